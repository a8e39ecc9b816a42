# SPDX-License-Identifier: Apache-2.0
"""Schedules by name: golden sequences, rules, makespans and memory at all sizes, errors."""

import dataclasses
import itertools
import sys
import textwrap

import hypothesis
import pytest
from hypothesis import strategies as st

from lingvo_gpipe.pipeline.schedule import schedules
from tests import naming

Action, Kind, Schedule = schedules.Action, schedules.Kind, schedules.Schedule
_SETTINGS = hypothesis.settings(max_examples=100, deadline=None, derandomize=True)

# The sequences of the first and the last device for 4 devices and 8 micro-batches, from the papers
# that introduced the schedules; the last three are worked out by hand. B before a W is the input
# gradient, lower case the second chunk.
_GOLDEN = {
  'gpipe': {
    0: 'F0 F1 F2 F3 F4 F5 F6 F7 B7 B6 B5 B4 B3 B2 B1 B0',
    3: 'F0 F1 F2 F3 F4 F5 F6 F7 B7 B6 B5 B4 B3 B2 B1 B0',
  },
  '1f1b': {
    0: 'F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7',
    3: 'F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7',
  },
  'interleaved_1f1b': {
    0: 'F0 F1 F2 F3 f0 f1 f2 f3 F4 F5 F6 b0 F7 b1 f4 b2 f5 b3 f6 B0 f7 B1 B2 B3 b4 b5 b6 b7 '
    'B4 B5 B6 B7',
    3: 'F0 F1 F2 F3 f0 b0 f1 b1 f2 b2 f3 b3 F4 B0 F5 B1 F6 B2 F7 B3 f4 b4 f5 b5 f6 b6 f7 b7 '
    'B4 B5 B6 B7',
  },
  'zb_h1': {
    0: 'F0 F1 F2 F3 B0 W0 F4 B1 W1 F5 B2 W2 F6 B3 W3 F7 B4 W4 B5 W5 B6 W6 B7 W7',
    1: 'F0 F1 F2 B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 F6 B4 W3 F7 B5 W4 B6 W5 B7 W6 W7',
    3: 'F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 F6 B6 W3 F7 B7 W4 W5 W6 W7',
  },
  'fused_fill_drain': {
    0: 'F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7',
    2: 'F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7',
    3: 'V0 V1 V2 V3 V4 V5 V6 V7',
  },
  '1f1b_fused': {
    0: 'F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7',
    2: 'F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7',
    3: 'V0 V1 V2 V3 V4 V5 V6 V7',
  },
  'looped_bfs': {
    0: 'F0 F1 F2 F3 F4 F5 F6 F7 f0 f1 f2 f3 f4 f5 f6 f7 b7 b6 b5 b4 b3 b2 b1 b0 '
    'B7 B6 B5 B4 B3 B2 B1 B0',
    3: 'F0 F1 F2 F3 F4 F5 F6 F7 f0 f1 f2 f3 f4 f5 f6 f7 b7 b6 b5 b4 b3 b2 b1 b0 '
    'B7 B6 B5 B4 B3 B2 B1 B0',
  },
}
# Length of a step for 4 devices and 8 micro-batches in units of a whole device's forward pass. A
# full backward takes two units; if each device has two chunks, a chunk takes half a unit.
_GOLDEN_MAKESPANS = {
  'gpipe': 33,
  '1f1b': 33,
  'interleaved_1f1b': 28.5,
  'zb_h1': 27,
  'fused_fill_drain': 33,
  '1f1b_fused': 33,
  'looped_bfs': 28.5,
}
_SEVERAL_STAGES_A_DEVICE = ('interleaved_1f1b', 'looped_bfs')
# See zero_bubble_test.
_OF_OTHER_FILES = ('dualpipe_v', 'interleaved_zb', 'v_half', 'v_min', 'zb_2p', 'zb_v')


# The rules of the schedules, implemented independently of the framework. Each returns the actions
# of device d in the letters above, for p devices and m micro-batches.


def _Gpipe(p, m, d):
  return [f'F{j}' for j in range(m)] + [f'B{j}' for j in reversed(range(m))]


def _FusedFillDrain(p, m, d):
  return [f'{kind}{j}' for kind in ('V' if d == p - 1 else 'FB') for j in range(m)]


def _OneForwardOneBackward(p, m, d):
  warm_up = min(m, p - 1 - d)
  row = [f'F{j}' for j in range(warm_up)]
  for j in range(m - warm_up):
    row += [f'F{warm_up + j}', f'B{j}']
  return row + [f'B{j}' for j in range(m - warm_up, m)]


def _FusedOneForwardOneBackward(p, m, d):
  if d == p - 1:
    return [f'V{j}' for j in range(m)]
  return _OneForwardOneBackward(p, m, d)


def _ZeroBubbleH1(p, m, d):
  row = []
  for token in _OneForwardOneBackward(p, m, d):
    row.append(token)
    if token[0] == 'B' and int(token[1:]) >= d:
      row.append(f'W{int(token[1:]) - d}')
  return row + [f'W{j}' for j in range(max(m - d, 0), m)]


def _Interleaved(p, m, d):
  def Name(letter, k, chunk):
    letter = letter.lower() if chunk else letter
    return f'{letter}{k // (p * 2) * p + k % p}'

  forwards = [Name('F', k, k % (p * 2) // p) for k in range(m * 2)]
  backwards = [Name('B', k, 1 - k % (p * 2) // p) for k in range(m * 2)]
  warm_up = min(m * 2, 2 * (p - 1 - d) + p)
  steady = itertools.chain.from_iterable(zip(forwards[warm_up:], backwards, strict=False))
  return forwards[:warm_up] + list(steady) + backwards[m * 2 - warm_up :]


def _LoopedBreadthFirst(p, m, d):
  up = [f'{letter}{j}' for letter in 'Ff' for j in range(m)]
  return up + [f'{letter}{j}' for letter in 'bB' for j in reversed(range(m))]


_RULES = {
  'gpipe': _Gpipe,
  'fused_fill_drain': _FusedFillDrain,
  '1f1b': _OneForwardOneBackward,
  '1f1b_fused': _FusedOneForwardOneBackward,
  'zb_h1': _ZeroBubbleH1,
  'interleaved_1f1b': _Interleaved,
  'looped_bfs': _LoopedBreadthFirst,
}


def _Text(rows):
  """Returns rows of letters in the notation of actions; the second chunk of d is stage p + d."""
  lines = []
  for d, row in enumerate(rows):
    split = any(token[0] == 'W' for token in row)
    cells = []
    for token in row:
      letter = 'I' if split and token[0] == 'B' else token[0].upper()
      cells.append(f'{len(rows) + d if token[0].islower() else d}{letter}{token[1:]}')
    lines.append(','.join(cells) + '\n')
  return ''.join(lines)


def _Get(name, p, m, v=2):
  return schedules.Get(name, p * (v if name in _SEVERAL_STAGES_A_DEVICE else 1), m, p)


_DURATIONS = {Kind.BACKWARD: 2, Kind.FORWARD_BACKWARD: 3}


def _Makespan(schedule):
  return max(row[-1][1] for row in schedule.Timeline(_DURATIONS))


# The rules.


def testEveryTrainingScheduleHasARule():
  names = {*_RULES, *_OF_OTHER_FILES, 'forward_only'}
  assert names == set(schedules.Names()) and _RULES.keys() == _GOLDEN.keys()


@pytest.mark.parametrize('name', _GOLDEN)
def testGoldenSequences(name):
  schedule = _Get(name, 4, 8)
  lines = schedule.ToText().splitlines(keepends=True)
  for d, golden in _GOLDEN[name].items():
    assert _RULES[name](4, 8, d) == golden.split()
    assert lines[d] == _Text([[]] * d + [golden.split()] + [[]] * (3 - d)).splitlines(True)[d]
  assert schedule.name == name and not schedule.forward_only
  assert _Makespan(schedule) == _GOLDEN_MAKESPANS[name] * schedule.num_stages / 4


@_SETTINGS
@hypothesis.given(st.sampled_from(list(_RULES)), st.integers(1, 7), st.integers(1, 16))
def testRulesAtAllSizes(name, p, m):
  if name == 'interleaved_1f1b':
    m *= p
  schedule = _Get(name, p, m)
  assert schedule.ToText() == _Text([_RULES[name](p, m, d) for d in range(p)])
  assert schedule.num_devices == p


@_SETTINGS
@hypothesis.given(st.sampled_from(list(_RULES)), st.integers(1, 6), st.integers(1, 14))
def testMakespanOfEqualStages(name, p, m):
  if name == 'interleaved_1f1b':
    m *= p
  schedule = _Get(name, p, m)
  if name in _SEVERAL_STAGES_A_DEVICE:
    # With fewer micro-batches than devices, devices idle between the rounds.
    expected = 3 * (2 * max(m, p) + p - 1) - 3 * max(p - m, 0)
  elif name == 'zb_h1':
    expected = 3 * m + p - 1 if m >= p else None
  else:
    expected = 3 * (m + p - 1)
    assert 1 - 3 * m / expected == pytest.approx(schedules.BubbleBound(p, m))
  if expected is not None:
    assert _Makespan(schedule) == expected


@_SETTINGS
@hypothesis.given(st.integers(1, 7), st.integers(1, 16), st.integers(1, 4))
def testHeldActivations(p, m, v):
  last_fused = {
    'fused_fill_drain': [m] * (p - 1),
    '1f1b_fused': [min(m, p - k) for k in range(p - 1)],
  }
  expected = {
    'gpipe': [m] * p,
    '1f1b': [min(m, p - k) for k in range(p)],
    'zb_h1': [min(m, p)] * p,
    **{name: [*peaks, 1] for name, peaks in last_fused.items()},
  }
  for name, peaks in expected.items():
    schedule = schedules.Get(name, p, m)
    assert list(schedule.PeakActivations()) == list(schedule.DevicePeakActivations()) == peaks
  looped = schedules.Get('looped_bfs', p * v, m, p)
  assert looped.PeakActivations() == (m,) * (p * v)
  assert looped.DevicePeakActivations() == (m * v,) * p
  m, v = m * p, v + 1
  interleaved = schedules.Get('interleaved_1f1b', p * v, m, p)
  assert interleaved.DevicePeakActivations() == tuple(
    min(m * v, 2 * (p - 1 - d) + (v - 1) * p + 1) for d in range(p)
  )


@_SETTINGS
@hypothesis.given(st.integers(1, 5), st.integers(1, 4), st.integers(2, 5))
def testInterleavingDividesTheBubble(p, rounds, v):
  m = rounds * p
  for name in ('interleaved_1f1b', 'looped_bfs'):
    schedule = schedules.Get(name, p * v, m, p)
    # (K-1)(F+B)/v of a whole device, so (K-1)(F+B) of a chunk.
    assert _Makespan(schedule) == 3 * (m * v + p - 1)
    assert schedule.stage_to_device == tuple(range(p)) * v


def testLoopedWithOneStagePerDeviceIsGpipe():
  assert schedules.Get('looped_bfs', 3, 5).actions == schedules.Get('gpipe', 3, 5).actions


def testInterleavedOnOneDevice():
  text = '0F0,1F0,1B0,0F1,0B0,1F1,1B1,0B1\n'
  assert schedules.Get('interleaved_1f1b', 2, 2, 1).ToText() == text


@_SETTINGS
@hypothesis.given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 13))
def testForwardOnlyOfAnySize(num_devices, chunks, num_micro_batches):
  num_stages = num_devices * chunks
  schedule = schedules.Get('forward_only', num_stages, num_micro_batches, num_devices)
  assert schedule.forward_only
  assert schedule.num_devices == num_devices
  assert schedule.PeakActivations() == (1,) * num_stages
  if num_micro_batches >= num_devices:
    assert _Makespan(schedule) == chunks * num_micro_batches + num_devices - 1


def testForwardOnlyOfUnevenStages():
  assert schedules.Get('forward_only', 3, 1, 2).ToText() == '0F0,2F0\n1F0\n'
  for owners in itertools.product(range(3), repeat=4):
    if len(set(owners)) == max(owners) + 1:
      assert schedules.ForwardOnlyOn(owners, 2).Validate().stage_to_device == owners


def testForwardRunsInLockstep():
  # torchgpipe asserts this order: (micro-batch, stage) for 3 micro-batches in 2 stages.
  order = schedules.Get('forward_only', 2, 3).EmissionOrder()
  expected = [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (2, 1)]
  assert [(a.micro_batch, a.stage) for a in order] == expected


@pytest.mark.parametrize('m, n', [(1, 1), (1, 3), (3, 1), (3, 3), (4, 2)])
def testForwardClockTable(m, n):
  # In tick t every stage k runs micro-batch t - k.
  timeline = schedules.Get('forward_only', n, m).Timeline()
  for k, row in enumerate(timeline):
    assert [(start, a.micro_batch) for start, _, a in row] == [(k + j, j) for j in range(m)]


@pytest.mark.parametrize(
  'v, m, p',
  [(2, 2, 2), (2, 4, 4), (2, 8, 2), (2, 8, 4), (2, 8, 8), (4, 4, 4), (4, 8, 4), (4, 8, 8)]
  + [(4, 16, 4), (4, 32, 4), (4, 64, 4), (4, 16, 16), (3, 2, 2), (3, 8, 2), (3, 12, 4)]
  + [(4, 6, 3), (4, 10, 5), (2, 3, 4), (2, 10, 4), (2, 15, 4), (4, 32, 32), (4, 128, 64)],
)
def testSizesThatPyTorchTests(v, m, p):
  # From the tests of torch.distributed.pipelining: (stages per rank, micro-batches, ranks).
  schedules.Get('looped_bfs', v * p, m, p)
  if m % p == 0:
    schedules.Get('interleaved_1f1b', v * p, m, p)
  else:
    with pytest.raises(
      ValueError, match=naming.Naming("'interleaved_1f1b'", f'multiple of {p}', f'got {m}')
    ):
      schedules.Get('interleaved_1f1b', v * p, m, p)


def testBubbleBound():
  assert schedules.BubbleBound(1, 5) == 0
  assert schedules.BubbleBound(4, 16) == 3 / 19
  assert schedules.BubbleBound(8, 32) == pytest.approx(0.179, abs=5e-4)
  with pytest.raises(ValueError, match=naming.Naming('num_micro_batches', 'positive', 'got 0')):
    schedules.BubbleBound(2, 0)


# Names and sizes.


def testUnknownNamesGetSuggestions():
  with pytest.raises(KeyError, match=naming.Naming("'gpip'", "mean 'gpipe'", 'forward_only')):
    schedules.Get('gpip', 2, 2)
  with pytest.raises(KeyError, match=naming.Naming("'?'", 'forward_only')):
    schedules.Get('?', 2, 2)
  with pytest.raises(ValueError, match=naming.Naming("'search'", 'schedule_search.Search')):
    schedules.Get('search', 2, 2)


def testASmallBatchFallsBackFromInterleaving():
  small = schedules.GetForBatch('interleaved_1f1b', 4, 3, 2)
  assert (small.name, small.num_micro_batches) == ('looped_bfs', 3)
  assert small.stage_to_device == schedules.Get('interleaved_1f1b', 4, 4, 2).stage_to_device
  for name, m in (('interleaved_1f1b', 4), ('looped_bfs', 3)):
    assert schedules.GetForBatch(name, 4, m, 2) == schedules.Get(name, 4, m, 2)


def testACustomScheduleIsCheckedAndReturned():
  text = schedules.Get('zb_h1', 3, 5).ToText()
  custom = Schedule.FromText(text, 'mine')
  assert schedules.Get(custom, 3, 5) is custom
  with pytest.raises(
    ValueError,
    match=naming.Naming(
      "'mine'", 'has num_micro_batches 5', 'num_micro_batches 8 is', 'schedules.Register'
    ),
  ):
    schedules.Get(custom, 3, 8)
  with pytest.raises(
    ValueError, match=naming.Naming("'mine'", 'has num_devices 3', 'num_devices 1 is')
  ):
    schedules.Get(custom, 3, 5, 1)
  with pytest.raises(ValueError, match=naming.Naming("'custom'", 'device 0', 'lacks 0B0')):
    schedules.Get(Schedule.FromText('0F0,0F1,0B1'), 1, 2)
  with pytest.raises(TypeError, match=naming.Naming('schedule', 'Schedule', 'None')):
    schedules.Get(None, 1, 2)


def testANewScheduleIsOneRegisteredFunction(monkeypatch):
  monkeypatch.setattr(schedules, '_GENERATORS', dict(schedules._GENERATORS))

  @schedules.Register('mine')
  def Mine(num_stages, num_micro_batches, num_devices):
    assert num_devices == num_stages
    text = _Text([_RULES['1f1b'](num_stages, num_micro_batches, d) for d in range(num_stages)])
    return Schedule.FromText(text, 'mine')

  assert 'mine' in schedules.Names()
  assert schedules.Get('mine', 4, 8).PeakActivations() == (4, 3, 2, 1)
  with pytest.raises(ValueError, match=naming.Naming("'mine'", 'already', 'Mine')):
    schedules.Register('mine')(Mine)

  @schedules.Register('broken')
  def Broken(num_stages, num_micro_batches, num_devices):
    return dataclasses.replace(Mine(num_stages, num_micro_batches, num_devices), name='broken')

  schedules.Get('broken', 2, 2)
  monkeypatch.setitem(_RULES, '1f1b', lambda p, m, d: ['B0', 'F0'])
  with pytest.raises(
    ValueError, match=naming.Naming("'broken'", 'device 0', '0B0 comes before 0F0')
  ):
    schedules.Get('broken', 2, 1)


def testTheExampleInTheDocstringRuns(monkeypatch, capsys):
  monkeypatch.setattr(schedules, '_GENERATORS', dict(schedules._GENERATORS))
  example = schedules.__doc__[schedules.__doc__.index('    from ') :]
  example = textwrap.dedent(example[: example.index('\n\n`Get`')])
  exec(example, {})
  assert schedules.Get('one_by_one', 2, 2).ToText() == '0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n'
  assert 'device 1  .  F0 B0' in capsys.readouterr().out


def testARegisteredFunctionThatMakesAnotherSize(monkeypatch):
  """The gradient would lack the missing micro-batches."""

  def Short(num_stages, num_micro_batches, num_devices):
    return schedules.Get('gpipe', num_stages, num_micro_batches - 1, num_devices)

  monkeypatch.setitem(schedules._GENERATORS, 'short', Short)
  with pytest.raises(
    ValueError, match=naming.Naming('has num_micro_batches 3', 'num_micro_batches 4 is', "'short'")
  ):
    schedules.Get('short', 2, 4)


@pytest.mark.parametrize(
  'args, words',
  [
    (('gpipe', 0, 1), ['num_stages', '0']),
    (('gpipe', 2, -1), ['num_micro_batches', '-1']),
    (('gpipe', 2, 2.0), ['num_micro_batches', '2.0']),
    (('gpipe', 2, 2, 0), ['num_devices', '0']),
    (('forward_only', 2, 2, 3), ['at least one stage for each device', 'got 2', 'than 2 devices']),
    (('interleaved_1f1b', 8, 6, 4), ['multiple of 4 micro-batches', 'got 6', 'is 4 or 8']),
    (('interleaved_1f1b', 8, 7, 4), ['got 7', 'nearest is 8,']),
    (('interleaved_1f1b', 8, 5, 4), ['got 5', 'nearest is 4,']),
    (('interleaved_1f1b', 8, 1, 4), ['got 1', 'nearest is 4,', 'looped_bfs']),
    (('interleaved_1f1b', 4, 4), ['at least 2', '4 stages for 4 devices', 'make it 8 ', '1f1b']),
    (('interleaved_1f1b', 10, 4, 4), ['10 stages for 4 devices', 'make it 8 or 12 stages']),
    (('looped_bfs', 3, 4, 4), ['at least 1', '3 stages for 4 devices', 'make it 4 stages']),
  ]
  + [
    ((name, 4, 2, 2), [name, 'one stage', '4 stages for 2 devices', 'use'])
    for name in ('gpipe', 'fused_fill_drain', '1f1b', '1f1b_fused', 'zb_h1')
  ],
)
def testImpossibleSizesAreNamed(args, words):
  with pytest.raises(ValueError) as e:
    schedules.Get(*args)
  assert all(word in str(e.value) for word in words), e.value


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
