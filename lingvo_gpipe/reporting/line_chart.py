# SPDX-License-Identifier: Apache-2.0
"""Draws curves as SVG: a figure with its numbers as caption, for a page, or a file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from lingvo_gpipe.reporting import svg

# (x, y) in order of x; y may be NaN.
Series = Sequence[tuple[float, float]]

# In pixels: the margins, the drawing without them, and the width of a series' most points.
_LEFT, _RIGHT, _TOP, _BOTTOM, _WIDTH, _HEIGHT = 62, 12, 8, 34, 420, 150
_SIZE = _LEFT + _WIDTH + _RIGHT, _TOP + _HEIGHT + _BOTTOM
_LINE = 16
_MOST_POINTS = 400
_DASHES = ('none', '6 3', '2 2', '8 3 2 3', '1 3', '10 4')
NUM_COLOURS = len(_DASHES)
# The first curve is broad and pale, so that curves on it show.
_STYLE = (
  'path{fill:none;stroke-width:1.2}.grid{stroke:#8886;stroke-width:1}'
  '.c0{stroke:#6f9fd8;stroke-width:5;opacity:0.6}.c1{stroke:#c8741a}.c2{stroke:#2e9e6b}'
  '.c3{stroke:#9b6fd0}.c4{stroke:#d05080}.c5{stroke:#708090}svg .title{font-weight:bold}'
)


@dataclasses.dataclass(frozen=True)
class Mark:
  """An event: a vertical line at x, with the class `css_class` and a text."""

  x: float
  text: str
  css_class: str


def Figure(
  title: str, series: Mapping[str, Series], x_name: str = 'step', marks: Sequence[Mark] = ()
) -> str:
  """Returns the curves as an HTML `figure`, whose caption is also their description.

  Args:
    title: the title.
    series: {name: its points}, at least one point in all.
    x_name: the name of the horizontal axis.
    marks: events.
  """
  parts = _Parts(series, x_name, marks)
  captions = []
  for i, (name, values) in enumerate(series.items()):
    captions.append(
      f'<span><svg class="sample" viewBox="0 0 24 10" aria-hidden="true">{_Sample(i)}</svg> '
      f'{svg.Escape(name)}: {_Describe(values)}</span>'
    )
  return (
    f'<figure><h3>{svg.Escape(title)}</h3><svg xmlns="http://www.w3.org/2000/svg" role="img" '
    f'viewBox="0 0 {_SIZE[0]} {_SIZE[1]}" aria-label="{svg.Escape(title)}">{"".join(parts)}</svg>'
    f'<figcaption>{"<br/>".join(captions)}</figcaption></figure>'
  )


def Picture(charts: Mapping[str, Mapping[str, Series]], x_name: str = 'step') -> str:
  """Returns charts side by side as a file of SVG.

  Args:
    charts: {title: series}; the series of each chart as of `Figure`.
    x_name: the name of the horizontal axes.
  """
  width, height = _SIZE
  parts = []
  for column, (title, series) in enumerate(charts.items()):
    parts += [f'<g transform="translate({column * width} {_LINE})">', *_Parts(series, x_name, ())]
    parts += [svg.Text(_LEFT, 0, title, css_class='title'), '</g>']
    for i, (name, values) in enumerate(series.items()):
      x, y = column * width + _LEFT, height + (i + 1.6) * _LINE
      parts += [f'<g transform="translate({x} {y - 9})">{_Sample(i)}</g>']
      parts += [svg.Text(x + 32, y, f'{name}: {_Describe(values)}')]
  rows = 2 + max(map(len, charts.values()))
  size = len(charts) * width, height + rows * _LINE
  return svg.Document(', '.join(charts), size, parts, is_standalone=True, style=_STYLE)


def _Parts(series: Mapping[str, Series], x_name: str, marks: Sequence[Mark]) -> list[str]:
  """Returns the elements of a chart."""
  points = [point for values in series.values() for point in values]
  xs = [x for x, _ in points] + [mark.x for mark in marks]
  ys = [y for _, y in points if not math.isnan(y)]
  x_ticks, y_ticks = Ticks(min(xs), max(xs), 6), Ticks(min(ys, default=0), max(ys, default=1), 5)
  x_low, x_high = min([*xs, x_ticks[0]]), max([*xs, x_ticks[-1]])
  low, high = min([*ys, y_ticks[0]]), max([*ys, y_ticks[-1]])

  def X(x: float) -> float:
    return _LEFT + (x - x_low) / ((x_high - x_low) or 1) * _WIDTH

  def Y(y: float) -> float:
    return _TOP + (high - y) / ((high - low) or 1) * _HEIGHT

  base, end, parts = _TOP + _HEIGHT, _LEFT + _WIDTH, []
  for y in y_ticks:
    parts.append(f'<path class="grid" d="M{_LEFT} {Y(y):.1f}H{end}"/>')
    parts.append(svg.Text(_LEFT - 6, Y(y) + 4, Number(y), 'end'))
  for x in x_ticks:
    parts.append(f'<path class="grid" d="M{X(x):.1f} {_TOP}V{base}"/>')
    parts.append(svg.Text(X(x), base + 14, Number(x), 'middle'))
  parts.append(svg.Text(_LEFT + _WIDTH / 2, base + 29, x_name, 'middle'))
  for i, values in enumerate(series.values()):
    css_class, dash = f'c{i % NUM_COLOURS}', _DASHES[i % NUM_COLOURS]
    path, pen = [], 'M'
    for x, y in _Thin(values):
      if math.isnan(y):
        parts.append(svg.Text(X(x), base - 2, '×', 'middle', 'bad'))
      else:
        path.append(f'{pen}{X(x):.1f} {Y(y):.1f}')
      pen = 'M' if math.isnan(y) else 'L'
    if len(values) == 1 and path:
      path.append('h2')
    parts.append(f'<path class="{css_class}" stroke-dasharray="{dash}" d="{"".join(path)}"/>')
  for mark in marks:
    parts.append(
      f'<path class="{mark.css_class}" d="M{X(mark.x):.1f} {_TOP}V{base}">'
      f'<title>{svg.Escape(mark.text)}</title></path>'
    )
  return parts


def _Sample(i: int) -> str:
  """Returns a piece of the curve of a series."""
  index = i % NUM_COLOURS
  return f'<path class="c{index}" stroke-dasharray="{_DASHES[index]}" d="M0 5H24"/>'


def Ticks(low: float, high: float, most: int) -> list[float]:
  """Returns at most `most` round numbers from `low` to `high`; `low` alone if there are none."""
  if not 1e-300 < high - low < 1e300:
    return [low]
  power = 10.0 ** math.floor(math.log10((high - low) / most))
  step = next(m * power for m in (1, 2, 5, 10) if (high - low) / (m * power) <= most)
  first = math.ceil(low / step)
  return [step * i for i in range(first, math.floor(high / step + 1e-9) + 1)] or [low]


def Number(value: float) -> str:
  """Returns a number in readable form: `12,345`, `0.0123`, `1.2e-05`."""
  return f'{value:,.0f}' if 1000 <= abs(value) < 1e9 else f'{value:.4g}'


def _Thin(values: Series) -> Iterable[tuple[float, float]]:
  """Yields the points, of many only the least, the greatest and a NaN of each of equal parts."""
  size = 2 * len(values) // _MOST_POINTS
  if size <= 2:
    yield from values
    return
  for start in range(0, len(values), size):
    part = sorted(values[start : start + size], key=lambda point: point[1])
    finite = [point for point in part if not math.isnan(point[1])]
    bad = [point for point in part if math.isnan(point[1])]
    yield from sorted({*finite[:1], *finite[-1:], *bad[:1]})


def _Describe(values: Series) -> str:
  ys = [y for _, y in values if not math.isnan(y)]
  parts = [Number(y) for y in ys[:1]]
  if len(ys) > 1:
    parts = [
      f'{parts[0]} → {Number(ys[-1])}',
      f'least {Number(min(ys))}',
      f'most {Number(max(ys))}',
    ]
  if len(ys) < len(values):
    parts.append(f'{len(values) - len(ys)} not finite (×)')
  return ', '.join(parts)
