# SPDX-License-Identifier: Apache-2.0
"""Schedules with slices of the vocabulary."""

import dataclasses
import sys

import pytest

from lingvo_gpipe.pipeline.cost import simulator
from lingvo_gpipe.pipeline.schedule import schedules, shared_vocabulary
from tests import naming
from tests.toys import simulations

_NAMES = [name for name in schedules.Names() if name != 'forward_only']


@pytest.mark.parametrize('name', _NAMES)
@pytest.mark.parametrize('num_devices, num_micro_batches', [(1, 2), (2, 2), (4, 8)])
def testEverySchedule(name, num_devices, num_micro_batches):
  try:
    schedule = simulations.Get(name, num_devices, num_micro_batches)
  except ValueError as e:
    pytest.skip(str(e))
  shared = shared_vocabulary.Share(schedule)  # It validates the result.
  assert shared.num_slices == num_devices
  assert shared.num_layer_stages == schedule.num_stages
  text = shared.ToText()
  assert schedules.Schedule.FromText(text, shared.name, num_slices=num_devices) == shared
  # Memory grows by two micro-batches of a stage at most, under schedules that limit it.
  for before, after in zip(schedule.PeakActivations(), shared.PeakActivations(), strict=False):
    assert after <= before + 2
  # A stage keeps the order of its micro-batches for each kind.
  for row, shared_row in zip(schedule.actions, shared.actions, strict=True):
    for a in row:
      if a.kind is not schedules.Kind.FORWARD_BACKWARD:
        same = [b for b in row if (b.stage, b.kind) == (a.stage, a.kind)]
        assert [b for b in shared_row if (b.stage, b.kind) == (a.stage, a.kind)] == same


def testDevicesRarelyWaitForTheSlices():
  """A device idles about as long as without slices, if a slice takes half as long as a stage."""
  for name in ('1f1b', 'zb_h1', 'gpipe'):
    schedule = schedules.Get(name, 8, 32)
    alone = simulator.Simulate(schedule, simulator.Costs(2), remat_policy='none')
    costs = simulator.Costs([2] * 8 + [1] * 8)
    shared = simulator.Simulate(shared_vocabulary.Share(schedule), costs, remat_policy='none')
    assert shared.overall_bubble < alone.overall_bubble + 0.02


# Two stages, then two slices.
_TEXT = '0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0'


def testTextWithSlicesHasTheirDependencies():
  schedule = schedules.Schedule.FromText(_TEXT, num_slices=2).Validate()
  action = schedules.Action.FromText
  assert schedule.Dependencies(action('2F0')) == (action('1F0'),)
  assert schedule.Dependencies(action('2B0')) == (action('2F0'), action('3F0'))
  assert schedule.Dependencies(action('1B0')) == tuple(map(action, ('1F0', '2B0', '3B0')))
  assert schedule.Dependencies(action('0B0')) == (action('0F0'), action('1B0'))


@pytest.mark.parametrize(
  'old, new, names',
  [
    ('3F0,3B0', '3B0,3F0', ['device 1', '3B0 comes before 3F0']),
    ('3B0,1B0', '1B0,3B0', ['device 1', '1B0 comes before 3B0']),
    ('2F0,2B0,0B0', '0B0,2F0,2B0', ['deadlock']),
    ('3F0,3B0', '3V0', ['device 1', '3V0']),
    (',2B0', '', ['device 0', 'lacks 2B0']),
  ],
)
def testWrongOrdersAreRefused(old, new, names):
  assert old in _TEXT
  with pytest.raises(ValueError, match=naming.Naming(*names)):
    schedules.Schedule.FromText(_TEXT.replace(old, new), num_slices=2).Validate()


def testAScheduleOfSlicesAloneIsRefused():
  schedule = schedules.Schedule.FromText(_TEXT, num_slices=2)
  with pytest.raises(ValueError, match='stage'):
    dataclasses.replace(schedule, num_slices=4).Validate()


def testTransfersToAndFromSlices():
  schedule = schedules.Schedule.FromText(_TEXT, num_slices=2)
  # F of stage 0 and its transfer end at 1 + 10, F of stage 1 at 12. Slice 3 is beside it; slice 2
  # has the last activation at 12 + 100, and is done at 113, with the numbers for slice 3 too.
  costs = simulator.Costs(1, transfer=[10, 100], gradient_transfer=[20, 200])
  result = simulator.Simulate(schedule, costs, remat_policy='none')
  ends = {str(s.action): s.end for row in result.timeline for s in row}
  assert (ends['1F0'], ends['3F0'], ends['2F0']) == (12, 13, 113)
  assert (ends['2B0'], ends['3B0']) == (115, 115)
  assert (ends['1B0'], ends['0B0']) == (115 + 200 + 2, 115 + 200 + 2 + 20 + 2)


def testLatencyDelaysTheLoss():
  schedule = schedules.Schedule.FromText(_TEXT, num_slices=2)
  result = simulator.Simulate(schedule, simulator.Costs(1, latency=3), remat_policy='none')
  ends = {str(s.action): s.end for row in result.timeline for s in row}
  assert (ends['1F0'], ends['3F0'], ends['2F0']) == (5, 6, 9)
  assert (ends['3B0'], ends['2B0']) == (9 + 3 + 2, 9 + 2)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
