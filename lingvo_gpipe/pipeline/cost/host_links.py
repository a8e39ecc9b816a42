# SPDX-License-Identifier: Apache-2.0
"""Links between devices and the memory of their hosts: when the copies O and L begin and end."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

from lingvo_gpipe.pipeline.schedule import actions

Action = actions.Action
Kind = actions.Kind


@dataclasses.dataclass(frozen=True)
class HostLink:
  """The link of one device to the memory of its host; both directions work at the same time.

  Attributes:
    bandwidth: bytes per unit of time in each direction, while all devices of the host use theirs.
    latency: the time from the end of a copy until its tensors can be used.
  """

  bandwidth: float
  latency: float = 0.0

  def __post_init__(self) -> None:
    if not self.bandwidth > 0 or not self.latency >= 0:
      raise ValueError(f'host link: expected bandwidth > 0 and latency >= 0, got {self}')


class HostLinks:
  """The copies of a step, each of which waits for the one before it in its direction.

  A copy begins when the device has ended the action before it. The device waits for copies to the
  host as `actions.WithEndsOfCopies` says, and before B or I for the copy back.
  """

  def __init__(self, duration: Callable[[Action], float], latency: float = 0.0) -> None:
    """Begins with idle links.

    Args:
      duration: returns the time that a copy occupies the link.
      latency: see `HostLink`.
    """
    self._duration = duration
    self._latency = latency
    self._free: dict[tuple[int, Kind], float] = {}  # {(device, direction): when it is free}.
    self._ends: dict[Action, float] = {}  # {copy: when its tensors can be used}.
    # {device: when its copies to the host end}: of copies since its last action, and before it.
    self._running: dict[int, float] = collections.defaultdict(float)
    self._ending: dict[int, float] = collections.defaultdict(float)

  def Copy(self, device: int, action: Action, time: float) -> tuple[float, float]:
    """Starts a copy that the device reaches at `time`; returns its start and end."""
    key = device, action.kind
    start = max(time, self._free.get(key, 0.0))
    if action.kind is Kind.LOAD:
      offload = dataclasses.replace(action, kind=Kind.OFFLOAD)
      start = max(start, self._ends[offload], self._ending[device])
    self._free[key] = end = start + self._duration(action)
    self._ends[action] = end + self._latency
    if action.kind is Kind.OFFLOAD:
      self._running[device] = max(self._running[device], self._ends[action])
    return start, end

  def Ready(self, device: int, action: Action) -> float:
    """Returns when the device's next action may start, as far as copies matter."""
    load = dataclasses.replace(action, kind=Kind.LOAD)
    # Only the first backward action of a micro-batch waits for the copy; the others run later
    # anyway.
    ready = max(self._ending[device], self._ends.get(load, 0.0))
    self._ending[device] = self._running.pop(device, 0.0)
    return ready
