# SPDX-License-Identifier: Apache-2.0
"""Chunked logits against whole ones."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.layers import chunked_logits

_DIM, _VOCAB = 4, 9


def _LogitsFn(weights, inputs):
  """A softmax with a bound, so that its gradient is not linear."""
  return 3.0 * tf.tanh(inputs @ weights['w'] + weights['b'])


def _Values(shape):
  h, w, b, g = (
    tf.random.stateless_normal(s, [i, 2], dtype=tf.float64)
    for i, s in enumerate([(*shape, _DIM), (_DIM, _VOCAB), (_VOCAB,), (2, *shape)])
  )
  ids = tf.random.stateless_uniform(shape, [1, 2], 0, _VOCAB, tf.int32)
  return h, {'w': w, 'b': b}, ids, g


def _Chunked(h, weights, chunk_size, logits_fn=_LogitsFn):
  return chunked_logits.ChunkedLogits(
    logits_fn, weights, h, num_classes=_VOCAB, chunk_size=chunk_size
  )


def _WithGradients(statistics, h, weights, g):
  """Returns statistics and the gradients of weighted sums of the cross entropies."""
  with tf.GradientTape() as tape:
    tape.watch((h, weights))
    xent, total, hits = statistics(h, weights)
    objective = tf.reduce_sum(xent * g[0] + total * g[1])
  return xent, total, hits, *tf.nest.flatten(tape.gradient(objective, (h, weights)))


@pytest.mark.parametrize('shape_is_known, xla', [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize('shape, chunk_size', [((1,), 3), ((2, 3), 2), ((7,), 3), ((5, 2), 10)])
def testEqualWholeLogits(shape, chunk_size, shape_is_known, xla):
  h, weights, ids, g = _Values(shape)

  def Whole(h, weights):
    return chunked_logits.FromLogits(_LogitsFn(weights, h), ids)

  @tf.function(autograph=False, jit_compile=xla)
  def Chunks(h, weights):
    return _WithGradients(
      lambda h, weights: _Chunked(h, weights, chunk_size).StatisticsOf(ids), h, weights, g
    )

  known = h.shape if shape_is_known else [*[None] * len(shape), _DIM]
  actual = Chunks.get_concrete_function(tf.TensorSpec(known, h.dtype), weights)(h, weights)
  for a, e in zip(actual, _WithGradients(Whole, h, weights, g), strict=True):
    assert a.shape == e.shape
    np.testing.assert_allclose(a, e, rtol=1e-12, atol=1e-12)
  assert 0 < sum(actual[2].numpy().flat) < len(actual[2].numpy().flat) or shape == (1,)


def testStatisticsEqualTheirDefinitions():
  h, weights, ids, _ = _Values([6])
  p = tf.nn.log_softmax(_LogitsFn(weights, h)).numpy()
  xent, total, hits = _Chunked(h, weights, 4).StatisticsOf(ids)
  np.testing.assert_allclose(xent, -p[np.arange(6), ids], rtol=1e-12)
  np.testing.assert_allclose(total, -p.sum(axis=1), rtol=1e-12)
  np.testing.assert_array_equal(hits, p.argmax(axis=1) == ids.numpy())


@pytest.mark.parametrize('chunk_size, expected', [(4, 4), (100, 12)])
def testAtMostTheLogitsOfAChunkExist(chunk_size, expected):
  sizes = []

  def Recorded(weights, inputs):
    sizes.append(inputs.shape[0])
    return _LogitsFn(weights, inputs)

  h, weights, ids, g = _Values([12])

  @tf.function(autograph=False)
  def Run(h, weights):
    return _WithGradients(
      lambda h, weights: _Chunked(h, weights, chunk_size, Recorded).StatisticsOf(ids),
      h,
      weights,
      g,
    )

  Run(h, weights)
  assert len(sizes) >= 2
  assert set(sizes) - {0} == {expected}  # A call without rows tells the dtype.


def testManyChunksOfBfloat16AddUp():
  """A bfloat16 sum of halves stops growing at 128, after 256 terms."""

  @tf.function(autograph=False)
  def Gradient(h, w):
    logits = chunked_logits.ChunkedLogits(
      lambda weights, x: x @ weights, w, h, num_classes=2, chunk_size=1
    )
    (gradient,) = tf.gradients(logits.StatisticsOf(tf.zeros([512], tf.int32)).xent, w)
    return gradient

  gradient = Gradient(tf.ones([512, 1], tf.bfloat16), tf.zeros([1, 2], tf.bfloat16))
  np.testing.assert_array_equal(tf.cast(gradient, tf.float32), [[-256, 256]])


@pytest.mark.parametrize('sizes, chunk_size', [([9], 0), ([4, 4, 1], 0), ([2, 7], 4)])
def testJoinedSlicesEqualTheWhole(sizes, chunk_size):
  h, weights, ids, g = _Values([6, 2])
  weights['w'] = tf.concat([weights['w'][:, :5]] * 2, axis=1)[:, :_VOCAB]  # Logits may be equal.
  weights['b'] *= 0.0

  def Joined(h, weights):
    slices, first = [], 0
    for size in sizes:
      part = {'w': weights['w'][:, first : first + size], 'b': weights['b'][first : first + size]}
      logits = _Chunked(h, part, chunk_size)
      slices.append(logits.SliceStatisticsOf(ids - first))
      first += size
    return chunked_logits.Join(slices, ids, _VOCAB)

  def Whole(h, weights):
    return chunked_logits.FromLogits(_LogitsFn(weights, h), ids)

  actual, expected = (_WithGradients(f, h, weights, g) for f in (Joined, Whole))
  for a, e in zip(actual, expected, strict=True):
    np.testing.assert_allclose(a, e, rtol=1e-12, atol=1e-12)


def testAClassOfNoSliceGivesNan():
  h, weights, ids, _ = _Values([4])
  ids = tf.tensor_scatter_nd_update(ids, [[0], [1]], [-1, _VOCAB])
  xent = chunked_logits.Join([_Chunked(h, weights, 0).SliceStatisticsOf(ids)], ids, _VOCAB).xent
  np.testing.assert_array_equal(tf.math.is_nan(xent), [True, True, False, False])


def testIntegerWeightsHaveNoGradient():
  h, weights, ids, g = _Values([6])

  def Scaled(weights, inputs):
    return _LogitsFn({**weights, 'w': weights['w'] / tf.cast(weights['scale'], tf.float64)}, inputs)

  scaled = {**weights, 'scale': tf.constant(2)}
  halves = {**weights, 'w': weights['w'] / 2}
  actual = _WithGradients(
    lambda h, w: _Chunked(h, {**w, 'scale': scaled['scale']}, 4, Scaled).StatisticsOf(ids),
    h, weights, g,
  )  # fmt: skip
  expected = _WithGradients(
    lambda h, w: chunked_logits.FromLogits(_LogitsFn(w, h), ids), h, halves, g
  )
  for a, e in zip(actual[:4], expected[:4], strict=True):
    np.testing.assert_allclose(a, e, rtol=1e-12)


def testConvertsIntoWholeLogits():
  h, weights, ids, _ = _Values([2, 3])
  logits = _Chunked(h, weights, 4)
  assert logits.shape == [2, 3, _VOCAB]
  np.testing.assert_array_equal(tf.nn.softmax(logits), tf.nn.softmax(_LogitsFn(weights, h)))


def testStatisticsOfTheSameLabelsAreComputedOnce():
  h, weights, ids, _ = _Values([6])
  logits = _Chunked(h, weights, 4)
  assert logits.StatisticsOf(ids) is logits.StatisticsOf(ids)
  assert logits.StatisticsOf(ids) is not logits.StatisticsOf((ids + 1) % _VOCAB)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
