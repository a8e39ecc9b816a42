# SPDX-License-Identifier: Apache-2.0
"""Dropout: rate, mode, and exactly reproducible masks."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import fprop_context
from lingvo_gpipe.layers import dropout, linear, sequential
from tests import naming
from tests.toys import layers, nested_layers


def _Make(**values):
  return dropout.DropoutLayer.Params().Set(name='drop', **values).Instantiate()


def _Drop(layer, x, **where):
  with fprop_context.Scope(**{'step': 1, **where}):
    return layer.FProp(layer.ThetaFrom({}), x)


@pytest.mark.parametrize('keep_prob', [0.1, 0.5, 0.9, 0.999])
def testShareOfKeptEntriesAndMean(keep_prob):
  x = tf.ones([1000, 200])
  y = _Drop(_Make(keep_prob=keep_prob), x).numpy()
  sigma = np.sqrt(keep_prob * (1 - keep_prob) / y.size)
  assert abs(np.mean(y != 0) - keep_prob) < 5 * sigma
  np.testing.assert_allclose(y[y != 0], 1 / keep_prob, rtol=1e-6)
  # All rows and columns have the same rate.
  for axis in (0, 1):
    share = np.mean(y != 0, axis=axis)
    n = y.shape[axis]
    assert np.all(np.abs(share - keep_prob) < 6 * np.sqrt(keep_prob * (1 - keep_prob) / n) + 1 / n)


def testMaskDependsOnTheSeedOnly():
  layer, x = _Make(keep_prob=0.5), tf.ones([64, 64])
  base = _Drop(layer, x).numpy()
  np.testing.assert_array_equal(base, _Drop(layer, x))
  for other in ({'step': 2}, {'micro_batch': 1}):
    mask = _Drop(layer, x, **other).numpy()
    # Independent masks agree in half of the entries.
    assert 0.4 < np.mean(mask == base) < 0.6, other


@pytest.mark.parametrize('dtype', [tf.float32, tf.float64, tf.bfloat16], ids=str)
def testXlaAndEagerAndGraphAreBitEqual(dtype):
  layer = _Make(keep_prob=0.7, noise_shape_broadcast_dims=None)
  x = tf.cast(tf.random.stateless_normal([33, 65], [1, 2]), dtype)

  def Run(x, step):
    return _Drop(layer, x, step=step)

  step = tf.constant(10**7, tf.int64)
  eager = tf.cast(Run(x, step), tf.float64).numpy()
  for xla in (False, True):
    y = tf.function(Run, autograph=False, jit_compile=xla)(x, step)
    np.testing.assert_array_equal(tf.cast(y, tf.float64).numpy(), eager)


@pytest.mark.parametrize('xla', [False, True])
@pytest.mark.parametrize('seed', [(0, 0), (-(2**63), 2**63 - 1), (10**18, 7 * 2**20 + 3)])
def testRandomBitsComeFromPhilox(seed, xla):
  """Numbers of another generator would change every run that is resumed, and differ on a GPU."""
  seed = tf.constant(seed, tf.int64)
  expected = tf.random.stateless_uniform([3, 5], seed, None, None, tf.uint32, alg='philox')
  draw = tf.function(lambda seed: dropout.RandomBits([3, 5], seed), jit_compile=xla)
  np.testing.assert_array_equal(draw(seed), expected)


def testMaskDoesNotDependOnTheDtype():
  layer = _Make(keep_prob=0.5)
  masks = [_Drop(layer, tf.ones([50, 50], d)) == 0 for d in (tf.float32, tf.bfloat16, tf.float64)]
  np.testing.assert_array_equal(masks[0], masks[1])
  np.testing.assert_array_equal(masks[0], masks[2])


def testEvaluationAndKeepProbOneAreTheIdentity():
  x = tf.ones([4, 4])
  assert _Drop(_Make(keep_prob=0.5), x, do_eval=True) is x
  assert _Make(keep_prob=0.5).FProp({}, x) is x  # Outside any scope.
  assert _Drop(_Make(), x) is x


def testTrainingWithoutAStepRaises():
  with pytest.raises(ValueError, match=naming.Naming('drop', 'step', 'fprop_context.Scope')):
    _Drop(_Make(keep_prob=0.5), tf.ones([2]), step=None)


def testGradientPassesThroughKeptEntries():
  layer, x = _Make(keep_prob=0.5), tf.ones([20, 20])
  with tf.GradientTape() as tape:
    tape.watch(x)
    y = _Drop(layer, x)
  np.testing.assert_array_equal(tape.gradient(y, x), y)


@pytest.mark.parametrize('dims', [[1], [-2]])
def testBroadcastDimsShareADecision(dims):
  layer = _Make(keep_prob=0.5, noise_shape_broadcast_dims=dims)
  y = _Drop(layer, tf.ones([8, 6, 9])).numpy()
  np.testing.assert_array_equal(y, np.broadcast_to(y[:, :1], y.shape))
  assert 0 < np.mean(y == 0) < 1


def testOtherOutputsPassThrough():
  layer = _Make(keep_prob=0.5)
  with fprop_context.Scope(step=1):
    x, paddings, nothing = layer.FProp({}, tf.ones([2, 3]), tf.zeros([2]), None)
  assert (x.shape, paddings.shape, nothing) == ((2, 3), (2,), None)


@pytest.mark.parametrize('keep_prob', [0.0, -0.5, 1.5])
def testWrongProbabilityRaises(keep_prob):
  with pytest.raises(
    ValueError, match=naming.Naming("'drop'", 'keep_prob', 'above 0', 'at most 1')
  ):
    _Make(keep_prob=keep_prob)


def testWrongBroadcastDimRaises():
  layer = _Make(keep_prob=0.5, noise_shape_broadcast_dims=[2])
  with pytest.raises(
    ValueError, match=naming.Naming('drop', 'noise_shape_broadcast_dims [2]', 'rank 2')
  ):
    _Drop(layer, tf.ones([2, 2]))


def testSiblingsDrawDifferentMasks():
  half = dropout.DropoutLayer.Params().Set(keep_prob=0.5)
  layer = layers.WithVariables(nested_layers.Pair.Params().Set(name='two', tpl=half))
  with fprop_context.Scope(step=1):
    a, b = layer(tf.ones([50, 50]))
  assert 0.4 < np.mean(a == b) < 0.6


def testEqualLayersOfASequenceDrawDifferentMasks():
  half = dropout.DropoutLayer.Params().Set(keep_prob=0.5)
  identity = linear.LinearLayer.Params().Set(input_dim=50, output_dim=50)
  stack = sequential.SequentialLayer.Params().Set(name='s', sub=[half, identity, half])
  stack = stack.Instantiate()
  with fprop_context.Scope(step=1):
    masks = [stack.layers[i].FProp({}, tf.ones([50, 50])) for i in (0, 2)]
  assert 0.4 < np.mean(masks[0] == masks[1]) < 0.6


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
