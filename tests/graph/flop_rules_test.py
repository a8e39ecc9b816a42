# SPDX-License-Identifier: Apache-2.0
"""Tests of the costs of single operations."""

import math
import sys

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from lingvo_gpipe.graph import flop_rules
from tests import naming


def _Flops(fn, op_type, *shapes, dtype=tf.float32):
  """Returns the FLOPs of the only op of that type that `fn` creates."""
  graph = tf.Graph()
  with graph.as_default():
    fn(*(tf.raw_ops.Placeholder(dtype=dtype, shape=x) for x in shapes))
  (op,) = [x for x in graph.get_operations() if x.type == op_type]
  return flop_rules.OpFlops(op)


def testEveryNameIsAnOpOfTensorFlow():
  names = flop_rules.FREE_OPS | flop_rules.ELEMENTWISE_OPS | flop_rules.REDUCTION_OPS
  assert sorted(x for x in names if not hasattr(tf.raw_ops, x)) == []
  assert not flop_rules.FREE_OPS & flop_rules.ELEMENTWISE_OPS
  assert not flop_rules.REDUCTION_OPS & (flop_rules.FREE_OPS | flop_rules.ELEMENTWISE_OPS)


@pytest.mark.parametrize('transpose_a', [False, True])
@pytest.mark.parametrize('transpose_b', [False, True])
def testMatMul(transpose_a, transpose_b):
  a = [5, 3] if transpose_a else [3, 5]
  b = [7, 5] if transpose_b else [5, 7]
  assert (
    _Flops(
      lambda x, y: tf.raw_ops.MatMul(a=x, b=y, transpose_a=transpose_a, transpose_b=transpose_b),
      'MatMul',
      a,
      b,
    )
    == 2 * 3 * 5 * 7
  )


@pytest.mark.parametrize('adjoint', [False, True])
def testBatchMatMulBroadcasts(adjoint):
  a = [2, 1, 5, 3] if adjoint else [2, 1, 3, 5]
  flops = _Flops(
    lambda x, y: tf.linalg.matmul(x, y, adjoint_a=adjoint), 'BatchMatMulV2', a, [4, 5, 7]
  )
  assert flops == 2 * (2 * 4) * 3 * 5 * 7


@pytest.mark.parametrize(
  ('equation', 'shapes', 'expected'),
  [
    ('ab,bc->ac', [[2, 3], [3, 5]], 2 * 2 * 3 * 5),
    ('ab,bc', [[2, 3], [3, 5]], 2 * 2 * 3 * 5),
    ('BTNH,BSNH->BNTS', [[2, 3, 5, 7], [2, 11, 5, 7]], 2 * 2 * 3 * 5 * 7 * 11),
    ('...d,df->...f', [[2, 3, 5], [5, 7]], 2 * 2 * 3 * 5 * 7),
    ('...ij,...jk->...ik', [[4, 1, 2, 3], [6, 3, 5]], 2 * 4 * 6 * 2 * 3 * 5),
    ('... d, d f -> ... f', [[5], [5, 7]], 2 * 5 * 7),
    ('a,b->ab', [[3], [5]], 15),
    ('ab,ab->ab', [[3, 5], [3, 5]], 15),
    ('ab,ab->', [[3, 5], [3, 5]], 30),
    ('ab,c->c', [[3, 5], [7]], 15 + 7),
    ('abc->cab', [[2, 3, 5]], 0),
    ('abc->a', [[2, 3, 5]], 30),
    ('ii->', [[4, 4]], 4),
    ('ii->i', [[4, 4]], 0),
    ('ab,bc->ac', [[2, 0], [0, 5]], 0),
  ],
)
def testEinsum(equation, shapes, expected):
  assert flop_rules.EinsumFlops(equation, shapes) == expected


@pytest.mark.parametrize(
  ('equation', 'shapes'),
  [
    ('ab,bc->ac', [[2, 3]]),
    ('a,b,c->abc', [[2], [3], [4]]),
    ('ab,bc->ac', [[2, 3], [4, 5]]),
    ('ab->a', [[2, 3, 4]]),
    ('ab...->a', [[2]]),
  ],
)
def testEinsumThatDoesNotMatchItsShapesRaises(equation, shapes):
  with pytest.raises(ValueError, match='einsum'):
    flop_rules.EinsumFlops(equation, shapes)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def testEinsumCountsThePointsOfItsIterationSpace(data):
  """If every label is shared or in the output, the cost is 1 or 2 per point of all labels."""
  sizes = {x: data.draw(st.integers(2, 4)) for x in 'abcde'}
  shared = data.draw(st.sets(st.sampled_from('abcde')))
  a, b = shared | {'a', 'b'}, shared | {'c'}
  unshared = (a | b) - (a & b)
  output = unshared | data.draw(st.sets(st.sampled_from(sorted(a & b)))) if shared else unshared
  equation = f'{"".join(a)},{"".join(b)}->{"".join(output)}'
  flops = flop_rules.EinsumFlops(
    equation, [[sizes[x] for x in ''.join(a)], [sizes[x] for x in ''.join(b)]]
  )
  points = math.prod(sizes[x] for x in a | b)
  assert flops == (1 if output == a | b else 2) * points
  np.einsum(equation, *(np.ones([sizes[x] for x in ''.join(t)]) for t in (a, b)))


def testConvolutions():
  image = [2, 8, 8, 6]
  conv = 2 * (2 * 4 * 4 * 10) * (3 * 3 * 6)
  assert _Flops(lambda x, w: tf.nn.conv2d(x, w, 2, 'SAME'), 'Conv2D', image, [3, 3, 6, 10]) == conv
  grouped = _Flops(lambda x, w: tf.nn.conv2d(x, w, 2, 'SAME'), 'Conv2D', image, [3, 3, 2, 12])
  assert grouped == 2 * (2 * 4 * 4 * 12) * (3 * 3 * 2)
  depthwise = _Flops(
    lambda x, w: tf.nn.depthwise_conv2d(x, w, [1, 1, 1, 1], 'VALID'),
    'DepthwiseConv2dNative',
    image,
    [3, 3, 6, 2],
  )
  assert depthwise == 2 * (2 * 6 * 6 * 12) * 9
  transposed = _Flops(
    lambda x, w: tf.nn.conv2d_transpose(x, w, [2, 8, 8, 6], 2),
    'Conv2DBackpropInput',
    [2, 4, 4, 10],
    [3, 3, 6, 10],
  )
  assert transposed == conv
  volume = _Flops(
    lambda x, w: tf.nn.conv3d(x, w, [1] * 5, 'VALID'), 'Conv3D', [1, 4, 4, 4, 2], [2, 2, 2, 2, 3]
  )
  assert volume == 2 * (3**3 * 3) * (2**3 * 2)


@pytest.mark.parametrize(
  ('fn', 'op_type', 'expected'),
  [
    (lambda x: tf.nn.max_pool2d(x, 2, 2, 'VALID'), 'MaxPool', 2 * 2 * 3 * 4 * 4),
    (lambda x: tf.nn.avg_pool2d(x, [2, 3], 1, 'SAME'), 'AvgPool', 2 * 4 * 6 * 4 * 6),
    (lambda x: tf.reduce_sum(x, 1), 'Sum', 192),
    (lambda x: tf.reduce_mean(x), 'Mean', 192),
    (lambda x: tf.argmax(x, -1), 'ArgMax', 192),
    (lambda x: tf.cumsum(x, 1), 'Cumsum', 192),
    (tf.nn.softmax, 'Softmax', 5 * 192),
    (tf.nn.log_softmax, 'LogSoftmax', 5 * 192),
    (tf.math.erf, 'Erf', 192),
    (lambda x: tf.where(x > 0, x, 0.0), 'SelectV2', 192),
    (lambda x: x + tf.zeros([7, 1, 1, 1, 1]), 'AddV2', 7 * 192),
    (lambda x: tf.add_n([x, x, x]), 'AddN', 2 * 192),
    (lambda x: tf.reshape(x, [-1]), 'Reshape', 0),
    (lambda x: tf.cast(x, tf.bfloat16), 'Cast', 0),
    (lambda x: tf.gather(x, [0, 0, 0]), 'GatherV2', 0),
    (lambda x: tf.transpose(x, [0, 2, 1, 3]), 'Transpose', 0),
    (tf.nn.l2_loss, 'L2Loss', 2 * 192),
    (lambda x: tf.linalg.det(x), 'MatrixDeterminant', None),
  ],
)
def testFlopsOfSingleOps(fn, op_type, expected):
  shape = [2, 4, 6, 4] if op_type != 'MatrixDeterminant' else [2, 4, 4]
  assert _Flops(fn, op_type, shape) == expected


def testCrossEntropyAndBatchNorm():
  dense = _Flops(
    lambda x, y: tf.nn.softmax_cross_entropy_with_logits(y, x),
    'SoftmaxCrossEntropyWithLogits',
    [3, 10],
    [3, 10],
  )
  assert dense == 7 * 30
  sparse = _Flops(
    lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits([1, 2, 3], x),
    'SparseSoftmaxCrossEntropyWithLogits',
    [3, 10],
  )
  assert sparse == 5 * 30 + 3
  for training, per_element in ((True, 6), (False, 2)):
    flops = _Flops(
      lambda x, t=training: tf.raw_ops.FusedBatchNormV3(
        x=x, scale=[1.0], offset=[0.0], mean=[0.0], variance=[1.0], is_training=t
      ),
      'FusedBatchNormV3',
      [2, 4, 4, 1],
    )
    assert flops == per_element * 32


def testUnknownShapeNamesTheOp():
  with pytest.raises(ValueError, match=naming.Naming("'my_tanh'", 'Tanh', '(None, 4)')):
    _Flops(lambda x: tf.tanh(x, name='my_tanh'), 'Tanh', [None, 4])


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
