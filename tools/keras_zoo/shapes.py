# SPDX-License-Identifier: Apache-2.0
"""Shapes of graphs: long skips, several inputs and outputs, shared layers, nested models, masks."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

from tools.keras_zoo.case import Case


def _UNet() -> Any:
  x = inputs = keras.Input([16, 16, 2])
  skips = []
  for width in (4, 8, 8):
    x = layers.Conv2D(width, 3, padding='same', activation='relu')(x)
    skips.append(x)
    x = layers.MaxPooling2D()(x)
  x = layers.Conv2D(16, 3, padding='same', activation='relu')(x)
  for skip in reversed(skips):
    x = layers.UpSampling2D()(x)
    x = layers.Concatenate()([x, skip])
    x = layers.Conv2D(8, 3, padding='same', activation='relu')(x)
  return keras.Model(inputs, layers.Conv2D(1, 1)(x))


def _TwoInputsTwoOutputs() -> Any:
  a, b = keras.Input([6], name='a'), keras.Input([4], name='b')
  x = layers.Dense(8, activation='relu')(a)
  y = layers.Dense(8, activation='relu')(b)
  z = layers.Dense(8)(layers.Concatenate()([x, y]))
  return keras.Model(
    {'a': a, 'b': b}, {'p': layers.Dense(2, name='p')(z), 'q': layers.Dense(3, name='q')(x + z)}
  )


def _SharedLayer() -> Any:
  a, b = keras.Input([6], name='a'), keras.Input([6], name='b')
  shared = layers.Dense(8, activation='tanh')
  x = layers.Dense(8)(shared(a))
  return keras.Model([a, b], layers.Dense(2)(shared(x[:, :6]) * shared(b)))


def _Nested() -> Any:
  inner_in = keras.Input([8])
  inner = keras.Model(inner_in, layers.Dense(8)(layers.Dense(16, activation='relu')(inner_in)))
  block = keras.Sequential([keras.Input([8]), inner, layers.LayerNormalization()])
  x = inputs = keras.Input([8])
  x = block(x) + x
  x = inner(x)
  return keras.Model(inputs, layers.Dense(3)(x))


def _MaskedEmbedding() -> Any:
  inputs = keras.Input([None], dtype='int32', name='ids')
  x = layers.Embedding(20, 8, mask_zero=True)(inputs)
  x = layers.LSTM(8, return_sequences=True)(x)
  x = layers.Dense(8, activation='relu')(x)
  x = layers.MultiHeadAttention(2, 4)(x, x)
  return keras.Model(inputs, layers.Dense(3)(x))


def _MaskedOutput() -> Any:
  inputs = keras.Input([None], dtype='int32', name='ids')
  x = layers.Embedding(20, 8, mask_zero=True)(inputs)
  x = layers.GRU(8, return_sequences=True)(x)
  return keras.Model(inputs, layers.Dense(3)(layers.Dense(8)(x)))


def _Lambda() -> Any:
  x = inputs = keras.Input([6])
  for i in range(4):
    x = layers.Dense(6)(x)
    x = layers.Lambda(lambda t, i=i: t * (i + 1) / 4)(x)
  return keras.Model(inputs, x)


def _Regularised() -> Any:
  x = inputs = keras.Input([6])
  for _ in range(4):
    x = layers.Dense(
      6, kernel_regularizer='l2', activity_regularizer='l1', kernel_constraint='max_norm'
    )(x)
  return keras.Model(inputs, x)


def _SpectralNormalization() -> Any:
  x = inputs = keras.Input([6])
  for _ in range(4):
    x = layers.SpectralNormalization(layers.Dense(6, activation='relu'))(x)
  return keras.Model(inputs, x)


def _Normalization() -> Any:
  norm = layers.Normalization()
  norm.adapt(100 + 7 * keras.random.normal([50, 6], seed=1))
  x = inputs = keras.Input([6])
  x = layers.Dense(8, activation='relu')(norm(x))
  return keras.Model(inputs, layers.Dense(2)(x))


def _Frozen() -> Any:
  x = inputs = keras.Input([6])
  for i in range(6):
    dense = layers.Dense(6, activation='relu')
    x = dense(x)
    dense.trainable = i > 2
  return keras.Model(inputs, x)


class _AuxiliaryLoss(layers.Layer):
  def call(self, x: Any) -> Any:
    self.add_loss(0.1 * ops.mean(ops.square(x)))
    return x


def _AddLoss() -> Any:
  x = inputs = keras.Input([6])
  for _ in range(4):
    x = _AuxiliaryLoss()(layers.Dense(6, activation='relu')(x))
  return keras.Model(inputs, x)


CASES = [
  Case('U-Net', _UNet),
  Case('two inputs, two outputs', _TwoInputsTwoOutputs),
  Case('shared layer', _SharedLayer),
  Case('nested models', _Nested),
  Case('masked embedding', _MaskedEmbedding),
  Case('masked output', _MaskedOutput),
  Case('Lambda', _Lambda),
  Case('regularised, constrained', _Regularised),
  Case('SpectralNormalization', _SpectralNormalization, refused='trained variable'),
  Case('adapted Normalization', _Normalization),
  Case('frozen layers', _Frozen),
  Case('add_loss', _AddLoss),
]
