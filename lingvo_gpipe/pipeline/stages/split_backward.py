# SPDX-License-Identifier: Apache-2.0
"""Traced functions of a stage that recompute nothing, or that split backward into I and W.

The parts are taken from one traced vector-Jacobian product (see `vjp`). As in `stage_functions`,
weights are arguments, gradients are added to accumulators in place, and nothing is inlined.

    F   x ──> y, sums, residuals             B   x, residuals, dy ──> dx, sparse
    I   x, residuals or none, dy ──> dx, for_weights
    W   x, residuals or none, dy, for_weights ──> sparse; adds weight gradients to accumulators
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.graph import side_effects
from lingvo_gpipe.pipeline.stages import failures, leaves, stage_math, vjp


class SplitBackward:
  """Functions of one structure of stage whose backward comes in parts; see `StageFunctions`.

  Attributes:
    Forward: tf.function (call) -> (y, sums, residuals).
    Backward: tf.function (call, accumulators, residuals, dy) -> (dx, accumulated).
    InputGradient: tf.function (call, residuals, dy) -> (dx, residuals for the weights).
    WeightGradient: tf.function (call, accumulators, residuals, dy, residuals for the weights) ->
      accumulated.

  `residuals` are the third result of Forward, or None to recompute the forward pass in I and W.
  """

  def __init__(
    self,
    math: stage_math.StageMath,
    xla: bool,
    layers: Sequence[Collection[str] | None] = (),
    *,
    is_inner: bool = False,
  ) -> None:
    """Traces nothing.

    Args:
      math: the computations of the stage.
      xla: whether XLA compiles the functions.
      layers: for each layer of the stage the parts that backward recomputes; None: the whole layer.
        Empty: nothing is recomputed.
      is_inner: whether the functions run as parts of another one.
    """
    self._math = math
    self._xla = xla
    self._recomputed_parts = layers
    self._products: dict[Any, vjp.SplitVjp] = {}
    self._outputs: dict[Any, tuple[Any, Any]] = {}
    self.Forward = stage_math.Traced(self._Forward, xla, is_inner)
    self.Backward = stage_math.Traced(self._Backward, xla, is_inner)
    self.InputGradient = stage_math.Traced(self._InputGradient, xla, is_inner)
    self.WeightGradient = stage_math.Traced(self._WeightGradient, xla, is_inner)

  def _Forward(self, call: stage_math.StageCall) -> tuple[Any, Any, list[tf.Tensor]]:
    key, product, flat = self._Product(call)
    results = list(product.forward(*flat))
    nest = self._outputs[key]
    y, sums = tf.nest.pack_sequence_as(nest, _WithNones(nest, results))
    return y, sums, results[product.num_y :]

  def _Backward(
    self,
    call: stage_math.StageCall,
    accumulators: Sequence[tf.Variable],
    residuals: list[tf.Tensor],
    dy: list[tf.Tensor] | None,
  ) -> tuple[list[tf.Tensor], stage_math.Accumulated]:
    _, product, flat = self._Product(call)
    results = list(product.backward(*flat, *residuals, *(dy or [])))
    accumulated = self._AddWeightGradients(product, accumulators, results[product.num_dx :])
    return results[: product.num_dx], accumulated

  def _InputGradient(
    self,
    call: stage_math.StageCall,
    residuals: list[tf.Tensor] | None,
    dy: list[tf.Tensor] | None,
  ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    _, product, flat = self._Product(call)
    if residuals is None:
      results = list(product.input_gradient(*flat, *(dy or [])))
    else:
      results = list(product.kept_input_gradient(*flat, *residuals, *(dy or [])))
    return results[: product.num_dx], results[product.num_dx :]

  def _WeightGradient(
    self,
    call: stage_math.StageCall,
    accumulators: Sequence[tf.Variable],
    residuals: list[tf.Tensor] | None,
    dy: list[tf.Tensor] | None,
    for_weights: list[tf.Tensor],
  ) -> stage_math.Accumulated:
    _, product, flat = self._Product(call)
    if residuals is None:
      results = product.weight_gradient(*flat, *(dy or []), *for_weights)
    else:
      results = product.kept_weight_gradient(*flat, *residuals, *(dy or []), *for_weights)
    return self._AddWeightGradients(product, accumulators, list(results))

  def _Product(self, call: stage_math.StageCall) -> tuple[Any, vjp.SplitVjp, list[tf.Tensor]]:
    """Returns the product for a call of these shapes, and the flat tensors its parts begin with."""
    nest = (call.x, call.side, call.context)
    handles = [w.handle for w in tf.nest.flatten(call.variables)]
    return leaves.TraceKey(nest), self.Product(call), [*handles, *leaves.Tensors(nest)]

  def Product(self, call: stage_math.StageCall) -> vjp.SplitVjp:
    """Returns the product for a call of these shapes; traces it for the first one.

    Args:
      call: the arguments of the stage, or their tf.TensorSpecs.
    """
    variables, nest = call.variables, (call.x, call.side, call.context)
    inputs = leaves.Tensors(nest)
    weights = tf.nest.flatten(variables)
    key = leaves.TraceKey(nest)
    if key not in self._products:

      def Vjp(values: list[tf.Tensor], flat: list[tf.Tensor]) -> Any:
        x, side, context = tf.nest.pack_sequence_as(nest, _WithNones(nest, flat))
        packed = tf.nest.pack_sequence_as(variables, values)
        math = self._math
        chosen, floats = math.Trained(values), math.WantedFloats(x)
        with math.EnterContext(context.seeds), tf.GradientTape() as tape:
          tape.watch([*chosen, *floats])
          with side_effects.NewOperations() as forward:
            y, sums, objective = math.Outputs(stage_math.StageCall(packed, x, side, context))
          # Backward starts from the stage's own losses, and from y with the gradient dy.
          dy = [tf.raw_ops.Placeholder(dtype=t.dtype, shape=t.shape) for t in leaves.Floats(y)]
          grads = tape.gradient(
            objective,
            [*chosen, *floats],
            output_gradients=stage_math.WithOwnLosses(dy, objective),
          )
        dw = grads[: len(chosen)]
        dx = leaves.DenseGradients(floats, grads[len(chosen) :])
        if not self._xla:  # XLA compiles no assertions.
          y, sums = side_effects.WithChecks(forward, (y, sums))
        self._outputs[key] = (y, sums)
        return leaves.Tensors((y, sums)), dy, dx, dw

      self._math.CountTrace(call.x, call.side)
      self._products[key] = vjp.SplitVjp(
        Vjp, weights, inputs, xla=self._xla, is_recomputed=self._IsRecomputed()
      )
    return self._products[key]

  def _IsRecomputed(self) -> Callable[[str], bool]:
    """Returns a function (name of an operation of the stage) -> whether backward recomputes it."""
    layers = self._math.stage_layers

    def IsRecomputed(op_name: str) -> bool:
      i = failures.LayerOfScope(op_name)
      if i is None or i >= len(self._recomputed_parts):
        return False
      parts = self._recomputed_parts[i]
      return parts is None or (bool(parts) and layers[i].PartOf(op_name) in parts)

    return functools.cache(IsRecomputed)

  def _AddWeightGradients(
    self, product: vjp.SplitVjp, accumulators: Sequence[tf.Variable], dw: list[tf.Tensor]
  ) -> stage_math.Accumulated:
    existing = iter(product.WeightGradients(dw))
    return self._math.Accumulate(
      accumulators, [next(existing) if has else None for has in product.has_weight_gradient]
    )


def _WithNones(nest: Any, flat: Sequence[tf.Tensor]) -> list[Any]:
  """Returns the leaves of a nest: None stays, and the others are the first tensors of `flat`."""
  tensors = iter(flat)
  return [None if leaf is None else next(tensors) for leaf in tf.nest.flatten(nest)]
