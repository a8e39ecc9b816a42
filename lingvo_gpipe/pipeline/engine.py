# SPDX-License-Identifier: Apache-2.0
"""The engine: emits a schedule as calls of stage functions, and fills the gradient accumulators.

A step of K = 2 stages and M = 2 micro-batches under `gpipe`. Time goes down, devices side by side:

    [1] micro-batches 0 and 1: args, side inputs of the loss, weight of the loss

         device 0                      device 1
    [2]  0F0  args[0,0]
         0F1  args[0,1] ──args[1,0]──> 1F0  args[1,0], side 0 ──> sums of loss and metrics
                        ──args[1,1]──> 1F1  args[1,1], side 1 ──> sums
                                       1B1  x[1,1] ──> recomputes, accumulators += dw       [3]
         0B1  x[0,1]    <──dargs[1,1]─ 1B0  x[1,0] ──> recomputes, accumulators += dw
         0B0  x[0,0]    <──dargs[1,0]─
         recomputes, accumulators += dw
    [4]  the accumulators are full: gradients of the sum of loss_weight * loss

Called inside a tf.function, `Accumulate` lays out one multi-device graph. TensorFlow's dataflow
runtime overlaps the devices and moves the tensors that pass between stages. The actions of a device
are chained by control dependencies, so they run in the order of the schedule. The engine ends at
[4]. `ReplicaUpdate`, or `KerasStep` for a Keras optimizer, sums the replicas and updates weights.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging

from lingvo_gpipe.core import base_layer, fprop_context, nested_map, weight_params
from lingvo_gpipe.pipeline import (
  emission,
  host_copies,
  replicas,
  sparse_gradients,
  vocabulary_emission,
)
from lingvo_gpipe.pipeline.schedule import offload as offload_lib
from lingvo_gpipe.pipeline.schedule import rematerialisation, schedules, shared_vocabulary
from lingvo_gpipe.pipeline.stages import (
  micro_batch,
  shared_functions,
  stage_math,
  vocabulary_slices,
  vocabulary_tables,
  weighted_loss,
)
from lingvo_gpipe.pipeline.stages import stage as stage_lib

_MicroBatches = Sequence[micro_batch.MicroBatch]


class Sums(NamedTuple):
  """The results of `PipelineEngine.Accumulate`, besides the accumulators.

  Attributes:
    metrics: {metric: [sum of value * weight, sum of weight]}, tensors [2] on the last device, or
      the total of a `weighted_loss.Sum` or `Rows`.
    layers: {path of a layer: the sums that it reported for its state}, for `layer_statistics.Next`.
    sparse_gradients: {path of a table: its gradient over all replicas, with a row for each
      occurrence}, only after `KeepSparseGradients`, and for tables that batches only look up.
  """

  metrics: dict[str, tf.Tensor]
  layers: dict[str, nested_map.NestedMap]
  sparse_gradients: dict[str, tf.IndexedSlices]


class PipelineEngine:
  """Runs a flat list of layers, cut into stages, by a schedule.

  Attributes:
    stages: the stages of the first replica.
    replicas: all replicas; the first one has `stages`.
    stage_to_device: for each stage the index of its device.
    ties: {path of a tied weight: path of its owner}.
    shares_vocabulary: whether training and evaluation share the last layer, a softmax, out over all
      devices.
    functions: the traced functions of the stages.
    loss_fn: the loss, or None.
    remat_policy: the part that backward recomputes, of all stages or of each.
    offload: the greatest share of the stages and micro-batches of a device to offload to the host.
    host_copies: the copies to the host and back.
  """

  def __init__(
    self,
    layers: Sequence[base_layer.BaseLayer],
    ends: Sequence[int],
    devices: Sequence[str],
    *,
    stage_to_device: Sequence[int] | None = None,
    schedule: str | schedules.Schedule = 'gpipe',
    remat_policy: rematerialisation.Policy = 'stage',
    xla: bool = True,
    loss_fn: stage_math.LossFn | None = None,
    is_trained: Callable[[str], bool] | None = None,
    ties: Mapping[str, str] | None = None,
    num_replicas: int = 1,
    offload: float = 0.0,
    vocabulary: Sequence[int] = (),
  ) -> None:
    """Puts each stage's variables on its device.

    Args:
      layers: the flat list; outputs of one are the arguments of the next.
      ends: for each stage the index after its last layer, ascending.
      devices: names for tf.device, the same number for each replica, replica by replica. Devices
        without a stage are not used.
      stage_to_device: for each stage the index of its device, as in the schedule; None: the stage's
        own number.
      schedule: name of the training schedule, or a Schedule.
      remat_policy: the part that backward recomputes: one of `rematerialisation.POLICIES`, or for
        each stage one of them or a `ByLayer`.
      xla: whether XLA compiles the stage functions.
      loss_fn: the loss of a micro-batch, which the last stage runs (see `stage_math.LossFn`).
      is_trained: whether to train the trainable variable of a path; None: train all. Frozen weights
        cost no weight gradient, and stages before the first trained weight no backward.
      ties: {path of a tied weight: path of its owner}. The stage of the tied weight holds a copy,
        whose gradient is added to the owner's.
      num_replicas: number of copies of the pipeline, each with its share of the micro-batches.
      offload: the greatest share of the stages and micro-batches of a device whose activations wait
        for backward in the memory of the host (see `schedule.offload`).
      vocabulary: for each device the number of classes of its slice of the last layer, a softmax;
        empty: training does not share it out. `stages` then has one stage more than `ends`, at the
        end: the softmax.

    Raises:
      ValueError: the cut, the devices, the schedule or the policy do not fit.
    """
    self.stage_to_device = tuple(range(len(ends)) if stage_to_device is None else stage_to_device)
    if vocabulary:
      # The softmax leaves the last stage, and becomes a stage of its own on the same device.
      ends = [*ends[:-1], ends[-1] - 1, ends[-1]]
      self.stage_to_device += self.stage_to_device[-1:]
    num_devices = max(self.stage_to_device) + 1
    per_replica = len(devices) // num_replicas
    if per_replica < num_devices or len(devices) % num_replicas:
      for_each = f' for each of {num_replicas} replicas' if num_replicas > 1 else ''
      raise ValueError(
        f'{len(ends)} stages need {num_devices} devices{for_each}, the same number for each; got '
        f'{len(devices)}: {", ".join(devices)}'
      )
    rematerialisation.CheckPolicy(remat_policy)
    self._schedule = schedule
    self.remat_policy = remat_policy
    self.offload = offload
    self.host_copies = host_copies.HostCopies()
    cpus = [d for d in devices if tf.DeviceSpec.from_string(d).device_type == 'CPU']
    if offload and cpus:
      logging.warning('offload frees no memory of %s, which is the host itself', cpus[0])
    self.loss_fn = loss_fn
    self.functions = shared_functions.SharedFunctions(
      len(ends), loss_fn, xla, shares_vocabulary=bool(vocabulary)
    )
    self.ties = dict(ties or {})
    self._logged_small_batch = False
    self.shares_vocabulary, head = bool(vocabulary), layers[-1]
    shard_devices, slice_devices = {}, devices[: len(vocabulary)]
    if vocabulary and head.class_shards:
      shard_devices[head.path] = vocabulary_slices.DevicesOfShards(head, vocabulary, slice_devices)
      if vocabulary_tables.CanShare(layers[0], head):
        shard_devices[layers[0].path] = shard_devices[head.path]
    first_devices = [devices[k] for k in self.stage_to_device]
    self.stages = stage_lib.Stages(
      layers, ends, first_devices, self.ties, is_trained, shard_devices
    )
    variables = {path: v for layer in layers for path, v in layer.VariablesByPath().items()}
    slices: list[vocabulary_slices.Slice] = []
    tables: list[vocabulary_tables.Table] = []
    if layers[0].path in shard_devices:
      self.stages[0], tables = vocabulary_tables.MoveShards(
        self.stages[0], vocabulary, slice_devices
      )
    if shard_devices:
      slices = vocabulary_slices.MoveShards(self.stages[-1], vocabulary, slice_devices)
    elif vocabulary:
      slices = vocabulary_slices.CopySlices(self.stages[-1], self.ties, vocabulary, slice_devices)
    first = replicas.Replica(self.stages, variables, slices, tables)
    self.replicas = [first]
    # Slice n is on device n of its replica.
    placement = [*self.stage_to_device, *range(len(slices))]
    for r in range(1, num_replicas):
      replica_devices = devices[r * per_replica : (r + 1) * per_replica]
      self.replicas.append(replicas.Copy(first, [replica_devices[k] for k in placement]))
    if num_replicas > 1:
      replicas.SumStatistics(self.replicas, xla)
    self._sparse_gradients = sparse_gradients.SparseGradients(
      layers, [*self.stages, *slices], self.ties, self._TrainingMath
    )
    # Until now a tied weight may have an initial value of its own.
    self.SyncTies()

  @property
  def num_stages(self) -> int:
    """S."""
    return len(self.stages)

  @property
  def training_stages(self) -> list[stage_lib.Stage]:
    """The stages of `TrainingSchedule`, in the first replica."""
    return self.replicas[0].training_stages

  @property
  def trained(self) -> dict[str, tf.Variable]:
    """{path: variable} of the trained weights, in the first replica."""
    return {path: v for s in self.holders for path, v in s.trained.items()}

  @property
  def holders(self) -> list[stage_lib.Stage]:
    """The stages that hold weights, in the first replica; see `Replica`."""
    return self.replicas[0].holders

  @property
  def forward_stages(self) -> list[stage_lib.Stage]:
    """The stages of a forward pass without a loss: slices only if they hold the head's weights."""
    has_shards = len(self.holders) > len(self.stages)
    return self.training_stages if has_shards else self.stages

  @property
  def xla(self) -> bool:
    """Whether XLA compiles the stages."""
    return self.functions.xla

  @property
  def compiles_updates(self) -> bool:
    """Whether XLA compiles the updates of the weights, too: unless a device is a CPU.

    An accelerator launches each operation, and an update has about 20 of them for each weight.
    """
    return self.xla and not any('CPU' in v.device for v in self.trained.values())

  @contextlib.contextmanager
  def WithoutXla(self) -> Iterator[None]:
    """Runs the stages of the enclosed code without XLA."""
    compiled = self.functions
    self.functions = compiled.With(xla=False, keeps_sparse=compiled.keeps_sparse)
    try:
      yield
    finally:
      self.functions = compiled

  @property
  def sums_statistics(self) -> bool:
    """Whether replicas wait for each other within their training stages."""
    return any(s.replica_sum is not None for s in self.stages)

  # ---- training and evaluation -------------------------------------------------------------------

  def KeepSparseGradients(self, keeps_sparse: bool) -> None:
    """Sets whether `Accumulate` returns the gradients of tables that batches only look up.

    To be called before the first step.

    Args:
      keeps_sparse: whether it returns them, as rows and indices, and does not use their
        accumulators. The arguments of the first layer must have the batch first.
    """
    if keeps_sparse != self.functions.keeps_sparse:
      self.functions = self.functions.With(xla=self.xla, keeps_sparse=keeps_sparse)

  def Accumulate(
    self,
    micro_batches: _MicroBatches,
    step: tf.Tensor,
    *,
    first_micro_batch: tf.Tensor | int = 0,
    clear: bool = True,
  ) -> Sums:
    """Runs forward and backward of all micro-batches; gradients end in the accumulators.

    The accumulators of each replica then hold the gradient of the sum of `loss_weight * loss` over
    its micro-batches, except for the tables of `KeepSparseGradients`. The update adds the replicas
    and divides by the sum of the loss weights. No weight and no layer's state changes.

    Args:
      micro_batches: the micro-batches of the mini-batch.
      step: int64 scalar, the training step.
      first_micro_batch: number of micro-batches in earlier mini-batches of the same update.
      clear: whether to set the accumulators to zero first; False adds to them.
    """
    counter = fprop_context.StepCounter(step, first_micro_batch)
    self.ClearAccumulators(mirrors_only=not clear)
    walks = self._EmitAll(micro_batches, counter, do_eval=False)
    # Before the ties, because it may add to accumulators of tied weights, which then go to the
    # owners.
    sparse = self._sparse_gradients.Join(walks, micro_batches[0].args)
    for replica in self.replicas:
      replica.AddTiedGradients(self.ties)
    if self.sums_statistics:
      for replica, walk in zip(self.replicas, walks, strict=True):
        _EndWithTheDevice(replica.holders, walk)
    # A step that fails must leave all state as it was: it is run again to find out why.
    with tf.control_dependencies([t for walk in walks for t in walk.LastResults()]):
      layer_sums = self._LayerSums(walks)
    return Sums(self._Sums(walks), layer_sums, sparse)

  def Evaluate(
    self, micro_batches: _MicroBatches, counter: tf.Tensor | None = None
  ) -> dict[str, tf.Tensor]:
    """Runs forward in evaluation mode; returns the metrics' sums, as `Accumulate` does.

    Args:
      micro_batches: the micro-batches. Their loss weights are the weights of auxiliary losses only;
        metrics have their own.
      counter: int64 scalar, the step counter (see `fprop_context`) of micro-batch 0, for layers
        that draw random numbers in evaluation, too; None: 0.
    """
    counter = tf.constant(0, tf.int64) if counter is None else counter
    return self._Sums(self._EmitAll(micro_batches, counter, do_eval=True))

  def _EmitAll(
    self, micro_batches: _MicroBatches, counter: tf.Tensor, *, do_eval: bool
  ) -> list[emission.Emission]:
    """Emits a walk for each replica that has micro-batches."""
    if self.loss_fn is None:
      raise ValueError('the engine was made without a loss: give loss_fn, to Place if that made it')
    label = "the weight of a micro-batch's loss"
    micro_batches = [
      b._replace(loss_weight=weighted_loss.Scalar(label, b.loss_weight)) for b in micro_batches
    ]
    shares = replicas.Shares(len(micro_batches), len(self.replicas))
    if not do_eval and self.sums_statistics and len(shares[0]) != len(shares[-1]):
      raise ValueError(
        f'statistics over {len(shares)} replicas need the same number of micro-batches in each, '
        f'got {len(micro_batches)} in total: use batches with at least as many rows as '
        'micro-batches, or over_replicas=False'
      )
    walks = []
    for r, (replica, share) in enumerate(zip(self.replicas, shares, strict=True)):
      if not share:
        continue
      # `counter` counts over all replicas: random numbers do not depend on how many there are.
      replica_micro_batches = micro_batches[share.start : share.stop]
      walk: emission.Emission
      if replica.slices:
        # Copy them every time, because an update changes the whole weights only.
        vocabulary_slices.SyncSlices(replica.slices, replica.variables)
        walk = vocabulary_emission.VocabularyEmission(
          replica.stages,
          replica.slices,
          self.functions,
          replica_micro_batches,
          counter + share.start,
          do_eval=do_eval,
          copies=self.host_copies,
          tables=replica.tables,
          is_dense=self._sparse_gradients.IsDense,
        )
      else:
        walk = emission.Emission(
          replica.stages,
          self.functions,
          replica_micro_batches,
          counter + share.start,
          do_eval=do_eval,
          with_loss=True,
          copies=self.host_copies,
          is_dense=self._sparse_gradients.IsDense,
        )
      schedule = self.TrainingSchedule(len(share))
      if do_eval:
        schedule = self.ForwardSchedule(replica.training_stages, len(share))
      with tf.name_scope(f'replica_{r}') if len(self.replicas) > 1 else contextlib.nullcontext():
        walk.Emit(schedule, self.remat_policy)
      walks.append(walk)
    return walks

  def _Sums(self, walks: Sequence[emission.Emission]) -> dict[str, tf.Tensor]:
    """Returns the metrics' sums, or joined rows, over all replicas."""
    walk_sums = [walk.Sums() for walk in walks]
    rows = [walk.Rows() for walk in walks]
    with tf.device(self.stages[-1].device):
      sums = {name: tf.add_n([sums[name] for sums in walk_sums]) for name in walk_sums[0]}
      return sums | {name: tf.concat([r[name] for r in rows], axis=0) for name in rows[0]}

  def _LayerSums(self, walks: Sequence[emission.Emission]) -> dict[str, nested_map.NestedMap]:
    """Returns {path of a layer: the sums that it reported} over all replicas."""
    by_path: dict[str, list[nested_map.NestedMap]] = {}
    for walk in walks:
      for layer, sums in walk.LayerSums():
        by_path.setdefault(layer.path, []).append(sums)
    # add_n of one tensor is that tensor, which waits for nothing.
    return {
      path: tf.nest.map_structure(lambda *values: tf.identity(tf.add_n(values)), *sums)
      for path, sums in by_path.items()
    }

  def TrainingSchedule(self, num_micro_batches: int) -> schedules.Schedule:
    """Returns the schedule of a training step of this many micro-batches.

    Raises:
      ValueError: the schedule has its stages on other devices than the engine.
    """
    schedule, num_devices = self._schedule, max(self.stage_to_device) + 1
    placement = self.stage_to_device
    if self.shares_vocabulary:  # The last stage is the softmax, which slices replace.
      placement = placement[:-1]
    chosen = schedules.GetForBatch(schedule, len(placement), num_micro_batches, num_devices)
    if chosen.stage_to_device != placement:
      raise ValueError(
        f'schedule {chosen.name!r} has its stages on devices {list(chosen.stage_to_device)} for '
        f'{num_micro_batches} micro-batches, but they are on {list(placement)}; a '
        'schedule must place its stages alike for any number of micro-batches'
      )
    if isinstance(schedule, str) and chosen.name != schedule and not self._logged_small_batch:
      self._logged_small_batch = True
      logging.info(
        'Schedule %s cannot take a batch of %d micro-batches on %d devices: %s runs it.',
        schedule,
        num_micro_batches,
        num_devices,
        chosen.name,
      )
    if self.shares_vocabulary:
      chosen = shared_vocabulary.Share(chosen)
    return offload_lib.WithOffload(chosen, self.offload)

  def ForwardSchedule(
    self, stages: Sequence[stage_lib.Stage], num_micro_batches: int
  ) -> schedules.Schedule:
    """Returns a schedule of forward actions alone, of all stages or of `forward_stages`."""
    devices = list(dict.fromkeys(s.device for s in stages))
    return schedules.ForwardOnlyOn([devices.index(s.device) for s in stages], num_micro_batches)

  # ---- without the loss --------------------------------------------------------------------------

  def Forward(
    self,
    args: Sequence[tuple[Any, ...]],
    *,
    theta: Sequence[Sequence[Any]] | None = None,
    counter: tf.Tensor | None = None,
    do_eval: bool = True,
  ) -> emission.Emission:
    """Runs forward only, without the loss, in the first replica.

    Args:
      args: for each micro-batch the arguments of the first layer.
      theta: for each stage and layer its weights as tensors; None takes the variables.
      counter: int64 scalar, the step counter (see `fprop_context`) of micro-batch 0; needed if
        do_eval is False.
      do_eval: the layers' mode.

    Returns:
      The walk, with the outputs, the stages' inputs and the layers' sums.
    """
    micro_batches = [micro_batch.MicroBatch(x) for x in args]
    stages = self.stages if theta is not None else self.forward_stages
    walk: emission.Emission
    if stages is self.stages:
      walk = emission.Emission(
        stages,
        self.functions,
        micro_batches,
        counter,
        do_eval=do_eval,
        with_loss=False,
        theta=theta,
      )
    else:
      walk = vocabulary_emission.VocabularyEmission(
        self.stages,
        self.replicas[0].slices,
        self.functions,
        micro_batches,
        counter,
        do_eval=do_eval,
        with_loss=False,
        tables=self.replicas[0].tables,
      )
    walk.Emit(self.ForwardSchedule(stages, len(micro_batches)))
    return walk

  def ThetaBackward(
    self,
    theta: Sequence[Sequence[Any]],
    stage_inputs: Sequence[Sequence[nested_map.NestedMap]],
    dys: Sequence[tuple[Any, ...]],
    counter: tf.Tensor,
    do_eval: bool,
  ) -> tuple[list[list[tf.Tensor]], list[tuple[Any, ...]]]:
    """Runs backward of `Forward` with the weights as tensors, micro-batches M-1 ... 0.

    Args:
      theta: as given to `Forward`.
      stage_inputs: `StageInputs` of the walk that `Forward` returned.
      dys: for each micro-batch a nest like the outputs, with gradients at its floating leaves.
      counter: as given to `Forward`.
      do_eval: as given to `Forward`.

    Returns:
      For each stage the gradients of its floating weights; for each micro-batch a nest like the
      inputs, with gradients at its floating leaves.
    """
    walk = emission.Emission(
      self.stages, self.functions, [], counter, do_eval=do_eval, with_loss=False, theta=theta
    )
    return walk.EmitThetaBackward(stage_inputs, dys)

  def ConnectedPaths(self) -> set[str]:
    """Returns the paths of the weights that the loss depends on, once a step was traced."""
    # The functions of tables record no gradients, so tables count as connected.
    tables = {path for s in self.replicas[0].tables for path in (*s.trained, *s.mirrors)}
    connected = {
      path
      for path, uses in self._sparse_gradients.uses.items()
      if any(leaf in self._TrainingMath(s).connected for s, leaf in uses)
    }
    return {self.ties.get(path, path) for path in tables} | connected

  def _TrainingMath(self, s: stage_lib.Stage) -> stage_math.StageMath:
    return self.functions.Math(s, do_eval=False, with_loss=True)

  # ---- weights and accumulators ------------------------------------------------------------------

  def SyncTies(self) -> None:
    """Copies tied weights to the stages that use them, in each replica.

    To be called when weights were changed.
    """
    for replica in self.replicas:
      replica.SyncTies(self.ties)

  def SyncReplicas(self) -> None:
    """Copies the first replica's weights to the others, and tied weights to their users.

    To be called when weights were changed.
    """
    replicas.SyncWeights(self.replicas)
    self.SyncTies()

  def _AllStages(self) -> list[stage_lib.Stage]:
    return [
      s for replica in self.replicas for s in (*replica.stages, *replica.slices, *replica.tables)
    ]

  def MakeAccumulators(
    self, reuse: Callable[[tf.Variable, Callable[[], tf.Variable]], tf.Variable] | None = None
  ) -> None:
    """Allocates the gradient accumulators on their stages' devices; once, outside any graph.

    `Accumulate` does so too, but TensorFlow traces a tf.function that makes variables twice.

    Args:
      reuse: called as reuse(variable, make): returns the variable's existing accumulator, or
        make().
    """
    for s in self._AllStages():
      if s.accumulators or s.mirror_accumulators:
        continue
      with tf.init_scope(), tf.device(s.device):
        for v in s.trained.values():
          make = functools.partial(weight_params.NewAccumulator, v)
          s.accumulators.append(reuse(v, make) if reuse else make())
        s.mirror_accumulators = [weight_params.NewAccumulator(v) for v in s.mirrors.values()]

  def DropAccumulators(self) -> None:
    """Releases the accumulators of all replicas. Traces may outlive them."""
    for s in self._AllStages():
      s.accumulators.clear()
      s.mirror_accumulators.clear()

  def ClearAccumulators(self, *, mirrors_only: bool = False) -> None:
    """Sets the accumulators to zero.

    Args:
      mirrors_only: clear only the accumulators of copies of tied weights, whose gradients were
        added to the owners' already.
    """
    self.MakeAccumulators()
    for s in self._AllStages():
      with tf.device(s.device):
        for accumulator in s.mirror_accumulators if mirrors_only else s.AllAccumulators():
          accumulator.assign(tf.zeros_like(accumulator))


def _EndWithTheDevice(stages: Sequence[stage_lib.Stage], walk: emission.Emission) -> None:
  """Makes gradients of stages that share a device wait for the last action there.

  Otherwise the replicas could interleave the sums of these gradients with sums of statistics, each
  in another order.
  """
  last_of_device = {s.device: s for s in stages if s.accumulators}
  for device, s in last_of_device.items():
    if sum(other.device == device for other in stages) > 1:
      with tf.device(device), tf.control_dependencies(walk.LastResults(device)):
        # `GradientSum` begins with this accumulator. A function's reads wait for earlier writes.
        s.accumulators[-1].assign_add(tf.zeros_like(s.accumulators[-1]))
