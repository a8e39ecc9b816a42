# SPDX-License-Identifier: Apache-2.0
"""`tools.accelerator_check`: a report of rows, also if a check crashes or hangs."""

import html
import json
import os
import stat
import sys
import time

import pytest
import tensorflow as tf
from absl import flags

from lingvo_gpipe import dropout
from tests import processes
from tools import accelerator_check
from tools.accelerators import checks

_PROGRAM = str(processes.ROOT / 'tools' / 'accelerator_check.py')


def testTheReport(forks, tmp_path):
  folder = tmp_path / 'out'
  (folder / 'a_run').mkdir(parents=True)
  (folder / 'a_run' / 'timeline_3.html').write_text('<svg id="steps"></svg>')
  done = forks.Run(_PROGRAM, f'--output_dir={folder}', '--checks=masks', '--platform=cpu')
  out = processes.Succeeded(done).stdout
  report = json.loads((folder / 'report.json').read_text())
  assert [row['check'] for row in report['rows']] == ['masks'] * 4  # Two devices, with XLA and not.
  assert all(row['pass'] for row in report['rows'])
  for name in ('report.md', 'report.html'):
    text = (folder / name).read_text()
    assert text.count('PASS') == 5 and '4 PASS, 0 FAIL' in text and 'report.json' in text
  assert '<svg id="steps">' in html.unescape((folder / 'report.html').read_text())
  assert 'a_run/timeline_3.html' in (folder / 'report.md').read_text()
  assert '4 PASS, 0 FAIL' in out and 'report.json' in out
  assert (folder / 'masks.log').exists()


@pytest.mark.parametrize(
  'flag, name',
  [('--output_dir=', 'output_dir'), ('--checks=copies,cuda', "'cuda'")],
)
def testMistakesAreOneLine(forks, tmp_path, flag, name):
  done = forks.Run(_PROGRAM, f'--output_dir={tmp_path}', flag)
  assert done.returncode == 2 and name in done.stderr
  assert len(processes.Messages(done.stderr)) == 1


@pytest.fixture
def run_check(monkeypatch, tmp_path):
  """Returns a function that runs a check whose process is a shell script."""
  if 'timeout' not in flags.FLAGS:
    accelerator_check.DefineFlags()
  flags.FLAGS(['test', '--timeout=2'])

  def Run(script):
    path = tmp_path / 'python'
    path.write_text(
      f'#!/bin/sh\necho \'{{"row": "a", "pass": true, "text": "", "x": 1}}\'\n{script}\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, 'executable', str(path))
    return accelerator_check.RunCheck('masks', {}, str(tmp_path))

  yield Run
  flags.FLAGS.unparse_flags()


@pytest.mark.parametrize(
  'script, text', [('kill -ABRT $$', '-6'), ('exit 3', '3'), ('sleep 60', '--timeout')]
)
def testACrashOrHangIsReportedInTheLastRow(run_check, script, text):
  first, last = run_check(script)
  assert first['row'] == 'a' and first['pass']
  assert last['row'] == last['check'] == 'masks' and not last['pass'] and text in last['text']


def testProcessesOfACheckEndWithIt(run_check, tmp_path):
  run_check(f'sleep 60 & echo $! > {tmp_path}/child')
  child = int((tmp_path / 'child').read_text())
  for _ in range(100):
    try:
      with open(f'/proc/{child}/stat', encoding='ascii') as f:
        if f.read().rsplit(')', 1)[1].split()[0] == 'Z':  # Nobody waits for it here.
          return
    except OSError:
      return
    time.sleep(0.1)
  os.kill(child, 9)
  raise AssertionError('the process goes on')


def _Rows(name, capsys):
  checks.CHECKS[name][0](checks.Place('cpu', ''))
  return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize('name', ['devices', 'keras_xla', 'dtypes', 'replicas', 'copies'])
def testACheckPasses(name, capsys):
  """All but `keras`: `keras_xla` without XLA, as in `dtypes` and `replicas`."""
  rows = _Rows(name, capsys)
  assert rows and all(row['pass'] for row in rows), rows


def testMemoryOfAnAcceleratorComesFromItsAllocator(monkeypatch, capsys):
  """Stand-ins for accelerators, whose allocators have 1.5 and 3 times the predicted peaks."""
  monkeypatch.setattr(checks.Place, 'is_cpu', False)
  monkeypatch.setattr(checks, '_MEMORY_SIZES', {'dim': 8, 'batch': 64})
  monkeypatch.setattr(checks.rematerialisation, 'POLICIES', ('stage',))
  monkeypatch.setattr(tf.config.experimental, 'reset_memory_stats', lambda device: None)
  runners = []

  class Runner(checks.train_runner.TrainRunner):
    def __init__(self, *args):
      super().__init__(*args)
      runners.append(self)

  def Allocated(device):
    index = int(device[-1])
    predicted = runners[0].cut.memory[index].activations if runners else 0
    return {'current': 100, 'peak': 100 + (1.5, 3)[index] * predicted}

  monkeypatch.setattr(checks.train_runner, 'TrainRunner', Runner)
  monkeypatch.setattr(checks, '_AllocatedBytes', Allocated)
  place = checks.Place('cpu', '')
  place.cluster = checks.cluster.Cluster.Create(2, platform='cpu')
  checks.CHECKS['memory'][0](place)
  rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
  assert [row['row'] for row in rows] == ['memory stage CPU:0', 'memory stage CPU:1']
  assert [row['pass'] for row in rows] == [True, False]


def testEqualityCoversSchedulesAndPolicies(monkeypatch, capsys):
  monkeypatch.setattr(checks.rematerialisation, 'POLICIES', ('layer',))
  monkeypatch.setattr(checks.schedules, 'Names', lambda: ['looped_bfs', '1f1b', 'forward_only'])
  rows = _Rows('equality', capsys)
  assert [row['row'] for row in rows] == ['looped_bfs layer', '1f1b layer']
  assert all(row['pass'] for row in rows), rows


def testXlaIsLeftOutOnAGpuThatIsTooNew(monkeypatch, capsys):
  monkeypatch.setattr(checks.accelerators, 'UsesXla', lambda xla, devices: False)
  monkeypatch.setattr(checks.accelerators, 'XlaProblem', lambda gpus: 'NVIDIA Y')
  (row,) = _Rows('equality_xla', capsys)
  assert row['pass'] and 'NVIDIA Y' in row['text']


def testAWrongMaskFails(monkeypatch, capsys):
  right = dropout.ApplyDropout

  def Apply(x, keep_prob, noise_shape, seed):
    shift = int(not tf.executing_eagerly())
    return right(x, keep_prob, noise_shape, seed + shift)

  monkeypatch.setattr(dropout, 'ApplyDropout', Apply)
  rows = _Rows('masks', capsys)
  assert not any(row['pass'] for row in rows)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
