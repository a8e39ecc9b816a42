# SPDX-License-Identifier: Apache-2.0
"""Reproduces the shape of the paper's Tables 2 and 3: speed over devices and micro-batches.

Run `python -m tools.paper_throughput` in the checkout. It uses a small Transformer and a small
AmoebaNet-D in place of the paper's models, and GPipe's schedule with re-materialisation. With one
and two stages the step is measured, with one core per stage. With four and eight stages it is
simulated from actions that were measured in isolation, so it has no transfers and no overhead; one
and two stages are also simulated, for comparison. The batch size is constant, while the paper's was
"adjusted to fit memory".
"""

from __future__ import annotations

from collections.abc import Mapping

from absl import flags

from tools import program
from tools.benchmarking import configuration, report

FLAGS = flags.FLAGS

_NAMES = {'b': 'Transformer', 'd': 'AmoebaNet-D'}
# Tables 2 and 3 of arXiv:1811.06965v5, relative to K=2: {M: {K: throughput}} by workload.
_TABLE_2 = {
  'b': {1: {2: 1, 4: 1.07, 8: 1.3}, 4: {2: 1.7, 4: 3.2, 8: 4.8}, 32: {2: 1.8, 4: 3.4, 8: 6.3}},
  'd': {
    1: {2: 1, 4: 1.13, 8: 1.38},
    4: {2: 1.07, 4: 1.26, 8: 1.72},
    32: {2: 1.21, 4: 1.84, 8: 3.48},
  },
}
_TABLE_3 = {'b': {2: 1, 4: 1.8, 8: 3.3}, 'd': {2: 1, 4: 1.7, 8: 2.7}}
_BASE = 2
_MOST_MEASURED = 2
_COLUMNS = '{:>4} {:>4} {:>10} {:>10} {:>12} {:>8}'


def DefineFlags() -> None:
  """Defines the flags; the defaults take about half an hour on two cores."""
  flags.DEFINE_list('workloads', list(_NAMES), 'b: a Transformer; d: an AmoebaNet-D.')
  flags.DEFINE_list('num_stages', ['1', '2', '4', '8'], 'The numbers of stages K, 2 among them.')
  flags.DEFINE_list('num_micro_batches', ['1', '4', '32'], 'The numbers of micro-batches M.')
  flags.DEFINE_multi_string('size', [], 'Changes a size, such as b.layers=16 or d.batch=64.')
  flags.DEFINE_integer('repeats', 3, 'Number of timed steps, if steps are measured.', lower_bound=1)
  flags.DEFINE_integer('timeout', 600, 'Time limit in seconds for one process.', lower_bound=1)


def Configuration(workload: str, num_stages: int, m: int) -> configuration.Configuration:
  """Returns the configuration of one process; with more stages than cores only actions are used."""
  return configuration.Configuration(
    system=configuration.OURS,
    workload=workload,
    sizes=configuration.Sizes(workload, FLAGS.size),
    num_stages=num_stages,
    num_micro_batches=m,
    schedule='gpipe',
    remat_policy='stage',
    xla=False,
    num_cores=min(num_stages, _MOST_MEASURED),
    repeats=FLAGS.repeats if num_stages <= _MOST_MEASURED else 1,
    seconds=0.0,
  )


def Table(workload: str, steps: Mapping[tuple[int, int], tuple[float, float]]) -> str:
  """Returns the throughput of every (K, M) relative to K=2 and the least M, and the paper's.

  Args:
    workload: 'b' or 'd'.
    steps: {(K, M): (seconds of a measured step, of a simulated one)}.
  """
  least = min(m for _, m in steps)
  base_measured, base_simulated = steps[_BASE, least]
  lines = [
    f'{_NAMES[workload]}, relative to K=2, M={least}',
    _COLUMNS.format('K', 'M', 'measured', 'simulated', 'KM/(M+K-1)', 'Table 2'),
  ]
  for (k, m), (measured, simulated) in sorted(steps.items(), key=lambda item: item[0][::-1]):
    ideal = [n * x / (x + n - 1) for n, x in ((k, m), (_BASE, least))]
    paper = _TABLE_2[workload].get(m, {}).get(k) if least == 1 else None
    lines.append(
      _COLUMNS.format(
        k,
        m,
        f'{base_measured / measured:.2f}' if k <= _MOST_MEASURED else '-',
        f'{base_simulated / simulated:.2f}',
        f'{ideal[0] / ideal[1]:.2f}',
        '-' if paper is None else f'{paper:g}',
      )
    )
  most = max(m for _, m in steps)
  throughputs = ', '.join(
    f'K={k} {steps[_BASE, most][1] / seconds:.2f}'
    for (k, m), (_, seconds) in sorted(steps.items())
    if m == most
  )
  paper_3 = ', '.join(f'K={k} {x:g}' for k, x in _TABLE_3[workload].items())
  lines.append(f'relative to K=2, M={most}, simulated: {throughputs}; Table 3 (M=32): {paper_3}')
  return '\n'.join(lines)


def Run() -> int:
  """Measures and prints one workload after another."""
  workloads = program.Names('workloads', list(_NAMES))
  micro_batches = program.Numbers('num_micro_batches', 1, 1024)
  stages = program.Numbers('num_stages', 1, 8)
  if _BASE not in stages:
    raise ValueError(f'--num_stages={stages}: {_BASE} is to be among them, the base of all')
  for workload in workloads:
    steps = {}
    for m in micro_batches:
      for k in stages:
        config = Configuration(workload, k, m)
        result = program.ResultOf('tools.benchmarking.worker', config.ToJson(), FLAGS.timeout)
        steps[k, m] = report.Best(result), result['simulated_best']
    print(Table(workload, steps) + '\n', flush=True)
  return 0


if __name__ == '__main__':
  program.Main(DefineFlags, Run, __doc__)
