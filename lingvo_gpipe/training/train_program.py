# SPDX-License-Identifier: Apache-2.0
"""`TrainProgram`: trains a model in a log directory; also what every program leaves there.

<logdir>/params.txt            the Params of the last call of the trainer; a checkpoint has its own
<logdir>/model_analysis.txt    every weight, and the stage table
<logdir>/metrics.jsonl         what training and its evaluations measured, a line each
<logdir>/report.txt, .json     what came of the last call of the trainer
<logdir>/assets/               files that the input needs, such as its vocabulary
<logdir>/timeline_<a>_<b>.html  a picture of the schedule in the steps that were profiled
<logdir>/train/                checkpoints and TensorBoard events of training, and trainer.lock
<logdir>/eval_<dataset>/       TensorBoard events and score-<step>.txt of evaluations
<logdir>/decode_<dataset>/     the same, and decode-<step>.jsonl, of decoding

Of a model of several tasks the names of evaluations end with that of the task, and so do those of
pictures, metrics, and what a checkpoint tells beside the weights.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging

from lingvo_gpipe.checkpoint import (
  assets,
  background_saver,
  checkpointer,
  logdir_lock,
  params_change,
  warm_start,
)
from lingvo_gpipe.core import hyperparams
from lingvo_gpipe.distributed import cluster, stop_request
from lingvo_gpipe.evaluation import pass_schedule
from lingvo_gpipe.experiment import model as model_lib
from lingvo_gpipe.input import batches as input_batches
from lingvo_gpipe.learning import multi_learner, nonfinite_steps
from lingvo_gpipe.reporting import metrics_log, progress, run_report
from lingvo_gpipe.runners import failure_notes, multi_task_runner, task_batches
from lingvo_gpipe.training import inspection, run_state, step_output, step_profiler, stream_states

# What the trainer can do: train_and_eval evaluates and decodes between steps, too.
JOBS = ('train', 'train_and_eval')

InputParams = Callable[[str], hyperparams.InstantiableParams]


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
    job: str = 'train',
    check_numerics: bool = False,
    allow_params_change: bool = False,
    lock: logdir_lock.Lock | None = None,
    profile_steps: tuple[int, int] | None = None,
    failures: Mapping[str, int] | None = None,
    own_params: hyperparams.InstantiableParams | None = None,
  ) -> None:
    """Checks that the log directory can be written; makes the model's weights on their devices.

    Args:
      params: the model's Params, input included.
      logdir: the log directory.
      devices: the devices to use.
      input_params: the Params of the input of a data set, by its name.
      stop: asked after each step.
      job: one of `JOBS`.
      check_numerics: stop at the first step whose loss or gradients are not finite, and say which
        layer is to blame.
      allow_params_change: go on from a checkpoint whose Params were others (see `params_change`).
      lock: of <logdir>/train; asked before each checkpoint whether it still holds.
      profile_steps: the first and the last step to profile (see `step_profiler`).
      failures: how often training failed before in this call, by kind (see `supervisor`).
      own_params: the experiment's Params, where `params` has another cut for fewer devices: what
        the log directory and checkpoints tell.

    Raises:
      OSError: the log directory cannot be written.
      ValueError: check_numerics with a learner that applies gradients that are not finite; a run
        with other Params; or a mistake in the Params of evaluations, early stopping or warm start.
      LookupError: an unknown data set in `task.train.eval_datasets` or `decode_datasets`.
    """
    train = model_lib.FindTrainParams(params)
    learner_params = {
      f'{path}.train.learner': task.train.learner
      for path, task in model_lib.FindTaskParams(params).items()
    }
    self._nonfinite = nonfinite_steps.NonFiniteSteps(
      train.max_nonfinite_steps, learner_params, check_numerics=check_numerics
    )
    self._checkpointer = checkpointer.Checkpointer(
      os.path.join(logdir, 'train'),
      max_to_keep=train.save_max_to_keep,
      keep_every_n_hours=train.save_keep_checkpoint_every_n_hours or None,
    )
    self._checkpointer.CheckWritable()
    self._checkpointer.LetWorkersWrite(devices.devices)
    self._params = params if own_params is None else own_params
    self._allow_params_change = allow_params_change
    self._checked: checkpointer.CheckpointInfo | None = None  # Its Params were compared.
    if saved := self._checkpointer.All():
      self._CheckParams(saved[-1])
    self._saver = background_saver.BackgroundSaver(
      self._checkpointer, in_background=train.save_async, lock=lock
    )
    self._logdir = logdir
    self._cluster = devices
    self._stop = stop
    self._failures = dict(failures or {})
    self._model: model_lib.BaseModel = params.Instantiate()
    self._train = model_lib.FindTrainParams(self._model.params)
    self._early_stop = self._train.early_stop.Instantiate()
    warm_start.Check(self._train.init_from_checkpoint_rules)
    # Reads the data, with errors of its own, before there are weights to fill the memory.
    for name in self._model.active_tasks:
      if name in self._model.inputs:
        self._model.inputs[name].Fingerprint()
    self._runner = multi_task_runner.Make(
      self._model, devices.devices, self._checkpointer, num_replicas=devices.num_replicas
    )
    self._profiler = step_profiler.StepProfiler(
      profile_steps, logdir, self._runner.task_runners, self._model.TaskAtStep, devices.workers
    )
    # Of the tasks that are trained.
    self._inputs = {name: self._model.inputs[name] for name in self._runner.task_runners}
    self._streams = stream_states.StreamStates(self._model.inputs, self._inputs)
    # Made now, for a mistake in their Params to show before the training and not after it.
    self._passes = pass_schedule.DatasetPasses(
      self._runner,
      input_params,
      logdir,
      stop,
      during_training=job == 'train_and_eval',
      clock=self._TrainSeconds,
    )
    self._passes.CheckFollowed(self._early_stop)
    self._saved_passes: dict[str, Any] = {}  # Their state in the last checkpoint.
    self._counts = run_state.Counts()
    self._values: dict[str, float] = {}  # Of the last step.
    self._batches: list[input_batches.AnyBatch] = []  # Of the update under way.
    self._is_saved = True  # The last checkpoint; not where weights were not finite.

  def Run(self) -> int:
    """Trains to the end, or until asked to stop; returns the exit status."""
    self._Describe()
    for source in self._inputs.values():
      source.CheckRestarts()
    self._Restore()
    files = {path: None for source in self._inputs.values() for path in source.Assets()}
    assets.Keep(self._logdir, list(files), is_resumed=self._counts.examples_consumed > 0)
    # An evaluator started with this call is not to take the last one's end for its own.
    run_report.Remove(self._logdir)
    # Not before: where the checkpoint is another model's, its description stays.
    plans = {name: one.cut for name, one in self._runner.task_runners.items()}
    inspection.WriteDescription(self._logdir, self._params, self._model, plans)
    self._first_step, self._start = self._step + 1, time.monotonic()
    self._seconds_before = self._counts.train_seconds
    self._log = metrics_log.MetricsLog(_MetricsPath(self._logdir), self._step)
    try:
      ended = self._Loop()
      if self._stop.signal is None:
        self._EndPasses()
    except nonfinite_steps.NotFiniteError as e:
      failure_notes.AddNotes(e, self._step, self._checkpointer)
      print(e, *e.__notes__, sep='\n', file=sys.stderr)
      return 1
    except Exception as e:
      failure_notes.AddNotes(e, self._step, self._checkpointer)
      raise
    finally:
      self._log.Close()
      self._passes.Close()
    self._Report(ended)
    return self._stop.exit_status or int(not self._is_saved)

  @property
  def _step(self) -> int:
    return int(self._runner.global_step)

  def _Describe(self) -> None:
    """Prints what was found and chosen."""
    print(f'{self._params.model or self._params.name} on {self._cluster.Describe()}')
    for name, one in self._runner.task_runners.items():
      if name:
        print(f'task {name}:')
      print(one.cut.Table(self._cluster.devices))
      print(one.Precision())
    train = [
      f'{model_lib.TaskDirectory("Train", name)} {source.Describe()}'
      for name, source in self._inputs.items()
    ]
    print(f'data: {"; ".join([*train, *self._passes.Describe()])}', flush=True)
    followed = self._early_stop.params
    if followed.metric and not self._passes.during_training:
      print(
        f'early stopping by {followed.jobname} {followed.metric} needs --job=train_and_eval: this '
        'job does not end by it',
        flush=True,
      )

  def _CheckParams(self, info: checkpointer.CheckpointInfo) -> None:
    params_change.Check(info, self._params, self._allow_params_change)
    self._checked = info

  def _Restore(self) -> None:
    """Restores the last checkpoint; a new run may take over weights of other runs."""
    found = self._checkpointer.RestoreLatest(
      {**self._runner.Variables(), **self._streams.Variables()}
    )
    if found is None:
      print(f'starting a new run in {self._logdir}', flush=True)
      rules = self._train.init_from_checkpoint_rules
      if rules:
        paths = {p: v for t in self._model.tasks.values() for p, v in t.VariablesByPath().items()}
        print('\n'.join(warm_start.Load(rules, self._model.ByCheckpointName(paths))), flush=True)
        self._runner.BeginAtWeights()
      return
    info, saved = found
    if info != self._checked:  # A newer one is damaged.
      self._CheckParams(info)
    self._runner.AfterRestore()
    self._streams.AfterRestore(info.path)
    self._counts = run_state.Counts.Of(saved)
    self._nonfinite.in_a_row = self._counts.nonfinite_in_a_row
    self._early_stop.Restore(saved.get('early_stop', {}))
    self._passes.Restore(saved.get('passes', {}))
    self._saved_passes = self._passes.State()
    consumed = self._counts.examples_consumed
    print(f'resuming from step {info.step} ({consumed:,} examples consumed) in {self._logdir}')
    run_state.LogChanges(saved, self._Circumstances())

  def _Loop(self) -> str:
    """The training loop, to its end or until asked to stop; returns why it ended."""
    step, max_steps = self._step, self._train.max_steps
    # A stop between the last step and its evaluation left that to this call.
    if self._RunPasses(step, at_end=False):
      self._Save(step)
      self._saver.Wait()
    ended = self._WhyEnd(step)
    if self._stop.signal is not None:
      print(f'stopped by {ended} before a step was done', flush=True)
      return ended
    if ended:
      print(f'step {step} of {max_steps}: nothing left to train ({ended})')
      return ended
    self._profiler.Begin(step, print)
    shapes = sum(len(source.BatchSpecs()) for source in self._inputs.values())
    first = 'the first step' if shapes == 1 else f'the first step of each of {shapes} shapes'
    print(f'training to step {max_steps}; {first} compiles the stages', flush=True)
    output = step_output.StepOutput(
      self._runner,
      self._logdir,
      self._log,
      max_steps,
      seconds_left=(self._train.max_seconds or math.inf) - self._counts.train_seconds,
    )
    try:
      ended = self._TrainSteps(output)
      self._saver.Wait()
    finally:
      self._saver.Close()
      output.Close()
      self._profiler.Close(print)
    step = self._step
    if report := self._saver.Report():
      print(report)
    if self._batches:
      print(
        f'the data ended within an update of {self._NumAccumulated(step)} '
        f'mini-batches: its first {len(self._batches)} changed nothing'
      )
    ended = self._stop.name or ended  # A signal may have come while the last step was saved.
    if step < max_steps or self._stop.signal is not None or not self._is_saved:
      said = 'the checkpoint is saved' if self._is_saved else 'there is no checkpoint of it'
      print(f'stopped by {ended} after step {step}; {said}', flush=True)
    return ended

  def _TrainSteps(self, output: step_output.StepOutput) -> str:
    """Trains, with what comes between steps, until something ends it; returns what."""
    step = saved_step = self._step
    saved_time = time.monotonic()
    interval = self._train.histogram_interval_steps
    for batch in task_batches.Batches(
      self._model, step, self._counts.Position, self._runner, self._streams.iterators
    ):
      if not self._TrainStep(step + 1, batch, output):
        continue
      step += 1
      if interval and step % interval == 0:
        output.WriteHistograms(step)
      ended = self._WhyEnd(step)
      is_best = self._PassesAfter(step, output.progress, at_end=bool(ended))
      if not ended and (ended := self._WhyEnd(step)):
        # Those that were not due.
        is_best |= self._PassesAfter(step, output.progress, at_end=True)
      if ended or step % self._train.summary_interval_steps == 0:
        output.WriteScalars(step)
      if ended or is_best or self._IsSaveDue(step - saved_step, time.monotonic() - saved_time):
        self._Save(step)
        output.Flush()
        saved_step, saved_time = step, time.monotonic()
      if ended:
        return ended
    ended = self._stop.name or 'the end of the data'
    output.WriteScalars(step)
    if self._PassesAfter(step, output.progress, at_end=True) or step > saved_step:
      self._Save(step)
    return ended

  def _TrainStep(
    self, step: int, batch: input_batches.AnyBatch, output: step_output.StepOutput
  ) -> bool:
    """Trains on one more batch of the step of that number; returns whether it was the last one."""
    # On workers alone: to ask costs something in each step.
    if self._checkpointer.workers and not self._runner.IsTraced(batch):
      self._saver.BeforeNewFunctions()
    with self._profiler.Step(step):
      values = self._runner.TrainStep(batch)
    self._batches.append(batch)
    if values is None:
      return False
    self._saver.Check()
    say = output.progress.Print
    self._profiler.After(step, say)
    if step == self._first_step:
      trace = self._runner.trace_seconds
      rest = time.monotonic() - self._start - trace
      say(f'traced in {trace:.1f} s; compiled and ran the first step in {rest:.1f} s')
    name = self._model.TaskAtStep(step - 1)
    num_rows = sum(map(input_batches.NumRows, self._batches))
    shares = itertools.chain(*map(self._runner.task_runners[name].Shares, self._batches))
    source = self._inputs[name]
    num_read = num_rows - sum(map(source.NumPadded, shares))
    self._counts.Step(name, source.PositionAfter(self._counts.Position(name), num_read))
    self._values = values
    output.Step(step, values, num_rows, name, self._counts.NumSteps(name))
    self._nonfinite.Check(
      step, values, say, lambda: self._runner.WhyNotFinite(*self._batches), name
    )
    self._batches = []
    return True

  def _WhyEnd(self, step: int) -> str:
    """Why training ends after this step; '' where it goes on."""
    p = self._train
    if self._stop.signal is not None:
      return self._stop.name
    if step >= p.max_steps:
      return f'max_steps {p.max_steps}'
    if 0 < p.max_seconds <= self._TrainSeconds():
      return f'max_seconds {p.max_seconds:g}'
    # Without evaluations in between, their lack is none of gains.
    why = self._early_stop.StopReason(step) if self._passes.during_training else ''
    return f'early stopping ({why})' if why else ''

  def _TrainSeconds(self) -> float:
    """The time of the run so far, over all its calls."""
    return self._seconds_before + time.monotonic() - self._start

  def _IsSaveDue(self, steps: int, seconds: float) -> bool:
    p = self._train
    by_steps = p.save_interval_steps > 0 and steps >= p.save_interval_steps
    return by_steps or (p.save_interval_seconds > 0 and seconds >= p.save_interval_seconds)

  def _PassesAfter(self, step: int, shown: progress.Progress, *, at_end: bool) -> bool:
    """`_RunPasses` between two steps, where this job does that."""
    wanted = self._passes.during_training and self._passes.IsDue(step, at_end=at_end)
    if not wanted or self._stop.signal is not None:
      return False
    with shown.Paused('evaluating'):
      return self._RunPasses(step, at_end=at_end)

  def _RunPasses(self, step: int, *, at_end: bool) -> bool:
    """Evaluates and decodes what is due; returns whether one evaluation was the best so far."""
    self._saver.BeforeNewFunctions()
    is_best = False
    for found in self._passes.Run(step, at_end=at_end):
      self._log.Write(step, found.jobname, found.values)
      is_best |= self._early_stop.Update(
        step, found.jobname, found.values, is_extra=not found.is_due
      )
    return is_best

  def _EndPasses(self) -> None:
    """`_RunPasses` after the loop; saves what a later call is to know of it."""
    is_best = self._RunPasses(self._step, at_end=True)
    is_new = self._passes.during_training and self._passes.State() != self._saved_passes
    if is_best or is_new:
      self._Save(self._step)
      self._saver.Wait()

  def _Save(self, step: int) -> None:
    """Writes a checkpoint; that of the best evaluation stays."""
    self._counts.train_seconds = self._TrainSeconds()
    self._counts.nonfinite_in_a_row = self._nonfinite.in_a_row
    self._saved_passes = self._passes.State()
    metadata = {
      **dataclasses.asdict(self._counts),
      'early_stop': self._early_stop.State(),
      'passes': self._saved_passes,
      params_change.KEY: self._params.ToText(),
      **self._Circumstances(),
    }
    best = self._early_stop.best_step
    with self._saver.Blocking():
      streams = self._streams.Now()
    self._is_saved = self._saver.Save(
      step,
      {**self._runner.Variables(), **streams},
      metadata,
      trained=self._runner.TrainedNames(),
      protected=[] if best is None else [best],
    )

  def _Report(self, ended: str) -> None:
    """Prints and writes what came of this call."""
    best = self._early_stop
    sizes = [source.NumExamples() for source in self._inputs.values()]
    report = run_report.RunReport(
      model=self._params.model or self._params.name,
      logdir=self._logdir,
      ended=ended,
      is_finished=self._stop.signal is None and self._is_saved,
      step=self._step,
      num_steps=self._step - self._first_step + 1,
      num_skipped_steps=int(self._runner.NumSkippedSteps()),
      examples_consumed=self._counts.examples_consumed,
      num_examples=0 if self._streams.iterators else sum(sizes),
      num_damaged_records=sum(source.NumDamaged() for source in self._inputs.values()),
      train_seconds=self._counts.train_seconds,
      seconds=time.monotonic() - self._start,
      train=step_output.Metrics(self._values),
      passes=self._passes.State(),
      best=None
      if best.best_step is None
      else {
        'step': best.best_step,
        'value': best.best_value,
        'jobname': best.followed['jobname'],
        'metric': best.followed['metric'],
      },
      checkpoints=[info.step for info in self._checkpointer.All()],
      tasks={
        name: {**counts, 'num_examples': self._model.inputs[name].NumExamples()}
        for name, counts in self._counts.tasks.items()
      },
      failures=self._failures,
    )
    print(f'--- run report\n{report.Text()}', end='', flush=True)
    report.Write()

  def _Circumstances(self) -> dict[str, Any]:
    return run_state.Circumstances(self._model, self._runner, self._cluster)

  def _NumAccumulated(self, step: int) -> int:
    task = self._model.tasks[self._model.TaskAtStep(step)]
    return multi_learner.NumAccumulated(task.params.train.learner)


def RecordFailures(logdir: str, step: int, failures: Mapping[str, int]) -> None:
  """Adds to metrics.jsonl how often training has failed; called where nobody trains.

  Args:
    logdir: the log directory.
    step: that of the last checkpoint; -1: there is none.
    failures: as `TrainProgram` takes them.
  """
  try:
    with logdir_lock.Held(os.path.join(logdir, 'train')):
      log = metrics_log.MetricsLog(_MetricsPath(logdir))
      log.Write(max(step, 0), metrics_log.FAILURES, failures)
      log.Close()
  except OSError as e:  # Training goes on or ends all the same.
    logging.warning('%s', e)


def _MetricsPath(logdir: str) -> str:
  return os.path.join(logdir, 'metrics.jsonl')
