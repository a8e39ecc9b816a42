# SPDX-License-Identifier: Apache-2.0
"""Large layers of users are opened, so that a model can be cut inside, if that changes nothing."""

import sys

import keras
import pytest
import tensorflow as tf
from keras import layers, ops

from lingvo_gpipe.layers.keras import keras_cells, keras_graph
from tests import naming
from tests.toys import keras_fits

IDS, OTHER = keras_fits.Integers(9, 8, 5), keras_fits.Integers(9, 8, 4, seed=1)
TARGETS = keras_fits.Floats(8, 4, 3)
COMPILED = {'loss': 'mse'}.copy


class _Block(layers.Layer):
  """A Dense layer, after attention to a context, if there is one."""

  def __init__(self, **options):
    super().__init__(**options)
    self.attention, self.dense = layers.MultiHeadAttention(2, 3), layers.Dense(6)

  def call(self, x, context=None):
    if context is not None:
      x += self.attention(x, context)
    return x + self.dense(ops.tanh(x))


class _Encoder(layers.Layer):
  """Blocks, state that training changes, and sizes of each micro-batch."""

  def __init__(self, num_blocks, **options):
    super().__init__(**options)
    self.blocks = [_Block(name=f'block_{i}') for i in range(num_blocks)]
    self.embedding, self.positions = layers.Embedding(9, 6), layers.Embedding(9, 6)
    self.norm = layers.BatchNormalization(momentum=0.5)

  def call(self, ids, training=None):
    x = self.embedding(ids)
    x += self.positions(tf.range(tf.shape(x)[1]))
    for block in self.blocks:
      x = self.norm(block(x), training=training)
    return x


class _Decoder(layers.Layer):
  """Two inputs, one of them named, and a weight of its own."""

  def __init__(self, **options):
    super().__init__(**options)
    self.embedding = layers.Embedding(9, 6)
    self.block = _Block(name='block_2')
    self.scale = self.add_weight(shape=[6], initializer='random_normal', name='scale')

  def call(self, ids, context):
    return self.block(self.embedding(ids) * self.scale, context=context)


class _Subclassed(keras.Model):
  """An encoder and a decoder."""

  def __init__(self):
    super().__init__(name='model')
    self.out = layers.Dense(3)
    self.encoder, self.decoder = _Encoder(2, name='encoder'), _Decoder(name='decoder')

  def call(self, inputs, training=None):
    ids, other = inputs
    context = self.encoder(ids, training=training)
    return self.out(self.decoder(other, context=context))


def _Called():
  """Returns a subclassed model with its weights, which its first call makes."""
  model = _Subclassed()
  model((IDS, OTHER))
  return model


def _Functional():
  ids, other = keras.Input([5], dtype='int32'), keras.Input([4], dtype='int32')
  context = _Encoder(0, name='encoder')(ids)
  x = _Decoder(name='decoder')(other, context=context)
  return keras.Model([ids, other], layers.Dense(3)(x))


@pytest.mark.parametrize(('make', 'num_cells'), [(_Called, 8), (_Functional, 6)])
def testALargeLayerIsCutInside(make, num_cells):
  """Three layers make four stages; the subclassed model has two blocks with one normalisation."""
  options = {'batch_size': 8, 'epochs': 1}
  plain = keras_fits.Seeded(make)
  if make is _Functional:
    graph = keras_graph.FromModel(plain, (IDS, OTHER))
    assert len(keras_cells.Cut(graph)) == 3  # So four stages need open layers.
  expected = keras_fits.Fit(plain, (IDS, OTHER), TARGETS, COMPILED, **options)
  pipe = keras_fits.Pipe(keras_fits.Seeded(make), 4)
  actual = keras_fits.Fit(pipe, (IDS, OTHER), TARGETS, COMPILED, **options)
  keras_fits.CheckEqual(actual, expected)
  assert not pipe._placed.graph.closed and len(pipe._placed.cells) >= num_cells


class _Large(layers.Layer):
  """Calls a function beside its layers."""

  def __init__(self, function):
    super().__init__(name='large')
    self.first, self.second = layers.Dense(6), layers.Dense(6)
    self.function = function
    self.table = self.add_weight(shape=[9, 6], initializer='random_normal', name='table')
    self.count = self.add_weight(shape=[], initializer='zeros', trainable=False, name='count')

  def call(self, x, training=None):
    return self.second(self.function(self, self.first(x), training))


def _Small(function, length=4):
  ids = keras.Input([length], dtype='int32')
  x = _Large(function)(layers.Embedding(9, 6)(ids))
  return keras.Model(ids, layers.Dense(3)(x))


def _Opened(model):
  return keras_graph.OpenLayers(keras_graph.FromModel(model), 4)


def _Counting(layer, x, training):
  if training:
    layer.count.assign_add(1)
  return x


def _AddingALoss(layer, x, training):
  layer.add_loss(ops.mean(x))
  return x


@pytest.mark.parametrize(
  'function',
  [
    _Counting,
    _AddingALoss,
    lambda layer, x, training: 2 * x if training else x,
    lambda layer, x, training: x * ops.exp(layer.table.value[0]),
  ],
  ids=['state', 'loss', 'mode', 'value'],
)
def testALayerStaysClosedIfItDoesMoreThanItsCalls(function):
  make = lambda: _Small(function)  # noqa: E731
  graph = _Opened(make())
  assert 'large' in graph.closed
  keras_fits.CheckFit(make, OTHER, TARGETS, COMPILED, ((2, 1),), batch_size=8)


def testALengthThatIsNotKnownKeepsALayerClosed():
  graph = _Opened(_Small(lambda layer, x, _: x, None))
  assert 'unknown' in graph.closed['large']


class _Setting(layers.Layer):
  """Sets a mask by itself."""

  def call(self, x):
    x._keras_mask = ops.any(x > 0, axis=-1)
    return x


@pytest.mark.parametrize(
  'part', [layers.Masking(), _Setting(), layers.Embedding(9, 6, mask_zero=True)]
)
def testAMaskKeepsLayersClosed(part):
  inputs = keras.Input([5] if isinstance(part, layers.Embedding) else [5, 6])
  x = _Large(lambda layer, x, training: x)(part(inputs))
  assert 'mask' in _Opened(keras.Model(inputs, x)).closed['large']


def testTooFewCellsNameTheReason():
  model = keras.Sequential([keras.Input([6]), _Large(_AddingALoss)])
  pipe = keras_fits.Pipe(model, 3)
  pipe.compile(loss='mse')
  with pytest.raises(ValueError, match=naming.Naming('large', 'add_loss', '3')):
    pipe.predict(keras_fits.Floats(4, 6), verbose=0)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
