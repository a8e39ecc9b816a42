# SPDX-License-Identifier: Apache-2.0
"""Functions of TensorFlow, operators and sizes in a traced `call` compute what plain Keras does."""

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from lingvo_gpipe.layers.keras import keras_graph
from tests import naming
from tests.toys import keras_fits

IDS, TARGETS = keras_fits.Integers(8, 8, 4), keras_fits.Floats(8, 4, 3)
COMPILED = {'loss': 'mse'}.copy
TWO_STEPS = {'batch_size': 4, 'epochs': 1}


class _Model(keras.Model):
  """Calls a function between two layers."""

  def __init__(self, function):
    super().__init__(name='model')
    self.embedding, self.positions = layers.Embedding(9, 6), layers.Embedding(8, 6)
    self.first, self.last = layers.Dense(6, activation='tanh', name='first'), layers.Dense(3)
    self.w = self.add_weight(shape=[6], initializer='random_normal', name='w')
    self.table = self.add_weight(shape=[1, 8, 6], initializer='random_normal', name='table')
    self.function = function

  def call(self, ids):
    x = self.first(self.embedding(ids))
    return self.last(self.function(self, x, ids))


def _TensorFlow(model, x, ids):
  batch, length = tf.shape(x)[0], tf.shape(x)[1]
  flat = tf.reshape(x, [batch * length, 6]) * tf.exp(model.w)
  x = tf.concat([x, tf.reshape(flat, [batch, length, 6])], axis=-1)
  a, b = tf.split(x, 2, axis=-1)
  mean, variance = tf.nn.moments(a, axes=[-1], keepdims=True)
  x = (a - mean) * tf.math.rsqrt(variance + 1.0) + tf.math.top_k(b, k=2).values[..., :1]
  x = tf.where(ids[..., None] > 0, x, model.w) + tf.nn.embedding_lookup(model.table[0], ids)
  mask = tf.linalg.band_part(tf.ones([length, length]), -1, 0)
  x = tf.einsum('ts,bsd->btd', mask, x) + tf.broadcast_to(model.w, tf.shape(x))
  x = tf.constant(2.0) * x + tf.range(6.0) * model.w
  x = tf.map_fn(lambda row: row / 20, layers.Activation(tf.nn.relu)(x))
  return x + model.positions(tf.range(length)) * tf.stop_gradient(x)


def _Operators(model, x, ids):
  """Has the operators of TensorFlow: for integers `&` differs from logical_and."""
  x += tf.cast((ids & 3) + (ids ^ 5), x.dtype)[..., None]
  x *= (
    +model.w * tf.cast(ids / 3, 'float32')[..., None]
    + tf.cast(ids // 2 * (ids % 3), 'float32')[..., None]
  )
  x = np.sqrt(2) * x + np.arange(6, dtype='float32') / (3 + abs(x) + (-x) ** 2)
  x -= x @ ops.transpose(model.table[0]) @ model.table[0, np.int64(0) :]
  return tf.where(~(ids == 1) & (ids != 2) | (ids > 3), ops.sum(x, -1), 0.0)[..., None] * x


def _Sizes(model, x, ids):
  batch, length = ops.shape(ids)
  x += ops.broadcast_to(model.w, (batch, length, 6)) + model.table[:, :length]
  x = ops.reshape(ops.reshape(x, (batch, length, 2, 3)), (batch * length, 6))
  x = ops.reshape(x, ops.shape(ids) + (6,)) + model.positions(ops.arange(length))
  x = ops.concatenate([x, ops.zeros((batch, 1, 6)), ops.tile(model.table, (batch, 1, 1))], axis=1)
  return x[:, :length] * ops.cast(length, 'float32') + ops.repeat(x[:1], batch, axis=0)[:, -length:]


def _Shapes(model, x, ids):
  """Reads the static shapes of tensors."""
  _, length, dim = x.shape.as_list()
  assert ids.get_shape().rank == ids.shape.ndims == 2 and x.shape[1:].is_fully_defined()
  x = tf.reshape(x * model.w, [-1, x.shape[1:].num_elements()]) * float(length * dim) / 40
  x = tf.reshape(x, [-1] + list(ids.shape[1:] + model.w.shape)) / [1, 2, 3, 4, 5, dim]
  return x * tf.ones(tuple([1]) + x.shape[1:2] + [1]) + ops.zeros(x.shape[-1:]) * x


def _LongVector(model, x, ids):
  """Crosses a cell with more numbers than a shape may have."""
  numbers = tf.range(75 * tf.shape(ids)[1])
  mean = lambda: tf.reduce_mean(tf.cast(numbers, x.dtype)) / 300  # noqa: E731
  x = model.first(x * model.w + mean())
  return model.first(x * model.positions(ids)) + mean()


@pytest.mark.parametrize(
  ('function', 'num_stages'), [(_TensorFlow, 2), (_Operators, 2), (_Shapes, 2), (_LongVector, 3)]
)
def testFunctionsAndOperatorsAreTrained(function, num_stages):
  pipelines = ((num_stages, 2),)
  keras_fits.CheckFit(lambda: _Model(function), IDS, TARGETS, COMPILED, pipelines, **TWO_STEPS)


def testEachMicroBatchHasItsSizes():
  """For the second of two lengths the model is traced with an unknown one."""
  x, y = keras_fits.Integers(9, 4, 6, seed=1), keras_fits.Floats(4, 6, 3, seed=1)
  batches = [(x, y), (IDS[:5], TARGETS[:5])]

  def Results(model, **options):
    model.compile(loss='mse', optimizer=keras_fits.Sgd(), jit_compile=False, **options)
    losses = [model.train_on_batch(*batch) for batch in batches]
    return [*losses, *model.get_weights()]

  def Make():
    return keras_fits.Seeded(lambda: _Model(lambda m, x, ids: _Sizes(m, x[:, :, :], ids)))

  expected = Results(Make(), run_eagerly=True)
  actual = Results(keras_fits.Pipe(Make(), 2, 2))
  for a, e in zip(actual, expected, strict=True):
    np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)


class _InAFunction(_Model):
  """Has a call that is a tf.function."""

  @tf.function
  def call(self, ids):
    return super().call(ids)


def testACallThatIsATfFunctionIsTraced():
  def Make():
    model = _InAFunction(lambda m, x, ids: tf.map_fn(lambda row: 2 * row, layers.ReLU()(x)))
    model(IDS)  # Keras would use the trace by which `fit` makes the weights, without gradients.
    return model

  keras_fits.CheckFit(Make, IDS, TARGETS, COMPILED, ((2, 2),), **TWO_STEPS)


@pytest.mark.parametrize(
  'function, name',
  [
    (lambda m, x, ids: (tf.print(x), x)[1], 'print'),
    (lambda m, x, ids: x if tf.is_tensor(x) else 2 * x, 'is_tensor'),
    (lambda m, x, ids: tf.map_fn(lambda row: row + x[0], x), 'KerasTensor'),
    (lambda m, x, ids: x * np.asarray(tf.exp(m.w)), 'w'),
  ],
  ids=['effect', 'no tensor', 'function', 'value'],
)
def testFunctionsThatCannotBeRecordedAreRefused(function, name):
  line = function.__code__.co_firstlineno
  model = _Model(function)
  model.embedding.build(None)
  model.built = True
  with pytest.raises(ValueError, match=naming.Naming('_Model.call', line, name)):
    keras_graph.FromModel(model, IDS)


def testRandomNumbersOfTensorFlowAreRefused():
  """They would differ when activations are recomputed."""
  model = _Model(lambda m, x, ids: x + tf.random.normal(tf.shape(x)))
  pipe = keras_fits.Pipe(model, 2, 1)
  pipe.compile(loss='mse')
  with pytest.raises(ValueError, match=naming.Naming('draws', 'RandomStandardNormal')):
    pipe.fit(IDS, TARGETS, verbose=0)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
