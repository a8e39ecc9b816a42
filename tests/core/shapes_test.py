# SPDX-License-Identifier: Apache-2.0
"""Tests of shape checks and their messages."""

import sys

import pytest
import tensorflow as tf

from lingvo_gpipe.core import shapes


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
  ('check', 'message'),
  [
    (lambda: shapes.CheckRank('a.b', _Spec(2, None), 3), r'a\.b: inputs .*rank 3.*\[2, \?\]'),
    (lambda: shapes.CheckRank('a', _Spec(), 1, 'ids'), r'a: ids .*rank 1, got shape \[\]'),
    (lambda: shapes.CheckLastDim('a', _Spec(2, 3), 4), r'inputs must be 4, got shape \[2, 3\]'),
    (lambda: shapes.CheckLastDim('a', _Spec(), 4), r'inputs must be 4, got shape \[\]'),
    (
      lambda: shapes.CheckShape('a', _Spec(2), [2, 3]),
      r'must have shape \[2, 3\], got shape \[2\]',
    ),
    (lambda: shapes.CheckShape('a', _Spec(2, 4), [None, 3]), r'\[\?, 3\], got shape \[2, 4\]'),
    (lambda: shapes.CheckPaddings('a', _Spec(2, 3), _Spec(2, 3)), r'paddings .*\[2\], got'),
  ],
)
def testMessagesNameTheMismatch(check, message):
  with pytest.raises(ValueError, match=message):
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
  for nest, error, message in (
    (
      {'a': [_Spec(2, 3)]},
      ValueError,
      r'fc: w: expected {a: \[float32\[2, 3\], None\]}, got {a: \[',
    ),
    ({'a': [None, None]}, ValueError, r'fc: w.a\[0\]: expected float32\[2, 3\], got None'),
    ({'a': [_Spec(2, 3), _Spec(1)]}, ValueError, r'fc: w.a\[1\]: expected None, got float32\[1\]'),
    (
      {'a': [_Spec(6), None]},
      ValueError,
      r'fc: w.a\[0\]: expected float32\[2, 3\], got float32\[6\]',
    ),
    ({'a': [tf.zeros([2, 3], tf.bool), None]}, TypeError, r'a\[0\]: expected float32.*, got bool'),
  ):
    with pytest.raises(error, match=message):
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
