# SPDX-License-Identifier: Apache-2.0
"""Costs given as one number for all stages, or as one number for each stage."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence

PerStage = float | Sequence[float]


def Expand(name: str, value: PerStage, count: int, unit: str) -> tuple[float, ...]:
  """Returns `count` numbers; repeats a single number.

  Args:
    name: the name of the value in error messages.
    value: a number, or a sequence of `count` numbers, each finite and not negative.
    count: how many numbers to return.
    unit: the thing that each number belongs to, for error messages: 'stage', 'device', ...

  Raises:
    ValueError: the sequence has another length, or an entry is not a number >= 0.
  """
  entries = tuple(value) if isinstance(value, Iterable) else (value,) * count
  if len(entries) != count:
    raise ValueError(
      f'{name}: expected one number, or {count} numbers, one per {unit}; got {len(entries)} numbers'
    )
  for i, number in enumerate(entries):
    if not (isinstance(number, numbers.Real) and 0 <= number < math.inf):
      raise ValueError(f'{name}: {unit} {i}: expected a number >= 0, got {number!r}')
  return entries
