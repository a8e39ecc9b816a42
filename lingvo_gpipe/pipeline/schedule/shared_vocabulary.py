# SPDX-License-Identifier: Apache-2.0
"""Shares out the vocabulary in any schedule: adds slices of the softmax on all devices.

The last stage of a language model has the softmax, whose work grows with the vocabulary. Shared
out, each device has a slice of the classes (Yeung et al. 2024, arXiv:2411.05288). All slices wait
for the last stage with layers, and its backward waits for all of them, while each device is in the
middle of another action. So there must be time between these four:

    F of the last stage  ──>  F of slices  ──>  B of slices  ──>  B of the last stage

Let P be the time that a device works for one micro-batch, with its slice. The times of the given
schedule are stretched to make room for the slices. The slices' B are due P / 2 after their F, and
all backward actions of stages P later than before. Each device runs its actions in this order. A
stage thus holds about one micro-batch more.
"""

from __future__ import annotations

import dataclasses

from lingvo_gpipe.pipeline.schedule import actions
from lingvo_gpipe.pipeline.schedule import schedule as schedule_lib

Action = actions.Action
Kind = actions.Kind
Schedule = schedule_lib.Schedule

# Typical times. The order depends little on them.
_SECONDS = {
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
  rows = [[part for a in row for part in _SplitFused(a)] for row in schedule.actions]
  times = {
    action: (start, end)
    for row in dataclasses.replace(schedule, actions=rows).Timeline(_SECONDS)
    for start, end, action in row
  }
  num_micro_batches = schedule.num_micro_batches
  busiest = max(sum(_SECONDS[a.kind] for a in row) for row in rows)
  # The order depends on times relative to P. If P is twice the time of the busiest device for the
  # whole step, all of them are integers.
  stretch, period = 2 * num_micro_batches, 2 * busiest
  # When an action is due, and its rank among actions due at the same time.
  due = {
    action: (stretch * start, 0) if action.kind is Kind.FORWARD else (stretch * start + period, 3)
    for action, (start, _) in times.items()
  }
  for device, row in enumerate(rows):
    stage = schedule.num_stages + device
    for m in range(num_micro_batches):
      _, end = times[Action(schedule.num_stages - 1, Kind.FORWARD, m)]
      due[Action(stage, Kind.FORWARD, m)] = (stretch * end, 1)
      due[Action(stage, Kind.BACKWARD, m)] = (stretch * end + busiest, 2)
      row += [Action(stage, Kind.FORWARD, m), Action(stage, Kind.BACKWARD, m)]
    row.sort(key=due.__getitem__)
  return Schedule(
    f'{schedule.name}, vocabulary shared',
    schedule.num_stages + schedule.num_devices,
    num_micro_batches,
    rows,
    (*schedule.stage_to_device, *range(schedule.num_devices)),
    schedule.num_devices,
  ).Validate()


def _SplitFused(action: Action) -> tuple[Action, ...]:
  if action.kind is not Kind.FORWARD_BACKWARD:
    return (action,)
  return tuple(dataclasses.replace(action, kind=k) for k in (Kind.FORWARD, Kind.BACKWARD))
