# SPDX-License-Identifier: Apache-2.0
"""The batches of a run, each of the task whose step it is, read where its stages need them.

`Source` decides that for an input; evaluations have theirs.
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

_MAX_SHOWN = 300

# Batches, and the iterator of a stream that they are read of.
_Opened = tuple[Iterator[batches.AnyBatch], stream_iterator.StreamIterator | None]


def Batches(
  model: model_lib.BaseModel,
  step: int,
  position: Callable[[str], int],
  run: multi_task_runner.AnyRunner | None = None,
  streams: MutableMapping[str, stream_iterator.StreamIterator] | None = None,
) -> Iterator[batches.AnyBatch]:
  """The batches from a step on; for each step as many as the task's learner accumulates.

  They end where the data of a task do when its turn comes.

  Args:
    model: has the tasks and their inputs.
    step: how many steps were done.
    position: the count of examples consumed of a task, by its name.
    run: what trains. Where its stages are in workers, these read what they can.
    streams: {task: its iterator, there}, of inputs whose examples have no index; that of a worker
      takes its place.
  """
  streams = {} if streams is None else streams
  # A task's data wait for its next turn.
  sources: dict[str, Iterator[batches.AnyBatch]] = {}
  for current in itertools.count(step):
    name = model.TaskAtStep(current)
    if name not in sources:
      one = None if run is None else run.task_runners[name]
      source = Source(model.inputs[name], one, of='run')
      sources[name], stream = source.Batches(position(name), streams.get(name))
      if stream is not None:
        streams[name] = stream
    for _ in range(multi_learner.NumAccumulated(model.tasks[name].params.train.learner)):
      batch = next(sources[name], None)
      if batch is None:
        return
      yield batch


class Source:
  """An input, whose batches workers read where its first one is the same to the bit.

  That it is the same tells that they see the files that this process sees, and that rows of a batch
  can be made without the others.
  """

  def __init__(self, source: Any, one: eval_runner.EvalRunner | None, of: str = 'data set') -> None:
    """Reads nothing.

    Args:
      source: the input.
      one: what takes the batches. Where its stages are in workers, these read what they can.
      of: what positions count in, see `batches.Batches`.
    """
    self._source = source
    self._of = of
    self._runner = one if one is not None and batch_placement.AreOnWorkers(one.engine) else None
    self._is_decided = False
    # {position: what goes through the batches from there}, kept: workers have what they need.
    self._passes: dict[int, Callable[[], Iterator[batches.PlacedBatch]]] = {}

  def Batches(
    self, position: int = 0, stream: stream_iterator.StreamIterator | None = None
  ) -> _Opened:
    """The batches from a position on; the first call decides who reads them, in this one and later.

    Args:
      position: in the data set or run.
      stream: the one that is there, of an input whose examples have no index; None: at the
        beginning.

    Returns:
      The batches, and the iterator that they are read of, None where examples have an index.
    """
    if stream is None and isinstance(self._source, stream_input.BaseStreamInput):
      stream = self._source.Iterator()
    if self._is_decided and self._runner is not None:
      return self._ReadThere(self._runner, position, stream)
    found = iter(self._source.Dataset(start=position)) if stream is None else stream
    here = batches.AddNotes(found, self._source, position, self._of, worker_connection.IsFailure)
    if self._runner is None:
      return here, stream
    (there, moved), placed, why = self._Tried(self._runner, position, stream)
    first = next(here, None)
    if first is None:
      return here, stream
    self._is_decided = True
    name = batches.InputName(self._source)
    if placed is not None and _Bytes(self._runner, first) == _Bytes(self._runner, placed):
      logging.info('data: %s, %s', name, self._runner.placement.ReadBy(self._source))
      return itertools.chain([placed], there), moved
    why = why or 'what the workers read differs'
    logging.info('data: %s, read by the trainer: %s', name, why)
    self._runner = None
    self._passes.clear()
    return itertools.chain([first], here), stream

  def _ReadThere(
    self,
    one: eval_runner.EvalRunner,
    position: int,
    stream: stream_iterator.StreamIterator | None,
  ) -> _Opened:
    if stream is None:
      if position not in self._passes:
        self._passes[position] = one.placement.Pass(self._source, position)
      there = self._passes[position]()
    else:
      stream = stream.CopyTo(one.placement.first_host)
      there = one.placement.ReadStream(stream)
    there = batches.AddNotes(there, self._source, position, self._of, worker_connection.IsFailure)
    return there, stream

  def _Tried(
    self,
    one: eval_runner.EvalRunner,
    position: int,
    stream: stream_iterator.StreamIterator | None,
  ) -> tuple[_Opened, batches.AnyBatch | None, str]:
    """What the workers read after its first batch, and that, or why they read none."""
    why = batch_placement.WhyNot(self._source)
    if not why:
      try:
        opened = self._ReadThere(one, position, stream)
        return opened, next(opened[0], None), ''
      except Exception as e:
        if worker_connection.IsFailure(e):
          raise
        tf.experimental.async_clear_error()  # Else the next operation here has it, too.
        why = f'the workers cannot: {" ".join(str(e).split())[:_MAX_SHOWN]}'
    return (iter(()), stream), None, why


def _Bytes(one: eval_runner.EvalRunner, batch: batches.AnyBatch) -> list[bytes | None]:
  """What the first and the last stage get of a batch."""
  pieces = [(piece.args, piece.side) for piece in one.MicroBatches(batch)]
  return [None if x is None else tf.io.serialize_tensor(x).numpy() for x in tf.nest.flatten(pieces)]
