# SPDX-License-Identifier: Apache-2.0
"""Which of several tasks a step trains: their weights, and the draw by them.

The draw follows from the seed and the step alone: a restart goes on with the same tasks. The names
are Lingvo's.
"""

from __future__ import annotations

import itertools
import math
import numbers
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from lingvo_gpipe.core import hyperparams, weight_params

_WEIGHTS = 'finite numbers, not negative, and one above 0'


class TaskScheduler:
  """Base class: weights of tasks, which may change with the step."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of a schedule of tasks."""
    return hyperparams.InstantiableParams(cls)

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    """Takes the Params; a subclass raises ValueError for what is no schedule."""
    self.params = params.Copy()

  def Weights(self, step: int) -> dict[str, float]:
    """{task: how likely it is after so many steps}, at least 0; their sum need not be 1."""
    raise NotImplementedError(f'{type(self).__name__} has no Weights')

  def _Check(self, ok: bool, name: str, expected: str) -> None:
    if not ok:
      raise ValueError(
        f'{type(self).__name__}: {name} must be {expected}; got {self.params.Get(name)!r}'
      )


class ConstantScheduler(TaskScheduler):
  """The same weights throughout."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params with the weights."""
    p = super().Params()
    p.Define('task_probs', {}, '{task: weight}.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    found = self.params.task_probs
    self._Check(
      isinstance(found, Mapping) and _AreWeights(found.values()),
      'task_probs',
      f"{{task: weight}} such as {{'a': 2.0, 'b': 1.0}}, {_WEIGHTS}",
    )

  def Weights(self, step: int) -> dict[str, float]:
    """See the parent."""
    del step
    return dict(self.params.task_probs)


class ExponentialScheduler(TaskScheduler):
  """Each weight goes from a first to a last one: last + (first - last) * exp(-alpha * step)."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of the curve."""
    p = super().Params()
    p.Define('alpha', 0.0, 'How fast: after 1 / alpha steps 63 % of the way is done.')
    p.Define('task_probs', {}, '{task: [first weight, last weight]}.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    self._Check(_IsWeight(p.alpha), 'alpha', 'a finite number, not negative')
    pairs = list(p.task_probs.values()) if isinstance(p.task_probs, Mapping) else []
    self._Check(
      bool(pairs) and all(map(_IsPair, pairs)) and all(map(_AreWeights, zip(*pairs, strict=True))),
      'task_probs',
      "{task: [first weight, last weight]} such as {'a': [1.0, 0.5], 'b': [0.0, 0.5]}, "
      f'{_WEIGHTS}, of the first and of the last',
    )

  def Weights(self, step: int) -> dict[str, float]:
    """See the parent."""
    rest = math.exp(-self.params.alpha * step)
    pairs = self.params.task_probs.items()
    return {task: last + (first - last) * rest for task, (first, last) in pairs}


class SequentialScheduler(TaskScheduler):
  """One task after the other, each for a number of steps."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of the order."""
    p = super().Params()
    p.Define('task_steps', [], "Pairs ['task', steps], in order; -1, for the last: to the end.")
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    found = self.params.task_steps
    pairs = list(found) if isinstance(found, (list, tuple)) else []
    self._Check(
      bool(pairs)
      and all(_IsPair(pair) and isinstance(pair[0], str) for pair in pairs)
      and all(_IsCount(steps) for _, steps in pairs[:-1])
      and (_IsCount(pairs[-1][1]) or pairs[-1][1] == -1),
      'task_steps',
      "pairs ['task', steps] such as [['a', 100], ['b', -1]], of whole numbers of steps, not "
      'negative; -1, which does not end, in the last pair alone',
    )

  def Weights(self, step: int) -> dict[str, float]:
    """See the parent; the last task stays where its steps are over."""
    pairs = self.params.task_steps
    ends = itertools.accumulate(math.inf if steps < 0 else steps for _, steps in pairs)
    now = next((i for i, end in enumerate(ends) if step < end), len(pairs) - 1)
    weights = dict.fromkeys((task for task, _ in pairs), 0.0)
    if pairs:
      weights[pairs[now][0]] = 1.0
    return weights


def Draw(weights: Mapping[str, float], seed: int, step: int) -> str:
  """A task, drawn by the weights.

  Args:
    weights: {task: weight}.
    seed: of the run.
    step: how many steps were done.

  Raises:
    ValueError: a weight is negative or not finite, or none is above 0.
  """
  if not _AreWeights(weights.values()):
    raise ValueError(
      f'weights of tasks must be {_WEIGHTS}; after {step} steps they are {dict(weights)}'
    )
  left = math.fsum(weights.values()) * ((weight_params.Hash64(seed, 'task', step) + 2**63) / 2**64)
  chosen = ''
  for task, weight in weights.items():
    if weight > 0.0:
      chosen = task
      left -= weight
      if left < 0.0:
        break
  return chosen


def _IsWeight(value: Any) -> bool:
  is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
  return is_number and 0 <= value <= sys.float_info.max


def _AreWeights(values: Iterable[Any]) -> bool:
  """Whether a task can be drawn by these weights."""
  found = list(values)
  return all(map(_IsWeight, found)) and 0.0 < sum(map(float, found)) < math.inf


def _IsPair(value: Any) -> bool:
  return isinstance(value, (list, tuple)) and len(value) == 2


def _IsCount(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool) and value >= 0
