# SPDX-License-Identifier: Apache-2.0
"""Keras layers with losses, masks, tables or modes of their own."""

import keras
import tensorflow as tf
from keras import layers, ops


class Penalty(layers.Layer):
  """Adds the mean square of its input to the loss."""

  def call(self, x):
    self.add_loss(0.1 * ops.mean(ops.square(x)))
    return x


class Masking(layers.Layer):
  """Attaches a mask that depends on the mode or on random numbers, or noise that has none of it."""

  def __init__(self, of):
    super().__init__()
    self.supports_masking = True
    self.of = of
    self.generator = keras.random.SeedGenerator(1)

  def call(self, x, training=False):
    shape = ops.shape(x)
    y = x + 0.0 * keras.random.normal(shape, seed=self.generator)
    if self.of == 'random':
      y._keras_mask = keras.random.uniform(shape[:2], seed=self.generator) > 0.5
    else:
      y._keras_mask = x[:, :, 0] > (0 if training else -99)
    return y


class AddsRows(layers.Layer):
  """Adds the first rows of a table, one for each position."""

  def __init__(self, table):
    super().__init__()
    self.table = table

  def call(self, x):
    return x + self.table(ops.arange(x.shape[1]))


class IdsAndPositions(layers.Layer):
  """Looks a table up by ids and by positions."""

  def __init__(self):
    super().__init__()
    self.table = layers.Embedding(8, 6)

  def call(self, x):
    return self.table(x) - self.table(ops.arange(8))


class MaskedRows(layers.Layer):
  """Looks up a number of rows that depends on the values of the ids."""

  def build(self, shape):
    self.table = self.add_weight(shape=(5, 6))

  def call(self, x):
    rows = tf.gather(self.table, tf.boolean_mask(x, x > -1))
    return tf.ensure_shape(tf.reshape(rows, [-1, 8, 6]), [x.shape[0], 8, 6])


class FirstExamples(layers.Layer):
  """Adds the rows of the first three examples."""

  def __init__(self):
    super().__init__()
    self.table = layers.Embedding(5, 6)

  def call(self, x):
    return ops.mean(self.table(x[:3]), axis=0) + ops.one_hot(x, 6)


class ThreeExamples(FirstExamples):
  """Takes three examples at most."""

  def call(self, x):
    if (x.shape[0] or 0) > 3:
      raise ValueError('too many')
    return self.table(x)


class BlendsPositions(layers.Dense):
  """A user's layer, whose outputs depend on several positions."""

  def call(self, inputs, training=None):
    return super().call(inputs - ops.mean(inputs, axis=1, keepdims=True), training)


class StopsGradients(layers.Layer):
  """Passes no gradient on, which only its own code says."""

  def call(self, x):
    return ops.stop_gradient(x)


class Guard(layers.Layer):
  """Fails for large values, when the step runs."""

  def call(self, x):
    with tf.control_dependencies([tf.debugging.assert_less(tf.reduce_max(tf.abs(x)), 100.0)]):
      return tf.identity(x)


class Centers(layers.Layer):
  """Subtracts the mean of the batch, in training only."""

  def call(self, x, training=False):
    return x - ops.mean(x, axis=0) if training else x


class AddsLosses(layers.Layer):
  """Adds a function of its input to the loss, in training, in evaluation or in both."""

  def __init__(self, function, modes=(False, True)):
    super().__init__()
    self.function = function
    self.modes = modes

  def call(self, x, training=None):
    if training in self.modes:
      self.add_loss(self.function(x))
    return x


class LevelMask(layers.Layer):
  """Masks by its weight."""

  def build(self, input_shape):
    self.level = self.add_weight(shape=())

  def call(self, x):
    return x * self.level

  def compute_mask(self, x, mask=None):
    return ops.any(x > self.level, axis=-1)
