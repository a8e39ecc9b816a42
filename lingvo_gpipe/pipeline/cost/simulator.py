# SPDX-License-Identifier: Apache-2.0
"""Simulates a step of a schedule under given costs: its time, idle devices and peak memory.

For example gpipe with two stages and two micro-batches, drawn to scale:

    device 0    |F0-|F1-......................|R1-|B1-----|R0-|B0-----+++++|U
    link 0->1       ==~ ==~
    link 1->0                              ==~         ==~
    device 1    .......|F0-|F1-|R1-|B1-----|R0-|B0-----+++++|U

    R recomputation, U update, = transfer, ~ latency, + all-reduce over the replicas, . idle

The model:
- A device runs its actions in their order, one at a time. An action starts as soon as the device is
  free and the input or gradient has arrived. A recomputation (R) runs before its B or I.
- A result is sent to the neighbouring stage when its action ends, which takes no device time.
  Results between the same two devices in the same direction are sent one after the other.
- If transfers occupy devices (`Costs.transfer_occupies_devices`), the sender is busy for the time
  of the transfer after its action, and the receiver before the action that needs the result.
- Copies of activations to the host and back (O and L) take the link between a device and its host,
  which serves each direction by itself. A device waits for them as `host_links` says.
- With replicas, a stage's gradients are added over the replicas (all-reduce) after its last
  backward action, which takes no device time either. The update waits for the sums.

- Each slice of the vocabulary gets the last activation and sends back a gradient. Between its
  forward and its backward, the loss needs some numbers for each token, which only the latency
  delays.

Not modelled: the transfers of skip connections, memory bandwidth that devices share, and links that
gradients and activations share.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lingvo_gpipe.pipeline.cost import activation_memory, core_sharing, host_links, per_stage
from lingvo_gpipe.pipeline.schedule import actions, rematerialisation, step_work, timeline_text
from lingvo_gpipe.pipeline.schedule import schedule as schedule_lib

Action = actions.Action
Kind = actions.Kind
ActivationSizes = activation_memory.ActivationSizes
HostLink = host_links.HostLink
PerStage = per_stage.PerStage


@dataclasses.dataclass(frozen=True)
class Costs:
  """Times for one micro-batch, in any unit; a single number applies to all stages.

  Times left at None are derived from the others. By default only `forward` counts, and a backward
  takes two forwards. Set every field if times are measured.

  Attributes:
    forward: F of each stage.
    recompute: the repeated forward pass within B and I, if the policy recomputes; None: `forward`.
    input_gradient: I of each stage, without recomputation; None: `forward`.
    weight_gradient: W of each stage; None: `forward`.
    backward: B of each stage, without recomputation; None: I + W.
    fused: V of the last stage (each stage has an entry); None: F + B.
    update: the optimizer's update on each device, after its actions.
    transfer: how long an activation occupies the link, for each boundary between two stages; see
      `TransferTimes`. Ignored if both stages are on one device. All slices of the vocabulary are
      behind one boundary, the last.
    gradient_transfer: how long a gradient occupies the link, which is the opposite one; None:
      `transfer`.
    latency: the time from the end of a transfer until its result arrives; one number, or one for
      each boundary.
    transfer_occupies_devices: whether a transfer takes the time of both devices, as TensorFlow's
      copies between GPUs do, which wait for the compute streams of sender and receiver.
    all_reduce: how long it takes to add the gradients of each stage over the replicas; the stages
      of one device follow one after the other.
    micro_batch_sizes: relative size of each micro-batch, if they differ; times and transfers are
      proportional to it.
    host_link: the link of each device to its host, for schedules with copies; None: copies take no
      time.
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
  transfer_occupies_devices: bool = False
  all_reduce: PerStage = 0
  micro_batch_sizes: Sequence[float] | None = None
  host_link: HostLink | None = None


class Span(NamedTuple):
  """One piece of work of a device, from `start` to `end`.

  `part` is `compute`, `recompute` (the repeated forward pass of the B or I in `action`),
  `transfer` (to or from another device, if transfers occupy devices), `update` (without an
  action), or `copy` (to or from the host, which does not occupy the device).
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
    schedule: the simulated schedule.
    makespan: the time when the last device is done.
    reduced: for each device the time when its gradients have been added over the replicas.
    busy: for each device its working time, including recomputation, transfers that occupy it, and
      the update.
    peak_activations: for each stage the most micro-batches that it holds at one time.
    peak_bytes: for each stage the peak bytes of activations; None without sizes.
    device_peak_bytes: for each device the peak bytes of activations of all its stages; None without
      sizes.
    timeline: for each device its spans, in order of time.
    copies: for each device its copies to and from the host, spans of the part `copy`.
  """

  schedule: schedule_lib.Schedule
  makespan: float
  reduced: tuple[float, ...]
  busy: tuple[float, ...]
  peak_activations: tuple[int, ...]
  peak_bytes: tuple[float, ...] | None
  device_peak_bytes: tuple[float, ...] | None
  timeline: tuple[tuple[Span, ...], ...]
  copies: tuple[tuple[Span, ...], ...]

  @property
  def idle(self) -> tuple[float, ...]:
    """The idle time of each device."""
    return tuple(self.makespan - busy for busy in self.busy)

  @property
  def bubble(self) -> tuple[float, ...]:
    """The idle share of the step of each device."""
    return tuple(idle / self.makespan if self.makespan else 0.0 for idle in self.idle)

  @property
  def overall_bubble(self) -> float:
    """The idle share of all devices together."""
    return sum(self.bubble) / len(self.bubble)

  @property
  def gaps(self) -> tuple[float, ...]:
    """The idle time of each device between its first start and its last end.

    This is the idle time that remains if a device may start the next step while other devices still
    run this one.
    """
    return tuple(
      row[-1].end - row[0].start - busy for row, busy in zip(self.timeline, self.busy, strict=True)
    )

  def Picture(self, num_columns: int = 100) -> str:
    """Draws the timeline with widths in proportion to time: `|F0--|R0--|B0------`, `.` is idle.

    R is a recomputation, = a transfer and U the update. Each row ends with the device's idle share.
    Below the devices are their links to the host, if copies take time.
    """
    rows = {f'device {device}': row for device, row in enumerate(self.timeline)}
    notes = [f'{bubble:.1%} idle' for bubble in self.bubble]
    for device, row in enumerate(self.copies):
      for name, kind in (('offload', Kind.OFFLOAD), ('load', Kind.LOAD)):
        spans = tuple(s for s in row if s.action and s.action.kind is kind and s.end > s.start)
        if spans:
          rows[f'{name} {device}'] = spans
          notes.append('')
    drawn = [[(s.start, s.end, self._Label(s)) for s in row] for row in rows.values()]
    return timeline_text.DrawToScale(drawn, num_columns, notes, list(rows))

  def _Label(self, span: Span) -> str:
    if span.action is None:
      return 'U'
    label = self.schedule.Label(span.action)
    letter = {'recompute': 'R', 'transfer': '='}.get(span.part, span.action.kind.value)
    return label.replace(span.action.kind.value, letter)


def TransferTimes(num_bytes: PerStage, bandwidth: float) -> float | tuple[float, ...]:
  """Returns `Costs.transfer`.

  Args:
    num_bytes: bytes over each boundary.
    bandwidth: bytes per unit of time of a link.

  Raises:
    ValueError: the bandwidth is not positive.
  """
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
  remat_policy: rematerialisation.Policy = 'stage',
  recompute_early: bool = False,
  update_barrier: bool = False,
  sizes: ActivationSizes | None = None,
  trained: Sequence[bool] | None = None,
) -> Result:
  """Simulates one step.

  V never recomputes: if F, R, I and W of a layer take one unit each, a layer costs 3 units in a
  fused last stage and 4 in other stages. A schedule without gradients recomputes and keeps nothing.

  Args:
    schedule: any valid schedule.
    costs: the times; if devices share their host's cores, the times while all of them are busy.
    alone: the times of actions while no other device is busy, for devices that share cores (see
      `core_sharing`); shorter times only. Transfers and updates always follow `costs`. None: the
      devices do not share cores.
    remat_policy: the policy of all stages, or of each. For a `ByLayer`, `costs.recompute` has the
      time of the layers and parts that it recomputes.
    recompute_early: whether to recompute before the gradient arrives, as soon as the device is
      free; not possible layer by layer.
    update_barrier: whether updates wait until all devices have finished their actions and added
      their gradients, as clipping by the global gradient norm requires.
    sizes: the bytes of activations, for the peaks in bytes, and for copies over `costs.host_link`.
    trained: for each stage whether it has trained weights. As in the engine, stages before the
      first trained stage run forward only and hold nothing, the first trained stage computes no
      input gradient, and frozen stages after it compute no weight gradients. Without
      `costs.backward`, the first trained stage's W takes as long as its B would, and a frozen
      stage's B as long as its I. None: all stages are trained, and even the first one computes an
      input gradient.

  Raises:
    ValueError: an invalid schedule, an unknown policy, or costs, sizes or flags that do not match
      the schedule; devices that share cores, with transfers that occupy devices or a link to a
      host; or a link to a host without sizes.
  """
  schedule.Validate()
  work = step_work.StepWork(schedule, remat_policy, trained)
  if recompute_early and remat_policy == 'layer':
    raise ValueError(
      "recompute_early: policy 'layer' recomputes each layer between two gradients, not earlier; "
      "use 'stage' or 'except_last'"
    )
  if alone and costs.transfer_occupies_devices:
    raise ValueError('transfer_occupies_devices: not possible for devices that share cores (alone)')
  if alone and costs.host_link:
    raise ValueError('host_link: not possible for devices that share cores (alone)')
  scale = _Scale(costs.micro_batch_sizes, schedule.num_micro_batches)
  copies = _Copies(work, costs, sizes, scale)
  durations = Durations(work, costs, scale)
  timeline, copied = _Play(work, durations, _Links(work, costs, scale), copies, recompute_early)
  if alone:
    pair = durations, Durations(work, alone, scale)
    timeline = _ShareCores(timeline, pair, _Links(work, costs, scale), recompute_early)
  reduced = _AllReduceEnds(work, timeline, costs.all_reduce)
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
    copies=tuple(map(tuple, copied)),
  )


def _Copies(
  work: step_work.StepWork,
  costs: Costs,
  sizes: ActivationSizes | None,
  scale: Sequence[float],
) -> host_links.HostLinks:
  """Returns the idle links to the hosts."""
  link = costs.host_link
  if link is None:
    return host_links.HostLinks(lambda action: 0.0)
  if sizes is None:
    raise ValueError('host_link: the time of a copy needs sizes, the bytes of activations')
  num_bytes = activation_memory.StoredBytes(work, sizes, scale)
  return host_links.HostLinks(
    lambda action: num_bytes(action.stage, action.micro_batch) / link.bandwidth, link.latency
  )


def _Play(
  work: step_work.StepWork,
  durations: Durations,
  links: _Links,
  copies: host_links.HostLinks,
  recompute_early: bool,
) -> tuple[list[list[Span]], list[list[Span]]]:
  """Returns the spans of each device, without updates, and of its copies.

  `Walk` yields an action after its dependencies, so one pass suffices: when an action's turn comes,
  `clock` has the time from which its device is free and `links` the arrival of its input.
  """
  schedule = work.schedule
  clock: list[float] = [0] * schedule.num_devices
  timeline: list[list[Span]] = [[] for _ in range(schedule.num_devices)]
  copied: list[list[Span]] = [[] for _ in range(schedule.num_devices)]
  for device, action in schedule.InOrder():
    if not work.Exists(action):
      continue
    if action.kind in actions.COPIES:
      span = copies.Copy(device, action, clock[device])
      copied[device].append(Span(device, *span, action, 'copy'))
      continue
    clock[device] = max(clock[device], copies.Ready(device, action))
    arrival, receive = links.Arrival(action), links.Receive(action)
    again = durations.Get(action, 'recompute') if work.Repeats(action) else 0
    parts = [(0.0, again, 'recompute'), (arrival, receive, 'transfer')]
    if not recompute_early:
      parts = [(arrival, receive, 'transfer'), (arrival, again, 'recompute')]
    for earliest, duration, part in (*parts, (arrival, durations.Get(action), 'compute')):
      if duration or part == 'compute':
        start = max(clock[device], earliest)
        clock[device] = start + duration
        timeline[device].append(Span(device, start, clock[device], action, part))
    if send := links.Send(action, clock[device]):
      start, clock[device] = clock[device], clock[device] + send
      timeline[device].append(Span(device, start, clock[device], action, 'transfer'))
  return timeline, copied


def _ShareCores(
  timeline: Sequence[Sequence[Span]],
  durations: tuple[Durations, Durations],
  links: _Links,
  recompute_early: bool,
) -> list[list[Span]]:
  """Returns the timeline with its times adapted to devices that share cores.

  Args:
    timeline: the spans without updates, in the order to keep.
    durations: the durations while all devices are busy, and while no other device is.
    links: new links, over which nothing has been sent.
    recompute_early: whether a recomputation may start before the gradient arrives.
  """
  slowed, alone = durations
  parts = [[(s.action, s.part) for s in row if s.action] for row in timeline]
  pieces = [[core_sharing.Piece(slowed.Get(*p), alone.Get(*p)) for p in row] for row in parts]

  def Arrival(device: int, index: int) -> float:
    action, part = parts[device][index]
    return 0.0 if recompute_early and part == 'recompute' else links.Arrival(action)

  def SendResult(device: int, index: int, time: float) -> None:
    action, part = parts[device][index]
    if part == 'compute':
      links.Send(action, time)

  played = core_sharing.Play(pieces, Arrival, SendResult)
  return [
    [span._replace(start=start, end=end) for span, (start, end) in zip(row, ends, strict=True)]
    for row, ends in zip(timeline, played, strict=True)
  ]


class _Links:
  """The links between devices: when a stage's results arrive at the neighbouring stage."""

  def __init__(self, work: step_work.StepWork, costs: Costs, scale: Sequence[float]) -> None:
    schedule = work.schedule
    num_boundaries = schedule.num_layer_stages - (0 if schedule.num_slices else 1)
    back = costs.transfer if costs.gradient_transfer is None else costs.gradient_transfer
    self._forward = per_stage.Expand('transfer', costs.transfer, num_boundaries, 'boundary')
    self._backward = per_stage.Expand('gradient_transfer', back, num_boundaries, 'boundary')
    self._latency = per_stage.Expand('latency', costs.latency, num_boundaries, 'boundary')
    self._work = work
    self._owners = schedule.stage_to_device
    self._first_slice = schedule.num_layer_stages
    self._scale = scale
    self._occupies_devices = costs.transfer_occupies_devices
    # {(action, receiving stage): time that the transfer takes the receiver}.
    self._received: dict[tuple[Action, int], float] = {}
    self._free: dict[tuple[int, int], float] = {}  # {(sender, receiver): time when it is free}.
    # {(action, receiving stage): when the receiver has the result}.
    self._arrivals: dict[tuple[Action, int], float] = {}

  def Arrival(self, action: Action) -> float:
    """Returns when an action's inputs from other stages arrive; infinite if some are not sent."""
    needed = self._RemoteInputs(action)
    return max((self._arrivals.get((n, action.stage), math.inf) for n in needed), default=0)

  def Receive(self, action: Action) -> float:
    """Returns how long an action's device is busy with the transfers of its inputs."""
    return sum(self._received.get((n, action.stage), 0) for n in self._RemoteInputs(action))

  def _RemoteInputs(self, action: Action) -> list[Action]:
    # Inputs from the same stage were made on the same device, earlier in its order.
    return [n for n in self._work.Dependencies(action) if n.stage != action.stage]

  def Send(self, action: Action, time: float) -> float:
    """Sends the result of an action that ends at `time`; returns how long its device is busy."""
    stage, first_slice = action.stage, self._first_slice
    forward = action.kind is Kind.FORWARD
    if action.kind is Kind.WEIGHT_GRADIENT or not (forward or self._work.NeedsDx(stage)):
      return 0  # Only this stage needs the result.
    slices = range(first_slice, len(self._owners))
    if not forward:
      receivers: Sequence[int] = [min(stage, first_slice) - 1]
    elif stage in slices:
      for other in slices:  # The loss needs some numbers for each token.
        near = self._owners[other] == self._owners[stage]
        self._arrivals[action, other] = time + (0 if near else self._latency[-1])
      return 0
    else:
      receivers = slices if stage + 1 in slices else [stage + 1]
    return sum(self._SendTo(receiver, action, time) for receiver in receivers)

  def _SendTo(self, receiver: int, action: Action, time: float) -> float:
    """Like `Send`, to one stage."""
    stage = action.stage
    self._arrivals[action, receiver] = time
    if receiver not in range(len(self._owners)) or self._owners[receiver] == self._owners[stage]:
      return 0
    boundary = min(stage, receiver)
    seconds = (self._forward if action.kind is Kind.FORWARD else self._backward)[boundary]
    seconds *= self._scale[action.micro_batch]
    if self._occupies_devices:
      self._arrivals[action, receiver] = time + self._latency[boundary]
      self._received[action, receiver] = seconds
      return seconds
    link = self._owners[stage], self._owners[receiver]
    self._free[link] = max(time, self._free.get(link, 0)) + seconds
    self._arrivals[action, receiver] = self._free[link] + self._latency[boundary]
    return 0


def _AllReduceEnds(
  work: step_work.StepWork, timeline: Sequence[Sequence[Span]], all_reduce: PerStage
) -> list[float]:
  """Returns for each device the time when it has the gradient sums of all its stages."""
  durations = per_stage.Expand('all_reduce', all_reduce, work.schedule.num_stages, 'stage')
  reduced = []
  for row in timeline:
    # The end of each stage's last backward action: later entries replace earlier ones.
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


class Durations:
  """The durations of actions, and of their recomputations."""

  def __init__(
    self, work: step_work.StepWork, costs: Costs, scale: Sequence[float] | None = None
  ) -> None:
    """Reads the costs.

    Args:
      work: the work of each action.
      costs: the times.
      scale: the size of each micro-batch; None: 1.

    Raises:
      ValueError: costs that do not match the stages.
    """
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
    # If I is empty, W is the whole backward.
    weights = tuple(weights[k] if work.NeedsDx(k) else backward[k] for k in stages)
    differentiated = (backward[k] * work.HasBackward(k) for k in stages)
    self._by_kind = {
      Kind.FORWARD: forward,
      Kind.INPUT_GRADIENT: inputs,
      Kind.WEIGHT_GRADIENT: weights,
      Kind.BACKWARD: backward,
      Kind.FORWARD_BACKWARD: Entries('fused', Sum(forward, differentiated)),
      **dict.fromkeys(actions.COPIES, (0.0,) * num_stages),  # They take no time of a device.
    }
    self._recompute = Entries('recompute', forward)
    self._scale = scale or (1,) * work.schedule.num_micro_batches

  def Get(self, action: Action, part: str = 'compute') -> float:
    """Returns the duration of an action's part, `compute` or `recompute`."""
    stage_durations = self._recompute if part == 'recompute' else self._by_kind[action.kind]
    return stage_durations[action.stage] * self._scale[action.micro_batch]


def _Scale(sizes: Sequence[float] | None, num_micro_batches: int) -> tuple[float, ...]:
  if sizes is not None and not isinstance(sizes, Iterable):
    raise ValueError(f'micro_batch_sizes: expected one number per micro-batch, got {sizes!r}')
  value = 1 if sizes is None else sizes
  return per_stage.Expand('micro_batch_sizes', value, num_micro_batches, 'micro-batch')
