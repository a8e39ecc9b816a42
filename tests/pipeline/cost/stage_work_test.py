# SPDX-License-Identifier: Apache-2.0
"""The work of layers and stages: units per layer, and cuts that are exact in these units."""

import itertools
import sys

import hypothesis
import pytest
from hypothesis import strategies as st

from lingvo_gpipe.pipeline.cost import partitioner, simulator, stage_work
from lingvo_gpipe.pipeline.schedule import rematerialisation, schedules

_SETTINGS = hypothesis.settings(max_examples=150, deadline=None, derandomize=True)


def _Busy(schedule, work, ends, policy):
  """Returns the working time of each stage in a simulation."""
  trained = [
    any(w.is_trained for w in work[start:end]) for start, end in partitioner.StageRanges(ends)
  ]
  costs = stage_work.SimulatorCosts(work, ends)
  result = simulator.Simulate(schedule, costs, remat_policy=policy, trained=trained)
  busy = [0] * schedule.num_stages
  for span in itertools.chain.from_iterable(result.timeline):
    busy[span.action.stage] += span.end - span.start
  return busy


@pytest.mark.parametrize(
  'schedule, policy, units',
  [
    ('gpipe', 'stage', [4, 4]),
    ('fused_fill_drain', 'stage', [4, 3]),
    ('1f1b_fused', 'layer', [4, 3]),
    ('1f1b', 'none', [3, 3]),
    ('fused_fill_drain', 'none', [3, 3]),
    ('gpipe', 'except_last', [3.75, 3.75]),
    ('zb_h1', 'stage', [4, 4]),
  ],
)
def testUnitsPerLayer(schedule, policy, units):
  schedule = schedules.Get(schedule, 2, 4)
  work = stage_work.FromForward([1] * 3, [True] * 3)
  costs = stage_work.CutCosts(work, schedule, policy)
  assert [c.layers[1] / 4 for c in costs] == units
  # The first layer has no gradient of its input.
  assert [c.layers[0] / 4 for c in costs] == [u - 1 for u in units]


def testFrozenLayersHaveNoWAndLayersBeforeTheFirstTrainedOneNoBackward():
  work = stage_work.FromForward([1] * 4, [False, True, False, True])
  assert [(w.input_gradient, w.weight_gradient) for w in work] == [(0, 0), (0, 1), (1, 0), (1, 1)]
  schedule = schedules.Get('gpipe', 2, 1)
  # A stage of the first layer runs forward only; with the second layer it is recomputed.
  assert stage_work.StageCosts(work, [1, 4], schedule, 'stage') == [1, 3 + 3 + 4]
  assert stage_work.StageCosts(work, [2, 4], schedule, 'stage') == [2 + 3, 3 + 4]
  assert stage_work.StageCosts(work, [2, 4], schedule, 'none') == [1 + 2, 2 + 3]


def testWithoutTrainedLayersThereIsNoBackward():
  work = stage_work.FromForward([1, 2], [False, False])
  schedule = schedules.Get('gpipe', 2, 3)
  assert stage_work.StageCosts(work, [1, 2], schedule, 'stage') == [3, 6]
  assert stage_work.OneDevice(work, 3, 'stage') == 9


def testAMeasuredBackwardIsDividedBetweenIAndW():
  work = stage_work.FromTimes([(1, 0), (1, 5), (2, 6), (3, 4)], [False, True, True, False])
  assert [(w.input_gradient, w.weight_gradient) for w in work] == [(0, 0), (0, 5), (3, 3), (4, 0)]


@st.composite
def _Problems(draw):
  layers = draw(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=7))
  num_stages = draw(st.integers(1, min(4, len(layers))))
  name = draw(st.sampled_from(['gpipe', 'fused_fill_drain', '1f1b', '1f1b_fused', 'zb_h1']))
  policy = draw(st.sampled_from(rematerialisation.POLICIES))
  forward, trained = zip(*layers, strict=True)
  work = stage_work.FromForward(forward, trained)
  return work, schedules.Get(name, num_stages, draw(st.integers(1, 4))), policy


@_SETTINGS
@hypothesis.given(_Problems())
def testTheCutMinimisesTheBusiestStageOfTheSimulator(problem):
  work, schedule, policy = problem
  cuts = itertools.combinations(range(1, len(work)), schedule.num_stages - 1)
  best = min(max(_Busy(schedule, work, [*cut, len(work)], policy)) for cut in cuts)
  ends = partitioner.PartitionStages(stage_work.CutCosts(work, schedule, policy))
  assert max(_Busy(schedule, work, ends, policy)) == best
  assert stage_work.StageCosts(work, ends, schedule, policy) == _Busy(schedule, work, ends, policy)


@_SETTINGS
@hypothesis.given(_Problems())
def testOneDeviceTakesTheTimeOfOneStage(problem):
  work, schedule, policy = problem
  single = schedules.Get('gpipe', 1, schedule.num_micro_batches)
  assert stage_work.OneDevice(work, single.num_micro_batches, policy) == sum(
    _Busy(single, work, [len(work)], policy)
  )


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
