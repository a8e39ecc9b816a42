# SPDX-License-Identifier: Apache-2.0
"""`Learner`: updates one group of weights from their summed gradients, stage by stage.

Every weight, gradient and optimizer slot stays on the device of its stage. Only scalars cross
stages: the squared norms of the gradients. `multi_learner` combines the learners of a task.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from lingvo_gpipe.core import domain, hyperparams
from lingvo_gpipe.learning import lr_schedules, optimizer, shared_weights

_CLIPPING = (
  'clip_gradient_norm_to_value',
  'clip_gradient_single_norm_to_value',
  'clip_gradient_value_to',
)
_PATTERNS = (
  'bprop_variable_filter',
  'bprop_variable_exclusion',
  'weight_decay_exclusion',
  'lp_regularizer_exclusion',
)
_NAME = domain.Domain(
  'a name of lower-case letters, digits and _, a letter first',
  lambda x: isinstance(x, str) and re.fullmatch('([a-z][a-z0-9_]*)?', x) is not None,
  '',
)
_NUM_EXAMPLES = 4  # Paths that a message names.


class LearnerStage(Protocol):
  """The attributes of a pipeline stage that a learner uses."""

  device: str
  trained: dict[str, tf.Variable]
  accumulators: list[tf.Variable]


@dataclasses.dataclass(frozen=True)
class _Part:
  """The variables of a learner on one stage, their gradient sums, and their optimizer."""

  device: str
  trained: dict[str, tf.Variable]
  accumulators: list[tf.Variable]
  optimizer: optimizer.StageOptimizer


class Learner:
  """Regularises and clips gradients, and updates the weights that its filters select."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of a learner."""
    p = hyperparams.InstantiableParams(cls)
    p.Define('name', '', 'Name of this learner; required if the task has several learners.', _NAME)
    p.Define(
      'learning_rate',
      1e-3,
      'Learning rate before it is multiplied by the schedule.',
      domain.POSITIVE,
    )
    p.Define(
      'lr_schedule',
      lr_schedules.Constant.Params(),
      'Params of the schedule that multiplies the learning rate.',
      domain.ParamsOf(lr_schedules.BaseSchedule),
    )
    p.Define(
      'optimizer',
      optimizer.Adam.Params(),
      'Params of the optimizer.',
      domain.ParamsOf(optimizer.KerasOptimizer),
    )
    p.Define(
      'clip_gradient_norm_to_value',
      0.0,
      'Maximum global norm of the gradients of this learner, which are scaled down to it; 0: none.',
      domain.NOT_NEGATIVE,
    )
    p.Define(
      'clip_gradient_single_norm_to_value',
      0.0,
      "Maximum norm of each variable's gradient, which is scaled down to it; 0: none.",
      domain.NOT_NEGATIVE,
    )
    p.Define(
      'clip_gradient_value_to',
      0.0,
      'Value c that clips gradients to [-c, c]; 0: none.',
      domain.NOT_NEGATIVE,
    )
    p.Define(
      'l2_regularizer_weight',
      0.0,
      'Weight c of the loss term c / 2 * sum of w^2.',
      domain.NOT_NEGATIVE,
    )
    p.Define(
      'l1_regularizer_weight', 0.0, 'Weight c of the loss term c * sum of |w|.', domain.NOT_NEGATIVE
    )
    p.Define(
      'lp_regularizer_exclusion',
      '',
      'Regex; variables whose path contains a match get no L1 and L2 regularisation.',
      domain.REGEX,
    )
    p.Define(
      'weight_decay_exclusion',
      '',
      "Regex; variables whose path contains a match are exempt from the optimizer's weight_decay.",
      domain.REGEX,
    )
    p.Define(
      'skip_nonfinite',
      True,
      'Whether to skip the update if a gradient is not finite; weights and slots are unchanged.',
    )
    p.Define(
      'num_accumulated_mini_batches',
      1,
      'Number of mini-batches whose gradients, averaged by loss weight, make one update.',
      domain.Int(1, 1 << 20),
    )
    p.Define(
      'bprop_variable_filter',
      '',
      'Regex; only variables whose path contains a match are trained.',
      domain.REGEX,
    )
    p.Define(
      'bprop_variable_exclusion',
      '',
      'Regex; variables whose path contains a match are not trained.',
      domain.REGEX,
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    p = self.params = params.Copy()
    clipping = [name for name in _CLIPPING if p.Get(name)]
    if len(clipping) > 1:
      raise ValueError(f'a learner clips in only one way: set only one of {", ".join(clipping)}')
    self._schedule = p.lr_schedule.Instantiate()
    self._parts: list[_Part] = []
    self._squares: list[Callable[[], tf.Tensor]] = []
    self._updates: list[Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = []
    # The first `_num_private` parts belong to this learner only. If all parts are shared with other
    # tasks, `_count` counts the updates of this learner.
    self._num_private = 0
    self._count: tf.Variable | None = None

  def IsTrained(self, path: str) -> bool:
    """Whether the filters select the variable with this path for training."""
    p = self.params
    is_selected = not p.bprop_variable_filter or self._Matches('bprop_variable_filter', path)
    return is_selected and not self._Matches('bprop_variable_exclusion', path)

  def CheckPatterns(self, paths: Collection[str]) -> None:
    """Raises ValueError if a pattern matches none of the paths of a task's variables.

    The variables need not be this learner's: the learners of a task may have a pattern in common.
    """
    p = self.params
    for name in _PATTERNS:
      if p.Get(name) and not any(self._Matches(name, path) for path in paths):
        learner = f' of the learner {p.name}' if p.name else ''
        examples = ', '.join(itertools.islice(paths, _NUM_EXAMPLES))
        raise ValueError(
          f'train.learner: {name}{learner} is {p.Get(name)!r}, which matches none of the '
          f'{len(paths)} variables of the task, such as {examples}: correct it, or set it to {""!r}'
        )

  def _Matches(self, name: str, path: str) -> bool:
    """Whether the pattern param `name` matches in the path; an empty pattern matches nothing."""
    pattern = self.params.Get(name)
    return bool(pattern) and re.search(pattern, path) is not None

  def _IsDecayed(self, path: str) -> bool:
    return not self._Matches('weight_decay_exclusion', path)

  def SlotsPerWeight(self) -> int:
    """Returns the number of optimizer slots, each as large as its weight, per trained weight."""
    return self.params.optimizer.Instantiate().SlotsPerWeight()

  def Build(
    self,
    stages: Sequence[LearnerStage],
    shared: shared_weights.SharedWeights | None = None,
    *,
    is_compiled: bool = False,
  ) -> None:
    """Creates the optimizer and slots of each stage on its device.

    Args:
      stages: the stages, each with its device, its trainable variables {path: variable}, and their
        accumulators in the same order. Variables that the filters do not select are ignored.
      shared: registry of the weights that several tasks share, with their optimizers; None if no
        weights are shared.
      is_compiled: whether XLA compiles the updates.

    Raises:
      ValueError: the filters select no variable, or another task uses a different optimizer for a
        shared weight.
    """
    p = self.params
    built = p.optimizer.Instantiate()
    shared_members: dict[tuple[str, str], list[tuple[str, tf.Variable, tf.Variable]]] = {}
    for s in stages:
      members: list[tuple[str, tf.Variable, tf.Variable]] = []
      for (path, v), a in zip(s.trained.items(), s.accumulators, strict=True):
        if self.IsTrained(path):
          trainers = shared.Trainers(path) if shared else ''
          group = shared_members.setdefault((trainers, s.device), []) if trainers else members
          group.append((path, v, a))
      if members:
        trained = {path: v for path, v, _ in members}
        stage_optimizer = built.Build(s.device, trained, self._IsDecayed)
        self._parts.append(_Part(s.device, trained, [a for _, _, a in members], stage_optimizer))
    self._num_private = len(self._parts)
    for (_, device), members in shared_members.items():
      assert shared is not None
      trained = {path: v for path, v, _ in members}
      stage_optimizer = shared.Optimizer(p.optimizer, device, trained, self._IsDecayed)
      # The optimizer expects gradients in the order of the task that created it.
      rank = {id(v): i for i, v in enumerate(stage_optimizer.variables)}
      members.sort(key=lambda member: rank[id(member[1])])
      trained = {path: v for path, v, _ in members}
      self._parts.append(_Part(device, trained, [a for _, _, a in members], stage_optimizer))
    if self._parts and not self._num_private:
      with tf.init_scope(), tf.device('/device:CPU:0'):
        self._count = tf.Variable(0, trainable=False, dtype=tf.int64, name='iterations')
    if not self._parts:
      raise ValueError(
        f'no variable is left to train{f" for learner {p.name}" if p.name else ""}: '
        f'bprop_variable_filter {p.bprop_variable_filter!r}, '
        f'exclusion {p.bprop_variable_exclusion!r}'
      )
    # One function for all traces of a step (one for each shape of a batch) is compiled once.
    compiled = functools.partial(tf.function, autograph=False, jit_compile=True)
    wrap = compiled if is_compiled else lambda function: function
    for part in self._parts:
      self._squares.append(wrap(functools.partial(_SumOfSquares, part)))
      self._updates.append(wrap(functools.partial(self._UpdatePart, part)))

  def LearningRate(self, step: Any) -> tf.Tensor:
    """Returns the learning rate of the update after `step` steps, a float32 scalar."""
    return tf.cast(self.params.learning_rate * self._schedule.Value(step), tf.float32)

  @property
  def iterations(self) -> tf.Variable:
    """Number of updates applied, an int64 variable."""
    return self._parts[0].optimizer.iterations if self._count is None else self._count

  def Variables(self, prefix: str) -> dict[str, tf.Variable]:
    """Returns {name: variable} for the optimizer state to save, except the number of updates."""
    variables: dict[str, tf.Variable] = {}
    for part in self._parts:
      variables.update(part.optimizer.slots)
    if self._num_private:
      for name, variable in self._parts[0].optimizer.shared.items():
        variables[f'{prefix}/{name}'] = variable
    return variables

  def AfterRestore(self, iterations: tf.Variable) -> None:
    """Copies the restored state that stages have in common, and `iterations`, to all stages."""
    self.iterations.assign(iterations)
    for part in self._parts[1 : self._num_private]:
      part.optimizer.Follow(self._parts[0].optimizer)

  def BeginAtWeights(self) -> None:
    """Resets slots that start at their weight; call it after assigning weights without slots."""
    for part in self._parts:
      part.optimizer.BeginAtWeights()

  # ---- The methods of one update, in the order in which they are called ------------------------

  def Regularize(self, loss_weight: tf.Tensor) -> None:
    """Adds the gradients of the L1 and L2 losses to the accumulators.

    Args:
      loss_weight: scalar by which the accumulated gradients will be divided.
    """
    p = self.params
    if not (p.l1_regularizer_weight or p.l2_regularizer_weight):
      return
    for part in self._parts:
      with tf.device(part.device):
        for (path, v), a in zip(part.trained.items(), part.accumulators, strict=True):
          if not self._Matches('lp_regularizer_exclusion', path):
            slope = p.l2_regularizer_weight * v + p.l1_regularizer_weight * tf.sign(v)
            a.assign_add(tf.cast(loss_weight, a.dtype) * tf.cast(slope, a.dtype))

  def SumOfSquares(self) -> tf.Tensor:
    """Returns the squared norm of the accumulators of all stages, a float64 scalar."""
    sums = []
    for part, squares in zip(self._parts, self._squares, strict=True):
      with tf.device(part.device):
        sums.append(squares())
    return tf.add_n([tf.cast(x, tf.float64) for x in sums])

  def Update(
    self, step: tf.Tensor, norm: tf.Tensor, divisor: tf.Tensor, is_applied: tf.Tensor
  ) -> Mapping[str, tf.Tensor]:
    """Updates the weights from the accumulators.

    Args:
      step: int64 scalar, the training step.
      norm: float64 scalar, the norm of the gradients of all stages.
      divisor: float64 scalar by which the accumulated gradients are divided.
      is_applied: bool scalar; if False, nothing changes.

    Returns:
      {name: scalar}: learning_rate, grad_norm (before clipping), and grad_scale (the factor by
      which clipping the global norm scaled the gradients; 0 if nothing changed).
    """
    p = self.params
    clip = tf.constant(1.0, tf.float64)
    if p.clip_gradient_norm_to_value:
      clip = tf.minimum(clip, p.clip_gradient_norm_to_value / tf.maximum(norm, 1e-30))
    rate = self.LearningRate(step)
    # The norm needs the gradients of all stages: if one stage fails, no stage has been updated.
    with tf.control_dependencies([norm]):
      factor = clip / divisor
    for part, update in zip(self._parts, self._updates, strict=True):
      with tf.device(part.device):
        tf.cond(is_applied, functools.partial(update, factor, rate), lambda: tf.constant(False))
    if self._count is not None:
      self._count.assign_add(tf.cast(is_applied, tf.int64))
    return {
      'learning_rate': rate,
      'grad_norm': tf.cast(norm, tf.float32),
      'grad_scale': tf.cast(tf.where(is_applied, clip, tf.zeros_like(clip)), tf.float32),
    }

  def _UpdatePart(self, part: _Part, factor: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
    """Updates the weights of a part; returns True, as a branch of a condition returns a value."""
    pairs = zip(part.trained.values(), part.accumulators, strict=True)
    grads = [tf.cast(self._Clip(a * tf.cast(factor, a.dtype)), v.dtype) for v, a in pairs]
    part.optimizer.Apply(grads, rate)
    return tf.constant(True)

  def _Clip(self, gradient: tf.Tensor) -> tf.Tensor:
    """Clips the gradient of one variable by its own norm or by value."""
    p = self.params
    if limit := p.clip_gradient_single_norm_to_value:
      norm = tf.norm(tf.cast(gradient, _NormDtype(gradient)))
      return gradient * tf.cast(limit / tf.maximum(norm, limit), gradient.dtype)
    if limit := p.clip_gradient_value_to:
      return tf.clip_by_value(gradient, -limit, limit)
    return gradient


def _SumOfSquares(part: _Part) -> tf.Tensor:
  dtypes = [_NormDtype(a) for a in part.accumulators]
  values = map(tf.cast, part.accumulators, dtypes)
  # One weight of float64 among others makes the sum float64.
  dtype = tf.float64 if tf.float64 in dtypes else tf.float32
  return tf.add_n([tf.cast(tf.reduce_sum(tf.square(x)), dtype) for x in values])


def _NormDtype(x: tf.Variable | tf.Tensor) -> tf.DType:
  return tf.float64 if x.dtype == tf.float64 else tf.float32
