# SPDX-License-Identifier: Apache-2.0
"""LeNet-5 learns equally in one stage and in two."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.runners import train_runner
from tasks.image import lenet

BATCH_SIZE = 24


def _Runner(num_stages):
  p = lenet.LeNet5.Params().Set(
    name='lenet',
    image_size=8,
    num_channels=1,
    num_classes=3,
    filter_size=3,
    filters=[4, 8],
    hidden_dim=16,
    dropout_prob=0.1,
  )
  p.stack.Set(num_stages=num_stages, num_micro_batches=2, xla=False)
  p.train.learner.learning_rate = 1e-2
  devices = [d.name for d in tf.config.list_logical_devices('CPU')]
  spec = nested_map.NestedMap(
    images=tf.TensorSpec([BATCH_SIZE, 8, 8, 1]),
    labels=tf.TensorSpec([BATCH_SIZE], tf.int32),
    example_weights=tf.TensorSpec([BATCH_SIZE]),
  )
  return train_runner.TrainRunner(p.Instantiate(), devices, spec)


def _Batch(rng):
  """Returns noise with a bright square at one of three places."""
  labels = rng.integers(0, 3, [BATCH_SIZE])
  images = rng.standard_normal([BATCH_SIZE, 8, 8, 1]) * 0.3
  for image, label in zip(images, labels, strict=True):
    image[2 * label : 2 * label + 3, 2:6] += 1.0
  return nested_map.NestedMap(
    images=tf.constant(images, tf.float32),
    labels=tf.constant(labels, tf.int32),
    example_weights=tf.ones([BATCH_SIZE]),
  )


def testLeNetLearnsEquallyWithAnyStages():
  losses = []
  for num_stages in (1, 2):
    rng = np.random.default_rng(0)
    run = _Runner(num_stages)
    losses.append([run.TrainStep(_Batch(rng))['loss'] for _ in range(40)])
    # So few steps do not make useful moving averages; test only that they change.
    variables = run.task.VariablesByPath()
    mean = variables['lenet.stack.layers[0].batch_norm.moving_mean']
    assert not mean.trainable and np.any(mean.numpy())
  np.testing.assert_allclose(losses[1][:20], losses[0][:20], rtol=1e-3)
  assert losses[0][-1] < losses[0][0] / 3


def testLayers():
  p = lenet.LeNet5.Params().Set(name='net', image_size=8, num_classes=3, dropout_prob=0.25)
  p.batch_norm_tpl.decay = 0.5
  layers = p.Instantiate().stack.layers
  assert [type(layer).__name__ for layer in layers] == [
    *['ConvBatchNormLayer', 'PoolingLayer'] * 2,
    *['ActivationLayer', 'FlattenLayer', 'ProjectionLayer', 'DropoutLayer', 'ProjectionLayer'],
  ]
  # The blocks begin with a ReLU, which must not apply to the images or the logits.
  activations = [layer.params.Get('activation') for layer in layers[:3:2] + layers[6::2]]
  assert activations == ['NONE', 'RELU', 'RELU', 'NONE']
  assert layers[7].params.keep_prob == 0.75
  assert [layer.batch_norm.params.decay for layer in layers[:3:2]] == [0.5, 0.5]


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
