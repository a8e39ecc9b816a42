# SPDX-License-Identifier: Apache-2.0
"""Offload added to schedules: valid, as low as possible, and with as few copies as possible."""

import itertools
import sys

import pytest

from lingvo_gpipe.pipeline.schedule import actions, offload, schedules
from tests import naming
from tests.toys import simulations

Kind = actions.Kind


def _NumCopies(schedule):
  return [sum(a.kind is Kind.OFFLOAD for a in row) for row in schedule.actions]


def testCopiesOverlapTheNeighbouringComputations():
  schedule = offload.WithOffload(schedules.Get('gpipe', 1, 5))
  assert schedule.Validate().ToText() == (
    '0F0,0O0,0F1,0O1,0F2,0O2,0F3,0F4,0B4,0L2,0B3,0L1,0B2,0L0,0B1,0B0\n'
  )
  assert schedule.PeakActivations() == (2,)


@pytest.mark.parametrize('name', [n for n in schedules.Names() if n != 'forward_only'])
def testAnyScheduleTakesCopies(name):
  for k, m, share in itertools.product((1, 2, 4), (1, 4, 8), (0.3, 0.5, 1.0)):
    if name in schedules.IN_ROUNDS and m % k:
      continue
    plain = simulations.Get(name, k, m)
    changed = offload.WithOffload(plain, share).Validate()
    assert changed.ToText(for_torch=True) == plain.ToText(for_torch=True)
    assert changed.name == plain.name
    pairs = zip(changed.DevicePeakActivations(), plain.DevicePeakActivations(), strict=True)
    for (now, before), copies, row in zip(pairs, _NumCopies(changed), plain.actions, strict=True):
      assert copies <= share * len({(a.stage, a.micro_batch) for a in row})
      # No copy is for nothing.
      assert now < before if copies else now == before


def testCopiesBackMayBeginEarlier():
  plain = schedules.Get('1f1b', 8, 12)
  held = []
  for ahead in (1, 2, 3):
    schedule = offload.WithOffload(plain, ahead=ahead).Validate()
    held.append(schedule.PeakActivations()[0])
    for row in schedule.actions:
      computations = [a for a in row if a.kind not in actions.COPIES]
      for position, action in enumerate(row):
        if action.kind is Kind.LOAD:
          backward = computations.index(
            actions.Action(action.stage, Kind.BACKWARD, action.micro_batch)
          )
          before = [a for a in row[:position] if a.kind not in actions.COPIES]
          assert backward - len(before) == ahead
  assert held[0] < held[1] < held[2] < plain.PeakActivations()[0]


def testMoreOffloadNeverHoldsMore():
  for name in ('gpipe', '1f1b', 'interleaved_1f1b', 'v_half'):
    held = [
      offload.WithOffload(simulations.Get(name, 4, 12), share).DevicePeakActivations()
      for share in (0, 0.25, 0.5, 0.75, 1)
    ]
    for less, more in itertools.pairwise(held):
      assert all(a >= b for a, b in zip(less, more, strict=True))


@pytest.mark.parametrize('name, m', [('gpipe', 5), ('1f1b', 6), ('zb_h1', 6)])
def testNoOtherSetIsBetter(name, m):
  """Compares with all sets of micro-batches of the first stage."""
  plain = schedules.Get(name, 4, m)
  row = plain.actions[0]

  def With(members):
    """Returns the peak of the first device, if exactly these are offloaded."""
    changed = []
    for action, following in itertools.zip_longest(row, row[1:], fillvalue=row[0]):
      if following.kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT):
        if following.micro_batch in members:
          changed.append(actions.Action(0, Kind.LOAD, following.micro_batch))
      changed.append(action)
      if action.kind is Kind.FORWARD and action.micro_batch in members:
        changed.append(actions.Action(0, Kind.OFFLOAD, action.micro_batch))
    rows = [changed, *plain.actions[1:]]
    schedule = schedules.Schedule(name, 4, m, rows, range(4))
    try:
      return schedule.Validate().PeakActivations()[0]
    except ValueError:
      return m + 1  # It comes back before it has left.

  best = {}
  for size in range(m + 1):
    for members in itertools.combinations(range(m), size):
      best[size] = min(best.get(size, m + 1), With(members))
  for share in (0.25, 0.5, 0.75, 1.0):
    changed = offload.WithOffload(plain, share)
    least = min(peak for size, peak in best.items() if size <= share * m)
    assert changed.PeakActivations()[0] == least
    assert _NumCopies(changed)[0] == min(size for size, peak in best.items() if peak == least)


def testWithoutAShareNothingChanges():
  for name in ('gpipe', 'forward_only'):
    plain = schedules.Get(name, 2, 4)
    assert offload.WithOffload(plain, 0) is plain
  assert offload.WithOffload(plain, 1) is plain  # Nothing waits for backward.


@pytest.mark.parametrize('share', [-0.1, 1.5, float('nan')])
def testAShareIsFromZeroToOne(share):
  with pytest.raises(ValueError, match=naming.Naming('offload', f'got {share}')):
    offload.WithOffload(schedules.Get('gpipe', 2, 4), share)


@pytest.mark.parametrize('ahead', [0, 1.5])
def testACopyBackIsAhead(ahead):
  with pytest.raises(ValueError, match=naming.Naming('offload', 'ahead', f'got {ahead}')):
    offload.WithOffload(schedules.Get('gpipe', 2, 4), ahead=ahead)


def testCopiesAreAddedOnce():
  schedule = offload.WithOffload(schedules.Get('gpipe', 2, 6))
  with pytest.raises(ValueError, match=naming.Naming('offload', "'gpipe'", 'copies')):
    offload.WithOffload(schedule)


def testThePictureHasARowOfCopies():
  lines = offload.WithOffload(schedules.Get('gpipe', 1, 5)).Picture().splitlines()
  assert lines[1:] == [
    'device 0  F0 F1 F2 F3 F4 B4 B3 B2 B1 B0',
    'copies 0  .  O0 O1 O2 .  .  L2 L1 L0 .',
  ]


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
