# SPDX-License-Identifier: Apache-2.0
"""What losses and metrics of a micro-batch count, by the weight of its loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import shapes


def Scalar(what: str, value: Any) -> tf.Tensor:
  """The value, which may be a number, as a tensor; ValueError, of `what`, where it is no scalar."""
  value = tf.convert_to_tensor(value)
  if value.shape.rank not in (None, 0):
    raise ValueError(
      f'{what}: expected a scalar, got {shapes.FormatNest(value)}; reduce it over the micro-batch'
    )
  return value


def Loss(what: str, value: Any) -> tf.Tensor:
  """As `Scalar`; TypeError where it can have no gradient."""
  value = Scalar(what, value)
  if not value.dtype.is_floating:
    raise TypeError(f'{what}: expected a floating scalar, got {value.dtype.name}')
  return value


def Metrics(found: Any) -> dict[str, tuple[tf.Tensor, tf.Tensor]]:
  """What a loss function returned, with tensors for numbers.

  Raises:
    TypeError: it is not {name: (value, weight)}, or the loss has no gradient.
    ValueError: there is no loss, or a value or weight is no scalar.
  """
  pairs = found.items() if isinstance(found, Mapping) else [('', found)]
  metrics = {}
  for name, pair in pairs:
    if not (name and isinstance(pair, (tuple, list)) and len(pair) == 2):
      raise TypeError(
        f'a loss must return {{name: (value, weight)}}, got {shapes.FormatNest(found)}'
      )
    value, weight = pair
    metrics[name] = (Scalar(f'metric {name!r}', value), Scalar(f'weight of {name!r}', weight))
  if 'loss' not in metrics:
    raise ValueError(f"a loss must return a metric 'loss', got {sorted(metrics)}")
  Loss("metric 'loss'", metrics['loss'][0])
  return metrics


def WeightedSum(value: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
  """[value * weight, weight] in float32, or float64 where the value is."""
  dtype = tf.float64 if value.dtype == tf.float64 else tf.float32
  value, weight = tf.cast(value, dtype), tf.cast(weight, dtype)
  # A mean over nothing may be NaN.
  return tf.stack([tf.where(weight > 0, value * weight, tf.zeros_like(value)), weight])


def WeightedLoss(value: tf.Tensor, loss_weight: tf.Tensor, coefficient: float = 1.0) -> tf.Tensor:
  """What a loss adds to the objective: value * coefficient * weight of the micro-batch."""
  if value.dtype.size < 4:  # Where the weight, a count of tokens, would lose digits.
    value = tf.cast(value, tf.float32)
  return value * (coefficient * tf.cast(loss_weight, value.dtype))


def WhereItCounts(x: tf.Tensor, loss_weight: tf.Tensor) -> tf.Tensor:
  """An output of the last layer, whose gradient is zero where the weight is.

  A mean over nothing, and its gradient, may be NaN, and times the weight still are.
  """

  @tf.custom_gradient
  def Counted(x: tf.Tensor) -> Any:
    def Gradient(dy: tf.Tensor) -> tf.Tensor:
      return tf.where(tf.not_equal(loss_weight, 0), dy, tf.zeros_like(dy))

    return tf.identity(x), Gradient

  return Counted(x)
