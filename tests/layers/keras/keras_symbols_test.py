# SPDX-License-Identifier: Apache-2.0
"""The trace of a subclassed model records what plain Keras computes: calls, weights and modes."""

import random
import sys

import keras
import numpy as np
import pytest
from keras import layers, ops

from lingvo_gpipe.layers.keras import keras_graph
from tests import naming
from tests.toys import keras_fits

IDS, TARGETS = keras_fits.Integers(9, 8, 4), keras_fits.Floats(8, 4, 3)
X, Y = keras_fits.Floats(8, 5), keras_fits.Floats(8, 3, seed=1)
COMPILED = {'loss': 'mse'}.copy
TWO_STEPS = {'batch_size': 4, 'epochs': 1}


class _Glue(keras.Model):
  """Computes with weights and constants between its layers."""

  def __init__(self):
    super().__init__(name='glue')
    self.embedding = layers.Embedding(9, 5)
    self.positions = layers.Embedding(4, 5)
    self.norm = layers.LayerNormalization()
    self.mlp = keras.Sequential([keras.Input([5]), layers.Dense(5, activation='tanh')])
    self.heads = [layers.Dense(5, activation='tanh'), layers.Dense(5), layers.Dense(3)]
    for name in 'abcdef':
      weight = self.add_weight(shape=[5], initializer='random_normal', name=name)
      setattr(self, name, weight)
    self.matrix = self.add_weight(shape=[5, 5], initializer='random_normal', name='matrix')
    self.table = ops.convert_to_tensor(keras_fits.Floats(4, 5, seed=2))

  def call(self, ids):
    x = self.embedding(ids) + self.positions(ops.arange(4))[None]
    x = self.heads[0](x) + self.norm(self.table) + self.mlp(self.table)
    x = layers.add([x * ops.exp(self.a), layers.ReLU()(x)]) * keras.activations.sigmoid(self.b)
    x = self.heads[1](x) @ (self.matrix @ ops.transpose(self.matrix)) - self.c[None][:1]
    x = (1.0 - 2 * self.d) * x / (3.0 + abs(self.e) ** 2)
    x = x * ops.where(self.f > 0, self.f, -self.f) / ops.sqrt(ops.cast(5, x.dtype))
    x = ops.where(ops.expand_dims(ids, -1) == 0, ops.where(self.f != 0, 0.5, x), x)
    return self.heads[2](x)


def testWeightsAndConstantsOutsideLayersAreTrained():
  """Some weights have a gradient only through operations that do not depend on the inputs."""
  keras_fits.CheckFit(lambda: _Made(_Glue, IDS), IDS, TARGETS, COMPILED, **TWO_STEPS)


def _Made(cls, x):
  """Returns a model with its weights, which `call` on the first batch makes."""
  model = cls()
  model(x)
  return model


class _Masked(keras.Model):
  """Passes on the mask of an embedding."""

  def __init__(self):
    super().__init__(name='masked')
    self.embedding = layers.Embedding(9, 5, mask_zero=True)
    self.parts = [layers.SimpleRNN(5, return_sequences=True), layers.Dense(3)]

  def call(self, ids):
    return self.parts[1](self.parts[0](self.embedding(ids)))


def testMasksAreTraced():
  ids = keras_fits.PaddedIds(8, 4)
  keras_fits.CheckFit(lambda: _Made(_Masked, ids), ids, TARGETS, COMPILED, ((2, 2),), **TWO_STEPS)


class _Counter(layers.Layer):
  """Counts its calls in training, and adds a loss, but returns nothing."""

  def build(self, _):
    self.count = self.add_weight(shape=[], initializer='zeros', trainable=False)

  def call(self, x, y, training=None):
    if training:
      self.count.assign_add(1)
      self.add_loss(ops.mean(ops.square(x - y)))


class _Effects(keras.Model):
  """Ignores what some layers return, and changes state in another order than outputs need it."""

  def __init__(self):
    super().__init__(name='effects')
    self.dense = [layers.Dense(5, activation='tanh'), layers.Dense(5), layers.Dense(3)]
    self.norm = layers.BatchNormalization(momentum=0.5)
    self.unused = layers.Dense(2, activity_regularizer='l2')
    self.counter = _Counter(name='counter')

  def call(self, x, training=None):
    a = self.norm(self.dense[0](x))
    b = self.norm(self.dense[1](x))
    self.unused(b)
    self.counter(a, x)
    return self.dense[2](b * 2 + a)


def testCallsHaveTheirEffectsInOrder():
  make = lambda: _Made(_Effects, X)  # noqa: E731
  keras_fits.CheckFit(make, X, Y, COMPILED, ((2, 1),), **TWO_STEPS)


class _Slice(keras.Model):
  """Adds the first rows of a table."""

  def __init__(self):
    super().__init__(name='slice')
    self.dense = layers.Dense(3)
    self.table = self.add_weight(shape=[8, 3], name='table')

  def call(self, x):
    return self.dense(x) + ops.sum(self.table[: x.shape[1]], axis=0)


def testASliceByALengthThatChangesIsRefused():
  pipe = keras_fits.Pipe(_Slice(), 1, 1)
  pipe.compile(loss='mse')
  x, y = keras_fits.Floats(2, 6, 5), keras_fits.Floats(2, 6, 3)
  pipe.evaluate(x, y, verbose=0)
  with pytest.raises(ValueError, match=naming.Naming('_Slice.call', 'length')):
    pipe.evaluate(x[:, :4], y[:, :4], verbose=0)


class _Seen(layers.Layer):
  """Records the training mode of each of its calls."""

  def __init__(self):
    super().__init__(name='seen')
    self.modes = []

  def call(self, x, training=None):
    self.modes.append(bool(training))
    return x


class _Wrapped(layers.Layer):
  """Calls a layer, which it may ask for a mode."""

  def __init__(self, mode):
    super().__init__(name='wrapped')
    self.seen = _Seen()
    self.mode = mode

  def call(self, x):
    return self.seen(x) if self.mode is None else self.seen(x, training=self.mode)


class _Chain(keras.Model):
  """Calls layers in turn, each of which gets a mode or none; `call` has no mode."""

  def __init__(self, calls):
    super().__init__(name='chain')
    self.parts = [layer for layer, _ in calls]
    self.modes = [mode for _, mode in calls]

  def Run(self, x, training):
    for part, mode in zip(self.parts, self.modes, strict=True):
      x = part(x) if mode is None else part(x, training=training if mode == 'model' else mode)
    return x

  def call(self, x):
    return self.Run(x, True)


class _ChainWithMode(_Chain):
  def call(self, x, training=None):
    return self.Run(x, training)


@pytest.mark.parametrize('cls', [_Chain, _ChainWithMode])
def testLayersHaveTheModesOfKeras(cls):
  """A mode that one layer is asked for is the mode of the next ones, too, in Keras."""
  rng = random.Random(5)
  for _ in range(8):
    calls = []
    for _ in range(6):
      layer = rng.choice([_Seen, lambda: _Wrapped(None), lambda: _Wrapped(rng.random() < 0.5)])()
      mode = rng.choice([None, None, True, False, 'model']) if type(layer) is _Seen else None
      calls.append((layer, mode))
    model = cls(calls)
    model(X)
    nodes = keras_graph.FromModel(model, X).nodes
    for mode in [True, False] if cls is _ChainWithMode else [None]:
      model(X) if mode is None else model(X, training=mode)
      for layer, node in zip(model.parts, nodes, strict=True):
        if getattr(layer, 'mode', None) is None:
          actual = mode if node.training is None else node.training
          assert actual == getattr(layer, 'seen', layer).modes[-1], model.modes


class _Normalised(keras.Model):
  """Freezes one normalisation, and calls the next without a mode."""

  def __init__(self):
    super().__init__(name='normalised')
    self.dense = [layers.Dense(5, activation='tanh'), layers.Dense(5), layers.Dense(3)]
    self.norms = [layers.BatchNormalization() for _ in range(3)]

  def Run(self, x, **options):
    x = self.norms[0](self.dense[0](x))
    x = self.norms[1](self.dense[1](x), **options)
    return self.dense[2](self.norms[2](x))


class _WithoutMode(_Normalised):
  def call(self, x):
    return self.Run(x)


class _WithMode(_Normalised):
  def call(self, x, training=None):
    return self.Run(x)


class _Frozen(_Normalised):
  def call(self, x, training=None):
    return self.Run(x, training=False)


@pytest.mark.parametrize('cls', [_WithoutMode, _WithMode, _Frozen])
def testNormalisationTrainsAsInKeras(cls):
  keras_fits.CheckFit(lambda: _Made(cls, X), X, Y, COMPILED, ((2, 1),), **TWO_STEPS)


class _Inverse(_Normalised):
  def call(self, x, training=None):
    return self.Run(x, training=not training)


def testAModeThatIsInvertedIsRefused():
  with pytest.raises(ValueError, match=naming.Naming('_Inverse.call', 'evaluation')):
    keras_graph.FromModel(_Inverse(), X)


class _Inner(keras.Model):
  """Calls a Functional model that has a layer with a mode of its own."""

  def __init__(self):
    super().__init__(name='outer')
    inputs = keras.Input([5])
    normalised = layers.BatchNormalization(name='norm')(layers.Dense(5)(inputs), training=True)
    self.inner = keras.Model(inputs, normalised, name='inner')

  def call(self, x):
    return self.inner(x)


def testAModeWithinAFunctionalModelIsRefusedIfItHoldsInKerasOnly():
  with pytest.raises(ValueError, match=naming.Naming('norm', 'inner', 'training')):
    keras_graph.FromModel(_Made(_Inner, X), X)


class _Settings(_Normalised):
  """Changes an attribute of a layer between its calls, which run later."""

  def call(self, x):
    for self.dense.use_bias in (True, False):
      x = self.dense(x)
    return x


def testAttributesThatChangeBetweenCallsAreRefused():
  model = _Settings()
  model.dense = layers.Dense(5, name='dense')
  with pytest.raises(ValueError, match=naming.Naming('_Settings.call', 'use_bias', 'dense')):
    keras_graph.FromModel(_Made(lambda: model, X), X)


class _Values(_Normalised):
  def __init__(self, function):
    super().__init__()
    self.function = function
    self.w = self.add_weight(shape=[3], initializer='random_normal', name='w')
    self.i = self.add_weight(shape=[3], initializer='zeros', dtype='int32', trainable=False)

  def call(self, x):
    return self.Run(x) * self.function(self)


@pytest.mark.parametrize(
  'function',
  [
    lambda m: np.sign(m.w.value),
    lambda m: ops.normalize(ops.square(m.w.value)),
    lambda m: ops.cast(m.w.value != 0, 'float32'),
    lambda m: ops.cast(m.i.value == 1, 'float32'),
  ],
  ids=['sign', 'direction', 'zero', 'integer'],
)
def testValuesOfWeightsAreRefused(function):
  """Whatever their functions do not show: sign, size, zeros."""
  model = _Made(lambda: _Values(function), X)
  with pytest.raises(ValueError, match=naming.Naming('_Values.call', 'weight')):
    keras_graph.FromModel(model, X)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
