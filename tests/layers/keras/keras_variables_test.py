# SPDX-License-Identifier: Apache-2.0
"""Variables of Keras models are made without values, and move, without another object."""

import gc
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from lingvo_gpipe.layers.keras import keras_variables
from tests import naming
from tests.toys import keras_fits, stacks

X = keras_fits.Floats(4, 5)


def testMoveKeepsTheVariableAndItsValue():
  dense = layers.Dense(5)
  dense.build([None, 5])
  kernel, value = dense.kernel, dense.kernel.numpy()
  device = stacks.Devices()[1]
  placed = keras_variables.Move(kernel, device)
  assert dense.kernel is kernel
  assert kernel.value is placed
  assert tf.DeviceSpec.from_string(placed.device).device_index == 1
  np.testing.assert_array_equal(kernel, value)
  assert keras_variables.Move(kernel, device) is placed
  kernel.assign(2 * value)
  np.testing.assert_array_equal(placed, 2 * value)
  kernel.trainable = False
  assert not keras_variables.Move(kernel, device).trainable
  np.testing.assert_array_equal(kernel, 2 * value)


def testVariablesWithoutValues():
  """They get their initial values where they are moved to, and not earlier."""
  gc.collect()
  before = sum(isinstance(x, tf.Variable) for x in gc.get_objects())
  with keras_variables.WithoutValues():
    dense = layers.Dense(3, kernel_initializer='glorot_uniform', bias_initializer='ones')
    dense.build([None, 5])
  layers.Dense(5).build([None, 5])
  gc.collect()
  after = sum(isinstance(x, tf.Variable) for x in gc.get_objects())
  assert after <= before + 2
  assert dense.kernel._value is None
  device = stacks.Devices()[2]
  placed = keras_variables.Move(dense.kernel, device)
  assert tf.DeviceSpec.from_string(placed.device).device_index == 2
  assert np.ptp(dense.kernel.numpy()) > 0
  assert dense.bias._value is None
  keras_variables.Move(dense.bias, device)
  np.testing.assert_array_equal(dense.bias, np.ones(3))
  np.testing.assert_allclose(dense(X), X @ dense.kernel.numpy() + 1, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def testWeightsThatMoveInSlicesAreEqual(dtype, tmp_path, monkeypatch):
  """The last slice is smaller; the variables are on another device than the default one."""
  monkeypatch.setattr(keras_variables, '_SLICE_BYTES', 100)
  models = [
    keras.Sequential([keras.Input([7]), layers.Dense(9, dtype=dtype), layers.Dense(1, dtype=dtype)])
    for _ in range(2)
  ]
  path = tmp_path / 'x.weights.h5'
  for v in (*models[0].weights, *models[1].weights):
    keras_variables.Move(v, stacks.Devices()[1])
  with keras_variables.Streaming():
    models[0].save_weights(path)
    models[1].load_weights(path)
  for v, expected in zip(models[1].weights, models[0].weights, strict=True):
    np.testing.assert_array_equal(v, expected)
    assert tf.DeviceSpec.from_string(v.value.device).device_index == 1
  plain = keras.Sequential([keras.Input([7]), layers.Dense(9, dtype=dtype), layers.Dense(1)])
  plain.load_weights(path)
  np.testing.assert_array_equal(plain.layers[0].kernel, models[0].layers[0].kernel)


def testNumbersAndListsBecomeValues():
  """`load_own_variables` of a layer may assign them."""
  dense = layers.Dense(3)
  dense.build([None, 5])
  scale = keras.Variable(0.0)
  with keras_variables.Streaming():
    scale.assign(2.5)
    dense.bias.assign([1, 2, 3])
  assert float(scale.value) == 2.5
  np.testing.assert_array_equal(dense.bias, [1, 2, 3])


def testAValueOfAnotherShapeIsRefused():
  dense = layers.Dense(5, name='dense')
  dense.build([None, 5])
  pattern = naming.Naming('dense/kernel', '(5, 5)', '(5, 4)')
  with keras_variables.Streaming(), pytest.raises(ValueError, match=pattern):
    dense.kernel.assign(np.zeros([5, 4]))


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
