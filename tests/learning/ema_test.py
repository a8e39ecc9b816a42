# SPDX-License-Identifier: Apache-2.0
"""Moving averages of weights: their formula, their devices, and their use in evaluation."""

import sys
from concurrent import futures

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.checkpoint import checkpointer
from lingvo_gpipe.learning import ema, optimizer
from lingvo_gpipe.runners import eval_runner, train_runner
from tests import naming
from tests.toys import stacks, tasks

_BATCH = 4
_OWNER, _MEAN = 'net.stack.layers[0].w', 'net.stack.layers[2].moving_mean'


def _Runner(splits=(3, 5), decay=0.15, dtype=tf.float64, cls=train_runner.TrainRunner, **train):
  p = tasks.TiedNet.Params().Set(name='net', random_seed=4, dtype=dtype, splits=list(splits))
  p.train.Set(ema_decay=decay, **train)
  p.train.learner.Set(learning_rate=0.3, optimizer=optimizer.SGD.Params())
  return cls(p.Instantiate(), stacks.Devices(), tasks.BatchSpec(_BATCH, dtype))


def _Batch(seed, dtype=tf.float64):
  return tasks.Batch(np.random.default_rng(seed), _BATCH, dtype)


def _Bad(seed):
  batch = _Batch(seed)
  batch.y = batch.y * np.nan
  return batch


def _Arrays(run):
  return {name: v.numpy() for name, v in run.Variables().items()}


def _Weights(run):
  return {path: v.numpy() for path, v in run.task.VariablesByPath().items()}


def _AssertSame(actual, expected):
  assert actual.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_array_equal(actual[name], value, err_msg=name)


def testAveragesFollowTheFormula():
  """Equals tf.train.ExponentialMovingAverage with num_updates."""
  # TensorFlow's class enters a variable scope, which a loop that failed in an earlier test may have
  # left with a caching device. Each thread has its own scopes.
  with futures.ThreadPoolExecutor(1) as executor:
    executor.submit(_CompareWithTensorFlow).result()


def _CompareWithTensorFlow():
  variables = {'a': tf.Variable([1.0, -2.0]), 'b': tf.Variable(3.0)}
  ours = ema.ExponentialMovingAverage(0.25, variables)
  count = tf.Variable(0, dtype=tf.int64)
  theirs = tf.train.ExponentialMovingAverage(0.25, num_updates=count)
  theirs.apply(list(variables.values()))  # These also start at the present values.
  move = tf.function(ours.Apply, autograph=False)
  for step in range(5):
    for v in variables.values():
      v.assign_add(tf.ones_like(v) * (step + 1.0))
    count.assign(step)
    move(tf.constant(step, tf.int64), tf.constant(True))
    theirs.apply(list(variables.values()))
    before = {name: v.numpy() for name, v in ours.Variables().items()}
    move(tf.constant(step, tf.int64), tf.constant(False))
    for path, v in variables.items():
      np.testing.assert_allclose(before[f'{path}/ema'], theirs.average(v), rtol=1e-6)
      np.testing.assert_array_equal(ours.Variables()[f'{path}/ema'], before[f'{path}/ema'])


def testNarrowWeightsHaveWideAverages():
  """In bfloat16 an average of decay 0.999 would not move at all."""
  v = tf.Variable(tf.ones([2], tf.bfloat16))
  averages = ema.ExponentialMovingAverage(0.999, {'v': v})
  v.assign([2.0, 2.0])
  averages.Apply(tf.constant(10**6, tf.int64), tf.constant(True))
  (average,) = averages.Variables().values()
  np.testing.assert_allclose(average.numpy(), [1.001, 1.001], rtol=1e-6)
  before = average.numpy()
  with averages.InPlaceOfWeights():
    np.testing.assert_array_equal(v.numpy(), tf.cast(average, tf.bfloat16))
  np.testing.assert_array_equal(v.numpy(), [2.0, 2.0])
  np.testing.assert_array_equal(average.numpy(), before)


def testWeightsAreRestoredExactlyAfterAnError():
  v = tf.Variable([0.1, 1e-30, 1e30])
  averages = ema.ExponentialMovingAverage(0.5, {'v': v})
  v.assign([np.nan, -0.0, 7.0])
  with pytest.raises(RuntimeError), averages.InPlaceOfWeights():
    with averages.InPlaceOfWeights():
      pass
    np.testing.assert_array_equal(v.numpy(), np.float32([0.1, 1e-30, 1e30]))
    raise RuntimeError('in evaluation')
  assert v.numpy().tobytes() == np.float32([np.nan, -0.0, 7.0]).tobytes()


@pytest.mark.parametrize('moving', [False, True])
def testAveragedVariables(moving):
  """Tied weights have one average; moving statistics have averages if requested."""
  run = _Runner(ema_decay_moving_vars=moving)
  variables = run.task.VariablesByPath()
  expected = {path for path, v in variables.items() if v.trainable}
  if moving:
    expected |= {_MEAN, _MEAN.replace('mean', 'variance')}
  averages = {name: v for name, v in run.Variables().items() if name.endswith('/ema')}
  assert set(averages) == {f'{path}/ema' for path in expected}
  for path in expected:
    assert averages[f'{path}/ema'].device == variables[path].device


def testAveragesOfARun():
  """With one and two stages, tied weights, BatchNorm and a skipped step."""
  results = []
  for splits in ((5,), (3, 5)):
    run = _Runner(splits, ema_decay_moving_vars=True)
    averaged = [name[: -len('/ema')] for name in run.Variables() if name.endswith('/ema')]
    expected = {path: value for path, value in _Weights(run).items() if path in averaged}
    for step, batch in enumerate([_Batch(1), _Batch(2), _Bad(3), _Batch(4)]):
      before = _Arrays(run)
      values = run.TrainStep(batch)
      after = _Arrays(run)
      if values['is_finite']:
        decay = min(0.15, (1 + step) / (10 + step))
        for path in expected:
          expected[path] = decay * expected[path] + (1 - decay) * after[path]
          np.testing.assert_allclose(after[f'{path}/ema'], expected[path], rtol=1e-12)
          assert not np.array_equal(after[f'{path}/ema'], before[f'{path}/ema']), path
      else:
        _AssertSame(after, {**before, 'global_step': step + 1})
    assert values['num_skipped_steps'] == 1.0
    results.append(_Arrays(run))
  for name, value in results[0].items():
    np.testing.assert_allclose(results[1][name], value, rtol=1e-9, atol=1e-12, err_msg=name)


def testEvaluationUsesTheAverages(tmp_path):
  """In the trainer between steps, and in an evaluator that restores a checkpoint without slots."""
  run = _Runner()
  for seed in range(3):
    run.TrainStep(_Batch(seed))
  raw = _Runner(decay=0.0)
  for name, v in raw.Variables().items():
    v.assign(run.Variables()[name])
  raw.AfterRestore()
  before = _Arrays(run)
  evaluated = run.Evaluate([_Batch(9)])
  _AssertSame(_Arrays(run), before)
  assert evaluated != raw.Evaluate([_Batch(9)])

  store = checkpointer.Checkpointer(str(tmp_path))
  store.Save(3, run.Variables(), {})
  evaluator = _Runner((5,), cls=eval_runner.EvalRunner)
  num_averages = ema.Restore(store, store.Latest(), evaluator.Variables())
  assert num_averages == sum(name.endswith('/ema') for name in before) > 0
  evaluator.AfterRestore()
  for path, v in _Weights(evaluator).items():
    np.testing.assert_array_equal(v, before.get(f'{path}/ema', before[path]), err_msg=path)
  assert evaluator.Evaluate([_Batch(9)])['loss'] == pytest.approx(evaluated['loss'], rel=1e-12)
  with evaluator.AveragedWeights():
    assert not any('/' in path for path in _Weights(evaluator))

  # Training resumes exactly: the copy of the tied weight on the other stage was restored as well.
  again = _Runner()
  store.RestoreLatest(again.Variables())
  again.AfterRestore()
  run.TrainStep(_Batch(5))
  again.TrainStep(_Batch(5))
  _AssertSame(_Arrays(again), _Arrays(run))


def testDecodingUsesTheAverages():
  run = _Runner()
  run.TrainStep(_Batch(0))
  seen = []
  run.task.Decode = lambda batch, generator: seen.append(_Weights(run)) or {}
  before = _Arrays(run)
  with run.AveragedWeights():
    run.Decode(_Batch(0), None)
  run.Decode(_Batch(0), None)
  for weights in seen:
    np.testing.assert_array_equal(weights[_OWNER], before[f'{_OWNER}/ema'])
    np.testing.assert_array_equal(weights[_MEAN], before[_MEAN])
  _AssertSame(_Arrays(run), before)


@pytest.mark.parametrize('decay', [0.0, 0.5])
def testAnEvaluatorOfNarrowWeightsUsesTheAverages(tmp_path, decay):
  """The checkpoint decides whether there are averages, not the Params of the evaluator."""
  run = _Runner(dtype=tf.bfloat16)
  for name, v in run.Variables().items():
    if name.endswith('/ema'):
      assert v.dtype == tf.float32
      v.assign_add(tf.ones_like(v) / 3)
  store = checkpointer.Checkpointer(str(tmp_path))
  store.Save(0, run.Variables(), {})
  evaluator = _Runner(dtype=tf.bfloat16, decay=decay, cls=eval_runner.EvalRunner)
  ema.Restore(store, store.Latest(), evaluator.Variables())
  evaluator.AfterRestore()
  with run.AveragedWeights():
    averaged = _Weights(run)
    average = run.Variables()[f'{_OWNER}/ema']
    np.testing.assert_array_equal(averaged[_OWNER], tf.cast(average, tf.bfloat16))
  _AssertSame(_Weights(evaluator), averaged)


def testAveragesStartAtAssignedWeights():
  run = _Runner()
  run.TrainStep(_Batch(0))
  for v in run.task.VariablesByPath().values():
    v.assign(v * 2)
  run.BeginAtWeights()
  averages = _Arrays(run)
  for path, v in _Weights(run).items():
    np.testing.assert_array_equal(averages.get(f'{path}/ema', v), v)


def testAveragesCountAsMemory():
  cuts = [_Runner(decay=decay, cls=eval_runner.EvalRunner).cut for decay in (0.0, 0.15)]
  assert [p.weights.slots_per_weight for p in cuts] == [0, 1]


@pytest.mark.parametrize('decay', [-0.1, 1.0, float('nan')])
def testDecayOutOfRange(decay):
  with pytest.raises(
    ValueError, match=naming.Naming("'net'", 'train.ema_decay', 'at least 0', 'below 1', decay)
  ):
    _Runner(decay=decay)


def testMovingVarsNeedADecay():
  with pytest.raises(
    ValueError, match=naming.Naming('net.train.ema_decay_moving_vars', 'ema_decay')
  ):
    _Runner(decay=0.0, ema_decay_moving_vars=True)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
