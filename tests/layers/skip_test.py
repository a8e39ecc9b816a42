# SPDX-License-Identifier: Apache-2.0
"""StashLayer and PopLayer in a SequentialLayer; tests/pipeline/skips_test.py has the pipelines."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.layers import linear, sequential, skip
from tests import naming
from tests.toys import layers

_DIM = 4


def _Run(sub, *args):
  layer = layers.WithVariables(sequential.SequentialLayer.Params().Set(name='seq', sub=sub))
  return layer(*args)


def _X():
  return tf.reshape(tf.range(8.0), [2, _DIM])


def testAdd():
  sub = [layers.Stash('a'), layers.Without(lambda x: 3.0 * x), layers.Pop('a')]
  np.testing.assert_array_equal(_Run(sub, _X()), 4.0 * _X())


def testConcat():
  sub = [layers.Stash('a'), layers.Without(lambda x: x[:, :1] - 1.0), layers.Pop('a', 'concat')]
  y = _Run(sub, _X())
  np.testing.assert_array_equal(y, np.concatenate([_X()[:, :1] - 1.0, _X()], axis=1))


def testAppendTakesAnyNest():
  nest = nested_map.NestedMap(ids=tf.constant([1, 2]), none=None, more=[tf.constant([True, False])])
  sub = [layers.Stash('a'), layers.Without(lambda nest: tf.ones([2])), layers.Pop('a', 'append')]
  first, appended = _Run(sub, nest)
  np.testing.assert_array_equal(first, [1.0, 1.0])
  tf.nest.assert_same_structure(appended, nest)
  assert appended.none is None
  for a, b in zip((appended.ids, *appended.more), (nest.ids, *nest.more), strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)


def testOtherArgumentsPassThrough():
  paddings = tf.zeros([2])
  sub = [
    layers.Stash('a'),
    layers.Without(lambda x, paddings: (2.0 * x, paddings)),
    layers.Pop('a'),
    layers.Pop('a', 'concat'),
    layers.Pop('a', 'append'),
  ]
  x, passed, appended = _Run(sub, _X(), paddings)
  assert passed is paddings
  np.testing.assert_array_equal(x, np.concatenate([3.0 * _X(), _X()], axis=1))
  np.testing.assert_array_equal(appended, _X())


def testSeveralPopsAndNestedSequences():
  double = layers.Without(lambda x: 2.0 * x)
  inner = sequential.SequentialLayer.Params().Set(sub=[double, layers.Pop('a'), layers.Stash('b')])
  sub = [layers.Stash('a'), inner, double, layers.Pop('a'), layers.Pop('b')]
  # 2 x + x = 3 x; 6 x + x + 3 x.
  np.testing.assert_array_equal(_Run(sub, _X()), 10.0 * _X())


def testGradientsOfAllPopsAddUp():
  square = linear.LinearLayer.Params().Set(input_dim=_DIM, output_dim=_DIM)
  sub = [
    square,
    layers.Stash('a'),
    layers.Without(tf.sin),
    layers.Pop('a'),
    layers.Without(tf.cos),
    layers.Pop('a'),
  ]
  layer = layers.WithVariables(sequential.SequentialLayer.Params().Set(name='seq', sub=sub))
  w = layer.layers[0].vars.w
  with tf.GradientTape(persistent=True) as tape:
    loss = tf.reduce_sum(layer(_X()))
    h = _X() @ w
    expected = tf.reduce_sum(tf.cos(tf.sin(h) + h) + h)
  np.testing.assert_allclose(tape.gradient(loss, w), tape.gradient(expected, w), rtol=1e-5)


def _Layer(params):
  return layers.WithVariables(params.Set(name='layer'))


def testDecodingWithSkipsRaises():
  p = sequential.SequentialLayer.Params().Set(name='seq', sub=[layers.Stash('a'), layers.Pop('a')])
  layer = layers.WithVariables(p)
  with pytest.raises(
    NotImplementedError, match=naming.Naming('seq.layers[0]', 'StashLayer', "skip 'a'")
  ):
    layer.Prefill(layer.theta, _X(), max_length=9)


def testSkipLayersHaveNoWeights():
  for p in (layers.Stash('a'), layers.Pop('a')):
    assert _Layer(p).VariablesByPath() == {}


def testSkipsInAndOutAreTheKey():
  stash, pop = _Layer(layers.Stash('a')), _Layer(layers.Pop('a'))
  assert (stash.skips_in, stash.skips_out) == ((), ('a',))
  assert (pop.skips_in, pop.skips_out) == (('a',), ())


def testAStashAloneIsTheIdentity():
  layer = _Layer(layers.Stash('a'))
  assert layer(1) == 1
  assert layer(1, None) == (1, None)


def testFPropMetaOfSkips():
  x, ids = tf.TensorSpec([2, 5, _DIM]), tf.TensorSpec([2, 5], tf.int32)
  meta, stashed = skip.StashLayer.FPropMetaSkips(layers.Stash('a'), nested_map.NestedMap(), x, ids)
  assert (meta.flops, meta.out_specs, dict(stashed)) == (0, (x, ids), {'a': x})
  for combine, flops, specs in (
    ('add', 2 * 5 * _DIM, (x, ids)),
    ('concat', 0, (tf.TensorSpec([2, 5, 2 * _DIM]), ids)),
    ('append', 0, (x, ids, x)),
  ):
    meta, remaining = skip.PopLayer.FPropMetaSkips(layers.Pop('a', combine), stashed, x, ids)
    assert (meta.flops, meta.out_specs, remaining) == (flops, specs, {})


# ---- errors ------------------------------------------------------------------------------


def testAddOfAnotherShapeRaises():
  with pytest.raises(ValueError, match=naming.Naming('seq.layers[2]', 'shape (2, 4)', 'to (2, 1)')):
    _Run([layers.Stash('a'), layers.Without(lambda x: x[:, :1]), layers.Pop('a')], _X())


def testUnknownCombinationRaises():
  with pytest.raises(
    ValueError, match=naming.Naming("'layer'", 'combine', "'append'", "got 'mul'")
  ):
    _Layer(layers.Pop('a', 'mul'))


@pytest.mark.parametrize('key', ['', 'a b', '1a'])
def testKeyThatIsNotANameRaises(key):
  for p in (layers.Stash(key), layers.Pop(key)):
    with pytest.raises((KeyError, ValueError, TypeError), match=key or 'key'):
      _Layer(p)


def testKeyWithoutStashRaises():
  with pytest.raises((KeyError, ValueError), match='wrong'):
    _Run([layers.Stash('a'), layers.Pop('wrong')], _X())


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
