# SPDX-License-Identifier: Apache-2.0
"""R replicas of a pipeline with M micro-batches each are one with R x M: sums, gradients, state."""

import functools
import itertools
import os
import sys

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from lingvo_gpipe.layers import batch_norm, dropout, linear
from lingvo_gpipe.pipeline import replicas
from tests import naming
from tests.toys import stacks

pytestmark = pytest.mark.optimized_graphs

_DIM = 4
_TIES = [['layers[3].w', 'layers[0].w']]


def _Sub():
  project = linear.ProjectionLayer.Params().Set(
    input_dim=_DIM, output_dim=_DIM, has_bias=True, activation='TANH'
  )
  norm = batch_norm.BatchNormLayer.Params().Set(dim=_DIM, decay=0.5)
  return [project, dropout.DropoutLayer.Params().Set(keep_prob=0.8), norm, project]


def _X(batch_size):
  x = np.random.default_rng(4).normal(size=[batch_size, 2, _DIM])
  return tf.constant(x * np.arange(1, _DIM + 1))


@functools.cache
def _Reference(num_micro_batches, batch_size):
  state = {}
  result = stacks.Reference(
    _Sub(),
    num_micro_batches,
    (_X(batch_size),),
    stacks.ExampleWeights(batch_size),
    state=state,
    ties=_TIES,
  )
  return result, state


def _Place(num_replicas, batch_size, **options):
  stack = stacks.MakeStack(_Sub(), ties=_TIES, **options)
  return stacks.PlaceReplicas(stack, (_X(batch_size),), num_replicas)


def _CheckStep(stack, num_micro_batches, batch_size):
  """One step against the reference; then every replica has the same gradients and state."""
  sums, _ = stacks.TakeStep(stack, (_X(batch_size),), stacks.ExampleWeights(batch_size))
  expected, state = _Reference(num_micro_batches, batch_size)
  stacks.CheckEqual((sums, stacks.Gradients(stack)), expected)
  actual = stacks.State(stack)
  assert actual.keys() == state.keys()
  for path, value in state.items():
    np.testing.assert_allclose(actual[path], value, rtol=1e-10, err_msg=path)
  first, *later_replicas = stack.engine.replicas
  for other in later_replicas:
    for path, v in first.variables.items():
      assert other.variables[path].device != v.device
      np.testing.assert_array_equal(other.variables[path], v, err_msg=path)
    for a, b in zip(first.stages, other.stages, strict=True):
      for x, y in zip(a.accumulators, b.accumulators, strict=True):
        assert y.device.endswith(b.device)
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
  'num_replicas, num_stages, num_micro_batches, batch_size, schedule',
  [
    (2, 2, 3, 13, 'gpipe'),
    (2, 2, 2, 8, '1f1b'),
    (2, 2, 4, 5, '1f1b_fused'),  # The batch is too small: 3 micro-batches and 2.
    (4, 1, 2, 8, 'gpipe'),
    (3, 1, 2, 2, 'gpipe'),  # The last replica gets nothing.
    (2, 2, 3, 6, 'zb_h1'),
  ],
)
def testReplicasAreOnePipelineOfMoreMicroBatches(
  num_replicas, num_stages, num_micro_batches, batch_size, schedule
):
  stack = _Place(
    num_replicas,
    batch_size,
    num_stages=num_stages,
    num_micro_batches=num_micro_batches,
    schedule=schedule,
  )
  _CheckStep(stack, num_replicas * num_micro_batches, batch_size)


def testTheReferenceOfOneReplicaDiffers():
  """Two replicas have other micro-batches than one: other masks, other statistics."""
  (_, one_replica), _ = _Reference(3, 12)
  (_, two_replicas), _ = _Reference(6, 12)
  stacks.CheckAnyDiffers(one_replica, two_replicas)


@pytest.mark.parametrize('all_reduce', ['collective', 'send'])
def testEachWayOfAddingGivesTheSameSums(all_reduce, monkeypatch):
  monkeypatch.setattr(replicas, 'BUCKET_BYTES', 200)  # Two buckets for each stage.
  stack = _Place(2, 8, num_stages=2, num_micro_batches=2)
  stack.engine.MakeAccumulators()
  add = replicas.GradientSum(stack.engine.replicas, all_reduce)
  monkeypatch.setattr(replicas, 'GradientSum', lambda _: add)
  _CheckStep(stack, 4, 8)


def testOneOfSeveralReplicasAddsForAll():
  """If each added on its own, TensorFlow could add in another order there, with other bits."""
  stack = _Place(4, 8, num_micro_batches=2)
  stack.engine.MakeAccumulators()
  add = replicas.GradientSum(stack.engine.replicas, 'send').Add
  graph = tf.function(add, autograph=False).get_concrete_function().graph
  devices = [op.device for op in graph.get_operations() if op.type == 'AddN']
  assert len(devices) == len(stack.engine.stages[0].accumulators)
  assert len(set(devices)) == 4  # They take turns.


def testCollectivesOfADeviceAreInOneOrder(monkeypatch):
  """Each collective waits for the one before it on its device, in the order of the buckets."""
  monkeypatch.setattr(replicas, 'BUCKET_BYTES', 100)
  stack = _Place(
    2, 8, num_stages=4, stages_per_device=2, num_micro_batches=2, schedule='looped_bfs'
  )
  stack.engine.MakeAccumulators()
  add = replicas.GradientSum(stack.engine.replicas, 'collective').Add
  graph = tf.function(add, autograph=False).get_concrete_function().graph
  by_device = {}
  for op in graph.get_operations():
    if op.type == 'CollectiveReduce':
      by_device.setdefault(op.device, []).append(op)
  assert len(by_device) == 4 and max(map(len, by_device.values())) > 2
  keys = []
  for ops in by_device.values():
    for before, op in itertools.pairwise(ops):
      assert before in op.control_inputs
    # Else TensorFlow would take no NCCL on GPUs.
    assert {op.get_attr('communication_hint') for op in ops} == {b'nccl'}
    keys.append([op.get_attr('instance_key') for op in ops])
  assert len({tuple(k) for k in keys}) == 2  # The keys of both replicas.
  assert all(k == sorted(k) for k in keys)


def testCollectivesLeaveNoThreads():
  stack = _Place(2, 8, num_micro_batches=2)
  stack.engine.MakeAccumulators()
  add = tf.function(replicas.GradientSum(stack.engine.replicas, 'collective').Add, autograph=False)
  counts = []
  for _ in range(3):
    for _ in range(20):
      add()
    counts.append(len(os.listdir('/proc/self/task')))
  assert counts[-1] < counts[0] + 20


def testOwnersOfAllStagesOfADeviceShareItsBytes():
  stack = _Place(
    2, 8, num_stages=4, stages_per_device=2, num_micro_batches=2, schedule='looped_bfs'
  )
  stack.engine.MakeAccumulators()
  load = {}
  for shard in replicas.ShardedWeights(stack.engine.replicas).Stages():
    num_bytes = sum(v.shape.num_elements() * 8 for v in shard.trained.values())
    load[shard.device] = load.get(shard.device, 0) + num_bytes
  # Stages 0 and 2: a matrix against a bias, and the two vectors of the BatchNorm.
  first = [replica.stages[0].device for replica in stack.engine.replicas]
  assert [load[device] for device in first] == [8 * _DIM * _DIM, 8 * 3 * _DIM]


def testAnUnknownWayOfAddingIsNamed():
  stack = _Place(2, 8, num_micro_batches=2)
  with pytest.raises(
    ValueError, match=naming.Naming('all_reduce', 'auto', 'collective', 'send', "'ring'")
  ):
    replicas.GradientSum(stack.engine.replicas, 'ring')


def testReplicasShareTheTraces():
  traces = []
  for num_replicas in (1, 2):
    stack = _Place(num_replicas, 8, num_stages=2, num_micro_batches=2 // num_replicas)
    stacks.TakeStep(stack, (_X(8),), stacks.ExampleWeights(8))
    traces.append(stack.engine.functions.num_traces)
  assert traces[0] == traces[1]


def testReplicasShareAnEvaluation():
  """The sums are as in one replica, also after weights changed in the first replica alone."""
  losses = []
  for num_replicas in (1, 2):
    stack = _Place(num_replicas, 7, num_stages=2, num_micro_batches=4 // num_replicas)
    for v in stack.VariablesByPath().values():
      v.assign(v * 1.5)
    stack.engine.SyncReplicas()
    x, side = (_X(7),), stacks.ExampleWeights(7)
    losses.append(stacks.Evaluate(stack, x, side)['loss'])
  np.testing.assert_allclose(losses[0], losses[1], rtol=1e-12)


def testTooFewDevicesAreCounted():
  with pytest.raises(
    ValueError, match=naming.Naming('2 stages', '2 devices', '2 replicas', 'got 3')
  ):
    stack = stacks.MakeStack(_Sub(), num_stages=2)
    stack.Place(stacks.Devices()[:3], *stacks.Specs((_X(4),)), num_replicas=2)


@given(st.integers(1, 40), st.integers(1, 9))
def testSharesAreConsecutiveAndEven(num_micro_batches, num_replicas):
  shares = replicas.Shares(num_micro_batches, num_replicas)
  assert [m for share in shares for m in share] == list(range(num_micro_batches))
  sizes = [len(share) for share in shares]
  assert sizes == sorted(sizes, reverse=True)
  assert max(sizes) - min(sizes) <= 1


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
