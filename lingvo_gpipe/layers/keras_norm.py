# SPDX-License-Identifier: Apache-2.0
"""Keras's BatchNormalization as a pipeline needs it: micro-batch statistics, no update of its own.

A pipelined training step sees a mini-batch in pieces, forward and again in the recomputation.
`MicroBatchNormalization` normalises by the micro-batch, leaves the moving averages alone, and
hands (count, sum, sum of squares) out as values of three more variables, which is how a Keras
layer hands state out of `stateless_call`. `KerasLayer` reports them; the moving averages are
updated once a mini-batch.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

_built: contextvars.ContextVar[list[MicroBatchNormalization] | None] = contextvars.ContextVar(
  'built', default=None
)


@contextlib.contextmanager
def Collect() -> Iterator[list[MicroBatchNormalization]]:
  """Collects the MicroBatchNormalization layers that are built inside, in order."""
  layers: list[MicroBatchNormalization] = []
  token = _built.set(layers)
  try:
    yield layers
  finally:
    _built.reset(token)


class MicroBatchNormalization(keras.layers.BatchNormalization):
  """BatchNormalization that reports its sums instead of updating its moving averages.

  Attributes:
    batch_sums: {'count', 'sum', 'sum_squares': Keras variable}. A training call adds to them: the
      number of values a channel was normalised over (a scalar), their sum and the sum of their
      squares, [channels] each. They are given as zeros.
  """

  def build(self, input_shape: Any) -> None:
    """Adds the variables of `batch_sums` to those of a BatchNormalization."""
    super().build(input_shape)
    channels = self.moving_mean.shape
    self.batch_sums = {
      name: self.add_weight(
        shape=shape, name=f'batch_{name}', initializer='zeros', trainable=False, autocast=False
      )
      for name, shape in (('count', ()), ('sum', channels), ('sum_squares', channels))
    }
    layers = _built.get()
    if layers is not None:
      layers.append(self)

  def call(self, inputs: tf.Tensor, training: bool | None = None, mask: Any = None) -> tf.Tensor:
    """Normalises [..., channels, ...] along `axis`.

    In training by the moments of `inputs`, where `mask` [batch, ...], if given, says which
    positions count; else by the moving averages.
    """
    if not (training and self.trainable):
      return super().call(inputs, training=False, mask=mask)
    x = tf.cast(inputs, keras.backend.result_type(inputs.dtype, 'float32'))
    rank = len(x.shape)
    axis = self.axis % rank
    axes = [i for i in range(rank) if i != axis]
    if mask is None:
      count = tf.cast(tf.size(x) // x.shape[axis], x.dtype)
      mean, variance = tf.nn.moments(x, axes)
    else:
      ones = tf.reshape(mask, [*tf.unstack(tf.shape(mask)), *[1] * (rank - len(mask.shape))])
      ones = tf.broadcast_to(tf.cast(ones, x.dtype), tf.shape(x))
      count = tf.reduce_sum(ones) / x.shape[axis]
      # A micro-batch may be masked altogether.
      divisor = tf.maximum(count, 1)
      mean = tf.reduce_sum(x * ones, axes) / divisor
      shape = [x.shape[axis] if i == axis else 1 for i in range(rank)]
      variance = tf.reduce_sum(tf.square(x - tf.reshape(mean, shape)) * ones, axes) / divisor
    sums = {
      'count': count,
      'sum': mean * count,
      'sum_squares': (variance + tf.square(mean)) * count,
    }
    for name, variable in self.batch_sums.items():
      # The layer may be called several times.
      variable.assign(variable + tf.cast(tf.stop_gradient(sums[name]), variable.dtype))
    outputs = keras.ops.batch_normalization(
      x=x,
      mean=mean,
      variance=variance,
      axis=axis,
      offset=tf.cast(self.beta, x.dtype) if self.center else None,
      scale=tf.cast(self.gamma, x.dtype) if self.scale else None,
      epsilon=self.epsilon,
    )
    return tf.cast(outputs, self.compute_dtype)


def Convert(config: Any, path: str) -> Any:
  """A serialised Keras object with each BatchNormalization in it made a MicroBatchNormalization.

  Args:
    config: as `keras.saving.serialize_keras_object` makes it; changed in place.
    path: the layer's name in messages.

  Raises:
    ValueError: one of them cannot be converted.
  """
  if isinstance(config, list):
    for part in config:
      Convert(part, path)
  elif isinstance(config, dict):
    inner = config.get('config')
    if config.get('class_name') == 'BatchNormalization' and isinstance(inner, dict):
      for option, reason in (
        ('synchronized', 'its moments would have to be taken over all replicas'),
        ('renorm', 'it corrects by averages that change within a mini-batch'),
      ):
        if inner.get(option):
          raise ValueError(
            f'{path}: the BatchNormalization {inner.get("name")!r} has {option}=True; {reason}, '
            f'which a pipeline of micro-batches does not do; set {option}=False'
          )
      config.update(
        module=__name__, class_name=MicroBatchNormalization.__name__, registered_name=_NAME
      )
    for part in config.values():
      Convert(part, path)
  return config


_NAME = f'lingvo_gpipe>{MicroBatchNormalization.__name__}'
CUSTOM_OBJECTS = {_NAME: MicroBatchNormalization}
