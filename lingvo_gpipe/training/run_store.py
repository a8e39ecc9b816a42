# SPDX-License-Identifier: Apache-2.0
"""`RunStore`: everything of a run that its checkpoints hold, saved and restored as one."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from lingvo_gpipe.checkpoint import (
  background_saver,
  checkpointer,
  logdir_lock,
  params_change,
  warm_start,
)
from lingvo_gpipe.core import hyperparams
from lingvo_gpipe.distributed import cluster
from lingvo_gpipe.evaluation import pass_schedule
from lingvo_gpipe.experiment import model as model_lib
from lingvo_gpipe.input import batches
from lingvo_gpipe.learning import early_stopping
from lingvo_gpipe.runners import multi_task_runner
from lingvo_gpipe.training import callback, run_state, stream_states


class RunStore(callback.StepHook):
  """Restores a run, and saves it when a checkpoint is due.

  Attributes:
    checkpointer: the checkpoints in <logdir>/train.
    counts: numbers of the run that a checkpoint stores alongside its step.
    streams: positions of the input streams.
    is_saved: whether the last save wrote a checkpoint; it writes none if weights are not finite.
    flush: called at each save, for logs that must survive a kill as the checkpoint does.
  """

  streams: stream_states.StreamStates

  def __init__(
    self,
    logdir: str,
    params: hyperparams.InstantiableParams,
    devices: cluster.Cluster,
    *,
    allow_params_change: bool = False,
    lock: logdir_lock.Lock | None = None,
  ) -> None:
    """Checks that the directory can be written and that the last checkpoint has these Params.

    Args:
      logdir: the log directory.
      params: Params of the experiment, which checkpoints store.
      devices: devices of the run.
      allow_params_change: resume from a checkpoint with different Params (see `params_change`).
      lock: lock of <logdir>/train; it must still be held at each save.

    Raises:
      OSError: the directory cannot be written.
      ValueError: the run has different Params.
    """
    self._logdir = logdir
    self._params = params
    self._devices = devices
    self._allow_params_change = allow_params_change
    self._train = model_lib.FindTrainParams(params)
    self.checkpointer = checkpointer.Checkpointer(
      os.path.join(logdir, 'train'),
      max_to_keep=self._train.save_max_to_keep,
      keep_every_n_hours=self._train.save_keep_checkpoint_every_n_hours or None,
    )
    self.checkpointer.CheckWritable()
    self.checkpointer.LetWorkersWrite(devices.devices)
    self._checked: checkpointer.CheckpointInfo | None = None  # Its Params were compared.
    if infos := self.checkpointer.All():
      self._CheckParams(infos[-1])
    self._saver = background_saver.BackgroundSaver(
      self.checkpointer, in_background=self._train.save_async, lock=lock
    )
    self.counts = run_state.Counts()
    self.is_saved = True
    self.flush: Callable[[], None] = lambda: None
    self._seconds_before = 0.0  # Training time before this call.

  def Attach(
    self,
    model: model_lib.BaseModel,
    runner: multi_task_runner.TrainingRunner,
    early_stop: early_stopping.EarlyStopping,
    passes: pass_schedule.DatasetPasses,
  ) -> None:
    """Sets the parts of the run to save and restore.

    Args:
      model: the model with its inputs.
      runner: owner of the weights, slots and the step.
      early_stop: knows the best step, whose checkpoint is protected.
      passes: the evaluations and decodings.
    """
    self._model = model
    self._runner = runner
    self._early_stop = early_stop
    self._passes = passes
    self._saved_passes = passes.State()
    self.streams = stream_states.StreamStates(model.inputs, runner.task_runners)

  def Restore(self) -> None:
    """Restores the last checkpoint. A new run may load weights of other runs instead."""
    restored = self.checkpointer.RestoreLatest(
      {**self._runner.Variables(), **self.streams.Variables()}
    )
    if restored is None:
      print(f'starting a new run in {self._logdir}', flush=True)
      self._WarmStart(self._train.init_from_checkpoint_rules)
    else:
      self._AfterRestore(*restored)
    self._start = time.monotonic()

  def _WarmStart(self, rules: Mapping[str, Any]) -> None:
    if rules:
      paths = {p: v for t in self._model.tasks.values() for p, v in t.VariablesByPath().items()}
      print('\n'.join(warm_start.Load(rules, self._model.ByCheckpointName(paths))), flush=True)
      self._runner.BeginAtWeights()

  def _AfterRestore(self, info: checkpointer.CheckpointInfo, metadata: dict[str, Any]) -> None:
    if info != self._checked:  # A newer checkpoint is damaged.
      self._CheckParams(info)
    self._runner.AfterRestore()
    self.streams.AfterRestore(info.path)
    self.counts = run_state.Counts.FromMetadata(metadata)
    self._seconds_before = self.counts.train_seconds
    self._early_stop.Restore(metadata.get('early_stop', {}))
    self._passes.Restore(metadata.get('passes', {}))
    self._saved_passes = self._passes.State()
    consumed = self.counts.examples_consumed
    print(f'resuming from step {info.step} ({consumed:,} examples consumed) in {self._logdir}')
    run_state.LogChanges(metadata, self._Circumstances())

  def TrainSeconds(self) -> float:
    """Returns the training time of the run so far, over all calls of the trainer."""
    return self._seconds_before + time.monotonic() - self._start

  def BeforeBatch(self, batch: batches.AnyBatch) -> None:
    """Waits for a save in progress if the batch needs new functions on workers."""
    # Checked only with workers, because the check takes time in each step.
    if self.checkpointer.workers and not self._runner.IsTraced(batch):
      self._saver.BeforeNewFunctions()

  def BeforeNewFunctions(self) -> None:
    """Waits for a save in progress if workers write it: they must get no functions meanwhile."""
    self._saver.BeforeNewFunctions()

  def Begin(self, step: int) -> None:
    """Starts the intervals between checkpoints."""
    self._saved_step, self._saved_time = step, time.monotonic()

  def AfterStep(self, step: callback.Step) -> None:
    """Saves if a checkpoint is due; `AtEnd` saves after the last step."""
    self._saver.Check()
    if step.end_reason is None and (step.needs_save or self._IsSaveDue(step.number)):
      self._SaveAndFlush(step)

  def AtEnd(self, step: callback.Step) -> None:
    """Saves the steps since the last checkpoint, and waits until it is written."""
    if step.needs_save or step.number > self._saved_step:
      self._SaveAndFlush(step)
    self._saver.Wait()

  def Close(self) -> None:
    """Waits for a save in progress; a failure of it is logged."""
    self._saver.Close()

  def Save(self, step: callback.Step) -> None:
    """Writes a checkpoint of the state after a step, and returns when it is committed."""
    self._StartSave(step)
    self._saver.Wait()

  def HasNewResults(self) -> bool:
    """Whether data sets were evaluated or decoded since the last save."""
    return self._passes.State() != self._saved_passes

  def Report(self) -> str | None:
    """Returns a line about the cost of all saves, or None if there were none."""
    return self._saver.Report()

  def _StartSave(self, step: callback.Step) -> None:
    """Copies the state after a step; a thread writes it. The best checkpoint so far stays."""
    step.needs_save = False
    self.counts.train_seconds = self.TrainSeconds()
    self._saved_passes = self._passes.State()
    metadata = {
      **dataclasses.asdict(self.counts),
      'early_stop': self._early_stop.State(),
      'passes': self._saved_passes,
      params_change.KEY: self._params.ToText(),
      **self._Circumstances(),
    }
    with self._saver.Blocking():
      streams = self.streams.Now()
    best_step = self._early_stop.best_step
    self.is_saved = self._saver.Save(
      step.number,
      {**self._runner.Variables(), **streams},
      metadata,
      trained=self._runner.TrainedNames(),
      protected=[] if best_step is None else [best_step],
    )

  def _SaveAndFlush(self, step: callback.Step) -> None:
    self._StartSave(step)
    self.flush()
    self._saved_step, self._saved_time = step.number, time.monotonic()

  def _IsSaveDue(self, step: int) -> bool:
    steps, seconds = self._train.save_interval_steps, self._train.save_interval_seconds
    by_steps = steps > 0 and step - self._saved_step >= steps
    return by_steps or (seconds > 0 and time.monotonic() - self._saved_time >= seconds)

  def _CheckParams(self, info: checkpointer.CheckpointInfo) -> None:
    params_change.Check(info, self._params, self._allow_params_change)
    self._checked = info

  def _Circumstances(self) -> dict[str, Any]:
    return run_state.Circumstances(self._model, self._runner, self._devices)
