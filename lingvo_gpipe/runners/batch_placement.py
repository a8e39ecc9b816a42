# SPDX-License-Identifier: Apache-2.0
"""Reads batches on the workers that need them: with each replica's first and last stage.

If the trainer read the batches, all of them would cross its network link. A worker runs only
TensorFlow operations and sees only its own file system, so the trainer must read an input that
calls Python functions. A stream is read on one worker.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures

import tensorflow as tf

from lingvo_gpipe.core import heartbeat, nested_map
from lingvo_gpipe.distributed import worker_hosts
from lingvo_gpipe.experiment import task as task_lib
from lingvo_gpipe.input import (
  base_input_generator,
  batches,
  bucketed_input,
  pipeline_graph,
  stream_input,
  stream_iterator,
)
from lingvo_gpipe.pipeline import engine, replicas
from lingvo_gpipe.pipeline.stages import micro_batch

# The tensors of a data set are sent for each part that is read, in messages below 2 GiB.
MAX_BYTES_IN_MEMORY = 1 << 30

# For each replica with rows, the fields of its first and of its last stage.
_Parts = list[list[tuple[tf.Tensor, ...]]]

_PYTHON = re.compile(r'(Eager)?PyFunc(Stateless)?')


@dataclasses.dataclass(frozen=True)
class Share:
  """One replica's share of a batch.

  Attributes:
    rows: rows of the batch.
    num_micro_batches: number of micro-batches that these rows are split into.
    first: CPU of the host of the replica's first stage.
    last: CPU of the host of the replica's last stage.
  """

  rows: range
  num_micro_batches: int
  first: str
  last: str


class Placement:
  """Maps the parts of a batch to the hosts of the stages that read them.

  Attributes:
    first_host: CPU of the host of the first replica's first stage.
  """

  def __init__(
    self,
    task: task_lib.BaseTask,
    stages: engine.PipelineEngine,
    batch_spec: nested_map.NestedMap,
  ) -> None:
    """Finds the fields that a task's first and last stage read of batches of this spec."""
    self._task = task
    self._spec = batch_spec
    self._num_micro_batches = 1 if task.pipeline is None else task.pipeline.num_micro_batches
    self._ends = [
      tuple(worker_hosts.Host(replica.stages[k].device) for k in (0, -1))
      for replica in stages.replicas
    ]
    self.first_host = self._ends[0][0]
    self._keys = batch_spec.Keys()
    inputs = task_lib.FindReadFields(task.PipelineInputs, batch_spec)
    sides = task_lib.FindReadFields(task.LossInputs, batch_spec)
    # Fields that neither stage reads go to the last one, where `CheckBatch` may read them.
    self._keys_first = [key for key in self._keys if key in inputs]
    self._keys_last = [key for key in self._keys if key in sides or key not in inputs]

  def ReadBy(self, source: base_input_generator.BaseInputGenerator) -> str:
    """Returns a log text that names the workers that read an input."""
    if isinstance(source, stream_input.BaseStreamInput):
      return f'read by worker {worker_hosts.WorkerOf(self.first_host)}'
    size = micro_batch.BatchSize(source.BatchSpec())
    first, last = (
      ', '.join(map(str, dict.fromkeys(worker_hosts.WorkerOf(host) for host in hosts)))
      for hosts in zip(*map(_Hosts, self.Shares(size)), strict=True)
    )
    if first == last:
      return f'read by worker {first}'
    return f'read by worker {first}, labels by worker {last}'

  def Shares(self, num_rows: int) -> list[Share]:
    """Returns the replicas' shares of a batch of this many rows; empty shares are left out."""
    sizes = micro_batch.Sizes(num_rows, self._num_micro_batches)
    shares = replicas.Shares(len(sizes), len(self._ends))
    return [
      Share(range(sum(sizes[: share.start]), sum(sizes[: share.stop])), len(share), *ends)
      for ends, share in zip(self._ends, shares, strict=True)
      if share
    ]

  def Keys(self, share: Share) -> tuple[list[str], list[str]]:
    """Returns the fields to read on the first stage's host, and on the last stage's host."""
    return (self._keys, []) if share.first == share.last else (self._keys_first, self._keys_last)

  def Views(
    self, batch: batches.PlacedBatch
  ) -> Iterator[tuple[Share, nested_map.NestedMap, nested_map.NestedMap]]:
    """Yields each share with its rows as a batch for the first stage and as one for the last.

    Fields that both stages read are tensors of different hosts in the two batches.
    """
    shares = self.Shares(batches.NumRows(batch))
    for share, first, last in zip(shares, batch.firsts, batch.lasts, strict=True):
      keys_first, keys_last = self.Keys(share)
      first_fields = dict(zip(keys_first, first, strict=True))
      last_fields = dict(zip(keys_last, last, strict=True))
      for_first, for_last = {**last_fields, **first_fields}, {**first_fields, **last_fields}
      yield (
        share,
        self._spec.Pack([for_first[key] for key in self._keys]),
        self._spec.Pack([for_last[key] for key in self._keys]),
      )

  def Pass(
    self, source: base_input_generator.BaseInputGenerator, start: int
  ) -> Callable[[], Iterator[batches.PlacedBatch]]:
    """Returns a function that iterates over an input from a position; the workers read and check.

    The functions and data that workers need are sent once, here. The next batch is read while a
    batch is in use.
    """
    if isinstance(source, bucketed_input.BucketedInput):
      parts = self._BucketedParts(source, start)
    else:
      parts = self._Read(source, start)
    # Counts the batches: at the end of the data TensorFlow would print an error of the worker.
    return functools.partial(self._Ahead, parts, source.NumBatches(start))

  def _Ahead(
    self, parts: Callable[[], Iterator[_Parts]], num_batches: int | None
  ) -> Iterator[batches.PlacedBatch]:
    iterator = parts()

    def ReadNext() -> batches.PlacedBatch:
      return self._MakeBatch(next(iterator))

    numbers = itertools.count() if num_batches is None else iter(range(num_batches))
    if next(numbers, None) is None:
      return
    # The first batch decides whether workers read at all, so nothing is read ahead of it. Reading
    # it traces the functions and sends them to the workers.
    batch = ReadNext()
    heartbeat.Step(heartbeat.READ)
    yield batch
    with futures.ThreadPoolExecutor(max_workers=1) as thread:
      coming = (thread.submit(ReadNext) for _ in numbers)
      reading = next(coming, None)
      while reading is not None:
        heartbeat.Begin(heartbeat.READ)
        batch = reading.result()
        heartbeat.Step(heartbeat.READ)
        reading = next(coming, None)
        yield batch

  def ReadStream(self, stream: stream_iterator.StreamIterator) -> Iterator[batches.PlacedBatch]:
    """Yields the batches of a stream; their rows go from its host to the hosts of the stages.

    Reads no batch ahead, because checkpoints store the state of the stream.
    """

    def Parts(batch: nested_map.NestedMap) -> _Parts:
      parts: _Parts = []
      for share in self.Shares(micro_batch.BatchSize(batch)):
        rows = batch.Transform(operator.itemgetter(slice(share.rows.start, share.rows.stop)))
        fields = []
        for host, keys in zip(_Hosts(share), self.Keys(share), strict=True):
          with tf.device(host):
            fields.append(tuple(tf.identity(rows.GetItem(key)) for key in keys))
        parts.append(fields)
      return parts

    for parts in stream.Map(Parts):
      read = self._MakeBatch(parts)
      heartbeat.Step(heartbeat.READ)
      yield read
      heartbeat.Begin(heartbeat.READ)
    heartbeat.Step(heartbeat.READ)

  def _MakeBatch(self, parts: _Parts) -> batches.PlacedBatch:
    batch = batches.PlacedBatch(*zip(*parts, strict=True))
    for share, _, view in self.Views(batch):
      with tf.device(share.last):
        self._task.CheckBatch(view)
    return batch

  def _Read(
    self, source: base_input_generator.BaseInputGenerator, start: int
  ) -> Callable[[], Iterator[_Parts]]:
    """Returns a function that iterates over batches, read in parts by data sets on the workers."""
    readers = [
      [
        _Reader(host, functools.partial(source.RowsDataset, start, share.rows, keys))
        if keys
        else functools.partial(itertools.repeat, ())
        for host, keys in zip(_Hosts(share), self.Keys(share), strict=True)
      ]
      for share in self.Shares(source.params.batch_size)
    ]

    def Parts() -> Iterator[_Parts]:
      iterators = [[read() for read in readers_of_share] for readers_of_share in readers]
      while True:
        yield [[next(part) for part in parts_of_share] for parts_of_share in iterators]

    return Parts

  def _BucketedParts(
    self, source: bucketed_input.BucketedInput, start: int
  ) -> Callable[[], Iterator[_Parts]]:
    """Returns a function that iterates over bucketed batches, which workers make of row numbers."""
    largest = max(micro_batch.BatchSize(spec) for spec in source.BatchSpecs())
    makers = [
      [
        _RowMaker(source, host, keys)
        for host, keys in zip(_Hosts(share), self.Keys(share), strict=True)
      ]
      for share in self.Shares(largest)
    ]
    orders = source.BatchRows(start).prefetch(1)  # Computing the order of an epoch takes a while.

    def Parts() -> Iterator[_Parts]:
      for indices, weights, length in orders:
        parts = []
        # Smaller batches may have no rows for the last replicas.
        for share, makers_of_share in zip(self.Shares(len(indices)), makers, strict=False):
          rows = slice(share.rows.start, share.rows.stop)
          parts.append([make(indices[rows], weights[rows], length) for make in makers_of_share])
        yield parts

    return Parts


def AreOnWorkers(stages: engine.PipelineEngine) -> bool:
  """Whether stages run in other processes."""
  return bool(
    worker_hosts.ListHosts(s.device for replica in stages.replicas for s in replica.stages)
  )


def WhyNotOnWorkers(source: base_input_generator.BaseInputGenerator) -> str | None:
  """Returns why workers cannot read an input; None if there is no known reason."""
  name, p = type(source).__name__, source.params
  owners = (
    base_input_generator.BaseInputGenerator,
    bucketed_input.BucketedInput,
    stream_input.BaseStreamInput,
  )
  if type(source).Dataset not in [owner.Dataset for owner in owners]:
    return f'{name} overrides Dataset'  # Two workers may then read in different orders.
  if p.read_on_workers is False:
    return 'input.read_on_workers is False'
  if isinstance(source, bucketed_input.BucketedInput):
    rows = functools.partial(source.Rows, source.Tensors())
    traced = tf.function(rows, autograph=False).get_concrete_function(*bucketed_input.ROWS_SPEC)
  elif isinstance(source, stream_input.BaseStreamInput):
    traced = pipeline_graph.Trace(source.Dataset)
  else:
    traced = pipeline_graph.Trace(functools.partial(source.RowsDataset, 0, range(p.batch_size)))
  nodes = itertools.chain(*pipeline_graph.Operations(traced))
  if operations := sorted({node.op for node in nodes if _PYTHON.fullmatch(node.op)}):
    return f'{name} calls Python functions ({", ".join(operations)})'
  captured = traced.captured_inputs
  if any(x.dtype in (tf.resource, tf.variant) for x in captured):
    return f'{name} uses a variable or a table of this process'
  size = sum(x.shape.num_elements() * x.dtype.size for x in captured)
  if size > MAX_BYTES_IN_MEMORY:
    return f'{name} holds {size:,} bytes in memory'
  return None


def _Reader(
  host: str, make: Callable[[], tf.data.Dataset]
) -> Callable[[], Iterator[tuple[tf.Tensor, ...]]]:
  """Returns a function that iterates over a data set on another host; its elements stay there."""
  with tf.device(host):
    dataset = make()
  # Without a function, TensorFlow reports an error of another host's iterator twice.
  read = tf.function(lambda iterator: next(iterator), autograph=False)

  def Read() -> Iterator[tuple[tf.Tensor, ...]]:
    with tf.device(host):
      iterator = iter(dataset)
    while True:
      with tf.device(host):
        fields = read(iterator)
      yield fields

  return Read


def _RowMaker(
  source: bucketed_input.BucketedInput, host: str, keys: Sequence[str]
) -> Callable[..., tuple[tf.Tensor, ...]]:
  """Returns a function that makes fields of rows on another host.

  It keeps a copy of the input's tensors there.
  """
  if not keys:
    return lambda *rows: ()
  tensors = source.Tensors()
  with tf.device(host):
    tensors = tensors.Transform(tf.identity)
  make = tf.function(
    lambda *args: tuple(map(source.Rows(*args).GetItem, keys)),
    input_signature=[tensors.Transform(tf.TensorSpec.from_tensor), *bucketed_input.ROWS_SPEC],
    autograph=False,
  )

  def Make(*rows: tf.Tensor) -> tuple[tf.Tensor, ...]:
    with tf.device(host):
      fields: tuple[tf.Tensor, ...] = make(tensors, *rows)
      return fields

  # The first call sends the function to its worker, which may break calls that run there at the
  # same time (see `worker_hosts._Gate`).
  Make(*(tf.zeros([0] * spec.shape.rank, spec.dtype) for spec in bucketed_input.ROWS_SPEC))
  return Make


def _Hosts(share: Share) -> tuple[str, str]:
  return share.first, share.last
