# SPDX-License-Identifier: Apache-2.0
"""Counts the FLOPs, weights and bytes of a sequence of layers; runs and allocates nothing."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import fractions
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import base_layer, fprop_trace, nested_map, pipeline_element, shapes
from lingvo_gpipe.graph import flop_rules
from lingvo_gpipe.pipeline.cost import stage_memory
from lingvo_gpipe.pipeline.stages import retraces, split_backward, stage_math, vjp

# Each subset of a layer's parts is an option. If it has more parts, the first by name are used.
_MAX_PARTS = 3


@dataclasses.dataclass(frozen=True)
class LayerCost:
  """One layer of the sequence: path, class, number of weights, forward FLOPs and output specs."""

  path: str
  kind: str
  num_params: int
  flops: int
  out_specs: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Weights:
  """The weights that are trained, and the state that training keeps for each.

  Attributes:
    is_trained: path of a trainable weight -> whether it is trained; None: all are.
    ties: {path of a tied weight: path of its owner}.
    slots_per_weight: number of optimizer slots of a trained weight, each of its size; if the
      replicas shard the slots, the mean over the replicas.
    owner_slots: with sharded slots, the number of additional slots of a weight in the replica that
      owns it.
    num_kept_sparse: number of micro-batches whose gradients of looked-up rows wait for the update,
      where they are joined.
  """

  is_trained: Callable[[str], bool] | None = None
  ties: Mapping[str, str] = dataclasses.field(default_factory=dict)
  slots_per_weight: float = 2
  owner_slots: float = 0
  num_kept_sparse: int = 0

  def Trained(self, layer: base_layer.BaseLayer) -> list[str]:
    """Returns the paths of the layer's weights that get a gradient."""
    return [
      path
      for path, (_, trainable) in layer.WeightSpecs().items()
      if trainable and (self.is_trained is None or self.is_trained(self.ties.get(path, path)))
    ]

  def StateBytes(self, layer: base_layer.BaseLayer) -> int:
    """Returns the bytes of the layer's weights, gradient accumulators and slots.

    A stage's copy of a tied weight has an accumulator but no slots.
    """
    trained = set(self.Trained(layer))
    total = 0.0
    for path, (weight, _) in layer.WeightSpecs().items():
      copies = 1 + self.slots_per_weight * (path in trained and path not in self.ties)
      total += weight.num_elements * copies * tf.as_dtype(weight.dtype).size
      total += weight.accumulator_bytes * (path in trained)
    return round(total)

  def CopyBytes(self, layer: base_layer.BaseLayer) -> int:
    """Returns the bytes of a copy of the layer's weights, with gradient accumulators."""
    trained = set(self.Trained(layer))
    return sum(
      weight.num_elements * tf.as_dtype(weight.dtype).size
      + weight.accumulator_bytes * (path in trained)
      for path, (weight, _) in layer.WeightSpecs().items()
    )

  def OwnerBytes(self, layer: base_layer.BaseLayer) -> int:
    """Returns the layer's `LayerBytes.of_owner`."""
    specs = layer.WeightSpecs()
    weights = [specs[path][0] for path in self.Trained(layer) if path not in self.ties]
    sizes = [w.num_elements * tf.as_dtype(w.dtype).size for w in weights]
    return round(self.owner_slots * max(sizes, default=0))


@dataclasses.dataclass(frozen=True)
class LayerCall:
  """One layer of a sequence and its inputs.

  Attributes:
    layer: the layer.
    skips: specs of the skip connections that it takes.
    specs: specs of its arguments.
    key: equal for layers of equal structure and equal inputs.
    stage: the layer's stage, if it is known.
  """

  layer: base_layer.BaseLayer
  skips: nested_map.NestedMap
  specs: tuple[Any, ...]
  key: Any
  stage: int | None = None


class LayerCosts:
  """The costs and inputs of the layers of a sequence; equal layers are measured once.

  Attributes:
    costs: the `LayerCost` of each layer.
    calls: the `LayerCall` of each layer.
  """

  def __init__(
    self,
    layers: Sequence[base_layer.BaseLayer],
    input_specs: Sequence[Any],
    splits: Sequence[int] = (),
  ) -> None:
    """Computes FLOPs and specs; the outputs of each layer are the inputs of the next.

    Args:
      layers: the flat list of layers.
      input_specs: a (nest of) tf.TensorSpec with static shapes for each argument of the first
        layer.
      splits: for each stage the index after its last layer, for error messages; empty if unknown.
    """
    self._traces: dict[Any, fprop_trace.LayerTrace] = {}
    self._options: dict[Any, tuple[stage_memory.Option, ...]] = {}
    known: dict[Any, Any] = {}
    costs: list[LayerCost] = []
    calls: list[LayerCall] = []

    def Run(i: int, layer: Any, specs: tuple[Any, ...], skips: nested_map.NestedMap) -> Any:
      index = bisect.bisect_right(splits, i) if splits else None
      key = (stage_math.StructureKey(layer), repr((skips, specs)))
      call = LayerCall(layer, skips, specs, key, index)
      if key not in known:
        with LocateErrors(layer, specs, calls[-1].layer if calls else None, index):
          meta, stashed = self._Meta(call)
          stage_math.CheckSkips(layer, stashed)
        known[key] = meta, stashed, layer.NumParams()
      calls.append(call)
      meta, stashed, num_params = known[key]
      outputs = tuple(meta.out_specs)
      kind, flops = type(layer).__name__, int(meta.flops)
      costs.append(LayerCost(layer.path, kind, num_params, flops, outputs))
      return outputs, stashed

    pipeline_element.RunLayers(layers, Run, tuple(input_specs))
    self.costs = tuple(costs)
    self.calls = tuple(calls)

  def Bytes(
    self, weights: Weights, xla: bool, *, with_options: bool = False
  ) -> list[stage_memory.LayerBytes]:
    """Returns the bytes of each layer for one micro-batch.

    Args:
      weights: the weights that are trained.
      xla: whether XLA compiles the stages, and so fuses operations and keeps fewer results.
      with_options: whether to trace the backward of each distinct layer for its options.
    """
    layer_bytes = []
    options: tuple[stage_memory.Option, ...] = ()
    needs_dx = False
    for call in self.calls:
      layer = call.layer
      if with_options:
        options = self._Options(call, weights, needs_dx, xla)
        needs_dx = needs_dx or bool(weights.Trained(layer))
      with LocateErrors(layer, call.specs, stage_index=call.stage):
        cost = self._Trace(call).cost
      layer_bytes.append(
        stage_memory.LayerBytes(
          state=weights.StateBytes(layer),
          inputs=SpecBytes(call.specs),
          inner=cost.fused_bytes if xla else cost.result_bytes,
          skips_in={name: SpecBytes(spec) for name, spec in call.skips.items()},
          skips_out=layer.skips_out,
          of_owner=weights.OwnerBytes(layer),
          options=options,
        )
      )
    if weights.num_kept_sparse:
      return [
        dataclasses.replace(x, state=x.state + num_bytes)
        for x, num_bytes in zip(layer_bytes, self._SparseBytes(weights), strict=True)
      ]
    return layer_bytes

  def _SparseBytes(self, weights: Weights) -> list[int]:
    """Returns for each layer the bytes of the sparse gradients that wait for the update."""
    table_bytes = {
      f'{call.layer.path}.{name}': num_bytes
      for call in self.calls
      for name, num_bytes in self._Trace(call).row_bytes.items()
    }
    # For each layer {path of a trained weight: bytes of rows; 0: it has another use}.
    rows = [
      {path: table_bytes.get(path, 0) for path in weights.Trained(x.layer)} for x in self.calls
    ]
    dense = {weights.ties.get(path, path) for x in rows for path, n in x.items() if not n}
    num_copies = weights.num_kept_sparse * (2 if weights.num_kept_sparse > 1 else 1)
    return [
      num_copies * sum(n for path, n in x.items() if weights.ties.get(path, path) not in dense)
      for x in rows
    ]

  def _Options(
    self, call: LayerCall, weights: Weights, needs_dx: bool, xla: bool
  ) -> tuple[stage_memory.Option, ...]:
    """Returns the options to keep results of a layer, and to recompute the others in backward."""
    layer, paths = call.layer, set(weights.Trained(call.layer))
    specs = layer.WeightTensorSpecs().FlattenItems()
    trained = tuple(f'{layer.path}.{name}' in paths for name, _ in specs)
    is_last = call is self.calls[-1]
    key = (call.key, trained, needs_dx, is_last)
    if key not in self._options:
      with LocateErrors(layer, call.specs, stage_index=call.stage):
        cost = self._Trace(call).cost
        everything = cost.fused_bytes if xla else cost.result_bytes
        whole = stage_memory.Option(None, 0, fractions.Fraction(1), everything)
        has_backward = needs_dx or any(trained)
        options = _KeepOptions(call, trained, needs_dx, xla) if has_backward else []
      # The loss, which runs with the last layer, keeps the outputs.
      outputs = SpecBytes(self._Meta(call)[0].out_specs) if is_last else 0
      self._options[key] = (
        whole,
        *(dataclasses.replace(x, kept_bytes=x.kept_bytes + outputs) for x in options),
      )
    return self._options[key]

  def _Meta(self, call: LayerCall) -> tuple[nested_map.NestedMap, nested_map.NestedMap]:
    """Returns `FPropMetaSkips` of the layer. A trace made for it also serves `Bytes`."""
    cls = type(call.layer)
    if cls.HasOwnMeta():
      return cls.FPropMetaSkips(call.layer.params, call.skips, *call.specs)
    trace = self._Trace(call)
    return trace.meta, trace.skip_specs

  def _Trace(self, call: LayerCall) -> fprop_trace.LayerTrace:
    """Traces each distinct layer once."""
    if call.key not in self._traces:
      self._traces[call.key] = fprop_trace.TraceLayer(call.layer, call.skips, *call.specs)
    return self._traces[call.key]


def SparseRows(call: LayerCall) -> dict[str, tuple[int | None, bool]]:
  """Returns {name of a weight with a gradient: its number of rows, and whether they are constant}.

  See `vjp.SplitVjp.Rows`.
  """
  names = [name for name, _ in call.layer.WeightTensorSpecs().FlattenItems()]
  trainable = {path: is_trained for path, (_, is_trained) in call.layer.WeightSpecs().items()}
  trained = [trainable[f'{call.layer.path}.{name}'] for name in names]
  product = _Product(call, trained, needs_dx=False, xla=False)
  with_gradient = itertools.compress(
    itertools.compress(names, trained), product.has_weight_gradient
  )
  return dict(zip(with_gradient, product.Rows(), strict=True))


def _Product(call: LayerCall, trained: Sequence[bool], needs_dx: bool, xla: bool) -> vjp.SplitVjp:
  """Traces forward and backward of a layer.

  Args:
    call: the layer and its inputs.
    trained: whether each weight is trained.
    needs_dx: whether anything needs the gradient of the layer's input.
    xla: whether XLA compiles the stage.
  """
  layer = call.layer
  math = stage_math.StageMath(
    [layer],
    loss_fn=None,
    exports=sorted(layer.skips_out),
    trained=trained,
    needs_dx=needs_dx,
    do_eval=False,
    seen_shapes=retraces.Retraces(),
    num_weights=[len(trained)],
  )
  x = nested_map.NestedMap(args=call.specs, skips=call.skips)
  context = stage_math.Context(tf.TensorSpec([1, 2], tf.int64), tf.TensorSpec([], tf.float32))
  specs = layer.WeightTensorSpecs()
  with stage_math.Running(call.stage or 0, [layer]):
    functions = split_backward.SplitBackward(math, xla)
    return functions.Product(stage_math.StageCall([specs], x, None, context))


def _KeepOptions(
  call: LayerCall, trained: Sequence[bool], needs_dx: bool, xla: bool
) -> list[stage_memory.Option]:
  """Returns the options of a layer except to recompute it whole; see `_Product`."""
  layer, product = call.layer, _Product(call, trained, needs_dx, xla)
  flops = {name: flop_rules.OpFlops(op) or 0 for name, op in product.forward_ops.items()}
  part_of = {name: layer.PartOf(name) for name in flops}
  names = sorted({part for part in part_of.values() if part is not None})[:_MAX_PARTS]
  options: list[stage_memory.Option] = []
  always = all_bytes = 0
  for size in range(len(names) + 1):
    for recomputed in map(frozenset, itertools.combinations(names, size)):
      again = {name for name, part in part_of.items() if part in recomputed}
      residuals = product.ForwardResiduals(again.__contains__)
      num_bytes = sum(flop_rules.Elements(t) * t.dtype.size for t in residuals)
      repeated = sum(flops[name] for name in product.RepeatedOps(residuals))
      if not recomputed:  # Cheap operations are always repeated.
        always, all_bytes = repeated, num_bytes
      share = fractions.Fraction(max(repeated - always, 0), max(sum(flops.values()), 1))
      options.append(
        stage_memory.Option(recomputed, num_bytes, share, max(all_bytes - num_bytes, 0))
      )
  return options


def SpecBytes(specs: Any) -> int:
  """Returns the bytes of the tensors of a nest of tf.TensorSpec."""
  return sum(
    spec.shape.num_elements() * spec.dtype.size
    for spec in tf.nest.flatten(specs)
    if spec is not None
  )


@contextlib.contextmanager
def LocateErrors(
  layer: base_layer.BaseLayer,
  specs: Any,
  producer: base_layer.BaseLayer | None = None,
  stage_index: int | None = None,
) -> Iterator[None]:
  """Adds a note to any exception: the layer that is being measured, and its inputs.

  FPropMeta only knows the layer's Params, so if its message begins with the layer's name, the
  layer's path replaces the name.

  Args:
    layer: the layer.
    specs: specs of its arguments.
    producer: the layer whose outputs they are, if any.
    stage_index: the layer's stage, if it is known.
  """
  try:
    yield
  except Exception as e:
    name, text = layer.params.name, str(e)
    if e.args == (text,) and text.startswith((f'{name}:', f'{name}.')):
      e.args = (layer.path + text.removeprefix(name),)
    by = '' if producer is None else f' by {producer.path} ({type(producer).__name__})'
    stage = '' if stage_index is None else f'in stage {stage_index}, '
    e.add_note(
      f'{stage}while measuring layer {layer.path} ({type(layer).__name__}) for one micro-batch, '
      f'given {shapes.FormatNest(specs)}{by}'
    )
    raise
