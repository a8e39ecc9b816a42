# SPDX-License-Identifier: Apache-2.0
"""Draws a simulated step as SVG: a row of actions for each device, above a curve of what it holds.

    device 0  |F0 |F1 |F2 |...|B0    |B1    |     one rect an action, its width is its time
              ▁▁▁▃▃▃▅▅▅▅▅▅▅▅▅▅▅▃▃▃▃▁▁             micro-batches held, relative to the most of all

Each action has the attributes `data-action` and `data-device`; its title has its times. The text
has the colour of the page, so that the picture suits light and dark pages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from lingvo_gpipe.pipeline.cost import simulator
from lingvo_gpipe.pipeline.profiling import timeline_html
from lingvo_gpipe.pipeline.schedule import actions
from lingvo_gpipe.reporting import svg

# In pixels: left and right margin, height of a row, of its curve, and of the gap below; width of
# the drawing, and of a letter.
_LEFT, _RIGHT, _ROW, _CURVE, _GAP, _WIDTH, _LETTER = 64, 48, 22, 20, 8, 900, 6.5


class Svg(str):
  """The text of an SVG picture, which notebooks show as a picture."""

  __slots__ = ()

  def _repr_html_(self) -> str:
    return str(self)


def Draw(result: simulator.Result, *, is_standalone: bool = False) -> Svg:
  """Returns the picture of a simulated step.

  Args:
    result: the step; times in any unit.
    is_standalone: see `svg.Document`.
  """
  scale = _WIDTH / result.makespan
  held = [list(_NumActivations(result, device)) for device in range(len(result.timeline))]
  most = max(count for row in held for _, count in row)
  height = len(result.timeline) * (_ROW + _CURVE + _GAP)
  parts = []
  for device, row in enumerate(result.timeline):
    y = device * (_ROW + _CURVE + _GAP)
    parts.append(f'<text x="0" y="{y + 15}">device {device}</text>')
    parts += [_Rect(result, span, device, scale, y) for span in row]
    parts.append(_Curve(held[device], most, scale, y + _ROW + _CURVE))
    peak = max(count for _, count in held[device])
    parts.append(f'<text x="{_LEFT + _WIDTH + 4}" y="{y + _ROW + _CURVE}">{peak} held</text>')
  size = _LEFT + _WIDTH + _RIGHT, height
  return Svg(svg.Document(result.schedule.name, size, parts, is_standalone))


def _Rect(
  result: simulator.Result, span: simulator.Span, device: int, scale: float, y: float
) -> str:
  if span.action is None or span.end <= span.start:
    return ''
  x, width = _LEFT + span.start * scale, (span.end - span.start) * scale
  schedule, action = result.schedule, span.action
  # Later stages of a device are paler; so is work that does not belong to an action.
  turn, last_turn = (
    action.stage // schedule.num_devices,
    schedule.num_stages // schedule.num_devices,
  )
  opacity = (1 - 0.5 * turn / last_turn) * (1 if span.part == 'compute' else 0.5)
  label = schedule.Label(action)
  if width < _LETTER * len(label):
    label = str(action.micro_batch)
  rect = (
    f'<rect data-action="{action}" data-device="{device}" x="{x:.2f}" y="{y}" '
    f'width="{width:.2f}" height="{_ROW}" fill="{_Pale(action.kind, opacity)}" stroke="#fff" '
    f'stroke-width="0.5">'
    f'<title>{action} {span.part}: {span.start:g} to {span.end:g}</title></rect>'
  )
  if width < _LETTER * len(label):
    return rect
  return f'{rect}<text x="{x + width / 2:.2f}" y="{y + 15}" text-anchor="middle">{label}</text>'


def _Pale(kind: actions.Kind, opacity: float) -> str:
  """Returns a kind's colour mixed with white: a transparent colour is too dark on dark pages."""
  colour = timeline_html.COLOURS[kind]
  parts = (255 - opacity * (255 - int(colour[i : i + 2], 16)) for i in (1, 3, 5))
  return '#' + ''.join(f'{round(part):02x}' for part in parts)


def _NumActivations(result: simulator.Result, device: int) -> Iterator[tuple[float, int]]:
  """Yields (time, number of activations that the device holds from then on)."""
  spans = {
    span.action: span
    for span in (*result.timeline[device], *result.copies[device])
    if span.part in ('compute', 'copy')
  }
  actions_of_device = result.schedule.actions[device]
  changes = sorted(
    (spans[action].start if change > 0 else spans[action].end, change)
    for action, change in result.schedule.Holdings(actions_of_device)
  )
  counts = itertools.accumulate(change for _, change in changes)
  yield 0.0, 0
  yield from zip((time for time, _ in changes), counts, strict=True)


def _Curve(held: list[tuple[float, int]], most: int, scale: float, base: float) -> str:
  """Returns the area below the numbers of activations, with its base at y = `base`."""
  points = [f'M{_LEFT} {base:g}']
  for time, count in held:
    points.append(f'H{_LEFT + time * scale:.1f}V{base - count * _CURVE / most:.1f}')
  return f'<path d="{"".join(points)}V{base:g}Z" fill="currentColor" opacity="0.3"/>'
