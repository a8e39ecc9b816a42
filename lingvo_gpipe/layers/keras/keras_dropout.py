# SPDX-License-Identifier: Apache-2.0
"""Keras's Dropout and SpatialDropout with masks from integer random bits, as in `DropoutLayer`.

Keras compares random floats, which differ with and without XLA.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from lingvo_gpipe.layers import dropout


class IntegerDropout(keras.layers.Dropout):
  """A Dropout whose masks are equal with and without XLA."""

  def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
    """In training drops entries of `inputs`, of any shape, and scales up the remaining entries."""
    if not training or self.rate == 0:
      return inputs
    if self.rate == 1:
      return tf.zeros_like(inputs)
    shape = tf.unstack(tf.shape(inputs))
    if self.noise_shape is not None:
      shape = [a if b is None else b for a, b in zip(shape, self.noise_shape, strict=True)]
    return dropout.ApplyDropout(inputs, 1 - self.rate, tf.stack(shape), self.seed_generator.next())


_SPATIAL = {f'SpatialDropout{n}D': n for n in (1, 2, 3)}
_NAME = f'lingvo_gpipe>{IntegerDropout.__name__}'
CUSTOM_OBJECTS = {_NAME: IntegerDropout}


def Convert(part: dict[str, Any]) -> None:
  """Turns a serialised Dropout or SpatialDropout into an IntegerDropout, in place.

  Args:
    part: a layer serialised by `keras.saving.serialize_keras_object`; any other layer stays
      unchanged.
  """
  name, config = part['class_name'], part['config']
  if part.get('registered_name') or name not in ('Dropout', *_SPATIAL):
    return
  if name in _SPATIAL:
    order = config.pop('data_format', None) or keras.config.image_data_format()
    ones = [1] * _SPATIAL[name]
    is_last = name == 'SpatialDropout1D' or order == 'channels_last'
    config['noise_shape'] = [None, *ones, None] if is_last else [None, None, *ones]
    # Keras serialises only the weights' dtype of the policy, and there are no weights.
    config.update(dtype=None, trainable=True)
  part.update(module=__name__, class_name=IntegerDropout.__name__, registered_name=_NAME)
