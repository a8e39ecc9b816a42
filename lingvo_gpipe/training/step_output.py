# SPDX-License-Identifier: Apache-2.0
"""`StepOutput`: what training shows and writes of its steps.

The progress line, TensorBoard's events in <logdir>/train, and the lines of metrics.jsonl.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from lingvo_gpipe.experiment import model as model_lib
from lingvo_gpipe.reporting import metrics_log, progress, summaries
from lingvo_gpipe.runners import multi_task_runner
from lingvo_gpipe.training import inspection

# Statistics of a step that the progress line does not show beside the task's metrics.
_STATISTICS = (
  'learning_rate',
  'grad_norm',
  'grad_scale',
  'is_finite',
  'num_skipped_steps',
  'loss_weight',
)

# Those that are of the run, whatever its tasks.
_OF_RUN = ('num_skipped_steps',)


class StepOutput:
  """Shows the steps of a call of the trainer, and writes what they gave.

  Attributes:
    progress: the line; others may print above it.
  """

  def __init__(
    self,
    runner: multi_task_runner.TrainingRunner,
    logdir: str,
    log: metrics_log.MetricsLog,
    max_steps: int,
    seconds_left: float,
  ) -> None:
    """Starts the clock; writes the stage tables and the pictures of the schedules.

    Args:
      runner: what trains, at the step from which it goes on.
      logdir: the log directory.
      log: gets what the summaries get.
      max_steps: the step at which the run ends.
      seconds_left: the run ends after so many seconds from now, if that is before `max_steps`.

    Raises:
      OSError: the summaries cannot be written.
    """
    self._runner = runner
    self._log = log
    one, *others = runner.task_runners.values()
    # What the weights of all tasks' losses count; '' where not all count the same.
    self._unit = one.task.loss_unit
    if any(other.task.loss_unit != self._unit for other in others):
      self._unit = ''
    step = int(runner.global_step)
    self.progress = progress.Progress(
      step,
      max_steps,
      self._unit or 'examples',
      seconds_left=seconds_left,
    )
    self._writer = summaries.SummaryWriter(os.path.join(logdir, 'train'))
    self._DrawPlans(step)
    self._loss_weight = 0.0  # Of the last step.
    # Of each task's last step since the last summary.
    self._unwritten: dict[str, float] = {}

  def Step(
    self,
    step: int,
    values: Mapping[str, float],
    num_rows: int,
    task_name: str = '',
    num_task_steps: int = 0,
  ) -> None:
    """Shows a finished step.

    Args:
      step: steps done so far.
      values: what it gave.
      num_rows: of its batches.
      task_name: whose step it was, where there are several tasks.
      num_task_steps: steps of this task done so far.
    """
    self._loss_weight = values['loss_weight']
    self._unwritten.update(_Keyed(values, task_name, num_task_steps))
    count = self._loss_weight if self._unit else num_rows
    notes = []
    if 'learning_rate' in values:  # Those of several learners would fill the line.
      notes.append(f'lr {values["learning_rate"]:.3g}')
    cut = self._runner.task_runners[task_name].cut
    if cut.num_devices > 1 and cut.bubble:
      notes.append(f'bubble {cut.bubble:.0%}')
    self.progress.Update(step, Metrics(values), count, label=task_name, notes=notes)

  def WriteScalars(self, step: int) -> None:
    """Writes what the steps since the last summary gave, if there were any."""
    if not self._unwritten:
      return
    scalars = {**self._unwritten, f'{self._unit or "examples"}_per_second': self.progress.rate}
    self._writer.Scalars(step, scalars)
    self._log.Write(step, 'train', scalars)
    self._unwritten = {}

  def WriteHistograms(self, step: int) -> None:
    """Writes a histogram of each weight's gradient in the last step."""
    found = self._runner.Gradients(self._loss_weight)
    self._writer.Histograms(step, {f'gradients/{path}': value for path, value in found.items()})

  def Flush(self) -> None:
    """What was written outlives a kill from here on."""
    self._writer.Flush()

  def Close(self) -> None:
    """Ends the line and closes the file of summaries."""
    self.progress.Close()
    self._writer.Close()

  def _DrawPlans(self, step: int) -> None:
    for task_name, one in self._runner.task_runners.items():
      texts = {'stage_table': one.cut.Table(), 'schedule': inspection.SchedulePicture(one.cut)}
      for name, text in texts.items():
        if text:
          name = model_lib.TaskKey(name, task_name)
          self._writer.Text(step, name, summaries.Preformatted(text))


def Metrics(values: Mapping[str, float]) -> dict[str, float]:
  """The task's metrics among what a step gave."""
  return {name: value for name, value in values.items() if name.split('/')[0] not in _STATISTICS}


def _Keyed(values: Mapping[str, float], task_name: str, num_task_steps: int) -> dict[str, float]:
  """The values of a step under names that tell the task, and how often it was trained."""
  if not task_name:
    return dict(values)
  return {
    name if name in _OF_RUN else model_lib.TaskKey(name, task_name): value
    for name, value in {**values, 'steps': float(num_task_steps)}.items()
  }
