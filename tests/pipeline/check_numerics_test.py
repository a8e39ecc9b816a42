# SPDX-License-Identifier: Apache-2.0
"""The first layer whose output or gradient is not finite is the one that is named."""

import re
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import fprop_context, nested_map
from lingvo_gpipe.layers import dropout, skip
from lingvo_gpipe.pipeline import check_numerics
from tests import naming
from tests.toys import aux_loss_layers, layers, stacks

_DIM, _BATCH, _M = layers.DIM, 6, 3


def _AddsLogarithm():
  """Returns Params of a layer that adds the logarithm of the first entry as an auxiliary loss."""
  losses = [['log', 0.5, lambda x: tf.math.log(x[0, 0])]]
  return aux_loss_layers.AuxLossLayer.Params().Set(losses=losses)


def _Layer(fn=None):
  return layers.FnLayer.Params().Set(fn=fn) if fn else layers.FnLayer.Params()


def _Explain(sub, x=None, side=None, *, change=None, loss_fn=stacks.SquareLoss, is_finite=False):
  """Returns the explanation of the engine's step, which is not finite unless `is_finite`."""
  x = tf.ones([_BATCH, _DIM]) if x is None else x
  side = tf.ones([_BATCH]) if side is None else side
  stack = stacks.MakeStack(
    sub, num_stages=2, splits=[2, len(sub)], num_micro_batches=_M, dtype=tf.float32
  )
  stack.Place(stacks.Devices(), *stacks.Specs((x,)), loss_fn=loss_fn)
  if change:
    change(stack)
  before = [v.numpy() for v in stack.variables]
  sums = stacks.StepFunction(stack)((x,), side, tf.constant(4, tf.int64))
  grads = stacks.Gradients(stack)
  values = [sums['loss'].numpy(), *grads.values()]
  assert not all(np.isfinite(value).all() for value in values)
  sides = stack.SplitBatch(side)
  weights = [stacks.LossWeight(s) for s in sides]
  inputs = stack.SplitBatch((x,))
  pieces = stacks.MicroBatches(inputs, sides, weights)
  text = check_numerics.Explain(stack.engine, pieces, 4)
  assert '\n' not in text
  for v, value in zip(stack.variables, before, strict=True):
    np.testing.assert_array_equal(v, value)
  assert naming.Names(text, 'every', 'finite') == is_finite, text
  return text


def _At(row, value):
  """Ones, and `value` in one row: rows 2 and 3 are micro-batch 1."""
  return tf.tensor_scatter_nd_update(tf.ones([_BATCH, _DIM]), [[row, 1]], [value])


def _Check(text, *parts):
  assert naming.Names(text, *parts), text


def testANonfiniteOutputIsReported():
  sub = [_Layer(), _Layer(), _Layer(lambda w, x: tf.math.log(x) * w), _Layer()]
  _Check(
    _Explain(sub, _At(3, -1.0)),
    *('output of layer stack.layers[2] (FnLayer)', 'stage 1', 'micro-batch 1', '1 NaN', '0 Inf'),
    *('float32[2, 3]', '[0, 0]', 'inputs are finite', 'weights finite'),
  )


def testANonfiniteComplexOutputIsReported():
  sub = [_Layer(lambda w, x: tf.complex(x, tf.math.log(x) * w)), _Layer(lambda w, z: tf.abs(z) * w)]
  _Check(
    _Explain([*sub, _Layer()], _At(3, -1.0)),
    *('output of layer stack.layers[0] (FnLayer)', 'stage 0', 'micro-batch 1', '1 NaN', '0 Inf'),
    *('complex64[2, 3]', '[-1, 1]'),
  )


def testANonfiniteInputIsReported():
  text = _Explain([_Layer()] * 4, _At(5, np.inf))
  _Check(text, 'fault: input of micro-batch 2', '0 NaN', '1 Inf', 'float32[2, 3]')


def testANonfiniteLossInputIsReported():
  side = tf.constant([1.0, 1.0, 1.0, np.nan, 1.0, 1.0])
  _Check(_Explain([_Layer()] * 4, side=side), 'fault: loss input of micro-batch 1')


def testANonfiniteWeightIsReported():
  def Change(stack):
    stack.layers[1].vars.w.assign([1.0, np.nan, np.inf])

  text = _Explain([_Layer()] * 4, change=Change)
  _Check(text, 'output of layer stack.layers[1] (FnLayer)', 'stage 0', 'micro-batch 0')
  _Check(text, '2 NaN', '2 Inf', 'float32[2, 3]', 'inputs are finite', 'weights 1 NaN and 1 Inf')


@pytest.mark.parametrize('place, stage', [(1, 0), (3, 1)])
def testANonfiniteGradientOfAnInputIsReported(place, stage):
  """The square root of 0 is 0, its slope is not finite."""
  sub = [_Layer() for _ in range(4)]
  sub[place] = _Layer(lambda w, x: tf.sqrt(x) * w)
  _Check(
    _Explain([*sub, _Layer(lambda w, x: x * w + 1.0)], _At(2, 0.0)),
    *(f'gradient of its input of layer stack.layers[{place}] (FnLayer)', f'stage {stage}'),
    *('micro-batch 1', 'inputs are finite', 'weights finite', 'gradient of its output finite'),
  )


def testANonfiniteGradientOfAWeightIsReported():
  @tf.custom_gradient
  def Scale(w, x):
    return w * x, lambda dy: (tf.reduce_sum(dy * x, 0) / tf.zeros([_DIM]), dy * w)

  _Check(
    _Explain([_Layer(), _Layer(Scale), _Layer()]),
    *('gradient of the weight stack.layers[1].w', 'stack.layers[1] (FnLayer)', 'stage 0'),
    *('micro-batch 0', '0 NaN', '3 Inf', 'float32[3]', 'gradient of its output finite'),
  )


def testANonfiniteLossIsReported():
  """The loss of micro-batch 1 is NaN too, but has a weight of zero."""

  def Loss(theta, outputs, side):
    total = tf.reduce_sum(side)
    return {'loss': (tf.reduce_sum(outputs[0][:, 0] * side) / (total * (total - 4.0)), total)}

  side = tf.constant([1.0, 1.0, 0.0, 0.0, 2.0, 2.0])
  text = _Explain([_Layer()] * 3, side=side, loss_fn=Loss)
  _Check(text, 'loss of micro-batch 2', 'stage 1', '0 NaN', '1 Inf')
  assert not naming.Names(text, 'gradient')


def testANonfiniteGradientOfALossIsReported():
  def Loss(theta, outputs, side):
    total = tf.reduce_sum(side)
    return {'loss': (tf.reduce_sum(tf.sqrt(outputs[0] - 1.0)), total)}

  text = _Explain([_Layer()] * 3, loss_fn=Loss)
  _Check(text, 'gradient of the loss', 'micro-batch 0', 'stage 1', '6 Inf', 'loss is 0')


def testANonfiniteAuxiliaryLossIsReported():
  x = tf.tensor_scatter_nd_update(tf.ones([_BATCH, _DIM]), [[2, 0]], [0.0])
  _Check(
    _Explain([_Layer(), _Layer(), _AddsLogarithm(), _Layer()], x),
    *("auxiliary loss 'log'", 'stack.layers[2] (AuxLossLayer)', 'stage 1', 'micro-batch 1'),
    *('0 NaN', '1 Inf'),
  )


def testGradientsOfSkipsAndAuxiliaryLossesComeDown():
  """A gradient that reaches a layer by a skip alone."""

  @tf.custom_gradient
  def Break(x):
    return tf.identity(x), lambda dy: dy / 0.0

  sub = [
    _Layer(),
    skip.StashLayer.Params().Set(key='a'),
    _Layer(lambda w, x: tf.stop_gradient(x) * w),
    _AddsLogarithm(),
    skip.PopLayer.Params().Set(key='a'),
    _Layer(),
  ]
  sub[0] = _Layer(lambda w, x: Break(x * w))
  _Check(
    _Explain(sub),
    *('gradient of the weight stack.layers[0].w', 'stack.layers[0] (FnLayer)', 'stage 0'),
    'gradient of its output finite',
  )


def testMasksDependOnTheStep():
  """The dropout mask decides whether the value occurs at all."""
  sub = [
    _Layer(),
    dropout.DropoutLayer.Params().Set(keep_prob=0.3),
    _Layer(lambda w, x: tf.math.log(x - 0.1) * w),
  ]
  keep = dropout.DropoutLayer.Params().Set(keep_prob=0.3)
  stack = stacks.MakeStack([_Layer(), keep], dtype=tf.float32)
  with fprop_context.Scope(step=4):
    dropped = int(np.sum(stack.layers[1].FProp(nested_map.NestedMap(), tf.ones([2, _DIM])) == 0.0))
  stated = re.search(r'stack\.layers\[2\].* micro-batch 0: (\d) NaN', _Explain(sub))
  assert dropped and int(stated[1]) == dropped


def testAnOverflowingSumOfGradientsIsReported():
  """Every micro-batch's gradient is finite, their sum is not."""

  def Loss(theta, outputs, side):
    return {'loss': (6e37 * tf.reduce_sum(outputs[0][:, 0]), tf.reduce_sum(side))}

  text = _Explain([_Layer()] * 3, loss_fn=Loss, is_finite=True)
  _Check(text, 'largest gradient', '2.4e+38', 'stack.layers')


def testAnEngineWithoutALossIsRefused():
  stack = stacks.MakeStack([_Layer()], dtype=tf.float32)
  stack.Place(stacks.Devices(), tf.TensorSpec([2, _DIM]))
  with pytest.raises(ValueError, match=naming.Naming('engine', 'loss_fn')):
    check_numerics.Explain(stack.engine, [], 1)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
