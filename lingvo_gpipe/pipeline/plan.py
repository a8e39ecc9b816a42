# SPDX-License-Identifier: Apache-2.0
"""Where the cuts go: the cost of each layer, the stages, and the table that shows them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from lingvo_gpipe import base_layer, nested_map
from lingvo_gpipe.pipeline import partitioner, schedules, stage

COSTS = ('flops', 'params')

# Of actions of equal stages, for the bubble.
_DURATIONS = {
  schedules.Kind.FORWARD: 1,
  schedules.Kind.BACKWARD: 2,
  schedules.Kind.INPUT_GRADIENT: 1,
  schedules.Kind.WEIGHT_GRADIENT: 1,
  schedules.Kind.FORWARD_BACKWARD: 3,
}


@dataclasses.dataclass(frozen=True)
class LayerCost:
  """One layer of the sequence: its path, class, trainable weights and forward FLOPs."""

  path: str
  kind: str
  num_params: int
  flops: int
  out_specs: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class StagePlan:
  """One stage: layers [start, end), their weights, FLOPs and share of the total cost."""

  start: int
  end: int
  num_params: int
  flops: int
  share: float


@dataclasses.dataclass(frozen=True)
class Plan:
  """A sequence of layers cut into stages.

  Attributes:
    layers: the layers' costs for one micro-batch.
    ends: for each stage the index after its last layer.
    stages: the stages.
    schedule: the training schedule.
    by: what the cut is balanced by.
    num_params: count of the trained weights; one that is tied to another counts once.
  """

  layers: tuple[LayerCost, ...]
  ends: tuple[int, ...]
  stages: tuple[StagePlan, ...]
  schedule: schedules.Schedule
  by: str
  num_params: int

  @property
  def num_micro_batches(self) -> int:
    """M."""
    return self.schedule.num_micro_batches

  @property
  def num_devices(self) -> int:
    """K."""
    return self.schedule.num_devices

  @property
  def bubble(self) -> float:
    """The share of a step that the devices idle, with equal stages and backward twice forward.

    That is (K-1)/(M+K-1) for gpipe (GPipe section 2.3).
    """
    timeline = self.schedule.Timeline(_DURATIONS)
    makespan = max(row[-1][1] for row in timeline)
    busy = sum(end - start for row in timeline for start, end, _ in row)
    return 1.0 - busy / (makespan * self.num_devices)

  def Table(self, devices: Sequence[str] = ()) -> str:
    """The stage table: layers, weights, cost share and device of every stage."""
    rows = [('stage', 'layers', 'from', 'to', 'params', 'MFLOPs', 'share', 'device')]
    for k, s in enumerate(self.stages):
      rows.append(
        (
          str(k),
          str(s.end - s.start),
          self.layers[s.start].path,
          self.layers[s.end - 1].path,
          f'{s.num_params:,}',
          f'{s.flops / 1e6:,.1f}',
          f'{s.share:.1%}',
          devices[self.schedule.stage_to_device[k]].rsplit('/', 1)[-1] if devices else '-',
        )
      )
    left = {2, 3, 7}
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
      '  '.join(
        cell.ljust(w) if i in left else cell.rjust(w)
        for i, (cell, w) in enumerate(zip(row, widths, strict=True))
      ).rstrip()
      for row in rows
    ]
    slowest = max(s.share for s in self.stages)
    balance = 1.0 / (slowest * len(self.stages)) if slowest else 1.0
    stages = f'K={self.num_devices} stages'
    if self.num_devices < len(self.stages):
      stages = f'{len(self.stages)} stages on K={self.num_devices} devices'
    lines.append(
      f'{stages}, M={self.num_micro_batches} micro-batches, '
      f'{self.schedule.name}: bubble {self.bubble:.1%} of a step if stages were equal; '
      f'balance {balance:.1%} (by {self.by}); {self.num_params:,} parameters'
    )
    return '\n'.join(lines)


def LayerCosts(
  layers: Sequence[base_layer.BaseLayer], input_specs: Sequence[Any]
) -> tuple[LayerCost, ...]:
  """The cost of each layer, the output specs of one being the inputs of the next.

  Layers of equal structure and inputs are measured once.

  Args:
    layers: the flat list.
    input_specs: a (nest of) tf.TensorSpec with static shapes for each argument of the first.
  """
  known: dict[Any, Any] = {}
  costs = []
  specs = tuple(input_specs)
  skips = nested_map.NestedMap()
  for layer in layers:
    taken = nested_map.NestedMap({name: skips[name] for name in layer.skips_in})
    key = (stage.StructureKey(layer), repr((taken, specs)))
    if key not in known:
      try:
        known[key] = type(layer).FPropMetaSkips(layer.params, taken, *specs)
      except Exception as e:
        e.add_note(f'while measuring layer {layer.path} ({type(layer).__name__}), given {specs}')
        raise
    meta, stashed = known[key]
    skips.update(stashed)
    kind = type(layer).__name__
    specs = tuple(meta.out_specs)
    costs.append(LayerCost(layer.path, kind, layer.NumParams(), int(meta.flops), specs))
  return tuple(costs)


def MakePlan(
  layers: Sequence[base_layer.BaseLayer],
  input_specs: Sequence[Any],
  *,
  schedule: schedules.Schedule,
  splits: Sequence[int] | None = None,
  by: str = 'flops',
  num_params: int | None = None,
) -> Plan:
  """Cuts the layers so that the costliest stage is as cheap as can be, or by hand.

  Args:
    layers: the flat list.
    input_specs: specs of one micro-batch, an argument of the first layer each.
    schedule: the training schedule; it says how many stages and micro-batches there are.
    splits: for each stage the index after its last layer, where the cut is made by hand.
    by: 'flops' or 'params', what is balanced.
    num_params: count of the trained weights, where it is not the sum of the layers'.

  Raises:
    ValueError: more stages than layers, an unknown `by`, or splits that do not fit.
  """
  if by not in COSTS:
    raise ValueError(f'unknown cost {by!r} to partition by; expected one of {", ".join(COSTS)}')
  num_stages = schedule.num_stages
  costs = LayerCosts(layers, input_specs)
  weights = [cost.flops if by == 'flops' else cost.num_params for cost in costs]
  if splits:
    ends = list(splits)
    if len(ends) != num_stages:
      raise ValueError(f'splits {ends} name {len(ends)} stages, but num_stages is {num_stages}')
    partitioner.CheckSplits(ends, len(costs))
  else:
    ends = list(partitioner.Partition(weights, num_stages))
  total = sum(weights)
  stages = []
  for start, end in zip([0, *ends[:-1]], ends, strict=True):
    members = costs[start:end]
    share = sum(weights[start:end]) / total if total else (end - start) / len(costs)
    stages.append(
      StagePlan(
        start, end, sum(m.num_params for m in members), sum(m.flops for m in members), share
      )
    )
  if num_params is None:
    num_params = sum(cost.num_params for cost in costs)
  return Plan(costs, tuple(ends), tuple(stages), schedule, by, num_params)
