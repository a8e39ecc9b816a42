# SPDX-License-Identifier: Apache-2.0
"""The programs with two tasks: training, restarts, evaluation, export and mistakes."""

import json
import re
import sys
import types

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.checkpoint import checkpointer
from lingvo_gpipe.distributed import cluster, stop_request
from lingvo_gpipe.evaluation import pass_schedule
from lingvo_gpipe.experiment import multi_task_model, registry
from lingvo_gpipe.training import train_program
from tests import naming, processes
from tests.toys import multi_task, projects, training

_END = 14
_JOB = '--job=train_and_eval'


@pytest.fixture(scope='module')
def project(tmp_path_factory):
  return projects.Write(tmp_path_factory.mktemp('project'), projects.Experiments('two_tasks'))


@pytest.fixture(scope='module')
def run(project, forks, tmp_path_factory):
  """(function that runs a program in the project, logdir of an uninterrupted run, its output)."""
  logdir = tmp_path_factory.mktemp('once')

  def Run(program, logdir, *args):
    return forks.Run(program, '--model=toy.Two', f'--logdir={logdir}', *args, cwd=project)

  done = processes.Succeeded(Run('trainer', logdir, f'--max_steps={_END}', _JOB))
  return Run, logdir, done.stdout


def _Lines(logdir):
  return [json.loads(line) for line in (logdir / 'metrics.jsonl').read_text().splitlines()]


def _Metadata(logdir):
  store = checkpointer.Checkpointer(str(logdir / 'train'))
  return store.ReadMetadata(store.Latest())


def testEachTaskIsDescribedMeasuredAndEvaluated(run):
  _, logdir, out = run
  assert 'task a:\nstage' in out and 'task b:\nstage' in out
  assert 'data: Train_a 30 examples; Train_b 10 examples; Dev_a 5 examples; Test_a 6' in out
  counts = _Metadata(logdir)['tasks']
  assert counts['a']['steps'] + counts['b']['steps'] == _END
  assert min(counts['a']['steps'], counts['b']['steps']) > 1
  # Each batch has 4 examples, and a step of `b` two batches.
  assert {name: c['examples'] / c['steps'] for name, c in counts.items()} == {'a': 4, 'b': 8}
  pattern = rf'task b +{counts["b"]["steps"]} steps, {counts["b"]["examples"]} examples'
  assert re.search(pattern, out)
  lines = [line for line in _Lines(logdir) if line['split'] == 'train']
  assert [line['step'] for line in lines] == list(range(1, _END + 1))
  scalars = processes.Scalars(logdir / 'train')
  for task in 'ab':
    steps = [line['step'] for line in lines if f'loss/{task}' in line['values']]
    assert len(steps) == counts[task]['steps']
    assert [step for step, _ in scalars[f'loss/{task}']] == steps
    assert [n for _, n in scalars[f'steps/{task}']] == list(range(1, len(steps) + 1))
    assert f'stage_table/{task}' in processes.Tensorboard(logdir / 'train')
  assert 'num_skipped_steps' in lines[-1]['values'] and 'loss' not in lines[-1]['values']
  for name in ('eval_dev_a', 'eval_test_a', 'eval_test_b'):
    assert [step for step, _ in processes.Scalars(logdir / name)['loss']] == [7, _END]
  assert not (logdir / 'eval_dev_b').exists()
  # Only `a` decodes.
  assert (logdir / 'decode_test_a' / f'decode-{_END:08d}.jsonl').exists()
  assert not (logdir / 'decode_test_b').exists()
  assert '--- said\nword' in out
  assert 'eval_test_b loss' in out.partition('\nbest ')[2]
  names = set(processes.Tensors(logdir, _END))
  assert {n for n in names if n.startswith('shared.w')} == {
    'shared.w', 'shared.w/momentum', 'shared.w/velocity'
  }  # fmt: skip


def testARestartIsBitEqual(run, tmp_path):
  """The restart begins with another task than the start; one task has updates of two batches."""
  call, logdir, _ = run
  resumed = processes.CopyAsKilled(logdir, tmp_path / 'resumed', 5)
  done = processes.Succeeded(call('trainer', resumed, f'--max_steps={_END}', _JOB))
  assert naming.AnyLineNames(done.stdout, 'resuming', 'step 5')
  processes.AssertSameTensors(processes.Tensors(resumed, _END), processes.Tensors(logdir, _END))
  assert _Metadata(resumed)['tasks'] == _Metadata(logdir)['tasks']
  values = [
    [
      (line['step'], line['values']['loss/a'])
      for line in _Lines(where)
      if 'loss/a' in line['values']
    ]
    for where in (resumed, logdir)
  ]
  assert values[0] == values[1]


def testTheEvaluatorTakesAllTasksOrOne(run):
  call, logdir, trained = run
  done = processes.Succeeded(call('evaluator', logdir, '--once', '--split=Test'))
  results = [line for line in trained.splitlines() if re.match('Test_.*: loss', line)]
  lines = done.stdout.splitlines()
  assert naming.Names(lines[1], 'task a', 'weights float32') and naming.Names(lines[2], 'task b')
  assert naming.Names(lines[3], 'data', 'Test_a 6 examples', 'Test_b 7 examples')
  assert naming.Names(lines[4], 'eval_test_a', 'eval_test_b', 'weights')
  assert [line for line in lines if re.match('Test_.*: loss', line)] == results[-2:]
  done = processes.Succeeded(
    call('evaluator', logdir, '--once', '--split=Test', '--model_task_name=b')
  )
  weights, result = done.stdout.splitlines()[3:]
  assert naming.Names(weights, 'eval_test_b', 'weights') and 'eval_test_a' not in weights
  assert result == results[-1]
  # Only `a` decodes.
  done = processes.Succeeded(call('evaluator', logdir, '--once', '--split=Test', '--job=decode'))
  assert naming.AnyLineNames(done.stdout, 'Test_a', f'step {_END}', '6 examples')
  assert (logdir / 'decode_test_a').exists() and not (logdir / 'decode_test_b').exists()


def testAnExportNeedsTheNameOfATask(run):
  call, logdir, _ = run
  done = call('trainer', logdir, '--mode=export')
  assert done.returncode == 2 and 'with --model_task_name' in done.stderr
  done = call('trainer', logdir, '--mode=export', '--model_task_name=b')
  assert f'{logdir}/export/b/{_END}\n' in processes.Succeeded(done).stdout
  loaded = tf.saved_model.load(str(logdir / 'export' / 'b' / str(_END)))
  weights = processes.Tensors(logdir, _END)
  x = np.random.default_rng(0).normal(size=[3, 4]).astype(np.float32)
  actual = loaded.signatures['serving_default'](inputs=tf.constant(x))['outputs']
  np.testing.assert_allclose(
    actual, np.tanh(x @ weights['shared.w']) @ weights['b.head'], rtol=1e-5
  )


def testOneTaskAloneIsTrained(run, tmp_path):
  call, logdir, _ = run
  done = call('trainer', tmp_path, '--max_steps=2', '--model_task_name=b', _JOB)
  out = processes.Succeeded(done).stdout
  # Dev has no input for it.
  assert 'task a' not in out and 'data: Train_b 10 examples; Test_b 7 examples\n' in out
  weights, start = processes.Tensors(tmp_path, 2), processes.Tensors(logdir, _END)
  assert weights.keys() == start.keys()
  assert weights['learner/b/iterations'] == 2 and weights['learner/a/iterations'] == 0
  assert not weights['a.head/momentum'].any() and weights['shared.w/momentum'].any()
  # Resuming with both tasks is a different training.
  done = call('trainer', tmp_path, '--max_steps=3', _JOB)
  assert done.returncode == 2 and "~ task_name : 'b' -> ''" in done.stderr


@pytest.mark.parametrize(
  'args, names',
  [
    (['--model_task_name=c'], ['task_name', "unknown task 'c'", 'a, b']),
    (['--split=Dev', '--once', '--model_task_name=b'], ['no input', 'task b', 'inputs for a']),
    (['--job=decode', '--once', '--model_task_name=b'], ['none', 'tasks b']),
  ],
)
def testMistakesAreOneLine(run, args, names):
  call, logdir, _ = run
  done = call('evaluator', logdir, *args)
  assert done.returncode == 2
  (line,) = processes.Messages(done.stderr)
  assert naming.Names(line, *names)


def testAProfileDrawsEachTask(run, tmp_path):
  call, *_ = run
  done = processes.Succeeded(call('trainer', tmp_path, '--max_steps=5', '--profile_steps=2,5'))
  expected = {
    line['step']: next(task for task in 'ab' if f'loss/{task}' in line['values'])
    for line in _Lines(tmp_path)
    if line['split'] == 'train' and line['step'] > 1
  }
  drawn = {}
  for task in 'ab':
    page = (tmp_path / f'timeline_2_5_{task}.html').read_text()
    # An update of `b` takes two batches.
    for step, mini_batch in re.findall(r'<h2>step (\d+)(?:, mini-batch (\d))?: ', page):
      assert (mini_batch == '') == (task == 'a')
      drawn[int(step)] = task
    assert re.search(rf'^profiled steps? [2-5]\b.*\btask {task}\b', done.stdout, re.MULTILINE)
  assert drawn == expected and len(set(expected.values())) == 2


def testADataSetThatNoTaskCanUseIsRefusedOrLogged(tmp_path, caplog):
  """It is refused before weights are used, or logged if one task is trained alone."""
  caplog.set_level('INFO', logger='absl')

  def Make(data, *names, **train):
    p = multi_task.Params()
    p.train.Set(**train)
    tasks = p.Instantiate().tasks
    runners = {name: types.SimpleNamespace(task=tasks[name]) for name in names}
    inputs = multi_task.AsParams({name: multi_task.Input(name, 'Dev') for name in data})
    pass_schedule.DatasetPasses(
      types.SimpleNamespace(task_runners=runners), lambda _: inputs, str(tmp_path),
      stop_request.StopRequest(), during_training=True, clock=lambda: 0.0,
    )  # fmt: skip

  decoded = naming.Naming('train.decode_datasets', 'Dev', 'a, b', 'Decode')
  for data in ('ab', 'b', ''):
    with pytest.raises(ValueError, match=decoded):
      Make(data, 'a', 'b', decode_datasets=['Dev'])
  with pytest.raises(ValueError, match=naming.Naming('train.eval_datasets', 'Dev', 'a, b')):
    Make('', 'a', 'b', eval_datasets=['Dev'])
  assert '_datasets' not in caplog.text
  Make('a', 'b', decode_datasets=['Dev'], eval_datasets=['Dev'])
  for kind in ('decode', 'eval'):
    names = f'train.{kind}_datasets', 'Dev', 'tasks b'
    assert any(naming.Names(message, *names) for message in caplog.messages)


def testAnUnknownTaskOfADataSetIsRefusedBeforeTraining(tmp_path):
  p = multi_task.Params()
  p.train.eval_datasets = ['Dev']
  inputs = multi_task.AsParams(
    {'a': multi_task.Input('a', 'Dev'), 'bb': multi_task.Input('b', 'Dev')}
  )
  with pytest.raises(ValueError, match=naming.Naming('Dev', "'bb'", 'a, b')):
    train_program.TrainProgram(
      p,
      str(tmp_path),
      cluster.Cluster.Create(1, platform='cpu'),
      lambda _: inputs,
      stop_request.StopRequest(),
    )


def testMessagesNameTheParamsOfTheTask(tmp_path):
  p = multi_task.Params(b=multi_task.Task(1, skip_nonfinite=False))
  with pytest.raises(
    ValueError, match=naming.Naming('skip_nonfinite', 'task_params.b.train.learner')
  ):
    training.Program(tmp_path, p, check_numerics=True)
  p.task_params.a.train.learner = []
  with pytest.raises(ValueError, match=naming.Naming('task_params.a.train.learner', 'empty')):
    training.Program(tmp_path, p)
  for path, guesses in (
    ('task.train.max_steps', 'train.max_steps'),
    ('task.train.learner.name', 'task_params.b.train.learner.name'),
  ):
    with pytest.raises(AttributeError, match=naming.Naming(path, f'{guesses}?')):
      p.Get(path)


def testAModelOfOneTaskHasNoTaskNames(forks, tmp_path):
  args = [f'--model={processes.MODEL}', f'--logdir={tmp_path}', '--model_task_name=a']
  done = forks.Run('trainer', *args)
  assert done.returncode == 2
  (line,) = processes.Messages(done.stderr)
  assert naming.Names(line, '--model_task_name=a', processes.MODEL, 'one task')


def testAProgramOfOneTaskEqualsASingleTaskModel(tmp_path):
  """Bit for bit, through the whole program, except for names."""
  single = training.Params(max_steps=5)
  training.Train(tmp_path / 'single', single)
  p = multi_task_model.MultiTaskModel.Params().Set(
    task_params=multi_task.AsParams({'toy': single.task.Copy()}),
    input=multi_task.AsParams({'toy': single.input.Copy()}),
  )
  for key in ('max_steps', 'summary_interval_steps'):
    p.train.Set(**{key: single.task.train.Get(key)})
    p.task_params.toy.train.Set(**{key: p.task_params.toy.train.GetDefault(key)})
  training.Train(tmp_path / 'multi', p)
  expected = {
    name.replace('learner/', 'learner/toy/'): value
    for name, value in processes.Tensors(tmp_path / 'single', 5).items()
  }
  processes.AssertSameTensors(processes.Tensors(tmp_path / 'multi', 5), expected)


def testTheRegistryListsAndChecksExperimentsOfSeveralTasks(project, monkeypatch):
  with pytest.raises(
    TypeError, match=naming.Naming("SingleTaskModelParams'", 'MultiTaskModelParams:')
  ):
    registry.RegisterMultiTaskModel(registry.SingleTaskModelParams)
  with pytest.raises(
    TypeError, match=naming.Naming("MultiTaskModelParams'", 'SingleTaskModelParams:')
  ):
    registry.RegisterSingleTaskModel(registry.MultiTaskModelParams)
  with pytest.raises(NotImplementedError, match=naming.Naming('MultiTaskModelParams', 'Tasks()')):
    registry.MultiTaskModelParams().Model()
  assert 'image.digits_tasks.DigitAndParity' in registry.ListKeys()


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
