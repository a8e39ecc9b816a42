# SPDX-License-Identifier: Apache-2.0
"""`EvalProgram`: evaluates or decodes the checkpoints of a log directory while they come."""

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
  """What is done of each checkpoint's work; this process and all its forks read and write it."""

  def __init__(self) -> None:
    """Nothing is done."""
    self._numbers = _Numbers.from_buffer(mmap.mmap(-1, ctypes.sizeof(_Numbers)))
    self._numbers.step = self._numbers.finished = -1

  @property
  def step(self) -> int:
    """That of the checkpoint that was begun last; -1: none was."""
    return int(self._numbers.step)

  @property
  def finished(self) -> int:
    """The step of the last checkpoint of which all is done; -1: there is none."""
    return int(self._numbers.finished)

  @property
  def total(self) -> int:
    """How many parts are done, of all checkpoints."""
    return int(self._numbers.total)

  def Undone(self, step: int, parts: Sequence[_Part]) -> Iterator[_Part]:
    """Begins or goes on with a checkpoint.

    Args:
      step: that of the checkpoint.
      parts: of the work on it, always the same.

    Yields:
      Those that are not done. One is when the next is asked for.
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
      stop: asked between checkpoints.
      job: one of `dataset_passes.JOBS`.
      checkpoint: which one, as `checkpoint_choice.Find` takes it; but for the last, it alone.
      allow_params_change: take the weights of a run with Params that do not mean its model.
      progress: of a process before this one, whose work goes on; what it has done is not repeated.

    Raises:
      ValueError: the task cannot do the job, the run has other Params, or no such checkpoint.
    """
    self._params = params
    self._logdir = logdir
    self._cluster = devices
    self._allow_params_change = allow_params_change
    self._progress = progress or EvalProgress()
    self._checked: str | None = None  # The run's Params that were compared.
    self._checkpointer = checkpointer.Checkpointer(os.path.join(logdir, 'train'))
    self._chosen: checkpointer.CheckpointInfo | None = None
    if checkpoint != checkpoint_choice.LAST:
      self._chosen = self._Begun() or checkpoint_choice.Find(self._checkpointer, checkpoint)
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
      kind(one, p, name, logdir, stop)
      for one, p, name in kind.OfTasks(self._runner.task_runners, params.input, dataset)
    ]
    if not self._jobs:
      raise ValueError(
        f'--job={job} can be done with none of the tasks {", ".join(self._runner.task_runners)}'
      )
    self._stop = stop
    self._said = ''  # Which kind of weights was taken.
    self._prints = False  # Whether to print what comes of an example.
    self._logs: dict[str, metrics_log.MetricsLog] = {}

  def Run(self, once: bool = False) -> int:
    """Does the job for one checkpoint, or for each new one until training ends.

    Args:
      once: for the last one alone; so it is for one that was chosen.

    Returns:
      The exit status: 1 where nobody trains any more and the training has not ended.

    Raises:
      ValueError: there is no checkpoint and will be none, or the run has other Params.
      DamagedError: the chosen checkpoint, or any, cannot be read. One that follows leaves them out,
        and raises it where training has ended with no other.
    """
    self._prints = self._chosen is not None or once
    if not self._prints:
      self._Describe()
      return self._Follow()
    found = self._chosen or self._Begun() or checkpoint_choice.Find(self._checkpointer)
    self._Describe()
    if self._chosen is not None:
      self._Restore(found)
    else:
      while not self._RestoreIfThere(found):
        found = checkpoint_choice.Find(self._checkpointer)
    self._RunJobs(found.step)
    return self._stop.exit_status

  def _Begun(self) -> checkpointer.CheckpointInfo | None:
    """The checkpoint with which a process before this one began; None where it is gone."""
    there = self._checkpointer.All()
    return next((info for info in there if info.step == self._progress.step), None)

  def _Follow(self) -> int:
    """Each new checkpoint until training ends; returns the exit status."""
    # Of several tasks the most patient one decides.
    limits = [task.eval.max_seconds_without_trainer for task in self._tasks]
    patience = max(limits) if all(limits) else 0.0
    watch = logdir_lock.Watch(self._checkpointer.directory)
    done, saved = self._progress.finished, math.inf  # The last step evaluated; when it was saved.
    pause = 1.0
    # Where training ends the trainer says, whose max_steps may be another one than here.
    while self._stop.signal is None:
      # Asked before the checkpoints: when training has ended, all that it saved is there.
      finished = run_report.FinishedStep(self._logdir)
      try:
        found = self._RestoreNewer(done, saved)
      except OSError as e:  # The directory may be out of reach for a while.
        logging.warning('%s; trying again', files.OneLine(e))
        finished = found = None
      if found is not None:
        self._RunJobs(found.step)
        done, saved, pause = found.step, found.time, 1.0
        watch = logdir_lock.Watch(self._checkpointer.directory)
        continue
      free = watch.SecondsFree()
      # While somebody trains, it is the end of an earlier call.
      if finished is not None and free > 0.0:
        self._CheckEnd(done, finished)
        break
      if 0 < patience <= free:
        print(self._WhyGiveUp(done, free), file=sys.stderr)
        return 1
      _Wait(min(pause, patience - free) if patience else pause, self._stop)
      pause = min(2 * pause, 30.0)
    return self._stop.exit_status

  def _RestoreNewer(self, done: int, saved: float) -> checkpointer.CheckpointInfo | None:
    """Restores the newest checkpoint, as `_NewerThan` has it, and says what was passed over."""
    while (found := self._NewerThan(done, saved)) is not None:
      passed_over = self._PassedOver(done, found.step)  # Asked while they are there.
      if self._RestoreIfThere(found):
        if passed_over:
          logging.info('%s', passed_over)
        return found
    return None

  def _NewerThan(self, done: int, saved: float) -> checkpointer.CheckpointInfo | None:
    """The newest checkpoint that can be read, if it is none of up to the step `done`; else None.

    Where a run went back, or another one began in its place, it has an earlier step, but was saved
    after `saved`.
    """
    try:
      found = self._checkpointer.Latest()
    except checkpointer.DamagedError:  # Named in the log; the next one may be whole.
      return None
    if found is None or found.step == done:
      return None
    return found if found.step > done or found.time > saved else None

  def _PassedOver(self, done: int, taken: int) -> str:
    """Says which checkpoints came between two that are evaluated; '' where none is there."""
    there = self._checkpointer.All()
    between = [
      f'step {info.step}'
      for info in there
      if done < info.step < taken and not self._checkpointer.IsKnownDamaged(info)
    ]
    if not between:
      return ''
    are_removed = done >= 0 and done not in [info.step for info in there]
    return (
      f'{self._jobnames} passed over the checkpoints of {", ".join(between)}'
      f'{", and perhaps others that are removed by now" if are_removed else ""}: the newer one of '
      f'step {taken} was there'
    )

  def _RestoreIfThere(self, info: checkpointer.CheckpointInfo) -> bool:
    """`_Restore`; False where it was removed meanwhile, or is damaged: there may be another."""
    try:
      self._Restore(info)
      return True
    except checkpointer.DamagedError:
      return False

  def _Restore(self, info: checkpointer.CheckpointInfo) -> None:
    self._CheckParams(info)
    # Slots and learner state are the trainer's alone.
    num_averages = ema.Restore(self._checkpointer, info, self._runner.Variables())
    self._runner.AfterRestore()
    self._Say(num_averages)

  def _RunJobs(self, step: int) -> None:
    """Does the jobs for the checkpoint that was restored, or what is not done of them."""
    parts = [(job, part) for job in self._jobs for part in (self._Result, self._Sample)]
    for job, part in self._progress.Undone(step, parts):
      try:
        is_done = part(step, job)
      except Exception as e:
        e.add_note(f'in {job.jobname} of the checkpoint of step {step}')
        raise
      if not is_done:
        return

  def _Describe(self) -> None:
    """Prints what was found and chosen."""
    print(f'{self._params.model or self._params.name} on {self._cluster.Describe()}')
    for name, one in self._runner.task_runners.items():
      print(f'task {name}: {one.Precision()}' if name else one.Precision())
    print(f'data: {"; ".join(job.Describe() for job in self._jobs)}', flush=True)

  def _CheckParams(self, info: checkpointer.CheckpointInfo) -> None:
    """Raises ValueError where the checkpoint has other Params; each may have new ones."""
    self._checked = params_change.CheckEvaluated(
      info, self._params, self._allow_params_change, self._checked
    )

  def _Say(self, num_averages: int) -> None:
    """Prints which kind of weights is taken, where it is another one than before."""
    said = f'{self._jobnames} {"takes" if len(self._jobs) == 1 else "take"} the '
    said += ema.DescribeWeights(num_averages)
    if bool(num_averages) != any(task.train.ema_decay for task in self._tasks):
      said += ', as they were saved: train.ema_decay here is not that of the run'
    if said != self._said:
      print(said, flush=True)
      self._said = said

  def _CheckEnd(self, done: int, finished: int) -> None:
    """Says where the last checkpoint of a training that has ended was not to be had."""
    if done < 0:
      self._checkpointer.Latest()  # Raises where there are some, and none can be read.
      raise ValueError(
        f'training ended after step {finished}, but there is no checkpoint in '
        f'{self._checkpointer.directory}'
      )
    if done < finished:
      logging.warning(
        'training ended after step %d, but its last checkpoint cannot be read or is gone: the one '
        'before it, of step %d, was the last for %s',
        finished, done, self._jobnames,
      )  # fmt: skip

  def _WhyGiveUp(self, done: int, seconds: float) -> str:
    after = (
      f'after the checkpoint of step {done}'
      if done >= 0
      else 'and there is no checkpoint that can be read'
    )
    return (
      f'nobody has trained in {self._logdir!r} for {seconds:.0f} s, {after}, and no report there '
      'says that training has ended: see what the trainer said, call it again to go on, and then '
      'this evaluator. eval.max_seconds_without_trainer says how long it waits'
    )

  @property
  def _tasks(self) -> list[Any]:
    """The Params of the tasks that are evaluated."""
    return [one.task.params for one in self._runner.task_runners.values()]

  @property
  def _jobnames(self) -> str:
    return ' and '.join(job.jobname for job in self._jobs)

  def _Result(self, step: int, job: dataset_pass.DatasetPass) -> bool:
    """Has the result, if not asked to stop before, and adds it to the job's own metrics.jsonl."""
    values = job.Run(step)
    if values is None:
      return False
    if job.jobname not in self._logs:  # That of the logdir belongs to the trainer.
      path = os.path.join(self._logdir, job.jobname, 'metrics.jsonl')
      self._logs[job.jobname] = metrics_log.MetricsLog(path)
    self._logs[job.jobname].Write(step, job.jobname, values)
    return True

  def _Sample(self, step: int, job: dataset_pass.DatasetPass) -> bool:
    job.WriteSample(step)
    if self._prints:
      job.PrintSample()
    return True


def _Wait(seconds: float, stop: stop_request.StopRequest) -> None:
  heartbeat.SuspendTimeout()
  end = time.monotonic() + seconds
  while stop.signal is None and time.monotonic() < end:
    time.sleep(0.1)
