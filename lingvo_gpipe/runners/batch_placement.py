# SPDX-License-Identifier: Apache-2.0
"""Reads batches where stages need them: on the workers of each replica's first and last stage.

Read by the trainer, each batch would go over its link; a stream is read on one of them. A worker
has nothing but TensorFlow's operations and what lies in its file system: functions of Python stay
with the trainer.
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

# What a data set holds in memory is sent for each part that is read; a message is below 2 GiB.
MAX_BYTES_IN_MEMORY = 1 << 30

# What is read by each replica's first and last stage.
_Parts = list[list[tuple[tf.Tensor, ...]]]

_PYTHON = re.compile(r'(Eager)?PyFunc(Stateless)?')


@dataclasses.dataclass(frozen=True)
class Share:
  """What one replica takes of a batch.

  Attributes:
    rows: of the batch.
    num_micro_batches: that these rows are cut into.
    first: the CPU beside its first stage.
    last: the CPU beside its last stage.
  """

  rows: range
  num_micro_batches: int
  first: str
  last: str


class Placement:
  """Where the parts of a batch belong.

  Attributes:
    first_host: the CPU beside the first stage of the first replica.
  """

  def __init__(
    self,
    task: task_lib.BaseTask,
    stages: engine.PipelineEngine,
    batch_spec: nested_map.NestedMap,
  ) -> None:
    """Finds what a task's first and last stage read of batches of this spec."""
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
    # What neither reads, `CheckBatch` may: the loss is beside what else it looks at.
    self._keys_first = [key for key in self._keys if key in inputs]
    self._keys_last = [key for key in self._keys if key in sides or key not in inputs]

  def ReadBy(self, source: base_input_generator.BaseInputGenerator) -> str:
    """Which workers read an input, for the log."""
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
    """What the replicas take of a batch of so many rows, without those that get none."""
    sizes = micro_batch.Sizes(num_rows, self._num_micro_batches)
    shares = replicas.Shares(len(sizes), len(self._ends))
    return [
      Share(range(sum(sizes[: share.start]), sum(sizes[: share.stop])), len(share), *ends)
      for ends, share in zip(self._ends, shares, strict=True)
      if share
    ]

  def Keys(self, share: Share) -> tuple[list[str], list[str]]:
    """The fields that are read beside the first stage, and those beside the last one."""
    return (self._keys, []) if share.first == share.last else (self._keys_first, self._keys_last)

  def Views(
    self, batch: batches.PlacedBatch
  ) -> Iterator[tuple[Share, nested_map.NestedMap, nested_map.NestedMap]]:
    """For each share its rows as a batch: for the first stage and for the last one.

    They differ in where those fields are that both have.
    """
    shares = self.Shares(batches.NumRows(batch))
    for share, first, last in zip(shares, batch.firsts, batch.lasts, strict=True):
      keys_first, keys_last = self.Keys(share)
      of_first = dict(zip(keys_first, first, strict=True))
      of_last = dict(zip(keys_last, last, strict=True))
      for_first, for_last = {**of_last, **of_first}, {**of_first, **of_last}
      yield (
        share,
        self._spec.Pack([for_first[key] for key in self._keys]),
        self._spec.Pack([for_last[key] for key in self._keys]),
      )

  def Pass(
    self, source: base_input_generator.BaseInputGenerator, start: int
  ) -> Callable[[], Iterator[batches.PlacedBatch]]:
    """What goes through an input from a position on, at each call: the workers read and check.

    What they need for that is made and sent once, here. While a batch is in use the next is read.
    """
    if isinstance(source, bucketed_input.BucketedInput):
      parts = self._Planned(source, start)
    else:
      parts = self._Read(source, start)
    # Not until the end of the data shows: TensorFlow would print an error of the worker's.
    return functools.partial(self._Ahead, parts, source.NumBatches(start))

  def _Ahead(
    self, parts: Callable[[], Iterator[_Parts]], num_batches: int | None
  ) -> Iterator[batches.PlacedBatch]:
    found = parts()

    def ReadNext() -> batches.PlacedBatch:
      return self._Checked(next(found))

    left = itertools.count() if num_batches is None else iter(range(num_batches))
    if next(left, None) is None:
      return
    # Alone: whether workers read at all hangs on it. It is traced, and goes to where the run is.
    batch = ReadNext()
    heartbeat.Step(heartbeat.READ)
    yield batch
    with futures.ThreadPoolExecutor(max_workers=1) as thread:
      coming = (thread.submit(ReadNext) for _ in left)
      reading = next(coming, None)
      while reading is not None:
        heartbeat.Begin(heartbeat.READ)
        batch = reading.result()
        heartbeat.Step(heartbeat.READ)
        reading = next(coming, None)
        yield batch

  def ReadStream(self, stream: stream_iterator.StreamIterator) -> Iterator[batches.PlacedBatch]:
    """The batches of a stream; their rows go from its host to where stages need them.

    None is taken ahead, for checkpoints have the state of the stream.
    """

    def Parts(batch: nested_map.NestedMap) -> _Parts:
      parts: _Parts = []
      for share in self.Shares(micro_batch.BatchSize(batch)):
        rows = batch.Transform(operator.itemgetter(slice(share.rows.start, share.rows.stop)))
        of_share = []
        for host, keys in zip(_Hosts(share), self.Keys(share), strict=True):
          with tf.device(host):
            of_share.append(tuple(tf.identity(rows.GetItem(key)) for key in keys))
        parts.append(of_share)
      return parts

    for parts in stream.Map(Parts):
      read = self._Checked(parts)
      heartbeat.Step(heartbeat.READ)
      yield read
      heartbeat.Begin(heartbeat.READ)
    heartbeat.Step(heartbeat.READ)

  def _Checked(self, parts: _Parts) -> batches.PlacedBatch:
    batch = batches.PlacedBatch(*zip(*parts, strict=True))
    for share, _, view in self.Views(batch):
      with tf.device(share.last):
        self._task.CheckBatch(view)
    return batch

  def _Read(
    self, source: base_input_generator.BaseInputGenerator, start: int
  ) -> Callable[[], Iterator[_Parts]]:
    """What goes through the parts of batches that are read as a data set on each worker."""
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
      found = [[read() for read in of_share] for of_share in readers]
      while True:
        yield [[next(of_host) for of_host in of_share] for of_share in found]

    return Parts

  def _Planned(
    self, source: bucketed_input.BucketedInput, start: int
  ) -> Callable[[], Iterator[_Parts]]:
    """The same of batches in buckets: workers get which rows they consist of, and make them."""
    largest = max(micro_batch.BatchSize(spec) for spec in source.BatchSpecs())
    makers = [
      [
        _RowMaker(source, host, keys)
        for host, keys in zip(_Hosts(share), self.Keys(share), strict=True)
      ]
      for share in self.Shares(largest)
    ]
    plans = source.Plans(start).prefetch(1)  # The order of the next epoch takes a while.

    def Parts() -> Iterator[_Parts]:
      for indices, weights, length in plans:
        parts = []
        # Smaller batches may have no rows for the last replicas.
        for share, of_share in zip(self.Shares(len(indices)), makers, strict=False):
          rows = slice(share.rows.start, share.rows.stop)
          parts.append([make(indices[rows], weights[rows], length) for make in of_share])
        yield parts

    return Parts


def AreOnWorkers(stages: engine.PipelineEngine) -> bool:
  """Whether stages are in other processes."""
  return bool(worker_hosts.Of(s.device for one in stages.replicas for s in one.stages))


def WhyNot(source: base_input_generator.BaseInputGenerator) -> str:
  """Why workers cannot read an input, as far as it can be told without trying; '' if they may."""
  name, p = type(source).__name__, source.params
  owners = (
    base_input_generator.BaseInputGenerator,
    bucketed_input.BucketedInput,
    stream_input.BaseStreamInput,
  )
  if type(source).Dataset not in [owner.Dataset for owner in owners]:
    return f'{name} has a Dataset of its own'  # Which two workers need not read in one order.
  if p.read_on_workers is False:
    return 'input.read_on_workers is False'
  if isinstance(source, bucketed_input.BucketedInput):
    rows = functools.partial(source.Rows, source.Tensors())
    traced = tf.function(rows, autograph=False).get_concrete_function(*bucketed_input.PLAN_SPEC)
  elif isinstance(source, stream_input.BaseStreamInput):
    traced = pipeline_graph.Trace(source.Dataset)
  else:
    traced = pipeline_graph.Trace(functools.partial(source.RowsDataset, 0, range(p.batch_size)))
  nodes = itertools.chain(*pipeline_graph.Operations(traced))
  if found := sorted({node.op for node in nodes if _PYTHON.fullmatch(node.op)}):
    return f'{name} runs functions of Python ({", ".join(found)})'
  captured = traced.captured_inputs
  if any(x.dtype in (tf.resource, tf.variant) for x in captured):
    return f'{name} uses a variable or a table of this process'
  size = sum(x.shape.num_elements() * x.dtype.size for x in captured)
  if size > MAX_BYTES_IN_MEMORY:
    return f'{name} holds {size:,} bytes in memory'
  return ''


def _Reader(
  host: str, make: Callable[[], tf.data.Dataset]
) -> Callable[[], Iterator[tuple[tf.Tensor, ...]]]:
  """What goes through a data set that lives on another host; its elements stay there."""
  with tf.device(host):
    dataset = make()
  # Where an iterator of another host is called by itself, an error is told of twice.
  read = tf.function(lambda iterator: next(iterator), autograph=False)

  def Read() -> Iterator[tuple[tf.Tensor, ...]]:
    with tf.device(host):
      iterator = iter(dataset)
    while True:
      with tf.device(host):
        found = read(iterator)
      yield found

  return Read


def _RowMaker(
  source: bucketed_input.BucketedInput, host: str, keys: Sequence[str]
) -> Callable[..., tuple[tf.Tensor, ...]]:
  """What makes fields of rows of a plan on another host, of a copy of their tensors there."""
  if not keys:
    return lambda *plan: ()
  tensors = source.Tensors()
  with tf.device(host):
    tensors = tensors.Transform(tf.identity)
  make = tf.function(
    lambda *args: tuple(map(source.Rows(*args).GetItem, keys)),
    input_signature=[tensors.Transform(tf.TensorSpec.from_tensor), *bucketed_input.PLAN_SPEC],
    autograph=False,
  )

  def Make(*plan: tf.Tensor) -> tuple[tf.Tensor, ...]:
    with tf.device(host):
      made: tuple[tf.Tensor, ...] = make(tensors, *plan)
      return made

  # The first call brings the function to its worker. Beside others that run there that may break
  # them, see `worker_hosts._Gate`.
  Make(*(tf.zeros([0] * spec.shape.rank, spec.dtype) for spec in bucketed_input.PLAN_SPEC))
  return Make


def _Hosts(share: Share) -> tuple[str, str]:
  return share.first, share.last
