# SPDX-License-Identifier: Apache-2.0
"""`StepProfiler`: runs TensorFlow's profiler for some training steps, and draws their schedule.

<logdir>/train/plugins/profile/<time>/   the trace, for TensorBoard, and a trace of each worker
<logdir>/timeline_<first>_<last>.html    each device's actions as measured, over the simulated ones

In a model of several tasks each task has a picture, whose name ends with the name of the task.
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
from lingvo_gpipe.training import callback, worker_profiles


def ParseSteps(text: str, max_steps: int) -> tuple[int, int]:
  """Parses `5,7` into the first and the last step to profile.

  Args:
    text: value of the flag --profile_steps.
    max_steps: last step of the run.

  Raises:
    ValueError: the text has another form, or the run has no such steps.
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


class StepProfiler(callback.StepHook):
  """Profiles some steps of a run; does nothing if no steps are given.

  A file that cannot be written or read is reported in a line and does not end the training.
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
      steps: the first and the last step to profile; None for none.
      logdir: the log directory.
      runners: {task: runner of its steps}.
      task_of: returns the task that is trained after this many steps.
      workers: {task index: address} of the workers that compute.
    """
    self._first, self._last = steps or (0, 0)
    self._flag = f'--profile_steps={self._first},{self._last}'
    self._logdir = logdir
    self._runners = runners
    self._task_of = task_of
    self._addresses = workers
    self._workers: worker_profiles.WorkerProfiles | None = None  # Set while a profile runs.
    self._is_done = steps is None
    self._traces_before: set[tuple[str, int]] = set()

  def Begin(self, step: int) -> None:
    """Prints a note if the steps are over, or if the first one compiles."""
    if self._is_done:
      return
    if self._last <= step:  # Not an error: a run may be restarted with the same flags.
      print(f'{self._flag}: nothing is profiled: the run resumes from step {step}')
      self._is_done = True
    elif self._first <= step + 1:
      print(
        f'{self._flag}: step {step + 1} compiles the stages, which the trace includes; choose '
        f'steps from {step + 2} to leave it out'
      )

  def Record(self, step: int) -> contextlib.AbstractContextManager[Any]:
    """Returns a context for a step, or for each of its mini-batches, in which it is recorded."""
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

  def AfterStep(self, step: callback.Step) -> None:
    """Ends the profile after its last step."""
    if step.number == self._last:
      self._End(step.Print)

  def Close(self) -> None:
    """Ends the profile, if the training ends before the last step to profile."""
    self._End(print)

  def _End(self, show: Callable[[str], None]) -> None:
    """Ends the profile with the steps so far, and shows lines about the results."""
    if self._is_done:
      return
    self._is_done = True
    if self._workers is None:
      show(f'{self._flag}: nothing was profiled: the run ended before these steps')
      return
    traces, reasons = self._workers.End()
    for index, reason in reasons.items():
      show(f'{self._flag}: no trace of worker {index}: {reason}')
    try:
      tf.profiler.experimental.stop()
      steps = self._NameActions(traces)
      for task_name, runner in self._runners.items():
        steps_of_task = [step for step in steps if self._TaskOf(step) == task_name]
        if steps_of_task:
          show(self._Draw(task_name, runner, steps_of_task))
      if not steps:
        show(f'{self._flag}: the trace holds no action')
    except (tf.errors.OpError, OSError, ValueError) as e:
      show(f'{self._flag}: no picture of the schedule: {" ".join(str(e).split())}')

  def _TaskOf(self, step: profiler_trace.StepTrace) -> str:
    return self._task_of(step.step - 1)

  def _Traces(self) -> set[tuple[str, int]]:
    """Returns the traces in the log directory, with their times: a name may be used again."""
    top = os.path.join(self._logdir, 'train', 'plugins', 'profile')
    paths = [
      os.path.join(folder, name)
      for folder, _, names in tf.io.gfile.walk(top)
      for name in names
      if name.endswith('.xplane.pb')
    ]
    return {(path, tf.io.gfile.stat(path).mtime_nsec) for path in paths}

  def _NameActions(self, worker_traces: Mapping[int, bytes]) -> list[profiler_trace.StepTrace]:
    """Adds rows of named actions to the trace, and writes the workers' traces next to it.

    Args:
      worker_traces: {task index: trace}.

    Returns:
      The steps of the trace.
    """
    paths = self._Traces() - self._traces_before
    if len(paths) != 1:
      raise OSError(f'expected one new trace in {self._logdir}/train, got {len(paths)}')
    ((path, _),) = paths
    for index, content in worker_traces.items():
      files.WriteWhole(os.path.join(os.path.dirname(path), f'worker_{index}.xplane.pb'), content)
    with tf.io.gfile.GFile(path, 'rb') as f:
      trace = profiler_trace.Trace(f.read(), list(worker_traces.values()))
    if trace.steps:
      rows = {
        task_name: [
          f'pipeline {_ShortName(stage.device)}' for stage in runner.engine.training_stages
        ]
        for task_name, runner in self._runners.items()
      }
      files.WriteWhole(path, trace.WithRows([rows[self._TaskOf(step)] for step in trace.steps]))
    return trace.steps

  def _Draw(
    self,
    task_name: str,
    runner: eval_runner.EvalRunner,
    traces: Sequence[profiler_trace.StepTrace],
  ) -> str:
    """Writes the picture of a task's steps; returns a text about its content."""
    pairs = _MeasuredAndSimulated(runner, traces)
    first, last = traces[0].step, traces[-1].step
    steps = f'step {first}' if first == last else f'steps {first} to {last}'
    if task_name:
      steps += f' of task {task_name}'
    # A step may have several mini-batches.
    num_steps = len({trace.step for trace in traces})
    seconds = sum(trace.end - trace.start for trace in traces) / num_steps
    measured = statistics.fmean(m.bubble for m, _ in pairs)
    simulated = statistics.fmean(p.overall_bubble for _, p in pairs)
    text = (
      f'{seconds * 1e3:.2f} ms a step; bubble {measured:.1%} measured, {simulated:.1%} simulated '
      f'with the measured times, {runner.cut.bubble:.1%} predicted by {runner.cut.by}'
    )
    num_replicas = len(runner.engine.replicas)
    if num_replicas > 1:
      text += f'; schedule and bubble of the first of {num_replicas} replicas'
    measured_steps = [m for m, _ in pairs]
    doubts = measured_schedule.FindDoubts(
      measured_steps, runner.cut.policy, _HaveWeightGradient(runner)
    )
    text = '; '.join([text, *doubts])
    owners = runner.engine.stage_to_device
    page = timeline_html.MakePage(
      f'{steps[0].upper()}{steps[1:]} of {self._logdir}',
      [
        text,
        f'{runner.cut.schedule.name}, remat_policy {runner.cut.remat_policy}. Times are those at '
        'which the host began an action and had its result, from the first action on.',
      ],
      pairs,
      [
        _ShortName(runner.engine.stages[owners.index(d)].device)
        for d in range(runner.cut.num_devices)
      ],
      measured_schedule.MeanTimes(measured_steps),
    )
    name = model_lib.TaskDirectory(f'timeline_{self._first}_{self._last}', task_name)
    path = os.path.join(self._logdir, f'{name}.html')
    files.WriteWhole(path, page)
    return f'profiled {steps}: {text}\npicture: {path}; trace: in {self._logdir}/train'


def _ShortName(device: str) -> str:
  """Returns a device's name for a row."""
  worker = worker_hosts.WorkerOf(device)
  name = device.rsplit('/', 1)[-1]
  return name if worker is None else f'worker {worker} {name.removeprefix("device:")}'


def _HaveWeightGradient(runner: eval_runner.EvalRunner) -> list[bool]:
  return [stage.has_weight_gradient for stage in runner.engine.training_stages]


def _MeasuredAndSimulated(
  runner: eval_runner.EvalRunner, traces: Sequence[profiler_trace.StepTrace]
) -> list[tuple[measured_schedule.Measured, simulator.Result]]:
  """Returns each measured mini-batch with the simulation of its number of micro-batches."""

  def Size(mini_batch: measured_schedule.Measured) -> int:
    return mini_batch.schedule.num_micro_batches

  measured = []
  for trace in traces:
    num_micro_batches = 1 + max(action.micro_batch for action in trace.times)
    schedule = runner.engine.TrainingSchedule(num_micro_batches)
    measured.append(measured_schedule.Measured(schedule, trace.step, trace.times))
  simulated = {
    size: measured_schedule.SimulateWithMeanTimes(
      list(group), runner.cut.policy, _HaveWeightGradient(runner)
    )
    for size, group in itertools.groupby(sorted(measured, key=Size), Size)
  }
  return [(m, simulated[Size(m)]) for m in measured]
