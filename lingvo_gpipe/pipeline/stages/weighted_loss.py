# SPDX-License-Identifier: Apache-2.0
"""Losses and metrics of a micro-batch, weighted by the weight of its loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from lingvo_gpipe.core import shapes


class Sum(NamedTuple):
  """A metric that adds up over the micro-batches, such as the state of a Keras metric."""

  value: tf.Tensor


class Rows(NamedTuple):
  """A metric `[batch, ...]` with a row for each example; rows of all micro-batches are joined."""

  value: tf.Tensor


# A mean and its weight, both scalars, or one of the above.
Metric = tuple[tf.Tensor, tf.Tensor] | Sum | Rows


def Scalar(label: str, value: Any) -> tf.Tensor:
  """Returns a number or tensor as a scalar tensor.

  Args:
    label: the value's name in messages.
    value: the number or tensor.

  Raises:
    ValueError: the value is not a scalar.
  """
  value = tf.convert_to_tensor(value)
  if value.shape.rank not in (None, 0):
    raise ValueError(
      f'{label}: expected a scalar, got {shapes.FormatNest(value)}; reduce it over the micro-batch'
    )
  return value


def Loss(label: str, value: Any) -> tf.Tensor:
  """Returns the value as a floating scalar, see `Scalar`; raises TypeError for other dtypes."""
  value = Scalar(label, value)
  if not value.dtype.is_floating:
    raise TypeError(f'{label}: expected a floating scalar, got {value.dtype.name}')
  return value


def Metrics(returned: Any) -> dict[str, Metric]:
  """Returns the result of a loss function, with numbers converted to tensors.

  Raises:
    TypeError: the result is not {name: (value, weight)}, or the loss has no gradient.
    ValueError: there is no loss, or a value or weight is not a scalar.
  """
  pairs = returned.items() if isinstance(returned, Mapping) else [('', returned)]
  metrics: dict[str, Metric] = {}
  for name, pair in pairs:
    if isinstance(pair, (Sum, Rows)):
      metrics[name] = pair
      continue
    if not (name and isinstance(pair, (tuple, list)) and len(pair) == 2):
      got = shapes.FormatNest(returned)
      raise TypeError(f'a loss must return {{name: (value, weight)}}, got {got}')
    value, weight = pair
    metrics[name] = (Scalar(f'metric {name!r}', value), Scalar(f'weight of {name!r}', weight))
  if 'loss' not in metrics:
    raise ValueError(f"a loss must return a metric 'loss', got {sorted(metrics)}")
  Loss("metric 'loss'", metrics['loss'][0])
  return metrics


def WeightedSum(value: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
  """Returns [value * weight, weight] in float32, or in float64 if the value is float64."""
  dtype = tf.float64 if value.dtype == tf.float64 else tf.float32
  value, weight = tf.cast(value, dtype), tf.cast(weight, dtype)
  # The mean of an empty micro-batch may be NaN.
  product = tf.where(tf.not_equal(weight, 0), value * weight, tf.zeros_like(value))
  return tf.stack([product, weight])


def WeightedLoss(value: tf.Tensor, loss_weight: tf.Tensor, coefficient: float = 1.0) -> tf.Tensor:
  """Returns a loss's part of the objective: value * coefficient * weight of the micro-batch."""
  if value.dtype.size < 4:  # The weight, a count of tokens, would lose digits.
    value = tf.cast(value, tf.float32)
  return value * (coefficient * tf.cast(loss_weight, value.dtype))


def WhereItCounts(x: tf.Tensor, loss_weight: tf.Tensor) -> tf.Tensor:
  """Returns an output of the last layer, with a gradient of zero if the loss weight is zero.

  The mean of an empty micro-batch and its gradient may be NaN, and NaN * 0 is NaN.
  """

  @tf.custom_gradient
  def Counted(x: tf.Tensor) -> Any:
    def Gradient(dy: tf.Tensor) -> tf.Tensor:
      return tf.where(tf.not_equal(loss_weight, 0), dy, tf.zeros_like(dy))

    return tf.identity(x), Gradient

  return Counted(x)
