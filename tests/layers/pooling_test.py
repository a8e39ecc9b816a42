# SPDX-License-Identifier: Apache-2.0
"""Pooling against Keras and NumPy."""

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.layers import pooling
from tests import naming

X = np.random.default_rng(0).standard_normal([2, 7, 6, 3])


@pytest.mark.parametrize('padding', ['SAME', 'VALID'])
@pytest.mark.parametrize('window, stride', [((2, 2), (2, 2)), ((3, 3), (1, 1)), ((3, 2), (2, 1))])
@pytest.mark.parametrize('pooling_type', ['MAX', 'AVG'])
def testPoolEqualsKeras(pooling_type, window, stride, padding):
  p = pooling.PoolingLayer.Params().Set(
    name='pool',
    dtype=tf.float64,
    window_shape=window,
    window_stride=stride,
    pooling_type=pooling_type,
    padding=padding,
  )
  cls = {'MAX': keras.layers.MaxPooling2D, 'AVG': keras.layers.AveragePooling2D}[pooling_type]
  theirs = cls(window, stride, padding.lower(), dtype='float64')
  x = tf.constant(X)
  with tf.GradientTape(persistent=True) as tape:
    tape.watch(x)
    y, expected = p.Instantiate().FProp(None, x), theirs(x)
    losses = tf.reduce_sum(tf.sin(y)), tf.reduce_sum(tf.sin(expected))
  np.testing.assert_allclose(y, expected, rtol=1e-12)
  np.testing.assert_allclose(tape.gradient(losses[0], x), tape.gradient(losses[1], x), rtol=1e-12)


@pytest.mark.parametrize('pooling_type, fn', [('MAX', np.max), ('AVG', np.mean)])
def testGlobalPool(pooling_type, fn):
  p = pooling.GlobalPoolingLayer.Params().Set(
    name='pool', dtype=tf.float64, pooling_type=pooling_type
  )
  y = p.Instantiate().FProp(None, tf.constant(X))
  np.testing.assert_allclose(y, fn(X, axis=(1, 2)), rtol=1e-12)


def testErrors():
  p = pooling.PoolingLayer.Params().Set(name='pool', window_shape=(5, 5), padding='VALID')
  with pytest.raises(ValueError, match=naming.Naming('pooling_type', "'MAX'", "'AVG'", "'MIN'")):
    p.Copy().Set(pooling_type='MIN').Instantiate()
  with pytest.raises(ValueError, match=naming.Naming('window_shape', 'list of 2', (5, 0))):
    p.Copy().Set(window_shape=(5, 0)).Instantiate()
  with pytest.raises(ValueError, match=naming.Naming('pool', 'VALID', (5, 5), (1, 4, 8, 3))):
    pooling.PoolingLayer.FPropMeta(p, tf.TensorSpec([1, 4, 8, 3]))
  with pytest.raises(ValueError, match=naming.Naming('pool', 'VALID', (5, 5), (1, 4, 8, 3))):
    p.Instantiate().FProp(None, tf.zeros([1, 4, 8, 3]))


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
