# SPDX-License-Identifier: Apache-2.0
"""The benchmark runs, and its table and lines are complete; speeds are not tested."""

import importlib.util
import json
import os
import random
import re
import sys

import pytest

from lingvo_gpipe.pipeline.schedule import schedules
from tests import naming, processes
from tools.benchmarking import configuration, report, standalone, torch_peer, worker

_PROGRAM = str(processes.ROOT / 'tools' / 'benchmark.py')
_TINY = [
  '--size=a.dim=16', '--size=a.layers=2', '--size=a.batch=8', '--repeats=2',
  '--seconds=0', '--num_micro_batches=2',
]  # fmt: skip


def _Config(**changes):
  common = {
    'system': 'lingvo_gpipe',
    'workload': 'a',
    'sizes': {'layers': 4},
    'num_stages': 2,
    'num_micro_batches': 4,
    'schedule': 'gpipe',
    'remat_policy': 'stage',
    'xla': True,
    'num_cores': 2,
    'repeats': 3,
    'seconds': 0.0,
  }
  return configuration.Configuration(**{**common, **changes})


def testATinyBenchmarkRuns(forks, tmp_path):
  output = tmp_path / 'results.jsonl'
  done = processes.Run(
    'benchmark', *_TINY, '--workloads=a', '--schedules=1f1b_fused', '--xla=off',
    f'--output={output}', '--peer=torch', '--peer_python=/no/such/python',
    command=[sys.executable, '-m', 'tools.benchmark'],
  )  # fmt: skip
  lines = processes.Succeeded(done).stdout.splitlines()
  assert naming.Names(lines[0], '--peer=torch', '/no/such/python', 'pip install torch')
  start = lines.index('workload (a): layers 2, dim 16, batch 8')
  for column in report.COLUMNS:
    assert column in lines[start + 1]
  rows = [line.split() for line in lines[start + 2 :]]
  # Without the number of cores, which differs on a machine with one core.
  assert [row[1:6] for row in rows] == [
    ['1', '2', 'gpipe', 'stage', 'off'],
    ['1', '2', 'gpipe', 'stage', 'off'],
    ['2', '2', '1f1b_fused', 'stage', 'off'],
  ]
  for row in rows:
    cells = dict(zip(report.COLUMNS, row, strict=True))
    assert cells['eff. best'].endswith('%') and cells['eff. median'].endswith('%')
    assert float(cells['pred. best']) > 0 and float(cells['pred. median']) > 0
    assert cells['peer best'] == cells['peer median'] == '-'
  results = [json.loads(line) for line in output.read_text().splitlines()]
  assert len(results) == 3
  for line in results:
    result = line['result']
    assert len(result['steps']) == 2 and min(result['steps']) > 0
    assert result['memory_mib'] > result['memory_before_mib'] > 0
    assert 0 < result['simulated_best'] <= result['simulated_median']
    assert 0 < result['predicted_best'] <= result['simulated_best'] * (1 + 1e-9)
  table = processes.Succeeded(forks.Run(_PROGRAM, f'--table_of={output}')).stdout.splitlines()
  assert table[1:] == lines[start:]
  fused = results[2]['result']['actions']
  assert fused['F'][0] > 0 and fused['B'][0] > 0 and fused['V'][0] == 0
  assert fused['F'][1] == 0 and fused['B'][1] == 0 and fused['V'][1] > 0
  assert len(fused['update']) == 2


@pytest.fixture
def measure(capsys, monkeypatch):
  """Returns a function that returns what a process of the benchmark prints for a configuration.

  It runs in this process, in which TensorFlow traces faster. Long graphs, which call an action many
  times, are in `testATinyBenchmarkRuns`.
  """
  cores = os.sched_getaffinity(0)
  monkeypatch.setattr(standalone, '_SECONDS', 1e-3)

  def Measure(config):
    monkeypatch.setattr(sys, 'argv', ['worker', config.ToJson()])
    random.seed(0)  # As in each new process of a test.
    try:
      worker.main()
    finally:
      os.sched_setaffinity(0, cores)
    return json.loads(capsys.readouterr().out.splitlines()[-1])

  return Measure


def testKerasAndItsPipelinesAreAWorkload(measure):
  pytest.importorskip('keras_hub')
  sizes = {'layers': 1, 'dim': 8, 'batch': 4, 'time': 4, 'vocab': 11, 'heads': 2}
  grid = configuration.Grid(
    workloads=['c'], sizes=[f'c.{name}={value}' for name, value in sizes.items()],
    num_stages=[1, 2], num_micro_batches=[2], schedules=['1f1b_fused'], remat_policies=['stage'],
    xla=[False], repeats=1, seconds=0.0, peer=None,
  )  # fmt: skip
  results = [measure(config) for config in grid]
  *_, plain, single, piped = report.Table(list(zip(grid, results, strict=True))).splitlines()
  assert plain.split()[:6] == ['keras', '1', '1', '-', 'none', 'off']
  assert single.split()[:6] == ['lingvo_gpipe', '1', '1', '1f1b_fused', 'none', 'off']
  assert piped.split()[:6] == ['lingvo_gpipe', '2', '2', '1f1b_fused', 'stage', 'off']
  losses = [result['loss'] for result in results]
  assert losses == pytest.approx(losses[:1] * 3, rel=1e-5)
  column = report.COLUMNS.index('speed-up')
  ratios = [float(line.split()[column]) for line in (plain, single, piped)]
  best = [min(result['steps']) for result in results]
  assert ratios == pytest.approx([best[0] / seconds for seconds in best], abs=0.01)


_SIZES_B = {'layers': 1, 'dim': 8, 'batch': 4, 'time': 4, 'vocab': 11, 'heads': 2}


@pytest.mark.parametrize(
  'changes, letters',
  [
    ({'schedule': 'zb_h1', 'remat_policy': 'none', 'xla': True}, {'F', 'I', 'W'}),
    ({'schedule': 'zb_h1', 'remat_policy': 'except_last'}, {'F', 'I', 'i', 'W', 'w'}),
    ({'schedule': '1f1b', 'remat_policy': 'except_last'}, {'F', 'B', 'b'}),
    (
      {
        'schedule': 'interleaved_1f1b',
        'remat_policy': 'layer',
        'stages_per_device': 2,
        'sizes': {**_SIZES_B, 'layers': 2},
      },
      {'F', 'B'},
    ),
  ],
)
def testWorkloadBTimesEveryKindOfAction(measure, changes, letters):
  config = _Config(workload='b', sizes=_SIZES_B, num_micro_batches=2, repeats=1, xla=False)
  config = type(config)(**{**vars(config), **changes})
  actions = measure(config)['actions']
  alone = actions.pop('alone')
  assert alone.keys() == letters
  assert actions.keys() == letters | {'update'}
  for kind, times in actions.items():
    assert len(times) == (2 if kind == 'update' else 2 * config.stages_per_device)
    if kind in 'Ii':
      assert times.pop(0) == 0  # The gradient of the first stage's input is not needed.
    assert min(times) > 0


# ---- meaning of the figures ----------------------------------------------------------------------


def testSimulatedTimesFollowTheFormula():
  def Times(actions, update, alone=None):
    num_stages = len(actions['F'])
    return standalone.Times(
      actions, alone or actions, update, [any(map(str.islower, actions))] * num_stages
    )

  times = Times({'F': [[1.0, 2.0]] * 2, 'B': [[3.0, 4.0]] * 2}, [[0.5, 0.7]] * 2)
  schedule = schedules.Get('gpipe', 2, 4)
  # (M + K - 1)(F + B) + update.
  assert times.Simulate(schedule, min) == pytest.approx(5 * 4.0 + 0.5)
  assert times.Simulate(schedule, max) == pytest.approx(5 * 6.0 + 0.7)
  # All micro-batches except the last recompute; with one stage nothing overlaps.
  times = Times({'F': [[1.0]], 'B': [[3.0]], 'b': [[2.0]]}, [[0.0]])
  assert times.Simulate(schedules.Get('gpipe', 1, 4), min) == pytest.approx(4 * 1 + 3 * 3 + 2)
  # With a split backward; without an I, W recomputes.
  for split in ({'I': 2, 'i': 1, 'W': 1, 'w': 1}, {'I': 0, 'i': 0, 'W': 3, 'w': 2}):
    times = Times({kind: [[t]] for kind, t in {'F': 1, **split}.items()}, [[0.0]])
    assert times.Simulate(schedules.Get('zb_h1', 1, 4), min) == 4 * 1 + 3 * 3 + 2
  fused = {'F': [[1.0], [0.0]], 'B': [[3.0], [0.0]], 'V': [[0.0], [3.0]]}
  times = Times(fused, [[0.0], [0.0]])
  schedule = schedules.Get('fused_fill_drain', 2, 1)
  assert times.Simulate(schedule, min) == pytest.approx(7.0)
  # Only one device works at a time, on both cores.
  halves = {kind: [[t / 2 for t in times] for times in stages] for kind, stages in fused.items()}
  times = Times(fused, [[0.0], [0.0]], alone=halves)
  assert times.Simulate(schedule, min) == pytest.approx(7.0)
  assert times.Simulate(schedule, min, share_cores=True) == pytest.approx(3.5)


def _Result(*steps, **more):
  return {
    'steps': list(steps), 'cores': 2, 'memory_mib': 100.0, 'trace_seconds': 1.0,
    'compile_seconds': 2.0, **more,
  }  # fmt: skip


def _Cells(config, results):
  return dict(zip(report.COLUMNS, report.Row(config, results), strict=True))


def testRatiosOfTheTable():
  pinned, free = _Config(num_stages=1, num_cores=1), _Config(num_stages=1)
  piped, torch = _Config(), _Config(system='torch', xla=False)
  simulated = {
    'simulated_best': 4.5, 'simulated_median': 5.0, 'predicted_best': 4.0, 'predicted_median': 4.4
  }  # fmt: skip
  results = [
    (pinned, _Result(8.0, 9.0)),
    (free, _Result(6.0)),
    (_Config(num_stages=1, num_cores=1, xla=False), _Result(1.0)),
    (piped, _Result(5.5, 5.0, 6.0, **simulated)),
    (torch, _Result(6.0, 7.0)),
    (_Config(system='torch', xla=False, schedule='1f1b'), _Result(5.5, 5.5, 9.0)),
    (_Config(system='torch', xla=False, remat_policy='none'), _Result(1.0)),
  ]
  cells = _Cells(piped, results)
  assert cells['best s'] == '5' and cells['median s'] == '5.5'
  assert cells['speed-up'] == '1.60' and cells['KM/(M+K-1)'] == '1.60'
  assert cells['eff. best'] == '90.0%' and cells['eff. median'] == '90.9%'
  assert cells['pred. best'] == cells['pred. median'] == '0.80'
  # The best schedule of torch, by best steps and by medians.
  assert cells['peer best'] == '1.10' and cells['peer median'] == '1.00'
  assert _Cells(free, results)['speed-up'] == '1.33'
  assert _Cells(free, results)['peer best'] == '-'
  cells = _Cells(torch, results)
  assert {cells[c] for c in ('speed-up', 'eff. best', 'peer best', 'xla')} == {'-'}
  assert report.Table(results).count('\n') == len(results) + 1
  # Another size has its own table, without a line to compare with.
  other = _Config(sizes={'layers': 5})
  cells = _Cells(other, [*results, (other, _Result(5.0))])
  assert {cells[c] for c in ('speed-up', 'peer best')} == {'-'}
  tables = report.Table([*results, (other, _Result(5.0))]).split('\n\n')
  assert [table.splitlines()[0] for table in tables] == [
    f'workload (a): layers {n}' for n in (4, 5)
  ]


def testRoundsAreMerged():
  def Round(*steps, best, median, predicted, mib):
    simulated = {'simulated_best': best, 'simulated_median': median, 'predicted_best': predicted}
    simulated['predicted_median'] = 2 * predicted
    return {**_Result(*steps), **simulated, 'memory_mib': mib}

  rounds = [
    Round(3.0, 4.0, best=2.0, median=2.5, predicted=1.9, mib=10.0),
    Round(5.0, best=1.5, median=4.0, predicted=1.4, mib=12.0),
    Round(2.0, best=1.8, median=3.0, predicted=1.7, mib=11.0),
  ]
  merged = report.Merge(rounds)
  assert merged['steps'] == [3.0, 4.0, 5.0, 2.0]
  assert (merged['simulated_best'], merged['simulated_median']) == (1.5, 3.0)
  assert (merged['predicted_best'], merged['predicted_median']) == (1.4, 3.4)
  assert merged['memory_mib'] == 12.0
  assert merged['rounds'] == {0: [3.0, 4.0], 1: [5.0], 2: [2.0]}
  # Results of an older version lack some figures.
  for older in (0, 1):
    del rounds[older]['predicted_best']
  assert report.Merge(rounds)['predicted_best'] == 1.7
  del rounds[2]['predicted_best']
  assert 'predicted_best' not in report.Merge(rounds)


def testARatioOfRoundsHasItsSpread():
  first, second = _Config(num_stages=1, num_cores=1), _Config()
  # The machine is half as fast in the second round, in both lines.
  results = [
    (first, report.Merge([_Result(4.0, 5.0), _Result(8.0, 12.0)])),
    (second, report.Merge([_Result(2.0, 3.0), _Result(5.0, 5.0)])),
  ]
  cells = _Cells(second, results)
  # Medians of the rounds are 4.5 and 2.5, 10 and 5.
  assert cells['vs first'] == '1.90 (1.80-2.00)'
  assert cells['speed-up'] == '1.80 (1.60-2.00)'
  assert _Cells(first, results)['vs first'] == '1.00 (1.00-1.00)'
  # A round that failed in one line is left out of the other.
  rounds = [
    [(1, 4.0), (2, 40.0)], [(0, 1.0), (1, 2.0), (2, 20.0)],
  ]  # fmt: skip
  results = [
    (config, report.Merge([_Result(steps, round=f'0/{n}') for n, steps in each]))
    for config, each in zip((first, second), rounds, strict=True)
  ]
  assert _Cells(second, results)['vs first'] == '2.00 (2.00-2.00)'


def testGridOfConfigurations():
  grid = configuration.Grid(
    workloads=['a', 'b'],
    sizes=['b.batch=8'],
    num_stages=[1, 2],
    num_micro_batches=[4, 8],
    schedules=['gpipe', '1f1b'],
    remat_policies=['stage', 'except_last'],
    xla=[True, False],
    repeats=3,
    seconds=1.0,
    peer='torch',
  )
  assert len(set(map(configuration.Configuration.ToJson, grid))) == len(grid)
  # With K=1 pinned and free; two schedules with K=2; each with XLA on and off; torch cannot except.
  assert len(grid) == 2 * 2 * (2 * (2 + 2) * 2 + 2)
  assert {c.num_cores for c in grid if c.num_stages == 1} == {1, 2}
  assert {c.sizes['batch'] for c in grid if c.workload == 'b'} == {8}
  assert all(configuration.Configuration.FromJson(c.ToJson()) == c for c in grid)


def testOptionsAreLinesOfOneTable():
  grid = configuration.Grid(
    workloads=['b'], sizes=['b.vocab=32', 'b.chunk=0,4', 'b.shared=0,1'], num_stages=[2],
    num_micro_batches=[4], schedules=['1f1b'], remat_policies=['stage'], xla=[False], repeats=3,
    seconds=1.0, peer='torch',
  )  # fmt: skip
  ours = [c.schedule_text for c in grid if c.system == 'lingvo_gpipe']
  assert ours == ['1f1b', '1f1b shared=1', '1f1b chunk=4', '1f1b chunk=4 shared=1']
  assert [c.schedule_text for c in grid if c.system == 'torch'] == ['gpipe', '1f1b']
  results = [(c, _Result(4.0 if c.system == 'torch' else 2.0)) for c in grid]
  assert report.Table(results).count('workload (b)') == 1
  assert {_Cells(c, results)['peer best'] for c in grid if c.system == 'lingvo_gpipe'} == {'2.00'}
  with pytest.raises(ValueError, match='b.chunk=0,4'):
    configuration.Sizes('b', ['b.chunk=0,4'])


def testTorchHasBalancedStages():
  assert torch_peer.StageEnds([1] * 16, 2) == [8, 16]
  # Eight blocks and a softmax that costs five of them.
  assert torch_peer.StageEnds([1] * 8 + [5], 2) == [6, 9]
  assert torch_peer.StageEnds([1] * 48, 8) == list(range(6, 49, 6))
  assert torch_peer.StageEnds([3, 1], 2) == [1, 2]
  assert torch_peer.StageEnds([1] * 10, 4) in ([2, 5, 7, 10], [2, 4, 7, 10], [3, 5, 8, 10])


def testWorkloadCWithoutKerasHubNamesThePackage(monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(ValueError, match='pip install .*keras-hub'):
    configuration.Grid(
      workloads=['c'], sizes=[], num_stages=[1, 2], num_micro_batches=[8],
      schedules=['1f1b_fused'], remat_policies=['stage'], xla=[True], repeats=3, seconds=1.0,
      peer=None,
    )  # fmt: skip


def testOnlyLoopingSchedulesHaveTheFlagsStagesPerDevice():
  grid = configuration.Grid(
    workloads=['a'], sizes=[], num_stages=[1, 2], num_micro_batches=[4],
    schedules=['gpipe', 'interleaved_1f1b', 'zb_v'], remat_policies=['stage'], xla=[True],
    repeats=3, seconds=1.0, peer=None, stages_per_device=2,
  )  # fmt: skip
  assert [(c.num_stages, c.schedule_text) for c in grid if c.num_cores == 2] == [
    (1, 'gpipe'), (2, 'gpipe'), (2, 'interleaved_1f1b v=2'), (2, 'zb_v v=2'),
  ]  # fmt: skip


def testThePlotIsWritten(tmp_path):
  pytest.importorskip('matplotlib')
  pinned, piped = _Config(num_stages=1, num_cores=1), _Config()
  path = tmp_path / 'plot.png'
  report.Plot([(pinned, _Result(8.0)), (piped, _Result(5.0))], str(path))
  assert path.read_bytes().startswith(b'\x89PNG')


@pytest.mark.parametrize(
  'flag, names',
  [
    ('--schedules=gpip', ['--schedules', "'gpip'", '1f1b']),
    ('--workloads=e', ['--workloads', "'e'"]),
    ('--num_micro_batches=0', ['--num_micro_batches', 'at least 1', 'got 0']),
    ('--size=a.dim=8,0', ["'a.dim=8,0'", 'at least 1']),
    ('--size=a.depth=3', ["'a.depth=3'", '<name>=<number>', '<number>,<number>', 'a.layers']),
    ('--table_of=/no/such', ['--table_of', '/no/such']),
    ('both', ["argument 'both'"]),
    ('--num_micro_batches=300', ['batch of 256', 'M']),
  ],
)
def testInvalidFlagsAreRejected(forks, flag, names):
  done = forks.Run(_PROGRAM, flag)
  assert done.returncode == 2
  (line,) = done.stderr.splitlines()
  assert naming.Names(line, *names)


@pytest.mark.parametrize('result', [{}, {'steps': 1.0}, {'steps': [0.0]}, {'steps': ['x']}, 1])
def testATableOfOtherResultsIsRefused(forks, tmp_path, result):
  path = tmp_path / 'results.jsonl'
  line = {'configuration': json.loads(_Config().ToJson()), 'result': result}
  path.write_text(json.dumps(line) + '\n')
  done = forks.Run(_PROGRAM, f'--table_of={path}')
  assert done.returncode == 2
  (line,) = done.stderr.splitlines()
  assert naming.Names(line, '--table_of', '--output', path)


def testHelpListsTheFlagsOfTheGuide(forks):
  text = processes.Succeeded(forks.Run(_PROGRAM, '--help')).stdout
  pages = ('performance.md', 'measurements.md')
  guide = ''.join((processes.ROOT / 'docs' / page).read_text() for page in pages)
  named = set(re.findall(r'(?<![\w-])--([a-z_]+)', guide)) - {'help', 'xla_cache'}
  assert named
  for flag in named:
    assert f'  --{flag}: ' in text


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
