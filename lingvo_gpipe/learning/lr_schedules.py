# SPDX-License-Identifier: Apache-2.0
"""Learning rate schedules: the factor that multiplies the learning rate at a step.

A schedule is a pure function of the step and has no variables. Steps count from 0. Names and Params
are Lingvo's. Values are computed in float64, which represents every step below 2^53 exactly, and
returned as float32, so consecutive values are distinct even at step 10^7.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import domain, hyperparams


class BaseSchedule:
  """Base class of schedules; a subclass defines Params and `_Value`."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of the schedule."""
    return hyperparams.InstantiableParams(cls)

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    self.params = params.Copy()

  def Value(self, step: Any) -> tf.Tensor:
    """Computes the factor at a step.

    Args:
      step: integer scalar (number, tensor or variable); a negative step counts as 0.

    Returns:
      float32 scalar.

    Raises:
      TypeError: the step is not of an integer type.
    """
    step = tf.convert_to_tensor(step, dtype_hint=tf.int64)
    if not step.dtype.is_integer:
      raise TypeError(
        f'{type(self).__name__}.Value expects an integer step, got {step.dtype.name}.'
      )
    step = tf.cast(tf.maximum(tf.cast(step, tf.int64), 0), tf.float64)
    return tf.cast(self._Value(step), tf.float32)

  def _Value(self, step: tf.Tensor) -> tf.Tensor:
    """Computes the factor, a float64 scalar, at a step, a float64 whole number >= 0."""
    raise NotImplementedError(f'{type(self).__name__} defines no _Value.')

  def _Check(self, ok: bool, name: str, expected: str) -> None:
    if not ok:
      raise ValueError(
        f'{type(self).__name__}: {name} must be {expected}, got {self.params.Get(name)!r}.'
      )


class Constant(BaseSchedule):
  """A constant factor."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    p = super().Params()
    p.Define('value', 1.0, 'The constant value.', domain.NOT_NEGATIVE)
    return p

  def _Value(self, step: tf.Tensor) -> tf.Tensor:
    return tf.constant(self.params.value, tf.float64)


class PiecewiseConstantSchedule(BaseSchedule):
  """values[i] from step boundaries[i - 1] on, up to and without boundaries[i]."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    p = super().Params()
    p.Define(
      'boundaries',
      [],
      'Steps at which the value changes.',
      domain.ListOf(domain.Number(), increasing=True),
    )
    p.Define(
      'values',
      [1.0],
      'Values between the boundaries: one more than there are boundaries.',
      domain.ListOf(domain.NOT_NEGATIVE),
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    count = len(p.boundaries) + 1
    self._Check(len(p.values) == count, 'values', f'{count} numbers ({count - 1} boundaries)')

  def _Value(self, step: tf.Tensor) -> tf.Tensor:
    p = self.params
    passed = tf.cast(step >= tf.constant(list(p.boundaries), tf.float64), tf.int32)
    return tf.gather(tf.constant(list(p.values), tf.float64), tf.reduce_sum(passed))


class _PointToPoint(BaseSchedule):
  """Base class of schedules that move from y0 at step x0 to y1 at step x1, constant elsewhere."""

  _VALUE = domain.NOT_NEGATIVE

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    p = super().Params()
    p.Define(
      'start',
      (0, 1.0),
      '(x0, y0): the first step of the change, and the value before it.',
      domain.PairOf(domain.Number(), cls._VALUE),
    )
    p.Define(
      'limit',
      (1, 1.0),
      '(x1, y1): the last step of the change, and the value after it.',
      domain.PairOf(domain.Number(), cls._VALUE),
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    self._Check(
      p.limit[0] > p.start[0],
      'limit',
      f'a pair (step, value) with a step after {p.start[0]}',
    )


class LinearSchedule(_PointToPoint):
  """Linear from (x0, y0) to (x1, y1), constant before and after; no value is negative."""

  def _Value(self, step: tf.Tensor) -> tf.Tensor:
    (x0, y0), (x1, y1) = self.params.start, self.params.limit
    return _Linear(step, x0, y0, x1, y1)


class ExponentialSchedule(_PointToPoint):
  """Exponential from (x0, y0) to (x1, y1), a constant factor per step; values are positive."""

  _VALUE = domain.POSITIVE

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    return super().Params().Set(limit=(1, 0.5))

  def _Value(self, step: tf.Tensor) -> tf.Tensor:
    (x0, y0), (x1, y1) = self.params.start, self.params.limit
    return tf.exp(_Linear(step, x0, math.log(y0), x1, math.log(y1)))


class CosineSchedule(BaseSchedule):
  """Half a cosine from initial_value at step 0 to final_value at total_steps, constant after."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    p = super().Params()
    p.Define('initial_value', 1.0, 'Value at step 0.', domain.NOT_NEGATIVE)
    p.Define('final_value', 0.0, 'Value at total_steps and after.', domain.NOT_NEGATIVE)
    p.Define('total_steps', 0, 'Number of steps of the decay; required.', domain.POSITIVE)
    return p

  def _Value(self, step: tf.Tensor) -> tf.Tensor:
    p = self.params
    angle = _Linear(step, 0, 0.0, p.total_steps, math.pi)
    return p.final_value + (p.initial_value - p.final_value) * (1.0 + tf.cos(angle)) / 2.0


class LinearRampupCosineSchedule(CosineSchedule):
  """Cosine decay with linear warm-up: the smaller of the ramp and the cosine.

  The ramp leads from warmup_init at step 0 to initial_value at warmup_steps. The cosine counts from
  step 0, not from the end of the ramp, as in Lingvo.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    p = super().Params()
    p.Define('warmup_init', 0.0, 'Value at step 0.', domain.NOT_NEGATIVE)
    p.Define('warmup_steps', 0, 'Number of warm-up steps; 0: none.', domain.NOT_NEGATIVE)
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    self._Check(
      p.warmup_steps < p.total_steps, 'warmup_steps', f'below total_steps = {p.total_steps}'
    )
    self._Check(p.warmup_init <= p.initial_value, 'warmup_init', 'at most initial_value')

  def _Value(self, step: tf.Tensor) -> tf.Tensor:
    p = self.params
    cosine = super()._Value(step)
    if not p.warmup_steps:
      return cosine
    return tf.minimum(_Linear(step, 0, p.warmup_init, p.warmup_steps, p.initial_value), cosine)


class PiecewiseSchedule(BaseSchedule):
  """A sequence of schedules, separated by boundaries.

  schedules[i] applies to the steps boundaries[i - 1] <= step < boundaries[i]. Each schedule counts
  steps from the boundary at which it starts. For example, a linear warm-up of 100 steps followed by
  a linear decay of 900 steps is

      PiecewiseSchedule.Params().Set(
        boundaries=[100],
        schedules=[
          LinearSchedule.Params().Set(start=(0, 0.0), limit=(100, 1.0)),
          LinearSchedule.Params().Set(start=(0, 1.0), limit=(900, 0.0)),
        ],
      )
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    p = super().Params()
    p.Define(
      'boundaries',
      [],
      'Steps at which the next schedule starts.',
      domain.ListOf(domain.POSITIVE, increasing=True),
    )
    p.Define(
      'schedules',
      [Constant.Params()],
      'Params of the schedules, one more than boundaries.',
      domain.ListOf(domain.ParamsOf(BaseSchedule)),
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    if len(p.schedules) != len(p.boundaries) + 1:
      raise ValueError(
        f'{type(self).__name__}: schedules must be {len(p.boundaries) + 1} Params '
        f'({len(p.boundaries)} boundaries), got {len(p.schedules)}.'
      )
    self._schedules = [schedule.Instantiate() for schedule in p.schedules]

  def _Value(self, step: tf.Tensor) -> tf.Tensor:
    starts = [0, *self.params.boundaries]
    value = self._schedules[0]._Value(step)
    for start, schedule in zip(starts[1:], self._schedules[1:], strict=True):
      value = tf.where(step >= start, schedule._Value(tf.maximum(step - start, 0.0)), value)
    return value


class TransformerSchedule(BaseSchedule):
  """model_dim^-0.5 * min((step + 1) * warmup_steps^-1.5, (step + 1)^-0.5).

  The schedule of "Attention is all you need" (Vaswani et al. 2017, section 5.3): linear up to
  warmup_steps, then proportional to the inverse square root of the step.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    p = super().Params()
    p.Define('warmup_steps', 4000, 'Number of steps of the linear warm-up.', domain.POSITIVE)
    p.Define('model_dim', 512, 'Width of the model.', domain.POSITIVE)
    p.Define(
      'decay_end',
      None,
      'Step after which the value stays constant; None: never.',
      domain.NOT_NEGATIVE | domain.NONE,
    )
    return p

  def _Value(self, step: tf.Tensor) -> tf.Tensor:
    p = self.params
    if p.decay_end is not None:
      step = tf.minimum(step, tf.constant(p.decay_end, tf.float64))
    count = step + 1.0
    return p.model_dim**-0.5 * tf.minimum(count * p.warmup_steps**-1.5, tf.math.rsqrt(count))


def _Linear(step: tf.Tensor, x0: float, y0: float, x1: float, y1: float) -> tf.Tensor:
  """Interpolates linearly between (x0, y0) and (x1, y1), constant before and after; float64."""
  fraction = tf.clip_by_value((step - x0) / (x1 - x0), 0.0, 1.0)
  # This form gives exactly y0 and y1 at the ends.
  return y0 * (1.0 - fraction) + y1 * fraction
