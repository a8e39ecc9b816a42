# SPDX-License-Identifier: Apache-2.0
"""Tests of the bytes of results that a forward pass keeps for its backward."""

import sys

import pytest
import tensorflow as tf

from lingvo_gpipe.core import base_layer, fprop_trace, nested_map, weight_params
from lingvo_gpipe.layers import linear, skip

_N = 32 * 8 * 4  # Bytes of a tensor [32, 8].


class _Mlp(base_layer.BaseLayer):
  """tanh(x w), reshaped, times w; the second product is the output."""

  def __init__(self, params):
    super().__init__(params)
    self.CreateVariable('w', weight_params.WeightParams([8, 8]))

  def FProp(self, theta, x):
    hidden = tf.reshape(tf.tanh(tf.matmul(x, theta.w)), [32, 8])
    return tf.matmul(hidden, theta.w)


class _Masked(base_layer.BaseLayer):
  """Positive elements of x; the mask comes from a nested function."""

  def FProp(self, theta, x):
    mask = tf.function(lambda x: x + 1.0 > 0.0, autograph=False)
    return tf.where(mask(x), x, tf.zeros_like(x))


def _Cost(cls, *specs):
  layer = cls.Params().Set(name='l').Instantiate()
  return fprop_trace.TraceLayer(layer, nested_map.NestedMap(), *specs).cost


def testProductsAndTheirOperandsCountButOutputsDoNot():
  cost = _Cost(_Mlp, tf.TensorSpec([32, 8]))
  assert cost.result_bytes == 2 * _N  # The first product and its tanh.
  assert cost.fused_bytes == 2 * _N  # The tanh is an operand.


def testMasksCountUnderXlaButElementwiseResultsDoNot():
  cost = _Cost(_Masked, tf.TensorSpec([32, 8]))
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
