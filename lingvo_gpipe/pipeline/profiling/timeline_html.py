# SPDX-License-Identifier: Apache-2.0
"""Draws timelines as a page of HTML: the measured row of each device above the simulated row.

The page is well-formed XML without external resources. Each action is a `rect` with the attributes
`data-action` (such as `1F0`), `data-step` and `class`: `measured`, `simulated` or, for a simulated
recomputation, `recompute`. Its `title` has the times.
"""

from __future__ import annotations

import collections
import html
import math
import re
from collections.abc import Mapping, Sequence

from lingvo_gpipe.pipeline.cost import simulator
from lingvo_gpipe.pipeline.profiling import measured_schedule
from lingvo_gpipe.pipeline.schedule import actions
from lingvo_gpipe.reporting import svg

Kind = actions.Kind

COLOURS = {
  Kind.FORWARD: '#6f9fd8',
  Kind.BACKWARD: '#7fbf7b',
  Kind.INPUT_GRADIENT: '#5fc4c0',
  Kind.WEIGHT_GRADIENT: '#f2a65a',
  Kind.FORWARD_BACKWARD: '#b795c9',
}
_NAMES = {
  Kind.FORWARD: 'forward',
  Kind.BACKWARD: 'backward',
  Kind.INPUT_GRADIENT: 'gradient of the input',
  Kind.WEIGHT_GRADIENT: 'gradient of the weights',
  Kind.FORWARD_BACKWARD: 'forward and backward',
}
# In pixels: left margin for the names of the rows, heights of both kinds of rows, gap between
# devices, height of the axis; widths of the drawing, of an action and of a letter.
_LEFT, _MEASURED, _SIMULATED, _GAP, _AXIS = 120, 24, 13, 12, 24
_MIN_WIDTH, _ACTION_WIDTH, _LETTER_WIDTH = 1050, 22, 7
# The page from the text of a title to the end of its picture. Each part matches in one way only, so
# that the time is linear in the length of the page.
_PICTURE = re.compile(r'([^<]*)</h2>\s*<svg ([^>]*)><style>[^<]*</style>(.*?)</svg>', re.S)
_VIEW_BOX = re.compile(r'viewBox="0 0 ([0-9]{1,9}) ([0-9]{1,9})"')
_STYLE = """
body { font: 14px sans-serif; margin: 1.5em; color: #222; background: #fff; }
h2 { font-size: 15px; margin: 1.5em 0 0.3em; }
svg { display: block; }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #222; } }
table { border-collapse: collapse; margin-top: 1.5em; }
td, th { padding: 2px 12px; text-align: right; }
""".strip()
# This style is inside the picture, because the picture may be copied into another page.
_SVG_STYLE = """
svg text { font: 11px sans-serif; fill: currentColor; } svg rect + text { fill: #222; }
svg line { stroke: currentColor; opacity: 0.2; }
svg .simulated, svg .recompute { opacity: 0.75; }
""".strip()


def MakePage(
  title: str,
  lines: Sequence[str],
  drawn: Sequence[tuple[measured_schedule.Measured, simulator.Result]],
  devices: Sequence[str],
  mean_times: Mapping[tuple[Kind, int], float],
) -> str:
  """Returns the page.

  Args:
    title: the title.
    lines: texts below the title.
    drawn: the measured mini-batches in order, each with its simulation; times in seconds.
    devices: the names of the devices.
    mean_times: {(kind, stage): seconds}, for the table at the end.
  """
  kinds = [kind for kind in COLOURS if any(kind is k for k, _ in mean_times)]
  parts = [
    '<!DOCTYPE html>',
    '<html lang="en"><head><meta charset="utf-8"/>',
    f'<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>',
    f'<h1>{html.escape(title)}</h1>',
    *(f'<p>{html.escape(line)}</p>' for line in lines),
    f'<p>{" ".join(Legend(kind) for kind in kinds)}</p>',
  ]
  counts: collections.Counter[int] = collections.Counter()
  is_once = len({measured.step for measured, _ in drawn}) == len(drawn)
  for measured, simulated in drawn:
    counts[measured.step] += 1
    mini_batch = '' if is_once else f', mini-batch {counts[measured.step]}'
    parts.append(
      f'<h2>step {measured.step}{mini_batch}: {measured.makespan * 1e3:.2f} ms, '
      f'bubble {measured.bubble:.1%}; simulated {simulated.makespan * 1e3:.2f} ms, '
      f'bubble {simulated.overall_bubble:.1%}</h2>'
    )
    parts.append(_Draw(measured, simulated, devices))
  parts += [*_Table(mean_times, kinds), '</body></html>']
  return '\n'.join(parts) + '\n'


def LastPicture(page: str) -> str:
  """Returns the picture of the last mini-batch on a page as a file of SVG.

  Raises:
    ValueError: the page has no such picture.
  """
  for section in reversed(page.split('<h2>')[1:]):
    picture = _PICTURE.match(section)
    if picture and (view_box := _VIEW_BOX.search(picture[2])):
      break
  else:
    raise ValueError('expected a timeline_*.html of a profile')
  title, parts = html.unescape(picture[1]), picture[3].strip()
  style = '.simulated,.recompute{opacity:0.7}line{stroke:#8886}'
  size = float(view_box[1]), float(view_box[2])
  return svg.Document(title, size, [parts], is_standalone=True, style=style)


def Legend(kind: Kind) -> str:
  """Returns the letter of a kind on its colour, and its name, as HTML."""
  style = f'background:{COLOURS[kind]};color:#222;padding:1px 8px'
  return f'<span style="{style}">{kind.value}</span> {_NAMES[kind]}'


def _Draw(
  measured: measured_schedule.Measured, simulated: simulator.Result, devices: Sequence[str]
) -> str:
  schedule = measured.schedule
  longest = max(map(len, schedule.actions))
  width = max(_MIN_WIDTH, longest * _ACTION_WIDTH)
  device_height = _MEASURED + _SIMULATED + _GAP
  height = schedule.num_devices * device_height + _AXIS
  full = _LEFT + width + 20
  seconds = max(measured.makespan, simulated.makespan)
  scale = width / seconds if seconds else 0.0
  parts = [
    # Shrinks to the width of a page as long as the actions stay legible.
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {full} {height}" width="{full}" '
    f'style="max-width:max(100%,{longest * _ACTION_WIDTH}px)"><style>{_SVG_STYLE}</style>'
  ]
  for tick in _Ticks(seconds * 1e3):
    x = _LEFT + tick * 1e-3 * scale
    parts.append(f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{height - _AXIS + 4}"/>')
    parts.append(f'<text x="{x:.1f}" y="{height - 6}" text-anchor="middle">{tick:g} ms</text>')
  rows = zip(measured.timeline, simulated.timeline, strict=True)
  for device, (measured_row, simulated_row) in enumerate(rows):
    y = device * device_height
    name = html.escape(devices[device])
    parts.append(f'<text x="0" y="{y + 16}">{name}</text>')
    parts.append(f'<text x="0" y="{y + _MEASURED + 10}" class="simulated">simulated</text>')
    for row_kind, spans, top, height_of_row in (
      ('measured', measured_row, y, _MEASURED),
      ('simulated', simulated_row, y + _MEASURED + 1, _SIMULATED),
    ):
      for span in spans:
        if span.action is not None and span.end > span.start:
          label = schedule.Label(span.action)
          parts.append(_Rect(row_kind, span, label, measured.step, scale, top, height_of_row))
  return '\n'.join([*parts, '</svg>'])


def _Rect(
  row_kind: str,
  span: simulator.Span,
  label: str,
  step: int,
  scale: float,
  top: float,
  height: float,
) -> str:
  assert span.action is not None
  x, width = _LEFT + span.start * scale, (span.end - span.start) * scale
  start, end = span.start * 1e3, span.end * 1e3
  css_class = 'recompute' if span.part == 'recompute' else row_kind
  rect = (
    f'<rect class="{css_class}" data-action="{span.action}" data-step="{step}" x="{x:.2f}" '
    f'y="{top}" width="{width:.2f}" height="{height}" fill="{COLOURS[span.action.kind]}" '
    f'stroke="#fff" stroke-width="0.5"><title>{span.action} {css_class}: {start:.3f} to '
    f'{end:.3f} ms, {end - start:.3f} ms</title></rect>'
  )
  if width < _LETTER_WIDTH * len(label):
    return rect
  middle, base = x + width / 2, top + height / 2 + 4
  return f'{rect}<text x="{middle:.2f}" y="{base}" text-anchor="middle">{label}</text>'


def _Ticks(end: float) -> list[float]:
  """Returns about ten round numbers from 0 to `end`."""
  if not end:
    return [0.0]
  power = 10.0 ** math.floor(math.log10(end / 10))
  step = next(m * power for m in (1, 2, 5, 10) if end / (m * power) <= 12)
  return [step * i for i in range(int(end / step) + 1)]


def _Table(mean_times: Mapping[tuple[Kind, int], float], kinds: Sequence[Kind]) -> list[str]:
  """Returns the table of mean times, one row per stage."""
  stages = sorted({stage for _, stage in mean_times})
  head = ''.join(f'<th>{kind.value}</th>' for kind in kinds)
  lines = [f'<table><tr><th>mean ms, stage</th>{head}</tr>']
  for stage in stages:
    cells = (mean_times.get((kind, stage)) for kind in kinds)
    texts = ('' if seconds is None else f'{seconds * 1e3:.3f}' for seconds in cells)
    lines.append(f'<tr><td>{stage}</td>{"".join(f"<td>{text}</td>" for text in texts)}</tr>')
  return [*lines, '</table>']
