# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of workers and replicas on this machine, and prints tables in Markdown.

    python -m tools.workers_benchmark

Run it in the checkout on an idle machine; docs/worker_cost.md describes the measurement. A new
process with one thread of operations per device trains some steps for each line of a table. If the
devices are workers, each worker is another process. All lines train with the same mini-batches and
the same total number of micro-batches.
"""

from __future__ import annotations

import itertools
import os
import re
import statistics
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from absl import flags

from lingvo_gpipe.cli import binary
from lingvo_gpipe.core import params_text, text_table
from tools import program
from tools.benchmarking import socket_bytes, workers_trial
from tools.planning import report

FLAGS = flags.FLAGS

_MODEL = 'lm.stdlib.ByteTransformerGPipe2'
_WIDE = 'task.model_dim:512;task.hidden_dim:2048;task.num_heads:8'
_PLACES, _SUMS = ('process', 'workers'), ('send', 'collective')
_HEAD = (
  'R', 'K', 'devices in', 'sums', 'cores', 'best', 'median', 'speed-up', 'between workers',
  'with the trainer', 'peak MiB',
)  # fmt: skip
# Flags of `binary` that the grid and the places replace here.
_NOT_HERE = (
  'cluster', 'devices', 'local_workers', 'logdir', 'max_steps', 'num_devices', 'num_replicas',
  'platform', 'xla_cache',
)  # fmt: skip
_LEGEND = """\
Speed-up compares the best step with the first line's. Bytes are sent in a step between workers
and between them and the trainer, both ways; in parentheses, the bytes that must be sent. Peak MiB
is VmHWM of the trainer and of each worker; in parentheses, the share of TensorFlow alone."""


def _DefineFlags() -> None:
  flags.DEFINE_multi_string(
    'variant', None,
    f'Overrides that come last; a table for each. Without --model: {_MODEL}, and once more with '
    f'{_WIDE}.',
  )  # fmt: skip
  flags.DEFINE_list('grid', ['1x1', '1x2', '2x1'], 'Numbers of replicas and stages, RxK.')
  flags.DEFINE_list('devices_in', list(_PLACES), f'Of {", ".join(_PLACES)}.')
  flags.DEFINE_list('sums', list(_SUMS), f'How replicas add gradients: of {", ".join(_SUMS)}.')
  flags.DEFINE_integer('num_micro_batches', 4, 'Total number of micro-batches of all replicas.', 1)
  flags.DEFINE_integer('repeats', 3, 'Minimum number of timed steps per process.', lower_bound=1)
  flags.DEFINE_float(
    'seconds', 6.0, 'Minimum duration of the timed steps, in seconds.', lower_bound=0.0
  )
  flags.DEFINE_integer(
    'rounds',
    3,
    'Number of rounds over all lines, because the speed of a machine varies.',
    lower_bound=1,
  )
  flags.DEFINE_integer('timeout', 600, 'Time limit in seconds for one process.', lower_bound=1)


def _Grid() -> list[tuple[int, int]]:
  """Returns (R, K) for each entry of --grid; raises UsageError if an entry is invalid."""
  grid = []
  for text in FLAGS.grid:
    match = re.fullmatch(r'([1-9]\d*)x([1-9]\d*)', text)
    if not match:
      raise binary.UsageError(
        f'--grid: expected entries such as 2x1, replicas and stages; got {text!r}'
      )
    grid.append((int(match[1]), int(match[2])))
    if FLAGS.num_micro_batches % grid[-1][0]:
      raise binary.UsageError(
        f'--grid: {text} cannot share --num_micro_batches={FLAGS.num_micro_batches} out evenly'
      )
  return grid


def _Trials(key: str, overrides: Sequence[str]) -> list[workers_trial.Trial]:
  """Returns the trials of one table."""
  grid = _Grid()
  most = min(max(r * k for r, k in grid), len(os.sched_getaffinity(0)))
  trials = []
  for (r, k), place in itertools.product(grid, program.Names('devices_in', _PLACES)):
    on_workers = place == 'workers'
    for all_reduce in program.Names('sums', _SUMS) if r > 1 else ['']:
      # Also measure one device with all cores, because TensorFlow has other threads.
      for cores in sorted({1, most}) if r * k == 1 and not on_workers else [r * k]:
        values = {
          'num_stages': k,
          'stages_per_device': 1,
          'splits': [],
          'num_micro_batches': FLAGS.num_micro_batches // r,
        }
        text = ';'.join(f'task.stack.{name}:{value}' for name, value in values.items())
        trials.append(
          workers_trial.Trial(
            key=key,
            packages=binary.Packages(),
            overrides=[*overrides, text, f'task.train.all_reduce:{all_reduce or "auto"}'],
            num_replicas=r,
            num_stages=k,
            all_reduce=all_reduce,
            on_workers=on_workers,
            num_cores=cores,
            repeats=FLAGS.repeats,
            seconds=FLAGS.seconds,
          )
        )
  return trials


def Row(trial: workers_trial.Trial, results: Sequence[dict[str, Any]], first: float) -> list[str]:
  """Returns the cells of a line.

  Args:
    trial: the trial.
    results: the result of each round.
    first: seconds of the fastest step of the first line.
  """
  steps = [seconds for result in results for seconds in result['steps']]

  def Bytes(name: str) -> str:
    counts = [result[name] for result in results]
    if not trial.on_workers or None in counts:
      return '-'
    theory = results[0][f'{name}_theory']
    return f'{text_table.FormatBytes(statistics.median(counts))} ({text_table.FormatBytes(theory)})'

  peaks = zip(*(result['peak_mib'] for result in results), strict=True)
  starts = zip(*(result['start_mib'] for result in results), strict=True)
  return [
    str(trial.num_replicas),
    str(trial.num_stages),
    'workers' if trial.on_workers else 'one process',
    trial.all_reduce or '-',
    str(trial.num_cores),
    report.SecondsText(min(steps)),
    report.SecondsText(statistics.median(steps)),
    f'{first / min(steps):.2f}',
    Bytes('between'),
    Bytes('with_trainer'),
    ', '.join(
      f'{max(peak):.0f} ({max(start):.0f})' for peak, start in zip(peaks, starts, strict=True)
    ),
  ]


def Table(measured: Sequence[tuple[workers_trial.Trial, Sequence[dict[str, Any]]]]) -> str:
  """Returns a table in Markdown and the maximum difference of the losses."""
  first = min(seconds for result in measured[0][1] for seconds in result['steps'])
  rows = [_HEAD, ['---'] * len(_HEAD), *(Row(trial, results, first) for trial, results in measured)]
  losses = [result['loss'] for _, results in measured for result in results]
  apart = (max(losses) - min(losses)) / max(abs(losses[0]), 1e-30)
  lines = [f'| {" | ".join(row)} |' for row in rows]
  return '\n'.join([*lines, '', f'The losses of all second steps agree to {apart:.1e}.'])


def _Measure() -> int:
  for name in _NOT_HERE:
    if FLAGS[name].present:
      raise binary.UsageError(
        f'--{name} does nothing here: --grid and --devices_in choose the measurements'
      )
  key = FLAGS.model or _MODEL
  tables: dict[str, list[workers_trial.Trial]] = {}
  for variant in FLAGS.variant or (['', _WIDE] if FLAGS.model is None else ['']):
    overrides = [*binary.Overrides(), variant]
    tables[variant] = _Trials(key, overrides)
    params = binary.ModelParams('Train', key)
    for trial in tables[variant]:
      for text in trial.overrides[len(overrides) - 1 :]:
        params.ApplyOverrides(params_text.ParseOverrides(text))
  trials = [trial for table in tables.values() for trial in table]
  cores, total = len(os.sched_getaffinity(0)), FLAGS.rounds * len(trials)
  print(f'{total} processes on {cores} cores, load {os.getloadavg()[0]:.1f}', flush=True)
  num_needed = max(trial.num_cores for trial in trials)
  if cores < num_needed:
    print(f'{num_needed} cores are needed: expect no speed-up', flush=True)
  if not socket_bytes.IsThere():
    print('bytes are not counted: there is no `ss` here (iproute2)', flush=True)
  results: dict[str, list[dict[str, Any]]] = {}
  failed, begin = 0, time.monotonic()
  for i, trial in enumerate(trials * FLAGS.rounds, 1):
    try:
      result = trial.Run(FLAGS.timeout)
    except (RuntimeError, subprocess.TimeoutExpired) as e:
      failed += 1
      late = f'it took more than --timeout={FLAGS.timeout} seconds'
      why = e if isinstance(e, RuntimeError) else late
      print(f'[{i}/{total}] {trial.name}: FAILED\n{why}', flush=True)
      continue
    results.setdefault(trial.ToJson(), []).append(result)
    best = report.SecondsText(min(result['steps']))
    print(f'[{i}/{total}] {trial.name}: {best} ({time.monotonic() - begin:.0f} s)', flush=True)
  for variant, mine in tables.items():
    measured = [(trial, results[trial.ToJson()]) for trial in mine if trial.ToJson() in results]
    if measured:
      print(f'\n{" with ".join(filter(None, [key, variant]))}:\n\n{Table(measured)}')
  if results:
    print(f'\n{_LEGEND}')
  return 1 if failed else 0


def Run() -> None:
  """Entry point."""
  binary.DefineFlags()
  _DefineFlags()
  binary.Run(_Measure, __doc__ or '')


if __name__ == '__main__':
  Run()
