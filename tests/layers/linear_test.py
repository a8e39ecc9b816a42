# SPDX-License-Identifier: Apache-2.0
"""Linear, projection and feed-forward layers against NumPy, and their activations."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import fprop_context
from lingvo_gpipe.layers import activations, dropout, linear
from tests import naming
from tests.toys import layers


def _Make(params, **values):
  return layers.WithVariables(params.Set(name='layer', dtype=tf.float64, **values))


def _Random(*shape):
  return np.random.default_rng(0).standard_normal(shape)


@pytest.mark.parametrize('lead', [(), (3,), (3, 2), (3, 2, 5), (0, 2)], ids=str)
def testLinearMapsTheLastAxis(lead):
  layer = _Make(linear.LinearLayer.Params(), input_dim=4, output_dim=6)
  x = _Random(*lead, 4)
  np.testing.assert_allclose(layer(tf.constant(x)), x @ layer.vars.w.numpy(), atol=1e-12)


def testLinearAcceptsAnUnknownBatch():
  layer = _Make(linear.LinearLayer.Params(), input_dim=4, output_dim=6)
  run = tf.function(layer, input_signature=[tf.TensorSpec([None, None, 4], tf.float64)])
  assert run.get_concrete_function().structured_outputs.shape.as_list() == [None, None, 6]
  assert run(tf.zeros([2, 3, 4], tf.float64)).shape == (2, 3, 6)


def testProjectionHasBiasAndActivationAndZeroesPaddings():
  layer = _Make(
    linear.ProjectionLayer.Params(), input_dim=4, output_dim=3, has_bias=True, bias_init=0.5
  )
  x = _Random(2, 5, 4)
  paddings = np.float32([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]])
  expected = np.maximum(x @ layer.vars.w.numpy() + 0.5, 0)
  np.testing.assert_allclose(layer(tf.constant(x)), expected, atol=1e-12)
  expected *= (1 - paddings)[..., np.newaxis]
  padded = layer(tf.constant(x), tf.constant(paddings))
  np.testing.assert_allclose(padded, expected, atol=1e-12)


def testDefaultsEqualLingvos():
  p = linear.ProjectionLayer.Params()
  assert (p.activation, p.has_bias) == ('RELU', False)


def testFeedForwardNetAppliesItsProjections():
  layer = _Make(
    linear.FeedForwardNet.Params(),
    input_dim=4,
    hidden_layer_dims=[5, 3],
    activation=['TANH', 'NONE'],
  )
  assert layer.NumParams() == 4 * 5 + 5 + 5 * 3 + 3
  x = _Random(2, 4)
  (w0, w1) = (fc.w.numpy() for fc in layer.vars.fc)
  np.testing.assert_allclose(layer(tf.constant(x)), np.tanh(x @ w0) @ w1, atol=1e-12)


def testFeedForwardNetDropsAfterEachProjection():
  half = dropout.DropoutLayer.Params().Set(keep_prob=0.5)
  layer = _Make(
    linear.FeedForwardNet.Params(),
    input_dim=4,
    hidden_layer_dims=[50, 60],
    activation='SIGMOID',
    dropout=half,
  )
  with fprop_context.Scope(step=1):
    y = layer(tf.ones([10, 4], tf.float64)).numpy()
  assert 0.4 < np.mean(y == 0) < 0.6


@pytest.mark.parametrize(
  ('values', 'names'),
  [
    ({'input_dim': 4}, ['output_dim']),
    ({'input_dim': 4, 'output_dim': -1}, ['output_dim', -1]),
    ({'input_dim': 4, 'output_dim': 2, 'activation': 'RELUU'}, ["'RELUU'", "mean 'RELU'"]),
  ],
)
def testWrongParamsRaise(values, names):
  with pytest.raises(ValueError, match=naming.Naming(*names)):
    _Make(linear.ProjectionLayer.Params(), **values)


def testFeedForwardNetWithAListOfWrongLengthRaises():
  with pytest.raises(
    ValueError, match=naming.Naming("'layer'", 'activation', 'list of 2', 'got 1')
  ):
    _Make(
      linear.FeedForwardNet.Params(), input_dim=2, hidden_layer_dims=[2, 2], activation=['RELU']
    )
  with pytest.raises(ValueError, match=naming.Naming("'layer'", 'hidden_layer_dims', 'empty')):
    _Make(linear.FeedForwardNet.Params(), input_dim=2)


def testWrongInputsRaiseWithThePath():
  layer = _Make(linear.FeedForwardNet.Params(), input_dim=4, hidden_layer_dims=[5])
  with pytest.raises(
    ValueError, match=naming.Naming('layer.fc[0]', 'inputs', 4, 'got shape [2, 3]')
  ):
    layer(tf.zeros([2, 3], tf.float64))
  with pytest.raises(
    ValueError, match=naming.Naming('layer.fc[0]', 'paddings', '[2]', 'got shape [3]')
  ):
    layer(tf.zeros([2, 4], tf.float64), tf.zeros([3]))


@pytest.mark.parametrize('name', activations.NAME.names())
@pytest.mark.parametrize('dtype', [tf.float32, tf.float64, tf.bfloat16], ids=str)
def testActivationsKeepTheDtype(name, dtype):
  x = tf.cast(tf.linspace(-3.0, 3.0, 7), dtype)
  y = activations.GetFn(name)(x)
  assert y.dtype == dtype
  assert np.all(np.isfinite(tf.cast(y, tf.float32)))


def testActivationValues():
  x = np.array([-2.0, 0.5, 7.0])
  expected = {
    'NONE': x,
    'RELU': [0, 0.5, 7],
    'RELU6': [0, 0.5, 6],
    'SQUARED_RELU': [0, 0.25, 49],
    'TANH': np.tanh(x),
    'SIGMOID': 1 / (1 + np.exp(-x)),
    'SWISH': x / (1 + np.exp(-x)),
    # x Phi(x) with Phi(-2) and Phi(0.5) of the normal distribution.
    'GELU': [-2 * 0.0227501319, 0.5 * 0.6914624613, 7],
  }
  for name, y in expected.items():
    np.testing.assert_allclose(activations.GetFn(name)(tf.constant(x)), y, atol=1e-9, err_msg=name)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
