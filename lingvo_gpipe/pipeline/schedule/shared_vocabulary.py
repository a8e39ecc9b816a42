# SPDX-License-Identifier: Apache-2.0
"""Shares out the vocabulary in any schedule: adds slices of the softmax on all devices.

The last stage of a language model has the softmax, whose work grows with the vocabulary. Shared
out, each device has a slice of the classes (Yeung et al. 2024, arXiv:2411.05288). Every slice waits
for the last stage with layers, and that stage's backward for every slice, so a device that keeps
its order would idle. Here a device that is free runs the first action of these that is ready:

1. an action of its slice, because all devices wait for it;
2. the first of the other actions, in the order of the given schedule. F comes before its turn only
   if its stage then holds at most `extra` micro-batches more than in the given schedule.

Of the numbers 0, 1 and 2 for `extra` the smallest one is taken that makes the step shortest.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq

from lingvo_gpipe.pipeline.schedule import actions
from lingvo_gpipe.pipeline.schedule import schedule as schedule_lib

Action = actions.Action
Kind = actions.Kind
Schedule = schedule_lib.Schedule

_MOST_EXTRA = 2
# Typical durations of the actions of a stage; an action of a slice takes half as long.
_DURATIONS = {
  Kind.FORWARD: 2,
  Kind.BACKWARD: 4,
  Kind.INPUT_GRADIENT: 2,
  Kind.WEIGHT_GRADIENT: 2,
}


def Share(schedule: Schedule) -> Schedule:
  """Returns the schedule with a slice of the vocabulary on each device, as its last stages.

  V of a fused last stage becomes F and B, because the loss runs between them. Slices do not split
  their backward, because between I and W they would keep logits.

  Args:
    schedule: a valid schedule with gradients, without slices.
  """
  draft = _WithSlices(schedule)
  best: tuple[int, list[list[Action]]] | None = None
  for extra in range(_MOST_EXTRA + 1):
    candidate = _Order(draft, [held + extra for held in schedule.PeakActivations()])
    if best is None or candidate[0] < best[0]:
      best = candidate
  assert best is not None
  return dataclasses.replace(draft, actions=best[1]).Validate()


def _WithSlices(schedule: Schedule) -> Schedule:
  """Returns the schedule with the actions of slices at the beginning of each device."""
  rows = [[part for a in row for part in _Unfused(a)] for row in schedule.actions]
  kinds, micro_batches = (Kind.FORWARD, Kind.BACKWARD), range(schedule.num_micro_batches)
  slices = [
    [Action(schedule.num_stages + device, kind, m) for kind in kinds for m in micro_batches]
    for device in range(schedule.num_devices)
  ]
  return Schedule(
    f'{schedule.name}, vocabulary shared',
    schedule.num_stages + schedule.num_devices,
    schedule.num_micro_batches,
    [of_slice + row for of_slice, row in zip(slices, rows, strict=True)],
    (*schedule.stage_to_device, *range(schedule.num_devices)),
    schedule.num_devices,
  )


def _Unfused(action: Action) -> tuple[Action, ...]:
  if action.kind is not Kind.FORWARD_BACKWARD:
    return (action,)
  return tuple(dataclasses.replace(action, kind=k) for k in (Kind.FORWARD, Kind.BACKWARD))


def _Order(draft: Schedule, most_held: list[int]) -> tuple[int, list[list[Action]]]:
  """Returns the time of the step and the actions of each device, in the order that they run in.

  Args:
    draft: the actions of each device, in any order of slices and layers.
    most_held: for each stage with layers the most micro-batches that it may hold.
  """
  is_slice = [k >= draft.num_layer_stages for k in range(draft.num_stages)]
  rank: dict[Action, tuple[int, int]] = {}
  # For each device the actions of each stage and kind, which keep their order.
  queues: list[dict[tuple[int, Kind], collections.deque[Action]]] = []
  for row in draft.actions:
    queues.append({})
    for i, a in enumerate(row):
      rank[a] = (int(not is_slice[a.stage]), i)
      queues[-1].setdefault((a.stage, a.kind), collections.deque()).append(a)
  held = [0] * draft.num_stages
  rows: list[list[Action]] = [[] for _ in queues]
  done: set[Action] = set()
  running: list[tuple[int, int, Action]] = []  # (end, device, action).
  busy = [False] * len(queues)
  time = 0

  def IsReady(a: Action) -> bool:
    if a.kind is Kind.FORWARD and not is_slice[a.stage] and held[a.stage] >= most_held[a.stage]:
      return False
    return all(needed in done for needed in draft.Dependencies(a))

  while True:
    for device, of_device in enumerate(queues):
      if busy[device]:
        continue
      ready = [q[0] for q in of_device.values() if q and IsReady(q[0])]
      if not ready:
        continue
      action = min(ready, key=rank.__getitem__)
      of_device[action.stage, action.kind].popleft()
      for a, change in draft.Holdings([action]):
        held[a.stage] += change
      rows[device].append(action)
      duration = _DURATIONS[action.kind] // (2 if is_slice[action.stage] else 1)
      heapq.heappush(running, (time + duration, device, action))
      busy[device] = True
    if not running:
      return time, rows
    time = running[0][0]
    while running and running[0][0] == time:
      _, device, action = heapq.heappop(running)
      done.add(action)
      busy[device] = False
