# SPDX-License-Identifier: Apache-2.0
"""Auxiliary losses of any layer: in the gradients with their own coefficients, and reported.

`layer_statistics_test` has them under each schedule and policy, under XLA and in stages on one
device.
"""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import fprop_context
from lingvo_gpipe.layers import dropout
from lingvo_gpipe.pipeline.schedule import rematerialisation
from tests import naming
from tests.toys import aux_loss_layers, layers, stacks

_BATCH, _DIM = 6, layers.DIM


def _Add(**losses):
  return aux_loss_layers.ProductWithLosses.Params().Set(losses=losses)


def _Sub():
  drop = dropout.DropoutLayer.Params().Set(keep_prob=0.8)
  return [
    *(_Add(first=2.0), drop),
    *(aux_loss_layers.ChildrenWithLosses.Params(), _Add()),
    *(drop, _Add(one=0.1, other=0.7)),
  ]


_NAMES = {
  'loss',
  'stack.layers[0].first',
  'stack.layers[2].aux_loss',
  'stack.layers[2].a.z',
  'stack.layers[2].b.z',
  'stack.layers[5].one',
  'stack.layers[5].other',
}


def _X(size=_BATCH):
  return layers.RandomInput(size, _DIM, seed=4)


def _Check(sub, *, num_micro_batches=3, dtype=tf.float64, **options):
  side = stacks.ExampleWeights(_BATCH)
  stack = stacks.MakeStack(sub, num_micro_batches=num_micro_batches, **options)
  sums, grads = stacks.Train(stack, (_X(),), side)
  expected = stacks.Reference(sub, num_micro_batches, (_X(),), side)
  stacks.CheckEqual((sums, grads), expected)
  return sums, grads


@pytest.mark.parametrize(
  'schedule, policy', [('gpipe', 'stage'), ('1f1b', 'layer'), ('zb_h1', 'none')]
)
def testAnAuxiliaryLossTrainsWeightsThatTheLossDoesNotUse(schedule, policy):
  """The last stage's loss sees no weight of the first; its own auxiliary loss does."""

  sub = [_Add(only=0.4), layers.Without(tf.stop_gradient), _Add()]
  _, grads = _Check(sub, num_stages=3, splits=[1, 2, 3], schedule=schedule, remat_policy=policy)
  assert np.any(grads['stack.layers[0].w'])


def testEqualStagesKeepTheirNamesApart():
  """They share their functions, but not the names."""
  sums, _ = _Check([_Add(z=0.1)] * 4, num_stages=4, splits=[1, 2, 3, 4])
  assert sums.keys() == {'loss'} | {f'stack.layers[{i}].z' for i in range(4)}
  assert len({float(pair[0]) for pair in sums.values()}) == 5


def testBfloat16():
  side = stacks.ExampleWeights(_BATCH, tf.float32)
  dtypes = {'dtype': tf.float32, 'fprop_dtype': tf.bfloat16}
  stack = stacks.MakeStack(_Sub(), num_stages=3, splits=[2, 4, 6], num_micro_batches=2, **dtypes)
  x = tf.cast(_X(), tf.bfloat16)
  sums, grads = stacks.Train(stack, (x,), side)
  _, expected = stacks.Reference(_Sub(), 2, (x,), side, **dtypes)
  assert sums.keys() == _NAMES
  assert {v.dtype for v in sums.values()} == {np.dtype(np.float32)}
  norm = stacks.GlobalNorm(expected)
  for path, g in expected.items():
    assert np.abs(grads[path] - g).max() <= 2e-2 * norm, path


def testEvaluateReportsAuxiliaryLosses():
  """Micro-batches of 3, 2 and 2 examples count by their loss weights, as in training."""
  stack = stacks.MakeStack([_Add(z=0.1), _Add()], num_stages=2, num_micro_batches=3, splits=[1, 2])
  x, side = _X(7), stacks.ExampleWeights(7)
  stack.Place(
    stacks.Devices(),
    *stacks.Specs((x,)),
    loss_fn=stacks.SquareLoss,
  )
  sums = stacks.Evaluate(stack, (x,), side)
  w = stack.layers[0].theta.w
  weights = [tf.reduce_sum(s) for s in stack.SplitBatch(side)]
  means = [tf.reduce_mean(tf.tanh(x @ w) ** 2) for (x,) in stack.SplitBatch((x,))]
  expected = np.average(means, weights=weights) + tf.reduce_mean(w**2)
  value, weight = sums['stack.layers[0].z']
  np.testing.assert_allclose(value / weight, expected, rtol=1e-12)


def testAMetricMayHaveAColonInItsName():
  def Loss(theta, outputs, side):
    metrics = stacks.SquareLoss(theta, outputs, side)
    return {**metrics, 'error:total': metrics['loss']}

  stack = stacks.MakeStack([_Add(z=1.0)], num_micro_batches=1)
  side = stacks.ExampleWeights(_BATCH)
  sums, _ = stacks.Train(stack, (_X(),), side, Loss)
  assert sums.keys() == {'loss', 'error:total', 'stack.layers[0].z'}


# ---- errors ------------------------------------------------------------------------------


@pytest.mark.parametrize('policy', rematerialisation.POLICIES)
def testTwoAuxiliaryLossesOfOneNameAreRefused(policy):
  names = naming.Naming('stack.layers[1]', 'two auxiliary losses', "'same'")
  adds_twice = aux_loss_layers.AuxLossLayer.Params().Set(losses=[['same', 1.0, tf.reduce_mean]] * 2)
  with pytest.raises(ValueError, match=names):
    _Check([_Add(), adds_twice], num_stages=2, splits=[1, 2], remat_policy=policy)


def testAuxiliaryLossesUnderAUsersTapeAreRefused():
  stack = stacks.MakeStack([_Add(), _Add(z=0.1)], num_stages=2, num_micro_batches=1, splits=[1, 2])
  stack.Place(stacks.Devices(), *stacks.Specs((_X(),)))
  with tf.GradientTape() as tape, fprop_context.Scope(step=1):
    loss = tf.reduce_sum(stack(_X()) ** 2)
  names = naming.Naming('auxiliary losses', 'stack.layers[1].z', 'last stage')
  with pytest.raises(ValueError, match=names):
    tape.gradient(loss, stack.trainable_variables)
  # Nobody asks for gradients in evaluation.
  stack.Predict(_X())


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
