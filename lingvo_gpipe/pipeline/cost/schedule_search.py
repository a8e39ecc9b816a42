# SPDX-License-Identifier: Apache-2.0
"""Searches for the order of actions that takes the least time within the memory of each device.

The candidates are all named schedules, and orders that the devices make as they go: a device that
is free runs the first ready action by a rule, such as I before F before W, if its memory holds what
the action keeps. The best candidate is then improved by moves of single actions: into a gap, or
forward if another device waits for them. `simulator.Simulate` judges all, so the result is never
worse than a named schedule under the same costs. The search is a heuristic. It makes the same
choices each time, and its length is bounded by the number of actions that it simulates.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Sequence

from lingvo_gpipe.core import text_table
from lingvo_gpipe.pipeline.cost import activation_memory, per_stage, simulator
from lingvo_gpipe.pipeline.schedule import actions, orders, schedules, step_work

Action = actions.Action
Kind = actions.Kind
Schedule = schedules.Schedule

NAME = 'search'
# The most actions to simulate: in the orders by rules, and in the moves. About ten seconds in all.
_MAX_ACTIONS = 60_000
_MAX_MOVES = 400


def Search(
  num_stages: int,
  num_micro_batches: int,
  num_devices: int,
  costs: simulator.Costs,
  *,
  remat_policy: str = 'stage',
  sizes: activation_memory.ActivationSizes | None = None,
  memory_limit: float | Sequence[float] | None = None,
  trained: Sequence[bool] | None = None,
) -> simulator.Result:
  """Returns the fastest step that the search finds; its `schedule` has the order.

  Args:
    num_stages: S, a multiple of K.
    num_micro_batches: M.
    num_devices: K. With two stages on each, stage k is on device k mod K or they form a V.
    costs: the times, measured or counted.
    remat_policy: one of `rematerialisation.POLICIES`.
    sizes: the bytes of activations; needed for a limit.
    memory_limit: the most bytes of activations of a device, or of each device; None: any.
    trained: for each stage whether it has trained weights; None: as for `simulator.Simulate`.

  Raises:
    ValueError: impossible sizes, a limit without sizes, or no candidate keeps the limit.
  """
  if memory_limit is not None and sizes is None:
    raise ValueError('memory_limit: a limit in bytes needs sizes, the bytes of activations')
  limits: tuple[float, ...] = (math.inf,) * num_devices
  if memory_limit is not None:
    limits = per_stage.Expand('memory_limit', memory_limit, num_devices, 'device')
  judge = _Judge(costs, remat_policy, sizes, limits, trained)
  # This schedule exists for any number of stages on each device.
  plain = schedules.Get('looped_bfs', num_stages, num_micro_batches, num_devices)
  for name in schedules.Names():
    try:
      schedule = schedules.Get(name, num_stages, num_micro_batches, num_devices)
    except ValueError:
      continue  # The schedule does not exist for these numbers.
    if not schedule.forward_only:
      judge.Try(schedule)
  times = _Times(plain, costs, remat_policy, trained)
  placements = [orders.LoopOwners(num_stages, num_devices)]
  if num_stages == 2 * num_devices and num_devices > 1:
    placements.append(orders.VOwners(num_devices))
  budget = _MAX_ACTIONS
  for rule, owners in itertools.product(_Rules(num_stages, num_devices), placements):
    budget -= 3 * num_stages * num_micro_batches
    if budget < 0:
      break
    memory = _Memory(owners, sizes, limits, remat_policy, rule.is_split)
    if rows := _Order(rule, owners, num_micro_batches, times, memory):
      judge.Try(Schedule(NAME, num_stages, num_micro_batches, rows, owners))
  best = judge.best
  if best is None:
    raise ValueError(
      f'memory_limit: no order of {num_stages} stages on {num_devices} devices and '
      f'{num_micro_batches} micro-batches keeps {text_table.FormatBytes(min(limits))} of '
      f'activations on each device; {judge.least_name} needs the least, '
      f'{text_table.FormatBytes(judge.least_bytes)}; use more micro-batches, more stages or '
      'another remat_policy'
    )
  best = _Improve(best, judge)
  return dataclasses.replace(best, schedule=dataclasses.replace(best.schedule, name=NAME))


class _Judge:
  """Simulates candidates, and keeps the best one.

  Attributes:
    best: the fastest step within the limits so far; the first if several are equally fast.
    least_bytes: the least bytes on a device of any candidate.
    least_name: the schedule that needs them.
  """

  def __init__(
    self,
    costs: simulator.Costs,
    remat_policy: str,
    sizes: activation_memory.ActivationSizes | None,
    limits: Sequence[float],
    trained: Sequence[bool] | None,
  ) -> None:
    self._costs, self._policy, self._sizes = costs, remat_policy, sizes
    self._limits, self._trained = limits, trained
    self.best: simulator.Result | None = None
    self.least_bytes, self.least_name = math.inf, ''

  def Try(self, schedule: Schedule) -> None:
    """Simulates the schedule and compares it with the best one."""
    result = self.Simulate(schedule)
    if self.Fits(result) and (self.best is None or result.makespan < self.best.makespan):
      self.best = result

  def Simulate(self, schedule: Schedule) -> simulator.Result:
    """Returns the step; raises ValueError if the order is impossible."""
    return simulator.Simulate(
      schedule,
      self._costs,
      remat_policy=self._policy,
      sizes=self._sizes,
      trained=self._trained,
    )

  def Fits(self, result: simulator.Result) -> bool:
    """Whether the step keeps the limits."""
    if result.device_peak_bytes is None:
      return True
    most = max(result.device_peak_bytes)
    if most < self.least_bytes:
      self.least_bytes, self.least_name = most, result.schedule.name
    return all(b <= limit for b, limit in zip(result.device_peak_bytes, self._limits, strict=True))


# Orders by rules.


@dataclasses.dataclass(frozen=True)
class _Rule:
  """A rule by which a device chooses among its ready actions.

  Attributes:
    kinds: letters of F, I (or B) and W, by descending priority.
    is_split: whether backward is I and W.
    is_fused: whether the last stage runs V.
    is_late_first: whether an F or I of a later stage goes before one of an earlier stage.
    most_held: the most stages and micro-batches that a device holds.
  """

  kinds: str
  is_split: bool
  is_fused: bool
  is_late_first: bool
  most_held: float


def _Rules(num_stages: int, num_devices: int) -> Iterator[_Rule]:
  """Yields the rules; neighbours differ in one respect, and the least limited come first."""
  caps = (math.inf, num_stages, num_stages + num_devices, max(num_stages // 2 + 1, 2))
  for cap, is_late_first, is_fused in itertools.product(caps, (True, False), (False, True)):
    for kinds in ('IFW', 'FIW', 'IWF'):
      yield _Rule(kinds, True, is_fused, is_late_first, cap)
    for kinds in ('IF', 'FI'):
      yield _Rule(kinds, False, is_fused, is_late_first, cap)


class _Times:
  """The times of actions and transfers, for the orders by rules."""

  def __init__(
    self,
    schedule: Schedule,
    costs: simulator.Costs,
    remat_policy: str,
    trained: Sequence[bool] | None,
  ) -> None:
    work = step_work.StepWork(schedule, remat_policy, trained)
    durations = simulator.Durations(work, costs)
    self._seconds = {}
    for stage, kind in itertools.product(range(schedule.num_stages), Kind):
      action = Action(stage, kind, 0)
      seconds = durations.Get(action) if work.Exists(action) else 0.0
      if work.Repeats(action):
        seconds += durations.Get(action, 'recompute')
      self._seconds[stage, kind] = seconds
    boundaries = schedule.num_stages - 1
    back = costs.transfer if costs.gradient_transfer is None else costs.gradient_transfer
    forward, backward, latency = (
      per_stage.Expand(name, value, boundaries, 'boundary')
      for name, value in (
        ('transfer', costs.transfer),
        ('gradient_transfer', back),
        ('latency', costs.latency),
      )
    )
    self._down = [a + b for a, b in zip(forward, latency, strict=True)]
    self._up = [a + b for a, b in zip(backward, latency, strict=True)]

  def Seconds(self, stage: int, kind: Kind) -> float:
    """Returns the time of an action with its recomputation."""
    return self._seconds[stage, kind]

  def Transfer(self, source: int, target: int) -> float:
    """Returns the time from one stage to the next one, on another device."""
    return self._down[source] if target > source else self._up[target]


class _Memory:
  """An estimate of the bytes that a device holds; the simulator decides in the end."""

  def __init__(
    self,
    owners: Sequence[int],
    sizes: activation_memory.ActivationSizes | None,
    limits: Sequence[float],
    remat_policy: str,
    is_split: bool,
  ) -> None:
    self._owners, self._limits = owners, limits
    stages = range(len(owners))

    def Read(name: str) -> tuple[float, ...]:
      value = getattr(sizes, name, None)
      return per_stage.Expand(f'sizes.{name}', value or 0, len(owners), 'stage')

    whole = [a + b for a, b in zip(Read('stage_input'), Read('inner'), strict=True)]
    for_weights = Read('weight_part') if sizes and sizes.weight_part is not None else whole
    stored, working = whole, whole
    if remat_policy == 'layer' and not is_split:
      stored = [a + b for a, b in zip(Read('stage_input'), Read('layer_inputs'), strict=True)]
      working = [a + b for a, b in zip(stored, Read('largest_layer'), strict=True)]
    elif remat_policy != 'none':
      stored = list(Read('stage_input'))
    # {kind: for each stage the change within and after an action}.
    self._changes = {
      Kind.FORWARD: [(stored[k], stored[k]) for k in stages],
      Kind.BACKWARD: [(working[k] - stored[k], -stored[k]) for k in stages],
      Kind.INPUT_GRADIENT: [(whole[k] - stored[k], for_weights[k] - stored[k]) for k in stages],
      Kind.WEIGHT_GRADIENT: [(0.0, -for_weights[k]) for k in stages],
      Kind.FORWARD_BACKWARD: [(whole[k], 0.0) for k in stages],
    }
    # An F leaves room for a micro-batch in each later stage of its device, and for its backward, so
    # that the oldest micro-batch can always continue.
    self._room = [
      sum(stored[j] for j in stages if j > k and owners[j] == owners[k])
      + max(whole[j] - stored[j] for j in stages if owners[j] == owners[k])
      for k in stages
    ]

  def Has(self, held: float, count: int, most_held: float, stage: int, kind: Kind) -> bool:
    """Whether a device that holds this much can run the action."""
    need = held + self._changes[kind][stage][0]
    if kind is Kind.FORWARD:
      need += self._room[stage]
      owner = self._owners[stage]
      later = sum(k > stage and d == owner for k, d in enumerate(self._owners))
      if count + 1 + later > most_held:
        return False
    return need <= self._limits[self._owners[stage]]

  def After(self, stage: int, kind: Kind) -> float:
    """Returns the change of the bytes by an action."""
    return self._changes[kind][stage][1]


def _Order(
  rule: _Rule, owners: Sequence[int], num_micro_batches: int, times: _Times, memory: _Memory
) -> list[list[Action]] | None:
  """Returns the actions of each device by the rule; None if memory leaves no action to run."""
  num_stages, num_devices = len(owners), max(owners) + 1
  last = num_stages - 1
  first_backward = Kind.INPUT_GRADIENT if rule.is_split else Kind.BACKWARD
  ends: dict[tuple[int, str, int], float] = {}  # F and I (also of B and V) by stage.
  counts = {(k, letter): 0 for k in range(num_stages) for letter in 'FIW'}
  rows: list[list[Action]] = [[] for _ in range(num_devices)]
  clock, held, held_count = [0.0] * num_devices, [0.0] * num_devices, [0] * num_devices

  def Ready(stage: int, letter: str, m: int) -> float:
    """Returns when the results that an action needs arrive; infinite if they are not made."""
    if letter == 'W':
      return ends.get((stage, 'I', m), math.inf)
    if letter == 'F':
      if stage == 0:
        return 0.0
      needed = [(stage - 1, 'F', m)]
    else:
      needed = [(stage, 'F', m)] + ([(stage + 1, 'I', m)] if stage < last else [])
    return max(
      ends.get(key, math.inf)
      + (times.Transfer(key[0], stage) if owners[key[0]] != owners[stage] else 0.0)
      for key in needed
    )

  def KindOf(stage: int, letter: str) -> Kind:
    if letter == 'F':
      return Kind.FORWARD_BACKWARD if rule.is_fused and stage == last else Kind.FORWARD
    return first_backward if letter == 'I' else Kind.WEIGHT_GRADIENT

  stages_of = [[k for k in range(num_stages) if owners[k] == d] for d in range(num_devices)]

  def Choose(d: int) -> tuple[float, int, str] | None:
    """Returns (start, stage, letter) of the device's next action."""
    options = []
    for stage in stages_of[d]:
      for letter in rule.kinds:
        m = counts[stage, letter]
        if m == num_micro_batches or (letter != 'F' and rule.is_fused and stage == last):
          continue
        ready = Ready(stage, letter, m)
        kind = KindOf(stage, letter)
        if ready < math.inf and memory.Has(held[d], held_count[d], rule.most_held, stage, kind):
          options.append((ready, stage, letter))
    if not options:
      return None
    start = max(clock[d], min(ready for ready, _, _ in options))
    sign = -1 if rule.is_late_first else 1
    _, stage, letter = min(
      (o for o in options if o[0] <= start),
      key=lambda o: (rule.kinds.index(o[2]), sign * o[1]),
    )
    return start, stage, letter

  num_left = sum(
    num_micro_batches * (1 if rule.is_fused and k == last else len(rule.kinds))
    for k in range(num_stages)
  )
  for _ in range(num_left):
    choices = [(c, d) for d in range(num_devices) if (c := Choose(d))]
    if not choices:
      return None
    (start, stage, letter), d = min(choices, key=lambda choice: (choice[0][0], choice[1]))
    kind, m = KindOf(stage, letter), counts[stage, letter]
    counts[stage, letter] += 1
    clock[d] = start + times.Seconds(stage, kind)
    ends[stage, letter, m] = clock[d]
    if kind is Kind.FORWARD_BACKWARD:
      ends[stage, 'I', m] = clock[d]
    held[d] += memory.After(stage, kind)
    held_count[d] += (kind is Kind.FORWARD) - (kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT))
    rows[d].append(Action(stage, kind, m))
  return rows


# Moves.


def _Improve(best: simulator.Result, judge: _Judge) -> simulator.Result:
  """Returns the step after moves of single actions, none of which makes it longer."""
  rng = random.Random(0)
  num_actions = sum(map(len, best.schedule.actions))
  for _ in range(min(_MAX_MOVES, _MAX_ACTIONS // num_actions)):
    rows = _Move(best, rng)
    if rows is None:
      break
    try:
      result = judge.Simulate(dataclasses.replace(best.schedule, actions=rows))
    except ValueError:
      continue  # An action precedes one of its dependencies.
    if _Length(result) <= _Length(best) and judge.Fits(result):
      best = result
  return best


def _Length(result: simulator.Result) -> tuple[float, float]:
  """Returns the time of the step, and the sum of the times when the devices are done."""
  return result.makespan, sum(row[-1].end for row in result.timeline)


def _Move(result: simulator.Result, rng: random.Random) -> list[list[Action]] | None:
  """Returns the order with one action moved, or None if no device waits."""
  schedule = result.schedule
  gaps = [
    (d, after.action)
    for d, row in enumerate(result.timeline)
    for before, after in itertools.pairwise(row)
    if after.start > before.end and after.action
  ]
  if not gaps:
    return None
  d, waiting = rng.choice(gaps)
  assert waiting is not None
  rows = [list(row) for row in schedule.actions]
  position = rows[d].index(waiting)
  if rng.random() < 0.5:
    # The gap takes the next action of one stage and kind.
    later: dict[tuple[int, Kind], int] = {}
    for i in range(position + 1, len(rows[d])):
      later.setdefault((rows[d][i].stage, rows[d][i].kind), i)
    if later:
      rows[d].insert(position, rows[d].pop(rng.choice(list(later.values()))))
  else:
    # The action that the device waits for moves forward.
    needed = rng.choice(schedule.Dependencies(waiting) or (waiting,))
    row = rows[schedule.stage_to_device[needed.stage]]
    i = row.index(needed)
    row.insert(max(i - rng.randint(1, 3), 0), row.pop(i))
  return rows
