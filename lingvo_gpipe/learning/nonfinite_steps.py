# SPDX-License-Identifier: Apache-2.0
"""Checks that the loss and gradients of each step are finite, and stops training if they are not.

With several tasks, each task is checked on its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging

from lingvo_gpipe.core import files
from lingvo_gpipe.learning import multi_learner


class NotFiniteError(Exception):
  """Training stops because of non-finite steps; the message names the steps and the cause."""


class NonFiniteSteps:
  """Counts consecutive non-finite steps, and stops training after `limit` of them.

  Attributes:
    in_a_row: {task: number of consecutive non-finite steps}, saved in checkpoints.
  """

  def __init__(
    self, limit: int, learner_params: Mapping[str, Any], *, check_numerics: bool = False
  ) -> None:
    """Starts the counts at 0.

    Args:
      limit: number of consecutive non-finite steps at which training stops; 0: never.
      learner_params: {path: Params of a task's learner, or a list of Params}.
      check_numerics: whether training stops at the first non-finite step and reports its cause.

    Raises:
      ValueError: check_numerics is set, but a learner applies gradients that are not finite.
    """
    applied = [
      path
      for path, params in learner_params.items()
      if not multi_learner.AsList(params, path)[0].skip_nonfinite
    ]
    if check_numerics and applied:
      raise ValueError(
        'check_numerics repeats a non-finite step, so the step must not change the weights: set '
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
    log: Callable[[str], None],
    locate: Callable[[], str],
    task: str = '',
  ) -> None:
    """Counts a step and logs a line if it is not finite.

    Args:
      step: number of the step, from 1.
      values: scalars of the step: `loss`, `is_finite` (whether the gradients are finite) and more.
      log: logs a line.
      locate: repeats the step and describes the origin of its first non-finite value.
      task: name of the task that the step trained, or '' if there is only one.

    Raises:
      NotFiniteError: the limit of consecutive non-finite steps is reached.
    """
    gradients, loss = bool(values['is_finite']), math.isfinite(values['loss'])
    if gradients and loss:
      self.in_a_row[task] = 0
      return
    num = self.in_a_row[task] = self.in_a_row.get(task, 0) + 1
    if self._check_numerics:
      raise NotFiniteError(f'step {step} is not finite: {locate()}')
    if gradients:
      log(f'step {step}: the loss is not finite; the gradients are, and were applied')
    else:
      result = 'the update was skipped' if self._is_skipped else 'the update was applied'
      log(f'step {step}: a gradient is not finite; {result}')
    if self._limit and num >= self._limit:
      # A step whose update was applied cannot be repeated, because the weights have changed.
      can_repeat = self._is_skipped and not gradients
      origin = _DescribeOrigin(locate) if can_repeat else ''
      raise NotFiniteError(self._LimitMessage(step, num, task) + origin)

  def _LimitMessage(self, step: int, num: int, task: str) -> str:
    of_task = f' of the task {task}' if task else ''
    # Steps of other tasks may come between the steps of a task.
    which = f'up to {step}' if task else f'{step - num + 1} to {step}'
    weights = (
      'updates with non-finite gradients were skipped'
      if self._is_skipped
      else 'the updates were applied because train.learner.skip_nonfinite is False'
    )
    return (
      f'step {step}: the loss or gradients of {num} steps in a row{of_task} were not finite '
      f'({which}; train.max_nonfinite_steps is {self._limit}), and training stops; '
      f'{weights}. Run with --check_numerics to find the first non-finite layer; try a lower '
      'learning rate, a warm-up or clip_gradient_norm_to_value, and check the data'
    )


def _DescribeOrigin(locate: Callable[[], str]) -> str:
  """Describes the origin of the last step's first non-finite value; '' if the repetition fails."""
  try:
    return f'. In the last step {locate()}'
  except Exception as e:  # A failed repetition must not hide the error message.
    logging.warning('the step cannot be repeated: %s', files.OneLine(e))
    return ''
