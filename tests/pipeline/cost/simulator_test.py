# SPDX-License-Identifier: Apache-2.0
"""The simulator against the papers' formulas and tables: GPipe, Megatron-LM and zero bubble.

`zb_2p` is ZB-H2 of the zero-bubble paper. Its searched orders, ZB-1p and ZB-2p, are not reproduced.
"""

import itertools
import sys

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from lingvo_gpipe.pipeline.cost import partitioner, simulator
from lingvo_gpipe.pipeline.schedule import rematerialisation, schedules
from tests import naming
from tests.toys import simulations

Costs, Simulate, Sizes = simulator.Costs, simulator.Simulate, simulator.ActivationSizes
Kind = schedules.Kind
_SETTINGS = hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
_TIMES = st.integers(1, 64).map(lambda n: n / 8)  # Sums of these are exact.
_SEVERAL_STAGES_A_DEVICE = ('interleaved_1f1b', 'looped_bfs')


def _Get(name, k, m, v=2):
  if name in schedules.IN_ROUNDS:
    m = -(-m // k) * k
  return simulations.Get(name, k, m, v)


# Formulas and tables of the papers.


@pytest.mark.parametrize(
  'k, m, waits, early, early_except_last',
  [
    (2, 32, 0.030, 0.023, 0.015),
    (4, 4, 0.429, 0.360, 0.333),
    (4, 16, 0.158, 0.123, 0.111),
    (8, 32, 0.179, 0.141, 0.135),
  ],
)
def testTableOfRematerialisation(k, m, waits, early, early_except_last):
  schedule = schedules.Get('gpipe', k, m)

  def Share(**options):
    return round(1 - 4 * m / Simulate(schedule, Costs(1), **options).makespan, 3)

  assert round(schedules.BubbleBound(k, m), 3) == waits == Share()
  assert Share(recompute_early=True) == early
  assert Share(recompute_early=True, remat_policy='except_last') == early_except_last


@pytest.mark.parametrize(
  'name, makespan',
  [
    ('gpipe', 33),
    ('1f1b', 33),
    ('interleaved_1f1b', 28.5),
    ('zb_h1', 27),
    ('zb_2p', 27),
    ('interleaved_zb', 25.5),
    ('zb_v', 25.5),
    ('dualpipe_v', 25.5),
    ('v_half', 27.5),
    ('v_min', 29.5),
  ],
)
def testGoldenMakespans(name, makespan):
  schedule = _Get(name, 4, 8)
  result = Simulate(schedule, Costs(4 / schedule.num_stages), remat_policy='none')
  assert result.makespan == makespan
  assert result.busy == (24,) * 4
  assert result.idle == (makespan - 24,) * 4
  assert result.overall_bubble == pytest.approx(1 - 24 / makespan)
  assert any(result.gaps) == (name not in ('zb_2p', 'zb_v'))


@_SETTINGS
@hypothesis.given(st.integers(1, 5), st.integers(1, 6), st.integers(2, 3), _TIMES, _TIMES)
def testBubbleFormulas(p, m, v, t_f, t_b):
  costs = Costs(t_f, backward=t_b)
  for name in ('gpipe', '1f1b', 'fused_fill_drain', '1f1b_fused'):
    result = Simulate(_Get(name, p, m), costs, remat_policy='none')
    assert result.idle == ((p - 1) * (t_f + t_b),) * p
    assert result.bubble == pytest.approx([schedules.BubbleBound(p, m)] * p)
  for name in _SEVERAL_STAGES_A_DEVICE:
    schedule = _Get(name, p, m * p, v)
    result = Simulate(schedule, Costs(t_f / v, backward=t_b / v), remat_policy='none')
    assert result.idle == pytest.approx([(p - 1) * (t_f + t_b) / v] * p)
    assert result.overall_bubble == pytest.approx((p - 1) / (v * m * p + p - 1))


@_SETTINGS
@hypothesis.given(st.integers(1, 5), st.integers(0, 5), _TIMES)
def testZeroBubbleFormulas(p, more, t):
  t_f, t_i, t_w = t, t * 1.25, t * 0.75
  costs = Costs(t_f, input_gradient=t_i, weight_gradient=t_w)
  h1 = Simulate(schedules.Get('zb_h1', p, p + more), costs, remat_policy='none')
  assert h1.idle == pytest.approx([(p - 1) * (t_f + t_i - t_w)] * p)
  h2 = Simulate(_Get('zb_2p', p, 2 * p - 1 + more), costs, remat_policy='none')
  assert max(h2.gaps) == pytest.approx((p - 1) * (t_f + t_i - 2 * t_w))
  equal = Costs(t / 2, input_gradient=t / 2, weight_gradient=t / 2)
  v = Simulate(_Get('zb_v', p, 2 * p - 1 + more), equal, remat_policy='none')
  assert not any(v.gaps)


def testZeroBubbleFigures():
  h1, h2, v, f1b1 = (_Get(name, 4, 16) for name in ('zb_h1', 'zb_2p', 'zb_v', '1f1b'))

  def Worst(schedule, attribute, *times):
    f, i, w = (t * 4 / schedule.num_stages for t in times)
    costs = Costs(f, input_gradient=i, weight_gradient=w)
    return max(getattr(Simulate(schedule, costs, remat_policy='none'), attribute))

  unequal = (1, 1.2, 0.8)
  assert Worst(h1, 'idle', *unequal) == pytest.approx(4.2)
  assert Worst(h2, 'gaps', *unequal) == pytest.approx(1.8)
  assert Worst(v, 'gaps', *unequal) == pytest.approx(1.2)
  assert Worst(f1b1, 'idle', *unequal) == pytest.approx(9)
  # With a barrier at the end of the step ZB-H2 is not faster than ZB-H1.
  assert [Worst(s, 'idle', 1, 1, 1) for s in (h1, h2, v, f1b1)] == [3, 3, 1.5, 9]
  assert [Worst(s, 'gaps', 1, 1, 1) for s in (h2, v)] == [0, 0]


@_SETTINGS
@hypothesis.given(st.integers(1, 6), st.integers(1, 16), _TIMES, _TIMES)
def testALongWarmUpOf1F1BNeedsMemoryAndSavesNoTime(p, m, t_f, t_b):
  """PiPPy's early 1F1B, with a warm-up of 2(p - 1 - s) forwards, as a custom schedule."""
  rows = []
  for s in range(p):
    warm_up = min(m, 2 * (p - 1 - s))
    row = [f'{s}F{j}' for j in range(warm_up)]
    for j in range(m - warm_up):
      row += [f'{s}F{warm_up + j}', f'{s}B{j}']
    rows.append(','.join([*row, *(f'{s}B{j}' for j in range(m - warm_up, m))]))
  schedule = schedules.Schedule.FromText('\n'.join(rows))
  result = Simulate(schedule, Costs(t_f, backward=t_b), remat_policy='none')
  assert result.idle == ((p - 1) * (t_f + t_b),) * p
  assert result.peak_activations == tuple(min(m, 2 * (p - 1 - s) + 1) for s in range(p))


@pytest.mark.parametrize(
  'name, sends', [('1f1b', 48), ('zb_h1', 48), ('zb_v', 96), ('interleaved_1f1b', 112)]
)
def testNumberOfForwardTransfers(name, sends):
  """With v chunks per device there are (v p - 1) / (p - 1) times as many as with one."""
  schedule = _Get(name, 4, 16)
  devices = schedule.stage_to_device
  assert sends == 16 * sum(a != b for a, b in itertools.pairwise(devices))


def testRecomputationShrinksTheGainOfZeroBubble():
  def Gain(policy):
    times = [
      Simulate(_Get(n, 4, 8), Costs(1), remat_policy=policy).makespan for n in ('1f1b', 'zb_h1')
    ]
    return 1 - times[1] / times[0]

  assert 0 < Gain('stage') < Gain('none')


# The model against definitions.


@_SETTINGS
@hypothesis.given(
  st.sampled_from(schedules.Names()), st.integers(1, 5), st.integers(1, 9), st.tuples(*[_TIMES] * 5)
)
def testAgreesWithTimeline(name, k, m, times):
  schedule = _Get(name, k, m)
  f, i, w, b, v = times
  costs = Costs(f, input_gradient=i, weight_gradient=w, backward=b, fused=v)
  result = Simulate(schedule, costs, remat_policy='none')
  kinds = (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT, Kind.BACKWARD)
  timeline = schedule.Timeline({**dict(zip(kinds, times, strict=False)), Kind.FORWARD_BACKWARD: v})
  spans = tuple(tuple((s.start, s.end, s.action) for s in row) for row in result.timeline)
  assert spans == timeline
  assert result.makespan == max(row[-1][1] for row in timeline)
  assert result.peak_activations == schedule.PeakActivations()


@_SETTINGS
@hypothesis.given(
  st.sampled_from(schedules.Names()),
  st.integers(1, 4),
  st.integers(1, 6),
  st.sampled_from(rematerialisation.POLICIES),
  st.booleans(),
  st.data(),
)
def testAgreesWithTheLongestPath(name, k, m, policy, early, data):
  schedule = _Get(name, k, m)
  early = early and policy != 'layer'
  per_stage = st.lists(_TIMES, min_size=schedule.num_stages, max_size=schedule.num_stages)
  costs = Costs(*data.draw(st.tuples(*[per_stage] * 6)), latency=data.draw(_TIMES))
  result = Simulate(schedule, costs, remat_policy=policy, recompute_early=early)
  fields = dict(F='forward', I='input_gradient', W='weight_gradient', B='backward', V='fused')
  last = schedule.num_micro_batches - 1
  ends = {}

  def End(action):
    if action in ends:
      return ends[action]
    device = schedule.stage_to_device[action.stage]
    row = schedule.actions[device]
    i = row.index(action)
    free = End(row[i - 1]) if i else 0
    arrivals = [0]
    for n in schedule.Dependencies(action):
      away = schedule.stage_to_device[n.stage] != device
      arrivals.append(End(n) + (costs.latency if away else 0))
    again = 0
    if action.kind.value in 'BI' and policy != 'none':
      if not (policy == 'except_last' and action.micro_batch == last):
        again = costs.recompute[action.stage]
    start = max(free + again, *arrivals) if early else max(free, *arrivals) + again
    ends[action] = start + getattr(costs, fields[action.kind.value])[action.stage]
    return ends[action]

  work = [0] * schedule.num_devices
  for device, row in enumerate(result.timeline):
    for before, after in itertools.pairwise(row):
      assert before.end <= after.start
    for s in row:
      assert s.device == device
      work[device] += s.end - s.start
      if s.part == 'compute':
        assert s.end == End(s.action)
  assert result.busy == tuple(work)
  assert result.makespan == max(ends.values())
  waiting = Simulate(schedule, costs, remat_policy=policy)
  assert result.makespan <= waiting.makespan and result.busy == waiting.busy


def testLinkSendsOneResultAfterTheOther():
  # Transfers of 2 units hold up forwards of 1; the last arrives 0.5 after the link is free.
  result = Simulate(
    schedules.Get('forward_only', 2, 3), Costs(1, transfer=2, latency=0.5), remat_policy='none'
  )
  assert [s.start for s in result.timeline[1]] == [3.5, 5.5, 7.5]
  assert result.makespan == 8.5
  # A gradient uses the opposite link, which is free.
  result = Simulate(
    schedules.Get('gpipe', 2, 1), Costs(1, transfer=2, gradient_transfer=3), remat_policy='none'
  )
  assert result.makespan == 1 + 2 + 1 + 2 + 3 + 2
  # Neighbours on one device need no transfer.
  result = Simulate(schedules.Get('looped_bfs', 2, 3, 1), Costs(1, transfer=[99], latency=99))
  assert result.idle == (0,)


def testTransfersThatOccupyDevices():
  """The sender is busy after each forward, and the receiver before it."""
  costs = Costs(1, transfer=2, latency=0.5, transfer_occupies_devices=True)
  result = Simulate(schedules.Get('forward_only', 2, 2), costs, remat_policy='none')
  spans = [[(s.start, s.end, s.part) for s in row] for row in result.timeline]
  assert spans[0] == [(0, 1, 'compute'), (1, 3, 'transfer'), (3, 4, 'compute'), (4, 6, 'transfer')]
  assert spans[1] == [
    (1.5, 3.5, 'transfer'),
    (3.5, 4.5, 'compute'),
    (4.5, 6.5, 'transfer'),
    (6.5, 7.5, 'compute'),
  ]
  assert result.busy == (6, 6)
  # A recomputation does not wait for the gradient if it may be early.
  for early, parts in ((True, ['recompute', 'transfer']), (False, ['transfer', 'recompute'])):
    costs = Costs(1, transfer=2, transfer_occupies_devices=True)
    result = Simulate(schedules.Get('gpipe', 2, 1), costs, recompute_early=early)
    assert [s.part for s in result.timeline[0]] == ['compute', 'transfer', *parts, 'compute']


@pytest.mark.parametrize('k, m', [(2, 4), (4, 8)])
def testInterleavingLosesMoreByTransfersThatOccupyDevices(k, m):
  def Loss(name, v):
    costs = {'transfer': 0.25, 'transfer_occupies_devices': True}
    schedule = schedules.Get(name, k * v, m, k)
    alone = Simulate(schedule, Costs(1 / v)).makespan
    return Simulate(schedule, Costs(1 / v, **costs)).makespan - alone

  assert Loss('interleaved_1f1b', 4) > Loss('interleaved_1f1b', 2) > Loss('1f1b', 1) > 0


@_SETTINGS
@hypothesis.given(st.sampled_from(schedules.Names()), st.integers(1, 4), st.integers(1, 6))
def testOccupiedDevicesAreBusyForEachTransfer(name, k, m):
  schedule = _Get(name, k, m)
  free = Simulate(schedule, Costs(1, transfer=0.25))
  occupied = Simulate(schedule, Costs(1, transfer=0.25, transfer_occupies_devices=True))
  assert occupied.makespan >= free.makespan
  spans = [s for row in occupied.timeline for s in row if s.part == 'transfer']
  sent = sum(s.end - s.start for s in spans)
  assert sum(occupied.busy) == pytest.approx(sum(free.busy) + sent)
  assert len(spans) % 2 == 0  # Each has a sender and a receiver.


def testTransferTimes():
  assert simulator.TransferTimes(6, 2) == 3
  assert simulator.TransferTimes([6, 8], 2) == (3, 4)
  with pytest.raises(ValueError, match=naming.Naming('bandwidth', 'positive', 'got 0')):
    simulator.TransferTimes(6, 0)


@_SETTINGS
@hypothesis.given(st.sampled_from(schedules.Names()), st.integers(1, 4), st.integers(1, 6))
def testTransfersOnlyDelay(name, k, m):
  schedule = _Get(name, k, m)
  free = Simulate(schedule, Costs(1))
  slow = Simulate(schedule, Costs(1, transfer=0.25, latency=0.125))
  assert slow.busy == free.busy
  assert slow.makespan >= free.makespan + (0.375 if k > 1 else 0)


# The costs of actions.


def _Parts(result):
  return {(str(s.action), s.part): s.end - s.start for row in result.timeline for s in row}


@pytest.mark.parametrize('policy', rematerialisation.POLICIES)
def testThePolicyDecidesAboutRecomputation(policy):
  for name in ('gpipe', '1f1b', 'zb_h1', '1f1b_fused', 'fused_fill_drain'):
    schedule = schedules.Get(name, 3, 4)
    parts = _Parts(Simulate(schedule, Costs(1, recompute=[0.5, 1, 2]), remat_policy=policy))
    recomputed = {action: time for (action, part), time in parts.items() if part == 'recompute'}
    expected = {}
    for row in schedule.actions:
      for a in row:
        if a.kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT) and policy != 'none':
          if not (policy == 'except_last' and a.micro_batch == 3):
            expected[str(a)] = [0.5, 1, 2][a.stage]
    assert recomputed == expected


def testDefaultsFollowFromForward():
  result = Simulate(schedules.Get('1f1b_fused', 2, 1), Costs([1, 2]))
  assert _Parts(result) == {
    ('0F0', 'compute'): 1,
    ('0B0', 'recompute'): 1,
    ('0B0', 'compute'): 2,
    ('1V0', 'compute'): 6,
  }
  parts = _Parts(Simulate(schedules.Get('zb_h1', 1, 1), Costs(2, input_gradient=3)))
  assert (parts['0I0', 'compute'], parts['0W0', 'compute']) == (3, 2)
  parts = _Parts(Simulate(schedules.Get('gpipe', 1, 1), Costs(2, input_gradient=3, backward=7)))
  assert parts['0B0', 'compute'] == 7


def testFusedLastStageMayTakeMoreLayers():
  # 7 layers of one unit: 3 x 4 units in the first stage are balanced by 4 x 3 in the fused one.
  ends = partitioner.Partition([1] * 7, 2, last_stage_factor=0.75)
  assert ends == [3, 4 + 3]
  result = Simulate(schedules.Get('1f1b_fused', 2, 8), Costs([3, 4]))
  assert result.busy == (8 * 3 * 4, 8 * 4 * 3)
  plain = Simulate(schedules.Get('1f1b', 2, 8), Costs([3, 4]))
  assert plain.busy == (8 * 3 * 4, 8 * 4 * 4)


def testFusedLastStageSavesTime():
  for k, m in itertools.product((1, 2, 4), (1, 4, 8)):
    gpipe = Simulate(schedules.Get('gpipe', k, m), Costs(1))
    fused = Simulate(schedules.Get('fused_fill_drain', k, m), Costs(1))
    # One device saves all recomputations; several devices start to drain one F, R and B earlier.
    assert gpipe.makespan - fused.makespan == (m if k == 1 else min(m, 4))


def testFrozenLayersCostNothing():
  result = Simulate(schedules.Get('zb_h1', 2, 2), Costs(1, weight_gradient=[0, 1]))
  assert result.busy == (6, 8)
  nothing = Simulate(schedules.Get('gpipe', 2, 2), Costs(0))
  assert (nothing.makespan, nothing.bubble, nothing.overall_bubble) == (0, (0, 0), 0)


# Stages that are not trained, as in the engine.


@pytest.mark.parametrize('name', ['gpipe', '1f1b'])
def testStagesBeforeTheFirstTrainedStageRunForwardOnly(name):
  costs = Costs(1, transfer=1)
  result = Simulate(schedules.Get(name, 3, 4), costs, trained=[False, False, True])
  for row in result.timeline[:2]:
    assert [str(s.action)[1:] for s in row] == ['F0', 'F1', 'F2', 'F3']
  # They never wait: the first stage is done after its forwards.
  assert result.timeline[0][-1].end == 4
  # The last stage: F, R, I and W of each micro-batch.
  assert result.busy == (4, 4, 16)
  assert result.makespan == 4 + 16


@pytest.mark.parametrize('policy', ['stage', 'none'])
def testALaterFrozenStageHasNoWeightGradients(policy):
  again = policy == 'stage'
  whole = Simulate(
    schedules.Get('gpipe', 3, 4), Costs(1), remat_policy=policy, trained=[True, False, True]
  )
  split = Simulate(
    schedules.Get('zb_h1', 3, 4), Costs(1), remat_policy=policy, trained=[True, False, True]
  )
  assert whole.busy == split.busy == (4 * (3 + again), 4 * (2 + again), 4 * (3 + again))
  assert [s.action.kind for s in split.timeline[1] if s.part == 'compute'].count('W') == 0


def testTheFirstTrainedStageHasNoInputGradients():
  """Its W is the whole backward and waits for the gradient of the next stage."""
  result = Simulate(schedules.Get('zb_h1', 2, 1), Costs([1, 10]), trained=[True, True])
  spans = [[(str(s.action), s.part, s.start, s.end) for s in row] for row in result.timeline]
  assert spans == [
    [('0F0', 'compute', 0, 1), ('0W0', 'recompute', 31, 32), ('0W0', 'compute', 32, 34)],
    [
      ('1F0', 'compute', 1, 11),
      ('1I0', 'recompute', 11, 21),
      ('1I0', 'compute', 21, 31),
      ('1W0', 'compute', 31, 41),
    ],
  ]
  early = Simulate(
    schedules.Get('zb_h1', 2, 1), Costs([1, 10]), trained=[True, True], recompute_early=True
  )
  assert [s.start for s in early.timeline[0]] == [0, 1, 31]


def testGradientsAreOnlySentToStagesThatNeedThem():
  schedule = schedules.Get('gpipe', 2, 1)
  costs = Costs(1, transfer=0, gradient_transfer=100)
  assert Simulate(schedule, costs, trained=[False, True]).makespan == 5
  assert Simulate(schedule, costs, trained=[True, True]).makespan == 2 + 3 + 100 + 3


@pytest.mark.parametrize('name', ['gpipe', '1f1b', '1f1b_fused', 'zb_h1'])
def testPeaksOfStagesThatAreNotTrained(name):
  schedule = schedules.Get(name, 3, 5)
  sizes = Sizes(1, 10, layer_inputs=2, largest_layer=3)
  for policy in rematerialisation.POLICIES:
    everything = Simulate(schedule, Costs(1), remat_policy=policy, sizes=sizes)
    some = Simulate(
      schedule, Costs(1), remat_policy=policy, sizes=sizes, trained=[False, True, True]
    )
    assert some.peak_activations == (1, *everything.peak_activations[1:])
    assert some.peak_bytes[0] == 1
    # The middle stage has no I, so the activations that W needs are not held longer.
    assert some.peak_bytes[2] == everything.peak_bytes[2]
  assert schedule.PeakActivations() == Simulate(schedule, Costs(1)).peak_activations


def testASplitBackwardIsNeverLayerByLayer():
  schedule = schedules.Get('zb_h1', 3, 5)
  by_layer, by_stage = (
    Simulate(schedule, Costs(1), remat_policy=policy, sizes=Sizes(1, 10))
    for policy in ('layer', 'stage')
  )
  assert by_layer.timeline == by_stage.timeline
  assert by_layer.peak_bytes == by_stage.peak_bytes


def testFlagsForEveryStage():
  with pytest.raises(ValueError, match=naming.Naming('trained', '2 flags', 'got 3')):
    Simulate(schedules.Get('gpipe', 2, 1), Costs(1), trained=[True] * 3)


def testUpdate():
  schedule = schedules.Get('gpipe', 2, 2)
  result = Simulate(schedule, Costs(1, update=[1, 5]), remat_policy='none')
  # Device 1 is done after 7 of 9 units, and its update ends last.
  assert result.makespan == 12
  assert result.busy == (7, 11)
  assert result.timeline[1][-1] == simulator.Span(1, 7, 12, None, 'update')
  result = Simulate(schedule, Costs(1, update=[1, 5]), remat_policy='none', update_barrier=True)
  assert result.makespan == 14
  assert [row[-1].start for row in result.timeline] == [9, 9]


def testAllReduceOverlapsWithOtherStages():
  schedule = schedules.Get('gpipe', 3, 4)
  without = Simulate(schedule, Costs(1))
  ends = [row[-1].end for row in without.timeline]
  assert ends[0] > ends[1] > ends[2]  # The last stage is done first.
  # Only the all-reduce of the first stage can delay the step.
  hidden = Simulate(schedule, Costs(1, all_reduce=[0, ends[0] - ends[1], ends[0] - ends[2]]))
  assert hidden.makespan == without.makespan
  assert hidden.busy == without.busy
  slower = Simulate(schedule, Costs(1, all_reduce=2))
  assert slower.reduced == tuple(end + 2 for end in ends)
  assert slower.makespan == without.makespan + 2


@pytest.mark.parametrize('barrier', [True, False])
def testUpdatesWaitForTheAllReduce(barrier):
  schedule = schedules.Get('1f1b', 2, 3)
  costs = Costs(1, all_reduce=[1, 9], update=0.5)
  result = Simulate(schedule, costs, update_barrier=barrier)
  starts = [row[-1].start for row in result.timeline]
  assert [row[-1].part for row in result.timeline] == ['update', 'update']
  assert starts == ([max(result.reduced)] * 2 if barrier else list(result.reduced))


def testTheAllReducesOfOneDeviceAreSerial():
  schedule = schedules.Get('looped_bfs', 4, 2, 2)
  plain = Simulate(schedule, Costs(1))
  ends = {a.action.stage: a.end for row in plain.timeline for a in row}
  result = Simulate(schedule, Costs(1, all_reduce=100))
  # Device 0 has stages 0 and 2, and is done with stage 2 first.
  assert ends[2] < ends[0] < ends[2] + 100
  assert result.reduced[0] == ends[2] + 200
  # Frozen stages have no gradients.
  frozen = Simulate(schedule, Costs(1, all_reduce=100), trained=[False, False, True, True])
  assert frozen.reduced[0] == frozen.timeline[0][-1].end + 100


def testEachBoundaryHasALatency():
  schedule = schedules.Get('forward_only', 3, 1)
  result = Simulate(schedule, Costs(1, latency=[2, 5]), remat_policy='none')
  assert [row[0].start for row in result.timeline] == [0, 3, 9]


def testMicroBatchesOfUnequalSize():
  schedule = schedules.Get('1f1b', 2, 3)
  sizes = [1, 1, 0.5]
  costs = Costs(2, transfer=4, latency=1, micro_batch_sizes=sizes)
  result = Simulate(schedule, costs)
  for row in result.timeline:
    for s in row:
      factor = 4 if s.action.kind is Kind.BACKWARD and s.part == 'compute' else 2
      assert s.end - s.start == factor * sizes[s.action.micro_batch]
  assert result.busy == (2.5 * 8,) * 2
  first, _, third = (s for s in result.timeline[1] if s.action.kind is Kind.FORWARD)
  assert first.start == 2 + 4 + 1
  assert result.timeline[0][0].end == 2 and third.end - third.start == 1
  halves = Simulate(schedule, Costs(2, transfer=4, micro_batch_sizes=[0.5] * 3))
  assert halves.makespan == Simulate(schedule, Costs(2, transfer=4)).makespan / 2


# Memory.


@_SETTINGS
@hypothesis.given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 9), st.integers(1, 99))
def testPeakBytesFormulas(k, m, x, inner):
  sizes = Sizes(x, inner, layer_inputs=3 * x, largest_layer=inner / 4)

  def Peaks(name, policy):
    result = Simulate(schedules.Get(name, k, m), Costs(1), remat_policy=policy, sizes=sizes)
    assert result.peak_bytes == result.device_peak_bytes
    return list(result.peak_bytes)

  # GPipe: the inputs of all micro-batches, and one micro-batch in full: O(N + L/K N/M).
  assert Peaks('gpipe', 'stage') == [m * x + inner] * k
  # The last micro-batch is kept in full, but its backward is the first.
  assert Peaks('gpipe', 'except_last') == [m * x + inner] * k
  assert Peaks('gpipe', 'layer') == [m * 4 * x + inner / 4] * k
  assert Peaks('gpipe', 'none') == [m * (x + inner)] * k
  held = [min(m, k - stage) for stage in range(k)]
  assert Peaks('1f1b', 'stage') == [h * x + inner for h in held]
  assert Peaks('1f1b', 'none') == [h * (x + inner) for h in held]
  assert Peaks('1f1b_fused', 'stage') == [h * x + inner for h in held]
  assert Peaks('fused_fill_drain', 'stage') == [m * x + inner] * (k - 1) + [x + inner]
  assert Peaks('forward_only', 'stage') == [x] * k


def testPeakBytesOfExceptLastInForwardOrder():
  # The last micro-batch is held in full while another is recomputed.
  result = Simulate(
    schedules.Get('fused_fill_drain', 2, 3),
    Costs(1),
    remat_policy='except_last',
    sizes=Sizes(1, 10),
  )
  assert result.peak_bytes == (3 + 2 * 10, 11)


def testPeakBytesOfSplitBackward():
  # (p-s) M_B + s M_W, the zero-bubble paper's formula.
  schedule = schedules.Get('zb_h1', 4, 8)
  sizes = Sizes(0, 12, weight_part=5)
  result = Simulate(schedule, Costs(1), remat_policy='none', sizes=sizes)
  assert result.peak_bytes == tuple((4 - s) * 12 + s * 5 for s in range(4))
  result = Simulate(_Get('zb_2p', 4, 8), Costs(1), remat_policy='none', sizes=sizes)
  assert result.peak_bytes == tuple((2 * (4 - s) - 1) * 12 + 2 * s * 5 for s in range(4))
  whole = Simulate(schedule, Costs(1), remat_policy='none', sizes=Sizes(0, 12))
  assert whole.peak_bytes == (48,) * 4
  # Recomputed activations live until W.
  again = Simulate(schedule, Costs(1), sizes=Sizes(1, 12))
  assert again.peak_bytes == tuple((4 - s) * 1 + s * 13 + 12 for s in range(4))


def testPeakBytesOfStagesAndDevices():
  schedule = schedules.Get('looped_bfs', 4, 3, 2)
  result = Simulate(schedule, Costs(1), sizes=Sizes([1, 2, 3, 4], [50, 60, 70, 80]))
  assert result.peak_bytes == (3 + 50, 6 + 60, 9 + 70, 12 + 80)
  assert result.device_peak_bytes == (3 + 9 + 70, 6 + 12 + 80)


def testPeakBytesOfUnequalMicroBatches():
  costs = Costs(1, micro_batch_sizes=[1, 1, 0.5])
  result = Simulate(schedules.Get('gpipe', 1, 3), costs, sizes=Sizes(2, 10))
  # 2.5 inputs with half a recomputation, then 2 with a whole one.
  assert result.peak_bytes == (14,)
  assert Simulate(schedules.Get('gpipe', 1, 3), costs).peak_bytes is None


# Errors and pictures.


@pytest.mark.parametrize(
  'costs, options, words',
  [
    (Costs([1, 2, 3]), {}, ['forward', '2 numbers, one per stage', 'got 3']),
    (Costs(-1), {}, ['forward: stage 0', '-1']),
    (Costs(float('nan')), {}, ['forward', 'nan']),
    (Costs([1, '2']), {}, ['forward: stage 1', "'2'"]),
    (Costs(1, weight_gradient=[1]), {}, ['weight_gradient', 'got 1']),
    (Costs(1, transfer=[1, 2]), {}, ['transfer', '1 numbers, one per boundary']),
    (Costs(1, gradient_transfer=[1, 2]), {}, ['gradient_transfer']),
    (Costs(1, transfer_occupies_devices=True), {'alone': Costs(1)}, ['transfer_occupies_devices']),
    (Costs(1, latency=-1), {}, ['latency']),
    (Costs(1, update=[1]), {}, ['update', '2 numbers, one per device']),
    (Costs(1, micro_batch_sizes=[1]), {}, ['micro_batch_sizes', '3 numbers, one per micro-batch']),
    (Costs(1, micro_batch_sizes=2), {}, ['micro_batch_sizes', 'one number per micro-batch, got 2']),
    (Costs(1), dict(remat_policy='all'), ["'all'", 'stage, except_last, layer, none']),
    (
      Costs(1),
      dict(remat_policy='layer', recompute_early=True),
      ['recompute_early', 'except_last'],
    ),
    (Costs(1), dict(remat_policy='layer', sizes=Sizes(1, 1)), ['sizes.layer_inputs']),
    (Costs(1), dict(sizes=Sizes(1, [1])), ['sizes.inner', 'got 1']),
  ],
)
def testErrorsNameTheArgument(costs, options, words):
  with pytest.raises(ValueError) as e:
    Simulate(schedules.Get('gpipe', 2, 3), costs, **options)
  assert all(word in str(e.value) for word in words), e.value


def testInvalidScheduleIsRefused():
  with pytest.raises(ValueError, match=naming.Naming("'custom'", 'device 1', 'lacks 1B0')):
    Simulate(schedules.Schedule.FromText('0F0,0B0\n1F0'), Costs(1))


def testCostsMayBeArrays():
  schedule = schedules.Get('gpipe', 3, 4)
  result = Simulate(schedule, Costs(np.array([1.0, 2.0, 1.5]), transfer=np.array([1, 2])))
  assert result.makespan == Simulate(schedule, Costs([1, 2, 1.5], transfer=[1, 2])).makespan


def testPicture():
  result = Simulate(schedules.Get('gpipe', 2, 2), Costs(1, update=2), recompute_early=True)
  assert (
    result.Picture(60)
    == """\
time      0              3.25           6.5            9.75            13
device 0  |F0--|F1-|R1--..............|B1------|R0--|B0------|U-------  23.1% idle
device 1  .....|F0-|F1--|R1-|B1-------|R0-|B0-------|U-------.........  23.1% idle
"""
  )


def testPictureNamesStages():
  result = Simulate(schedules.Get('looped_bfs', 4, 1, 2), Costs(1), remat_policy='none')
  assert '|0F0' in result.Picture(120) and '|3B0' in result.Picture(120)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
