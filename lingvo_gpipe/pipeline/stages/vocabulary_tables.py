# SPDX-License-Identifier: Apache-2.0
"""A shared embedding: each device looks up the ids whose rows it has, outside of the schedule.

    device 0   table 0: ids ──> rows, or zeros ──┐                               ┌──> accumulators
    device 1   table 1: ids ──> rows, or zeros ──┼──> sum ──> F .. B of stage 0 ──┼──> accumulators
    device 2   table 2: ids ──> rows, or zeros ──┘                               └──> accumulators

The embedding has as many shards as the softmax, and each table the shards of the device's slice.
Stage 0 takes the rows in the place of ids; the embedding in it then has no weights.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import base_layer, nested_map
from lingvo_gpipe.layers import embedding
from lingvo_gpipe.pipeline.stages import stage, stage_math


@dataclasses.dataclass
class Table(stage.Stage):
  """Consecutive shards of an embedding on one device, as a stage that is in no schedule.

  Attributes:
    first: the first id that it has.
  """

  first: int = 0

  def __str__(self) -> str:
    return f'rows from {self.first} of {self.layers[0].path}'


def CanShare(layer: base_layer.BaseLayer, head: base_layer.BaseLayer) -> bool:
  """Whether an embedding has shards that can share devices with the shards of the softmax."""
  return (
    isinstance(layer, embedding.EmbeddingLayer)
    # A class that overrides one of these may do something else with ids than look them up.
    and all(
      getattr(type(layer), name) is getattr(embedding.EmbeddingLayer, name)
      for name in ('FProp', 'EmbLookup', 'LookUp')
    )
    and len(layer.class_shards) == len(head.class_shards) > 0
    and layer.params.vocab_size == head.params.num_classes
  )


def MoveShards(
  first_stage: stage.Stage, sizes: Sequence[int], devices: Sequence[str]
) -> tuple[stage.Stage, list[Table]]:
  """Returns the first stage without the weights of its first layer, and the tables that have them.

  Args:
    first_stage: the stage that begins with the embedding.
    sizes: for each table its number of rows, a multiple of a shard's.
    devices: for each table its device, which has the weights of its shards already.
  """
  whole, *variables = first_stage.variables
  tables = []
  for number, (size, device) in enumerate(zip(sizes, devices, strict=True)):
    first = sum(sizes[:number])
    start, end = (len(whole.shards) * c // sum(sizes) for c in (first, first + size))
    part = [nested_map.NestedMap(shards=whole.shards[start:end])]
    trained, mirrors = first_stage.OfVariables(part)
    tables.append(
      Table(0, first_stage.layers[:1], device, part, (), (), trained, mirrors, False, first=first)
    )
  variables = [nested_map.NestedMap(shards=[]), *variables]
  trained, mirrors = first_stage.OfVariables(variables)
  needs_dx = any(table.has_weight_gradient for table in tables)
  return dataclasses.replace(
    first_stage, variables=variables, trained=trained, mirrors=mirrors, needs_dx=needs_dx
  ), tables


class SharedTable:
  """Traced functions of tables.

  Attributes:
    LookUp: tf.function (variables, ids) -> rows; zeros for ids that the table does not have.
    Backward: tf.function (variables, for each whether it is trained, accumulators of these, ids,
      gradient of the rows) -> a scalar that waits for the gradients.
  """

  def __init__(self, layer: embedding.EmbeddingLayer, xla: bool) -> None:
    self._layer = layer
    self.LookUp = stage_math.Traced(self._LookUp, xla)
    self.Backward = stage_math.Traced(self._Backward, xla)

  def LookUpIn(self, tables: Sequence[Table], ids: tf.Tensor, device: str) -> tf.Tensor:
    """Returns the rows of ids, on `device`."""
    parts = []
    for table in tables:
      with tf.device(table.device):
        parts.append(self.LookUp(table.variables, ids - table.first))
    with tf.device(device):
      return tf.add_n(parts)

  def _LookUp(self, variables: Sequence[Any], ids: tf.Tensor) -> tf.Tensor:
    return self._layer.LookUp(self._layer.ThetaFrom(variables[0]), ids)

  def _Backward(
    self,
    variables: Sequence[Any],
    is_trained: tuple[bool, ...],
    accumulators: Sequence[tf.Variable],
    ids: tf.Tensor,
    dy: tf.Tensor,
  ) -> tf.Tensor:
    with tf.GradientTape() as tape:
      rows = self._LookUp(variables, ids)
    trained = list(itertools.compress(tf.nest.flatten(variables), is_trained))
    grads = tape.gradient(rows, trained, output_gradients=dy)
    stage_math.Accumulate(accumulators, grads)
    with tf.control_dependencies([g.values if hasattr(g, 'values') else g for g in grads]):
      return tf.zeros([], tf.int32)
