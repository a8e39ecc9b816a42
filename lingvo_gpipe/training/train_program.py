# SPDX-License-Identifier: Apache-2.0
"""`TrainProgram`: trains a model in a log directory.

Every program keeps its files there:

<logdir>/params.txt            Params of the last call of the trainer; a checkpoint has its own
<logdir>/model_analysis.txt    every weight, and the stage table
<logdir>/metrics.jsonl         metrics of training and of its evaluations, one line each
<logdir>/report.txt, .json     report of the last call of the trainer
<logdir>/report.html           the same as a page, with curves, stages, samples and profiles
<logdir>/assets/               files that the input needs, such as its vocabulary
<logdir>/timeline_<a>_<b>.html  a picture of the schedule in the profiled steps
<logdir>/train/                checkpoints and TensorBoard events of training, and trainer.lock
<logdir>/eval_<dataset>/       TensorBoard events and score-<step>.txt of evaluations
<logdir>/decode_<dataset>/     TensorBoard events, score-<step>.txt and decode-<step>.jsonl

In a model of several tasks, the names of evaluations, pictures, metrics and a checkpoint's metadata
end with the name of the task.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Mapping

from absl import logging

from lingvo_gpipe.checkpoint import assets, logdir_lock, warm_start
from lingvo_gpipe.core import hyperparams
from lingvo_gpipe.distributed import cluster, stop_request
from lingvo_gpipe.evaluation import pass_schedule
from lingvo_gpipe.experiment import model as model_lib
from lingvo_gpipe.input import batches as input_batches
from lingvo_gpipe.learning import multi_learner, nonfinite_steps
from lingvo_gpipe.pipeline.cutting import cut as cut_lib
from lingvo_gpipe.reporting import metrics_log, run_report
from lingvo_gpipe.runners import failure_notes, multi_task_runner, task_batches
from lingvo_gpipe.training import (
  callback,
  evaluations,
  finite_check,
  inspection,
  run_page,
  run_store,
  step_output,
  step_profiler,
)

# Jobs of the trainer: train_and_eval also evaluates and decodes between steps.
JOBS = ('train', 'train_and_eval')

InputParams = Callable[[str], hyperparams.InstantiableParams]


@dataclasses.dataclass(frozen=True)
class RunOptions:
  """Options of a call of the trainer.

  Attributes:
    job: one of `JOBS`.
    check_numerics: stop at the first step with a loss or gradients that are not finite, and name
      the layer that caused them.
    allow_params_change: resume from a checkpoint with different Params (see `params_change`).
    lock: lock of <logdir>/train; it must still be held at each save.
    profile_steps: the first and the last step to profile (see `step_profiler`).
    failures: number of earlier failures of this call, by kind (see `supervisor`).
    experiment_params: the experiment's Params if the model is cut for fewer devices than they say;
      they are written to the log directory and into checkpoints.
    command: the command line of this call, for the report.
  """

  job: str = 'train'
  check_numerics: bool = False
  allow_params_change: bool = False
  lock: logdir_lock.Lock | None = None
  profile_steps: tuple[int, int] | None = None
  failures: Mapping[str, int] = dataclasses.field(default_factory=dict)
  experiment_params: hyperparams.InstantiableParams | None = None
  command: str = 'trainer --model=KEY --logdir=DIR'


class TrainProgram:
  """Trains a model in a log directory; resumes from its last checkpoint if there is one."""

  def __init__(
    self,
    params: hyperparams.InstantiableParams,
    logdir: str,
    devices: cluster.Cluster,
    input_params: InputParams,
    stop: stop_request.StopRequest,
    options: RunOptions | None = None,
  ) -> None:
    """Checks that the log directory can be written; makes the model's weights on their devices.

    Args:
      params: the model's Params, input included.
      logdir: the log directory.
      devices: the devices to use.
      input_params: returns the Params of the input of a data set, by its name.
      stop: request to stop; checked after each step.
      options: options of this call; None for the defaults.

    Raises:
      OSError: the log directory cannot be written.
      ValueError: check_numerics is used with a learner that applies gradients that are not finite;
        the run has different Params; or Params of evaluations, early stopping, warm start or
        callbacks are wrong.
      LookupError: `task.train.eval_datasets` or `decode_datasets` names an unknown data set.
    """
    options = options or RunOptions()
    learner_params = {
      f'{path}.train.learner': task.train.learner
      for path, task in model_lib.FindTaskParams(params).items()
    }
    self._nonfinite = nonfinite_steps.NonFiniteSteps(
      model_lib.FindTrainParams(params).max_nonfinite_steps,
      learner_params,
      check_numerics=options.check_numerics,
    )
    self._params = options.experiment_params or params
    self._logdir = logdir
    self._cluster = devices
    self._stop = stop
    self._options = options
    self._store = run_store.RunStore(
      logdir,
      self._params,
      devices,
      allow_params_change=options.allow_params_change,
      lock=options.lock,
    )
    self._model: model_lib.BaseModel = params.Instantiate()
    self._train = model_lib.FindTrainParams(self._model.params)
    self._early_stop = self._train.early_stop.Instantiate()
    self._callbacks: list[callback.Callback] = [p.Instantiate() for p in self._train.callbacks]
    warm_start.Check(self._train.init_from_checkpoint_rules)
    # Reads the data, which may fail, before weights fill the memory.
    for name in self._model.active_tasks:
      if name in self._model.inputs:
        self._model.inputs[name].Fingerprint()
    self._runner = multi_task_runner.Make(
      self._model, devices.devices, self._store.checkpointer, num_replicas=devices.num_replicas
    )
    # Inputs of the tasks that are trained.
    self._inputs = {name: self._model.inputs[name] for name in self._runner.task_runners}

    def CheckedInputParams(dataset: str) -> hyperparams.InstantiableParams:
      p = input_params(dataset)
      self._model.CheckInputs(f'the data set {dataset}', p)
      return p

    self._passes = pass_schedule.DatasetPasses(
      self._runner,
      CheckedInputParams,
      logdir,
      stop,
      during_training=options.job == 'train_and_eval',
      clock=self._store.TrainSeconds,
    )
    self._passes.CheckFollowed(self._early_stop)
    self._store.Attach(self._model, self._runner, self._early_stop, self._passes)

  def Run(self) -> int:
    """Trains to the end, or until a request to stop; returns the exit status."""
    self._PrintDescription()
    for source in self._inputs.values():
      source.CheckRestarts()
    self._store.Restore()
    self._WriteDescription()
    self._first_step, self._start = self._step + 1, time.monotonic()
    self._values: Mapping[str, float] = {}  # Values of the last step.
    log = metrics_log.MetricsLog(_MetricsPath(self._logdir), self._step)
    self._MakeHooks(log)
    try:
      end_reason = self._Loop()
      if self._stop.signal is None:
        self._EvaluateAtEnd()
    except nonfinite_steps.NotFiniteError as e:
      failure_notes.AddNotes(e, self._step, self._store.checkpointer)
      print(e, *e.__notes__, sep='\n', file=sys.stderr)
      return 1
    except Exception as e:
      failure_notes.AddNotes(e, self._step, self._store.checkpointer)
      raise
    finally:
      log.Close()
      self._passes.Close()
    self._Report(end_reason)
    return self._stop.exit_status or int(not self._store.is_saved)

  @property
  def _step(self) -> int:
    return int(self._runner.global_step)

  def _MakeHooks(self, log: metrics_log.MetricsLog) -> None:
    """Makes everything that runs between steps, in this order."""
    max_seconds = self._train.max_seconds or math.inf
    self._line = step_output.ProgressLine(
      self._runner, self._train.max_steps, lambda: max_seconds - self._store.TrainSeconds()
    )
    self._profiler = step_profiler.StepProfiler(
      self._options.profile_steps,
      self._logdir,
      self._runner.task_runners,
      self._model.TaskAtStep,
      self._cluster.workers,
    )
    self._evaluations = evaluations.Evaluations(
      self._passes, self._early_stop, self._store, log, self._line, self._stop
    )
    summaries = step_output.StepSummaries(self._runner, self._logdir, log, self._line, self._train)
    self._store.flush = summaries.Flush
    self._hooks: list[callback.StepHook] = [
      self._profiler,
      self._line,
      finite_check.FiniteCheck(self._nonfinite, self._runner, self._store),
      self._evaluations,
      *self._callbacks,
      summaries,
      self._store,
    ]

  def _Loop(self) -> str:
    """Trains to the end, or until a request to stop; returns why training ended."""
    step, max_steps = callback.Step(self._step, print), self._train.max_steps
    # A stop between the last step and its evaluation left the evaluation to this call.
    self._evaluations.Run(step, at_end=False)
    if step.needs_save:
      self._store.Save(step)
    end_reason = self._EndReason(step.number)
    if self._stop.signal is not None:
      print(f'stopped by {end_reason} before a step was done', flush=True)
      return str(end_reason)
    if end_reason:
      print(f'step {step.number} of {max_steps}: nothing left to train ({end_reason})')
      return end_reason
    num_shapes = sum(len(source.BatchSpecs()) for source in self._inputs.values())
    first = (
      'the first step' if num_shapes == 1 else f'the first step of each of {num_shapes} shapes'
    )
    print(f'training to step {max_steps}; {first} compiles the stages', flush=True)
    with contextlib.ExitStack() as stack:
      for hook in self._hooks:
        hook.Begin(step.number)
        stack.callback(hook.Close)
      step = self._TrainSteps(step)
    if report := self._store.Report():
      print(report)
    if self._data:
      print(
        f'the data ended within an update of {self._NumAccumulated(step.number)} '
        f'mini-batches: its first {len(self._data)} changed nothing'
      )
    # A signal may have come while the last step was saved.
    end_reason = self._stop.name or str(step.end_reason)
    is_saved = self._store.is_saved
    if step.number < max_steps or self._stop.signal is not None or not is_saved:
      note = 'the checkpoint is saved' if is_saved else 'there is no checkpoint of it'
      print(f'stopped by {end_reason} after step {step.number}; {note}', flush=True)
    return end_reason

  def _TrainSteps(self, step: callback.Step) -> callback.Step:
    """Takes steps, with the hooks after each of them, until training ends; returns the last."""
    self._data: list[input_batches.AnyBatch] = []  # Mini-batches of the update in progress.
    for batch in task_batches.Batches(
      self._model,
      step.number,
      self._store.counts.Position,
      self._runner,
      self._store.streams.iterators,
    ):
      values = self._TrainBatch(step.number + 1, batch)
      if values is None:  # The update waits for more mini-batches.
        continue
      step = self._CountStep(step.number + 1, values)
      for hook in self._hooks:
        # A signal or the limit of time may come meanwhile, and hooks may end the training.
        step.end_reason = step.end_reason or self._EndReason(step.number)
        hook.AfterStep(step)
      step.data = ()  # Frees the memory of the mini-batches.
      if step.end_reason:
        break
    else:
      step.end_reason = self._stop.name or 'the end of the data'
    for hook in self._hooks:
      hook.AtEnd(step)
    return step

  def _TrainBatch(self, step: int, batch: input_batches.AnyBatch) -> Mapping[str, float] | None:
    """Trains on one mini-batch of a step; returns the step's values if it was the last one."""
    self._store.BeforeBatch(batch)
    with self._profiler.Record(step):
      values = self._runner.TrainStep(batch)
    self._data.append(batch)
    return values

  def _CountStep(self, number: int, values: Mapping[str, float]) -> callback.Step:
    """Counts the step of the mini-batches that were trained."""
    data, self._data = self._data, []
    task_name = self._model.TaskAtStep(number - 1)
    source, counts = self._inputs[task_name], self._store.counts
    num_rows = sum(map(input_batches.NumRows, data))
    shares = itertools.chain(*map(self._runner.task_runners[task_name].Shares, data))
    num_examples = num_rows - sum(map(source.NumPadded, shares))
    counts.AddStep(task_name, source.PositionAfter(counts.Position(task_name), num_examples))
    self._values = values
    num_task_steps = counts.NumSteps(task_name)
    return callback.Step(
      number, self._line.Print, task_name, num_task_steps, values, data, num_rows
    )

  def _EndReason(self, step: int) -> str | None:
    """Returns why training ends after this step; None if it continues."""
    p = self._train
    if self._stop.signal is not None:
      return self._stop.name
    if step >= p.max_steps:
      return f'max_steps {p.max_steps}'
    if 0 < p.max_seconds <= self._store.TrainSeconds():
      return f'max_seconds {p.max_seconds:g}'
    # If this job runs no evaluations, their absence must not count as "no improvement".
    reason = self._early_stop.StopReason(step) if self._passes.during_training else None
    return f'early stopping ({reason})' if reason else None

  def _EvaluateAtEnd(self) -> None:
    """Runs the passes that no hook ran; saves results that a later call needs."""
    step = callback.Step(self._step, print)
    self._evaluations.Run(step, at_end=True)
    if step.needs_save or (self._passes.during_training and self._store.HasNewResults()):
      self._store.Save(step)

  def _PrintDescription(self) -> None:
    """Prints the experiment, its devices, stages, dtypes and data."""
    print(f'{self._params.model or self._params.name} on {self._cluster.Describe()}')
    for task_name, runner in self._runner.task_runners.items():
      if task_name:
        print(f'task {task_name}:')
      print(runner.cut.Table(self._cluster.devices))
      print(runner.Precision())
    train = [
      f'{model_lib.TaskDirectory("Train", task_name)} {source.Describe()}'
      for task_name, source in self._inputs.items()
    ]
    print(f'data: {"; ".join([*train, *self._passes.Describe()])}', flush=True)
    p = self._early_stop.params
    if p.metric and not self._passes.during_training:
      print(
        f'early stopping by {p.jobname} {p.metric} needs --job=train_and_eval: this job does not '
        'end by it',
        flush=True,
      )

  def _WriteDescription(self) -> None:
    """Writes the assets, Params and weights of the run; removes the report of an earlier call."""
    paths = {path: None for source in self._inputs.values() for path in source.Assets()}
    is_resumed = self._store.counts.examples_consumed > 0
    assets.Keep(self._logdir, list(paths), is_resumed=is_resumed)
    # An evaluator that is started now would take the report for the end of this training.
    run_report.Remove(self._logdir)
    # After the checkpoint was restored: if it is another model's, its description stays.
    inspection.WriteDescription(self._logdir, self._params, self._model, self._Cuts())

  def _Cuts(self) -> dict[str, cut_lib.Cut]:
    return {task_name: runner.cut for task_name, runner in self._runner.task_runners.items()}

  def _Report(self, end_reason: str) -> None:
    """Prints and writes the results of this call."""
    best, counts = self._early_stop, self._store.counts
    sizes = [source.NumExamples() for source in self._inputs.values()]
    report = run_report.RunReport(
      model=self._params.model or self._params.name,
      logdir=self._logdir,
      ended=end_reason,
      is_finished=self._stop.signal is None and self._store.is_saved,
      step=self._step,
      num_steps=self._step - self._first_step + 1,
      num_skipped_steps=int(self._runner.NumSkippedSteps()),
      examples_consumed=counts.examples_consumed,
      num_examples=0 if self._store.streams.iterators else sum(sizes),
      num_damaged_records=sum(source.NumDamaged() for source in self._inputs.values()),
      train_seconds=counts.train_seconds,
      seconds=time.monotonic() - self._start,
      train=step_output.TaskMetrics(self._values),
      passes=self._passes.State(),
      best=None
      if best.best_step is None
      else {
        'step': best.best_step,
        'value': best.best_value,
        'jobname': best.followed['jobname'],
        'metric': best.followed['metric'],
      },
      checkpoints=[info.step for info in self._store.checkpointer.All()],
      tasks={
        task_name: {**task_counts, 'num_examples': self._model.inputs[task_name].NumExamples()}
        for task_name, task_counts in counts.tasks.items()
      },
      failures=self._options.failures,
    )
    print(f'--- run report\n{report.Text()}', end='', flush=True)
    report.Write()
    run_page.Write(
      report, self._Cuts(), self._cluster, self._passes.Samples(), self._options.command
    )

  def _NumAccumulated(self, step: int) -> int:
    task = self._model.tasks[self._model.TaskAtStep(step)]
    return multi_learner.NumAccumulated(task.params.train.learner)


def RecordFailures(logdir: str, step: int, failures: Mapping[str, int]) -> None:
  """Adds the failures so far to metrics.jsonl; must be called while no process trains.

  Args:
    logdir: the log directory.
    step: step of the last checkpoint; -1 if there is none.
    failures: number of failures by kind.
  """
  try:
    with logdir_lock.HoldLock(os.path.join(logdir, 'train')):
      log = metrics_log.MetricsLog(_MetricsPath(logdir))
      log.Write(max(step, 0), metrics_log.FAILURES, failures)
      log.Close()
  except OSError as e:  # The log is not worth a failure of the training.
    logging.warning('%s', e)


def _MetricsPath(logdir: str) -> str:
  return os.path.join(logdir, metrics_log.NAME)
