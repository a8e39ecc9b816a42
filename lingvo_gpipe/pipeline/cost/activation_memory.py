# SPDX-License-Identifier: Apache-2.0
"""Peak activations: how much of their forward passes the stages of a schedule hold at one time."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, assert_never

from lingvo_gpipe.pipeline.cost import per_stage
from lingvo_gpipe.pipeline.schedule import actions, step_work

Kind = actions.Kind
PerStage = per_stage.PerStage


@dataclasses.dataclass(frozen=True)
class ActivationSizes:
  """Bytes of the activations of one micro-batch; a single number applies to all stages.

  Attributes:
    stage_input: the input of each stage.
    inner: everything else that a stage keeps from its forward pass for its backward pass.
    layer_inputs: the inputs of a stage's layers except the first (kept under policy `layer`); under
      a `ByLayer`, plus everything else that its layers keep.
    largest_layer: the inner activations of a stage's largest layer (held within a backward under
      policy `layer`); under a `ByLayer`, the most that the backward of a layer recomputes.
    weight_part: the part of the activations that W needs after I; None: all of them.
  """

  stage_input: PerStage
  inner: PerStage
  layer_inputs: PerStage | None = None
  largest_layer: PerStage | None = None
  weight_part: PerStage | None = None


class Part(enum.Enum):
  """The activations that a stage holds of one micro-batch."""

  NOTHING = 'nothing'
  INPUT = "the stage's input"
  LAYER_INPUTS = 'the inputs of all its layers'
  ONE_LAYER = 'the inputs of all its layers, and the inner activations of one'
  FOR_WEIGHTS = 'the activations that W needs after I'
  EVERYTHING = 'everything'


class Change(NamedTuple):
  """The part of a micro-batch that its stage holds before, during and after an action."""

  before: Part
  within: tuple[Part, ...]
  after: Part


def Changes(work: step_work.StepWork) -> Iterator[tuple[int, actions.Action, Change]]:
  """Yields (device, action, change) for all actions that have work, device by device.

  An O comes where its copy ends and the device has its memory back.
  """
  for device, row in enumerate(work.schedule.actions):
    for action in actions.WithEndsOfCopies(filter(work.Exists, row)):
      k, m = action.stage, action.micro_batch
      stored, working = _StoredAndWorking(work, k, m)
      after_input = Part.FOR_WEIGHTS if work.IsTrained(k) else Part.NOTHING
      kind = Kind.BACKWARD if work.IsWholeBackward(action) else action.kind
      match kind:
        case Kind.FORWARD:
          after = stored if work.HasBackward(k) else Part.NOTHING
          change = Change(Part.NOTHING, (stored,), after)
        case Kind.BACKWARD:
          change = Change(stored, (working,), Part.NOTHING)
        case Kind.INPUT_GRADIENT:
          change = Change(stored, (working, after_input), after_input)
        case Kind.WEIGHT_GRADIENT:
          change = Change(after_input, (after_input,), Part.NOTHING)
        case Kind.FORWARD_BACKWARD:
          change = Change(Part.NOTHING, (working,), Part.NOTHING)
        case Kind.OFFLOAD:
          change = Change(stored, (stored,), Part.NOTHING)
        case Kind.LOAD:
          change = Change(Part.NOTHING, (stored,), stored)
        case _:
          assert_never(kind)
      yield device, action, change


def _StoredAndWorking(work: step_work.StepWork, stage: int, micro_batch: int) -> tuple[Part, Part]:
  """Returns the parts that a stage holds between F and B, and within B."""
  if not work.HasBackward(stage):
    return Part.INPUT, Part.INPUT
  if not work.RunsAgain(stage, micro_batch):
    return Part.EVERYTHING, Part.EVERYTHING
  if work.KeepsLayers(stage, micro_batch):
    by_layer = work.GoesByLayer(stage, micro_batch)
    return Part.LAYER_INPUTS, Part.ONE_LAYER if by_layer else Part.EVERYTHING
  return Part.INPUT, Part.EVERYTHING


def StoredBytes(
  work: step_work.StepWork, sizes: ActivationSizes, scale: Sequence[float]
) -> Callable[[int, int], float]:
  """Returns a function (stage, micro-batch) -> bytes that wait from F for B; see `Peaks`."""
  num_bytes = _PartBytes(work, sizes)

  def Stored(stage: int, micro_batch: int) -> float:
    stored, _ = _StoredAndWorking(work, stage, micro_batch)
    return num_bytes[stage][stored] * scale[micro_batch]

  return Stored


def Peaks(
  work: step_work.StepWork, sizes: ActivationSizes, scale: Sequence[float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
  """Returns the peak bytes of each stage, and of each device.

  A device runs one action at a time, so the peaks depend on the order of the actions only.

  Args:
    work: the work of each action.
    sizes: the bytes of a micro-batch of size 1.
    scale: the size of each micro-batch.

  Raises:
    ValueError: the sizes do not match the schedule, or lack values that the policy needs.
  """
  schedule = work.schedule
  num_bytes = _PartBytes(work, sizes)
  held: list[float] = [0] * schedule.num_stages
  stage_peaks: list[float] = [0] * schedule.num_stages
  device_peaks: list[float] = [0] * schedule.num_devices
  device_held: list[float] = [0] * schedule.num_devices
  for device, action, change in Changes(work):
    k, size = action.stage, scale[action.micro_batch]
    before, after = num_bytes[k][change.before], num_bytes[k][change.after]
    growth = (max(num_bytes[k][part] for part in change.within) - before) * size
    stage_peaks[k] = max(stage_peaks[k], held[k] + growth)
    device_peaks[device] = max(device_peaks[device], device_held[device] + growth)
    held[k] += (after - before) * size
    device_held[device] += (after - before) * size
  return tuple(stage_peaks), tuple(device_peaks)


def _PartBytes(work: step_work.StepWork, sizes: ActivationSizes) -> list[dict[Part, float]]:
  """Returns for each stage the bytes of each part; raises ValueError as `Peaks` does."""
  schedule = work.schedule
  keeps_layers = any(
    work.KeepsLayers(a.stage, a.micro_batch) for row in schedule.actions for a in row
  )
  if keeps_layers and (sizes.layer_inputs is None or sizes.largest_layer is None):
    raise ValueError("remat_policy 'layer' needs sizes.layer_inputs and sizes.largest_layer")

  def Read(name: str) -> tuple[float, ...]:
    value = getattr(sizes, name)
    return per_stage.Expand(
      f'sizes.{name}', 0 if value is None else value, schedule.num_stages, 'stage'
    )

  stage_input, inner, weight_part = Read('stage_input'), Read('inner'), Read('weight_part')
  layer_inputs, largest_layer = Read('layer_inputs'), Read('largest_layer')
  num_bytes: list[dict[Part, float]] = []
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
  return num_bytes


def PeakActivations(work: step_work.StepWork) -> tuple[int, ...]:
  """Returns the most micro-batches that each stage holds at one time, in part or in full."""
  whole = step_work.StepWork(work.schedule, 'none', work.trained)
  peaks, _ = Peaks(whole, ActivationSizes(1, 0), [1] * work.schedule.num_micro_batches)
  return tuple(int(peak) for peak in peaks)
