# SPDX-License-Identifier: Apache-2.0
"""Sequences of layers, flattened into one list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lingvo_gpipe.core import base_layer, domain, hyperparams, nested_map, pipeline_element


def FlattenSequential(params: hyperparams.InstantiableParams) -> list[Any]:
  """Returns the Params of all layers of a sequence, with nested sequences and `repeat` expanded.

  A layer inherits dtype, fprop_dtype, random_seed and params_init from its sequence if its own are
  None. Repetitions share one copy of the Params: instantiate it, but do not change it. The Params
  of any other layer give a list of one element.

  Raises:
    TypeError: an element is not the Params of a layer.
    ValueError: a sequence is empty, or its `repeat` is below 1.
  """
  if not isinstance(params, hyperparams.InstantiableParams):
    raise TypeError(f'expected the Params of a layer in a sequence, got {params!r}')
  if params.cls is not SequentialLayer:
    return [params.Copy()]
  if not params.sub or not isinstance(params.repeat, int) or params.repeat < 1:
    raise ValueError(
      f'SequentialLayer {params.name!r} needs layers in `sub` and a `repeat` of at least 1, '
      f'got {len(params.sub)} and {params.repeat!r}'
    )
  flat = [layer for sub in params.sub for layer in FlattenSequential(sub)]
  for layer in flat:
    for name in base_layer.INHERITED:
      if layer.Get(name) is None:
        layer.Set(**{name: params.Get(name)})
  return flat * params.repeat


def FPropLayers(
  layers: Sequence[base_layer.BaseLayer], thetas: Sequence[nested_map.NestedMap], *args: Any
) -> Any:
  """Runs `FProp` of layers in sequence; returns the outputs of the last layer.

  Args:
    layers: a flat list, of a sequence or of a pipeline that runs as if it were not cut.
    thetas: the weights of each layer.
    *args: the arguments of the first layer.
  """

  def Run(i: int, layer: Any, args: tuple[Any, ...], skips: nested_map.NestedMap) -> Any:
    return layer.FPropSkips(thetas[i], skips, *args)

  return pipeline_element.RunLayers(layers, Run, args)[0]


def FPropMetaLayers(
  params: hyperparams.InstantiableParams, *input_specs: Any
) -> nested_map.NestedMap:
  """Returns the sum of `FPropMeta` of all layers of a sequence, and the last layer's output specs.

  Args:
    params: Params of a SequentialLayer or of a pipeline.
    *input_specs: a (nest of) tf.TensorSpec with static shapes for each argument of the first layer.
  """
  p = params.Copy()
  p.name = p.name or 'layer'
  flops = []

  def Run(i: int, layer: Any, specs: tuple[Any, ...], skips: nested_map.NestedMap) -> Any:
    meta, stashed = type(layer).FPropMetaSkips(layer.params, skips, *specs)
    flops.append(meta.flops)
    return tuple(meta.out_specs), stashed

  specs, _ = pipeline_element.RunLayers(p.Instantiate().layers, Run, input_specs)
  return nested_map.NestedMap(flops=sum(flops), out_specs=specs)


def PrefillLayers(
  layers: Sequence[base_layer.BaseLayer],
  thetas: Sequence[nested_map.NestedMap],
  *args: Any,
  max_length: int,
) -> tuple[Any, list[nested_map.NestedMap]]:
  """Runs `Prefill` of layers in sequence; returns the last outputs and the states of each layer."""
  states = []

  def Run(i: int, layer: Any, args: tuple[Any, ...], _: nested_map.NestedMap) -> Any:
    pipeline_element.CheckNoSkips(layer)
    outputs, state = layer.Prefill(thetas[i], *args, max_length=max_length)
    states.append(state)
    return outputs, {}

  return pipeline_element.RunLayers(layers, Run, args)[0], states


def ExtendStepLayers(
  layers: Sequence[base_layer.BaseLayer],
  thetas: Sequence[nested_map.NestedMap],
  states: Sequence[nested_map.NestedMap],
  *args: Any,
  time_step: Any,
) -> tuple[Any, list[nested_map.NestedMap]]:
  """Runs `ExtendStep` of layers in sequence, with the states from `PrefillLayers`."""
  new_states = []

  def Run(i: int, layer: Any, args: tuple[Any, ...], _: nested_map.NestedMap) -> Any:
    pipeline_element.CheckNoSkips(layer)
    outputs, state = layer.ExtendStep(thetas[i], states[i], *args, time_step=time_step)
    new_states.append(state)
    return outputs, {}

  return pipeline_element.RunLayers(layers, Run, args)[0], new_states


class SequentialLayer(base_layer.BaseLayer):
  """Runs layers in sequence: the outputs of each layer are the arguments of the next.

  A tuple of outputs becomes several arguments. Nested sequences are flattened into one list of
  children, `layers`. Weights therefore have the same paths, and random operations the same seeds,
  as in a pipeline of these layers with any cut.
  """

  is_position_wise = True

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of a SequentialLayer."""
    p = super().Params()
    p.Define(
      'sub', [], 'Params of the layers.', domain.ListOf(domain.ParamsOf(base_layer.BaseLayer))
    )
    p.Define(
      'repeat',
      1,
      'Number of repetitions of the layers, each with its own weights.',
      domain.NUM_LAYERS,
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    self.CreateChildren('layers', FlattenSequential(self.params), seed_roots=True)

  def FProp(self, theta: nested_map.NestedMap, *args: Any) -> Any:
    """Passes `args` to the first layer; returns the outputs of the last."""
    return FPropLayers(self.layers, theta.layers, *args)

  def Prefill(
    self, theta: nested_map.NestedMap, *args: Any, max_length: int
  ) -> tuple[Any, nested_map.NestedMap]:
    """See BaseLayer.Prefill; the states of layer i are `states.layers[i]`."""
    outputs, states = PrefillLayers(self.layers, theta.layers, *args, max_length=max_length)
    return outputs, nested_map.NestedMap(layers=states)

  def ExtendStep(
    self, theta: nested_map.NestedMap, states: nested_map.NestedMap, *args: Any, time_step: Any
  ) -> tuple[Any, nested_map.NestedMap]:
    """See BaseLayer.ExtendStep."""
    outputs, new = ExtendStepLayers(
      self.layers, theta.layers, states.layers, *args, time_step=time_step
    )
    return outputs, nested_map.NestedMap(layers=new)

  @classmethod
  def FPropMeta(
    cls, params: hyperparams.InstantiableParams, *input_specs: Any
  ) -> nested_map.NestedMap:
    """Adds up `FPropMeta` of the layers, some of which may override it."""
    return FPropMetaLayers(params, *input_specs)
