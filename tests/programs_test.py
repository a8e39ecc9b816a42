# SPDX-License-Identifier: Apache-2.0
"""The programs in cases that are hard to reach from outside the process."""

import json
import os
import re
import signal
import sys
import types

import pytest
import tensorflow as tf

from lingvo_gpipe.checkpoint import checkpointer
from lingvo_gpipe.core import nested_map, params_text
from lingvo_gpipe.distributed import cluster, stop_request
from lingvo_gpipe.evaluation import dataset_pass, eval_program
from lingvo_gpipe.experiment import registry
from lingvo_gpipe.experiment import task as task_lib
from lingvo_gpipe.learning import optimizer
from lingvo_gpipe.pipeline.cutting import layer_profile
from lingvo_gpipe.training import inspection, train_program
from tests import processes
from tests.toys import training


def _ModelParams(dataset='Train', more=''):
  params = registry.GetParams(processes.MODEL, dataset)
  # One micro-batch and no slots: nothing here is about them, and a step is traced in less time.
  overrides = f'{processes.TINY};task.stack.num_micro_batches:1;{more}'
  params.ApplyOverrides(params_text.ParseOverrides(overrides))
  params.task.train.eval_datasets = []
  params.task.train.learner.optimizer = optimizer.SGD.Params()
  return params


def _Program(logdir, params, stop=None, input_params=None, **options):
  return train_program.TrainProgram(
    params,
    str(logdir),
    cluster.Cluster.Create(2, platform='cpu'),
    input_params or (lambda name: _ModelParams(name).input),
    stop or stop_request.StopRequest(),
    train_program.RunOptions(**options),
  )


def testAMistakeInAnEvaluationIsReportedBeforeTraining(tmp_path):
  params = _ModelParams()
  params.task.train.eval_datasets = ['Test', 'Tset']

  def InputParams(name):
    return registry.GetParams(processes.MODEL, name).input

  with pytest.raises(LookupError, match='Tset'):
    _Program(tmp_path, params, input_params=InputParams)


def testCheckNumericsNeedsTheWeightsBeforeTheStep(tmp_path):
  params = _ModelParams(more='task.train.learner.skip_nonfinite:False')
  with pytest.raises(ValueError, match=r'skip_nonfinite of task\.train\.learner'):
    _Program(tmp_path, params, check_numerics=True)


def testTooManyNonfiniteStepsInARowEndTheTraining(tmp_path, capsys):
  """Updates are so large that soon no step is finite."""
  more = 'task.train.max_steps:9;task.train.max_nonfinite_steps:2;task.train.save_interval_steps:1;'
  params = _ModelParams(more=f'{more}task.train.ema_decay:0.5')
  params.task.train.learner.learning_rate = 1e30
  assert _Program(tmp_path, params).Run() == 1
  out = capsys.readouterr()
  bad = re.findall(r'step (\d+): a gradient is not finite; the update was skipped', out.out)
  first, last = map(int, bad)
  message = (
    f'step {last}: the loss or gradients of 2 steps in a row were not finite ({first} to {last};'
  )
  assert out.err.startswith(message)
  assert re.search(r'In the last step the first value that is not .* of layer \S+\.stack', out.err)
  store = checkpointer.Checkpointer(str(tmp_path / 'train'))
  info = store.Latest()
  assert info.step == first == last - 1
  assert 'lm.stack.layers[0].emb/ema' in info.tensors
  # A resumed run continues the count.
  assert _Program(tmp_path, params).Run() == 1
  assert capsys.readouterr().err.startswith(message)


def testAnUnwritableLogDirectoryIsReportedBeforeWeightsAreCreated(tmp_path, monkeypatch):
  (tmp_path / 'file').write_text('')
  monkeypatch.setattr(train_program.multi_task_runner, 'Make', None)
  with pytest.raises(OSError, match='Cannot write'):
    _Program(tmp_path / 'file' / 'run', _ModelParams())


def _Partition(params, *logdir):
  """Returns the stage lines that `--mode=inspect_partition` prints."""
  lines = inspection.PartitionText(params, *logdir).splitlines()
  return lines[1 : 1 + params.task.stack.num_stages]


def testARunKeepsItsMeasuredCut(tmp_path, monkeypatch):
  """A resumed run would measure other times, and so choose other stages."""
  costly = [0]

  def Measure(calls, *_, **__):
    return [(float(i in costly) + 0.001,) * 2 for i in range(len(calls))]

  monkeypatch.setattr(layer_profile, 'Measure', Measure)
  by_time = 'task.stack.partition_by:time;task.train.max_steps:1'
  program = _Program(tmp_path, _ModelParams(more=by_time))
  first = program._runner.cut
  assert program.Run() == 0
  costly[:] = [len(first.layers) - 1]
  other = _Program(tmp_path / 'other', _ModelParams(more=by_time))._runner.cut
  assert other.ends != first.ends
  params = _ModelParams(more=by_time)
  assert _Program(tmp_path, params)._runner.cut.ends == first.ends
  evaluation = eval_program.EvalProgram(
    params,
    str(tmp_path),
    cluster.Cluster.Create(2, platform='cpu'),
    'Test',
    stop_request.StopRequest(),
  )
  assert evaluation._runner.cut.ends == first.ends
  picked = [line.split()[1] for line in _Partition(params, str(tmp_path))]
  assert picked == [str(b - a) for a, b in zip([0, *first.ends[:-1]], first.ends, strict=True)]
  assert _Partition(params) != _Partition(params, str(tmp_path))
  # A pipeline that differs from the checkpoint's is measured again.
  changed = _ModelParams(more=f'{by_time};task.stack.remat_policy:none')
  assert _Program(tmp_path, changed)._runner.cut.ends == other.ends
  by_flops = _ModelParams(more='task.train.max_steps:1')
  assert _Program(tmp_path, by_flops)._runner.cut.by == 'flops'


def testARunKeepsTheSlicesOfItsMeasuredCut(tmp_path, monkeypatch):
  of_softmax = [4.0]

  def Measure(calls, *_, **__):
    return [(1.0, 2.0), *[(float(i), 2.0 * i) for i in range(len(calls) - 2)], (of_softmax[0],) * 2]

  monkeypatch.setattr(layer_profile, 'Measure', Measure)
  more = (
    'task.num_layers:2;task.stack.partition_by:time;task.stack.vocabulary:shared;'
    'task.train.max_steps:1'
  )
  program = _Program(tmp_path, _ModelParams(more=more))
  first = program._runner.cut
  assert program.Run() == 0
  of_softmax[0] = 9.0
  assert _Program(tmp_path / 'other', _ModelParams(more=more))._runner.cut.splits != first.splits
  assert _Program(tmp_path, _ModelParams(more=more))._runner.cut.splits == first.splits


def testTheDescriptionOfAnotherModelsRunStays(tmp_path):
  params = _ModelParams(more='task.train.max_steps:1')
  assert _Program(tmp_path, params).Run() == 0
  described = {name: (tmp_path / name).read_text() for name in ('params.txt', 'model_analysis.txt')}
  other = _ModelParams(more='task.hidden_dim:64;task.train.max_steps:2')
  with pytest.raises(ValueError, match=r'other Params.*: ~ task\.hidden_dim : 32 -> 64\.'):
    _Program(tmp_path, other)
  # Params that are allowed must still fit the checkpoint.
  with pytest.raises(ValueError, match='does not fit.*another shape'):
    _Program(tmp_path, other, allow_params_change=True).Run()
  assert {name: (tmp_path / name).read_text() for name in described} == described


def testTheEndOfTheDataEndsTheRunAndSaves(tmp_path, capsys):
  # Batches of 4, the last one partial.
  params = training.Params('input.num_epochs:1;input.num_examples:30', max_steps=100)
  training.Train(tmp_path, params)
  message = 'stopped by the end of the data after step 8; the checkpoint is saved\n'
  assert message in capsys.readouterr().out
  assert processes.Steps(tmp_path) == [8]
  lines = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
  assert [line['step'] for line in lines if line['split'] == 'train'][-1] == 8
  training.Train(tmp_path, params)
  assert message in capsys.readouterr().out
  assert processes.Steps(tmp_path) == [8]


def testASignalInTheLastStepSkipsTheEvaluation(tmp_path, capsys, monkeypatch):
  stop = stop_request.StopRequest()
  params = training.Params(max_steps=1, eval_datasets=['Test'])
  program = training.Program(tmp_path, params, stop)
  save = checkpointer.Checkpointer.Save

  def SignalDuringSave(self, *args, **kwargs):
    stop.signal = signal.SIGTERM
    return save(self, *args, **kwargs)

  monkeypatch.setattr(checkpointer.Checkpointer, 'Save', SignalDuringSave)
  assert program.Run() == 143
  out = capsys.readouterr().out
  assert 'stopped by SIGTERM after step 1;' in out
  assert 'Test at step' not in out
  assert processes.Steps(tmp_path) == [1]


class _Numbers:
  """An input of 10 batches of one example."""

  @classmethod
  def Params(cls):
    params = types.SimpleNamespace(batch_size=1)
    params.Copy = lambda: params
    params.Set = lambda **unused: params
    params.Instantiate = lambda: cls(params)
    return params

  def __init__(self, params):
    self.params = params

  def BatchSpecs(self):
    return []

  def CheckComplete(self):
    pass

  def Dataset(self, start=0):
    return tf.data.Dataset.range(10).batch(1).map(lambda i: nested_map.NestedMap(i=i))


class _Runner:
  """Counts batches; sends a signal at batch `at`."""

  def __init__(self, stop=None, at=-1, limit=0, decoded=None):
    self.seen = []
    self._stop, self._at = stop, at
    self.task = types.SimpleNamespace(
      params=types.SimpleNamespace(eval=task_lib.EvalParams().Set(samples_per_summary=limit)),
      Report=lambda values, input_generator: '',
    )
    self.Decode = lambda batch, input_generator: decoded or {}
    self.engine = types.SimpleNamespace(replicas=[])  # No batches are read on workers.

  def ExpectBatches(self, batch_specs):
    assert not batch_specs

  def Evaluate(self, batches):
    for batch in batches:
      self.seen.append(int(batch.i[0]))
      if self.seen[-1] == self._at:
        self._stop.signal = signal.SIGINT
    return {'loss': (1.5, len(self.seen))}


@pytest.mark.parametrize('limit, count', [(0, 10), (3, 3)])
def testEvaluatesTheWholeDataSetOrItsBeginning(tmp_path, limit, count):
  runner = _Runner(limit=limit)
  done = dataset_pass.Evaluation(
    runner, _Numbers.Params(), 'Dev', str(tmp_path), stop_request.StopRequest()
  )
  assert done.Run(7) == {'loss': 1.5}
  assert runner.seen == list(range(count))
  assert (tmp_path / 'eval_dev' / 'score-00000007.txt').read_text() == 'loss: 1.5\n'


def testASignalEndsAnEvaluationBetweenBatches(tmp_path, capsys):
  stop = stop_request.StopRequest()
  runner = _Runner(stop, at=3)
  done = dataset_pass.Evaluation(runner, _Numbers.Params(), 'Test', str(tmp_path), stop)
  assert done.Run(7) is None
  assert runner.seen == [0, 1, 2, 3]
  assert capsys.readouterr().out == 'Test at step 7: stopped by SIGINT, no result\n'
  assert os.listdir(tmp_path) == []


def testASampleCannotControlTheTerminal(tmp_path, capsys):
  runner = _Runner(decoded={'continuation': ['a\x1b[2Jb\x07\n\tc\x00é\r\ufffd']})
  done = dataset_pass.Evaluation(
    runner, _Numbers.Params(), 'Test', str(tmp_path), stop_request.StopRequest()
  )
  done.WriteSample(7)
  assert capsys.readouterr().out == ''
  done.PrintSample()
  done.PrintSample()
  printed = capsys.readouterr().out
  assert printed == '--- continuation\na\ufffd[2Jb\ufffd\n\tc\ufffdé\ufffd\ufffd\n'


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
