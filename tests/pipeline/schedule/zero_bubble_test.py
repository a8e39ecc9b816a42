# SPDX-License-Identifier: Apache-2.0
"""The zero-bubble schedules: golden sequences, idle time and held activations at all sizes."""

import sys

import hypothesis
import pytest
from hypothesis import strategies as st

from lingvo_gpipe.pipeline.cost import simulator
from lingvo_gpipe.pipeline.schedule import schedules
from tests import naming

_SETTINGS = hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
_V = ('zb_v', 'v_half', 'v_min', 'dualpipe_v')
# For 2 devices and 4 micro-batches; `interleaved_zb`, `zb_v` and `dualpipe_v` as PyTorch 2.13 makes
# them, `zb_2p` after ZB-H2 of the paper.
_GOLDEN = {
  'zb_2p': """\
0F0,0F1,0F2,0I0,0W0,0F3,0I1,0W1,0I2,0W2,0I3,0W3
1F0,1I0,1F1,1I1,1F2,1I2,1W0,1F3,1I3,1W1,1W2,1W3
""",
  'interleaved_zb': """\
0F0,0F1,2F0,2F1,2I0,2W0,0F2,2I1,2W1,0F3,0I0,0W0,2F2,0I1,0W1,2F3,2I2,2W2,2I3,2W3,0I2,0W2,0I3,0W3
1F0,1F1,3F0,3I0,3F1,3I1,3W0,1F2,1I0,3W1,1F3,1I1,1W0,3F2,3I2,1W1,3F3,3I3,3W2,1I2,3W3,1I3,1W2,1W3
""",
  'zb_v': """\
0F0,0F1,0F2,3F0,3I0,3W0,3F1,3I1,3W1,0F3,0I0,0W0,3F2,3I2,3W2,0I1,0W1,3F3,3I3,3W3,0I2,0W2,0I3,0W3
1F0,2F0,1F1,2F1,2I0,2W0,1F2,1I0,1W0,2F2,2I1,2W1,1F3,1I1,1W1,2F3,2I2,2W2,1I2,2I3,1I3,1W2,2W3,1W3
""",
  'dualpipe_v': """\
0F0,0F1,0F2,3F0,3I0,3W0,3F1,0F3,3B1,3F2,0B0,3B2,3F3,0B1,3B3,0I2,0W2,0I3,0W3
1F0,2F0,1F1,2F1,1F2,2B0,2F2,1B0,1F3,2B1,2F3,1B1,2B2,1B2,2I3,1I3,2W3,1W3
""",
}


def _Idle(schedule, *times):
  """Returns the idle time of each device, if F, I and W take these times."""
  forward, inputs, weights = times or (1, 1, 1)
  costs = simulator.Costs(forward, input_gradient=inputs, weight_gradient=weights)
  return simulator.Simulate(schedule, costs, remat_policy='none').idle


def _Held(schedule):
  return max(schedule.DevicePeakActivations())


@pytest.mark.parametrize('name', _GOLDEN)
def testGoldenSequences(name):
  stages = 2 if name == 'zb_2p' else 4
  assert schedules.Get(name, stages, 4, 2).ToText() == _GOLDEN[name]


@_SETTINGS
@hypothesis.given(st.integers(1, 8), st.integers(0, 9), st.tuples(*[st.integers(1, 9)] * 3))
def testZeroBubble2P(k, more, times):
  schedule = schedules.Get('zb_2p', k, 2 * k - 1 + more)
  f, i, w = times
  assert _Idle(schedule, *times) == ((k - 1) * max(f, i - f, f + i - 2 * w),) * k
  assert list(schedule.PeakActivations()) == [2 * k - 1] * k


@_SETTINGS
@hypothesis.given(st.integers(1, 7), st.integers(1, 4), st.integers(2, 4))
def testInterleavedZeroBubble(k, rounds, v):
  schedule = schedules.Get('interleaved_zb', k * v, rounds * k, k)
  assert _Idle(schedule) == (k - 1,) * k
  assert schedule.DevicePeakActivations() == (v * k,) * k
  with pytest.raises(ValueError, match=naming.Naming("'interleaved_zb'", f'multiple of {k + 1}')):
    schedules.Get('interleaved_zb', (k + 1) * v, rounds * (k + 1) + 1, k + 1)


@_SETTINGS
@hypothesis.given(st.integers(2, 12), st.integers(0, 12))
def testVSchedules(k, more):
  """(Name, idle time, activations held, the fewest micro-batches)."""
  table = [
    ('zb_v', k - 1, 2 * k, 2 * k - 1),
    ('dualpipe_v', k - 1, 2 * k + 1, 2 * k),
    ('v_half', 3 * k - 4 - (k > 2 and k % 2 == 0), 2 * (k // 2 + 1), k),
    ('v_min', 4 * k - 5, 2 * -(-(k + 2) // 3), k),
  ]
  for name, idle, held, fewest in table:
    schedule = schedules.Get(name, 2 * k, fewest + more, k)
    assert schedule.stage_to_device == (*range(k), *reversed(range(k)))
    assert _Idle(schedule) == (idle,) * k
    assert _Held(schedule) == held


@pytest.mark.parametrize('name', _V)
@pytest.mark.parametrize('k', [1, 2, 3, 6, 17])
def testAnyNumberOfMicroBatches(name, k):
  for m in (1, 2, k, 2 * k + 1):
    schedule = schedules.Get(name, 2 * k, m, k)
    assert _Held(schedule) <= min(2 * m, 2 * k + 1)


@pytest.mark.parametrize('name', ['v_half', 'v_min'])
def testWithoutEqualTimesSavingMemoryCostsTime(name):
  """W of half the length leaves gaps, in which `zb_v` has something to run."""
  times = (1, 1, 0.5)
  waits = {n: _Idle(schedules.Get(n, 8, 16, 4), *times)[0] for n in (name, 'zb_v')}
  assert waits[name] > 2 * waits['zb_v']


@pytest.mark.parametrize('name', _V)
def testTheVNeedsTwoStagesOnEachDevice(name):
  for stages in (4, 12, 7):
    with pytest.raises(
      ValueError,
      match=naming.Naming(repr(name), 'two stages', f'{stages} stages', '4 devices', '8 stages'),
    ):
      schedules.Get(name, stages, 4, 4)


def testStagesPerDevice():
  takes = {
    name: [v for v in (1, 2, 3) if schedules.TakesStagesPerDevice(name, v)]
    for name in schedules.Names()
  }
  assert {name for name, counts in takes.items() if counts == [2]} == set(_V)
  assert takes['zb_2p'] == takes['gpipe'] == [1]
  assert takes['interleaved_zb'] == [2, 3] and takes['looped_bfs'] == [1, 2, 3]


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
