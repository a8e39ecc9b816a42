# SPDX-License-Identifier: Apache-2.0
"""`StepProfiler`: TensorFlow's profiler around some training steps, and a picture of what it saw.

<logdir>/train/plugins/profile/<time>/   the trace, where TensorBoard finds it; one more a worker
<logdir>/timeline_<first>_<last>.html    each device's actions as measured, over the planned ones

Of several tasks each has a picture, whose name ends with the task's.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from lingvo_gpipe.core import files
from lingvo_gpipe.distributed import worker_hosts
from lingvo_gpipe.experiment import model as model_lib
from lingvo_gpipe.pipeline.cost import simulator
from lingvo_gpipe.pipeline.profiling import measured_schedule, profiler_trace, timeline_html
from lingvo_gpipe.runners import eval_runner
from lingvo_gpipe.training import worker_profiles


def ParseSteps(text: str, max_steps: int) -> tuple[int, int]:
  """Reads `5,7`: the first and the last step to profile.

  Args:
    text: the value of the flag --profile_steps.
    max_steps: where the run ends.

  Raises:
    ValueError: it is something else, or steps that do not come.
  """
  match = re.fullmatch(r'\s*([0-9]{1,18})\s*,\s*([0-9]{1,18})\s*', text)
  if not match:
    raise ValueError(f'--profile_steps={text}: expected the first and the last step, such as 5,7')
  first, last = int(match[1]), int(match[2])
  if first < 1 or last < first:
    raise ValueError(
      f'--profile_steps={text}: steps count from 1, and the last is not before the first'
    )
  if last > max_steps:
    raise ValueError(
      f'--profile_steps={text}: the run ends at step {max_steps}; name earlier steps, or raise '
      'max_steps'
    )
  return first, last


class StepProfiler:
  """Profiles some steps of a run; without any it does nothing.

  What cannot be written or read is told in a line: it is no reason to end a training.
  """

  def __init__(
    self,
    steps: tuple[int, int] | None,
    logdir: str,
    runners: Mapping[str, eval_runner.EvalRunner],
    task_of: Callable[[int], str],
    workers: Mapping[int, str],
  ) -> None:
    """Starts nothing yet.

    Args:
      steps: the first and the last step to profile; None: none.
      logdir: the log directory.
      runners: {task: what runs its steps}.
      task_of: the task that is trained after so many steps.
      workers: {task index: address} of those that compute.
    """
    self._first, self._last = steps or (0, 0)
    self._flag = f'--profile_steps={self._first},{self._last}'
    self._logdir = logdir
    self._runners = runners
    self._task_of = task_of
    self._addresses = workers
    self._workers: worker_profiles.WorkerProfiles | None = None  # While a profile is under way.
    self._is_done = steps is None
    self._traces_before: set[tuple[str, int]] = set()

  def Begin(self, step: int, say: Callable[[str], None]) -> None:
    """To be called before the loop.

    Args:
      step: steps done so far.
      say: prints a line for the user.
    """
    if self._is_done:
      return
    if self._last <= step:  # No error: a run may be restarted with the same flags.
      say(f'{self._flag}: nothing is profiled, for the run goes on from step {step}')
      self._is_done = True
    elif self._first <= step + 1:
      say(
        f'{self._flag}: step {step + 1} compiles the stages, and the trace has that too; name '
        f'steps from {step + 2} on for one without'
      )

  def Step(self, step: int) -> contextlib.AbstractContextManager[Any]:
    """Encloses what is done for a step, or for each of its mini-batches."""
    if self._is_done or step < self._first:
      return contextlib.nullcontext()
    if self._workers is None:
      try:
        self._traces_before = self._Traces()
        tf.profiler.experimental.start(os.path.join(self._logdir, 'train'))
      except files.FILE_ERRORS as e:
        logging.warning('%s: nothing is profiled: %s', self._flag, files.OneLine(e))
        self._is_done = True
        return contextlib.nullcontext()
      self._workers = worker_profiles.WorkerProfiles(self._addresses)
    return tf.profiler.experimental.Trace(profiler_trace.STEP_EVENT, step_num=step, _r=1)

  def After(self, step: int, say: Callable[[str], None]) -> None:
    """To be called after each step; after the last one it says what came out."""
    if step == self._last:
      self.Close(say)

  def Close(self, say: Callable[[str], None]) -> None:
    """Ends the profile where one is under way, with the steps so far, and says what came out."""
    if self._is_done:
      return
    self._is_done = True
    if self._workers is None:
      say(f'{self._flag}: nothing was profiled, for the run ended before')
      return
    traces, reasons = self._workers.End()
    for index, why in reasons.items():
      say(f'{self._flag}: no trace of worker {index}: {why}')
    try:
      tf.profiler.experimental.stop()
      steps = self._NameActions(traces)
      for task, one in self._runners.items():
        of_task = [step for step in steps if self._TaskOf(step) == task]
        if of_task:
          say(self._Draw(task, one, of_task))
      if not steps:
        say(f'{self._flag}: the trace holds no action')
    except (tf.errors.OpError, OSError, ValueError) as e:
      say(f'{self._flag}: no picture of the schedule: {" ".join(str(e).split())}')

  def _TaskOf(self, step: profiler_trace.StepTrace) -> str:
    return self._task_of(step.step - 1)

  def _Traces(self) -> set[tuple[str, int]]:
    """The traces in the log directory, with their times: one may take another's name."""
    top = os.path.join(self._logdir, 'train', 'plugins', 'profile')
    paths = [
      os.path.join(folder, name)
      for folder, _, names in tf.io.gfile.walk(top)
      for name in names
      if name.endswith('.xplane.pb')
    ]
    return {(path, tf.io.gfile.stat(path).mtime_nsec) for path in paths}

  def _NameActions(self, of_workers: Mapping[int, bytes]) -> list[profiler_trace.StepTrace]:
    """Adds rows with the actions to the trace, and beside it those of workers; returns its steps.

    Args:
      of_workers: {task index: trace}.
    """
    paths = self._Traces() - self._traces_before
    if len(paths) != 1:
      raise OSError(f'expected one new trace in {self._logdir}/train, found {len(paths)}')
    ((path, _),) = paths
    for index, content in of_workers.items():
      files.WriteWhole(os.path.join(os.path.dirname(path), f'worker_{index}.xplane.pb'), content)
    with tf.io.gfile.GFile(path, 'rb') as f:
      trace = profiler_trace.Trace(f.read(), list(of_workers.values()))
    if trace.steps:
      rows = {
        task: [f'pipeline {_Short(stage.device)}' for stage in one.engine.stages]
        for task, one in self._runners.items()
      }
      files.WriteWhole(path, trace.WithRows([rows[self._TaskOf(step)] for step in trace.steps]))
    return trace.steps

  def _Draw(
    self, task: str, one: eval_runner.EvalRunner, found: Sequence[profiler_trace.StepTrace]
  ) -> str:
    """Writes the picture of a task's steps; returns what it shows."""
    drawn = _WithPlans(one, found)
    first, last = found[0].step, found[-1].step
    steps = f'step {first}' if first == last else f'steps {first} to {last}'
    if task:
      steps += f' of task {task}'
    # A step may have several mini-batches.
    seconds = sum(step.end - step.start for step in found) / len({step.step for step in found})
    measured = statistics.fmean(m.bubble for m, _ in drawn)
    planned = statistics.fmean(p.overall_bubble for _, p in drawn)
    text = (
      f'{seconds * 1e3:.2f} ms a step; bubble {measured:.1%} measured, {planned:.1%} simulated '
      f'with the measured times, {one.cut.bubble:.1%} predicted by {one.cut.by}'
    )
    num_replicas = len(one.engine.replicas)
    if num_replicas > 1:
      text += f'; the schedule and the bubble are those of the first of {num_replicas} replicas'
    of_steps = [m for m, _ in drawn]
    doubts = measured_schedule.FindDoubts(of_steps, one.cut.remat_policy, _Trained(one))
    text = '; '.join([text, *doubts])
    owners = one.engine.stage_to_device
    page = timeline_html.MakePage(
      f'{steps[0].upper()}{steps[1:]} of {self._logdir}',
      [
        text,
        f'{one.cut.schedule.name}, remat_policy {one.cut.remat_policy}. Times are those at '
        'which the host began an action and had its result, from the first action on.',
      ],
      drawn,
      [_Short(one.engine.stages[owners.index(d)].device) for d in range(one.cut.num_devices)],
      measured_schedule.MeanTimes(of_steps),
    )
    name = model_lib.TaskDirectory(f'timeline_{self._first}_{self._last}', task)
    path = os.path.join(self._logdir, f'{name}.html')
    files.WriteWhole(path, page)
    return f'profiled {steps}: {text}\npicture: {path}; trace: in {self._logdir}/train'


def _Short(device: str) -> str:
  """A device's name for a row."""
  worker = worker_hosts.WorkerOf(device)
  name = device.rsplit('/', 1)[-1]
  return name if worker is None else f'worker {worker} {name.removeprefix("device:")}'


def _Trained(one: eval_runner.EvalRunner) -> list[bool]:
  return [stage.has_weight_gradient for stage in one.engine.stages]


def _WithPlans(
  one: eval_runner.EvalRunner, found: Sequence[profiler_trace.StepTrace]
) -> list[tuple[measured_schedule.Measured, simulator.Result]]:
  """The mini-batches as measured, each with the plan for all of its number of micro-batches."""

  def Size(one: measured_schedule.Measured) -> int:
    return one.schedule.num_micro_batches

  measured = []
  for step in found:
    num_micro_batches = 1 + max(action.micro_batch for action in step.times)
    schedule = one.engine.TrainingSchedule(num_micro_batches)
    measured.append(measured_schedule.Measured(schedule, step.step, step.times))
  planned = {
    size: measured_schedule.SimulateWithMeanTimes(list(group), one.cut.remat_policy, _Trained(one))
    for size, group in itertools.groupby(sorted(measured, key=Size), Size)
  }
  return [(m, planned[Size(m)]) for m in measured]
