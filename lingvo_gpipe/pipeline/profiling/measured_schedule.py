# SPDX-License-Identifier: Apache-2.0
"""Measured times of a schedule's actions, and a simulation with these times for comparison."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Mapping, Sequence

from lingvo_gpipe.pipeline.cost import simulator
from lingvo_gpipe.pipeline.schedule import actions, rematerialisation, step_work
from lingvo_gpipe.pipeline.schedule import schedule as schedule_lib

Action = actions.Action
Kind = actions.Kind


@dataclasses.dataclass(frozen=True)
class Measured:
  """The measured actions of one mini-batch.

  Attributes:
    schedule: the schedule that ran.
    step: the number of the training step.
    times: {action: (start, end)}, in seconds, with any origin.
  """

  schedule: schedule_lib.Schedule
  step: int
  times: Mapping[Action, tuple[float, float]]

  @functools.cached_property
  def timeline(self) -> tuple[tuple[simulator.Span, ...], ...]:
    """The spans of each device, in order of time; the first one starts at 0."""
    origin = min(start for start, _ in self.times.values())
    rows: list[list[simulator.Span]] = [[] for _ in range(self.schedule.num_devices)]
    for action, (start, end) in sorted(self.times.items(), key=lambda item: item[1]):
      device = self.schedule.stage_to_device[action.stage]
      rows[device].append(simulator.Span(device, start - origin, end - origin, action))
    return tuple(map(tuple, rows))

  @property
  def makespan(self) -> float:
    """The time from the start of the first action to the end of the last."""
    return max(span.end for row in self.timeline for span in row)

  @property
  def bubble(self) -> float:
    """The idle share of the devices, over `makespan`."""
    busy = sum(span.end - span.start for row in self.timeline for span in row)
    return 1.0 - busy / (self.makespan * self.schedule.num_devices) if self.makespan else 0.0


def MeanTimes(measured: Sequence[Measured]) -> dict[tuple[Kind, int], float]:
  """Returns {(kind, stage): mean duration of these actions}, including recomputation."""
  durations: dict[tuple[Kind, int], list[float]] = {}
  for mini_batch in measured:
    for action, (start, end) in mini_batch.times.items():
      durations.setdefault((action.kind, action.stage), []).append(end - start)
  return {key: statistics.fmean(values) for key, values in sorted(durations.items())}


def SimulateWithMeanTimes(
  measured: Sequence[Measured], remat_policy: rematerialisation.Policy, trained: Sequence[bool]
) -> simulator.Result:
  """Simulates the schedule with the mean times of its actions.

  In the simulation a device waits only for results of other devices, so the difference to the
  measured times is overhead, or actions that took longer than the mean.

  Args:
    measured: mini-batches of one schedule, at least one.
    remat_policy: their re-materialisation policy. If only some actions of a kind recompute, these
      have a separate mean.
    trained: for each stage whether it has trained weights.
  """
  schedule = measured[0].schedule
  work = step_work.StepWork(schedule, remat_policy, trained)
  is_repeated = {a: work.Repeats(a) for row in schedule.actions for a in row}

  def Select(repeats: bool) -> list[Measured]:
    """Returns the mini-batches with only those actions that recompute, or do not."""
    selected = []
    for mini_batch in measured:
      times = {a: t for a, t in mini_batch.times.items() if is_repeated.get(a) == repeats}
      selected.append(dataclasses.replace(mini_batch, times=times))
    return selected

  plain, repeating = MeanTimes(Select(False)), MeanTimes(Select(True))

  def StageTimes(kind: Kind) -> list[float]:
    keys = [(kind, k) for k in range(schedule.num_stages)]
    return [plain.get(key, repeating.get(key, 0.0)) for key in keys]

  backward, weights = StageTimes(Kind.BACKWARD), StageTimes(Kind.WEIGHT_GRADIENT)
  recompute = [0.0] * schedule.num_stages
  for key, seconds in repeating.items():
    recompute[key[1]] = max(seconds - plain.get(key, seconds), 0.0)
  costs = simulator.Costs(
    forward=StageTimes(Kind.FORWARD),
    recompute=recompute,
    input_gradient=StageTimes(Kind.INPUT_GRADIENT),
    weight_gradient=weights,
    # If I is empty, W is the whole backward.
    backward=[b or w for b, w in zip(backward, weights, strict=True)],
    fused=StageTimes(Kind.FORWARD_BACKWARD),
  )
  return simulator.Simulate(schedule, costs, remat_policy=remat_policy, trained=trained)


def FindDoubts(
  measured: Sequence[Measured], remat_policy: rematerialisation.Policy, trained: Sequence[bool]
) -> list[str]:
  """Returns reasons to doubt the measured times, as texts.

  Args:
    measured: mini-batches.
    remat_policy: their re-materialisation policy.
    trained: for each stage whether it has trained weights.
  """
  num_missing, early = 0, 0.0
  for mini_batch in measured:
    times = mini_batch.times
    work = step_work.StepWork(mini_batch.schedule, remat_policy, trained)
    device_actions = (a for row in mini_batch.schedule.actions for a in row)
    expected = [a for a in device_actions if work.Exists(a) and a.kind not in actions.COPIES]
    num_missing += sum(action not in times for action in expected)
    for action, (start, _) in times.items():
      ends = [times[needed][1] for needed in work.Dependencies(action) if needed in times]
      early = max([early, *(end - start for end in ends)])
  doubts = []
  if num_missing:
    doubts.append(f'actions missing in the trace: {num_missing}')
  if early > 0:
    doubts.append(
      f'an action begins {early * 1e3:.2f} ms before the end of an action that it depends on: the '
      'clocks of the hosts differ by at least that much'
    )
  return doubts
