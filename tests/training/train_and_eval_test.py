# SPDX-License-Identifier: Apache-2.0
"""Evaluations between steps: when they run, that training does not change, when they end it."""

import json
import shutil
import signal
import sys
import types
from xml.etree import ElementTree

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.checkpoint import checkpointer, logdir_lock
from lingvo_gpipe.core import params_text
from lingvo_gpipe.distributed import stop_request
from lingvo_gpipe.evaluation import eval_program
from lingvo_gpipe.reporting import run_report
from lingvo_gpipe.training import export, run_store
from tests import naming, processes
from tests.toys import training

# Each fifth step an evaluation, each eighth a decoding.
_TRAIN = {
  'eval_datasets': ['Dev', 'Test'],
  'eval_interval_steps': 5,
  'decode_datasets': ['Dev'],
  'decode_interval_steps': 8,
  'save_interval_steps': 3,
}


def _Params(more='', **train):
  return training.Params(more, **{**_TRAIN, **train})


def _Train(logdir, params, **options):
  training.Train(logdir, params, job='train_and_eval', **options)


def _Lines(logdir):
  """Returns [(step, split, values)] of metrics.jsonl without values that depend on time."""
  entries = [json.loads(line) for line in (logdir / 'metrics.jsonl').read_text().splitlines()]
  drop = 'examples_per_second'
  return [
    (entry['step'], entry['split'], {k: v for k, v in entry['values'].items() if k != drop})
    for entry in entries
  ]


def _Steps(logdir, split):
  return [step for step, other, _ in _Lines(logdir) if other == split]


def _Report(logdir):
  return json.loads((logdir / 'report.json').read_text())


@pytest.fixture(scope='module')
def straight(tmp_path_factory):
  """The log directory of 20 steps with evaluations in between."""
  logdir = tmp_path_factory.mktemp('straight')
  _Train(logdir, _Params())
  return logdir


def testEvaluationsDoNotChangeTraining(straight, tmp_path):
  training.Train(tmp_path, _Params())
  processes.AssertSameTensors(processes.Tensors(tmp_path, 20), processes.Tensors(straight, 20))
  train = [[line for line in _Lines(d) if line[1] == 'train'] for d in (straight, tmp_path)]
  assert train[0] == train[1] and len(train[0]) == 20
  assert _Steps(tmp_path, 'eval_dev') == [20] and not _Steps(tmp_path, 'decode_dev')


def testEachPassRunsAtItsStepsAndAtTheEnd(straight):
  assert _Steps(straight, 'eval_dev') == _Steps(straight, 'eval_test') == [5, 10, 15, 20]
  assert _Steps(straight, 'decode_dev') == [8, 16, 20]
  for step in (5, 10, 15, 20):
    assert (straight / 'eval_dev' / f'score-{step:08d}.txt').exists()
  scalars = processes.Scalars(straight / 'eval_dev')
  lines = [values['loss'] for _, split, values in _Lines(straight) if split == 'eval_dev']
  assert [np.float32(value) for value in lines] == [value for _, value in scalars['loss']]
  assert [step for step, _ in scalars['loss']] == [5, 10, 15, 20]
  # All of them in one file, with a sample for each evaluation.
  assert len(list((straight / 'eval_dev').glob('events*'))) == 1


def testTheReportPageHasEachPart(straight):
  text = (straight / 'report.html').read_text()
  root = ElementTree.fromstring(text.removeprefix('<!DOCTYPE html>'))
  sections = {s.findtext('h2'): s for s in root.iter('section')}
  assert list(sections) == [
    'Summary', 'Command', 'Curves', 'Time, starts and failures', 'Evaluations', 'Stages', 'Memory',
    'Profile', 'Samples',
  ]  # fmt: skip
  figures = {f.findtext('h3'): ''.join(f.itertext()) for f in sections['Curves'].iter('figure')}
  assert {'loss', 'learning rate', 'examples per second', 'mean'} <= figures.keys()
  assert all(f'{split}: ' in figures['loss'] for split in ('train', 'eval_dev', 'eval_test'))
  summary = {row.findtext('th'): row.findtext('td') for row in sections['Summary'].iter('tr')}
  lines = (straight / 'report.txt').read_text().splitlines()
  assert lines == [f'{name:11}  {value}' for name, value in summary.items()]
  samples = [title.text for title in sections['Samples'].iter('h3')]
  assert samples == ['eval_dev', 'eval_test', 'decode_dev']
  assert 'start of the trainer' in ''.join(sections['Time, starts and failures'].itertext())
  assert len(list(sections['Evaluations'].iter('tr'))) == 1 + 4 + 4 + 3
  assert 'src=' not in text and 'http' not in text.replace('http://www.w3.org/2000/svg', '')


def testPassesRunAtIntervalsOfTime(tmp_path):
  params = _Params(eval_interval_steps=0, eval_interval_seconds=1e-6, max_steps=4)
  params.task.train.Set(decode_interval_steps=0, decode_interval_seconds=1e6)
  _Train(tmp_path, params)
  assert _Steps(tmp_path, 'eval_dev') == [1, 2, 3, 4]
  assert _Steps(tmp_path, 'decode_dev') == [4]


def testATimeIntervalMayBeLongerThanACall(tmp_path, monkeypatch):
  """Each call of the trainer is stopped after three or four steps of ten seconds."""
  clock = [0.0]
  monkeypatch.setattr(
    run_store, 'time', types.SimpleNamespace(monotonic=lambda: clock[0], time=lambda: 0.0)
  )
  params = _Params(eval_interval_steps=0, eval_interval_seconds=45.0, decode_datasets=[])
  for last in (4, 7, 11):
    stop = stop_request.StopRequest()
    program = training.Program(tmp_path, params, stop, job='train_and_eval')

    def TrainStep(batch, program=program, step=program._runner.TrainStep, last=last, stop=stop):
      values = step(batch)
      clock[0] += 10.0
      if int(program._runner.global_step) == last:
        stop.signal = signal.SIGTERM
      return values

    monkeypatch.setattr(program._runner, 'TrainStep', TrainStep)
    assert program.Run() == 143
    clock[0] += 1000.0  # Time between two calls does not count.
  assert _Steps(tmp_path, 'eval_dev') == [5, 10]


@pytest.mark.parametrize('at', [5, 16])
def testAStopAndARestartEqualOneRun(straight, tmp_path, monkeypatch, at):
  """The stop comes before a due evaluation or decoding, which the next call runs."""
  stop = stop_request.StopRequest()
  program = training.Program(tmp_path, _Params(), stop, job='train_and_eval')
  step = program._runner.TrainStep

  def TrainStep(batch):
    values = step(batch)
    if int(program._runner.global_step) == at:
      stop.signal = signal.SIGTERM
    return values

  monkeypatch.setattr(program._runner, 'TrainStep', TrainStep)
  assert program.Run() == 143
  assert processes.Steps(tmp_path)[-1] == at
  assert not _Report(tmp_path)['is_finished'] and run_report.FinishedStep(str(tmp_path)) is None
  _Train(tmp_path, _Params())
  processes.AssertSameTensors(processes.Tensors(tmp_path, 20), processes.Tensors(straight, 20))
  assert sorted(map(repr, _Lines(tmp_path))) == sorted(map(repr, _Lines(straight)))


def testASignalBeforeTheFirstStepIsReported(tmp_path, capsys):
  stop = stop_request.StopRequest()
  stop.signal = signal.SIGINT
  assert training.Program(tmp_path, _Params(), stop).Run() == 130
  out = capsys.readouterr().out
  assert naming.AnyLineNames(out, 'stopped', 'SIGINT', 'before') and 'nothing left' not in out
  assert processes.Steps(tmp_path) == [] and not _Report(tmp_path)['is_finished']


def testARestartFromAnEarlierCheckpointRepeatsNoLogLine(straight, tmp_path):
  """A kill leaves log lines of steps after the last checkpoint."""
  logdir = processes.CopyAsKilled(straight, tmp_path / 'killed', 12)
  with (logdir / 'metrics.jsonl').open('a') as f:
    f.write('{"step": 99')
  _Train(logdir, _Params())
  assert _Lines(logdir) == _Lines(straight)


def testALogDirectoryMayBeRemote(straight, tmp_path, monkeypatch):
  """TensorFlow's in-memory file system cannot rename directories, like an object store."""
  monkeypatch.setattr(logdir_lock, 'SETTLE_SECONDS', 0.02)
  logdir = f'ram://train_and_eval_test{tmp_path}'
  for max_steps in (8, 20):  # Steps with a decoding in any case.
    with logdir_lock.HoldLock(f'{logdir}/train') as lock:
      _Train(logdir, _Params(max_steps=max_steps), lock=lock)
  remote, local = (
    [tf.io.read_file(path) for path in tf.io.gfile.glob(f'{where}/train/ckpt-*20-*/*.data-*')]
    for where in (logdir, straight)
  )
  assert len(remote) == len(local) == 1 and remote == local
  assert training.Evaluator(logdir, _Params()).Run() == 0
  exported = export.Export(_Params(), logdir)
  for folder in ('train', 'eval_dev', 'eval_test'):
    actual, expected = (processes.Scalars(f'{where}/{folder}') for where in (logdir, straight))
    assert actual['loss'][-1] == expected['loss'][-1] and actual['loss'][-1][0] == 20
  for file in (
    'params.txt',
    'report.html',
    'report.txt',
    'metrics.jsonl',
    'decode_dev/decode-00000020.jsonl',
  ):
    with tf.io.gfile.GFile(f'{logdir}/{file}') as f:
      assert f.read().count('\n') >= 6
  loaded = tf.saved_model.load(exported.directory)
  weights = processes.Tensors(straight, 20)
  serve = loaded.signatures['serving_default']
  np.testing.assert_allclose(
    serve(inputs=tf.eye(4))['outputs'], weights['toy.w'] + weights['toy.b'], rtol=1e-6
  )
  extra = f'{exported.directory}/assets.extra'
  assert sorted(tf.io.gfile.listdir(extra)) == ['export.json', 'params.txt']
  assert tf.io.gfile.listdir(f'{logdir}/export') == ['20']


# --- early stopping ---


def _Stopping(more='', **train):
  """Returns Params by which a higher loss is better, so that no evaluation beats the first one."""
  p = _Params(eval_interval_steps=2, decode_interval_steps=20, save_max_to_keep=1, **train)
  p.task.train.early_stop.Set(metric='loss', minimize=False, max_evaluations=3)
  p.ApplyOverrides(params_text.ParseOverrides(more))
  return p


@pytest.fixture(scope='module')
def stopped(tmp_path_factory):
  """The log directory of a run that stopped early."""
  logdir = tmp_path_factory.mktemp('stopped')
  _Train(logdir, _Stopping())
  return logdir


def testStopsWithoutGainAndKeepsTheBest(stopped, tmp_path, capsys):
  shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
  reasons = 'early stopping', 'eval_dev loss', 'step 2'
  assert processes.Steps(tmp_path) == [2, 8]
  report = _Report(tmp_path)
  assert report['best']['step'] == 2 and report['checkpoints'] == [2, 8]
  assert report['is_finished'] and naming.Names(report['ended'], *reasons, '3 evaluations')
  text = (tmp_path / 'report.txt').read_text()
  assert naming.AnyLineNames(text, 'best', 'step 2', 'eval_dev loss')
  # Another call ends at once; with more patience it continues.
  assert _Steps(tmp_path, 'decode_dev') == [8]
  _Train(tmp_path, _Stopping())
  out = capsys.readouterr().out
  assert naming.Names(out, 'step 8 of 20', f'({report["ended"]})')
  assert ' at step ' not in out  # Evaluations and decodings are not repeated.
  _Train(tmp_path, _Stopping('task.train.early_stop.max_evaluations:5'))
  out = capsys.readouterr().out
  assert naming.AnyLineNames(out, 'stopped', *reasons, '5 evaluations', 'after step 12')
  assert processes.Steps(tmp_path) == [2, 12]


def testARestartStopsAtTheSameStep(stopped, tmp_path, capsys):
  """The first call ends at an odd step, whose evaluation does not count."""
  for max_steps in (5, 20):
    _Train(tmp_path, _Stopping(max_steps=max_steps))
    # Each call ends with a sample of each data set, even if it was evaluated before the end.
    assert capsys.readouterr().out.count('--- said\n') == 2
  assert processes.Steps(tmp_path) == [2, 8]
  processes.AssertSameTensors(processes.Tensors(tmp_path, 8), processes.Tensors(stopped, 8))


def testTheJobTrainKeepsTheBestAndDoesNotStopEarly(stopped, tmp_path, capsys):
  shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
  training.Train(tmp_path, _Stopping(max_steps=11))
  notice = (
    'early stopping by eval_dev loss needs --job=train_and_eval: this job does not end by it\n'
  )
  assert capsys.readouterr().out.count(notice) == 1
  assert processes.Steps(tmp_path) == [2, 11]
  assert _Report(tmp_path)['best']['step'] == 2


def testTheBestCheckpointStaysWithoutAMetric(stopped, tmp_path):
  shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
  nothing = "task.train.early_stop.metric:'';task.train.early_stop.max_evaluations:0"
  _Train(tmp_path, _Stopping(nothing, max_steps=11))
  assert processes.Steps(tmp_path) == [2, 11]
  # Once followed again, its history continues.
  _Train(tmp_path, _Stopping('task.train.early_stop.max_evaluations:4'))
  assert processes.Steps(tmp_path) == [2, 12]
  best = _Report(tmp_path)['best']
  assert (best['step'], best['jobname'], best['metric']) == (2, 'eval_dev', 'loss')


def testTheBestCheckpointMayBeTheLastStep(tmp_path):
  """A lower loss is better, so each evaluation is the best one and is saved at once."""
  params = _Params(save_interval_steps=100, save_max_to_keep=1, max_steps=7)
  params.task.train.early_stop.metric = 'loss'
  _Train(tmp_path, params)
  report = _Report(tmp_path)
  assert report['best']['step'] == 7 and report['checkpoints'] == [7]
  saved = checkpointer.Checkpointer(tmp_path / 'train').Latest().metadata
  assert saved['early_stop']['best_step'] == 7
  # The evaluation after the last step was not due by its interval.
  assert saved['early_stop']['gain_step'] == 5


def testTheEvaluatorFollowsUntilTheTrainerHasEnded(stopped, tmp_path, monkeypatch):
  """Training ended long before max_steps."""
  shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
  (tmp_path / 'eval_test' / 'metrics.jsonl').unlink(missing_ok=True)
  monkeypatch.setattr(eval_program, '_Wait', lambda *args: pytest.fail('it waits for more'))
  assert training.Evaluator(tmp_path, _Stopping()).Run() == 0
  (line,) = (tmp_path / 'eval_test' / 'metrics.jsonl').read_text().splitlines()
  entry = json.loads(line)
  assert (entry['step'], entry['split']) == (8, 'eval_test') and entry['values']['loss'] > 0


@pytest.mark.parametrize(
  'more, job, names',
  [
    (
      "task.train.early_stop.jobname:'eval_prod'",
      'train_and_eval',
      ('train.early_stop.jobname', "'eval_prod'", 'eval_dev, eval_test, decode_dev'),
    ),
    (
      'task.train.eval_interval_steps:0',
      'train_and_eval',
      ('train.early_stop.jobname', "'eval_dev'", 'decode_dev.'),
    ),
    (
      "task.train.early_stop.metric:'log_pplx'",
      'train_and_eval',
      ('train.early_stop.metric', "'log_pplx'", 'eval_dev', 'loss'),
    ),
    ('task.train.eval_interval_steps:-1', 'train_and_eval', ('eval_interval_steps', -1)),
    (
      "task.train.init_from_checkpoint_rules:{'x': 1}",
      'train_and_eval',
      ('init_from_checkpoint_rules', "{'x': 1}"),
    ),
    (
      'task.train.eval_datasets:[];task.train.decode_datasets:[]',
      'train_and_eval',
      ('train.eval_datasets', 'train.decode_datasets'),
    ),
  ],
)
def testMistakesAreReportedBeforeTheTraining(tmp_path, more, job, names):
  with pytest.raises(ValueError, match=naming.Naming(*names)):
    training.Program(tmp_path, _Stopping(more), job=job)


def testAMetricMissingFromADecodingIsReportedAtTheFirstOne(tmp_path):
  params = _Params(max_steps=4, decode_interval_steps=2)
  params.task.train.early_stop.Set(metric='meen', jobname='decode_dev')
  with pytest.raises(
    ValueError, match=naming.Naming("'meen'", 'decode_dev', 'mean, num_examples')
  ) as e:
    _Train(tmp_path, params)
  assert naming.Names(e.value.__notes__[-1], 'after step 2')


# --- time, warm start, what is written ---


@pytest.mark.parametrize('job', ['train', 'train_and_eval'])
def testTheInitialWeightsAreEvaluatedIfThereAreNoSteps(straight, tmp_path, job):
  """The initial weights come from another run, so the metrics equal that run's last ones."""
  params = _Params(max_steps=0)
  params.task.train.init_from_checkpoint_rules = {str(straight): ([(r'(.*)', r'\1')], [])}
  training.Train(tmp_path, params, job=job)
  expected = {split: values for step, split, values in _Lines(straight) if step == 20}
  jobs = ['eval_dev', 'eval_test'] + (['decode_dev'] if job == 'train_and_eval' else [])
  assert {line[1]: line[2] for line in _Lines(tmp_path)} == {name: expected[name] for name in jobs}
  reported = _Report(tmp_path)['passes']['eval_dev']
  assert (reported['step'], reported['values']) == (0, expected['eval_dev'])
  if job == 'train_and_eval':  # Training from here starts as usual.
    _Train(tmp_path, _Params(max_steps=5))
    assert _Steps(tmp_path, 'eval_dev') == [0, 5]


def testATimeLimitCountsOverAllCalls(tmp_path, monkeypatch, capsys):
  clock = [0.0]
  monkeypatch.setattr(
    run_store, 'time', types.SimpleNamespace(monotonic=lambda: clock[0], time=lambda: 0.0)
  )
  for max_seconds, steps in ((35.0, 4), (55.0, 6)):
    program = training.Program(tmp_path, _Params(max_seconds=max_seconds))
    step = program._runner.TrainStep

    def TrainStep(batch, step=step):
      clock[0] += 10.0
      return step(batch)

    monkeypatch.setattr(program._runner, 'TrainStep', TrainStep)
    assert program.Run() == 0
    clock[0] += 1000.0  # Time between two calls does not count.
    assert processes.Steps(tmp_path)[-1] == steps
    out = capsys.readouterr().out
    assert naming.AnyLineNames(out, 'stopped', f'max_seconds {max_seconds:g}', f'step {steps}')
    # The description is printed once.
    data = 'Train 40 examples', 'Dev 6 examples', 'Test 6 examples'
    for names in (data, ('weights float32', 'activations float32', 'XLA off')):
      assert [naming.Names(line, *names) for line in out.splitlines()].count(True) == 1
    assert _Report(tmp_path)['train_seconds'] == 10.0 * steps
  training.Train(tmp_path, _Params(max_seconds=55.0))
  assert naming.Names(capsys.readouterr().out, '(max_seconds 55)')


def testOnlyANewRunHasAWarmStart(straight, tmp_path, capsys):
  # Both runs have the same model here.
  rules = {str(straight): ([(r'(toy\.w)', r'\1')], [])}

  def Params(max_steps):
    return _Params(init_from_checkpoint_rules=rules, max_steps=max_steps)

  program = training.Program(tmp_path, Params(1))
  program._store.Restore()
  out = capsys.readouterr().out
  assert naming.AnyLineNames(out, 'warm start', '1 of 2 weights')
  assert naming.AnyLineNames(out, 'warm start', 'initial', 'toy.b')
  values = program._model.task.VariablesByPath()
  saved = processes.Tensors(straight, 20)
  np.testing.assert_array_equal(values['toy.w'], saved['toy.w'])
  assert not np.array_equal(values['toy.b'], saved['toy.b'])
  training.Train(tmp_path, Params(1))
  capsys.readouterr()
  training.Program(tmp_path, Params(2))._store.Restore()
  out = capsys.readouterr().out
  assert naming.AnyLineNames(out, 'resuming', 'step 1') and 'warm start' not in out


def testTensorBoardHasGradientsPlanAndSamples(tmp_path):
  params = _Params(histogram_interval_steps=2, max_steps=4, eval_interval_steps=2)
  _Train(tmp_path, params)
  summaries = processes.Tensorboard(tmp_path / 'train')
  for path in ('toy.w', 'toy.b'):
    assert [step for step, _ in summaries[f'gradients/{path}']] == [2, 4]
    # Rows of (left, right, count): each entry of the gradient is counted.
    counts = [value[:, 2].sum() for _, value in summaries[f'gradients/{path}']]
    assert counts == [8.0 if path == 'toy.w' else 2.0] * 2
  ((step, table),) = summaries['stage_table']
  assert step == 0 and b'    stage  layers' in table.item()
  assert b'device 0' in summaries['schedule'][0][1].item()
  samples = processes.Tensorboard(tmp_path / 'eval_dev')['sample/said']
  assert [step for step, _ in samples] == [2, 4]
  assert samples[-1][1].item().startswith(b'    ')


def testAReportThatCannotBeRemovedIsAnError(tmp_path):
  (tmp_path / 'report.json').mkdir()
  with pytest.raises(OSError, match=naming.Naming(f"'{tmp_path}/report.json'", '--logdir')):
    run_report.Remove(str(tmp_path))


def testTheReportHasTheResults(straight):
  report = _Report(straight)
  assert report['step'] == report['num_steps'] == 20 and report['examples_consumed'] == 80
  assert report['ended'] == 'max_steps 20' and report['is_finished']
  assert {name: result['step'] for name, result in report['passes'].items()} == {
    'eval_dev': 20, 'eval_test': 20, 'decode_dev': 20
  }  # fmt: skip
  assert run_report.FinishedStep(str(straight)) == 20
  text = (straight / 'report.txt').read_text()
  assert '80, 2.00 epochs' in text and 'eval_dev     step 20: loss ' in text
  assert str(straight) in text


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
