# SPDX-License-Identifier: Apache-2.0
"""Devices of one host that share its cores: how long each takes for what it does, and when.

TensorFlow's threads belong to all CPU devices of a process. While all devices work, each has a core
to itself; while some idle, operations of an action that do not wait for each other run side by side
on the cores of those. Between the two a piece's time is in proportion to the number of others that
work, as for `device_description.Devices.Slowdown`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Piece(NamedTuple):
  """Something that a device does, and its times: while all devices work, while no other does."""

  slowed: float
  alone: float

  def Seconds(self, num_working: int, num_devices: int) -> float:
    """Its time while so many of the devices work; never longer than `slowed`."""
    idle = (num_devices - num_working) / (num_devices - 1) if num_devices > 1 else 1.0
    return self.slowed - max(self.slowed - self.alone, 0.0) * idle


@dataclasses.dataclass
class _Running:
  """A piece under way: its whole time and its end as long as the same number of devices work."""

  start: float
  seconds: float
  end: float


def Play(
  rows: Sequence[Sequence[Piece]],
  arrival: Callable[[int, int], float],
  ended: Callable[[int, int, float], None],
) -> list[list[tuple[float, float]]]:
  """For each device the start and the end of each of its pieces, one after the other.

  Args:
    rows: for each device its pieces, in order.
    arrival: (device, index) -> from when on a device that is free can begin that piece; infinite as
      long as other pieces have to end before that is known.
    ended: (device, index, time) is told of each piece that ends.
  """
  times: list[list[tuple[float, float]]] = [[] for _ in rows]
  running: dict[int, _Running] = {}
  now = 0.0
  while True:
    arrivals = []
    for device, row in enumerate(rows):
      if device not in running and len(times[device]) < len(row):
        arrives = arrival(device, len(times[device]))
        arrivals.append(arrives)
        if arrives <= now:
          slowed = row[len(times[device])].slowed
          running[device] = _Running(now, slowed, now + slowed)
    for device, piece in running.items():
      seconds = rows[device][len(times[device])].Seconds(len(running), len(rows))
      if seconds != piece.seconds:
        piece.end = now + (piece.end - now) / piece.seconds * seconds
        piece.seconds = seconds
    coming = [piece.end for piece in running.values()] + [time for time in arrivals if time > now]
    now = min(coming, default=math.inf)
    if now == math.inf:
      return times
    for device in [device for device, piece in running.items() if piece.end <= now]:
      times[device].append((running.pop(device).start, now))
      ended(device, len(times[device]) - 1, now)
