# SPDX-License-Identifier: Apache-2.0
"""A whole pipeline as one differentiable function, for a gradient tape of the user.

Forward keeps the stages' inputs. Backward, micro-batches M-1 ... 0, recomputes each stage from its
input. The weights are given as tensors, so that the tape gets their gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import base_layer, fprop_context, nested_map
from lingvo_gpipe.pipeline import engine, failed_step
from lingvo_gpipe.pipeline.stages import leaves, micro_batch


class TapeFunction:
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
      pipeline: the engine that runs the stages.
      split: splits a nest into micro-batches.
      batch_dim: the batch dimension.
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
    """Returns the pipeline's outputs, differentiable by the floating leaves of theta and args."""
    per_stage: list[Any] = []
    layer_thetas = iter(theta)
    for s in self._pipeline.stages:
      with tf.device(s.device):
        per_stage.append(AsTensors([next(layer_thetas) for _ in s.layers]))
    weights = leaves.Floats(per_stage)
    # TensorFlow keeps the gradient functions of graphs as long as the process runs. What they hold,
    # the layers with their weights, would stay in memory.
    this = self if tf.executing_eagerly() else weakref.proxy(self)
    whole: list[Any] = []
    reported: list[Any] = []

    def Nests(floats: Sequence[tf.Tensor]) -> tuple[Any, Any]:
      """Returns the weights and the arguments with these floating leaves."""
      theta = leaves.WithFloats(per_stage, floats[: len(weights)])
      return theta, leaves.WithFloats(args, floats[len(weights) :])

    @tf.custom_gradient
    def Pipeline(*floats: tf.Tensor) -> Any:
      forward_args = *_HideFromTapes(Nests(floats)), counter
      with failed_step.Locate(this._pipeline, lambda: this._Forward(*forward_args)):
        outputs, saved, sums = this._forward(*forward_args)
      whole.append(outputs)
      reported.extend(sums)

      @tf.custom_gradient
      def Saved(*floats: tf.Tensor) -> Any:
        """Returns the saved leaves with a gradient, which second derivatives need."""

        def Gradient(*dys: tf.Tensor) -> list[tf.Tensor]:
          with tf.GradientTape() as tape:
            tape.watch(floats)
            _, again, _ = this._forward(*Nests(floats), counter)
          again = leaves.Floats(again)
          return tape.gradient(again, floats, dys, unconnected_gradients='zero')

        return tuple(leaves.Floats(saved)), Gradient

      def Grad(*dys: tf.Tensor) -> list[tf.Tensor]:
        stage_inputs = leaves.WithFloats(saved, Saved(*floats))
        backward_args = Nests(floats)[0], stage_inputs, leaves.WithFloats(outputs, dys), counter
        with failed_step.Locate(this._pipeline, lambda: this._Backward(*backward_args)):
          return this._backward(*backward_args)

      return tuple(leaves.Floats(outputs)), Grad

    floats = Pipeline(*weights, *leaves.Floats(args))
    for layer, sums in zip(self._stateful, reported, strict=True):
      fprop_context.Current().AddSums(layer, sums)
    return leaves.WithFloats(whole[0], floats)

  def _Forward(
    self, theta: Any, args: tuple[Any, ...], counter: tf.Tensor
  ) -> tuple[Any, Any, list[nested_map.NestedMap]]:
    inputs = self._split(args)
    walk = self._pipeline.Forward(inputs, theta=theta, counter=counter, do_eval=self._do_eval)
    layer_sums = walk.LayerSums()
    # Every trace has the same layers: traces differ in the shapes of the inputs only.
    self._stateful = [layer for layer, _ in layer_sums]
    merged = micro_batch.MergeOutputs(walk.Outputs(), inputs, self._batch_dim)
    return merged, walk.StageInputs(), [sums for _, sums in layer_sums]

  def _Backward(self, theta: Any, saved: Any, dys: Any, counter: tf.Tensor) -> list[tf.Tensor]:
    pieces = self._split(dys)
    dtheta, dargs = self._pipeline.ThetaBackward(theta, saved, pieces, counter, self._do_eval)
    dx = leaves.Floats(micro_batch.Merge(dargs, self._batch_dim))
    return [g for grads in dtheta for g in grads] + dx


def AsTensors(nest: Any) -> Any:
  """Returns the nest with its numbers, arrays and variables as tensors."""
  return tf.nest.map_structure(lambda x: None if x is None else tf.convert_to_tensor(x), nest)


def _HideFromTapes(nest: Any) -> Any:
  """Returns the nest, hidden from the tapes of eager execution.

  An eager tape would differentiate every function that a watched tensor enters, although nobody
  asks for that gradient, and so keep each stage's activations instead of its input.
  """
  if not tf.executing_eagerly():
    return nest

  def Hide(x: tf.Tensor) -> tf.Tensor:
    with tf.device(x.device):
      return tf.stop_gradient(x)

  return leaves.WithFloats(nest, [Hide(x) for x in leaves.Floats(nest)])
