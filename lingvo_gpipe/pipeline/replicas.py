# SPDX-License-Identifier: Apache-2.0
"""Replicas of a pipeline: copies of its stages on other devices, fed with other micro-batches.

The first replica holds the layers' own variables; the others hold copies. A step gives each replica
its share of the micro-batches, and the gradients of each weight are added over the replicas.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf
from absl import logging

from lingvo_gpipe.pipeline.stages import stage as stage_lib
from lingvo_gpipe.pipeline.stages import vocabulary_slices, vocabulary_tables

ALL_REDUCE_OPTIONS = ('auto', 'collective', 'send')
# A bucket of gradients is one collective; the first buckets are sent while others are computed.
BUCKET_BYTES = 4 << 20

# The first key of this process, int32. Workers that outlive a process remember its keys, with other
# devices or shapes, so each process begins at a random key. tf.distribute's keys begin lower.
_first_key = (1 << 20) + secrets.randbelow(1 << 9) * (1 << 21)
_group_keys: dict[tuple[str, ...], int] = {}
_StageT = TypeVar('_StageT', bound=stage_lib.Stage)
_instance_keys = itertools.count(_first_key)


@dataclasses.dataclass(frozen=True)
class Replica:
  """The stages of one replica.

  Attributes:
    stages: the stages, in order.
    variables: {path: variable} of all layers, copies of tied weights included.
    slices: the slices of the vocabulary, if it is shared out.
    tables: the parts of the embedding, if that is shared out, too.
  """

  stages: list[stage_lib.Stage]
  variables: Mapping[str, tf.Variable]
  slices: list[vocabulary_slices.Slice] = dataclasses.field(default_factory=list)
  tables: list[vocabulary_tables.Table] = dataclasses.field(default_factory=list)

  @property
  def training_stages(self) -> list[stage_lib.Stage]:
    """The stages of a training schedule; slices replace the head."""
    return [*self.stages[:-1], *self.slices] if self.slices else self.stages

  @property
  def holders(self) -> list[stage_lib.Stage]:
    """The stages that hold the model's weights: all, slices with shards of the head, and tables."""
    return [*self.stages, *(s for s in self.slices if not s.paths), *self.tables]

  def AddTiedGradients(self, ties: Mapping[str, str]) -> None:
    """Adds the gradients of tied weights, and of slices, to their owners' gradients."""
    owners = {
      path: (s.device, accumulator)
      for s in self.holders
      for path, accumulator in zip(s.trained, s.accumulators, strict=True)
    }
    for s in self.holders:
      for path, accumulator in zip(s.mirrors, s.mirror_accumulators, strict=True):
        device, owner = owners[ties[path]]
        with tf.device(s.device):
          gradient = tf.identity(accumulator)
        with tf.device(device):
          owner.assign_add(gradient)
    vocabulary_slices.AddSliceGradients(self.slices, owners)

  def SyncTies(self, ties: Mapping[str, str]) -> None:
    """Copies tied weights to the stages that use them."""
    for tied, owner in ties.items():
      _Assign(self.variables[tied], self.variables[owner])


def Copy(first: Replica, devices: Sequence[str]) -> Replica:
  """Returns a copy of the first replica.

  Args:
    first: the first replica, without accumulators.
    devices: for each of its stages, and then of its slices, the device of the copy. Each table is
      on the device of its slice.
  """
  copies: dict[int, tf.Variable] = {}

  def CopyStage(s: _StageT, device: str) -> _StageT:
    for v in tf.nest.flatten(s.variables):
      if id(v) not in copies:
        with tf.init_scope(), tf.device(device):
          copies[id(v)] = tf.Variable(
            tf.identity(v), trainable=v.trainable, name=v.name.split(':')[0]
          )
    return dataclasses.replace(
      s,
      device=device,
      variables=tf.nest.map_structure(lambda v: copies[id(v)], s.variables),
      trained={path: copies[id(v)] for path, v in s.trained.items()},
      mirrors={path: copies[id(v)] for path, v in s.mirrors.items()},
      accumulators=[],
      mirror_accumulators=[],
    )

  of_stages, of_slices = devices[: len(first.stages)], devices[len(first.stages) :]
  stages = list(itertools.starmap(CopyStage, zip(first.stages, of_stages, strict=True)))
  slices = list(itertools.starmap(CopyStage, zip(first.slices, of_slices, strict=True)))
  tables = list(map(CopyStage, first.tables, of_slices))
  variables = {path: copies[id(v)] for path, v in first.variables.items()}
  return Replica(stages, variables, slices, tables)


def Shares(num_micro_batches: int, num_replicas: int) -> list[range]:
  """Returns the micro-batches of each replica: consecutive, and shared out evenly.

  If the number does not divide, the first replicas get one more. If there are fewer micro-batches
  than replicas, the last replicas get none.
  """
  small, larger = divmod(num_micro_batches, num_replicas)
  sizes = [small + (r < larger) for r in range(num_replicas)]
  ends = list(itertools.accumulate(sizes))
  return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def SyncWeights(replicas: Sequence[Replica], paths: Iterable[str] | None = None) -> None:
  """Copies the first replica's variables, all or only these paths, to the other replicas."""
  first = replicas[0]
  for path in first.variables if paths is None else paths:
    for replica in replicas[1:]:
      _Assign(replica.variables[path], first.variables[path])


def SumStatistics(replicas: Sequence[Replica], xla: bool) -> None:
  """Lets the layers that ask for it sum their statistics over the replicas.

  Raises:
    ValueError: a layer asks for it, and XLA compiles the stages.
  """
  for of_stage in zip(*(replica.stages for replica in replicas), strict=True):
    layers = [layer for top in of_stage[0].layers for layer in top.Descendants()]
    summing = [layer.path for layer in layers if layer.sums_over_replicas]
    if summing and xla:
      raise ValueError(
        f'{summing[0]} has over_replicas=True: XLA does not compile sums over replicas; set '
        'xla=False for its PipeliningLayer, or take larger micro-batches instead'
      )
    replica_sum = StatisticsSum([s.device for s in of_stage]) if summing else None
    for s in of_stage:
      s.replica_sum = replica_sum


class GradientSum:
  """Adds the gradients of each weight over all replicas, bit-for-bit equally in each replica."""

  def __init__(self, replicas: Sequence[Replica], all_reduce: str = 'auto') -> None:
    """Groups the gradients into buckets.

    Args:
      replicas: all replicas, with their accumulators; one replica needs no sums.
      all_reduce: 'collective' (TensorFlow's collective operations; NCCL between GPUs), 'send' (two
        replicas exchange their gradients and both add them; of more replicas, one adds for all and
        sends the sum back), or 'auto' ('send' on CPUs, else 'collective').

    Raises:
      ValueError: all_reduce is not an option.
    """
    if all_reduce not in ALL_REDUCE_OPTIONS:
      raise ValueError(f'all_reduce is one of {", ".join(ALL_REDUCE_OPTIONS)}; got {all_reduce!r}')
    self._buckets: list[_Bucket] = []
    if len(replicas) == 1:
      return
    if all_reduce == 'auto':
      on_cpu = tf.DeviceSpec.from_string(replicas[0].stages[0].device).device_type == 'CPU'
      all_reduce = 'send' if on_cpu else 'collective'
    logging.info('Gradients are added over %d replicas by %s.', len(replicas), all_reduce)
    self._is_collective = all_reduce == 'collective'
    # The last stage's buckets come first, as in backward, so that stages that share a device do not
    # wait for each other.
    for of_stage in reversed(list(zip(*(replica.holders for replica in replicas), strict=True))):
      devices = tuple(s.device for s in of_stage)
      for indices in _Buckets(of_stage[0].accumulators):
        rows = [[s.accumulators[i] for i in indices] for s in of_stage]
        self._buckets.append(_Bucket(f'gradient_sum_{of_stage[0].index}', devices, rows))

  def Add(self) -> None:
    """Leaves the sums in all replicas' accumulators; to be called in a tf.function.

    The sum of a bucket waits only for the last writers of its own accumulators, so it overlaps the
    remaining backward pass.
    """
    # All devices must start the collectives that they share in the same order, or each may wait for
    # one that the other device has not started.
    last: dict[str, tf.Tensor] = {}
    for bucket in self._buckets:
      with tf.name_scope(bucket.name):
        if self._is_collective:
          bucket.AddByCollective(last)
        else:
          bucket.AddBySend()


class _Bucket:
  """Accumulators of one stage and dtype: for each replica its device and its variables.

  Attributes:
    name: name of its operations, in graphs and in profiles.
  """

  def __init__(self, name: str, devices: tuple[str, ...], rows: list[list[tf.Variable]]) -> None:
    self.name = name
    self._devices = devices
    self._rows = rows
    self._group_key = _GroupKey(devices)
    self._instance_key = next(_instance_keys)

  def AddByCollective(self, last: dict[str, tf.Tensor]) -> None:
    """Adds after the collectives in `last`, {device: result}, and sets its results there."""
    for device, row in zip(self._devices, self._rows, strict=True):
      with tf.device(device):
        flat = tf.concat([tf.reshape(a, [-1]) for a in row], axis=0)
        with tf.control_dependencies([last[device]] if device in last else []):
          # Without GPUs or NCCL, TensorFlow uses rings; "auto" always means rings.
          total = _AllReduce(flat, len(self._rows), self._group_key, self._instance_key, 'nccl')
        last[device] = total
        pieces = tf.split(total, [a.shape.num_elements() for a in row])
        for a, piece in zip(row, pieces, strict=True):
          a.assign(tf.reshape(piece, a.shape))

  def AddBySend(self) -> None:
    num_replicas = len(self._rows)
    for i, of_replicas in enumerate(zip(*self._rows, strict=True), start=self._instance_key):
      values = _Values(self._devices, of_replicas)
      # The order in which TensorFlow adds three tensors or more depends on which of them it may
      # overwrite. So two replicas each add for themselves; of more replicas one adds for all, and
      # they take turns.
      adding = self._devices if num_replicas == 2 else [self._devices[i % num_replicas]]
      totals = []
      for device in adding:
        with tf.device(device):
          totals.append(tf.add_n(values))
      pairs = zip(self._devices, of_replicas, strict=True)
      for (device, a), total in zip(pairs, itertools.cycle(totals), strict=False):
        with tf.device(device):
          a.assign(total)


class ShardedWeights:
  """Trained weights that are each owned by one replica, which alone has the slots and updates it.

  This is stage 1 of ZeRO (Rajbhandari et al. 2020), with whole weights as shards. It sends as many
  bytes as an all-reduce: gradients to the owner, weights back.
  """

  def __init__(self, replicas: Sequence[Replica]) -> None:
    """Assigns the weights of each stage, largest first, to the replica with the least bytes."""
    self._replicas = replicas
    self._owner: dict[str, int] = {}
    # Bytes of each replica, by device, so that stages of one device do not all favour one replica.
    loads: dict[str, list[int]] = {}
    for s in replicas[0].holders:
      load = loads.setdefault(s.device, [0] * len(replicas))
      for path, v in sorted(s.trained.items(), key=lambda item: -_NumBytes(item[1])):
        self._owner[path] = owner = load.index(min(load))
        load[owner] += _NumBytes(v)

  def Stages(self) -> list[Shard]:
    """Returns for each replica and stage the weights that it owns there, for a learner."""
    shards = []
    for r, replica in enumerate(self._replicas):
      for s in replica.holders:
        pairs = zip(s.trained.items(), s.accumulators, strict=True)
        owned = [(path, v, a) for (path, v), a in pairs if self._owner[path] == r]
        shards.append(Shard(s.device, {path: v for path, v, _ in owned}, [a for *_, a in owned]))
    return shards

  def AddGradients(self) -> None:
    """Leaves the sums in the owners' accumulators; to be called in a tf.function."""
    for of_stage in zip(*(replica.holders for replica in self._replicas), strict=True):
      devices = [s.device for s in of_stage]
      with tf.name_scope(f'gradient_sum_{of_stage[0].index}'):
        for i, path in enumerate(of_stage[0].trained):
          owner = of_stage[self._owner[path]]
          values = _Values(devices, [s.accumulators[i] for s in of_stage])
          with tf.device(owner.device):
            owner.accumulators[i].assign(tf.add_n(values))

  def SyncWeights(self) -> None:
    """Copies the weights from their owners to all other replicas."""
    for path, r in self._owner.items():
      for other, replica in enumerate(self._replicas):
        if other != r:
          _Assign(replica.variables[path], self._replicas[r].variables[path])


class StatisticsSum:
  """Adds tensors of a stage's layers over the replicas, inside the functions that they all run.

  All replicas reach the same calls in the same order, each once for a micro-batch of its own, so
  calls match up by position and need no tags. In a function, each sum waits for the one before it.
  """

  def __init__(self, devices: Sequence[str]) -> None:
    """Takes the stage's device of each replica."""
    self._num_replicas = len(devices)
    self._group_key = _GroupKey(tuple(devices))
    self._instance_keys: dict[str, int] = {}
    self._last: dict[tf.Graph, tf.Tensor] = {}

  def __call__(self, place: str, value: tf.Tensor) -> tf.Tensor:
    """Returns the sum over the replicas; to be called while a stage function is traced.

    Args:
      place: distinguishes the calls of one trace.
      value: a tensor of the same shape in all replicas and traces.
    """

    @tf.custom_gradient
    def Sum(x: tf.Tensor) -> Any:
      return self._Sum(place, x), lambda dy: self._Sum(f'gradient of {place}', dy)

    return Sum(value)

  def _Sum(self, place: str, value: tf.Tensor) -> tf.Tensor:
    if place not in self._instance_keys:
      self._instance_keys[place] = next(_instance_keys)
    graph = tf.identity(value).graph  # The value itself may be of an enclosing graph.
    # Otherwise sums of independent branches could start in another order in each replica.
    with tf.control_dependencies([self._last[graph]] if graph in self._last else []):
      self._last[graph] = _AllReduce(
        value, self._num_replicas, self._group_key, self._instance_keys[place], 'ring'
      )
    return self._last[graph]


@dataclasses.dataclass
class Shard:
  """The weights that a learner updates on one device (see `learner.LearnerStage`)."""

  device: str
  trained: dict[str, tf.Variable]
  accumulators: list[tf.Variable]


def _Buckets(accumulators: Sequence[tf.Variable]) -> list[list[int]]:
  """Returns buckets of indices of accumulators, of one dtype and about BUCKET_BYTES each.

  The last layers come first.
  """
  buckets: list[list[int]] = []
  open_buckets: dict[tf.DType, tuple[list[int], int]] = {}
  # Backward ends with the first layers; the gradients of the last layers are ready earlier.
  for i, a in reversed(list(enumerate(accumulators))):
    bucket, size = open_buckets.get(a.dtype, ([], BUCKET_BYTES))
    if size + _NumBytes(a) > BUCKET_BYTES:
      bucket, size = [], 0
      buckets.append(bucket)
    bucket.append(i)
    open_buckets[a.dtype] = (bucket, size + _NumBytes(a))
  return buckets


def _GroupKey(devices: tuple[str, ...]) -> int:
  return _group_keys.setdefault(devices, _first_key + len(_group_keys))


def _AllReduce(
  value: tf.Tensor, num_replicas: int, group_key: int, instance_key: int, hint: str
) -> tf.Tensor:
  return tf.raw_ops.CollectiveReduce(
    input=value,
    group_size=num_replicas,
    group_key=group_key,
    instance_key=instance_key,
    merge_op='Add',
    final_op='Id',
    subdiv_offsets=[0],
    communication_hint=hint,
    # With a timeout, each call would leave a thread behind that sleeps until the timeout. If a
    # worker dies, the supervisor ends the step that waits for it.
    timeout_seconds=0,
  )


def _Values(devices: Sequence[str], variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
  """Returns the variables' values, each read on its own device."""
  values = []
  for device, v in zip(devices, variables, strict=True):
    with tf.device(device):
      values.append(tf.identity(v))
  return values


def _Assign(target: tf.Variable, source: tf.Variable) -> None:
  with tf.device(source.device):
    value = tf.identity(source)
  with tf.device(target.device):
    target.assign(value)


def _NumBytes(v: tf.Variable) -> int:
  return int(v.shape.num_elements()) * int(v.dtype.size)
