# SPDX-License-Identifier: Apache-2.0
"""Training in cases that are hard to reach from outside the process."""

import json
import re
import signal
import sys

import pytest

from lingvo_gpipe.checkpoint import checkpointer
from lingvo_gpipe.core import params_text
from lingvo_gpipe.distributed import cluster, stop_request
from lingvo_gpipe.evaluation import eval_program
from lingvo_gpipe.experiment import registry
from lingvo_gpipe.learning import optimizer
from lingvo_gpipe.pipeline.cutting import layer_profile
from lingvo_gpipe.training import inspection, train_program
from tests import naming, processes
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
  with pytest.raises(ValueError, match=naming.Naming('skip_nonfinite', 'task.train.learner')):
    _Program(tmp_path, params, check_numerics=True)


def testTooManyNonfiniteStepsInARowEndTheTraining(tmp_path, capsys):
  """Updates are so large that soon no step is finite."""
  more = 'task.train.max_steps:9;task.train.max_nonfinite_steps:2;task.train.save_interval_steps:1;'
  params = _ModelParams(more=f'{more}task.train.ema_decay:0.5')
  params.task.train.learner.learning_rate = 1e30
  assert _Program(tmp_path, params).Run() == 1
  out = capsys.readouterr()
  bad = re.findall(r'\bstep (\d+)\b.*\bgradient\b.*\bskipped\b', out.out)
  first, last = map(int, bad)
  names = f'step {last}', '2 steps', f'({first} to {last}'
  assert naming.Names(out.err, *names)
  assert re.search(r'layer \S+\.stack', out.err)
  store = checkpointer.Checkpointer(str(tmp_path / 'train'))
  info = store.Latest()
  assert info.step == first == last - 1
  assert 'lm.stack.layers[0].emb/ema' in info.tensors
  # A resumed run continues the count.
  assert _Program(tmp_path, params).Run() == 1
  assert naming.Names(capsys.readouterr().err, *names)


def testAnUnwritableLogDirectoryIsReportedBeforeWeightsAreCreated(tmp_path, monkeypatch):
  (tmp_path / 'file').write_text('')
  monkeypatch.setattr(train_program.multi_task_runner, 'Make', None)
  with pytest.raises(OSError, match=naming.Naming(f"'{tmp_path}/file/run/train'")):
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
  with pytest.raises(
    ValueError, match=naming.Naming('ckpt-00000001.json', '~ task.hidden_dim : 32 -> 64')
  ):
    _Program(tmp_path, other)
  # Params that are allowed must still fit the checkpoint.
  with pytest.raises(
    ValueError,
    match=naming.Naming(
      'ckpt-00000001.json', 'variable float32[16, 64]', 'checkpoint float32[16, 32]'
    ),
  ):
    _Program(tmp_path, other, allow_params_change=True).Run()
  assert {name: (tmp_path / name).read_text() for name in described} == described


def testTheEndOfTheDataEndsTheRunAndSaves(tmp_path, capsys):
  # Batches of 4, the last one partial.
  params = training.Params('input.num_epochs:1;input.num_examples:30', max_steps=100)
  training.Train(tmp_path, params)
  names = ('stopped', 'end', 'data', 'step 8', 'checkpoint')
  assert naming.AnyLineNames(capsys.readouterr().out, *names)
  assert processes.Steps(tmp_path) == [8]
  lines = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
  assert [line['step'] for line in lines if line['split'] == 'train'][-1] == 8
  training.Train(tmp_path, params)
  assert naming.AnyLineNames(capsys.readouterr().out, *names)
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
  assert naming.AnyLineNames(out, 'stopped', 'SIGTERM', 'step 1')
  assert not naming.AnyLineNames(out, 'Test', 'step 1')
  assert processes.Steps(tmp_path) == [1]


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
