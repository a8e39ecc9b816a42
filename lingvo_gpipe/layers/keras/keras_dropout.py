# SPDX-License-Identifier: Apache-2.0
"""Keras's Dropout and SpatialDropout with masks of integer random bits, as `DropoutLayer` has.

Keras compares random floats, which are others with XLA than without.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from lingvo_gpipe.layers import dropout


class IntegerDropout(keras.layers.Dropout):
  """A Dropout whose masks are equal with and without XLA."""

  def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
    """In training drops entries of `inputs`, any shape, and scales the others up."""
    if not training or self.rate == 0:
      return inputs
    if self.rate == 1:
      return tf.zeros_like(inputs)
    shape = tf.unstack(tf.shape(inputs))
    if self.noise_shape is not None:
      shape = [a if b is None else b for a, b in zip(shape, self.noise_shape, strict=True)]
    return dropout.Dropped(inputs, 1 - self.rate, tf.stack(shape), self.seed_generator.next())


_SPATIAL = {f'SpatialDropout{n}D': n for n in (1, 2, 3)}
_NAME = f'lingvo_gpipe>{IntegerDropout.__name__}'
CUSTOM_OBJECTS = {_NAME: IntegerDropout}


def Convert(part: dict[str, Any]) -> None:
  """Makes a serialised Dropout or SpatialDropout an IntegerDropout, in place; others stay.

  Args:
    part: a layer as `keras.saving.serialize_keras_object` writes it.
  """
  name, config = part['class_name'], part['config']
  if part.get('registered_name') or name not in ('Dropout', *_SPATIAL):
    return
  if name in _SPATIAL:
    order = config.pop('data_format', None) or keras.config.image_data_format()
    ones = [1] * _SPATIAL[name]
    is_last = name == 'SpatialDropout1D' or order == 'channels_last'
    config['noise_shape'] = [None, *ones, None] if is_last else [None, None, *ones]
    # Keras writes no more of its policy than the dtype of weights, of which there are none.
    config.update(dtype=None, trainable=True)
  part.update(module=__name__, class_name=IntegerDropout.__name__, registered_name=_NAME)
