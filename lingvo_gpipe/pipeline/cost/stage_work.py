# SPDX-License-Identifier: Apache-2.0
"""How much work a stage has in a step: what its layers cost under a schedule and a policy.

A layer's forward F is one unit: its FLOPs, its weights or its measured time. The recomputation R is
F again. Where a layer's backward is not measured, the gradient I of its input and the gradient W of
its weights are each as much as F. So a trained layer costs 4 units a micro-batch where its stage
recomputes, and 3 in a fused last stage or under policy `none`. A layer without trained weights has
no W; the first layer with trained weights and those before it have no I; and stages before it have
no backward at all.
"""

from __future__ import annotations

import dataclasses
import fractions
import itertools
from collections.abc import Sequence

from lingvo_gpipe.pipeline.cost import partitioner, simulator
from lingvo_gpipe.pipeline.schedule import actions, rematerialisation
from lingvo_gpipe.pipeline.schedule import schedule as schedule_lib


@dataclasses.dataclass(frozen=True)
class LayerWork:
  """Of one layer, for one micro-batch: F, I and W in any unit, and whether weights are trained."""

  forward: float
  input_gradient: float
  weight_gradient: float
  is_trained: bool


def FromForward(forward: Sequence[float], trained: Sequence[bool]) -> tuple[LayerWork, ...]:
  """The work of layers of which only F is known: I and W are as much, where there are any."""
  first = FirstTrained(trained)
  return tuple(
    LayerWork(cost, cost if i > first else 0, cost if is_trained else 0, is_trained)
    for i, (cost, is_trained) in enumerate(zip(forward, trained, strict=True))
  )


def FromTimes(
  times: Sequence[tuple[float, float]], trained: Sequence[bool]
) -> tuple[LayerWork, ...]:
  """The work of layers of which (F, I + W) is measured, as far as each has I and W."""
  first = FirstTrained(trained)
  work = []
  for i, ((forward, backward), is_trained) in enumerate(zip(times, trained, strict=True)):
    halves = int(i > first) + int(is_trained)
    part = backward / halves if halves else 0
    work.append(LayerWork(forward, part if i > first else 0, part if is_trained else 0, is_trained))
  return tuple(work)


def FirstTrained(trained: Sequence[bool]) -> int:
  """The index of the first layer with trained weights; the number of layers if none has."""
  return next((i for i, is_trained in enumerate(trained) if is_trained), len(trained))


def CutCosts(
  work: Sequence[LayerWork], schedule: schedule_lib.Schedule, remat_policy: str
) -> list[partitioner.StageCosts]:
  """What each layer costs in each stage, over a whole step: the partitioner's view, exact."""
  counts = Recomputations(schedule, remat_policy)
  return CountedCutCosts(work, schedule.num_micro_batches, counts)


def CountedCutCosts(
  work: Sequence[LayerWork], num_micro_batches: int, counts: Sequence[int]
) -> list[partitioner.StageCosts]:
  """`CutCosts` where it is known how often each stage recomputes its forward."""
  first = FirstTrained([w.is_trained for w in work])
  made: dict[int, partitioner.StageCosts] = {}
  for count in set(counts):
    layers = []
    for i, w in enumerate(work):
      forward, inputs, weights = map(
        fractions.Fraction, (w.forward, w.input_gradient, w.weight_gradient)
      )
      again = count * forward if i >= first else 0
      layers.append(num_micro_batches * (forward + inputs + weights) + again)
    late = [count * fractions.Fraction(w.forward) for w in work[:first]]
    made[count] = partitioner.StageCosts(layers, late, first)
  return [made[count] for count in counts]


def StageCosts(
  work: Sequence[LayerWork],
  ends: Sequence[int],
  schedule: schedule_lib.Schedule,
  remat_policy: str,
) -> list[fractions.Fraction]:
  """For each stage of a cut the time that it works in a step."""
  first = FirstTrained([w.is_trained for w in work])
  counts = Recomputations(schedule, remat_policy)
  busy = []
  for (start, end), count in zip(partitioner.StageRanges(ends), counts, strict=True):
    members = work[start:end]
    forward = sum(fractions.Fraction(w.forward) for w in members)
    backward = sum(
      fractions.Fraction(w.input_gradient) + fractions.Fraction(w.weight_gradient) for w in members
    )
    again = count * forward if end > first else 0
    busy.append(fractions.Fraction(schedule.num_micro_batches * (forward + backward) + again))
  return busy


def Recomputations(schedule: schedule_lib.Schedule, remat_policy: str) -> list[int]:
  """For each stage how often it recomputes its forward in a step."""
  last = schedule.num_micro_batches - 1
  counts = [0] * schedule.num_stages
  for action in itertools.chain.from_iterable(schedule.actions):
    if action.kind in (actions.Kind.BACKWARD, actions.Kind.INPUT_GRADIENT):
      counts[action.stage] += rematerialisation.RunsAgain(remat_policy, action.micro_batch == last)
  return counts


def SimulatorCosts(work: Sequence[LayerWork], ends: Sequence[int]) -> simulator.Costs:
  """What the actions of each stage of a cut cost: the simulator's view."""
  first = FirstTrained([w.is_trained for w in work])
  ranges = partitioner.StageRanges(ends)
  forward = [sum(w.forward for w in work[start:end]) for start, end in ranges]
  return simulator.Costs(
    forward,
    recompute=[f if end > first else 0 for f, (_, end) in zip(forward, ranges, strict=True)],
    input_gradient=[sum(w.input_gradient for w in work[start:end]) for start, end in ranges],
    weight_gradient=[sum(w.weight_gradient for w in work[start:end]) for start, end in ranges],
  )


def OneDevice(work: Sequence[LayerWork], num_micro_batches: int, remat_policy: str) -> float:
  """The time of the same step on one device that runs every F, then every B."""
  first = FirstTrained([w.is_trained for w in work])
  again = 0
  if first < len(work):
    last = num_micro_batches - 1
    again = sum(rematerialisation.RunsAgain(remat_policy, m == last) for m in range(last + 1))
  forward = sum(w.forward for w in work)
  backward = sum(w.input_gradient + w.weight_gradient for w in work)
  return num_micro_batches * (forward + backward) + again * forward
