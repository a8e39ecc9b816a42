# SPDX-License-Identifier: Apache-2.0
"""Devices that share cores: times lie between one busy device and all devices busy."""

import sys

import hypothesis
import pytest
from hypothesis import strategies as st

from lingvo_gpipe.pipeline.cost import core_sharing, simulator
from lingvo_gpipe.pipeline.schedule import rematerialisation, schedules

_SETTINGS = hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
_TIMES = st.integers(0, 64).map(lambda n: n / 8)  # Sums of these are exact.
_FIELDS = ('forward', 'recompute', 'input_gradient', 'weight_gradient', 'backward', 'fused')


@st.composite
def _Steps(draw):
  """Draws (schedule, costs of all its parts, options), with transfers and updates."""
  name = draw(st.sampled_from(schedules.Names()))
  k = draw(st.integers(1, 4))
  v = 2 if schedules.TakesStagesPerDevice(name, 2) else 1
  m = k * draw(st.integers(1, 2)) if name in schedules.IN_ROUNDS else draw(st.integers(1, 6))
  schedule = schedules.Get(name, k * v, m, k)

  def Draw(number):
    return draw(st.lists(_TIMES, min_size=number, max_size=number))

  costs = simulator.Costs(
    **{field: Draw(k * v) for field in _FIELDS},
    update=Draw(k),
    transfer=Draw(k * v - 1),
    latency=draw(_TIMES),
    all_reduce=Draw(k * v),
  )
  policy = draw(st.sampled_from(rematerialisation.POLICIES))
  options = {
    'remat_policy': policy,
    'recompute_early': policy != 'layer' and draw(st.booleans()),
    'update_barrier': draw(st.booleans()),
  }
  return schedule, costs, options


def _Scaled(costs, factors):
  """Returns the costs with each field of actions times its factor."""
  scaled = {
    field: [t * factor for t in getattr(costs, field)]
    for field, factor in zip(_FIELDS, factors, strict=True)
  }
  return simulator.Costs(**{**vars(costs), **scaled})


@_SETTINGS
@hypothesis.given(_Steps(), st.lists(st.sampled_from([1, 2, 3]), min_size=6, max_size=6))
def testSharingChangesNothingIfDevicesAreNotFasterAlone(step, factors):
  schedule, costs, options = step
  plain = simulator.Simulate(schedule, costs, **options)
  assert simulator.Simulate(schedule, costs, alone=_Scaled(costs, factors), **options) == plain


@_SETTINGS
@hypothesis.given(_Steps(), st.lists(st.floats(0, 1), min_size=6, max_size=6))
def testTimesAreBetweenAllSlowedAndAllAlone(step, factors):
  schedule, costs, options = step
  alone = _Scaled(costs, factors)
  fast, shared, slow = (
    simulator.Simulate(schedule, main, **options, **more)
    for main, more in ((alone, {}), (costs, {'alone': alone}), (costs, {}))
  )
  assert fast.makespan - 1e-9 <= shared.makespan <= slow.makespan + 1e-9
  for rows in zip(fast.timeline, shared.timeline, slow.timeline, strict=True):
    ends = [{(s.action, s.part): s.end for s in row} for row in rows]
    for span, end in ends[1].items():
      assert ends[0].get(span, 0) - 1e-9 <= end <= ends[2][span] + 1e-9
  if schedule.num_devices == 1:
    assert shared.makespan == pytest.approx(fast.makespan)


@_SETTINGS
@hypothesis.given(_Steps(), st.data())
def testNeverUsesMoreThanAllCores(step, data):
  schedule, costs, options = step
  k = schedule.num_devices
  factors = data.draw(st.lists(st.floats(1 / k, 1), min_size=6, max_size=6))
  costs = simulator.Costs(**{**vars(costs), 'update': 0})
  shared = simulator.Simulate(schedule, costs, alone=_Scaled(costs, factors), **options)
  work = sum(simulator.Simulate(schedule, costs, **options).busy)
  assert shared.makespan * k >= work - 1e-9


def testTheCoreOfAnIdleDeviceHelpsTheOther():
  # 0F0 runs alone at 3/2 of its speed; then 1F0 and 0F1 share; then 1F1 runs alone.
  schedule = schedules.Get('forward_only', 2, 2)
  result = simulator.Simulate(
    schedule, simulator.Costs([3, 6]), alone=simulator.Costs([2, 4]), remat_policy='none'
  )
  assert [(s.start, s.end) for s in result.timeline[0]] == [(0, 2), (2, 5)]
  # Half of 1F0 runs while 0F1 does, the other half alone: 3 + 2.
  assert [(s.start, s.end) for s in result.timeline[1]] == [(2, 7), (7, 11)]


def testTimeIsLinearInTheNumberOfOtherBusyDevices():
  piece = core_sharing.Piece(4.0, 1.0)
  assert [piece.Seconds(n, 4) for n in (1, 2, 3, 4)] == [1, 2, 3, 4]
  assert piece.Seconds(1, 1) == 1
  assert core_sharing.Piece(1.0, 4.0).Seconds(1, 2) == 1


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
