# SPDX-License-Identifier: Apache-2.0
"""Checkpoint, run and weights that the evaluator takes, and its end."""

import json
import re
import shutil
import signal
import sys

import pytest

from lingvo_gpipe.checkpoint import checkpointer, logdir_lock
from lingvo_gpipe.core import heartbeat
from lingvo_gpipe.distributed import stop_request
from lingvo_gpipe.evaluation import eval_program
from lingvo_gpipe.training import export
from tests import naming, processes
from tests.toys import training


def _Params(more='', **train):
  return training.Params(more, **{'save_interval_steps': 4, 'max_steps': 10, **train})


def _Other(more=''):
  """Returns Params of another model whose weights would fit."""
  params = _Params(more)
  params.task.Define('activation', 'RELU', '')
  params.task.activation = 'TANH'
  return params


def _Lines(logdir, jobname='eval_test'):
  text = (logdir / jobname / 'metrics.jsonl').read_text()
  return {line['step']: line['values'] for line in map(json.loads, text.splitlines())}


@pytest.fixture(scope='module')
def followed(tmp_path_factory):
  """A run in which a higher loss is better: of steps 2, 6 and 10 the first is the best."""
  logdir = tmp_path_factory.mktemp('followed')
  params = _Params(eval_datasets=['Dev', 'Test'], eval_interval_steps=2)
  params.task.train.early_stop.Set(metric='loss', minimize=False)
  training.Train(logdir, params, job='train_and_eval')
  assert processes.Steps(logdir) == [2, 6, 10]
  return logdir


@pytest.fixture
def run(followed, tmp_path):
  """A copy of that run without its evaluations."""
  shutil.copytree(followed, tmp_path, dirs_exist_ok=True)
  shutil.rmtree(tmp_path / 'eval_test')
  return tmp_path


def _Damage(logdir, step):
  for path in (logdir / 'train').glob(f'ckpt-{step:08d}-*/*data*'):
    path.write_bytes(b'')


def _FlipABit(logdir, step):
  (path,) = (logdir / 'train').glob(f'ckpt-{step:08d}-*/*data*')
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


@pytest.mark.parametrize('checkpoint, step', [('last', 10), ('best', 2), ('6', 6)])
def testTheChosenCheckpointIsEvaluatedAndExported(followed, run, checkpoint, step):
  """It evaluates only this checkpoint, although training has not ended."""
  (run / 'report.json').unlink()
  evaluator = training.Evaluator(run, _Params(), checkpoint=checkpoint)
  assert evaluator.Run(once=checkpoint == 'last') == 0
  trained = (followed / 'metrics.jsonl').read_text().splitlines()
  lines = [line for line in map(json.loads, trained) if line['split'] == 'eval_test']
  expected = {line['step']: line['values'] for line in lines}
  assert _Lines(run) == {step: expected[step]}
  done = export.Export(_Params(), str(run), checkpoint=checkpoint)
  assert done.step == step and done.directory == str(run / 'export' / str(step))


def testAMissingCheckpointIsReportedBeforeWeightsAreMade(run, monkeypatch):
  params = _Params()
  message = naming.Naming('step 7', run / 'train', 'step 2, step 6, step 10')
  with monkeypatch.context() as patched, pytest.raises(ValueError, match=message):
    patched.setattr(eval_program.multi_task_runner, 'MakeEvaluated', None)
    training.Evaluator(run, params, checkpoint='7')
  with pytest.raises(ValueError, match=message):
    export.Export(params, str(run), checkpoint='7')


def testARunOfAnotherModelIsRefused(run, caplog):
  """Its weights fit; Params that affect only training may differ."""
  other = _Other('task.train.learner.learning_rate:0.5;input.batch_size:3')
  for make in (training.Evaluator, lambda d, p, **more: export.Export(p, str(d), **more)):
    with pytest.raises(
      ValueError, match=naming.Naming('ckpt-00000010.json', "+ task.activation : 'TANH'")
    ):
      make(run, other)
    make(run, other, allow_params_change=True)
    assert "+ task.activation : 'TANH'" in caplog.text
    assert 'learning_rate' not in caplog.text
    caplog.clear()


def testParamsOfLaterCheckpointsAreCompared(followed, tmp_path):
  """The evaluator may start before the trainer."""
  evaluator = training.Evaluator(tmp_path, _Other())
  shutil.copytree(followed, tmp_path, dirs_exist_ok=True)
  with pytest.raises(ValueError, match=naming.Naming('ckpt-00000010.json', '+ task.activation')):
    evaluator.Run()


def testATemporarilyUnreadableDirectoryIsReadAgain(run, monkeypatch, caplog):
  """Training has ended; finding, listing and restoring fail in turn."""
  evaluator = training.Evaluator(run, _Params())
  failing = [
    (checkpointer.Checkpointer, 'Latest'),
    (checkpointer.Checkpointer, 'All'),
    (eval_program.ema, 'Restore'),
  ]
  for place, name in failing:
    _FailOnce(monkeypatch, place, name)
  monkeypatch.setattr(eval_program, '_Wait', lambda seconds, stop: None)
  assert evaluator.Run() == 0
  assert list(_Lines(run)) == [10]
  for _, name in failing:
    assert naming.AnyLineNames(caplog.text, f'no route to {name}', 'again')


def _FailOnce(monkeypatch, place, name):
  function, failures = getattr(place, name), [OSError(f'no route to {name}')]

  def Call(*args, **kwargs):
    if failures:
      raise failures.pop()
    return function(*args, **kwargs)

  monkeypatch.setattr(place, name, Call)


@pytest.mark.parametrize('trained, evaluated', [(0.9, 0.0), (0.9, 0.9), (0.0, 0.9)])
def testTheCheckpointDecidesWhetherAveragesAreUsed(tmp_path, capsys, trained, evaluated):
  train = {'eval_datasets': ['Test'], 'eval_interval_steps': 100}
  training.Train(tmp_path, _Params(ema_decay=trained, **train))
  params = _Params(ema_decay=evaluated)
  expected = json.loads((tmp_path / 'report.json').read_text())['passes']['eval_test']['values']
  capsys.readouterr()
  assert training.Evaluator(tmp_path, params).Run() == 0
  assert _Lines(tmp_path) == {10: expected}
  kind = 'moving averages of 2 weights' if trained else 'weights'
  line = capsys.readouterr().out.splitlines()[3]
  assert naming.Names(line, 'eval_test', f'the {kind}')
  assert naming.Names(line, 'train.ema_decay') == (trained != evaluated)
  done = export.Export(params, str(tmp_path))
  assert naming.AnyLineNames(done.Text(), 'exported', f'the {kind}', 'step 10')
  # Training cannot resume with this change.
  if trained != evaluated:
    with pytest.raises(
      ValueError,
      match=naming.Naming('task.train.ema_decay', trained, evaluated, 'ckpt-00000010.json'),
    ):
      training.Program(tmp_path, params, allow_params_change=True)


def testTheEvaluatorsSampleEqualsTheTrainers(followed, run, capsys):
  assert training.Evaluator(run, _Params()).Run(once=True) == 0
  samples = processes.Tensorboard(run / 'eval_test')['sample/said']
  trained = processes.Tensorboard(followed / 'eval_test')['sample/said']
  assert samples == trained[-1:] and samples[0][0] == 10
  assert '\n--- said\n' in capsys.readouterr().out
  # Decoding has its own file.
  assert training.Evaluator(run, _Params(), job='decode').Run(once=True) == 0
  assert 'sample/said' not in processes.Tensorboard(run / 'decode_test')


def testTheNextProcessRepeatsNoWork(run, monkeypatch, capsys):
  """The next process knows the finished work; with --once it also knows the checkpoint."""
  progress = eval_program.EvalProgress()

  def Evaluator(checkpoint='last'):
    return training.Evaluator(run, _Params(), progress=progress, checkpoint=checkpoint)

  with monkeypatch.context() as patched:
    patched.setattr(training.Regression, 'Decode', lambda *_: 1 / 0)
    for _ in range(2):  # The second process has the result.
      with pytest.raises(ZeroDivisionError):
        Evaluator('best').Run()
  assert (progress.step, progress.total, progress.finished) == (2, 1, -1)
  assert Evaluator().Run(once=True) == 0
  assert Evaluator().Run(once=True) == 0
  assert (progress.step, progress.total, progress.finished) == (2, 2, 2)
  assert capsys.readouterr().out.count('Test at step ') == 1
  # A process that follows continues with the newest checkpoint.
  for _ in range(2):
    assert Evaluator().Run() == 0
  assert [*_Lines(run)] == [2, 10]
  summaries = processes.Tensorboard(run / 'eval_test')
  assert (
    [step for step, _ in summaries['loss']]
    == [step for step, _ in summaries['sample/said']]
    == [2, 10]
  )


def testWaitingForACheckpointSendsAHeartbeat(monkeypatch):
  signs = []
  monkeypatch.setattr(heartbeat, 'SuspendTimeout', lambda: signs.append('long'))
  eval_program._Wait(0.0, stop_request.StopRequest())
  assert signs


@pytest.mark.parametrize('limit', [3, 4, 5])
def testSamplesPerSummaryLimitsTheExamples(run, limit):
  """The metrics equal the metrics of a data set of this size, not of whole batches of 4."""
  cut = _Params(f'task.eval.samples_per_summary:{limit}')
  assert training.Evaluator(run, cut).Run(once=True) == 0
  metrics = _Lines(run)[10]
  evaluator = training.Evaluator(run, _Params())
  small = training.Input('Test').Set(num_examples=limit, shuffle=False, num_epochs=1)
  evaluator._jobs[0]._input = small.Instantiate()
  assert evaluator.Run(once=True) == 0
  assert metrics == pytest.approx(_Lines(run)[10], rel=1e-6)


# --- following ---


def _Hide(logdir, *steps):
  """Hides commit files; returns a function that restores some of them."""
  hidden = logdir / 'hidden'
  hidden.mkdir()
  for step in steps:
    (logdir / 'train' / f'ckpt-{step:08d}.json').rename(hidden / str(step))

  def Show(*steps):
    for step in steps:
      (hidden / str(step)).rename(logdir / 'train' / f'ckpt-{step:08d}.json')

  return Show


def _Skipped(caplog):
  messages = [r.getMessage() for r in caplog.records]
  return [message for message in messages if naming.Names(message, 'skipped', 'checkpoints')]


@pytest.mark.parametrize('is_removed', [False, True])
def testSkippedCheckpointsAreLoggedOnce(run, monkeypatch, caplog, is_removed):
  show = _Hide(run, 6, 10)
  caplog.set_level('INFO', logger='absl')
  evaluator = training.Evaluator(run, _Params())
  evaluate = evaluator._jobs[0].Run

  def Run(step):
    if step == 2:
      assert not _Skipped(caplog)
      show(6, 10)
      if is_removed:
        (run / 'train' / 'ckpt-00000002.json').unlink()
    return evaluate(step)

  monkeypatch.setattr(evaluator._jobs[0], 'Run', Run)
  assert evaluator.Run() == 0
  assert list(_Lines(run)) == [2, 10]
  (message,) = _Skipped(caplog)
  assert naming.Names(message, 'eval_test') and re.search(r'\bstep 6\b.*\bstep 10\b', message)
  assert not naming.Names(message, 'step 2')
  assert naming.Names(message, 'removed') == is_removed


def testEarlierCheckpointsAreLoggedAsSkipped(run, caplog):
  caplog.set_level('INFO', logger='absl')
  assert training.Evaluator(run, _Params()).Run() == 0
  (message,) = _Skipped(caplog)
  assert naming.Names(message, 'step 2, step 6', 'step 10')
  caplog.clear()
  assert training.Evaluator(run, _Params()).Run(once=True) == 0
  assert not _Skipped(caplog)  # Only the last checkpoint was requested.


def testADamagedFirstCheckpointIsSkipped(run, monkeypatch, caplog):
  """The evaluator waits for the next checkpoint."""
  _FlipABit(run, 2)
  show = _Hide(run, 6, 10)
  caplog.set_level('INFO', logger='absl')
  waits = iter([(), (6, 10)])
  monkeypatch.setattr(eval_program, '_Wait', lambda *args: show(*next(waits)))
  (run / 'report.json').rename(run / 'report')

  def Evaluate(step):
    (run / 'report').rename(run / 'report.json')
    return evaluate(step)

  evaluator = training.Evaluator(run, _Params())
  evaluate = evaluator._jobs[0].Run
  monkeypatch.setattr(evaluator._jobs[0], 'Run', Evaluate)
  assert evaluator.Run() == 0
  assert list(_Lines(run)) == [10]
  messages = [r.getMessage() for r in caplog.records]
  (message,) = [message for message in messages if naming.Names(message, 'damaged')]
  assert 'ckpt-00000002-' in message and naming.Names(message, 'Skipping', 'checkpoint')
  # The damaged one is not among the skipped ones.
  (message,) = _Skipped(caplog)
  assert naming.Names(message, 'step 6') and 'step 2' not in message


def testNoReadableCheckpointIsAnError(run):
  """This holds with --once, and when following a training that has ended."""
  for step in (2, 6, 10):
    _FlipABit(run, step)
  for once in (True, False):
    with pytest.raises(
      checkpointer.DamagedError,
      match=naming.Naming('3 checkpoints', 'ckpt-00000010', 'ckpt-00000006'),
    ):
      training.Evaluator(run, _Params()).Run(once=once)


def testDoesNotWaitForADamagedLastCheckpoint(run, monkeypatch, caplog):
  _Damage(run, 10)
  monkeypatch.setattr(eval_program, '_Wait', lambda *args: pytest.fail('it waits for more'))
  assert training.Evaluator(run, _Params()).Run() == 0
  assert list(_Lines(run)) == [6]
  messages = [r.getMessage() for r in caplog.records]
  (message,) = [message for message in messages if naming.Names(message, 'training', 'ended')]
  assert naming.Names(message, 'step 10', 'step 6')


def testTheReportOfAnEarlierCallDoesNotCountDuringTraining(run, monkeypatch):
  held = logdir_lock.HoldLock(str(run / 'train'))
  held.__enter__()
  waits = []

  def Wait(seconds, stop):
    waits.append(seconds)
    if len(waits) == 3:
      held.__exit__(None, None, None)

  monkeypatch.setattr(eval_program, '_Wait', Wait)
  assert training.Evaluator(run, _Params()).Run() == 0
  assert len(waits) == 3 and list(_Lines(run)) == [10]


def testFollowsARunThatReplacesTheFirst(run, monkeypatch):
  """Another training replaces the run while the evaluator follows it."""
  (run / 'report.json').unlink()

  def Wait(*unused_args):
    shutil.rmtree(run / 'train')
    training.Train(run, _Params(max_steps=4))

  monkeypatch.setattr(eval_program, '_Wait', Wait)
  assert training.Evaluator(run, _Params()).Run() == 0
  assert list(_Lines(run)) == [10, 4]


def testTheTrainersMaxStepsDecidesTheEnd(run, monkeypatch):
  """The trainer has more steps."""
  saved = checkpointer.Checkpointer(run / 'train').All()
  coming = iter(saved)
  monkeypatch.setattr(
    checkpointer.Checkpointer, 'Latest', lambda self: next(coming, None) or saved[-1]
  )
  assert training.Evaluator(run, _Params(max_steps=3)).Run() == 0
  assert list(_Lines(run)) == [2, 6, 10]


def testDoesNotWaitIfTrainingEndedWithoutACheckpoint(run):
  shutil.rmtree(run / 'train')
  with pytest.raises(ValueError, match=naming.Naming('step 10', 'no checkpoint', run / 'train')):
    training.Evaluator(run, _Params()).Run()


@pytest.mark.parametrize('remaining', ['checkpoints', 'nothing'])
def testGivesUpIfNoProcessTrains(run, monkeypatch, capsys, remaining):
  """It evaluates the existing checkpoints first, and waits while a process holds the directory."""
  (run / 'report.json').unlink()  # The trainer failed, or never started.
  if remaining == 'nothing':
    shutil.rmtree(run / 'train')
  clock, waits = [0.0], []
  held = logdir_lock.HoldLock(str(run / 'train'))

  def Wait(seconds, stop):
    waits.append(seconds)
    clock[0] += seconds
    if len(waits) == 10:
      held.__enter__()
    elif len(waits) == 30:
      held.__exit__(None, None, None)

  monkeypatch.setattr(eval_program, '_Wait', Wait)
  monkeypatch.setattr(logdir_lock.time, 'monotonic', lambda: clock[0])
  params = _Params('task.eval.max_seconds_without_trainer:300', max_steps=20)
  assert training.Evaluator(run, params).Run() == 1
  assert 30 * 20 + 300 <= sum(waits) < 30 * 30 + 301 and max(waits) == 30.0
  error = capsys.readouterr().err
  last = 'step 10' if remaining == 'checkpoints' else 'no readable checkpoint'
  assert naming.Names(error, f"'{run}'", '300 s', last, 'eval.max_seconds_without_trainer')
  assert error.count('\n') == 1
  assert (run / 'eval_test').exists() == (remaining == 'checkpoints')


def testANewCheckpointRestartsTheTimeLimit(run, monkeypatch):
  """The trainer may have no lock; without a limit the evaluator waits forever."""
  (run / 'report.json').unlink()
  hidden = run / 'hidden'
  shutil.copytree(run / 'train', hidden)
  for path in (run / 'train').glob('ckpt-00000010*.json'):
    path.unlink()
  clock = [0.0]

  def Wait(seconds, stop):
    clock[0] += seconds
    if clock[0] >= 200 and hidden.exists():
      shutil.copytree(hidden, run / 'train', dirs_exist_ok=True)
      shutil.rmtree(hidden)
    if clock[0] > 10000:
      stop.signal = signal.SIGTERM

  monkeypatch.setattr(eval_program, '_Wait', Wait)
  monkeypatch.setattr(logdir_lock.time, 'monotonic', lambda: clock[0])
  params = _Params('task.eval.max_seconds_without_trainer:300', max_steps=20)
  assert training.Evaluator(run, params).Run() == 1
  assert 500 <= clock[0] < 560 and list(_Lines(run)) == [6, 10]
  params.task.eval.max_seconds_without_trainer = 0.0
  assert training.Evaluator(run, params).Run() == 128 + signal.SIGTERM


def testACheckpointRemovedMeanwhileIsNotNamed(run, monkeypatch):
  evaluator = training.Evaluator(run, _Params(), checkpoint='6')
  _Damage(run, 6)
  with pytest.raises(
    checkpointer.DamagedError, match=naming.Naming('ckpt-00000006', '0 bytes', 96)
  ):
    evaluator.Run()


def testTheEvaluatorTakesANewerCheckpointIfItsCheckpointIsRemoved(tmp_path, monkeypatch):
  training.Train(tmp_path, training.Params(max_steps=1, save_max_to_keep=1))
  params = training.Params(max_steps=2, save_max_to_keep=1)
  program = training.Evaluator(tmp_path, params)
  latest = checkpointer.Checkpointer.Latest

  def ThenTrainOn(self):
    latest_checkpoint = latest(self)
    monkeypatch.setattr(checkpointer.Checkpointer, 'Latest', latest)  # Once is enough.
    training.Train(tmp_path, params)
    return latest_checkpoint

  monkeypatch.setattr(checkpointer.Checkpointer, 'Latest', ThenTrainOn)
  assert program.Run(once=True) == 0
  scores = [path.name for path in (tmp_path / 'eval_test').glob('score-*')]
  assert scores == ['score-00000002.txt']


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
