# SPDX-License-Identifier: Apache-2.0
"""Task schedulers: choose the task that each step of a multi-task model trains.

A scheduler gives each task a weight at a step, and `Draw` picks a task by these weights. The draw
depends only on the seed and the step, so a resumed run trains the same sequence of tasks. The names
are Lingvo's.
"""

from __future__ import annotations

import itertools
import math
import numbers
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from lingvo_gpipe.core import domain, hyperparams, weight_params

_WEIGHTS = 'finite numbers, none negative and at least one positive'


class TaskScheduler:
  """Base class of task schedulers: weights of the tasks, which may change with the step."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of a task scheduler."""
    return hyperparams.InstantiableParams(cls)

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    """Copies the Params; a subclass raises ValueError if they are invalid."""
    self.params = params.Copy()

  def Weights(self, step: int) -> dict[str, float]:
    """Returns {task: relative probability after `step` steps}; the sum need not be 1.

    Every task has an entry; 0.0 means that it is not trained.
    """
    raise NotImplementedError(f'{type(self).__name__} has no Weights')

  def _Check(self, ok: bool, name: str, expected: str) -> None:
    if not ok:
      raise ValueError(
        f'{type(self).__name__}: {name} must be {expected}; got {self.params.Get(name)!r}'
      )


class ConstantScheduler(TaskScheduler):
  """Constant weights."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of a scheduler with constant weights."""
    p = super().Params()
    p.Define(
      'task_probs',
      {},
      'Weight of each task: {task: weight}.',
      domain.DictOf(domain.STR, domain.NOT_NEGATIVE),
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    self._Check(
      _AreWeights(self.params.task_probs.values()),
      'task_probs',
      f"{{task: weight}} such as {{'a': 2.0, 'b': 1.0}}, {_WEIGHTS}",
    )

  def Weights(self, step: int) -> dict[str, float]:
    """Returns the constant weights."""
    del step
    return dict(self.params.task_probs)


class ExponentialScheduler(TaskScheduler):
  """Exponential change of each weight: last + (first - last) * exp(-alpha * step)."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of the exponential curve."""
    p = super().Params()
    p.Define(
      'alpha',
      0.0,
      'Rate of the change: 63 % of it is done after 1 / alpha steps.',
      domain.NOT_NEGATIVE,
    )
    p.Define(
      'task_probs',
      {},
      'First and last weight of each task: {task: [first, last]}.',
      domain.DictOf(domain.STR, domain.PairOf(domain.NOT_NEGATIVE, domain.NOT_NEGATIVE)),
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    pairs = list(self.params.task_probs.values())
    self._Check(
      bool(pairs) and all(map(_AreWeights, zip(*pairs, strict=True))),
      'task_probs',
      "{task: [first weight, last weight]} such as {'a': [1.0, 0.5], 'b': [0.0, 0.5]}, "
      f'{_WEIGHTS}, of the first and of the last',
    )

  def Weights(self, step: int) -> dict[str, float]:
    """Returns the weights after `step` steps."""
    decay = math.exp(-self.params.alpha * step)
    pairs = self.params.task_probs.items()
    return {task: last + (first - last) * decay for task, (first, last) in pairs}


class SequentialScheduler(TaskScheduler):
  """One task after another, each for a number of steps."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of a sequence of tasks."""
    p = super().Params()
    p.Define(
      'task_steps',
      [],
      "Pairs ['task', number of steps], in order; -1 in the last pair means until the end.",
      domain.ListOf(domain.PairOf(domain.STR, domain.Int(-1, domain.MAX_STEPS))),
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    pairs = self.params.task_steps
    self._Check(
      bool(pairs) and all(steps >= 0 for _, steps in pairs[:-1]),
      'task_steps',
      "pairs ['task', steps] such as [['a', 100], ['b', -1]]; steps are whole numbers, not "
      'negative, except that -1 in the last pair means until the end',
    )

  def Weights(self, step: int) -> dict[str, float]:
    """Returns weight 1 for the task of this step; the last task continues after its steps."""
    pairs = self.params.task_steps
    ends = itertools.accumulate(math.inf if steps < 0 else steps for _, steps in pairs)
    current = next((i for i, end in enumerate(ends) if step < end), len(pairs) - 1)
    weights = dict.fromkeys((task for task, _ in pairs), 0.0)
    if pairs:
      weights[pairs[current][0]] = 1.0
    return weights


def Draw(weights: Mapping[str, float], seed: int, step: int) -> str:
  """Draws a task with a probability proportional to its weight; their order has no effect.

  Args:
    weights: {task: weight}.
    seed: the seed of the run.
    step: number of steps done so far.

  Raises:
    ValueError: a weight is negative or not finite, or all weights are 0.
  """
  if not _AreWeights(weights.values()):
    raise ValueError(
      f'task weights must be {_WEIGHTS}; after {step} steps they are {dict(weights)}'
    )
  uniform = (weight_params.Hash64(seed, 'task', step) + 2**63) / 2**64
  remainder = math.fsum(weights.values()) * uniform
  chosen = ''
  for task, weight in sorted(weights.items()):
    if weight > 0.0:
      chosen = task
      remainder -= weight
      if remainder < 0.0:
        break
  return chosen


def _IsWeight(value: Any) -> bool:
  is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
  return is_number and 0 <= value <= sys.float_info.max


def _AreWeights(values: Iterable[Any]) -> bool:
  """Whether a task can be drawn by these weights."""
  weights = list(values)
  return all(map(_IsWeight, weights)) and 0.0 < sum(map(float, weights)) < math.inf
