# SPDX-License-Identifier: Apache-2.0
"""What tasks with common weights have once: the variables, and what training keeps beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from lingvo_gpipe.core import hyperparams
from lingvo_gpipe.learning import optimizer


@dataclasses.dataclass(frozen=True)
class SharedWeight:
  """A weight of several tasks.

  Attributes:
    name: what checkpoints call it.
    task: the task of this path.
    trainers: the tasks, maybe with the names of their learners, that train it, as in 'a+b'. Weights
      of equal trainers are updated by one optimizer.
  """

  name: str
  task: str
  trainers: str


@dataclasses.dataclass
class _Optimizer:
  """What updates the weights of equal trainers on one device, and what it was made from."""

  params: hyperparams.InstantiableParams
  task: str
  decayed: dict[int, bool]
  built: optimizer.StageOptimizer


class SharedWeights:
  """Hands the first task's variables to the others, with gradient sums, averages and optimizers.

  Attributes:
    global_step: int64 variable, the steps of all tasks together.
  """

  def __init__(self, weights: Mapping[str, SharedWeight]) -> None:
    """`weights` are {path in a task: what is known of it}; others belong to their task alone."""
    self._weights = dict(weights)
    self._variables: dict[str, tuple[str, tf.Variable]] = {}
    self._auxiliary: dict[tuple[str, int], tf.Variable] = {}
    self._optimizers: dict[tuple[str, str], _Optimizer] = {}
    with tf.device('/device:CPU:0'):
      self.global_step = tf.Variable(0, trainable=False, dtype=tf.int64, name='global_step')

  def Variable(
    self, path: str, device: str | None, create: Callable[[], tf.Variable]
  ) -> tf.Variable:
    """The variable of a path: another task's, or a new one (see `BaseLayer.SetVariableMaker`).

    Raises:
      ValueError: the other task has it on another device.
    """
    weight = self._weights.get(path)
    if weight is None:
      return create()
    if weight.name not in self._variables:
      self._variables[weight.name] = path, create()
    owner, variable = self._variables[weight.name]
    actual = tf.DeviceSpec.from_string(variable.device)
    wanted = tf.DeviceSpec.from_string(device or '')
    if actual.make_merged_spec(wanted) != actual:
      raise ValueError(
        f'{owner} and {path} are one weight, {weight.name}, but the stage of the task '
        f'{self._weights[owner].task!r} that has it is on {variable.device}, and that of the task '
        f'{weight.task!r} on {device}: give both tasks the same stages for the layers they share, '
        'by num_stages and splits of their stack'
      )
    return variable

  def Auxiliary(
    self, kind: str, variable: tf.Variable, create: Callable[[], tf.Variable]
  ) -> tf.Variable:
    """What lies beside a variable, such as its gradient's sum: once, however many tasks have it."""
    key = (kind, id(variable))
    if key not in self._auxiliary:
      self._auxiliary[key] = create()
    return self._auxiliary[key]

  def Trainers(self, path: str) -> str:
    """Who trains the weight of a path; '' where only its own task does."""
    weight = self._weights.get(path)
    return weight.trainers if weight and '+' in weight.trainers else ''

  def Optimizer(
    self,
    params: hyperparams.InstantiableParams,
    device: str,
    variables: Mapping[str, tf.Variable],
    is_decayed: Callable[[str], bool],
  ) -> optimizer.StageOptimizer:
    """What updates weights of equal trainers, all of those on a device, whichever task trains.

    Args:
      params: of the optimizer.
      device: where they are.
      variables: {path: variable}; all have the same `Trainers`.
      is_decayed: as for `KerasOptimizer.Build`.

    Raises:
      ValueError: another task has another optimizer for them, or other exclusions.
    """
    path = next(iter(variables))
    key = (self.Trainers(path), device)
    decayed = {id(v): is_decayed(path) for path, v in variables.items()}
    found = self._optimizers.get(key)
    if found is None:
      built = params.Instantiate().Build(device, variables, is_decayed)
      found = _Optimizer(params, self._weights[path].task, decayed, built)
      self._optimizers[key] = found
    if found.params != params or found.decayed != decayed:
      what = found.params.TextDiff(params).replace('\n', ' ') or 'other weight_decay_exclusion '
      raise ValueError(
        f'{path} and other weights have one set of optimizer slots for the tasks '
        f'{self._weights[path].trainers.replace("+", " and ")}, so those need the same optimizer; '
        f'that of {found.task} (>) and that of {self._weights[path].task} (<): {what}'
      )
    return found.built

  def Variables(self) -> dict[str, tf.Variable]:
    """{name: variable} of what checkpoints keep beside weights and slots."""
    found = {}
    for trainers, (first, *_) in self._Groups().items():
      found[f'learner/{trainers}/iterations'] = first.iterations
      found.update({f'learner/{trainers}/{name}': v for name, v in first.shared.items()})
    return found

  def AfterRestore(self) -> None:
    """To be called when `Variables()` were assigned from a checkpoint."""
    for first, *rest in self._Groups().values():
      for other in rest:
        other.Follow(first)

  def _Groups(self) -> dict[str, Sequence[optimizer.StageOptimizer]]:
    """{trainers: their optimizers}, one a device, which count the same updates."""
    groups: dict[str, list[optimizer.StageOptimizer]] = {}
    for (trainers, _), found in self._optimizers.items():
      groups.setdefault(trainers, []).append(found.built)
    return dict(groups)
