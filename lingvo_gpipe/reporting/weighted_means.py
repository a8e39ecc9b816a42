# SPDX-License-Identifier: Apache-2.0
"""Metrics averaged by weight over batches, on the host.

A step reports `{name: (value, weight)}`: the value is a mean over what the weight counts (tokens,
examples). `MetricsAccumulator` turns the reports of many steps into one of the same form. Sums are
kept in float64, whatever the dtype of what comes in. This module needs no TensorFlow; values
may be numbers, numpy scalars or eager tensors.
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
      value: a scalar. Where the weight is 0 it is not looked at: it may be NaN, as the mean over
        nothing is.
      weight: a finite scalar, not negative.

    Raises:
      ValueError: the weight is negative or not finite, or either is not a scalar.
    """
    weight = _Scalar(weight, 'weight')
    if not (math.isfinite(weight) and weight >= 0.0):
      raise ValueError(
        f'The weight of a metric is finite and not negative, got {weight}. A weight counts what '
        'the value was averaged over (tokens, examples).'
      )
    value = _Scalar(value, 'value')
    if weight > 0.0:
      self._weighted_sum += value * weight
      self._total_weight += weight

  @property
  def value(self) -> float:
    """The mean; 0.0 while the total weight is 0."""
    return self._weighted_sum / self._total_weight if self._total_weight > 0.0 else 0.0

  @property
  def total_weight(self) -> float:
    """Sum of the weights."""
    return self._total_weight


class MetricsAccumulator:
  """Averages the metrics of many steps, each by name and by its own weights.

  A name may be missing from some of the steps: it is then averaged over the others.
  """

  def __init__(self) -> None:
    self._metrics: dict[str, AverageMetric] = {}

  def Update(self, metrics: Mapping[str, tuple[Any, Any]]) -> None:
    """Adds the metrics of one step.

    Args:
      metrics: {name: (value, weight)}, scalars.

    Raises:
      ValueError: an entry is not a pair of scalars, or its weight is negative; the message names
        the metric. Nothing of this step is added then.
    """
    updates = []
    for name, pair in metrics.items():
      try:
        value, weight = pair
      except (TypeError, ValueError) as e:
        raise ValueError(f'Metric {name!r}: expected (value, weight), got {pair!r}.') from e
      try:
        one = AverageMetric()
        one.Update(value, weight)
      except ValueError as e:
        raise ValueError(f'Metric {name!r}: {e}') from e
      updates.append((name, value, weight))
    for name, value, weight in updates:
      self._metrics.setdefault(name, AverageMetric()).Update(value, weight)

  def Result(self) -> dict[str, tuple[float, float]]:
    """{name: (mean, total weight)} of all steps, in order of appearance."""
    return {name: (x.value, x.total_weight) for name, x in self._metrics.items()}


def _Scalar(x: Any, what: str) -> float:
  shape = tuple(np.shape(x))
  if shape:
    raise ValueError(f'The {what} of a metric is a scalar, got the shape {list(shape)}.')
  return float(x)
