# SPDX-License-Identifier: Apache-2.0
"""Tests that layers and losses may read variables and tables, but not write or draw statefully."""

import contextlib
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.graph import side_effects
from tests import naming
from tests.toys import faulty_layers, layers, stacks

_DIM, _BATCH = layers.DIM, 4


def _Trace(fn):
  """Traces fn(x) with side effects forbidden."""

  def Run(x):
    with side_effects.Forbid('net'):
      return fn(x)

  tf.function(Run, autograph=False).get_concrete_function(tf.TensorSpec([_DIM]))


def _Loop(fn, x):
  return tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, fn(y)), [0, x])[1]


_AROUND = {
  'nothing': lambda fn, x: fn(x),
  'function': lambda fn, x: tf.function(fn)(x),
  'compiled': lambda fn, x: tf.function(fn, jit_compile=True)(x),
  'map_fn': tf.map_fn,
  'loop': _Loop,
  'loop in a function': lambda fn, x: tf.function(lambda y: _Loop(fn, y))(x),
  'cond': lambda fn, x: tf.cond(x[0] > 0, lambda: fn(x), lambda: x),
  'switch': lambda fn, x: tf.switch_case(tf.cast(x[0], tf.int32), [lambda: x, lambda: fn(x)]),
}


def _Table():
  return tf.lookup.experimental.MutableHashTable(tf.int32, tf.float32, default_value=0.0)


def _Insert(table, x):
  with tf.control_dependencies([table.insert(tf.constant(0), tf.constant(1.0))]):
    return tf.identity(x)


_EFFECTS = {
  'assign': (tf.Variable, [0.0], lambda v, x: x + v.assign_add(1.0), 'writes'),
  'insert': (_Table, [], _Insert, 'writes'),
  'dropout': (int, [], lambda _, x: tf.nn.dropout(x, 0.5), 'draws'),
  'timestamp': (int, [], lambda _, x: x * tf.cast(tf.timestamp(), x.dtype), 'draws'),
  'generator': (
    tf.random.Generator.from_seed,
    [1],
    lambda g, x: x + g.normal([]),
    'draws',
  ),
}
_READS = {
  'variable': (tf.Variable, [1.0], lambda v, x: x * v),
  'gather': (tf.Variable, [[1.0]], lambda v, x: x * tf.gather(v, 0)),
  'lookup': (_Table, [], lambda t, x: x + tf.ensure_shape(t.lookup(tf.constant(0)), [])),
  'export': (_Table, [], lambda t, x: x + tf.reduce_sum(t.export()[1])),
  'stateless': (int, [], lambda _, x: tf.nn.experimental.stateless_dropout(x, 0.5, [1, 2])),
}


@pytest.mark.parametrize('around', _AROUND)
@pytest.mark.parametrize('name', _EFFECTS)
def testCodeThatWritesOrDrawsRaises(name, around):
  make, args, fn, effect = _EFFECTS[name]
  state = make(*args)
  with pytest.raises(ValueError, match=naming.Naming('net', effect)):
    _Trace(lambda x: _AROUND[around](lambda y: fn(state, y), x))


@pytest.mark.parametrize('around', _AROUND)
@pytest.mark.parametrize('name', _READS)
def testCodeThatReadsPasses(name, around):
  make, args, fn = _READS[name]
  state = make(*args)
  _Trace(lambda x: _AROUND[around](lambda y: fn(state, y), x))


def testRecurrentNetworksOfCudnnDrawOnlyForDropout():
  def Run(dropout):
    x = tf.zeros([5, 2, _DIM])
    state = tf.zeros([1, 2, _DIM])
    return tf.raw_ops.CudnnRNN(
      input=x, input_h=state, input_c=state, params=tf.zeros([100]), dropout=dropout
    )

  _Trace(lambda x: Run(0.0))
  with pytest.raises(ValueError, match=naming.Naming('net', 'CudnnRNN', 'draws')):
    _Trace(lambda x: Run(0.5))


# ---- in a pipeline -------------------------------------------------------------------------------


def _AddsToItsWeight(w, x):
  return x * w.assign_add(w)


def _Stack(layer, **options):
  """Returns three layers in two stages; the last layer is `layer`."""
  sub = [layers.SilentLayer.Params(), layers.SilentLayer.Params(), layer]
  return stacks.MakeStack(sub, num_stages=2, splits=[1, 3], num_micro_batches=2, **options)


def _X():
  return tf.ones([_BATCH, _DIM], tf.float64)


def _Side():
  return tf.ones([_BATCH], tf.float64)


@pytest.mark.parametrize(
  'fn, word, policy, xla',
  [
    (_AddsToItsWeight, 'writes', 'stage', False),
    (_AddsToItsWeight, 'writes', 'except_last', True),
    (lambda w, x: tf.nn.dropout(x * w, 0.5), 'draws', 'layer', True),
    (lambda w, x: tf.nn.dropout(x * w, 0.5), 'draws', 'none', False),
  ],
)
def testSideEffectsOfALayerRaiseUnderAnyPolicy(fn, word, policy, xla):
  stack = _Stack(layers.SilentLayer.Params().Set(fn=fn), remat_policy=policy, xla=xla)
  for call in (
    lambda: stacks.Train(stack, (_X(),), _Side()),
    lambda: stacks.Evaluate(stack, (_X(),), _Side()),
  ):
    with pytest.raises(ValueError, match=naming.Naming('stack.layers[2]', word)) as e:
      call()
    stage = 'in stage 1 (stack.layers[1] to stack.layers[2]), micro-batch 0'
    assert stage in '\n'.join(e.value.__notes__)


def testSideEffectsRaiseWhenTheCutIsMade():
  stack = _Stack(layers.FnLayer.Params().Set(fn=_AddsToItsWeight))
  with pytest.raises(ValueError, match=naming.Naming('stack.layers[2]', 'assign_add')):
    stack.MakeCut(tf.TensorSpec([_BATCH, _DIM], tf.float64))


def testSideEffectsRaiseUnderATapeAndInTheLoss():
  count = tf.Variable(1.0, dtype=tf.float64)
  stack = _Stack(layers.SilentLayer.Params().Set(fn=lambda w, x: x * count.assign_add(1.0)))
  stack.Place(stacks.Devices(), *stacks.Specs((_X(),)))
  with pytest.raises(ValueError, match=naming.Naming('stack.layers[2]', 'writes')):
    stack(_X())

  def Loss(theta, outputs, side):
    return stacks.SquareLoss(theta, [outputs[0] * count.assign_add(1.0)], side)

  with pytest.raises(ValueError, match=naming.Naming('the loss', 'writes')):
    stacks.Train(_Stack(layers.FnLayer.Params()), (_X(),), _Side(), Loss)


@pytest.mark.parametrize(
  'cls, path',
  [
    (faulty_layers.TakesItsWeight, 'stack.layers[2]'),
    (faulty_layers.CallsItsChild, 'stack.layers[2].child'),
  ],
)
@pytest.mark.parametrize('schedule, policy', [('zb_h1', 'stage'), ('1f1b', 'none')])
def testWeightsMustBeArguments(cls, path, schedule, policy):
  stack = _Stack(cls.Params(), schedule=schedule, remat_policy=policy)
  with pytest.raises(ValueError, match=naming.Naming('stack.layers[2]', path, 'theta')):
    stacks.Train(stack, (_X(),), _Side())


def testTheLossTakesWeightsFromItsArgument():
  stack = _Stack(layers.FnLayer.Params())

  def Loss(theta, outputs, side):
    return stacks.SquareLoss(theta, [outputs[0] * stack.layers[2].theta.w], side)

  with pytest.raises(ValueError, match=naming.Naming('the loss', 'stack.layers[2]', 'theta')):
    stacks.Train(stack, (_X(),), _Side(), Loss)


def _OfDerived(w):
  return tf.recompute_grad(lambda x: tf.tanh(x * w))


# Custom gradients of x [_DIM] with the weight w [].
_LOST = {
  'surroundings': lambda w: tf.recompute_grad(lambda x: tf.tanh(2.0 * x * w)),
  'inner function': lambda w: tf.recompute_grad(tf.function(lambda x: tf.tanh(x * w))),
  'inner loop': lambda w: tf.recompute_grad(lambda x: _Loop(lambda y: y * w, tf.tanh(x))),
  'unused result': lambda w: lambda x: tf.recompute_grad(lambda x: (tf.tanh(x), x * w))(x)[0],
  'complex': lambda w: tf.recompute_grad(lambda x: tf.math.real(tf.complex(x, w * x) * 1j)),
  'argument, too': lambda w: lambda x: tf.recompute_grad(lambda x, u: x * u * tf.exp(w))(x, w),
}
_CUSTOM = {
  **_LOST,
  # Plain TensorFlow has no gradient for it, either.
  'derived': lambda w: _OfDerived(tf.identity(w)),
  'argument': lambda w: lambda x: tf.recompute_grad(lambda x, w: tf.tanh(x * w))(x, w),
  'returned argument': lambda w: lambda x: tf.recompute_grad(lambda y: y)(x * w),
  'stopped': lambda w: tf.recompute_grad(lambda x: tf.tanh(x * tf.stop_gradient(w))),
  'plain': lambda w: lambda x: tf.tanh(x * w),
}


@pytest.mark.parametrize('around', _AROUND)
@pytest.mark.parametrize('custom', _CUSTOM)
def testACustomGradientTakesWeightsAsArguments(custom, around):
  def Run(x, w):
    with side_effects.CheckCaptures('net', {'net.w': w}):
      _AROUND[around](_CUSTOM[custom](w), x)

  is_lost = custom in _LOST
  with (
    pytest.raises(ValueError, match=naming.Naming('net', 'net.w'))
    if is_lost
    else contextlib.nullcontext()
  ):
    tf.function(Run, autograph=False).get_concrete_function(tf.ones([_DIM]), tf.ones([]))


@pytest.mark.parametrize('policy', ['stage', 'layer', 'none'])
@pytest.mark.parametrize('fn', [lambda v, x: x * v, lambda v, x: tf.map_fn(lambda y: y * v, x)])
def testVariablesThatWouldNotBeTrainedRaise(fn, policy):
  stack = _Stack(faulty_layers.HasAVariable.Params().Set(fn=fn), remat_policy=policy)
  for _ in range(2):  # A failed trace counts for nothing.
    with pytest.raises(ValueError, match=naming.Naming('stack.layers[2]', 'undeclared:0')):
      stacks.Train(stack, (_X(),), _Side())


def testAVariableOfTheLossWouldNotBeTrained():
  scale = tf.Variable(2.0, dtype=tf.float64, name='scale')

  def Loss(theta, outputs, side):
    return stacks.SquareLoss(theta, (outputs[0] * scale,), side)

  with pytest.raises(ValueError, match=naming.Naming('the loss', 'scale:0')):
    stacks.Train(_Stack(layers.FnLayer.Params()), (_X(),), _Side(), Loss)


@pytest.mark.parametrize(
  'layer',
  [
    faulty_layers.HasAVariable.Params().Set(trainable=False),
    faulty_layers.ReadsOtherVariables.Params(),
  ],
)
def testUntrainedVariablesMayBeRead(layer):
  sums, _ = stacks.Train(_Stack(layer), (_X(),), _Side())
  np.testing.assert_array_equal(sums['loss'], [_BATCH, _BATCH])


# Every two of them come together.
@pytest.mark.parametrize(
  'around, policy, schedule',
  [
    (around, policy, ('1f1b', 'zb_h1')[(i + j) % 2])
    for i, around in enumerate(['nothing', 'cond', 'map_fn'])
    for j, policy in enumerate(['stage', 'layer', 'none'])
  ],
)
def testAssertionsAreCheckedUnderAnyPolicy(around, policy, schedule):
  def Assert(x):
    tf.debugging.assert_less(x, tf.constant(0.5, x.dtype))
    return x

  def Fn(w, x):
    _AROUND[around](Assert, x[0])  # Nothing depends on the result.
    return x * w

  sub = [layers.SilentLayer.Params().Set(fn=Fn), layers.SilentLayer.Params()]
  stack = stacks.MakeStack(sub, num_stages=2, schedule=schedule, remat_policy=policy)
  # The other stage may report that it was cancelled.
  with pytest.raises((tf.errors.InvalidArgumentError, tf.errors.CancelledError)):
    stacks.Train(stack, (_X(),), _Side())


def testALayerMayReadATable():
  table = tf.lookup.StaticHashTable(
    tf.lookup.KeyValueTensorInitializer([0], tf.constant([2.0], tf.float64)), default_value=0.0
  )
  fn = tf.function(lambda w, x: x * w + table.lookup(tf.constant(0)))
  stack = _Stack(layers.SilentLayer.Params().Set(fn=fn))
  stack.Place(stacks.Devices(), *stacks.Specs((_X(),)))
  np.testing.assert_array_equal(stack.Predict(_X()), 3.0 * _X())


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
