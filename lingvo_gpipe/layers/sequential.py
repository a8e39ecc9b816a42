# SPDX-License-Identifier: Apache-2.0
"""Layers one after the other, as one flat list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lingvo_gpipe.core import base_layer, hyperparams, nested_map


def FlattenSequential(params: hyperparams.InstantiableParams) -> list[Any]:
  """The Params of the layers of a sequence: nested SequentialLayers and `repeat` opened.

  A layer takes dtype, fprop_dtype, random_seed and params_init from the sequence that it stood in
  where its own are None. Each element is a copy, the same one at each repetition: to make layers
  of, not to change. Params of another layer are a list of one.

  Raises:
    TypeError: an element is not the Params of a layer.
    ValueError: a sequence is empty, or its repeat is below 1.
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


def CheckNoSkips(layer: base_layer.BaseLayer) -> None:
  """NotImplementedError for a layer with skip connections: decoding cannot carry them."""
  if names := (*layer.skips_in, *layer.skips_out):
    raise NotImplementedError(
      f'{layer.path} ({type(layer).__name__}) begins or takes the skip {names[0]!r}; decoding '
      'position by position has no skip connections: pass the tensor on as an argument'
    )


def AsTuple(outputs: Any) -> tuple[Any, ...]:
  """Returns a layer's outputs as a tuple: the arguments of the next layer."""
  return outputs if isinstance(outputs, tuple) else (outputs,)


def RunLayers(
  layers: Sequence[base_layer.BaseLayer],
  run: Callable[[int, Any, tuple[Any, ...], nested_map.NestedMap], tuple[Any, Any]],
  args: tuple[Any, ...],
  skips: nested_map.NestedMap | None = None,
) -> tuple[Any, nested_map.NestedMap]:
  """Runs layers one after another, each on the outputs of the layer before it.

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
    taken = nested_map.NestedMap({name: skips[name] for name in layer.skips_in if name in skips})
    outputs, begun = run(i, layer, args, taken)
    skips.update(begun)
    args = AsTuple(outputs)
  return outputs, skips


def FPropLayers(
  layers: Sequence[base_layer.BaseLayer], thetas: Sequence[nested_map.NestedMap], *args: Any
) -> Any:
  """Runs FProp of layers one after another; returns the last layer's outputs.

  Args:
    layers: a flat list, of a sequence or of a pipeline, as if that were not cut.
    thetas: the weights of each layer.
    *args: the arguments of the first layer.
  """

  def Run(i: int, layer: Any, args: tuple[Any, ...], skips: nested_map.NestedMap) -> Any:
    return layer.FPropSkips(thetas[i], skips, *args)

  return RunLayers(layers, Run, args)[0]


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
  flops, specs, skips = 0, input_specs, nested_map.NestedMap()
  for layer in p.Instantiate().layers:
    meta, stashed = type(layer).FPropMetaSkips(layer.params, skips, *specs)
    skips.update(stashed)
    flops += meta.flops
    specs = tuple(meta.out_specs)
  return nested_map.NestedMap(flops=flops, out_specs=specs)


def PrefillLayers(
  layers: Sequence[base_layer.BaseLayer],
  thetas: Sequence[nested_map.NestedMap],
  *args: Any,
  max_length: int,
) -> tuple[Any, list[nested_map.NestedMap]]:
  """`Prefill` of layers one after the other: the last one's outputs, and the states of each."""
  states = []

  def Run(i: int, layer: Any, args: tuple[Any, ...], _: nested_map.NestedMap) -> Any:
    CheckNoSkips(layer)
    outputs, state = layer.Prefill(thetas[i], *args, max_length=max_length)
    states.append(state)
    return outputs, {}

  return RunLayers(layers, Run, args)[0], states


def ExtendStepLayers(
  layers: Sequence[base_layer.BaseLayer],
  thetas: Sequence[nested_map.NestedMap],
  states: Sequence[nested_map.NestedMap],
  *args: Any,
  time_step: Any,
) -> tuple[Any, list[nested_map.NestedMap]]:
  """`ExtendStep` of layers one after the other, with the states that `PrefillLayers` made."""
  new_states = []

  def Run(i: int, layer: Any, args: tuple[Any, ...], _: nested_map.NestedMap) -> Any:
    CheckNoSkips(layer)
    outputs, state = layer.ExtendStep(thetas[i], states[i], *args, time_step=time_step)
    new_states.append(state)
    return outputs, {}

  return RunLayers(layers, Run, args)[0], new_states


class SequentialLayer(base_layer.BaseLayer):
  """Runs layers one after the other: the outputs of one are the arguments of the next.

  A tuple of outputs is spread over the next layer's arguments. Sequences within are opened: the
  children are one flat list `layers`, so weights have the paths and random operations the seeds
  that they have in a pipeline of the same layers, however it is cut.
  """

  is_position_wise = True

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """The Params of a SequentialLayer."""
    p = super().Params()
    p.Define('sub', [], 'Params of the layers.')
    p.Define('repeat', 1, 'How often the layers follow each other, each time with own weights.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    self.CreateChildren('layers', FlattenSequential(self.params), seed_roots=True)

  def FProp(self, theta: nested_map.NestedMap, *args: Any) -> Any:
    """Feeds `args` to the first layer; returns what the last one returns."""
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
