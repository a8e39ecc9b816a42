# SPDX-License-Identifier: Apache-2.0
"""Tests of shape checks and their messages."""

import sys

import pytest
import tensorflow as tf

from lingvo_gpipe.core import shapes
from tests import naming


def _Spec(*dims):
  return tf.TensorSpec(dims, tf.float32)


UNKNOWN_RANK = tf.TensorSpec(None, tf.float32)


def testMatchingAndUnknownShapesPass():
  for x in (_Spec(2, 3), _Spec(None, 3), _Spec(2, None), UNKNOWN_RANK, tf.zeros([2, 3])):
    shapes.CheckRank('p', x, 2)
    shapes.CheckLastDim('p', x, 3)
    shapes.CheckShape('p', x, [2, 3])
    shapes.CheckShape('p', x, [2, None])
    shapes.CheckPaddings('p', None, x)
    shapes.CheckPaddings('p', _Spec(2), x)


@pytest.mark.parametrize(
  ('check', 'names'),
  [
    (lambda: shapes.CheckRank('a.b', _Spec(2, None), 3), ['a.b', 'inputs', 'rank 3', '[2, ?]']),
    (lambda: shapes.CheckRank('a', _Spec(), 1, 'ids'), ['a: ids', 'rank 1', 'got shape []']),
    (lambda: shapes.CheckLastDim('a', _Spec(2, 3), 4), ['a:', 'inputs', 4, 'got shape [2, 3]']),
    (lambda: shapes.CheckLastDim('a', _Spec(), 4), ['a:', 'inputs', 4, 'got shape []']),
    (
      lambda: shapes.CheckShape('a', _Spec(2), [2, 3]),
      ['a: inputs', '[2, 3]', 'got shape [2]'],
    ),
    (
      lambda: shapes.CheckShape('a', _Spec(2, 4), [None, 3]),
      ['a: inputs', '[?, 3]', 'got shape [2, 4]'],
    ),
    (
      lambda: shapes.CheckPaddings('a', _Spec(2, 3), _Spec(2, 3)),
      ['a: paddings', '[2]', 'got shape [2, 3]'],
    ),
  ],
)
def testMessagesNameTheMismatch(check, names):
  with pytest.raises(ValueError, match=naming.Naming(*names)):
    check()


def testFormatNest():
  nest = (
    {'b': _Spec(2, 3), 'a': [None, tf.zeros([1], tf.int32)]},
    tf.TensorSpec(None, tf.bool),
    42,
  )
  assert shapes.FormatNest(nest) == '({a: [None, int32[1]], b: float32[2, 3]}, bool<unknown>, int)'
  paths = ['x[0].a[0]', 'x[0].a[1]', 'x[0].b', 'x[1]', 'x[2]']
  assert [path for path, _ in shapes.Leaves(nest, 'x')] == paths
  assert [a for _, a in shapes.Leaves(nest)] == tf.nest.flatten(nest)


def testCheckNest():
  specs = {'a': [_Spec(2, 3), None]}
  shapes.CheckNest('fc', 'w', {'a': [_Spec(5, 4), None]}, specs)
  for nest, error, names in (
    (
      {'a': [_Spec(2, 3)]},
      ValueError,
      ['w', 'expected {a: [float32[2, 3], None]}', 'got {a: [float32[2, 3]]}'],
    ),
    ({'a': [None, None]}, ValueError, ['w.a[0]', 'expected float32[2, 3]', 'got None']),
    ({'a': [_Spec(2, 3), _Spec(1)]}, ValueError, ['w.a[1]', 'expected None', 'got float32[1]']),
    (
      {'a': [_Spec(6), None]},
      ValueError,
      ['w.a[0]', 'expected float32[2, 3]', 'got float32[6]'],
    ),
    (
      {'a': [tf.zeros([2, 3], tf.bool), None]},
      TypeError,
      ['w.a[0]', 'expected float32[2, 3]', 'got bool[2, 3]'],
    ),
  ):
    with pytest.raises(error, match=naming.Naming('fc', *names)):
      shapes.CheckNest('fc', 'w', nest, specs)


def testGetShapeMixesStaticAndDynamic():
  seen = []

  @tf.function(input_signature=[_Spec(None, 3)], autograph=False)
  def Run(x):
    seen.append(shapes.GetShape(x))
    return tf.reshape(x, [seen[0][1], seen[0][0]])

  assert Run(tf.zeros([4, 3])).shape == (3, 4)
  assert seen[0][1] == 3 and isinstance(seen[0][0], tf.Tensor)
  assert shapes.GetShape(tf.zeros([4, 3])) == [4, 3]


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
