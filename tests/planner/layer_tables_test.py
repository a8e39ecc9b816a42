# SPDX-License-Identifier: Apache-2.0
"""Costs of layers for the planner; the loss is measured with the last layer."""

import sys

import pytest
import tensorflow as tf

from lingvo_gpipe.layers import linear, norm
from lingvo_gpipe.pipeline import pipelining_layer
from lingvo_gpipe.pipeline.cutting import layer_costs, layer_profile
from lingvo_gpipe.planner import layer_tables

_LINEAR = linear.LinearLayer.Params().Set(input_dim=8, output_dim=8)
_SUB = [_LINEAR, norm.LayerNorm.Params().Set(input_dim=8), _LINEAR]


def _Layers():
  return pipelining_layer.PipeliningLayer.Params().Set(name='p', sub=_SUB).Instantiate().layers


def _Specs(size):
  return [tf.TensorSpec([size, 8])]


def _Side(size):
  return {'labels': tf.TensorSpec([size], tf.int32)}


def _Loss(theta, outputs, side):
  del theta
  (logits,) = outputs
  xent = tf.nn.sparse_softmax_cross_entropy_with_logits(side['labels'], logits)
  hits = tf.cast(tf.argmax(logits, -1, tf.int32) == side['labels'], tf.float32)
  return {'loss': (tf.reduce_mean(xent), 1.0), 'hits': (tf.reduce_mean(hits), tf.size(hits))}


_LOSS = layer_tables.Loss(_Loss, _Side)


def _Update(device, trained, accumulators):
  del device, trained
  return lambda: tf.add_n([tf.reduce_sum(a) for a in accumulators])


def _Collect(sizes, **measuring):
  options = layer_tables.Measuring(**{'devices': [''], 'update': _Update, **measuring})
  return layer_tables.Collect(
    _Layers(), _Specs, sizes, layer_costs.Weights(), _LOSS, xla=False, measuring=options
  )


def testNothingRunsWithoutMeasuring(monkeypatch):
  monkeypatch.setattr(layer_profile, '_MeasureCopy', None)
  costs = layer_tables.Collect(_Layers(), _Specs, [2, 4], layer_costs.Weights(), _LOSS)
  assert [s.seconds for row in costs.samples.values() for s in row] == [None] * 6
  assert [w.update_seconds for w in costs.weights] == [None] * 3


def testTheLossIsMeasuredWithTheLastLayer(monkeypatch):
  def Copy(call, trained, needs_dx, *_):
    is_loss = call.layer.path == 'loss'
    assert needs_dx == (call.layer.path != 'p.layers[0]') and bool(trained) != is_loss
    rows = call.specs[0][0].shape[0] if is_loss else 0
    return (10.0 * rows, 20.0 * rows) if is_loss else (1.0, 2.0)

  monkeypatch.setattr(layer_profile, '_MeasureCopy', Copy)
  costs = _Collect([2, 4])
  for size, row in costs.samples.items():
    assert [s.seconds for s in row] == [(1, 2), (1, 2), (1 + 10 * size, 2 + 20 * size)]


def testTheLossRunsAsInAStage():
  costs = _Collect([2])
  for row in costs.samples.values():
    assert all(forward > 0 and backward >= 0 for forward, backward in (s.seconds for s in row))
  assert all(w.update_seconds >= 0 for w in costs.weights)


def testTheSlowestKindOfLayerDeterminesTheSlowdown(monkeypatch):
  monkeypatch.setattr(layer_profile, 'MeasureSlowdown', lambda call, *_, **__: call.layer.path)

  def Slowdown(seconds, devices):
    return layer_tables.Slowdown(
      _Layers(), _Specs(2), layer_costs.Weights(), seconds, devices=devices
    )

  assert Slowdown([(1, 1), (3, 3), (0, 3)], ['a', 'b']) == 'p.layers[1]'
  assert Slowdown([(1, 2), (2, 2), (0, 3)], ['a', 'b']) == 'p.layers[0]'  # Two of a kind.
  assert Slowdown([(1, 1), (3, 3), (0, 3)], ['a']) == 1


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
