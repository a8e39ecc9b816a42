# SPDX-License-Identifier: Apache-2.0
"""Tests of the bytes of results that a forward pass keeps for its backward."""

import sys

import pytest
import tensorflow as tf

from lingvo_gpipe.core import fprop_trace, nested_map
from lingvo_gpipe.layers import linear, skip
from tests.toys import layers

_N = 32 * 8 * 4  # Bytes of a tensor [32, 8].


def _TwoProducts(w, x):
  """Returns tanh(x w), reshaped, times w."""
  return tf.matmul(tf.reshape(tf.tanh(tf.matmul(x, w)), [32, 8]), w)


def _Masked(x):
  """Returns positive elements of x; the mask comes from a nested function."""
  mask = tf.function(lambda x: x + 1.0 > 0.0, autograph=False)
  return tf.where(mask(x), x, tf.zeros_like(x))


def _Cost(params, *specs):
  layer = params.Set(name='l').Instantiate()
  return fprop_trace.TraceLayer(layer, nested_map.NestedMap(), *specs).cost


def testProductsAndTheirOperandsCountButOutputsDoNot():
  cost = _Cost(
    layers.MatrixLayer.Params().Set(fn=_TwoProducts, dims=[8, 8]), tf.TensorSpec([32, 8])
  )
  assert cost.result_bytes == 2 * _N  # The first product and its tanh.
  assert cost.fused_bytes == 2 * _N  # The tanh is an operand.


def testMasksCountUnderXlaButElementwiseResultsDoNot():
  cost = _Cost(layers.Without(_Masked), tf.TensorSpec([32, 8]))
  assert cost.fused_bytes == _N // 4
  assert cost.result_bytes >= _N + _N // 4


def testALinearLayerKeepsNoInnerResults():
  p = linear.LinearLayer.Params().Set(name='l', input_dim=8, output_dim=8)
  cost = fprop_trace.TraceLayer(
    p.Instantiate(), nested_map.NestedMap(), tf.TensorSpec([32, 8])
  ).cost
  assert (cost.result_bytes, cost.fused_bytes) == (0, 0)
  assert cost.flops == 2 * 32 * 8 * 8


def testSkipConnectionsAreTraced():
  p = skip.PopLayer.Params().Set(name='l', key='s')
  skips = nested_map.NestedMap(s=tf.TensorSpec([32, 8]))
  cost = fprop_trace.TraceLayer(p.Instantiate(), skips, tf.TensorSpec([32, 8])).cost
  assert cost.flops == 32 * 8
  assert cost.result_bytes == 0


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
