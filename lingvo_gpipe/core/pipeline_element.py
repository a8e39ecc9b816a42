# SPDX-License-Identifier: Apache-2.0
"""The side of a layer that the pipeline, the loss and the cost model use; sequences of layers.

The author of a layer needs only `base_layer`, unless the layer has a cost that cannot be counted,
skip connections, or a loss that does without its outputs.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import fprop_context, fprop_trace, hyperparams, layer_tree, nested_map


class PipelineElement(layer_tree.LayerTree):
  """The base class of `BaseLayer`: properties and costs of an element of a sequence of layers."""

  # Whether FProp may read trainable variables other than its weights, which nobody trains.
  reads_other_variables = False

  # Whether, if this is the last layer, a loss gets `ForLoss` in the place of the outputs of FProp.
  loss_takes_inputs = False

  # A softmax with `ForLoss`, whose vocabulary can be shared out over devices, has {path of a weight
  # below the layer: the axis of its classes}, for all weights.
  class_axes: Mapping[str, int] = types.MappingProxyType({})

  # The children of such a softmax, called `shards`, if it consists of several: softmaxes of equal
  # size, in the order of their classes. Its FProp computes the logits of the shards that theta has.
  # An embedding can have such children, too.
  class_shards: Sequence[Any] = ()

  @property
  def compute_dtypes(self) -> frozenset[tf.DType]:
    """The dtypes in which this layer computes, without its children."""
    return frozenset([self._params.fprop_dtype])

  @property
  def structure(self) -> Any:
    """A hashable value, equal for layers that compute the same function of theta and inputs.

    Stages of equal layers share their traced functions. None: layers are equal if their Params and
    the attributes that `__init__` sets are.
    """
    return None

  def PartOf(self, op_name: str) -> str | None:
    """Returns the part of FProp in which an operation was made, if any.

    By default the innermost `fprop_context.Part`.

    Args:
      op_name: the name of the operation in a graph.
    """
    return fprop_context.PartOf(op_name)

  def ForLoss(self, theta: nested_map.NestedMap, *args: Any) -> tuple[Any, ...]:
    """Returns objects that stand for the outputs of FProp, which the loss computes from them.

    A layer with `loss_takes_inputs` overrides it. The objects convert into the outputs of FProp if
    TensorFlow needs tensors.
    """
    raise NotImplementedError(f'{self.path}: a {type(self).__name__} has no ForLoss')

  # ---- skip connections of a sequence ----------------------------------------------------------

  @property
  def skips_in(self) -> tuple[str, ...]:
    """Names of the skip connections that end here: tensors of earlier layers of the sequence."""
    return ()

  @property
  def skips_out(self) -> tuple[str, ...]:
    """Names of the skip connections that begin here."""
    return ()

  def FPropSkips(
    self, theta: nested_map.NestedMap, skips: nested_map.NestedMap, *args: Any
  ) -> tuple[Any, nested_map.NestedMap]:
    """Runs FProp as an element of a sequence: takes `skips_in`, returns (outputs, `skips_out`)."""
    del skips
    return self.FProp(theta, *args), nested_map.NestedMap()

  # ---- cost ------------------------------------------------------------------------------------

  @classmethod
  def FPropMeta(
    cls, params: hyperparams.InstantiableParams, *input_specs: Any
  ) -> nested_map.NestedMap:
    """Returns the output shapes and the cost of one FProp, without allocating or running anything.

    This default traces the layer once and counts the operations of its graph. Override it only if
    the layer cannot be traced, or if counting is slow or wrong.

    Args:
      params: the layer's Params.
      *input_specs: a (nest of) tf.TensorSpec with static shapes for each input; None allowed.

    Returns:
      NestedMap(flops, out_specs): floating-point operations of one forward call (a multiply-add
      counts as two) and a tuple with the (nest of) tf.TensorSpec of each output.
    """
    return cls._Trace(params, nested_map.NestedMap(), *input_specs).meta

  @classmethod
  def FPropMetaSkips(
    cls,
    params: hyperparams.InstantiableParams,
    skip_specs: nested_map.NestedMap,
    *input_specs: Any,
  ) -> tuple[nested_map.NestedMap, nested_map.NestedMap]:
    """Returns FPropMeta of an element of a sequence, and the specs of its `skips_out`.

    Raises:
      ValueError: `out_specs` of an overridden FPropMeta is not a tuple.
    """
    if cls.HasOwnMeta():
      meta = cls.FPropMeta(params, *input_specs)
      if not isinstance(meta.out_specs, tuple | list):
        raise ValueError(
          f'{cls.__name__}.FPropMeta: out_specs must be a tuple with the specs of each output, got '
          f'{meta.out_specs!r}'
        )
      return meta, nested_map.NestedMap()
    trace = cls._Trace(params, skip_specs, *input_specs)
    return trace.meta, trace.skip_specs

  @classmethod
  def HasOwnMeta(cls) -> bool:
    """Whether the class overrides `FPropMeta` or `FPropMetaSkips`."""
    return any(
      getattr(cls, name).__func__ is not getattr(PipelineElement, name).__func__
      for name in ('FPropMeta', 'FPropMetaSkips')
    )

  @classmethod
  def _Trace(
    cls,
    params: hyperparams.InstantiableParams,
    skip_specs: nested_map.NestedMap,
    *input_specs: Any,
  ) -> fprop_trace.LayerTrace:
    p = params.Copy()
    p.name = p.name or 'layer'
    return fprop_trace.TraceLayer(p.Instantiate(), skip_specs, *input_specs)


def CheckNoSkips(layer: PipelineElement) -> None:
  """Raises NotImplementedError if a layer has skip connections, which decoding cannot carry."""
  if names := (*layer.skips_in, *layer.skips_out):
    raise NotImplementedError(
      f'{layer.path} ({type(layer).__name__}) begins or takes the skip {names[0]!r}; decoding '
      'position by position has no skip connections: pass the tensor as an argument of the layers'
    )


def AsTuple(outputs: Any) -> tuple[Any, ...]:
  """Returns a layer's outputs as a tuple: the arguments of the next layer."""
  return outputs if isinstance(outputs, tuple) else (outputs,)


def RunLayers(
  layers: Sequence[PipelineElement],
  run: Callable[[int, Any, tuple[Any, ...], nested_map.NestedMap], tuple[Any, Any]],
  args: tuple[Any, ...],
  skips: nested_map.NestedMap | None = None,
) -> tuple[Any, nested_map.NestedMap]:
  """Runs layers in sequence, each on the outputs of the previous layer.

  Args:
    layers: a flat list.
    run: (index, layer, arguments, skips that the layer takes) -> (outputs, skips that begin there).
    args: the arguments of the first layer.
    skips: skips that begin before the first layer, {name: nest}.

  Returns:
    The last layer's outputs, and all skips.
  """
  outputs: Any = args
  skips = nested_map.NestedMap(skips or {})
  for i, layer in enumerate(layers):
    skips_in = nested_map.NestedMap({name: skips[name] for name in layer.skips_in if name in skips})
    # Copies of the maps and lists: a layer may change its own.
    outputs, begun = run(i, layer, *tf.nest.map_structure(lambda t: t, (args, skips_in)))
    outputs, begun = tf.nest.map_structure(lambda t: t, (outputs, begun))
    skips.update(begun)
    args = AsTuple(outputs)
  return outputs, skips
