# SPDX-License-Identifier: Apache-2.0
"""The partitioner against brute force, its errors, and its speed on the paper's largest model."""

import fractions
import itertools
import random
import sys
import time

import hypothesis
import pytest
from hypothesis import strategies as st

from lingvo_gpipe.pipeline.cost import partitioner

_SETTINGS = hypothesis.settings(max_examples=120, deadline=None, derandomize=True)


def _Key(costs, ends, factor=1.0):
  """Returns the documented criteria, computed exactly; the best cut has the least key."""
  stages = [costs[start:end] for start, end in partitioner.StageRanges(ends)]
  sums = [sum(map(fractions.Fraction, stage)) for stage in stages]
  sums[-1] *= fractions.Fraction(factor)
  return (
    max(sums),
    sum(s * s for s in sums),
    sum(len(stage) ** 2 for stage in stages),
    list(reversed(ends)),
  )


def _BruteForce(costs, num_stages, memory=None, memory_limit=None, factor=1.0):
  """Returns the best of all cuts into non-empty stages, or None if none keeps the limit."""
  cuts = itertools.combinations(range(1, len(costs)), num_stages - 1)
  candidates = [[*cut, len(costs)] for cut in cuts]
  if memory is not None:
    limit = fractions.Fraction(memory_limit)
    candidates = [
      ends
      for ends in candidates
      if all(
        sum(map(fractions.Fraction, memory[start:end])) <= limit
        for start, end in partitioner.StageRanges(ends)
      )
    ]
  return min(candidates, key=lambda ends: _Key(costs, ends, factor), default=None)


_COST = st.one_of(
  st.integers(0, 4),  # Many ties, many zeros.
  st.integers(0, 10**25),
  st.floats(0, 10, allow_nan=False),
  st.floats(0, allow_nan=False, allow_infinity=False),
  st.sampled_from([0.1, 0.2, 0.3, 0.6]),  # 0.1 + 0.2 > 0.3 in floats.
)


@st.composite
def _Problems(draw):
  costs = draw(st.lists(_COST, min_size=1, max_size=9))
  return costs, draw(st.integers(1, len(costs)))


@_SETTINGS
@hypothesis.given(_Problems())
def testEqualsBruteForce(problem):
  costs, num_stages = problem
  ends = partitioner.Partition(costs, num_stages)
  assert ends == _BruteForce(costs, num_stages)
  assert len(ends) == num_stages and ends[-1] == len(costs)
  assert all(start < end for start, end in partitioner.StageRanges(ends))
  assert all(type(end) is int for end in ends)


@_SETTINGS
@hypothesis.given(
  st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=9),
  st.data(),
  st.sampled_from([0.25, 0.75, 1.0, 1.5, 100.0]),
)
def testMemoryLimitAndLastStageFactorEqualBruteForce(layers, data, factor):
  costs, memory = map(list, zip(*layers, strict=True))
  num_stages = data.draw(st.integers(1, len(costs)))
  limit = data.draw(st.integers(0, 20))
  expected = _BruteForce(costs, num_stages, memory, limit, factor)
  kwargs = dict(memory=memory, memory_limit=limit, last_stage_factor=factor)
  if expected is None:
    with pytest.raises(ValueError, match='memory_limit'):
      partitioner.Partition(costs, num_stages, **kwargs)
  else:
    assert partitioner.Partition(costs, num_stages, **kwargs) == expected


@_SETTINGS
@hypothesis.given(_Problems(), st.sampled_from([0.1, 0.75, 0.9, 1.3]))
def testLastStageFactorEqualsBruteForce(problem, factor):
  costs, num_stages = problem
  ends = partitioner.Partition(costs, num_stages, last_stage_factor=factor)
  assert ends == _BruteForce(costs, num_stages, factor=factor)


def _StageCost(stage_costs, start, end):
  total = sum(stage_costs.layers[start:end])
  first = stage_costs.first
  if first is not None and start < first < end:
    total += sum(stage_costs.late[start:first])
  return total


def _BestOfAll(stage_costs, rooms):
  """Returns the best of all cuts if costs and rooms depend on the stage, or None."""
  num_layers = len(stage_costs[0].layers)
  candidates = []
  for cut in itertools.combinations(range(1, num_layers), len(stage_costs) - 1):
    ranges = partitioner.StageRanges([*cut, num_layers])
    if any(rooms[k][start] < end for k, (start, end) in enumerate(ranges)):
      continue
    sums = [_StageCost(c, *ends) for c, ends in zip(stage_costs, ranges, strict=True)]
    layers = [(end - start) ** 2 for start, end in ranges]
    ends = [*cut, num_layers]
    candidates.append((max(sums), sum(s * s for s in sums), sum(layers), ends[::-1], ends))
  return min(candidates)[-1] if candidates else None


@st.composite
def _StagedProblems(draw, alike):
  num_layers = draw(st.integers(1, 8))
  num_stages = draw(st.integers(1, num_layers))
  first = draw(st.one_of(st.none(), st.integers(0, num_layers)))

  def Costs():
    layers = draw(st.lists(_SMALL, min_size=num_layers, max_size=num_layers))
    return partitioner.StageCosts(
      layers, draw(st.lists(_SMALL, min_size=first or 0, max_size=first or 0)), first
    )

  distinct = [Costs() for _ in range(num_stages if not alike else 2)]
  costs = distinct if not alike else [distinct[0]] * (num_stages - 1) + [distinct[1]]
  rooms = [
    [draw(st.integers(start, num_layers)) for start in range(num_layers)] for _ in range(num_stages)
  ]
  return costs, rooms


_SMALL = st.one_of(st.integers(0, 4), st.fractions(0, 3, max_denominator=3))


@pytest.mark.parametrize('alike', [True, False])
@pytest.mark.parametrize('with_rooms', [True, False])
def testStagesWithDifferentCostsAndRoomsEqualBruteForce(alike, with_rooms):
  @hypothesis.settings(_SETTINGS, max_examples=50)
  @hypothesis.given(_StagedProblems(alike))
  def Check(problem):
    costs, rooms = problem
    if with_rooms:
      assert partitioner.PartitionStages(costs, rooms) == _BestOfAll(costs, rooms)
    else:
      everywhere = [[len(rooms[0])] * len(rooms[0])] * len(rooms)
      assert partitioner.PartitionStages(costs) == _BestOfAll(costs, everywhere)

  Check()


def testRoomsThatDoNotGrow():
  # Only a stage that starts early has room, which rules out the best cut without rooms.
  costs = [partitioner.StageCosts([1] * 4)] * 2
  assert partitioner.PartitionStages(costs) == [2, 4]
  assert partitioner.PartitionStages(costs, [[1, 2, 3, 4], [0, 4, 3, 4]]) == [1, 4]
  assert partitioner.PartitionStages(costs, [[1, 2, 3, 4], [0, 3, 4, 4]]) is None


def testManyLayersWithRooms():
  random.seed(2)
  num_layers, num_stages = 400, 16
  sizes = [random.randint(1, 100) for _ in range(num_layers)]
  room = []
  for start in range(num_layers):  # The input of the stage needs memory too, sometimes a lot.
    free, end = 1800 - 300 * (start % 7 == 0), start
    while end < num_layers and free >= sizes[end]:
      free -= sizes[end]
      end += 1
    room.append(end)
  costs = [partitioner.StageCosts(sizes[::-1])] * num_stages
  start = time.perf_counter()
  ends = partitioner.PartitionStages(costs, [room] * num_stages)
  assert time.perf_counter() - start < 20
  assert all(room[a] >= b for a, b in partitioner.StageRanges(ends))


def testLongListsEqualQuadraticDynamicProgram():
  # Too long for brute force: checks only the bottleneck, with the textbook recurrence.
  random.seed(1)
  for _ in range(20):
    costs = [random.choice([0, 1, 1, 5, 40]) for _ in range(random.randint(10, 40))]
    num_stages = random.randint(1, len(costs))
    best = [0] + [float('inf')] * len(costs)
    for _ in range(num_stages):
      best = [float('inf')] + [
        min(max(best[i], sum(costs[i:j])) for i in range(j)) for j in range(1, len(costs) + 1)
      ]
    ends = partitioner.Partition(costs, num_stages)
    assert max(sum(costs[a:b]) for a, b in partitioner.StageRanges(ends)) == best[-1]


def testKnownCuts():
  assert partitioner.Partition([1, 2, 3, 4, 5, 6], 2) == [4, 6]
  assert partitioner.Partition([0, 0], 2) == [1, 2]
  assert partitioner.Partition([7], 1) == [1]
  # The most expensive layer is the bottleneck; the other layers are still cut evenly.
  assert partitioner.Partition([100] + [1] * 9, 4) == [1, 4, 7, 10]
  # The fused last stage takes more layers: 3 units per layer, and 4 in the first stage.
  assert partitioner.Partition([1] * 7, 2, last_stage_factor=0.75) == [3, 7]


@pytest.mark.parametrize('num_layers, num_stages', [(8, 4), (7, 2), (10, 3), (5, 5), (100, 7)])
def testFreeLayersAreSpreadEvenlyWithSpareOnesLast(num_layers, num_stages):
  for cost in (0, 0.1, 10**30):
    ends = partitioner.Partition([cost] * num_layers, num_stages)
    sizes = [end - start for start, end in partitioner.StageRanges(ends)]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes)


def testSumsAreExact():
  # As floats, 1e16 + 1 == 1e16: a running sum would not see the two small layers.
  assert partitioner.Partition([1e16, 1.0, 1.0, 1e16 + 2], 2) == [3, 4]
  # Ten times 0.1 as floats is not 1.0, and running sums of 0.1 differ from one another.
  assert partitioner.Partition([0.1] * 60, 6) == [10, 20, 30, 40, 50, 60]


def testTakesNumPyNumbers():
  np = pytest.importorskip('numpy')
  assert partitioner.Partition(np.arange(1, 7), 2) == [4, 6]
  assert partitioner.Partition(np.arange(1, 7, dtype=np.float32), np.int64(2).item()) == [4, 6]


@pytest.mark.parametrize(
  'costs',
  [
    [1.0] * 1663,
    [random.Random(0).random() for _ in range(1663)],
    [random.Random(0).random() for _ in range(1662)] + [1000.0],
    [0] * 1663,
  ],
  ids=['equal', 'random', 'one outweighs all', 'zero'],
)
def testTheLargestModelOfThePaperIsFast(costs):
  # Table 1 of the paper: Transformer-L with 1663 layers on 128 accelerators.
  start = time.process_time()
  ends = partitioner.Partition(costs, 128)
  assert time.process_time() - start < 10  # Half a second or less; slack for a busy machine.
  assert len(set(ends)) == 128


@pytest.mark.parametrize(
  'costs, num_stages, words',
  [
    ([1, 2], 3, ['3 stages', '2 layers', 'at most 2']),
    ([], 1, ['no layers']),
    ([1, 2], 0, ['num_stages', 'positive', '0']),
    ([1, 2], -1, ['num_stages', '-1']),
    ([1, 2], True, ['num_stages', 'True']),
    ([1, 2], 1.5, ['num_stages', '1.5']),
    ([1, -2.5], 1, ['costs[1]', '-2.5']),
    ([1, float('nan')], 1, ['costs[1]', 'nan']),
    ([float('inf')], 1, ['costs[0]', 'inf']),
    (['3'], 1, ['costs[0]', "'3'"]),
    ([None], 1, ['costs[0]', 'None']),
    ([True], 1, ['costs[0]', 'True']),
  ],
)
def testBadArgumentsAreNamed(costs, num_stages, words):
  with pytest.raises(ValueError) as e:
    partitioner.Partition(costs, num_stages)
  assert all(word in str(e.value) for word in words), e.value


@pytest.mark.parametrize(
  'kwargs, words',
  [
    (dict(memory=[1, 9, 1], memory_limit=8), ['layer 1', '9', '8']),
    (dict(memory=[5, 5, 5], memory_limit=8), ['2 stages', 'layer 2', 'at least 3']),
    (dict(memory=[5, 5], memory_limit=8), ['memory has 2', '3 layers']),
    (dict(memory=[5, 5, 5]), ['memory_limit']),
    (dict(memory_limit=5), ['without memory']),
    (dict(memory=[1, 1, 1], memory_limit=float('nan')), ['memory_limit', 'nan']),
    (dict(memory=[1, -1, 1], memory_limit=3), ['memory[1]', '-1']),
    (dict(memory=[1, float('nan'), 1], memory_limit=float('inf')), ['memory[1]', 'nan']),
    (dict(last_stage_factor=0), ['last_stage_factor', '0']),
    (dict(last_stage_factor=float('nan')), ['last_stage_factor', 'nan']),
  ],
)
def testBadLimitsAreNamed(kwargs, words):
  with pytest.raises(ValueError) as e:
    partitioner.Partition([1, 1, 1], 2, **kwargs)
  assert all(word in str(e.value) for word in words), e.value


def testUnlimitedMemoryChangesNothing():
  assert partitioner.Partition([1, 2, 3], 2, memory=[9, 9, 9], memory_limit=float('inf')) == [2, 3]


def testStageRanges():
  assert partitioner.StageRanges([4, 6]) == [(0, 4), (4, 6)]
  assert partitioner.StageRanges([3]) == [(0, 3)]


def testCheckSplitsAcceptsTheResultOfPartition():
  assert partitioner.CheckSplits((4, 6), 6) == [4, 6]
  assert partitioner.CheckSplits(partitioner.Partition([1] * 9, 4), 9) == [2, 4, 6, 9]


@pytest.mark.parametrize(
  'splits, error, words',
  [
    ([4], ValueError, ['last end', '6', '4']),
    ([4, 7], ValueError, ['last end', '6', '7']),
    ([4, 4, 6], ValueError, ['stage 1', 'no layers']),
    ([0, 6], ValueError, ['stage 0', 'no layers']),
    ([5, 4, 6], ValueError, ['stage 1', 'no layers', '5, 4, 6']),
    ([], ValueError, ['empty']),
    (2, TypeError, ['list', 'num_stages']),
    ([2.0, 6], TypeError, ['splits[0]', '2.0']),
    ([True, 6], TypeError, ['splits[0]', 'True']),
  ],
)
def testCheckSplitsNamesTheFault(splits, error, words):
  with pytest.raises(error) as e:
    partitioner.CheckSplits(splits, 6)
  assert all(word in str(e.value) for word in words), e.value


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
