# SPDX-License-Identifier: Apache-2.0
"""Tables as text, their columns aligned."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def Lines(rows: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
  """A line for each row.

  Args:
    rows: cells, as many in each row, at least one row.
    left: indices of the columns of words; the others, of numbers, are aligned to the right.
  """
  widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
  return [
    '  '.join(
      cell.ljust(width) if i in left else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ).rstrip()
    for row in rows
  ]
