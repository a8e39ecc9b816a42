# SPDX-License-Identifier: Apache-2.0
"""`TrainProgram`: trains a model in a log directory; also what every program leaves there.

<logdir>/params.txt            the model's Params as text
<logdir>/model_analysis.txt    every weight, and the stage table
<logdir>/assets/               files that the input needs, such as its vocabulary
<logdir>/train/                checkpoints and TensorBoard events of training, and trainer.lock
<logdir>/eval_<dataset>/       TensorBoard events and score-<step>.txt of evaluations
<logdir>/decode_<dataset>/     the same, and decode-<step>.jsonl, of decoding
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from lingvo_gpipe import (
  assets,
  background_saver,
  checkpointer,
  cluster,
  evaluation,
  hyperparams,
  inspection,
  logdir_lock,
  measured_cut,
  nested_map,
  params_change,
  progress,
  runner,
  stop_request,
  summaries,
)
from lingvo_gpipe import model as model_lib

# Statistics of a step that the progress line does not show beside the task's metrics.
_STATISTICS = ('learning_rate', 'grad_norm', 'grad_scale', 'is_finite', 'loss_weight')

InputParams = Callable[[str], hyperparams.InstantiableParams]


class _NotFinite(Exception):
  """A step was not finite; its text says why."""


class TrainProgram:
  """Trains a model in a log directory, from its last checkpoint on if there is one."""

  def __init__(
    self,
    params: hyperparams.InstantiableParams,
    logdir: str,
    devices: cluster.Cluster,
    input_params: InputParams,
    stop: stop_request.StopRequest,
    *,
    check_numerics: bool = False,
    allow_params_change: bool = False,
    lock: logdir_lock.Lock | None = None,
  ) -> None:
    """Checks that the log directory can be written; makes the model's weights on their devices.

    Args:
      params: the model's Params, input included.
      logdir: the log directory.
      devices: the devices to use.
      input_params: the Params of the input of a data set, by its name.
      stop: asked after each step.
      check_numerics: stop at the first step whose loss or gradients are not finite, and say which
        layer is to blame.
      allow_params_change: go on with a run whose Params were others (see `params_change`).
      lock: of <logdir>/train; asked before each checkpoint whether it still holds.

    Raises:
      OSError: the log directory cannot be written.
      ValueError: check_numerics with a learner that applies gradients that are not finite, or a run
        with other Params.
      LookupError: an unknown data set in `task.train.eval_datasets`.
    """
    train = params.task.train
    if check_numerics and not train.learner.skip_nonfinite:
      raise ValueError(
        'check_numerics repeats a bad step, for which its weights must be as before it: set '
        'task.train.learner.skip_nonfinite to True'
      )
    self._check_numerics = check_numerics
    self._checkpointer = checkpointer.Checkpointer(
      os.path.join(logdir, 'train'),
      max_to_keep=train.save_max_to_keep,
      keep_every_n_hours=train.save_keep_checkpoint_every_n_hours or None,
    )
    self._checkpointer.CheckWritable()
    if self._checkpointer.All():
      params_change.Check(logdir, params, allow_params_change)
    self._saver = background_saver.BackgroundSaver(
      self._checkpointer, in_background=train.save_async, lock=lock
    )
    self._params = params
    self._logdir = logdir
    self._cluster = devices
    self._stop = stop
    self._model = model_lib.SingleTaskModel(params)
    self._train = self._model.task.params.train
    self._input = self._model.input
    self._runner = runner.TaskRunner(
      self._model.task,
      devices.devices,
      self._input.BatchSpec(),
      splits=measured_cut.Find(self._checkpointer, self._model.task),
    )
    self._runner.ExpectBatches(self._input.BatchSpecs())
    # Made now, for a mistake in their Params to show before the training and not after it.
    self._evaluations = [
      evaluation.Evaluation(self._runner, input_params(name), name, logdir, stop)
      for name in train.eval_datasets
    ]

  def Run(self) -> int:
    """Trains to the end, or until asked to stop; returns the exit status."""
    print(f'{self._params.model or self._params.name} on {self._cluster.Describe()}')
    print(self._runner.plan.Table(self._cluster.devices), flush=True)
    self._input.Fingerprint()  # Reads the data before the first step, with its own errors.
    consumed = self._Restore()
    assets.Keep(self._logdir, self._input.Assets(), is_resumed=consumed > 0)
    # Not before: where the checkpoint is another model's, its description stays.
    inspection.WriteDescription(self._logdir, self._params, self._runner)
    try:
      self._Loop(consumed)
    except _NotFinite as e:
      print(e, file=sys.stderr)
      return 1
    for one in self._evaluations:
      if self._stop.signal is None and one.Run(int(self._runner.global_step)) is not None:
        one.PrintSample()
    return self._stop.exit_status

  def _Restore(self) -> int:
    """Restores the last checkpoint; returns how many examples were consumed before."""
    found = self._checkpointer.RestoreLatest(self._runner.Variables())
    if found is None:
      print(f'starting a new run in {self._logdir}', flush=True)
      return 0
    info, saved = found
    self._runner.AfterRestore()
    consumed = int(saved['examples_consumed'])
    print(f'going on from step {info.step} ({consumed:,} examples consumed) in {self._logdir}')
    for key, now in self._Circumstances().items():
      if saved.get(key) != now:
        logging.warning('%s was %s at the checkpoint and is %s now', key, saved.get(key), now)
    return consumed

  def _Loop(self, consumed: int) -> None:
    """The training loop, to its end or until asked to stop."""
    step = int(self._runner.global_step)
    max_steps = self._train.max_steps
    if step >= max_steps:
      print(f'step {step} is at or behind max_steps {max_steps}: nothing left to train')
      return
    shapes = len(self._input.BatchSpecs())
    first = 'the first step' if shapes == 1 else f'the first step of each of {shapes} shapes'
    print(f'training to step {max_steps}; {first} compiles the stages', flush=True)
    shown = progress.Progress(step, max_steps, self._model.task.loss_unit)
    writer = summaries.SummaryWriter(os.path.join(self._logdir, 'train'))
    saved_step, saved_time = step, time.monotonic()
    batches: list[nested_map.NestedMap] = []  # Of the update under way.
    first_step, start = step + 1, time.monotonic()
    try:
      for batch in self._input.Dataset(start=consumed):
        values = self._runner.TrainStep(batch)
        batches.append(batch)
        if values is None:
          continue
        step += 1
        self._saver.Check()
        if step == first_step:
          trace = self._runner.trace_seconds
          rest = time.monotonic() - start - trace
          shown.Print(f'traced in {trace:.1f} s; compiled and ran the first step in {rest:.1f} s')
        if self._check_numerics and not (values['is_finite'] and math.isfinite(values['loss'])):
          raise _NotFinite(f'step {step} is not finite: {self._runner.WhyNotFinite(*batches)}')
        consumed += sum(evaluation.NumRows(b) for b in batches)
        batches = []
        shown.Update(step, _Metrics(values), values['loss_weight'])
        if not values['is_finite']:
          shown.Print(f'step {step}: a gradient is not finite; the update was skipped')
        is_last = step >= max_steps or self._stop.signal is not None
        if is_last or step % self._train.summary_interval_steps == 0:
          writer.Scalars(step, {**values, f'{self._model.task.loss_unit}_per_second': shown.rate})
        if is_last or self._IsSaveDue(step - saved_step, time.monotonic() - saved_time):
          self._Save(step, consumed)
          writer.Flush()
          saved_step, saved_time = step, time.monotonic()
        if is_last:
          break
      if step > saved_step:
        self._Save(step, consumed)  # The data ended before max_steps.
      self._saver.Wait()
    finally:
      self._saver.Close()
      shown.Close()
      writer.Close()
    if report := self._saver.Report():
      print(report)
    if batches:
      print(
        f'the data ended within an update of {self._train.learner.num_accumulated_mini_batches} '
        f'mini-batches: its first {len(batches)} changed nothing'
      )
    if step < max_steps or self._stop.signal is not None:
      why = self._stop.name or 'the end of the data'
      print(f'stopped by {why} after step {step}; the checkpoint is saved', flush=True)

  def _IsSaveDue(self, steps: int, seconds: float) -> bool:
    p = self._train
    by_steps = p.save_interval_steps > 0 and steps >= p.save_interval_steps
    return by_steps or (p.save_interval_seconds > 0 and seconds >= p.save_interval_seconds)

  def _Save(self, step: int, consumed: int) -> None:
    metadata = {'examples_consumed': consumed, **self._Circumstances()}
    self._saver.Save(step, self._runner.Variables(), metadata)

  def _Circumstances(self) -> dict[str, Any]:
    """What a bit-equal continuation depends on beside the weights (design 4.15)."""
    return {
      'model': self._params.model,
      'data': self._input.Fingerprint(),
      'random_seed': self._model.task.params.random_seed,
      'cut': list(self._runner.plan.ends),
      'num_micro_batches': self._runner.plan.num_micro_batches,
      'num_accumulated_mini_batches': self._train.learner.num_accumulated_mini_batches,
      **self._PipelineCircumstances(),
      'intra_op_threads': tf.config.threading.get_intra_op_parallelism_threads(),
      'tensorflow': tf.__version__,
    }

  def _PipelineCircumstances(self) -> dict[str, Any]:
    if self._model.task.pipeline is None:
      return {}
    return measured_cut.PipelineSettings(self._model.task.pipeline.params)


def _Metrics(values: Mapping[str, float]) -> dict[str, float]:
  return {name: value for name, value in values.items() if name not in _STATISTICS}
