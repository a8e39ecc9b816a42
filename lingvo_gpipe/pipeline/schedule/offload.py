# SPDX-License-Identifier: Apache-2.0
"""Offload: what a stage keeps of a micro-batch from F to B waits in the memory of the host.

`WithOffload` adds the copies to any schedule (PipeOffload, arXiv:2503.01328). O follows F, and L
goes some computations ahead of B or I, here one:

    computations   F0 F1 F2 F3 F4 B0 ...
    copies of 0      O0       L0            the device holds 0 in F0, F1, F4 and B0

A copy to the host lasts no longer than the next computation, and then the one after that waits for
it (`actions.WithEndsOfCopies`). So a device never holds more than the order of its actions says,
however slow the link is. Offloading saves nothing if F and B have fewer than three computations
between them. A copy from the host that takes longer than one computation costs no time if L is
further ahead, but then the device holds the tensors for longer.

Several sets of (stage, micro-batch) reduce the peak of a device to its least. `WithOffload` takes
one of the smallest: the pairs whose B is furthest away.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Sequence

from lingvo_gpipe.pipeline.schedule import actions
from lingvo_gpipe.pipeline.schedule import schedule as schedule_lib

Action = actions.Action
Kind = actions.Kind

_BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRADIENT)


@dataclasses.dataclass(frozen=True)
class _Stay:
  """The time that a (stage, micro-batch) may be away, in positions of computations.

  Attributes:
    forward: the position of F on the device.
    load: the position of the computation that L runs alongside.
  """

  forward: int
  load: int

  @property
  def away(self) -> range:
    """The computations in which the host has the tensors, if they are offloaded."""
    return range(self.forward + 2, self.load)  # O lasts until the end of the next one after F.


def WithOffload(
  schedule: schedule_lib.Schedule, share: float = 1.0, *, ahead: int = 1
) -> schedule_lib.Schedule:
  """Returns the schedule with copies to the host and back.

  Args:
    schedule: a valid schedule without copies. Slices of the vocabulary are never offloaded: their B
      soon follows their F.
    share: the greatest share of the (stage, micro-batch) of a device to offload, from 0 to 1. Fewer
      are offloaded if more would not lower the most that the device holds.
    ahead: the number of computations that L is ahead of B or I.

  Raises:
    ValueError: the share is not between 0 and 1, ahead is not positive, or the schedule has copies.
  """
  if not 0 <= share <= 1:
    raise ValueError(f'offload: expected a share between 0 and 1, got {share!r}')
  if not schedule_lib.IsPositiveInteger(ahead):
    raise ValueError(f'offload: expected ahead to be a positive integer, got {ahead!r}')
  if not share or schedule.forward_only:
    return schedule
  if schedule.offloaded:
    raise ValueError(
      f'offload: schedule {schedule.name!r} has copies to the host already; leave offload at 0'
    )
  num_stages = schedule.num_layer_stages
  rows = [_WithCopies(row, num_stages, share, ahead) for row in schedule.actions]
  return dataclasses.replace(schedule, actions=rows)


def _WithCopies(row: Sequence[Action], num_stages: int, share: float, ahead: int) -> list[Action]:
  """Returns the actions of a device with copies of stages below `num_stages`."""
  forwards: dict[tuple[int, int], int] = {}
  backwards: dict[tuple[int, int], int] = {}
  changes = [0] * (len(row) + 1)  # In the number of micro-batches on the device.
  for position, action in enumerate(row):
    key = action.stage, action.micro_batch
    if action.stage >= num_stages:
      continue
    if action.kind is Kind.FORWARD:
      forwards[key] = position
      changes[position] += 1
    if action.kind in _BACKWARDS:
      backwards[key] = position
    if action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT):
      changes[position + 1] -= 1
  stays = [_Stay(i, backwards[key] - ahead) for key, i in forwards.items()]
  held = list(itertools.accumulate(changes[:-1]))
  most_copies = int(share * len(stays) + 1e-9)
  low, high = 0, max(held, default=0)
  chosen: list[_Stay] = []
  while low < high:
    most = (low + high) // 2
    attempt = _Choose(stays, held, most)
    if attempt is None or len(attempt) > most_copies:
      low = most + 1
    else:
      high, chosen = most, attempt
  offloaded = {stay.forward for stay in chosen}
  loads = {stay.load: row[stay.forward] for stay in chosen}
  result = []
  for position, action in enumerate(row):
    if position in loads:
      result.append(dataclasses.replace(loads[position], kind=Kind.LOAD))
    result.append(action)
    if position in offloaded:
      result.append(dataclasses.replace(action, kind=Kind.OFFLOAD))
  return result


def _Choose(stays: Sequence[_Stay], held: Sequence[int], most: int) -> list[_Stay] | None:
  """Returns the fewest stays whose offload leaves at most `most` at any time, or None.

  Goes through the computations. If the device holds too many in one, offloads the last to return.

  Args:
    stays: all that could be offloaded, in the order of their F.
    held: for each computation the number that the device holds without offload.
    most: the limit.
  """
  chosen: list[_Stay] = []
  later = iter(sorted((s for s in stays if s.away), key=lambda s: s.away.start))
  following = next(later, None)
  candidates: list[tuple[int, int, _Stay]] = []  # A heap, the latest return first.
  num_away = 0
  back = [0] * (len(held) + 1)
  for position, count in enumerate(held):
    num_away -= back[position]
    while following is not None and following.away.start <= position:
      heapq.heappush(candidates, (-following.away.stop, following.forward, following))
      following = next(later, None)
    while count - num_away > most:
      if not candidates:
        return None
      stay = heapq.heappop(candidates)[2]
      if stay.away.stop <= position:
        return None  # All other candidates return even earlier.
      chosen.append(stay)
      num_away += 1
      back[stay.away.stop] += 1
  return chosen
