# SPDX-License-Identifier: Apache-2.0
"""`DatasetPass`: evaluates a data set with a runner's present weights, and decodes a sample."""

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
  """Base class of passes over a data set: every example once, in order.

  Attributes:
    jobname: name of its directory in the log directory, such as eval_dev.
    sample: text of examples that the last pass decoded; '' if it decoded none.
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
      task_runner: runner with the weights.
      input_params: Params of the data set's input.
      name: the data set's name.
      logdir: the run's log directory.
      stop: request to stop; checked after each batch.

    Raises:
      ValueError: the name is not a valid directory name, the task does not support this pass, or
        the input may skip examples without a warning.
    """
    if not name.isidentifier():
      raise ValueError(f'a data set has a name of letters, digits and underscores; got {name!r}')
    if reason := self.WhyUnsupported(task_runner.task):
      raise ValueError(reason)
    self._runner = task_runner
    self._stop = stop
    self._input = input_params.Copy().Set(shuffle=False, num_epochs=1).Instantiate()
    task_runner.ExpectBatches(self._input.BatchSpecs())
    self._input.CheckComplete()
    self._name = name
    self.jobname = f'{self._Prefix()}_{name.lower()}'
    self._dir = os.path.join(logdir, self.jobname)
    self._writer: summaries.SummaryWriter | None = None  # Opened with the first result.
    self.sample = ''
    self._unprinted = ''  # The sample of `WriteSample`, until it is printed.

  @classmethod
  def Arguments(
    cls, task_runners: Mapping[str, eval_runner.EvalRunner], input_params: Any, name: str
  ) -> Iterator[tuple[eval_runner.EvalRunner, Any, str]]:
    """Yields the runner, the Params of the input and the name of the data set for each pass.

    Leaves out tasks that have no input in the data set, or that do not support this pass.

    Args:
      task_runners: {task: runner}; the name of a single task is ''.
      input_params: Params of the input; for several tasks, Params with one input per task name.
      name: the data set's name.
    """
    if '' in task_runners:
      yield task_runners[''], input_params, name
      return
    for task, p in input_params.IterParams():
      if p is not None and task in task_runners and not cls.WhyUnsupported(task_runners[task].task):
        yield task_runners[task], p, model_lib.TaskDirectory(name, task)

  @classmethod
  def WhyUnsupported(cls, task: task_lib.BaseTask) -> str | None:
    """Returns why a task does not support this pass; None if it does."""
    del task
    return None

  def Describe(self) -> str:
    """Returns the data set's name and size."""
    return f'{self._name} {self._input.Describe()}'

  def MetricNames(self) -> list[str] | None:
    """Returns the names of the metrics that `Run` returns; None if only `Run` knows them."""
    return None

  def Close(self) -> None:
    """Closes the events file; the next result opens a new file."""
    if self._writer is not None:
      self._writer.Close()
      self._writer = None

  def Run(self, step: int) -> dict[str, float] | None:
    """Goes through the data set, prints one line, and writes the results into its directory.

    Args:
      step: the step of the weights.

    Returns:
      The metrics; None, with nothing written, after a request to stop.
    """
    raise NotImplementedError(f'{type(self).__name__} has no Run')

  def WriteSample(self, step: int) -> None:
    """Writes the result of one example; does nothing if `Run` writes all results."""

  def PrintSample(self) -> None:
    """Prints the last sample of `WriteSample` once."""
    print(self._unprinted, end='', flush=True)
    self._unprinted = ''

  def _Prefix(self) -> str:
    """Returns the prefix of the directory's name."""
    raise NotImplementedError(f'{type(self).__name__} has no _Prefix')

  def _Batches(self) -> Iterator[nested_map.NestedMap]:
    """Yields the batches of the data set, read by this process, until a request to stop."""
    return self._UntilStopped(
      batches.Batches(self._input, is_lost_machine=worker_connection.IsFailure)
    )

  def _UntilStopped(self, data: Iterator[_Batch]) -> Iterator[_Batch]:
    return itertools.takewhile(lambda _: self._stop.signal is None, data)

  def _IsStopped(self, step: int) -> bool:
    """Whether there was a request to stop; prints a line if so."""
    if self._stop.signal is None:
      return False
    print(f'{self._name} at step {step}: stopped by {self._stop.name}, no result', flush=True)
    return True

  def _Write(self, step: int, values: Mapping[str, float | str]) -> dict[str, float]:
    """Writes summaries and a score file; returns the values that are numbers."""
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
  """Computes the metrics of `ComputeLoss`."""

  @functools.cached_property
  def _source(self) -> task_batches.Source:
    return task_batches.Source(self._input, self._runner)

  def Run(self, step: int) -> dict[str, float] | None:
    """Evaluates the data set, see `DatasetPass.Run`. A metric without any weight is NaN.

    Raises:
      ValueError: the data set is empty, or its loss has no weight.
    """
    metrics = self._runner.Evaluate(self._SampleBatches())
    if self._IsStopped(step):
      return None
    if not metrics:
      raise ValueError(f'{self._name}: the data set is empty: check the params of its input')
    if not metrics['loss'][1]:
      raise ValueError(
        f'{self._name}: the loss has a weight of 0 over the whole data set, so there is nothing to '
        "evaluate: check the params of its input, and its examples' weights"
      )
    values = {name: value for name, (value, _) in metrics.items()}
    print(f'{self._name} at step {step}: {progress.FormatMetrics(values)}', flush=True)
    report = self._runner.task.Report(values, self._input)
    if report:
      print(f'{self._name} at step {step}: {report}', flush=True)
    return self._Write(step, values)

  def MetricNames(self) -> list[str]:
    """Returns the names of the task's metrics."""
    return self._runner.MetricNames(self._input.BatchSpec())

  def WriteSample(self, step: int) -> None:
    """Decodes the first example, if the task decodes, and writes the result to TensorBoard."""
    self.sample = self._unprinted = ''
    batch = next(self._Batches(), None)
    if batch is None:
      return
    decoded = self._runner.Decode(_FirstRows(batch, 1), self._input)
    for name, (value,) in decoded.items():
      text = _Printable(str(value))
      self.sample += f'--- {name}\n{text}\n'
      self._Summaries().Text(step, f'sample/{name}', summaries.Preformatted(text))
    self._unprinted = self.sample
    if decoded:
      self._Summaries().Flush()

  def _Prefix(self) -> str:
    return 'eval'

  def _SampleBatches(self) -> Iterator[batches.AnyBatch]:
    """Yields the batches of the first `eval.samples_per_summary` examples; 0 means all examples."""
    num_examples = self._runner.task.params.eval.samples_per_summary
    if not num_examples:
      data, _ = self._source.Batches()
      yield from self._UntilStopped(data)
      return
    for batch in self._Batches():
      rows = RealRows(batch)
      if len(rows) > num_examples:
        batch = _FirstRows(batch, int(rows[num_examples]))
        self._runner.ExpectBatches([batch.Transform(lambda x: tf.TensorSpec(x.shape, x.dtype))])
      yield batch
      num_examples -= len(rows)
      if num_examples <= 0:
        return


def RealRows(batch: nested_map.NestedMap) -> np.ndarray:
  """Returns the indices of the rows that are not padding."""
  weights = batch.get('example_weights')
  return np.arange(batches.NumRows(batch)) if weights is None else np.flatnonzero(weights)


def _FirstRows(batch: nested_map.NestedMap, num_rows: int) -> nested_map.NestedMap:
  return batch.Transform(lambda x: x[:num_rows])


def _Printable(text: str) -> str:
  """Replaces control characters in a text, because a sample must not control the terminal."""
  return ''.join(c if c.isprintable() or c in '\n\t' else '\ufffd' for c in text)
