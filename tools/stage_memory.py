# SPDX-License-Identifier: Apache-2.0
"""Measures the activation memory of a device and compares it with the formula.

Run `python -m tools.stage_memory` in the checkout; docs/measurements.md has the results.
Every figure comes from two new processes: one with wide layers, and one with narrow layers, which
shows the memory of TensorFlow itself.
"""

from __future__ import annotations

import dataclasses
import itertools

from absl import flags

from lingvo_gpipe.pipeline.schedule import rematerialisation, schedules
from tools import program
from tools.benchmarking import stage_memory

FLAGS = flags.FLAGS
_COLUMNS = '{:>2}  {:>5}  {:>2}  {:18}  {:11}  {:>6}  {:>3}  {:>13}  {:>12}  {:>9}'


def DefineFlags() -> None:
  """Defines the flags; all have defaults."""
  flags.DEFINE_integer('num_stages', 3, 'K.', lower_bound=2)
  flags.DEFINE_list('stages', ['1', '2'], 'Stages to measure, from 1.')
  flags.DEFINE_list('num_micro_batches', ['4', '12'], 'The numbers of micro-batches M.')
  flags.DEFINE_list(
    'schedules', ['gpipe', '1f1b'], 'Schedules, with one stage per device if they can, or two.'
  )
  flags.DEFINE_list('remat_policies', ['stage'], 'Re-materialisation policies.')
  flags.DEFINE_list('num_layers', ['2'], 'Number of layers of the measured stage: L/K.')
  flags.DEFINE_list('xla', ['off'], 'on, off or both.')
  flags.DEFINE_integer('rows', 2048, 'Examples of a micro-batch, of 1024 floats.', lower_bound=16)


def Grid() -> list[stage_memory.Setting]:
  """Returns the settings that the flags select.

  Raises:
    ValueError: the value of a flag is invalid.
  """
  grid = [
    stage_memory.Setting(
      FLAGS.num_stages,
      m,
      name,
      k,
      policy,
      layers,
      FLAGS.rows,
      xla=xla == 'on',
      stages_per_device=1 if schedules.TakesStagesPerDevice(name, 1) else 2,
    )  # fmt: skip
    for name, policy, xla, layers, k, m in itertools.product(
      program.Names('schedules', schedules.Names()),
      program.Names('remat_policies', rematerialisation.POLICIES),
      program.Names('xla', ['on', 'off']),
      program.Numbers('num_layers', 1, 64),
      program.Numbers('stages', 1, FLAGS.num_stages - 1),
      program.Numbers('num_micro_batches', 1, 64),
    )
  ]
  for setting in grid:
    _ = setting.made_schedule  # Reports impossible sizes.
  return grid


def Measure(setting: stage_memory.Setting) -> float:
  """Returns the MiB by which a step raises the resident memory of a new process."""
  return float(program.ResultOf('tools.benchmarking.stage_memory', setting.ToJson(), 600))


def Run() -> int:
  """Measures all settings and prints a line for each."""
  grid = Grid()
  print(
    _COLUMNS.format(
      'K', 'stage', 'M', 'schedule', 'remat', 'layers', 'xla',
      'predicted MiB', 'measured MiB', 'besides'
    )
  )  # fmt: skip
  for setting in grid:
    # With 8 rows activations are negligible.
    besides = Measure(dataclasses.replace(setting, rows=8))
    measured = Measure(setting) - besides
    print(
      _COLUMNS.format(
        setting.num_stages,
        setting.stage,
        setting.num_micro_batches,
        setting.schedule,
        setting.remat_policy,
        setting.num_layers,
        'on' if setting.xla else 'off',
        f'{stage_memory.Predict(setting):.0f}',
        f'{measured:.0f}',
        f'{besides:.0f}',
      ),
      flush=True,
    )
  return 0


if __name__ == '__main__':
  program.Main(DefineFlags, Run, __doc__)
