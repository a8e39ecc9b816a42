# SPDX-License-Identifier: Apache-2.0
"""How much of their forward passes the stages of a schedule hold at one time."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lingvo_gpipe.pipeline.cost import per_stage
from lingvo_gpipe.pipeline.schedule import actions, step_work

Kind = actions.Kind
PerStage = per_stage.PerStage


@dataclasses.dataclass(frozen=True)
class ActivationSizes:
  """Bytes that one micro-batch takes; one number holds for all stages.

  Attributes:
    stage_input: what comes over the boundary into each stage.
    inner: all else that a stage keeps from its forward pass for its backward pass.
    layer_inputs: the inputs of its layers except the first (policy `layer` keeps them).
    largest_layer: the inner activations of its largest layer (policy `layer` has them in backward).
    weight_part: what W still needs after I; None: everything.
  """

  stage_input: PerStage
  inner: PerStage
  layer_inputs: PerStage | None = None
  largest_layer: PerStage | None = None
  weight_part: PerStage | None = None


class Part(enum.Enum):
  """What a stage holds of one micro-batch."""

  NOTHING = 'nothing'
  INPUT = "the stage's input"
  LAYER_INPUTS = 'the inputs of all its layers'
  ONE_LAYER = 'the inputs of all its layers, and what is inside of one'
  FOR_WEIGHTS = 'what W needs after I'
  EVERYTHING = 'everything'


class Change(NamedTuple):
  """What is held of an action's micro-batch before, at most within, and after the action."""

  before: Part
  within: tuple[Part, ...]
  after: Part


def Changes(work: step_work.StepWork) -> Iterator[tuple[int, actions.Action, Change]]:
  """(device, action, change), of all actions that exist, in the order of each device."""
  for device, row in enumerate(work.schedule.actions):
    for action in filter(work.Exists, row):
      k, m = action.stage, action.micro_batch
      kept = working = Part.INPUT
      if work.HasBackward(k):
        if not work.RunsAgain(k, m):
          kept = working = Part.EVERYTHING
        elif work.GoesByLayer(k, m):
          kept, working = Part.LAYER_INPUTS, Part.ONE_LAYER
        else:
          working = Part.EVERYTHING
      left = Part.FOR_WEIGHTS if work.IsTrained(k) else Part.NOTHING
      kind = Kind.BACKWARD if work.IsWholeBackward(action) else action.kind
      yield (
        device,
        action,
        {
          Kind.FORWARD: Change(
            Part.NOTHING, (kept,), kept if work.HasBackward(k) else Part.NOTHING
          ),
          Kind.BACKWARD: Change(kept, (working,), Part.NOTHING),
          Kind.INPUT_GRADIENT: Change(kept, (working, left), left),
          Kind.WEIGHT_GRADIENT: Change(left, (left,), Part.NOTHING),
          Kind.FORWARD_BACKWARD: Change(Part.NOTHING, (working,), Part.NOTHING),
        }[kind],
      )


def Peaks(
  work: step_work.StepWork, sizes: ActivationSizes, scale: Sequence[float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
  """For each stage and for each device the most bytes that are held at one time.

  A device does one thing at a time, so their order is all that matters.

  Args:
    work: what each action does.
    sizes: what a micro-batch of size 1 takes.
    scale: the size of each micro-batch.

  Raises:
    ValueError: sizes that do not fit the schedule or the policy.
  """
  schedule = work.schedule
  goes_by_layer = any(
    work.GoesByLayer(a.stage, a.micro_batch) for row in schedule.actions for a in row
  )
  if goes_by_layer and (sizes.layer_inputs is None or sizes.largest_layer is None):
    raise ValueError("remat_policy 'layer' needs sizes.layer_inputs and sizes.largest_layer")

  def Read(name: str) -> tuple[float, ...]:
    value = getattr(sizes, name)
    return per_stage.Expand(
      f'sizes.{name}', 0 if value is None else value, schedule.num_stages, 'stage'
    )

  stage_input, inner, weight_part = Read('stage_input'), Read('inner'), Read('weight_part')
  layer_inputs, largest_layer = Read('layer_inputs'), Read('largest_layer')
  held: list[float] = [0] * schedule.num_stages
  stage_peaks: list[float] = [0] * schedule.num_stages
  device_peaks: list[float] = [0] * schedule.num_devices
  device_held: list[float] = [0] * schedule.num_devices
  num_bytes = []
  for k in range(schedule.num_stages):
    everything = stage_input[k] + inner[k]
    by_layer = stage_input[k] + layer_inputs[k]
    num_bytes.append(
      {
        Part.NOTHING: 0,
        Part.INPUT: stage_input[k],
        Part.LAYER_INPUTS: by_layer,
        Part.ONE_LAYER: by_layer + largest_layer[k],
        Part.FOR_WEIGHTS: everything if sizes.weight_part is None else weight_part[k],
        Part.EVERYTHING: everything,
      }
    )
  for device, action, change in Changes(work):
    k, size = action.stage, scale[action.micro_batch]
    before, after = num_bytes[k][change.before], num_bytes[k][change.after]
    more = (max(num_bytes[k][part] for part in change.within) - before) * size
    stage_peaks[k] = max(stage_peaks[k], held[k] + more)
    device_peaks[device] = max(device_peaks[device], device_held[device] + more)
    held[k] += (after - before) * size
    device_held[device] += (after - before) * size
  return tuple(stage_peaks), tuple(device_peaks)


def PeakActivations(work: step_work.StepWork) -> tuple[int, ...]:
  """For each stage the most micro-batches that it holds at one time, in part or in full."""
  whole = step_work.StepWork(work.schedule, 'none', work.trained)
  peaks, _ = Peaks(whole, ActivationSizes(1, 0), [1] * work.schedule.num_micro_batches)
  return tuple(int(peak) for peak in peaks)
