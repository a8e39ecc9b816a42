# SPDX-License-Identifier: Apache-2.0
"""Frozen layers: no weight gradient for them, and no backward below the first trained layer."""

import collections
import functools
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.layers import linear
from lingvo_gpipe.pipeline import pipelining_layer
from lingvo_gpipe.pipeline.cutting import layer_costs
from lingvo_gpipe.pipeline.schedule import schedules, step_work
from tests.toys import stacks

_DIM = 4
_SCHEDULES = ('gpipe', '1f1b', 'fused_fill_drain', 'zb_h1')


def _Loss(theta, outputs, side):
  del theta
  value = tf.reduce_mean((outputs[0] - side) ** 2)
  return {'loss': (value, tf.cast(tf.shape(side)[0], value.dtype))}


def _Engine(schedule, policy, is_trained):
  p = pipelining_layer.PipeliningLayer.Params().Set(
    name='stack',
    num_stages=4,
    num_micro_batches=4,
    splits=[1, 2, 3, 4],
    schedule=schedule,
    remat_policy=policy,
    xla=False,
    dtype=tf.float64,
    sub=[
      linear.ProjectionLayer.Params().Set(
        input_dim=_DIM, output_dim=_DIM, has_bias=True, activation='TANH'
      )
    ]
    * 4,
  )
  stack = p.Instantiate()
  spec = tf.TensorSpec([8, _DIM], tf.float64)
  stack.Place(stacks.Devices(), spec, loss_fn=_Loss, weights=layer_costs.Weights(is_trained))
  return stack


def _Function(stack):
  """A training step as a tf.function of the step."""
  stack.engine.MakeAccumulators()
  rng = np.random.default_rng(0)
  x, y = (tf.constant(rng.standard_normal([8, _DIM])) for _ in range(2))

  @tf.function(autograph=False)
  def Run(step):
    sides = stack.SplitBatch(y)
    weights = [tf.constant(2.0, tf.float64)] * len(sides)
    return stacks.RunStep(stack.engine, [(x,) for x in stack.SplitBatch(x)], sides, weights, step)

  return Run


def _Step(stack):
  """(loss, {path: accumulated gradient}) of one training step."""
  sums = _Function(stack)(tf.constant(1, tf.int64))
  return sums['loss'].numpy(), stacks.Gradients(stack)


def _Calls(stack):
  """How many calls of each device a step holds."""
  function = _Function(stack).get_concrete_function(tf.constant(1, tf.int64))
  return collections.Counter(
    op.device.rsplit(':', 1)[-1]
    for op in function.graph.get_operations()
    if 'PartitionedCall' in op.type
  )


@functools.cache
def _Everything():
  """Returns loss and gradients with all weights trained."""
  return _Step(_Engine('gpipe', 'stage', lambda path: True))


@pytest.mark.parametrize(
  'schedule, policy',
  [
    ('gpipe', 'stage'),
    ('gpipe', 'layer'),
    ('1f1b', 'none'),
    ('fused_fill_drain', 'stage'),
    ('zb_h1', 'stage'),
    ('zb_h1', 'none'),
  ],
)
def testTrainedWeightsGetTheSameGradients(schedule, policy):
  loss, everything = _Everything()
  frozen_loss, some = _Step(
    _Engine(schedule, policy, lambda path: 'layers[2]' in path or path.endswith('layers[3].b'))
  )
  np.testing.assert_allclose(loss, frozen_loss, rtol=1e-14)
  assert set(some) == {'stack.layers[2].w', 'stack.layers[2].b', 'stack.layers[3].b'}
  for path, grad in some.items():
    np.testing.assert_allclose(grad, everything[path], rtol=0, atol=1e-14)
    assert np.abs(grad).max() > 1e-3


@pytest.mark.parametrize(
  'trained, schedule',
  [
    *(([2], schedule) for schedule in _SCHEDULES),
    *(([1, 3], schedule) for schedule in ('1f1b', 'zb_h1')),
    *(([0, 1, 2, 3], schedule) for schedule in ('gpipe', 'fused_fill_drain')),
  ],
)
def testTheSimulatorPricesEveryCall(schedule, trained):
  """Only M forwards below the first trained layer, and no W in frozen stages."""
  layers = tuple(f'layers[{i}]' for i in trained)
  stack = _Engine(schedule, 'stage', lambda path: any(layer in path for layer in layers))
  calls = _Calls(stack)
  flags = [i in trained for i in range(4)]
  assert [s.has_weight_gradient for s in stack.engine.stages] == flags
  work = step_work.StepWork(schedules.Get(schedule, 4, 4), 'stage', flags)
  assert calls == {
    str(device): sum(map(work.Exists, row)) for device, row in enumerate(work.schedule.actions)
  }
  if trained == [2]:
    assert calls['0'] == calls['1'] == 4
    # F and B or W; F and B or I, or V.
    assert calls['2'] == 8
    assert calls['3'] == (4 if schedule == 'fused_fill_drain' else 8)


def testNoAccumulatorsForFrozenWeights():
  stack = _Engine('gpipe', 'stage', lambda path: 'layers[2].w' in path)
  stack.engine.MakeAccumulators()
  assert [len(s.accumulators) for s in stack.engine.stages] == [0, 0, 1, 0]


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
