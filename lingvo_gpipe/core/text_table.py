# SPDX-License-Identifier: Apache-2.0
"""Tables with aligned columns, and sizes in bytes, as text."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def FormatTable(rows: Sequence[Sequence[str]], text_columns: Collection[int]) -> list[str]:
  """Returns one line for each row.

  Args:
    rows: at least one row of cells; all rows have equally many cells.
    text_columns: indices of the columns to align to the left. Columns of numbers align to the
      right.
  """
  widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
  return [
    '  '.join(
      cell.ljust(width) if i in text_columns else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ).rstrip()
    for row in rows
  ]


def FormatBytes(num_bytes: float) -> str:
  """Formats a size with its unit: `512B`, `3.4KiB`, `1,024.0MiB`."""
  if num_bytes < 1024:
    return f'{num_bytes:.0f}B'
  for unit in ('KiB', 'MiB'):
    num_bytes /= 1024
    if num_bytes < 1024:
      return f'{num_bytes:.1f}{unit}'
  return f'{num_bytes / 1024:,.1f}GiB'
