# SPDX-License-Identifier: Apache-2.0
"""A pipeline schedule as data: who does what in which order, checked, timed, printed and read.

A schedule gives every device an ordered list of actions; the engine emits the calls in that order
and the simulator prices them. Nothing here knows TensorFlow, nor any schedule by name: those are in
`schedules`, which is also the name under which everybody else uses these classes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from lingvo_gpipe.pipeline.schedule import actions, timeline_text

Action = actions.Action
Kind = actions.Kind

_MAKE_FORWARD = (Kind.FORWARD, Kind.FORWARD_BACKWARD)
_MAKE_INPUT_GRADIENT = (Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.FORWARD_BACKWARD)
# After these nothing of the micro-batch's activations is needed any more.
_FREE = (Kind.BACKWARD, Kind.WEIGHT_GRADIENT, Kind.FORWARD_BACKWARD)
# What one stage may do for one micro-batch of a training step, and for one of a forward-only step.
_COMPLETE = (
  frozenset({Kind.FORWARD, Kind.BACKWARD}),
  frozenset({Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT}),
  frozenset({Kind.FORWARD_BACKWARD}),
)
_COMPLETE_FORWARD_ONLY = (frozenset({Kind.FORWARD}),)
# Fused, the same two units of work are one action.
_UNIT_DURATIONS = {kind: 2 if kind is Kind.FORWARD_BACKWARD else 1 for kind in Kind}


@dataclasses.dataclass(frozen=True)
class Schedule:
  """Ordered actions per device. Construction checks types only; `Validate` checks the meaning.

  Attributes:
    name: what messages call it.
    num_stages: S, the number of stages.
    num_micro_batches: M, the number of micro-batches.
    actions: for each device its actions, in the order in which it runs them.
    stage_to_device: for each stage the device that owns it (S entries; a device may own several).

  Any sequences will do for the last two; they are kept as tuples.
  """

  name: str
  num_stages: int
  num_micro_batches: int
  actions: Sequence[Sequence[Action]]
  stage_to_device: Sequence[int]

  def __post_init__(self) -> None:
    object.__setattr__(self, 'actions', tuple(tuple(row) for row in self.actions))
    object.__setattr__(self, 'stage_to_device', tuple(self.stage_to_device))
    for device, row in enumerate(self.actions):
      for position, action in enumerate(row):
        if not isinstance(action, Action):
          raise TypeError(
            f'Schedule {self.name!r}: device {device}, position {position}: expected an Action, '
            f'got {action!r}; Action.FromText or Schedule.FromText reads text'
          )
        if not isinstance(action.kind, Kind):
          raise TypeError(
            f'Schedule {self.name!r}: device {device}, position {position}: expected a Kind, '
            f'got {action.kind!r}; Kind is one of {actions.KINDS_TEXT}'
          )

  @property
  def num_devices(self) -> int:
    return len(self.actions)

  @functools.cached_property
  def forward_only(self) -> bool:
    """Whether no action computes a gradient: a step for evaluation or inference."""
    return all(a.kind is Kind.FORWARD for row in self.actions for a in row)

  # Text.

  def ToText(self, *, for_torch: bool = False) -> str:
    """One line a device, actions separated by commas.

    Args:
      for_torch: write V, which PyTorch does not know, as F and B, so that PyTorch reads the text.
    """
    text = ''.join(','.join(map(str, row)) + '\n' for row in self.actions)
    return re.sub(r'(\d+)V(\d+)', r'\1F\2,\1B\2', text) if for_torch else text

  @classmethod
  def FromText(
    cls, text: str, name: str = 'custom', stage_to_device: Iterable[int] | None = None
  ) -> Schedule:
    """Reads `ToText`'s form. The counts are one more than the greatest index that occurs.

    Blank lines and what follows a `#` are ignored; an empty cell (or `None`) is an idle slot,
    which carries no meaning: when an action runs follows from the order alone.

    Args:
      text: the schedule.
      name: its name.
      stage_to_device: the owner of every stage; by default the device that runs it forward.

    Raises:
      ValueError: the text cannot be read (line, column and token are named), or a stage below the
        greatest one has no action. Call `Validate` for everything else.
    """
    rows = []
    for line_number, line in enumerate(text.splitlines(), 1):
      line = line.split('#')[0]
      if not line.strip():
        continue
      row = []
      column = 1
      for cell in line.split(','):
        if cell.strip() not in ('', 'None'):
          try:
            action = Action.FromText(cell)
          except ValueError as e:
            start = column + len(cell) - len(cell.lstrip())
            raise ValueError(
              f'Schedule {name!r}: line {line_number}, column {start}: {e}'
            ) from None
          row.append(action)
        column += len(cell) + 1
      rows.append(row)
    owners: dict[int, int] = {}
    for kinds in (_MAKE_FORWARD, tuple(Kind)):
      for device, row in enumerate(rows):
        for action in row:
          if action.kind in kinds:
            owners.setdefault(action.stage, device)
    if not owners:
      raise ValueError(f'Schedule {name!r}: the text holds no action')
    num_stages = max(owners) + 1
    if len(owners) < num_stages:
      missing = next(stage for stage in range(num_stages) if stage not in owners)
      raise ValueError(
        f'Schedule {name!r}: stage {missing} has no action, but stage {num_stages - 1} has; '
        'stages are numbered from 0 without gaps'
      )
    if stage_to_device is None:
      stage_to_device = [owners[stage] for stage in range(num_stages)]
    num_micro_batches = 1 + max(action.micro_batch for row in rows for action in row)
    return cls(name, num_stages, num_micro_batches, rows, tuple(stage_to_device))

  # Meaning.

  def Dependencies(self, action: Action) -> tuple[Action, ...]:
    """Whose results `action` needs: its input's and gradient's makers, its own forward pass.

    The schedule must be a valid one.
    """
    stage, m = action.stage, action.micro_batch
    if action.kind is Kind.WEIGHT_GRADIENT:
      return (Action(stage, Kind.INPUT_GRADIENT, m),)
    if action.kind in _MAKE_FORWARD:
      return (self._forward[stage - 1, m],) if stage else ()
    own = self._forward[stage, m]
    return (own, self._gradient[stage + 1, m]) if stage + 1 < self.num_stages else (own,)

  @functools.cached_property
  def _forward(self) -> dict[tuple[int, int], Action]:
    """(stage, micro-batch) -> the action that makes the stage's output."""
    return self._Makers(_MAKE_FORWARD)

  @functools.cached_property
  def _gradient(self) -> dict[tuple[int, int], Action]:
    """(stage, micro-batch) -> the action that makes the gradient of the stage's input."""
    return self._Makers(_MAKE_INPUT_GRADIENT)

  def _Makers(self, kinds: tuple[Kind, ...]) -> dict[tuple[int, int], Action]:
    return {
      (action.stage, action.micro_batch): action
      for row in self.actions
      for action in row
      if action.kind in kinds
    }

  def Validate(self) -> Schedule:
    """Checks everything that the engine relies on, and returns the schedule itself.

    Every stage handles every micro-batch exactly once, on the device that owns the stage, as F and
    B, or F, I and W, or (last stage only) V; with no gradient at all, as F. An action never stands
    before one that it depends on, and no devices wait for each other for ever.

    Raises:
      ValueError: the first fault found; it names the device and the action.
    """
    self._CheckCounts()
    self._CheckOwners()
    self._CheckComplete()
    self._CheckOrder()
    for _ in self.Walk():
      pass
    return self

  def _Fault(self, text: str) -> ValueError:
    return ValueError(f'Schedule {self.name!r}: {text}')

  def _CheckCounts(self) -> None:
    for what, value in (('stage', self.num_stages), ('micro-batch', self.num_micro_batches)):
      if not IsPositiveInteger(value):
        raise self._Fault(f'expected at least one {what}, as an integer, got {value!r}')
    if len(self.stage_to_device) != self.num_stages:
      raise self._Fault(
        f'stage_to_device has {len(self.stage_to_device)} entries for {self.num_stages} stages; '
        'name one device a stage'
      )
    for stage, device in enumerate(self.stage_to_device):
      if device not in range(self.num_devices):
        raise self._Fault(
          f'stage {stage} is on device {device!r}, but the devices with actions are '
          f'0 to {self.num_devices - 1}'
        )
    for device in range(self.num_devices):
      if device not in self.stage_to_device:
        raise self._Fault(f'device {device} owns no stage; leave the device out')

  def _CheckOwners(self) -> None:
    seen = set()
    for device, row in enumerate(self.actions):
      for action in row:
        if action.stage not in range(self.num_stages):
          raise self._Fault(
            f'device {device}: {action}: no stage {action.stage}, there are {self.num_stages}'
          )
        if action.micro_batch not in range(self.num_micro_batches):
          raise self._Fault(
            f'device {device}: {action}: no micro-batch {action.micro_batch}, '
            f'there are {self.num_micro_batches}'
          )
        owner = self.stage_to_device[action.stage]
        if owner != device:
          raise self._Fault(
            f'device {device}: {action}: stage {action.stage} belongs to device {owner}'
          )
        if action in seen:
          raise self._Fault(f'device {device}: {action} occurs more than once')
        seen.add(action)

  def _CheckComplete(self) -> None:
    complete = _COMPLETE_FORWARD_ONLY if self.forward_only else _COMPLETE
    kinds_at: dict[tuple[int, int], frozenset[Kind]] = {}
    for row in self.actions:
      for a in row:
        at = (a.stage, a.micro_batch)
        kinds_at[at] = kinds_at.get(at, frozenset()) | {a.kind}
    for stage, device in enumerate(self.stage_to_device):
      for m in range(self.num_micro_batches):
        kinds = kinds_at.get((stage, m), frozenset())
        fused = Action(stage, Kind.FORWARD_BACKWARD, m)
        if fused.kind in kinds and stage != self.num_stages - 1:
          raise self._Fault(
            f'device {device}: {fused}: only the last stage, {self.num_stages - 1}, holds the loss '
            'and can run forward and backward in one action'
          )
        if kinds in complete:
          continue
        # The closest complete set of actions decides what to say.
        alike = [c for c in complete if (fused.kind in c) == (fused.kind in kinds)]
        wanted = min(alike, key=lambda c: len(c ^ kinds))
        lacking = [str(Action(stage, k, m)) for k in Kind if k in wanted - kinds]
        excess = [str(Action(stage, k, m)) for k in Kind if k in kinds - wanted]
        parts = [f'lacks {" and ".join(lacking)}'] if lacking else []
        parts += [f'has {" and ".join(excess)} too many'] if excess else []
        raise self._Fault(
          f'device {device} {" and ".join(parts)}: for each micro-batch a stage runs '
          + ' or '.join('+'.join(k.value for k in Kind if k in c) for c in complete)
        )

  def _CheckOrder(self) -> None:
    for device, row in enumerate(self.actions):
      position = {action: i for i, action in enumerate(row)}
      for i, action in enumerate(row):
        for needed in self.Dependencies(action):
          if position.get(needed, -1) > i:
            raise self._Fault(f'device {device}: {action} stands before {needed}, which it needs')

  # Time.

  def Walk(self) -> Iterator[tuple[int, Action]]:
    """(device, action) for all actions: each device's in its order, none before what it needs.

    The rows must hold all actions that are needed, as `Validate` checks.

    Raises:
      ValueError: devices wait for each other for ever.
    """
    done: set[Action] = set()
    position = [0] * self.num_devices
    progress = True
    while progress:
      progress = False
      for device, row in enumerate(self.actions):
        while position[device] < len(row):
          action = row[position[device]]
          if not all(needed in done for needed in self.Dependencies(action)):
            break
          yield device, action
          done.add(action)
          position[device] += 1
          progress = True
    if len(done) < sum(map(len, self.actions)):
      raise self._Deadlock(position, done)

  def _Deadlock(self, position: list[int], done: set[Action]) -> ValueError:
    """Follows who waits for whom from the first stuck device until a device comes up again."""
    device = next(d for d, row in enumerate(self.actions) if position[d] < len(row))
    waits: dict[int, str] = {}
    while device not in waits:
      action = self.actions[device][position[device]]
      needed = next(n for n in self.Dependencies(action) if n not in done)
      waits[device] = f'device {device} stands at {action} and waits for {needed}'
      device = self.stage_to_device[needed.stage]
    cycle = list(waits.values())[list(waits).index(device) :]
    return self._Fault(f'deadlock: {"; ".join(cycle)}')

  def Timeline(
    self, durations: Mapping[Kind, float] | None = None
  ) -> tuple[tuple[tuple[float, float, Action], ...], ...]:
    """For each device (start, end, action), each as early as possible, transfers free.

    Args:
      durations: {kind: time > 0}, kinds left out take one unit (V two).

    Raises:
      ValueError: a duration that is not positive, or an invalid schedule.
    """
    self.Validate()
    durations = {Kind(kind): time for kind, time in (durations or {}).items()}
    for kind, time in durations.items():
      if not time > 0:
        raise ValueError(f'Duration of {kind.value}: expected a positive number, got {time!r}')
    durations = {**_UNIT_DURATIONS, **durations}
    clock: list[float] = [0] * self.num_devices
    times: dict[Action, tuple[float, float]] = {}
    for device, action in self.Walk():
      start = max([clock[device], *(times[needed][1] for needed in self.Dependencies(action))])
      clock[device] = start + durations[action.kind]
      times[action] = (start, clock[device])
    return tuple(tuple((*times[action], action) for action in row) for row in self.actions)

  def EmissionOrder(self) -> tuple[Action, ...]:
    """All actions in one order that respects dependencies and every device's own order.

    It is the order of start times when every action takes one unit (V two), lower devices first
    among equals: what runs at the same time stands together.
    """
    starts = [(start, d, a) for d, row in enumerate(self.Timeline()) for start, _, a in row]
    return tuple(action for _, _, action in sorted(starts, key=lambda item: item[:2]))

  def Picture(self, durations: Mapping[Kind, int] | None = None) -> str:
    """Draws the schedule like the GPipe paper's figure 2: a row a device, a column a time tick.

    The stage is left out of the actions where it is the device's number.

    Args:
      durations: {kind: ticks}, whole numbers; kinds left out take one tick (V two).
    """
    for kind, time in (durations or {}).items():
      if int(time) != time:
        raise ValueError(f'Picture counts in ticks: {kind}: expected a whole number, got {time!r}')
    timeline = self.Timeline(durations)
    return timeline_text.DrawTicks([[(s, e, self.Label(a)) for s, e, a in r] for r in timeline])

  def Label(self, action: Action) -> str:
    """The action for a row of its device: `F0` where every device has the stage of its number."""
    simple = self.stage_to_device == tuple(range(self.num_devices))
    return str(action).removeprefix(str(action.stage)) if simple else str(action)

  # Memory.

  def PeakActivations(self) -> tuple[int, ...]:
    """For each stage the most micro-batches whose activations it holds at one time.

    A micro-batch is held from the start of F to the end of B (of W where the backward is split),
    within V, and in a forward-only schedule only within F. With re-materialisation read it as the
    number of stage inputs kept.
    """
    held = [0] * self.num_stages
    peak = [0] * self.num_stages
    for row in self.actions:
      for action, change in self._Holdings(row):
        held[action.stage] += change
        peak[action.stage] = max(peak[action.stage], held[action.stage])
    return tuple(peak)

  def DevicePeakActivations(self) -> tuple[int, ...]:
    """For each device the same, over all its stages: (stage, micro-batch) pairs held at one time.

    This is less than the sum over its stages where these are not full at the same time.
    """
    changes = ((change for _, change in self._Holdings(row)) for row in self.actions)
    return tuple(max(itertools.accumulate(c), default=0) for c in changes)

  def _Holdings(self, row: Iterable[Action]) -> Iterator[tuple[Action, int]]:
    """In order (action, 1) where it begins to hold a micro-batch, (action, -1) where that ends."""
    for action in row:
      if action.kind in _MAKE_FORWARD:
        yield action, 1
      if self.forward_only or action.kind in _FREE:
        yield action, -1


def IsPositiveInteger(value: object) -> bool:
  """Whether the value can be a count of stages, micro-batches or devices."""
  return isinstance(value, int) and not isinstance(value, bool) and value >= 1
