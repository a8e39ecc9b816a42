# SPDX-License-Identifier: Apache-2.0
"""BatchNorm over replicas: R of M micro-batches are one of M micro-batches of R times the rows."""

import functools
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.layers import batch_norm, linear
from lingvo_gpipe.pipeline import replicas, verify
from lingvo_gpipe.pipeline.stages import micro_batch
from tests import graph_reader, naming
from tests.toys import stacks, statistics_layers

pytestmark = pytest.mark.optimized_graphs

_DIM = 4


def _Norm(**params):
  params = {'dim': _DIM, 'decay': 0.5, 'over_replicas': True, **params}
  return batch_norm.BatchNormLayer.Params().Set(**params)


def _Sub():
  project = linear.ProjectionLayer.Params().Set(
    input_dim=_DIM, output_dim=_DIM, has_bias=True, activation='TANH'
  )
  return [
    project,
    statistics_layers.NormBranches.Params().Set(norm=_Norm()),
    project,
    _Norm(decay=None),
    project,
  ]


def _X(batch_size):
  x = np.random.default_rng(4).normal(size=[batch_size, 2, _DIM])
  return tf.constant(x * np.arange(1, _DIM + 1) + np.arange(batch_size)[:, None, None])


def _TogetherFirst(num_replicas, num_micro_batches, batch_size):
  """Returns the rows of micro-batch 0 of all replicas, then the rows of micro-batches 1, ..."""
  sizes = micro_batch.Sizes(batch_size, num_replicas * num_micro_batches)
  pieces = np.split(np.arange(batch_size), np.cumsum(sizes)[:-1])
  return np.concatenate(
    [row for m in range(num_micro_batches) for row in pieces[m::num_micro_batches]]
  )


@functools.cache
def _Reference(num_replicas, num_micro_batches, batch_size):
  rows, state = _TogetherFirst(num_replicas, num_micro_batches, batch_size), {}
  x, side = _X(batch_size), stacks.ExampleWeights(batch_size)
  result = stacks.Reference(
    _Sub(), num_micro_batches, (tf.gather(x, rows),), tf.gather(side, rows), state=state
  )
  return result, state


def _Place(num_replicas, batch_size, sub=None, **options):
  stack = stacks.MakeStack(_Sub() if sub is None else sub, **options)
  return stacks.PlaceReplicas(stack, (_X(batch_size),), num_replicas)


@pytest.mark.parametrize(
  'num_replicas, num_stages, num_micro_batches, batch_size, schedule, policy',
  [
    (2, 1, 2, 9, 'gpipe', 'none'),  # Micro-batches of 3 rows meet such of 2.
    (2, 2, 2, 8, '1f1b_fused', 'layer'),
    (3, 1, 1, 3, 'gpipe', 'stage'),  # Micro-batches of one row.
  ],
)
def testIsOneReplicaOfLargerMicroBatches(
  num_replicas, num_stages, num_micro_batches, batch_size, schedule, policy
):
  stack = _Place(
    num_replicas,
    batch_size,
    num_stages=num_stages,
    num_micro_batches=num_micro_batches,
    schedule=schedule,
    remat_policy=policy,
  )
  actual = stacks.TakeStep(stack, (_X(batch_size),), stacks.ExampleWeights(batch_size))
  _CheckEqual(stack, actual, num_replicas, num_micro_batches, batch_size)


def _CheckEqual(stack, actual, num_replicas, num_micro_batches, batch_size):
  expected, state = _Reference(num_replicas, num_micro_batches, batch_size)
  stacks.CheckEqual(actual, expected)
  for path, value in stacks.State(stack).items():
    np.testing.assert_allclose(value, state[path], rtol=1e-10, err_msg=path)


@pytest.mark.parametrize(
  'schedule, policy, stages_per_device',
  [
    ('zb_h1', 'except_last', 1),
    ('looped_bfs', 'layer', 2),  # Both stages of a replica on one device.
  ],
)
def testCollectivesOfADeviceAreInOneOrder(schedule, policy, stages_per_device, monkeypatch):
  """Collectives of gradients and of statistics: NCCL hangs if devices differ in the order."""
  monkeypatch.setattr(replicas, 'BUCKET_BYTES', 100)
  stack = _Place(
    2,
    8,
    num_stages=2,
    stages_per_device=stages_per_device,
    num_micro_batches=2,
    schedule=schedule,
    remat_policy=policy,
  )
  stack.engine.MakeAccumulators()
  add = replicas.GradientSum(stack.engine.replicas, 'collective')
  monkeypatch.setattr(replicas, 'GradientSum', lambda _: add)
  arguments = (_X(8),), stacks.ExampleWeights(8), tf.constant(stacks.STEP, tf.int64)
  step = stacks.StepFunction(stack)
  graph = step.get_concrete_function(*arguments).graph
  assert graph_reader.NumOrderedCollectives(graph) >= 96
  sums = {name: value.numpy() for name, value in step(*arguments).items()}
  _CheckEqual(stack, (sums, stacks.Gradients(stack)), 2, 2, 8)


def testAnEagerStepTakesTheStatisticsOfEachReplica():
  """Eager steps find out why a step failed: one replica has run when the next one begins."""
  stack = _Place(2, 8, num_micro_batches=2)
  x, side = (_X(8),), stacks.ExampleWeights(8)
  sides = stack.SplitBatch(side)
  weights = [stacks.LossWeight(s) for s in sides]
  step = tf.constant(stacks.STEP, tf.int64)
  pieces = stacks.MicroBatches(stack.SplitBatch(x), sides, weights)
  sums = stack.engine.Accumulate(pieces, step).metrics
  (expected, _), (together, _) = (
    stacks.Reference(_Sub(), 4, x, side),
    _Reference(2, 2, 8)[0],
  )
  np.testing.assert_allclose(sums['loss'], expected['loss'], rtol=1e-10)
  assert abs(sums['loss'][0] - together['loss'][0]) > 1e-3


def testImpossibleSettingsAreRefused():
  with pytest.raises(
    ValueError, match=naming.Naming('stack.layers[1].a', 'over_replicas=True', 'XLA', 'xla=False')
  ):
    _Place(2, 8, num_micro_batches=2, xla=True)
  _Place(1, 8, num_micro_batches=2, xla=True)
  stack = _Place(2, 3, num_micro_batches=2)
  with pytest.raises(ValueError, match=naming.Naming('2 replicas', 'micro-batches', 'got 3')):
    stacks.TakeStep(stack, (_X(3),), stacks.ExampleWeights(3))
  with pytest.raises(ValueError, match=naming.Naming('over_replicas', 'one replica')):
    side = stacks.ExampleWeights(3)
    verify.VerifyEngine(stack.engine, [], ((), side), loss_fn=stacks.SquareLoss)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
