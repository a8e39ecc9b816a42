# SPDX-License-Identifier: Apache-2.0
"""`DatasetPasses`: runs the evaluations and decodings of a training process when they are due."""

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

# Kinds of passes over a data set.
JOBS: dict[str, type[dataset_pass.DatasetPass]] = {
  'eval': dataset_pass.Evaluation,
  'decode': decode_pass.Decoding,
}


@dataclasses.dataclass
class _Entry:
  """A pass with its interval and its last result.

  Attributes:
    job: the pass.
    interval_steps: the pass is due at multiples of this step; 0 if it is not due by steps.
    interval_seconds: time from the last pass until the next is due; 0 if it is not due by time.
    seconds: training time of the run at the last pass.
    step: step of the weights at the last pass; -1 before the first one.
    values: metrics of the last pass.
  """

  job: dataset_pass.DatasetPass
  interval_steps: int
  interval_seconds: float
  seconds: float = 0.0
  step: int = -1
  values: dict[str, float] = dataclasses.field(default_factory=dict)

  @property
  def is_periodic(self) -> bool:
    """Whether the pass is ever due before the end of training."""
    return self.interval_steps > 0 or self.interval_seconds > 0

  def IsDue(self, step: int, seconds: float) -> bool:
    """Whether the pass is due. Multiples of a step do not move when a run is restarted."""
    if step <= max(self.step, 0):  # Initial weights are evaluated only at the end of training.
      return False
    if self.interval_steps > 0 and step % self.interval_steps == 0:
      return True
    return 0 < self.interval_seconds <= seconds - self.seconds


class Result(NamedTuple):
  """Result of a pass.

  Attributes:
    jobname: name of the pass.
    values: its metrics.
    is_due: whether the pass was due by its interval, and not only because training ends.
  """

  jobname: str
  values: dict[str, float]
  is_due: bool


class DatasetPasses:
  """Evaluates and decodes with the weights of a run, in its process.

  The passes do not change the training: they only read weights, have their own inputs, and do not
  draw from the random numbers of training.
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
    """Makes the inputs, so that errors in their Params show before the training.

    Args:
      task_runner: runner with the weights.
      input_params: returns the Params of the input of a data set, by its name.
      logdir: the run's log directory.
      stop: request to stop; checked after each batch.
      during_training: whether passes run during training; if not, data sets are evaluated, but not
        decoded, when training ends.
      clock: returns the training time of the run in seconds, over all calls of the trainer.

    Raises:
      LookupError: a data set is unknown.
      ValueError: no data sets are given, two of them would write into one directory, or no task
        supports the pass over a data set.
    """
    self.during_training = during_training
    self._clock = clock
    runners = task_runner.task_runners
    train = next(iter(runners.values())).task.params.train  # Equal in all tasks.
    jobs = list(JOBS) if during_training else ['eval']
    passes = [(job, name) for job in jobs for name in dict.fromkeys(train.Get(f'{job}_datasets'))]
    if during_training and not passes:
      raise ValueError(
        'train_and_eval has nothing to evaluate: name data sets, such as Dev, in '
        'train.eval_datasets or train.decode_datasets'
      )
    self._entries: list[_Entry] = []
    names: dict[str, str] = {}  # The data set of each job.
    for job, name in passes:
      kind, p = JOBS[job], input_params(name)
      arguments = list(kind.Arguments(runners, p, name))
      if not arguments:
        _CheckUnused(job, name, p, list(runners))
      steps, seconds = train.Get(f'{job}_interval_steps'), train.Get(f'{job}_interval_seconds')
      for runner, task_input, full_name in arguments:
        e = _Entry(kind(runner, task_input, full_name, logdir, stop), steps, seconds)
        if (other := names.setdefault(e.job.jobname, name)) != name:
          raise ValueError(
            f'train.{job}_datasets names {other} and {name}, which would both write into '
            f'{e.job.jobname}: leave out or rename one of them'
          )
        self._entries.append(e)

  def CheckFollowed(self, early_stop: early_stopping.EarlyStopping) -> None:
    """Raises ValueError if no pass during training has the metric that early stopping follows.

    The metrics of a decoding are not known before it runs, and are not checked.
    """
    p = early_stop.params
    if not p.metric or not self.during_training:
      return
    followed = [e for e in self._entries if e.job.jobname == p.jobname and e.is_periodic]
    if not followed:
      known = ', '.join(e.job.jobname for e in self._entries if e.is_periodic) or 'none'
      raise ValueError(
        f'train.early_stop.jobname is {p.jobname!r}, which does not run periodically during '
        f'training; these jobs do: {known}. See train.eval_datasets, eval_interval_steps and, for '
        'decoding, decode_datasets and decode_interval_steps'
      )
    if (names := followed[0].job.MetricNames()) is not None:
      early_stop.CheckMetric(names)

  def Describe(self) -> list[str]:
    """Returns the data sets' names and sizes without repetition."""
    return list(dict.fromkeys(e.job.Describe() for e in self._entries))

  def IsDue(self, step: int, *, at_end: bool) -> bool:
    """Whether `Run` would run any pass."""
    return any(self._MustRun(e, step, at_end=at_end) for e in self._entries)

  def Run(self, step: int, *, at_end: bool) -> Iterator[Result]:
    """Runs the due passes one after the other, and yields their results.

    Ends early after a request to stop; the other passes are then still due.

    Args:
      step: the step of the weights.
      at_end: whether training has ended. Then all passes that have not seen these weights run, and
        the samples of all passes are printed.
    """
    for e in self._entries:
      is_due = self._MustRun(e, step, at_end=False)
      must_run = self._MustRun(e, step, at_end=at_end)
      if must_run:
        values = e.job.Run(step)
        if values is None:
          return
        e.job.WriteSample(step)
        e.step, e.values, e.seconds = step, values, self._clock()
      if at_end:
        e.job.PrintSample()
      if must_run:
        yield Result(e.job.jobname, e.values, is_due)

  def State(self) -> dict[str, Any]:
    """Returns {jobname: step, seconds and values} of the last results, for the checkpoint."""
    done = [e for e in self._entries if e.step >= 0]
    return {e.job.jobname: {'step': e.step, 'seconds': e.seconds, 'values': e.values} for e in done}

  def Samples(self) -> dict[str, str]:
    """Returns {jobname: text of the examples that its last pass decoded}, without empty texts."""
    return {e.job.jobname: e.job.sample for e in self._entries if e.job.sample}

  def Restore(self, state: Mapping[str, Any]) -> None:
    """Restores a state that `State` returned."""
    for e in self._entries:
      last = state.get(e.job.jobname, {})
      e.step, e.values = last.get('step', -1), dict(last.get('values', {}))
      e.seconds = last.get('seconds', 0.0)

  def Close(self) -> None:
    """Closes the events files."""
    for e in self._entries:
      e.job.Close()

  def _MustRun(self, e: _Entry, step: int, *, at_end: bool) -> bool:
    if at_end:
      return step > e.step
    return self.during_training and e.IsDue(step, self._clock())


def _CheckUnused(job: str, name: str, input_params: Any, tasks: list[str]) -> None:
  """Logs that no trained task can use a data set; raises ValueError if no other task can either.

  Args:
    job: one of `JOBS`.
    name: the data set's name.
    input_params: {task: Params of its input}.
    tasks: names of the trained tasks.
  """
  use, reason = {
    'eval': ('be evaluated on it', 'they have no input in this data set'),
    'decode': ('decode it', 'they have no input in this data set, or do not override Decode'),
  }[job]
  text = (
    f'train.{job}_datasets names {name}, but none of the tasks {", ".join(tasks)} can {use}: '
    f'{reason}'
  )
  # If one task is trained alone, the data set may be meant for the experiment's other tasks.
  if all(p is None or task in tasks for task, p in input_params.IterParams()):
    raise ValueError(text)
  logging.info('%s', text)
