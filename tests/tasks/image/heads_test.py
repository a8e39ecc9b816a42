# SPDX-License-Identifier: Apache-2.0
"""The heads of image networks."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import fprop_context, nested_map
from tasks.image import heads
from tests import naming


def _Make(cls, **values):
  layer = cls.Params().Set(name='head', dtype=tf.float64, **values).Instantiate()
  layer.InstantiateVariables()
  return layer


def testClassifierHead():
  layer = _Make(heads.ClassifierHead, input_dim=3, num_classes=4, dropout_prob=0.5)
  x = tf.constant(np.random.default_rng(0).standard_normal([2, 5, 6, 3]))
  expected = np.maximum(x, 0).mean((1, 2)) @ layer.vars.projection.w + layer.vars.projection.b
  np.testing.assert_allclose(layer(x), expected, rtol=1e-12)
  np.testing.assert_allclose(layer(x, x), expected, rtol=1e-12)
  with fprop_context.Scope(step=0):
    assert not np.allclose(layer(x), expected)  # Channels are dropped.
  assert _Make(
    heads.ClassifierHead, input_dim=3, num_classes=4, dropout_prob=0.2
  ).dropout.params.keep_prob == pytest.approx(0.8)
  aux = tf.ones([2, 4], tf.float64)
  logits, same = layer(x, None, aux)
  np.testing.assert_allclose(logits, expected, rtol=1e-12)
  assert same is aux


def testClassifierHeadCost():
  p = heads.ClassifierHead.Params().Set(name='head', input_dim=3, num_classes=4, dropout_prob=0.5)
  specs = [tf.TensorSpec([2, 5, 6, 3]), None, tf.TensorSpec([2, 4])]
  meta = heads.ClassifierHead.FPropMeta(p, *specs)
  # ReLU, mean, dropout, and the projection with its bias.
  flops = 2 * (2 * 5 * 6 * 3) + 3 * (2 * 3) + 2 * (2 * 3 * 4) + 2 * 4
  assert meta.flops == pytest.approx(flops, rel=0.05)
  assert [s.shape for s in meta.out_specs] == [[2, 4], [2, 4]]


@pytest.mark.parametrize('size, pooled_size', [(5, 1), (14, 4), (30, 9)])
def testAuxiliaryHead(size, pooled_size):
  layer = _Make(
    heads.AuxiliaryHead, input_dim=3, input_size=size, num_classes=4, scale=0.02, key='aux'
  )
  small, large = 2, 15
  weights = [small * 3, small * large * pooled_size**2, 2 * (small + large), large * 4 + 4]
  assert layer.NumParams() == sum(weights)
  x, y = tf.ones([2, 7]), tf.ones([2, 3])
  skips = nested_map.NestedMap(
    aux=tf.constant(np.random.default_rng(0).standard_normal([2, size, size, 3]))
  )
  with fprop_context.Scope(step=0):
    out, stashed = layer.FPropSkips(layer.theta, skips, x, y)
  assert out[0] is x and out[1] is y and not stashed
  assert out[2].shape == [2, 4] and np.any(out[2] != 0)
  np.testing.assert_allclose(out[2], _AuxiliaryLogits(layer, skips.aux), rtol=1e-6, atol=1e-9)
  # In evaluation there are no auxiliary logits.
  assert layer.FPropSkips(layer.theta, skips, x, y)[0] == (x, y)
  specs = nested_map.NestedMap(aux=tf.TensorSpec([2, size, size, 3]))
  meta, _ = heads.AuxiliaryHead.FPropMetaSkips(
    layer.params, specs, tf.TensorSpec([2, 7]), tf.TensorSpec([2, 3])
  )
  assert [s.shape.as_list() for s in meta.out_specs] == [[2, 7], [2, 3], [2, 4]]
  assert meta.flops > 2 * 2 * large * small * pooled_size**2


def _AuxiliaryLogits(layer, x):
  """Computes the logits in training with plain TensorFlow: two convolutions and a projection."""
  first, second = (b.conv.w for b in layer.vars.features.layers if 'conv' in b)

  def Norm(y):
    mean, variance = tf.nn.moments(y, [0, 1, 2])
    return (y - mean) / tf.sqrt(variance + 1e-3)

  y = tf.nn.avg_pool2d(tf.nn.relu(x), 5, 3, 'VALID')
  y = tf.nn.relu(Norm(tf.nn.conv2d(y, first, 1, 'VALID')))
  y = tf.nn.relu(Norm(tf.nn.conv2d(y, second, 1, 'VALID')))
  return y[:, 0, 0] @ layer.vars.projection.w + layer.vars.projection.b


def testTooSmallFeaturesRaise():
  with pytest.raises(ValueError, match=naming.Naming('AuxiliaryHead', 'input_size', 5, 4)):
    _Make(heads.AuxiliaryHead, input_dim=3, input_size=4, num_classes=4)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
