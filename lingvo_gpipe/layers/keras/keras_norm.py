# SPDX-License-Identifier: Apache-2.0
"""Keras's BatchNormalization for a pipeline: statistics by micro-batch, without updates in FProp.

A pipelined training step runs a layer on each micro-batch of a mini-batch, and again to recompute.
`MicroBatchNormalization` normalises by micro-batch, does not change the moving averages, and
returns (count, sum, sum of squares) as the values of three further variables, because
`stateless_call` returns the values of variables. `KerasLayer` reports the sums, and the moving
averages are updated once in each mini-batch.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
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
    batch_sums: {'count', 'sum', 'sum_squares': float64 Keras variable}. A training call adds to
      them the number of values per channel (a scalar), their sum and the sum of their squares
      (each [channels]). The caller must pass zeros for them.
  """

  def build(self, input_shape: Any) -> None:
    """Builds the BatchNormalization and the variables of `batch_sums`."""
    super().build(input_shape)
    channels = self.moving_mean.shape
    self.batch_sums = {
      name: self.add_weight(
        shape=shape,
        name=f'batch_{name}',
        dtype='float64',
        initializer='zeros',
        trainable=False,
        autocast=False,
      )
      for name, shape in (('count', ()), ('sum', channels), ('sum_squares', channels))
    }
    layers = _built.get()
    if layers is not None:
      layers.append(self)

  def call(self, inputs: tf.Tensor, training: bool | None = None, mask: Any = None) -> tf.Tensor:
    """Normalises [..., channels, ...] along `axis`.

    In training it uses the moments of `inputs`, only at positions for which `mask` [batch, ...] is
    True if there is a mask. In evaluation it uses the moving averages.
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
      # All of a micro-batch may be masked.
      divisor = tf.maximum(count, 1)
      mean = tf.reduce_sum(x * ones, axes) / divisor
      shape = [x.shape[axis] if i == axis else 1 for i in range(rank)]
      variance = tf.reduce_sum(tf.square(x - tf.reshape(mean, shape)) * ones, axes) / divisor
    n, m, v = (tf.cast(tf.stop_gradient(value), tf.float64) for value in (count, mean, variance))
    # Sums of squares in float32 would lose digits; these come from accurate moments.
    sums = {'count': n, 'sum': n * m, 'sum_squares': n * (v + tf.square(m))}
    for name, variable in self.batch_sums.items():
      # Add, because the layer may be called several times.
      variable.assign_add(sums[name])
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


def MovingAverages(
  mean: tf.Tensor, variance: tf.Tensor, momentum: float, sums: Mapping[str, tf.Tensor]
) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns the moving mean and variance, each [channels], after a mini-batch.

  Args:
    mean: the moving mean before.
    variance: the moving variance before.
    momentum: share of a moving average that an update keeps.
    sums: the `batch_sums`, added up over all micro-batches. If the count is 0, nothing changes.
  """
  batch_mean = tf.math.divide_no_nan(sums['sum'], sums['count'])
  batch_variance = tf.math.divide_no_nan(sums['sum_squares'], sums['count'])
  batch_variance = tf.maximum(batch_variance - tf.square(batch_mean), 0)
  rate = tf.where(sums['count'] > 0, tf.constant(1 - momentum, tf.float64), 0)

  def Update(old: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
    wide = tf.cast(old, tf.float64)
    return tf.cast(wide + (new - wide) * rate, old.dtype)

  return Update(mean, batch_mean), Update(variance, batch_variance)


def Convert(part: dict[str, Any], path: str) -> None:
  """Turns a serialised BatchNormalization into a MicroBatchNormalization, in place.

  Args:
    part: a layer serialised by `keras.saving.serialize_keras_object`; any other layer stays
      unchanged.
    path: the layer's name in messages.

  Raises:
    ValueError: the layer has an option that micro-batches do not support.
  """
  if part['class_name'] != 'BatchNormalization':
    return
  config = part['config']
  for option, reason, advice in (
    (
      'synchronized',
      'it computes moments over all replicas',
      ', and divide num_micro_batches by the number of replicas to have moments of as many rows',
    ),
    ('renorm', 'it uses averages that change within a mini-batch', ''),
  ):
    if config.get(option):
      raise ValueError(
        f'{path}: the BatchNormalization {config.get("name")!r} has {option}=True; {reason}, '
        f'which a pipeline of micro-batches cannot do; set {option}=False{advice}'
      )
  part.update(module=__name__, class_name=MicroBatchNormalization.__name__, registered_name=_NAME)


_NAME = f'lingvo_gpipe>{MicroBatchNormalization.__name__}'
CUSTOM_OBJECTS = {_NAME: MicroBatchNormalization}
