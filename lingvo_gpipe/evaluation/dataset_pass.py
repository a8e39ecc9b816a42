# SPDX-License-Identifier: Apache-2.0
"""Evaluating one data set with a runner's present weights: metrics, and a sample for people."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from lingvo_gpipe.core import files, hyperparams, nested_map
from lingvo_gpipe.distributed import stop_request, worker_connection
from lingvo_gpipe.experiment import model as model_lib
from lingvo_gpipe.experiment import task as task_lib
from lingvo_gpipe.input import batches
from lingvo_gpipe.reporting import progress, summaries
from lingvo_gpipe.runners import eval_runner, task_batches

_Batch = TypeVar('_Batch')


class DatasetPass:
  """Goes through one data set: every example once, in order. What for, a subclass says.

  Attributes:
    jobname: the name of its directory in the logdir, such as eval_dev.
  """

  def __init__(
    self,
    task_runner: eval_runner.EvalRunner,
    input_params: hyperparams.InstantiableParams,
    name: str,
    logdir: str,
    stop: stop_request.StopRequest,
  ) -> None:
    """Makes the input.

    Args:
      task_runner: holds the weights.
      input_params: Params of the data set's input.
      name: the data set's name.
      logdir: the run's log directory.
      stop: asked after each batch.

    Raises:
      ValueError: the name cannot be that of a directory in the logdir, this can not be done, or
        the input may leave out examples and tell nobody.
    """
    if not name.isidentifier():
      raise ValueError(f'a data set has a name of letters, digits and underscores; got {name!r}')
    if why := self.WhyNot(task_runner.task):
      raise ValueError(why)
    self._runner = task_runner
    self._stop = stop
    self._input = input_params.Copy().Set(shuffle=False, num_epochs=1).Instantiate()
    task_runner.ExpectBatches(self._input.BatchSpecs())
    self._input.CheckComplete()
    self._name = name
    self.jobname = f'{self._Prefix()}_{name.lower()}'
    self._dir = os.path.join(logdir, self.jobname)
    self._writer: summaries.SummaryWriter | None = None  # Made with the first result.
    self._sample = ''  # The last one, until it is printed.

  @classmethod
  def OfTasks(
    cls, task_runners: Mapping[str, eval_runner.EvalRunner], input_params: Any, name: str
  ) -> Iterator[tuple[eval_runner.EvalRunner, Any, str]]:
    """The arguments of a pass for each task: runner, Params of the input, name of the data set.

    Of several tasks those are left out that have no input here, or of which this can not be done.

    Args:
      task_runners: {task: runner}; '' is the name of a single one.
      input_params: of the input; where there are several tasks, of each by its name.
      name: the data set's.
    """
    if '' in task_runners:
      yield task_runners[''], input_params, name
      return
    for task, p in input_params.IterParams():
      if p is not None and task in task_runners and not cls.WhyNot(task_runners[task].task):
        yield task_runners[task], p, model_lib.TaskDirectory(name, task)

  @classmethod
  def WhyNot(cls, task: task_lib.BaseTask) -> str:
    """Why this can not be done with a task, '' where it can."""
    del task
    return ''

  def Describe(self) -> str:
    """The data set's name and size."""
    return f'{self._name} {self._input.Describe()}'

  def MetricNames(self) -> list[str] | None:
    """The names of what `Run` returns; None where only `Run` can tell."""
    return None

  def Close(self) -> None:
    """Closes the file of summaries; another result opens a new one."""
    if self._writer is not None:
      self._writer.Close()
      self._writer = None

  def Run(self, step: int) -> dict[str, float] | None:
    """Goes through the data set, prints one line, writes what was found into its directory.

    Args:
      step: the step of the weights.

    Returns:
      The metrics; None, and nothing is written, where asked to stop before the end.
    """
    raise NotImplementedError(f'{type(self).__name__} has no Run')

  def WriteSample(self, step: int) -> None:
    """Writes what the weights of a step make of one example, where `Run` does not."""

  def PrintSample(self) -> None:
    """Prints what `WriteSample` wrote last, once."""
    print(self._sample, end='', flush=True)
    self._sample = ''

  def _Prefix(self) -> str:
    """What the directory's name begins with."""
    raise NotImplementedError(f'{type(self).__name__} has no _Prefix')

  def _Batches(self) -> Iterator[nested_map.NestedMap]:
    """The batches of the data set, in this process, until asked to stop."""
    return self._UntilStopped(
      batches.Batches(self._input, is_lost_machine=worker_connection.IsFailure)
    )

  def _UntilStopped(self, data: Iterator[_Batch]) -> Iterator[_Batch]:
    return itertools.takewhile(lambda _: self._stop.signal is None, data)

  def _IsStopped(self, step: int) -> bool:
    """Whether asked to stop; says so."""
    if self._stop.signal is None:
      return False
    print(f'{self._name} at step {step}: stopped by {self._stop.name}, no result', flush=True)
    return True

  def _Write(self, step: int, values: Mapping[str, float | str]) -> dict[str, float]:
    """Writes summaries and a score file; returns the numbers among the values."""
    numbers = {name: float(v) for name, v in values.items() if not isinstance(v, str)}
    self._Summaries().Scalars(step, numbers)
    self._Summaries().Flush()
    texts = {**values, **{name: f'{value:.8g}' for name, value in numbers.items()}}
    lines = ''.join(f'{name}: {text}\n' for name, text in sorted(texts.items()))
    files.WriteWhole(os.path.join(self._dir, f'score-{step:08d}.txt'), lines)
    return numbers

  def _Summaries(self) -> summaries.SummaryWriter:
    if self._writer is None:
      self._writer = summaries.SummaryWriter(self._dir)
    return self._writer


class Evaluation(DatasetPass):
  """The metrics of `ComputeLoss`."""

  @functools.cached_property
  def _source(self) -> task_batches.Source:
    return task_batches.Source(self._input, self._runner)

  def Run(self, step: int) -> dict[str, float] | None:
    """As the parent says."""
    metrics = self._runner.Evaluate(self._Limited())
    if self._IsStopped(step):
      return None
    if not metrics:
      raise ValueError(f'{self._name}: the data set is empty: check the params that name the data')
    values = {name: value for name, (value, _) in metrics.items()}
    print(f'{self._name} at step {step}: {progress.FormatMetrics(values)}', flush=True)
    report = self._runner.task.Report(values, self._input)
    if report:
      print(f'{self._name} at step {step}: {report}', flush=True)
    return self._Write(step, values)

  def MetricNames(self) -> list[str]:
    """As the parent says."""
    return self._runner.MetricNames(self._input.BatchSpec())

  def WriteSample(self, step: int) -> None:
    """Writes what the task decodes of the first example, if it decodes anything, to TensorBoard."""
    self._sample = ''
    batch = next(self._Batches(), None)
    if batch is None:
      return
    decoded = self._runner.Decode(_FirstRows(batch, 1), self._input)
    for name, (value,) in decoded.items():
      text = _Printable(str(value))
      self._sample += f'--- {name}\n{text}\n'
      self._Summaries().Text(step, f'sample/{name}', summaries.Preformatted(text))
    if decoded:
      self._Summaries().Flush()

  def _Prefix(self) -> str:
    return 'eval'

  def _Limited(self) -> Iterator[batches.AnyBatch]:
    """The batches of so many examples as the task's Params say; the last one is cut to them."""
    left = self._runner.task.params.eval.samples_per_summary
    if not left:
      found, _ = self._source.Batches()
      yield from self._UntilStopped(found)
      return
    for batch in self._Batches():
      rows = RealRows(batch)
      if len(rows) > left:
        batch = _FirstRows(batch, int(rows[left]))
        self._runner.ExpectBatches([batch.Transform(lambda x: tf.TensorSpec(x.shape, x.dtype))])
      yield batch
      left -= len(rows)
      if left <= 0:
        return


def RealRows(batch: nested_map.NestedMap) -> np.ndarray:
  """The rows that are no padding."""
  weights = batch.get('example_weights')
  return np.arange(batches.NumRows(batch)) if weights is None else np.flatnonzero(weights)


def _FirstRows(batch: nested_map.NestedMap, num_rows: int) -> nested_map.NestedMap:
  return batch.Transform(lambda x: x[:num_rows])


def _Printable(text: str) -> str:
  """The text without control characters: a sample must not steer the terminal."""
  return ''.join(c if c.isprintable() or c in '\n\t' else '\ufffd' for c in text)
