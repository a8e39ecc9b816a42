# SPDX-License-Identifier: Apache-2.0
"""The planner finds the fastest plan that fits, as an exhaustive search does."""

import dataclasses
import fractions
import math
import random
import sys
import types

import pytest

from lingvo_gpipe.pipeline.cost import stage_memory
from lingvo_gpipe.pipeline.schedule import schedules
from lingvo_gpipe.planner import (
  device_description,
  model_costs,
  plan_choice,
  plan_schedules,
  plan_times,
  planner,
)
from tests import naming
from tools.planning import experiment

_LAYER = model_costs.LayerWeights(num_bytes=4000, gradient_bytes=4000, trained_bytes=4000)
_SAMPLE = model_costs.LayerSample(flops=1e6, inputs=1000, outputs=1000, inner=5000)


def _Devices(num_devices=4, **changes):
  values = {
    'num_devices': num_devices,
    'devices_per_host': 4,
    'memory_bytes': 1e9,
    'flops_per_second': 1e9,
    'within_host': {'bandwidth': 1e9},
    'between_hosts': {'bandwidth': 1e9},
    **changes,
  }
  return device_description.FromMapping(values)


def _Even(num_layers=8, **changes):
  """Returns equal layers; each takes 1 ms for the forward of an example."""
  sample = dataclasses.replace(_SAMPLE, **changes)
  return model_costs.ModelCosts([_LAYER] * num_layers, {1: [sample] * num_layers})


def _RandomCosts(rng, num_layers):
  """Returns unequal layers, some of them not trained, with one skip connection."""
  weights, samples = [], []
  for i in range(num_layers):
    num_bytes = rng.randrange(1, 9) * 1000
    is_trained = rng.random() < (0.5 if i < 2 else 0.8)
    trained = num_bytes * is_trained
    skips_out = ('skip',) if i == 1 else ()
    weights.append(model_costs.LayerWeights(num_bytes, trained, trained, skips_out))
    samples.append(
      model_costs.LayerSample(
        flops=rng.choice([0, 1e5, 1e6, 4e6]),
        inputs=rng.randrange(1, 4000),
        outputs=1000,
        inner=rng.randrange(9000),
        skips_in={'skip': 700} if i == 4 else {},
      )
    )
  return model_costs.ModelCosts(weights, {1: samples}, slots_per_weight=rng.choice([0, 1, 2]))


def _RandomDevices(rng):
  return _Devices(
    rng.choice([1, 3, 4]),
    devices_per_host=rng.choice([1, 2, 4]),
    memory_bytes=rng.choice([3e4, 6e4, 1e5, 1e6]),
    memory_bandwidth=rng.choice([1e7, 1e12]),
    within_host={'bandwidth': rng.choice([1e6, 1e8]), 'latency': rng.choice([0, 1e-3])},
    between_hosts={'bandwidth': rng.choice([3e5, 1e7]), 'latency': rng.choice([0, 4e-3])},
    all_reduce=rng.choice(['collective', 'send']),
    slowdown=rng.choice([1, 1.3]),
    transfers=rng.choice(['overlap', 'occupy']),
    **rng.choice([{}, {'to_host': {'bandwidth': rng.choice([1e6, 1e9]), 'latency': 1e-4}}]),
  )


_SPACE = plan_choice.Space(
  schedules=(
    *(*plan_choice.ONE_STAGE_A_DEVICE, 'fused_fill_drain'),
    *(*plan_choice.LOOPED, *plan_choice.IN_A_V),
  ),
  stages_per_device=(1, 2),
)


# Few choices, but all kinds of devices, and best plans of several schedules and policies, on one to
# three devices for a replica, with activations on the host, and none.
@pytest.mark.parametrize('seed', [4, 5, 6, 11, 13, 24, 28, 30])
def testFindsThePlanOfAnExhaustiveSearch(seed):
  rng = random.Random(seed)
  costs, devices = _RandomCosts(rng, 6), _RandomDevices(rng)
  batch = rng.choice([1, 4, 6])
  plans = planner.Planner(costs, devices, batch, _SPACE)
  result = plans.Search()
  every = [
    planner.Planner(costs, devices, batch, _SPACE).Predict(choice)
    for grid in plan_choice.Grids(plans.space, 6, devices.num_devices, batch)
    for choice in plan_choice.Choices(plans.space, 6, grid, batch)
  ]
  assert len(every) == result.num_choices
  fitting = [p for p in every if p.peak_bytes <= devices.memory_bytes]
  if not fitting:
    assert result.best is None and result.rows == ()
    assert result.least_bytes == min(p.peak_bytes for p in every) > devices.memory_bytes
    return
  least = min(p.seconds for p in fitting)
  assert result.best.seconds == pytest.approx(least, rel=2e-6)
  assert result.rows[0] == result.best and result.num_simulated < len(every)
  for p in every:
    # A bound is not above the simulated time but for rounding to ticks, and the parts add up to it.
    assert result.by_grid[p.choice.grid].bound <= p.seconds * (1 + 1e-8) or p not in fitting
    assert p.work + p.bubble + p.communication + p.update == pytest.approx(p.seconds)


@pytest.mark.parametrize('seed', range(3))
def testMoreOfAnythingIsNeverSlower(seed):
  rng = random.Random(100 + seed)
  costs = _RandomCosts(rng, 6)
  devices = _RandomDevices(rng)

  def Seconds(**changes):
    changed = dataclasses.replace(devices, **changes)
    best = planner.Planner(costs, changed, 6, _SPACE).Search(1).best
    return math.inf if best is None else best.seconds * (1 - 3e-6)

  now = planner.Planner(costs, devices, 6, _SPACE).Search(1).best
  now = math.inf if now is None else now.seconds
  fast = device_description.Link(1e12, 0.0)
  assert Seconds(memory_bytes=2 * devices.memory_bytes) <= now
  assert Seconds(within_host=fast, between_hosts=fast) <= now
  assert Seconds(flops_per_second=2 * devices.flops_per_second) <= now


@pytest.mark.parametrize('schedule', [*_SPACE.schedules])
@pytest.mark.parametrize('policy', plan_choice.POLICIES)
def testLongSchedulesAreExtrapolated(schedule, policy, monkeypatch):
  v = 2 if schedule in (*plan_choice.LOOPED, *plan_choice.IN_A_V) else 1
  costs = _RandomCosts(random.Random(5), 6)
  devices = _Devices(3, memory_bandwidth=1e12)
  choice = plan_choice.Choice(1, 3, v, 48, 1, schedule, policy)
  predictions = []
  for limit in (0, 10**9):
    monkeypatch.setattr(plan_schedules, '_MAX_ACTIONS', limit)
    predictions.append(planner.Planner(costs, devices, 48).Predict(choice))
  extrapolated, whole = predictions
  assert extrapolated.memory == whole.memory
  assert extrapolated.seconds == pytest.approx(whole.seconds, rel=0.01)
  assert extrapolated.seconds == pytest.approx(whole.seconds, rel=1e-9) or schedule not in (
    'gpipe', 'fused_fill_drain',
  )  # fmt: skip


@pytest.mark.parametrize('bandwidth', [3e5, 1e7])
@pytest.mark.parametrize('schedule', ['gpipe', '1f1b', 'zb_h1', 'interleaved_1f1b', 'v_half'])
def testLongSchedulesWithOffloadAreExtrapolated(schedule, bandwidth, monkeypatch):
  v = 2 if schedule in (*plan_choice.LOOPED, *plan_choice.IN_A_V) else 1
  costs = _RandomCosts(random.Random(5), 6)
  devices = _Devices(3, to_host={'bandwidth': bandwidth})
  for policy in ('none', 'stage'):
    choice = plan_choice.Choice(1, 3, v, 60, 1, schedule, policy, offload=1.0)
    predictions = []
    for limit in (0, 10**9):
      monkeypatch.setattr(plan_schedules, '_MAX_ACTIONS', limit)
      predictions.append(planner.Planner(costs, devices, 60).Predict(choice))
    extrapolated, whole = predictions
    assert extrapolated.memory == whole.memory
    assert extrapolated.seconds == pytest.approx(whole.seconds, rel=0.01)


def testMemoryIsThePredictionOfStageMemory():
  costs, choice = _Even(), plan_choice.Choice(1, 4, 1, 8, 1, '1f1b', 'stage')
  prediction = planner.Planner(costs, _Devices(), 8).Predict(choice)
  state = 2 * 4 * 4000  # Two layers: weight, gradient, two slots.
  # K - k stage inputs and, within B, the inner activations of the stage.
  expected = [state + held * 1000 + 1000 + 2 * 5000 for held in (4, 3, 2, 1)]
  assert prediction.ends == (2, 4, 6, 8) and list(prediction.memory) == expected
  by_hand = stage_memory.StageMemory(costs.Bytes(1), schedules.Get('1f1b', 4, 8), 'stage')
  assert prediction.memory[0] == by_hand.State(0, 2) + by_hand.Activations(0, 0, 2)


# Choices that are obvious to people.


def testAModelThatFitsIsReplicatedIfLinksAreFast():
  best = planner.Planner(_Even(), _Devices(), 4).Search().best
  assert best.choice.grid == (4, 1) and best.policies == ('none',)
  # One example per device; 8 layers of 3 ms, but the first layer has no gradient of its input.
  assert best.seconds == pytest.approx(23e-3, rel=3e-3)


def testAModelThatDoesNotFitIsCut():
  # 40 of 128 kB of state fit into a device.
  best = planner.Planner(_Even(), _Devices(memory_bytes=4e4 + 9e3), 8).Search().best
  assert best.choice.grid == (1, 4)


def testActivationsGoToTheHostIfTheyDoNotFit():
  """Without recomputation: a fast link costs no time, and a slow one more than to recompute."""
  space = plan_choice.Space(schedules=['1f1b'], num_replicas=[1], num_devices=[4])

  def Best(**changes):
    # Beside its state the first stage has room for three micro-batches of 12 kB, not for four.
    devices = _Devices(memory_bytes=3.2e4 + 4e4, **changes)
    return planner.Planner(_Even(), devices, 32, space).Search().best

  plain, fast = Best(), Best(to_host={'bandwidth': 1e8})
  assert plain.choice.offload == 0 and fast.choice.offload == 1
  assert fast.seconds < plain.seconds
  slow = Best(to_host={'bandwidth': 1e4})
  assert slow.choice == plain.choice
  with pytest.raises(ValueError, match='to_host'):
    planner.Planner(_Even(), _Devices(), 32, space).Predict(fast.choice)


def testSlotsAreShardedIfThatSavesEnoughMemory():
  devices = _Devices(2, memory_bytes=8 * 3 * 4000 + 8 * 6000)
  best = planner.Planner(_Even(), devices, 8, plan_choice.Space(num_devices=[1])).Search().best
  assert best.choice.grid == (2, 1) and best.choice.shard_slots


@pytest.mark.parametrize('seed', range(20))
def testShardedSlotsOfWholeWeightsAreAtMostThePrediction(seed):
  rng = random.Random(seed)
  sizes = [rng.choice([40, 400, rng.randrange(9000)]) for _ in range(6)]
  layers = [model_costs.LayerWeights(n, n, n) for n in sizes]
  costs = model_costs.ModelCosts(layers, {1: [_SAMPLE] * 6})
  for r in (2, 3, 8):
    memory = stage_memory.StageMemory(costs.Bytes(1, r), schedules.Get('gpipe', 1, 1), 'stage')
    owned = [0] * r
    for size in sizes:  # Any order, as with several stages on a device.
      owned[owned.index(min(owned))] += size
    state = memory.State(0, 6)
    # 6 for rounding.
    assert 2 * sum(sizes) + 2 * max(owned) <= state + 6 <= 4 * sum(sizes) + 12


def testGradientsAreNotSentToFrozenStages():
  frozen = dataclasses.replace(_LAYER, gradient_bytes=0, trained_bytes=0)
  costs = model_costs.ModelCosts([frozen] * 2 + [_LAYER] * 2, {1: [_SAMPLE] * 4})
  slow = _Devices(2, within_host={'bandwidth': 1e9, 'latency': 0.1})
  space = plan_choice.Space(
    remat_policies=['stage'], num_replicas=[1], num_devices=[2], stages_per_device=[1]
  )
  result = planner.Planner(costs, slow, 1, space).Search()
  assert result.best.ends[0] >= 2 and 0.1 < result.best.seconds < 0.2
  assert result.by_grid[1, 2].bound <= result.best.seconds * (1 + 1e-9)


def testSlowLinksBetweenHostsOnlyCarryGradients():
  space = plan_choice.Space(schedules=['1f1b'], stages_per_device=[1], num_replicas=[1, 2, 8])
  fast = planner.Planner(_Even(), _Devices(8), 16, space).Search().best
  assert fast.choice.grid == (8, 1)
  slow = _Devices(8, between_hosts={'bandwidth': 5e5})
  best = planner.Planner(_Even(), slow, 16, space).Search().best
  # Each device has fewer gradients to send, and no activation crosses hosts.
  assert best.choice.grid == (2, 4)


def testRecomputationIsOnlyChosenToSaveMemory():
  plenty = planner.Planner(_Even(), _Devices(1), 16).Search().best
  assert plenty.policies == ('none',)
  little = planner.Planner(_Even(), _Devices(1, memory_bytes=1.3e5 + 4.9e4), 16)
  assert little.Search().best.choice.num_micro_batches > 1


def testThePolicyOfEachStageIsPredicted():
  options = (
    stage_memory.Option(None, 0, fractions.Fraction(1), 5000),
    stage_memory.Option(frozenset(), 4000, fractions.Fraction(0), 0),
  )
  sample = dataclasses.replace(_SAMPLE, options=options)
  costs = model_costs.ModelCosts([_LAYER] * 8, {1: [sample] * 8})
  space = plan_choice.Space(schedules=['1f1b'], num_devices=[2], num_replicas=[1])
  seconds = []
  for memory_bytes in (9e4, 1e5, 1.1e5, 1e6):
    best = planner.Planner(costs, _Devices(2, memory_bytes=memory_bytes), 8, space).Search().best
    assert best.peak_bytes <= best.memory_limit == memory_bytes
    seconds.append(best.seconds)
    values = experiment.Experiment.Overrides(types.SimpleNamespace(_is_batch_chosen=False), best)
    if {*best.policies} == {'none'}:
      assert 'remat_policy:none' in values and 'memory_limit' not in values
    else:
      assert f'remat_policy:auto;task.stack.memory_limit:{int(memory_bytes)};' in values
  assert seconds == sorted(seconds, reverse=True) and {*best.policies} == {'none'}
  assert len(set(seconds)) > 2


def testNothingFits():
  result = planner.Planner(_Even(), _Devices(memory_bytes=100), 8).Search()
  assert result.best is None and result.least_bytes > 100
  assert all(entry.best is None for entry in result.by_grid.values())


def testNeighboursDifferInOneRespect():
  plans = planner.Planner(_Even(), _Devices(), 16)
  choice = plan_choice.Choice(2, 2, 1, 4, 2, '1f1b', 'auto')
  near = plans.Neighbours(choice)
  assert {c.schedule for c in near} == set(plan_choice.Space().schedules)
  assert {c.num_micro_batches for c in near} == {2, 4, 8}
  assert choice not in near and all(c.grid == (2, 2) for c in near)


def testGradientsOverReplicas():
  devices = _Devices(16, within_host={'bandwidth': 1e3}, between_hosts={'bandwidth': 10})

  def Seconds(r, k=1, **changes):
    options = {'shard_slots': False, **changes}
    choice = plan_choice.Choice(r, k, 1, 1, 1, 'gpipe', 'none', **options)
    return plan_times.ReduceSeconds(devices, choice, 1000)

  assert Seconds(1) == (0, 0)
  assert Seconds(4) == (pytest.approx(2 * 3 / 4), 0)
  assert Seconds(4, shard_slots=True) == (pytest.approx(3 / 4), pytest.approx(3 / 4))
  assert Seconds(8) == (pytest.approx(100 * 2 * 7 / 8), 0)  # Beyond one host.
  devices = dataclasses.replace(devices, all_reduce='send')
  assert Seconds(4) == (pytest.approx(2 * 3 / 4), 0)


@pytest.mark.parametrize('batch', [1, 2, 7, 12, 64])
def testMicroBatchesCoverTheBatch(batch):
  pairs = plan_choice.MicroBatches(batch)
  assert (1, batch) in pairs and (batch, 1) in pairs
  for m, size in pairs:
    assert (size - 1) * m < batch <= size * m and m <= batch


def testCostsAreLinearInTheSize():
  rows = {b: [dataclasses.replace(_SAMPLE, flops=10 + 2 * b, skips_in={'a': b})] for b in (1, 4)}
  costs = model_costs.ModelCosts([_LAYER], rows)
  for b in (1, 2, 4, 9):
    assert costs.At(b)[0].flops == pytest.approx(10 + 2 * b)
    assert costs.At(b)[0].skips_in == {'a': pytest.approx(b)}
  proportional = model_costs.ModelCosts([_LAYER], {2: [_SAMPLE]})
  assert proportional.At(6)[0].inner == pytest.approx(3 * _SAMPLE.inner)


def testMeasuredSecondsReplaceFlops():
  rows = {1: [dataclasses.replace(_SAMPLE, seconds=(1e-6, 3e-6))] * 2}
  first, second = model_costs.ModelCosts([_LAYER] * 2, rows).Work(2, _Devices())
  # Two examples; the first layer does not compute the gradient of its input.
  assert (first.forward, first.input_gradient, first.weight_gradient) == (2e6, 0, 6e6)
  assert (second.forward, second.input_gradient, second.weight_gradient) == (2e6, 3e6, 3e6)


def testFewerDevicesIfTheySlowEachOtherDown():
  space = plan_choice.Space(num_devices=[1])
  free, shared = (
    planner.Planner(_Even(), _Devices(4, slowdown=s), 4, space).Search().best for s in (1, 4.5)
  )
  assert free.choice.grid == (4, 1) and shared.choice.grid == (1, 1)
  plans = planner.Planner(_Even(), _Devices(4, slowdown=4.5), 4, space)
  all_four = plans.Predict(free.choice)
  assert all_four.work == pytest.approx(4.5 * free.work)


def testAMeasuredUpdateReplacesBytes():
  layers = [dataclasses.replace(_LAYER, update_seconds=s) for s in (None, 0.25, 0.5)]
  costs = model_costs.ModelCosts(layers, {1: [_SAMPLE] * 3})
  devices = _Devices(memory_bandwidth=1e6)
  # Weight, gradient and two slots of 4000 bytes are read and written.
  of_bytes = 8 * 4000 / 1e6
  assert costs.UpdateSeconds(costs.weights, 1, devices) == pytest.approx(of_bytes + 0.75)
  assert costs.UpdateSeconds(costs.weights[1:], 3, devices) == pytest.approx(0.25)


def testALayerMayBeLimitedByMemoryBandwidth():
  devices = _Devices(memory_bandwidth=1e6)
  first, second = _Even(2, flops=1.0).Work(1, devices)
  touched = 1000 + 1000 + 2 * 5000
  assert first.forward == second.input_gradient == (touched + 4000) * 10**6
  assert first.weight_gradient == (touched + 2 * 4000) * 10**6


@pytest.mark.parametrize(
  'batch, space, names',
  [
    (0, None, ('global_batch', 0)),
    (4, plan_choice.Space(num_devices=[99]), ('4 devices', '8 layers', '4 examples')),
    (4, plan_choice.Space(schedules=()), ('4 devices', '8 layers', '4 examples')),
  ],
)
def testBatchesAndSpacesWithoutAPlanAreRefused(batch, space, names):
  with pytest.raises(ValueError, match=naming.Naming(*names)):
    planner.Planner(_Even(), _Devices(), batch, space).Search()


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
