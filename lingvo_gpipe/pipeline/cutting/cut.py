# SPDX-License-Identifier: Apache-2.0
"""Where the cuts go: the cost of each layer, the stages, and the table that shows them."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from lingvo_gpipe.core import base_layer, text_table
from lingvo_gpipe.pipeline.cost import partitioner, simulator, stage_memory, stage_work
from lingvo_gpipe.pipeline.cutting import layer_costs, layer_profile
from lingvo_gpipe.pipeline.schedule import rematerialisation, schedules

COSTS = ('flops', 'params', 'time')

# Of actions of equal stages, for the bubble.
_DURATIONS = {
  schedules.Kind.FORWARD: 1,
  schedules.Kind.BACKWARD: 2,
  schedules.Kind.INPUT_GRADIENT: 1,
  schedules.Kind.WEIGHT_GRADIENT: 1,
  schedules.Kind.FORWARD_BACKWARD: 3,
}
# Longer paths are cut at their front in the table, which is at most 140 columns wide then.
_PATH_COLUMNS = 20


@dataclasses.dataclass(frozen=True)
class StageCut:
  """One stage: layers [start, end), their weights, forward FLOPs and share of the step's work."""

  start: int
  end: int
  num_params: int
  flops: int
  share: float


@dataclasses.dataclass(frozen=True)
class StageBytes:
  """The most memory that a stage is predicted to need (see `stage_memory`)."""

  state: int
  activations: int

  @property
  def total(self) -> int:
    """Weights, accumulators, slots and activations."""
    return self.state + self.activations


@dataclasses.dataclass(frozen=True)
class Cut:
  """A sequence of layers cut into stages.

  Attributes:
    layers: the layers' costs for one micro-batch.
    ends: for each stage the index after its last layer.
    stages: the stages.
    schedule: the training schedule.
    by: what the cut is balanced by.
    num_params: count of the trained weights; one that is tied to another counts once.
    remat_policy: what backward recomputes.
    work: for each layer its F, I and W, in FLOPs, weights or seconds, as `by` says.
    weights: what is trained, and the slots.
    make_memory: traces the layers for the sizes of their activations.
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
    """The share of a step that the devices idle, with equal stages and backward twice forward.

    That is (K-1)/(M+K-1) for gpipe (GPipe section 2.3).
    """
    timeline = self.schedule.Timeline(_DURATIONS)
    makespan = max(row[-1][1] for row in timeline)
    busy = sum(end - start for row in timeline for start, end, _ in row)
    return 1.0 - busy / (makespan * self.num_devices)

  @functools.cached_property
  def simulated(self) -> simulator.Result:
    """A step of this cut, times in the unit of `work`; without transfers, loss and update."""
    work = self.work
    if not any(w.forward for w in work):  # Nothing is known to cost anything.
      work = stage_work.FromForward([1] * len(work), [w.is_trained for w in work])
    costs = stage_work.SimulatorCosts(work, self.ends)
    trained = [
      any(w.is_trained for w in work[start:end])
      for start, end in partitioner.StageRanges(self.ends)
    ]
    return simulator.Simulate(self.schedule, costs, remat_policy=self.remat_policy, trained=trained)

  @property
  def bubble(self) -> float:
    """The predicted share of a step that the devices idle, by `simulated`."""
    return self.simulated.overall_bubble

  @property
  def speed_up(self) -> float:
    """How much faster than one device, with the same policy and M, by `simulated`."""
    one = stage_work.OneDevice(self.work, self.num_micro_batches, self.remat_policy)
    return one / self.simulated.makespan if one else float(self.num_devices)

  @functools.cached_property
  def memory(self) -> tuple[StageBytes, ...]:
    """For each stage the most memory that it is predicted to need."""
    found = self.make_memory()
    return tuple(
      StageBytes(found.State(s.start, s.end), found.Activations(k, s.start, s.end))
      for k, s in enumerate(self.stages)
    )

  def Table(self, devices: Sequence[str] = ()) -> str:
    """The stage table: layers, work, predicted idle time and memory, and device of every stage."""
    in_time = self.by == 'time'
    head = f'stage layers from to params {"ms" if in_time else "MFLOPs"} share idle weights'
    rows = [(*head.split(), 'activations', 'device')]
    for k, (s, needs) in enumerate(zip(self.stages, self.memory, strict=True)):
      device = self.schedule.stage_to_device[k]
      seconds = sum(
        w.forward + w.input_gradient + w.weight_gradient for w in self.work[s.start : s.end]
      )
      rows.append(
        (
          str(k),
          str(s.end - s.start),
          _Shortened(self.layers[s.start].path),
          _Shortened(self.layers[s.end - 1].path),
          f'{s.num_params:,}',
          f'{seconds * 1e3:,.2f}' if in_time else f'{s.flops / 1e6:,.1f}',
          f'{s.share:.1%}',
          f'{self.simulated.bubble[device]:.1%}',
          BytesText(needs.state),
          BytesText(needs.activations),
          _ShortName(devices[device]) if devices else '-',
        )
      )
    lines = text_table.Lines(rows, left={2, 3, 10})
    slowest = max(s.share for s in self.stages)
    balance = 1.0 / (slowest * len(self.stages)) if slowest else 1.0
    stages = f'K={self.num_devices} stages'
    if self.num_devices < len(self.stages):
      stages = f'{len(self.stages)} stages on K={self.num_devices} devices'
    lines.append(
      f'{stages}, M={self.num_micro_batches} micro-batches, {self.schedule.name}, '
      f'remat_policy {self.remat_policy}; balance {balance:.1%} (by {self.by}); '
      f'{self.num_params:,} parameters'
    )
    lines.append(
      f'predicted: bubble {self.bubble:.1%} of a step '
      f'({self.even_bubble:.1%} if stages were equal), '
      f'{self.speed_up:.2f} times as fast as one device'
    )
    lines.append(
      'predicted memory: weights with gradients and '
      f'{self.weights.slots_per_weight:g} optimizer slots each; activations at their peak'
    )
    if in_time:
      lines.append('ms: measured, forward and backward of a micro-batch without recomputation')
    return '\n'.join(lines)


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
  where: str = '',
) -> Cut:
  """Cuts the layers so that the costliest stage is as cheap as can be, or by hand.

  A stage's cost is what it does in a step under the schedule and the policy (see `stage_work`). The
  loss, which runs in the last stage, is not part of it, nor are transfers and the update.

  Args:
    layers: the flat list.
    input_specs: specs of one micro-batch, an argument of the first layer each.
    schedule: the training schedule; it says how many stages and micro-batches there are.
    splits: for each stage the index after its last layer, where the cut is made by hand.
    by: 'flops', 'params' or 'time', what is balanced; time is measured on `device`, and only if the
      cut is not made by hand are layers run at all.
    num_params: count of the trained weights, where it is not the sum of the layers'.
    remat_policy: what backward recomputes, one of `rematerialisation.POLICIES`.
    xla: whether XLA compiles the stages.
    weights: what is trained; by default all, with two optimizer slots.
    memory_limit: the most bytes that the stages of one device may need by the prediction of
      `stage_memory`; 0: no limit.
    device: where to measure times; '' is TensorFlow's choice.
    where: what messages begin with.

  Raises:
    TypeError: splits that are not integers.
    ValueError: more stages than layers, an unknown `by` or policy, splits that do not fit, or a
      memory limit that cannot be kept.
  """
  try:
    _CheckArguments(len(layers), schedule.num_stages, splits, by, remat_policy)
  except (TypeError, ValueError) as e:
    raise type(e)(f'{where}{e}') from None
  if splits and by == 'time':
    by = 'flops'  # Nobody waits for a measurement that decides nothing.
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

  @functools.cache
  def Memory() -> stage_memory.StageMemory:
    sizes = measured.Bytes(weights, xla)
    return stage_memory.StageMemory(sizes, schedule, remat_policy, stage_work.FirstTrained(trained))

  def WithEnds(ends: Sequence[int]) -> Cut:
    return Cut(
      layers=costs,
      ends=tuple(ends),
      stages=_Stages(costs, work, ends, schedule, remat_policy),
      schedule=schedule,
      by=by,
      num_params=sum(c.num_params for c in costs) if num_params is None else num_params,
      remat_policy=remat_policy,
      work=work,
      weights=weights,
      make_memory=Memory,
    )

  stage_costs = stage_work.CutCosts(work, schedule, remat_policy)
  ends = list(splits or ())
  if not ends and memory_limit:
    ends = partitioner.PartitionStages(stage_costs, Memory().Rooms(memory_limit)) or []
  keeps_limit = bool(ends)
  if not ends:
    ends = partitioner.PartitionStages(stage_costs) or []
  cut = WithEnds(ends)
  if memory_limit and (splits or not keeps_limit):
    _CheckMemory(cut, memory_limit, where, by_hand=bool(splits))
  return cut


def BytesText(num_bytes: float) -> str:
  """A size with three or more digits and its unit: `512B`, `3.4KiB`, `1,024.0MiB`."""
  if num_bytes < 1024:
    return f'{num_bytes:.0f}B'
  for unit in ('KiB', 'MiB'):
    num_bytes /= 1024
    if num_bytes < 1024:
      return f'{num_bytes:.1f}{unit}'
  return f'{num_bytes / 1024:,.1f}GiB'


def _CheckArguments(
  num_layers: int, num_stages: int, splits: Sequence[int] | None, by: str, remat_policy: str
) -> None:
  if by not in COSTS:
    raise ValueError(f'unknown cost {by!r} to partition by; expected one of {", ".join(COSTS)}')
  rematerialisation.CheckPolicy(remat_policy)
  partitioner.CheckNumStages(num_stages, num_layers)
  if not splits:
    return
  if len(splits) != num_stages:
    raise ValueError(
      f'splits {list(splits)} name {len(splits)} stages, but num_stages is {num_stages}; '
      'leave splits empty to have the layers cut by their cost'
    )
  partitioner.CheckSplits(splits, num_layers)


def _Stages(
  costs: Sequence[layer_costs.LayerCost],
  work: Sequence[stage_work.LayerWork],
  ends: Sequence[int],
  schedule: schedules.Schedule,
  remat_policy: str,
) -> tuple[StageCut, ...]:
  ranges = partitioner.StageRanges(ends)
  busy = stage_work.StageCosts(work, ends, schedule, remat_policy)
  total = sum(busy)
  stages = []
  for (start, end), stage_busy in zip(ranges, busy, strict=True):
    share = stage_busy / total if total else (end - start) / len(costs)
    members = costs[start:end]
    num_params = sum(m.num_params for m in members)
    stages.append(StageCut(start, end, num_params, sum(m.flops for m in members), float(share)))
  return tuple(stages)


def _CheckMemory(cut: Cut, limit: float, where: str, by_hand: bool) -> None:
  """Raises ValueError where the stages of a device need more than the limit."""
  needs = [0] * cut.num_devices
  for device, memory in zip(cut.schedule.stage_to_device, cut.memory, strict=True):
    needs[device] += memory.total
  if by_hand and max(needs) <= limit:
    return
  owners = cut.schedule.stage_to_device
  of_device = [k for k, owner in enumerate(owners) if owner == needs.index(max(needs))]
  k = max(of_device, key=lambda k: cut.memory[k].total)
  s, memory = cut.stages[k], cut.memory[k]
  whose = 'of splits' if by_hand else f'of the cut that is best by {cut.by}'
  many = len(of_device)
  share = f' (an equal share of it for each of the {many} stages of the device)' if many > 1 else ''
  raise ValueError(
    f'{where}memory_limit {BytesText(limit)} a device{share}: '
    + ('' if by_hand else f'no cut into {len(cut.stages)} stages keeps it; ')
    + f'stage {k} {whose}, layers {cut.layers[s.start].path} to {cut.layers[s.end - 1].path}, is '
    f'predicted to need {BytesText(memory.total)} ({memory.total:,} bytes): '
    f'{BytesText(memory.state)} of weights, gradients and slots and '
    f'{BytesText(memory.activations)} of activations. Take more stages, more micro-batches, '
    'another schedule or remat_policy, or raise the limit'
  )


def _ShortName(device: str) -> str:
  """A device without what all of them have: `device:GPU:0`, of a worker `task:1/device:GPU:0`."""
  return re.sub(r'^/(job:worker/replica:0/|.*/)?', '', device)


def _Shortened(path: str) -> str:
  return path if len(path) <= _PATH_COLUMNS else f'...{path[3 - _PATH_COLUMNS :]}'
