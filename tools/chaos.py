# SPDX-License-Identifier: Apache-2.0
"""Attacks the programs at random and checks what they promise.

    python -m tools.chaos --minutes=60 --seed=1

kills and stops training runs and their workers, cuts links between hosts, damages checkpoints,
fills a small disk and limits memory: each run must end bit-for-bit like an undisturbed run. It also
mutates each kind of text and file that is read: each must be read rightly, or refused in one line,
within a time limit. It prints the number of cases of each kind and a command that repeats each
failure; the exit status is 1 if there are any. The effect of a signal depends on timing, so a
repeated case may pass.

It ends only processes that it started. Hosts are network namespaces of this machine, which need
root; so does a small disk, in whose place the size of files may be limited.
"""

from __future__ import annotations

from lingvo_gpipe.cli import binary  # noqa: F401  First: it keeps TensorFlow quiet.

# isort: split
import functools
import os
import pathlib
import random
import shutil
import tempfile
import time
from collections import Counter

from absl import flags

from tools import program
from tools.chaos_attacks import (
  children,
  data_files,
  file_attacks,
  preset_files,
  program_files,
  run_attacks,
  text_attacks,
)

FLAGS = flags.FLAGS

# In each turn the attacks of `run_attacks` come once, the others more often: they take less time.
_TIMES_IN_A_TURN = 10

_RUN_ATTACKS: dict[str, run_attacks.Attack] = {
  'kill': run_attacks.Kill,
  'workers': run_attacks.Workers,
  'links': run_attacks.Links,
  'checkpoints': run_attacks.Checkpoints,
  'disk': run_attacks.Disk,
  'memory': run_attacks.Memory,
}
_KINDS = {**data_files.KINDS, **program_files.KINDS, **preset_files.KINDS}
_ATTACKS: dict[str, run_attacks.Attack] = {
  'overrides': text_attacks.Overrides,
  'training': text_attacks.Training,
  'params_file': text_attacks.ParamsFile,
  'cluster_file': text_attacks.ClusterFile,
  'schedule': text_attacks.Schedule,
  'token_store': text_attacks.TokenStore,
  'records': text_attacks.Records,
  **{name: functools.partial(file_attacks.Attack, name, kind) for name, kind in _KINDS.items()},
  **_RUN_ATTACKS,
}

# Time limits of a program and of a case, which runs several programs.
_PROGRAM_SECONDS, _CASE_SECONDS = 120.0, 900.0


def DefineFlags() -> None:
  """Defines the flags."""
  flags.DEFINE_float('minutes', 10.0, 'How long to begin further cases.', lower_bound=0.0)
  flags.DEFINE_integer('seed', 0, 'Seed of all cases.')
  flags.DEFINE_list('attacks', list(_ATTACKS), 'Kinds of attacks, in turn.')
  flags.DEFINE_integer('first_case', 0, 'Number of the first case.', lower_bound=0)
  flags.DEFINE_integer('cases', None, 'Number of cases; ends earlier than --minutes.', 1)


def Run() -> int:
  """Runs cases until the time is over; returns the exit status."""
  names = program.Names('attacks', _ATTACKS)
  short = [name for name in names if name not in _RUN_ATTACKS]
  turn = names + short * (_TIMES_IN_A_TURN - 1)
  end = time.monotonic() + 60.0 * FLAGS.minutes
  counts: Counter[str] = Counter()
  findings: Counter[str] = Counter()
  folder = pathlib.Path(tempfile.mkdtemp(prefix='chaos_'))
  case = FLAGS.first_case
  try:
    while time.monotonic() < end and not (FLAGS.cases and sum(counts.values()) >= FLAGS.cases):
      name = turn[case % len(turn)]
      counts[name] += 1
      if text := _Case(name, case, folder):
        findings[name] += 1
        print(f'{name}, case {case}: {text}\n  repeat: {_Command(name, case)}\n', flush=True)
      case += 1
  finally:
    shutil.rmtree(folder, ignore_errors=True)
  for name in names:
    print(f'{name:17} {counts[name]:6} cases {findings[name]:4} findings')
  return 1 if findings else 0


def _Command(name: str, case: int) -> str:
  return f'python -m tools.chaos --seed={FLAGS.seed} --attacks={name} --first_case={case} --cases=1'


def _Case(name: str, case: int, folder: pathlib.Path) -> str:
  """Runs a case in a fork; returns the finding, or ''."""
  own_folder = folder / f'case_{case}'
  runner = children.Runner(own_folder, _PROGRAM_SECONDS)
  # A text as the seed: the same in each process.
  draw = random.Random(f'{FLAGS.seed} {name} {case}')
  child = children.Child(lambda: _ATTACKS[name](draw, runner), own_folder)
  try:
    ended = child.Wait(_CASE_SECONDS)
  finally:
    run_attacks.Unmount(own_folder)
    shutil.rmtree(own_folder, ignore_errors=True)
  if ended.status is None:
    return f'no end within {_CASE_SECONDS:g} s'
  if not ended.status:
    return ''
  lines = ended.stderr.partition('FindingError: ')
  return (lines[2] if lines[1] else ended.stderr).strip() or f'status {ended.status}'


if __name__ == '__main__':
  os.environ.pop('TF_CONFIG', None)
  program.Main(DefineFlags, Run, __doc__)
