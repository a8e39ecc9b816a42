# SPDX-License-Identifier: Apache-2.0
"""AmoebaNet's cells: their graphs, step by step, and their cost."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import fprop_context
from tasks.image import amoebanet_cell, amoebanet_ops
from tests import naming

BATCH, SIZE, FILTERS = 2, 6, 4


def _Params(kind, **values):
  return amoebanet_cell.AmoebaNetCell.Params().Set(
    name='cell', dtype=tf.float64, kind=kind, filters=FILTERS, **values
  )


def _Make(p):
  layer = p.Instantiate()
  layer.InstantiateVariables()
  return layer


def _Random(*shape, seed=0):
  return tf.constant(np.random.default_rng(seed).standard_normal(shape))


CASES = [
  # input_dim, previous_dim, is_previous_wider
  (8, 4, False),
  (8, 6, False),
  (8, 6, True),
  (3, 0, False),
]


# Operations of each kind of cell in each case, added up by hand: 2 for each multiply-add of a
# convolution, 1 for each element of a ReLU or sum, 7 for batch norm, and a pool's window.
_FLOPS = {
  'd_normal': (44_640, 50_544, 51_564, 50_904),
  'd_reduction': (15_588, 21_492, 22_512, 12_996),
  'b_normal': (71_424, 77_328, 78_348, 77_040),
  'b_reduction': (28_116, 34_020, 35_040, 24_120),
}


@pytest.mark.parametrize('input_dim, previous_dim, is_wider', CASES)
@pytest.mark.parametrize('kind', list(amoebanet_cell.CELLS))
def testShapesAndCost(kind, input_dim, previous_dim, is_wider):
  p = _Params(kind, input_dim=input_dim, previous_dim=previous_dim, is_previous_wider=is_wider)
  args = [tf.TensorSpec([BATCH, SIZE, SIZE, input_dim], tf.float64)]
  if previous_dim:
    wide = 2 * SIZE - 1 if is_wider else SIZE
    args.append(tf.TensorSpec([BATCH, wide, wide, previous_dim], tf.float64))
  meta = amoebanet_cell.AmoebaNetCell.FPropMeta(p, *args)
  flops = _FLOPS[kind][CASES.index((input_dim, previous_dim, is_wider))]
  assert meta.flops == pytest.approx(flops, rel=0.05)
  size = SIZE // 2 if kind.endswith('reduction') else SIZE
  dim = amoebanet_cell.AmoebaNetCell.OutputDim(kind, FILTERS)
  assert meta.out_specs[0].shape == [BATCH, size, size, dim]
  assert meta.out_specs[1] == args[0]


def testNormalCellDIsTheGraphOfThePaper():
  """Compares evaluation with the cell's own operations, joined by plain TensorFlow."""
  layer = _Make(_Params('d_normal', input_dim=8, previous_dim=4))
  x, previous = _Random(BATCH, SIZE, SIZE, 8), _Random(BATCH, SIZE, SIZE, 4, seed=1)
  ops = {name: lambda s, n=name: layer.ops[n](s) for name in layer.ops}
  s0, s1 = layer.project_inputs(x), previous
  s2 = ops['left0'](s1) + tf.nn.max_pool2d(s1, 3, 1, 'SAME')
  s3 = s1 + ops['right1'](s0)
  s4 = ops['left2'](s0) + ops['right2'](s0)
  s5 = tf.nn.max_pool2d(s2, 3, 1, 'SAME') + s2
  s6 = tf.nn.avg_pool2d(s1, 3, 1, 'SAME') + ops['right4'](s5)
  expected = tf.concat([s0, s3, s4, s6], -1)
  y, same = layer(x, previous)
  np.testing.assert_allclose(y, expected, rtol=1e-10, atol=1e-12)
  assert same is x
  # The filters of each operation: 1x1, and the bottleneck 1x1, 1x7, 7x1, 1x1.
  shapes = {name: [b.conv.w.shape[:2] for b in _Blocks(layer.vars.ops[name])] for name in ops}
  bottleneck = [(1, 1), (1, 7), (7, 1), (1, 1)]
  assert shapes == {
    'left0': [(1, 1)],
    'right0': [],
    'right1': bottleneck,
    'left2': [(1, 1)],
    'right2': bottleneck,
    'left3': [],
    'left4': [],
    'right4': [(1, 1)],
  }


def _Blocks(op_vars):
  return [block for block in op_vars.layers if 'conv' in block]


def testReductionCellDIsTheGraphOfThePaper():
  layer = _Make(_Params('d_reduction', input_dim=8, previous_dim=4))
  x, previous = _Random(BATCH, SIZE, SIZE, 8), _Random(BATCH, SIZE, SIZE, 4, seed=1)
  s0, s1 = layer.project_inputs(x), previous
  s2 = tf.nn.max_pool2d(s0, 2, 2, 'SAME') + tf.nn.max_pool2d(s0, 3, 2, 'SAME')
  s3 = s2 + layer.ops.right1(s1)
  s4 = layer.ops.left2(s2) + tf.nn.max_pool2d(s2, 3, 1, 'SAME')
  s5 = s3 + tf.nn.max_pool2d(s1, 2, 2, 'SAME')
  s6 = tf.nn.avg_pool2d(s2, 3, 1, 'SAME') + layer.ops.right4(s3)
  expected = tf.concat([s4, s5, s6], -1)
  np.testing.assert_allclose(layer(x, previous)[0], expected, rtol=1e-10, atol=1e-12)
  assert [s.filter_stride for s in _ConvParams(layer.ops.right1)] == [(1, 1), (2, 2), (1, 1)]


def testNormalCellBIsTheGraphOfThePaper():
  layer = _Make(_Params('b_normal', input_dim=8, previous_dim=4))
  x, previous = _Random(BATCH, SIZE, SIZE, 8), _Random(BATCH, SIZE, SIZE, 4, seed=1)
  s0, s1 = layer.project_inputs(x), previous
  s2 = layer.ops.left0(s1) + tf.nn.max_pool2d(s1, 3, 1, 'SAME')
  s3 = s1 + layer.ops.right1(s0)
  s4 = layer.ops.left2(s1) + layer.ops.right2(s0)
  s5 = layer.ops.left3(s2) + s2
  s6 = tf.nn.avg_pool2d(s1, 3, 1, 'SAME') + layer.ops.right4(s5)
  expected = tf.concat([s0, s3, s4, s6], -1)
  np.testing.assert_allclose(layer(x, previous)[0], expected, rtol=1e-10, atol=1e-12)
  assert [p.filter_shape[0] for p in _ConvParams(layer.ops.right1)] == [3, 3]


def testReductionCellBIsTheGraphOfThePaper():
  layer = _Make(_Params('b_reduction', input_dim=8, previous_dim=4))
  x, previous = _Random(BATCH, SIZE, SIZE, 8), _Random(BATCH, SIZE, SIZE, 4, seed=1)
  s0, s1 = layer.project_inputs(x), previous
  s2 = tf.nn.max_pool2d(s0, 2, 2, 'SAME') + tf.nn.max_pool2d(s0, 3, 2, 'SAME')
  s3 = s2 + layer.ops.right1(s1)
  s4 = layer.ops.left2(s2) + tf.nn.max_pool2d(s2, 3, 1, 'SAME')
  s5 = s3 + layer.ops.right3(s1)
  s6 = tf.nn.avg_pool2d(s4, 3, 1, 'SAME') + layer.ops.right4(s3)
  expected = tf.concat([s5, s6], -1)
  np.testing.assert_allclose(layer(x, previous)[0], expected, rtol=1e-10, atol=1e-12)
  assert [p.filter_shape[0] for p in _ConvParams(layer.ops.left2)] == [5, 5]
  # The first of two separable convolutions has the stride.
  assert [p.filter_stride for p in _ConvParams(layer.ops.right3)] == [(2, 2), (1, 1)]


def testPoolOfOtherChannelsIsProjectedWithoutReLU():
  layer = amoebanet_ops.OpBuilder(FILTERS).Op('max_pool_2x2', 8, 2).Set(name='pool').Instantiate()
  assert [p.activation for p in _ConvParams(layer)] == ['NONE']


def _ConvParams(op):
  return [layer.params for layer in op.layers if 'conv' in layer.children]


def testFirstCellUsesOneInputForBoth():
  layer = _Make(_Params('d_reduction', input_dim=4, previous_dim=0))
  x = _Random(BATCH, SIZE, SIZE, 4)
  with fprop_context.Scope(step=0):
    output = layer(x)[0]
  same = _Make(_Params('d_reduction', input_dim=4, previous_dim=4))
  with fprop_context.Scope(step=0):
    np.testing.assert_array_equal(output, same(x, x)[0])


def testAllOperationsButIdentitiesHaveDropPath():
  p = _Params('d_normal', input_dim=8, previous_dim=4)
  p.drop_path_tpl.keep_prob = 0.5
  layer = p.Instantiate()
  last = {name: type(op.layers[-1]).__name__ for name, op in layer.ops.items()}
  assert set(last.values()) == {'DropPathLayer'}
  # Ten operations, two of them identities.
  assert len(last) == 8


def testOperationsByName():
  builder = amoebanet_ops.OpBuilder(8)
  assert builder.Op('identity', 8, 1) is None
  assert builder.Op('identity', 8, 2) is not None
  assert builder.Op('identity', 4, 1) is not None
  for name in amoebanet_ops.NAMES:
    if op := builder.Op(name, 16, 2):
      meta = op.cls.FPropMeta(op, tf.TensorSpec([1, 6, 6, 16]))
      assert meta.out_specs[0].shape == [1, 3, 3, 8], name
  with pytest.raises(ValueError, match=naming.Naming("'conv_2x2'", 'identity', 'conv_1x7_7x1')):
    builder.Op('conv_2x2', 8, 1)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
