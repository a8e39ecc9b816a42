# SPDX-License-Identifier: Apache-2.0
"""The programs that reproduce the paper's tables: counts, search and ratios."""

import json
import re
import sys

import pytest
import tensorflow as tf

from lingvo_gpipe.experiment import registry
from lingvo_gpipe.runners import task_cut
from tests import naming, processes
from tools import largest_model, paper_memory, paper_throughput, program
from tools.benchmarking import configuration, memory_trial, workloads

_TRIAL = memory_trial.Trial(
  num_layers=1, num_stages=1, remat_policy='stage', limit_mib=256, num_micro_batches=2,
  dim=64, batch=2, time=8, vocab=16,
)  # fmt: skip


@pytest.mark.parametrize('least, most, largest', [(1, 64, 37), (2, 64, 2), (3, 20, 0), (1, 9, 99)])
def testTheSearchFindsTheLargest(least, most, largest):
  tried = []

  def Fits(n):
    tried.append(n)
    return n <= largest

  actual = largest_model.Largest(Fits, least, most)
  assert actual == (min(largest, most) if largest >= least else 0)
  assert len(tried) == len(set(tried)) and max(tried) <= most
  assert len(tried) <= 2 * most.bit_length() + 1


def testAModelFits():
  assert largest_model.NumParams(_TRIAL) == 16 * 64 * 2 + 16 + 12 * 64**2 + 13 * 64 + 2 * 64


def testAModelDoesNotFit(monkeypatch):
  # The allocator of oneDNN waits 10 s for memory. Only the start of a process turns it off.
  monkeypatch.setenv('TF_ENABLE_ONEDNN_OPTS', '0')
  wide = memory_trial.Trial(**{**json.loads(_TRIAL.ToJson()), 'dim': 1024, 'limit_mib': 32})
  assert largest_model.NumParams(wide) is None  # The weights alone take 48 MiB.


def testAnotherFailureIsReported(forks, monkeypatch):
  def RunModule(module, argument, timeout_seconds):
    del module, timeout_seconds
    return forks.Run(memory_trial.__file__, argument)

  monkeypatch.setattr(program, 'RunModule', RunModule)
  wrong = memory_trial.Trial(**{**json.loads(_TRIAL.ToJson()), 'remat_policy': 'x'})
  with pytest.raises(RuntimeError, match='remat_policy'):
    largest_model.NumParams(wrong)


def testTable1CountsAndPredicts(forks):
  models = 'lm.one_billion_wds.Transformer3,lm.one_billion_wds.Transformer13'
  path = str(processes.ROOT / 'tools' / 'paper_memory.py')
  done = forks.Run(path, f'--models={models}')
  lines = processes.Succeeded(done).stdout.splitlines()
  rows = [re.split(r'\s{1,}', line) for line in lines if line.startswith('lm.')]
  assert [row[4] for row in rows] == ['282,178,816', '785,761,536']
  # 12 bytes per parameter in GiB, as in the paper (with the two figures for Naive-1 swapped).
  assert [row[6:8] for row in rows] == [['3.15', '3.15'], ['8.78', '8.8']]
  naive, pipelined = (float(row[8]) for row in rows)
  # Four times as many layers, but less memory.
  assert 0 < pipelined < naive


def testEveryRowOfTable1IsAnExperiment():
  assert set(paper_memory.TABLE) <= set(registry.ListKeys())


def testThroughputIsRelative():
  steps = {(k, m): (8.0 / k + 1 / m, 4.0 / k + 1 / m) for k in (1, 2, 4, 8) for m in (1, 32)}
  lines = paper_throughput.Table('b', steps).splitlines()
  rows = [line.split() for line in lines[2:-1]]
  assert [row[:2] for row in rows] == [[str(k), str(m)] for m in (1, 32) for k in (1, 2, 4, 8)]
  assert rows[0][2:] == [f'{5 / 9:.2f}', f'{3 / 5:.2f}', '1.00', '-']
  assert rows[1][2:] == ['1.00', '1.00', '1.00', '1']
  assert rows[5][2] == f'{5 / (4 + 1 / 32):.2f}' and rows[6][2] == '-'
  assert rows[7][3:] == [f'{3 / (0.5 + 1 / 32):.2f}', f'{8 * 32 / 39:.2f}', '6.3']
  assert f' K=8 {(2 + 1 / 32) / (0.5 + 1 / 32):.2f}; Table 3 (M=32): K=2 1, K=4 1.8' in lines[-1]


@pytest.mark.parametrize(
  'name, flag, names',
  [
    ('paper_memory', '--models=a.B', ["'a.B'", 'Table 1']),
    ('largest_model', '--num_stages=0', ['--num_stages', 'numbers']),
    ('paper_throughput', '--workloads=a', ["unknown 'a'"]),
    ('paper_throughput', '--num_stages=1,4', ['--num_stages', 2]),
  ],
)
def testErrorsAreOneLine(forks, name, flag, names):
  done = forks.Run(str(processes.ROOT / 'tools' / f'{name}.py'), flag)
  assert done.returncode == 2
  (line,) = done.stderr.splitlines()
  assert naming.Names(line, *names)


def testAnAmoebaNetIsAWorkload():
  sizes = configuration.Sizes('d', ['d.cells=3', 'd.filters=16', 'd.image=32', 'd.batch=2'])
  stack = {'num_stages': 4, 'num_micro_batches': 2}
  task, batch = workloads.Make('d', sizes, stack)
  task.CheckBatch(batch)
  spec = batch.Transform(lambda x: tf.TensorSpec(x.shape, x.dtype))
  cut = task_cut.CutTask(task, spec)
  # The actions of a stage are timed in isolation, so there must not be skip connections.
  assert len(cut.stages) == 4 and not any(layer.skips_out for layer in task.pipeline.layers)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
