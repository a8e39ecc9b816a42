# SPDX-License-Identifier: Apache-2.0
"""`MultiLearner`: what `task.train.learner` says, one learner or several over groups of variables.

All of them update at once or not at all: where one gradient is not finite, the step is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import hyperparams
from lingvo_gpipe.learning import learner, shared_weights

# What holds for a step as a whole.
_COMMON = ('skip_nonfinite', 'num_accumulated_mini_batches')
_NAME = re.compile(r'[a-z][a-z0-9_]*')


def AsList(
  params: hyperparams.InstantiableParams | Sequence[hyperparams.InstantiableParams],
  where: str = 'train.learner',
) -> list[hyperparams.InstantiableParams]:
  """The Params of each learner.

  Args:
    params: one learner's, or a list of them.
    where: their path, for messages.

  Raises:
    ValueError: the list is empty, its names do not tell learners apart, or they differ in what
      holds for a whole step.
    TypeError: there is something else in it.
  """
  found = [params] if isinstance(params, hyperparams.Params) else list(params)
  for p in found:
    if not isinstance(p, hyperparams.InstantiableParams):
      raise TypeError(
        f'{where} must be the Params of a learner or a list of them, got {type(p).__name__}'
      )
  if not found:
    raise ValueError(f'{where} is an empty list; it needs the Params of a learner')
  names = [p.name for p in found]
  bad = [name for name in names if not _NAME.fullmatch(name)]
  if len(found) > 1 and (bad or len(set(names)) < len(names)):
    raise ValueError(
      'several learners need names of their own, of lower-case letters, digits and underscores; '
      f'{where} has {", ".join(map(repr, names))}'
    )
  for key in _COMMON:
    values = [p.Get(key) for p in found]
    if any(value != values[0] for value in values):
      raise ValueError(
        f'{key} holds for a whole step, so all learners need the same; {where} has '
        f'{", ".join(map(repr, values))}'
      )
  return found


def NumAccumulated(
  params: hyperparams.InstantiableParams | Sequence[hyperparams.InstantiableParams],
) -> int:
  """Of how many mini-batches an update is made; `params` as for `AsList`."""
  num: int = AsList(params)[0].num_accumulated_mini_batches
  return num


class MultiLearner:
  """The learners of a task.

  Attributes:
    learners: each of them; a variable belongs to one at most, and to none if it is not trained.
    num_accumulated_mini_batches: of how many mini-batches an update is made.
  """

  def __init__(
    self, params: hyperparams.InstantiableParams | Sequence[hyperparams.InstantiableParams]
  ) -> None:
    """Makes the learners; raises as `AsList` does, or what a learner says of its Params."""
    found = AsList(params)
    self.learners: list[learner.Learner] = [p.Instantiate() for p in found]
    self.num_accumulated_mini_batches: int = found[0].num_accumulated_mini_batches
    self._skip_nonfinite: bool = found[0].skip_nonfinite

  def IsTrained(self, path: str) -> bool:
    """Whether a learner trains the variable of this path; ValueError where two do."""
    return self.OwnerOf(path) is not None

  def OwnerOf(self, path: str) -> str | None:
    """The name of the learner that trains the variable of this path; None where none does.

    Raises:
      ValueError: two do.
    """
    owners = [each.params.name for each in self.learners if each.IsTrained(path)]
    if len(owners) > 1:
      raise ValueError(
        f'{path} belongs to the learners {" and ".join(owners)}, and can belong to one: change '
        'their bprop_variable_filter or bprop_variable_exclusion'
      )
    return owners[0] if owners else None

  def SlotsPerWeight(self) -> int:
    """How many optimizer slots of its own size a trained weight has, at most."""
    return max(each.SlotsPerWeight() for each in self.learners)

  def Build(
    self, stages: Sequence[learner.Stage], shared: shared_weights.SharedWeights | None = None
  ) -> None:
    """Makes the slots; see `Learner.Build`."""
    for each in self.learners:
      each.Build(stages, shared)

  def LearningRates(self, step: int) -> dict[str, float]:
    """{name: each learner's rate of the update that follows a step}, named as `Apply` does."""
    with tf.device('/device:CPU:0'):
      return {
        f'learning_rate{self._Suffix(each)}': float(each.LearningRate(step))
        for each in self.learners
      }

  @property
  def iterations(self) -> tf.Variable:
    """The count of updates applied, the same for all."""
    return self.learners[0].iterations

  def Variables(self) -> dict[str, tf.Variable]:
    """{name: variable}: what a checkpoint keeps of the learners."""
    found = {'learner/iterations': self.iterations}
    for each in self.learners:
      found.update(each.Variables(f'learner{self._Suffix(each)}'))
    return found

  def AfterRestore(self) -> None:
    """To be called when `Variables()` were assigned from a checkpoint."""
    for each in self.learners:
      each.AfterRestore(self.iterations)

  def BeginAtWeights(self) -> None:
    """To be called when weights, but not their slots, were assigned from elsewhere."""
    for each in self.learners:
      each.BeginAtWeights()

  def Prepare(self, loss_weight: tf.Tensor) -> list[tf.Tensor]:
    """Adds the regularisers' gradients; returns each learner's sum of squares, for `Apply`."""
    for each in self.learners:
      each.Regularize(tf.cast(loss_weight, tf.float64))
    return [each.SumOfSquares() for each in self.learners]

  def Apply(
    self, step: tf.Tensor, loss_weight: tf.Tensor, squares: Sequence[tf.Tensor] | None = None
  ) -> Mapping[str, Any]:
    """Updates all weights from the accumulators; to be called in a tf.function.

    Args:
      step: int64 scalar, the training step.
      loss_weight: scalar, the sum of the micro-batches' loss weights, by which the accumulated
        gradients are divided. Where it is 0 there was nothing to learn, and nothing is changed.
      squares: what `Prepare` returned, here or in another replica; None: it is called here.

    Returns:
      Scalars by name: grad_norm (before clipping), learning_rate, grad_scale (what clipping the
      global norm multiplied by; 0 where the step was skipped), is_finite, and is_applied: whether
      it was not. Where there are several learners each has its own, as in `learning_rate/encoder`,
      and grad_norm is of all of them.
    """
    divisor = tf.cast(loss_weight, tf.float64)
    if squares is None:
      squares = self.Prepare(loss_weight)
    total = tf.add_n(squares)
    norm = _Norm(total, divisor)
    # divide_no_nan hides a total that is not finite where the divisor is 0.
    is_finite = tf.math.is_finite(total) & tf.math.is_finite(norm)
    is_applied = tf.not_equal(divisor, 0.0)
    if self._skip_nonfinite:
      is_applied &= is_finite
    values: dict[str, tf.Tensor] = {'grad_norm': tf.cast(norm, tf.float32)}
    # Nobody updates before the norm is known, and so the gradients of all.
    with tf.control_dependencies([norm]):
      norms = [_Norm(square, divisor) for square in squares]
    for each, own_norm in zip(self.learners, norms, strict=True):
      own = each.Update(step, own_norm, divisor, is_applied)
      values.update({f'{name}{self._Suffix(each)}': value for name, value in own.items()})
    return {**values, 'is_finite': is_finite, 'is_applied': is_applied}

  def _Suffix(self, one: learner.Learner) -> str:
    """What the names of a learner's scalars end with."""
    return f'/{one.params.name}' if len(self.learners) > 1 else ''


def _Norm(total: tf.Tensor, divisor: tf.Tensor) -> tf.Tensor:
  return tf.math.divide_no_nan(tf.sqrt(total), divisor)
