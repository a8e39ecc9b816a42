# SPDX-License-Identifier: Apache-2.0
"""What the layers of a sequence cost: operations, weights and bytes; allocates and runs nothing."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import base_layer, fprop_trace, nested_map, shapes
from lingvo_gpipe.pipeline.cost import stage_memory
from lingvo_gpipe.pipeline.stages import stage_functions


@dataclasses.dataclass(frozen=True)
class LayerCost:
  """One layer of the sequence: its path, class, trainable weights and forward FLOPs."""

  path: str
  kind: str
  num_params: int
  flops: int
  out_specs: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Weights:
  """What is trained, and what training keeps beside each weight.

  Attributes:
    is_trained: tells by its path whether a trainable weight is trained; None: all are.
    ties: {path of a weight: path of the weight that it is}.
    slots_per_weight: how many optimizer slots of its size a trained weight has; where replicas
      share them out, the mean.
    owner_slots: how many more a weight has where its owner is.
  """

  is_trained: Callable[[str], bool] | None = None
  ties: Mapping[str, str] = dataclasses.field(default_factory=dict)
  slots_per_weight: float = 2
  owner_slots: float = 0

  def Trained(self, layer: base_layer.BaseLayer) -> list[str]:
    """The paths of the layer's weights that get a gradient."""
    return [
      path
      for path, (_, trainable) in layer.WeightSpecs().items()
      if trainable and (self.is_trained is None or self.is_trained(self.ties.get(path, path)))
    ]

  def StateBytes(self, layer: base_layer.BaseLayer) -> int:
    """Bytes of the layer's weights, of their gradient accumulators and slots.

    The copy that a stage has of a tied weight has an accumulator, but no slots.
    """
    trained = set(self.Trained(layer))
    total = 0.0
    for path, (weight, _) in layer.WeightSpecs().items():
      copies = 1.0
      if path in trained:
        copies += 1 if path in self.ties else 1 + self.slots_per_weight
      total += copies * weight.num_elements * tf.as_dtype(weight.dtype).size
    return round(total)

  def OwnerBytes(self, layer: base_layer.BaseLayer) -> int:
    """`LayerBytes.of_owner` of the layer."""
    specs = layer.WeightSpecs()
    own = [specs[path][0] for path in self.Trained(layer) if path not in self.ties]
    sizes = [w.num_elements * tf.as_dtype(w.dtype).size for w in own]
    return round(self.owner_slots * max(sizes, default=0))


@dataclasses.dataclass(frozen=True)
class LayerCall:
  """One layer of a sequence, what it takes, a key for what is equal, and its stage if known."""

  layer: base_layer.BaseLayer
  skips: nested_map.NestedMap
  specs: tuple[Any, ...]
  key: Any
  stage: int | None = None


class LayerCosts:
  """The layers of a sequence with the specs of what each takes; equal ones are measured once.

  Attributes:
    costs: a `LayerCost` each.
    calls: a `LayerCall` each.
  """

  def __init__(
    self,
    layers: Sequence[base_layer.BaseLayer],
    input_specs: Sequence[Any],
    splits: Sequence[int] = (),
  ) -> None:
    """Finds FLOPs and specs; the output specs of one layer are the inputs of the next.

    Args:
      layers: the flat list.
      input_specs: a (nest of) tf.TensorSpec with static shapes for each argument of the first.
      splits: for each stage the index after its last layer, for messages; empty: not known yet.
    """
    known: dict[Any, Any] = {}
    costs: list[LayerCost] = []
    calls: list[LayerCall] = []
    specs = tuple(input_specs)
    skips = nested_map.NestedMap()
    for i, layer in enumerate(layers):
      index = bisect.bisect_right(splits, i) if splits else None
      taken = nested_map.NestedMap({name: skips[name] for name in layer.skips_in})
      key = (stage_functions.StructureKey(layer), repr((taken, specs)))
      if key not in known:
        with Naming(layer, specs, calls[-1].layer if calls else None, index):
          meta, stashed = type(layer).FPropMetaSkips(layer.params, taken, *specs)
          stage_functions.CheckSkips(layer, stashed)
        known[key] = meta, stashed, layer.NumParams()
      calls.append(LayerCall(layer, taken, specs, key, index))
      meta, stashed, num_params = known[key]
      skips.update(stashed)
      specs = tuple(meta.out_specs)
      costs.append(LayerCost(layer.path, type(layer).__name__, num_params, int(meta.flops), specs))
    self.costs = tuple(costs)
    self.calls = tuple(calls)

  def Bytes(self, weights: Weights, xla: bool) -> list[stage_memory.LayerBytes]:
    """The bytes of each layer, for one micro-batch; traces each distinct layer once.

    Args:
      weights: what is trained.
      xla: whether XLA compiles the stages, and so keeps fewer results.
    """
    inner: dict[Any, int] = {}
    found = []
    for call in self.calls:
      layer = call.layer
      if call.key not in inner:
        with Naming(layer, call.specs, stage_index=call.stage):
          cost = fprop_trace.TraceCost(layer, call.skips, *call.specs)
        inner[call.key] = cost.fused_bytes if xla else cost.result_bytes
      found.append(
        stage_memory.LayerBytes(
          state=weights.StateBytes(layer),
          inputs=SpecBytes(call.specs),
          inner=inner[call.key],
          skips_in={name: SpecBytes(spec) for name, spec in call.skips.items()},
          skips_out=layer.skips_out,
          of_owner=weights.OwnerBytes(layer),
        )
      )
    return found


def SpecBytes(specs: Any) -> int:
  """What tensors of a nest of tf.TensorSpec take."""
  return sum(
    spec.shape.num_elements() * spec.dtype.size
    for spec in tf.nest.flatten(specs)
    if spec is not None
  )


@contextlib.contextmanager
def Naming(
  layer: base_layer.BaseLayer,
  specs: Any,
  giver: base_layer.BaseLayer | None = None,
  stage_index: int | None = None,
) -> Iterator[None]:
  """Adds to any exception which layer was being measured, and what it was given by which.

  FPropMeta knows the layer's Params only: where a message begins with the name in them, the layer's
  path takes its place.
  """
  try:
    yield
  except Exception as e:
    name, text = layer.params.name, str(e)
    if e.args == (text,) and text.startswith((f'{name}:', f'{name}.')):
      e.args = (layer.path + text.removeprefix(name),)
    by = '' if giver is None else f' by {giver.path} ({type(giver).__name__})'
    where = '' if stage_index is None else f'in stage {stage_index}, '
    e.add_note(
      f'{where}while measuring layer {layer.path} ({type(layer).__name__}) for one micro-batch, '
      f'given {shapes.NestText(specs)}{by}'
    )
    raise
