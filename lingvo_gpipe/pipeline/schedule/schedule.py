# SPDX-License-Identifier: Apache-2.0
"""`Schedule`: a pipeline schedule as data, with its checks, times, text and pictures.

A schedule gives each device an ordered list of actions, and says which device owns which stage:

    device 0   0F0  0F1  0B1  0B0        owns stage 0
    device 1   1F0  1F1  1B1  1B0        owns stage 1

A schedule stores nothing else. The order and the dependencies between actions determine when each
action runs, and transfers between devices are implied:

    F of a stage      needs F of the stage before it
    B or I            needs F of its own stage, and B, I or V of the stage after it
    W                 needs I of its own stage
    V (last stage)    needs F of the stage before it
    O                 needs F of its own stage
    L                 needs O of its own stage, and B or I needs L

all for the same micro-batch. The vocabulary can be shared out over all devices (`vocabulary`): then
the last stages are slices of the softmax, one on each device. The loss, which takes no time, runs
between their forward and their backward. If stages 0 and 1 have the layers, and 2 and 3 are slices:

    device 0   0F0  2F0  0F1  2F1  2B0 ...
    device 1   1F0  3F0  1F1  3F1  3B0  1B0 ...

    F of a slice               needs F of the last stage with layers
    B or I of a slice          needs F of all slices
    B or I of the last stage   needs B or I of all slices
    with layers

The engine traces the calls in this order, and the simulator predicts their times. This module does
not know any schedule by name: `schedules` does, and other folders import these classes from there.
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
# After these actions a stage no longer needs its activations of the micro-batch.
_FREE = (Kind.BACKWARD, Kind.WEIGHT_GRADIENT, Kind.FORWARD_BACKWARD)
# The sets of actions that process one micro-batch in one stage: in a training step, and in a step
# without gradients.
_COMPLETE = (
  frozenset({Kind.FORWARD, Kind.BACKWARD}),
  frozenset({Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT}),
  frozenset({Kind.FORWARD_BACKWARD}),
)
_COMPLETE_FORWARD_ONLY = (frozenset({Kind.FORWARD}),)
_COMPLETE_WITH_COPIES = tuple(
  kinds.union(actions.COPIES) for kinds in _COMPLETE if Kind.FORWARD_BACKWARD not in kinds
)
# V does the two units of work of F and B. Copies take no time of the device.
_UNIT_DURATIONS = {
  **dict.fromkeys(Kind, 1),
  Kind.FORWARD_BACKWARD: 2,
  **dict.fromkeys(actions.COPIES, 0),
}


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The ordered actions of each device. Construction checks types, `Validate` everything else.

  Attributes:
    name: the schedule's name in messages.
    num_stages: S, the number of stages.
    num_micro_batches: M, the number of micro-batches.
    actions: for each device its actions, in the order in which it runs them. Any sequence of
      sequences; stored as tuples.
    stage_to_device: for each stage the index of the device that owns it. A device may own several
      stages. Any sequence; stored as a tuple.
    num_slices: the number of stages, the last ones, that are slices of the vocabulary.
  """

  name: str
  num_stages: int
  num_micro_batches: int
  actions: Sequence[Sequence[Action]]
  stage_to_device: Sequence[int]
  num_slices: int = 0

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

  @property
  def num_layer_stages(self) -> int:
    """The number of stages that have layers: all but the slices of the vocabulary."""
    return self.num_stages - self.num_slices

  @functools.cached_property
  def forward_only(self) -> bool:
    """Whether no action computes a gradient, as in evaluation and inference."""
    return all(a.kind is Kind.FORWARD for row in self.actions for a in row)

  # Text.

  def ToText(self, *, for_torch: bool = False) -> str:
    """Returns one line per device, actions separated by commas.

    Args:
      for_torch: whether to write V as F and B and to leave out O and L, because PyTorch does not
        know these.
    """
    skipped = actions.COPIES if for_torch else ()
    rows = ([str(a) for a in row if a.kind not in skipped] for row in self.actions)
    text = ''.join(','.join(row) + '\n' for row in rows)
    return re.sub(r'(\d+)V(\d+)', r'\1F\2,\1B\2', text) if for_torch else text

  @classmethod
  def FromText(
    cls,
    text: str,
    name: str = 'custom',
    stage_to_device: Iterable[int] | None = None,
    num_slices: int = 0,
  ) -> Schedule:
    """Parses the text form of `ToText`.

    The numbers of stages and micro-batches are the greatest indices in the text plus one. Blank
    lines and comments (`#`) are ignored. So are idle slots: the order alone decides when an action
    runs. The text may be a CSV file of PyTorch, with or without transfers (`ActionsOfCell`).

    Args:
      text: the schedule.
      name: its name.
      stage_to_device: the device of each stage; by default the device that runs its forward.
      num_slices: the number of stages, the last ones, that are slices of the vocabulary.

    Raises:
      ValueError: a token is not an action (the message has its line and column), or the stages are
        not numbered without gaps. Call `Validate` to check everything else.
    """
    rows = []
    for line_number, line in enumerate(text.splitlines(), 1):
      line = line.split('#')[0]
      if not line.strip():
        continue
      row: list[Action] = []
      column = 1
      for cell in line.split(','):
        try:
          row += actions.ActionsOfCell(cell)
        except ValueError as e:
          start = column + len(cell) - len(cell.lstrip())
          raise ValueError(f'Schedule {name!r}: line {line_number}, column {start}: {e}') from None
        column += len(cell) + 1
      rows.append(row)
    owners: dict[int, int] = {}
    for kinds in (_MAKE_FORWARD, tuple(Kind)):
      for device, row in enumerate(rows):
        for action in row:
          if action.kind in kinds:
            owners.setdefault(action.stage, device)
    if not owners:
      raise ValueError(f'Schedule {name!r}: the text has no actions')
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
    return cls(name, num_stages, num_micro_batches, rows, tuple(stage_to_device), num_slices)

  # Meaning.

  def Dependencies(self, action: Action) -> tuple[Action, ...]:
    """Returns the actions whose results `action` needs (see the module's docstring).

    Assumes that the schedule is valid.
    """
    stage, m = action.stage, action.micro_batch
    if action.kind is Kind.WEIGHT_GRADIENT:
      return (Action(stage, Kind.INPUT_GRADIENT, m),)
    slices = range(self.num_layer_stages, self.num_stages)
    if action.kind in _MAKE_FORWARD:
      before = min(stage, self.num_layer_stages) - 1
      return (self._forward[before, m],) if stage else ()
    if action.kind is Kind.LOAD:
      return (Action(stage, Kind.OFFLOAD, m),)
    if action.kind is Kind.OFFLOAD:
      return (self._forward[stage, m],)
    if stage in slices:
      return tuple(self._forward[k, m] for k in slices)
    needed = [self._forward[stage, m]]
    if stage + 1 in slices:
      needed += [self._gradient[k, m] for k in slices]
    elif stage + 1 < self.num_stages:
      needed.append(self._gradient[stage + 1, m])
    if (stage, m) in self.offloaded:
      needed.append(Action(stage, Kind.LOAD, m))
    return tuple(needed)

  @functools.cached_property
  def offloaded(self) -> frozenset[tuple[int, int]]:
    """The (stage, micro-batch) whose tensors wait for backward in the memory of the host."""
    return frozenset(self._ActionsOfKinds((Kind.LOAD,)))

  @functools.cached_property
  def _forward(self) -> dict[tuple[int, int], Action]:
    """{(stage, micro-batch): the action that makes the stage's output}."""
    return self._ActionsOfKinds(_MAKE_FORWARD)

  @functools.cached_property
  def _gradient(self) -> dict[tuple[int, int], Action]:
    """{(stage, micro-batch): the action that makes the gradient of the stage's input}."""
    return self._ActionsOfKinds(_MAKE_INPUT_GRADIENT)

  def _ActionsOfKinds(self, kinds: tuple[Kind, ...]) -> dict[tuple[int, int], Action]:
    return {
      (action.stage, action.micro_batch): action
      for row in self.actions
      for action in row
      if action.kind in kinds
    }

  def Validate(self) -> Schedule:
    """Checks everything that the engine relies on, and returns the schedule itself.

    - Each stage processes each micro-batch exactly once, on the device that owns the stage.
    - It does so as F and B, as F, I and W, or (last stage only) as V; in a schedule without
      gradients, as F alone. O and L, always both, may come between F and B or I.
    - No action precedes an action of its own device that it depends on.
    - No devices wait for each other for ever.

    Raises:
      ValueError: the first fault; the message names the device and the action.
    """
    _ = self._is_valid
    return self

  @functools.cached_property
  def _is_valid(self) -> bool:
    """Always True. The first access checks the schedule, which never changes, and may raise."""
    self._CheckCounts()
    self._CheckOwners()
    self._CheckComplete()
    self._CheckOrder()
    for _ in self.InOrder():
      pass
    return True

  def _Fault(self, text: str) -> ValueError:
    return ValueError(f'Schedule {self.name!r}: {text}')

  def _CheckCounts(self) -> None:
    counts = {'stage': self.num_layer_stages, 'micro-batch': self.num_micro_batches}
    for unit, value in counts.items():
      if not IsPositiveInteger(value):
        raise self._Fault(f'expected at least one {unit}, as an integer, got {value!r}')
    if len(self.stage_to_device) != self.num_stages:
      raise self._Fault(
        f'stage_to_device has {len(self.stage_to_device)} entries for {self.num_stages} stages; '
        'give one device for each stage'
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
            f'device {device}: {action}: no stage {action.stage}, the schedule has '
            f'{self.num_stages}'
          )
        if action.micro_batch not in range(self.num_micro_batches):
          raise self._Fault(
            f'device {device}: {action}: no micro-batch {action.micro_batch}, '
            f'the schedule has {self.num_micro_batches}'
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
    kinds_at: dict[tuple[int, int], frozenset[Kind]] = {}
    for row in self.actions:
      for a in row:
        at = (a.stage, a.micro_batch)
        kinds_at[at] = kinds_at.get(at, frozenset()) | {a.kind}
    for stage, device in enumerate(self.stage_to_device):
      for m in range(self.num_micro_batches):
        kinds = kinds_at.get((stage, m), frozenset())
        fused = Action(stage, Kind.FORWARD_BACKWARD, m)
        if fused.kind in kinds and (stage != self.num_stages - 1 or self.num_slices):
          if self.num_slices:
            raise self._Fault(
              f'device {device}: {fused}: the loss runs between the forward and the backward of '
              'the slices of the vocabulary, so no stage can run both in one action'
            )
          raise self._Fault(
            f'device {device}: {fused}: only the last stage, {self.num_stages - 1}, holds the loss '
            'and can run forward and backward in one action'
          )
        complete: tuple[frozenset[Kind], ...] = _COMPLETE
        if self.forward_only:
          complete = _COMPLETE_FORWARD_ONLY
        elif not kinds.isdisjoint(actions.COPIES):
          complete = _COMPLETE_WITH_COPIES
        if kinds in complete:
          continue
        # Describe the difference to the nearest complete set of actions.
        candidates = [c for c in complete if (fused.kind in c) == (fused.kind in kinds)] or complete
        nearest = min(candidates, key=lambda c: len(c ^ kinds))
        missing = [str(Action(stage, k, m)) for k in Kind if k in nearest - kinds]
        excess = [str(Action(stage, k, m)) for k in Kind if k in kinds - nearest]
        parts = [f'lacks {" and ".join(missing)}'] if missing else []
        parts += [f'has extra actions: {" and ".join(excess)}'] if excess else []
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
            raise self._Fault(f'device {device}: {action} comes before {needed}, which it needs')

  # Time.

  def InOrder(self) -> Iterator[tuple[int, Action]]:
    """Yields (device, action) for all actions, in an order in which they can run.

    The actions of a device keep their order, and no action comes before its dependencies. Assumes
    that the schedule has all the actions that others depend on, as `Validate` checks.

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
    """Returns an error that describes a cycle of devices that wait for each other."""
    # From any stuck device, follow the device that it waits for until a device repeats.
    device = next(d for d, row in enumerate(self.actions) if position[d] < len(row))
    waits: dict[int, str] = {}
    while device not in waits:
      action = self.actions[device][position[device]]
      needed = next(n for n in self.Dependencies(action) if n not in done)
      waits[device] = f'device {device} is at {action} and waits for {needed}'
      device = self.stage_to_device[needed.stage]
    cycle = list(waits.values())[list(waits).index(device) :]
    return self._Fault(f'deadlock: {"; ".join(cycle)}')

  def Timeline(
    self, durations: Mapping[Kind, float] | None = None
  ) -> tuple[tuple[tuple[float, float, Action], ...], ...]:
    """Returns (start, end, action) for all actions of each device, as early as possible.

    Transfers take no time. `simulator` has a more detailed model.

    Args:
      durations: {kind: time > 0}; other kinds take one unit of time (V two).

    Raises:
      ValueError: a duration is not positive, or the schedule is invalid.
    """
    self.Validate()
    durations = {Kind(kind): time for kind, time in (durations or {}).items()}
    for kind, time in durations.items():
      if not time > 0:
        raise ValueError(f'Duration of {kind.value}: expected a positive number, got {time!r}')
    durations = {**_UNIT_DURATIONS, **durations}
    clock: list[float] = [0] * self.num_devices
    times: dict[Action, tuple[float, float]] = {}
    for device, action in self.InOrder():
      start = max([clock[device], *(times[needed][1] for needed in self.Dependencies(action))])
      clock[device] = start + durations[action.kind]
      times[action] = (start, clock[device])
    return tuple(tuple((*times[action], action) for action in row) for row in self.actions)

  def EmissionOrder(self) -> tuple[Action, ...]:
    """Returns all actions in one order that respects dependencies and each device's order.

    This is the order of start times if every action takes one unit (V two), lower devices first, so
    that actions that run at the same time are next to each other.
    """
    starts = [(start, d, a) for d, row in enumerate(self.Timeline()) for start, _, a in row]
    return tuple(action for _, _, action in sorted(starts, key=lambda item: item[:2]))

  def Picture(self, durations: Mapping[Kind, int] | None = None) -> str:
    """Draws the schedule like figure 2 of the GPipe paper: rows are devices, columns time ticks.

    Actions are drawn without their stage (`F0`) if each device has the stage of its number. Copies
    are drawn below the devices, when they start.

    Args:
      durations: {kind: ticks}, whole numbers; other kinds take one tick (V two).

    Raises:
      ValueError: a duration is not a positive whole number, or the schedule is invalid.
    """
    for kind, time in (durations or {}).items():
      if int(time) != time:
        raise ValueError(f'Picture counts in ticks: {kind}: expected a whole number, got {time!r}')
    rows: dict[str, list[tuple[float, float, str]]] = {}
    copies: dict[str, dict[float, str]] = {}
    for device, row in enumerate(self.Timeline(durations)):
      rows[f'device {device}'] = []
      for start, end, action in row:
        if action.kind not in actions.COPIES:
          rows[f'device {device}'].append((start, end, self.Label(action)))
          continue
        # Copies that start at the same time share a tick.
        labels = copies.setdefault(f'copies {device}', {})
        labels[start] = '+'.join(filter(None, (labels.get(start), self.Label(action))))
    for name, labels in copies.items():
      rows[name] = [(start, start + 1, label) for start, label in labels.items()]
    return timeline_text.DrawTicks(list(rows.values()), list(rows))

  def Label(self, action: Action) -> str:
    """Returns the text of an action in a picture: `F0` if stage k is on device k for all k."""
    simple = self.stage_to_device == tuple(range(self.num_devices))
    return str(action).removeprefix(str(action.stage)) if simple else str(action)

  # Memory.

  def PeakActivations(self) -> tuple[int, ...]:
    """Returns for each stage the most micro-batches whose activations it holds at one time.

    A stage holds a micro-batch from the start of F to the end of B (of W if the backward is split),
    during V, and in a schedule without gradients during F; not while the host has them, after O and
    before L. With re-materialisation this is the number of stage inputs.
    """
    held = [0] * self.num_stages
    peak = [0] * self.num_stages
    for row in self.actions:
      for action, change in self.Holdings(row):
        held[action.stage] += change
        peak[action.stage] = max(peak[action.stage], held[action.stage])
    return tuple(peak)

  def DevicePeakActivations(self) -> tuple[int, ...]:
    """Returns for each device the most (stage, micro-batch) pairs that it holds at one time.

    This is less than the sum over its stages if their peaks are at different times.
    """
    changes = ((change for _, change in self.Holdings(row)) for row in self.actions)
    return tuple(max(itertools.accumulate(c), default=0) for c in changes)

  def Holdings(self, row: Iterable[Action]) -> Iterator[tuple[Action, int]]:
    """Yields (action, 1) when a stage starts to hold a micro-batch, (action, -1) when it stops."""
    for action in actions.WithEndsOfCopies(row):
      if action.kind in (*_MAKE_FORWARD, Kind.LOAD):
        yield action, 1
      if self.forward_only or action.kind in (*_FREE, Kind.OFFLOAD):
        yield action, -1


def IsPositiveInteger(value: object) -> bool:
  """Whether the value can be a count of stages, micro-batches or devices."""
  return isinstance(value, int) and not isinstance(value, bool) and value >= 1
