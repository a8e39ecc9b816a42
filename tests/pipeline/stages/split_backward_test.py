# SPDX-License-Identifier: Apache-2.0
"""Layers with control flow, functions and any dtype, under a backward in parts."""

import collections
import re
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.layers import dropout, embedding, linear
from tests.toys import layers, random_layer, stacks

# Micro-batches of one size: of two every function would be traced twice (random_stacks_test).
_BATCH, _DIM = 4, layers.DIM
# Whole, kept and in halves, with and without recomputation.
_WAYS = [
  ('gpipe', 'stage'),
  ('gpipe', 'layer'),
  ('gpipe', 'none'),
  ('zb_h1', 'stage'),
  ('zb_h1', 'none'),
]
_FOUR_WAYS = _WAYS[1:]
# By layer, kept, and in halves: for what random_stacks_test has with every schedule and policy.
_THREE_WAYS = _WAYS[1:4]


def _With(fn):
  return layers.MatrixLayer.Params().Set(fn=fn)


def _Square():
  return layers.MatrixLayer.Params()


def _X():
  return layers.RandomInput(_BATCH, _DIM, seed=4)


def _Check(sub, ways, *inputs, xla=False, splits=None, num_micro_batches=1):
  """Each layer a stage of its own, if `splits` says nothing else; each (schedule, policy).

  One micro-batch shows what passes between stages; more take longer.
  """
  inputs = inputs or (_X(),)
  side = stacks.ExampleWeights(_BATCH)
  splits = splits or list(range(1, len(sub) + 1))
  stack = stacks.MakeStack(
    sub,
    num_stages=len(splits),
    num_micro_batches=num_micro_batches,
    splits=splits,
    xla=xla,
  )
  expected = stacks.Reference(sub, num_micro_batches, inputs, side)
  stacks.CheckWays(stack, inputs, side, ways, expected)


# ---- what layers compute -----------------------------------------------------------------


def _Cond(w, x):
  return tf.cond(
    tf.reduce_sum(x) > 0, lambda: tf.tanh(tf.matmul(x, w)), lambda: tf.sin(tf.matmul(x, w) * 2.0)
  )


def _Loop(w, x):
  def Body(i, y):
    return i + 1, tf.tanh(tf.matmul(y, w) + tf.cast(i, y.dtype))

  return tf.while_loop(lambda i, y: i < 3, Body, (tf.constant(0), x), maximum_iterations=3)[1]


def _DynamicLoop(w, x):
  limit = tf.cast(tf.reduce_max(tf.abs(x)) * 2.0, tf.int32) + 1
  return tf.while_loop(
    lambda i, y: i < limit, lambda i, y: (i + 1, tf.tanh(tf.matmul(y, w))), (tf.constant(0), x)
  )[1]


@tf.function(autograph=False)
def _Inner(w, x):
  return tf.tanh(tf.matmul(x, w)) * tf.sigmoid(x)


@tf.custom_gradient
def _DoubledGradient(x):
  return tf.sin(x), lambda dy: 2.0 * dy * tf.cos(x)


def _Custom(w, x):
  return _DoubledGradient(tf.matmul(_DoubledGradient(x), w))


def _Gather(w, x):
  ids = tf.argmax(x, axis=-1, output_type=tf.int32)
  return tf.gather(w, ids) * x + tf.gather(x, ids, axis=-1, batch_dims=1)[:, None]


def _Sorted(w, x):
  values, indices = tf.math.top_k(tf.matmul(x, w), _DIM)
  return values * tf.cast(indices + 1, x.dtype) + tf.linalg.matrix_transpose(tf.matmul(w, w))[0]


def _Gated(w, x):
  """Backward needs the indices and the softmax, but not the values between them."""
  values, indices = tf.math.top_k(tf.matmul(x, w), _DIM)
  return tf.nn.softmax(2.0 * values) * tf.cast(indices + 1, x.dtype)


def _Twice(w, x):
  """The same product used in several ways, and an input handed on as well."""
  y = tf.matmul(x, w)
  return tf.nn.softmax(y) + tf.cumsum(y, axis=1) * tf.cast(y > 0, y.dtype) + x


_KINDS = {
  'control_flow': [_Cond, _Loop, lambda w, x: _Inner(w, x) + _Inner(w, 2.0 * x)],
  'loop_and_gates': [_DynamicLoop, _Gated],
  'operations': [_Custom, _Gather, _Sorted, _Twice],
}


@pytest.mark.parametrize('kind', _KINDS)
def testLayersOfAllKinds(kind):
  # A layer before, so that each has an input gradient too.
  sub = [_Square(), *map(_With, _KINDS[kind])]
  ways = _WAYS if kind == 'control_flow' else _FOUR_WAYS
  # Two micro-batches take different branches and numbers of turns.
  _Check(sub, ways, splits=list(range(2, len(sub) + 1)), num_micro_batches=2)


def testLayersOfAllKindsCompiledByXla():
  bodies = [_Cond, _Loop, lambda w, x: _Inner(w, x) + _Inner(w, 2.0 * x), _Twice]
  sub = [_Square(), *map(_With, bodies)]
  ways = [('gpipe', 'none'), ('zb_h1', 'stage')]
  _Check(sub, ways, splits=[2, 3, 5], xla=True, num_micro_batches=2)


# ---- what goes between stages ------------------------------------------------------------


def testOutputsMayBeInputsOrTheSameTensor():
  """A residual may be an output, an output an input, and two outputs the same tensor."""

  def Double(w, x, *extras):
    y = tf.matmul(x, w)
    return y, y, x, *extras

  sub = [
    _With(Double),
    _With(lambda w, a, b, c: (tf.tanh(tf.matmul(a, w)) * b, c, c)),
    _With(lambda w, a, b, c: tf.matmul(a + tf.sin(b), w) * c),
  ]
  _Check(sub, _WAYS, num_micro_batches=2)


def testOutputsMayBeUnused():
  sub = [
    _With(lambda w, x: (tf.tanh(tf.matmul(x, w)), tf.matmul(x, w) * 2.0, None, tf.shape(x))),
    _With(lambda w, a, b, none, shape: (tf.matmul(a, w), [b, none])),
    _With(lambda w, a, nest: tf.matmul(a, w)),
  ]
  _Check(sub, _THREE_WAYS)


def testStagesMayHaveNoWeightsOrUnusedWeights():
  sub = [
    _Square(),
    dropout.DropoutLayer.Params().Set(keep_prob=0.6),
    layers.Without(lambda x: x),
    _With(lambda w, x: tf.tanh(x)),
  ]
  _Check(sub, _THREE_WAYS)


def testFirstStagesMayHaveIntegersOnly():
  """Neither the first stage nor the second has anything to differentiate."""
  ids = tf.constant(np.random.default_rng(1).integers(0, 5, [_BATCH, 2]), tf.int32)
  sub = [
    layers.Without(lambda ids: (ids + 1) % 5),
    layers.Without(lambda ids: (ids, ids > 2, None)),
    _With(lambda w, ids, flags, none: (tf.gather(w, ids % 3), flags)),
    _With(lambda w, x, flags: tf.where(flags[..., None], tf.tanh(x), x)[:, 0] @ w),
  ]
  _Check(sub, _THREE_WAYS, ids)


def _IntegersBetween():
  return [
    _Square(),
    layers.Without(lambda x: tf.cast(x > 0, tf.int32)),
    layers.Without(lambda ids: 1 - ids),
    _With(lambda w, ids: tf.gather(w, ids[:, 0])),
    _Square(),
  ]


def testIntegerStagesStopTheGradient():
  """Trained weights precede them, but no gradient can pass."""
  _Check(_IntegersBetween(), _FOUR_WAYS, splits=[1, 2, 3, 5])


def testStagesThatNoGradientReachesRunUnderXla():
  """TensorFlow makes a NoOp of a call that gives and changes nothing, which XLA cannot run."""
  ids = tf.constant(np.random.default_rng(1).integers(0, _DIM, [_BATCH]), tf.int32)
  table = _With(lambda w, ids: tf.gather(w, ids))
  to_ids = _With(lambda w, x: tf.argmax(tf.matmul(x, w), -1, tf.int32))
  unused = _With(lambda w, ids: 2 - ids)
  none = layers.Without(lambda ids: (ids + 1) % _DIM)
  # With four micro-batches every stage but the first has a forward after its first backward.
  ways = [('1f1b', 'stage'), ('zb_h1', 'none')]
  for sub in ([table, to_ids, none, table], [none, unused, table]):
    _Check(sub, ways, ids, xla=True, num_micro_batches=_BATCH)


def testIntegersMayDependOnFloats():
  def Route(w, x):
    y = tf.matmul(x, w)
    return y, nested_map.NestedMap(best=tf.argmax(y, -1), up=y > 0, half=tf.cast(y, tf.float32))

  def Take(w, x, nest):
    y = tf.where(nest.up, x, 0.1 * x) * tf.cast(nest.half, x.dtype)
    return tf.tanh(y @ w) * tf.cast(nest.best + 1, x.dtype)[:, None]

  _Check([_With(Route), _With(Take), _Square()], _FOUR_WAYS)


def testAFrozenMatrixMayHaveATrainedBias():
  # A frozen matrix and a trained bias.
  frozen = random_layer.RandomLayer.Params().Set(weights=['b'], fixed=True)
  sub = [_Square(), frozen, frozen, _Square()]
  _Check(sub, _THREE_WAYS, num_micro_batches=2)


def testSplitBackwardDrawsTheSameDropoutMasks():
  drop = dropout.DropoutLayer.Params().Set(keep_prob=0.5)
  sub = [drop, _Square(), drop, drop, _Square(), drop]
  _Check(sub, _THREE_WAYS, splits=[2, 4, 6], num_micro_batches=2)


# ---- embeddings --------------------------------------------------------------------------


@pytest.mark.parametrize(
  'schedule, policy, xla',
  [(*way, False) for way in _WAYS] + [('gpipe', 'none', True), ('zb_h1', 'stage', True)],
)
def testAnEmbeddingsGradientStaysSparse(schedule, policy, xla):
  """No micro-batch makes a tensor of the embedding's shape for it."""
  vocab_size = 50
  sub = [
    embedding.EmbeddingLayer.Params().Set(vocab_size=vocab_size, embedding_dim=_DIM),
    _Square(),
    _Square(),
  ]
  ids = tf.constant(np.random.default_rng(1).integers(0, vocab_size, [_BATCH, 2]), tf.int32)
  side = stacks.ExampleWeights(_BATCH)
  stack = stacks.MakeStack(
    sub,
    num_stages=2,
    num_micro_batches=2,
    splits=[2, 3],
    schedule=schedule,
    remat_policy=policy,
    xla=xla,
  )
  stack.Place(
    stacks.Devices(),
    *stacks.Specs((ids,)),
    loss_fn=stacks.SquareLoss,
  )
  step = stacks.StepFunction(stack)
  args = ((ids,), side, tf.constant(stacks.STEP, tf.int64))
  sums = {name: value.numpy() for name, value in step(*args).items()}
  expected = stacks.Reference(sub, 2, (ids,), side)
  stacks.CheckEqual((sums, stacks.Gradients(stack)), expected)
  library = step.get_concrete_function(*args).graph.as_graph_def().library
  backward = [
    collections.Counter(node.op for node in function.node_def)
    for function in library.function
    if re.match(r'__inference__(Backward|WeightGradient)', function.signature.name)
  ]
  # Two stages.
  assert len(backward) == 2
  for ops in backward:
    # One of the two weights is scattered to, and nothing is made dense.
    assert ops['UnsortedSegmentSum'] == 0
    assert ops['AssignAddVariableOp'] == 1
  assert sorted(ops['ResourceScatterAdd'] for ops in backward) == [0, 1]


# ---- bfloat16 ----------------------------------------------------------------------------


@pytest.mark.parametrize(
  'schedule, policy, xla',
  # except_last consists of stage and none.
  [
    *[('gpipe', 'except_last', False), ('zb_h1', 'none', False)],
    *[('1f1b_fused', 'stage', True), ('gpipe', 'layer', True)],
  ],
)
def testBfloat16ActivationsAndFloat32Weights(schedule, policy, xla):
  square = linear.ProjectionLayer.Params().Set(
    input_dim=_DIM, output_dim=_DIM, has_bias=True, activation='TANH'
  )
  sub = [
    embedding.EmbeddingLayer.Params().Set(vocab_size=5, embedding_dim=_DIM),
    square,
    dropout.DropoutLayer.Params().Set(keep_prob=0.7),
    square,
  ]
  ids = tf.constant(np.random.default_rng(1).integers(0, 5, [_BATCH, 2]), tf.int32)
  side = stacks.ExampleWeights(_BATCH, tf.float32)
  dtypes = {'dtype': tf.float32, 'fprop_dtype': tf.bfloat16}
  stack = stacks.MakeStack(
    sub,
    num_stages=2,
    num_micro_batches=2,
    splits=[2, 4],
    schedule=schedule,
    remat_policy=policy,
    xla=xla,
    **dtypes,
  )
  # As a float the step would have lost the digits that tell it, and the micro-batch, apart.
  late = 10**7
  sums, grads = stacks.Train(stack, (ids,), side, step=late)
  _, expected = stacks.Reference(sub, 2, (ids,), side, step=late, **dtypes)
  for s in stack.engine.stages:
    assert {v.dtype for v in (*s.trained.values(), *s.accumulators)} == {tf.float32}
  assert sums['loss'].dtype == np.float32
  norm = stacks.GlobalNorm(expected)
  for path, g in expected.items():
    # Rounding to 8 bits, which XLA does at other places.
    assert np.abs(grads[path] - g).max() <= 2e-2 * norm, path


def testAccumulatorsDoNotRoundToBfloat16():
  sub = [_With(lambda w, x: x * tf.cast(w[0], x.dtype))]
  stack = stacks.MakeStack(sub, num_micro_batches=4, dtype=tf.float32, fprop_dtype=tf.bfloat16)

  def Sum(theta, outputs, side):
    del theta
    return {'loss': (tf.reduce_sum(outputs[0]), tf.reduce_sum(side))}

  x, side = tf.ones([4, _DIM], tf.bfloat16), tf.constant([512.0, 1.0, 1.0, 1.0])
  _, grads = stacks.Train(stack, (x,), side, Sum)
  # 512 + 1 is 512 in bfloat16.
  np.testing.assert_array_equal(grads['stack.layers[0].w'][0], [515.0] * _DIM)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
