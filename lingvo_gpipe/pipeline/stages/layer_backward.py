# SPDX-License-Identifier: Apache-2.0
"""Stage functions of the policy `layer`: forward keeps each layer's input, backward goes by layer.

Backward goes through the layers from last to first and computes one at a time again, from its kept
input: one forward pass in total, and one layer's inner activations at any time. The loss belongs to
the last layer, so that layer's outputs (logits, for example) are not kept.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.pipeline.stages import leaves, stage_functions, weighted_loss

# A layer's arguments or outputs, beside the names of skips, which are never empty.
_ARGS = ''
# {_ARGS or name of a skip: for each floating leaf its gradient, if it has any}.
_Gradients = dict[str, list[Any]]


@dataclasses.dataclass(frozen=True)
class _Layout:
  """Where backward finds what.

  Attributes:
    layer_inputs: for each layer a nest like its input, of indices into the leaves of the stage's
      input followed by what is kept; None for layers that have no backward.
    from_y: which leaves of y are kept; they come before what only backward needs.
    y: a nest like y, of tf.TensorSpec.
  """

  layer_inputs: list[Any]
  from_y: list[int]
  y: Any


class LayerBackward:
  """F and B of a stage of which every layer's input is kept; arguments as for `stage`'s.

  Attributes:
    BackwardKept: (variables, accumulators, x, side, context, kept, dy) -> (dx, token).
  """

  def __init__(self, functions: stage_functions.StageFunctions, xla: bool) -> None:
    self._functions = functions
    self._layouts: dict[Any, _Layout] = {}
    options = stage_functions.FunctionOptions(xla)
    self._forward_keep = tf.function(self._ForwardKeep, **options)
    self.BackwardKept = tf.function(self._BackwardKept, **options)
    rest = iter(functions.trained)
    self._trained = [
      list(itertools.islice(rest, len(tf.nest.flatten(layer.vars)))) for layer in functions.layers
    ]
    # No layer before this one has any backward.
    self._first = 0 if functions.needs_dx else [any(t) for t in self._trained].index(True)
    self._makers = {name: i for i, layer in enumerate(functions.layers) for name in layer.skips_out}

  def ForwardKeep(
    self, variables: Sequence[Any], x: nested_map.NestedMap, side: Any, context: Any
  ) -> tuple[Any, dict[str, tf.Tensor], list[tf.Tensor]]:
    """(y, sums, what is kept beside x): each tensor once, however many layers take it."""
    y, sums, kept = self._forward_keep(variables, x, side, context)
    # What is in y is not returned again, for XLA would make another tensor of it.
    of_y, layout = leaves.Tensors(y), self._layouts[leaves.TraceKey((x, side, context))]
    return y, sums, [*(of_y[i] for i in layout.from_y), *kept]

  def _ForwardKeep(
    self, variables: Sequence[Any], x: nested_map.NestedMap, side: Any, context: Any
  ) -> tuple[Any, dict[str, tf.Tensor], list[tf.Tensor]]:
    self._functions.CountTrace(x, side)
    inputs: list[Any] = []
    with self._functions.EnterContext(context.seeds):
      y, sums, _ = self._functions.Outputs(variables, x, side, context, inputs)
    inputs[: self._first] = [None] * self._first
    in_x, in_y = ([id(t) for t in leaves.Tensors(nest)] for nest in (x, y))
    wanted = {id(t): t for t in leaves.Tensors(inputs) if id(t) not in in_x}
    from_y = [i for i, key in enumerate(in_y) if key in wanted and key not in in_y[:i]]
    kept = [t for key, t in wanted.items() if key not in in_y]
    keys = [*in_x, *(in_y[i] for i in from_y), *map(id, kept)]
    places = {key: place for place, key in enumerate(keys)}
    self._layouts[leaves.TraceKey((x, side, context))] = _Layout(
      tf.nest.map_structure(lambda t: None if t is None else places[id(t)], inputs),
      from_y,
      tf.nest.map_structure(lambda t: None if t is None else tf.TensorSpec(t.shape, t.dtype), y),
    )
    return y, sums, kept

  def _BackwardKept(
    self,
    variables: Sequence[Any],
    accumulators: Sequence[tf.Variable],
    x: nested_map.NestedMap,
    side: Any,
    context: Any,
    kept: list[tf.Tensor],
    dy: list[tf.Tensor] | None,
  ) -> tuple[list[tf.Tensor], tf.Tensor]:
    self._functions.CountTrace(x, side)
    functions, layout = self._functions, self._layouts[leaves.TraceKey((x, side, context))]
    tensors = [*leaves.Tensors(x), *kept]
    # Of what the next layer below returns, and of the skips that any below does.
    gradients: _Gradients = {}
    if dy is not None:
      gradients.update(_FloatsByRole(leaves.WithFloats(layout.y, dy)))
    rest = iter(accumulators)
    sinks = [list(itertools.islice(rest, sum(mask))) for mask in self._trained]
    done: list[tf.Tensor] = []
    for i in reversed(range(self._first, len(functions.layers))):
      has_loss = dy is None and i == len(functions.layers) - 1
      # What follows from a layer's floating inputs waits in tf.recompute_grad for its gradient.
      # Random numbers and layers of integers do here, and all wait for the weights' gradients;
      # XLA, which knows no control dependencies, would draw all random numbers first.
      seeds = _WaitFor(gradients.get(_ARGS, []), context.seeds)
      with tf.control_dependencies(done), functions.EnterContext(seeds):
        given = tf.nest.map_structure(
          # Two of them may be one tensor, but have a gradient each.
          lambda place: None if place is None else tf.identity(tensors[place]),
          layout.layer_inputs[i],
        )
        dw, dx = self._LayerGradient(
          i, variables, given, context, gradients, loss_side=(side,) if has_loss else None
        )
      # The loss may take the weights of any layer.
      stage_functions.Accumulate(accumulators if has_loss else sinks[i], dw)
      gradients.pop(_ARGS, None)
      for role, grads in dx.items():
        gradients[role] = _Sums(gradients.get(role), grads)
      done = [tf.identity(g) for g in (*dw, *gradients.get(_ARGS, ())) if g is not None]
    floats = functions.WantedFloats(x)
    grads = [g for role in _FloatsByRole(x) for g in gradients[role]] if floats else []
    return leaves.DenseGradients(floats, grads), tf.zeros([], tf.int32)

  def _LayerGradient(
    self,
    i: int,
    variables: Sequence[Any],
    given: nested_map.NestedMap,
    context: Any,
    gradients: _Gradients,
    loss_side: tuple[Any] | None,
  ) -> tuple[list[Any], _Gradients]:
    """Layer i again, and the gradients of its trained weights and of its floating inputs.

    Args:
      i: the layer's index.
      variables: as for B.
      given: the layer's input.
      context: as for B.
      gradients: those of its outputs and skips, and maybe of other skips.
      loss_side: where the loss is added to the layer, what it needs of the micro-batch; then the
        gradients are those of all trained weights of the stage.
    """
    functions = self._functions
    dy: list[tf.Tensor] = []

    def Layer(*floats: tf.Tensor) -> list[tf.Tensor]:
      out, aux_losses = functions.RunLayer(i, variables[i], leaves.WithFloats(given, floats))
      losses = [weighted_loss.WeightedLoss(value, context, c) for value, c in aux_losses.values()]
      if loss_side is not None:
        loss = functions.Metrics(variables, out.args, *loss_side, context)['loss'][0]
        losses.append(weighted_loss.WeightedLoss(loss, context))
      pairs = [
        pair
        for role, values in _FloatsByRole(out).items()
        for pair in zip(values, gradients.get(role) or [None] * len(values), strict=True)
        if pair[1] is not None
      ]
      dy[:] = [g for _, g in pairs]
      return [*(t for t, _ in pairs), *losses]

    floats_by_role = _FloatsByRole(given)
    floats = [t for values in floats_by_role.values() for t in values]
    if loss_side is not None:
      weights = functions.Trained(variables)
    else:
      mask = zip(tf.nest.flatten(variables[i]), self._trained[i], strict=True)
      weights = [w for w, is_trained in mask if is_trained]
    wanted = {role: values for role, values in floats_by_role.items() if self._IsWanted(i, role)}
    sources = [t for values in wanted.values() for t in values]
    below = (_ARGS, *functions.layers[i].skips_out)
    has_gradient = any(g is not None for role in below for g in gradients.get(role, ()))
    with tf.GradientTape() as tape:
      tape.watch(floats)
      # Where nothing else has a gradient, an auxiliary loss may.
      repeat = has_gradient or loss_side is not None
      outputs = functions.Recomputed(Layer, floats) if repeat else Layer(*floats)
      grads = tape.gradient(
        outputs, [*weights, *sources], output_gradients=stage_functions.WithOwnLosses(dy, outputs)
      )
    dx = iter(None if g is None else tf.convert_to_tensor(g) for g in grads[len(weights) :])
    return grads[: len(weights)], {role: [next(dx) for _ in v] for role, v in wanted.items()}

  def _IsWanted(self, i: int, role: str) -> bool:
    """Whether the gradient of layer i's arguments, or of a skip that it takes, is of any use."""
    if self._functions.needs_dx:
      return True
    return i > self._first if role == _ARGS else self._makers.get(role, -1) >= self._first


def _WaitFor(gradients: Sequence[tf.Tensor | None], seeds: tf.Tensor) -> tf.Tensor:
  """The seeds, which wait for the first of the gradients even under XLA."""
  for gradient in [g for g in gradients if g is not None][:1]:
    element = tf.math.real(tf.reshape(gradient, [-1])[:1])
    # No number is finite and above the greatest; no compiler so far sees that.
    never = tf.math.is_finite(element) & (element > element.dtype.max)
    seeds += tf.reduce_sum(tf.cast(never, seeds.dtype))
  return seeds


def _FloatsByRole(nest: nested_map.NestedMap) -> dict[str, list[tf.Tensor]]:
  """The floating leaves of NestedMap(args, skips), of the arguments and of each skip."""
  skips = {name: leaves.Floats(nest.skips[name]) for name in sorted(nest.skips)}
  return {_ARGS: leaves.Floats(nest.args), **skips}


def _Sums(a: list[Any] | None, b: list[Any]) -> list[Any]:
  """The sums of two lists of gradients, None among them."""
  if a is None:
    return b
  return [x if y is None else y if x is None else x + y for x, y in zip(a, b, strict=True)]
