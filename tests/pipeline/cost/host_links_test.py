# SPDX-License-Identifier: Apache-2.0
"""Links to hosts in the simulator: copies delay only what waits for them, and lower the peak."""

import sys

import pytest

from lingvo_gpipe.pipeline.cost import simulator, stage_memory
from lingvo_gpipe.pipeline.schedule import actions, offload, rematerialisation, schedules
from tests import naming

Kind = actions.Kind
_SIZES = simulator.ActivationSizes(
  stage_input=1, inner=5, layer_inputs=2, largest_layer=2, weight_part=4
)


def _Simulate(schedule, link=None, policy='none', sizes=_SIZES, **options):
  costs = simulator.Costs(forward=1, host_link=link)
  return simulator.Simulate(schedule, costs, remat_policy=policy, sizes=sizes, **options)


def testASlowLinkDelaysTheActionsThatWaitForIt():
  """One device: F takes 1, B 2, and each copy 3, in either direction."""
  schedule = offload.WithOffload(schedules.Get('gpipe', 1, 5))
  result = _Simulate(schedule, simulator.HostLink(bandwidth=2, latency=0.5))
  spans = {str(s.action): (s.start, s.end) for s in (*result.timeline[0], *result.copies[0])}
  assert [spans[f'0O{m}'] for m in range(3)] == [(1, 4), (4, 7), (7, 10)]
  # F1 is beside O0; F2 waits for the end of O0 and its latency.
  assert [spans[f'0F{m}'][0] for m in range(5)] == [0, 1, 4.5, 7.5, 10.5]
  # L2 begins after B4 and is beside B3.
  assert spans['0L2'] == (13.5, 16.5)
  assert spans['0B3'] == (13.5, 15.5) and spans['0B2'] == (17, 19)
  # L1 waits for L2, and B1 for L1.
  assert spans['0L1'] == (16.5, 19.5) and spans['0B1'][0] == 20
  assert result.busy == (15,)
  lines = result.Picture(60).splitlines()
  assert [line.split()[0] for line in lines] == ['time', 'device', 'offload', 'load']


def testAFastLinkCostsNothing():
  for name, v in (('gpipe', 1), ('1f1b', 1), ('zb_h1', 1), ('interleaved_1f1b', 2), ('v_half', 2)):
    plain = schedules.Get(name, 4 * v, 8, 4)
    schedule = offload.WithOffload(plain)
    expected = _Simulate(plain)
    # A copy takes no longer than the shortest action.
    result = _Simulate(schedule, simulator.HostLink(bandwidth=6))
    assert result.makespan == _Simulate(schedule).makespan == expected.makespan
    assert sum(map(len, result.copies)) == 2 * len(schedule.offloaded) > 0
    pairs = zip(result.device_peak_bytes, expected.device_peak_bytes, strict=True)
    assert all(now <= before for now, before in pairs)
    assert result.device_peak_bytes[0] < expected.device_peak_bytes[0]


def testASlowerLinkIsNeverFaster():
  schedule = offload.WithOffload(schedules.Get('1f1b', 4, 12))
  times = [_Simulate(schedule, simulator.HostLink(b)).makespan for b in (8, 4, 2, 1, 0.5)]
  assert times == sorted(times) and times[0] < times[-1]


@pytest.mark.parametrize('policy', rematerialisation.POLICIES)
@pytest.mark.parametrize('name', ['gpipe', '1f1b', 'zb_h1'])
def testTheMemoryModelsAgree(name, policy):
  """One is the simulator's; the cut and the planner use the other, `stage_memory`."""
  schedule = offload.WithOffload(schedules.Get(name, 3, 10))
  # `stage_memory` counts 2 of these 5 bytes as inputs of layers.
  sizes = simulator.ActivationSizes(stage_input=1, inner=5, layer_inputs=2, largest_layer=2)
  result = _Simulate(schedule, policy=policy, sizes=sizes)
  peaks = [
    max(h.stage_input + 2 * h.layer_inputs + 3 * h.inner + 2 * h.largest_layer for h in candidates)
    for candidates in stage_memory.HeldAtPeaks(schedule, policy)
  ]
  assert list(result.peak_bytes) == peaks


_WITHIN_AND_AFTER = {
  Kind.FORWARD: (1, 1),
  Kind.LOAD: (1, 1),
  Kind.OFFLOAD: (1, 0),
  Kind.BACKWARD: (6, 0),
  Kind.INPUT_GRADIENT: (6, 4),
  Kind.WEIGHT_GRADIENT: (4, 0),
}


@pytest.mark.parametrize('name', ['interleaved_1f1b', 'zb_v'])
def testThePeakIsTheSumOfTheActivationsOnTheDevice(name):
  """Under the policy `stage`, a micro-batch waits with its input, and returns with it."""
  schedule = offload.WithOffload(schedules.Get(name, 4, 6, 2))
  result = _Simulate(schedule, policy='stage')
  for row, peak in zip(schedule.actions, result.device_peak_bytes, strict=True):
    held, sums = {}, []
    for action in actions.WithEndsOfCopies(row):
      key = action.stage, action.micro_batch
      held[key], after = _WITHIN_AND_AFTER[action.kind]
      sums.append(sum(held.values()))
      held[key] = after
    assert peak == max(sums)
    assert not any(held.values())


def testStagesWithoutBackwardCopyNothingToTheHost():
  schedule = offload.WithOffload(schedules.Get('gpipe', 2, 6))
  result = _Simulate(schedule, simulator.HostLink(1), trained=[False, True])
  assert [len(copies) for copies in result.copies] == [0, 2 * 4]


@pytest.mark.parametrize(
  'options, cause',
  [
    ({'sizes': None}, 'sizes'),
    ({'alone': simulator.Costs(1)}, 'share cores (alone)'),
  ],
)
def testALinkNeedsSizesAndADeviceOfItsOwn(options, cause):
  schedule = offload.WithOffload(schedules.Get('gpipe', 2, 6))
  with pytest.raises(ValueError, match=naming.Naming('host_link', cause)):
    _Simulate(schedule, simulator.HostLink(1), **options)


@pytest.mark.parametrize('bandwidth, latency', [(0, 0), (-1, 0), (1, -1), (float('nan'), 0)])
def testALinkHasABandwidth(bandwidth, latency):
  with pytest.raises(ValueError, match=naming.Naming('host link', 'bandwidth > 0', 'latency >= 0')):
    simulator.HostLink(bandwidth, latency)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
