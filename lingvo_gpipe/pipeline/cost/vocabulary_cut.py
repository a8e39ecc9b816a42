# SPDX-License-Identifier: Apache-2.0
"""The cut of a model whose vocabulary is shared out: stages of whole layers, and slices.

Layers are whole, but a slice can have any number of classes. So the layers without the softmax are
cut as well as possible, and then the slices fill up the devices, like water:

    device     0       1       2       3
    level    ..sss.....sss.............sss..    s: slice
               sss    layer   layer    sss
              layer   layer   layer   layer
              layer   layer   layer   layer

The devices are equally busy unless the busiest one exceeds the level without a slice, and then no
other cut makes it less busy.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from lingvo_gpipe.pipeline.cost import partitioner, stage_memory, stage_work
from lingvo_gpipe.pipeline.schedule import schedule as schedule_lib

LayerWork = stage_work.LayerWork


def Cut(
  work: Sequence[LayerWork],
  splits: Sequence[int] | None,
  schedule: schedule_lib.Schedule,
  remat_policy: str,
  num_parts: int,
) -> tuple[list[int], list[int]]:
  """Returns the ends of the stages, and the sizes of the slices that balance the devices, in parts.

  Slices fill up the devices, so the best cut of the other layers is best with the slices, too.

  Args:
    work: the work of each layer; the last one is the softmax.
    splits: the cut by hand, if any.
    schedule: the training schedule, with slices.
    remat_policy: the re-materialisation policy.
    num_parts: the number of classes, or of shards of equally many classes.
  """
  num_layers, num_stages = len(work) - 1, schedule.num_layer_stages
  ends: Sequence[int] | None = splits and [*splits[:-1], num_layers]
  if not ends:
    stage_costs = stage_work.CutCosts(work[:-1], schedule, remat_policy)
    ends = partitioner.PartitionStages(stage_costs[:num_stages])
  assert ends
  even = [1] * schedule.num_devices
  all_ends = AllEnds([*ends[:-1], num_layers + 1], len(even))
  busy = stage_work.StageCosts(WithSlices(work, even), all_ends, schedule, remat_policy)
  loads = [0.0] * schedule.num_devices
  for device, stage_busy in zip(schedule.stage_to_device, busy[:num_stages], strict=False):
    loads[device] += float(stage_busy)
  sizes = SliceSizes(loads, float(sum(busy[num_stages:])), num_parts)
  return [*ends[:-1], num_layers + 1], sizes


def AllEnds(ends: Sequence[int], num_slices: int) -> list[int]:
  """Returns the ends of all stages if slices, each a layer, take the place of the last layer.

  Args:
    ends: the ends of the stages with layers; the last layer belongs to the last stage.
    num_slices: the number of slices.
  """
  return [*ends[:-1], *range(ends[-1] - 1, ends[-1] + num_slices)]


def WithSlices(work: Sequence[LayerWork], sizes: Sequence[int]) -> tuple[LayerWork, ...]:
  """Returns the work with slices of the vocabulary, each as a layer, in place of the last layer.

  Args:
    work: the work of each layer; the last one is a softmax.
    sizes: for each slice its number of classes.
  """
  head, num_classes = work[-1], sum(sizes)
  parts = [
    dataclasses.replace(
      head,
      forward=head.forward * size / num_classes,
      input_gradient=head.input_gradient * size / num_classes,
      weight_gradient=head.weight_gradient * size / num_classes,
    )
    for size in sizes
  ]
  return (*work[:-1], *parts)


def WithSliceBytes(
  sizes: Sequence[stage_memory.LayerBytes],
  slices: Sequence[int],
  owner: int,
  *,
  copy_bytes: int | None,
  has_table: bool,
) -> list[stage_memory.LayerBytes]:
  """Returns the bytes of each layer, and of each slice its weights with state, and activations.

  A slice of whole weights has a copy with accumulators; the slice on the device of the last stage
  then includes the whole weights with their state.

  Args:
    sizes: the bytes of each layer; the last one is the softmax.
    slices: for each slice its number of classes.
    owner: the device of the last stage.
    copy_bytes: the bytes of a copy of the softmax's weights, with accumulators; None: the weights
      themselves are in the slices.
    has_table: whether the slices have the weights of the first layer, too.
  """
  first, *between, head = sizes
  of_owner = [head.of_owner] * len(slices)
  states, divided = [0] * len(slices), head.state
  if copy_bytes is not None:
    of_owner = [head.of_owner if device == owner else 0 for device in range(len(slices))]
    states[owner], divided = head.state, copy_bytes
  elif has_table:
    divided += first.state
    of_owner = [max(head.of_owner, first.of_owner)] * len(slices)
    # The first layer gets rows, as the second layer does.
    first = dataclasses.replace(first, state=0, of_owner=0, inputs=sizes[1].inputs)
  parts = [
    dataclasses.replace(
      head,
      state=state + round(divided * size / sum(slices)),
      inner=round(head.inner * size / sum(slices)),
      of_owner=extra,
      options=(),  # A slice is recomputed as a whole, or not at all.
    )
    for size, state, extra in zip(slices, states, of_owner, strict=True)
  ]
  return [first, *between, *parts]


def SliceSizes(loads: Sequence[float], work: float, num_parts: int) -> list[int]:
  """Returns for each device the size of its slice, so that all devices are equally busy.

  Devices with less work get larger slices. A device whose other work is above the level of the
  others gets one part. No other sizes make the busiest device less busy, up to one part and a
  thousandth of the mean: slices of equal size share their traces.

  Args:
    loads: the work of each device without the vocabulary.
    work: the work of the whole vocabulary, in the same unit.
    num_parts: the number of parts of equal work, such as classes, at least one for each device.
  """
  unit = float(work + sum(loads)) / len(loads) / 1000 or 1.0
  loads = [round(float(load) / unit) * unit for load in loads]
  # The level that the work reaches if it fills up the devices, the least loaded ones first.
  ascending = sorted(loads)
  levels = ((work + sum(ascending[:i])) / i for i in range(1, len(loads) + 1))
  level = next(
    level
    for level, following in zip(levels, [*ascending[1:], math.inf], strict=True)
    if level <= following
  )
  parts = [max(level - load, 0.0) for load in loads]
  if not sum(parts):
    parts = [1.0] * len(loads)
  spare = num_parts - len(loads)  # Each device has one part.
  ends = [round(spare * part / sum(parts)) for part in itertools.accumulate(parts)]
  return [1 + end - start for start, end in itertools.pairwise([0, *ends])]
