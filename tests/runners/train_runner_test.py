# SPDX-License-Identifier: Apache-2.0
"""The runner trains, evaluates and resumes tasks with and without a pipeline."""

import functools
import itertools
import math
import os
import re
import sys
import threading

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.checkpoint import checkpointer
from lingvo_gpipe.core import heartbeat, nested_map
from lingvo_gpipe.input import synthetic
from lingvo_gpipe.layers import linear
from lingvo_gpipe.learning import learner, lr_schedules, optimizer
from lingvo_gpipe.runners import eval_runner, task_cut, train_runner
from tests import naming
from tests.naming import Naming
from tests.toys import measured

_DIM, _BATCH = measured.DIM, 8


def _Devices():
  return [d.name for d in tf.config.list_logical_devices('CPU')]


def _Input(**settings):
  p = synthetic.SyntheticRegressionInput.Params().Set(
    batch_size=_BATCH, num_examples=40, input_shape=[_DIM], num_targets=2, **settings
  )
  return p.Instantiate()


def _LinearParams(rate=0.1):
  p = measured.Linear.Params().Set(name='linear')
  p.train.learner.Set(learning_rate=rate, optimizer=optimizer.SGD.Params())
  return p


def _PipelinedParams(num_stages=2, num_micro_batches=2, **settings):
  p = measured.Pipelined.Params().Set(name='net', random_seed=3, **settings)
  p.stack.Set(num_stages=num_stages, num_micro_batches=num_micro_batches)
  p.train.learner.Set(
    learning_rate=0.02,
    optimizer=optimizer.Adam.Params(),
    clip_gradient_norm_to_value=1.0,
    lr_schedule=lr_schedules.CosineSchedule.Params().Set(total_steps=50),
  )
  return p


def _Runner(p, cls=train_runner.TrainRunner):
  return cls(p.Instantiate(), _Devices(), _Input().BatchSpec())


def _Train(run, start, num_steps):
  """Returns the losses of `num_steps` steps from a position of the data, and the next position."""
  losses = []
  for batch in _Input().Dataset(start).take(num_steps):
    losses.append(run.TrainStep(batch)['loss'])
    start += _BATCH
  return losses, start


def _Arrays(variables):
  return {name: v.numpy() for name, v in variables.items()}


@functools.cache
def _Trained(num_stages, num_micro_batches=2):
  """Returns (runner, losses of 8 steps, variables after 4 steps, their position in the data).

  Tests train the runner further, since each other runner would be traced again.
  """
  run = _Runner(_PipelinedParams(num_stages, num_micro_batches))
  first, position = _Train(run, 0, 4)
  variables = _Arrays(run.Variables())
  return run, first + _Train(run, position, 4)[0], variables, position


# ---- a task without a pipeline -------------------------------------------------------------------


def testATaskWithoutAPipelineTrains():
  p = _LinearParams()
  assert task_cut.NumDevices(p.Instantiate()) == 1
  run = _Runner(p)
  assert run.cut.ends == (1,)
  before = _Arrays(run.Variables())
  assert set(before) == {
    'linear.w',
    'linear.b',
    'linear.scale',
    'linear.fixed',
    'learner/iterations',
    'global_step',
  }
  losses, _ = _Train(run, 0, 25)
  assert np.mean(losses[-5:]) < 0.5 * losses[0]
  after = _Arrays(run.Variables())
  for name in ('linear.w', 'linear.b', 'linear.scale'):
    assert not np.array_equal(after[name], before[name]), name
  assert after['linear.fixed'] == before['linear.fixed']
  assert after['global_step'] == after['learner/iterations'] == 25


def testOneStepByHand():
  """Metrics, gradient norm and new weights of a step follow the formulas."""
  run = _Runner(_LinearParams(rate=0.25))
  batch = next(iter(_Input().Dataset()))
  variables = run.Variables()
  w, b = (tf.constant(variables[f'linear.{name}'].numpy()) for name in 'wb')
  scale = tf.constant(1.0)
  with tf.GradientTape() as tape:
    tape.watch([w, b, scale])
    predictions = (batch.inputs @ w + b) * scale * 2.0
    errors = tf.reduce_mean((predictions - batch.targets) ** 2, axis=-1)
    loss = tf.reduce_mean(errors)
  grads = tape.gradient(loss, [w, b, scale])

  values = run.TrainStep(batch)
  assert values == {
    'loss': pytest.approx(float(loss), rel=1e-5),
    'close': pytest.approx(float(np.mean(errors.numpy() < 0.5)), rel=1e-5),
    'mean': pytest.approx(float(tf.reduce_mean(predictions)), rel=1e-4),
    'loss_weight': _BATCH,
    'learning_rate': 0.25,
    'grad_norm': pytest.approx(float(tf.linalg.global_norm(grads)), rel=1e-5),
    'grad_scale': 1.0,
    'is_finite': 1.0,
    'num_skipped_steps': 0.0,
  }
  for name, value, grad in zip(('w', 'b', 'scale'), (w, b, scale), grads, strict=True):
    np.testing.assert_allclose(
      variables[f'linear.{name}'].numpy(), value - 0.25 * grad, rtol=1e-5, atol=1e-6
    )
    gradient = run.Gradients(values['loss_weight'])[f'linear.{name}']
    np.testing.assert_allclose(gradient, grad, rtol=1e-5, atol=1e-6)
  assert int(run.global_step) == 1


def testAnEvalRunnerMakesNoTrainingState():
  run = _Runner(_PipelinedParams(), eval_runner.EvalRunner)
  assert set(run.Variables()) == {*run.task.VariablesByPath(), 'global_step'}
  assert all(not s.accumulators for s in run.engine.stages)
  result = run.Evaluate(_Input(shuffle=False, num_epochs=1).Dataset())
  assert math.isfinite(result['loss'][0])
  assert all(not s.accumulators for s in run.engine.stages)


def testATaskWithoutALossIsRefused():
  class NoLoss(measured.Linear):
    def ComputeLoss(self, theta, predictions, input_batch):
      return {'error': (tf.constant(0.0), tf.constant(1.0))}, {}

  run = _Runner(NoLoss.Params().Set(name='linear'))
  with pytest.raises(ValueError, match=naming.Naming("'loss'", "['error']")):
    run.TrainStep(next(iter(_Input().Dataset())))


def testCheckBatchRunsBeforeEachStep():
  class Picky(measured.Linear):
    def CheckBatch(self, input_batch):
      if float(tf.reduce_max(input_batch.inputs)) > 100:
        raise ValueError('inputs must be at most 100')

  run = _Runner(Picky.Params().Set(name='linear'))
  batch = next(iter(_Input().Dataset()))
  run.TrainStep(batch)
  before = _Arrays(run.Variables())
  bad = batch.Transform(lambda x: x * 1000)
  with pytest.raises(ValueError, match='at most 100'):
    run.TrainStep(bad)
  with pytest.raises(ValueError, match='at most 100'):
    run.Evaluate([bad])
  for name, value in _Arrays(run.Variables()).items():
    np.testing.assert_array_equal(value, before[name])


# ---- a pipelined task ----------------------------------------------------------------------------


def testAPipelinedTaskTrains():
  run = _Runner(_PipelinedParams(keep_prob=1.0))
  assert task_cut.NumDevices(run.task) == 2
  before = _Arrays(run.Variables())
  losses, _ = _Train(run, 0, 40)
  assert np.mean(losses[-5:]) < 0.6 * losses[0]
  for name, value in _Arrays(run.Variables()).items():
    assert not np.array_equal(value, before[name]), name
  devices = {v.device for v in run.task.VariablesByPath().values()}
  assert len(devices) == 2


@pytest.mark.parametrize('num_stages', [2, 4])
def testLossesDoNotDependOnTheCut(num_stages):
  np.testing.assert_allclose(_Trained(num_stages)[1], _Trained(1)[1], rtol=1e-4)


def testSeveralLearnersDoNotDependOnTheCut():
  losses = []
  for num_stages in (1, 2):
    p = _PipelinedParams(num_stages)
    lower = p.train.learner.Copy().Set(name='lower', bprop_variable_filter=r'layers\[[0-2]\]')
    upper = p.train.learner.Copy().Set(
      name='upper',
      bprop_variable_exclusion=r'layers\[[0-2]\]',
      optimizer=optimizer.SGD.Params().Set(momentum=0.9),
    )
    p.train.learner = [lower, upper]
    run = _Runner(p)
    losses.append(_Train(run, 0, 4)[0])
    assert {name for name in run.Variables() if name.startswith('learner/')} == {
      'learner/iterations'
    }
  np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
  assert not np.allclose(losses[0], _Trained(1)[1][:4], rtol=1e-3)


@pytest.mark.parametrize('name', ['fprop_dtype', 'dtype'])
def testFloat16IsEvaluatedButNotTrained(name):
  p = _PipelinedParams().Set(**{name: 'float16'})
  with pytest.raises(ValueError, match=Naming('float16', 'bfloat16', 'PipelinedModel')):
    _Runner(p)
  _Runner(p, eval_runner.EvalRunner)


def testTheComparisonCouldFail():
  """Dropout masks are drawn per micro-batch, so another M gives other losses."""
  assert not np.allclose(_Trained(1, num_micro_batches=4)[1], _Trained(1)[1], rtol=1e-3)


def testCutTaskAllocatesNothing():
  p = _PipelinedParams(4).Instantiate()
  cut = task_cut.CutTask(p, _Input().BatchSpec())
  assert len(cut.stages) == 4
  assert sum(s.num_params for s in cut.stages) == p.NumParams()
  with pytest.raises(ValueError, match=naming.Naming('net', 'InstantiateVariables()')):
    _ = p.vars


def testLossWeightMustAgree():
  class Wrong(measured.Pipelined):
    def LossWeight(self, input_batch):
      return tf.constant(5.0)

  p = Wrong.Params().Set(name='net')
  p.stack.Set(num_micro_batches=2)
  run = _Runner(p)
  with pytest.raises(ValueError) as e:
    run.TrainStep(next(iter(_Input().Dataset())))
  assert re.search(r'\bWrong\.LossWeight\D+10\b.*\bWrong\.ComputeLoss\D+8\b', str(e.value))


def testLossWeightMustAgreeInEachStep():
  """Later steps compare them, too, not only the first step."""

  class OfFull(measured.Pipelined):
    def LossWeight(self, input_batch):
      return tf.constant(4.0)

  p = OfFull.Params().Set(name='net')
  p.stack.Set(num_micro_batches=2)
  run = _Runner(p)
  batch = next(iter(_Input().Dataset()))
  run.TrainStep(batch)
  batch.example_weights *= 0.5
  with pytest.raises(ValueError, match=Naming('OfFull.LossWeight', 8, 4)):
    run.TrainStep(batch)


def testGlobalStepCountsSkippedStepsToo():
  run = _Trained(2)[0]
  batch = next(iter(_Input().Dataset()))
  run.TrainStep(batch)
  before = _Arrays(run.Variables())
  bad = nested_map.NestedMap(batch)
  bad.targets = batch.targets * np.inf
  values = run.TrainStep(bad)
  assert (values['is_finite'], values['grad_scale']) == (0.0, 0.0)
  assert values['num_skipped_steps'] == 1.0
  after = _Arrays(run.Variables())
  assert after.pop('global_step') == before.pop('global_step') + 1
  for name, value in after.items():
    np.testing.assert_array_equal(value, before[name], err_msg=name)
  assert run.TrainStep(batch)['is_finite'] == 1.0


def testABatchOfPaddingChangesNothing():
  run = _Trained(2)[0]
  batch = next(iter(_Input().Dataset()))
  run.TrainStep(batch)
  before = _Arrays(run.Variables())
  empty = nested_map.NestedMap(batch)
  empty.example_weights = tf.zeros_like(batch.example_weights)
  values = run.TrainStep(empty)
  assert (values['loss'], values['loss_weight'], values['is_finite']) == (0.0, 0.0, 1.0)
  after = _Arrays(run.Variables())
  assert after.pop('global_step') == before.pop('global_step') + 1
  for name, value in after.items():
    np.testing.assert_array_equal(value, before[name], err_msg=name)


def testWeightsOutsideThePipelineAreAnError():
  """They would be counted and saved, but never trained."""

  class Outside(measured.Pipelined):
    def __init__(self, params):
      super().__init__(params)
      self.CreateChild('extra', linear.LinearLayer.Params().Set(input_dim=2, output_dim=2))

  with pytest.raises(ValueError, match=naming.Naming('Outside', 'net.extra.w')):
    _Runner(Outside.Params().Set(name='net'))
  # They are allowed if they are not trained, or if nothing is.
  p = Outside.Params().Set(name='net')
  p.train.learner.bprop_variable_exclusion = r'\.extra\.'
  _Runner(p)
  run = _Runner(Outside.Params().Set(name='net'), eval_runner.EvalRunner)
  assert 'net.extra.w' in run.Variables()


@pytest.mark.parametrize('name', ['bprop_variable_exclusion', 'weight_decay_exclusion'])
@pytest.mark.parametrize('p', [_LinearParams(), _PipelinedParams()], ids=['one stage', 'pipelined'])
def testAPatternWithoutAMatchIsAnError(name, p):
  """A weight that should be frozen would be trained."""
  p = p.Copy()
  p.train.learner.Set(**{name: '^shared'})
  path = 'linear.w' if p.name == 'linear' else 'net.stack.layers[0].w'
  with pytest.raises(ValueError, match=Naming(name, "'^shared'", path)):
    _Runner(p)


@pytest.mark.parametrize(
  'name, num_accumulated',
  [
    ('loss_weight', 1),
    ('grad_norm', 2),
    ('learning_rate/encoder', 1),
    ('steps', 2),
    ('examples_per_second', 1),
  ],
)
def testAMetricCannotHaveTheNameOfAStatistic(name, num_accumulated):
  class Named(measured.Linear):
    def ComputeLoss(self, theta, predictions, input_batch):
      metrics, per_example = super().ComputeLoss(theta, predictions, input_batch)
      return {**metrics, name: metrics['close']}, per_example

  p = Named.Params().Set(name='linear')
  p.train.learner.num_accumulated_mini_batches = num_accumulated
  run = _Runner(p)
  before = _Arrays(run.Variables())
  with pytest.raises(ValueError, match=Naming('Named.ComputeLoss', name)):
    run.TrainStep(next(iter(_Input().Dataset())))
  for path, value in _Arrays(run.Variables()).items():
    np.testing.assert_array_equal(value, before[path])


# ---- evaluation ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'p', [_LinearParams(), _PipelinedParams(2, 3)], ids=['one stage', 'pipelined']
)
def testEvaluateIsTheMeanOverAllExamples(p):
  """13 examples in batches of 8: the last batch is padded, its last micro-batch completely."""
  run = _Runner(p)
  data = {'shuffle': False, 'num_epochs': 1}
  small = _Input(**data).params.Copy().Set(num_examples=13).Instantiate()
  result = run.Evaluate(small.Dataset())

  whole = small.params.Copy().Set(batch_size=13).Instantiate()
  batch = next(iter(whole.Dataset()))
  if run.task.pipeline is None:
    predictions = run.task.FPropDefaultTheta(batch)
    expected, _ = run.task.ComputeLoss(run.task.theta, predictions, batch)
  else:
    x = batch.inputs
    for layer in run.task.pipeline.layers:
      x = layer(x)
    expected, _ = measured.Metrics(x, batch)
  assert result.keys() == expected.keys()
  for name, (value, weight) in expected.items():
    assert result[name][0] == pytest.approx(float(value), rel=1e-5), name
    assert result[name][1] == float(weight)


def testEvaluatingTwiceGivesEqualMetricsAndChangesNothing():
  run = _Trained(2)[0]
  before = _Arrays(run.Variables())
  data = _Input(shuffle=False, num_epochs=1).Dataset()
  assert run.Evaluate(data) == run.Evaluate(data)
  assert run.Evaluate([]) == {}
  for name, value in _Arrays(run.Variables()).items():
    np.testing.assert_array_equal(value, before[name])


# ---- signs of life -------------------------------------------------------------------------------


def _Beats(monkeypatch, calls):
  """Records the heartbeats of each call."""
  read, write = os.pipe()
  monkeypatch.setattr(heartbeat, '_descriptor', write)
  beats = []
  for call in calls:
    call()
    os.write(write, b'|')
    beats.append(os.read(read, 100).rstrip(b'|'))
  monkeypatch.undo()
  os.close(read)
  os.close(write)
  return beats


def testAStepSendsHeartbeatsAtItsStartAndEnd(monkeypatch):
  batch = next(iter(_Input().Dataset()))
  run = _Runner(_LinearParams())
  # Tracing and compiling take long: the first step, and the first batch of an evaluation.
  steps = [lambda: run.TrainStep(batch)] * 3
  assert _Beats(monkeypatch, steps) == [b'lt', b'Tt', b'Tt']
  assert _Beats(monkeypatch, [lambda: run.Evaluate([batch, batch])] * 2) == [b'VlvVv', b'VvVv']
  assert _Beats(monkeypatch, steps[:1]) == [b'Tt']


def testWaitingForABatchOfWorkersSendsHeartbeats(monkeypatch):
  run = _Runner(_PipelinedParams(), eval_runner.EvalRunner)
  read = run.placement.Pass(_Input(), 0)()
  assert _Beats(monkeypatch, [lambda: next(read)] * 3) == [b'r', b'Rr', b'Rr']


def testABatchIsReadAheadAndItsErrorIsRaisedInItsTurn(monkeypatch):
  third, number = threading.Event(), itertools.count(1)

  def Check(self, batch):
    del self, batch
    if next(number) == 3:
      third.set()
      raise ValueError('of the third')

  monkeypatch.setattr(measured.Pipelined, 'CheckBatch', Check)
  run = _Runner(_PipelinedParams(), eval_runner.EvalRunner)
  read = run.placement.Pass(_Input(), 0)()
  next(read)
  assert next(number) == 2  # The first batch decides whether workers can read.
  number = itertools.count(2)
  next(read)
  assert third.wait(60)
  with pytest.raises(ValueError, match='of the third'):
    next(read)


def testAMiniBatchOfAnUpdateSendsAHeartbeat(monkeypatch):
  p = _LinearParams()
  p.train.learner.num_accumulated_mini_batches = 2
  batch, run = next(iter(_Input().Dataset())), _Runner(p)
  beats = _Beats(monkeypatch, [lambda: run.TrainStep(batch)] * 4)
  assert beats == [b'll', b't', b'Tl', b'Tt']


# ---- continuation --------------------------------------------------------------------------------


@pytest.mark.parametrize('num_stages', [1, 4])
def testACheckpointContinuesWithAnotherCut(num_stages, tmp_path):
  """Weights, slots, step, number of updates and position of the data are restored."""
  _, losses, variables, position = _Trained(2)
  checkpoints = checkpointer.Checkpointer(tmp_path)
  checkpoints.Save(4, variables, {'examples_consumed': position})

  other = _Trained(num_stages)[0]
  _Train(other, 24, 2)  # The restored values must replace all of these.
  restored = checkpoints.RestoreLatest(other.Variables())
  assert restored is not None
  other.AfterRestore()
  assert int(other.global_step) == 4
  second, end = _Train(other, restored[1]['examples_consumed'], 4)
  np.testing.assert_allclose(second, losses[4:], rtol=1e-5)
  assert end == 8 * _BATCH

  assert 'net.stack.layers[0].w/momentum' in variables
  assert set(other.Variables()) == set(variables)


def testAfterRestoreDoesNothingInEvaluation():
  _Runner(_LinearParams(), eval_runner.EvalRunner).AfterRestore()


def testTheLearnersParamsAreTheTasks():
  p = _LinearParams(rate=0.125)
  run = _Runner(p)
  (only,) = run.learner.learners
  assert isinstance(only, learner.Learner)
  assert only.params == p.train.learner


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
