# SPDX-License-Identifier: Apache-2.0
"""Keras models in a pipeline: the same losses, gradients and masks as one device, and as Keras."""

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import fprop_context
from lingvo_gpipe.layers.keras import keras_cut
from tests.toys import stacks

LAYERS = keras.layers


def _Convolutions(dropout=0.3, norm=True):
  net = keras.Sequential([keras.Input([8, 8, 3])])
  for filters in (4, 6):
    net.add(LAYERS.Conv2D(filters, 3, kernel_regularizer=keras.regularizers.L2(0.01)))
    if norm:
      net.add(LAYERS.BatchNormalization(momentum=0.9))
    net.add(LAYERS.ReLU())
    if dropout:
      net.add(LAYERS.Dropout(dropout))
  net.add(LAYERS.GlobalAveragePooling2D())
  net.add(LAYERS.Dense(5))
  return net


def _Images(batch=6, size=8, dtype=tf.float64):
  x = np.random.default_rng(3).standard_normal([batch, size, size, 3])
  return (tf.constant(x, dtype),), stacks.ExampleWeights(batch, dtype)


def _Step(stack, images, side):
  """(sums, gradients) of one training step."""
  stack.Place(stacks.Devices(), *stacks.Specs(images), loss_fn=stacks.SquareLoss)
  sums = stacks.StepFunction(stack)(images, side, tf.constant(stacks.STEP, tf.int64))
  return {name: value.numpy() for name, value in sums.items()}, stacks.Gradients(stack)


def _CheckState(stack, expected):
  state = stacks.State(stack)
  assert state.keys() == expected.keys()
  for path, value in expected.items():
    np.testing.assert_allclose(state[path], value, rtol=1e-9, atol=1e-12, err_msg=path)


@pytest.fixture(scope='module')
def expected():
  """(sums, gradients) and state of one device."""
  state = {}
  sub = keras_cut.Cut(_Convolutions())
  return stacks.Reference(sub, 3, *_Images(), state=state), state


@pytest.mark.parametrize(
  'options',
  [
    {'num_stages': 2, 'schedule': 'gpipe'},
    {'num_stages': 3, 'schedule': '1f1b', 'remat_policy': 'layer'},
    {'num_stages': 2, 'schedule': '1f1b_fused', 'remat_policy': 'except_last'},
    {'num_stages': 2, 'schedule': 'zb_h1', 'remat_policy': 'none'},
  ],
  ids=lambda o: '-'.join(map(str, o.values())),
)
def testSequentialEqualsItselfOnOneDevice(options, expected):
  stack = stacks.MakeStack(keras_cut.Cut(_Convolutions()), num_micro_batches=3, **options)
  stacks.CheckEqual(_Step(stack, *_Images()), expected[0])
  _CheckState(stack, expected[1])
  assert len(expected[0][0]) == 3  # The loss, and a regularizer of each convolution.
  assert len(expected[1]) == 4  # No state of a seed generator.


def testMasksDifferBetweenSteps(expected):
  sub = keras_cut.Cut(_Convolutions())
  other = stacks.Reference(sub, 3, *_Images(), step=stacks.STEP + 1)
  stacks.CheckAnyDiffers(other[1], expected[0][1])


def testMasksAreTheSameForEveryCutAndWithXla():
  drop = keras.Sequential([keras.Input([8]), LAYERS.Dropout(0.2), LAYERS.Dropout(0.2)])
  masks = []
  for num_stages, xla in ((1, False), (2, False), (1, True), (2, True)):
    stack = stacks.MakeStack(
      keras_cut.Cut(drop), num_stages=num_stages, num_micro_batches=2, xla=xla, dtype=tf.float32
    )
    stack.Place(stacks.Devices(), tf.TensorSpec([16, 8]))
    with fprop_context.Scope(step=stacks.STEP):
      masks.append(stack(tf.ones([16, 8])).numpy())
  assert 0.4 < np.mean(masks[0] > 0) < 0.85
  for mask in masks[1:]:
    np.testing.assert_array_equal(mask, masks[0])


def testXlaWithDropoutInMixedPrecision():
  net = keras.Sequential([keras.Input([8]), LAYERS.Dense(6), LAYERS.Dropout(0.5)])
  sub = keras_cut.Cut(net) + keras_cut.Cut(keras.Sequential([keras.Input([6]), LAYERS.Dense(6)]))
  x = tf.constant(np.random.default_rng(3).standard_normal([4, 8]), tf.float32)
  results = []
  for num_stages in (1, 2):
    stack = stacks.MakeStack(
      sub,
      num_micro_batches=2,
      num_stages=num_stages,
      xla=True,
      dtype=tf.float32,
      fprop_dtype=tf.bfloat16,
    )
    side = stacks.ExampleWeights(4, tf.float32)
    results.append(stacks.Train(stack, (x,), side))
    assert {v.dtype for v in stack.variables} == {tf.float32}
  stacks.CheckEqual(*results, bound=1e-5)


def testEqualsKerasWithoutDropoutAndNorm():
  """One mini-batch in three pieces equals Keras on the whole mini-batch."""
  net = _Convolutions(dropout=0, norm=False)
  stack = stacks.MakeStack(keras_cut.Cut(net), num_micro_batches=3, num_stages=2, dtype=tf.float32)
  images, side = _Images(batch=7, dtype=tf.float32)
  stack.Place(stacks.Devices(), *stacks.Specs(images), loss_fn=stacks.SquareLoss)
  keras_cut.LoadWeights(stack.layers, net)
  np.testing.assert_allclose(stack.Predict(*images), net(images[0]), rtol=1e-5, atol=1e-6)

  sums = stacks.StepFunction(stack)(images, side, tf.constant(stacks.STEP, tf.int64))
  total = tf.reduce_sum(side)
  with tf.GradientTape() as tape:
    metrics = stacks.SquareLoss(None, (net(images[0], training=True),), side)
    loss = metrics['loss'][0] + tf.add_n(net.losses)
  expected = tape.gradient(loss, [v.value for v in net.trainable_weights])
  objective = sum(float(pair[0]) for pair in sums.values())
  np.testing.assert_allclose(objective / total, loss, rtol=1e-5)
  grads = stacks.Gradients(stack)
  paths = [path for path, v in stack.VariablesByPath().items() if v.trainable]
  assert len(grads) == len(expected) == 6
  for path, want in zip(paths, expected, strict=True):
    error = np.abs(grads[path] / total - want).max()
    assert error <= 1e-5 * max(np.linalg.norm(want), 1e-3), path


def testApplicationNobodyHereWrote():
  """MobileNetV2: depthwise convolutions, residuals, 52 BatchNormalizations."""
  net = keras.applications.MobileNetV2(
    input_shape=(32, 32, 3), alpha=0.35, weights=None, classes=4, classifier_activation=None
  )
  names = {layer.name for layer in net.layers}
  ends = [(f'block_{i}_add', f'block_{i}_project_BN') for i in range(1, 17)]
  sub = keras_cut.Cut(net, after=[add if add in names else norm for add, norm in ends])
  assert len(sub) == 17
  images, side = _Images(batch=4, size=32)
  state = {}
  expected = stacks.Reference(sub, 2, images, side, state=state)
  # The last stage recomputes nothing, so a long one is quickly traced.
  options = {'num_stages': 3, 'splits': [3, 6, 17], 'schedule': '1f1b_fused'}
  stack = stacks.MakeStack(sub, num_micro_batches=2, **options)
  stacks.CheckEqual(_Step(stack, images, side), expected)
  _CheckState(stack, state)
  assert len(state) == 104


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
