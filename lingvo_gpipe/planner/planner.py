# SPDX-License-Identifier: Apache-2.0
"""Finds the fastest way to run a model on given devices that fits into their memory.

The time of a step is the simulator's, with transfers between stages, the sum of gradients over the
replicas (which begins when a stage's backward ends), and the update, which waits for all gradients.
Memory is the prediction of `stage_memory`.

The search is best-first. A priority queue orders the choices by a lower bound of their time, which
becomes tighter and more expensive in three stages:

    bound for any cut  ->  bound with the choice's best cut, if that fits  ->  simulation

A choice is simulated only if its bound is below the best simulated time, so the result is the
fastest of all choices.

A shared vocabulary has the cut that `MakeCut` finds, whose slices balance the devices. As there, no
other cut is tried if it does not fit: `auto` recomputes as much as it takes, and other policies do
not fit. The rows that slices of an embedding send to the first stage take no time.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

from lingvo_gpipe.pipeline.cost import (
  partitioner,
  recomputation,
  simulator,
  stage_memory,
  stage_work,
  vocabulary_cut,
)
from lingvo_gpipe.pipeline.schedule import rematerialisation
from lingvo_gpipe.planner import (
  device_description,
  model_costs,
  plan_bound,
  plan_choice,
  plan_schedules,
  plan_times,
)

Choice = plan_choice.Choice

# Cuts that fit into memory are searched for up to this number of layers times stages.
_MAX_ROOMS = 20_000


@dataclasses.dataclass(frozen=True)
class Prediction:
  """The prediction for a choice; times in seconds.

  Attributes:
    choice: the choice.
    ends: its cut: for each stage the index after its last layer; a softmax whose vocabulary is
      shared belongs to the last stage.
    vocabulary: for each device the number of classes of its slice; empty: it is not shared.
    policies: the re-materialisation policy of each stage, and then of each slice.
    memory: bytes of each device of a replica.
    memory_limit: bytes that each device has.
    seconds: time of a step, the sum of the next four.
    work: mean time in which a device computes, including recomputation.
    bubble: additional time in which devices wait for each other, without transfers.
    communication: additional time because of transfers.
    update: time of the update.
  """

  choice: Choice
  ends: tuple[int, ...]
  vocabulary: tuple[int, ...]
  policies: tuple[rematerialisation.StagePolicy, ...]
  memory: tuple[float, ...]
  memory_limit: float
  seconds: float
  work: float
  bubble: float
  communication: float
  update: float

  @property
  def peak_bytes(self) -> float:
    """The memory of the device that needs the most."""
    return max(self.memory)


@dataclasses.dataclass(frozen=True)
class GridBest:
  """The best choice with R replicas of K devices, without a simulation.

  Attributes:
    best: the choice with the least bound that fits into memory; None if no choice fits.
    bound: the lower bound of its time, in seconds.
    least_bytes: the least `peak_bytes` of the choices that were cut.
  """

  best: Choice | None
  bound: float
  least_bytes: float


@dataclasses.dataclass(frozen=True)
class Result:
  """The result of a search.

  Attributes:
    best: the fastest plan that fits into memory; None if no choice fits.
    rows: a good plan for each of the best grids, the fastest first.
    by_grid: {(R, K): the best choice of this grid}.
    least_bytes: the least `peak_bytes` of the choices that were cut.
    num_choices: number of choices in the space.
    num_simulated: number of simulated choices.
  """

  best: Prediction | None
  rows: tuple[Prediction, ...]
  by_grid: dict[tuple[int, int], GridBest]
  least_bytes: float
  num_choices: int
  num_simulated: int


class Planner:
  """Predicts and compares choices for one model, kind of devices and mini-batch size."""

  def __init__(
    self,
    costs: model_costs.ModelCosts,
    devices: device_description.Devices,
    global_batch: int,
    space: plan_choice.Space | None = None,
  ) -> None:
    """Initialises the planner; `Search` and `Predict` do the work.

    Args:
      costs: the model's costs.
      devices: the devices to run on.
      global_batch: number of examples in a mini-batch, over all replicas.
      space: the choices to search; None: the default space.

    Raises:
      ValueError: global_batch is less than 1.
    """
    if global_batch < 1:
      raise ValueError(f'global_batch: expected at least 1, got {global_batch}')
    self.costs = costs
    self.devices = devices
    self.global_batch = global_batch
    self.space = space or plan_choice.Space()
    if devices.to_host is None:
      self.space = dataclasses.replace(self.space, offloads=(0.0,))
    self._first = stage_work.FirstTrained(costs.trained)
    self._totals: dict[int, plan_bound.Totals] = {}
    self._cuts: dict[tuple, list[int]] = {}
    self._shared_cuts: dict[tuple, tuple[list[int], tuple[int, ...]]] = {}
    self._bytes: dict[tuple[int, int], list[stage_memory.LayerBytes]] = {}
    self._fitted: dict[Choice, _Fitted] = {}
    self._simulated: dict[Choice, float] = {}

  def Search(self, num_rows: int = 12) -> Result:
    """Returns the fastest plan and, for comparison, a good plan for each of the best grids.

    Args:
      num_rows: number of grids to simulate.

    Raises:
      ValueError: the space has no choices.
    """
    num_layers = self.costs.num_layers
    grids = plan_choice.Grids(self.space, num_layers, self.devices.num_devices, self.global_batch)
    choices_by_grid = {grid: list(self._Choices(grid)) for grid in grids}
    num_choices = sum(map(len, choices_by_grid.values()))
    if not num_choices:
      raise ValueError(
        'there is nothing to choose from: no numbers of replicas, devices and stages are possible '
        f'with {self.devices.num_devices} devices, {num_layers} layers and {self.global_batch} '
        'examples'
      )
    by_grid = {grid: self._BestOfGrid(choices) for grid, choices in choices_by_grid.items()}
    best = self._FindFastest([c for choices in choices_by_grid.values() for c in choices])
    grids = sorted((g for g in grids if by_grid[g].best), key=lambda g: by_grid[g].bound)[:num_rows]
    rows = [] if best is None else [best]
    for grid in grids:
      choice = by_grid[grid].best
      if choice is not None and best is not None and grid != best.choice.grid:
        rows.append(self.Predict(choice))
    rows.sort(key=lambda row: row.seconds)
    return Result(
      best=best,
      rows=tuple(rows[:num_rows]),
      by_grid=by_grid,
      least_bytes=min(each.least_bytes for each in by_grid.values()),
      num_choices=num_choices,
      num_simulated=len(self._simulated),
    )

  def Predict(self, choice: Choice) -> Prediction:
    """Returns the prediction for a choice, whether it fits into memory or not."""
    fitted = self._Fit(choice)
    seconds = self._SimulateOnce(choice)
    without_links = self._Seconds(fitted, with_links=False)
    update = max(fitted.times.update) * model_costs.TICK
    work = sum(fitted.times.stages) / choice.num_devices * choice.num_micro_batches
    work *= model_costs.TICK
    work -= fitted.times.of_last / choice.num_devices * model_costs.TICK
    ends = fitted.ends[: choice.num_stages]
    if choice.num_slices:
      ends = [*ends[:-1], ends[-1] + 1]
    return Prediction(
      choice=choice,
      ends=tuple(ends),
      vocabulary=fitted.layers.slices,
      policies=fitted.policies,
      memory=fitted.memory,
      memory_limit=self.devices.memory_bytes,
      seconds=seconds,
      work=work,
      bubble=max(without_links - work - update, 0.0),
      communication=max(seconds - without_links, 0.0),
      update=update,
    )

  def Neighbours(self, choice: Choice) -> list[Choice]:
    """Returns the choices of the space that differ from this one in one respect."""
    candidates = self._Choices(choice.grid)
    fields = ('schedule', 'remat_policy', 'shard_slots', 'offload', 'vocabulary')

    def Differences(other: Choice) -> int:
      changed = sum(getattr(other, f) != getattr(choice, f) for f in fields)
      # Another schedule may require another number of stages per device: one difference.
      if other.schedule == choice.schedule:
        changed += other.stages_per_device != choice.stages_per_device
      ratio = other.num_micro_batches / choice.num_micro_batches
      return changed + (0 if ratio == 1 else 1 if 0.5 <= ratio <= 2 else 2)

    return [other for other in candidates if Differences(other) == 1]

  def Fits(self, prediction: Prediction) -> bool:
    """Whether the plan fits into the memory of the devices."""
    return prediction.peak_bytes <= self.devices.memory_bytes

  # The search.

  def _Choices(self, grid: tuple[int, int]) -> Iterable[Choice]:
    vocabulary, num_layers = self.costs.vocabulary, self.costs.num_layers
    num_parts = vocabulary.num_parts if vocabulary else 0
    return plan_choice.Choices(self.space, num_layers, grid, self.global_batch, num_parts)

  def _BestOfGrid(self, choices: Sequence[Choice]) -> GridBest:
    """Returns the choice of the least bound that has a cut; simulates nothing."""
    least = math.inf
    queue = self._Queue(choices)
    while queue:
      bound, rank, is_cut, choice = heapq.heappop(queue)
      if is_cut:
        return GridBest(choice, bound * model_costs.TICK, least)
      if self._IsPointless(choice):
        continue
      fitted = self._Fit(choice)
      least = min(least, max(fitted.memory))
      if fitted.fits:
        heapq.heappush(queue, (_Round(max(bound, fitted.bound)), rank, True, choice))
    return GridBest(None, math.inf, least)

  def _FindFastest(self, choices: Iterable[Choice]) -> Prediction | None:
    """Returns the fastest choice that fits, or None if no choice fits."""
    queue = self._Queue(choices)
    best: tuple[float, tuple[float, ...], Choice] | None = None
    while queue:
      bound, rank, is_cut, choice = heapq.heappop(queue)
      # All other bounds are greater. Ignore gains below one part in a million: prefer the simpler
      # plan and skip its simulation.
      if best is not None and bound * model_costs.TICK >= best[0] * (1 - 1e-6):
        break
      if not is_cut:
        if self._IsPointless(choice):
          continue
        fitted = self._Fit(choice)
        if fitted.fits:
          heapq.heappush(queue, (_Round(max(bound, fitted.bound)), rank, True, choice))
        continue
      seconds = self._SimulateOnce(choice)
      if best is None or seconds < best[0] * (1 - 1e-6):
        best = seconds, rank, choice
    return None if best is None else self.Predict(best[2])

  def _IsPointless(self, choice: Choice) -> bool:
    """Whether the choice offloads although its best cut fits without."""
    if not choice.offload:
      return False
    plain = self._Fit(dataclasses.replace(choice, offload=0.0))
    if choice.remat_policy == rematerialisation.AUTO and {*plain.policies} != {'none'}:
      return False
    return plain.fits and plain.ends == plain.layers.ends

  def _Queue(
    self, choices: Iterable[Choice]
  ) -> list[tuple[float, tuple[float, ...], bool, Choice]]:
    """Returns a heap of (bound in ticks, complexity, whether it is the bound of a cut, choice)."""
    queue = [(_Round(self._Bound(c)), plan_choice.Complexity(c), False, c) for c in choices]
    heapq.heapify(queue)
    return queue

  def _Work(self, size: int) -> plan_bound.Totals:
    if size not in self._totals:
      self._totals[size] = plan_bound.Totals(self.costs.Work(size, self.devices), self._first)
    return self._totals[size]

  def _Bound(self, choice: Choice) -> float:
    """Returns a lower bound of a step's time with any cut, in ticks."""
    totals = self._Work(choice.micro_batch_size)
    return plan_bound.BoundStep(choice, totals) * self.devices.Slowdown(math.prod(choice.grid))

  def _Fit(self, choice: Choice) -> _Fitted:
    """Returns the choice with its best cut, or with the best cut that fits into memory."""
    if choice not in self._fitted and choice.remat_policy == rematerialisation.AUTO:
      self._fitted[choice] = self._FitByLayer(choice)
    if choice not in self._fitted:
      layers = self._LayersOf(choice)
      memory = self._Memory(choice, layers)
      ends = layers.ends
      needs = self._DeviceBytes(choice, memory, ends)
      limit = self.devices.memory_bytes
      if max(needs) > limit and self._MayFit(choice, needs):
        within = partitioner.PartitionStages(self._StageCosts(choice), memory.Rooms(limit))
        if within is not None:
          ends, needs = within, self._DeviceBytes(choice, memory, within)

      def Times() -> plan_times.Times:
        return plan_times.Times(
          self.costs, self.devices, choice, layers.weights, layers.work, ends, memory, policies
        )

      policies = (choice.remat_policy,) * len(ends)
      fits = max(needs) <= limit
      self._fitted[choice] = _Fitted(choice, layers, ends, policies, tuple(needs), fits, Times)
    return self._fitted[choice]

  def _FitByLayer(self, choice: Choice) -> _Fitted:
    """Returns the choice with the cut and the policy of each stage that recompute the least."""
    layers = self._LayersOf(choice)
    memory = self._Memory(dataclasses.replace(choice, remat_policy='none'), layers)
    chooser = recomputation.Chooser(
      layers.num_bytes,
      layers.work,
      self.devices.memory_bytes,
      plan_schedules.Get(choice, min(choice.num_micro_batches, 2 * choice.num_devices)),
      num_micro_batches=choice.num_micro_batches,
      held=functools.partial(plan_schedules.HeldAtPeaks, choice),
    )
    ends = layers.ends
    choose = chooser.ChooseTogether if choice.num_slices else chooser.ChooseAll
    choices, fits = choose(ends)
    is_small = self.costs.num_layers * choice.num_stages <= _MAX_ROOMS
    may_move = choice.num_stages > 1 and is_small and not choice.num_slices
    if may_move and not (fits and not any(x.again for x in choices)):
      # If nothing is recomputed, the cut is the best one already.
      ends = chooser.Partition() or ends
      choices, fits = chooser.ChooseAll(ends)
    needs = [0.0] * choice.num_devices
    for owner, x, span in zip(
      choice.stage_to_device, choices, partitioner.StageRanges(ends), strict=True
    ):
      needs[owner] += memory.State(*span) + x.activations
    policies = tuple(x.policy for x in choices)
    recompute = list(itertools.starmap(chooser.OneRecomputation, enumerate(choices)))

    def Times() -> plan_times.Times:
      return plan_times.Times(
        self.costs,
        self.devices,
        choice,
        layers.weights,
        layers.work,
        ends,
        memory,
        policies,
        recompute,
        chooser.Sizes(ends, choices),
      )

    return _Fitted(choice, layers, ends, policies, tuple(needs), fits, Times)

  def _MayFit(self, choice: Choice, needs: Sequence[float]) -> bool:
    """Whether to search for another cut that fits into memory.

    False if even the memory of all devices together is too small, and if the search is slow: it is
    fast only if later stages hold no more micro-batches than earlier stages. Slices fill up the
    devices only for the most even cut.
    """
    is_fast = choice.stages_per_device == 1 and choice.schedule not in plan_choice.SPLIT
    is_small = self.costs.num_layers * choice.num_stages <= _MAX_ROOMS
    if choice.num_stages == 1 or choice.num_slices or not (is_fast and is_small):
      return False
    return sum(needs) <= self.devices.memory_bytes * choice.num_devices

  def _LayersOf(self, choice: Choice) -> _Layers:
    work, num_bytes = self._Work(choice.micro_batch_size).work, self._LayerBytes(choice)
    vocabulary = self.costs.vocabulary
    if not choice.num_slices or vocabulary is None:
      return _Layers(self.costs.weights, work, num_bytes, self._Cut(choice))
    ends, slices = self._SharedCut(choice, vocabulary)
    owner = choice.stage_to_device[choice.num_stages - 1]
    return _Layers(
      self.costs.WithSlices(slices, owner),
      vocabulary_cut.WithSlices(work, slices),
      vocabulary_cut.WithSliceBytes(
        num_bytes,
        slices,
        owner,
        copy_bytes=vocabulary.copy_bytes,
        has_table=vocabulary.has_table,
      ),
      vocabulary_cut.AllEnds(ends, len(slices)),
      slices,
    )

  def _SharedCut(
    self, choice: Choice, vocabulary: model_costs.Vocabulary
  ) -> tuple[list[int], tuple[int, ...]]:
    """Returns the ends of stages, and the sizes of slices; except_last counts as stage."""
    owners = tuple(choice.stage_to_device)
    key = (choice.micro_batch_size, owners, choice.recomputes)
    if key not in self._shared_cuts:
      # Any number of micro-batches, as in `_Memory`.
      schedule = plan_schedules.Get(choice, choice.num_devices)
      policy = 'stage' if choice.recomputes else 'none'
      work = self._Work(choice.micro_batch_size).work
      ends, parts = vocabulary_cut.Cut(work, None, schedule, policy, vocabulary.num_parts)
      self._shared_cuts[key] = ends, tuple(vocabulary.of_part * n for n in parts)
    return self._shared_cuts[key]

  def _StageCosts(self, choice: Choice) -> list[partitioner.StageCosts]:
    """Returns layers' costs in each stage for one micro-batch; except_last counts as stage."""
    counts = [int(choice.recomputes)] * choice.num_stages
    if choice.is_fused:
      counts[-1] = 0
    return stage_work.CountedCutCosts(self._Work(choice.micro_batch_size).work, 1, counts)

  def _Cut(self, choice: Choice) -> list[int]:
    fused = choice.recomputes and choice.is_fused
    key = (choice.micro_batch_size, choice.num_stages, choice.recomputes, fused)
    if key not in self._cuts:
      ends = partitioner.PartitionStages(self._StageCosts(choice))
      assert ends is not None, 'Without rooms there is always a cut.'
      self._cuts[key] = ends
    return self._cuts[key]

  def _Memory(self, choice: Choice, layers: _Layers) -> stage_memory.StageMemory:
    # Any number of micro-batches: only the devices of the stages matter here.
    schedule = plan_schedules.Get(choice, choice.num_devices)
    return stage_memory.StageMemory(
      layers.num_bytes,
      schedule,
      choice.remat_policy,
      self._first,
      held=plan_schedules.HeldAtPeaks(choice, choice.remat_policy),
    )

  def _LayerBytes(self, choice: Choice) -> list[stage_memory.LayerBytes]:
    key = (choice.micro_batch_size, choice.num_shards)
    if key not in self._bytes:
      self._bytes[key] = self.costs.Bytes(*key)
    return self._bytes[key]

  def _DeviceBytes(
    self, choice: Choice, memory: stage_memory.StageMemory, ends: Sequence[int]
  ) -> list[float]:
    needs = [0.0] * choice.num_devices
    ranges = partitioner.StageRanges(ends)
    for stage, (owner, (start, end)) in enumerate(zip(choice.stage_to_device, ranges, strict=True)):
      needs[owner] += memory.State(start, end) + memory.Activations(stage, start, end)
    return needs

  def _SimulateOnce(self, choice: Choice) -> float:
    if choice not in self._simulated:
      self._simulated[choice] = self._Seconds(self._Fit(choice))
    return self._simulated[choice]

  def _Seconds(self, fitted: _Fitted, with_links: bool = True) -> float:
    """Returns the simulated seconds of a step, extrapolated for a long schedule."""
    choice, times = fitted.choice, fitted.times
    costs = times.Costs(with_links)
    work = fitted.layers.work
    ranges = partitioner.StageRanges(fitted.ends)
    trained = [any(w.is_trained for w in work[a:b]) for a, b in ranges]

    def Makespan(num_micro_batches: int) -> float:
      return simulator.Simulate(
        plan_schedules.Get(choice, num_micro_batches),
        costs,
        remat_policy=fitted.policies,
        update_barrier=True,
        sizes=times.sizes,
        trained=trained,
      ).makespan

    m = choice.num_micro_batches
    short, more = plan_schedules.Prefix(choice)
    if short == m:
      ticks = Makespan(m)
    else:
      ticks = Makespan(short)
      ticks += (m - short) / more * (Makespan(short + more) - ticks)
    return (ticks + (times.after if with_links else 0.0)) * model_costs.TICK


@dataclasses.dataclass(frozen=True)
class _Layers:
  """The layers of the stages, and the most even cut.

  If the vocabulary is shared, its slices take the place of the last layer, as layers and stages.

  Attributes:
    weights: the weights of each layer.
    work: the work of each layer.
    num_bytes: the memory of each layer.
    ends: for each stage the index after its last layer.
    slices: for each slice its number of classes.
  """

  weights: Sequence[model_costs.LayerWeights]
  work: Sequence[stage_work.LayerWork]
  num_bytes: Sequence[stage_memory.LayerBytes]
  ends: list[int]
  slices: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Fitted:
  """A choice with its cut, and the memory of each device."""

  choice: Choice
  layers: _Layers
  ends: list[int]
  policies: tuple[rematerialisation.StagePolicy, ...]
  memory: tuple[float, ...]
  fits: bool
  make_times: Callable[[], plan_times.Times]

  @functools.cached_property
  def times(self) -> plan_times.Times:
    """Times of stages, transfers and updates; computed only for choices that fit into memory."""
    return self.make_times()

  @functools.cached_property
  def bound(self) -> float:
    """A lower bound of a step's time with this cut, in ticks."""
    return self.times.Bound()


def _Round(bound: float) -> float:
  """Rounds a bound, so that ties are broken by complexity and not by float noise."""
  return float(f'{bound:.9g}')
