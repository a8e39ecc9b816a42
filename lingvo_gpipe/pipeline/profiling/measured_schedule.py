# SPDX-License-Identifier: Apache-2.0
"""A schedule as it was measured, and the same schedule as it should be with what was measured."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Mapping, Sequence

from lingvo_gpipe.pipeline.cost import simulator
from lingvo_gpipe.pipeline.schedule import actions, step_work
from lingvo_gpipe.pipeline.schedule import schedule as schedule_lib

Action = actions.Action
Kind = actions.Kind


@dataclasses.dataclass(frozen=True)
class Measured:
  """The actions of one mini-batch.

  Attributes:
    schedule: what ran.
    step: the number of the training step.
    times: {action: (start, end)}, with any origin.
  """

  schedule: schedule_lib.Schedule
  step: int
  times: Mapping[Action, tuple[float, float]]

  @functools.cached_property
  def timeline(self) -> tuple[tuple[simulator.Span, ...], ...]:
    """For each device what it did, in order of time, which begins at 0."""
    origin = min(start for start, _ in self.times.values())
    rows: list[list[simulator.Span]] = [[] for _ in range(self.schedule.num_devices)]
    for action, (start, end) in sorted(self.times.items(), key=lambda item: item[1]):
      device = self.schedule.stage_to_device[action.stage]
      rows[device].append(simulator.Span(device, start - origin, end - origin, action))
    return tuple(map(tuple, rows))

  @property
  def makespan(self) -> float:
    """From the start of the first action to the end of the last."""
    return max(span.end for row in self.timeline for span in row)

  @property
  def bubble(self) -> float:
    """The share of that time in which the devices do nothing."""
    busy = sum(span.end - span.start for row in self.timeline for span in row)
    return 1.0 - busy / (self.makespan * self.schedule.num_devices) if self.makespan else 0.0


def MeanTimes(measured: Sequence[Measured]) -> dict[tuple[Kind, int], float]:
  """{(kind, stage): the mean time of such actions}, what they recompute included."""
  found: dict[tuple[Kind, int], list[float]] = {}
  for one in measured:
    for action, (start, end) in one.times.items():
      found.setdefault((action.kind, action.stage), []).append(end - start)
  return {key: statistics.fmean(times) for key, times in sorted(found.items())}


def Planned(
  measured: Sequence[Measured], remat_policy: str, trained: Sequence[bool]
) -> simulator.Result:
  """The schedule, played with the mean times of its actions: no device waits but for another one.

  Args:
    measured: mini-batches of one schedule, at least one.
    remat_policy: the policy under which they ran. Where only some actions of a kind recompute,
      these have a mean of their own.
    trained: for each stage whether it has weights that are trained.
  """
  schedule = measured[0].schedule
  work = step_work.StepWork(schedule, remat_policy, trained)
  is_repeated = {a: work.Repeats(a) for row in schedule.actions for a in row}
  halves = [
    MeanTimes(
      [
        dataclasses.replace(
          one, times={a: t for a, t in one.times.items() if is_repeated.get(a) == repeats}
        )
        for one in measured
      ]
    )
    for repeats in (False, True)
  ]
  plain, repeating = halves

  def OfStages(kind: Kind) -> list[float]:
    keys = [(kind, k) for k in range(schedule.num_stages)]
    return [plain.get(key, repeating.get(key, 0.0)) for key in keys]

  backward, weights = OfStages(Kind.BACKWARD), OfStages(Kind.WEIGHT_GRADIENT)
  recompute = [0.0] * schedule.num_stages
  for key, seconds in repeating.items():
    recompute[key[1]] = max(seconds - plain.get(key, seconds), 0.0)
  costs = simulator.Costs(
    forward=OfStages(Kind.FORWARD),
    recompute=recompute,
    input_gradient=OfStages(Kind.INPUT_GRADIENT),
    weight_gradient=weights,
    # Without an I, W is all of the backward.
    backward=[b or w for b, w in zip(backward, weights, strict=True)],
    fused=OfStages(Kind.FORWARD_BACKWARD),
  )
  return simulator.Simulate(schedule, costs, remat_policy=remat_policy, trained=trained)


def Doubts(measured: Sequence[Measured], remat_policy: str, trained: Sequence[bool]) -> list[str]:
  """What the times themselves tell against them, a text each.

  Args:
    measured: mini-batches.
    remat_policy: the policy under which they ran.
    trained: for each stage whether it has weights that are trained.
  """
  num_missing, early = 0, 0.0
  for one in measured:
    work = step_work.StepWork(one.schedule, remat_policy, trained)
    ran = [a for row in one.schedule.actions for a in row if work.Exists(a)]
    num_missing += sum(action not in one.times for action in ran)
    for action, (start, _) in one.times.items():
      ends = [one.times[needed][1] for needed in work.Dependencies(action) if needed in one.times]
      early = max([early, *(end - start for end in ends)])
  found = []
  if num_missing:
    found.append(f'actions missing in the trace: {num_missing}')
  if early > 0:
    found.append(
      f'an action begins {early * 1e3:.2f} ms before the end of what it needs: the clocks of the '
      'hosts differ by that or more'
    )
  return found
