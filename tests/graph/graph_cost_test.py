# SPDX-License-Identifier: Apache-2.0
"""Tests of the FLOP count of traced functions, against counts by hand."""

import sys

import pytest
import tensorflow as tf

from lingvo_gpipe.graph import graph_cost
from tests import naming


def _Trace(fn, *shapes, dtype=tf.float32):
  specs = [x if isinstance(x, tf.TensorSpec) else tf.TensorSpec(x, dtype) for x in shapes]
  return tf.function(fn, autograph=False).get_concrete_function(*specs)


def _Count(fn, *shapes):
  return graph_cost.CountFlops(_Trace(fn, *shapes))


def _Flops(fn, *shapes):
  cost = _Count(fn, *shapes)
  assert cost.unknown == {}
  return cost.flops


@pytest.fixture(name='w')
def _Weights():
  return tf.Variable(tf.ones([8, 4]), name='w')


def testDense(w):
  b = tf.Variable(tf.zeros([4]))
  traced = _Trace(lambda x: tf.nn.relu(tf.nn.bias_add(x @ w, b)), [16, 8])
  expected = 2 * 16 * 8 * 4 + 16 * 4 + 16 * 4
  cost = graph_cost.CountFlops(traced)
  assert (cost.flops, cost.unknown) == (expected, {})
  assert graph_cost.CountFlops(traced.graph).flops == expected


def testAttentionByEinsum():
  batch, time, heads, dim = 2, 6, 3, 4
  model = heads * dim
  weights = [tf.Variable(tf.ones([model, heads, dim])) for _ in range(4)]

  def Attention(x):
    q, k, v = (tf.einsum('...D,DNH->...NH', x, w) for w in weights[:3])
    logits = tf.einsum('BTNH,BSNH->BNTS', q * dim**-0.5, k)
    size = tf.shape(x)[1]
    causal = tf.linalg.band_part(tf.ones([size, size]), -1, 0)
    probs = tf.nn.softmax(logits + (causal - 1.0) * 1e9)
    return tf.einsum('BTNH,DNH->BTD', tf.einsum('BNTS,BSNH->BTNH', probs, v), weights[3])

  projections = 4 * 2 * batch * time * model * heads * dim
  scores = batch * heads * time * time
  assert _Flops(Attention, [batch, time, model]) == (
    projections + batch * time * model + 2 * (2 * scores * dim) + scores + 5 * scores
  )


def testConvNet():
  w = tf.Variable(tf.ones([3, 3, 3, 8]))

  def Net(x):
    y = tf.nn.relu(tf.nn.conv2d(x, w, 1, 'SAME'))
    return tf.reduce_mean(tf.nn.max_pool2d(y, 2, 2, 'VALID'), axis=[1, 2])

  outputs = 2 * 16 * 16 * 8
  pooled = outputs // 4
  assert _Flops(Net, [2, 16, 16, 3]) == 2 * outputs * 27 + outputs + pooled * 4 + pooled


def testNestedFunctionsAreCountedAtEveryCall(w):
  inner = tf.function(lambda x: tf.tanh(x @ w), autograph=False)
  middle = tf.function(lambda x: inner(x) + inner(2.0 * x), autograph=False, jit_compile=True)
  calls = lambda x: middle(x) + inner(x)  # noqa: E731
  once = 2 * 16 * 8 * 4 + 16 * 4
  assert _Flops(calls, [16, 8]) == (2 * once + 16 * 8 + 16 * 4) + once + 16 * 4


def testFunctionsAreCountedWithTheShapesOfTheCall(w):
  """A function traced for any batch is counted with the shapes and constants of its call."""

  @tf.function(
    input_signature=[tf.TensorSpec([None, 8]), tf.TensorSpec([], tf.int32)], autograph=False
  )
  def Inner(x, n):
    y = tf.reshape(x @ w, [n, -1])
    values, _ = tf.math.top_k(y, 2)
    return tf.reduce_sum(values) + tf.reduce_sum(tf.tanh(y))

  flops = _Flops(lambda x: Inner(x, tf.shape(x)[0] // 2), [16, 8])
  assert flops == 2 * 16 * 8 * 4 + 64 + 8 * 2 + 64 + 64 + 1


def testRecomputedAndCustomGradientBodies(w):
  once = 2 * 16 * 8 * 4 + 16 * 4

  @tf.custom_gradient
  def Custom(x):
    return tf.tanh(x @ w), lambda dy, variables=None: (dy @ tf.transpose(w), [None])

  assert _Flops(tf.recompute_grad(lambda x: tf.tanh(x @ w)), [16, 8]) == once
  assert _Flops(Custom, [16, 8]) == once
  assert _Flops(tf.function(Custom, autograph=False), [16, 8]) == once

  def Backward(x):
    body = tf.recompute_grad(lambda x: tf.tanh(x @ w))
    with tf.GradientTape() as tape:
      tape.watch(x)
      y = tf.reduce_sum(body(x))
    return tape.gradient(y, [x, w])

  # The first forward is pruned. Left: a barrier (adds 0 to x), the body, TanhGrad, two products.
  assert _Flops(Backward, [16, 8]) == 16 * 8 + once + 16 * 4 + 2 * (2 * 16 * 8 * 4)


def testBranches(w):
  def Branch(x):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: x @ w, lambda: x[:, :4] + 1.0)

  assert _Flops(Branch, [16, 8]) == 16 * 8 + 1 + 2 * 16 * 8 * 4

  def Cases(x, i):
    return tf.switch_case(i, [lambda: x, lambda: x @ tf.ones([8, 8]), lambda: -x])

  index = tf.TensorSpec([], tf.int32)
  assert _Flops(Cases, [16, 8], index) == 2 * 16 * 8 * 8
  # The branch is known inside a function that is called with a constant.
  inner = tf.function(Cases, autograph=False)
  assert _Flops(lambda x: inner(x, tf.constant(2)), [16, 8]) == 16 * 8


def testLoopsOfKnownLength():
  w = tf.ones([4, 4])
  iteration = 2 * 16 * 4 * 4

  def While(x, start=0, limit=5, step=1):
    return tf.while_loop(lambda i, x: i < limit, lambda i, x: (i + step, x @ w), (start, x))[1]

  overhead = 20  # Counters and conditions are scalars.
  for length, kwargs in ((5, {}), (3, {'start': 2}), (3, {'step': 2}), (0, {'limit': -1})):
    flops = _Flops(lambda x, kwargs=kwargs: While(x, **kwargs), [16, 4])
    assert length * iteration <= flops <= length * (iteration + overhead)

  def MapFn(x):
    return tf.map_fn(lambda row: tf.tanh(row), x)

  assert 16 * 100 <= _Flops(MapFn, [16, 100]) <= 16 * (100 + overhead)

  @tf.function(autograph=True)
  def Autograph(x, n):
    for _ in tf.range(n):
      x = x @ w
    return x

  # The length is an argument computed from a static shape.
  flops = _Flops(lambda x: Autograph(x, tf.shape(x)[0] - 9), [16, 4])
  assert 7 * iteration <= flops <= 7 * (iteration + overhead)


def testLoopBodiesReadVariablesAndCallFunctions():
  w = tf.Variable(tf.ones([8, 8]))
  inner = tf.function(lambda x: tf.tanh(x @ w), autograph=False)

  def Loop(x):
    limit = tf.reduce_max(tf.stack([tf.ones_like(x, tf.int32)[0, 0], 3, tf.size(x) - 127]))
    return tf.while_loop(lambda i, x: i < limit, lambda i, x: (i + 1, inner(x) @ w), (0, x))[1]

  iteration = 2 * (2 * 16 * 8 * 8) + 16 * 8
  assert 3 * iteration <= _Flops(Loop, [16, 8]) <= 3 * (iteration + 20)


def testLoopsOfUnknownLengthAreReported():
  w = tf.ones([4, 4])
  iteration = 2 * 16 * 4 * 4

  def Until(x, **kwargs):
    more = lambda x: tf.reduce_sum(x) < 100.0  # noqa: E731
    return tf.while_loop(more, lambda x: (x @ w,), (x,), **kwargs)[0]

  cost = _Count(Until, [16, 4])
  (unknown,) = cost.unknown
  assert unknown in ('While', 'StatelessWhile')
  assert iteration <= cost.flops <= iteration + 16 * 4 + 20
  bounded = _Count(lambda x: Until(x, maximum_iterations=3), [16, 4])
  assert set(bounded.unknown) == {unknown}
  assert 3 * iteration <= bounded.flops <= 3 * (iteration + 16 * 4 + 20)


def testUnknownOpsAreReportedAndNeverZero():
  large = _Count(lambda x: tf.linalg.inv(x), [2, 40, 40])
  assert (large.flops, large.unknown) == (3200, {'MatrixInverse': 3200})
  small = _Count(lambda x: tf.linalg.inv(x), [2, 8, 8])
  assert (small.flops, small.unknown) == (128, {})
  inner = tf.function(tf.linalg.inv, autograph=False)
  twice = _Count(lambda x: inner(inner(x)), [2, 40, 40])
  assert (twice.flops, twice.unknown) == (6400, {'MatrixInverse': 6400})


def testOnlyNeededOpsCount(w):
  counter = tf.Variable(tf.zeros([3]))

  def Body(x):
    _ = tf.tanh(x @ w)  # Dead.
    counter.assign_add(tf.ones([3]))  # A side effect.
    return x + 1.0

  assert _Flops(Body, [16, 8]) == 3 + 16 * 8
  assert _Flops(tf.function(Body, autograph=False), [16, 8]) == 3 + 16 * 8


def testConstantsAndShapesAreFolded():
  def Scale(x):
    shape = tf.shape(x)
    return x * tf.sqrt(tf.cast(shape[0] * shape[1], tf.float32)) + tf.sin(tf.ones([8]))

  assert _Flops(Scale, [16, 8]) == 2 * 16 * 8
  # Too large to be folded.
  assert _Flops(lambda x: x + tf.sin(tf.ones([200, 200])), [1]) == 2 * 200 * 200


def testRandomBitsAreFree():
  def Dropout(x, seed):
    bits = tf.random.stateless_uniform(x.shape, seed, None, None, tf.uint32, alg='philox')
    return tf.where(bits < 2**31, 2.0 * x, tf.zeros_like(x))

  seed_arithmetic = 4  # On scalars.
  expected = 3 * 16 * 8 + seed_arithmetic
  assert _Flops(Dropout, [16, 8], tf.TensorSpec([2], tf.int64)) == expected


def testUnknownShapesNameTheOp(w):
  with pytest.raises(ValueError, match=naming.Naming("'my_product:0'", 'MatMul', '(None, 4)')):
    _Count(lambda x: tf.matmul(x, w, name='my_product'), [None, 8])
  inner = tf.function(lambda x: tf.tanh(x, name='my_tanh'), autograph=False)
  with pytest.raises(ValueError, match='my_tanh'):
    _Count(inner, [None, 8])


def testCountsWhileAnotherFunctionIsTraced(w):
  counts = []

  @tf.function(autograph=False)
  def Outer(x):
    inner = tf.function(lambda x: x @ w, autograph=False)
    limit = lambda: tf.maximum(tf.constant(1), 2)  # noqa: E731
    iteration = lambda i, x: (i + 1, inner(x)[:, :1] + x)  # noqa: E731
    length = lambda x: tf.while_loop(lambda i, x: i < limit(), iteration, (0, x))[1]  # noqa: E731
    counts.append(_Flops(length, [16, 8]))
    return inner(x)

  Outer(tf.ones([2, 8]))
  assert 2 * (2 * 16 * 8 * 4 + 16 * 8) <= counts[0] <= 2 * (2 * 16 * 8 * 4 + 16 * 8 + 20)


def testCostsAdd():
  a = graph_cost.Cost(3, {'Foo': 1})
  b = graph_cost.Cost(4, {'Foo': 2, 'Bar': 3})
  assert a + b == graph_cost.Cost(7, {'Foo': 3, 'Bar': 3})
  assert b.Times(2) == graph_cost.Cost(8, {'Foo': 4, 'Bar': 6})
  assert b.Times(0) == graph_cost.Cost()


def testTakesTracedFunctionsOnly():
  with pytest.raises(TypeError, match='get_concrete_function'):
    graph_cost.CountFlops(lambda x: x)


def testALargeUnknownOperationWithASmallResultIsReported():
  @tf.function(autograph=False)
  def Run(x):
    return tf.linalg.svd(x, compute_uv=False)

  cost = graph_cost.CountFlops(Run.get_concrete_function(tf.TensorSpec([4, 2000])))
  assert cost.unknown == {'Svd': 8000}
  assert cost.flops >= 8000


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
