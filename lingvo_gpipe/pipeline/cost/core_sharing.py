# SPDX-License-Identifier: Apache-2.0
"""Simulates devices of one host that share its cores.

All CPU devices of a process share TensorFlow's threads. While all devices are busy, each has one
core. While some are idle, independent operations of an action run in parallel on the idle devices'
cores. In between, the time of a piece of work is linear in the number of other busy devices, as in
`device_description.Devices.Slowdown`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Piece(NamedTuple):
  """A piece of work of a device: its time while all devices are busy, and while no other is."""

  slowed: float
  alone: float

  def Seconds(self, num_working: int, num_devices: int) -> float:
    """Returns the time while `num_working` devices are busy; at most `slowed`."""
    idle = (num_devices - num_working) / (num_devices - 1) if num_devices > 1 else 1.0
    return self.slowed - max(self.slowed - self.alone, 0.0) * idle


@dataclasses.dataclass
class _Running:
  """A piece in progress: its total time, and its end if the number of busy devices stays."""

  start: float
  seconds: float
  end: float


def Play(
  rows: Sequence[Sequence[Piece]],
  arrival: Callable[[int, int], float],
  ended: Callable[[int, int, float], None],
) -> list[list[tuple[float, float]]]:
  """Returns the start and end of all pieces of each device.

  The simulation steps from event to event: a piece starts, ends, or becomes available. At each
  event the remaining times of all running pieces are scaled to the new number of busy devices.

  Args:
    rows: for each device its pieces, in order.
    arrival: (device, index) -> the earliest time at which the device can start that piece; infinite
      while the time depends on pieces that have not ended.
    ended: called with (device, index, time) when a piece ends.
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
