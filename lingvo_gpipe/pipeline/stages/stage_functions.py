# SPDX-License-Identifier: Apache-2.0
"""Traced functions of a stage whose backward recomputes the whole stage from its input.

Each function is compiled by XLA or marked as not to be inlined. If TensorFlow inlined it, the
control edges that hold the schedule would vanish, and the recomputation would be merged with the
first forward.

    F   x ──> y, sums            keeps only x, which the engine holds
    B   x, dy ──> dx, sparse     runs F again under a tape, adds weight gradients to accumulators
    V   x ──> dx, sums, sparse   F and B of the last stage in one: nothing to recompute

If the schedule splits the backward, I and W of `split_backward` recompute the stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.pipeline.stages import leaves, split_backward, stage_math


class StageFunctions:
  """F, B and V of one structure of stage, shared by all stages that have it.

  Attributes:
    Forward: tf.function (call) -> (y, sums, None).
    Backward: tf.function (call, accumulators, None, dy) -> (dx, accumulated).
    ForwardBackward: tf.function (call, accumulators) -> (dx, sums, accumulated); only for the last
      stage, which has the loss, so that nothing is recomputed.
    ThetaBackward: tf.function (call, dy) -> (gradients of the floating weights, dx); for weights
      given as tensors, under a user's tape.
    InputGradient, WeightGradient: see `SplitBackward`; to be called without residuals.

  `call` is a StageCall. `y` is NestedMap(args, skips): the last layer's outputs, a tuple or not,
  and the exported skips; it is () in the stage with the loss, because full-batch logits never
  exist. `sums` is NestedMap(metrics, layers). `metrics` holds {name: [sum of value * weight, sum of
  weight]}, tensors [2]: the metrics in the last stage, and auxiliary losses named `<layer's index
  in the stage>:<path below it>.<name>`. `layers` holds the sums that layers report for their state
  by `AddSums`, {`<index>:<path below it>`: {name: tensor}}. `dy` and `dx` are lists of the
  gradients of the floating leaves of y and x; dx is empty if no earlier stage is trained.
  `accumulated` is a `stage_math.Accumulated`. The third result of Forward, and the third argument
  of Backward, are the residuals: tensors that forward keeps for backward. `layer_backward` and
  `split_backward` have functions of this form that keep some.
  """

  def __init__(
    self,
    math: stage_math.StageMath,
    xla: bool,
    halves: split_backward.SplitBackward | None = None,
    *,
    is_inner: bool = False,
  ) -> None:
    """Traces nothing.

    Args:
      math: the computations of the stage.
      xla: whether XLA compiles the functions.
      halves: the functions I and W; None if no action calls them.
      is_inner: whether the functions run as parts of another one.
    """
    self._math = math
    self.Forward = stage_math.Traced(self._Forward, xla, is_inner)
    self.Backward = stage_math.Traced(self._Backward, xla, is_inner)
    self.ForwardBackward = stage_math.Traced(self._ForwardBackward, xla, is_inner)
    self.ThetaBackward = stage_math.Traced(self._ThetaBackward, xla, is_inner)
    if halves is not None:
      self.InputGradient, self.WeightGradient = halves.InputGradient, halves.WeightGradient

  def _Forward(self, call: stage_math.StageCall) -> tuple[Any, nested_map.NestedMap, None]:
    self._math.CountTrace(call.x, call.side)
    with self._math.EnterContext(call.context.seeds):
      y, sums, _ = self._math.Outputs(call)
    return y, sums, None

  def _Backward(
    self,
    call: stage_math.StageCall,
    accumulators: Sequence[tf.Variable],
    residuals: None,
    dy: list[tf.Tensor] | None,
  ) -> tuple[list[tf.Tensor], stage_math.Accumulated]:
    del residuals
    dx, _, accumulated = self._WithGradients(call, accumulators, dy)
    return dx, accumulated

  def _ForwardBackward(
    self, call: stage_math.StageCall, accumulators: Sequence[tf.Variable]
  ) -> tuple[list[tf.Tensor], nested_map.NestedMap, stage_math.Accumulated]:
    return self._WithGradients(call, accumulators, None)

  def _WithGradients(
    self,
    call: stage_math.StageCall,
    accumulators: Sequence[tf.Variable],
    dy: list[tf.Tensor] | None,
  ) -> tuple[list[tf.Tensor], nested_map.NestedMap, stage_math.Accumulated]:
    """Runs the stage from its input, then its gradients, within the same trace.

    Does not use `tf.recompute_grad`: TensorFlow keeps the function to recompute as long as the
    process runs, so all weights of each pipeline would stay in memory. `tf.recompute_grad` would
    also trace the stage twice, and hide a recomputation from a tape within a layer.
    """
    math = self._math
    math.CountTrace(call.x, call.side)
    floats, weights = math.WantedFloats(call.x), math.Trained(call.variables)
    with math.EnterContext(call.context.seeds), tf.GradientTape() as tape:
      tape.watch(floats)
      _, sums, objective = math.Outputs(call)
      output_gradients = stage_math.WithOwnLosses(dy, objective)
      grads = tape.gradient(objective, [*weights, *floats], output_gradients)
    accumulated = math.Accumulate(accumulators, grads[: len(weights)])
    return leaves.DenseGradients(floats, grads[len(weights) :]), sums, accumulated

  def _ThetaBackward(
    self, call: stage_math.StageCall, dy: list[tf.Tensor]
  ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Recomputes the stage from its input, so that nothing else was kept (see `tape_function`)."""
    math = self._math
    math.CountTrace(call.x, None)
    weights, floats = leaves.Floats(call.variables), leaves.Floats(call.x)
    with math.EnterContext(call.context.seeds), tf.GradientTape() as tape:
      tape.watch([*weights, *floats])
      y, aux_losses = math.RunLayers(call.variables, call.x)
      if aux_losses:
        split = (key.partition(':') for key in aux_losses)
        names = ', '.join(f'{math.layers[int(i)].path}{path}' for i, _, path in split)
        raise ValueError(
          f'auxiliary losses ({names}) need the loss inside the last stage; train through the '
          'engine, or leave them out'
        )
      grads = tape.gradient(
        leaves.Floats(y),
        [*weights, *floats],
        output_gradients=dy,
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
      )
    grads = [tf.convert_to_tensor(g) for g in grads]
    return grads[: len(weights)], grads[len(weights) :]
