# SPDX-License-Identifier: Apache-2.0
"""Traced functions of a stage whose backward goes layer by layer: policies `layer` and `ByLayer`.

The stage runs as a pipeline of one-layer stages within one function. Forward keeps the input of
each layer, and the residuals of layers that are not recomputed. Backward goes from the last layer
to the first:

    forward    x ──[0]── x1 ──[1]── x2 ──[2]──> y        kept: x1, x2, the residuals of [1]
    backward   [2] again from x2, dy ──> dx2;  [1] from its residuals, dx2 ──> dx1;  [0] again ...

So the inner activations are recomputed for one layer at a time. The loss belongs to the last layer:
if that is recomputed, its outputs (logits, for example) are not kept.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import nested_map, pipeline_element
from lingvo_gpipe.pipeline.stages import leaves, split_backward, stage_functions, stage_math


@dataclasses.dataclass(frozen=True)
class _Segment:
  """One layer of the stage, with its functions.

  Attributes:
    math: its computations.
    functions: StageFunctions if the layer is recomputed, else SplitBackward.
  """

  math: stage_math.StageMath
  functions: Any


@dataclasses.dataclass(frozen=True)
class _Layout:
  """The places of the tensors that backward needs.

  Attributes:
    x: for each layer a nest like its input, of indices into the leaves of the stage's input
      followed by the kept tensors; None for layers without a backward.
    residuals: for each layer such indices of its residuals; None if it is recomputed.
    outputs: for each layer a nest like its outputs, of tf.TensorSpec.
    from_y: indices of the leaves of y that are kept; they come before the other kept tensors.
  """

  x: list[Any]
  residuals: list[Any]
  outputs: list[Any]
  from_y: list[int]


class LayerBackward:
  """F and B of one structure of stage, layer by layer; see `StageFunctions`.

  Attributes:
    Backward: tf.function (call, accumulators, residuals, dy) -> (dx, accumulated).
  """

  def __init__(
    self,
    math: stage_math.StageMath,
    xla: bool,
    layers: Sequence[Collection[str] | None] = (),
  ) -> None:
    """Traces nothing.

    Args:
      math: the computations of the stage.
      xla: whether XLA compiles the functions.
      layers: for each layer the parts that backward recomputes; None: the whole layer. Empty: every
        layer as a whole.
    """
    self._math, self._xla = math, xla
    self._layouts: dict[Any, _Layout] = {}
    self._forward = stage_math.Traced(self._Forward, xla)
    self.Backward = stage_math.Traced(self._Backward, xla)
    stage = list(math.layers)
    layers = layers or [None] * len(stage)
    # Skips that anything after a layer takes.
    skips_taken = set(math.exports).union(*(layer.skips_in for layer in stage))
    needs_dx = math.needs_dx
    self._segments: list[_Segment] = []
    # No layer before this one has any backward.
    self._first: int | None = None
    mask = iter(math.trained)
    for i, layer in enumerate(stage):
      is_trained = any(list(itertools.islice(mask, math.num_weights[i])))
      exports = sorted(skips_taken.intersection(layer.skips_out))
      segment = math.Segment(i, exports=exports, needs_dx=needs_dx)
      if layers[i] is None:
        functions: Any = stage_functions.StageFunctions(segment, xla, is_inner=True)
      else:
        functions = split_backward.SplitBackward(segment, xla, layers, is_inner=True)
      self._segments.append(_Segment(segment, functions))
      needs_dx = needs_dx or is_trained
      if needs_dx and self._first is None:
        self._first = i

  def Forward(
    self, call: stage_math.StageCall
  ) -> tuple[Any, nested_map.NestedMap, list[tf.Tensor]]:
    """Returns (y, sums, residuals); residuals are all tensors that backward needs besides x."""
    y, sums, only_kept = self._forward(call)
    # Tensors of y are not returned twice: XLA would copy them.
    output_tensors, layout = leaves.Tensors(y), self._layouts[_Key(call)]
    return y, sums, [*(output_tensors[i] for i in layout.from_y), *only_kept]

  def _Forward(
    self, call: stage_math.StageCall
  ) -> tuple[Any, nested_map.NestedMap, list[tf.Tensor]]:
    self._math.CountTrace(call.x, call.side)
    sums = nested_map.NestedMap(metrics={}, rows={}, layers={})
    inputs: list[Any] = []
    residuals: list[Any] = []
    outputs: list[Any] = []
    before: list[tf.Tensor] = []

    def Run(i: int, _: Any, args: tuple[Any, ...], skips: nested_map.NestedMap) -> Any:
      segment, x = self._segments[i], nested_map.NestedMap(args=args, skips=skips)
      # Sums over the replicas must run in one order.
      with tf.control_dependencies(before if self._math.sums_over_replicas else []):
        y, new_sums, new_residuals = segment.functions.Forward(segment.math.OfSegment(call, x))
      before[:] = leaves.Tensors((y, new_sums))
      for name, values in new_sums.items():
        for key, value in values.items():
          # The loss may call a layer of the stage, which then reports sums twice.
          known = sums[name].get(key)
          new = value if known is None else tf.nest.map_structure(tf.add, known, value)
          sums[name][key] = new
      has_backward = self._first is not None and i >= self._first
      inputs.append(x if has_backward else None)
      residuals.append(new_residuals if has_backward else None)
      outputs.append(y)
      return (y.args, y.skips) if y else ((), {})  # The loss takes the outputs of the last layer.

    _, skips = pipeline_element.RunLayers(self._math.layers, Run, call.x.args, call.x.skips)
    y = outputs[-1]
    if y:
      exported = nested_map.NestedMap({name: skips[name] for name in self._math.exports})
      y = nested_map.NestedMap(args=y.args, skips=exported)
    in_x, in_y = ([id(t) for t in leaves.Tensors(nest)] for nest in (call.x, y))
    needed = {id(t): t for t in leaves.Tensors((inputs, residuals)) if id(t) not in in_x}
    from_y = [i for i, key in enumerate(in_y) if key in needed and key not in in_y[:i]]
    only_kept = [t for key, t in needed.items() if key not in in_y]
    keys = [*in_x, *(in_y[i] for i in from_y), *map(id, only_kept)]
    places = {key: place for place, key in enumerate(keys)}

    def Places(nest: Any) -> Any:
      return tf.nest.map_structure(lambda t: None if t is None else places[id(t)], nest)

    specs = tf.nest.map_structure(
      lambda t: None if t is None else tf.TensorSpec(t.shape, t.dtype), outputs
    )
    self._layouts[_Key(call)] = _Layout(Places(inputs), Places(residuals), specs, from_y)
    return y, sums, only_kept

  def _Backward(
    self,
    call: stage_math.StageCall,
    accumulators: Sequence[tf.Variable],
    residuals: list[tf.Tensor],
    dy: list[tf.Tensor] | None,
  ) -> tuple[list[tf.Tensor], stage_math.Accumulated]:
    math, layout = self._math, self._layouts[_Key(call)]
    math.CountTrace(call.x, call.side)
    tensors = [*leaves.Tensors(call.x), *residuals]

    def Tensors(places: Any) -> Any:
      # Two inputs may be one tensor, but each has its own gradient.
      return tf.nest.map_structure(
        lambda place: None if place is None else tf.identity(tensors[place]), places
      )

    # Gradients of the outputs of the layer below, and of skips: a list for each layer that took it.
    dargs: list[tf.Tensor] = []
    dskips: dict[str, list[list[tf.Tensor]]] = {}
    if dy is not None:
      gradients = iter(dy)
      dargs = _Take(gradients, layout.outputs[-1].args)
      skips = {name: o.skips[name] for o in layout.outputs for name in o.skips}
      for name in math.exports:
        dskips[name] = [_Take(gradients, skips[name])]
    done: list[tf.Tensor] = []
    accumulated = stage_math.Accumulated({}, tf.zeros([], tf.int32))
    for i in reversed(range(self._first or 0, len(self._segments))):
      segment = self._segments[i]
      layer_dy = None
      if dy is not None or i < len(self._segments) - 1:
        skip_dys = [leaves.AddUp(dskips.pop(name)) for name in segment.math.exports]
        layer_dy = [*dargs, *(g for grads in skip_dys for g in grads)]
      # A layer waits for the gradients of the layer after it, so that the inner activations of one
      # layer exist at a time. XLA ignores control dependencies.
      with tf.control_dependencies(done):
        x = Tensors(layout.x[i])
        if self._xla and layer_dy:
          x = leaves.WithFloats(x, [_WaitFor(layer_dy[0], t) for t in leaves.Floats(x)])
        layer_call = segment.math.OfSegment(call, x)
        if self._xla and layer_dy:
          seeds = _WaitFor(layer_dy[0], layer_call.context.seeds)
          layer_call = layer_call._replace(context=layer_call.context._replace(seeds=seeds))
        dx: list[tf.Tensor] = []
        if any(segment.math.trained) or (segment.math.needs_dx and leaves.Floats(x)):
          sinks = segment.math.OfAccumulators(accumulators)
          layer_residuals = Tensors(layout.residuals[i])
          dx, segment_gradients = segment.functions.Backward(
            layer_call, sinks, layer_residuals, layer_dy
          )
          done = [segment_gradients.token, *dx]
          for leaf, sparse in segment_gradients.sparse.items():
            accumulated.sparse.setdefault(leaf, []).extend(sparse)
      grads = iter(dx)
      if segment.math.needs_dx:
        dargs = _Take(grads, x.args)
        for name in sorted(x.skips):
          dskips.setdefault(name, []).append(_Take(grads, x.skips[name]))
      else:
        dargs = []
    if not math.needs_dx:
      return [], accumulated
    dskips_in = [leaves.AddUp(dskips[name]) for name in sorted(call.x.skips)]
    return [*dargs, *(g for grads in dskips_in for g in grads)], accumulated


def _Key(call: stage_math.StageCall) -> Any:
  return leaves.TraceKey((call.x, call.side, call.context))


def _Take(gradients: Iterator[tf.Tensor], nest: Any) -> list[tf.Tensor]:
  """Returns the next gradients, one for each floating leaf of the nest."""
  return [next(gradients) for _ in leaves.Floats(nest)]


def _WaitFor(gradient: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
  """Returns x, made to wait for a gradient even under XLA."""
  element = tf.math.real(tf.reshape(gradient, [-1])[:1])
  # No number is finite and above the greatest; so far no compiler folds this condition.
  never = tf.math.is_finite(element) & (element > element.dtype.max)
  return tf.where(tf.reduce_any(never), tf.zeros_like(x), x)
