# SPDX-License-Identifier: Apache-2.0
"""Keras's BatchNormalization by micro-batch, with moving averages over the mini-batch."""

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import fprop_context
from lingvo_gpipe.layers.keras import keras_config, keras_cut, keras_layer
from lingvo_gpipe.pipeline.stages import micro_batch

LAYERS = keras.layers


def _Make(model, *shape, **values):
  inputs = [keras_config.KerasInput((None, *shape))]
  p = keras_layer.KerasLayer.FromKeras(model, inputs).Set(name='cell', **values)
  layer = p.Instantiate()
  layer.InstantiateVariables()
  return layer


def _Net(**options):
  norm = LAYERS.BatchNormalization(
    momentum=0.8,
    gamma_initializer=keras.initializers.RandomUniform(0.5, 1.5, seed=1),
    beta_initializer=keras.initializers.RandomUniform(0.5, 1.5, seed=2),
    moving_mean_initializer=keras.initializers.RandomUniform(0.5, 1.5, seed=3),
    moving_variance_initializer=keras.initializers.RandomUniform(0.5, 1.5, seed=4),
    **options,
  )
  return keras.Sequential([keras.Input([3, 4, 5]), norm])


def _X(batch, offset=0.0):
  x = np.random.default_rng(5).standard_normal([batch, 3, 4, 5]) * np.arange(1, 6)
  return tf.constant(x + offset, tf.float32)


def _Train(layer, pieces):
  """Runs one mini-batch; returns the outputs of its micro-batches and updates the state."""
  contexts, outputs = [], []
  for m, x in enumerate(pieces):
    with fprop_context.Scope(step=0, micro_batch=m) as context:
      outputs.append(layer(x))
    contexts.append(context)
  fprop_context.UpdateLayers(*contexts)
  return outputs


@pytest.mark.parametrize(
  'options',
  [{}, {'axis': 1}, {'axis': 2, 'center': False}, {'scale': False}, {'trainable': False}],
  ids=str,
)
def testOneMicroBatchEqualsKeras(options):
  net = _Net(**options)
  layer = _Make(net, 3, 4, 5)
  keras_cut.LoadWeights([layer], net)
  x = _X(6, offset=3.0)
  np.testing.assert_allclose(layer(x), net(x), atol=1e-6)
  before = [w.numpy() for w in net.non_trainable_weights]
  with tf.GradientTape() as tape:
    tape.watch(x)
    y = net(x, training=True)
    loss = tf.reduce_sum(y**3)
  want = tape.gradient(loss, [x, *(v.value for v in net.trainable_weights)])
  with tf.GradientTape() as tape:
    tape.watch(x)
    (actual,) = _Train(layer, [x])
    loss = tf.reduce_sum(actual**3)
  got = tape.gradient(loss, [x, *layer.trainable_variables])
  np.testing.assert_allclose(actual, y, atol=1e-5)
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())
  pairs = zip(net.weights[-2:], before[-2:], strict=True)
  changed = [np.abs(w.numpy() - b).max() > 0.01 for w, b in pairs]
  assert changed == [net.layers[0].trainable] * 2
  for ours, theirs in zip(layer.variables, net.weights, strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def testMicroBatchesNormaliseAndMiniBatchesAverage():
  net = _Net()
  layer = _Make(net, 3, 4, 5)
  keras_cut.LoadWeights([layer], net)
  x = _X(7, offset=1000.0)  # float32 cannot represent the squares of these values.
  pieces = micro_batch.Split(x, 3)
  outputs = _Train(layer, pieces)
  for piece, output in zip(pieces, outputs, strict=True):
    np.testing.assert_allclose(output, net(piece, training=True), rtol=1e-3, atol=1e-3)
  again = _Net()
  again(x, training=True)
  for ours, theirs in zip(layer.variables, again.weights, strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def testMaskedPositionsDoNotCount():
  ids = tf.constant([[1, 2, 0], [3, 0, 0], [4, 1, 2], [0, 0, 0]])
  net = keras.Sequential(
    [
      keras.Input([3], dtype='int32'),
      LAYERS.Embedding(5, 4, mask_zero=True),
      LAYERS.BatchNormalization(momentum=0.5),
    ]
  )
  p = keras_layer.KerasLayer.FromKeras(net, [keras_config.KerasInput((None, 3), 'int32')])
  layer = p.Set(name='cell', drop_mask=True).Instantiate()
  layer.InstantiateVariables()
  table = layer.variables[0].numpy()
  _Train(layer, tf.split(ids, 4))
  kept = table[[1, 2, 3, 4, 1, 2]]
  np.testing.assert_allclose(
    layer.VariableOf('batch_normalization_moving_mean'), 0.5 * kept.mean(0), rtol=1e-5
  )
  np.testing.assert_allclose(
    layer.VariableOf('batch_normalization_moving_variance'), 0.5 + 0.5 * kept.var(0), rtol=1e-5
  )
  with fprop_context.Scope(step=0):
    ours = layer(ids).numpy()
  np.testing.assert_allclose(ours[np.array(ids) > 0].mean(0), 0, atol=1e-6)


def testLayerCalledTwiceAveragesBothCalls():
  inputs = keras.Input([4])
  norm = LAYERS.BatchNormalization(momentum=0.5)
  net = keras.Model(inputs, norm(norm(inputs) + 2.0))
  layer = _Make(net, 4)
  x = tf.constant(np.random.default_rng(0).standard_normal([50, 4]) + 6.0, tf.float32)
  _Train(layer, [x])
  # The values are around 6 and 2.
  np.testing.assert_allclose(
    layer.VariableOf('batch_normalization_moving_mean'), [2.0] * 4, atol=0.2
  )


def testLayersInWrappersAndBlocksAreConverted():
  inputs = keras.Input([3, 4])
  inner = keras.Sequential([LAYERS.Dense(4), LAYERS.BatchNormalization()])
  x = LAYERS.Add()([inner(inputs), inputs])
  layer = _Make(keras.Model(inputs, x), 3, 4, dtype=tf.float64)
  assert len(layer.template.norms) == 1
  before = [v.numpy() for v in layer.non_trainable_variables]
  _Train(layer, [tf.ones([2, 3, 4], tf.float64)])
  for v, b in zip(layer.non_trainable_variables, before, strict=True):
    assert np.abs(v - b).max() > 0


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
