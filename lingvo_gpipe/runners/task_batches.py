# SPDX-License-Identifier: Apache-2.0
"""Batches of a run: each step's batches come from its task, read by workers if possible.

A `Source` decides this for one input. Training and evaluations have sources of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import tensorflow as tf
from absl import logging

from lingvo_gpipe.distributed import worker_connection
from lingvo_gpipe.experiment import model as model_lib
from lingvo_gpipe.input import batches, stream_input, stream_iterator
from lingvo_gpipe.learning import multi_learner
from lingvo_gpipe.runners import batch_placement, eval_runner, multi_task_runner

_MAX_ERROR_CHARS = 300

# Batches, and the stream iterator that they are read from.
_Opened = tuple[Iterator[batches.AnyBatch], stream_iterator.StreamIterator | None]


def Batches(
  model: model_lib.BaseModel,
  step: int,
  position: Callable[[str], int],
  run: multi_task_runner.AnyRunner | None = None,
  streams: MutableMapping[str, stream_iterator.StreamIterator] | None = None,
) -> Iterator[batches.AnyBatch]:
  """Yields the batches from a step on: per step, as many as the task's learner accumulates.

  Ends when it is the turn of a task whose data have ended.

  Args:
    model: the model, with the tasks and their inputs.
    step: number of steps that are done.
    position: returns the number of examples consumed of a task, by its name.
    run: the runner. If its stages are on workers, the workers read the inputs that they can read.
    streams: {task: iterator} of inputs whose examples have no index. If a worker reads the stream,
      the worker's iterator replaces it here.
  """
  streams = {} if streams is None else streams
  # Iterators of the tasks' data, kept until the task's next turn.
  sources: dict[str, Iterator[batches.AnyBatch]] = {}
  for current in itertools.count(step):
    name = model.TaskAtStep(current)
    if name not in sources:
      runner = None if run is None else run.task_runners[name]
      source = Source(model.inputs[name], runner, of='run')
      sources[name], stream = source.Batches(position(name), streams.get(name))
      if stream is not None:
        streams[name] = stream
    for _ in range(multi_learner.NumAccumulated(model.tasks[name].params.train.learner)):
      batch = next(sources[name], None)
      if batch is None:
        return
      yield batch


class Source:
  """An input. Workers read it if the first batch that they read is bit-equal to the trainer's.

  Equality shows that the workers see the same files as this process, and that they can make some
  rows of a batch without the other rows.
  """

  def __init__(
    self, source: Any, runner: eval_runner.EvalRunner | None, of: str = 'data set'
  ) -> None:
    """Reads nothing.

    Args:
      source: the input.
      runner: runner that takes the batches. If its stages are on workers, they read if they can.
      of: kind of the positions in error messages, see `batches.Batches`.
    """
    self._source = source
    self._of = of
    is_remote = runner is not None and batch_placement.AreOnWorkers(runner.engine)
    self._runner = runner if is_remote else None
    self._is_decided = False
    # {position: function that iterates from it}, kept because workers already have its data.
    self._passes: dict[int, Callable[[], Iterator[batches.PlacedBatch]]] = {}

  def Batches(
    self, position: int = 0, stream: stream_iterator.StreamIterator | None = None
  ) -> _Opened:
    """Returns the batches from a position on. The first call decides who reads, for all calls.

    Args:
      position: position in the data set or run.
      stream: iterator at this position, for an input whose examples have no index; None for the
        beginning of the stream.

    Returns:
      The batches, and the iterator that they are read from; None if examples have an index.
    """
    if stream is None and isinstance(self._source, stream_input.BaseStreamInput):
      stream = self._source.Iterator()
    if self._is_decided and self._runner is not None:
      return self._ReadOnWorkers(self._runner, position, stream)
    iterator = iter(self._source.Dataset(start=position)) if stream is None else stream
    local = self._AddNotes(iterator, position)
    if self._runner is None:
      return local, stream
    (remote, moved_stream), placed, reason = self._TryWorkers(self._runner, position, stream)
    first = next(local, None)
    if first is None:
      return local, stream
    self._is_decided = True
    name = batches.InputName(self._source)
    if placed is not None and _Bytes(self._runner, first) == _Bytes(self._runner, placed):
      logging.info('data: %s, %s', name, self._runner.placement.ReadBy(self._source))
      return itertools.chain([placed], remote), moved_stream
    reason = reason or 'the workers read different values'
    logging.info('data: %s, read by the trainer: %s', name, reason)
    self._runner = None
    self._passes.clear()
    return itertools.chain([first], local), stream

  def _ReadOnWorkers(
    self,
    runner: eval_runner.EvalRunner,
    position: int,
    stream: stream_iterator.StreamIterator | None,
  ) -> _Opened:
    if stream is None:
      if position not in self._passes:
        self._passes[position] = runner.placement.Pass(self._source, position)
      remote = self._passes[position]()
    else:
      stream = stream.CopyTo(runner.placement.first_host)
      remote = runner.placement.ReadStream(stream)
    return self._AddNotes(remote, position), stream

  def _AddNotes(self, data: Iterator[Any], position: int) -> Iterator[Any]:
    """Adds the position of a batch to errors that are not failures of a worker."""
    return batches.AddNotes(data, self._source, position, self._of, worker_connection.IsFailure)

  def _TryWorkers(
    self,
    runner: eval_runner.EvalRunner,
    position: int,
    stream: stream_iterator.StreamIterator | None,
  ) -> tuple[_Opened, batches.AnyBatch | None, str | None]:
    """Returns the batches after the first, the first batch, and why the workers read none."""
    reason = batch_placement.WhyNotOnWorkers(self._source)
    if reason is None:
      try:
        opened = self._ReadOnWorkers(runner, position, stream)
        return opened, next(opened[0], None), None
      except Exception as e:
        if worker_connection.IsFailure(e):
          raise
        # Otherwise the next operation of this process would raise the error again.
        tf.experimental.async_clear_error()
        reason = f'the workers cannot: {" ".join(str(e).split())[:_MAX_ERROR_CHARS]}'
    return (iter(()), stream), None, reason


def _Bytes(runner: eval_runner.EvalRunner, batch: batches.AnyBatch) -> list[bytes | None]:
  """Returns the bytes of a batch that reach the first and the last stage."""
  pieces = [(piece.args, piece.side) for piece in runner.MicroBatches(batch)]
  return [None if x is None else tf.io.serialize_tensor(x).numpy() for x in tf.nest.flatten(pieces)]
