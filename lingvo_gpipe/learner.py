# SPDX-License-Identifier: Apache-2.0
"""`Learner`: from summed gradients to updated weights, stage by stage.

Only scalars cross stages: the squared norms of the stages' gradients. Every weight, gradient and
slot stays on its stage's device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from lingvo_gpipe import hyperparams, lr_schedules, optimizer


class _Stage(Protocol):
  """What the learner needs of a stage."""

  device: str
  trained: dict[str, tf.Variable]
  accumulators: list[tf.Variable]


class Learner:
  """Clips by the global norm, skips non-finite steps, and lets the optimizers update."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of a learner."""
    p = hyperparams.InstantiableParams(cls)
    p.Define('learning_rate', 1e-3, 'The learning rate that the schedule multiplies.')
    p.Define('lr_schedule', lr_schedules.Constant.Params(), 'Schedule of the learning rate.')
    p.Define('optimizer', optimizer.Adam.Params(), 'Params of the optimizer.')
    p.Define(
      'clip_gradient_norm_to_value', 0.0, 'Scale gradients down to this global norm; 0: do not.'
    )
    p.Define(
      'skip_nonfinite', True, 'Leave weights and slots as they are where a gradient is not finite.'
    )
    p.Define(
      'num_accumulated_mini_batches',
      1,
      'An update takes the gradients of so many mini-batches of the input, by their loss weights.',
    )
    p.Define('bprop_variable_filter', '', 'Train only variables whose path this regex finds.')
    p.Define('bprop_variable_exclusion', '', 'Do not train variables whose path this regex finds.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    p = self.params = params.Copy()
    if not p.learning_rate > 0:
      raise ValueError(f'learner.learning_rate must be positive, got {p.learning_rate}')
    if p.clip_gradient_norm_to_value < 0:
      raise ValueError(
        f'learner.clip_gradient_norm_to_value must not be negative, '
        f'got {p.clip_gradient_norm_to_value}'
      )
    num = p.num_accumulated_mini_batches
    if not isinstance(num, int) or isinstance(num, bool) or num < 1:
      raise ValueError(
        f'learner.num_accumulated_mini_batches must be a positive integer, got {num!r}'
      )
    for name in ('bprop_variable_filter', 'bprop_variable_exclusion'):
      try:
        re.compile(p.Get(name))
      except re.error as e:
        raise ValueError(
          f'learner.{name} must be a regular expression, got {p.Get(name)!r}: {e}'
        ) from e
    self._schedule = p.lr_schedule.Instantiate()
    self._stages: list[tuple[str, list[tf.Variable], optimizer.StageOptimizer]] = []

  def IsTrained(self, path: str) -> bool:
    """Whether the filters let the variable of this path be trained."""
    p = self.params
    wanted = not p.bprop_variable_filter or re.search(p.bprop_variable_filter, path)
    return bool(
      wanted and not (p.bprop_variable_exclusion and re.search(p.bprop_variable_exclusion, path))
    )

  def SlotsPerWeight(self) -> int:
    """How many optimizer slots of its own size each trained weight has."""
    return self.params.optimizer.Instantiate().SlotsPerWeight()

  def Build(self, stages: Sequence[_Stage]) -> None:
    """Makes each stage's optimizer and slots on its device.

    Args:
      stages: each with its device, {path: variable to be trained}, as `IsTrained` told the engine,
        and accumulators in that order.

    Raises:
      ValueError: the variable filters leave nothing to train.
    """
    built = self.params.optimizer.Instantiate()
    for s in stages:
      if s.trained:
        self._stages.append((s.device, s.accumulators, built.Build(s.device, s.trained)))
    if not self._stages:
      p = self.params
      raise ValueError(
        'no variable is left to train: bprop_variable_filter '
        f'{p.bprop_variable_filter!r}, exclusion {p.bprop_variable_exclusion!r}'
      )

  def Variables(self) -> dict[str, tf.Variable]:
    """{name: variable} of all slots and the count of updates: what a checkpoint keeps."""
    found: dict[str, tf.Variable] = {}
    for _, _, stage_optimizer in self._stages:
      found.update(stage_optimizer.slots)
    found['learner/iterations'] = self._stages[0][2].iterations
    return found

  def AfterRestore(self) -> None:
    """Hands the restored count of updates to the optimizers of all stages."""
    for _, _, stage_optimizer in self._stages[1:]:
      stage_optimizer.iterations.assign(self._stages[0][2].iterations)

  def Apply(self, step: tf.Tensor, loss_weight: tf.Tensor) -> Mapping[str, Any]:
    """Updates all weights from the accumulators; to be called in a tf.function.

    Args:
      step: int64 scalar, the training step.
      loss_weight: scalar, the sum of the micro-batches' loss weights, by which the accumulated
        gradients are divided. Where it is 0 there was nothing to learn, and nothing is changed.

    Returns:
      Scalars by name: learning_rate, grad_norm (before clipping), grad_scale (what clipping
      multiplied by; 0 where the step was skipped), is_finite, and is_applied: whether it was not.
    """
    p = self.params
    squares = []
    for device, accumulators, _ in self._stages:
      with tf.device(device):
        squares.append(
          tf.add_n([tf.reduce_sum(tf.square(tf.cast(a, _NormDtype(a)))) for a in accumulators])
        )
    total = tf.add_n([tf.cast(s, tf.float64) for s in squares])
    divisor = tf.cast(loss_weight, tf.float64)
    norm = tf.math.divide_no_nan(tf.sqrt(total), divisor)
    # divide_no_nan hides a total that is not finite where the divisor is 0.
    is_finite = tf.math.is_finite(total) & tf.math.is_finite(norm)
    is_wanted = tf.not_equal(divisor, 0.0)
    if p.skip_nonfinite:
      is_wanted &= is_finite
    clip = tf.constant(1.0, tf.float64)
    if p.clip_gradient_norm_to_value:
      clip = tf.minimum(clip, p.clip_gradient_norm_to_value / tf.maximum(norm, 1e-30))
    rate = tf.cast(p.learning_rate * self._schedule.Value(step), tf.float32)
    # The norm needs all stages' gradients: where one fails, no other has been updated.
    with tf.control_dependencies([norm]):
      factor = clip / divisor
    for device, accumulators, stage_optimizer in self._stages:
      self._Update(device, accumulators, stage_optimizer, factor, rate, is_wanted)
    return {
      'learning_rate': rate,
      'grad_norm': tf.cast(norm, tf.float32),
      'grad_scale': tf.cast(tf.where(is_wanted, clip, tf.zeros_like(clip)), tf.float32),
      'is_finite': is_finite,
      'is_applied': is_wanted,
    }

  def _Update(
    self,
    device: str,
    accumulators: list[tf.Variable],
    stage_optimizer: optimizer.StageOptimizer,
    factor: tf.Tensor,
    rate: tf.Tensor,
    is_wanted: tf.Tensor,
  ) -> None:
    with tf.device(device):

      def Apply() -> tf.Tensor:
        grads = [a * tf.cast(factor, a.dtype) for a in accumulators]
        stage_optimizer.Apply(grads, rate)
        return tf.constant(True)

      tf.cond(is_wanted, Apply, lambda: tf.constant(False))


def _NormDtype(variable: tf.Variable) -> tf.DType:
  return tf.float64 if variable.dtype == tf.float64 else tf.float32
