# SPDX-License-Identifier: Apache-2.0
"""Layers one after the other, as one flat list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lingvo_gpipe.core import base_layer, hyperparams, nested_map
from lingvo_gpipe.layers import fprop_meta


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


def FPropLayers(
  layers: Sequence[base_layer.BaseLayer], thetas: Sequence[nested_map.NestedMap], *args: Any
) -> Any:
  """FProp of layers one after the other: `args` to the first; returns what the last one returns.

  Args:
    layers: a flat list, of a sequence or of a pipeline, as if that were not cut.
    thetas: the weights of each layer.
    *args: the arguments of the first layer.
  """
  outputs: Any = args
  skips = nested_map.NestedMap()
  for layer, theta in zip(layers, thetas, strict=True):
    outputs, stashed = layer.FPropSkips(theta, skips, *args)
    skips.update(stashed)
    args = outputs if isinstance(outputs, tuple) else (outputs,)
  return outputs


def PrefillLayers(
  layers: Sequence[base_layer.BaseLayer],
  thetas: Sequence[nested_map.NestedMap],
  *args: Any,
  max_length: int,
) -> tuple[Any, list[nested_map.NestedMap]]:
  """`Prefill` of layers one after the other: the last one's outputs, and the states of each."""
  outputs: Any = args
  states = []
  for layer, theta in zip(layers, thetas, strict=True):
    CheckNoSkips(layer)
    outputs, made = layer.Prefill(theta, *args, max_length=max_length)
    states.append(made)
    args = outputs if isinstance(outputs, tuple) else (outputs,)
  return outputs, states


def ExtendStepLayers(
  layers: Sequence[base_layer.BaseLayer],
  thetas: Sequence[nested_map.NestedMap],
  states: Sequence[nested_map.NestedMap],
  *args: Any,
  time_step: Any,
) -> tuple[Any, list[nested_map.NestedMap]]:
  """`ExtendStep` of layers one after the other, with the states that `PrefillLayers` made."""
  outputs: Any = args
  new = []
  for layer, theta, old in zip(layers, thetas, states, strict=True):
    CheckNoSkips(layer)
    outputs, made = layer.ExtendStep(theta, old, *args, time_step=time_step)
    new.append(made)
    args = outputs if isinstance(outputs, tuple) else (outputs,)
  return outputs, new


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
    """The layers' costs added up; see BaseLayer.FPropMeta."""
    return fprop_meta.Chain(fprop_meta.Declare(params).layers, *input_specs)
