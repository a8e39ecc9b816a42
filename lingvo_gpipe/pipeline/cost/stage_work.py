# SPDX-License-Identifier: Apache-2.0
"""The work of a stage in a step: the costs of its layers under a schedule and a policy.

A layer's forward F is one unit of work: its FLOPs, its weights or its measured time. The
recomputation R costs as much as F. So do the gradient I of the layer's input and the gradient W of
its weights, unless the backward was measured:

| layer | F | R, if the stage recomputes | I | W |
| --- | --- | --- | --- | --- |
| trained | 1 | 1 | 1 | 1 |
| frozen, after the first trained layer | 1 | 1 | 1 | |
| the first trained layer | 1 | 1 | | 1 |
| before it, in the stage of the first trained layer | 1 | 1 | | |
| before it, in an earlier stage | 1 | | | |

A trained layer thus costs 4 units per micro-batch if its stage recomputes, and 3 units in a fused
last stage or under policy `none`.
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
  """The work of one layer for one micro-batch: F, I and W in any unit."""

  forward: float
  input_gradient: float
  weight_gradient: float
  is_trained: bool


def FromForward(forward: Sequence[float], trained: Sequence[bool]) -> tuple[LayerWork, ...]:
  """Returns the work of layers from F alone; I and W cost as much as F if the layer has them."""
  first = FirstTrained(trained)
  return tuple(
    LayerWork(cost, cost if i > first else 0, cost if is_trained else 0, is_trained)
    for i, (cost, is_trained) in enumerate(zip(forward, trained, strict=True))
  )


def FromTimes(
  times: Sequence[tuple[float, float]], trained: Sequence[bool]
) -> tuple[LayerWork, ...]:
  """Returns the work of layers from measured (F, I + W); I and W share the backward equally."""
  first = FirstTrained(trained)
  work = []
  for i, ((forward, backward), is_trained) in enumerate(zip(times, trained, strict=True)):
    halves = int(i > first) + int(is_trained)
    part = backward / halves if halves else 0
    work.append(LayerWork(forward, part if i > first else 0, part if is_trained else 0, is_trained))
  return tuple(work)


def FirstTrained(trained: Sequence[bool]) -> int:
  """Returns the index of the first trained layer, or the number of layers if there is none."""
  return next((i for i, is_trained in enumerate(trained) if is_trained), len(trained))


def CutCosts(
  work: Sequence[LayerWork], schedule: schedule_lib.Schedule, remat_policy: str
) -> list[partitioner.StageCosts]:
  """Returns the exact cost of each layer in each stage over a whole step, for the partitioner."""
  counts = Recomputations(schedule, remat_policy)
  return CountedCutCosts(work, schedule.num_micro_batches, counts)


def CountedCutCosts(
  work: Sequence[LayerWork], num_micro_batches: int, counts: Sequence[int]
) -> list[partitioner.StageCosts]:
  """Like `CutCosts`.

  Args:
    work: the work of each layer.
    num_micro_batches: M.
    counts: for each stage the number of recomputations of its forward in a step.
  """
  first = FirstTrained([w.is_trained for w in work])
  costs: dict[int, partitioner.StageCosts] = {}
  for count in set(counts):
    layers = []
    for i, w in enumerate(work):
      forward, inputs, weights = map(
        fractions.Fraction, (w.forward, w.input_gradient, w.weight_gradient)
      )
      again = count * forward if i >= first else 0
      layers.append(num_micro_batches * (forward + inputs + weights) + again)
    late = [count * fractions.Fraction(w.forward) for w in work[:first]]
    costs[count] = partitioner.StageCosts(layers, late, first)
  return [costs[count] for count in counts]


def StageCosts(
  work: Sequence[LayerWork],
  ends: Sequence[int],
  schedule: schedule_lib.Schedule,
  remat_policy: str,
) -> list[fractions.Fraction]:
  """Returns the work of each stage of a cut in a step."""
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


def Recomputations(
  schedule: schedule_lib.Schedule, remat_policy: rematerialisation.Policy
) -> list[int]:
  """Returns for each stage the number of recomputations of its forward in a step."""
  last = schedule.num_micro_batches - 1
  counts = [0] * schedule.num_stages
  for action in itertools.chain.from_iterable(schedule.actions):
    if action.kind in (actions.Kind.BACKWARD, actions.Kind.INPUT_GRADIENT):
      policy = rematerialisation.OfStage(remat_policy, action.stage)
      counts[action.stage] += rematerialisation.RunsAgain(policy, action.micro_batch == last)
  return counts


def SimulatorCosts(work: Sequence[LayerWork], ends: Sequence[int]) -> simulator.Costs:
  """Returns the costs of the actions of each stage of a cut, for the simulator."""
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
  """Returns the time of a step on one device that runs every F, then every B."""
  first = FirstTrained([w.is_trained for w in work])
  again = 0
  if first < len(work):
    last = num_micro_batches - 1
    again = sum(rematerialisation.RunsAgain(remat_policy, m == last) for m in range(last + 1))
  forward = sum(w.forward for w in work)
  backward = sum(w.input_gradient + w.weight_gradient for w in work)
  return num_micro_batches * (forward + backward) + again * forward
