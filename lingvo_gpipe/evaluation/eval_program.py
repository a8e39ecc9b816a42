# SPDX-License-Identifier: Apache-2.0
"""`EvalProgram`: evaluates or decodes the checkpoints of a log directory as they are written."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from absl import logging

from lingvo_gpipe.checkpoint import (
  assets,
  checkpoint_choice,
  checkpointer,
  logdir_lock,
  params_change,
)
from lingvo_gpipe.core import files, heartbeat, hyperparams
from lingvo_gpipe.distributed import cluster, stop_request
from lingvo_gpipe.evaluation import dataset_pass, pass_schedule
from lingvo_gpipe.experiment import model as model_lib
from lingvo_gpipe.learning import ema
from lingvo_gpipe.reporting import metrics_log, run_report
from lingvo_gpipe.runners import multi_task_runner

_Part = TypeVar('_Part')


class _Numbers(ctypes.Structure):
  _fields_ = [(name, ctypes.c_int64) for name in ('step', 'num_done', 'finished', 'total')]


class EvalProgress:
  """Progress of the work on checkpoints, in memory that this process shares with all its forks."""

  def __init__(self) -> None:
    """Starts with no work done."""
    self._numbers = _Numbers.from_buffer(mmap.mmap(-1, ctypes.sizeof(_Numbers)))
    self._numbers.step = self._numbers.finished = -1

  @property
  def step(self) -> int:
    """Step of the checkpoint on which work started last; -1 before the first one."""
    return int(self._numbers.step)

  @property
  def finished(self) -> int:
    """Step of the last checkpoint on which all work is done; -1 if there is none."""
    return int(self._numbers.finished)

  @property
  def total(self) -> int:
    """Number of parts of the work that are done, over all checkpoints."""
    return int(self._numbers.total)

  def PendingParts(self, step: int, parts: Sequence[_Part]) -> Iterator[_Part]:
    """Starts or continues the work on a checkpoint.

    Args:
      step: step of the checkpoint.
      parts: all parts of the work, equal for all checkpoints.

    Yields:
      The parts that are not done. A part is done when the next one is requested.
    """
    if step != self._numbers.step:
      self._numbers.num_done, self._numbers.step = 0, step
    for part in parts[self._numbers.num_done :]:
      yield part
      self._numbers.num_done += 1
      self._numbers.total += 1
    self._numbers.finished = step


class EvalProgram:
  """Evaluates, or decodes, the checkpoints of a log directory on one data set."""

  def __init__(
    self,
    params: hyperparams.InstantiableParams,
    logdir: str,
    devices: cluster.Cluster,
    dataset: str,
    stop: stop_request.StopRequest,
    *,
    job: str = 'eval',
    checkpoint: str = checkpoint_choice.LAST,
    allow_params_change: bool = False,
    progress: EvalProgress | None = None,
  ) -> None:
    """Makes the weights on their devices.

    Args:
      params: the model's Params, with the data set's input.
      logdir: the log directory.
      devices: the devices to use.
      dataset: the data set's name.
      stop: request to stop; checked between checkpoints.
      job: one of `pass_schedule.JOBS`.
      checkpoint: the checkpoint, in the form that `checkpoint_choice.Find` takes. Anything other
        than the last one selects this checkpoint alone.
      allow_params_change: take the weights of a run with Params that describe another model.
      progress: progress of an earlier process that this one continues; None to start.

    Raises:
      ValueError: no task supports the job, the run has different Params, or the checkpoint does not
        exist.
    """
    self._params = params
    self._logdir = logdir
    self._cluster = devices
    self._allow_params_change = allow_params_change
    self._progress = progress or EvalProgress()
    self._checked: str | None = None  # Params of the run that were compared.
    self._checkpointer = checkpointer.Checkpointer(os.path.join(logdir, 'train'))
    self._chosen: checkpointer.CheckpointInfo | None = None
    if checkpoint != checkpoint_choice.LAST:
      self._chosen = self._UnfinishedCheckpoint() or checkpoint_choice.Find(
        self._checkpointer, checkpoint
      )
    # Before weights are made for another model.
    for info in [self._chosen] if self._chosen else self._checkpointer.All()[-1:]:
      self._CheckParams(info)
    model: model_lib.BaseModel = params.Instantiate()
    if not allow_params_change:
      for task_name in model.active_tasks:
        if task_name in model.inputs:
          assets.Check(logdir, model.inputs[task_name].Assets())
    self._runner = multi_task_runner.MakeEvaluated(
      model, devices.devices, self._checkpointer, num_replicas=devices.num_replicas
    )
    kind = pass_schedule.JOBS[job]
    self._jobs = [
      kind(runner, p, name, logdir, stop)
      for runner, p, name in kind.Arguments(self._runner.task_runners, params.input, dataset)
    ]
    if not self._jobs:
      raise ValueError(
        f'--job={job} is supported by none of the tasks {", ".join(self._runner.task_runners)}'
      )
    self._stop = stop
    self._weights_text = ''  # The last printed line about the kind of weights.
    self._prints_samples = False
    self._logs: dict[str, metrics_log.MetricsLog] = {}

  def Run(self, once: bool = False) -> int:
    """Runs the job on one checkpoint, or on each new checkpoint until training ends.

    Args:
      once: run on the last checkpoint only, as on a checkpoint that was selected.

    Returns:
      The exit status; 1 if no process trains any more although the training has not ended.

    Raises:
      ValueError: no checkpoint exists or will be written, or the run has different Params.
      DamagedError: the checkpoint cannot be read. While following a run damaged checkpoints are
        skipped; the error is raised if training has ended without a readable one.
    """
    self._prints_samples = self._chosen is not None or once
    if not self._prints_samples:
      self._Describe()
      return self._Follow()
    info = (
      self._chosen or self._UnfinishedCheckpoint() or checkpoint_choice.Find(self._checkpointer)
    )
    self._Describe()
    if self._chosen is not None:
      self._Restore(info)
    else:
      while not self._TryRestore(info):
        info = checkpoint_choice.Find(self._checkpointer)
    self._RunJobs(info.step)
    return self._stop.exit_status

  def _UnfinishedCheckpoint(self) -> checkpointer.CheckpointInfo | None:
    """Returns the checkpoint on which an earlier process worked; None if it does not exist."""
    infos = self._checkpointer.All()
    return next((info for info in infos if info.step == self._progress.step), None)

  def _Follow(self) -> int:
    """Runs the job on each new checkpoint until training ends; returns the exit status."""
    # The longest limit of several tasks decides; 0 means no limit.
    limits = [task.eval.max_seconds_without_trainer for task in self._tasks]
    patience = max(limits) if all(limits) else 0.0
    watch = logdir_lock.Watch(self._checkpointer.directory)
    # Step and time of the last evaluated checkpoint.
    done, saved = self._progress.finished, math.inf
    pause = 1.0
    # The trainer reports the end of training; its max_steps may differ from this process's.
    while self._stop.signal is None:
      # Read before the checkpoints: if training has ended, all its checkpoints exist.
      finished = run_report.FinishedStep(self._logdir)
      try:
        info = self._RestoreNewer(done, saved)
      except OSError as e:  # The directory may be unreachable for a while.
        logging.warning('%s; trying again', files.OneLine(e))
        finished = info = None
      if info is not None:
        self._RunJobs(info.step)
        done, saved, pause = info.step, info.time, 1.0
        watch = logdir_lock.Watch(self._checkpointer.directory)
        continue
      free = watch.SecondsFree()
      # While a process trains, the report is from an earlier call.
      if finished is not None and free > 0.0:
        self._CheckEnd(done, finished)
        break
      if 0 < patience <= free:
        print(self._DescribeTimeout(done, free), file=sys.stderr)
        return 1
      _Wait(min(pause, patience - free) if patience else pause, self._stop)
      pause = min(2 * pause, 30.0)
    return self._stop.exit_status

  def _RestoreNewer(self, done: int, saved: float) -> checkpointer.CheckpointInfo | None:
    """Restores and returns the checkpoint of `_NewerThan`; logs which checkpoints it skips."""
    while (info := self._NewerThan(done, saved)) is not None:
      skipped = self._DescribeSkipped(done, info.step)  # Before the trainer removes them.
      if self._TryRestore(info):
        if skipped:
          logging.info('%s', skipped)
        return info
    return None

  def _NewerThan(self, done: int, saved: float) -> checkpointer.CheckpointInfo | None:
    """Returns the newest readable checkpoint after step `done`, or None.

    If a run went back, or a new run replaced it, the checkpoint has an earlier step but was saved
    after the time `saved`.
    """
    try:
      info = self._checkpointer.Latest()
    except checkpointer.DamagedError:  # It is named in the log; the next one may be readable.
      return None
    if info is None or info.step == done:
      return None
    return info if info.step > done or info.time > saved else None

  def _DescribeSkipped(self, done: int, step: int) -> str:
    """Returns a text about the checkpoints between two evaluated ones; '' if there are none."""
    infos = self._checkpointer.All()
    between = [
      f'step {info.step}'
      for info in infos
      if done < info.step < step and not self._checkpointer.IsKnownDamaged(info)
    ]
    if not between:
      return ''
    may_lack_some = done >= 0 and done not in [info.step for info in infos]
    return (
      f'{self._jobnames} skipped the checkpoints of {", ".join(between)}'
      f'{" and perhaps others that have been removed" if may_lack_some else ""}: the newer one of '
      f'step {step} exists'
    )

  def _TryRestore(self, info: checkpointer.CheckpointInfo) -> bool:
    """Restores a checkpoint; returns False if it was removed meanwhile or is damaged."""
    try:
      self._Restore(info)
      return True
    except checkpointer.DamagedError:
      return False

  def _Restore(self, info: checkpointer.CheckpointInfo) -> None:
    self._CheckParams(info)
    # Evaluation needs neither slots nor learner state.
    num_averages = ema.Restore(self._checkpointer, info, self._runner.Variables())
    self._runner.AfterRestore()
    self._PrintWeights(num_averages)

  def _RunJobs(self, step: int) -> None:
    """Runs the jobs, or their unfinished parts, on the restored checkpoint."""
    parts = [(job, part) for job in self._jobs for part in (self._Result, self._Sample)]
    for job, part in self._progress.PendingParts(step, parts):
      try:
        is_done = part(step, job)
      except Exception as e:
        e.add_note(f'in {job.jobname} of the checkpoint of step {step}')
        raise
      if not is_done:
        return

  def _Describe(self) -> None:
    """Prints the experiment, its devices, dtypes and data."""
    print(f'{self._params.model or self._params.name} on {self._cluster.Describe()}')
    for name, runner in self._runner.task_runners.items():
      print(f'task {name}: {runner.Precision()}' if name else runner.Precision())
    print(f'data: {"; ".join(job.Describe() for job in self._jobs)}', flush=True)

  def _CheckParams(self, info: checkpointer.CheckpointInfo) -> None:
    """Raises ValueError if the checkpoint has different Params; a later one may have others."""
    self._checked = params_change.CheckEvaluated(
      info, self._params, self._allow_params_change, self._checked
    )

  def _PrintWeights(self, num_averages: int) -> None:
    """Prints the kind of weights that are evaluated if it differs from the kind before."""
    text = f'{self._jobnames} {"takes" if len(self._jobs) == 1 else "take"} the '
    text += ema.DescribeWeights(num_averages)
    if bool(num_averages) != any(task.train.ema_decay for task in self._tasks):
      text += ', as they were saved: train.ema_decay differs from the value of the run'
    if text != self._weights_text:
      print(text, flush=True)
      self._weights_text = text

  def _CheckEnd(self, done: int, finished: int) -> None:
    """Checks that the last checkpoint of a training that has ended was evaluated."""
    if done < 0:
      self._checkpointer.Latest()  # Raises DamagedError if none of them can be read.
      raise ValueError(
        f'training ended after step {finished}, but there is no checkpoint in '
        f'{self._checkpointer.directory}'
      )
    if done < finished:
      logging.warning(
        'training ended after step %d, but its last checkpoint cannot be read or was removed: the '
        'checkpoint of step %d was the last one for %s',
        finished, done, self._jobnames,
      )  # fmt: skip

  def _DescribeTimeout(self, done: int, seconds: float) -> str:
    state = (
      f'the last checkpoint is of step {done}' if done >= 0 else 'there is no readable checkpoint'
    )
    return (
      f'no process has trained in {self._logdir!r} for {seconds:.0f} s; {state}, and no report '
      'says that training has ended. See the output of the trainer, start it again to resume, and '
      'then this evaluator. eval.max_seconds_without_trainer sets how long it waits'
    )

  @property
  def _tasks(self) -> list[Any]:
    """Params of the evaluated tasks."""
    return [runner.task.params for runner in self._runner.task_runners.values()]

  @property
  def _jobnames(self) -> str:
    return ' and '.join(job.jobname for job in self._jobs)

  def _Result(self, step: int, job: dataset_pass.DatasetPass) -> bool:
    """Runs a job and logs its metrics; returns False after a request to stop."""
    values = job.Run(step)
    if values is None:
      return False
    if job.jobname not in self._logs:  # The trainer writes <logdir>/metrics.jsonl.
      path = os.path.join(self._logdir, job.jobname, 'metrics.jsonl')
      self._logs[job.jobname] = metrics_log.MetricsLog(path)
    self._logs[job.jobname].Write(step, job.jobname, values)
    return True

  def _Sample(self, step: int, job: dataset_pass.DatasetPass) -> bool:
    job.WriteSample(step)
    if self._prints_samples:
      job.PrintSample()
    return True


def _Wait(seconds: float, stop: stop_request.StopRequest) -> None:
  heartbeat.SuspendTimeout()
  end = time.monotonic() + seconds
  while stop.signal is None and time.monotonic() < end:
    time.sleep(0.1)
