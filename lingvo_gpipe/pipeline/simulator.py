# SPDX-License-Identifier: Apache-2.0
"""Plays a schedule under given costs: how long a step takes, who idles, what memory it needs.

The model: a device runs its actions in their order, one at a time, each as soon as the device is
free and its input or gradient has arrived. A result starts on its way to the neighbouring stage
when its action ends, and costs no device any time; results between the same two devices in the same
direction travel one after the other. What is not modelled: skip connections' own transfers, and
any sharing of cores or memory bandwidth between devices.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lingvo_gpipe.pipeline import actions, rematerialisation, schedule_ir, timeline_text

Action = actions.Action
Kind = actions.Kind
PerStage = float | Sequence[float]


@dataclasses.dataclass(frozen=True)
class Costs:
  """Times, in any unit, for one micro-batch; one number holds for all stages.

  What is None follows from the others: by default every stage is like one of `forward` alone, with
  a backward of two forwards. Measured times are best given one by one.

  Attributes:
    forward: F of each stage.
    recompute: the forward pass again, within B and I, as far as the policy has it; None: `forward`.
    input_gradient: I of each stage, without recomputation; None: `forward`.
    weight_gradient: W of each stage; None: `forward`.
    backward: B of each stage, without recomputation; None: I + W.
    fused: V of the last stage (each stage has an entry); None: F + B.
    update: the optimizer's update on each device, after its actions.
    transfer: how long the link is busy with one activation, for the boundary after each stage but
      the last; see `TransferTimes`. Counts where the two stages are on different devices.
    gradient_transfer: the same for the gradient, which goes the other way; None: `transfer`.
    latency: how much later a result arrives than the link is free again.
    micro_batch_sizes: relative size of each micro-batch, if they differ; times and transfers are in
      proportion.
  """

  forward: PerStage
  recompute: PerStage | None = None
  input_gradient: PerStage | None = None
  weight_gradient: PerStage | None = None
  backward: PerStage | None = None
  fused: PerStage | None = None
  update: float | Sequence[float] = 0
  transfer: float | Sequence[float] = 0
  gradient_transfer: float | Sequence[float] | None = None
  latency: float = 0
  micro_batch_sizes: Sequence[float] | None = None


@dataclasses.dataclass(frozen=True)
class ActivationSizes:
  """Bytes that one micro-batch takes; one number holds for all stages.

  Attributes:
    stage_input: what comes over the boundary into each stage.
    inner: all else that a stage keeps from its forward pass for its backward pass.
    layer_inputs: the inputs of its layers except the first (policy `layer` keeps them).
    largest_layer: the inner activations of its largest layer (policy `layer` has them in backward).
    weight_part: what W still needs after I; None: everything.
  """

  stage_input: PerStage
  inner: PerStage
  layer_inputs: PerStage | None = None
  largest_layer: PerStage | None = None
  weight_part: PerStage | None = None


class Span(NamedTuple):
  """What a device does from `start` to `end`.

  `part` is `compute`, `recompute` (the forward pass again, which belongs to the B or I named by
  `action`), or `update` (no action).
  """

  device: int
  start: float
  end: float
  action: Action | None
  part: str = 'compute'


@dataclasses.dataclass(frozen=True)
class Result:
  """One simulated step.

  Attributes:
    schedule: what was simulated.
    makespan: when the last device is done.
    busy: for each device the time in which it works, recomputation and update included.
    peak_activations: for each stage the most micro-batches that it holds at one time.
    peak_bytes: for each stage the most bytes of activations at one time; None without sizes.
    device_peak_bytes: the same for each device, over all its stages.
    timeline: for each device its spans, in order of time.
  """

  schedule: schedule_ir.Schedule
  makespan: float
  busy: tuple[float, ...]
  peak_activations: tuple[int, ...]
  peak_bytes: tuple[float, ...] | None
  device_peak_bytes: tuple[float, ...] | None
  timeline: tuple[tuple[Span, ...], ...]

  @property
  def idle(self) -> tuple[float, ...]:
    """For each device the time of the step in which it does nothing."""
    return tuple(self.makespan - busy for busy in self.busy)

  @property
  def bubble(self) -> tuple[float, ...]:
    """For each device the idle share of the step."""
    return tuple(idle / self.makespan if self.makespan else 0.0 for idle in self.idle)

  @property
  def overall_bubble(self) -> float:
    """The idle share of all devices together."""
    return sum(self.bubble) / len(self.bubble)

  @property
  def gaps(self) -> tuple[float, ...]:
    """For each device its idle time between its own first start and last end.

    This is what remains idle if a device may start the next step before the others end this one.
    """
    return tuple(
      row[-1].end - row[0].start - busy for row, busy in zip(self.timeline, self.busy, strict=True)
    )

  def Picture(self, num_columns: int = 100) -> str:
    """The timeline as text, widths in proportion to time: `|F0--|R0--|B0------`, `.` is idle.

    R is a recomputation, U the update; the share of idle time stands behind each row.
    """
    rows = [[(s.start, s.end, self._Label(s)) for s in row] for row in self.timeline]
    notes = [f'{bubble:.1%} idle' for bubble in self.bubble]
    return timeline_text.DrawToScale(rows, num_columns, notes)

  def _Label(self, span: Span) -> str:
    if span.action is None:
      return 'U'
    label = self.schedule.Label(span.action)
    return label.replace(span.action.kind.value, 'R') if span.part == 'recompute' else label


def TransferTimes(num_bytes: PerStage, bandwidth: float) -> float | tuple[float, ...]:
  """`Costs.transfer` from the bytes over each boundary and a link's bytes per unit of time."""
  if not bandwidth > 0:
    raise ValueError(f'bandwidth: expected a positive number, got {bandwidth!r}')
  if isinstance(num_bytes, Iterable):
    return tuple(b / bandwidth for b in num_bytes)
  return num_bytes / bandwidth


def Simulate(
  schedule: schedule_ir.Schedule,
  costs: Costs,
  *,
  remat_policy: str = 'stage',
  recompute_early: bool = False,
  update_barrier: bool = False,
  sizes: ActivationSizes | None = None,
) -> Result:
  """Plays one step.

  V never recomputes: with every F, R, I and W of a layer one unit, a layer of a fused last stage
  costs 3 units and any other 4. A schedule that only runs forward recomputes and keeps nothing.

  Args:
    schedule: any valid schedule.
    costs: what everything costs.
    remat_policy: one of `rematerialisation.POLICIES`.
    recompute_early: recompute before the gradient arrives, as soon as the device is free; not
      possible where it is done layer by layer.
    update_barrier: no device updates before all have finished their actions, as a global gradient
      norm demands.
    sizes: for the peaks in bytes.

  Raises:
    ValueError: an invalid schedule, an unknown policy, or costs or sizes that do not fit.
  """
  schedule.Validate()
  rematerialisation.CheckPolicy(remat_policy)
  if recompute_early and remat_policy == 'layer':
    raise ValueError(
      "recompute_early: policy 'layer' recomputes each layer between two gradients, not before; "
      "take 'stage' or 'except_last'"
    )
  scale = _Scale(costs.micro_batch_sizes, schedule.num_micro_batches)
  timeline = _Play(schedule, costs, scale, remat_policy, recompute_early)
  _AppendUpdates(timeline, costs.update, update_barrier)
  peaks = _PeakBytes(schedule, sizes, scale, remat_policy) if sizes else (None, None)
  return Result(
    schedule=schedule,
    makespan=max(row[-1].end for row in timeline),
    busy=tuple(sum(s.end - s.start for s in row) for row in timeline),
    peak_activations=schedule.PeakActivations(),
    peak_bytes=peaks[0],
    device_peak_bytes=peaks[1],
    timeline=tuple(map(tuple, timeline)),
  )


def _Recomputes(remat_policy: str, schedule: schedule_ir.Schedule, action: Action) -> bool:
  """Whether a forward pass is repeated within the action."""
  if action.kind not in (Kind.BACKWARD, Kind.INPUT_GRADIENT):
    return False
  is_last = action.micro_batch == schedule.num_micro_batches - 1
  return rematerialisation.RunsAgain(remat_policy, is_last)


def _Play(
  schedule: schedule_ir.Schedule,
  costs: Costs,
  scale: Sequence[float],
  remat_policy: str,
  recompute_early: bool,
) -> list[list[Span]]:
  """For each device the spans of its actions."""
  durations, recompute = _Durations(costs, schedule.num_stages)
  links = _Links(schedule, costs, scale)
  clock: list[float] = [0] * schedule.num_devices
  timeline: list[list[Span]] = [[] for _ in range(schedule.num_devices)]
  arrivals: dict[Action, float] = {}  # When the neighbouring stage has the action's result.
  for device, action in schedule.Walk():
    stage, size = action.stage, scale[action.micro_batch]
    # What it needs of its own stage was made by its own device before.
    needed = (arrivals[n] for n in schedule.Dependencies(action) if n.stage != stage)
    arrival = max(needed, default=0)
    start = max(clock[device], arrival)
    if _Recomputes(remat_policy, schedule, action) and recompute[stage]:
      start = clock[device] if recompute_early else start
      end = start + recompute[stage] * size
      timeline[device].append(Span(device, start, end, action, 'recompute'))
      start = max(end, arrival)
    clock[device] = start + durations[action.kind][stage] * size
    timeline[device].append(Span(device, start, clock[device], action))
    arrivals[action] = links.Send(action, clock[device])
  return timeline


class _Links:
  """When results that one stage makes are there for its neighbour."""

  def __init__(self, schedule: schedule_ir.Schedule, costs: Costs, scale: Sequence[float]) -> None:
    num_boundaries = schedule.num_stages - 1
    back = costs.transfer if costs.gradient_transfer is None else costs.gradient_transfer
    self._forward = _Entries('transfer', costs.transfer, num_boundaries, 'boundary')
    self._backward = _Entries('gradient_transfer', back, num_boundaries, 'boundary')
    (self._latency,) = _Entries('latency', costs.latency, 1, 'link')
    self._owners = schedule.stage_to_device
    self._scale = scale
    self._free: dict[tuple[int, int], float] = {}  # From when on a link (from, to) is free.

  def Send(self, action: Action, time: float) -> float:
    """The time at which the result of an action that ends at `time` arrives."""
    if action.kind is Kind.WEIGHT_GRADIENT:
      return time  # It stays where it is.
    stage = action.stage
    forward = action.kind is Kind.FORWARD
    other = stage + 1 if forward else stage - 1
    if other not in range(len(self._owners)) or self._owners[other] == self._owners[stage]:
      return time
    seconds = self._forward[stage] if forward else self._backward[other]
    link = self._owners[stage], self._owners[other]
    start = max(time, self._free.get(link, 0))
    self._free[link] = start + seconds * self._scale[action.micro_batch]
    return self._free[link] + self._latency


def _AppendUpdates(
  timeline: list[list[Span]], update: float | Sequence[float], barrier: bool
) -> None:
  updates = _Entries('update', update, len(timeline), 'device')
  all_done = max(row[-1].end for row in timeline)
  for device, (row, duration) in enumerate(zip(timeline, updates, strict=True)):
    start = all_done if barrier else row[-1].end
    if duration:
      row.append(Span(device, start, start + duration, None, 'update'))


def _PeakBytes(
  schedule: schedule_ir.Schedule,
  sizes: ActivationSizes,
  scale: Sequence[float],
  remat_policy: str,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
  """For each stage and for each device the most bytes that are held at one time.

  A device does one thing at a time, so their order is all that matters.
  """
  by_layer = remat_policy == 'layer'
  if by_layer and (sizes.layer_inputs is None or sizes.largest_layer is None):
    raise ValueError("remat_policy 'layer' needs sizes.layer_inputs and sizes.largest_layer")

  def Entries(name: str) -> tuple[float, ...]:
    value = getattr(sizes, name)
    return _Entries(f'sizes.{name}', 0 if value is None else value, schedule.num_stages, 'stage')

  stage_input, inner, weight_part = Entries('stage_input'), Entries('inner'), Entries('weight_part')
  layer_inputs, largest_layer = Entries('layer_inputs'), Entries('largest_layer')
  held: list[float] = [0] * schedule.num_stages
  stage_peaks: list[float] = [0] * schedule.num_stages
  device_peaks: list[float] = [0] * schedule.num_devices
  for device, row in enumerate(schedule.actions):
    device_held: float = 0
    for action in row:
      k = action.stage
      everything = stage_input[k] + inner[k]
      backward = Action(k, Kind.BACKWARD, action.micro_batch)
      if schedule.forward_only:
        kept = working = stage_input[k]
      elif action.kind is Kind.FORWARD_BACKWARD or not _Recomputes(
        remat_policy, schedule, backward
      ):
        kept = working = everything
      elif by_layer:
        kept = stage_input[k] + layer_inputs[k]
        working = kept + largest_layer[k]
      else:
        kept, working = stage_input[k], everything
      for_weights = everything if sizes.weight_part is None else weight_part[k]
      # Of this micro-batch: what was held before, is held within, and is held after the action.
      before, within, after = {
        Kind.FORWARD: (0, kept, 0 if schedule.forward_only else kept),
        Kind.BACKWARD: (kept, working, 0),
        Kind.INPUT_GRADIENT: (kept, max(working, for_weights), for_weights),
        Kind.WEIGHT_GRADIENT: (for_weights, for_weights, 0),
        Kind.FORWARD_BACKWARD: (0, working, 0),
      }[action.kind]
      size = scale[action.micro_batch]
      stage_peaks[k] = max(stage_peaks[k], held[k] + (within - before) * size)
      device_peaks[device] = max(device_peaks[device], device_held + (within - before) * size)
      held[k] += (after - before) * size
      device_held += (after - before) * size
  return tuple(stage_peaks), tuple(device_peaks)


# Reading costs.


def _Durations(
  costs: Costs, num_stages: int
) -> tuple[dict[Kind, tuple[float, ...]], tuple[float, ...]]:
  """{kind: for each stage its time}, and for each stage the time of its recomputation."""

  def Entries(name: str, default: Iterable[float]) -> tuple[float, ...]:
    value = getattr(costs, name)
    return _Entries(name, tuple(default) if value is None else value, num_stages, 'stage')

  def Sum(a: Sequence[float], b: Sequence[float]) -> Iterable[float]:
    return (x + y for x, y in zip(a, b, strict=True))

  forward = Entries('forward', ())
  inputs = Entries('input_gradient', forward)
  weights = Entries('weight_gradient', forward)
  backward = Entries('backward', Sum(inputs, weights))
  durations = {
    Kind.FORWARD: forward,
    Kind.INPUT_GRADIENT: inputs,
    Kind.WEIGHT_GRADIENT: weights,
    Kind.BACKWARD: backward,
    Kind.FORWARD_BACKWARD: Entries('fused', Sum(forward, backward)),
  }
  return durations, Entries('recompute', forward)


def _Scale(sizes: Sequence[float] | None, num_micro_batches: int) -> tuple[float, ...]:
  if sizes is not None and not isinstance(sizes, Iterable):
    raise ValueError(f'micro_batch_sizes: expected one number a micro-batch, got {sizes!r}')
  value = 1 if sizes is None else sizes
  return _Entries('micro_batch_sizes', value, num_micro_batches, 'micro-batch')


def _Entries(
  name: str, value: float | Sequence[float], count: int, of_what: str
) -> tuple[float, ...]:
  """One number for each of `count`; a single number is repeated."""
  entries = tuple(value) if isinstance(value, Iterable) else (value,) * count
  if len(entries) != count:
    raise ValueError(
      f'{name}: expected one number, or {count}, one a {of_what}; got {len(entries)} of them'
    )
  for i, number in enumerate(entries):
    if not (isinstance(number, numbers.Real) and 0 <= number < math.inf):
      raise ValueError(f'{name}: {of_what} {i}: expected a number from 0 up, got {number!r}')
  return entries
