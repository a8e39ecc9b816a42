# SPDX-License-Identifier: Apache-2.0
"""Traces a layer's `FProp` once for its output specs and cost. Allocates and runs nothing.

A layer may have any class that meets the Protocol `TracedLayer`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import tensorflow as tf

from lingvo_gpipe.core import fprop_context, graph_cost, nested_map, result_bytes, side_effects


class TracedLayer(Protocol):
  """The members of a layer that a trace uses."""

  @property
  def path(self) -> str:
    """The layer's path, for messages."""

  def WeightTensorSpecs(self) -> nested_map.NestedMap:
    """Returns a nest with a tf.TensorSpec for each weight."""

  def ThetaFrom(self, variables: nested_map.NestedMap) -> nested_map.NestedMap:
    """Turns such a nest of weights into the `theta` of `FProp`."""

  def FProp(self, theta: nested_map.NestedMap, *args: Any) -> Any:
    """Computes the outputs."""

  def FPropSkips(
    self, theta: nested_map.NestedMap, skips: nested_map.NestedMap, *args: Any
  ) -> tuple[Any, nested_map.NestedMap]:
    """Computes the outputs, and the skip connections that begin here."""


def TraceMeta(layer: TracedLayer, *input_specs: Any) -> nested_map.NestedMap:
  """Traces one call of `layer.FProp` and counts the operations of its graph.

  Args:
    layer: the layer.
    *input_specs: a (nest of) tf.TensorSpec with static shapes for each input; None allowed.

  Returns:
    NestedMap(flops, out_specs): floating-point operations of one forward call (a multiply-add
    counts as two) and a tuple with the (nest of) tf.TensorSpec of each output.
  """
  cost, out, _ = _Trace(layer, layer.FProp, *input_specs)
  return nested_map.NestedMap(flops=cost.flops, out_specs=out if isinstance(out, tuple) else (out,))


def TraceCost(
  layer: TracedLayer, skip_specs: nested_map.NestedMap, *input_specs: Any
) -> graph_cost.Cost:
  """Traces one call of `layer.FPropSkips` and counts its operations and the bytes of its results.

  The bytes exclude the outputs.

  Args:
    layer: the layer.
    skip_specs: the (nest of) tf.TensorSpec of each skip connection that ends in the layer.
    *input_specs: a (nest of) tf.TensorSpec with static shapes for each input; None allowed.
  """

  def Run(theta: nested_map.NestedMap, skips: nested_map.NestedMap, *args: Any) -> Any:
    out, stashed = layer.FPropSkips(theta, skips, *args)
    return out, dict(stashed)

  cost, _, outputs = _Trace(layer, Run, skip_specs, *input_specs)
  results, fused = result_bytes.CountOutputBytes(outputs)
  return dataclasses.replace(
    cost, result_bytes=cost.result_bytes - results, fused_bytes=cost.fused_bytes - fused
  )


def _Trace(
  layer: TracedLayer, fprop: Callable[..., Any], *input_specs: Any
) -> tuple[graph_cost.Cost, Any, list[tf.Tensor]]:
  """Returns the cost of `fprop(theta, *inputs)`, the specs of its result, and its tensors."""
  none_at = [i for i, s in enumerate(tf.nest.flatten(list(input_specs))) if s is None]
  flat_specs = [s for s in tf.nest.flatten(list(input_specs)) if s is not None]

  def Run(variables: Any, *flat: tf.Tensor) -> Any:
    leaves: list[Any] = list(flat)
    for i in none_at:
      leaves.insert(i, None)
    args = tf.nest.pack_sequence_as(list(input_specs), leaves)
    with fprop_context.Scope(step=0), side_effects.Forbid(layer.path):
      return fprop(layer.ThetaFrom(variables), *args)

  traced = tf.function(Run, autograph=False).get_concrete_function(
    layer.WeightTensorSpecs(), *flat_specs
  )
  cost = graph_cost.CountFlops(traced)
  if cost.unknown:
    tf.get_logger().warning(
      '%s: no FLOP rule for %s; counted one operation per output element',
      layer.path,
      ', '.join(sorted(cost.unknown)),
    )
  specs = tf.nest.map_structure(
    lambda t: None if t is None else tf.TensorSpec(t.shape, t.dtype), traced.structured_outputs
  )
  return cost, specs, list(traced.outputs)
