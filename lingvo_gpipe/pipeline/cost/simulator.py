# SPDX-License-Identifier: Apache-2.0
"""Plays a schedule under given costs: how long a step takes, who idles, what memory it needs.

The model: a device runs its actions in their order, one at a time, each as soon as the device is
free and its input or gradient has arrived. A result starts on its way to the neighbouring stage
when its action ends, and costs no device any time; results between the same two devices in the same
direction travel one after the other. Where there are replicas, the gradients of a stage go round
them from the end of its last backward action on, which costs no device any time either; updates
wait for them. What is not modelled: skip connections' own transfers, any sharing of memory
bandwidth between devices, and of links between gradients and activations.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lingvo_gpipe.pipeline.cost import activation_memory, core_sharing, per_stage
from lingvo_gpipe.pipeline.schedule import actions, step_work, timeline_text
from lingvo_gpipe.pipeline.schedule import schedule as schedule_lib

Action = actions.Action
Kind = actions.Kind
ActivationSizes = activation_memory.ActivationSizes
PerStage = per_stage.PerStage


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
    latency: how much later a result arrives than the link is free again; one number, or one for
      each boundary.
    all_reduce: how long adding the gradients of each stage over the replicas takes; those of one
      device are added one stage after the other.
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
  latency: float | Sequence[float] = 0
  all_reduce: PerStage = 0
  micro_batch_sizes: Sequence[float] | None = None


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
    reduced: for each device when the gradients of its stages have been added over the replicas.
    busy: for each device the time in which it works, recomputation and update included.
    peak_activations: for each stage the most micro-batches that it holds at one time.
    peak_bytes: for each stage the most bytes of activations at one time; None without sizes.
    device_peak_bytes: the same for each device, over all its stages.
    timeline: for each device its spans, in order of time.
  """

  schedule: schedule_lib.Schedule
  makespan: float
  reduced: tuple[float, ...]
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
  schedule: schedule_lib.Schedule,
  costs: Costs,
  *,
  alone: Costs | None = None,
  remat_policy: str = 'stage',
  recompute_early: bool = False,
  update_barrier: bool = False,
  sizes: ActivationSizes | None = None,
  trained: Sequence[bool] | None = None,
) -> Result:
  """Plays one step.

  V never recomputes: with every F, R, I and W of a layer one unit, a layer of a fused last stage
  costs 3 units and any other 4. A schedule that only runs forward recomputes and keeps nothing.

  Args:
    schedule: any valid schedule.
    costs: what everything costs; where devices share their host's cores, while all of them work.
    alone: what actions cost while no other device works; see `core_sharing`. No action gets longer
      by it. The rest, updates too, takes what `costs` say. None: the devices share no cores.
    remat_policy: one of `rematerialisation.POLICIES`.
    recompute_early: recompute before the gradient arrives, as soon as the device is free; not
      possible where it is done layer by layer.
    update_barrier: no device updates before all have finished their actions and added their
      gradients, as a global gradient norm demands.
    sizes: for the peaks in bytes.
    trained: for each stage whether it has weights that are trained, as the engine has it: stages
      before the first one do nothing backward and hold nothing, that one computes no input
      gradient, and frozen ones after it no weight gradients. Its I is empty and its W takes as long
      as its B would, frozen ones' B as long as I, where `costs` do not tell the B apart. None: all
      stages are alike, the first computes an input gradient too.

  Raises:
    ValueError: an invalid schedule, an unknown policy, or costs, sizes or flags that do not fit.
  """
  schedule.Validate()
  work = step_work.StepWork(schedule, remat_policy, trained)
  if recompute_early and remat_policy == 'layer':
    raise ValueError(
      "recompute_early: policy 'layer' recomputes each layer between two gradients, not before; "
      "take 'stage' or 'except_last'"
    )
  scale = _Scale(costs.micro_batch_sizes, schedule.num_micro_batches)
  durations = _Durations(work, costs, scale)
  timeline = _Play(work, durations, _Links(work, costs, scale), recompute_early)
  if alone:
    pair = durations, _Durations(work, alone, scale)
    timeline = _ShareCores(timeline, pair, _Links(work, costs, scale), recompute_early)
  reduced = _Reduced(work, timeline, costs.all_reduce)
  _AppendUpdates(timeline, reduced, costs.update, update_barrier)
  peaks = activation_memory.Peaks(work, sizes, scale) if sizes else (None, None)
  return Result(
    schedule=schedule,
    makespan=max(*reduced, *(row[-1].end for row in timeline)),
    reduced=tuple(reduced),
    busy=tuple(sum(s.end - s.start for s in row) for row in timeline),
    peak_activations=activation_memory.PeakActivations(work),
    peak_bytes=peaks[0],
    device_peak_bytes=peaks[1],
    timeline=tuple(map(tuple, timeline)),
  )


def _Play(
  work: step_work.StepWork, durations: _Durations, links: _Links, recompute_early: bool
) -> list[list[Span]]:
  """For each device the spans of its actions."""
  schedule = work.schedule
  clock: list[float] = [0] * schedule.num_devices
  timeline: list[list[Span]] = [[] for _ in range(schedule.num_devices)]
  for device, action in schedule.Walk():
    if not work.Exists(action):
      continue
    arrival = links.Arrival(action)
    start = max(clock[device], arrival)
    if work.Repeats(action) and (again := durations.Of(action, 'recompute')):
      start = clock[device] if recompute_early else start
      timeline[device].append(Span(device, start, start + again, action, 'recompute'))
      start = max(start + again, arrival)
    clock[device] = start + durations.Of(action)
    timeline[device].append(Span(device, start, clock[device], action))
    links.Send(action, clock[device])
  return timeline


def _ShareCores(
  timeline: Sequence[Sequence[Span]],
  durations: tuple[_Durations, _Durations],
  links: _Links,
  recompute_early: bool,
) -> list[list[Span]]:
  """The timeline with the times that spans have where devices share cores.

  Args:
    timeline: without updates.
    durations: while all devices work, and of each while no other works.
    links: nothing sent yet.
    recompute_early: as for `Simulate`.
  """
  slowed, alone = durations
  parts = [[(s.action, s.part) for s in row if s.action] for row in timeline]
  pieces = [[core_sharing.Piece(slowed.Of(*p), alone.Of(*p)) for p in row] for row in parts]

  def Arrival(device: int, index: int) -> float:
    action, part = parts[device][index]
    return 0.0 if recompute_early and part == 'recompute' else links.Arrival(action)

  def Ended(device: int, index: int, time: float) -> None:
    action, part = parts[device][index]
    if part == 'compute':
      links.Send(action, time)

  played = core_sharing.Play(pieces, Arrival, Ended)
  return [
    [span._replace(start=start, end=end) for span, (start, end) in zip(row, ends, strict=True)]
    for row, ends in zip(timeline, played, strict=True)
  ]


class _Links:
  """When results that one stage makes are there for its neighbour."""

  def __init__(self, work: step_work.StepWork, costs: Costs, scale: Sequence[float]) -> None:
    num_boundaries = work.schedule.num_stages - 1
    back = costs.transfer if costs.gradient_transfer is None else costs.gradient_transfer
    self._forward = per_stage.Expand('transfer', costs.transfer, num_boundaries, 'boundary')
    self._backward = per_stage.Expand('gradient_transfer', back, num_boundaries, 'boundary')
    self._latency = per_stage.Expand('latency', costs.latency, num_boundaries, 'boundary')
    self._work = work
    self._owners = work.schedule.stage_to_device
    self._scale = scale
    self._free: dict[tuple[int, int], float] = {}  # From when on a link (from, to) is free.
    self._arrivals: dict[Action, float] = {}  # When the neighbouring stage has its result.

  def Arrival(self, action: Action) -> float:
    """When all is there that the action needs of other stages; infinite if not all is sent."""
    # What it needs of its own stage was made by its own device before.
    needed = (n for n in self._work.Dependencies(action) if n.stage != action.stage)
    return max((self._arrivals.get(n, math.inf) for n in needed), default=0)

  def Send(self, action: Action, time: float) -> None:
    """The action ends at that time, and its result goes where it is needed."""
    self._arrivals[action] = self._ArrivalOf(action, time)

  def _ArrivalOf(self, action: Action, time: float) -> float:
    stage = action.stage
    forward = action.kind is Kind.FORWARD
    if action.kind is Kind.WEIGHT_GRADIENT or not (forward or self._work.NeedsDx(stage)):
      return time  # It stays where it is.
    other = stage + 1 if forward else stage - 1
    if other not in range(len(self._owners)) or self._owners[other] == self._owners[stage]:
      return time
    boundary = min(stage, other)
    seconds = (self._forward if forward else self._backward)[boundary]
    link = self._owners[stage], self._owners[other]
    start = max(time, self._free.get(link, 0))
    self._free[link] = start + seconds * self._scale[action.micro_batch]
    return self._free[link] + self._latency[boundary]


def _Reduced(
  work: step_work.StepWork, timeline: Sequence[Sequence[Span]], all_reduce: PerStage
) -> list[float]:
  """For each device when it has its stages' gradients of all replicas."""
  durations = per_stage.Expand('all_reduce', all_reduce, work.schedule.num_stages, 'stage')
  reduced = []
  for row in timeline:
    # Whichever comes last is what ends the stage's gradients.
    ends = {
      s.action.stage: s.end
      for s in row
      if s.action is not None and s.action.kind is not Kind.FORWARD
    }
    free = 0.0
    for stage, end in sorted(ends.items(), key=lambda item: item[1]):
      if work.IsTrained(stage):
        free = max(free, end) + durations[stage]
    reduced.append(free)
  return reduced


def _AppendUpdates(
  timeline: list[list[Span]],
  reduced: Sequence[float],
  update: float | Sequence[float],
  barrier: bool,
) -> None:
  updates = per_stage.Expand('update', update, len(timeline), 'device')
  ready = [max(row[-1].end, end) for row, end in zip(timeline, reduced, strict=True)]
  for device, (row, duration) in enumerate(zip(timeline, updates, strict=True)):
    start = max(ready) if barrier else ready[device]
    if duration:
      row.append(Span(device, start, start + duration, None, 'update'))


# Reading costs.


class _Durations:
  """How long actions take, apart from what they recompute, and how long that takes."""

  def __init__(self, work: step_work.StepWork, costs: Costs, scale: Sequence[float]) -> None:
    num_stages = work.schedule.num_stages

    def Entries(name: str, default: Iterable[float]) -> tuple[float, ...]:
      value = getattr(costs, name)
      return per_stage.Expand(name, tuple(default) if value is None else value, num_stages, 'stage')

    def Sum(a: Iterable[float], b: Iterable[float]) -> Iterable[float]:
      return (x + y for x, y in zip(a, b, strict=True))

    forward = Entries('forward', ())
    inputs = Entries('input_gradient', forward)
    weights = Entries('weight_gradient', forward)
    stages = range(num_stages)
    backward = Entries('backward', Sum(inputs, (weights[k] * work.IsTrained(k) for k in stages)))
    # Without an I, W is all of the backward.
    weights = tuple(weights[k] if work.NeedsDx(k) else backward[k] for k in stages)
    differentiated = (backward[k] * work.HasBackward(k) for k in stages)
    self._of_kind = {
      Kind.FORWARD: forward,
      Kind.INPUT_GRADIENT: inputs,
      Kind.WEIGHT_GRADIENT: weights,
      Kind.BACKWARD: backward,
      Kind.FORWARD_BACKWARD: Entries('fused', Sum(forward, differentiated)),
    }
    self._recompute = Entries('recompute', forward)
    self._scale = scale

  def Of(self, action: Action, part: str = 'compute') -> float:
    """The time of a span's action and part, but no update."""
    of_stages = self._recompute if part == 'recompute' else self._of_kind[action.kind]
    return of_stages[action.stage] * self._scale[action.micro_batch]


def _Scale(sizes: Sequence[float] | None, num_micro_batches: int) -> tuple[float, ...]:
  if sizes is not None and not isinstance(sizes, Iterable):
    raise ValueError(f'micro_batch_sizes: expected one number a micro-batch, got {sizes!r}')
  value = 1 if sizes is None else sizes
  return per_stage.Expand('micro_batch_sizes', value, num_micro_batches, 'micro-batch')
