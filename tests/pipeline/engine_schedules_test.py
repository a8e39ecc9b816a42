# SPDX-License-Identifier: Apache-2.0
"""Same results under every schedule and policy, at the same time on all devices; refusals."""

import dataclasses
import functools
import itertools
import os
import random
import sys
import threading

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.layers import dropout, embedding, linear
from lingvo_gpipe.pipeline.schedule import rematerialisation, schedules
from tests import naming
from tests.toys import stacks, timed_layers, tokens

_TIME, _DIM, _VOCAB = 3, 4, 7
_ONE_A_DEVICE = ('gpipe', 'fused_fill_drain', '1f1b', '1f1b_fused', 'zb_h1')
_LOOPED = ('interleaved_1f1b', 'looped_bfs')
# The first stage takes integers only, and the second of four has no weights.
_SPLITS = {
  **{1: [6], 2: [2, 6], 3: [1, 4, 6], 4: [1, 2, 4, 6]},
  **{n: list(range(1, n + 1)) for n in (6, 8)},
}


def _Sub(num_layers=6):
  """Returns Params of six layers, or of eight."""
  drop = dropout.DropoutLayer.Params().Set(keep_prob=0.7)
  square = linear.ProjectionLayer.Params().Set(input_dim=_DIM, output_dim=_DIM, activation='TANH')
  return [
    embedding.EmbeddingLayer.Params().Set(vocab_size=_VOCAB, embedding_dim=_DIM),
    drop,
    square.Copy().Set(has_bias=True),
    *[square, drop] * (num_layers // 2 - 2),
    embedding.SimpleFullSoftmax.Params().Set(input_dim=_DIM, num_classes=_VOCAB),
  ]


@functools.cache
def _Batch(size):
  """((ids, paddings), side); the second example's tokens count nothing."""
  rng = np.random.default_rng(0)
  ids, labels = (tf.constant(rng.integers(0, _VOCAB, [size, _TIME]), tf.int32) for _ in range(2))
  weights = rng.uniform(0.0, 2.0, [size, _TIME]) * (rng.uniform(size=[size, _TIME]) < 0.7)
  weights[1:2] = 0.0
  paddings = (np.arange(_TIME) >= rng.integers(1, _TIME + 1, [size, 1])).astype(np.float64)
  side = nested_map.NestedMap(labels=labels, weights=tf.constant(weights))
  return (ids, tf.constant(paddings)), side


@functools.cache
def _Reference(num_micro_batches, size, num_layers=6):
  return stacks.Reference(_Sub(num_layers), num_micro_batches, *_Batch(size), tokens.Xent)


def _Stack(schedule, policy, num_stages, num_micro_batches, stages_per_device=1, **options):
  return stacks.MakeStack(
    _Sub(_SPLITS[num_stages][-1]),
    num_stages=num_stages,
    num_micro_batches=num_micro_batches,
    stages_per_device=stages_per_device,
    schedule=schedule,
    remat_policy=policy,
    splits=_SPLITS[num_stages],
    **options,
  )


@functools.cache
def _Placed(num_stages, stages_per_device=1, xla=False, schedule=''):
  """Returns a placed stack for all schedules with its placement, which share traces of stages."""
  schedule = schedule or ('gpipe' if stages_per_device == 1 else 'looped_bfs')
  stack = _Stack(schedule, 'stage', num_stages, 4, stages_per_device, xla=xla)
  stack.Place(stacks.Devices(), *stacks.Specs(_Batch(8)[0]), loss_fn=tokens.Xent)
  return stack


def _Retrain(stack, schedule, policy, num_micro_batches, size, **options):
  options['num_micro_batches'] = num_micro_batches
  return stacks.Retrain(stack, *_Batch(size), schedule, policy, **options)


def _Check(stack, size):
  p = stack.params
  actual = stacks.Train(stack, *_Batch(size), tokens.Xent)
  stacks.CheckEqual(actual, _Reference(p.num_micro_batches, size))


@dataclasses.dataclass(frozen=True)
class _Case:
  """One of schedules x policies x K x M x batch sizes x XLA on and off."""

  schedule: str
  policy: str
  k: int
  m: int
  batch: str
  xla: bool

  def __str__(self):
    batch, compiled = self.batch.replace(' ', '_'), '-xla' * self.xla
    return f'{self.schedule}-{self.policy}-K{self.k}-M{self.m}-{batch}{compiled}'

  @functools.cached_property
  def pairs(self):
    """Every two of its values."""
    return frozenset(itertools.combinations(dataclasses.asdict(self).items(), 2))

  @property
  def can_be(self):
    if self.schedule == 'interleaved_1f1b' and (self.m % self.k or min(self.m, self.size) % self.k):
      return False
    return self.m > 1 or self.batch == 'even'

  @property
  def size(self):
    return {'even': 2 * self.m, 'uneven': 2 * self.m - 1, 'below M': self.m - 1}[self.batch]


@functools.cache
def _AllCases(most=3, xla=(False,)):
  """All cases with up to this many devices, and as many micro-batches."""
  some = range(1, most + 1)
  names, policies = (*_ONE_A_DEVICE, *_LOOPED), rematerialisation.POLICIES
  values = (names, policies, some, some, ('even', 'uneven', 'below M'), xla)
  return [_Case(*x) for x in itertools.product(*values)]


def _Possible(*args):
  return [case for case in _AllCases(*args) if case.can_be]


def _Pairs(cases):
  return set().union(*(case.pairs for case in cases))


@functools.cache
def _Grid():
  """A sample in which every two values that can come together do.

  XLA compiles the functions of stages, which depend on the policy and the kinds of actions only.
  """
  possible = _Possible()
  random.Random(0).shuffle(possible)
  possible.sort(key=lambda case: case.k)  # Many stages cost most: of equally good ones never first.
  cases = [
    _Case('zb_h1', 'none', 2, 3, 'uneven', True),
    _Case('interleaved_1f1b', 'layer', 2, 2, 'even', True),
    _Case('gpipe', 'except_last', 1, 2, 'even', True),
    _Case('1f1b_fused', 'stage', 1, 3, 'below M', True),
  ]
  uncovered = _Pairs(possible) - _Pairs(cases)
  while uncovered:
    cases.append(max(possible, key=lambda case: len(case.pairs & uncovered)))
    uncovered -= cases[-1].pairs
  return cases


_FULL = _Possible(4, (False, True))


@pytest.mark.parametrize('case', _FULL if 'ENGINE_GRID' in os.environ else _Grid(), ids=str)
def testTheResultIsTheSame(case):
  v = 2 if case.schedule in _LOOPED else 1
  stack = _Placed(v * case.k, v, case.xla)
  actual = _Retrain(stack, case.schedule, case.policy, case.m, case.size)
  expected = _Reference(case.m, case.size, len(stack.layers))
  stacks.CheckEqual(actual, expected)


@pytest.mark.parametrize(
  'name, v, k, m, policy',
  [
    ('zb_2p', 1, 3, 4, 'none'),
    ('interleaved_zb', 2, 2, 4, 'stage'),
    ('zb_v', 2, 2, 4, 'none'),
    ('v_half', 2, 3, 2, 'none'),
    ('v_min', 2, 3, 4, 'except_last'),
    ('dualpipe_v', 2, 2, 4, 'layer'),
  ],
)
def testTheResultIsTheSameIfBackwardIsSplit(name, v, k, m, policy):
  stack = _Placed(v * k, v, schedule='' if name in ('zb_2p', 'interleaved_zb') else 'zb_v')
  size = 2 * m - (name == 'v_half')  # Two sizes of micro-batches need twice the traces.
  stacks.CheckEqual(_Retrain(stack, name, policy, m, size), _Reference(m, size))
  owners = list(range(k)) * v if name[0] == 'i' else [*range(k), *reversed(range(k))][: v * k]
  assert list(stack.engine.stage_to_device) == owners


def testTheSampleCoversTheGrid():
  cannot_be = {(('m', 1), ('batch', 'uneven')), (('m', 1), ('batch', 'below M'))}
  assert _Pairs(_AllCases()) - _Pairs(_Grid()) == cannot_be
  assert any(c.m < c.k for c in _Grid())
  compiled = [c for c in _Grid() if c.xla]
  assert {c.policy for c in compiled} == set(rematerialisation.POLICIES)
  assert {'even', 'uneven', 'below M'} == {c.batch for c in compiled}
  # Backward whole, in halves and with its forward.
  assert {'interleaved_1f1b', 'gpipe', 'zb_h1', '1f1b_fused'} == {c.schedule for c in compiled}
  assert {1, 2} == {c.k for c in compiled}  # With two stages on a device, and with one.
  assert len(_Grid()) < 40 and len(compiled) < 9  # Which cost more.


def testTheTestCanFail():
  cases = [c for c in _Grid() if c.k == 2 and c.schedule not in _LOOPED and not c.xla]
  case = max(cases, key=lambda case: case.size)
  way = (case.schedule, case.policy, case.m, case.size)
  _, grads = _Retrain(_Placed(2), *way, step=stacks.STEP + 1)
  stacks.CheckAnyDiffers(grads, _Reference(case.m, case.size)[1])


def testInterleavingLeavesABatchTooSmallForItToLoopedBfs(caplog):
  stack = _Placed(4, 2)
  with caplog.at_level('INFO', logger='absl'):
    # This policy depends on the number of micro-batches.
    actual = _Retrain(stack, 'interleaved_1f1b', 'except_last', 4, 3)
    stacks.CheckEqual(actual, _Reference(4, 3))
    for size in (1, 3):
      stacks.RunStep(stack.engine, *_MicroBatches(stack, size), tf.constant(1, tf.int64))
  messages = [r.getMessage() for r in caplog.records if 'looped_bfs' in r.getMessage()]
  assert len(messages) == 1
  assert naming.Names(messages[0], '3 micro-batches', '2 devices')


def _MicroBatches(stack, size):
  inputs, side = _Batch(size)
  sides = stack.SplitBatch(side)
  return stack.SplitBatch(inputs), sides, [stacks.LossWeight(s) for s in sides]


# ---- at the same time --------------------------------------------------------------------


def _Meet(timeout, **options):
  """A step in which 1F0 and 0F1 wait for each other, and 1B0 and 0B1; the barrier."""
  timed_layers.Meeting.barrier = threading.Barrier(2, timeout=timeout)
  sub = [timed_layers.Meeting.Params().Set(at=1), timed_layers.Meeting.Params().Set(at=0)]
  stack = stacks.MakeStack(sub, num_stages=2, splits=[1, 2], num_micro_batches=2, **options)
  x, side = (tf.ones([4, 1], tf.float64), tf.constant([0, 0, 1, 1])), tf.ones([4], tf.float64)
  stacks.Train(stack, x, side)
  return timed_layers.Meeting.barrier


@pytest.mark.skipif(
  len(os.sched_getaffinity(0)) < 2, reason='TensorFlow has one thread on one core'
)
def testDevicesRunAtTheSameTime():
  assert not _Meet(timeout=60).broken


def testStagesOfOneDeviceTakeTurns():
  """This shows that the test above can fail."""
  with pytest.raises(tf.errors.OpError, match='BrokenBarrierError'):
    _Meet(timeout=0.1, stages_per_device=2, schedule='looped_bfs')


# ---- schedules of the user's own ---------------------------------------------------------


def testACustomScheduleTrains():
  """Micro-batches are out of order, and backward is split for some of them only."""
  text = """
    0F0, 0F1, 0F2, 0I1, 0B0, 0I2, 0W2, 0W1
    1F1, 1F0, 1B1, 1F2, 1I0, 1B2, 1W0
  """
  schedule = schedules.Schedule.FromText(text, name='mixed')
  for policy in ('layer', 'except_last'):  # Which has stage and none.
    stacks.CheckEqual(_Retrain(_Placed(2), schedule, policy, 3, 6), _Reference(3, 6))


def testACustomScheduleWithSeveralStagesPerDeviceTrains():
  text = """
    0F0, 0F1, 2F0, 2F1, 2B1, 2I0, 0B1, 0B0, 2W0
    1F0, 1F1, 3V1, 3V0, 1B1, 1B0
  """
  schedule = schedules.Schedule.FromText(text, name='looped')
  stacks.CheckEqual(_Retrain(_Placed(4, 2), schedule, 'stage', 2, 6), _Reference(2, 6))


def testACustomScheduleOfAnotherSizeIsRefused():
  schedule = schedules.Get('1f1b', 2, 4)
  with pytest.raises(
    ValueError, match=naming.Naming("'1f1b'", 'has num_micro_batches 4', 'num_micro_batches 2 is')
  ):
    _Stack(schedule, 'stage', 2, 2)
  stack = _Stack(schedule, 'stage', 2, 4)
  with pytest.raises(
    ValueError, match=naming.Naming("'1f1b'", 'has num_micro_batches 4', 'num_micro_batches 3 is')
  ):
    stacks.Train(stack, *_Batch(3), tokens.Xent)


# Two devices; the first has the first stage of four and the last, as in a V.
_V = """
  0F0, 0F1, 3V0, 3F1, 3B1, 0B0, 0B1
  1F0, 2F0, 1F1, 2F1, 2I0, 1B0, 2W0, 2B1, 1B1
"""
_UNEVEN = """
  0F0, 0F1, 0B0, 0B1
  1F0, 1F1, 2F0, 2B0, 2F1, 2B1, 1I0, 1B1, 1W0
"""
_BACK_TO_FRONT = """
  1F0, 1F1, 1B1, 1B0
  0F0, 0F1, 0B1, 0B0
"""


@pytest.mark.parametrize(
  'text, placement, policy',
  [
    (_V, (0, 1, 1, 0), 'stage'),
    (_UNEVEN, (0, 1, 1), 'none'),
    (_BACK_TO_FRONT, (1, 0), 'layer'),
  ],
  ids=['v', 'uneven', 'back_to_front'],
)
def testACustomSchedulePlacesTheStages(text, placement, policy):
  schedule = schedules.Schedule.FromText(text, name='placed')
  stack = _Stack(schedule, policy, len(placement), 2)
  assert stack.num_devices == 2
  _Check(stack, 6)
  devices = stacks.Devices()
  for s, device in zip(stack.engine.stages, placement, strict=True):
    assert s.device == devices[device]
    assert all(v.device.endswith(devices[device]) for v in tf.nest.flatten(s.variables))
  # Forward only, with a batch that the schedule cannot train on, too.
  layer, theta = stacks.PlainLayers(_Sub())
  ids, paddings = (x[:1] for x in _Batch(6)[0])
  expected = layer.FProp(theta(), ids, paddings)
  np.testing.assert_allclose(stack.Predict(ids, paddings), expected, atol=1e-12)


def testStagesPerDeviceThatContradictACustomScheduleAreRefused():
  schedule = schedules.Schedule.FromText(_V, name='v')
  assert _Stack(schedule, 'stage', 4, 2, 2).num_devices == 2
  with pytest.raises(
    ValueError, match=naming.Naming("'v'", 'has num_devices 2', 'num_devices 1 is')
  ):
    _Stack(schedule, 'stage', 4, 2, 4)


def testAScheduleWhosePlacementDependsOnTheBatchIsRefused(monkeypatch):
  """The placement depends on the number of micro-batches."""

  def Moving(num_stages, num_micro_batches, num_devices):
    schedule = schedules.Get('gpipe', num_stages, num_micro_batches, num_devices)
    step = 1 if num_micro_batches > 1 else -1
    return dataclasses.replace(
      schedule,
      name='moving',
      actions=schedule.actions[::step],
      stage_to_device=schedule.stage_to_device[::step],
    )

  monkeypatch.setitem(schedules._GENERATORS, 'moving', Moving)
  stack = _Stack('moving', 'stage', 2, 2)
  stack.Place(stacks.Devices(), *stacks.Specs(_Batch(7)[0]), loss_fn=tokens.Xent)
  names = naming.Naming("'moving'", 'devices [1, 0]', '1 micro-batches', 'on [0, 1]')
  with pytest.raises(ValueError, match=names):
    stacks.RunStep(stack.engine, *_MicroBatches(stack, 1), tf.constant(1, tf.int64))


# ---- refused -----------------------------------------------------------------------------


def testForwardOnlyCannotTrain():
  for schedule in ('forward_only', schedules.Get('forward_only', 2, 4)):
    with pytest.raises(ValueError, match=naming.Naming('stack', "'forward_only'", 'backward')):
      _Stack(schedule, 'stage', 2, 4)


def testInterleavingNamesTheNearestNumberOfMicroBatches():
  with pytest.raises(
    ValueError, match=naming.Naming("'interleaved_1f1b'", 'multiple of 2', 'got 3', '2 or 4')
  ):
    _Stack('interleaved_1f1b', 'stage', 4, 3, 2)


@pytest.mark.parametrize(
  'schedule, num_stages, stages_per_device, names',
  [
    ('gpipe', 4, 2, ['one stage', '4 stages', '2 devices']),
    ('1f1b', 2, 2, ['one stage', '2 stages', '1 devices']),
    ('looped_bfs', 3, 2, ['at least 1', '3 stages', '2 devices']),
    ('interleaved_1f1b', 2, 1, ['at least 2', '2 stages', '2 devices']),
  ],
)
def testUnsuitableStagesPerDeviceAreRefused(schedule, num_stages, stages_per_device, names):
  with pytest.raises(ValueError, match=naming.Naming(repr(schedule), *names)):
    _Stack(schedule, 'stage', num_stages, 4, stages_per_device)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
