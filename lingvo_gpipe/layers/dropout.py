# SPDX-License-Identifier: Apache-2.0
"""Dropout with masks that depend on integer seeds only."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import base_layer, fprop_context, hyperparams, nested_map, shapes


def Dropped(x: tf.Tensor, keep_prob: float, noise_shape: Any, seed: tf.Tensor) -> tf.Tensor:
  """`x` with each entry kept with probability `keep_prob` and divided by it, or zero.

  Args:
    x: a floating tensor of any shape.
    keep_prob: above 0 and below 1.
    noise_shape: one decision for each entry of this shape, which broadcasts to that of `x`.
    seed: an integer tensor [2].
  """
  bits = tf.random.stateless_uniform(
    noise_shape, seed, minval=None, maxval=None, dtype=tf.uint32, alg='philox'
  )
  threshold = min(round(keep_prob * 2**32), 2**32 - 1)
  kept = bits < tf.constant(threshold, tf.uint32)
  return tf.where(kept, x * tf.constant(1.0 / keep_prob, x.dtype), tf.zeros([], x.dtype))


class DropoutLayer(base_layer.BaseLayer):
  """Keeps each entry with probability `keep_prob`, divided by it, and zeroes the others.

  Nothing happens in evaluation or with keep_prob 1. The mask compares integer random bits with
  keep_prob * 2^32: unlike float draws they are equal with and without XLA, in every dtype, and so
  is the mask that a re-materialised stage draws again.
  """

  is_position_wise = True

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """The Params of a DropoutLayer."""
    p = super().Params()
    p.Define('keep_prob', 1.0, 'Probability of keeping an entry, above 0 and at most 1.')
    p.Define(
      'noise_shape_broadcast_dims',
      None,
      'Dimensions over which one decision holds, as [1] for all of time; negative ones count from '
      'the end.',
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    if not 0 < p.keep_prob <= 1:
      raise ValueError(
        f'{type(self).__name__} {p.name!r}: keep_prob must be above 0 and at most 1, '
        f'got {p.keep_prob!r}'
      )

  def FProp(self, theta: nested_map.NestedMap, inputs: tf.Tensor, *others: Any) -> Any:
    """Applies dropout.

    Args:
      theta: empty.
      inputs: a floating tensor of any shape.
      *others: further outputs of the layer before, as paddings; handed on as they are.

    Returns:
      A tensor like `inputs`; with `others` a tuple of it and them.
    """
    dropped = self._Drop(inputs)
    return (dropped, *others) if others else dropped

  def _Drop(self, x: tf.Tensor) -> tf.Tensor:
    p = self.params
    if p.keep_prob == 1 or self.do_eval:
      return x
    noise_shape = shapes.GetShape(x)
    for dim in p.noise_shape_broadcast_dims or ():
      if not -len(noise_shape) <= dim < len(noise_shape):
        raise ValueError(
          f'{self.path}: noise_shape_broadcast_dims {list(p.noise_shape_broadcast_dims)} does not '
          f'fit inputs of rank {len(noise_shape)}'
        )
      noise_shape[dim] = 1
    return Dropped(x, p.keep_prob, noise_shape, fprop_context.Current().OpSeed(self))
