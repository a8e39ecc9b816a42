# SPDX-License-Identifier: Apache-2.0
"""Micro-batches: sizes, and Split and Merge as inverses on nests of any kind."""

import collections
import sys

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.pipeline.stages import micro_batch
from tests import naming

_SETTINGS = hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
_Pair = collections.namedtuple('_Pair', ['first', 'second'])


@hypothesis.given(st.integers(1, 300), st.integers(1, 40))
def testSizesAreEvenAndNeverEmpty(batch_size, num_micro_batches):
  sizes = micro_batch.Sizes(batch_size, num_micro_batches)
  assert sum(sizes) == batch_size
  assert len(sizes) == min(batch_size, num_micro_batches)
  assert min(sizes) >= 1
  assert max(sizes) - min(sizes) <= 1
  assert sizes == sorted(sizes, reverse=True)


def testSizesByHand():
  assert micro_batch.Sizes(7, 4) == [2, 2, 2, 1]
  assert micro_batch.Sizes(8, 4) == [2, 2, 2, 2]
  assert micro_batch.Sizes(2, 4) == [1, 1]
  assert micro_batch.Sizes(5, 1) == [5]


@pytest.mark.parametrize(
  'batch_size, number, names',
  [
    (4, 0, ['num_micro_batches', 'got 0']),
    (4, -1, ['num_micro_batches', 'got -1']),
    (0, 2, ['batch', 'example', 'got 0']),
  ],
)
def testSizesRefusesEmptyBatchesAndZeroMicroBatches(batch_size, number, names):
  with pytest.raises(ValueError, match=naming.Naming('at least', *names)):
    micro_batch.Sizes(batch_size, number)


_DTYPES = (tf.float32, tf.float64, tf.bfloat16, tf.int32, tf.int64, tf.uint8, tf.bool, tf.string)


def _Leaf(dtype, shape, seed):
  values = np.random.default_rng(seed).integers(0, 2, shape)
  if dtype == tf.string:
    return tf.constant(values.astype(str))
  return tf.cast(tf.constant(values), dtype)


def _Nests(leaves):
  return st.recursive(
    leaves,
    lambda inner: st.one_of(
      st.lists(inner, min_size=1, max_size=3),
      st.lists(inner, min_size=1, max_size=3).map(tuple),
      st.tuples(inner, inner).map(lambda two: _Pair(*two)),
      st.dictionaries(st.sampled_from(['a', 'b', 'c']), inner, min_size=1).map(
        nested_map.NestedMap
      ),
    ),
    max_leaves=6,
  )


_LEAVES = st.one_of(
  st.none(), st.tuples(st.sampled_from(_DTYPES), st.integers(0, 2), st.integers(0, 99))
)


def _IsLeaf(value):
  return value is None or (isinstance(value, tuple) and value and isinstance(value[0], tf.DType))


def _Map(fn, nest):
  """Applies fn to the leaves, without the code under test."""
  if _IsLeaf(nest) or isinstance(nest, tf.Tensor):
    return fn(nest)
  if isinstance(nest, dict):
    return type(nest)({k: _Map(fn, v) for k, v in nest.items()})
  if isinstance(nest, _Pair):
    return _Pair(*(_Map(fn, v) for v in nest))
  return type(nest)(_Map(fn, v) for v in nest)


@_SETTINGS
@hypothesis.given(
  nest=_Nests(_LEAVES),
  batch_size=st.integers(1, 9),
  number=st.integers(1, 5),
  batch_dim=st.integers(0, 1),
)
def testMergeUndoesSplit(nest, batch_size, number, batch_dim):
  def Tensor(leaf):
    if leaf is None:
      return None
    dtype, extra_dims, seed = leaf
    shape = [3] * batch_dim + [batch_size] + [2] * extra_dims
    return _Leaf(dtype, shape, seed)

  whole = _Map(Tensor, nest)
  tensors = [x for x in tf.nest.flatten(whole) if x is not None]
  hypothesis.assume(tensors)
  pieces = micro_batch.Split(whole, number, batch_dim)
  sizes = micro_batch.Sizes(batch_size, number)
  assert [micro_batch.BatchSize(piece, batch_dim) for piece in pieces] == sizes
  for piece in pieces:
    tf.nest.assert_same_structure(piece, whole)
    types = [type(v) for v in (piece, whole)]
    assert types[0] is types[1]
    for a, b in zip(tf.nest.flatten(piece), tf.nest.flatten(whole), strict=True):
      assert (a is None) == (b is None)
      assert a is None or a.dtype == b.dtype
  merged = micro_batch.Merge(pieces, batch_dim)
  tf.nest.assert_same_structure(merged, whole)
  for a, b in zip(tf.nest.flatten(merged), tf.nest.flatten(whole), strict=True):
    assert (a is None) == (b is None)
    if a is not None:
      assert a.dtype == b.dtype
      np.testing.assert_array_equal(a.numpy(), b.numpy())


def testTheOrderOfExamplesIsKept():
  x = tf.range(7)
  pieces = micro_batch.Split(nested_map.NestedMap(x=x, none=None), 4)
  assert [piece.x.numpy().tolist() for piece in pieces] == [[0, 1], [2, 3], [4, 5], [6]]
  assert all(isinstance(p, nested_map.NestedMap) and p.none is None for p in pieces)


def testSplitsAlongTheGivenDimensionInsideAFunction():
  @tf.function(autograph=False)
  def Run(x):
    pieces = micro_batch.Split((x,), 2, batch_dim=1)
    return [piece[0] for piece in pieces], micro_batch.Merge(pieces, batch_dim=1)[0]

  x = tf.reshape(tf.range(12), [2, 3, 2])
  pieces, merged = Run(x)
  np.testing.assert_array_equal(pieces[0], x[:, :2])
  np.testing.assert_array_equal(pieces[1], x[:, 2:])
  np.testing.assert_array_equal(merged, x)


def testAFunctionWithoutAStaticBatchSizeNamesTheTensor():
  @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, 3])])
  def Run(x):
    return micro_batch.Split(nested_map.NestedMap(ids=x), 2)

  with pytest.raises(ValueError, match=naming.Naming('input.ids', 'dimension 0', '(None, 3)')):
    Run(tf.ones([4, 3]))


def testSizesThatDifferAreNamed():
  nest = nested_map.NestedMap(x=tf.ones([4, 2]), y=[tf.ones([4]), (tf.ones([3]),)])
  with pytest.raises(
    ValueError, match=naming.Naming('dimension 0', '4 at input.x', '3 at input.y[1][0]')
  ):
    micro_batch.Split(nest, 2)


@pytest.mark.parametrize('nest', [None, [], (None, {'a': None})])
def testNoTensorAtAllIsAnError(nest):
  with pytest.raises(ValueError, match=naming.Naming('tensor', 'batch size')):
    micro_batch.BatchSize(nest)


def testAScalarHasNoBatch():
  with pytest.raises(ValueError, match=naming.Naming('input[1]', 'dimension 0', '()')):
    micro_batch.Split((tf.ones([2]), tf.constant(1.0)), 2)
  with pytest.raises(ValueError, match=naming.Naming('input', 'dimension 1', '(2,)')):
    micro_batch.Split(tf.ones([2]), 2, batch_dim=1)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
