# SPDX-License-Identifier: Apache-2.0
"""Series of actions from which schedules are put together, and the placements of their stages."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Sequence

from lingvo_gpipe.pipeline.schedule import actions

Action = actions.Action
Kind = actions.Kind


class Row:
  """The actions of one device; a stage takes its micro-batches in turn, separately for each kind.

  Attributes:
    actions: the actions so far.
  """

  def __init__(self) -> None:
    self.actions: list[Action] = []
    self._counts: collections.Counter[tuple[int, Kind]] = collections.Counter()

  def Add(self, stage: int, kinds: str) -> None:
    """Appends one action for each letter, with the stage's next micro-batch of that kind.

    Args:
      stage: the stage.
      kinds: letters of `Kind`. B counts as I and W.
    """
    for kind in map(Kind, kinds):
      parts = (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT) if kind is Kind.BACKWARD else (kind,)
      self.actions.append(Action(stage, kind, self._counts[stage, parts[0]]))
      self._counts.update((stage, part) for part in parts)

  def Count(self, stage: int, kind: Kind) -> int:
    """Returns the number of micro-batches that the stage has run with this kind of action."""
    return self._counts[stage, kind]


def Series(stage: int, kind: Kind, micro_batches: Iterable[int]) -> list[Action]:
  """Returns the actions of one stage and kind for these micro-batches."""
  return [Action(stage, kind, m) for m in micro_batches]


def Rounds(
  kind: Kind, stages: Sequence[int], num_micro_batches: int, num_devices: int
) -> list[Action]:
  """Returns actions in rounds of K micro-batches, each round through all stages."""
  rounds = range(0, num_micro_batches, num_devices)
  return [a for r in rounds for k in stages for a in Series(k, kind, range(r, r + num_devices))]


def Alternate(
  forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int
) -> list[Action]:
  """Returns `warm_up` forwards, then a forward and a backward in turn, then the last backwards."""
  warm_up = min(warm_up, len(forwards))
  turns = zip(forwards[warm_up:], backwards, strict=False)
  cool_down = backwards[len(forwards) - warm_up :]
  return [*forwards[:warm_up], *itertools.chain.from_iterable(turns), *cool_down]


def DelayWeightGradients(row: Iterable[Action], delay: int) -> list[Action]:
  """Returns the row with the W of each I, which runs after the I that is `delay` later."""
  result: list[Action] = []
  waiting: collections.deque[Action] = collections.deque()
  for action in row:
    result.append(action)
    if action.kind is Kind.INPUT_GRADIENT:
      waiting.append(Action(action.stage, Kind.WEIGHT_GRADIENT, action.micro_batch))
      if len(waiting) > delay:
        result.append(waiting.popleft())
  return [*result, *waiting]


def Below(rows: Iterable[Iterable[Action]], num_micro_batches: int) -> list[list[Action]]:
  """Returns the rows without the actions of further micro-batches; the order stays valid."""
  return [[action for action in row if action.micro_batch < num_micro_batches] for row in rows]


# Placements: the device of each stage, and checks of the numbers.


def LoopOwners(num_stages: int, num_devices: int) -> list[int]:
  """Returns the devices if stage k is on device k mod K."""
  return [stage % num_devices for stage in range(num_stages)]


def VOwners(num_devices: int) -> list[int]:
  """Returns the devices if device k has stages k and 2K-1-k: down the devices and up again."""
  return [*range(num_devices), *reversed(range(num_devices))]


def CheckOneStageADevice(name: str, num_stages: int, num_devices: int) -> None:
  """Raises ValueError unless each device has one stage."""
  if num_devices != num_stages:
    raise ValueError(
      f'Schedule {name!r} needs one stage on each device, got {num_stages} stages for '
      f'{num_devices} devices; make them equal, or use a schedule with several stages per device: '
      'interleaved_1f1b or looped_bfs'
    )


def CheckTwoStagesADevice(name: str, num_stages: int, num_devices: int) -> None:
  """Raises ValueError unless each device has two stages."""
  if num_stages != 2 * num_devices:
    raise ValueError(
      f'Schedule {name!r} needs two stages on each device, got {num_stages} stages for '
      f'{num_devices} devices; make it {2 * num_devices} stages (stages_per_device 2), or use '
      '1f1b with one stage each'
    )


def CheckLoops(name: str, num_stages: int, num_devices: int, at_least: int) -> None:
  """Raises ValueError unless all devices have an equal number of stages, at least `at_least`."""
  if num_stages % num_devices or num_stages < at_least * num_devices:
    near = [num_stages // num_devices, -(-num_stages // num_devices)]
    sizes = sorted({max(v, at_least) * num_devices for v in near})
    raise ValueError(
      f'Schedule {name!r} needs the same number of stages on each device, at least {at_least}, got '
      f'{num_stages} stages for {num_devices} devices; make it {" or ".join(map(str, sizes))} '
      'stages, or use fewer devices' + (', or 1f1b with one stage each' if at_least > 1 else '')
    )


def CheckRounds(name: str, num_micro_batches: int, num_devices: int) -> None:
  """Raises ValueError unless the micro-batches are whole rounds of K."""
  if num_micro_batches % num_devices:
    below = num_micro_batches // num_devices * num_devices
    near = [below, below + num_devices] if below else [num_devices]
    distance = min(abs(num_micro_batches - m) for m in near)
    nearest_text = ' or '.join(str(m) for m in near if abs(num_micro_batches - m) == distance)
    raise ValueError(
      f'Schedule {name!r} needs a multiple of {num_devices} micro-batches, the number of '
      f'devices, got {num_micro_batches}; the nearest is {nearest_text}, and looped_bfs takes any '
      'number'
    )
