# SPDX-License-Identifier: Apache-2.0
"""SequentialLayer: spreads tuples, flattens, and keeps weights and masks under nesting."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import fprop_context, nested_map
from lingvo_gpipe.layers import dropout, linear, sequential
from tests import naming
from tests.toys import layers, nested_layers

Sequential = sequential.SequentialLayer.Params
DIM = 4


def _Projection(dim_out=DIM, **values):
  return linear.ProjectionLayer.Params().Set(
    input_dim=DIM, output_dim=dim_out, activation='TANH', **values
  )


def _Drop():
  return dropout.DropoutLayer.Params().Set(keep_prob=0.5)


def _Make(params):
  return layers.WithVariables(params.Set(name='seq'))


def testOutputsAreTheNextArguments():
  def Pack(a, b):
    return nested_map.NestedMap(a=a, rest=[b, None])

  def Unpack(nest):
    assert nest.rest[1] is None
    return nest.a * nest.rest[0]

  both, pack, unpack = (layers.Without(fn) for fn in (lambda a, b: (a + b, a - b), Pack, Unpack))
  layer = _Make(Sequential().Set(sub=[both, both]))
  a, b = tf.constant(3.0), tf.constant(5.0)
  assert [x.numpy() for x in layer(a, b)] == [6.0, 10.0]
  layer = _Make(Sequential().Set(sub=[both, pack, unpack]))
  assert layer(a, b).numpy() == 8 * -2
  spec = tf.TensorSpec([], tf.float32)
  assert layer.FPropMeta(layer.params, spec, spec).out_specs == (spec,)


def testFlattenExpandsSequencesAndRepeats():
  inner = Sequential().Set(sub=[_Projection(), _Drop()], repeat=2)
  outer = Sequential().Set(sub=[_Drop(), inner, Sequential().Set(sub=[inner])], repeat=2)
  flat = sequential.FlattenSequential(outer)
  repetition = [dropout.DropoutLayer] + 4 * [linear.ProjectionLayer, dropout.DropoutLayer]
  assert [p.cls for p in flat] == 2 * repetition
  # Each element is a copy, shared by its repetitions.
  assert len({id(p) for p in flat}) == 5
  assert not {id(p) for p in flat} & {id(p) for p in [*inner.sub, *outer.sub]}
  assert [p.cls for p in sequential.FlattenSequential(_Drop())] == [dropout.DropoutLayer]


def testFlattenInheritsParamsOfTheSequence():
  inner = Sequential().Set(sub=[_Projection(), _Projection(dtype=tf.float32)], dtype=tf.float64)
  outer = Sequential().Set(sub=[inner, _Projection()], fprop_dtype=tf.bfloat16, random_seed=7)
  flat = sequential.FlattenSequential(outer)
  assert [p.dtype for p in flat] == [tf.float64, tf.float32, None]
  assert [p.fprop_dtype for p in flat] == 3 * [tf.bfloat16]
  assert [p.random_seed for p in flat] == 3 * [7]
  assert inner.sub[0].dtype is None


def testFlattenDoesNotExpandSubclasses():
  params = nested_layers.OpaqueSequence.Params().Set(sub=[_Drop()])
  assert sequential.FlattenSequential(Sequential().Set(sub=[params]))[0].cls is params.cls


def testNestingChangesNeitherWeightsNorMasks():
  four = [_Projection(), _Drop(), _Projection(), _Drop()]
  flat = _Make(Sequential().Set(sub=four))
  nested = _Make(Sequential().Set(sub=[Sequential().Set(sub=four[:2], repeat=2)]))
  assert list(flat.VariablesByPath()) == ['seq.layers[0].w', 'seq.layers[2].w']
  assert list(flat.VariablesByPath()) == list(nested.VariablesByPath())
  x = tf.ones([5, DIM])
  with fprop_context.Scope(step=3):
    np.testing.assert_array_equal(flat(x), nested(x))


def testRepeatedLayersHaveTheirOwnWeights():
  layer = _Make(Sequential().Set(sub=[_Projection()], repeat=3))
  weights = [v.w.numpy() for v in layer.vars.layers]
  assert not np.array_equal(weights[0], weights[1])
  x = np.ones([2, DIM], np.float32)
  y = layer(tf.constant(x))
  for w in weights:
    x = np.tanh(x @ w)
  np.testing.assert_allclose(y, x, rtol=1e-5)


def testFPropMetaAddsUpTheLayers():
  layer = _Make(Sequential().Set(sub=[_Projection(), _Projection(3)], repeat=1))
  x = tf.TensorSpec([5, DIM], tf.float32)
  parts = [child.FPropMeta(child.params, x).flops for child in layer.layers]
  meta = layer.FPropMeta(layer.params, x)
  assert meta.flops == sum(parts)
  assert meta.out_specs == (tf.TensorSpec([5, 3], tf.float32),)


@pytest.mark.parametrize('values', [{'sub': []}, {'sub': [_Drop()], 'repeat': 0}], ids=str)
def testEmptySequencesRaise(values):
  with pytest.raises(ValueError, match='repeat'):
    _Make(Sequential().Set(**values))
  with pytest.raises(
    ValueError, match=naming.Naming('SequentialLayer', '`sub`', '`repeat`', 'at least 1')
  ):
    sequential.FlattenSequential(Sequential().Set(sub=[Sequential().Set(**values)]))


def testSubOfAnotherTypeRaises():
  with pytest.raises(ValueError, match=naming.Naming("'seq'", 'sub', 'Params', ['layer'])):
    _Make(Sequential().Set(sub=['layer']))


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
