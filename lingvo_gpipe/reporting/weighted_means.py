# SPDX-License-Identifier: Apache-2.0
"""Metrics averaged by weight over batches, on the host.

A step reports `{name: (value, weight)}`. The value is a mean, and the weight is the number of
tokens or examples that it averages. `MetricsAccumulator` combines the reports of many steps into
one report. The mean over no weight is NaN. Sums are kept in float64 for values of any dtype. This
module needs no TensorFlow; values may be numbers, numpy scalars or eager tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


class AverageMetric:
  """Mean of values by weight: sum(value * weight) / sum(weight)."""

  def __init__(self) -> None:
    self._weighted_sum = 0.0
    self._total_weight = 0.0

  def Update(self, value: Any, weight: Any = 1.0) -> None:
    """Adds one value.

    Args:
      value: a scalar. It is ignored if the weight is 0, so the mean over no examples may be NaN.
      weight: a finite, non-negative scalar.

    Raises:
      ValueError: the weight is negative or not finite, or an argument is not a scalar.
    """
    weight = _Scalar(weight, 'weight')
    if not (math.isfinite(weight) and weight >= 0.0):
      raise ValueError(
        f'The weight of a metric must be finite and not negative, got {weight}. It is the number '
        'of tokens or examples that the value averages.'
      )
    value = _Scalar(value, 'value')
    if weight > 0.0:
      self._weighted_sum += value * weight
      self._total_weight += weight

  @property
  def value(self) -> float:
    """The mean, or NaN if the total weight is 0."""
    return self._weighted_sum / self._total_weight if self._total_weight > 0.0 else math.nan

  @property
  def total_weight(self) -> float:
    """Sum of the weights."""
    return self._total_weight


class MetricsAccumulator:
  """Averages the metrics of many steps, each metric by its own weights.

  A metric that is missing from some steps is averaged over the steps that report it.
  """

  def __init__(self) -> None:
    self._metrics: dict[str, AverageMetric] = {}

  def Update(self, metrics: Mapping[str, tuple[Any, Any]]) -> None:
    """Adds the metrics of one step.

    Args:
      metrics: {name: (value, weight)}, scalars.

    Raises:
      ValueError: an entry is not a pair of scalars, or its weight is negative; the message names
        the metric. No metric of this step is added then.
    """
    updates = []
    for name, pair in metrics.items():
      try:
        value, weight = pair
      except (TypeError, ValueError) as e:
        raise ValueError(f'Metric {name!r}: expected (value, weight), got {pair!r}.') from e
      try:
        AverageMetric().Update(value, weight)  # Checks the pair.
      except ValueError as e:
        raise ValueError(f'Metric {name!r}: {e}') from e
      updates.append((name, value, weight))
    for name, value, weight in updates:
      self._metrics.setdefault(name, AverageMetric()).Update(value, weight)

  def Result(self) -> dict[str, tuple[float, float]]:
    """Returns {name: (mean, total weight)} over all steps, in order of appearance."""
    return {name: (x.value, x.total_weight) for name, x in self._metrics.items()}


def _Scalar(x: Any, role: str) -> float:
  shape = tuple(np.shape(x))
  if shape:
    raise ValueError(f'The {role} of a metric must be a scalar, got the shape {list(shape)}.')
  return float(x)
