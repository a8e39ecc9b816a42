# SPDX-License-Identifier: Apache-2.0
"""Drop-path: drops whole branches of a network at random, for each example on its own."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gpipe.core import base_layer, domain, fprop_context, hyperparams, nested_map, shapes
from lingvo_gpipe.layers import dropout

_ONE = 1 << 32


class DropPathLayer(base_layer.BaseLayer):
  """Zeroes a whole example with probability 1 - keep, and divides the other examples by keep.

  keep falls linearly from 1 to `keep_prob` over `total_steps` steps of training and then stays
  constant (ScheduledDropPath, Zoph et al. 2018). In evaluation, or if keep_prob is 1, the layer is
  the identity. Like DropoutLayer it compares integer random bits, and the schedule uses integer
  arithmetic, so decisions are equal with and without XLA and in every recomputation.
  """

  is_position_wise = True

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of a DropPathLayer."""
    p = super().Params()
    p.Define(
      'keep_prob', 1.0, 'Final probability of keeping an example.', domain.Number(above=0, high=1)
    )
    # The product with a probability in units of 2^-32 must fit an int64.
    p.Define(
      'total_steps',
      0,
      'Steps until keep_prob is reached; 0: it applies from the start.',
      domain.INDEX,
    )
    return p

  def FProp(self, theta: nested_map.NestedMap, inputs: tf.Tensor) -> tf.Tensor:
    """Drops examples of inputs [batch, ...]; keeps the shape."""
    del theta
    p = self.params
    x = self._CastToFPropDtype(inputs)
    if p.keep_prob == 1 or self.do_eval:
      return x
    seed = fprop_context.Current().OpSeed(self)
    # Probability to drop, in units of 2^-32.
    drop = tf.constant(round((1.0 - p.keep_prob) * _ONE), tf.int64)
    if p.total_steps:
      step = tf.minimum(seed[1] // fprop_context.MAX_MICRO_BATCHES, p.total_steps)
      drop = drop * step // p.total_steps
    shape = [shapes.GetShape(x)[0], *[1] * (x.shape.rank - 1)]
    bits = dropout.RandomBits(shape, seed)
    compute = tf.float32 if x.dtype.size < 4 else x.dtype
    scale = _ONE / tf.cast(_ONE - drop, tf.float64)
    is_kept = tf.cast(bits, tf.int64) >= drop
    return tf.where(is_kept, x * tf.cast(tf.cast(scale, compute), x.dtype), tf.zeros([], x.dtype))
