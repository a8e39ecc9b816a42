# SPDX-License-Identifier: Apache-2.0
"""The computations of a stage as plain functions, which the traced stage functions share.

Nothing here is a tf.function. `stage_functions`, `layer_backward` and `split_backward` trace these
computations, each for another way to get the gradients.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from lingvo_gpipe.core import (
  base_layer,
  fprop_context,
  nested_map,
  params_tree,
  pipeline_element,
  shapes,
)
from lingvo_gpipe.graph import side_effects
from lingvo_gpipe.pipeline.stages import failures, leaves, retraces, weighted_loss

# Maps (theta of each layer of the last stage, outputs of the last layer, side inputs) of a
# micro-batch to metrics: {name: (value, weight)}, scalars, 'loss' among them. Other metrics may be
# a `weighted_loss.Sum` or `weighted_loss.Rows`.
LossFn = Callable[[list[Any], tuple[Any, ...], Any], Mapping[str, Any]]
# (place, tensor) -> its sum over the replicas, each of which is at the same place.
ReplicaSum = Callable[[str, tf.Tensor], tf.Tensor]
# {name: (auxiliary loss, its coefficient)}.
AuxLosses = dict[str, tuple[tf.Tensor, float]]


class Context(NamedTuple):
  """The random seeds and the weight of a micro-batch in one stage.

  Attributes:
    seeds: int64 [layers, 2], a seed pair for each layer.
    loss_weight: scalar, the weight of the micro-batch's loss.
  """

  seeds: tf.Tensor
  loss_weight: tf.Tensor


class StageCall(NamedTuple):
  """The arguments that every stage function takes first.

  Attributes:
    variables: a list with one nest a layer, like `layer.vars`. They are arguments, never captured,
      so that stages of equal structure share one trace.
    x: NestedMap(args, skips): the arguments of the first layer, a tuple, and the skip connections
      {name: nest} that end in this stage.
    side: the loss's inputs of the micro-batch; None except in the last stage.
    context: the seeds and the weight of the micro-batch.
  """

  variables: Sequence[Any]
  x: nested_map.NestedMap
  side: Any
  context: Context


def SeedTensor(hashes: Sequence[int], counter: tf.Tensor, micro_batch: int = 0) -> tf.Tensor:
  """Returns the seed pairs of a stage's layers, int64 [layers, 2].

  Args:
    hashes: the first number of each pair, see `Stage.seed_hashes`.
    counter: int64 [2], zero and the second number of all pairs: the step and micro-batch (see
      `fprop_context.StepCounter`).
    micro_batch: added to the counter.
  """
  return tf.constant([(x, micro_batch) for x in hashes], tf.int64) + counter


def AsTensors(layer: base_layer.BaseLayer, outputs: Any) -> Any:
  """Returns a layer's outputs with numbers and arrays converted to tensors.

  Raises:
    TypeError: an output cannot be converted.
  """

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
  """Raises ValueError unless a layer begins exactly the skip connections that it announced."""
  if set(stashed) != set(layer.skips_out):
    raise ValueError(
      f'{layer.path}: skips_out announces {sorted(layer.skips_out)}, but FPropSkips returned '
      f'{sorted(stashed)}; return every announced skip from FPropSkips (FPropMetaSkips)'
    )


class StructureKey:
  """Equal for two layers that compute the same function of (theta, inputs, seeds).

  The Params and the attributes that `__init__` set decide, or the `structure` of the layer if it
  has one. Comparing the text of the Params is not enough: two functions among them may have the
  same name.
  """

  def __init__(self, layer: base_layer.BaseLayer) -> None:
    self._key: Any = layer.structure
    self._attributes: list[dict[str, Any]] = []
    self._hash = hash((type(layer), self._key))
    if self._key is None:
      self._key = layer.params.Copy()
      # The name only decides paths and seeds, and the caller of a trace passes both.
      self._key.name = ''
      self._attributes = layer.Attributes()
      self._hash = hash(self._key.ToText())

  def __hash__(self) -> int:
    return self._hash

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, StructureKey):
      return NotImplemented
    return (
      self._hash == other._hash
      and bool(self._key == other._key)
      and params_tree.Equal(self._attributes, other._attributes, exactly=True)
    )


class Accumulated(NamedTuple):
  """The results of adding gradients to accumulators.

  Attributes:
    sparse: {index of a trained leaf: its sparse gradients, which were not added}.
    token: a scalar that waits for the gradients.
  """

  sparse: dict[int, list[tf.IndexedSlices]]
  token: tf.Tensor


class _RunningStage(NamedTuple):
  number: int
  layers: Sequence[base_layer.BaseLayer]


_running: contextvars.ContextVar[_RunningStage | None] = contextvars.ContextVar(
  'running_stage', default=None
)


@contextlib.contextmanager
def Running(index: int, layers: Sequence[base_layer.BaseLayer]) -> Iterator[None]:
  """Names the stage that calls shared functions in the enclosed code.

  Stages of equal structure share functions, and the first caller traces them. Errors raised while
  tracing must name the layers of the caller.

  Args:
    index: the stage's number.
    layers: the stage's layers.
  """
  token = _running.set(_RunningStage(index, layers))
  try:
    yield
  finally:
    _running.reset(token)


def RunningLayers() -> Sequence[base_layer.BaseLayer] | None:
  """Returns the layers of the running stage, see `Running`; None outside of one."""
  running = _running.get()
  return None if running is None else running.layers


class StageMath:
  """The forward pass of one structure of stage, its sums and its objective; traces nothing.

  Attributes:
    exports: names of the skip connections that begin here and end in a later stage.
    trained: for each leaf of `variables` whether it is trained.
    needs_dx: whether an earlier stage is trained, and so needs a gradient from this one.
    num_weights: for each layer the number of leaves of its variables.
    num_traces: number of times that a function of this structure was traced.
    connected: indices of the trained leaves that got a gradient in a trace.
    keeps_sparse: whether sparse gradients, of the rows that a batch looks up, are results of
      backward; if not, they are added to the accumulators.
    dense: indices of trained leaves that got a dense gradient.
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
    seen_shapes: retraces.Retraces,
    num_weights: Sequence[int],
    replica_sum: ReplicaSum | None = None,
    keeps_sparse: bool = False,
  ) -> None:
    """Traces nothing.

    Args:
      layers: layers of one of the stages with this structure.
      loss_fn: the loss, in the last stage of training and evaluation, or None.
      exports: see the class.
      trained: see the class.
      needs_dx: see the class.
      do_eval: the layers' mode.
      seen_shapes: records the shapes that functions are traced for.
      num_weights: for each layer the number of leaves of its variables.
      replica_sum: adds statistics over the replicas; None if no layer asks for that.
      keeps_sparse: see the class.
    """
    self._layers = list(layers)
    self.exports = list(exports)
    self.trained = list(trained)
    self.needs_dx = needs_dx
    self.num_weights = list(num_weights)
    self.keeps_sparse = keeps_sparse
    self.num_traces = 0
    self.connected: set[int] = set()
    self.dense: set[int] = set()
    # Layers, and None for the loss, whose reads of variables have been checked.
    self._checked: set[int | None] = set()
    self._loss_fn = loss_fn
    self._do_eval = do_eval
    self._replica_sum = replica_sum
    self._seen_shapes = seen_shapes
    # A segment's layers in the stage, and its first trained leaf among the stage's.
    self._start, self._end = 0, len(self._layers)
    self._first_trained = 0
    # The first layer of `layers` that runs.
    self._first_run = 0
    self._is_segment = False

  @property
  def layers(self) -> Sequence[base_layer.BaseLayer]:
    """The layers of the running stage, see `Running`."""
    return self.stage_layers[self._start : self._end]

  @property
  def stage_layers(self) -> Sequence[base_layer.BaseLayer]:
    """All layers of the running stage, of which a segment has one."""
    return RunningLayers() or self._layers

  @property
  def sums_over_replicas(self) -> bool:
    """Whether forward waits for sums over the replicas."""
    return self._replica_sum is not None

  def Segment(self, layer: int, *, exports: Sequence[str], needs_dx: bool) -> StageMath:
    """Returns the computations of one layer of the stage as if it were a stage.

    Its calls have the variables and seeds of that layer only. The segment with the loss has those
    of all layers, because the loss may use any weight of the stage.

    Args:
      layer: the index of the layer.
      exports: the names of the skip connections that begin in the layer and are taken elsewhere.
      needs_dx: whether anything before the layer needs a gradient from it.
    """
    segment = copy.copy(self)
    segment.exports, segment.needs_dx, segment._is_segment = list(exports), needs_dx, True
    if layer == len(self._layers) - 1 and self._loss_fn is not None:
      segment._first_run = layer
      return segment
    segment._loss_fn = None
    segment._start, segment._end = layer, layer + 1
    before = self.trained[: sum(self.num_weights[:layer])]
    segment.num_weights = self.num_weights[layer : layer + 1]
    segment.trained = self.trained[len(before) :][: self.num_weights[layer]]
    segment._first_trained = sum(before)
    return segment

  def OfSegment(self, call: StageCall, x: nested_map.NestedMap) -> StageCall:
    """Returns the call of a segment, from the call of the stage.

    Args:
      call: the arguments of the stage.
      x: NestedMap(args, skips), the input of the segment.
    """
    context = call.context._replace(seeds=call.context.seeds[self._start : self._end])
    side = call.side if self._loss_fn is not None else None
    return StageCall(call.variables[self._start : self._end], x, side, context)

  def OfAccumulators(self, accumulators: Sequence[tf.Variable]) -> Sequence[tf.Variable]:
    """Returns the accumulators of a segment, a part of the stage's."""
    return accumulators[self._first_trained :][: sum(self.trained)]

  def CountTrace(self, x: nested_map.NestedMap, side: Any) -> None:
    """Records that a function is being traced for inputs of these shapes."""
    # A segment is traced within a function of its stage, which was counted.
    if not self._is_segment:
      self.num_traces += 1
      self._seen_shapes.Add(self.layers, x, side, self._index)

  @property
  def _index(self) -> int:
    running = _running.get()
    return 0 if running is None else running.number

  def Trained(self, weights: Any) -> list[Any]:
    """Returns the trained leaves of a nest like `variables`."""
    return [
      w for w, is_trained in zip(tf.nest.flatten(weights), self.trained, strict=True) if is_trained
    ]

  def Accumulate(self, accumulators: Sequence[tf.Variable], grads: Sequence[Any]) -> Accumulated:
    """Adds gradients of the trained leaves, None among them, to their accumulators."""
    connected = {self._first_trained + i: g for i, g in enumerate(grads) if g is not None}
    sparse = {i: g for i, g in connected.items() if isinstance(g, tf.IndexedSlices)}
    self.connected.update(connected)  # Segments of the stage share the sets.
    self.dense.update(connected.keys() - sparse.keys())
    added, waiting = grads, {}
    if self.keeps_sparse:
      added = [None if isinstance(g, tf.IndexedSlices) else g for g in grads]
      for i, g in sparse.items():  # TensorFlow keeps int32 on the host.
        waiting[i] = [tf.IndexedSlices(g.values, tf.cast(g.indices, tf.int64))]
    Accumulate(accumulators, added)
    with tf.control_dependencies([getattr(g, 'values', g) for g in connected.values()]):
      return Accumulated(waiting, tf.zeros([], tf.int32))

  def WantedFloats(self, x: nested_map.NestedMap) -> list[tf.Tensor]:
    """Returns the floating leaves of x if an earlier stage needs their gradients, else none."""
    return leaves.Floats(x) if self.needs_dx else []

  def EnterContext(self, seeds: tf.Tensor) -> Any:
    """Enters the FProp context of one micro-batch, with a row of seeds for each layer."""
    rows = {id(layer): row for layer, row in zip(self.layers, tf.unstack(seeds), strict=True)}
    context = fprop_context.FPropContext(
      self._do_eval, seed_rows=rows, replica_sum=self._replica_sum
    )
    return fprop_context.Enter(context)

  def RunLayer(
    self, i: int, layer_vars: Any, x: nested_map.NestedMap
  ) -> tuple[nested_map.NestedMap, AuxLosses]:
    """Runs layer i of the stage.

    Args:
      i: the layer's index in the stage.
      layer_vars: a nest like the layer's `vars`.
      x: NestedMap(args, skips), the layer's arguments and the skips that it takes.

    Returns:
      NestedMap(args, skips) as the layer returned them, and its auxiliary losses.
    """
    layer = self.layers[i]
    if self._LossTakesInputs(i):
      # `Metrics` runs the layer, as a part of the loss.
      return nested_map.NestedMap(args=x.args, skips=nested_map.NestedMap()), {}
    outer = fprop_context.Current()
    giver = self.layers[i - 1] if i else None
    with failures.NoteLayer(layer, x.args, giver):
      # A new list of auxiliary losses, so that all in it belong to this layer.
      with fprop_context.Enter(dataclasses.replace(outer, aux_losses=[])) as inner:
        reads = self._CheckVariables(i, layer_vars)
        with failures.LayerScope(self._start + i), reads, side_effects.Forbid(layer.path):
          theta = layer.ThetaFrom(layer_vars)
          weights = self._WithGradients(i, layer_vars, theta)
          with side_effects.CheckCaptures(layer.path, weights):
            out, stashed = self._FProp(layer, theta, x)
          CheckSkips(layer, stashed)
          out, stashed = AsTensors(layer, out), AsTensors(layer, stashed)
      aux_losses: AuxLosses = {}
      for owner, name, value, coefficient in inner.aux_losses:
        # An index instead of a path, because stages of equal structure share the trace:
        # `Stage.AbsoluteName` puts the path of the calling stage back.
        key = f'{self._start + i}:{owner.path[len(layer.path) :]}.{name}'
        if key in aux_losses:
          raise ValueError(f'{owner.path} adds two auxiliary losses {name!r}; give each its name')
        label = f'auxiliary loss {owner.path}.{name}'
        aux_losses[key] = (weighted_loss.Loss(label, value), coefficient)
    return nested_map.NestedMap(args=out, skips=stashed), aux_losses

  @contextlib.contextmanager
  def _CheckVariables(self, i: int | None, variables: Any) -> Iterator[None]:
    """Raises ValueError if code reads variables that are not trained; once, as it takes time.

    Args:
      i: the index of the layer that runs; None: the loss runs.
      variables: a nest of the variables that it may read.
    """
    layers = self.layers if i is None else [self.layers[i]]
    key = None if i is None else self._start + i
    if self._do_eval or key in self._checked or any(x.reads_other_variables for x in layers):
      yield
      return
    where = 'the loss' if i is None else layers[0].path
    with side_effects.ForbidOtherVariables(where, tf.nest.flatten(variables)):
      yield
    # After an error this is not reached, so the next trace checks again.
    self._checked.add(key)

  def _WithGradients(self, i: int, layer_vars: Any, theta: nested_map.NestedMap) -> dict[str, Any]:
    """Returns {path: weight} of layer i: trained variables, and all weights that are tensors."""
    first = sum(self.num_weights[:i])
    leaves_of_layer = zip(theta.FlattenItems(), tf.nest.flatten(layer_vars), strict=True)
    return {
      f'{self.layers[i].path}.{name}': weight
      for j, ((name, weight), v) in enumerate(leaves_of_layer)
      if not isinstance(v, tf.Variable) or self.trained[first + j]
    }

  def _FProp(
    self, layer: base_layer.BaseLayer, theta: nested_map.NestedMap, x: nested_map.NestedMap
  ) -> tuple[Any, Any]:
    """Returns a layer's outputs, and the skips that begin there."""
    return layer.FPropSkips(theta, x.skips, *x.args)

  def _LossTakesInputs(self, i: int) -> bool:
    is_last = self._loss_fn is not None and i == len(self.layers) - 1
    return is_last and self.layers[i].loss_takes_inputs

  def RunLayers(
    self,
    variables: Sequence[Any],
    x: nested_map.NestedMap,
  ) -> tuple[nested_map.NestedMap, AuxLosses]:
    """Runs all layers of the stage.

    Args:
      variables: as in a StageCall.
      x: as in a StageCall.

    Returns:
      y, which is NestedMap(args, skips) with the last layer's outputs and the exported skips, and
      the auxiliary losses.
    """
    aux_losses: AuxLosses = {}

    def Run(i: int, layer: Any, args: tuple[Any, ...], skips: nested_map.NestedMap) -> Any:
      i += self._first_run
      out, aux = self.RunLayer(i, variables[i], nested_map.NestedMap(args=args, skips=skips))
      aux_losses.update(aux)
      return out.args, out.skips

    outputs, skips = pipeline_element.RunLayers(
      self.layers[self._first_run :], Run, x.args, x.skips
    )
    exported = nested_map.NestedMap({name: skips[name] for name in self.exports})
    return nested_map.NestedMap(args=outputs, skips=exported), aux_losses

  def Outputs(self, call: StageCall) -> tuple[Any, nested_map.NestedMap, list[tf.Tensor]]:
    """Runs the stage, and the loss if it is the last one.

    Args:
      call: the stage's arguments.

    Returns:
      y, sums, and the tensors that backward differentiates: the floating outputs, except in the
      stage with the loss, then the weighted auxiliary losses and the weighted loss. The last two
      belong to the stage itself, and no gradient comes for them from the next stage.
    """
    y, aux_losses = self.RunLayers(call.variables, call.x)
    weight = call.context.loss_weight
    metric_sums = {}
    objective = [] if self._loss_fn is not None else leaves.Floats(y)
    for name, (value, coefficient) in aux_losses.items():
      metric_sums[name] = weighted_loss.WeightedSum(value, weight)
      objective.append(weighted_loss.WeightedLoss(value, weight, coefficient))
    if self._loss_fn is None:
      return y, self._Sums(metric_sums, {}), objective
    metrics, rows = self.Metrics(call, y.args), {}
    for name, metric in metrics.items():
      if isinstance(metric, weighted_loss.Rows):
        rows[name] = metric.value
      elif isinstance(metric, weighted_loss.Sum):
        metric_sums[name] = metric.value
      else:
        metric_sums[name] = weighted_loss.WeightedSum(*metric)
    objective.append(weighted_loss.WeightedLoss(metrics['loss'][0], weight))
    return (), self._Sums(metric_sums, rows), objective

  def Metrics(self, call: StageCall, outputs: Any) -> dict[str, weighted_loss.Metric]:
    """Returns the loss function's metrics for the last layer's outputs."""
    assert self._loss_fn is not None
    theta = [layer.ThetaFrom(v) for layer, v in zip(self.layers, call.variables, strict=True)]
    weight = call.context.loss_weight

    def Counted(nest: Any) -> Any:
      floats = [weighted_loss.WhereItCounts(x, weight) for x in leaves.Floats(nest)]
      return leaves.WithFloats(nest, floats)

    outputs = Counted(pipeline_element.AsTuple(outputs))
    try:
      weights: dict[str, Any] = {}
      for i, of_layer in enumerate(theta):
        weights.update(self._WithGradients(i, call.variables[i], of_layer))
      reads = self._CheckVariables(None, call.variables)
      captures = side_effects.CheckCaptures('the loss', weights)
      with failures.LossScope(), reads, side_effects.Forbid('the loss'), captures:
        if self._LossTakesInputs(len(self.layers) - 1):
          tensors = tf.nest.map_structure(tf.convert_to_tensor, theta[-1])
          # The gradient of these weights comes through the loss, too, and may be NaN if the weight
          # of the loss is zero.
          outputs = self._ForLoss(Counted(tensors), outputs)
        theta = self._ThetaOfLoss(theta)
        return weighted_loss.Metrics(self._loss_fn(theta, outputs, call.side))
    except Exception as e:
      inputs = (
        f'the outputs {shapes.FormatNest(outputs)} and the side {shapes.FormatNest(call.side)}'
      )
      e.add_note(f'in the loss, which stage {self._index} runs, given {inputs}')
      raise

  def _ThetaOfLoss(self, theta: list[Any]) -> list[Any]:
    """Returns the stage's weights as the loss gets them."""
    return theta

  def _ForLoss(self, theta: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the objects that the loss gets in place of the last layer's outputs."""
    return self.layers[-1].ForLoss(theta, *inputs)

  def _Sums(
    self, metric_sums: dict[str, tf.Tensor], rows: dict[str, tf.Tensor]
  ) -> nested_map.NestedMap:
    """Returns the sums of metrics, the rows, and the sums that layers reported by AddSums."""
    index = {id(layer): i for i, layer in enumerate(self.layers)}
    layer_sums = {}
    for owner, sums in fprop_context.Current().layer_sums.values():
      layer = next(a for a in owner.Ancestors() if id(a) in index)
      name = f'{self._start + index[id(layer)]}:{owner.path[len(layer.path) :]}'
      layer_sums[name] = sums
    return nested_map.NestedMap(metrics=metric_sums, rows=rows, layers=layer_sums)


def Traced(function: Callable[..., Any], xla: bool, is_inner: bool = False) -> Any:
  """Returns a stage function as a tf.function: compiled by XLA, or never inlined.

  Args:
    function: the function.
    xla: whether XLA compiles it.
    is_inner: whether it runs as a part of another stage function, and so is returned as it is.
  """
  if is_inner:
    return function
  if xla:
    return tf.function(function, autograph=False, jit_compile=True)
  # Inlined, it would lose the control dependencies that hold the schedule.
  return tf.function(function, autograph=False, experimental_attributes={'_noinline': True})


def WithOwnLosses(
  dy: Sequence[tf.Tensor] | None, objective: Sequence[tf.Tensor]
) -> list[tf.Tensor] | None:
  """Returns the output gradients of a stage's objective: dy, and 1 for the stage's own losses."""
  # In the stage with the loss: by default TensorFlow takes 1 for each tensor of the objective.
  if dy is None:
    return None
  # The floating outputs come first in the objective, one for each of dy.
  return [*dy, *(tf.ones_like(loss) for loss in objective[len(dy) :])]


def Accumulate(accumulators: Sequence[tf.Variable], grads: Sequence[Any]) -> None:
  """Adds gradients, None or sparse ones among them, to accumulators in place."""
  if accumulators and all(grad is None for grad in grads):
    # TensorFlow would replace a call that changes nothing by a NoOp, but still ask XLA to run it.
    accumulators[0].read_value()
  for accumulator, grad in zip(accumulators, grads, strict=True):
    if isinstance(grad, tf.IndexedSlices):
      values = tf.cast(grad.values, accumulator.dtype)
      accumulator.scatter_add(tf.IndexedSlices(values, grad.indices, grad.dense_shape))
    elif grad is not None:
      accumulator.assign_add(tf.cast(grad, accumulator.dtype))
