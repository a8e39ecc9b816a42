# SPDX-License-Identifier: Apache-2.0
"""Formats plans: the table of the best plans, reasons against the rest, and the grid of (R, K)."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gpipe.core import text_table
from lingvo_gpipe.planner import device_description, planner
from lingvo_gpipe.reporting import bar_table, svg

_HEAD = (
  'R', 'K', 'v', 'M', 'size', 'schedule', 'remat', 'slots', 'softmax', 'step', 'work', 'bubble',
  'links', 'update', 'memory', 'against the first',
)  # fmt: skip
_LEFT = {5, 6, 7, 8, 15}
LEGEND = (
  'R replicas of K devices with v stages each, M micro-batches of at most `size` examples a\n'
  'replica. One stage has the softmax, or all devices have shared its vocabulary. Of a step: work\n'
  'is the mean of the devices with recomputation, bubble their idle time with free links, links\n'
  'the time that these add, update the time of the weights; memory is of the device that needs\n'
  'most. All of it is predicted.'
)
# Smaller parts of a step are not reported.
_NOTABLE = 0.005
# The parts of a step in a picture.
_COLOURS = {'work': svg.BLUE, 'bubble': svg.GREY, 'links': svg.ORANGE, 'update': svg.PURPLE}
# Longer bars than this many times the best step, or the memory, are cut off.
_MOST_SECONDS, _MOST_BYTES = 3.0, 2.0


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
        c.vocabulary,
        SecondsText(row.seconds),
        *(f'{x / row.seconds:.1%}' for x in (row.work, row.bubble, row.communication, row.update)),
        text_table.FormatBytes(row.peak_bytes),
        Why(row, best, memory_bytes),
      )
    )
  return '\n'.join(text_table.FormatTable(cells, _LEFT))


def Near(plans: planner.Planner, best: planner.Prediction) -> list[planner.Prediction]:
  """Returns the plans that differ from the best one in one thing; plans that fit come first."""
  return sorted(
    map(plans.Predict, plans.Neighbours(best.choice)),
    key=lambda other: (not plans.Fits(other), other.seconds),
  )


def Grid(result: planner.Result) -> str:
  """Returns a table of the seconds of a step for all R and K that were considered.

  Simulated times stand as they are; a `>` marks a lower bound.
  """
  simulated = {row.choice.grid: SecondsText(row.seconds) for row in result.rows}
  rs, ks = (sorted({grid[i] for grid in result.by_grid}) for i in range(2))
  cells = [('R \\ K', *map(str, ks))]
  for r in rs:
    row = [str(r)]
    for k in ks:
      cell = result.by_grid.get((r, k))
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


def Draw(
  rows: Sequence[planner.Prediction],
  best: planner.Prediction,
  memory_bytes: float,
  title: str,
  *,
  is_standalone: bool = False,
) -> str:
  """Returns a picture in SVG: for each plan the parts of its step, and its memory.

  Args:
    rows: the plans.
    best: the plan that was chosen, one of the rows.
    memory_bytes: bytes of a device, at which a line is drawn.
    title: the title.
    is_standalone: see `svg.Document`.
  """
  times, memories, names = [], [], []
  for row in rows:
    parts = row.work, row.bubble, row.communication, row.update
    times.append(
      bar_table.Bar(list(zip(parts, _COLOURS.values(), strict=True)), SecondsText(row.seconds))
    )
    fits = row.peak_bytes <= memory_bytes
    size = text_table.FormatBytes(row.peak_bytes)
    memories.append(bar_table.Bar([(row.peak_bytes, svg.GREEN if fits else svg.RED)], size))
    c = row.choice
    policy = c.remat_policy + '+offload' * bool(c.offload)
    name = f'R={c.num_replicas} K={c.num_devices} v={c.stages_per_device} M={c.num_micro_batches}'
    chosen = ' (chosen)' * (c == best.choice)
    shared = ' shared vocabulary' * (c.num_slices > 0) + ' shared slots' * c.shard_slots
    names.append(f'{name} {c.schedule} {policy}{shared}{chosen}')
  columns = [
    bar_table.Column('predicted step', times, end=_MOST_SECONDS * best.seconds),
    bar_table.Column('memory of a device', memories, _MOST_BYTES * memory_bytes, memory_bytes),
  ]
  return bar_table.Draw(title, names, columns, _COLOURS, is_standalone=is_standalone)
