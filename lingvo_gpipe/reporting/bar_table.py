# SPDX-License-Identifier: Apache-2.0
"""Draws a table as SVG: a row for each thing that is compared, and in each column a bar.

             FLOPs                    memory
stage 0      ████████████ 13.8%       ███      26.2MiB
stage 1      █████████ 10.0%          █████████▸ 1.2GiB     longer than the column
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from lingvo_gpipe.reporting import svg

# In pixels: height of a row, of a bar and of the head, the gap between columns, and the width of
# all columns and of a letter.
_ROW, _BAR, _HEAD, _GAP, _WIDTH, _LETTER = 20, 13, 24, 18, 760, 6.2


@dataclasses.dataclass(frozen=True)
class Bar:
  """A bar of coloured parts, one after the other, and a text.

  Attributes:
    parts: (length, colour) of each part.
    text: the text after the bar.
  """

  parts: Sequence[tuple[float, str]]
  text: str

  @property
  def length(self) -> float:
    """The sum of the parts."""
    return sum(length for length, _ in self.parts)


@dataclasses.dataclass(frozen=True)
class Column:
  """A column.

  Attributes:
    name: its head.
    bars: a bar for each row.
    end: the length at which a bar is cut off; 0: the length of the longest bar.
    mark: the length at which a line is drawn; 0: none.
  """

  name: str
  bars: Sequence[Bar]
  end: float = 0.0
  mark: float = 0.0


def Draw(
  title: str,
  rows: Sequence[str],
  columns: Sequence[Column],
  legend: Mapping[str, str] | None = None,
  *,
  is_standalone: bool = False,
) -> str:
  """Returns the picture.

  Args:
    title: the title.
    rows: the name of each row.
    columns: the columns, with a bar for each row.
    legend: {text: colour}.
    is_standalone: see `svg.Document`.
  """
  first_x = _LETTER * max(map(len, rows)) + _GAP
  width = _WIDTH / len(columns)
  base = _HEAD + _ROW * len(rows)
  texts = [svg.Text(0, _HEAD + _ROW * i + 14, name) for i, name in enumerate(rows)]
  shapes = []
  for number, column in enumerate(columns):
    x = first_x + number * width
    room = width - _LETTER * max(len(bar.text) for bar in column.bars) - 2 * _GAP
    end = column.end or max(bar.length for bar in column.bars) or 1.0
    texts.append(svg.Text(x, 14, column.name))
    for i, bar in enumerate(column.bars):
      y = _HEAD + _ROW * i
      stop = x + min(bar.length, end) * room / end
      texts.append(svg.Text(stop + (10 if bar.length > end else 4), y + 14, bar.text))
      shapes += _Shapes(bar, x, y, room / end, end)
    if column.mark:
      at = x + column.mark * room / end
      shapes.append(f'<path d="M{at:.1f} {_HEAD - 4}V{base}" stroke="currentColor" opacity="0.6"/>')
  x = first_x
  for text, colour in (legend or {}).items():
    texts.append(svg.Text(x + 14, base + 18, text))
    shapes.append(f'<rect x="{x:.1f}" y="{base + 9}" width="10" height="10" fill="{colour}"/>')
    x += 14 + _LETTER * len(text) + _GAP
  size = first_x + _WIDTH, base + (26 if legend else 4)
  # A text after a rect would stand on it.
  return svg.Document(title, size, texts + shapes, is_standalone)


def _Shapes(bar: Bar, x: float, y: float, scale: float, end: float) -> list[str]:
  """Returns the elements of a bar without its text."""
  shapes, start = [], 0.0
  for length, colour in bar.parts:
    visible = max(min(length, end - start), 0.0)
    if visible:
      shapes.append(
        f'<rect x="{x + start * scale:.1f}" y="{y + 4}" width="{visible * scale:.1f}" '
        f'height="{_BAR}" fill="{colour}"/>'
      )
    start += visible
  if bar.length > end:
    points = f'{x + end * scale:.1f} {y + 4}l7 {_BAR / 2}l-7 {_BAR / 2}'
    shapes.append(f'<path d="M{points}z" fill="{bar.parts[-1][1]}"/>')
  return shapes
