# SPDX-License-Identifier: Apache-2.0
"""The cut of a model into stages: `MakeCut` finds it, `Cut` holds it and predicts its step."""

from __future__ import annotations

import dataclasses
import fractions
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from lingvo_gpipe.core import base_layer, text_table
from lingvo_gpipe.pipeline.cost import (
  partitioner,
  recomputation,
  simulator,
  stage_memory,
  stage_work,
  vocabulary_cut,
)
from lingvo_gpipe.pipeline.cutting import (
  cut_table,
  layer_costs,
  layer_profile,
  vocabulary_split,
)
from lingvo_gpipe.pipeline.schedule import offload as offload_lib
from lingvo_gpipe.pipeline.schedule import rematerialisation, schedules, shared_vocabulary

COSTS = ('flops', 'params', 'time')

# Durations of the actions of equal stages, for the bubble.
_DURATIONS = {
  schedules.Kind.FORWARD: 1,
  schedules.Kind.BACKWARD: 2,
  schedules.Kind.INPUT_GRADIENT: 1,
  schedules.Kind.WEIGHT_GRADIENT: 1,
  schedules.Kind.FORWARD_BACKWARD: 3,
}


@dataclasses.dataclass(frozen=True)
class StageCut:
  """One stage: layers [start, end), their weights, forward FLOPs and share of the step's work.

  A slice of the vocabulary counts as a layer.
  """

  start: int
  end: int
  num_params: int
  flops: int
  share: float


@dataclasses.dataclass(frozen=True)
class StageBytes:
  """The predicted peak memory of a stage (see `stage_memory`)."""

  state: int
  activations: int

  @property
  def total(self) -> int:
    """Bytes of weights, accumulators, slots and activations."""
    return self.state + self.activations


@dataclasses.dataclass(frozen=True)
class Cut:
  """A sequence of layers cut into stages.

  If the vocabulary is shared out, its slices take the place of the last layer in `layers`,
  `stages`, `schedule` and `work`.

  Attributes:
    layers: the layers' costs for one micro-batch.
    ends: for each stage the index after its last layer; a softmax whose vocabulary is shared out
      belongs to the last stage.
    stages: the stages.
    schedule: the training schedule.
    by: the cost that the cut balances, one of `COSTS`.
    num_params: number of trained weights; tied weights count once.
    remat_policy: the re-materialisation policy; `auto` stands for `choices`.
    work: F, I and W of each layer, in the unit of `by`: FLOPs, weights or seconds.
    weights: the weights that are trained, and their optimizer slots.
    make_memory: traces the layers for the sizes of their activations.
    vocabulary: for each device the number of classes of its slice; empty: it is not shared out.
    in_slices: the paths of the layers whose weights are in the slices; the others are whole.
    choices: under `auto`, for each stage the recomputed parts and the activations that it then
      holds; otherwise empty.
    again: under `auto`, for each stage the work of one recomputation, in the unit of `work`.
  """

  layers: tuple[layer_costs.LayerCost, ...]
  ends: tuple[int, ...]
  stages: tuple[StageCut, ...]
  schedule: schedules.Schedule
  by: str
  num_params: int
  remat_policy: str
  work: tuple[stage_work.LayerWork, ...]
  weights: layer_costs.Weights
  make_memory: Callable[[], stage_memory.StageMemory]
  vocabulary: tuple[int, ...] = ()
  in_slices: tuple[str, ...] = ()
  choices: tuple[recomputation.Choice, ...] = ()
  again: tuple[float, ...] = ()

  @property
  def policy(self) -> rematerialisation.Policy:
    """The policy as the engine takes it."""
    return [choice.policy for choice in self.choices] or self.remat_policy

  @property
  def splits(self) -> tuple[int, ...]:
    """The cut as `splits` of a PipeliningLayer: the ends of stages, then the sizes of slices."""
    return (*self.ends, *self.vocabulary)

  @property
  def num_micro_batches(self) -> int:
    """M."""
    return self.schedule.num_micro_batches

  @property
  def num_devices(self) -> int:
    """K."""
    return self.schedule.num_devices

  @property
  def even_bubble(self) -> float:
    """The idle share of a step if all stages were equal and a backward took two forwards.

    For gpipe this is (K-1)/(M+K-1) (GPipe section 2.3).
    """
    if self.vocabulary:
      return self._SimulateEven().overall_bubble
    timeline = self.schedule.Timeline(_DURATIONS)
    makespan = max(row[-1][1] for row in timeline)
    busy = sum(end - start for row in timeline for start, end, _ in row)
    return 1.0 - busy / (makespan * self.num_devices)

  def _SimulateEven(self) -> simulator.Result:
    """Simulates equal stages and equal slices with the total work of this cut."""
    slices, total = len(self.vocabulary), sum(w.forward for w in self.work)
    of_slices = sum(w.forward for w in self.work[-slices:])
    layers = self.schedule.num_layer_stages
    times = [(total - of_slices) / layers] * layers + [of_slices / slices] * slices
    costs = simulator.Costs(times if total else 1)
    return simulator.Simulate(self.schedule, costs, remat_policy='none')

  @property
  def balance(self) -> float:
    """The mean work of the devices, relative to the work of the busiest one."""
    busy = [0.0] * self.num_devices
    for device, s in zip(self.schedule.stage_to_device, self.stages, strict=True):
      busy[device] += s.share
    return sum(busy) / (max(busy) * len(busy)) if max(busy) else 1.0

  @functools.cached_property
  def simulated(self) -> simulator.Result:
    """A simulated step, in the unit of `work`, without transfers, loss and update."""
    work = self.work
    if not any(w.forward for w in work):  # No layer has a cost: simulate equal layers.
      work = stage_work.FromForward([1] * len(work), [w.is_trained for w in work])
    costs = stage_work.SimulatorCosts(work, [s.end for s in self.stages])
    if self.again:
      costs = dataclasses.replace(costs, recompute=self.again)
    trained = [any(w.is_trained for w in work[s.start : s.end]) for s in self.stages]
    return simulator.Simulate(self.schedule, costs, remat_policy=self.policy, trained=trained)

  @property
  def bubble(self) -> float:
    """The predicted idle share of a step, from `simulated`."""
    return self.simulated.overall_bubble

  @property
  def speed_up(self) -> float:
    """The speed relative to one device with the same policy and M, from `simulated`.

    Under `auto` the one device is assumed to have the memory of all and to recompute nothing.
    """
    policy = 'none' if self.choices else self.remat_policy
    one_device = stage_work.OneDevice(self.work, self.num_micro_batches, policy)
    return one_device / self.simulated.makespan if one_device else float(self.num_devices)

  @functools.cached_property
  def memory(self) -> tuple[StageBytes, ...]:
    """The predicted peak memory of each stage."""
    memory = self.make_memory()
    return tuple(
      StageBytes(
        memory.State(s.start, s.end),
        self.choices[k].activations if self.choices else memory.Activations(k, s.start, s.end),
      )
      for k, s in enumerate(self.stages)
    )

  @property
  def device_bytes(self) -> list[int]:
    """The predicted peak memory of each device."""
    needs = [0] * self.num_devices
    for device, memory in zip(self.schedule.stage_to_device, self.memory, strict=True):
      needs[device] += memory.total
    return needs

  def Table(self, devices: Sequence[str] = ()) -> str:
    """Returns the stage table: layers, work, predicted idle time and memory, and devices.

    Args:
      devices: the names of the devices; empty if they are not known.
    """
    in_time = self.by == 'time'
    rows = [
      self._TableRow(k, devices[self.schedule.stage_to_device[k]] if devices else '')
      for k in range(len(self.stages))
    ]
    slowest = max(s.share for s in self.stages)
    balance = 1.0 / (slowest * len(self.stages)) if slowest else 1.0
    if self.vocabulary:
      balance = self.balance
    stages = f'K={self.num_devices} stages'
    if self.vocabulary:
      stages = (
        f'{self.schedule.num_layer_stages} stages and {len(self.vocabulary)} slices of the '
        f'vocabulary on K={self.num_devices} devices'
      )
    elif self.num_devices < len(self.stages):
      stages = f'{len(self.stages)} stages on K={self.num_devices} devices'
    lines = [
      *cut_table.Lines(rows, in_time),
      f'{stages}, M={self.num_micro_batches} micro-batches, {self.schedule.name}, '
      f'remat_policy {self.remat_policy}; balance {balance:.1%} (by {self.by}); '
      f'{self.num_params:,} parameters',
      f'predicted: bubble {self.bubble:.1%} of a step '
      f'({self.even_bubble:.1%} if stages were equal), '
      f'{self.speed_up:.2f} times as fast as one device',
      'predicted memory: weights with gradients and '
      f'{self.weights.slots_per_weight:g} optimizer slots each; activations at their peak',
    ]
    if self.num_devices < len(self.stages):
      lines[-1] += f'; {text_table.FormatBytes(max(self.device_bytes))} on the fullest device'
    if self.in_slices:
      lines.append(f'vocabulary: weights of {" and ".join(self.in_slices)} are in the slices')
    elif self.vocabulary:
      lines.append(
        'vocabulary: the slices copy their weights in each step, from stage '
        f'{self.schedule.num_layer_stages - 1}'
      )
    if offloaded := self.schedule.offloaded:
      lines.append(
        f'offload: {len(offloaded)} times a step the activations of a micro-batch go to the host '
        f'and come back, in {len(dict(offloaded))} stages; the times are without the copies'
      )
    if in_time:
      lines.append('ms: measured, forward and backward of a micro-batch without recomputation')
    return '\n'.join(lines)

  def _TableRow(self, stage: int, device: str) -> cut_table.Row:
    s, memory = self.stages[stage], self.memory[stage]
    work = s.flops / 1e6
    if self.by == 'time':
      layers = self.work[s.start : s.end]
      work = sum(w.forward + w.input_gradient + w.weight_gradient for w in layers) * 1e3
    return cut_table.Row(
      num_layers=s.end - s.start,
      first_path=self.layers[s.start].path,
      last_path=self.layers[s.end - 1].path,
      num_params=s.num_params,
      work=work,
      share=s.share,
      idle=self.simulated.bubble[self.schedule.stage_to_device[stage]],
      state_bytes=memory.state,
      activation_bytes=memory.activations,
      recomputes=str(self.choices[stage].policy) if self.choices else '',
      device=device,
    )


def MakeCut(
  layers: Sequence[base_layer.BaseLayer],
  input_specs: Sequence[Any],
  *,
  schedule: schedules.Schedule,
  splits: Sequence[int] | None = None,
  by: str = 'flops',
  num_params: int | None = None,
  remat_policy: str = 'stage',
  xla: bool = True,
  weights: layer_costs.Weights | None = None,
  memory_limit: float = 0,
  device: str = '',
  prefix: str = '',
  shares_vocabulary: bool = False,
  offload: float = 0.0,
) -> Cut:
  """Cuts the layers so that the most expensive stage is as cheap as possible, or as `splits` say.

  The cost of a stage is its work in a step under the schedule and the policy (see `stage_work`).
  The loss, which runs in the last stage, is not included, nor are transfers and the update.

  Args:
    layers: the flat list of layers.
    input_specs: specs of one micro-batch, one for each argument of the first layer.
    schedule: the training schedule; it has the numbers of stages and micro-batches.
    splits: for each stage the index after its last layer, to cut by hand. With a shared vocabulary
      the number of classes of each slice may follow.
    by: the cost to balance: 'flops', 'params' or 'time'. Times are measured on `device`; a cut by
      hand measures nothing.
    num_params: number of trained weights; None: the sum over the layers.
    remat_policy: one of `rematerialisation.POLICIES`, or `auto`: each stage recomputes the least
      that keeps the memory limit, and the cut follows from that.
    xla: whether XLA compiles the stages.
    weights: the weights that are trained; by default all of them, with two optimizer slots each.
    memory_limit: the most bytes that the stages of one device may need, as `stage_memory` predicts;
      0: no limit. With a shared vocabulary the balanced cut must keep it; no other cut is tried,
      but `auto` recomputes as much as that takes.
    device: the device to measure times on; '' is TensorFlow's choice.
    prefix: the beginning of error messages.
    shares_vocabulary: whether to share the last layer, a softmax, out over all devices, so that
      they are equally busy.
    offload: the greatest share of the stages and micro-batches of a device to offload to the host.

  Raises:
    TypeError: splits that are not integers.
    ValueError: more stages than layers, an unknown `by` or policy, splits that do not match the
      layers or the schedule, a memory limit that no cut keeps, or a vocabulary that cannot be
      shared out.
  """
  if remat_policy == rematerialisation.AUTO and not memory_limit:
    remat_policy = 'none'
  sizes: Sequence[int] = ()
  if splits and shares_vocabulary:
    splits, sizes = splits[: schedule.num_stages], splits[schedule.num_stages :]
  if splits and by == 'time':
    by = 'flops'  # The cut is fixed: do not wait for a measurement that decides nothing.
  try:
    if shares_vocabulary:
      vocabulary_split.Check(layers, schedule, splits, sizes)
    _CheckArguments(len(layers), schedule.num_stages, splits, by, remat_policy)
  except (TypeError, ValueError) as e:
    raise type(e)(f'{prefix}{e}') from None
  weights = weights or layer_costs.Weights()
  measured = layer_costs.LayerCosts(layers, input_specs, splits or ())
  costs = measured.costs
  trained = [bool(weights.Trained(layer)) for layer in layers]
  if by == 'time':
    times = layer_profile.Measure(measured.calls, weights, device=device, xla=xla)
    work = stage_work.FromTimes(times, trained)
  else:
    forward = [cost.flops if by == 'flops' else cost.num_params for cost in costs]
    work = stage_work.FromForward(forward, trained)
  if shares_vocabulary:
    schedule = shared_vocabulary.Share(schedule)
  schedule = offload_lib.WithOffload(schedule, offload)
  has_choices = remat_policy == rematerialisation.AUTO
  one_policy = 'none' if has_choices else remat_policy
  ends: Sequence[int] | None = splits
  split: vocabulary_split.VocabularySplit | None = None
  if shares_vocabulary:
    split, ends = vocabulary_split.MakeSplit(layers, work, schedule, one_policy, splits, sizes)
    work, costs = vocabulary_cut.WithSlices(work, split.sizes), split.Costs(costs)

  @functools.cache
  def Bytes() -> list[stage_memory.LayerBytes]:
    num_bytes = measured.Bytes(weights, xla, with_options=has_choices)
    return num_bytes if split is None else split.Bytes(num_bytes, weights, schedule)

  @functools.cache
  def Memory() -> stage_memory.StageMemory:
    first = stage_work.FirstTrained(trained)
    return stage_memory.StageMemory(Bytes(), schedule, one_policy, first)

  chooser: recomputation.Chooser | None = None
  if has_choices:
    chooser = recomputation.Chooser(Bytes(), work, memory_limit, schedule)

  exceeds_limit = False
  if not ends:
    stage_costs = stage_work.CutCosts(work, schedule, one_policy)
    if chooser is not None:
      ends = chooser.Partition()
    else:
      ends = partitioner.PartitionStages(
        stage_costs, Memory().Rooms(memory_limit) if memory_limit else None
      )
    exceeds_limit = ends is None
    if exceeds_limit:  # The error message describes the best cut without the limit.
      ends = partitioner.PartitionStages(stage_costs)
  assert ends, 'Without a memory limit there is always a cut.'
  all_ends = ends if split is None else vocabulary_cut.AllEnds(ends, len(split.sizes))
  choices: tuple[recomputation.Choice, ...] = ()
  again: tuple[float, ...] = ()
  busy = stage_work.StageCosts(work, all_ends, schedule, one_policy)
  if chooser is not None:
    choices, _ = chooser.ChooseTogether(all_ends) if split else chooser.ChooseAll(ends)
    again = tuple(itertools.starmap(chooser.OneRecomputation, enumerate(choices)))
    busy = [cost + x.again * chooser.unit for cost, x in zip(busy, choices, strict=True)]
  cut = Cut(
    layers=costs,
    ends=tuple(ends),
    stages=_Stages(costs, all_ends, busy),
    schedule=schedule,
    by=by,
    num_params=sum(c.num_params for c in costs) if num_params is None else num_params,
    remat_policy=remat_policy,
    work=work,
    weights=weights,
    make_memory=Memory,
    vocabulary=split.sizes if split else (),
    in_slices=split.in_slices if split else (),
    choices=choices,
    again=again,
  )
  if memory_limit and (splits or exceeds_limit or split):
    _CheckMemory(cut, memory_limit, prefix, by_hand=bool(splits))
  return cut


def _CheckArguments(
  num_layers: int, num_stages: int, splits: Sequence[int] | None, by: str, remat_policy: str
) -> None:
  if by not in COSTS:
    raise ValueError(f'unknown cost {by!r} to partition by; expected one of {", ".join(COSTS)}')
  if remat_policy != rematerialisation.AUTO:
    rematerialisation.CheckPolicy(remat_policy)
  partitioner.CheckNumStages(num_stages, num_layers)
  if not splits:
    return
  if len(splits) != num_stages:
    raise ValueError(
      f'splits {list(splits)} name {len(splits)} stages, but num_stages is {num_stages}; '
      'leave splits empty to cut the layers by their cost'
    )
  partitioner.CheckSplits(splits, num_layers)


def _Stages(
  costs: Sequence[layer_costs.LayerCost], ends: Sequence[int], busy: Sequence[fractions.Fraction]
) -> tuple[StageCut, ...]:
  ranges = partitioner.StageRanges(ends)
  total = sum(busy)
  stages = []
  for (start, end), stage_busy in zip(ranges, busy, strict=True):
    share = stage_busy / total if total else (end - start) / len(costs)
    members = costs[start:end]
    num_params = sum(m.num_params for m in members)
    stages.append(StageCut(start, end, num_params, sum(m.flops for m in members), float(share)))
  return tuple(stages)


def _CheckMemory(cut: Cut, limit: float, prefix: str, by_hand: bool) -> None:
  """Raises ValueError if the stages of a device need more than the limit.

  Args:
    cut: a cut by hand or with a shared vocabulary, or the best cut without the limit if no cut
      keeps it.
    limit: bytes of one device.
    prefix: the beginning of the message.
    by_hand: whether the cut was made by hand.
  """
  needs = cut.device_bytes
  is_search = not (by_hand or cut.vocabulary)
  if not is_search and max(needs) <= limit:
    return
  owners = cut.schedule.stage_to_device
  stages = [k for k, owner in enumerate(owners) if owner == needs.index(max(needs))]
  k = max(stages, key=lambda k: cut.memory[k].total)
  s, memory = cut.stages[k], cut.memory[k]
  whose = 'of splits' if by_hand else f'of the cut that is best by {cut.by}'
  share = ''
  if len(stages) > 1 and not cut.vocabulary:
    share = f' (an equal share of it for each of the {len(stages)} stages of the device)'
  total, state, activations = map(
    text_table.FormatBytes, (memory.total, memory.state, memory.activations)
  )
  raise ValueError(
    f'{prefix}memory_limit {text_table.FormatBytes(limit)} per device{share}: '
    + (f'no cut into {len(cut.stages)} stages keeps it; ' if is_search else '')
    + f'stage {k} {whose}, layers {cut.layers[s.start].path} to {cut.layers[s.end - 1].path}, is '
    f'predicted to need {total} ({memory.total:,} bytes): {state} of weights, gradients and slots '
    f'and {activations} of activations. Use more stages, more micro-batches, another schedule or '
    'remat_policy, or raise the limit'
  )
