# SPDX-License-Identifier: Apache-2.0
"""Formats plans: the table of the best plans, reasons against the rest, and the grid of (R, K)."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gpipe.core import text_table
from lingvo_gpipe.planner import device_description, planner

_HEAD = (
  'R', 'K', 'v', 'M', 'size', 'schedule', 'remat', 'slots', 'step', 'work', 'bubble', 'links',
  'update', 'memory', 'against the first',
)  # fmt: skip
_LEFT = {5, 6, 7, 14}
LEGEND = (
  'R replicas of K devices with v stages each, M micro-batches of at most `size` examples a\n'
  'replica. Of a step: work is the mean of the devices with recomputation, bubble their idle time\n'
  'with free links, links what these add, update that of the weights; memory is of the device\n'
  'that needs most. All of it is predicted.'
)
# Smaller parts of a step are not reported.
_NOTABLE = 0.005


def DevicesText(devices: device_description.Devices) -> str:
  """Describes the devices and their links, and the source of the description."""
  name = f' {devices.name}' if devices.name else ''
  links = {}
  if devices.devices_per_host > 1:
    links['within a host'] = devices.within_host
  if devices.num_devices > devices.devices_per_host:
    links['between hosts'] = devices.between_hosts
  if devices.to_host is not None:
    links['to the host'] = devices.to_host
  texts = [
    f'{text_table.FormatBytes(link.bandwidth)}/s {where} after {SecondsText(link.latency)}'
    for where, link in links.items()
  ]
  return (
    f'{devices.num_devices} devices{name}, {devices.devices_per_host} a host, '
    f'{text_table.FormatBytes(devices.memory_bytes)} each, {devices.flops_per_second:.3g} FLOP/s'
    + (f'; links {", ".join(texts)}' if texts else '')
    + (f'\n({devices.source})' if devices.source else '')
  )


def SecondsText(seconds: float) -> str:
  """Formats seconds with three digits and a unit: `1.23s`, `45.6ms`, `789us`."""
  for factor, unit in ((1, 's'), (1e3, 'ms')):
    if seconds * factor >= 0.9995:
      return f'{seconds * factor:.3g}{unit}' if seconds * factor < 999.5 else f'{seconds:,.0f}s'
  return f'{seconds * 1e6:.3g}us'


def Why(other: planner.Prediction, best: planner.Prediction, memory_bytes: float) -> str:
  """Returns a short reason why a plan was not chosen."""
  if other.choice == best.choice:
    return 'chosen'
  if other.peak_bytes > memory_bytes:
    return f'does not fit: {text_table.FormatBytes(other.peak_bytes - memory_bytes)} too much'
  more = other.seconds - best.seconds
  if abs(more) < _NOTABLE * best.seconds:
    return 'as quick'
  if more < 0:
    return f'{more / best.seconds:+.0%}'
  parts = {
    'work': other.work - best.work,
    'bubble': other.bubble - best.bubble,
    'links': other.communication - best.communication,
    'update': other.update - best.update,
  }
  name, most = max(parts.items(), key=lambda item: item[1])
  return f'{more / best.seconds:+.0%}, {name} {most / best.seconds:+.0%}'


def Table(rows: Sequence[planner.Prediction], best: planner.Prediction, memory_bytes: float) -> str:
  """Returns a line for each plan."""
  cells: list[tuple[str, ...]] = [_HEAD]
  for row in rows:
    c = row.choice
    cells.append(
      (
        *map(str, (*c.grid, c.stages_per_device, c.num_micro_batches, c.micro_batch_size)),
        c.schedule,
        c.remat_policy + '+offload' * bool(c.offload),
        'shared' if c.shard_slots else 'all',
        SecondsText(row.seconds),
        *(f'{x / row.seconds:.1%}' for x in (row.work, row.bubble, row.communication, row.update)),
        text_table.FormatBytes(row.peak_bytes),
        Why(row, best, memory_bytes),
      )
    )
  return '\n'.join(text_table.FormatTable(cells, _LEFT))


def Grid(result: planner.Result) -> str:
  """Returns a table of the seconds of a step for all R and K that were considered.

  Simulated times stand as they are; a `>` marks a lower bound.
  """
  simulated = {row.choice.grid: SecondsText(row.seconds) for row in result.rows}
  rs, ks = (sorted({grid[i] for grid in result.cells}) for i in range(2))
  cells = [('R \\ K', *map(str, ks))]
  for r in rs:
    row = [str(r)]
    for k in ks:
      cell = result.cells.get((r, k))
      if cell is None:
        row.append('')
      elif cell.best is None:
        row.append('no room')
      else:
        row.append(simulated.get((r, k)) or f'>{SecondsText(cell.bound)}')
    cells.append(tuple(row))
  return '\n'.join(text_table.FormatTable(cells, ()))


def NothingFits(result: planner.Result, devices: device_description.Devices) -> str:
  """Returns the message for the case that no choice fits into memory."""
  least, limit = result.least_bytes, devices.memory_bytes
  return (
    f'nothing fits: of {result.num_choices} choices the one that needs least still needs '
    f'{text_table.FormatBytes(least)} on a device, '
    f'{text_table.FormatBytes(least - limit)} more than the {text_table.FormatBytes(limit)} there '
    'are; take more devices or larger ones, a smaller batch, or a smaller model'
  )


def Plot(result: planner.Result, title: str, path: str) -> None:
  """Draws the time of a step over K, with a line for each R, into a PNG file.

  Raises:
    ImportError: matplotlib is not installed.
  """
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot, ticker

  seconds = {g: cell.bound for g, cell in result.cells.items() if cell.best is not None}
  seconds.update({row.choice.grid: row.seconds for row in result.rows})
  figure, axes = pyplot.subplots(figsize=(7, 4.2), layout='constrained')
  for r in sorted({r for r, _ in seconds}):
    points = sorted((k, s) for (other, k), s in seconds.items() if other == r)
    axes.plot(*zip(*points, strict=True), marker='o', markersize=4, label=f'R = {r}')
  if result.best is not None:
    best = result.best
    axes.plot(best.choice.num_devices, best.seconds, marker='*', markersize=16, color='black')
  axes.set(xscale='log', yscale='log', xlabel='K', ylabel='predicted step, s', title=title)
  ks = sorted({k for _, k in seconds})
  axes.set_xticks(ks, list(map(str, ks)))
  axes.minorticks_off()
  axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
  axes.yaxis.set_major_formatter('{x:g}')
  axes.grid(alpha=0.3)
  axes.legend(fontsize=8)
  figure.savefig(path, dpi=100)
  pyplot.close(figure)
