# SPDX-License-Identifier: Apache-2.0
"""An error that ends the training names the step and a remedy."""

import re
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.checkpoint import checkpointer
from lingvo_gpipe.core import hyperparams
from lingvo_gpipe.experiment import registry
from lingvo_gpipe.pipeline import pipelining_layer
from lingvo_gpipe.reporting import run_report
from lingvo_gpipe.runners import failure_notes
from tests import naming, processes
from tests.toys import training


@pytest.mark.parametrize(
  'error',
  [
    tf.errors.ResourceExhaustedError(None, None, 'OOM when allocating tensor with shape[3,4]'),
    tf.errors.ResourceExhaustedError(None, None, 'failed to allocate memory'),
    tf.errors.InternalError(None, None, 'RESOURCE_EXHAUSTED: Out of memory while trying'),
    MemoryError(),
  ],
)
def testRemediesIfMemoryRunsOut(error):
  params = registry.GetParams(processes.MODEL, 'Train')
  with pytest.raises(type(error)), failure_notes.Hints(params):
    raise error
  (hint,) = error.__notes__
  assert naming.Names(hint, 'memory', 'num_micro_batches of task.stack')


def _Model(**tasks):
  """Params of a model of these tasks."""
  p = hyperparams.Params()
  p.Define('task_params', hyperparams.Params(), '')
  for name, task_params in tasks.items():
    p.task_params.Define(name, task_params, '')
  return p


def testTheHintNamesThePipelineAtAnyPath():
  task = training.Params().task
  within = hyperparams.Params()
  within.Define('pipe', pipelining_layer.PipeliningLayer.Params(), '')
  other = task.Copy()
  other.Define('decoder', within, '')
  for params, where in (
    (_Model(one=task, two=other), 'task_params.two.decoder.pipe'),
    (_Model(a=other, b=other), 'task_params.a.decoder.pipe and task_params.b.decoder.pipe'),
    (_Model(one=task), 'a PipeliningLayer'),
  ):
    with pytest.raises(MemoryError) as e, failure_notes.Hints(params):
      raise MemoryError
    assert naming.Names(e.value.__notes__[0], f'num_micro_batches of {where}')


@pytest.mark.parametrize(
  'error',
  [
    ValueError('out of bounds'),
    tf.errors.InvalidArgumentError(None, None, 'ROOM'),
    tf.errors.ResourceExhaustedError(None, None, 'x; No space left on device'),
    tf.errors.ResourceExhaustedError(None, None, 'x; Disk quota exceeded'),
    tf.errors.ResourceExhaustedError(None, None, 'x; Too many open files'),
  ],
)
def testOtherErrorsGetNoHint(error):
  with pytest.raises(type(error)), failure_notes.Hints(hyperparams.Params()):
    raise error
  assert not hasattr(error, '__notes__')


def testTheNoteNamesTheCheckpointOfTheNextCall(tmp_path):
  saved = checkpointer.Checkpointer(tmp_path)
  error = ValueError()
  failure_notes.AddNotes(error, 7, saved)
  for step in (2, 4):
    saved.Save(step, {'v': tf.Variable(0.0)}, {})
  failure_notes.AddNotes(error, 5, saved)
  first, second = error.__notes__
  assert naming.Names(first, 'step 7', 'over') and 'checkpoint' not in first
  assert naming.Names(second, 'step 5', 'checkpoint of step 4')


def testALossThatIsNotFiniteEndsTheTrainingAndNamesTheLastCheckpoint(tmp_path, monkeypatch, capsys):
  """Its gradients are finite, so the steps are applied and counted."""
  compute = training.Regression.ComputeLoss

  def Infinite(self, *args):
    metrics, per_example = compute(self, *args)
    return {'loss': (metrics['loss'][0] + np.inf, metrics['loss'][1])}, per_example

  monkeypatch.setattr(training.Regression, 'ComputeLoss', Infinite)
  params = training.Params(max_nonfinite_steps=3, save_interval_steps=1)
  assert training.Program(tmp_path, params).Run() == 1
  output = capsys.readouterr()
  assert re.search('^step 2: .*loss.*applied$', output.out, re.MULTILINE)
  first, last = output.err.splitlines()
  assert naming.Names(first, 'step 3', '3 steps', 'finite')
  assert naming.Names(last, 'step 3', 'checkpoint of step 2')


def testWeightsThatAreNotFiniteReachNoCheckpoint(tmp_path, caplog, capsys):
  p = training.Params(save_interval_steps=1, save_max_to_keep=2, max_steps=8)
  p.task.train.learner.Set(learning_rate=1e20, skip_nonfinite=False)
  assert training.Program(tmp_path, p).Run() == 1
  assert naming.AnyLineNames(capsys.readouterr().out, 'step 8', 'no checkpoint')
  assert run_report.FinishedStep(str(tmp_path)) is None
  last = processes.Steps(tmp_path)[-1]
  assert last < 8
  weights = processes.Tensors(tmp_path, last)
  assert all(np.isfinite(weights[f'toy.{name}']).all() for name in 'wb')
  assert any(re.search(rf'step {last + 1}: toy\.', message) for message in caplog.messages)


def testAStepThatCannotBeRepeatedHidesNoMessage(tmp_path, monkeypatch, capsys):
  compute = training.Regression.ComputeLoss

  def NotANumber(self, *args):
    metrics, per_example = compute(self, *args)
    return {'loss': (metrics['loss'][0] * np.nan, metrics['loss'][1])}, per_example

  def Fail(self, *data):
    raise MemoryError('none left')

  monkeypatch.setattr(training.Regression, 'ComputeLoss', NotANumber)
  monkeypatch.setattr('lingvo_gpipe.runners.train_runner.TrainRunner.WhyNotFinite', Fail)
  assert training.Program(tmp_path, training.Params(max_nonfinite_steps=1)).Run() == 1
  lines = capsys.readouterr().err.splitlines()
  assert naming.Names(lines[0], 'step 1', '1 steps', 'finite')


def testACheckpointDirectoryThatCannotBeReadHidesNoError(tmp_path):
  (tmp_path / 'file').write_text('')
  error = ValueError('mine')
  saved = checkpointer.Checkpointer(tmp_path / 'file' / 'train')
  failure_notes.AddNotes(error, 5, saved)
  assert naming.Names(error.__notes__[0], 'step 5')


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
