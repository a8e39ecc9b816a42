# SPDX-License-Identifier: Apache-2.0
"""Schedules as data: text, validation against brute force, order, time, pictures, memory."""

import collections
import dataclasses
import graphlib
import itertools
import random
import re
import sys

import pytest

from lingvo_gpipe.pipeline.schedule import offload, schedules
from lingvo_gpipe.pipeline.schedule import schedule as schedule_lib
from tests import naming

Action, Kind, Schedule = schedule_lib.Action, schedule_lib.Kind, schedule_lib.Schedule


def _Examples():
  """Returns valid schedules of every kind, for 4 devices and 8 micro-batches."""
  examples = {
    name: schedules.Get(name, 8 if schedules.TakesStagesPerDevice(name, 2) else 4, 8, 4)
    for name in schedules.Names()
  }
  for name in ('1f1b_fused', 'zb_h1'):
    changed = offload.WithOffload(examples[name])
    examples[f'{name}_offload'] = dataclasses.replace(changed, name=f'{name}_offload')
  return examples


# Text.


@pytest.mark.parametrize('name', _Examples())
def testScheduleTextReadsBack(name):
  schedule = _Examples()[name]
  text = schedule.ToText()
  assert len(text.splitlines()) == schedule.num_devices
  assert Schedule.FromText(text, name) == schedule


@pytest.mark.parametrize('name', ['fused_fill_drain', '1f1b_fused'])
def testTextForPyTorchHasNoV(name):
  schedule = schedules.Get(name, 4, 12)
  text = schedule.ToText(for_torch=True)
  assert re.sub(r'3F(\d+),3B\1\b', r'3V\1', text) == schedule.ToText() != text
  assert set(re.findall('[A-Z]', text)) == {'F', 'B'}
  Schedule.FromText(text).Validate()


def testTextMayHoldCommentsBlankLinesAndIdleCells():
  text = """
    # two devices
    0F0, 0F1,, None, 0B1 , 0B0   # the first

    ,1F0,1F1,1B1,1B0
  """
  schedule = Schedule.FromText(text).Validate()
  assert schedule.ToText() == '0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n'
  assert (schedule.num_stages, schedule.num_micro_batches, schedule.num_devices) == (2, 2, 2)


# The CSV files that PyTorch 2.13 writes for ScheduleDualPipeV, 2 devices and 4 micro-batches.
_COMPUTE_ONLY = """\
0F0,0F1,0F2,3F0,3I0,3W0,3F1,(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,3B2,(3F3;0B1)OVERLAP_F_B,\
3B3,0I2,0W2,0I3,0W3\r
1F0,2F0,1F1,2F1,1F2,2B0,(2F2;1B0)OVERLAP_F_B,(1F3;2B1)OVERLAP_F_B,(2F3;1B1)OVERLAP_F_B,2B2,1B2,\
2I3,1I3,2W3,1W3\r
"""
_WITH_TRANSFERS = """\
0UNSHARD,3UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,3RECV_F0,0F2,0SEND_F2,3F0,3RECV_F1,3I0,3SEND_B0,3W0,\
3F1,3RECV_F2,0RECV_B0,(0F3;3B1)OVERLAP_F_B,0SEND_F3,3SEND_B1,(3F2;0B0)OVERLAP_F_B,3RECV_F3,\
0RECV_B1,3B2,3SEND_B2,(3F3;0B1)OVERLAP_F_B,0RECV_B2,3B3,3SEND_B3,3REDUCE_GRAD,0RECV_B3,3RESHARD,\
0I2,0W2,0I3,0W3,0REDUCE_GRAD,0RESHARD\r
1UNSHARD,2UNSHARD,1RECV_F0,1F0,1RECV_F1,2F0,2SEND_F0,1RECV_F2,1F1,2F1,2SEND_F1,2RECV_B0,1F2,2B0,\
(2F2;1B0)OVERLAP_F_B,2SEND_F2,1SEND_B0,1RECV_F3,2RECV_B1,(1F3;2B1)OVERLAP_F_B,\
(2F3;1B1)OVERLAP_F_B,2SEND_F3,1SEND_B1,2RECV_B2,2B2,1B2,1SEND_B2,2RECV_B3,2I3,1I3,1SEND_B3,2W3,\
2REDUCE_GRAD,2RESHARD,1W3,1REDUCE_GRAD,1RESHARD\r
"""


@pytest.mark.parametrize('text', [_COMPUTE_ONLY, _WITH_TRANSFERS])
def testACsvFileOfPyTorch(text):
  schedule = Schedule.FromText(text, 'dualpipe_v').Validate()
  assert schedule == schedules.Get('dualpipe_v', 4, 4, 2)


@pytest.mark.parametrize(
  'text, words',
  [
    ('0F0,(0F1;0X0)OVERLAP_F_B', ['line 1', 'column 5', "'0X0'"]),
    ('0F0,(0F1;0B0)', ['line 1', 'column 5', 'not an action']),
    ('0F0,0SEND_F0,1SEND_G0', ['line 1', 'column 14', "'1SEND_G0'"]),
    ('0F0,0B0\n1F0,1X0', ['line 2', 'column 5', "'1X0'"]),
    ('\n# c\n0F0,  0Q1 ,0B0', ['line 3', 'column 7', "'0Q1'"]),
    ('0F0;0B0', ['line 1', 'column 1', '0F0;0B0']),
    ('', ['no action']),
    ('0F0,0B0\n2F0,2B0', ['stage 1 has no action', 'stage 2']),
    ('99999999999999F0', ['stage 0 has no action']),
  ],
)
def testUnreadableTextIsLocated(text, words):
  with pytest.raises(ValueError) as e:
    Schedule.FromText(text, 'mine')
  assert "'mine'" in str(e.value)
  assert all(word in str(e.value) for word in words), e.value


def testFullAndSplitBackwardsMayMix():
  Schedule.FromText('0F0,0F1,0B0,0I1,0W1\n1V0,1F1,1I1,1W1').Validate()


# Validation.


def _IsValid(schedule):
  """Checks the definition by brute force: a multiset of actions and an acyclic graph."""
  count = collections.Counter()
  for d, row in enumerate(schedule.actions):
    for a in row:
      if not (0 <= a.stage < schedule.num_stages) or schedule.stage_to_device[a.stage] != d:
        return False
      count[a.stage, a.micro_batch, a.kind.value] += 1
  trains = any(kind != 'F' for _, _, kind in count)
  last = schedule.num_stages - 1
  expected = 0
  for k, m in itertools.product(range(schedule.num_stages), range(schedule.num_micro_batches)):
    kinds = ''.join(kind * count[k, m, kind] for kind in 'BFIVWLO')
    trained = ['BF', 'FIW', 'BFLO', 'FIWLO'] + ['V'] * (k == last)
    if kinds not in (trained if trains else ['F']):
      return False
    expected += len(kinds)
  if expected != count.total():
    return False
  graph = graphlib.TopologicalSorter()
  for row in schedule.actions:
    for earlier, later in itertools.pairwise(row):
      graph.add(later, earlier)
    for a in row:
      k, m = a.stage, a.micro_batch
      if a.kind.value in 'FV' and k:
        graph.add(a, Action(k - 1, Kind.FORWARD, m))
      if a.kind.value in 'BI':
        graph.add(a, Action(k, Kind.FORWARD, m))
        for kind in 'BIV':
          if count[k + 1, m, kind]:
            graph.add(a, Action(k + 1, Kind(kind), m))
      if a.kind.value in 'BI' and count[k, m, 'L']:
        graph.add(a, Action(k, Kind.LOAD, m))
      if a.kind.value == 'O':
        graph.add(a, Action(k, Kind.FORWARD, m))
      if a.kind.value == 'L':
        graph.add(a, Action(k, Kind.OFFLOAD, m))
      if a.kind.value == 'W':
        graph.add(a, Action(k, Kind.INPUT_GRADIENT, m))
  try:
    graph.prepare()
  except graphlib.CycleError:
    return False
  return True


def _Mutate(schedule, rng):
  """Changes one to three actions at random; some changes leave the schedule valid."""
  rows = [list(row) for row in schedule.actions]
  how = rng.choice(['swap', 'swap near', 'move', 'drop', 'copy', 'alter', 'away', 'split', 'fuse'])
  d = rng.randrange(len(rows))
  row = rows[d]
  i = rng.randrange(len(row))
  if how == 'swap':
    j = rng.randrange(len(row))
    row[i], row[j] = row[j], row[i]
  elif how == 'swap near':
    j = min(i + 1, len(row) - 1)
    row[i], row[j] = row[j], row[i]
  elif how == 'move':
    row.insert(rng.randrange(len(row)), row.pop(i))
  elif how == 'drop':
    row.pop(i)
  elif how == 'copy':
    row.insert(rng.randrange(len(row) + 1), row[i])
  elif how == 'away':
    other = rng.choice(rows)
    other.insert(rng.randrange(len(other) + 1), row.pop(i))
  elif how == 'alter':
    field = rng.choice(['stage', 'kind', 'micro_batch'])
    value = {
      'stage': rng.randrange(schedule.num_stages + 1),
      'kind': rng.choice(list(Kind)),
      'micro_batch': rng.randrange(schedule.num_micro_batches + 1),
    }[field]
    row[i] = dataclasses.replace(row[i], **{field: value})
  elif how == 'split' and row[i].kind is Kind.BACKWARD:
    w = dataclasses.replace(row[i], kind=Kind.WEIGHT_GRADIENT)
    row[i] = dataclasses.replace(row[i], kind=Kind.INPUT_GRADIENT)
    row.insert(rng.randrange(len(row) + 1), w)
  elif how == 'fuse':
    f = row[i]
    rows[d] = [a for a in row if (a.stage, a.micro_batch) != (f.stage, f.micro_batch)]
    rows[d].insert(i, dataclasses.replace(f, kind=Kind.FORWARD_BACKWARD))
  return dataclasses.replace(schedule, actions=rows)


@pytest.mark.parametrize('name', _Examples())
def testMutationsAreRejectedExactlyIfInvalid(name):
  rng = random.Random(name)
  verdicts = collections.Counter()
  original = _Examples()[name]
  for _ in range(400):
    schedule = _Mutate(original, rng)
    if rng.random() < 0.3:
      schedule = _Mutate(schedule, rng)
    truth = _IsValid(schedule)
    verdicts[truth] += 1
    try:
      schedule.Validate()
      message = None
    except ValueError as e:
      message = str(e)
    assert (message is None) == truth, (message, schedule.ToText())
    if message:
      assert re.search(r"^Schedule '\w+': .*device \d.* \d[FBIWVOL]\d", message), message
  assert min(verdicts[True], verdicts[False]) > 20


@pytest.mark.parametrize(
  'text, words',
  [
    ('0F0,0B0\n1F0', ['device 1', 'lacks 1B0']),
    ('0F0,0B0\n1F0,1I0', ['device 1', 'lacks 1W0']),
    ('0F0,0B0\n1F0,1B0,1W0', ['device 1', 'extra actions: 1W0']),
    ('0F0,0B0,0F0\n1F0,1B0', ['device 0', '0F0', 'more than once']),
    ('0F0,0B0,1B0\n1F0', ['device 0: 1B0', 'belongs to device 1']),
    ('0V0\n1V0', ['device 0', '0V0', 'only the last stage']),
    ('0F0,0V0', ['device 0', 'extra actions: 0F0']),
    ('0B0,0F0\n1F0,1B0', ['device 0', '0B0 comes before 0F0']),
    ('0F0,0O0,0B0', ['device 0', 'lacks 0L0']),
    ('0O0,0L0,0V0', ['device 0', '0F0', 'extra actions: 0V0']),
    ('0F0,0O0,0B0,0L0', ['device 0', '0B0 comes before 0L0']),
    ('0O0,0F0,0L0,0B0', ['device 0', '0O0 comes before 0F0']),
    ('0F0,0W0,0I0', ['device 0', '0W0 comes before 0I0']),
    (
      '0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1',
      ['deadlock', 'device 0 is at 0B0 and waits for 1B0', 'device 1 is at 1F1', '0F1'],
    ),
  ],
)
def testFaultsNameDeviceAndAction(text, words):
  with pytest.raises(ValueError) as e:
    Schedule.FromText(text).Validate()
  assert all(word in str(e.value) for word in words), e.value


@pytest.mark.parametrize(
  'change, words',
  [
    (dict(num_micro_batches=3), ['device 0', 'lacks 0F2']),
    (dict(num_micro_batches=1), ['device 0', '0F1', 'no micro-batch 1']),
    (dict(num_stages=3), ['stage_to_device', '2', '3']),
    (dict(num_stages=0), ['at least one stage']),
    (dict(num_micro_batches=True), ['at least one micro-batch', 'True']),
    (dict(stage_to_device=(0, 2)), ['stage 1', 'device 2']),
    (dict(stage_to_device=(0, 0)), ['device 1', 'no stage']),
    (dict(stage_to_device=(1, 0)), ['device 0', '0F0', 'belongs to device 1']),
  ],
)
def testWrongSizesAreNamed(change, words):
  schedule = dataclasses.replace(schedules.Get('gpipe', 2, 2), **change)
  with pytest.raises(ValueError) as e:
    schedule.Validate()
  assert all(word in str(e.value) for word in words), e.value


def testActionsMustBeActions():
  with pytest.raises(TypeError, match=naming.Naming("'mine'", 'device 0', 'position 1', "'0B0'")):
    Schedule('mine', 1, 1, [[Action(0, Kind.FORWARD, 0), '0B0']], [0])
  with pytest.raises(TypeError, match='Kind'):
    Schedule('mine', 1, 1, [[Action(0, 'F', 0)]], [0])


# Order and time.


@pytest.mark.parametrize('name', _Examples())
def testEmissionOrderRespectsDevicesAndDependencies(name):
  schedule = _Examples()[name]
  order = schedule.EmissionOrder()
  position = {action: i for i, action in enumerate(order)}
  assert len(order) == len(position) == sum(map(len, schedule.actions))
  for row in schedule.actions:
    assert [a for a in order if a in set(row)] == list(row)
  for action in order:
    assert all(position[needed] < position[action] for needed in schedule.Dependencies(action))


def testDependencies():
  schedule = Schedule.FromText('0F0,0F1,0B0,0I1,0W1\n1V0,1F1,1I1,1W1').Validate()
  needs = {
    '0F0': [],
    '1V0': ['0F0'],
    '0B0': ['0F0', '1V0'],
    '1F1': ['0F1'],
    '1I1': ['1F1'],
    '0I1': ['0F1', '1I1'],
    '0W1': ['0I1'],
  }
  for text, expected in needs.items():
    assert list(map(str, schedule.Dependencies(Action.FromText(text)))) == expected


@pytest.mark.parametrize('name', _Examples())
def testWalkYieldsEveryActionAfterItsDependencies(name):
  schedule = _Examples()[name]
  walked = list(schedule.InOrder())
  done = set()
  for device, action in walked:
    assert all(needed in done for needed in schedule.Dependencies(action))
    assert schedule.stage_to_device[action.stage] == device
    done.add(action)
  for device, row in enumerate(schedule.actions):
    assert tuple(a for d, a in walked if d == device) == row


def testPictureIsFigure2OfThePaper():
  # Figure 2c: F_k,m and B_k,m of 4 devices and 4 micro-batches.
  assert (
    schedules.Get('gpipe', 4, 4).Picture()
    == """\
time      0  1  2  3  4  5  6  7  8  9  10 11 12 13
device 0  F0 F1 F2 F3 .  .  .  .  .  .  B3 B2 B1 B0
device 1  .  F0 F1 F2 F3 .  .  .  .  B3 B2 B1 B0 .
device 2  .  .  F0 F1 F2 F3 .  .  B3 B2 B1 B0 .  .
device 3  .  .  .  F0 F1 F2 F3 B3 B2 B1 B0 .  .  .
"""
  )


def testPictureWithDurationsAndSeveralStagesADevice():
  assert (
    schedules.Get('gpipe', 2, 2).Picture({Kind.BACKWARD: 2})
    == """\
time      0  1  2  3  4  5  6  7  8
device 0  F0 F1 .  .  .  B1--- B0---
device 1  .  F0 F1 B1--- B0--- .  .
"""
  )
  assert (
    schedules.Get('forward_only', 4, 2, 2).Picture()
    == """\
time      0   1   2   3   4
device 0  0F0 0F1 2F0 2F1 .
device 1  .   1F0 1F1 3F0 3F1
"""
  )
  with pytest.raises(ValueError, match=naming.Naming('B', 'whole number', 1.5)):
    schedules.Get('gpipe', 2, 2).Picture({Kind.BACKWARD: 1.5})


def testDurationsMustBePositive():
  with pytest.raises(ValueError, match=naming.Naming('B', 'positive', 'got 0')):
    schedules.Get('gpipe', 2, 2).Timeline({Kind.BACKWARD: 0})


def testTimelineRefusesAnInvalidSchedule():
  with pytest.raises(ValueError, match=naming.Naming("'custom'", 'device 1', 'lacks 1B0')):
    Schedule.FromText('0F0,0B0\n1F0').Timeline()


def testPeakActivations():
  # Device 0 holds 0F0, 0F1 and 2F0, and one more during 2V1.
  schedule = Schedule.FromText('0F0,0F1,2F0,2V1,0B1,2I0,2W0,0B0\n1F0,1F1,1B1,1B0').Validate()
  assert schedule.PeakActivations() == (2, 2, 2)
  assert schedule.DevicePeakActivations() == (4, 2)
  for schedule in _Examples().values():
    stages, devices = schedule.PeakActivations(), schedule.DevicePeakActivations()
    for d, peak in enumerate(devices):
      peaks = [p for p, owner in zip(stages, schedule.stage_to_device, strict=True) if owner == d]
      assert max(peaks) <= peak <= sum(peaks)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
