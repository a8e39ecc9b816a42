# SPDX-License-Identifier: Apache-2.0
"""Stage functions that recompute nothing, or that split backward into input and weight gradients.

Their parts are cut from one traced vector-Jacobian product (see `vjp`); the rules of `stage` hold
for them too: weights come as variables, gradients go into accumulators in place, nothing is
inlined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.pipeline.stages import leaves, stage_functions, vjp


class SplitBackward:
  """The functions of a stage whose backward is in pieces; arguments as for `stage`'s.

  Attributes:
    ForwardKeep: (variables, x, side, context) -> (y, sums, residuals).
    BackwardKept: (variables, accumulators, x, side, context, residuals, dy) -> (dx, token).
    InputGradient: (variables, x, side, context, residuals, dy) -> (dx, residuals for the weights).
    WeightGradient: (variables, accumulators, x, side, context, residuals, dy, residuals for the
      weights) -> token.

  `residuals` are what ForwardKeep returned, or None where the forward is to be recomputed.
  """

  def __init__(self, functions: stage_functions.StageFunctions, xla: bool) -> None:
    self._functions = functions
    self._xla = xla
    self._cuts: dict[Any, vjp.CutVjp] = {}
    self._outputs: dict[Any, tuple[Any, Any]] = {}
    options = stage_functions.FunctionOptions(xla)
    self.ForwardKeep = tf.function(self._ForwardKeep, **options)
    self.BackwardKept = tf.function(self._BackwardKept, **options)
    self.InputGradient = tf.function(self._InputGradient, **options)
    self.WeightGradient = tf.function(self._WeightGradient, **options)

  def _ForwardKeep(
    self, variables: Sequence[Any], x: nested_map.NestedMap, side: Any, context: Any
  ) -> tuple[Any, Any, list[tf.Tensor]]:
    key, cut, flat = self._Cut(variables, x, side, context)
    out = list(cut.forward(*flat))
    y, sums = tf.nest.pack_sequence_as(self._outputs[key], _WithNones(self._outputs[key], out))
    return y, sums, out[cut.num_y :]

  def _BackwardKept(
    self,
    variables: Sequence[Any],
    accumulators: Sequence[tf.Variable],
    x: nested_map.NestedMap,
    side: Any,
    context: Any,
    residuals: list[tf.Tensor],
    dy: list[tf.Tensor] | None,
  ) -> tuple[list[tf.Tensor], tf.Tensor]:
    _, cut, flat = self._Cut(variables, x, side, context)
    out = list(cut.backward(*flat, *residuals, *(dy or [])))
    _AddWeightGradients(cut, accumulators, out[cut.num_dx :])
    return out[: cut.num_dx], tf.zeros([], tf.int32)

  def _InputGradient(
    self,
    variables: Sequence[Any],
    x: nested_map.NestedMap,
    side: Any,
    context: Any,
    residuals: list[tf.Tensor] | None,
    dy: list[tf.Tensor] | None,
  ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    _, cut, flat = self._Cut(variables, x, side, context)
    if residuals is None:
      out = list(cut.input_gradient(*flat, *(dy or [])))
    else:
      out = list(cut.kept_input_gradient(*flat, *residuals, *(dy or [])))
    return out[: cut.num_dx], out[cut.num_dx :]

  def _WeightGradient(
    self,
    variables: Sequence[Any],
    accumulators: Sequence[tf.Variable],
    x: nested_map.NestedMap,
    side: Any,
    context: Any,
    residuals: list[tf.Tensor] | None,
    dy: list[tf.Tensor] | None,
    for_weights: list[tf.Tensor],
  ) -> tf.Tensor:
    _, cut, flat = self._Cut(variables, x, side, context)
    if residuals is None:
      out = cut.weight_gradient(*flat, *(dy or []), *for_weights)
    else:
      out = cut.kept_weight_gradient(*flat, *residuals, *(dy or []), *for_weights)
    _AddWeightGradients(cut, accumulators, list(out))
    return tf.zeros([], tf.int32)

  def _Cut(
    self, variables: Sequence[Any], x: nested_map.NestedMap, side: Any, context: Any
  ) -> tuple[Any, vjp.CutVjp, list[tf.Tensor]]:
    """The product for inputs of these shapes, and the flat tensors its parts begin with."""
    nest = (x, side, context)
    inputs = leaves.Tensors(nest)
    weights = tf.nest.flatten(variables)
    key = leaves.TraceKey(nest)
    if key not in self._cuts:

      def Vjp(values: list[tf.Tensor], flat: list[tf.Tensor]) -> Any:
        x, side, context = tf.nest.pack_sequence_as(nest, _WithNones(nest, flat))
        functions = self._functions
        chosen, floats = functions.Trained(values), functions.WantedFloats(x)
        with functions.EnterContext(context.seeds), tf.GradientTape() as tape:
          tape.watch([*chosen, *floats])
          packed = tf.nest.pack_sequence_as(variables, values)
          y, sums, objective = functions.Outputs(packed, x, side, context)
          # The loss and auxiliary losses begin their own backward; for y, dy is given.
          dy = [tf.raw_ops.Placeholder(dtype=t.dtype, shape=t.shape) for t in leaves.Floats(y)]
          grads = tape.gradient(
            objective,
            [*chosen, *floats],
            output_gradients=stage_functions.WithOwnLosses(dy, objective),
          )
        dw = grads[: len(chosen)]
        dx = leaves.DenseGradients(floats, grads[len(chosen) :])
        self._outputs[key] = (y, sums)
        return leaves.Tensors((y, sums)), dy, dx, dw

      self._functions.CountTrace(x, side)
      self._cuts[key] = vjp.CutVjp(Vjp, weights, inputs, xla=self._xla)
    return key, self._cuts[key], [*(w.handle for w in weights), *inputs]


def _AddWeightGradients(
  cut: vjp.CutVjp, accumulators: Sequence[tf.Variable], dw: list[tf.Tensor]
) -> None:
  rest = iter(cut.WeightGradients(dw))
  stage_functions.Accumulate(
    accumulators, [next(rest) if has else None for has in cut.has_weight_gradient]
  )


def _WithNones(nest: Any, flat: Sequence[tf.Tensor]) -> list[Any]:
  """`flat` with None where the nest has None; what is left over at its end is not used."""
  rest = list(flat)
  return [None if leaf is None else rest.pop(0) for leaf in tf.nest.flatten(nest)]
