# SPDX-License-Identifier: Apache-2.0
"""The planner chooses whether devices share a vocabulary, and predicts what `MakeCut` predicts."""

import dataclasses
import functools
import itertools
import random
import sys

import pytest
import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.layers import embedding, linear
from lingvo_gpipe.pipeline.cost import vocabulary_cut
from lingvo_gpipe.pipeline.cutting import layer_costs
from lingvo_gpipe.pipeline.schedule import shared_vocabulary
from lingvo_gpipe.planner import (
  device_description,
  layer_tables,
  model_costs,
  plan_choice,
  plan_schedules,
  planner,
)
from tests.toys import stacks

_DIM, _TIME, _SIZE, _M, _NUM_LAYERS = 8, 3, 2, 8, 8
_SIMPLE, _SHARED = embedding.SimpleFullSoftmax.Params(), embedding.SharedSoftmaxLayer.Params()


def _Devices(**changes):
  """Returns devices on which a FLOP takes a tick, and all else no time."""
  values = {
    'num_devices': 4,
    'memory_bytes': 1e12,
    'flops_per_second': 1 / model_costs.TICK,
    'within_host': {'bandwidth': 1e30},
    **changes,
  }
  return device_description.FromMapping(values)


def _Sub(head, vocab_size, num_shards=1, num_layers=_NUM_LAYERS):
  layer = linear.ProjectionLayer.Params().Set(input_dim=_DIM, output_dim=_DIM, activation='TANH')
  return [
    embedding.EmbeddingLayer.Params().Set(
      vocab_size=vocab_size, embedding_dim=_DIM, num_shards=num_shards
    ),
    *[layer] * num_layers,
    head.Copy().Set(input_dim=_DIM, num_classes=vocab_size, num_shards=num_shards),
  ]


def _Loss(theta, outputs, side):
  del theta
  return {'loss': (tf.reduce_mean(embedding.XentLossFromLogits(outputs[0], side)), 1.0)}


def _Specs(size):
  return [tf.TensorSpec([size, _TIME], tf.int32)]


def _Costs(stack, loss_fn=_Loss, slots=2):
  weights = layer_costs.Weights(ties=stack.absolute_ties, slots_per_weight=slots)
  loss = layer_tables.Loss(loss_fn, lambda size: _Specs(size)[0])
  return layer_tables.Collect(stack.layers, _Specs, [1, _SIZE], weights, loss, xla=False)


_HEADS = [(1, False), (8, False), (8, True)]  # Number of shards, and whether they are tied.
_PIPELINES = [
  ('gpipe', 4, 'stage', 0.0, 1),
  ('1f1b', 3, 'none', 1.0, 1),
  ('1f1b', 2, 'layer', 0.0, 2),
  ('1f1b_fused', 2, 'stage', 0.0, 1),
  ('zb_h1', 4, 'stage', 0.0, 1),
  ('interleaved_1f1b', 2, 'none', 0.0, 1),
  ('zb_v', 2, 'stage', 0.0, 1),
  ('1f1b', 4, 'auto', 0.0, 1),
  ('v_half', 2, 'auto', 0.0, 1),
]


def _Ties(num_shards):
  last = f'layers[{_NUM_LAYERS + 1}]'
  return [[f'layers[0].shards[{i}].emb', f'{last}.shards[{i}].emb'] for i in range(num_shards)]


@functools.cache
def _CostsOfHead(num_shards, is_tied):
  """Returns the costs of the layers, which do not depend on the pipeline."""
  ties = _Ties(num_shards) if is_tied else []
  return _Costs(stacks.MakeStack(_Sub(_SHARED, 48, num_shards), ties=ties))


# Every two of a pipeline, a head and a vocabulary come together.
@pytest.mark.parametrize(
  'schedule, num_devices, policy, offload, num_replicas, num_shards, is_tied, vocabulary',
  [
    (*pipeline, *head, plan_choice.VOCABULARIES[(i + j) % 2])
    for i, pipeline in enumerate(_PIPELINES)
    for j, head in enumerate(_HEADS)
  ],
)
def testPredictionsEqualTheCut(
  schedule, num_devices, policy, offload, num_replicas, num_shards, is_tied, vocabulary
):
  """Ends, slices, work, bytes and time of a plan and of the stack that its overrides make."""
  v = 2 if schedule in (*plan_choice.LOOPED, *plan_choice.IN_A_V) else 1
  choice = plan_choice.Choice(
    num_replicas, num_devices, v, _M, _SIZE, schedule, policy, num_replicas > 1, offload, vocabulary
  )
  # Under auto with less room than it would take to keep everything.
  memory_bytes = 60e3 if policy == 'auto' else 1e12
  stack = stacks.MakeStack(
    _Sub(_SHARED, 48, num_shards),
    num_stages=choice.num_stages,
    stages_per_device=v,
    num_micro_batches=_M,
    schedule=schedule,
    remat_policy=policy,
    vocabulary=vocabulary,
    offload=offload,
    memory_limit=memory_bytes if policy == 'auto' else 0,
    ties=_Ties(num_shards) if is_tied else [],
  )
  cut = stack.MakeCut(
    *_Specs(_SIZE * _M * num_replicas),
    weights=layer_costs.Weights(
      slots_per_weight=2 / num_replicas, owner_slots=2 - 2 / num_replicas
    ),
    num_replicas=num_replicas,
  )
  devices = _Devices(memory_bytes=memory_bytes, to_host={'bandwidth': 1e30})
  plans = planner.Planner(_CostsOfHead(num_shards, is_tied), devices, _SIZE * _M * num_replicas)
  plan = plans.Predict(choice)
  assert (plan.ends, plan.vocabulary) == (cut.ends, cut.vocabulary)
  assert list(plan.memory) == cut.device_bytes
  assert policy != 'auto' or list(plan.policies) == list(cut.policy)
  assert plan.seconds == pytest.approx(cut.simulated.makespan * model_costs.TICK, rel=1e-9)
  assert plan.bubble == pytest.approx(plan.seconds * cut.bubble, abs=1e-9 * plan.seconds)
  assert bool(plan.vocabulary) == (vocabulary == 'shared')


def testTheLossDecidesWhetherAVocabularyCanBeShared():
  def WithTensor(theta, outputs, side):
    del theta, side
    return {'loss': (tf.reduce_mean(tf.nn.softmax(outputs[0])), 1.0)}

  def WithWeights(theta, outputs, side):
    # A task of which layers are measured gets no weights.
    return {'loss': (_Loss(theta, outputs, side)['loss'][0] + nested_map.NestedMap().b, 1.0)}

  stack = stacks.MakeStack(_Sub(_SIMPLE, 48, 6, num_layers=1), num_stages=2)
  assert _Costs(stack).vocabulary == model_costs.Vocabulary(6, 8, None, has_table=True)
  assert _Costs(stack, WithTensor).vocabulary is None
  assert _Costs(stack, WithWeights).vocabulary is None
  plain = stacks.MakeStack(_Sub(_SIMPLE, 48, num_layers=1), num_stages=2)
  # Weights and bias with their gradients in float64.
  assert _Costs(plain).vocabulary == model_costs.Vocabulary(48, 1, 2 * 8 * 48 * (_DIM + 1))
  without = stacks.MakeStack(_Sub(_SIMPLE, 48, num_layers=1)[:-1], num_stages=2)
  assert _Costs(without).vocabulary is None


@pytest.mark.parametrize('vocab_size, expected', [(4, 'one'), (4096, 'shared')])
@pytest.mark.parametrize('num_shards', [1, 4])
def testALargeVocabularyIsShared(vocab_size, expected, num_shards):
  stack = stacks.MakeStack(_Sub(_SIMPLE, vocab_size, num_shards), num_stages=1)
  space = plan_choice.Space(num_replicas=[1], num_devices=[4], schedules=['1f1b'])
  # A message takes longer than one of the other layers.
  devices = _Devices(within_host={'bandwidth': 1e30, 'latency': 1000 * model_costs.TICK})
  plans = planner.Planner(_Costs(stack), devices, 32, space)
  best = plans.Search().best
  assert best.choice.vocabulary == expected
  other = {choice.vocabulary: choice for choice in plans.Neighbours(best.choice)}
  (name,) = {*plan_choice.VOCABULARIES} - {expected}
  assert plans.Predict(other[name]).seconds > best.seconds


def testEachSliceHasAPartAndEachStageALayer():
  space = plan_choice.Space()

  def Shared(num_layers, grid, num_parts):
    choices = plan_choice.Choices(space, num_layers, grid, 8, num_parts)
    return {c.stages_per_device for c in choices if c.vocabulary == 'shared'}

  assert Shared(9, (1, 4), 4) == {1, 2} and Shared(8, (1, 4), 4) == {1}
  assert Shared(9, (1, 4), 3) == Shared(9, (1, 1), 4) == Shared(9, (1, 4), 0) == set()


def _RandomCosts(rng):
  """Returns unequal layers with a large softmax; some are not trained."""
  weights, samples = [], []
  for _ in range(6):
    num_bytes = rng.randrange(1, 9) * 1000
    trained = num_bytes * (rng.random() < 0.8)
    weights.append(model_costs.LayerWeights(num_bytes, trained, trained))
    flops = rng.choice([1e5, 1e6, 4e6])
    samples.append(model_costs.LayerSample(flops, rng.randrange(1, 4000), 1000, 3000))
  samples[-1] = dataclasses.replace(samples[-1], flops=rng.choice([1e6, 2e7]))
  copied = rng.choice([None, 9000])
  has_table = copied is None and rng.random() < 0.5
  vocabulary = model_costs.Vocabulary(rng.choice([2, 100]), 7, copied, has_table)
  return model_costs.ModelCosts(weights, {1: samples}, vocabulary=vocabulary)


_SPACE = plan_choice.Space(
  schedules=('gpipe', '1f1b', '1f1b_fused', 'zb_h1', 'interleaved_1f1b', 'zb_v', 'v_half'),
  remat_policies=('none', 'except_last', 'auto'),
  stages_per_device=(1, 2),
)


# Together they draw each kind of a vocabulary and of devices.
@pytest.mark.parametrize('seed', [0, 5, 29])
def testFindsThePlanOfAnExhaustiveSearch(seed):
  rng = random.Random(seed)
  costs = _RandomCosts(rng)
  devices = _Devices(
    num_devices=3,
    memory_bytes=rng.choice([6e4, 1e5, 1e6]),
    flops_per_second=1e9,
    within_host={'bandwidth': rng.choice([1e6, 1e8]), 'latency': rng.choice([0, 1e-3])},
    transfers=rng.choice(['overlap', 'occupy']),
    **rng.choice([{}, {'to_host': {'bandwidth': 1e8}}]),
  )
  plans = planner.Planner(costs, devices, 4, _SPACE)
  result = plans.Search()
  every = [
    planner.Planner(costs, devices, 4, _SPACE).Predict(choice)
    for grid in plan_choice.Grids(plans.space, 6, 3, 4)
    for choice in plan_choice.Choices(plans.space, 6, grid, 4, costs.vocabulary.num_parts)
  ]
  assert len(every) == result.num_choices
  assert any(p.vocabulary for p in every)
  fitting = [p for p in every if p.peak_bytes <= devices.memory_bytes]
  least = min((p.seconds for p in fitting), default=None)
  assert (result.best is None) == (least is None)
  assert result.best is None or result.best.seconds == pytest.approx(least, rel=2e-6)
  for p in every:
    assert result.by_grid[p.choice.grid].bound <= p.seconds * (1 + 1e-8) or p not in fitting
    assert plans._Bound(p.choice) * model_costs.TICK <= p.seconds * (1 + 1e-8)
    assert p.work + p.bubble + p.communication + p.update == pytest.approx(p.seconds)


@pytest.mark.parametrize('schedule', [*_SPACE.schedules, 'zb_2p', 'interleaved_zb', 'v_min'])
@pytest.mark.parametrize('policy, offload', [('none', 0.0), ('except_last', 1.0), ('auto', 0.0)])
def testLongSchedulesAreExtrapolated(schedule, policy, offload, monkeypatch):
  v = 2 if schedule in (*plan_choice.LOOPED, *plan_choice.IN_A_V) else 1
  costs, devices = _RandomCosts(random.Random(5)), _Devices(to_host={'bandwidth': 1e7})
  choice = plan_choice.Choice(1, 2, v, 48, 1, schedule, policy, False, offload, 'shared')
  predictions = []
  for limit in (0, 10**9):
    monkeypatch.setattr(plan_schedules, '_MAX_ACTIONS', limit)
    predictions.append(planner.Planner(costs, devices, 48).Predict(choice))
  extrapolated, whole = predictions
  assert extrapolated.memory == whole.memory
  assert extrapolated.seconds == pytest.approx(whole.seconds, rel=0.01)


def testChoicesShareTheirCuts(monkeypatch):
  """Each cut is searched for once, whatever the schedule, the number of micro-batches or slots."""
  calls = []

  def Count(module, name):
    function = getattr(module, name)

    def Counted(*args, **kwargs):
      calls.append(name)
      return function(*args, **kwargs)

    monkeypatch.setattr(module, name, Counted)

  Count(vocabulary_cut, 'Cut')
  Count(shared_vocabulary, 'Share')
  plan_schedules._GetCached.cache_clear()
  costs = _RandomCosts(random.Random(3))
  plans = planner.Planner(costs, _Devices(num_devices=2), 8, _SPACE)
  result = plans.Search()
  grids = plan_choice.Grids(plans.space, 6, 2, 8)
  choices = itertools.chain.from_iterable(map(plans._Choices, grids))
  shared = [c for c in choices if c.num_slices]
  owners = {(c.micro_batch_size, *c.stage_to_device, c.recomputes) for c in shared}
  assert calls.count('Cut') <= len(owners) < len(shared) / 3
  assert calls.count('Share') < len(shared)
  assert result.num_simulated < len(shared)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
