# SPDX-License-Identifier: Apache-2.0
"""`EarlyStopping`: tracks an evaluation metric, its best step, and when training should stop."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from absl import logging

from lingvo_gpipe.core import domain, hyperparams

# Fields saved in a checkpoint: the identity of the metric, and its history.
_METRIC = ('jobname', 'metric', 'minimize')
_HISTORY = ('best_step', 'best_value', 'gain_step', 'gain_value', 'num_without_gain')


class EarlyStopping:
  """Summarises the history of one metric and decides when training should stop.

  The checkpoint of the best evaluation is kept. An evaluation is a gain if it beats the last gain
  by more than the tolerance. Training stops when there has been no gain for too long.

  Without a metric, later checkpoints keep a restored history unchanged.

  Attributes:
    followed: jobname, metric and minimize of this history.
    best_step: the step of the best evaluation; None before the first finite value.
    best_value: the value of the best evaluation, or None.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of early stopping: `task.train.early_stop`."""
    p = hyperparams.InstantiableParams(cls)
    p.Define('metric', '', "Name of the metric to follow, for example loss; '': none.")
    p.Define(
      'jobname',
      'eval_dev',
      'Job that reports the metric: the name of its directory in the log directory.',
    )
    p.Define('minimize', True, 'Whether a smaller value is better.')
    p.Define(
      'window',
      0,
      'Number of steps without a gain after which training stops; 0: never.',
      domain.COUNT,
    )
    p.Define(
      'max_evaluations',
      0,
      'Number of consecutive evaluations without a gain after which training stops; 0: never.',
      domain.COUNT,
    )
    p.Define(
      'tolerance',
      0.0,
      'Minimum improvement over the last gain that counts as a gain, exclusive.',
      domain.NOT_NEGATIVE,
    )
    p.Define('min_steps', 0, 'Step before which training never stops.', domain.COUNT)
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    """Starts with an empty history.

    Raises:
      ValueError: a limit has no metric.
    """
    p = self.params = params.Copy()
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
    """Records an evaluation; ignores evaluations of jobs that are not followed.

    Args:
      step: the step of the evaluated weights.
      jobname: the job that evaluated them.
      values: {metric: value}.
      is_extra: whether the evaluation is outside the regular schedule, for example at a pause. An
        extra evaluation may be the best, but counts neither as a gain nor as a lack of one, so
        it does not change when training stops.

    Returns:
      Whether this is the best evaluation so far.

    Raises:
      ValueError: the followed metric is missing from `values`.
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
      self._gain_step = step  # The window starts here, even if this value is not finite.
    if self._Gain(value, self._gain_value) > p.tolerance:
      self._gain_step, self._gain_value, self._num_without_gain = step, value, 0
    else:
      self._num_without_gain += 1
    return is_best

  def CheckMetric(self, names: Collection[str]) -> None:
    """Raises ValueError if `names` does not include the followed metric."""
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
    """Returns the JSON-compatible state to save in a checkpoint."""
    state = dict(self.followed)
    for name in _HISTORY:
      state[name] = getattr(self, name if name.startswith('best') else f'_{name}')
    return state

  def Restore(self, state: Mapping[str, Any]) -> None:
    """Restores the result of `State`; starts over with a warning if the followed metric changed."""
    if not state.get('metric'):
      return
    changed = [name for name in _METRIC if state.get(name) != self.params.Get(name)]
    if changed and self.params.metric:
      logging.warning(
        'early stopping starts over: %s of train.early_stop changed since the checkpoint, whose '
        'best step was %s',
        ', '.join(changed),
        state.get('best_step'),
      )
      return
    self.followed = {name: state[name] for name in _METRIC}
    for name in _HISTORY:
      setattr(self, name if name.startswith('best') else f'_{name}', state[name])

  def _Gain(self, value: float, before: float | None) -> float:
    """Returns the improvement over `before`; -inf if the value is not finite."""
    if not math.isfinite(value):
      return -math.inf
    if before is None:
      return math.inf
    return before - value if self.params.minimize else value - before
