# SPDX-License-Identifier: Apache-2.0
"""`MultiLearner`: the learners of a task, each for one group of variables.

Either all learners update their weights in a step or none does: if a gradient of any learner is not
finite, the whole step is skipped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import hyperparams
from lingvo_gpipe.learning import learner, shared_weights

# Params that apply to the step as a whole.
_COMMON = ('skip_nonfinite', 'num_accumulated_mini_batches')


def AsList(
  params: hyperparams.InstantiableParams | Sequence[hyperparams.InstantiableParams],
  param_path: str = 'train.learner',
) -> list[hyperparams.InstantiableParams]:
  """Returns the Params of each learner as a list.

  Args:
    params: the Params of one learner, or a list of Params.
    param_path: the path of the param, for error messages.

  Raises:
    ValueError: the list is empty, the names of learners are not unique, or learners differ in a
      param that applies to a whole step.
    TypeError: the list contains something other than Params.
  """
  learners = [params] if isinstance(params, hyperparams.Params) else list(params)
  for p in learners:
    if not isinstance(p, hyperparams.InstantiableParams):
      raise TypeError(
        f'{param_path} must be the Params of a learner or a list of them, got {type(p).__name__}'
      )
  if not learners:
    raise ValueError(f'{param_path} is an empty list; it needs the Params of a learner')
  names = [p.name for p in learners]
  if len(learners) > 1 and ('' in names or len(set(names)) < len(names)):
    raise ValueError(
      f'several learners need different names; {param_path} has {", ".join(map(repr, names))}'
    )
  for key in _COMMON:
    values = [p.Get(key) for p in learners]
    if any(value != values[0] for value in values):
      raise ValueError(
        f'{key} applies to a whole step, so all learners need the same value; {param_path} has '
        f'{", ".join(map(repr, values))}'
      )
  return learners


def NumAccumulated(
  params: hyperparams.InstantiableParams | Sequence[hyperparams.InstantiableParams],
) -> int:
  """Returns the number of mini-batches per update, from the Params of one or several learners."""
  num: int = AsList(params)[0].num_accumulated_mini_batches
  return num


class MultiLearner:
  """The learners of a task.

  Attributes:
    learners: the learners; each trained variable belongs to exactly one.
    num_accumulated_mini_batches: number of mini-batches per update.
  """

  def __init__(
    self, params: hyperparams.InstantiableParams | Sequence[hyperparams.InstantiableParams]
  ) -> None:
    """Creates the learners.

    Args:
      params: the Params of one learner, or a list of Params.

    Raises:
      ValueError: Params are invalid, or do not fit together; see `AsList`.
      TypeError: the list contains something other than Params.
    """
    params_list = AsList(params)
    self.learners: list[learner.Learner] = [p.Instantiate() for p in params_list]
    self.num_accumulated_mini_batches: int = params_list[0].num_accumulated_mini_batches
    self._skip_nonfinite: bool = params_list[0].skip_nonfinite

  def IsTrained(self, path: str) -> bool:
    """Whether a learner trains the variable with this path; raises ValueError if several do."""
    return self.OwnerOf(path) is not None

  def OwnerOf(self, path: str) -> str | None:
    """Returns the name of the learner that trains the variable with this path, or None.

    Raises:
      ValueError: several learners train it.
    """
    owners = [each.params.name for each in self.learners if each.IsTrained(path)]
    if len(owners) > 1:
      raise ValueError(
        f'{path} belongs to the learners {" and ".join(owners)}, but can belong to only one: '
        'change their bprop_variable_filter or bprop_variable_exclusion'
      )
    return owners[0] if owners else None

  def CheckPatterns(self, paths: Collection[str]) -> None:
    """Raises ValueError if a learner's pattern matches none of the task's variables."""
    for each in self.learners:
      each.CheckPatterns(paths)

  def SlotsPerWeight(self) -> int:
    """Returns the maximum number of optimizer slots, each as large as its weight, per weight."""
    return max(each.SlotsPerWeight() for each in self.learners)

  def Build(
    self,
    stages: Sequence[learner.LearnerStage],
    shared: shared_weights.SharedWeights | None = None,
    *,
    is_compiled: bool = False,
  ) -> None:
    """Creates the optimizers and slots of all learners; see `Learner.Build`."""
    for each in self.learners:
      each.Build(stages, shared, is_compiled=is_compiled)

  def LearningRates(self, step: int) -> dict[str, float]:
    """Returns {name: learning rate of the update after `step` steps}, with the names of `Apply`."""
    with tf.device('/device:CPU:0'):
      return {
        f'learning_rate{self._Suffix(each)}': float(each.LearningRate(step))
        for each in self.learners
      }

  @property
  def iterations(self) -> tf.Variable:
    """Number of updates applied, equal for all learners."""
    return self.learners[0].iterations

  def Variables(self) -> dict[str, tf.Variable]:
    """Returns {name: variable} for the state of all learners to save in a checkpoint."""
    variables = {'learner/iterations': self.iterations}
    for each in self.learners:
      variables.update(each.Variables(f'learner{self._Suffix(each)}'))
    return variables

  def AfterRestore(self) -> None:
    """Synchronises the learners after `Variables()` were assigned from a checkpoint."""
    for each in self.learners:
      each.AfterRestore(self.iterations)

  def BeginAtWeights(self) -> None:
    """Resets slots that start at their weight; call it after assigning weights without slots."""
    for each in self.learners:
      each.BeginAtWeights()

  def Prepare(self, loss_weight: tf.Tensor) -> list[tf.Tensor]:
    """Adds the gradients of the regularisers; returns the squared norm of each learner."""
    for each in self.learners:
      each.Regularize(tf.cast(loss_weight, tf.float64))
    return [each.SumOfSquares() for each in self.learners]

  def Apply(
    self, step: tf.Tensor, loss_weight: tf.Tensor, squares: Sequence[tf.Tensor] | None = None
  ) -> Mapping[str, Any]:
    """Updates all weights from the accumulators; call it in a tf.function.

    Args:
      step: int64 scalar, the training step.
      loss_weight: scalar, the sum of the loss weights of the micro-batches, by which the
        accumulated gradients are divided. If it is 0, nothing changes.
      squares: the result of `Prepare`, here or in another replica; None calls `Prepare`.

    Returns:
      {name: scalar}: grad_norm (before clipping, over all learners), learning_rate, grad_scale (the
      factor by which clipping the global norm scaled the gradients; 0 if the step was skipped),
      is_finite, and is_applied (whether the step was not skipped). Several learners add their name
      to their scalars, for example `learning_rate/encoder` and `grad_norm/encoder`.
    """
    divisor = tf.cast(loss_weight, tf.float64)
    if squares is None:
      squares = self.Prepare(loss_weight)
    total = tf.add_n(squares)
    norm = _Norm(total, divisor)
    # Check the total too: divide_no_nan hides a non-finite total if the divisor is 0.
    is_finite = tf.math.is_finite(total) & tf.math.is_finite(norm)
    is_applied = tf.not_equal(divisor, 0.0)
    if self._skip_nonfinite:
      is_applied &= is_finite
    values: dict[str, tf.Tensor] = {'grad_norm': tf.cast(norm, tf.float32)}
    # No learner updates before the norm, and so the gradients of all stages, are known.
    with tf.control_dependencies([norm]):
      norms = [_Norm(square, divisor) for square in squares]
    for each, learner_norm in zip(self.learners, norms, strict=True):
      scalars = each.Update(step, learner_norm, divisor, is_applied)
      values.update({f'{name}{self._Suffix(each)}': value for name, value in scalars.items()})
    return {**values, 'is_finite': is_finite, 'is_applied': is_applied}

  def _Suffix(self, each: learner.Learner) -> str:
    """Returns the suffix of the names of a learner's scalars: '' if there is only one learner."""
    return f'/{each.params.name}' if len(self.learners) > 1 else ''


def _Norm(total: tf.Tensor, divisor: tf.Tensor) -> tf.Tensor:
  return tf.math.divide_no_nan(tf.sqrt(total), divisor)
