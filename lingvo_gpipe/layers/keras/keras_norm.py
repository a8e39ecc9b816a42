# SPDX-License-Identifier: Apache-2.0
"""Keras's BatchNormalization as a pipeline needs it: micro-batch statistics, no update of its own.

A pipelined training step sees a mini-batch in pieces, forward and again in the recomputation.
`MicroBatchNormalization` normalises by the micro-batch, leaves the moving averages alone, and
hands (count, sum, sum of squares) out as values of three more variables, which is how a Keras
layer hands state out of `stateless_call`. `KerasLayer` reports them, and the moving averages follow
once a mini-batch.
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
    batch_sums: {'count', 'sum', 'sum_squares': Keras variable of float64}. A training call adds to
      them: how many values of a channel it was normalised by (a scalar), their sum and the sum of
      their squares, [channels] each. They are to be given as zeros.
  """

  def build(self, input_shape: Any) -> None:
    """Adds the variables of `batch_sums` to those of a BatchNormalization."""
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
    n, m, v = (tf.cast(tf.stop_gradient(value), tf.float64) for value in (count, mean, variance))
    # From accurate moments: squares of float32 values, summed up as such, would lose digits.
    sums = {'count': n, 'sum': n * m, 'sum_squares': n * (v + tf.square(m))}
    for name, variable in self.batch_sums.items():
      # The layer may be called several times.
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
  """The moving mean and variance, [channels], after a mini-batch.

  Args:
    mean: the moving mean before.
    variance: the moving variance before.
    momentum: how much of them stays.
    sums: the `batch_sums` of all micro-batches together. Where the count is 0 nothing changes.
  """
  batch_mean = tf.math.divide_no_nan(sums['sum'], sums['count'])
  batch_variance = tf.math.divide_no_nan(sums['sum_squares'], sums['count'])
  batch_variance = tf.maximum(batch_variance - tf.square(batch_mean), 0)
  rate = tf.where(sums['count'] > 0, tf.constant(1 - momentum, tf.float64), 0)

  def Moved(old: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
    wide = tf.cast(old, tf.float64)
    return tf.cast(wide + (new - wide) * rate, old.dtype)

  return Moved(mean, batch_mean), Moved(variance, batch_variance)


def Convert(part: dict[str, Any], path: str) -> None:
  """Makes a serialised BatchNormalization a MicroBatchNormalization, in place; others stay.

  Args:
    part: a layer as `keras.saving.serialize_keras_object` writes it.
    path: the layer's name in messages.

  Raises:
    ValueError: it cannot be converted.
  """
  if part['class_name'] != 'BatchNormalization':
    return
  config = part['config']
  for option, reason, instead in (
    (
      'synchronized',
      'its moments would have to be taken over all replicas',
      ', and num_micro_batches to that over the number of replicas for moments of as many rows',
    ),
    ('renorm', 'it corrects by averages that change within a mini-batch', ''),
  ):
    if config.get(option):
      raise ValueError(
        f'{path}: the BatchNormalization {config.get("name")!r} has {option}=True; {reason}, '
        f'which a pipeline of micro-batches does not do; set {option}=False{instead}'
      )
  part.update(module=__name__, class_name=MicroBatchNormalization.__name__, registered_name=_NAME)


_NAME = f'lingvo_gpipe>{MicroBatchNormalization.__name__}'
CUSTOM_OBJECTS = {_NAME: MicroBatchNormalization}
