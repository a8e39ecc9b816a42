# SPDX-License-Identifier: Apache-2.0
"""What the parts of a product hand on to each other."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.pipeline.stages import vjp


def testMaxPoolIsComputedAgainFromItsInputs():
  x = tf.random.stateless_normal([2, 6, 6, 3], [1, 2])
  w = tf.Variable(tf.random.stateless_normal([3, 3, 3, 4], [3, 4]))

  def Pool(w, x):
    return tf.nn.max_pool2d(tf.nn.conv2d(x, w, 1, 'SAME'), 2, 2, 'SAME')

  def Product(weights, inputs):
    y = Pool(weights[0], inputs[0])
    dy = tf.raw_ops.Placeholder(dtype=y.dtype, shape=y.shape)
    dx, dw = tf.gradients(y, [inputs[0], weights[0]], dy)
    return [y], [dy], [dx], [dw]

  split = vjp.SplitVjp(Product, [w], [x])
  assert [t.op.type for t in split.Kept(lambda name: False)] == ['Conv2D']
  y, *kept = split.forward(w.handle, x)
  dx, dw = split.backward(w.handle, x, *kept, tf.ones_like(y))
  with tf.GradientTape() as tape:
    tape.watch(x)
    whole = Pool(w, x)
  for actual, expected in zip((dx, dw), tape.gradient(whole, [x, w]), strict=True):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
