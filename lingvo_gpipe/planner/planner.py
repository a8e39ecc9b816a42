# SPDX-License-Identifier: Apache-2.0
"""Finds how to run a model on given devices: what fits into memory and is predicted the quickest.

A step takes as long as the simulator says with the transfers between stages, the sum of gradients
over the replicas (which begins when a stage's backward ends), and the update, which waits for all
gradients. Memory is what `stage_memory` predicts. The search is best first: a choice is known by a
lower bound of its time without a cut, then by one with its own best cut, at last by a simulation;
the plan that is found is the quickest of all choices.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections.abc import Callable, Iterable, Sequence

from lingvo_gpipe.pipeline.cost import partitioner, simulator, stage_memory, stage_work
from lingvo_gpipe.planner import (
  device_description,
  model_costs,
  plan_bound,
  plan_choice,
  plan_schedules,
  plan_times,
)

Choice = plan_choice.Choice

# Cuts within memory are looked for where a model has at most so many layers times stages.
_MAX_ROOMS = 20_000


@dataclasses.dataclass(frozen=True)
class Prediction:
  """What is predicted of a choice; times in seconds.

  Attributes:
    choice: the choice.
    ends: its cut: for each stage the index after its last layer.
    memory: bytes of each device of a replica.
    seconds: of a step.
    work: the mean time that a device computes, recomputation included.
    bubble: what a step takes longer than that on devices without links.
    communication: what links make it longer.
    update: of the weights.
  """

  choice: Choice
  ends: tuple[int, ...]
  memory: tuple[float, ...]
  seconds: float
  work: float
  bubble: float
  communication: float
  update: float

  @property
  def peak_bytes(self) -> float:
    """Of the device that needs most."""
    return max(self.memory)


@dataclasses.dataclass(frozen=True)
class Cell:
  """What came of the choices with R replicas of K devices.

  Attributes:
    best: the one of the least bound that fits; None where none does.
    bound: what that takes at the least, in seconds.
    least_bytes: what the device that needs most needs at the least, among what was looked at.
  """

  best: Choice | None
  bound: float
  least_bytes: float


@dataclasses.dataclass(frozen=True)
class Result:
  """What a search found.

  Attributes:
    best: the quickest plan that fits; None where none does.
    rows: the best plan of the best grids, the quickest first.
    cells: {(R, K): what came of it}.
    least_bytes: the least memory of the device that needs most, over all choices looked at.
    num_choices: how many there were.
    num_simulated: how many were simulated.
  """

  best: Prediction | None
  rows: tuple[Prediction, ...]
  cells: dict[tuple[int, int], Cell]
  least_bytes: float
  num_choices: int
  num_simulated: int


class Planner:
  """Predicts and compares choices for one model, one kind of devices and one mini-batch."""

  def __init__(
    self,
    costs: model_costs.ModelCosts,
    devices: device_description.Devices,
    global_batch: int,
    space: plan_choice.Space | None = None,
  ) -> None:
    """Nothing is searched yet.

    Args:
      costs: of the model.
      devices: what it is to run on.
      global_batch: examples of a mini-batch, over all replicas.
      space: what is looked at.

    Raises:
      ValueError: no examples, or a space without choices.
    """
    if global_batch < 1:
      raise ValueError(f'global_batch: expected at least 1, got {global_batch}')
    self.costs = costs
    self.devices = devices
    self.global_batch = global_batch
    self.space = space or plan_choice.Space()
    self._first = stage_work.FirstTrained(costs.trained)
    self._totals: dict[int, plan_bound.Totals] = {}
    self._cuts: dict[tuple, list[int]] = {}
    self._bytes: dict[tuple[int, int], list[stage_memory.LayerBytes]] = {}
    self._fitted: dict[Choice, _Fitted] = {}
    self._simulated: dict[Choice, float] = {}

  def Search(self, num_rows: int = 12) -> Result:
    """The quickest plan, and for comparison a good one of each of the best grids.

    Args:
      num_rows: how many grids are simulated.
    """
    num_layers = self.costs.num_layers
    grids = plan_choice.Grids(self.space, num_layers, self.devices.num_devices, self.global_batch)
    every = {
      grid: list(plan_choice.Choices(self.space, num_layers, grid, self.global_batch))
      for grid in grids
    }
    num_choices = sum(map(len, every.values()))
    if not num_choices:
      raise ValueError(
        'there is nothing to choose from: no numbers of replicas, devices and stages fit '
        f'{self.devices.num_devices} devices, {num_layers} layers and {self.global_batch} examples'
      )
    cells = {grid: self._Cell(choices) for grid, choices in every.items()}
    best = self._Quickest([c for choices in every.values() for c in choices])
    grids = sorted((g for g in grids if cells[g].best), key=lambda g: cells[g].bound)[:num_rows]
    rows = [] if best is None else [best]
    for grid in grids:
      choice = cells[grid].best
      if choice is not None and best is not None and grid != best.choice.grid:
        rows.append(self.Predict(choice))
    rows.sort(key=lambda row: row.seconds)
    return Result(
      best=best,
      rows=tuple(rows[:num_rows]),
      cells=cells,
      least_bytes=min(cell.least_bytes for cell in cells.values()),
      num_choices=num_choices,
      num_simulated=len(self._simulated),
    )

  def Predict(self, choice: Choice) -> Prediction:
    """The prediction of a choice, whether it fits or not."""
    fitted = self._Fit(choice)
    seconds = self._Simulated(choice)
    alone = self._Seconds(fitted, with_links=False)
    update = max(fitted.times.update) * model_costs.TICK
    work = sum(fitted.times.stages) / choice.num_devices * choice.num_micro_batches
    work *= model_costs.TICK
    if choice.remat_policy == 'except_last':
      again = sum(fitted.times.again) / choice.num_devices * model_costs.TICK
      work -= again
    return Prediction(
      choice=choice,
      ends=tuple(fitted.ends),
      memory=fitted.memory,
      seconds=seconds,
      work=work,
      bubble=max(alone - work - update, 0.0),
      communication=max(seconds - alone, 0.0),
      update=update,
    )

  def Neighbours(self, choice: Choice) -> list[Choice]:
    """Choices that differ from this one in one thing, in all that the space has."""
    near = plan_choice.Choices(self.space, self.costs.num_layers, choice.grid, self.global_batch)
    fields = ('schedule', 'remat_policy', 'shard_slots')

    def Differences(other: Choice) -> int:
      changed = sum(getattr(other, f) != getattr(choice, f) for f in fields)
      # Another number of stages a device is another schedule, and the other way round.
      if other.schedule == choice.schedule:
        changed += other.stages_per_device != choice.stages_per_device
      ratio = other.num_micro_batches / choice.num_micro_batches
      return changed + (0 if ratio == 1 else 1 if 0.5 <= ratio <= 2 else 2)

    return [other for other in near if Differences(other) == 1]

  def Fits(self, prediction: Prediction) -> bool:
    """Whether it needs no more memory than there is."""
    return prediction.peak_bytes <= self.devices.memory_bytes

  # What is known of a choice, by and by.

  def _Cell(self, choices: Sequence[Choice]) -> Cell:
    """The choice of the least bound with a cut; nothing is simulated."""
    least = math.inf
    queue = self._Queue(choices)
    while queue:
      bound, rank, is_cut, choice = heapq.heappop(queue)
      if is_cut:
        return Cell(choice, bound * model_costs.TICK, least)
      fitted = self._Fit(choice)
      least = min(least, max(fitted.memory))
      if fitted.fits:
        heapq.heappush(queue, (_Rounded(max(bound, fitted.bound)), rank, True, choice))
    return Cell(None, math.inf, least)

  def _Quickest(self, choices: Iterable[Choice]) -> Prediction | None:
    """The quickest that fits, by simulation where a bound does not tell."""
    queue = self._Queue(choices)
    best: tuple[float, tuple[int, ...], Choice] | None = None
    while queue:
      bound, rank, is_cut, choice = heapq.heappop(queue)
      # What is as good to a millionth is no reason for a less plain plan, nor to look at it.
      if best is not None and bound * model_costs.TICK >= best[0] * (1 - 1e-6):
        break
      if not is_cut:
        fitted = self._Fit(choice)
        if fitted.fits:
          heapq.heappush(queue, (_Rounded(max(bound, fitted.bound)), rank, True, choice))
        continue
      seconds = self._Simulated(choice)
      if best is None or seconds < best[0] * (1 - 1e-6):
        best = seconds, rank, choice
    return None if best is None else self.Predict(best[2])

  def _Queue(self, choices: Iterable[Choice]) -> list[tuple[float, tuple[int, ...], bool, Choice]]:
    queue = [(_Rounded(self._Bound(c)), plan_choice.Complexity(c), False, c) for c in choices]
    heapq.heapify(queue)
    return queue

  def _Work(self, size: int) -> plan_bound.Totals:
    if size not in self._totals:
      self._totals[size] = plan_bound.Totals(self.costs.Work(size, self.devices), self._first)
    return self._totals[size]

  def _Bound(self, choice: Choice) -> float:
    """What a step takes at the least, whatever the cut; in ticks."""
    totals = self._Work(choice.micro_batch_size)
    return plan_bound.OfStep(choice, totals) * self.devices.Slowdown(math.prod(choice.grid))

  def _Fit(self, choice: Choice) -> _Fitted:
    """The choice's best cut, if possible one that fits into memory."""
    if choice not in self._fitted:
      memory = self._Memory(choice)
      ends = self._Cut(choice)
      needs = self._DeviceBytes(choice, memory, ends)
      limit = self.devices.memory_bytes
      if max(needs) > limit and self._MayFit(choice, needs):
        within = partitioner.PartitionStages(self._StageCosts(choice), memory.Rooms(limit))
        if within is not None:
          ends, needs = within, self._DeviceBytes(choice, memory, within)

      def Times() -> plan_times.Times:
        work = self._Work(choice.micro_batch_size).work
        return plan_times.Times(self.costs, self.devices, choice, work, ends, memory)

      self._fitted[choice] = _Fitted(choice, ends, tuple(needs), max(needs) <= limit, Times)
    return self._fitted[choice]

  def _MayFit(self, choice: Choice, needs: Sequence[float]) -> bool:
    """Whether it is worth while to look for another cut that fits: not for want of all memory.

    That is quick where later stages hold no more than earlier ones; else it takes seconds.
    """
    is_quick = choice.stages_per_device == 1 and choice.schedule != 'zb_h1'
    is_small = self.costs.num_layers * choice.num_stages <= _MAX_ROOMS
    if choice.num_stages == 1 or not (is_quick and is_small):
      return False
    return sum(needs) <= self.devices.memory_bytes * choice.num_devices

  def _StageCosts(self, choice: Choice) -> list[partitioner.StageCosts]:
    """What layers cost in each stage for one micro-batch; except_last counts as stage."""
    again = int(choice.recomputes)
    counts = [again] * choice.num_stages
    if choice.schedule in plan_choice.FUSED:
      counts[-1] = 0
    return stage_work.CountedCutCosts(self._Work(choice.micro_batch_size).work, 1, counts)

  def _Cut(self, choice: Choice) -> list[int]:
    fused = choice.recomputes and choice.schedule in plan_choice.FUSED
    key = (choice.micro_batch_size, choice.num_stages, choice.recomputes, fused)
    if key not in self._cuts:
      ends = partitioner.PartitionStages(self._StageCosts(choice))
      assert ends is not None, 'Without rooms there is a cut.'
      self._cuts[key] = ends
    return self._cuts[key]

  def _Memory(self, choice: Choice) -> stage_memory.StageMemory:
    # Only whose stages are on which device matters here.
    schedule = plan_schedules.Get(choice, choice.num_devices)
    key = (choice.micro_batch_size, choice.num_shards)
    if key not in self._bytes:
      self._bytes[key] = self.costs.Bytes(*key)
    return stage_memory.StageMemory(
      self._bytes[key],
      schedule,
      choice.remat_policy,
      self._first,
      held=plan_schedules.Held(choice),
    )

  def _DeviceBytes(
    self, choice: Choice, memory: stage_memory.StageMemory, ends: Sequence[int]
  ) -> list[float]:
    needs = [0.0] * choice.num_devices
    for stage, (start, end) in enumerate(partitioner.StageRanges(ends)):
      needs[stage % choice.num_devices] += memory.State(start, end) + memory.Activations(
        stage, start, end
      )
    return needs

  def _Simulated(self, choice: Choice) -> float:
    if choice not in self._simulated:
      self._simulated[choice] = self._Seconds(self._Fit(choice))
    return self._simulated[choice]

  def _Seconds(self, fitted: _Fitted, with_links: bool = True) -> float:
    """A step's seconds by the simulator; that of a long schedule from two shorter ones."""
    choice, times = fitted.choice, fitted.times
    costs = times.Costs(with_links)
    trained = [any(self.costs.trained[a:b]) for a, b in partitioner.StageRanges(fitted.ends)]

    def Makespan(num_micro_batches: int) -> float:
      return simulator.Simulate(
        plan_schedules.Get(choice, num_micro_batches),
        costs,
        remat_policy=choice.remat_policy,
        update_barrier=True,
        trained=trained,
      ).makespan

    m = choice.num_micro_batches
    short, more = plan_schedules.Part(choice)
    if short == m:
      ticks = Makespan(m)
    else:
      ticks = Makespan(short)
      ticks += (m - short) / more * (Makespan(short + more) - ticks)
    return (ticks + (times.after if with_links else 0.0)) * model_costs.TICK


@dataclasses.dataclass(frozen=True)
class _Fitted:
  """A choice with its cut, and what each device needs."""

  choice: Choice
  ends: list[int]
  memory: tuple[float, ...]
  fits: bool
  make_times: Callable[[], plan_times.Times]

  @functools.cached_property
  def times(self) -> plan_times.Times:
    """How long everything takes; of what does not fit nobody asks."""
    return self.make_times()

  @functools.cached_property
  def bound(self) -> float:
    """The least time of a step in ticks."""
    return self.times.Bound()


def _Rounded(bound: float) -> float:
  """So that what is equal but for rounding comes in order of complexity."""
  return float(f'{bound:.9g}')
