# SPDX-License-Identifier: Apache-2.0
"""Activation, convolution and batch norm in this order."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import fprop_context
from lingvo_gpipe.layers import conv, conv_batch_norm
from tests.toys import layers

X = np.random.default_rng(0).standard_normal([4, 5, 5, 3])


def _Layer(**values):
  p = conv_batch_norm.ConvBatchNormLayer.Params().Set(
    name='block', dtype=tf.float64, filter_shape=(3, 3, 3, 4), **values
  )
  return layers.WithVariables(p)


@pytest.mark.parametrize('activation, fn', [('RELU', tf.nn.relu), ('NONE', tf.identity)])
def testValues(activation, fn):
  layer = _Layer(activation=activation, filter_stride=(2, 2), padding='VALID')
  with fprop_context.Scope(step=0):
    y = layer(tf.constant(X))
  expected = tf.nn.conv2d(fn(X), layer.vars.conv.w, 2, 'VALID')
  mean, variance = tf.nn.moments(expected, [0, 1, 2])
  expected = (expected - mean) / tf.sqrt(variance + 1e-3)
  np.testing.assert_allclose(y, expected, rtol=1e-9, atol=1e-12)


def testTemplatesAreUsed():
  layer = _Layer(conv_tpl=conv.SeparableConv2DLayerNoPadding.Params())
  assert list(layer.vars.conv) == ['w_depthwise', 'w_pointwise']
  assert layer.NumParams() == 9 * 3 + 3 * 4 + 2 * 4


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
