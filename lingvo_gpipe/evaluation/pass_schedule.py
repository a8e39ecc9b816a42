# SPDX-License-Identifier: Apache-2.0
"""`DatasetPasses`: the evaluations and decodings of a training process, and when they are due."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from absl import logging

from lingvo_gpipe.core import hyperparams
from lingvo_gpipe.distributed import stop_request
from lingvo_gpipe.evaluation import dataset_pass, decode_pass
from lingvo_gpipe.learning import early_stopping
from lingvo_gpipe.runners import multi_task_runner

# What can be done with a data set.
JOBS: dict[str, type[dataset_pass.DatasetPass]] = {
  'eval': dataset_pass.Evaluation,
  'decode': decode_pass.Decoding,
}


@dataclasses.dataclass
class _Entry:
  """One pass: how often it comes, and what it found last.

  Attributes:
    job: the pass.
    interval_steps: it is due at multiples of this step; 0: not by steps.
    interval_seconds: it is due so long after the last time; 0: not by time.
    seconds: when it was last done, in the time of the run.
    step: the step of the weights that it saw last; -1: none yet.
    values: what it found then.
  """

  job: dataset_pass.DatasetPass
  interval_steps: int
  interval_seconds: float
  seconds: float = 0.0
  step: int = -1
  values: dict[str, float] = dataclasses.field(default_factory=dict)

  @property
  def comes_back(self) -> bool:
    """Whether it is ever due before the end."""
    return self.interval_steps > 0 or self.interval_seconds > 0

  def IsDue(self, step: int, seconds: float) -> bool:
    """Multiples of a step, and not a distance: a restart in between moves nothing."""
    if step <= max(self.step, 0):  # Weights of before the first step are for the end alone.
      return False
    if self.interval_steps > 0 and step % self.interval_steps == 0:
      return True
    return 0 < self.interval_seconds <= seconds - self.seconds


class Result(NamedTuple):
  """What a pass found; `is_due`: it came by its interval, and not at the end alone."""

  jobname: str
  values: dict[str, float]
  is_due: bool


class DatasetPasses:
  """Evaluates and decodes with the weights of a run, in its process.

  Nothing of the training changes by it: passes read weights, have inputs of their own, and draw no
  random numbers that training would draw.
  """

  def __init__(
    self,
    task_runner: multi_task_runner.AnyRunner,
    input_params: Callable[[str], hyperparams.InstantiableParams],
    logdir: str,
    stop: stop_request.StopRequest,
    *,
    during_training: bool,
    clock: Callable[[], float],
  ) -> None:
    """Makes the inputs, for a mistake in their Params to show before the training.

    Args:
      task_runner: holds the weights.
      input_params: the Params of the input of a data set, by its name.
      logdir: the run's log directory.
      stop: asked after each batch.
      during_training: else data sets are evaluated when training ends, and none is decoded.
      clock: the time of the run in seconds, over all calls: intervals that are longer than a call
        end, too.

    Raises:
      LookupError: an unknown data set.
      ValueError: a task decodes nothing, or there is nothing to do, with a data set or at all.
    """
    self.during_training = during_training
    self._clock = clock
    runners = task_runner.task_runners
    train = next(iter(runners.values())).task.params.train  # As to this all tasks are alike.
    jobs = list(JOBS) if during_training else ['eval']
    wanted = [(job, name) for job in jobs for name in dict.fromkeys(train.Get(f'{job}_datasets'))]
    if during_training and not wanted:
      raise ValueError(
        'train_and_eval has nothing to evaluate: name data sets, such as Dev, in '
        'train.eval_datasets or train.decode_datasets'
      )
    self._entries: list[_Entry] = []
    for job, name in wanted:
      kind, p = JOBS[job], input_params(name)
      found = list(kind.OfTasks(runners, p, name))
      if not found:
        _SayNothingToDo(job, name, p, list(runners))
      steps, seconds = train.Get(f'{job}_interval_steps'), train.Get(f'{job}_interval_seconds')
      self._entries += [
        _Entry(kind(one, its_input, full_name, logdir, stop), steps, seconds)
        for one, its_input, full_name in found
      ]

  def CheckFollowed(self, early_stop: early_stopping.EarlyStopping) -> None:
    """Raises ValueError where evaluations during training never have what is followed.

    What a decoding gives is not known before.
    """
    p = early_stop.params
    if not p.metric or not self.during_training:
      return
    followed = [e for e in self._entries if e.job.jobname == p.jobname and e.comes_back]
    if not followed:
      known = ', '.join(e.job.jobname for e in self._entries if e.comes_back) or 'none'
      raise ValueError(
        f'train.early_stop.jobname is {p.jobname!r}, which does not come back during training; '
        f'these do: {known}. See train.eval_datasets, eval_interval_steps and, to decode, '
        'decode_datasets and decode_interval_steps'
      )
    if (names := followed[0].job.MetricNames()) is not None:
      early_stop.CheckMetric(names)

  def Describe(self) -> list[str]:
    """The data sets' names and sizes, each once."""
    return list(dict.fromkeys(e.job.Describe() for e in self._entries))

  def IsDue(self, step: int, *, at_end: bool) -> bool:
    """Whether `Run` would go through a data set."""
    return any(self._IsWanted(e, step, at_end=at_end) for e in self._entries)

  def Run(self, step: int, *, at_end: bool) -> Iterator[Result]:
    """Does what is due, one after the other, and yields what was found.

    Ends early where it is asked to stop; what was not done then is due again.

    Args:
      step: the step of the weights.
      at_end: training has ended: all that have not seen these weights are due, and the samples of
        all are printed.
    """
    for e in self._entries:
      is_due = self._IsWanted(e, step, at_end=False)
      is_wanted = self._IsWanted(e, step, at_end=at_end)
      if is_wanted:
        values = e.job.Run(step)
        if values is None:
          return
        e.job.WriteSample(step)
        e.step, e.values, e.seconds = step, values, self._clock()
      if at_end:
        e.job.PrintSample()
      if is_wanted:
        yield Result(e.job.jobname, e.values, is_due)

  def State(self) -> dict[str, Any]:
    """{jobname: step, seconds and values} of what was found last: a checkpoint keeps it."""
    seen = [e for e in self._entries if e.step >= 0]
    return {e.job.jobname: {'step': e.step, 'seconds': e.seconds, 'values': e.values} for e in seen}

  def Restore(self, state: Mapping[str, Any]) -> None:
    """Takes over what `State` returned."""
    for e in self._entries:
      found = state.get(e.job.jobname, {})
      e.step, e.values = found.get('step', -1), dict(found.get('values', {}))
      e.seconds = found.get('seconds', 0.0)

  def Close(self) -> None:
    """Closes files."""
    for e in self._entries:
      e.job.Close()

  def _IsWanted(self, e: _Entry, step: int, *, at_end: bool) -> bool:
    if at_end:
      return step > e.step
    return self.during_training and e.IsDue(step, self._clock())


def _SayNothingToDo(job: str, name: str, input_params: Any, tasks: list[str]) -> None:
  """Logs that a data set is of no use to some of the tasks; ValueError where it is to none.

  Args:
    job: one of `JOBS`.
    name: the data set's.
    input_params: {task: Params of its input}.
    tasks: those that are trained.
  """
  can, why = {
    'eval': ('be evaluated on it', 'they have no input there'),
    'decode': ('decode it', 'they have no input there, or do not override Decode'),
  }[job]
  text = (
    f'train.{job}_datasets names {name}, but none of the tasks {", ".join(tasks)} can {can}: {why}'
  )
  # Of a task that is trained alone, the experiment's other tasks may be meant.
  if all(p is None or task in tasks for task, p in input_params.IterParams()):
    raise ValueError(text)
  logging.info('%s', text)
