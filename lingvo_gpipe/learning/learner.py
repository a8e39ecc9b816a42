# SPDX-License-Identifier: Apache-2.0
"""`Learner`: from summed gradients to updated weights, stage by stage, for one group of weights.

Only scalars cross stages: the squared norms of the stages' gradients. Every weight, gradient and
slot stays on its stage's device. `learners` runs the learners of a task together.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf
from absl import logging

from lingvo_gpipe.core import hyperparams
from lingvo_gpipe.learning import lr_schedules, optimizer, shared_weights

_PATTERNS = (
  'bprop_variable_filter',
  'bprop_variable_exclusion',
  'weight_decay_exclusion',
  'lp_regularizer_exclusion',
)
_CLIPPING = (
  'clip_gradient_norm_to_value',
  'clip_gradient_single_norm_to_value',
  'clip_gradient_value_to',
)
_NOT_NEGATIVE = (*_CLIPPING, 'l1_regularizer_weight', 'l2_regularizer_weight')


class Stage(Protocol):
  """What a learner needs of a stage."""

  device: str
  trained: dict[str, tf.Variable]
  accumulators: list[tf.Variable]


@dataclasses.dataclass(frozen=True)
class _Part:
  """What a learner has on one stage: variables by path, their gradients, and what updates them."""

  device: str
  trained: dict[str, tf.Variable]
  accumulators: list[tf.Variable]
  optimizer: optimizer.StageOptimizer


class Learner:
  """Regularises, clips, and lets the optimizers update the weights that its filters choose."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of a learner."""
    p = hyperparams.InstantiableParams(cls)
    p.Define('name', '', 'Name of this learner; needed where a task has several.')
    p.Define('learning_rate', 1e-3, 'The learning rate that the schedule multiplies.')
    p.Define('lr_schedule', lr_schedules.Constant.Params(), 'Schedule of the learning rate.')
    p.Define('optimizer', optimizer.Adam.Params(), 'Params of the optimizer.')
    p.Define(
      'clip_gradient_norm_to_value',
      0.0,
      "Scale gradients down to this norm of all of this learner's together; 0: do not.",
    )
    p.Define(
      'clip_gradient_single_norm_to_value',
      0.0,
      "Scale each variable's gradient down to this norm; 0: do not.",
    )
    p.Define('clip_gradient_value_to', 0.0, 'Cut each entry c of a gradient to [-c, c]; 0: do not.')
    p.Define('l2_regularizer_weight', 0.0, 'c in the loss c / 2 * sum of squares of the weights.')
    p.Define('l1_regularizer_weight', 0.0, 'c in the loss c * sum of magnitudes of the weights.')
    p.Define(
      'lp_regularizer_exclusion', '', 'No L1 and L2 for variables whose path this regex finds.'
    )
    p.Define(
      'weight_decay_exclusion',
      '',
      "The optimizer's weight_decay leaves variables alone whose path this regex finds.",
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
    for name in _NOT_NEGATIVE:
      if not p.Get(name) >= 0:
        raise ValueError(f'learner.{name} must not be negative, got {p.Get(name)}')
    clipping = [name for name in _CLIPPING if p.Get(name)]
    if len(clipping) > 1:
      raise ValueError(f'a learner clips in one way: set only one of {", ".join(clipping)}')
    num = p.num_accumulated_mini_batches
    if not isinstance(num, int) or isinstance(num, bool) or num < 1:
      raise ValueError(
        f'learner.num_accumulated_mini_batches must be a positive integer, got {num!r}'
      )
    for name in _PATTERNS:
      try:
        re.compile(p.Get(name))
      except re.error as e:
        raise ValueError(
          f'learner.{name} must be a regular expression, got {p.Get(name)!r}: {e}'
        ) from e
    self._schedule = p.lr_schedule.Instantiate()
    self._parts: list[_Part] = []
    # How many of the first are this learner's alone, and its count of updates where none is.
    self._num_own = 0
    self._count: tf.Variable | None = None

  def IsTrained(self, path: str) -> bool:
    """Whether the filters let the variable of this path be trained."""
    p = self.params
    wanted = not p.bprop_variable_filter or re.search(p.bprop_variable_filter, path)
    return bool(wanted) and not self._Excludes('bprop_variable_exclusion', path)

  def _Excludes(self, name: str, path: str) -> bool:
    """Whether the pattern of this name finds the path; an empty one finds nothing."""
    pattern = self.params.Get(name)
    return bool(pattern) and re.search(pattern, path) is not None

  def _IsDecayed(self, path: str) -> bool:
    return not self._Excludes('weight_decay_exclusion', path)

  def SlotsPerWeight(self) -> int:
    """How many optimizer slots of its own size each trained weight has."""
    return self.params.optimizer.Instantiate().SlotsPerWeight()

  def Build(
    self, stages: Sequence[Stage], shared: shared_weights.SharedWeights | None = None
  ) -> None:
    """Makes each stage's optimizer and slots on its device.

    Args:
      stages: each with its device, {path: variable to be trained} and accumulators in that order;
        what the filters do not choose is left to other learners.
      shared: knows the weights that other tasks train, too, and the optimizers of those.

    Raises:
      ValueError: the variable filters leave nothing to train, or another task has another
        optimizer for what both train.
    """
    p = self.params
    built = p.optimizer.Instantiate()
    in_common: dict[tuple[str, str], list[tuple[str, tf.Variable, tf.Variable]]] = {}
    for s in stages:
      own: list[tuple[str, tf.Variable, tf.Variable]] = []
      for (path, v), a in zip(s.trained.items(), s.accumulators, strict=True):
        if self.IsTrained(path):
          trainers = shared.Trainers(path) if shared else ''
          part = in_common.setdefault((trainers, s.device), []) if trainers else own
          part.append((path, v, a))
      if own:
        trained = {path: v for path, v, _ in own}
        made = built.Build(s.device, trained, self._IsDecayed)
        self._parts.append(_Part(s.device, trained, [a for _, _, a in own], made))
    self._num_own = len(self._parts)
    for (_, device), found in in_common.items():
      assert shared is not None
      trained = {path: v for path, v, _ in found}
      made = shared.Optimizer(p.optimizer, device, trained, self._IsDecayed)
      # In the order of the task that made it.
      rank = {id(v): i for i, v in enumerate(made.variables)}
      found.sort(key=lambda member: rank[id(member[1])])
      trained = {path: v for path, v, _ in found}
      self._parts.append(_Part(device, trained, [a for _, _, a in found], made))
    if self._parts and not self._num_own:
      with tf.init_scope(), tf.device('/device:CPU:0'):
        self._count = tf.Variable(0, trainable=False, dtype=tf.int64, name='iterations')
    if not self._parts:
      raise ValueError(
        f'no variable is left to train{f" for learner {p.name}" if p.name else ""}: '
        f'bprop_variable_filter {p.bprop_variable_filter!r}, '
        f'exclusion {p.bprop_variable_exclusion!r}'
      )
    paths = [path for part in self._parts for path in part.trained]
    for name in ('weight_decay_exclusion', 'lp_regularizer_exclusion'):
      if p.Get(name) and not any(self._Excludes(name, path) for path in paths):
        logging.warning('learner.%s %r finds no variable that is trained', name, p.Get(name))

  def LearningRate(self, step: Any) -> tf.Tensor:
    """The rate of the update that follows a step, a float32 scalar; `step` as schedules take it."""
    return tf.cast(self.params.learning_rate * self._schedule.Value(step), tf.float32)

  @property
  def iterations(self) -> tf.Variable:
    """The count of updates applied."""
    return self._parts[0].optimizer.iterations if self._count is None else self._count

  def Variables(self, prefix: str) -> dict[str, tf.Variable]:
    """{name: variable} of all slots: what a checkpoint keeps beside the count of updates."""
    found: dict[str, tf.Variable] = {}
    for part in self._parts:
      found.update(part.optimizer.slots)
    if self._num_own:
      for name, variable in self._parts[0].optimizer.shared.items():
        found[f'{prefix}/{name}'] = variable
    return found

  def AfterRestore(self, iterations: tf.Variable) -> None:
    """Hands what was restored, the count of updates too, to the optimizers of all stages."""
    self.iterations.assign(iterations)
    for part in self._parts[1 : self._num_own]:
      part.optimizer.Follow(self._parts[0].optimizer)

  def BeginAtWeights(self) -> None:
    """To be called when weights, but not their slots, were assigned from elsewhere."""
    for part in self._parts:
      part.optimizer.BeginAtWeights()

  # ---- one update, in the order of these methods -----------------------------------------------

  def Regularize(self, loss_weight: tf.Tensor) -> None:
    """Adds the gradients of the L1 and L2 losses to the accumulators.

    Args:
      loss_weight: scalar, by which the accumulated gradients will be divided.
    """
    p = self.params
    if not (p.l1_regularizer_weight or p.l2_regularizer_weight):
      return
    for part in self._parts:
      with tf.device(part.device):
        for (path, v), a in zip(part.trained.items(), part.accumulators, strict=True):
          if not self._Excludes('lp_regularizer_exclusion', path):
            slope = p.l2_regularizer_weight * v + p.l1_regularizer_weight * tf.sign(v)
            a.assign_add(tf.cast(loss_weight, a.dtype) * slope)

  def SumOfSquares(self) -> tf.Tensor:
    """The square of the accumulators' norm over all stages, a float64 scalar."""
    squares = []
    for part in self._parts:
      with tf.device(part.device):
        squares.append(
          tf.add_n([tf.reduce_sum(tf.square(tf.cast(a, _NormDtype(a)))) for a in part.accumulators])
        )
    return tf.add_n([tf.cast(s, tf.float64) for s in squares])

  def Update(
    self, step: tf.Tensor, norm: tf.Tensor, divisor: tf.Tensor, is_applied: tf.Tensor
  ) -> Mapping[str, tf.Tensor]:
    """Updates the weights from the accumulators.

    Args:
      step: int64 scalar, the training step.
      norm: float64 scalar, the norm of the gradients; it waits for those of all stages.
      divisor: float64 scalar, what the accumulated gradients are divided by.
      is_applied: bool scalar; where it is false nothing is changed.

    Returns:
      Scalars by name: learning_rate, grad_norm (before clipping), grad_scale (what clipping the
      global norm multiplied by; 0 where nothing was changed).
    """
    p = self.params
    clip = tf.constant(1.0, tf.float64)
    if p.clip_gradient_norm_to_value:
      clip = tf.minimum(clip, p.clip_gradient_norm_to_value / tf.maximum(norm, 1e-30))
    rate = self.LearningRate(step)
    # The norm needs all stages' gradients: where one fails, no other has been updated.
    with tf.control_dependencies([norm]):
      factor = clip / divisor
    for part in self._parts:
      self._UpdatePart(part, factor, rate, is_applied)
    if self._count is not None:
      self._count.assign_add(tf.cast(is_applied, tf.int64))
    return {
      'learning_rate': rate,
      'grad_norm': tf.cast(norm, tf.float32),
      'grad_scale': tf.cast(tf.where(is_applied, clip, tf.zeros_like(clip)), tf.float32),
    }

  def _UpdatePart(
    self, part: _Part, factor: tf.Tensor, rate: tf.Tensor, is_applied: tf.Tensor
  ) -> None:
    with tf.device(part.device):

      def Apply() -> tf.Tensor:
        grads = [self._Clipped(a * tf.cast(factor, a.dtype)) for a in part.accumulators]
        part.optimizer.Apply(grads, rate)
        return tf.constant(True)

      tf.cond(is_applied, Apply, lambda: tf.constant(False))

  def _Clipped(self, gradient: tf.Tensor) -> tf.Tensor:
    """One variable's gradient, clipped by itself."""
    p = self.params
    if limit := p.clip_gradient_single_norm_to_value:
      norm = tf.norm(tf.cast(gradient, _NormDtype(gradient)))
      return gradient * tf.cast(limit / tf.maximum(norm, limit), gradient.dtype)
    if limit := p.clip_gradient_value_to:
      return tf.clip_by_value(gradient, -limit, limit)
    return gradient


def _NormDtype(x: tf.Variable | tf.Tensor) -> tf.DType:
  return tf.float64 if x.dtype == tf.float64 else tf.float32
