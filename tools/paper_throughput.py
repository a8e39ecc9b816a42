# SPDX-License-Identifier: Apache-2.0
"""The shape of the paper's Tables 2 and 3: speed against the number of devices and micro-batches.

`python -m tools.paper_throughput` in the checkout. A small Transformer and a small AmoebaNet-D take
the place of the paper's; the schedule is GPipe's, with re-materialisation. With two stages the step
is measured, one core a stage. With four and eight it is simulated from actions that were measured
alone, one after the other: so it has no transfers and no overhead. With two stages both stand side
by side. The batch is the same everywhere, while the paper's was "adjusted to fit memory".
"""

from __future__ import annotations

from collections.abc import Mapping

from absl import flags

from tools import program
from tools.benchmarking import configuration, report

FLAGS = flags.FLAGS

_NAMES = {'b': 'Transformer', 'c': 'AmoebaNet-D'}
# Tables 2 and 3 of arXiv:1811.06965v5: {M: throughput at K=2, 4, 8} by workload.
_TABLE_2 = {
  'b': {1: (1, 1.07, 1.3), 4: (1.7, 3.2, 4.8), 32: (1.8, 3.4, 6.3)},
  'c': {1: (1, 1.13, 1.38), 4: (1.07, 1.26, 1.72), 32: (1.21, 1.84, 3.48)},
}
_TABLE_3 = {'b': (1, 1.8, 3.3), 'c': (1, 1.7, 2.7)}
_STAGES = (2, 4, 8)
_COLUMNS = '{:>4} {:>4} {:>10} {:>10} {:>12} {:>8}'


def DefineFlags() -> None:
  """Defines the flags; the defaults take about ten minutes on two cores."""
  flags.DEFINE_list('workloads', list(_NAMES), 'b: a Transformer; c: an AmoebaNet-D.')
  flags.DEFINE_list('num_micro_batches', ['1', '4', '32'], 'The numbers of micro-batches M.')
  flags.DEFINE_multi_string('size', [], 'Changes a size, such as b.layers=16 or c.batch=64.')
  flags.DEFINE_integer('repeats', 3, 'Timed steps with two stages.', lower_bound=1)
  flags.DEFINE_integer('timeout', 600, 'Seconds that one process may take.', lower_bound=1)


def Configuration(workload: str, num_stages: int, m: int) -> configuration.Configuration:
  """What one process measures: with more stages than cores the actions alone count."""
  return configuration.Configuration(
    system=configuration.OURS,
    workload=workload,
    sizes=configuration.Sizes(workload, FLAGS.size),
    num_stages=num_stages,
    num_micro_batches=m,
    schedule='gpipe',
    remat_policy='stage',
    xla=False,
    num_cores=2,
    repeats=FLAGS.repeats if num_stages == 2 else 1,
    seconds=0.0,
  )


def Table(workload: str, steps: Mapping[tuple[int, int], tuple[float, float]]) -> str:
  """The throughput of every (K, M), relative to two stages and the least M, and the paper's.

  Args:
    workload: 'b' or 'c'.
    steps: {(K, M): (seconds of a measured step, of a simulated one)}.
  """
  least = min(m for _, m in steps)
  base_measured, base_simulated = steps[_STAGES[0], least]
  lines = [
    f'{_NAMES[workload]}, relative to K=2, M={least}',
    _COLUMNS.format('K', 'M', 'measured', 'simulated', 'KM/(M+K-1)', 'Table 2'),
  ]
  for (k, m), (measured, simulated) in sorted(steps.items(), key=lambda item: item[0][::-1]):
    ideal = [n * x / (x + n - 1) for n, x in ((k, m), (_STAGES[0], least))]
    paper = _TABLE_2[workload].get(m) if least == 1 else None
    lines.append(
      _COLUMNS.format(
        k,
        m,
        f'{base_measured / measured:.2f}' if k == _STAGES[0] else '-',
        f'{base_simulated / simulated:.2f}',
        f'{ideal[0] / ideal[1]:.2f}',
        '-' if paper is None else f'{paper[_STAGES.index(k)]:g}',
      )
    )
  most = max(m for _, m in steps)
  shown = ', '.join(f'{steps[2, most][1] / steps[k, most][1]:.2f}' for k in _STAGES)
  paper_3 = ', '.join(f'{x:g}' for x in _TABLE_3[workload])
  lines.append(f'relative to K=2, M={most}, simulated: {shown}; Table 3 (M=32): {paper_3}')
  return '\n'.join(lines)


def Run() -> int:
  """Measures and prints one workload after the other."""
  workloads = program.Names('workloads', list(_NAMES))
  micro_batches = program.Numbers('num_micro_batches', 1, 1024)
  for workload in workloads:
    steps = {}
    for m in micro_batches:
      for k in _STAGES:
        config = Configuration(workload, k, m)
        result = program.ResultOf('tools.benchmarking.worker', config.ToJson(), FLAGS.timeout)
        steps[k, m] = report.Best(result), result['simulated_best']
    print(Table(workload, steps) + '\n', flush=True)
  return 0


if __name__ == '__main__':
  program.Main(DefineFlags, Run, __doc__)
