# SPDX-License-Identifier: Apache-2.0
"""The engine: one loop over a schedule that emits the stages' calls on their devices.

Called inside a tf.function, it lays out one multi-device graph; TensorFlow's dataflow runtime
then overlaps the devices and moves the boundary tensors. Each device's actions are chained by
control dependencies, so they run in the order of the schedule.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from lingvo_gpipe.core import base_layer, fprop_context, layer_state, nested_map, weight_params
from lingvo_gpipe.pipeline import emission, replicas
from lingvo_gpipe.pipeline.schedule import rematerialisation, schedules
from lingvo_gpipe.pipeline.stages import shared_functions, stage_functions, weighted_loss
from lingvo_gpipe.pipeline.stages import stage as stage_lib


class PipelineEngine:
  """Runs a flat list of layers, cut into stages, by a schedule.

  Attributes:
    functions: what the stages run.
    stage_to_device: for each stage the index of its device.
    replicas: the first one's stages are `stages`.
    ties: {path of a weight: path of the weight that it is}.
  """

  def __init__(
    self,
    layers: Sequence[base_layer.BaseLayer],
    ends: Sequence[int],
    devices: Sequence[str],
    *,
    stage_to_device: Sequence[int] | None = None,
    schedule: str | schedules.Schedule = 'gpipe',
    remat_policy: str = 'stage',
    xla: bool = True,
    loss_fn: stage_functions.LossFn | None = None,
    is_trained: Callable[[str], bool] | None = None,
    ties: Mapping[str, str] | None = None,
    num_replicas: int = 1,
  ) -> None:
    """Puts each stage's variables on its device.

    Args:
      layers: the flat list; outputs of one are the arguments of the next.
      ends: for each stage the index after its last layer, ascending.
      devices: names for tf.device, replica by replica as many; those that no stage is put on are
        left alone.
      stage_to_device: for each stage the index of its device, as the schedule has it; None: its own
        number.
      schedule: name of the training schedule, or one of the user's own.
      remat_policy: what backward recomputes, one of `rematerialisation.POLICIES`.
      xla: True to compile the stage functions by XLA.
      loss_fn: runs in the last stage on each micro-batch (see `stage.LossFn`).
      is_trained: tells by its path whether a trainable variable is trained; None: all are. Others
        cost no weight gradient, and stages before the first trained one no backward.
      ties: {path of a weight: path of the weight that it is}. The stage of the first holds a copy;
        its gradient is added to the other's.
      num_replicas: how many times the stages are there, each with its share of the micro-batches.

    Raises:
      ValueError: the cut, the devices, the schedule or the policy do not fit.
    """
    self.stage_to_device = tuple(range(len(ends)) if stage_to_device is None else stage_to_device)
    num_devices = max(self.stage_to_device) + 1
    per_replica = len(devices) // num_replicas
    if per_replica < num_devices or len(devices) % num_replicas:
      of_each = f' for each of {num_replicas} replicas, as many' if num_replicas > 1 else ''
      raise ValueError(
        f'{len(ends)} stages need {num_devices} devices{of_each}, got {len(devices)}: '
        f'{", ".join(devices)}'
      )
    rematerialisation.CheckPolicy(remat_policy)
    self._schedule = schedule
    self.remat_policy = remat_policy
    self.loss_fn = loss_fn
    self.functions = shared_functions.SharedFunctions(len(ends), loss_fn, xla)
    self.ties = dict(ties or {})
    self._told_of_small_batch = False
    of_first = [devices[k] for k in self.stage_to_device]
    self.stages = stage_lib.Stages(layers, ends, of_first, self.ties, is_trained)
    self._variables = {path: v for layer in layers for path, v in layer.VariablesByPath().items()}
    first = replicas.Replica(self.stages, self._variables)
    self.replicas = [first]
    for r in range(1, num_replicas):
      own = devices[r * per_replica : (r + 1) * per_replica]
      self.replicas.append(replicas.Copy(first, [own[k] for k in self.stage_to_device]))
    if num_replicas > 1:
      self._SumStatistics(xla)
    self._sum: replicas.GradientSum | None = None
    self.SyncTies()

  @property
  def num_stages(self) -> int:
    """S."""
    return len(self.stages)

  @property
  def trained(self) -> dict[str, tf.Variable]:
    """{path: variable} of what is trained, in the first replica."""
    return {path: v for s in self.stages for path, v in s.trained.items()}

  def _SumStatistics(self, xla: bool) -> None:
    """Lets layers that want it take sums over the replicas; ValueError under XLA."""
    for of_stage in zip(*(replica.stages for replica in self.replicas), strict=True):
      below = [layer for top in of_stage[0].layers for layer in top.Descendants()]
      summing = [layer.path for layer in below if layer.sums_over_replicas]
      if summing and xla:
        raise ValueError(
          f'{summing[0]} has over_replicas=True: XLA does not compile sums over replicas; set '
          'xla=False for its PipeliningLayer, or take larger micro-batches instead'
        )
      replica_sum = replicas.StatisticsSum([s.device for s in of_stage]) if summing else None
      for s in of_stage:
        s.replica_sum = replica_sum

  @property
  def xla(self) -> bool:
    """Whether the stages are compiled by XLA."""
    return self.functions.xla

  @contextlib.contextmanager
  def WithoutXla(self) -> Iterator[None]:
    """Within it the stages run without XLA."""
    compiled, self.functions = self.functions, self.functions.WithoutXla()
    try:
      yield
    finally:
      self.functions = compiled

  @property
  def sums_statistics(self) -> bool:
    """Whether replicas wait for each other within their training stages."""
    return any(s.replica_sum is not None for s in self.stages)

  # ---- the three entrances ---------------------------------------------------------------------

  def Train(
    self,
    inputs: Sequence[tuple[Any, ...]],
    sides: Sequence[Any],
    loss_weights: Sequence[tf.Tensor],
    step: tf.Tensor,
    *,
    first_micro_batch: tf.Tensor | int = 0,
    clear: bool = True,
  ) -> dict[str, tf.Tensor]:
    """Runs forward and backward of all micro-batches; gradients end in the accumulators.

    What the accumulators hold, those of each replica, is the gradient of the sum over all
    micro-batches of `loss_weight * loss`: divide by the sum of the loss weights once, at the
    update. Layers with statistics (`BaseLayer.StateFromSums`) have followed this mini-batch when it
    returns; where an update may be skipped, take `Accumulate`.

    Args:
      inputs: for each micro-batch the arguments of the first layer.
      sides: for each micro-batch what the loss function takes beside the last layer's outputs.
      loss_weights: for each micro-batch the weight of its loss, a scalar.
      step: int64 scalar, the training step.
      first_micro_batch: how many micro-batches of this step other mini-batches had before.
      clear: False to add to what the accumulators hold (see `ClearAccumulators`); in one replica
        only.

    Returns:
      {metric: [sum of value * weight, sum of weight]}, tensors [2] on the last device.

    Raises:
      ValueError: clear=False with several replicas.
    """
    if not clear and len(self.replicas) > 1:
      raise ValueError(
        f'clear=False: after Train each of {len(self.replicas)} replicas holds the sum over all, '
        'and the next one would add them again; call Accumulate for each mini-batch, then '
        'SumGradients once'
      )
    sums, layer_sums = self.Accumulate(
      inputs, sides, loss_weights, step, first_micro_batch=first_micro_batch, clear=clear
    )
    self.SumGradients()
    self.AssignState(self.NextState(layer_sums))
    return sums

  def Accumulate(
    self,
    inputs: Sequence[tuple[Any, ...]],
    sides: Sequence[Any],
    loss_weights: Sequence[tf.Tensor],
    step: tf.Tensor,
    *,
    first_micro_batch: tf.Tensor | int = 0,
    clear: bool = True,
  ) -> tuple[dict[str, tf.Tensor], dict[str, nested_map.NestedMap]]:
    """As `Train`, but no layer's state is changed, and each replica has its own gradients.

    Returns:
      What `Train` returns, and {path of a layer: what it reported for its state, over all
      micro-batches}, for `NextState`.
    """
    counter = fprop_context.StepCounter(step, first_micro_batch)
    self.ClearAccumulators(mirrors_only=not clear)
    runs = self._EmitAll(inputs, sides, loss_weights, counter, self.TrainingSchedule)
    for replica in self.replicas:
      replica.AddTiedGradients(self.ties)
    # A step that fails must leave all state as it was: it is run again, to find out why.
    with tf.control_dependencies([t for run in runs for t in run.LastActions()]):
      layer_sums = self._LayerSums(runs)
    return self._Sums(runs), layer_sums

  def _EmitAll(
    self,
    inputs: Sequence[tuple[Any, ...]],
    sides: Sequence[Any],
    loss_weights: Sequence[tf.Tensor],
    counter: tf.Tensor | None,
    schedule: Callable[[int], schedules.Schedule],
  ) -> list[emission.Emission]:
    """One walk for each replica that has micro-batches; for evaluation without a counter."""
    if self.loss_fn is None:
      raise ValueError('the engine was made without a loss: give loss_fn, to Place if that made it')
    what = "the weight of a micro-batch's loss"
    loss_weights = [weighted_loss.Scalar(what, weight) for weight in loss_weights]
    shares = replicas.Shares(len(inputs), len(self.replicas))
    if counter is not None and self.sums_statistics and len(shares[0]) != len(shares[-1]):
      raise ValueError(
        f'statistics over {len(shares)} replicas need as many micro-batches in each, got '
        f'{len(inputs)} in all: take batches of no fewer rows than micro-batches, or '
        'over_replicas=False'
      )
    runs = []
    for r, share in enumerate(shares):
      if not share:
        continue
      own = slice(share.start, share.stop)
      run = emission.Emission(
        self,
        self.replicas[r].stages,
        inputs[own],
        sides[own],
        loss_weights[own],
        None if counter is None else counter + share.start,
        do_eval=counter is None,
      )
      with tf.name_scope(f'replica_{r}') if len(self.replicas) > 1 else contextlib.nullcontext():
        run.Emit(schedule(len(share)))
      runs.append(run)
    return runs

  def _Sums(self, runs: Sequence[emission.Emission]) -> dict[str, tf.Tensor]:
    """The metrics' sums over all replicas."""
    found = [run.Sums() for run in runs]
    with tf.device(self.stages[-1].device):
      return {name: tf.add_n([sums[name] for sums in found]) for name in found[0]}

  def _LayerSums(self, runs: Sequence[emission.Emission]) -> dict[str, nested_map.NestedMap]:
    """{path of a layer: what it reported for its state} over all replicas."""
    by_path: dict[str, list[nested_map.NestedMap]] = {}
    for run in runs:
      for layer, sums in run.LayerSums():
        by_path.setdefault(layer.path, []).append(sums)
    # add_n of one tensor is that tensor, which waits for nothing.
    return {
      path: tf.nest.map_structure(lambda *values: tf.identity(tf.add_n(values)), *found)
      for path, found in by_path.items()
    }

  def ChooseAllReduce(self, all_reduce: str) -> None:
    """Chooses how `SumGradients` adds; see `replicas.GradientSum`."""
    self.MakeAccumulators()
    self._sum = replicas.GradientSum(self.replicas, all_reduce)

  def SumGradients(self) -> None:
    """Adds the gradients over the replicas; after it all replicas' accumulators hold the sums."""
    if len(self.replicas) > 1:
      if self._sum is None:
        self.ChooseAllReduce('auto')
      assert self._sum is not None
      self._sum.Add()

  def NextState(
    self,
    layer_sums: Mapping[str, nested_map.NestedMap],
    state: Mapping[str, Mapping[str, tf.Tensor]] | None = None,
  ) -> dict[str, dict[str, tf.Tensor]]:
    """The state of layers after a mini-batch; see `BaseLayer.StateFromSums`.

    Args:
      layer_sums: as `Accumulate` returned them.
      state: what this returned for the mini-batch before, where that was not assigned yet.

    Returns:
      {path of a layer: {name: value of its weight}}, on the devices of the weights.
    """
    layers = {
      layer.path: layer for s in self.stages for top in s.layers for layer in top.Descendants()
    }
    state = state or {}
    return {
      p: layer_state.NextState(layers[p], sums, state.get(p)) for p, sums in layer_sums.items()
    }

  def AssignState(
    self, state: Mapping[str, Mapping[str, tf.Tensor]], is_wanted: tf.Tensor | None = None
  ) -> None:
    """Assigns what `NextState` returned; where `is_wanted`, a bool scalar, is false nothing."""
    for path, values in state.items():
      for name, value in values.items():
        variable = self._variables[f'{path}.{name}']
        with tf.device(variable.device):
          variable.assign(value if is_wanted is None else tf.where(is_wanted, value, variable))
    replicas.SyncWeights(
      self.replicas, [f'{path}.{name}' for path, values in state.items() for name in values]
    )

  def Evaluate(
    self,
    inputs: Sequence[tuple[Any, ...]],
    sides: Sequence[Any],
    loss_weights: Sequence[tf.Tensor],
  ) -> dict[str, tf.Tensor]:
    """The metrics' sums (as `Train` returns them) in evaluation mode, forward only.

    The loss weights are those of auxiliary losses; metrics come with their own.
    """
    return self._Sums(self._EmitAll(inputs, sides, loss_weights, None, self._ForwardOnly))

  def _ForwardOnly(self, num_micro_batches: int) -> schedules.Schedule:
    return schedules.ForwardOnlyOn(self.stage_to_device, num_micro_batches)

  def Forward(
    self,
    inputs: Sequence[tuple[Any, ...]],
    *,
    theta: Sequence[Sequence[Any]] | None = None,
    counter: tf.Tensor | None = None,
    do_eval: bool = True,
  ) -> tuple[
    list[Any],
    list[list[nested_map.NestedMap]],
    list[tuple[base_layer.BaseLayer, nested_map.NestedMap]],
  ]:
    """Forward only, without the loss, in the first replica.

    Args:
      inputs: for each micro-batch the arguments of the first layer.
      theta: for each stage and layer its weights as tensors; None takes the variables.
      counter: int64 scalar, the step counter (see fprop_context) of micro-batch 0; needed where
        do_eval is False.
      do_eval: the layers' mode.

    Returns:
      For each micro-batch what the last layer returned; for each stage and micro-batch what the
      stage took, NestedMap(args, skips); and the layers that reported sums for their state, with
      the sums over all micro-batches.
    """
    run = emission.Emission(
      self, self.stages, inputs, None, [], counter, do_eval=do_eval, theta=theta
    )
    run.Emit(self._ForwardOnly(len(inputs)))
    micro_batches = range(len(inputs))
    outputs = [run.args[self.num_stages, m] for m in micro_batches]
    taken = [[run.x[k, m] for m in micro_batches] for k in range(self.num_stages)]
    return outputs, taken, run.LayerSums()

  def ThetaBackward(
    self,
    theta: Sequence[Sequence[Any]],
    stage_inputs: Sequence[Sequence[nested_map.NestedMap]],
    dys: Sequence[tuple[Any, ...]],
    counter: tf.Tensor,
    do_eval: bool,
  ) -> tuple[list[list[tf.Tensor]], list[tuple[Any, ...]]]:
    """Backward of `Forward` with the weights as tensors, micro-batches M-1 ... 0.

    Args:
      theta: as given to `Forward`.
      stage_inputs: as returned by `Forward`.
      dys: for each micro-batch a nest like the outputs, with gradients at its floating leaves.
      counter: as given to `Forward`.
      do_eval: as given to `Forward`.

    Returns:
      For each stage the gradients of its floating weights; for each micro-batch a nest like the
      inputs, with gradients at its floating leaves.
    """
    run = emission.Emission(self, self.stages, [], None, [], counter, do_eval=do_eval, theta=theta)
    return run.EmitThetaBackward(stage_inputs, dys)

  def TrainingSchedule(self, num_micro_batches: int) -> schedules.Schedule:
    """The schedule of a training step of so many micro-batches.

    Raises:
      ValueError: it has its stages on other devices than the engine.
    """
    named, num_devices = self._schedule, max(self.stage_to_device) + 1
    chosen = schedules.GetForBatch(named, self.num_stages, num_micro_batches, num_devices)
    if chosen.stage_to_device != self.stage_to_device:
      raise ValueError(
        f'schedule {chosen.name!r} has its stages on devices {list(chosen.stage_to_device)} for '
        f'{num_micro_batches} micro-batches, but they are on {list(self.stage_to_device)}; a '
        'schedule must place its stages alike for any number of micro-batches'
      )
    if isinstance(named, str) and chosen.name != named and not self._told_of_small_batch:
      self._told_of_small_batch = True
      logging.info(
        'Schedule %s cannot take a batch of %d micro-batches on %d devices: %s runs it.',
        named,
        num_micro_batches,
        num_devices,
        chosen.name,
      )
    return chosen

  def SyncTies(self) -> None:
    """Copies tied weights to where they are used; to be called when weights were changed.

    Of all replicas, whose weights are taken as they are.
    """
    for replica in self.replicas:
      replica.SyncTies(self.ties)

  def SyncReplicas(self) -> None:
    """Copies the first replica's weights to the others, and ties; to be called as `SyncTies`."""
    replicas.SyncWeights(self.replicas)
    self.SyncTies()

  def _AllStages(self) -> list[stage_lib.Stage]:
    return [s for replica in self.replicas for s in replica.stages]

  # ---- parts -----------------------------------------------------------------------------------

  def MakeAccumulators(
    self, beside: Callable[[tf.Variable, Callable[[], tf.Variable]], tf.Variable] | None = None
  ) -> None:
    """Allocates the gradient accumulators on their stages' devices; once, outside any graph.

    The other calls do so, too; but a tf.function that makes variables is traced twice.

    Args:
      beside: given a variable and what makes its accumulator, returns that or one that there is.
    """
    for s in self._AllStages():
      if s.accumulators or s.mirror_accumulators:
        continue
      with tf.init_scope(), tf.device(s.device):
        for v in s.trained.values():
          make = functools.partial(_Accumulator, v)
          s.accumulators.append(beside(v, make) if beside else make())
        s.mirror_accumulators = [_Accumulator(v) for v in s.mirrors.values()]

  def ClearAccumulators(self, *, mirrors_only: bool = False) -> None:
    """Sets the accumulators to zero, as `Train` does before it begins.

    With `mirrors_only` those alone that the gradients of tied weights pass through: what they held
    was added to the owner's already.
    """
    self.MakeAccumulators()
    for s in self._AllStages():
      with tf.device(s.device):
        for accumulator in s.mirror_accumulators if mirrors_only else s.AllAccumulators():
          accumulator.assign(tf.zeros_like(accumulator))

  def SeedHashes(self, s: stage_lib.Stage) -> list[int]:
    """The first halves of the seed pairs of a stage's layers."""
    return [weight_params.Hash64(layer.params.random_seed, layer.path) for layer in s.layers]


def _Accumulator(variable: tf.Variable) -> tf.Variable:
  return tf.Variable(tf.zeros_like(variable), trainable=False, name='accumulator')
