# SPDX-License-Identifier: Apache-2.0
"""BatchNormLayer: formulas, paddings, moving averages, precision, and use in a custom loop."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import base_layer, fprop_context, layer_state, nested_map
from lingvo_gpipe.layers import batch_norm
from lingvo_gpipe.pipeline.stages import micro_batch
from tests import naming
from tests.toys import layers, statistics_layers

_DIM = 3


def _Layer(**params):
  params = {'dtype': tf.float64, **params}
  return layers.WithVariables(batch_norm.BatchNormLayer.Params().Set(name='bn', dim=_DIM, **params))


def _X(shape=(7, 5, _DIM), seed=1):
  """Returns channels with different means and scales, and examples that differ in slope."""
  x = np.random.default_rng(seed).normal(size=shape)
  x *= [1.0, 10.0, 100.0]
  x += 2.0 ** np.arange(shape[0]).reshape([-1, *[1] * (len(shape) - 1)])
  return x


def _Train(layer, x, num_micro_batches, *more_inputs):
  """Returns the outputs of the micro-batches of one mini-batch, and updates the averages."""
  contexts, outputs = [], []
  for m, args in enumerate(micro_batch.Split((tf.constant(x), *more_inputs), num_micro_batches)):
    with fprop_context.Scope(step=0, micro_batch=m) as context:
      outputs.append(layer(*args))
    contexts.append(context)
  fprop_context.UpdateLayers(*contexts)
  return outputs


def _State(layer):
  return {
    path.rpartition('.')[2]: v.numpy()
    for path, v in layer.VariablesByPath().items()
    if not v.trainable
  }


@pytest.mark.parametrize('shape', [(7, _DIM), (7, 5, _DIM), (4, 2, 3, _DIM)], ids=str)
def testNormalisesEachMicroBatch(shape):
  layer, x = _Layer(epsilon=1e-4), _X(shape)
  layer.vars.gamma.assign([2.0, 0.5, 1.0])
  layer.vars.beta.assign([0.0, 1.0, -3.0])
  outputs = _Train(layer, x, 3)
  for y, piece in zip(outputs, np.split(x, np.cumsum([len(y) for y in outputs])[:-1]), strict=True):
    axes = tuple(range(x.ndim - 1))
    mean, variance = piece.mean(axes), piece.var(axes)
    expected = (piece - mean) / np.sqrt(variance + 1e-4) * [2.0, 0.5, 1.0] + [0.0, 1.0, -3.0]
    np.testing.assert_allclose(y, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('num_micro_batches', [1, 2, 3, 4, 7])
def testMovingAveragesCoverTheWholeMiniBatch(num_micro_batches):
  """7 examples in 3 micro-batches are 3, 2, 2: a mean of means would be wrong."""
  layer = _Layer(decay=0.9)
  mean, variance = np.zeros(_DIM), np.ones(_DIM)
  for seed in range(3):
    x = _X(seed=seed)
    _Train(layer, x, num_micro_batches)
    mean = 0.9 * mean + 0.1 * x.mean((0, 1))
    variance = 0.9 * variance + 0.1 * x.var((0, 1))
  np.testing.assert_allclose(layer.vars.moving_mean, mean, rtol=1e-12)
  np.testing.assert_allclose(layer.vars.moving_variance, variance, rtol=1e-12)


def testCumulativeAverage():
  layer = _Layer(decay=None)
  batches = [_X(seed=seed) for seed in range(4)]
  for x in batches:
    _Train(layer, x, 2)
  assert layer.vars.num_updates.numpy() == 4
  np.testing.assert_allclose(layer.vars.moving_mean, np.mean([x.mean((0, 1)) for x in batches], 0))
  np.testing.assert_allclose(
    layer.vars.moving_variance, np.mean([x.var((0, 1)) for x in batches], 0)
  )


def testEvaluationUsesButDoesNotChangeTheAverages():
  layer, x = _Layer(decay=0.5), _X()
  _Train(layer, x, 2)
  before = _State(layer)
  with fprop_context.Scope(do_eval=True) as context:
    y = layer(tf.constant(x))
  assert not context.layer_sums
  fprop_context.UpdateLayers(context)
  expected = (x - before['moving_mean']) / np.sqrt(before['moving_variance'] + 1e-3)
  np.testing.assert_allclose(y, expected, rtol=1e-12)
  np.testing.assert_allclose(layer(tf.constant(x)), expected, rtol=1e-12)  # Outside any scope.
  for name, value in _State(layer).items():
    np.testing.assert_array_equal(value, before[name])


def testPaddedPositionsDoNotCount():
  x, lengths = _X(), [5, 1, 3, 0, 2, 4, 5]
  paddings = (np.arange(5) >= np.array(lengths)[:, None]).astype(np.float32)
  poisoned = np.where(paddings[..., None] > 0, np.nan, x)
  layer = _Layer(decay=0.0)
  outputs = _Train(layer, poisoned, 1, tf.constant(paddings))
  unpadded = x[paddings < 0.5]
  np.testing.assert_allclose(layer.vars.moving_mean, unpadded.mean(0), rtol=1e-12)
  np.testing.assert_allclose(layer.vars.moving_variance, unpadded.var(0), rtol=1e-12)
  y, same = outputs[0]
  np.testing.assert_array_equal(same, paddings)
  expected = (unpadded - unpadded.mean(0)) / np.sqrt(unpadded.var(0) + 1e-3)
  np.testing.assert_allclose(y.numpy()[paddings < 0.5], expected, rtol=1e-9, atol=1e-9)
  assert not np.any(y.numpy()[paddings > 0.5])


def testPaddingsOfTheBatchAxisMaskWholeImages():
  x, paddings = _X((4, 2, 3, _DIM)), np.array([0.0, 1.0, 0.0, 0.0], np.float32)
  layer = _Layer(decay=0.0)
  _Train(layer, x, 2, tf.constant(paddings))
  np.testing.assert_allclose(layer.vars.moving_variance, x[[0, 2, 3]].var((0, 1, 2)), rtol=1e-12)


def testAllPaddingKeepsTheAverages():
  layer, x = _Layer(decay=None), _X()
  y, _ = _Train(layer, x, 1, tf.ones([7, 5]))[0]
  assert not np.any(y)
  state = _State(layer)
  np.testing.assert_array_equal(state['moving_variance'], np.ones(_DIM))
  assert state['num_updates'] == 0


def testNonfiniteValuesKeepTheAverages():
  layer = _Layer(decay=None)
  _Train(layer, _X(), 2)
  before, x = _State(layer), _X(seed=2)
  x[3, 0, 1] = np.inf
  _Train(layer, x, 2)
  for name, value in _State(layer).items():
    np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize('num_micro_batches', [1, 4])
def testVarianceIsAccurateForALargeMean(num_micro_batches):
  """mean / deviation is 2000, so sums of squares in float32 would lose the variance."""
  rng = np.random.default_rng(3)
  x = (2000.0 + rng.normal(size=[64, 8, _DIM])).astype(np.float32)
  layer = _Layer(dtype=tf.float32, decay=0.0)
  outputs = np.concatenate(_Train(layer, x, num_micro_batches))
  np.testing.assert_allclose(
    layer.vars.moving_variance, x.astype(np.float64).var((0, 1)), rtol=1e-5
  )
  assert abs(outputs.std() - 1.0) < 2e-3


def testBfloat16ActivationsHaveFloat32Statistics():
  layer = _Layer(dtype=tf.float32, fprop_dtype=tf.bfloat16, decay=0.0)
  x = tf.cast(_X(), tf.bfloat16)
  y = _Train(layer, x, 1)[0]
  assert y.dtype == tf.bfloat16
  exact = tf.cast(x, tf.float64).numpy()
  np.testing.assert_allclose(layer.vars.moving_mean, exact.mean((0, 1)), rtol=1e-5)
  np.testing.assert_allclose(layer.vars.moving_variance, exact.var((0, 1)), rtol=1e-4)
  assert layer.theta.moving_mean.dtype == tf.float32


def testMovingAveragesInTraining():
  layer, x = _Layer(use_moving_avg_in_training=True, decay=0.9), _X()
  y = _Train(layer, x, 1)[0]
  np.testing.assert_allclose(y, x / np.sqrt(1.001), rtol=1e-12)
  np.testing.assert_allclose(layer.vars.moving_mean, 0.1 * x.mean((0, 1)), rtol=1e-12)


def testWithoutGammaAndBeta():
  layer = _Layer(center=False, scale=False)
  assert layer.NumParams() == 0
  y = _Train(layer, _X(), 1)[0]
  np.testing.assert_allclose(np.mean(y, (0, 1)), np.zeros(_DIM), atol=1e-12)


@pytest.mark.parametrize(
  'params, names',
  [
    ({'dim': 0}, ['dim', 'at least 1', 'got 0']),
    ({'epsilon': 0.0}, ['epsilon', 'above 0', 'got 0.0']),
    ({'decay': 1.0}, ['decay', 'below 1', 'None', 'got 1.0']),
  ],
)
def testWrongParamsRaise(params, names):
  with pytest.raises(ValueError, match=naming.Naming("'bn'", *names)):
    batch_norm.BatchNormLayer.Params().Set(name='bn', **{'dim': 3, **params}).Instantiate()


def testPaddingsOfAnotherShapeRaise():
  with pytest.raises(
    ValueError, match=naming.Naming('bn', 'paddings', 'shape [2, 5]', 'got shape [2, 4]')
  ):
    _Layer()(tf.zeros([2, 5, _DIM]), tf.zeros([2, 4]))
  with pytest.raises(
    ValueError, match=naming.Naming('bn', 'paddings', 'inputs (2, 5, 3)', 'got shape (2, 5, 3)')
  ):
    _Layer()(tf.zeros([2, 5, _DIM]), tf.zeros([2, 5, _DIM]))


# ---- sums over a mini-batch -----------------------------------------------------------------


def _Counter(**params):
  return layers.WithVariables(statistics_layers.Counter.Params().Set(name='counts', **params))


def testSeveralCallsInAMicroBatchAddUp():
  layer = _Counter()
  with fprop_context.Scope(step=0) as context:
    layer(tf.zeros([3, 1]))
    layer(tf.zeros([4, 1]))
  assert layer.vars.total.numpy() == 0  # FProp has no side effects.
  fprop_context.UpdateLayers(context)
  assert layer.vars.total.numpy() == 7


def testInsideATfFunction():
  layer = _Counter()

  @tf.function(autograph=False)
  def Step(x):
    with fprop_context.Scope(step=tf.constant(0)) as context:
      layer(x)
    fprop_context.UpdateLayers(context)

  for _ in range(3):
    Step(tf.zeros([5, 1]))
  assert layer.vars.total.numpy() == 15


def testSumsHoldNoGradient():
  layer, x = _Layer(), tf.constant(_X())
  with tf.GradientTape() as tape, fprop_context.Scope(step=0) as context:
    tape.watch(x)
    layer(x)
    total = tf.reduce_sum(context.layer_sums[id(layer)][1]['sum'])
  assert tape.gradient(total, x) is None


def testSumsWithOtherNamesRaise():
  layer = _Counter()
  with fprop_context.Scope(step=0) as context:
    layer(tf.zeros([3, 1]))
    with pytest.raises(ValueError, match=naming.Naming('counts', 'sums a', 'reported count')):
      context.AddSums(layer, {'a': tf.zeros([])})


@pytest.mark.parametrize('dtype', [tf.bfloat16, tf.int32])
def testSumsOfAnotherDtypeRaise(dtype):
  layer = _Counter(sums={'a': tf.zeros([], dtype)})
  names = naming.Naming('counts', "'a'", 'float32', 'float64', f'got {dtype.name}')
  with fprop_context.Scope(step=0), pytest.raises(TypeError, match=names):
    layer(tf.zeros([3, 1]))


def testUpdateOfAnUnknownWeightRaises():
  names = naming.Naming('counts', 'StateFromSums', 'other', 'total', 'untouched')
  with pytest.raises(ValueError, match=names):
    layer_state.UpdateFromSums(
      _Counter(wrong='other'), nested_map.NestedMap(count=tf.constant(1.0))
    )


def testLayerWithoutStateFromSumsRaises():
  layer = layers.WithVariables(base_layer.BaseLayer.Params().Set(name='plain'))
  with pytest.raises(
    NotImplementedError, match=naming.Naming('BaseLayer', 'AddSums', 'StateFromSums')
  ):
    layer_state.UpdateFromSums(layer, nested_map.NestedMap(count=tf.constant(1.0)))


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
