# SPDX-License-Identifier: Apache-2.0
"""Looks at each step's loss and gradients, and ends the training where they are not finite.

Of several tasks each is looked at by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging

from lingvo_gpipe.core import files
from lingvo_gpipe.learning import multi_learner


class NotFiniteError(Exception):
  """Steps were not finite, and training ends; its text tells which, and what is known of why."""


class NonFiniteSteps:
  """Training goes on after a bad step, but not after `limit` of them in a row.

  Attributes:
    in_a_row: {task: how many there were until now}; a checkpoint keeps it.
  """

  def __init__(
    self, limit: int, learner_params: Mapping[str, Any], *, check_numerics: bool = False
  ) -> None:
    """Counts from 0.

    Args:
      limit: how many in a row are too many; 0: never.
      learner_params: {path: the Params of a task's learner, or a list of them}.
      check_numerics: whether the first is too many.

    Raises:
      ValueError: check_numerics, with a learner that applies gradients that are not finite.
    """
    applied = [
      path
      for path, one in learner_params.items()
      if not multi_learner.AsList(one, path)[0].skip_nonfinite
    ]
    if check_numerics and applied:
      raise ValueError(
        'check_numerics repeats a bad step, for which its weights must be as before it: set '
        f'skip_nonfinite of {" and ".join(applied)} to True'
      )
    self._limit = limit
    self._is_skipped = not applied
    self._check_numerics = check_numerics
    self.in_a_row: dict[str, int] = {}

  def Check(
    self,
    step: int,
    values: Mapping[str, float],
    say: Callable[[str], None],
    why: Callable[[], str],
    task: str = '',
  ) -> None:
    """Counts a step, and tells where it is not finite.

    Args:
      step: its number, from 1.
      values: what it gave: `loss`, `is_finite` (whether its gradients were) and others.
      say: shows a line.
      why: repeats the step and says where its first value that is not finite came from.
      task: whose step it was, where there are several.

    Raises:
      NotFiniteError: it is one too many.
    """
    gradients, loss = bool(values['is_finite']), math.isfinite(values['loss'])
    if gradients and loss:
      self.in_a_row[task] = 0
      return
    num = self.in_a_row[task] = self.in_a_row.get(task, 0) + 1
    if self._check_numerics:
      raise NotFiniteError(f'step {step} is not finite: {why()}')
    if gradients:
      say(f'step {step}: the loss is not finite; the gradients are, and were applied')
    else:
      did = 'the update was skipped' if self._is_skipped else 'it was applied'
      say(f'step {step}: a gradient is not finite; {did}')
    if self._limit and num >= self._limit:
      # A step whose update was applied cannot be repeated: its weights are others now.
      can_repeat = self._is_skipped and not gradients
      raise NotFiniteError(self._TooMany(step, num, task) + (_Where(why) if can_repeat else ''))

  def _TooMany(self, step: int, num: int, task: str) -> str:
    of = f' of the task {task}' if task else ''
    # Of several tasks, steps of others are between.
    which = f'up to {step}' if task else f'{step - num + 1} to {step}'
    weights = (
      'steps whose gradients are not finite left the weights as they were'
      if self._is_skipped
      else 'they went into the weights, for train.learner.skip_nonfinite is False'
    )
    return (
      f'step {step}: the loss or gradients of {num} steps in a row{of} were not finite '
      f'({which}; train.max_nonfinite_steps is {self._limit}), and training stops; '
      f'{weights}. --check_numerics names the layer where it begins; a lower learning rate, a '
      'warm-up, clip_gradient_norm_to_value or a look at the data may help'
    )


def _Where(why: Callable[[], str]) -> str:
  """The end of a message: where the last step's first bad value came from, if that can be told."""
  try:
    return f'. In the last one {why()}'
  except Exception as e:  # The message is not to be lost for it.
    logging.warning('the step cannot be repeated: %s', files.OneLine(e))
    return ''
