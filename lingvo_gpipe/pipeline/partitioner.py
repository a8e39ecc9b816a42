# SPDX-License-Identifier: Apache-2.0
"""Cuts a list of layers into contiguous stages whose costliest one is as cheap as can be.

The GPipe paper (section 2.2) asks for the cut with the least variance of the stages' costs and has
a heuristic for it. Time is set by the costliest stage, so that comes first here, and the cut is
exact. In this order:

1. the least cost of the costliest stage;
2. then the least sum of squared stage costs, which is the least variance;
3. then the least sum of squared layer counts: what costs nothing is spread evenly too;
4. then the least end of the last stage but one, then of the one before, and so on: a spare layer
   goes to a later stage, which holds fewer micro-batches under 1F1B.

Costs are turned into integers of one scale first (a float is a fraction with a power of two below),
so no sum is rounded and equal costs are recognised as equal.
"""

from __future__ import annotations

import bisect
import fractions
import itertools
import math
import operator
from collections.abc import Sequence
from typing import SupportsFloat, SupportsIndex


def Partition(
  costs: Sequence[float],
  num_stages: int,
  *,
  memory: Sequence[float] | None = None,
  memory_limit: float | None = None,
  last_stage_factor: float = 1.0,
) -> list[int]:
  """The best cut by the module's criteria: for each stage the index after its last layer.

  For example `[1, 2, 3, 4, 5, 6]` in 2 gives `[4, 6]`. 1663 layers in 128 stages take some
  hundredths of a second, about half a second where one layer outweighs all others.

  Args:
    costs: what each layer costs, finite and not negative.
    num_stages: K; every stage gets at least one layer.
    memory: what each layer needs of a stage's memory; goes together with `memory_limit`.
    memory_limit: the most that the layers of one stage may need together.
    last_stage_factor: what a layer costs in the last stage, relative to the others; 0.75 where the
      last stage is fused and so runs no recomputation (3 units of work a layer, not 4).

  Raises:
    ValueError: a bad argument, more stages than layers, or a memory limit that cannot be kept.
  """
  num_layers = len(costs)
  _CheckNumStages(num_stages, num_layers)
  if not (_IsNumber(last_stage_factor) and 0 < last_stage_factor < math.inf):
    raise ValueError(f'last_stage_factor: expected a positive number, got {last_stage_factor!r}')
  if (memory is None) != (memory_limit is None):
    given, lacking = ('memory_limit', 'memory') if memory is None else ('memory', 'memory_limit')
    raise ValueError(f'{given} is given without {lacking}; give both or none')
  scaled = _ExactIntegers('costs', costs)
  factor = fractions.Fraction(float(last_stage_factor))
  units = [factor.denominator] * (num_stages - 1) + [factor.numerator]
  # After the layer where a stage starts, the first layer that its memory has no room for.
  if memory is None or memory_limit is None:
    room = [num_layers] * num_layers
  else:
    room = _Room(memory, memory_limit, num_stages, num_layers)
  prefix = [0, *itertools.accumulate(scaled)]

  low, high = 0, prefix[-1] * max(units)
  while low < high:  # The least bottleneck for which a cut exists.
    middle = (low + high) // 2
    if _EndRanges(prefix, room, [middle // unit for unit in units]):
      high = middle
    else:
      low = middle + 1
  caps = [low // unit for unit in units]
  ranges = _EndRanges(prefix, room, caps)
  return _MostEven(prefix, room, caps, units, ranges)


def StageRanges(ends: Sequence[int]) -> list[tuple[int, int]]:
  """`[4, 6]` -> `[(0, 4), (4, 6)]`: for each stage its first layer and the one after its last."""
  return list(itertools.pairwise([0, *ends]))


def CheckSplits(splits: Sequence[int], num_layers: int) -> list[int]:
  """Checks a cut made by hand and returns it as a list of plain integers.

  Args:
    splits: for each stage the index after its last layer, as `Partition` returns it.
    num_layers: L, which the last entry must equal.

  Raises:
    TypeError: not a list of integers.
    ValueError: an empty stage, or the last stage does not end with the last layer.
  """
  shape = 'for each stage the index after its last layer'
  if isinstance(splits, (int, float, str)):
    raise TypeError(
      f'splits: expected a list, {shape}, got {splits!r}; an even cut into a number of stages is '
      'what num_stages is for'
    )
  ends = []
  for stage, end in enumerate(splits):
    try:
      if isinstance(end, bool):
        raise TypeError
      ends.append(operator.index(end))
    except TypeError:
      raise TypeError(f'splits[{stage}]: expected an integer, {shape}, got {end!r}') from None
  if not ends:
    raise ValueError(f'splits: expected {shape}, got an empty list')
  for stage, (start, end) in enumerate(StageRanges(ends)):
    if end <= start:
      raise ValueError(
        f'splits {ends}: stage {stage} starts at layer {start} and ends before layer {end}, so it '
        'has no layers; give ends that rise'
      )
  if ends[-1] != num_layers:
    raise ValueError(
      f'splits {ends}: the last end must be the number of layers, {num_layers}, got {ends[-1]}'
    )
  return ends


def _CheckNumStages(num_stages: int, num_layers: int) -> None:
  """Raises ValueError unless `num_layers` layers can make `num_stages` stages, none empty."""
  if not isinstance(num_stages, int) or isinstance(num_stages, bool) or num_stages < 1:
    raise ValueError(f'num_stages: expected a positive integer, got {num_stages!r}')
  if num_layers < 1:
    raise ValueError('there are no layers to cut into stages; give at least one')
  if num_stages > num_layers:
    raise ValueError(
      f'{num_stages} stages for {num_layers} layers: a stage needs at least one layer; take at '
      f'most {num_layers} stages, or split the layers into smaller ones'
    )


def _IsNumber(value: object) -> bool:
  """Whether float() means what it says: text and bools are mistakes here."""
  return isinstance(value, (SupportsIndex, SupportsFloat)) and not isinstance(value, bool)


def _ExactIntegers(what: str, values: Sequence[float]) -> list[int]:
  """The values times the least power of two that makes them whole."""
  ratios = []
  for i, value in enumerate(values):
    # Integers may be greater than any float.
    number = operator.index(value) if isinstance(value, SupportsIndex) else value
    if not (_IsNumber(value) and (isinstance(number, int) or math.isfinite(number))):
      raise ValueError(f'{what}[{i}]: expected a finite number, got {value!r}')
    if number < 0:
      raise ValueError(f'{what}[{i}]: expected a number >= 0, got {value!r}')
    ratios.append((number if isinstance(number, int) else float(number)).as_integer_ratio())
  scale = max((denominator for _, denominator in ratios), default=1)
  return [numerator * (scale // denominator) for numerator, denominator in ratios]


def _Room(
  memory: Sequence[float], memory_limit: float, num_stages: int, num_layers: int
) -> list[int]:
  """For each layer the furthest end of a stage that starts there and keeps to the limit."""
  if len(memory) != num_layers:
    raise ValueError(f'memory has {len(memory)} entries for {num_layers} layers')
  if not _IsNumber(memory_limit) or not memory_limit >= 0:
    raise ValueError(f'memory_limit: expected a number >= 0, got {memory_limit!r}')
  for layer, need in enumerate(memory):
    if _IsNumber(need) and need > memory_limit:
      raise ValueError(
        f'layer {layer} alone needs {need} of memory, more than memory_limit {memory_limit}: no '
        'cut can make it fit; split the layer or raise the limit'
      )
  if math.isinf(memory_limit):
    _ExactIntegers('memory', memory)
    return [num_layers] * num_layers
  *scaled, limit = _ExactIntegers('memory', [*memory, memory_limit])
  prefix = [0, *itertools.accumulate(scaled)]
  room = [bisect.bisect_right(prefix, start + limit) - 1 for start in prefix[:-1]]
  ends = [room[0]]
  while ends[-1] < num_layers:
    ends.append(room[ends[-1]])
  if len(ends) > num_stages:
    raise ValueError(
      f'{num_stages} stages are too few for memory_limit {memory_limit}: filled in order, the last '
      f'of them ends before layer {ends[num_stages - 1]} of {num_layers}; take at least '
      f'{len(ends)} stages or raise the limit'
    )
  return room


def _EndRanges(prefix: list[int], room: list[int], caps: list[int]) -> list[tuple[int, int]]:
  """For k = 0..K the least and greatest end that the first k stages can have in a whole cut.

  Stages 0..k-1 end at j in some cut with no cost above `caps` exactly when low <= j <= high, since
  a stage that is cut short stays within its bounds. Empty where no cut exists.
  """
  num_layers, num_stages = len(room), len(caps)
  high = [0]
  for k in range(num_stages):  # Fill the stages from the front...
    start = high[-1]
    reach = bisect.bisect_right(prefix, prefix[start] + caps[k]) - 1
    high.append(min(reach, room[start]) if start < num_layers else start)
  low = [num_layers]
  for k in reversed(range(num_stages)):  # ... and from the back.
    end = low[-1]
    by_cost = bisect.bisect_left(prefix, prefix[end] - caps[k])
    low.append(max(by_cost, bisect.bisect_left(room, end)) if end else end)
  low.reverse()
  # No stage is empty: k layers lie before the end of stage k-1 and K-k behind it, at the least.
  ranges = [
    (max(low[k], k), min(high[k], num_layers - (num_stages - k))) for k in range(num_stages + 1)
  ]
  return ranges if all(a <= b for a, b in ranges) else []


def _MostEven(
  prefix: list[int],
  room: list[int],
  caps: list[int],
  units: list[int],
  ranges: list[tuple[int, int]],
) -> list[int]:
  """Among the cuts within the bounds the one that is best by criteria 2 to 4.

  Dynamic programming over stages; the weight of a stage, `cost^2 * W + layers^2`, satisfies the
  quadrangle inequality (also where a bound makes it infinite), so the best start moves forward
  with the end and each stage takes O(L log L) by divide and conquer.
  """
  num_layers, num_stages = len(room), len(caps)
  above_layers = num_layers * num_layers + 1  # The W that makes layer counts matter in ties only.
  best = {0: 0}  # End of the stages so far -> the least weight.
  starts: list[dict[int, int]] = []  # For each stage: end -> its best start.
  for k in range(num_stages):
    previous, best, start_of = best, {}, {}
    factor = units[k] * units[k] * above_layers
    pending = [(*ranges[k + 1], *ranges[k])]
    while pending:
      first_end, last_end, first_start, last_start = pending.pop()
      if first_end > last_end:
        continue
      end = (first_end + last_end) // 2
      total = prefix[end]
      earliest = max(
        first_start, bisect.bisect_left(prefix, total - caps[k]), bisect.bisect_left(room, end)
      )
      weight = start = None
      for i in range(earliest, min(last_start, end - 1) + 1):
        cost = total - prefix[i]
        candidate = previous[i] + factor * cost * cost + (end - i) * (end - i)
        if weight is None or candidate < weight:
          weight, start = candidate, i
      assert weight is not None and start is not None, 'every end in range has a start'
      best[end], start_of[end] = weight, start
      pending.append((first_end, end - 1, first_start, start))
      pending.append((end + 1, last_end, start, last_start))
    starts.append(start_of)
  ends = [num_layers]
  for start_of in reversed(starts[1:]):
    ends.append(start_of[ends[-1]])
  return ends[::-1]
