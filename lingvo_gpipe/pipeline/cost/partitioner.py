# SPDX-License-Identifier: Apache-2.0
"""Cuts a list of layers into contiguous stages so that the most expensive stage is cheapest.

The GPipe paper (section 2.2) minimises the variance of the stages' costs, with a heuristic. The
most expensive stage determines the time of a step, so its cost comes first here, and the cut is
exact. The best cut has, in this order:

1. the least cost of the most expensive stage (the bottleneck);
2. the least sum of squared stage costs, which is the least variance;
3. the least sum of squared layer counts, which also spreads layers without cost evenly;
4. the earliest end of the last stage but one, then of the stage before it, and so on: a spare layer
   goes to a later stage, which holds fewer micro-batches under 1F1B.

Costs are first converted to integers with a common scale (a float is a fraction with a power of two
as denominator), so that sums are exact and equal costs compare equal.

The algorithm, for L layers and K stages:

A. Binary search for the bottleneck, `cap`. A value is feasible if stages that are filled from the
   front, each as far as `cap` allows, reach the last layer.
B. For each k the ends that the first k stages can have in a feasible cut. These are a range, from
   filling the stages greedily from the back (low) and from the front (high):

       layers   0                                                    L
       k = 1    |      low[1] ====== high[1]                         |
       k = 2    |                    low[2] ======== high[2]         |
       k = K    |                                                    low[K] = high[K] = L

C. Dynamic programming over these ranges for criteria 2 to 4:

       best[k][end] = min over start of best[k-1][start] + cost(start, end)^2 * W + (end - start)^2

   The weight satisfies the quadrangle inequality, so the best start never moves back as the end
   moves forward, and divide and conquer over the ends takes O(L log L) per stage.

If memory limits a stage's end by a `room` that does not grow along layers and stages, the ends of B
need not be ranges: then sets of ends replace the ranges in A to C.
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
  """The cost of each layer in one stage; finite numbers >= 0.

  Attributes:
    layers: each layer's cost in a stage that ends before layer `first` or starts at or after it.
    late: for each layer before `first` its additional cost in a stage that also contains layer
      `first`. `first` is the first trained layer: earlier layers are recomputed only if their stage
      has a backward.
    first: see `late`; None: no layer has such a cost.
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
  """Returns the best cut by the module's criteria: for each stage the index after its last layer.

  For example, `[1, 2, 3, 4, 5, 6]` in 2 stages gives `[4, 6]`. 1663 layers in 128 stages take some
  hundredths of a second, or half a second if one layer outweighs all others.

  Args:
    costs: the cost of each layer, a finite number >= 0.
    num_stages: K; each stage gets at least one layer.
    memory: the memory that each layer needs; requires `memory_limit`.
    memory_limit: the most memory that the layers of one stage may need.
    last_stage_factor: cost of a layer in the last stage, relative to other stages; 0.75 if the last
      stage is fused and so recomputes nothing (3 units of work per layer instead of 4).

  Raises:
    ValueError: a bad argument, more stages than layers, or a memory limit that no cut keeps.
  """
  num_layers = len(costs)
  CheckNumStages(num_stages, num_layers)
  if not (_IsNumber(last_stage_factor) and 0 < last_stage_factor < math.inf):
    raise ValueError(f'last_stage_factor: expected a positive number, got {last_stage_factor!r}')
  if (memory is None) != (memory_limit is None):
    present, missing = ('memory_limit', 'memory') if memory is None else ('memory', 'memory_limit')
    raise ValueError(f'{present} is set without {missing}; set both or neither')
  scaled = ExactIntegers('costs', costs)
  factor = fractions.Fraction(float(last_stage_factor))
  # Multiply both by the denominator, so that the costs stay integers.
  inner = StageCosts([factor.denominator * cost for cost in scaled])
  last = StageCosts([factor.numerator * cost for cost in scaled])
  rooms = None
  if memory is not None and memory_limit is not None:
    rooms = [_Room(memory, memory_limit, num_stages, num_layers)] * num_stages
  ends = PartitionStages([inner] * (num_stages - 1) + [last], rooms)
  assert ends is not None, '_Room has checked that the stages have room for all layers.'
  return ends


def PartitionStages(
  stage_costs: Sequence[StageCosts], rooms: Sequence[Sequence[int]] | None = None
) -> list[int] | None:
  """Returns the best cut by the module's criteria if a layer's cost depends on its stage.

  The search is as exact as `Partition`. It is also as fast if all stages but the last are alike and
  `rooms` grow along layers and stages. Rooms may shrink, because a stage that starts later may have
  a larger input. In that case the best cut within the smallest growing rooms that contain `rooms`
  is tried first. If it exceeds `rooms`, the search takes O(stages * layers * layers per stage).

  Args:
    stage_costs: for each stage the costs of all layers; the same object for stages that are alike.
    rooms: for each stage and each layer that it may start with, the furthest end that fits into its
      memory: an index after a last layer, or the start itself if no layer fits.

  Returns:
    For each stage the index after its last layer; None if no cut keeps within `rooms`.

  Raises:
    ValueError: a bad cost, or more stages than layers.
  """
  num_stages = len(stage_costs)
  num_layers = len(stage_costs[0].layers) if stage_costs else 0
  CheckNumStages(num_stages, num_layers)
  tables = _Tables(stage_costs)
  if rooms is None:
    rooms = [[num_layers] * num_layers] * num_stages
  # `_EndRanges` needs a layer that fits into a stage to fit into all later stages but the last.
  if len(set(map(id, stage_costs[:-1]))) > 1:
    return _BestInSets(tables, rooms)
  # Grown rooms allow every cut that `rooms` allow. If they allow no cut, none exists; if their best
  # cut fits into `rooms`, it is the best cut there, too.
  ends = _BestInRanges(tables, _GrowRooms(rooms))
  if ends is None:
    return None
  ranges = StageRanges(ends)
  if all(room[start] >= end for room, (start, end) in zip(rooms, ranges, strict=True)):
    return ends
  return _BestInSets(tables, rooms)


def PartitionByCost(
  costs: Sequence[Callable[[int, int], int | None]], num_layers: int, bound: int
) -> list[int] | None:
  """Returns the best cut by the module's criteria if the cost of a stage is any function.

  The search takes O(stages * layers * layers per stage) calls of the functions, so these should
  remember their results.

  Args:
    costs: for each stage a function of (first layer, index after the last layer): the cost, or None
      if such a stage is not possible. As a stage gets more layers at its end, its cost must not
      fall, and an impossible stage must stay impossible.
    num_layers: L.
    bound: no possible stage costs more.

  Returns:
    For each stage the index after its last layer; None if no cut is possible.

  Raises:
    ValueError: more stages than layers.
  """
  CheckNumStages(len(costs), num_layers)
  tables = [_FunctionTable(cost, num_layers, bound) for cost in costs]
  return _BestInSets(tables, [[num_layers] * num_layers] * len(costs))


def StageRanges(ends: Sequence[int]) -> list[tuple[int, int]]:
  """Returns for each stage (first layer, index after its last): [4, 6] -> [(0, 4), (4, 6)]."""
  return list(itertools.pairwise([0, *ends]))


def CheckSplits(splits: Sequence[int], num_layers: int) -> list[int]:
  """Checks a cut made by hand and returns it as a list of `int`.

  Args:
    splits: for each stage the index after its last layer, as `Partition` returns it.
    num_layers: L, the required last entry.

  Raises:
    TypeError: `splits` is not a list of integers.
    ValueError: a stage is empty, or the last stage does not end with the last layer.
  """
  shape = 'for each stage the index after its last layer'
  if isinstance(splits, (int, float, str)):
    raise TypeError(
      f'splits: expected a list, {shape}, got {splits!r}; to cut into equal stages, set num_stages '
      'instead'
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
        'has no layers; each end must be greater than the one before'
      )
  if ends[-1] != num_layers:
    raise ValueError(
      f'splits {ends}: the last end must be the number of layers, {num_layers}, got {ends[-1]}; '
      'leave splits empty to cut the layers by their cost'
    )
  return ends


def CheckNumStages(num_stages: int, num_layers: int) -> None:
  """Raises ValueError unless `num_layers` layers can be cut into `num_stages` non-empty stages."""
  if not isinstance(num_stages, int) or isinstance(num_stages, bool) or num_stages < 1:
    raise ValueError(f'num_stages: expected a positive integer, got {num_stages!r}')
  if num_layers < 1:
    raise ValueError('there are no layers to cut into stages; at least one is needed')
  if num_stages > num_layers:
    raise ValueError(
      f'{num_stages} stages for {num_layers} layers: a stage needs at least one layer; use at '
      f'most {num_layers} stages, or split the layers into smaller ones'
    )


def _IsNumber(value: object) -> bool:
  """Whether the value is a number. float() would also accept text and bools, which are mistakes."""
  return isinstance(value, (SupportsIndex, SupportsFloat)) and not isinstance(value, bool)


def ExactIntegers(name: str, values: Sequence[Number]) -> list[int]:
  """Returns the values times the least integer that makes all of them integers.

  Args:
    name: the name of the values in messages.
    values: finite numbers >= 0.

  Raises:
    ValueError: a value is not such a number.
  """
  ratios = []
  for i, value in enumerate(values):
    # Almost all values have these types, and isinstance with a protocol is slow.
    if type(value) in (int, float) and 0 <= value < math.inf:
      ratios.append(value.as_integer_ratio())
      continue
    # math.isfinite would overflow for integers and fractions greater than any float.
    exact = isinstance(value, (SupportsIndex, fractions.Fraction))
    if not (_IsNumber(value) and (exact or math.isfinite(value))):
      raise ValueError(f'{name}[{i}]: expected a finite number, got {value!r}')
    if value < 0:
      raise ValueError(f'{name}[{i}]: expected a number >= 0, got {value!r}')
    if isinstance(value, SupportsIndex):
      ratios.append((operator.index(value), 1))
    else:
      ratios.append((value if exact else float(value)).as_integer_ratio())
  scale = math.lcm(*{denominator for _, denominator in ratios})
  return [numerator * (scale // denominator) for numerator, denominator in ratios]


def _Room(
  memory: Sequence[float], memory_limit: float, num_stages: int, num_layers: int
) -> list[int]:
  """Returns for each layer the furthest end, within the limit, of a stage that starts there."""
  if len(memory) != num_layers:
    raise ValueError(f'memory has {len(memory)} entries for {num_layers} layers')
  if not _IsNumber(memory_limit) or not memory_limit >= 0:
    raise ValueError(f'memory_limit: expected a number >= 0, got {memory_limit!r}')
  for layer, need in enumerate(memory):
    if _IsNumber(need) and need > memory_limit:
      raise ValueError(
        f'layer {layer} alone needs {need} of memory, more than memory_limit {memory_limit}: no '
        'cut can keep the limit; split the layer or raise the limit'
      )
  if math.isinf(memory_limit):
    ExactIntegers('memory', memory)
    return [num_layers] * num_layers
  *scaled, limit = ExactIntegers('memory', [*memory, memory_limit])
  prefix = [0, *itertools.accumulate(scaled)]
  room = [bisect.bisect_right(prefix, start + limit) - 1 for start in prefix[:-1]]
  # Filling in order needs the fewest stages. Each step advances, because every single layer fits.
  ends = [room[0]]
  while ends[-1] < num_layers:
    ends.append(room[ends[-1]])
  if len(ends) > num_stages:
    raise ValueError(
      f'{num_stages} stages are too few for memory_limit {memory_limit}: filled in order, the last '
      f'stage ends before layer {ends[num_stages - 1]} of {num_layers}; use at least '
      f'{len(ends)} stages or raise the limit'
    )
  return room


class _Table:
  """`StageCosts` as prefix sums, so that the cost of any stage is one subtraction.

  `_before` has the sums of `layers`. `_after` adds `late`, for stages that reach beyond layer
  `first`; from `first` on its differences are equal to `_before`'s.
  """

  def __init__(self, layers: Sequence[int], late: Sequence[int], first: int | None) -> None:
    self.first = len(layers) if first is None else first
    self._before = [0, *itertools.accumulate(layers)]
    more = [0, *itertools.accumulate(late)]
    more += [more[-1]] * (len(self._before) - len(more))
    self._after = [a + b for a, b in zip(self._before, more, strict=True)]
    self.total = self._after[-1]

  def Sums(self, end: int) -> list[int]:
    """Returns the prefix sums for stages that end before layer `end`."""
    return self._after if end > self.first else self._before

  def Reach(self, start: int, cap: int) -> int:
    """Returns the furthest end of a stage that starts at layer `start` and costs at most `cap`."""
    before, after = self._before, self._after
    end = start
    if start < self.first:
      end = bisect.bisect_right(before, before[start] + cap, start, self.first + 1) - 1
      if end < self.first:
        return end
    # From here on the stage contains layer `first`, or starts after it.
    return bisect.bisect_right(after, after[start] + cap, end + 1) - 1

  def Earliest(self, end: int, cap: int) -> int:
    """Returns the earliest start of a stage that ends before `end` and costs at most `cap`."""
    sums = self.Sums(end)
    return bisect.bisect_left(sums, sums[end] - cap)

  def Cost(self, start: int, end: int) -> int:
    """Returns the cost of a stage."""
    sums = self.Sums(end)
    return sums[end] - sums[start]


class _FunctionTable:
  """The costs of a stage as a function, with the members of `_Table` that `_BestInSets` uses."""

  def __init__(self, cost: Callable[[int, int], int | None], num_layers: int, bound: int) -> None:
    self._cost = cost
    self._num_layers = num_layers
    self.total = bound

  def Reach(self, start: int, cap: int) -> int:
    """Returns the furthest end of a stage that starts at layer `start` and costs at most `cap`."""

    def IsBeyond(end: int) -> bool:
      cost = self._cost(start, end)
      return cost is None or cost > cap

    # Ends near the start are cheaper to examine.
    # Invariant: `step // 2` layers fit into the stage.
    step = 1
    while start + step <= self._num_layers and not IsBeyond(start + step):
      step *= 2
    ends = range(start + step // 2 + 1, min(start + step, self._num_layers + 1))
    return start + step // 2 + bisect.bisect_left(ends, True, key=IsBeyond)

  def Cost(self, start: int, end: int) -> int:
    """Returns the cost of a stage that is possible."""
    cost = self._cost(start, end)
    assert cost is not None, 'Only stages within Reach are asked for.'
    return cost


def _Tables(stage_costs: Sequence[StageCosts]) -> list[_Table]:
  """Returns the tables of the stages, in integers with a common scale."""
  distinct = list({id(c): c for c in stage_costs}.values())
  scaled = iter(ExactIntegers('costs', [x for c in distinct for x in (*c.layers, *c.late)]))
  tables = {}
  for c in distinct:
    layers = list(itertools.islice(scaled, len(c.layers)))
    tables[id(c)] = _Table(layers, list(itertools.islice(scaled, len(c.late))), c.first)
  return [tables[id(c)] for c in stage_costs]


def _GrowRooms(rooms: Sequence[Sequence[int]]) -> list[list[int]]:
  """Returns the least rooms that contain `rooms` and never fall along layers and stages."""
  grown: list[list[int]] = []
  for room in rooms:
    along = list(itertools.accumulate(room, max))
    grown.append(list(map(max, along, grown[-1])) if grown else along)
  return grown


def _LeastCap(
  tables: Sequence[_Table | _FunctionTable], exists: Callable[[int], bool]
) -> int | None:
  """Returns the least bottleneck for which a cut exists, or None if there is no cut (step A)."""
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
  """Returns the best cut if the rooms grow along layers and stages; None if there is none."""
  cap = _LeastCap(tables, lambda cap: bool(_EndRanges(tables, rooms, cap)))
  if cap is None:
    return None
  return _MostEven(tables, rooms, cap, _EndRanges(tables, rooms, cap))


def _EndRanges(
  tables: Sequence[_Table], rooms: Sequence[Sequence[int]], cap: int
) -> list[tuple[int, int]]:
  """Returns for k = 0..K the least and greatest end of the first k stages in a cut (step B).

  The first k stages end at j in some cut without a cost above `cap` exactly if low <= j <= high,
  because a stage that loses layers stays within its bounds. Empty if there is no cut.
  """
  num_layers, num_stages = len(rooms[0]), len(tables)
  high = [0]
  for table, room in zip(tables, rooms, strict=True):  # Fill the stages from the front...
    start = high[-1]
    high.append(min(table.Reach(start, cap), room[start]) if start < num_layers else start)
  low = [num_layers]
  # Rooms do not fall along layers, so bisection finds the first start from which `end` is in reach.
  for table, room in zip(reversed(tables), reversed(rooms), strict=True):  # ... and from the back.
    end = low[-1]
    low.append(max(table.Earliest(end, cap), bisect.bisect_left(room, end)) if end else end)
  low.reverse()
  # No stage is empty: at least k layers come before the end of stage k-1, and K-k after it.
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
  """Returns the cut within the ranges that is best by criteria 2 to 4 (step C).

  The invariant of the divide and conquer: an entry of `pending` is a range of ends, and a range of
  starts that contains the best start of each of these ends. The middle end is solved by trying its
  starts, and its best start bounds the starts of the ends on both sides:

      starts    first_start ............. start ............. last_start
      ends      first_end ........ end - 1 | end | end + 1 ........ last_end

  The quadrangle inequality also holds for weights that a bound makes infinite. Among equal weights
  the earliest start wins, which is criterion 4.
  """
  num_layers = len(rooms[0])
  # W is greater than any sum of squared layer counts, so these only decide ties.
  above_layers = num_layers * num_layers + 1
  best = {0: 0}  # {end of the stages so far: least weight}.
  starts: list[dict[int, int]] = []  # For each stage {end: its best start}.
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


def _BestInSets(
  tables: Sequence[_Table | _FunctionTable], rooms: Sequence[Sequence[int]]
) -> list[int] | None:
  """Returns the best cut within any rooms: steps A to C with sets of ends instead of ranges."""
  num_layers = len(rooms[0])
  above_layers = num_layers * num_layers + 1

  def Ends(table: _Table | _FunctionTable, room: Sequence[int], start: int, cap: int) -> range:
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
    # Visit the starts in order, so that the earliest start wins among equal weights: criterion 4.
    for start, weight in sorted(previous.items()):
      for end in Ends(table, room, start, cap):
        cost = table.Cost(start, end)
        candidate = weight + above_layers * cost * cost + (end - start) * (end - start)
        if end not in best or candidate < best[end]:
          best[end], start_of[end] = candidate, start
    starts.append(start_of)
  return _FollowBack(starts, num_layers)


def _FollowBack(starts: Sequence[Mapping[int, int]], num_layers: int) -> list[int]:
  """Returns the ends of all stages, given for each stage the best start of each of its ends."""
  ends = [num_layers]
  # The first stage begins at layer 0.
  for start_of in reversed(starts[1:]):
    ends.append(start_of[ends[-1]])
  return ends[::-1]
