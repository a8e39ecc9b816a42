# SPDX-License-Identifier: Apache-2.0
"""`EarlyStopping`: follows one metric of the evaluations; knows the best step and when to stop."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from absl import logging

from lingvo_gpipe.core import hyperparams

# What a checkpoint keeps. Of another metric's history nothing can be said.
_METRIC = ('jobname', 'metric', 'minimize')
_HISTORY = ('best_step', 'best_value', 'gain_step', 'gain_value', 'num_without_gain')


class EarlyStopping:
  """The history of one metric, in a few numbers.

  The best evaluation is the one whose checkpoint is kept. A gain is an evaluation that is better
  than the last gain by more than the tolerance: where gains stay away for too long, training ends.

  Where no metric is followed, what a checkpoint tells of one is kept as it is.

  Attributes:
    followed: jobname, metric and minimize of this history.
    best_step: the step of the best evaluation; None before the first one that is finite.
    best_value: its value.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of early stopping: `task.train.early_stop`."""
    p = hyperparams.InstantiableParams(cls)
    p.Define('metric', '', "The metric to follow, such as loss; '': none.")
    p.Define('jobname', 'eval_dev', 'Whose metric: the name of its directory in the logdir.')
    p.Define('minimize', True, 'Whether less is better.')
    p.Define('window', 0, 'Stop where the last gain is more than so many steps ago; 0: never.')
    p.Define(
      'max_evaluations', 0, 'Stop after so many evaluations in a row without a gain; 0: never.'
    )
    p.Define('tolerance', 0.0, 'A gain is better than the last one by more than this.')
    p.Define('min_steps', 0, 'Never stop before this step.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    """Nothing was evaluated yet.

    Raises:
      ValueError: a number is out of range.
    """
    p = self.params = params.Copy()
    for name in ('window', 'max_evaluations', 'tolerance', 'min_steps'):
      # Not `< 0`: a NaN is refused too.
      if not p.Get(name) >= 0:
        raise ValueError(f'train.early_stop.{name} must be at least 0, got {p.Get(name)}')
    if (p.window or p.max_evaluations) and not p.metric:
      raise ValueError(
        'train.early_stop has a window or max_evaluations but no metric: name one, such as loss'
      )
    self.followed: dict[str, Any] = {name: p.Get(name) for name in _METRIC}
    self.best_step: int | None = None
    self.best_value: float | None = None
    self._gain_step: int | None = None
    self._gain_value: float | None = None
    self._num_without_gain = 0

  def Update(
    self, step: int, jobname: str, values: Mapping[str, float], *, is_extra: bool = False
  ) -> bool:
    """Takes in an evaluation; of another job than the one that is followed it takes nothing.

    Args:
      step: the step of the weights.
      jobname: whose values these are.
      values: the metrics by name.
      is_extra: it may be the best one, but does not count as one without a gain, nor as a gain. So
        an evaluation where a run paused does not move its end.

    Returns:
      Whether it is the best so far.

    Raises:
      ValueError: the metric is not among them.
    """
    p = self.params
    if not p.metric or jobname != p.jobname:
      return False
    self.CheckMetric(values)
    value = float(values[p.metric])
    is_best = self._Gain(value, self.best_value) > 0
    if is_best:
      self.best_step, self.best_value = step, value
    if is_extra:
      return is_best
    if self._gain_step is None:
      self._gain_step = step  # The window begins here, also where this value is not finite.
    if self._Gain(value, self._gain_value) > p.tolerance:
      self._gain_step, self._gain_value, self._num_without_gain = step, value, 0
    else:
      self._num_without_gain += 1
    return is_best

  def CheckMetric(self, names: Collection[str]) -> None:
    """Raises ValueError where the metric is not among those of the job that is followed."""
    p = self.params
    if p.metric not in names:
      raise ValueError(
        f'train.early_stop.metric is {p.metric!r}, but {p.jobname} has {", ".join(sorted(names))}'
      )

  def StopReason(self, step: int) -> str | None:
    """Returns why training should end after this step, or None if it should continue."""
    p = self.params
    if self._gain_step is None or step < p.min_steps:
      return None
    by_steps = p.window > 0 and step - self._gain_step > p.window
    by_count = p.max_evaluations > 0 and self._num_without_gain >= p.max_evaluations
    if not (by_steps or by_count):
      return None
    tolerance = f' of more than {p.tolerance:g}' if p.tolerance else ''
    return (
      f'{p.jobname} {p.metric} had no gain{tolerance} since step {self._gain_step}, in '
      f'{self._num_without_gain} evaluations'
    )

  def State(self) -> dict[str, Any]:
    """What a checkpoint keeps, as JSON has it."""
    state = dict(self.followed)
    for name in _HISTORY:
      state[name] = getattr(self, name if name.startswith('best') else f'_{name}')
    return state

  def Restore(self, state: Mapping[str, Any]) -> None:
    """Takes over what `State` returned, unless another metric is followed: that is said."""
    if not state.get('metric'):
      return
    changed = [name for name in _METRIC if state.get(name) != self.params.Get(name)]
    if changed and self.params.metric:
      logging.warning(
        'early_stop began anew: %s is not as at the checkpoint, where best was step %s.',
        ', '.join(changed),
        state.get('best_step'),
      )
      return
    self.followed = {name: state[name] for name in _METRIC}
    for name in _HISTORY:
      setattr(self, name if name.startswith('best') else f'_{name}', state[name])

  def _Gain(self, value: float, before: float | None) -> float:
    """By how much the value is better; what is not finite never is."""
    if not math.isfinite(value):
      return -math.inf
    if before is None:
      return math.inf
    return before - value if self.params.minimize else value - before
