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
import dataclasses
import fractions
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import SupportsFloat, SupportsIndex

Number = float | fractions.Fraction


@dataclasses.dataclass(frozen=True)
class StageCosts:
  """What each layer costs as part of one stage; any numbers, finite and not negative.

  Attributes:
    layers: each layer's cost in a stage that does not go beyond layer `first`.
    late: what the layers before `first` cost more in a stage that has layer `first` too: layers
      before the first trained one are recomputed only where their stage has a backward at all.
    first: see `late`; None: there is no such layer.
  """

  layers: Sequence[Number]
  late: Sequence[Number] = ()
  first: int | None = None


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
  CheckNumStages(num_stages, num_layers)
  if not (_IsNumber(last_stage_factor) and 0 < last_stage_factor < math.inf):
    raise ValueError(f'last_stage_factor: expected a positive number, got {last_stage_factor!r}')
  if (memory is None) != (memory_limit is None):
    given, lacking = ('memory_limit', 'memory') if memory is None else ('memory', 'memory_limit')
    raise ValueError(f'{given} is given without {lacking}; give both or none')
  scaled = _ExactIntegers('costs', costs)
  factor = fractions.Fraction(float(last_stage_factor))
  inner = StageCosts([factor.denominator * cost for cost in scaled])
  last = StageCosts([factor.numerator * cost for cost in scaled])
  rooms = None
  if memory is not None and memory_limit is not None:
    rooms = [_Room(memory, memory_limit, num_stages, num_layers)] * num_stages
  ends = PartitionStages([inner] * (num_stages - 1) + [last], rooms)
  assert ends is not None, 'Filled in order, the stages have room for all layers.'
  return ends


def PartitionStages(
  stage_costs: Sequence[StageCosts], rooms: Sequence[Sequence[int]] | None = None
) -> list[int] | None:
  """The best cut by the module's criteria where what a layer costs depends on its stage.

  Exact as `Partition` is, and as quick where all stages but the last are alike and `rooms` grow
  along layers and stages. Rooms need not: a stage that starts later may have a larger input. Then
  the best cut for the least rooms that do is tried first, and where it is not within `rooms`, time
  grows with stages · layers · layers in a stage.

  Args:
    stage_costs: an entry a stage, each for all the layers; one object where stages are alike.
    rooms: for each stage and each layer that it might start with the furthest end that its memory
      has room for: the start itself where there is none, else an index after a last layer.

  Returns:
    For each stage the index after its last layer; None where `rooms` leave no cut.

  Raises:
    ValueError: a bad cost, or more stages than layers.
  """
  num_stages = len(stage_costs)
  num_layers = len(stage_costs[0].layers) if stage_costs else 0
  CheckNumStages(num_stages, num_layers)
  tables = _Tables(stage_costs)
  if rooms is None:
    rooms = [[num_layers] * num_layers] * num_stages
  if len(set(map(id, stage_costs[:-1]))) > 1:
    return _BestInSets(tables, rooms)
  ends = _BestInRanges(tables, _Grown(rooms))
  if ends is None:
    return None
  ranges = StageRanges(ends)
  if all(room[start] >= end for room, (start, end) in zip(rooms, ranges, strict=True)):
    return ends
  return _BestInSets(tables, rooms)


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
      f'splits {ends}: the last end must be the number of layers, {num_layers}, got {ends[-1]}; '
      'leave splits empty to have the layers cut by their cost'
    )
  return ends


def CheckNumStages(num_stages: int, num_layers: int) -> None:
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


def _ExactIntegers(what: str, values: Sequence[Number]) -> list[int]:
  """The values times the least number that makes them whole."""
  ratios = []
  for i, value in enumerate(values):
    # Integers and fractions may be greater than any float.
    exact = isinstance(value, (SupportsIndex, fractions.Fraction))
    if not (_IsNumber(value) and (exact or math.isfinite(value))):
      raise ValueError(f'{what}[{i}]: expected a finite number, got {value!r}')
    if value < 0:
      raise ValueError(f'{what}[{i}]: expected a number >= 0, got {value!r}')
    if isinstance(value, SupportsIndex):
      ratios.append((operator.index(value), 1))
    else:
      ratios.append((value if exact else float(value)).as_integer_ratio())
  scale = math.lcm(*{denominator for _, denominator in ratios})
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


class _Table:
  """`StageCosts` as sums over the first layers: any stage's cost is one difference."""

  def __init__(self, layers: Sequence[int], late: Sequence[int], first: int | None) -> None:
    self.first = len(layers) if first is None else first
    self._before = [0, *itertools.accumulate(layers)]
    more = [0, *itertools.accumulate(late)]
    more += [more[-1]] * (len(self._before) - len(more))
    self._after = [a + b for a, b in zip(self._before, more, strict=True)]
    self.total = self._after[-1]

  def Sums(self, end: int) -> list[int]:
    """The sums for stages that end before layer `end`."""
    return self._after if end > self.first else self._before

  def Reach(self, start: int, cap: int) -> int:
    """The furthest end of a stage that starts with layer `start` and costs at most `cap`."""
    before, after = self._before, self._after
    end = start
    if start < self.first:
      end = bisect.bisect_right(before, before[start] + cap, start, self.first + 1) - 1
      if end < self.first:
        return end
    return bisect.bisect_right(after, after[start] + cap, end + 1) - 1

  def Earliest(self, end: int, cap: int) -> int:
    """The earliest start of a stage that ends before layer `end` and costs at most `cap`."""
    sums = self.Sums(end)
    return bisect.bisect_left(sums, sums[end] - cap)


def _Tables(stage_costs: Sequence[StageCosts]) -> list[_Table]:
  """The tables of the stages, in integers of one scale."""
  distinct = list({id(c): c for c in stage_costs}.values())
  scaled = iter(_ExactIntegers('costs', [x for c in distinct for x in (*c.layers, *c.late)]))
  made = {}
  for c in distinct:
    layers = list(itertools.islice(scaled, len(c.layers)))
    made[id(c)] = _Table(layers, list(itertools.islice(scaled, len(c.late))), c.first)
  return [made[id(c)] for c in stage_costs]


def _Grown(rooms: Sequence[Sequence[int]]) -> list[list[int]]:
  """The least rooms that contain these and grow along layers and stages."""
  grown: list[list[int]] = []
  for room in rooms:
    along = list(itertools.accumulate(room, max))
    grown.append(list(map(max, along, grown[-1])) if grown else along)
  return grown


def _LeastCap(tables: Sequence[_Table], exists: Callable[[int], bool]) -> int | None:
  """The least cost of the costliest stage for which a cut exists, None if there is no cut."""
  high = max(table.total for table in tables)
  if not exists(high):
    return None
  low = 0
  while low < high:
    middle = (low + high) // 2
    if exists(middle):
      high = middle
    else:
      low = middle + 1
  return low


def _BestInRanges(tables: Sequence[_Table], rooms: Sequence[Sequence[int]]) -> list[int] | None:
  """The best cut where rooms grow along layers and stages."""
  cap = _LeastCap(tables, lambda cap: bool(_EndRanges(tables, rooms, cap)))
  if cap is None:
    return None
  return _MostEven(tables, rooms, cap, _EndRanges(tables, rooms, cap))


def _EndRanges(
  tables: Sequence[_Table], rooms: Sequence[Sequence[int]], cap: int
) -> list[tuple[int, int]]:
  """For k = 0..K the least and greatest end that the first k stages can have in a whole cut.

  Stages 0..k-1 end at j in some cut with no cost above `cap` exactly when low <= j <= high, since
  a stage that is cut short stays within its bounds. Empty where no cut exists.
  """
  num_layers, num_stages = len(rooms[0]), len(tables)
  high = [0]
  for table, room in zip(tables, rooms, strict=True):  # Fill the stages from the front...
    start = high[-1]
    high.append(min(table.Reach(start, cap), room[start]) if start < num_layers else start)
  low = [num_layers]
  for table, room in zip(reversed(tables), reversed(rooms), strict=True):  # ... and from the back.
    end = low[-1]
    low.append(max(table.Earliest(end, cap), bisect.bisect_left(room, end)) if end else end)
  low.reverse()
  # No stage is empty: k layers lie before the end of stage k-1 and K-k behind it, at the least.
  ranges = [
    (max(low[k], k), min(high[k], num_layers - (num_stages - k))) for k in range(num_stages + 1)
  ]
  return ranges if all(a <= b for a, b in ranges) else []


def _MostEven(
  tables: Sequence[_Table],
  rooms: Sequence[Sequence[int]],
  cap: int,
  ranges: list[tuple[int, int]],
) -> list[int]:
  """Among the cuts within the bounds the one that is best by criteria 2 to 4.

  Dynamic programming over stages; the weight of a stage, `cost^2 * W + layers^2`, satisfies the
  quadrangle inequality (also where a bound makes it infinite), so the best start moves forward
  with the end and each stage takes O(L log L) by divide and conquer.
  """
  num_layers = len(rooms[0])
  above_layers = num_layers * num_layers + 1  # The W that makes layer counts matter in ties only.
  best = {0: 0}  # End of the stages so far -> the least weight.
  starts: list[dict[int, int]] = []  # For each stage: end -> its best start.
  for k, (table, room) in enumerate(zip(tables, rooms, strict=True)):
    previous, best, start_of = best, {}, {}
    pending = [(*ranges[k + 1], *ranges[k])]
    while pending:
      first_end, last_end, first_start, last_start = pending.pop()
      if first_end > last_end:
        continue
      end = (first_end + last_end) // 2
      sums = table.Sums(end)
      total = sums[end]
      earliest = max(first_start, table.Earliest(end, cap), bisect.bisect_left(room, end))
      weight = start = None
      for i in range(earliest, min(last_start, end - 1) + 1):
        cost = total - sums[i]
        candidate = previous[i] + above_layers * cost * cost + (end - i) * (end - i)
        if weight is None or candidate < weight:
          weight, start = candidate, i
      assert weight is not None and start is not None, 'every end in range has a start'
      best[end], start_of[end] = weight, start
      pending.append((first_end, end - 1, first_start, start))
      pending.append((end + 1, last_end, start, last_start))
    starts.append(start_of)
  return _FollowBack(starts, num_layers)


def _BestInSets(tables: Sequence[_Table], rooms: Sequence[Sequence[int]]) -> list[int] | None:
  """The best cut under any rooms: the ends that stages can have need not be ranges."""
  num_layers = len(rooms[0])
  above_layers = num_layers * num_layers + 1

  def Ends(table: _Table, room: Sequence[int], start: int, cap: int) -> range:
    if start == num_layers:
      return range(0)
    return range(start + 1, min(table.Reach(start, cap), room[start]) + 1)

  def Exists(cap: int) -> bool:
    ends = {0}
    for table, room in zip(tables, rooms, strict=True):
      ends = {end for start in ends for end in Ends(table, room, start, cap)}
    return num_layers in ends

  cap = _LeastCap(tables, Exists)
  if cap is None:
    return None
  best = {0: 0}
  starts: list[dict[int, int]] = []
  for table, room in zip(tables, rooms, strict=True):
    previous, best, start_of = best, {}, {}
    for start, weight in sorted(previous.items()):
      for end in Ends(table, room, start, cap):
        sums = table.Sums(end)
        cost = sums[end] - sums[start]
        candidate = weight + above_layers * cost * cost + (end - start) * (end - start)
        if end not in best or candidate < best[end]:
          best[end], start_of[end] = candidate, start
    starts.append(start_of)
  return _FollowBack(starts, num_layers)


def _FollowBack(starts: Sequence[Mapping[int, int]], num_layers: int) -> list[int]:
  """The ends of all stages, from the best start of each stage for each of its ends."""
  ends = [num_layers]
  for start_of in reversed(starts[1:]):
    ends.append(start_of[ends[-1]])
  return ends[::-1]
