# SPDX-License-Identifier: Apache-2.0
"""Measures the pipeline's speed on this machine and prints a table of ratios.

Run `python -m tools.benchmark` in the checkout; docs/performance.md describes the measurements. A
separate process with one thread of operations per device measures each line of the table.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from absl import flags

from lingvo_gpipe.pipeline.schedule import rematerialisation, schedules
from tools import program
from tools.benchmarking import configuration, report

FLAGS = flags.FLAGS

_TORCH_PROGRAM = program.ROOT / 'tools' / 'benchmarking' / 'torch_peer.py'
_XLA = {'on': [True], 'off': [False], 'both': [True, False]}


class _WorkerError(Exception):
  """A process that measured a configuration failed; the message is the end of its output."""


def DefineFlags() -> None:
  """Defines the flags; all have defaults that together take less than 8 minutes."""
  flags.DEFINE_list('workloads', ['a', 'b'], 'The workloads to measure: a, b, c or d.')
  flags.DEFINE_multi_string('size', [], 'Changes a size, such as a.dim=64 or b.chunk=0,256.')
  flags.DEFINE_list('num_stages', ['1', '2'], 'The numbers of stages K.')
  flags.DEFINE_list('num_micro_batches', ['8'], 'The numbers of micro-batches M.')
  flags.DEFINE_list('schedules', ['gpipe', '1f1b', '1f1b_fused'], 'Schedules for K > 1.')
  flags.DEFINE_integer(
    'stages_per_device',
    1,
    'Stages per device of the schedules with several in a loop; those in a V have two.',
    lower_bound=1,
  )
  flags.DEFINE_list('remat_policies', ['stage'], 'Re-materialisation policies.')
  flags.DEFINE_list('memory_limits', [], 'MiB of a device, each a line of the policy auto.')
  flags.DEFINE_enum('xla', 'on', list(_XLA), 'Compile the stages by XLA.')
  flags.DEFINE_integer('repeats', 3, 'Minimum number of timed steps per process.', lower_bound=1)
  flags.DEFINE_float(
    'seconds', 12.0, 'Minimum duration of the timed steps, in seconds.', lower_bound=0.0
  )
  flags.DEFINE_integer(
    'rounds',
    1,
    'Number of rounds over all configurations, because the speed of a machine varies.',
    lower_bound=1,
  )
  flags.DEFINE_enum('peer', None, [configuration.TORCH], 'Also measure this peer on the same work.')
  flags.DEFINE_string('peer_python', sys.executable, 'Python interpreter with the peer installed.')
  flags.DEFINE_string('output', None, 'Write each result as a JSON line into this file.')
  flags.DEFINE_string(
    'table_of', None, 'Only print the table of the results that --output wrote into this file.'
  )
  flags.DEFINE_string('plot', None, 'Draw speed-ups into this PNG file; needs matplotlib.')
  flags.DEFINE_integer('timeout', 600, 'Time limit in seconds for one process.', lower_bound=1)


def Grid() -> list[configuration.Configuration]:
  """Returns the configurations that the flags select.

  Raises:
    ValueError: the value of a flag is invalid.
  """
  grid = configuration.Grid(
    workloads=program.Names('workloads', configuration.WORKLOADS),
    sizes=FLAGS.size,
    num_stages=program.Numbers('num_stages'),
    num_micro_batches=program.Numbers('num_micro_batches'),
    schedules=program.Names('schedules', schedules.Names()),
    remat_policies=program.Names(
      'remat_policies', (*rematerialisation.POLICIES, rematerialisation.AUTO)
    ),
    memory_limits=program.Numbers('memory_limits') if FLAGS.memory_limits else [0],
    xla=_XLA[FLAGS.xla],
    repeats=FLAGS.repeats,
    seconds=FLAGS.seconds,
    peer=FLAGS.peer,
    stages_per_device=FLAGS.stages_per_device,
  )
  for config in grid:
    if config.num_micro_batches > config.sizes['batch']:
      raise ValueError(f'{config.name}: a batch of {config.sizes["batch"]} has no such M')
    k, v = config.num_stages, config.stages_per_device
    if config.system != configuration.KERAS:
      schedules.Get(config.schedule, k * v, config.num_micro_batches, k)
  return grid


def Measure(config: configuration.Configuration) -> dict[str, Any]:
  """Measures one configuration in a new process and returns its result.

  Raises:
    _WorkerError: the process failed or took too long.
  """
  try:
    if config.system == configuration.TORCH:
      done = subprocess.run(
        [FLAGS.peer_python, str(_TORCH_PROGRAM), config.ToJson()],
        capture_output=True,
        text=True,
        timeout=FLAGS.timeout,
        check=False,
      )
    else:
      done = program.RunModule('tools.benchmarking.worker', config.ToJson(), FLAGS.timeout)
  except subprocess.TimeoutExpired as e:
    raise _WorkerError(f'it took more than --timeout={FLAGS.timeout} seconds') from e
  if done.returncode:
    raise _WorkerError('\n'.join(done.stderr.splitlines()[-15:]) or f'status {done.returncode}')
  return json.loads(done.stdout.splitlines()[-1])


def PeerIsThere() -> bool:
  """Whether the peer's Python can import torch; prints a line if it cannot."""
  code = 'import torch, torch.distributed.pipelining, numpy; print(torch.__version__)'
  try:
    done = subprocess.run(
      [FLAGS.peer_python, '-c', code], capture_output=True, text=True, timeout=120, check=False
    )
    problem = (done.stderr.splitlines() or [''])[-1] if done.returncode else ''
    version = done.stdout.strip()
  except (OSError, subprocess.TimeoutExpired) as e:
    problem = str(e)
  if problem:
    print(
      f'--peer=torch: {FLAGS.peer_python} has no torch ({problem}), so it is left out; '
      '`pip install torch==2.13.0 numpy` into some environment, and name its Python by '
      '--peer_python'
    )
    return False
  print(f'peer: torch {version}')
  return True


def Read(path: str) -> list[report.Measured]:
  """Returns the results that earlier runs wrote into their --output.

  Raises:
    ValueError: a file does not exist or holds something else.
  """
  text = program.ReadText(path, 'table_of')
  try:
    lines = list(map(json.loads, text.splitlines()))
    return [
      (configuration.Configuration(**line['configuration']), line['result']) for line in lines
    ]
  except (ValueError, KeyError, TypeError, RecursionError) as e:
    raise ValueError(f'--table_of: expected a file that --output wrote: {path}: {e!r}') from e


def Show(measured: Sequence[report.Measured]) -> None:
  """Prints the table and draws the plot; merges the rounds of a configuration into one line."""
  rounds: dict[str, list[Any]] = {}
  for config, result in measured:
    same = dataclasses.replace(config, repeats=0, seconds=0.0)
    rounds.setdefault(same.ToJson(), []).append(result)
  results = [
    (configuration.Configuration.FromJson(text), report.Merge(each))
    for text, each in rounds.items()
  ]
  print('\n' + report.Table(results))
  if FLAGS.plot:
    try:
      report.Plot(results, FLAGS.plot)
    except ImportError:
      print('--plot: matplotlib is not installed, so there is no picture')


def Run() -> int:
  """Measures all configurations and prints the table; returns 1 if a measurement failed."""
  if path := FLAGS.table_of:
    lines = Read(path)
    try:
      Show(lines)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as e:
      raise ValueError(f'--table_of: expected a file that --output wrote: {path}: {e!r}') from e
    return 0
  grid = Grid()
  if FLAGS.peer and not PeerIsThere():
    grid = [config for config in grid if config.system != configuration.TORCH]
  cores = len(os.sched_getaffinity(0))
  num_needed = max(config.num_cores for config in grid)
  print(f'{len(grid)} configurations on {cores} cores, load {os.getloadavg()[0]:.1f}', flush=True)
  if cores < num_needed:
    print(f'{num_needed} cores are needed: expect no speed-up', flush=True)
  measured: list[report.Measured] = []
  failed, total = 0, len(grid) * FLAGS.rounds
  start, started = time.monotonic(), time.time()
  for i, config in enumerate(grid * FLAGS.rounds, 1):
    try:
      result = Measure(config)
    except _WorkerError as e:
      failed += 1
      print(f'[{i}/{total}] {config.name}: FAILED\n{e}', flush=True)
      continue
    # Rounds of several runs that wrote into one file do not belong together.
    result['round'] = f'{started:.0f}/{(i - 1) // len(grid)}'
    measured.append((config, result))
    seconds = time.monotonic() - start
    print(
      f'[{i}/{total}] {config.name}: {report.Best(result):.4g} s ({seconds:.0f} s so far)',
      flush=True,
    )
    if FLAGS.output:
      with open(FLAGS.output, 'a', encoding='utf-8') as f:
        line = {'configuration': json.loads(config.ToJson()), 'result': result, 'time': time.time()}
        f.write(json.dumps(line) + '\n')
  if measured:
    Show(measured)
  return 1 if failed else 0


if __name__ == '__main__':
  program.Main(DefineFlags, Run, __doc__)
