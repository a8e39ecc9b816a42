# SPDX-License-Identifier: Apache-2.0
"""Measured schedules: their times, and simulations with these times."""

import dataclasses
import functools
import re
import sys

import numpy as np
import pytest

from lingvo_gpipe.pipeline.cost import simulator
from lingvo_gpipe.pipeline.profiling import measured_schedule
from lingvo_gpipe.pipeline.schedule import rematerialisation, schedules
from tests import naming
from tests.toys import simulations

_M = 4
_SCHEDULES = {'gpipe': 3, '1f1b_fused': 3, 'zb_h1': 2, 'interleaved_1f1b': 4}


def _Simulated(name, policy, trained=None):
  """Returns a simulated step; the times of its actions depend only on kind and stage."""
  num_stages = _SCHEDULES[name]
  num_devices = num_stages // 2 if name == 'interleaved_1f1b' else num_stages
  rng = np.random.default_rng(5)

  def Times():
    return tuple((rng.integers(1, 9, num_stages) / 8).tolist())  # Sums of these are exact.

  costs = simulator.Costs(
    forward=Times(), recompute=Times(), input_gradient=Times(), weight_gradient=Times(),
    backward=Times(), fused=Times(),
  )  # fmt: skip
  return simulator.Simulate(
    schedules.Get(name, num_stages, _M, num_devices),
    costs,
    remat_policy=policy,
    trained=trained or [True] * num_stages,
  )


def _AsMeasured(result, step=1, origin=100.0):
  return simulations.AsMeasured(result, step, origin)


@pytest.mark.parametrize('name', list(_SCHEDULES))
@pytest.mark.parametrize('policy', rematerialisation.POLICIES)
def testSimulatingASimulationReproducesIt(name, policy):
  for trained in (None, [False, True, True, True][: _SCHEDULES[name]]):
    simulated = _Simulated(name, policy, trained)
    measured = _AsMeasured(simulated)
    assert measured.makespan == simulated.makespan
    assert measured.bubble == pytest.approx(simulated.overall_bubble, abs=1e-12)
    again = measured_schedule.SimulateWithMeanTimes(
      [measured] * 2, policy, trained or [True] * _SCHEDULES[name]
    )
    assert again.makespan == simulated.makespan
    assert again.busy == simulated.busy
    ends = [[(s.action, s.end) for s in row if s.part == 'compute'] for row in again.timeline]
    assert ends == [
      [(s.action, s.end) for s in row if s.part == 'compute'] for row in simulated.timeline
    ]


def testADelayShowsAsABubble():
  """One action comes late, which does not change its duration nor the simulation."""
  simulated = _Simulated('gpipe', 'stage')
  times = dict(_AsMeasured(simulated).times)
  last = max(times, key=times.get)
  times[last] = tuple(t + 10.0 for t in times[last])
  measured = measured_schedule.Measured(simulated.schedule, 1, times)
  again = measured_schedule.SimulateWithMeanTimes([measured], 'stage', [True] * 3)
  assert measured.makespan == simulated.makespan + 10.0
  assert again.makespan == simulated.makespan
  assert measured.bubble == pytest.approx(1.0 - sum(again.busy) / (3 * measured.makespan))


def testMissingActionsAndClocksThatDisagreeAreDoubted():
  """If a clock is wrong, an action begins before the end of an action that it depends on."""
  measured = _AsMeasured(_Simulated('zb_h1', 'none'))
  doubts = functools.partial(
    measured_schedule.FindDoubts, remat_policy='none', trained=[True] * measured.schedule.num_stages
  )
  assert doubts([measured]) == []
  times = dict(measured.times)
  for action in list(times)[:2]:
    del times[action]
  lost = dataclasses.replace(measured, times=times)
  (doubt,) = doubts([measured, lost, lost])
  assert naming.Names(doubt, 'missing', 4)
  for shift in (-9.0, 9.0):
    shifted = {
      action: (start + shift * action.stage, end + shift * action.stage)
      for action, (start, end) in measured.times.items()
    }
    (doubt,) = doubts([measured, dataclasses.replace(measured, times=shifted)])
    assert re.search(r' [1-9]\d{3}\.\d\d ms ', doubt) and naming.Names(doubt, 'clocks')


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
