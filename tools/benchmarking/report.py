# SPDX-License-Identifier: Apache-2.0
"""Formats the results of the benchmark as a table of ratios and as a plot."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lingvo_gpipe.core import text_table
from tools.benchmarking import configuration

COLUMNS = (
  'system',
  'K',
  'M',
  'schedule',
  'remat',
  'xla',
  'cores',
  'best s',
  'median s',
  'vs first',
  'speed-up',
  'KM/(M+K-1)',
  'eff. best',
  'eff. median',
  'pred. best',
  'pred. median',
  'peer best',
  'peer median',
  'peak MiB',
  'trace s',
  'compile s',
)
_LEFT = {0, 3, 4, 5}

# One line: the configuration and the result of its worker.
Measured = tuple[configuration.Configuration, Mapping[str, Any]]


def Best(result: Mapping[str, Any]) -> float:
  """Returns the seconds of the fastest step."""
  return min(result['steps'])


def Median(result: Mapping[str, Any]) -> float:
  """Returns the median seconds of a step."""
  return statistics.median(result['steps'])


def Merge(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Merges the results of several rounds: all steps, and the best or median of other figures."""
  merged = dict(rounds[0])
  merged['rounds'] = {result.get('round', i): result['steps'] for i, result in enumerate(rounds)}
  merged['steps'] = [seconds for result in rounds for seconds in result['steps']]
  for key, choose in (
    ('simulated_best', min),
    ('simulated_median', statistics.median),
    ('predicted_best', min),
    ('predicted_median', statistics.median),
    ('trace_seconds', min),
    ('compile_seconds', min),
    ('memory_mib', max),
  ):
    # Results of an older version may lack some figures.
    if values := [result[key] for result in rounds if key in result]:
      merged[key] = choose(values)
  return merged


def Baseline(
  config: configuration.Configuration, results: Sequence[Measured]
) -> Mapping[str, Any] | None:
  """Returns the result with K=1 on one core, all else being equal, if it was measured.

  The baseline of workload (c) is plain Keras.
  """
  if config.workload == 'c':
    config = dataclasses.replace(
      config, system=configuration.KERAS, num_micro_batches=1, remat_policy='none'
    )
  for other, result in results:
    same = all(
      getattr(other, name) == getattr(config, name)
      for name in ('system', 'workload', 'sizes', 'num_micro_batches', 'remat_policy', 'xla')
    )
    if same and other.num_stages == 1 and other.num_cores == 1:
      return result
  return None


def BestPeer(
  config: configuration.Configuration,
  results: Sequence[Measured],
  seconds: Callable[[Mapping[str, Any]], float],
) -> Mapping[str, Any] | None:
  """Returns the peer's fastest result with equal work, K, M and recomputation."""
  remat = config.remat_policy != 'none'
  peers = [
    result
    for other, result in results
    if other.system == configuration.TORCH
    and (other.workload, other.work) == (config.workload, config.work)
    and (other.num_stages, other.num_micro_batches) == (config.num_stages, config.num_micro_batches)
    and (other.remat_policy != 'none') == remat
  ]
  return min(peers, key=seconds, default=None)


def Ratio(
  numerator: Mapping[str, Any] | None,
  denominator: Mapping[str, Any],
  seconds: Callable[[Mapping[str, Any]], float],
) -> str:
  """Returns the ratio of two results; of several rounds the median, least and largest ratio.

  A round of one result is compared with the same round of the other, because both saw the same
  disturbances.
  """
  if numerator is None:
    return '-'
  above, below = numerator.get('rounds', {}), denominator.get('rounds', {})
  ratios = [
    seconds({'steps': above[n]}) / seconds({'steps': below[n]})
    for n in sorted(above.keys() & below.keys())
  ]
  if len(ratios) < 2:
    return f'{seconds(numerator) / seconds(denominator):.2f}'
  return f'{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})'


def Row(config: configuration.Configuration, results: Sequence[Measured]) -> tuple[str, ...]:
  """Returns the cells of one line, in the order of `COLUMNS`; '-' if a column does not apply."""
  result = next(r for c, r in results if c == config)
  k, m = config.num_stages, config.num_micro_batches
  best, median = Best(result), Median(result)
  ours = config.system == configuration.OURS

  def Share(name: str, measured: float, form: str = '.2f') -> str:
    return format(result[name] / measured, form) if name in result else '-'

  return (
    config.system,
    str(k),
    str(m),
    config.schedule_text,
    config.policy_text,
    '-' if config.system == configuration.TORCH else 'on' if config.xla else 'off',
    str(result['cores']),
    f'{best:.4g}',
    f'{median:.4g}',
    Ratio(results[0][1], result, Median),
    Ratio(Baseline(config, results), result, Best),
    f'{k * m / (m + k - 1):.2f}',
    Share('simulated_best', best, '.1%'),
    Share('simulated_median', median, '.1%'),
    Share('predicted_best', best),
    Share('predicted_median', median),
    Ratio(BestPeer(config, results, Best), result, Best) if ours else '-',
    Ratio(BestPeer(config, results, Median), result, Median) if ours else '-',
    f'{result["memory_mib"]:.0f}',
    f'{result["trace_seconds"]:.1f}',
    f'{result["compile_seconds"]:.1f}',
  )


def _Works(results: Sequence[Measured]) -> dict[str, list[Measured]]:
  """Returns {workload and sizes: lines}."""
  works: dict[str, list[Measured]] = {}
  for config, result in results:
    sizes = ', '.join(f'{name} {value}' for name, value in config.work.items())
    works.setdefault(f'workload ({config.workload}): {sizes}', []).append((config, result))
  return dict(sorted(works.items()))


def Table(results: Sequence[Measured]) -> str:
  """Returns a table for each workload and size."""
  parts = []
  for title, mine in _Works(results).items():
    rows = [COLUMNS, *(Row(config, mine) for config, _ in mine)]
    parts.append('\n'.join([title, *text_table.FormatTable(rows, _LEFT)]))
  return '\n\n'.join(parts)


def Plot(results: Sequence[Measured], path: str) -> None:
  """Draws the speed-up over M, with its bound, for each workload and size.

  Raises:
    ImportError: matplotlib is not installed.
  """
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  works = _Works(results)
  figure, all_axes = pyplot.subplots(1, len(works), figsize=(6 * len(works), 4.5), squeeze=False)
  for axes, (title, mine) in zip(all_axes[0], works.items(), strict=True):
    lines: dict[str, list[tuple[int, float]]] = {}
    bounds: dict[int, set[int]] = {}
    for config, result in mine:
      baseline = Baseline(config, mine)
      if config.num_stages == 1 or baseline is None:
        continue
      bounds.setdefault(config.num_stages, set()).add(config.num_micro_batches)
      xla = ' xla' if config.xla else ''
      label = f'K={config.num_stages} {config.schedule_text} {config.policy_text}{xla}'
      speed_up = Best(baseline) / Best(result)
      lines.setdefault(label, []).append((config.num_micro_batches, speed_up))
    for k, micro_batches in sorted(bounds.items()):
      ms = sorted(micro_batches)
      axes.plot(ms, [k * m / (m + k - 1) for m in ms], 'k--', label=f'KM/(M+K-1), K={k}')
    for label, points in lines.items():
      axes.plot(*zip(*sorted(points), strict=True), marker='o', label=label)
    axes.set(title=title, xlabel='M', ylabel='speed-up over one core')
    if lines:
      axes.legend()
  figure.tight_layout()
  figure.savefig(path)
  pyplot.close(figure)
