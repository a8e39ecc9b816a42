# SPDX-License-Identifier: Apache-2.0
"""Convolutions against Keras, in value and gradient."""

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.layers import conv
from tests import naming
from tests.toys import layers

X = np.random.default_rng(0).standard_normal([2, 7, 6, 3])


def _Layer(cls, **values):
  layer = layers.WithVariables(cls.Params().Set(name='conv', dtype=tf.float64, **values))
  rng = np.random.default_rng(1)
  for v in layer.variables:
    v.assign(rng.standard_normal(v.shape))
  return layer


def _ValueAndGradients(fn, x, variables):
  x = tf.constant(x)
  with tf.GradientTape() as tape:
    tape.watch(x)
    y = fn(x)
    loss = tf.reduce_sum(tf.sin(y))
  return [y, *tape.gradient(loss, [x, *variables])]


def _CheckAsKeras(layer, keras_layer, x=X):
  keras_layer.build(x.shape)
  keras_layer.set_weights([v.numpy() for v in layer.variables])
  ours = _ValueAndGradients(layer, x, layer.variables)
  theirs = _ValueAndGradients(keras_layer, x, [w.value for w in keras_layer.weights])
  for a, b in zip(ours, theirs, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize('padding', ['SAME', 'VALID'])
@pytest.mark.parametrize(
  'size, stride',
  [((1, 1), (1, 1)), ((3, 3), (2, 2)), ((1, 5), (1, 2)), ((5, 1), (2, 1)), ((3, 2), (1, 1))],
)
def testConvEqualsKeras(size, stride, padding):
  layer = _Layer(
    conv.Conv2DLayerNoPadding,
    filter_shape=(*size, 3, 4),
    filter_stride=stride,
    padding=padding,
  )
  keras_layer = keras.layers.Conv2D(
    4, size, stride, padding.lower(), use_bias=False, dtype='float64'
  )
  _CheckAsKeras(layer, keras_layer)


@pytest.mark.parametrize('stride', [1, 2])
def testDepthwiseEqualsKeras(stride):
  layer = _Layer(
    conv.DepthwiseConv2DLayerNoPadding, filter_shape=(3, 3, 3, 2), filter_stride=(stride, stride)
  )
  keras_layer = keras.layers.DepthwiseConv2D(
    3, stride, 'same', depth_multiplier=2, use_bias=False, dtype='float64'
  )
  _CheckAsKeras(layer, keras_layer)


@pytest.mark.parametrize('stride, multiplier', [(1, 1), (2, 3)])
def testSeparableEqualsKeras(stride, multiplier):
  layer = _Layer(
    conv.SeparableConv2DLayerNoPadding,
    filter_shape=(5, 5, 3, 4),
    filter_stride=(stride, stride),
    depth_multiplier=multiplier,
  )
  keras_layer = keras.layers.SeparableConv2D(
    4, 5, stride, 'same', depth_multiplier=multiplier, use_bias=False, dtype='float64'
  )
  _CheckAsKeras(layer, keras_layer)


def testBiasAndActivation():
  layer = _Layer(conv.Conv2DLayerNoPadding, filter_shape=(3, 3, 3, 4), bias=True, activation='RELU')
  expected = tf.nn.relu(tf.nn.conv2d(X, layer.vars.w, 1, 'SAME') + layer.vars.b)
  np.testing.assert_allclose(layer(tf.constant(X)), expected, rtol=1e-12)
  assert np.any(expected == 0)


@pytest.mark.parametrize(
  'values, names',
  [
    ({'filter_shape': (3, 3, 3)}, ['filter_shape', 'list of 4', (3, 3, 3)]),
    ({'filter_shape': (3, 3, 0, 4)}, ['filter_shape', 'list of 4', (3, 3, 0, 4)]),
    ({'filter_shape': (3, 3, 3, 4), 'padding': 'FULL'}, ['padding', "'SAME'", "'VALID'", "'FULL'"]),
    ({'filter_shape': (3, 3, 3, 4), 'filter_stride': (2,)}, ['filter_stride', 'list of 2', (2,)]),
  ],
)
def testWrongParamsRaise(values, names):
  with pytest.raises(ValueError, match=naming.Naming("'conv'", *names)):
    conv.Conv2DLayerNoPadding.Params().Set(name='conv', **values).Instantiate()


def testUnequalDepthwiseStridesRaise():
  p = conv.SeparableConv2DLayerNoPadding.Params()
  with pytest.raises(
    ValueError, match=naming.Naming("'conv'", 'equal strides', 'filter_stride (1, 2)')
  ):
    p.Set(name='conv', filter_shape=(3, 3, 3, 4), filter_stride=(1, 2)).Instantiate()


def testWrongInputsRaise():
  layer = _Layer(conv.Conv2DLayerNoPadding, filter_shape=(3, 3, 3, 4))
  with pytest.raises(ValueError, match=naming.Naming('conv', 'inputs', 3, '[2, 7, 6, 4]')):
    layer(tf.zeros([2, 7, 6, 4], tf.float64))
  with pytest.raises(ValueError, match=naming.Naming('conv', 'inputs', 'rank 4', '[7, 6, 3]')):
    layer(tf.zeros([7, 6, 3], tf.float64))


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
