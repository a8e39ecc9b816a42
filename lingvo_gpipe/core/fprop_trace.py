# SPDX-License-Identifier: Apache-2.0
"""Traces a layer's forward once for its output specs and cost. Allocates and runs nothing.

A layer may have any class that meets the Protocol `TracedLayer`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import tensorflow as tf

from lingvo_gpipe.core import fprop_context, nested_map
from lingvo_gpipe.graph import graph_cost, result_bytes, side_effects


class TracedLayer(Protocol):
  """The members of a layer that a trace uses."""

  @property
  def path(self) -> str:
    """The layer's path, for messages."""

  def WeightTensorSpecs(self) -> nested_map.NestedMap:
    """Returns a nest with a tf.TensorSpec for each weight."""

  def ThetaFrom(self, variables: nested_map.NestedMap) -> nested_map.NestedMap:
    """Turns such a nest of weights into the `theta` of `FProp`."""

  def FPropSkips(
    self, theta: nested_map.NestedMap, skips: nested_map.NestedMap, *args: Any
  ) -> tuple[Any, nested_map.NestedMap]:
    """Computes the outputs, and the skip connections that begin here."""


@dataclasses.dataclass(frozen=True)
class LayerTrace:
  """One forward call of a layer.

  Attributes:
    cost: floating-point operations, and the bytes of all results except the outputs.
    out_specs: a (nest of) tf.TensorSpec for each output.
    skip_specs: the (nest of) tf.TensorSpec of each skip connection that begins in the layer.
    row_bytes: {name of a weight that the call only looks up: bytes of the rows, in its dtype}.
  """

  cost: graph_cost.Cost
  out_specs: tuple[Any, ...]
  skip_specs: nested_map.NestedMap
  row_bytes: dict[str, int]

  @property
  def meta(self) -> nested_map.NestedMap:
    """NestedMap(flops, out_specs), the result of an `FPropMeta`."""
    return nested_map.NestedMap(flops=self.cost.flops, out_specs=self.out_specs)


def TraceLayer(
  layer: TracedLayer, skip_specs: nested_map.NestedMap, *input_specs: Any
) -> LayerTrace:
  """Traces one call of `layer.FPropSkips` in training and counts the operations of its graph.

  Args:
    layer: the layer.
    skip_specs: the (nest of) tf.TensorSpec of each skip connection that ends in the layer.
    *input_specs: a (nest of) tf.TensorSpec with static shapes for each input; None allowed.
  """
  inputs = [skip_specs, *input_specs]
  none_at = [i for i, s in enumerate(tf.nest.flatten(inputs)) if s is None]
  flat_specs = [s for s in tf.nest.flatten(inputs) if s is not None]

  def Run(variables: Any, *flat: tf.Tensor) -> Any:
    leaves: list[Any] = list(flat)
    for i in none_at:
      leaves.insert(i, None)
    skips, *args = tf.nest.pack_sequence_as(inputs, leaves)
    with fprop_context.Scope(step=0), side_effects.Forbid(layer.path):
      outputs, stashed = layer.FPropSkips(layer.ThetaFrom(variables), skips, *args)
    return outputs, dict(stashed)

  weights = layer.WeightTensorSpecs()
  traced = tf.function(Run, autograph=False).get_concrete_function(weights, *flat_specs)
  cost = graph_cost.CountFlops(traced)
  if cost.unknown:
    tf.get_logger().warning(
      '%s: no FLOP rule for %s; counted one operation per output element',
      layer.path,
      ', '.join(sorted(cost.unknown)),
    )
  results, fused = result_bytes.CountOutputBytes(list(traced.outputs))
  outputs, stashed = tf.nest.map_structure(
    lambda t: None if t is None else tf.TensorSpec(t.shape, t.dtype), traced.structured_outputs
  )
  return LayerTrace(
    dataclasses.replace(
      cost, result_bytes=cost.result_bytes - results, fused_bytes=cost.fused_bytes - fused
    ),
    outputs if isinstance(outputs, tuple) else (outputs,),
    nested_map.NestedMap(stashed),
    {
      name: num_bytes  # The weights are the first inputs.
      for (name, _), weight in zip(weights.FlattenItems(), traced.inputs, strict=False)
      if (num_bytes := _RowBytes(weight))
    },
  )


def _RowBytes(weight: tf.Tensor) -> int:
  """Returns the bytes of the rows that are looked up; 0 if the weight is used otherwise, too."""
  tables, elements = [weight], 0
  while tables:
    table = tables.pop()
    for op in table.consumers():
      if op.type in ('Cast', 'Identity'):
        tables.append(op.outputs[0])
      elif op.type == 'GatherV2' and tf.get_static_value(op.inputs[2]) == 0:  # The axis.
        elements += op.outputs[0].shape.num_elements() or 0  # Unknown if ids are masked.
      else:
        return 0
  return elements * int(weight.dtype.size)
