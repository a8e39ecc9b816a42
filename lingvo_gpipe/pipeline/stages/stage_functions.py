# SPDX-License-Identifier: Apache-2.0
"""A stage's traced functions: its forward F and its backward B, which re-materialises.

F and B take everything as arguments: the weights as tf.Variables (never captured, so that
stages of equal structure share one trace and XLA meets no variable of another device), the
stage's input, what comes from the side, and a context of seeds and loss weight. B adds the
weight gradients into accumulator variables in place and returns the gradient of the stage's
floating inputs.

Each is compiled by XLA or marked as not to be inlined: were it inlined, the control edges that
hold the schedule would vanish and the recomputation would be merged with the first forward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import base_layer, fprop_context, nested_map, shapes, side_effects
from lingvo_gpipe.pipeline.stages import failures, leaves, retraces, weighted_loss

# Maps (theta of each layer of the last stage, outputs of the last layer, side inputs) of a
# micro-batch to metrics: {name: (value, weight)}, scalars, 'loss' among them.
LossFn = Callable[[list[Any], tuple[Any, ...], Any], dict[str, tuple[tf.Tensor, tf.Tensor]]]
# (place, tensor) -> its sum over the replicas, each of which is at the same place.
ReplicaSum = Callable[[str, tf.Tensor], tf.Tensor]


def AsTuple(value: Any) -> tuple[Any, ...]:
  """A layer's outputs as a tuple."""
  return value if isinstance(value, tuple) else (value,)


def AsTensors(layer: base_layer.BaseLayer, outputs: Any) -> Any:
  """What a layer returned, numbers and arrays as tensors; TypeError for what is no such thing."""

  def Convert(value: Any) -> Any:
    try:
      return value if value is None or isinstance(value, tf.Tensor) else tf.convert_to_tensor(value)
    except (TypeError, ValueError) as e:
      raise TypeError(
        f'{layer.path}: FProp must return tensors, None, or a nest of them, got a '
        f'{type(value).__name__}'
      ) from e

  return tf.nest.map_structure(Convert, outputs)


def CheckSkips(layer: base_layer.BaseLayer, stashed: Any) -> None:
  """ValueError where a layer does not begin exactly the skip connections that it announced."""
  if set(stashed) != set(layer.skips_out):
    raise ValueError(
      f'{layer.path}: skips_out announces {sorted(layer.skips_out)}, but what began is '
      f'{sorted(stashed)}; return every announced skip from FPropSkips (FPropMetaSkips)'
    )


class StructureKey:
  """Equal for two layers that compute the same function of (theta, inputs, seeds).

  The text alone would not do: two functions among the Params may have the same name.
  """

  def __init__(self, layer: base_layer.BaseLayer) -> None:
    self._params = layer.params.Copy()
    self._params.name = ''
    self._text = self._params.ToText()

  def __hash__(self) -> int:
    return hash(self._text)

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, StructureKey):
      return NotImplemented
    return self._text == other._text and bool(self._params == other._params)


class StageFunctions:
  """F, B and V of one structure of stage, shared by all stages that have it.

  Attributes:
    Forward: tf.function (variables, x, side, context) -> (y, sums).
    Backward: tf.function (variables, accumulators, x, side, context, dy) -> (dx, token).
    ForwardBackward: tf.function (variables, accumulators, x, side, context) -> (dx, sums); of the
      last stage only, where nothing has to be recomputed.

  `variables` is a list with one nest (as `layer.vars`) a layer. `x` is NestedMap(args, skips): the
  tuple of arguments of the first layer, and the skip connections {name: nest} that end in this
  stage; `y` holds what the last layer returned, tuple or not, and the skips in `exports`. `side` is
  what the loss needs of the micro-batch, None but in the last stage. `context` is NestedMap(seeds,
  loss_weight): the layers' seed pairs, int64 [layers, 2], and the weight of the micro-batch's loss,
  a scalar. `sums` is NestedMap(metrics, layers). `metrics` holds {metric: [sum of value * weight,
  sum of weight]}, each a tensor [2]: the metrics in the last stage, which in turn returns no y, for
  full-batch logits never exist; and the auxiliary losses, named `<layer's index in the stage>:<path
  below it>.<name>`. `layers` holds what layers reported for their state by `AddSums`, {`<index>:
  <path below it>`: {name: tensor}}. `dy` and `dx` are the gradients of the floating leaves of y and
  x; dx is empty where no stage before is trained.
  """

  def __init__(
    self,
    layers: Sequence[base_layer.BaseLayer],
    *,
    loss_fn: LossFn | None,
    exports: Sequence[str],
    trained: Sequence[bool],
    needs_dx: bool,
    do_eval: bool,
    xla: bool,
    replica_sum: ReplicaSum | None = None,
  ) -> None:
    self.layers = list(layers)
    self.exports = list(exports)
    self.trained = list(trained)
    self.needs_dx = needs_dx
    self._loss_fn = loss_fn
    self._do_eval = do_eval
    self._replica_sum = replica_sum
    self.num_traces = 0
    self._user = 0
    self.num_batch_shapes = 1  # As `SharedFunctions` says.
    self._retraces = retraces.Retraces()
    options = FunctionOptions(xla)
    self.Forward = tf.function(self._Forward, **options)
    self.Backward = tf.function(self._Backward, **options)
    self.ForwardBackward = tf.function(self._ForwardBackward, **options)
    self.ThetaBackward = tf.function(self._ThetaBackward, **options)

  def UseFor(self, index: int, layers: Sequence[base_layer.BaseLayer]) -> None:
    """To be called before a stage calls: what is traced then, names its layers in messages.

    Args:
      index: the stage's number.
      layers: its layers, which compute the same as those of all stages with these functions.
    """
    self._user, self.layers = index, list(layers)

  def CountTrace(self, x: nested_map.NestedMap, side: Any) -> None:
    """To be called when a function is traced, with its inputs."""
    self.num_traces += 1
    self._retraces.Add(self.layers, x, side, self._user, self.num_batch_shapes)

  def Trained(self, weights: Any) -> list[Any]:
    """Those of a nest like `variables` that are trained: the ones that B accumulates for."""
    return [
      w for w, is_trained in zip(tf.nest.flatten(weights), self.trained, strict=True) if is_trained
    ]

  def WantedFloats(self, x: nested_map.NestedMap) -> list[tf.Tensor]:
    """The floating leaves of x that need a gradient: none where nothing before is trained."""
    return leaves.Floats(x) if self.needs_dx else []

  def EnterContext(self, seeds: tf.Tensor) -> Any:
    rows = {id(layer): seeds[i] for i, layer in enumerate(self.layers)}
    context = fprop_context.FPropContext(
      self._do_eval, seed_rows=rows, replica_sum=self._replica_sum
    )
    return fprop_context.Enter(context)

  def RunLayer(
    self, i: int, layer_vars: Any, given: nested_map.NestedMap
  ) -> tuple[nested_map.NestedMap, dict[str, tuple[tf.Tensor, float]]]:
    """Layer i: (NestedMap(args, skips) as it returned them, {name: (auxiliary loss, coefficient)}).

    Args:
      i: its index in the stage.
      layer_vars: a nest like its `vars`.
      given: NestedMap(args, skips), its arguments and the skips that it takes.
    """
    layer = self.layers[i]
    outer = fprop_context.Current()
    try:
      with fprop_context.Enter(dataclasses.replace(outer, aux_losses=[])) as inner:
        with failures.LayerScope(i), side_effects.Forbid(layer.path):
          out, stashed = layer.FPropSkips(layer.ThetaFrom(layer_vars), given.skips, *given.args)
          CheckSkips(layer, stashed)
          out, stashed = AsTensors(layer, out), AsTensors(layer, stashed)
      aux_losses = {}
      for owner, name, value, coefficient in inner.aux_losses:
        key = f'{i}:{owner.path[len(layer.path) :]}.{name}'
        if key in aux_losses:
          raise ValueError(f'{owner.path} adds two auxiliary losses {name!r}; name them apart')
        what = f'auxiliary loss {owner.path}.{name}'
        aux_losses[key] = (weighted_loss.Loss(what, value), coefficient)
    except Exception as e:
      giver = f' by {self.layers[i - 1].path}' if i else ''
      kind = type(layer).__name__
      e.add_note(f'in layer {layer.path} ({kind}), given {shapes.FormatNest(given.args)}{giver}')
      raise
    return nested_map.NestedMap(args=out, skips=stashed), aux_losses

  def _RunLayers(
    self,
    variables: Sequence[Any],
    x: nested_map.NestedMap,
    layer_inputs: list[nested_map.NestedMap] | None = None,
  ) -> tuple[nested_map.NestedMap, dict[str, tuple[tf.Tensor, float]]]:
    """(y, {name: (auxiliary loss, coefficient)}); appends each layer's input to `layer_inputs`."""
    args, skips = x.args, nested_map.NestedMap(x.skips)
    aux_losses: dict[str, tuple[tf.Tensor, float]] = {}
    for i, (layer, layer_vars) in enumerate(zip(self.layers, variables, strict=True)):
      taken = nested_map.NestedMap({name: skips[name] for name in layer.skips_in})
      given = nested_map.NestedMap(args=AsTuple(args), skips=taken)
      if layer_inputs is not None:
        layer_inputs.append(given)
      out, aux = self.RunLayer(i, layer_vars, given)
      args = out.args
      skips.update(out.skips)
      aux_losses.update(aux)
    exported = nested_map.NestedMap({name: skips[name] for name in self.exports})
    return nested_map.NestedMap(args=args, skips=exported), aux_losses

  def _Forward(
    self, variables: Sequence[Any], x: nested_map.NestedMap, side: Any, context: Any
  ) -> tuple[Any, nested_map.NestedMap]:
    self.CountTrace(x, side)
    with self.EnterContext(context.seeds):
      y, sums, _ = self.Outputs(variables, x, side, context)
      return y, sums

  def Outputs(
    self,
    variables: Sequence[Any],
    x: nested_map.NestedMap,
    side: Any,
    context: Any,
    layer_inputs: list[nested_map.NestedMap] | None = None,
  ) -> tuple[Any, nested_map.NestedMap, list[tf.Tensor]]:
    """(y, sums, what backward differentiates).

    That is the floating outputs but for the stage with the loss, then the auxiliary losses and the
    loss, weighted: these are the stage's own, and no gradient comes for them from above. Each
    layer's input, NestedMap(args, skips), is appended to `layer_inputs`.
    """
    y, aux_losses = self._RunLayers(variables, x, layer_inputs)
    metric_sums = {}
    objective = [] if self._loss_fn is not None else leaves.Floats(y)
    for name, (value, coefficient) in aux_losses.items():
      metric_sums[name] = weighted_loss.WeightedSum(value, context.loss_weight)
      objective.append(weighted_loss.WeightedLoss(value, context, coefficient))
    if self._loss_fn is None:
      return y, self._Sums(metric_sums), objective
    metrics = self.Metrics(variables, y.args, side, context)
    metric_sums.update({name: weighted_loss.WeightedSum(*pair) for name, pair in metrics.items()})
    objective.append(weighted_loss.WeightedLoss(metrics['loss'][0], context))
    return (), self._Sums(metric_sums), objective

  def Metrics(
    self, variables: Sequence[Any], outputs: Any, side: Any, context: Any
  ) -> dict[str, tuple[tf.Tensor, tf.Tensor]]:
    """The loss function's metrics, of what the last layer returned."""
    assert self._loss_fn is not None
    theta = [layer.ThetaFrom(v) for layer, v in zip(self.layers, variables, strict=True)]
    floats = [weighted_loss.WhereItCounts(x, context.loss_weight) for x in leaves.Floats(outputs)]
    outputs = leaves.WithFloats(AsTuple(outputs), floats)
    try:
      with failures.LossScope(), side_effects.Forbid('the loss'):
        return weighted_loss.Metrics(self._loss_fn(theta, outputs, side))
    except Exception as e:
      given = f'{shapes.FormatNest(outputs)}, beside them {shapes.FormatNest(side)}'
      e.add_note(f'in the loss, which stage {self._user} runs, given the outputs {given}')
      raise

  def _Sums(self, metric_sums: dict[str, tf.Tensor]) -> nested_map.NestedMap:
    """`metric_sums` and what layers reported in this context by AddSums."""
    index = {id(layer): i for i, layer in enumerate(self.layers)}
    found = {}
    for owner, sums in fprop_context.Current().layer_sums.values():
      layer = next(a for a in owner.Ancestors() if id(a) in index)
      found[f'{index[id(layer)]}:{owner.path[len(layer.path) :]}'] = sums
    return nested_map.NestedMap(metrics=metric_sums, layers=found)

  def Recomputed(
    self, function: Callable[..., list[tf.Tensor]], floats: Sequence[tf.Tensor]
  ) -> list[tf.Tensor]:
    """`function(*floats)`, of which a tape keeps the floats only, and which its gradient repeats.

    But for stages that take sums over the replicas: TensorFlow would not leave these out of the
    first run, whose results nobody needs.
    """
    # tf.recompute_grad needs an argument; without floats there is no activation to keep from them.
    if not floats or self._replica_sum is not None:
      return function(*floats)
    is_complex: list[bool] = []

    # It takes the maximum of the first gradient that it is given, and complex numbers have none.
    def InReals(*floats: tf.Tensor) -> list[tf.Tensor]:
      outputs = function(*floats)
      is_complex[:] = [t.dtype.is_complex for t in outputs]
      return [
        tf.stack([tf.math.real(t), tf.math.imag(t)]) if c else t
        for t, c in zip(outputs, is_complex, strict=True)
      ]

    outputs = tf.recompute_grad(InReals)(*floats)
    outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    return [tf.complex(t[0], t[1]) if c else t for t, c in zip(outputs, is_complex, strict=True)]

  def _Backward(
    self,
    variables: Sequence[Any],
    accumulators: Sequence[tf.Variable],
    x: nested_map.NestedMap,
    side: Any,
    context: Any,
    dy: list[tf.Tensor] | None,
  ) -> tuple[list[tf.Tensor], tf.Tensor]:
    self.CountTrace(x, side)
    floats = leaves.Floats(x)

    # Only the floating inputs are arguments of what is recomputed: tf.recompute_grad cannot
    # take integers or None, and would copy weights that were given to it as tensors.
    def Stage(*floats: tf.Tensor) -> list[tf.Tensor]:
      return self.Outputs(variables, leaves.WithFloats(x, floats), side, context)[2]

    with self.EnterContext(context.seeds), tf.GradientTape() as tape:
      tape.watch(floats)
      outputs = self.Recomputed(Stage, floats)
      weights, wanted = self.Trained(variables), self.WantedFloats(x)
      grads = tape.gradient(
        outputs, [*weights, *wanted], output_gradients=WithOwnLosses(dy, outputs)
      )
    Accumulate(accumulators, grads[: len(weights)])
    return leaves.DenseGradients(wanted, grads[len(weights) :]), tf.zeros([], tf.int32)

  def _ForwardBackward(
    self,
    variables: Sequence[Any],
    accumulators: Sequence[tf.Variable],
    x: nested_map.NestedMap,
    side: Any,
    context: Any,
  ) -> tuple[list[tf.Tensor], nested_map.NestedMap]:
    self.CountTrace(x, side)
    floats, weights = self.WantedFloats(x), self.Trained(variables)
    with self.EnterContext(context.seeds), tf.GradientTape() as tape:
      tape.watch(floats)
      _, sums, objective = self.Outputs(variables, x, side, context)
    grads = tape.gradient(objective, [*weights, *floats])
    Accumulate(accumulators, grads[: len(weights)])
    return leaves.DenseGradients(floats, grads[len(weights) :]), sums

  def _ThetaBackward(
    self, theta: Sequence[Any], x: nested_map.NestedMap, context: Any, dy: list[tf.Tensor]
  ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """The gradients of the weights, given as tensors, and of the floating inputs.

    For `PipeliningLayer.FProp` under somebody else's tape. The stage's forward runs here again
    from its input, so nothing but the input was kept.
    """
    self.CountTrace(x, None)
    weights, floats = leaves.Floats(theta), leaves.Floats(x)
    with self.EnterContext(context.seeds), tf.GradientTape() as tape:
      tape.watch([*weights, *floats])
      y, aux_losses = self._RunLayers(theta, x)
      if aux_losses:
        split = (key.partition(':') for key in aux_losses)
        names = ', '.join(f'{self.layers[int(i)].path}{rest}' for i, _, rest in split)
        raise ValueError(
          f'auxiliary losses ({names}) need the loss inside the last stage; train through the '
          'engine, or leave them out'
        )
      outputs = leaves.Floats(y)
      grads = tape.gradient(
        outputs,
        [*weights, *floats],
        output_gradients=dy,
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
      )
    grads = [tf.convert_to_tensor(g) for g in grads]
    return grads[: len(weights)], grads[len(weights) :]


def FunctionOptions(xla: bool) -> dict[str, Any]:
  """Options of tf.function for a stage function: compiled by XLA, or not to be inlined."""
  if xla:
    return {'autograph': False, 'jit_compile': True}
  return {'autograph': False, 'experimental_attributes': {'_noinline': True}}


def WithOwnLosses(
  dy: Sequence[tf.Tensor] | None, outputs: Sequence[tf.Tensor]
) -> list[tf.Tensor] | None:
  """The gradients of all that a stage's backward differentiates: dy, and 1 for its own losses."""
  if dy is None:
    return None
  return [*dy, *(tf.ones_like(loss) for loss in outputs[len(dy) :])]


def Accumulate(accumulators: Sequence[tf.Variable], grads: Sequence[Any]) -> None:
  """Adds gradients, None or slices among them, into accumulators in place."""
  if accumulators and all(grad is None for grad in grads):
    # A call that changes nothing would be made a NoOp, but keep the mark that XLA has to run it.
    accumulators[0].read_value()
  for accumulator, grad in zip(accumulators, grads, strict=True):
    if isinstance(grad, tf.IndexedSlices):
      values = tf.cast(grad.values, accumulator.dtype)
      accumulator.scatter_add(tf.IndexedSlices(values, grad.indices, grad.dense_shape))
    elif grad is not None:
      accumulator.assign_add(tf.cast(grad, accumulator.dtype))


def SeedTensor(hashes: Sequence[int], counter: tf.Tensor) -> tf.Tensor:
  """The int64 [layers, 2] seed pairs of a stage in the micro-batch that `counter` tells."""
  column = tf.constant(list(hashes), tf.int64)
  return tf.stack([column, tf.fill([len(hashes)], counter)], axis=1)


def Context(seeds: tf.Tensor, loss_weight: tf.Tensor) -> nested_map.NestedMap:
  """What F and B of one micro-batch know beside their inputs."""
  return nested_map.NestedMap(seeds=seeds, loss_weight=loss_weight)
