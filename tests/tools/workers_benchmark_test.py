# SPDX-License-Identifier: Apache-2.0
"""The benchmark of workers and replicas: bytes agree with theory; times are not tested."""

import re
import sys

import pytest

from tests import naming, processes
from tools import workers_benchmark
from tools.benchmarking import socket_bytes, workers_trial

_PROGRAM = str(processes.ROOT / 'tools' / 'workers_benchmark.py')


def _Bytes(text):
  number, unit = re.fullmatch(r'([\d.,]+)(B|KiB|MiB)', text).groups()
  return float(number) * 1024 ** ('B', 'KiB', 'MiB').index(unit)


@pytest.mark.skipif(not socket_bytes.IsThere(), reason='no `ss` here, which counts bytes')
def testStagesAndReplicasOnWorkersSendTheNecessaryBytes(forks):
  # Large enough that the overhead of calls is negligible.
  sizes = 'task.model_dim:64;task.hidden_dim:512;input.batch_size:16;input.seq_len:128'
  done = forks.Run(
    _PROGRAM, f'--model={processes.MODEL}',
    f'--model_params_override={processes.TINY};{sizes}', '--grid=1x2,2x1', '--devices_in=workers',
    '--sums=collective', '--num_micro_batches=2', '--repeats=2', '--seconds=0', '--rounds=1',
  )  # fmt: skip
  out = processes.Succeeded(done).stdout
  table = [line.strip('| ').split(' | ') for line in out.splitlines() if line.startswith('| ')]
  head, _, stages, replicas = table
  assert [row[:5] for row in (stages, replicas)] == [
    ['1', '2', 'workers', '-', '2'], ['2', '1', 'workers', 'collective', '2'],
  ]  # fmt: skip
  for row in (stages, replicas):
    cells = dict(zip(head, row, strict=True))
    assert len(cells['peak MiB'].split(', ')) == 3
    for name, most in (('between workers', 1.25), ('with the trainer', 4)):
      measured, theory = map(_Bytes, cells[name].strip(')').split(' ('))
      assert theory <= measured <= most * theory, cells
  # Activations of 16 rows of 128 vectors of 64 floats, and equally many gradients.
  assert stages[8].endswith('(1.0MiB)')
  # ids, labels and weights.
  assert stages[9].endswith('(24.0KiB)')
  assert float(re.search(r'agree to (\S+)\.$', out, re.MULTILINE)[1]) < 1e-5


def _Trial(**changes):
  common = {
    'key': 'a.b.C',
    'packages': ['params'],
    'overrides': [],
    'num_replicas': 1,
    'num_stages': 1,
    'all_reduce': '',
    'on_workers': False,
    'num_cores': 1,
    'repeats': 1,
    'seconds': 0.0,
  }
  return workers_trial.Trial(**{**common, **changes})


def testTheTableIsComplete():
  alone = {'steps': [0.4, 0.3], 'loss': 2.0, 'start_mib': [300.0], 'peak_mib': [500.0]}
  of_bytes = {'between_theory': 4096, 'with_trainer': 3000.0, 'with_trainer_theory': 2048}
  both = {
    'loss': 2.002, 'start_mib': [300.0, 290.0], 'peak_mib': [600.0, 400.0], **of_bytes,
  }  # fmt: skip
  rounds = [
    {**both, 'steps': [0.25], 'between': 4500.0},
    {**both, 'steps': [0.2, 0.3], 'between': 4608.0, 'peak_mib': [590.0, 410.0]},
    {**both, 'steps': [0.5], 'between': 9000.0},
  ]
  sends = _Trial(num_replicas=2, all_reduce='send', on_workers=True, num_cores=2)
  nothing = {'between': None, 'with_trainer': None, 'between_theory': 0, 'with_trainer_theory': 0}
  text = workers_benchmark.Table([(_Trial(), [{**alone, **nothing}]), (sends, rounds)])
  assert text.splitlines()[2:] == [
    '| 1 | 1 | one process | - | 1 | 300ms | 350ms | 1.00 | - | - | 500 (300) |',
    '| 2 | 1 | workers | send | 2 | 200ms | 275ms | 1.50 | 4.5KiB (4.0KiB) | 2.9KiB (2.0KiB) '
    '| 600 (300), 410 (290) |',
    '',
    'The losses of all second steps agree to 1.0e-03.',
  ]


_SS = """\
0      0      127.0.0.1:40000      127.0.0.1:5000 users:(("python",pid=11,fd=7))
\t cubic wscale:7,7 rto:204 bytes_sent:100 bytes_acked:101 bytes_received:9000 segs_out:5
0      0      [::ffff:127.0.0.1]:5000 [::ffff:127.0.0.1]:40000 users:(("python",pid=12,fd=8),("python",pid=14,fd=8))
\t cubic wscale:7,7 bytes_sent:9000 bytes_acked:9000 bytes_received:100
0      0      127.0.0.1:40002      127.0.0.1:5000 users:(("python",pid=11,fd=9))
\t cubic wscale:7,7 rto:204 bytes_sent:23
0      0      [::ffff:127.0.0.1]:5000 [::ffff:127.0.0.1]:40002 users:(("python",pid=12,fd=9))
\t cubic wscale:7,7
0      0      10.0.0.1:22      10.0.0.2:50000 users:(("sshd",pid=13,fd=4))
\t cubic bytes_sent:77
0      0      127.0.0.1:6000      127.0.0.1:6001
\t cubic bytes_sent:78
"""  # noqa: E501


def testCountsOfTheKernelAreParsed():
  assert socket_bytes.Parse(_SS) == {(11, 12): 123, (12, 11): 9000}
  later = {(11, 12): 200, (12, 11): 9000, (11, 13): 5}
  assert socket_bytes.Difference(later, socket_bytes.Parse(_SS)) == {
    (11, 12): 77, (12, 11): 0, (11, 13): 5,
  }  # fmt: skip


@pytest.mark.parametrize(
  'flags, names',
  [
    (['--grid=2'], ['2x1', "got '2'"]),
    (['--grid=3x1'], ['3x1', '--num_micro_batches=4']),
    (['--num_replicas=2'], ['--num_replicas', '--grid']),
    (['--sums=ring'], ['--sums', "'ring'"]),
    (['--variant=task.model_dim:big'], ['task.model_dim']),
    (['--model=lm.stdlib.ByteTransformer'], ['lm.stdlib.ByteTransformer']),
  ],
)
def testErrorsAreOneLine(forks, flags, names):
  done = forks.Run(_PROGRAM, *flags)
  assert done.returncode == 2, done.stdout + done.stderr
  (line,) = processes.Messages(done.stderr)
  assert naming.Names(line, *names)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
