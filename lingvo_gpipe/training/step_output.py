# SPDX-License-Identifier: Apache-2.0
"""Output of the training steps: the progress line, TensorBoard's events and metrics.jsonl."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping

from lingvo_gpipe.core import hyperparams
from lingvo_gpipe.experiment import model as model_lib
from lingvo_gpipe.reporting import metrics_log, progress, summaries
from lingvo_gpipe.runners import multi_task_runner, train_runner
from lingvo_gpipe.training import callback, inspection

# Statistics of the run rather than of one task.
_OF_RUN = ('num_skipped_steps',)


def LossUnit(runner: multi_task_runner.TrainingRunner) -> str:
  """Returns the unit of all tasks' loss weights, such as tokens; '' if their units differ."""
  units = {r.task.loss_unit for r in runner.task_runners.values()}
  return units.pop() if len(units) == 1 else ''


class ProgressLine(callback.StepHook):
  """Shows the steps of a call of the trainer in one updating line."""

  def __init__(
    self,
    runner: multi_task_runner.TrainingRunner,
    max_steps: int,
    seconds_left: Callable[[], float],
  ) -> None:
    """Shows nothing yet.

    Args:
      runner: runner of the steps.
      max_steps: number of steps after which the run ends.
      seconds_left: returns the time after which the run ends if `max_steps` does not end it.
    """
    self._runner = runner
    self._max_steps = max_steps
    self._seconds_left = seconds_left
    self._unit = LossUnit(runner)
    self._line: progress.Progress | None = None
    self._is_first = True

  @property
  def rate(self) -> float:
    """Tokens or examples per second in the last steps."""
    return 0.0 if self._line is None else self._line.rate

  def Begin(self, step: int) -> None:
    """Starts the clock of the rate."""
    self._start = time.monotonic()
    self._line = progress.Progress(
      step, self._max_steps, self._unit or 'examples', seconds_left=self._seconds_left()
    )

  def AfterStep(self, step: callback.Step) -> None:
    """Shows a step."""
    assert self._line is not None
    if self._is_first:
      trace = self._runner.trace_seconds
      run = time.monotonic() - self._start - trace
      self.Print(f'traced in {trace:.1f} s; compiled and ran the first step in {run:.1f} s')
      self._is_first = False
    notes = []
    if 'learning_rate' in step.values:  # The rates of several learners would fill the line.
      notes.append(f'lr {step.values["learning_rate"]:.3g}')
    cut = self._runner.task_runners[step.task_name].cut
    if cut.num_devices > 1 and cut.bubble:
      notes.append(f'bubble {cut.bubble:.0%}')
    count = step.values['loss_weight'] if self._unit else step.num_rows
    self._line.Update(
      step.number, TaskMetrics(step.values), count, label=step.task_name, notes=notes
    )

  def Print(self, text: str) -> None:
    """Prints lines above the progress line, if it is shown."""
    if self._line is None:
      print(text, flush=True)
    else:
      self._line.Print(text)

  def Pause(self, reason: str) -> contextlib.AbstractContextManager[None]:
    """Shows a reason in place of the rate, which does not count the time in the context."""
    return contextlib.nullcontext() if self._line is None else self._line.Pause(reason)

  def Close(self) -> None:
    """Leaves the last state of the line on the terminal."""
    if self._line is not None:
      self._line.Close()
      self._line = None


class StepSummaries(callback.StepHook):
  """Writes the values of the steps to TensorBoard's events in <logdir>/train and metrics.jsonl."""

  def __init__(
    self,
    runner: multi_task_runner.TrainingRunner,
    logdir: str,
    log: metrics_log.MetricsLog,
    line: ProgressLine,
    train: hyperparams.Params,
  ) -> None:
    """Writes nothing yet.

    Args:
      runner: runner of the steps.
      logdir: the log directory.
      log: metrics.jsonl; receives the same scalars as the events.
      line: knows the rate.
      train: `task.train`, which has the intervals.
    """
    self._runner = runner
    self._logdir = logdir
    self._log = log
    self._line = line
    self._train = train
    self._rate_name = f'{LossUnit(runner) or "examples"}_per_second'
    self._unwritten: dict[str, float] = {}  # Values of each task's last step since the last write.

  def Begin(self, step: int) -> None:
    """Opens the events file; writes the stage tables and pictures of the schedules.

    Raises:
      OSError: the file cannot be written.
    """
    self._writer = summaries.SummaryWriter(os.path.join(self._logdir, 'train'))
    for task_name, runner in self._runner.task_runners.items():
      picture = inspection.SchedulePicture(runner.cut)
      for name, text in (('stage_table', runner.cut.Table()), ('schedule', picture)):
        if text:
          key = model_lib.TaskKey(name, task_name)
          self._writer.Text(step, key, summaries.Preformatted(text))

  def AfterStep(self, step: callback.Step) -> None:
    """Writes due histograms and scalars; `AtEnd` writes the scalars of the last step."""
    self._unwritten.update(_NameValues(step))
    interval = self._train.histogram_interval_steps
    if interval and step.number % interval == 0:
      gradients = self._runner.Gradients(step.values['loss_weight'])
      self._writer.Histograms(
        step.number, {f'gradients/{path}': value for path, value in gradients.items()}
      )
    if step.end_reason is None and step.number % self._train.summary_interval_steps == 0:
      self._WriteScalars(step.number)

  def AtEnd(self, step: callback.Step) -> None:
    """Writes the scalars since the last write."""
    self._WriteScalars(step.number)

  def Flush(self) -> None:
    """Writes buffered events to the file, so that they survive a kill."""
    self._writer.Flush()

  def Close(self) -> None:
    """Closes the events file."""
    self._writer.Close()

  def _WriteScalars(self, step: int) -> None:
    if not self._unwritten:
      return
    scalars = {**self._unwritten, self._rate_name: self._line.rate}
    self._writer.Scalars(step, scalars)
    self._log.Write(step, 'train', scalars)
    self._unwritten = {}


def TaskMetrics(values: Mapping[str, float]) -> dict[str, float]:
  """Returns the task's metrics among the values of a step."""
  return {
    name: value
    for name, value in values.items()
    if name.split('/')[0] not in train_runner.STATISTICS
  }


def _NameValues(step: callback.Step) -> dict[str, float]:
  """Returns the values of a step and, with several tasks, adds the task to their names."""
  if not step.task_name:
    return dict(step.values)
  values = {**step.values, 'steps': float(step.num_task_steps)}
  return {
    name if name in _OF_RUN else model_lib.TaskKey(name, step.task_name): value
    for name, value in values.items()
  }
