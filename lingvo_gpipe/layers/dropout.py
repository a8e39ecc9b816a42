# SPDX-License-Identifier: Apache-2.0
"""Dropout whose masks depend on integer seeds only."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import base_layer, domain, fprop_context, hyperparams, nested_map, shapes


def RandomBits(shape: Any, seed: tf.Tensor) -> tf.Tensor:
  """Returns random uint32 of this shape, equal on CPUs and GPUs, with and without XLA.

  `tf.random.stateless_uniform(..., alg='philox')` draws the same numbers, but traces three times as
  many operations.

  Args:
    shape: shape of the result.
    seed: an integer tensor [2].
  """

  def Draw(shape: Any, key: tf.Tensor, counter: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
      shape=tf.convert_to_tensor(shape, tf.int32),
      key=key,
      counter=counter,
      alg=tf.random.Algorithm.PHILOX.value,
      dtype=dtype,
    )

  # Neighbouring seeds are scrambled into unrelated keys and counters.
  key = tf.constant([0x02461E293EC8F720], tf.uint64)
  mix = Draw([2], key, tf.cast(seed, tf.uint64), tf.uint64)
  return Draw(shape, mix[:1], mix * tf.constant([0, 1], tf.uint64), tf.uint32)


def ApplyDropout(x: tf.Tensor, keep_prob: float, noise_shape: Any, seed: tf.Tensor) -> tf.Tensor:
  """Returns `x` with each entry kept with probability `keep_prob`, and divided by it, or zeroed.

  Args:
    x: a floating tensor of any shape.
    keep_prob: above 0 and below 1.
    noise_shape: shape of the mask; broadcasts to the shape of `x`.
    seed: an integer tensor [2].
  """
  bits = RandomBits(noise_shape, seed)
  threshold = min(round(keep_prob * 2**32), 2**32 - 1)
  is_kept = bits < tf.constant(threshold, tf.uint32)
  return tf.where(is_kept, x * tf.constant(1.0 / keep_prob, x.dtype), tf.zeros([], x.dtype))


class DropoutLayer(base_layer.BaseLayer):
  """Keeps each entry with probability `keep_prob`, divided by it, and zeroes all other entries.

  In evaluation, or if keep_prob is 1, the layer is the identity. The mask compares integer random
  bits with keep_prob * 2^32. Unlike random floats, these are equal with and without XLA and in
  every dtype, so that a re-materialised stage draws the same mask again.
  """

  is_position_wise = True

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of a DropoutLayer."""
    p = super().Params()
    p.Define(
      'keep_prob',
      1.0,
      'Probability of keeping an entry, above 0 and at most 1.',
      domain.Number(above=0, high=1),
    )
    p.Define(
      'noise_shape_broadcast_dims',
      None,
      'Dimensions along which the mask is constant, such as [1] for time; negative values count '
      'from the end.',
      domain.ListOf(domain.Int(-8, 7)) | domain.NONE,
    )
    return p

  def FProp(self, theta: nested_map.NestedMap, inputs: tf.Tensor, *extras: Any) -> Any:
    """Applies dropout to the inputs.

    Args:
      theta: empty.
      inputs: a floating tensor of any shape.
      *extras: further outputs of the previous layer, such as paddings; returned unchanged.

    Returns:
      A tensor like `inputs`; if there are `extras`, the tuple (tensor, *extras).
    """
    y = self._Drop(inputs)
    return (y, *extras) if extras else y

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
    return ApplyDropout(x, p.keep_prob, noise_shape, fprop_context.Current().OpSeed(self))
