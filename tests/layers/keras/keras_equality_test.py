# SPDX-License-Identifier: Apache-2.0
"""Keras layers are equal only if they compute the same function of their variables."""

import itertools
import sys

import keras
import numpy as np
import pytest
from keras import layers

from lingvo_gpipe.layers.keras import keras_equality
from tests.toys import keras_fits


class _Scaled(layers.Layer):
  """Multiplies by a number, which no configuration has."""

  def __init__(self, factor, **options):
    super().__init__(**options)
    self.factor = factor

  def call(self, x):
    return x * self.factor


class _Hiding(layers.Layer):
  """Multiplies by a variable, which it tracks or not."""

  def __init__(self, value, is_tracked=False):
    super().__init__()
    if is_tracked:
      self.factor = keras.Variable(value, trainable=False)
    else:
      self.__dict__['factor'] = keras.Variable(value, trainable=False)

  def call(self, x):
    return x * self.factor


class Numbered(layers.Layer):
  """Multiplies by the number in its name, or in the name of the layer inside."""

  def __init__(self, inside=None, **options):
    super().__init__(**options)
    self.inside = inside

  def call(self, x):
    layer = self.inside or self
    return x * int(layer.name[-1])


class _Naming(layers.Layer):
  """Uses its name while it makes its layers only."""

  def __init__(self):
    super().__init__()
    self.dense = layers.Dense(4, name=f'{self.name}_dense')
    self.dense.build([None, 4])

  def call(self, x):
    return self.dense(x)


class _Unknown:
  """An object of which nothing is known."""


def _Twice(x):
  return 2 * x


def _Times(factor, bias=0.0):
  return lambda x, bias=bias: factor * x + bias


def _Half(x):
  return x / 2


def _Frozen(layer):
  layer.trainable = False
  return layer


def _Adapted(values):
  layer = layers.Normalization()
  layer.adapt(np.array(values))
  return layer


def _Lora(rank):
  layer = layers.Dense(4)
  layer.build([None, 4])
  layer.enable_lora(rank)
  return layer


def _Quantised():
  layer = layers.Dense(4)
  layer.build([None, 4])
  layer.quantize('int8')
  return layer


class _Features(layers.Layer):
  """Has a weight with an initializer."""

  def __init__(self, seed):
    super().__init__()
    self.kernel_initializer = keras.initializers.RandomNormal(seed=seed)
    self.kernel = self.add_weight(shape=(4, 4), initializer=self.kernel_initializer)


class _RandomFeatures(_Features):
  """Draws of its initializer again in each call."""

  def call(self, x):
    return keras.ops.cos(x @ self.kernel_initializer(self.kernel.shape))


class _Cast(layers.Layer):
  """Has a weight that a mixed policy casts, or not."""

  def __init__(self, autocast):
    super().__init__()
    self.add_weight(shape=(4,), name='w', autocast=autocast)


_NUMBERS = itertools.count()

EQUAL = {
  'Dense': lambda: layers.Dense(4, activation='relu'),
  'initializer': lambda: layers.Dense(4, kernel_initializer=keras.initializers.RandomNormal()),
  'initializer of a user': lambda: _Features(next(_NUMBERS)),
  'regularizer': lambda: layers.Dense(4, kernel_regularizer=keras.regularizers.L2(0.1)),
  'Dropout': lambda: layers.Dropout(0.5),
  'attention': lambda: layers.MultiHeadAttention(2, 4, dropout=0.1),
  'wrapped': lambda: layers.TimeDistributed(layers.Dense(4)),
  'function': lambda: layers.Lambda(_Twice),
  'function made twice': lambda: layers.Lambda(_Times(2.0)),
  'attribute': lambda: _Scaled(2.0),
  'array': lambda: _Scaled(np.arange(3.0)),
  'LoRA': lambda: _Lora(2),
  'tracked variable': lambda: _Hiding(2.0, is_tracked=True),
  'name of a part': _Naming,
}

UNEQUAL = {
  'activation': (lambda: layers.Dense(4, activation='relu'), lambda: layers.Dense(4)),
  'units': (lambda: layers.Dense(4), lambda: layers.Dense(5)),
  'bias': (lambda: layers.Dense(4), lambda: layers.Dense(4, use_bias=False)),
  'rate': (lambda: layers.Dropout(0.5), lambda: layers.Dropout(0.4)),
  'epsilon': (lambda: layers.LayerNormalization(), lambda: layers.LayerNormalization(epsilon=0.1)),
  'dtype': (lambda: layers.Dense(4), lambda: layers.Dense(4, dtype='mixed_bfloat16')),
  'trainable': (lambda: layers.Dense(4), lambda: _Frozen(layers.Dense(4))),
  'frozen statistics': (
    lambda: layers.BatchNormalization(),
    lambda: _Frozen(layers.BatchNormalization()),
  ),
  'function': (lambda: layers.Lambda(_Twice), lambda: layers.Lambda(_Half)),
  'captured': (lambda: layers.Lambda(_Times(2.0)), lambda: layers.Lambda(_Times(3.0))),
  'default': (
    lambda: layers.Lambda(_Times(2.0, bias=1.0)),
    lambda: layers.Lambda(_Times(2.0, bias=2.0)),
  ),
  'lambda': (lambda: layers.Lambda(lambda x: x), lambda: layers.Lambda(lambda x: x)),
  'regularizer': (
    lambda: layers.Dense(4, kernel_regularizer=keras.regularizers.L2(0.1)),
    lambda: layers.Dense(4, kernel_regularizer=keras.regularizers.L2(0.2)),
  ),
  'constraint': (lambda: layers.Dense(4), lambda: layers.Dense(4, kernel_constraint='max_norm')),
  'class': (lambda: layers.ReLU(), lambda: layers.ELU()),
  'nested': (
    lambda: keras.Sequential([layers.Dense(4), layers.Dense(4, activation='relu')]),
    lambda: keras.Sequential([layers.Dense(4), layers.Dense(4, activation='elu')]),
  ),
  'wrapped': (
    lambda: layers.TimeDistributed(layers.Dense(4)),
    lambda: layers.TimeDistributed(layers.Dense(4, activation='elu')),
  ),
  'adapted': (lambda: _Adapted([1.0, 2.0, 5.0]), lambda: _Adapted([1.0, 2.0, 6.0])),
  'attribute': (lambda: _Scaled(2.0), lambda: _Scaled(3.0)),
  'kind of number': (lambda: _Scaled(2.0), lambda: _Scaled(2)),
  'unknown object': (lambda: _Scaled(_Unknown()), lambda: _Scaled(_Unknown())),
  'initializer in a call': (
    lambda: _Scaled(keras.initializers.Constant(1.0)),
    lambda: _Scaled(keras.initializers.Constant(5.0)),
  ),
  'random initializer in a call': (lambda: _RandomFeatures(1), lambda: _RandomFeatures(2)),
  'order of a set': (lambda: _Scaled(frozenset([0, 8])), lambda: _Scaled(frozenset([8, 0]))),
  'sign of zero': (lambda: _Scaled(0.0), lambda: _Scaled(-0.0)),
  'chosen name': (lambda: _Scaled(2.0, name='left'), lambda: _Scaled(2.0, name='right')),
  'name that is read': (lambda: Numbered(name='numbered_1'), lambda: Numbered(name='numbered_2')),
  'name of a part that is read': (
    lambda: Numbered(layers.Dense(4, name='dense_1'), name='numbered'),
    lambda: Numbered(layers.Dense(4, name='dense_2'), name='numbered'),
  ),
  'untracked variable': (lambda: _Hiding(2.0), lambda: _Hiding(3.0)),
  'untracked variable in a part': (
    lambda: layers.TimeDistributed(_Hiding(2.0)),
    lambda: layers.TimeDistributed(_Hiding(3.0)),
  ),
  'autocast': (lambda: _Cast(True), lambda: _Cast(False)),
  'LoRA': (lambda: _Lora(2), lambda: _Lora(3)),
  'quantised': (lambda: _Quantised(), lambda: _Lora(2)),
}


def _Built(make):
  layer = make()
  shape = (None, 3, 4)
  if isinstance(layer, layers.MultiHeadAttention):
    layer.build(shape, shape)
  elif not layer.built:
    layer.build(shape)
  return layer


@pytest.mark.parametrize('make', EQUAL.values(), ids=EQUAL)
def testEqualLayers(make):
  """They have other names, variables and seeds."""
  a, b = _Built(make), _Built(make)
  assert a is not b
  assert keras_equality.AreEqual(a, b)


@pytest.mark.parametrize('pair', UNEQUAL.values(), ids=UNEQUAL)
def testUnequalLayers(pair):
  a, b = map(_Built, pair)
  assert keras_equality.AreEqual(a, a)
  assert not keras_equality.AreEqual(a, b)
  assert not keras_equality.AreEqual(b, a)


def testACalledLayerEqualsAnUncalledLayer():
  a, b = layers.Dense(4), layers.Dense(4)
  a(np.zeros([2, 3], 'float32'))
  b(keras.Input([3]))
  assert keras_equality.AreEqual(a, b)


def testSharingCounts():
  """A layer that stands at two places differs from two equal layers."""
  a, b, c = (_Built(EQUAL['Dense']) for _ in range(3))
  assert keras_equality.AreEqual([a, a], [b, b])
  assert keras_equality.AreEqual([a, b], [b, c])
  assert not keras_equality.AreEqual([a, a], [b, c])
  assert not keras_equality.AreEqual([a, b], [c, c])


def testPlainValues():
  assert keras_equality.AreEqual((1, 'a', None, [2.0], {'k': 3}), (1, 'a', None, [2.0], {'k': 3}))
  assert keras_equality.AreEqual(float('nan'), float('nan'))
  pairs = [(1, 1.0), (1, True), ([1], (1,)), ({'k': 1}, {'k': 2}), ({1}, {2}), ('a', 'b')]
  pairs += [(np.zeros(2), np.zeros(3)), (np.zeros(2), np.zeros(2, 'float32'))]
  for a, b in pairs:
    assert not keras_equality.AreEqual(a, b)


class _Choice(layers.Layer):
  """Has data under the name of a method that Keras wraps."""

  def __init__(self, quantize):
    super().__init__()
    self.quantize = quantize


def testDataWithTheNameOfAMethodCounts():
  assert keras_equality.AreEqual(_Choice(True), _Choice(True))
  assert not keras_equality.AreEqual(_Choice(True), _Choice(False))


@pytest.mark.parametrize(
  'make', [lambda i: _Hiding(i + 1.0), lambda i: Numbered(name=f'numbered_{i}')]
)
def testStagesThatDifferByAnUntrackedVariableOrANameEqualKeras(make):
  """The inner stages would share the trace of one of them."""

  def Make():
    x = inputs = keras.Input([5])
    for i in range(1, 5):
      x = make(i)(layers.Dense(5)(x))
    return keras.Model(inputs, x)

  x, y = keras_fits.Floats(4, 5), keras_fits.Floats(4, 5, seed=1)

  def Slow():
    return keras.optimizers.SGD(1e-4)

  def Compiled():
    return {'loss': 'mse'}

  keras_fits.CheckFit(Make, x, y, Compiled, ((4, 1),), optimizer=Slow, batch_size=4)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
