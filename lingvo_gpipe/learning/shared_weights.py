# SPDX-License-Identifier: Apache-2.0
"""Weights that several tasks share, with their optimizers, gradient sums and averages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from lingvo_gpipe.core import hyperparams
from lingvo_gpipe.learning import optimizer


@dataclasses.dataclass(frozen=True)
class SharedWeight:
  """A weight that several tasks share, as one of these tasks sees it.

  Attributes:
    name: the name of the weight in checkpoints.
    task: the name of the task.
    trainers: the tasks that train the weight, with the names of their learners if they have any,
      for example 'a+b'. One optimizer updates all weights with equal trainers.
  """

  name: str
  task: str
  trainers: str


@dataclasses.dataclass
class _Optimizer:
  """The optimizer of the weights with equal trainers on one device, and its Params."""

  params: hyperparams.InstantiableParams
  task: str
  decayed: dict[int, bool]
  built: optimizer.StageOptimizer


class SharedWeights:
  """Registry of shared weights: their variables, gradient sums, averages and optimizers.

  The first task that asks for a variable creates it; the other tasks get the same variable.

  Attributes:
    global_step: int64 variable, the number of steps of all tasks together.
  """

  def __init__(self, weights: Mapping[str, SharedWeight]) -> None:
    """Creates an empty registry.

    Args:
      weights: {path in a task: shared weight}; all other weights belong to one task only.
    """
    self._weights = dict(weights)
    self._variables: dict[str, tuple[str, tf.Variable]] = {}
    self._auxiliary: dict[tuple[str, int], tf.Variable] = {}
    self._optimizers: dict[tuple[str, str], _Optimizer] = {}
    with tf.device('/device:CPU:0'):
      self.global_step = tf.Variable(0, trainable=False, dtype=tf.int64, name='global_step')

  def Variable(
    self, path: str, device: str | None, create: Callable[[], tf.Variable]
  ) -> tf.Variable:
    """Returns the variable of a path, creating it if no other task has done so.

    See `BaseLayer.SetVariableMaker`.

    Raises:
      ValueError: another task placed the variable on a different device.
    """
    weight = self._weights.get(path)
    if weight is None:
      return create()
    if weight.name not in self._variables:
      self._variables[weight.name] = path, create()
    owner, variable = self._variables[weight.name]
    actual = tf.DeviceSpec.from_string(variable.device)
    requested = tf.DeviceSpec.from_string(device or '')
    if actual.make_merged_spec(requested) != actual:
      raise ValueError(
        f'{owner} and {path} share the weight {weight.name}, but the task '
        f'{self._weights[owner].task!r} has it on {variable.device}, and the task {weight.task!r} '
        f'on {device}: give both tasks the same stages for the layers they share, with num_stages '
        'and splits of their stack'
      )
    return variable

  def Auxiliary(
    self, kind: str, variable: tf.Variable, create: Callable[[], tf.Variable]
  ) -> tf.Variable:
    """Returns the variable of this kind, such as 'ema', that belongs to another variable.

    It is created once, however many tasks share the other variable.

    Args:
      kind: name of the kind of auxiliary variable.
      variable: the variable that it belongs to.
      create: creates the auxiliary variable.
    """
    key = (kind, id(variable))
    if key not in self._auxiliary:
      self._auxiliary[key] = create()
    return self._auxiliary[key]

  def Trainers(self, path: str) -> str:
    """Returns the trainers of the weight with this path; '' if only one task trains it."""
    weight = self._weights.get(path)
    return weight.trainers if weight and '+' in weight.trainers else ''

  def Optimizer(
    self,
    params: hyperparams.InstantiableParams,
    device: str,
    variables: Mapping[str, tf.Variable],
    is_decayed: Callable[[str], bool],
  ) -> optimizer.StageOptimizer:
    """Returns the optimizer of the weights with equal trainers on a device, for any of the tasks.

    Args:
      params: the Params of the optimizer.
      device: the device of the weights.
      variables: {path: variable}; all have the same `Trainers`.
      is_decayed: returns whether weight decay applies to the variable with a path.

    Raises:
      ValueError: another task uses a different optimizer or weight_decay_exclusion for the weights.
    """
    path = next(iter(variables))
    key = (self.Trainers(path), device)
    decayed = {id(v): is_decayed(path) for path, v in variables.items()}
    entry = self._optimizers.get(key)
    if entry is None:
      built = params.Instantiate().Build(device, variables, is_decayed)
      entry = _Optimizer(params, self._weights[path].task, decayed, built)
      self._optimizers[key] = entry
    if entry.params != params or entry.decayed != decayed:
      diff = entry.params.TextDiff(params).replace('\n', ' ') or 'weight_decay_exclusion differs '
      raise ValueError(
        f'{path} and other weights have one set of optimizer slots for the tasks '
        f'{self._weights[path].trainers.replace("+", " and ")}, which therefore need the same '
        f'optimizer; {entry.task} (>) and {self._weights[path].task} (<) differ: {diff}'
      )
    return entry.built

  def Variables(self) -> dict[str, tf.Variable]:
    """Returns {name: variable} for the optimizer state to save in addition to the slots."""
    variables = {}
    for trainers, (first, *_) in self._Groups().items():
      variables[f'learner/{trainers}/iterations'] = first.iterations
      variables.update({f'learner/{trainers}/{name}': v for name, v in first.shared.items()})
    return variables

  def AfterRestore(self) -> None:
    """Synchronises the optimizers after `Variables()` were assigned from a checkpoint."""
    for first, *followers in self._Groups().values():
      for other in followers:
        other.Follow(first)

  def _Groups(self) -> dict[str, Sequence[optimizer.StageOptimizer]]:
    """Returns {trainers: their optimizers, one for each device, with equal update counts}."""
    groups: dict[str, list[optimizer.StageOptimizer]] = {}
    for (trainers, _), entry in self._optimizers.items():
      groups.setdefault(trainers, []).append(entry.built)
    return dict(groups)
