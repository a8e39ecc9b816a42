# SPDX-License-Identifier: Apache-2.0
"""Timelines drawn as text: one row per device, time from left to right."""

from __future__ import annotations

from collections.abc import Sequence

# (start, end, label) of everything that one device runs, in order of time.
Row = Sequence[tuple[float, float, str]]


def DrawTicks(rows: Sequence[Row], names: Sequence[str] = ()) -> str:
  """Draws one column per time tick, like figure 2 of the GPipe paper.

  `.` is an idle tick, `B0---` an action of several ticks. Device 0 comes first (last in the paper).

  Args:
    rows: the row of each device; starts and ends are whole numbers.
    names: the names of the rows; by default `device 0` and so on.
  """
  num_ticks = int(max(end for row in rows for _, end, _ in row))
  width = max(len(str(num_ticks - 1)), *(len(label) for row in rows for *_, label in row))
  lines = [' '.join(str(tick).ljust(width) for tick in range(num_ticks))]
  for row in rows:
    cells: list[str] = []
    tick = 0
    for start, end, label in row:
      cells += ['.'.ljust(width)] * (int(start) - tick)
      tick = int(end)
      span = tick - int(start)
      cells.append(label.ljust(span * (width + 1) - 1, '-' if span > 1 else ' '))
    cells += ['.'.ljust(width)] * (num_ticks - tick)
    lines.append(' '.join(cells))
  return _WithMargin(lines, names)


def DrawToScale(
  rows: Sequence[Row], num_columns: int, notes: Sequence[str] = (), names: Sequence[str] = ()
) -> str:
  """Draws widths in proportion to time: `|F0--|F1--`, and `.` while a device is idle.

  An action too short for its label is drawn as the label's first letter, or without a letter.

  Args:
    rows: the row of each device.
    num_columns: width of the drawing, without the names of the devices.
    notes: for each row a text at its end.
    names: as for `DrawTicks`.

  Raises:
    ValueError: num_columns is not positive.
  """
  if num_columns < 1:
    raise ValueError(f'num_columns: expected a positive number, got {num_columns!r}')
  end_of_all = max((end for row in rows for _, end, _ in row), default=0)
  scale = num_columns / end_of_all if end_of_all else 0
  ruler = ''
  for quarter in range(4):
    ruler = ruler.ljust(quarter * num_columns // 4) + f'{end_of_all * quarter / 4:.4g} '
  lines = [ruler.ljust(num_columns) + f' {end_of_all:.4g}']
  for device, row in enumerate(rows):
    line = ''
    for start, end, label in row:
      line = line.ljust(round(start * scale), '.')  # Idle.
      span = round(end * scale) - len(line)
      letter = next((c for c in label if c.isalpha()), '')
      text = next(text for text in (f'|{label}', f'|{letter}', letter, '') if len(text) <= span)
      line += text.ljust(span, '-')
    line = line.ljust(num_columns, '.')
    lines.append(f'{line}  {notes[device]}' if notes else line)
  return _WithMargin(lines, names)


def _WithMargin(lines: Sequence[str], names: Sequence[str]) -> str:
  heads = ['time', *(names or (f'device {device}' for device in range(len(lines) - 1)))]
  margin = max(map(len, heads))
  drawn = (f'{h.ljust(margin)}  {line}'.rstrip() for h, line in zip(heads, lines, strict=True))
  return ''.join(f'{line}\n' for line in drawn)
