# SPDX-License-Identifier: Apache-2.0
"""State of layers that follows sums over the mini-batch: BatchNorm in a pipeline.

Gradients and moving averages equal the results of the same layers run one by one, for every cut,
schedule and policy of re-materialisation; recomputation does not count twice. The layers also add
auxiliary losses, so that one trace is the test of both; `aux_loss_test` has what is left of them.
"""

import functools
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import fprop_context
from lingvo_gpipe.layers import conv, dropout
from lingvo_gpipe.pipeline.cutting import layer_costs
from tests.toys import layers, stacks, statistics_layers

_BATCH, _DIM = 6, layers.DIM
# Backward whole, with its forward and in halves, each with several policies; those compiled by XLA
# below are of others. Micro-batches are of one size but for four, which take twice the traces.
_CASES = [
  ('gpipe', 'stage', 3, 2),
  ('1f1b', 'except_last', 2, 3),
  ('1f1b', 'layer', 3, 4),
  ('1f1b_fused', 'stage', 1, 2),
  ('zb_h1', 'stage', 2, 3),
  ('zb_h1', 'none', 4, 3),
]
_TRAINED = ('gamma', 'beta')


_METRICS = {
  'loss',
  'stack.layers[0].aux_loss',
  'stack.layers[2].aux_loss',
  'stack.layers[2].a.z',
  'stack.layers[2].b.z',
  'stack.layers[3].one',
  'stack.layers[3].other',
}


def _Sub(adds_losses=True):
  drop = dropout.DropoutLayer.Params().Set(keep_prob=0.8)
  block, middle, last = (
    layer.Params().Set(adds_losses=adds_losses)
    for layer in (
      statistics_layers.NormBlock,
      statistics_layers.NormBetweenLosses,
      statistics_layers.CountingProduct,
    )
  )
  return [block, drop, middle, last]


_SPLITS = {1: [4], 2: [1, 4], 3: [1, 3, 4], 4: [1, 2, 3, 4]}


def _X():
  x = np.random.default_rng(4).normal(size=[_BATCH, 2, _DIM])
  return tf.constant(x * [1.0, 2.0, 5.0] + np.arange(_BATCH).reshape([-1, 1, 1]))


def _Place(sub, *, num_micro_batches=3, num_stages=1, **options):
  stack = stacks.MakeStack(
    sub, num_micro_batches=num_micro_batches, num_stages=num_stages, **options
  )
  devices, specs = stacks.Devices(), stacks.Specs((_X(),))
  stack.Place(devices, *specs, loss_fn=stacks.SquareLoss)
  return stack


def _Step(stack):
  return stacks.TakeStep(stack, (_X(),), stacks.ExampleWeights(_BATCH))


def _CheckState(actual, expected, rtol=1e-10):
  assert actual.keys() == expected.keys()
  for path, value in expected.items():
    np.testing.assert_allclose(actual[path], value, rtol=rtol, atol=1e-12, err_msg=path)


@functools.cache
def _Reference(num_micro_batches):
  """((sums, gradients), state after one mini-batch)."""
  side, state = stacks.ExampleWeights(_BATCH), {}
  result = stacks.Reference(_Sub(), num_micro_batches, (_X(),), side, state=state)
  return result, state


def _Check(*, num_micro_batches=3, **options):
  stack = _Place(_Sub(), num_micro_batches=num_micro_batches, **options)
  result = _Step(stack)
  expected, state = _Reference(num_micro_batches)
  stacks.CheckEqual(result, expected)
  assert set(result[0]) == _METRICS  # Sums for the state are nobody's metrics.
  # Each is averaged over the micro-batches by their weights, as the loss is.
  assert len({round(float(pair[1]), 9) for pair in result[0].values()}) == 1
  _CheckState(stacks.State(stack), state)
  return stack


@pytest.mark.parametrize('schedule, policy, num_stages, num_micro_batches', _CASES)
def testEqualsTheLayersOneByOne(schedule, policy, num_stages, num_micro_batches):
  stack = _Check(
    num_micro_batches=num_micro_batches,
    num_stages=num_stages,
    splits=_SPLITS[num_stages],
    schedule=schedule,
    remat_policy=policy,
  )
  _CheckStateOfTheWholeMiniBatch(stack)
  if (schedule, policy) == ('zb_h1', 'stage'):
    _CheckEvaluationUpdatesNothing(stack)


@pytest.mark.parametrize(
  'schedule, policy',
  [('1f1b_fused', 'except_last'), ('zb_h1', 'layer')],
)
def testCompiledByXla(schedule, policy):
  _Check(num_stages=2, splits=_SPLITS[2], schedule=schedule, remat_policy=policy, xla=True)


def testADeviceMayHaveSeveralStages():
  options = {'num_stages': 4, 'stages_per_device': 2, 'splits': _SPLITS[4]}
  _Check(num_micro_batches=2, schedule='interleaved_1f1b', **options)


def testOneAuxiliaryLossChangesTheGradients():
  """The tests above would notice a coefficient that is lost."""
  (_, grads), _ = _Reference(3)
  sub = [statistics_layers.NormBlock.Params(), *_Sub()[1:]]
  _, fewer_grads = stacks.Reference(sub, 3, (_X(),), stacks.ExampleWeights(_BATCH))
  stacks.CheckAnyDiffers(grads, fewer_grads)


def _CheckStateOfTheWholeMiniBatch(stack):
  """The first layer's averages equal one BatchNorm over the batch, as in torchgpipe."""
  x = _X().numpy()
  np.testing.assert_allclose(stack.layers[0].a.vars.moving_mean, 0.1 * x.mean((0, 1)), rtol=1e-12)
  variance = 0.9 + 0.1 * x.var((0, 1))
  np.testing.assert_allclose(stack.layers[0].a.vars.moving_variance, variance, rtol=1e-12)


def testOneMicroBatchIsPlainBatchNorm():
  """Against Keras: outputs through the loss, gradients of gamma and beta, moving averages."""
  sub = [statistics_layers.Norm(decay=0.9), statistics_layers.Norm(decay=0.9)]
  stack = _Place(sub, num_micro_batches=1, num_stages=2, splits=[1, 2])
  (sums, grads), weights = _Step(stack), stacks.ExampleWeights(_BATCH)
  norms = [keras.layers.BatchNormalization(momentum=0.9, dtype='float64') for _ in sub]
  with tf.GradientTape() as tape:
    y = _X()
    for norm in norms:
      y = norm(y, training=True)
    total = tf.reduce_sum(tf.reduce_mean(y**2, axis=[1, 2]) * weights)
  np.testing.assert_allclose(sums['loss'][0], total, rtol=1e-6)
  trained = {f'stack.layers[{i}].{n}': getattr(k, n) for i, k in enumerate(norms) for n in _TRAINED}
  expected = tape.gradient(total, {path: v.value for path, v in trained.items()})
  stacks.CheckEqual((sums, grads), (sums, expected), bound=1e-6)
  for layer, norm in zip(stack.layers, norms, strict=True):
    np.testing.assert_allclose(layer.vars.moving_mean, norm.moving_mean, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(layer.vars.moving_variance, norm.moving_variance, rtol=1e-6)


def testEqualStagesKeepTheirStateApart():
  """They share their functions, but not their state."""
  stack = _Place(
    [statistics_layers.CountingProduct.Params()] * 4, num_stages=4, splits=[1, 2, 3, 4]
  )
  for _ in range(2):
    _Step(stack)
  assert [float(v) for v in stacks.State(stack).values()] == [2.0 * _BATCH] * 4
  stages = stack.engine.stages
  functions = {id(stacks.StageFunctions(stack, s)) for s in stages}
  assert len(functions) == 3  # The first needs no gradient of x; the last has the loss.


def _CheckEvaluationUpdatesNothing(stack):
  """Also checks that it takes the state that a step has left."""
  before = stacks.State(stack)
  sums = stacks.Evaluate(stack, (_X(),), stacks.ExampleWeights(_BATCH))
  y = stack.Predict(_X())
  _CheckState(stacks.State(stack), before, rtol=0)
  expected = _X()
  for layer in stack.layers:
    expected = layer(expected)
  np.testing.assert_allclose(y, expected, rtol=1e-10)
  assert np.isfinite(sums['loss'][0])


def testFrozenLayersFollowTheData():
  """Statistics follow the mode, not the trainability."""
  stack = stacks.MakeStack(_Sub(), num_micro_batches=3, num_stages=2, splits=_SPLITS[2])
  stack.Place(
    stacks.Devices(),
    *stacks.Specs((_X(),)),
    loss_fn=stacks.SquareLoss,
    weights=layer_costs.Weights(lambda path: 'layers[3]' in path),
  )
  _Step(stack)
  _CheckState(stacks.State(stack), _Reference(3)[1])


def testSumsThatAreNotFiniteAreDropped():
  """Layers before the bad one have seen good data; from there on all state stays as it was."""

  def Spoil(x):
    return tf.where(x > tf.reduce_max(x) - 1e-9, x * np.inf, x)

  sub = [
    statistics_layers.Norm(),
    layers.Without(Spoil),
    statistics_layers.Norm(),
  ]
  stack = _Place(sub, num_stages=2, splits=[1, 3])
  before = stacks.State(stack)
  _Step(stack)
  after = stacks.State(stack)
  for path, value in after.items():
    assert np.array_equal(value, before[path]) == path.startswith('stack.layers[2]'), path


@tf.custom_gradient
def _FailInBackward(x):
  def Grad(dy):
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_sum(dy) > np.inf, ['failed'])]):
      return tf.identity(dy)

  return tf.identity(x), Grad


def testAFailedStepLeavesTheState():
  sub = [
    statistics_layers.CountingProduct.Params(),
    layers.Without(_FailInBackward),
    statistics_layers.Norm(),
  ]
  stack = _Place(sub, num_stages=2, splits=[2, 3], num_micro_batches=1)
  before = stacks.State(stack)
  # Often TensorFlow tells only that other devices were cancelled.
  with pytest.raises((tf.errors.InvalidArgumentError, tf.errors.CancelledError)):
    _Step(stack)
  _CheckState(stacks.State(stack), before, rtol=0)


# ---- beside one BatchNorm of the whole batch (peers: deferred) ----------------------------


@functools.cache
def _FiveStepsOfSgd(num_stages, num_micro_batches):
  """(states after each step, evaluations before and after) of convolution, norm, convolution."""
  layer = conv.Conv2DLayerNoPadding.Params().Set(activation='TANH')
  sub = [layer.Copy().Set(filter_shape=(3, 3, 2, _DIM)), statistics_layers.Norm(decay=0.5)]
  sub.append(layer.Copy().Set(filter_shape=(2, 2, _DIM, 1)))
  size, options = 24, {'num_stages': num_stages, 'num_micro_batches': num_micro_batches}
  stack = stacks.MakeStack(sub, **options)
  examples = np.random.default_rng(7).normal(size=[6, size, 4, 4, 2])
  *batches, unseen = tf.unstack(tf.constant(examples))
  loss_fn = stacks.SquareLoss
  stack.Place(stacks.Devices(), *stacks.Specs((unseen,)), loss_fn=loss_fn)
  run, variables = stacks.StepFunction(stack), stack.VariablesByPath()
  states, evaluations = [], [stack.Predict(unseen).numpy()]
  for step, x in enumerate(batches):
    run((x,), tf.ones([size], tf.float64), tf.constant(step, tf.int64))
    for path, gradient in stacks.Gradients(stack).items():
      variables[path].assign_sub(gradient / size)
    states.append(stacks.State(stack))
    evaluations.append(stack.Predict(unseen).numpy())
  return states, evaluations


def testAfterSomeStepsEvaluationIsCloseToOneMicroBatch():
  """It is not equal, because a micro-batch is normalised by its own statistics."""
  (_, whole), (_, parts) = (_FiveStepsOfSgd(*n) for n in ((1, 1), (2, 4)))
  np.testing.assert_allclose(parts[0], whole[0], rtol=1e-12)
  moved, apart = np.linalg.norm(whole[5] - whole[0]), np.linalg.norm(parts[5] - whole[5])
  assert 1e-4 * moved < apart < 0.1 * min(moved, np.linalg.norm(whole[5]))


def testStatisticsAfterAConvolutionPartWithItsWeights():
  """The first step has the statistics of the whole batch; then the weights differ."""
  (whole, _), (parts, _) = (_FiveStepsOfSgd(*n) for n in ((1, 1), (2, 4)))
  _CheckState(parts[0], whole[0])
  for path, value in whole[1].items():
    assert np.abs(parts[1][path] - value).max() > 1e-5, path


# ---- a user's own tape -------------------------------------------------------------------


@pytest.mark.parametrize('in_function', [False, True])
def testStatisticsAreUpdatedUnderAUsersTape(in_function):
  sub = _Sub(adds_losses=False)  # A user's tape cannot see them.
  stack = stacks.MakeStack(sub, num_micro_batches=3, num_stages=2, splits=_SPLITS[2])
  stack.Place(stacks.Devices(), *stacks.Specs((_X(),)))

  def Step(x, step):
    with tf.GradientTape() as tape, fprop_context.Scope(step=step) as context:
      loss = tf.reduce_sum(stack(x) ** 2)
      # A backward within the scope must add nothing either.
      grads = tape.gradient(loss, stack.trainable_variables)
    fprop_context.UpdateLayers(context)
    return grads

  run = tf.function(Step, autograph=False) if in_function else Step
  run(_X(), tf.constant(stacks.STEP, tf.int64))
  _CheckState(stacks.State(stack), _Reference(3)[1])
  with fprop_context.Scope(do_eval=True) as context:
    stack(_X())
  assert not context.layer_sums


def testStatisticsCoverSeveralCallsOfOneMiniBatch():
  """Two micro-batches of the user's own, of unequal size, each cut by the pipeline."""
  stack = stacks.MakeStack(_Sub()[:1], num_micro_batches=2)
  x = _X()
  stack.Place(stacks.Devices(), *stacks.Specs((x,)))
  contexts = []
  for m, piece in enumerate([x[:5], x[5:]]):
    with fprop_context.Scope(step=0, micro_batch=m) as context:
      stack(piece)
    contexts.append(context)
  fprop_context.UpdateLayers(*contexts)
  mean = stack.layers[0].a.vars.moving_mean
  np.testing.assert_allclose(mean, 0.1 * x.numpy().mean((0, 1)), rtol=1e-12)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
