# SPDX-License-Identifier: Apache-2.0
"""The outer form: a whole pipeline as one differentiable function, under anybody's tape.

Forward keeps the stages' inputs; backward, micro-batches M-1 ... 0, recomputes each stage from its
own. The weights come as tensors, so that their gradients can be handed back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import base_layer, fprop_context, nested_map
from lingvo_gpipe.pipeline import engine
from lingvo_gpipe.pipeline.stages import failures, leaves, micro_batch


class OuterForm:
  """Forward and backward of the whole pipeline as two traced functions, weights as tensors."""

  def __init__(
    self,
    pipeline: engine.PipelineEngine,
    split: Callable[[Any], list[Any]],
    batch_dim: int,
    do_eval: bool,
  ) -> None:
    """Traces nothing yet.

    Args:
      pipeline: runs the stages.
      split: cuts a nest into micro-batches.
      batch_dim: the dimension along which it does.
      do_eval: the layers' mode.
    """
    self._pipeline = pipeline
    self._split = split
    self._batch_dim = batch_dim
    self._do_eval = do_eval
    self._stateful: list[base_layer.BaseLayer] = []
    self._forward = tf.function(self._Forward, autograph=False)
    self._backward = tf.function(self._Backward, autograph=False)

  def Run(self, theta: Sequence[Any], args: tuple[Any, ...], counter: tf.Tensor) -> Any:
    """The pipeline's outputs, with gradients for the floating leaves of theta and args."""
    per_stage: list[Any] = []
    rest = list(theta)
    for s in self._pipeline.stages:
      members, rest = rest[: len(s.layers)], rest[len(s.layers) :]
      with tf.device(s.device):
        per_stage.append(AsTensors(members))
    weights = leaves.Floats(per_stage)
    whole: list[Any] = []
    reported: list[Any] = []

    def Nests(floats: Sequence[tf.Tensor]) -> tuple[Any, Any]:
      """The weights and the arguments with these floating leaves."""
      theta = leaves.WithFloats(per_stage, floats[: len(weights)])
      return theta, leaves.WithFloats(args, floats[len(weights) :])

    @tf.custom_gradient
    def Pipeline(*floats: tf.Tensor) -> Any:
      forward_args = *_Unwatched(Nests(floats)), counter
      with failures.Located(self._pipeline, lambda: self._Forward(*forward_args)):
        outputs, saved, sums = self._forward(*forward_args)
      whole.append(outputs)
      reported.extend(sums)

      @tf.custom_gradient
      def Saved(*floats: tf.Tensor) -> Any:
        """No tape has seen how it was made; second derivatives need to know."""

        def Gradient(*dys: tf.Tensor) -> list[tf.Tensor]:
          with tf.GradientTape() as tape:
            tape.watch(floats)
            _, again, _ = self._forward(*Nests(floats), counter)
          again = leaves.Floats(again)
          return tape.gradient(again, floats, dys, unconnected_gradients='zero')

        return tuple(leaves.Floats(saved)), Gradient

      def Grad(*dys: tf.Tensor) -> list[tf.Tensor]:
        taken = leaves.WithFloats(saved, Saved(*floats))
        backward_args = Nests(floats)[0], taken, leaves.WithFloats(outputs, dys), counter
        with failures.Located(self._pipeline, lambda: self._Backward(*backward_args)):
          return self._backward(*backward_args)

      return tuple(leaves.Floats(outputs)), Grad

    floats = Pipeline(*weights, *leaves.Floats(args))
    for layer, sums in zip(self._stateful, reported, strict=True):
      fprop_context.Current().AddSums(layer, sums)
    return leaves.WithFloats(whole[0], floats)

  def _Forward(
    self, theta: Any, args: tuple[Any, ...], counter: tf.Tensor
  ) -> tuple[Any, Any, list[nested_map.NestedMap]]:
    inputs = self._split(args)
    outputs, saved, layer_sums = self._pipeline.Forward(
      inputs, theta=theta, counter=counter, do_eval=self._do_eval
    )
    # The same layers in every trace, which the shapes of the inputs tell apart.
    self._stateful = [layer for layer, _ in layer_sums]
    merged = micro_batch.MergeOutputs(outputs, inputs, self._batch_dim)
    return merged, saved, [sums for _, sums in layer_sums]

  def _Backward(self, theta: Any, saved: Any, dys: Any, counter: tf.Tensor) -> list[tf.Tensor]:
    pieces = self._split(dys)
    dtheta, dargs = self._pipeline.ThetaBackward(theta, saved, pieces, counter, self._do_eval)
    dx = leaves.Floats(micro_batch.Merge(dargs, self._batch_dim))
    return [g for grads in dtheta for g in grads] + dx


def AsTensors(nest: Any) -> Any:
  """The nest with its numbers, arrays and variables as tensors."""
  return tf.nest.map_structure(lambda x: None if x is None else tf.convert_to_tensor(x), nest)


def _Unwatched(nest: Any) -> Any:
  """The nest, hidden from the tapes of eager execution.

  An eager tape would differentiate every function that it sees a watched tensor enter, although
  nobody asks for that gradient, and so keep each stage's activations instead of its input.
  """
  if not tf.executing_eagerly():
    return nest

  def Hide(x: tf.Tensor) -> tf.Tensor:
    with tf.device(x.device):
      return tf.stop_gradient(x)

  return leaves.WithFloats(nest, [Hide(x) for x in leaves.Floats(nest)])
