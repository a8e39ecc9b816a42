# SPDX-License-Identifier: Apache-2.0
"""Chooses what a stage recomputes: the policy `auto`. No TensorFlow.

Given the layers of a stage and its bytes, `Chooser.Choose` returns the policy that recomputes the
least:

- one of the four policies that treat all layers alike (`rematerialisation.POLICIES`), or
- for each layer one of its `stage_memory.Option`s: to keep everything, to recompute some named
  parts, or all of it. Backward then goes layer by layer.

The second is a knapsack. With h micro-batches at the peak, the inputs of the stage's layers i, the
bytes kept besides k and the bytes recomputed within the backward of one layer w,

    state + h (sum of i + sum of k) + max of w <= limit,   sum of recomputed times: least

For each value of the maximum, a list (`_Front`) has the least time for each sum of k. It grows with
each layer. The knapsack is from AdaPipe (ASPLOS 2024), which also searches for the cut; here the
partitioner does that (see `partitioner.PartitionByCost`).
"""

from __future__ import annotations

import bisect
import dataclasses
import fractions
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lingvo_gpipe.pipeline.cost import (
  activation_memory,
  partitioner,
  per_stage,
  stage_memory,
  stage_work,
)
from lingvo_gpipe.pipeline.schedule import rematerialisation
from lingvo_gpipe.pipeline.schedule import schedule as schedule_lib

# Longer fronts are thinned. At worst the choice then recomputes the work that another 512th of the
# stage's bytes would save.
_MAX_FRONT = 512

# If the layers recompute more distinct numbers of bytes than this, some numbers are rounded up.
_MAX_WORKINGS = 16

_BY_LAYER = rematerialisation.ByLayer(())


@dataclasses.dataclass(frozen=True)
class Choice:
  """The parts of a stage that backward recomputes.

  Attributes:
    policy: the policy of the stage.
    again: the recomputed work of a step, in `Chooser.unit`.
    activations: predicted peak bytes of activations.
    kept_bytes: under a ByLayer, bytes of a micro-batch that the layers keep besides their inputs.
    working: under a ByLayer, the most bytes that the backward of a layer recomputes.
  """

  policy: rematerialisation.StagePolicy
  again: int
  activations: int
  kept_bytes: int = 0
  working: int = 0


class Chooser:
  """Chooses what each stage that a model can be cut into recomputes.

  Attributes:
    unit: the unit of all costs, in the unit of `LayerWork`; in it costs are integers, so exact.
  """

  def __init__(
    self,
    layers: Sequence[stage_memory.LayerBytes],
    work: Sequence[stage_work.LayerWork],
    limit: float,
    schedule: schedule_lib.Schedule,
    *,
    num_micro_batches: int | None = None,
    held: Callable[[rematerialisation.Policy], Sequence[tuple[stage_memory.Held, ...]]]
    | None = None,
  ) -> None:
    """Precomputes sums over the layers.

    Args:
      layers: the bytes of each layer, with its options; without any, all layers are treated alike.
      work: the work of each layer.
      limit: bytes of a device; its stages get equal shares.
      schedule: the training schedule, maybe shorter than the step's.
      num_micro_batches: M of the step; None: M of the schedule.
      held: the function from a policy to `stage_memory.HeldAtPeaks` of the step; None: of the
        schedule.
    """
    self._layers = layers
    self._first = stage_work.FirstTrained([w.is_trained for w in work])
    owners = schedule.stage_to_device
    self._limits = [limit / owners.count(owner) for owner in owners]
    self._limit, self._owners = limit, owners
    self._num_micro_batches = num_micro_batches or schedule.num_micro_batches
    held = held or functools.partial(stage_memory.HeldAtPeaks, schedule)
    self._memory = {
      policy: stage_memory.StageMemory(layers, schedule, policy, self._first, held(policy))
      for policy in (*rematerialisation.POLICIES, _BY_LAYER)
    }
    more = self._num_micro_batches - schedule.num_micro_batches
    self._counts = {
      # Each further micro-batch is recomputed if the first one of several is.
      policy: [n + more * bool(n) for n in stage_work.Recomputations(schedule, policy)]
      for policy in self._memory
    }
    # Stages with equal peaks, recomputations and limits share their choices.
    kinds = [
      (self._memory[_BY_LAYER].Peaks(k), self._limits[k], *(c[k] for c in self._counts.values()))
      for k in range(schedule.num_stages)
    ]
    self._kinds = [kinds.index(kind) for kind in kinds]
    costs = [(w.forward, w.input_gradient, w.weight_gradient) for w in work]
    *scaled, whole_work = partitioner.ExactIntegers('costs', [*itertools.chain(*costs), 1])
    shares = [option.again for x in layers for option in x.options]
    *scaled_shares, whole = partitioner.ExactIntegers('shares', [*shares, 1])
    self.unit = fractions.Fraction(1, whole_work * whole)
    self._forward = [0, *itertools.accumulate(whole * x for x in scaled[::3])]
    plain = (whole * sum(scaled[i : i + 3]) for i in range(0, len(scaled), 3))
    self._plain = [0, *itertools.accumulate(plain)]
    shares_left = iter(scaled_shares)
    self._options = [
      [
        _Option(option, scaled[3 * i] * next(shares_left) if i >= self._first else 0)
        for option in x.options
      ]
      for i, x in enumerate(layers)
    ]
    self._workings = _Thin(sorted({option.working for x in layers for option in x.options}))
    self._fronts: dict[tuple[int, int], list[_Front | None]] = {}
    self._choices: dict[tuple[int, int, int, float], Choice | None] = {}

  def Partition(self) -> list[int] | None:
    """Returns the cut with the cheapest most expensive stage; None if no cut keeps the limit."""
    bound = self._num_micro_batches * (self._plain[-1] + self._forward[-1])
    costs = [functools.partial(self.Cost, k) for k in range(len(self._kinds))]
    return partitioner.PartitionByCost(costs, len(self._layers), bound)

  def Cost(self, stage: int, start: int, end: int) -> int | None:
    """Returns the work of a step of a stage with layers [start, end); None if it does not fit."""
    choice = self.Choose(stage, start, end)
    if choice is None:
      return None
    return self._num_micro_batches * (self._plain[end] - self._plain[start]) + choice.again

  def Choose(self, stage: int, start: int, end: int, limit: float | None = None) -> Choice | None:
    """Returns the choice for a stage with layers [start, end); None if nothing keeps the limit.

    Args:
      stage: the stage.
      start: its first layer.
      end: the index after its last layer.
      limit: bytes of the stage; None: its equal share of its device.
    """
    limit = self._limits[stage] if limit is None else limit
    key = (self._kinds[stage], start, end, limit)
    if key not in self._choices:
      limit -= self._State(start, end)
      candidates = [
        choice
        for choice in (*self._Alike(stage, start, end), self._ByLayer(stage, start, end, limit))
        if choice is not None and choice.activations <= limit
      ]
      self._choices[key] = min(candidates, key=_Preference, default=None)
    return self._choices[key]

  def ChooseAll(self, ends: Sequence[int]) -> tuple[tuple[Choice, ...], bool]:
    """Returns the choice of each stage of a cut, and whether all of them keep the limit.

    A stage that cannot keep it gets the policy that takes the least memory.
    """
    choices, fits = [], True
    for k, (start, end) in enumerate(partitioner.StageRanges(ends)):
      choice = self.Choose(k, start, end)
      fits = fits and choice is not None
      choices.append(choice or self._Least(k, start, end))
    return tuple(choices), fits

  def ChooseTogether(self, ends: Sequence[int]) -> tuple[tuple[Choice, ...], bool]:
    """Like `ChooseAll`, but a stage may use what the other stages of its device leave.

    Earlier stages choose first, from the bytes that the other stages can do without.
    """
    ranges = partitioner.StageRanges(ends)
    least = [
      self._State(*span) + self._Least(k, *span).activations for k, span in enumerate(ranges)
    ]
    spare = dict.fromkeys(self._owners, self._limit)
    for owner, num_bytes in zip(self._owners, least, strict=True):
      spare[owner] -= num_bytes
    fits = min(spare.values()) >= 0
    choices = []
    for k, (span, owner) in enumerate(zip(ranges, self._owners, strict=True)):
      choice = self._Least(k, *span)
      if spare[owner] >= 0:
        choice = self.Choose(k, *span, least[k] + spare[owner]) or choice
      spare[owner] -= self._State(*span) + choice.activations - least[k]
      choices.append(choice)
    return tuple(choices), fits

  def _State(self, start: int, end: int) -> int:
    return self._memory['stage'].State(start, end)

  def _Least(self, stage: int, start: int, end: int) -> Choice:
    """Returns the policy that takes the least memory."""
    return min(self._Alike(stage, start, end), key=lambda choice: choice.activations)

  def Sizes(
    self, ends: Sequence[int], choices: Sequence[Choice]
  ) -> activation_memory.ActivationSizes:
    """Returns the bytes of activations of each stage of a cut, for the simulator."""
    sizes = self._memory[_BY_LAYER].Sizes(ends)
    by_layer = [isinstance(choice.policy, rematerialisation.ByLayer) for choice in choices]
    layer_inputs, largest = (
      per_stage.Expand(name, getattr(sizes, name) or 0, len(ends), 'stage')
      for name in ('layer_inputs', 'largest_layer')
    )
    return dataclasses.replace(
      sizes,
      layer_inputs=[x + choice.kept_bytes for x, choice in zip(layer_inputs, choices, strict=True)],
      largest_layer=[
        choice.working if chosen else x
        for x, choice, chosen in zip(largest, choices, by_layer, strict=True)
      ],
    )

  def OneRecomputation(self, stage: int, choice: Choice) -> float:
    """Returns the time of each recomputation of a stage, in the unit of `LayerWork`."""
    by_layer = isinstance(choice.policy, rematerialisation.ByLayer)
    count = self._counts[_BY_LAYER if by_layer else choice.policy][stage]
    return float(choice.again * self.unit / max(count, 1))

  def _Alike(self, stage: int, start: int, end: int) -> list[Choice]:
    """Returns the policies that treat all layers alike."""
    forward = (
      self._forward[end] - self._forward[max(start, self._first)] if end > self._first else 0
    )
    return [
      Choice(
        policy,
        self._counts[policy][stage] * forward,
        self._memory[policy].Activations(stage, start, end),
      )
      for policy in reversed(rematerialisation.POLICIES)  # The simplest of equal choices first.
    ]

  def _ByLayer(self, stage: int, start: int, end: int, limit: float) -> Choice | None:
    """Returns the best choice for each layer, or None if it does not fit."""
    memory, count = self._memory[_BY_LAYER], self._counts[_BY_LAYER][stage]
    if end <= self._first or not count:
      return None
    best: tuple[int, int, _Front, int] | None = None
    for w, working in enumerate(self._workings):
      front = self._FrontOf(w, start, end)
      room = memory.RoomToKeep(stage, start, end, limit, working)
      if front is None or room is None:
        continue
      point = bisect.bisect_right(front.kept_bytes, room) - 1
      if point >= 0 and (best is None or front.again[point] < best[0]):
        best = front.again[point], front.kept_bytes[point], front, point
    if best is None:
      return None
    again, kept_bytes, front, point = best
    options = front.Options(point)
    layers = tuple(option.recomputed for option in options)
    working = max(option.working for option in options)
    keeps_all = not any(parts is None or parts for parts in layers)
    return Choice(
      'none' if keeps_all else rematerialisation.ByLayer(layers),
      count * again,
      memory.Activations(stage, start, end, kept_bytes=kept_bytes, working=working),
      kept_bytes,
      working,
    )

  def _FrontOf(self, w: int, start: int, end: int) -> _Front | None:
    """Returns the front of layers [start, end) that recompute at most self._workings[w] bytes."""
    fronts = self._fronts.setdefault((w, start), [_Front([0], [0], [0], [], None)])
    while len(fronts) <= end - start:
      options = [
        option
        for option in self._options[start + len(fronts) - 1]
        if option.option.working <= self._workings[w]
      ]
      last = fronts[-1]
      fronts.append(last.With(options) if last is not None and options else None)
    return fronts[end - start]


class _Option(NamedTuple):
  """An option of a layer, and the work of a micro-batch that it recomputes."""

  option: stage_memory.Option
  again: int


@dataclasses.dataclass(frozen=True)
class _Front:
  """The least recomputed work for each number of bytes kept, by the first layers of a stage.

  Attributes:
    kept_bytes: bytes kept, ascending.
    again: for each of them the least recomputed work, descending.
    origins: for each of them index of the point of `before`, times the number of `options`, plus
      the index of the option of the last layer.
    options: the options of the last layer.
    before: the front without the last layer; None: there are no layers.
  """

  kept_bytes: list[int]
  again: list[int]
  origins: list[int]
  options: list[_Option]
  before: _Front | None

  def With(self, options: list[_Option]) -> _Front:
    """Returns the front with one more layer."""
    num_options = len(options)
    points = sorted(
      (num_bytes + x.option.kept_bytes, again + x.again, num_options * i + j)
      for i, (num_bytes, again) in enumerate(zip(self.kept_bytes, self.again, strict=True))
      for j, x in enumerate(options)
    )
    best: list[tuple[int, int, int]] = []
    for point in points:
      if not best or point[1] < best[-1][1]:
        best.append(point)
    if len(best) > _MAX_FRONT:
      # Keep the cheapest point of each of `_MAX_FRONT - 1` equal ranges of bytes, and the smallest.
      step = -(-(best[-1][0] - best[0][0]) // (_MAX_FRONT - 1))
      last_of_range = {-(-(point[0] - best[0][0]) // step): point for point in best}
      best = list(last_of_range.values())
    kept_bytes, again, origins = map(list, zip(*best, strict=True))
    return _Front(kept_bytes, again, origins, options, self)

  def Options(self, point: int) -> list[stage_memory.Option]:
    """Returns the option of each layer at a point."""
    chosen = []
    front: _Front = self
    while front.before is not None:
      point, option = divmod(front.origins[point], len(front.options))
      chosen.append(front.options[option].option)
      front = front.before
    return chosen[::-1]


def _Thin(values: list[int]) -> list[int]:
  """Returns at most `_MAX_WORKINGS` of ascending values, among them the greatest."""
  step = max(-(-len(values) // _MAX_WORKINGS), 1)
  return values[::-1][::step][::-1]


def _Preference(choice: Choice) -> tuple[int, bool, int]:
  """Orders choices: less work, then policies that treat layers alike, then less memory."""
  is_by_layer = isinstance(choice.policy, rematerialisation.ByLayer)
  return choice.again, is_by_layer, choice.activations
