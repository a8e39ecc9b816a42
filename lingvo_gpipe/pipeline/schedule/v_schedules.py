# SPDX-License-Identifier: Apache-2.0
"""V schedules with a chosen amount of memory: two stages per device, down the devices and up again.

A micro-batch runs through device d four times: F of stage d (down), F of stage 2K-1-d (up), I of
the second and I of the first. `v_half` and `v_min` repeat one block of these times every six units,
because a micro-batch takes a device two F, two I and two W ("Pipeline Parallelism with Controllable
Memory", Qi et al. 2024, arXiv:2405.15362):

    down  F at time step * d                     I, the last of the four
    up    F, from device K-1 to 0                I, from device 0 to K-1

A device holds an activation from its F to its W. The shorter the steps from device to device, the
less it holds. All steps are 1 in `v_min`; in `v_half` they are 1, 2, 1 and 2 in the four rows.
Between rows a micro-batch waits so that the four times of a device differ modulo 6.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from lingvo_gpipe.pipeline.schedule import actions, orders, schedules

Action = actions.Action
Kind = actions.Kind
Schedule = schedules.Schedule

_PERIOD = 6


@schedules.Register('v_min')
def VMin(num_stages: int, num_micro_batches: int, num_devices: int) -> Schedule:
  """The least memory, about a third of what `1f1b` needs.

  A device holds 2 ceil((K+2)/3) activations of stages of half the size.
  A device idles 4K-5 of 6M+4K-5 units if F = I = W, and longer if they differ.
  """
  orders.CheckTwoStagesADevice('v_min', num_stages, num_devices)
  waits = (3, 1, 3) if num_devices % 3 == 0 else (1, 1, 1)
  most_held = 2 * -(-(num_devices + 2) // 3)
  return _RepeatBlock('v_min', num_stages, num_micro_batches, (1, 1, 1, 1), waits, most_held)


@schedules.Register('v_half')
def VHalf(num_stages: int, num_micro_batches: int, num_devices: int) -> Schedule:
  """About half of the memory that `1f1b` needs.

  A device holds 2 (K div 2 + 1) activations of stages of half the size.
  A device idles 3K-4 units (3K-5 if K is even and above 2) besides 6M of work if F = I = W, and
  longer if they differ.
  """
  orders.CheckTwoStagesADevice('v_half', num_stages, num_devices)
  waits = (1, 1, 2) if num_devices % 2 else (4, 1, 5)
  most_held = 2 * (num_devices // 2 + 1)
  return _RepeatBlock('v_half', num_stages, num_micro_batches, (1, 2, 1, 2), waits, most_held)


@schedules.Register('dualpipe_v')
def DualPipeV(num_stages: int, num_micro_batches: int, num_devices: int) -> Schedule:
  """DeepSeek's order: a forward of one direction next to a whole backward of the other one.

  DeepSeek runs such a pair at the same time, so that each hides the transfers of the other. A
  device runs one action at a time, so F comes first here. A device holds 2K+1 half stages and idles
  K-1 units besides 6M of work. The order is complete from 2K micro-batches on; for fewer, it is the
  order for 2K without the surplus ones.
  """
  orders.CheckTwoStagesADevice('dualpipe_v', num_stages, num_devices)
  total = max(num_micro_batches, num_stages)
  rows = []
  for d in range(num_devices):
    down, up, row = d, num_stages - 1 - d, orders.Row()
    after = num_devices - 1 - d  # The devices below this one in the V.
    row.Add(down, 'FF' * after)
    for _ in range(d + 1):
      row.Add(down, 'F')
      row.Add(up, 'F')
    row.Add(up, 'IWF' * after)
    while row.Count(up, Kind.FORWARD) < total:
      if row.Count(down, Kind.FORWARD) < total:
        row.Add(down, 'F')
      row.Add(up, 'B')
      row.Add(up, 'F')
      row.Add(down, 'B')
    # The last d+1 backwards of each stage: whole ones first, then I, whose W come at the end.
    tail = [stage for _ in range(d + 1) for stage in (up, down)]
    for stage in tail[: d + 1]:
      row.Add(stage, 'B')
    delayed = tail[d + 1 :]
    for stage in delayed:
      row.Add(stage, 'I')
    for _ in range(after):
      row.Add(delayed.pop(0), 'W')
      row.Add(down, 'I')
      delayed.append(down)
    for stage in delayed:
      row.Add(stage, 'W')
    rows.append(row.actions)
  rows = orders.Below(rows, num_micro_batches)
  return Schedule('dualpipe_v', num_stages, num_micro_batches, rows, orders.VOwners(num_devices))


def _RepeatBlock(
  name: str,
  num_stages: int,
  num_micro_batches: int,
  steps: Sequence[int],
  waits: Sequence[int],
  most_held: int,
) -> Schedule:
  """Returns the schedule that repeats a block for each micro-batch, W in the gaps.

  Args:
    name: the schedule's name.
    num_stages: S, twice the number of devices.
    num_micro_batches: M.
    steps: the time from one device to the next in each of the four rows of the block.
    waits: the time between the rows.
    most_held: the most activations, of stages and micro-batches, that a device may hold.
  """
  num_devices = num_stages // 2
  rows = []
  for d, times in enumerate(_Block(num_devices, steps, waits)):
    up = num_stages - 1 - d
    block = list(zip((d, up, up, d), [Kind.FORWARD] * 2 + [Kind.INPUT_GRADIENT] * 2, strict=True))
    rows.append(
      [
        Action(stage, kind, m)
        for _, m, stage, kind in sorted(
          (time + _PERIOD * m, m, stage, kind)
          for m in range(num_micro_batches)
          for time, (stage, kind) in zip(times, block, strict=True)
        )
      ]
    )
  rows = _FillIn(rows, num_stages, most_held)
  return Schedule(name, num_stages, num_micro_batches, rows, orders.VOwners(num_devices))


def _Block(num_devices: int, steps: Sequence[int], waits: Sequence[int]) -> list[list[int]]:
  """Returns for each device the times of its F, F, I and I of one micro-batch."""
  block: list[list[int]] = [[] for _ in range(num_devices)]
  time, order = 0, list(range(num_devices))
  for step, wait in zip(steps, (0, *waits), strict=True):
    time += wait
    for i, d in enumerate(order):
      time += step * (i > 0)
      block[d].append(time)
    order.reverse()
  return block


def _FillIn(
  rows: Sequence[Sequence[Action]], num_stages: int, most_held: int
) -> list[list[Action]]:
  """Returns the rows with W, as played with actions of one unit of time.

  A device runs its next F or I if that is ready, and an F only if the device may hold one more.
  Otherwise it runs the oldest W, if there is one.
  """
  ends: dict[Action, int] = {}
  result: list[list[Action]] = [[] for _ in rows]
  waiting: list[collections.deque[Action]] = [collections.deque() for _ in rows]
  positions, held = [0] * len(rows), [0] * len(rows)
  missing, time = 6 * len(rows[0]) // 4 * len(rows), 0
  while missing:
    for d, row in enumerate(rows):
      action = row[positions[d]] if positions[d] < len(row) else None
      if action and _IsReady(action, num_stages, ends, time):
        if action.kind is Kind.INPUT_GRADIENT or held[d] < most_held:
          positions[d] += 1
        else:
          action = None
      else:
        action = None
      if action is None and waiting[d]:
        action = waiting[d].popleft()
      if action is None:
        continue
      if action.kind is Kind.INPUT_GRADIENT:
        waiting[d].append(Action(action.stage, Kind.WEIGHT_GRADIENT, action.micro_batch))
      held[d] += (action.kind is Kind.FORWARD) - (action.kind is Kind.WEIGHT_GRADIENT)
      ends[action] = time + 1
      result[d].append(action)
      missing -= 1
    time += 1
  return result


def _IsReady(action: Action, num_stages: int, ends: dict[Action, int], time: int) -> bool:
  stage, m = action.stage, action.micro_batch
  if action.kind is Kind.FORWARD:
    return stage == 0 or ends.get(Action(stage - 1, Kind.FORWARD, m), time + 1) <= time
  if stage == num_stages - 1:
    return ends.get(Action(stage, Kind.FORWARD, m), time + 1) <= time
  return ends.get(Action(stage + 1, Kind.INPUT_GRADIENT, m), time + 1) <= time
