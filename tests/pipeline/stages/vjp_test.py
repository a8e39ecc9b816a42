# SPDX-License-Identifier: Apache-2.0
"""What the parts of a product hand on to each other."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.pipeline.stages import vjp


def _Pooled(weights, x):
  """Two convolutions with a max pool between them."""
  pool = tf.nn.max_pool2d(tf.nn.conv2d(x, weights[0], 1, 'SAME'), 2, 2, 'SAME')
  return tf.nn.conv2d(pool, weights[1], 1, 'SAME')


def _Split(trained, *, xla=False):
  """Returns the product of `_Pooled`, its weights and its input; the last `trained` train."""
  x = tf.random.stateless_normal([2, 6, 6, 3], [1, 2])
  weights = [
    tf.Variable(tf.random.stateless_normal([3, 3, *dims], [3, i]))
    for i, dims in enumerate([(3, 4), (4, 5)])
  ]

  def Product(weights, inputs):
    y = _Pooled(weights, inputs[0])
    dy = tf.raw_ops.Placeholder(dtype=y.dtype, shape=y.shape)
    of = [*inputs, *weights] if trained == 2 else weights[1:]
    gradients = tf.gradients(y, of, dy)
    dx, dw = (gradients[:1], gradients[1:]) if trained == 2 else ([], [None, *gradients])
    return [y], [dy], dx, dw

  return vjp.SplitVjp(Product, weights, [x], xla=xla), weights, x


def _Types(tensors):
  return sorted(t.op.type for t in tensors)


def testAMaxPoolIsRecomputedNextToItsGradient():
  split, weights, x = _Split(trained=2)
  assert _Types(split.ForwardResiduals(lambda name: False)) == ['Conv2D']
  handles = [w.handle for w in weights]
  y, *residuals = split.forward(*handles, x)
  gradients = split.backward(*handles, x, *residuals, tf.ones_like(y))
  with tf.GradientTape() as tape:
    tape.watch(x)
    whole = _Pooled(weights, x)
  for actual, expected in zip(gradients, tape.gradient(whole, [x, *weights]), strict=True):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def testAMaxPoolIsKeptIfItsGradientRunsElsewhereOrNever():
  """Its inputs, which are larger, would be kept only to recompute it."""
  split, *_ = _Split(trained=1)
  assert _Types(split.ForwardResiduals(lambda name: False)) == ['MaxPool']
  split, *_ = _Split(trained=2)
  fed = [*split._inputs, *split._dy]
  assert _Types(split._WeightResiduals(fed)) == ['MaxPool', 'MaxPoolGrad']
  split, *_ = _Split(trained=2, xla=True)
  assert _Types(split.ForwardResiduals(lambda name: False)) == ['Conv2D', 'MaxPool']


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
