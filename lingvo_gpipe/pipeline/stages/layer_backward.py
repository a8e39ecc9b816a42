# SPDX-License-Identifier: Apache-2.0
"""Traced functions of a stage for the policy `layer`: one layer at a time is recomputed.

Forward keeps each layer's input. Backward goes through the layers from last to first and recomputes
each from its kept input:

    forward    x ──[0]── x1 ──[1]── x2 ──[2]──> y        residuals: x1, x2
    backward   [2] again from x2, dy ──> dx2;  [1] again from x1, dx2 ──> dx1;  [0] ...

That is one forward pass in total, with the inner activations of one layer at any time. The loss
belongs to the last layer, so that layer's outputs (logits, for example) are not kept.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.pipeline.stages import leaves, stage_math, weighted_loss

# The role of a layer's arguments or outputs. Other roles are names of skips, which are never empty.
_ARGS = ''
# {role: for each floating leaf its gradient or None}.
_Gradients = dict[str, list[Any]]


@dataclasses.dataclass(frozen=True)
class _Layout:
  """The places of the tensors that backward needs.

  Attributes:
    layer_inputs: for each layer a nest like its input, of indices into the leaves of the stage's
      input followed by the kept tensors; None for layers without a backward.
    from_y: indices of the leaves of y that are kept; they come before the other kept tensors.
    y: a nest like y, of tf.TensorSpec.
  """

  layer_inputs: list[Any]
  from_y: list[int]
  y: Any


class LayerBackward:
  """F and B of one structure of stage that keep every layer's input; see `StageFunctions`.

  Attributes:
    Backward: tf.function (call, accumulators, residuals, dy) -> (dx, token).
  """

  def __init__(self, math: stage_math.StageMath, xla: bool) -> None:
    self._math = math
    self._layouts: dict[Any, _Layout] = {}
    options = stage_math.FunctionOptions(xla)
    self._forward = tf.function(self._Forward, **options)
    self.Backward = tf.function(self._Backward, **options)
    layers = math.layers
    mask = iter(math.trained)
    self._trained = [
      list(itertools.islice(mask, len(tf.nest.flatten(layer.vars)))) for layer in layers
    ]
    # No layer before this one has any backward.
    self._first = 0 if math.needs_dx else [any(t) for t in self._trained].index(True)
    self._makers = {name: i for i, layer in enumerate(layers) for name in layer.skips_out}

  def Forward(
    self, call: stage_math.StageCall
  ) -> tuple[Any, nested_map.NestedMap, list[tf.Tensor]]:
    """Returns (y, sums, residuals): each tensor that backward needs besides x, once."""
    y, sums, only_kept = self._forward(call)
    # Tensors of y are not returned twice: XLA would copy them.
    of_y, layout = leaves.Tensors(y), self._layouts[_Key(call)]
    return y, sums, [*(of_y[i] for i in layout.from_y), *only_kept]

  def _Forward(
    self, call: stage_math.StageCall
  ) -> tuple[Any, nested_map.NestedMap, list[tf.Tensor]]:
    self._math.CountTrace(call.x, call.side)
    inputs: list[Any] = []
    with self._math.EnterContext(call.context.seeds):
      y, sums, _ = self._math.Outputs(call, inputs)
    inputs[: self._first] = [None] * self._first
    in_x, in_y = ([id(t) for t in leaves.Tensors(nest)] for nest in (call.x, y))
    needed = {id(t): t for t in leaves.Tensors(inputs) if id(t) not in in_x}
    from_y = [i for i, key in enumerate(in_y) if key in needed and key not in in_y[:i]]
    only_kept = [t for key, t in needed.items() if key not in in_y]
    keys = [*in_x, *(in_y[i] for i in from_y), *map(id, only_kept)]
    places = {key: place for place, key in enumerate(keys)}
    self._layouts[_Key(call)] = _Layout(
      tf.nest.map_structure(lambda t: None if t is None else places[id(t)], inputs),
      from_y,
      tf.nest.map_structure(lambda t: None if t is None else tf.TensorSpec(t.shape, t.dtype), y),
    )
    return y, sums, only_kept

  def _Backward(
    self,
    call: stage_math.StageCall,
    accumulators: Sequence[tf.Variable],
    residuals: list[tf.Tensor],
    dy: list[tf.Tensor] | None,
  ) -> tuple[list[tf.Tensor], tf.Tensor]:
    math, layout = self._math, self._layouts[_Key(call)]
    math.CountTrace(call.x, call.side)
    tensors = [*leaves.Tensors(call.x), *residuals]
    # Gradients of the outputs of the layer below, and of the skips that layers below begin.
    gradients: _Gradients = {}
    if dy is not None:
      gradients.update(_FloatsByRole(leaves.WithFloats(layout.y, dy)))
    variables = iter(accumulators)
    sinks = [list(itertools.islice(variables, sum(mask))) for mask in self._trained]
    done: list[tf.Tensor] = []
    num_layers = len(math.layers)
    for i in reversed(range(self._first, num_layers)):
      has_loss = dy is None and i == num_layers - 1
      # What follows from a layer's floating inputs waits in tf.recompute_grad for its gradient.
      # Random numbers and layers of integers wait here, and all layers wait for the weights'
      # gradients; XLA ignores control dependencies and would draw all random numbers first.
      seeds = _WaitFor(gradients.get(_ARGS, []), call.context.seeds)
      with tf.control_dependencies(done), math.EnterContext(seeds):
        layer_x = tf.nest.map_structure(
          # Two inputs may be one tensor, but each has its own gradient.
          lambda place: None if place is None else tf.identity(tensors[place]),
          layout.layer_inputs[i],
        )
        dw, dx = self._LayerGradient(i, call, layer_x, gradients, has_loss)
      # The loss may use the weights of any layer.
      if has_loss:
        math.Accumulate(accumulators, dw)
      else:
        math.Accumulate(sinks[i], dw, first=sum(map(len, sinks[:i])))
      gradients.pop(_ARGS, None)
      for role, grads in dx.items():
        gradients[role] = _Sums(gradients.get(role), grads)
      done = [tf.identity(g) for g in (*dw, *gradients.get(_ARGS, ())) if g is not None]
    floats = math.WantedFloats(call.x)
    grads = [g for role in _FloatsByRole(call.x) for g in gradients[role]] if floats else []
    return leaves.DenseGradients(floats, grads), tf.zeros([], tf.int32)

  def _LayerGradient(
    self,
    i: int,
    call: stage_math.StageCall,
    layer_x: nested_map.NestedMap,
    gradients: _Gradients,
    has_loss: bool,
  ) -> tuple[list[Any], _Gradients]:
    """Recomputes layer i; returns gradients of its trained weights and of its floating inputs.

    Args:
      i: the layer's index.
      call: the stage's arguments.
      layer_x: the layer's input, NestedMap(args, skips).
      gradients: gradients of the layer's outputs and skips, and maybe of other skips.
      has_loss: whether to add the loss to the layer; the result then has gradients of all
        trained weights of the stage.
    """
    math, context = self._math, call.context
    dy: list[tf.Tensor] = []

    def Layer(*floats: tf.Tensor) -> list[tf.Tensor]:
      out, aux_losses = math.RunLayer(i, call.variables[i], leaves.WithFloats(layer_x, floats))
      losses = [
        weighted_loss.WeightedLoss(value, context.loss_weight, coefficient)
        for value, coefficient in aux_losses.values()
      ]
      if has_loss:
        loss = math.Metrics(call, out.args)['loss'][0]
        losses.append(weighted_loss.WeightedLoss(loss, context.loss_weight))
      pairs = [
        pair
        for role, values in _FloatsByRole(out).items()
        for pair in zip(values, gradients.get(role) or [None] * len(values), strict=True)
        if pair[1] is not None
      ]
      dy[:] = [g for _, g in pairs]
      return [*(t for t, _ in pairs), *losses]

    floats_by_role = _FloatsByRole(layer_x)
    floats = [t for values in floats_by_role.values() for t in values]
    if has_loss:
      weights = math.Trained(call.variables)
    else:
      mask = zip(tf.nest.flatten(call.variables[i]), self._trained[i], strict=True)
      weights = [w for w, is_trained in mask if is_trained]
    by_role = {role: values for role, values in floats_by_role.items() if self._IsWanted(i, role)}
    sources = [t for values in by_role.values() for t in values]
    roles = (_ARGS, *math.layers[i].skips_out)
    has_gradient = any(g is not None for role in roles for g in gradients.get(role, ()))
    with tf.GradientTape() as tape:
      tape.watch(floats)
      # If nothing else has a gradient, an auxiliary loss may.
      repeat = has_gradient or has_loss
      objective = math.Recomputed(Layer, floats) if repeat else Layer(*floats)
      grads = tape.gradient(
        objective,
        [*weights, *sources],
        output_gradients=stage_math.WithOwnLosses(dy, objective),
      )
    dx = iter(None if g is None else tf.convert_to_tensor(g) for g in grads[len(weights) :])
    return grads[: len(weights)], {role: [next(dx) for _ in v] for role, v in by_role.items()}

  def _IsWanted(self, i: int, role: str) -> bool:
    """Whether anything needs the gradient of layer i's arguments, or of a skip that it takes."""
    if self._math.needs_dx:
      return True
    return i > self._first if role == _ARGS else self._makers.get(role, -1) >= self._first


def _Key(call: stage_math.StageCall) -> Any:
  return leaves.TraceKey((call.x, call.side, call.context))


def _WaitFor(gradients: Sequence[tf.Tensor | None], seeds: tf.Tensor) -> tf.Tensor:
  """Returns the seeds, made to wait for the first of the gradients even under XLA."""
  for gradient in [g for g in gradients if g is not None][:1]:
    element = tf.math.real(tf.reshape(gradient, [-1])[:1])
    # No number is finite and above the greatest; no compiler has noticed so far.
    never = tf.math.is_finite(element) & (element > element.dtype.max)
    seeds += tf.reduce_sum(tf.cast(never, seeds.dtype))
  return seeds


def _FloatsByRole(nest: nested_map.NestedMap) -> dict[str, list[tf.Tensor]]:
  """Returns the floating leaves of the arguments and of each skip in NestedMap(args, skips)."""
  skips = {name: leaves.Floats(nest.skips[name]) for name in sorted(nest.skips)}
  return {_ARGS: leaves.Floats(nest.args), **skips}


def _Sums(a: list[Any] | None, b: list[Any]) -> list[Any]:
  """Returns the sums of two lists of gradients, None among them."""
  if a is None:
    return b
  return [x if y is None else y if x is None else x + y for x, y in zip(a, b, strict=True)]
