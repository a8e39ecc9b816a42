# SPDX-License-Identifier: Apache-2.0
"""A shared vocabulary in a cut: the slices of the last layer, a softmax, with costs and bytes.

    stage 0   stage 1                   stage 0  stage 1  stage 2  stage 3
    [0   1]   [2   softmax]   becomes   [0   1]  [  2  ]  [slice]  [slice]

Each slice is a layer and a stage of its own.
"""

from __future__ import annotations

import dataclasses
import fractions
import itertools
from collections.abc import Sequence

from lingvo_gpipe.core import base_layer
from lingvo_gpipe.pipeline.cost import stage_memory, stage_work, vocabulary_cut
from lingvo_gpipe.pipeline.cutting import layer_costs
from lingvo_gpipe.pipeline.schedule import schedules
from lingvo_gpipe.pipeline.stages import vocabulary_tables


@dataclasses.dataclass(frozen=True)
class VocabularySplit:
  """The slices of a softmax.

  Attributes:
    head: the softmax.
    table: the embedding whose weights are in the slices, too; None: they stay in the first stage.
    sizes: for each device the number of classes of its slice.
  """

  head: base_layer.BaseLayer
  table: base_layer.BaseLayer | None
  sizes: tuple[int, ...]

  @property
  def in_slices(self) -> tuple[str, ...]:
    """The paths of the layers whose weights are in the slices; other weights are whole."""
    head = (self.head.path,) if self.head.class_shards else ()
    return head if self.table is None else (self.table.path, *head)

  def Costs(self, costs: Sequence[layer_costs.LayerCost]) -> tuple[layer_costs.LayerCost, ...]:
    """Returns the costs of the layers with slices in place of the softmax."""
    first, *between, head = costs
    num_params = head.num_params
    if self.table is not None:
      num_params += first.num_params
      first = dataclasses.replace(first, num_params=0)
    slices = []
    for start, end in itertools.pairwise([0, *itertools.accumulate(self.sizes)]):
      share = fractions.Fraction(end - start, sum(self.sizes))
      slices.append(
        dataclasses.replace(
          head,
          path=f'{head.path}[{start}:{end}]',
          num_params=round(num_params * share),
          flops=round(head.flops * share),
        )
      )
    return (first, *between, *slices)

  def Bytes(
    self,
    num_bytes: Sequence[stage_memory.LayerBytes],
    weights: layer_costs.Weights,
    schedule: schedules.Schedule,
  ) -> list[stage_memory.LayerBytes]:
    """Returns the memory of the layers with slices in place of the softmax."""
    owner = schedule.stage_to_device[schedule.num_layer_stages - 1]
    copied = None if self.head.class_shards else weights.CopyBytes(self.head)
    return vocabulary_cut.WithSliceBytes(
      num_bytes, self.sizes, owner, copy_bytes=copied, has_table=self.table is not None
    )


def Parts(head: base_layer.BaseLayer) -> tuple[int, int]:
  """Returns the number of parts of a layer that slices consist of, and the classes of each.

  (0, 0) stands for a layer whose classes cannot be shared out.
  """
  if not head.class_axes:
    return 0, 0
  name, axis = next(iter(head.class_axes.items()))
  num_classes = head.WeightSpecs()[f'{head.path}.{name}'][0].shape[axis]
  return (len(head.class_shards), num_classes) if head.class_shards else (num_classes, 1)


def Check(
  layers: Sequence[base_layer.BaseLayer],
  schedule: schedules.Schedule,
  splits: Sequence[int] | None,
  sizes: Sequence[int],
) -> None:
  """Raises ValueError if the vocabulary of the last layer cannot be shared out in this way.

  Args:
    layers: the flat list of layers.
    schedule: the training schedule, without slices.
    splits: for each stage the index after its last layer, if the cut is by hand.
    sizes: for each slice the number of its classes; empty: to be chosen.
  """
  head, what = layers[-1], "vocabulary='shared'"
  if not head.class_axes:
    raise ValueError(
      f'{what}: the last layer, {head.path}, is a {type(head).__name__}, not a softmax whose '
      'classes can be shared out, such as SimpleFullSoftmax or SharedSoftmaxLayer'
    )
  if schedule.num_stages >= len(layers):
    raise ValueError(
      f'{what}: {schedule.num_stages} stages for {len(layers) - 1} layers besides {head.path}, '
      f'which is shared out; use at most {len(layers) - 1} stages'
    )
  if splits and len(splits) > 1 and splits[-2] == len(layers) - 1:
    raise ValueError(
      f'{what}: splits {list(splits)} leave the last stage no layer but the softmax, {head.path}, '
      'which is shared out; give it another layer, or take one stage less'
    )
  num_parts, part_classes = Parts(head)
  if num_parts < schedule.num_devices:
    parts = f'shards of {part_classes} classes' if head.class_shards else 'classes'
    raise ValueError(
      f'{what}: {head.path} has {num_parts} {parts}, too few for {schedule.num_devices} devices'
    )
  fits = len(sizes) == schedule.num_devices and sum(sizes) == num_parts * part_classes
  if sizes and (not fits or any(size <= 0 or size % part_classes for size in sizes)):
    multiples = f', multiples of {part_classes}' if part_classes > 1 else ''
    raise ValueError(
      f'splits give slices of {list(sizes)} classes, but {schedule.num_devices} devices share '
      f'{num_parts * part_classes}{multiples}; leave these sizes out to balance the devices'
    )


def MakeSplit(
  layers: Sequence[base_layer.BaseLayer],
  work: Sequence[stage_work.LayerWork],
  schedule: schedules.Schedule,
  remat_policy: str,
  splits: Sequence[int] | None,
  sizes: Sequence[int],
) -> tuple[VocabularySplit, list[int]]:
  """Returns the slices and the ends of the stages with which the devices are equally busy.

  Args:
    layers: the flat list of layers.
    work: the work of each layer.
    schedule: the training schedule, with slices.
    remat_policy: the policy of all stages.
    splits: as in `Check`.
    sizes: as in `Check`.
  """
  num_parts, part_classes = Parts(layers[-1])
  ends, parts = vocabulary_cut.Cut(work, splits, schedule, remat_policy, num_parts)
  table = layers[0] if vocabulary_tables.CanShare(layers[0], layers[-1]) else None
  return VocabularySplit(layers[-1], table, tuple(sizes or (part_classes * n for n in parts))), ends
