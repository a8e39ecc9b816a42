# SPDX-License-Identifier: Apache-2.0
"""Drop-path: whole branches of a network are left out for some examples."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gpipe.core import base_layer, fprop_context, hyperparams, nested_map, shapes

_ONE = 1 << 32


class DropPathLayer(base_layer.BaseLayer):
  """Zeroes all of an example with probability 1 - keep, and divides the others by keep.

  keep falls from 1 to `keep_prob` linearly over `total_steps` steps of training and stays there
  (ScheduledDropPath, Zoph et al. 2018); nothing happens in evaluation or with keep_prob 1. One
  decision holds for all of an example. Decisions compare integer random bits, as DropoutLayer's do,
  and the schedule is integer arithmetic: the same with and without XLA and in every recomputation.
  """

  is_position_wise = True

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """The Params of a DropPathLayer."""
    p = super().Params()
    p.Define('keep_prob', 1.0, 'Probability of keeping an example, in the end.')
    p.Define('total_steps', 0, 'Steps until keep_prob is reached; 0: from the start.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    if not 0 < p.keep_prob <= 1:
      raise ValueError(
        f'{type(self).__name__} {p.name!r}: keep_prob must be above 0 and at most 1, '
        f'got {p.keep_prob!r}'
      )
    # What is multiplied by the probability in units of 2^-32 must fit an int64.
    if not 0 <= p.total_steps < 1 << 31:
      raise ValueError(
        f'{type(self).__name__} {p.name!r}: total_steps must be 0 ... 2^31 - 1, '
        f'got {p.total_steps!r}'
      )

  def FProp(self, theta: nested_map.NestedMap, inputs: tf.Tensor) -> tf.Tensor:
    """Maps inputs [batch, ...] to the same shape."""
    del theta
    p = self.params
    x = self._CastToFPropDtype(inputs)
    if p.keep_prob == 1 or self.do_eval:
      return x
    seed = fprop_context.Current().OpSeed(self)
    # Probability to drop, in units of 2^-32.
    dropped = tf.constant(round((1.0 - p.keep_prob) * _ONE), tf.int64)
    if p.total_steps:
      step = tf.minimum(seed[1] // fprop_context.MAX_MICRO_BATCHES, p.total_steps)
      dropped = dropped * step // p.total_steps
    shape = [shapes.GetShape(x)[0], *[1] * (x.shape.rank - 1)]
    bits = tf.random.stateless_uniform(
      shape, seed, minval=None, maxval=None, dtype=tf.uint32, alg='philox'
    )
    compute = tf.float32 if x.dtype.size < 4 else x.dtype
    scale = _ONE / tf.cast(_ONE - dropped, tf.float64)
    kept = tf.cast(bits, tf.int64) >= dropped
    return tf.where(kept, x * tf.cast(tf.cast(scale, compute), x.dtype), tf.zeros([], x.dtype))
