# SPDX-License-Identifier: Apache-2.0
"""Finds the largest Transformer that trains within a memory limit per device: a small Table 1.

Run `python -m tools.largest_model` in the checkout, on Linux. For each number of stages, with and
without re-materialisation, models of increasing depth train for one step, each in a new process
whose data (RLIMIT_DATA) may grow by the limit times the number of stages. A model fits if its
process succeeds. Doubling and bisection find the largest number of layers.
"""

from __future__ import annotations

from collections.abc import Callable

from absl import flags

from lingvo_gpipe.pipeline.schedule import rematerialisation
from tools import program
from tools.benchmarking import memory_trial

FLAGS = flags.FLAGS

_NO_MEMORY = (
  'ResourceExhausted',
  'OOM',
  'MemoryError',
  'bad_alloc',
  'annot allocate memory',
  'could not create a primitive',  # oneDNN.
)

_COLUMNS = '{:>2}  {:8}  {:>6}  {:>12}  {:>14}'


def DefineFlags() -> None:
  """Defines the flags; the defaults take about twenty minutes."""
  flags.DEFINE_list('num_stages', ['1', '2', '4'], 'The numbers of stages K.')
  flags.DEFINE_list('remat_policies', ['none', 'stage'], 'Re-materialisation policies.')
  flags.DEFINE_integer('limit_mib', 256, 'MiB a stage.', lower_bound=1)
  flags.DEFINE_integer('num_micro_batches', 8, 'M.', lower_bound=1)
  flags.DEFINE_integer('dim', 128, 'Width of the layers, a multiple of 64.', lower_bound=64)
  flags.DEFINE_integer('batch', 16, 'Number of sequences per mini-batch.', lower_bound=1)
  flags.DEFINE_integer('time', 256, 'Number of tokens per sequence.', lower_bound=1)
  flags.DEFINE_integer('timeout', 600, 'Time limit in seconds for one process.', lower_bound=1)
  flags.DEFINE_integer('most_layers', 512, 'Maximum number of layers to try.', lower_bound=1)


def Largest(fits: Callable[[int], bool], least: int, most: int) -> int:
  """Returns the largest number in [least, most] that fits, or 0 if none does.

  Args:
    fits: returns whether a number fits; if a number fits, so does every smaller number.
    least: the smallest number to try.
    most: the largest number to try.
  """
  good, tried = 0, least
  while tried <= most and fits(tried):
    good, tried = tried, 2 * tried
  bad = min(tried, most + 1)
  while good and bad - good > 1:
    middle = (good + bad) // 2
    if fits(middle):
      good = middle
    else:
      bad = middle
  return good


def NumParams(trial: memory_trial.Trial, timeout_seconds: float = 600.0) -> int | None:
  """Returns the number of parameters of the trial's model if it fits, or None.

  Raises:
    RuntimeError: the process failed for a reason other than memory.
  """
  done = program.RunModule('tools.benchmarking.memory_trial', trial.ToJson(), timeout_seconds)
  if done.returncode == 0:
    return int(done.stdout)
  # Out of memory, TensorFlow, NumPy or C++ may report an error first, or the process just ends.
  if done.returncode > 0 and not any(text in done.stderr for text in _NO_MEMORY):
    raise RuntimeError(f'{trial} failed:\n{done.stderr[-2000:]}')
  return None


def Run() -> int:
  """Searches for each setting and prints a line for each."""
  print(
    f'width {FLAGS.dim}, batch {FLAGS.batch}, sequences of {FLAGS.time}, '
    f'M={FLAGS.num_micro_batches}, {FLAGS.limit_mib} MiB a stage'
  )
  print(_COLUMNS.format('K', 'remat', 'layers', 'parameters', 'times the first'))
  first = 0
  for num_stages in program.Numbers('num_stages', 1, 64):
    for policy in program.Names('remat_policies', list(rematerialisation.POLICIES)):
      params_by_layers: dict[int, int] = {}

      def Fits(num_layers: int) -> bool:
        trial = memory_trial.Trial(
          num_layers=num_layers,
          num_stages=num_stages,  # noqa: B023  Called within this turn of the loop alone.
          remat_policy=policy,  # noqa: B023
          limit_mib=FLAGS.limit_mib,
          num_micro_batches=FLAGS.num_micro_batches,
          dim=FLAGS.dim,
          batch=FLAGS.batch,
          time=FLAGS.time,
        )
        num_params = NumParams(trial, FLAGS.timeout)
        params_by_layers[num_layers] = num_params or 0  # noqa: B023
        return num_params is not None

      layers = Largest(Fits, num_stages, FLAGS.most_layers)
      params = params_by_layers.get(layers, 0)
      first = first or params
      ratio = f'{params / first:.1f}' if first else '-'
      print(_COLUMNS.format(num_stages, policy, layers, f'{params:,}', ratio), flush=True)
  return 0


if __name__ == '__main__':
  program.Main(DefineFlags, Run, __doc__)
