# SPDX-License-Identifier: Apache-2.0
"""LayerNorm against NumPy, and its statistics in bfloat16."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.layers import norm
from tests import naming
from tests.toys import layers


def _Make(**values):
  return layers.WithVariables(norm.LayerNorm.Params().Set(name='ln', **values))


def testNormalisesAndScales():
  layer = _Make(input_dim=6, dtype=tf.float64, epsilon=1e-3)
  rng = np.random.default_rng(0)
  scale, bias = rng.standard_normal([2, 6])
  layer.vars.scale.assign(scale)
  layer.vars.bias.assign(bias)
  x = 3 * rng.standard_normal([2, 5, 6]) + 7
  normal = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-3)
  np.testing.assert_allclose(layer(tf.constant(x)), normal * scale + bias, atol=1e-12)


def testStartsAsPlainNormalisation():
  layer = _Make(input_dim=50)
  assert layer.NumParams() == 100
  y = layer(tf.random.stateless_normal([4, 50], [1, 2], 5.0, 3.0)).numpy()
  np.testing.assert_allclose(y.mean(-1), 0, atol=1e-5)
  np.testing.assert_allclose(y.std(-1), 1, atol=1e-5)


def testPaddingsPassThrough():
  layer = _Make(input_dim=3)
  x, paddings = tf.ones([2, 4, 3]), tf.zeros([2, 4])
  y, same = layer(x, paddings)
  assert same is paddings
  np.testing.assert_array_equal(y, layer(x))
  assert layer(x, None)[1] is None


def testStatisticsOfBfloat16AreComputedInFloat32():
  layer = _Make(input_dim=4096, fprop_dtype=tf.bfloat16)
  # 64 plus a small part, which a mean in bfloat16 would lose; a sum would stick at 64 * 256.
  x = tf.cast(64 + tf.random.stateless_normal([2, 4096], [1, 2]), tf.bfloat16)
  y = layer(x)
  assert y.dtype == tf.bfloat16
  exact = tf.cast(x, tf.float64).numpy()
  exact = (exact - exact.mean(-1, keepdims=True)) / exact.std(-1, keepdims=True)
  np.testing.assert_allclose(tf.cast(y, tf.float64), exact, rtol=0.01, atol=0.01)


def testConstantRowsAreFinite():
  layer = _Make(input_dim=8)
  x = tf.fill([2, 8], 3.0)
  with tf.GradientTape() as tape:
    tape.watch(x)
    y = layer(x)
  np.testing.assert_allclose(y, np.zeros([2, 8]), atol=1e-6)
  assert np.all(np.isfinite(tape.gradient(y, x)))


def testErrorsNameTheLayer():
  layer = _Make(input_dim=8)
  with pytest.raises(ValueError, match=naming.Naming('ln', 'inputs', 8, 'got shape [2, 7]')):
    layer(tf.zeros([2, 7]))
  with pytest.raises(ValueError, match=naming.Naming("'ln'", 'epsilon', 'above 0', 'got 0.0')):
    _Make(input_dim=8, epsilon=0.0)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
