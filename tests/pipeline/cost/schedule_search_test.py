# SPDX-License-Identifier: Apache-2.0
"""The search for an order: never worse than a named schedule, within the bytes, repeatable."""

import sys

import pytest

from lingvo_gpipe.pipeline.cost import schedule_search, simulator
from lingvo_gpipe.pipeline.schedule import schedules
from tests import naming

_SIZES = simulator.ActivationSizes(1, 9, layer_inputs=2, largest_layer=3)
_EQUAL = simulator.Costs(1)


@pytest.fixture(autouse=True)
def _fewMoves(monkeypatch):
  monkeypatch.setattr(schedule_search, '_MAX_ACTIONS', 5_000)


def _Named(num_stages, m, k, costs, limit, **options):
  """Returns the step of the best named schedule within the limit, or infinity."""
  steps = []
  for name in schedules.Names():
    try:
      schedule = schedules.Get(name, num_stages, m, k)
    except ValueError:
      continue
    result = simulator.Simulate(schedule, costs, sizes=_SIZES, **options)
    if not schedule.forward_only and max(result.device_peak_bytes) <= limit:
      steps.append(result.makespan)
  return min(steps, default=float('inf'))


@pytest.mark.parametrize(
  'k, v, m, policy, limit, costs',
  [
    (2, 1, 4, 'none', 20, simulator.Costs([1, 1.2], weight_gradient=0.8, latency=0.2)),
    (3, 1, 3, 'layer', 60, simulator.Costs(1, transfer=0.1, backward=3)),
    (2, 2, 4, 'none', 30, simulator.Costs(1, input_gradient=1.3, weight_gradient=0.7)),
    (3, 2, 4, 'stage', 45, _EQUAL),
    (2, 3, 4, 'except_last', 60, _EQUAL),
  ],
)
def testNeverWorseThanANamedScheduleAndWithinTheBytes(k, v, m, policy, limit, costs):
  options = {'remat_policy': policy, 'trained': [True] * (k * v)}
  result = schedule_search.Search(k * v, m, k, costs, sizes=_SIZES, memory_limit=limit, **options)
  assert result.schedule.Validate().name == 'search'
  assert result.makespan <= _Named(k * v, m, k, costs, limit, **options)
  assert max(result.device_peak_bytes) <= limit
  again = simulator.Simulate(result.schedule, costs, sizes=_SIZES, **options)
  assert (again.makespan, again.device_peak_bytes) == (result.makespan, result.device_peak_bytes)


def testBetterThanAnyNamedScheduleBetweenTheirBytes():
  """Seven stages' activations on each device: `v_half` holds six, `zb_v` eight."""
  options = {'remat_policy': 'none', 'sizes': _SIZES, 'memory_limit': 70}
  result = schedule_search.Search(8, 6, 4, _EQUAL, **options)
  assert result.makespan < _Named(8, 6, 4, _EQUAL, 70, remat_policy='none')
  assert result == schedule_search.Search(8, 6, 4, _EQUAL, **options)


def testWithoutALimitTheScheduleIsAtLeastAsFastAsZbV():
  result = schedule_search.Search(4, 4, 2, _EQUAL, remat_policy='none')
  assert result.makespan <= 25 and result.peak_bytes is None  # As `zb_v`: 6M + K - 1.


def testEachDeviceKeepsItsOwnLimit():
  limits = (40, 20, 10)
  result = schedule_search.Search(
    3, 6, 3, _EQUAL, remat_policy='none', sizes=_SIZES, memory_limit=limits
  )
  assert all(b <= limit for b, limit in zip(result.device_peak_bytes, limits, strict=True))


def testTooLittleMemoryAndImpossibleSizesAreRefused():
  with pytest.raises(
    ValueError,
    match=naming.Naming('memory_limit', '2 stages', '2 devices', '4 micro-batches', '5B'),
  ):
    schedule_search.Search(2, 4, 2, _EQUAL, sizes=_SIZES, memory_limit=5)
  with pytest.raises(ValueError, match=naming.Naming('memory_limit', 'sizes')):
    schedule_search.Search(2, 4, 2, _EQUAL, memory_limit=5)
  with pytest.raises(ValueError, match=naming.Naming("'looped_bfs'", '3 stages', '2 devices')):
    schedule_search.Search(3, 4, 2, _EQUAL)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
