# SPDX-License-Identifier: Apache-2.0
"""The weights of losses, and the errors of results that are not a loss."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.pipeline.stages import weighted_loss
from tests import naming
from tests.toys import aux_loss_layers, layers, stacks

_DIM, _BATCH = layers.DIM, 6


def _X():
  return (tf.reshape(tf.range(_BATCH * _DIM, dtype=tf.float64), [_BATCH, _DIM]),)


def _Train(loss, loss_weight=tf.reduce_sum, layer=None):
  """Builds a training step."""
  sub = [layer or layers.FnLayer.Params(), layers.FnLayer.Params()]
  stack = stacks.MakeStack(sub, num_stages=2, num_micro_batches=3)
  stack.Place(stacks.Devices(), *stacks.Specs(_X()), loss_fn=loss)

  @tf.function(autograph=False)
  def Step(x, side, step):
    sides = stack.SplitBatch(side)
    weights = [loss_weight(s) for s in sides]
    return stacks.RunStep(stack.engine, stack.SplitBatch(x), sides, weights, step)

  Step.get_concrete_function(_X(), tf.ones([_BATCH]), tf.constant(1, tf.int64))


def _Message(error, run):
  with pytest.raises(error) as e:
    run()
  return '\n'.join([str(e.value), *e.value.__notes__])


_FORM = '{name: (value, weight)}'


@pytest.mark.parametrize(
  'metrics, error, names',
  [
    ({'loss': (np.ones([2]), 1.0)}, ValueError, ["metric 'loss'", 'a scalar', 'got float64[2]']),
    (
      {'loss': (1.0, 1.0), 'a': (1.0, np.ones([2]))},
      ValueError,
      ["weight of 'a'", 'a scalar', 'got float64[2]'],
    ),
    ({'loss': (1, 1)}, TypeError, ["metric 'loss'", 'floating scalar', 'got int32']),
    ({'loss': tf.ones([])}, TypeError, [_FORM, 'got {loss: float32[]}']),
    (tf.ones([]), TypeError, [_FORM, 'got float32[]']),
    ((tf.ones([]), tf.ones([])), TypeError, [_FORM, 'got (float32[], float32[])']),
    (None, TypeError, [_FORM, 'got None']),
    ({'los': (1.0, 1.0)}, ValueError, ["'loss'", "got ['los']"]),
  ],
)
def testResultsThatAreNotALoss(metrics, error, names):
  with pytest.raises(error, match=naming.Naming(*names)):
    weighted_loss.Metrics(metrics)


def testNumbersAreScalars():
  metrics = weighted_loss.Metrics({'loss': (np.float64(2.0), 3), 'n': (1, 1.0)})
  assert float(weighted_loss.WeightedSum(*metrics['loss'])[0]) == 6.0
  assert [value.dtype for value in metrics['n']] == [tf.int32, tf.float32]


def testALossThatIsNotAScalarIsRefused():
  text = _Message(ValueError, lambda: _Train(lambda theta, y, side: {'loss': (y[0][:, 0], 1.0)}))
  assert naming.AnyLineNames(text, "'loss'", 'scalar', 'float64[2]')
  assert naming.AnyLineNames(text, 'stage 1', 'outputs (float64[2, 3])')


def testAnAuxiliaryLossThatIsNotAScalarIsRefused():
  adds = aux_loss_layers.AuxLossLayer.Params().Set(losses=[['a', 1.0, lambda x: x[:, 0]]])
  text = _Message(ValueError, lambda: _Train(stacks.SquareLoss, layer=adds))
  assert naming.AnyLineNames(text, 'stack.layers[0].a', 'scalar', 'float64[2]')
  assert naming.AnyLineNames(text, 'layer', 'stack.layers[0] (AuxLossLayer)')


def testALossWeightThatIsNotAScalarIsRefused():
  with pytest.raises(
    ValueError, match=naming.Naming('weight', 'micro-batch', 'scalar', 'float32[2]')
  ):
    _Train(stacks.SquareLoss, loss_weight=tf.identity)


def testTrainingWithoutALossIsRefused():
  with pytest.raises(ValueError, match=naming.Naming('engine', 'loss_fn')):
    _Train(None)


def testWeightsKeepTheirDigitsWithANarrowLoss():
  weight = tf.constant(513.0)
  assert float(weighted_loss.WeightedLoss(tf.constant(1.0, tf.bfloat16), weight)) == 513.0


@pytest.mark.parametrize(
  'schedule, policy, xla',
  [('gpipe', 'stage', True), ('gpipe', 'layer', False), ('zb_h1', 'none', False)],
)
def testAMicroBatchOfWeightZeroDoesNotCount(schedule, policy, xla):
  def Loss(theta, outputs, side):
    total = tf.reduce_sum(side)
    return {'loss': (tf.reduce_sum(outputs[0] ** 2 * side[:, tf.newaxis]) / _DIM / total, total)}

  sub = [layers.FnLayer.Params()] * 2
  options = {'num_stages': 2, 'num_micro_batches': 3, 'schedule': schedule, 'xla': xla}
  stack = stacks.MakeStack(sub, remat_policy=policy, **options)
  side = tf.constant([1.0, 2.0, 0.0, 0.0, 0.0, 3.0], tf.float64)
  actual = stacks.Train(stack, _X(), side, Loss)
  stacks.CheckEqual(actual, stacks.Reference(sub, 3, _X(), side))


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
