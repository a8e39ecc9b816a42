# SPDX-License-Identifier: Apache-2.0
"""What hand-written `FPropMeta`s are made of.

They count as `flop_rules` does: 2 for a multiply-add, 1 for an elementwise operation per output
element, moving and creating data is free; dropout counts as in training.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import base_layer, nested_map


def Meta(flops: int, *out_specs: Any) -> nested_map.NestedMap:
  """The result of an FPropMeta: operations and the specs of the outputs."""
  return nested_map.NestedMap(flops=flops, out_specs=out_specs)


def FPropDtype(params: Any) -> tf.DType:
  """The dtype of activations that `params` mean for a layer without parent."""
  return tf.as_dtype(params.fprop_dtype or params.dtype or tf.float32)


def WithDtype(spec: tf.TensorSpec, params: Any) -> tf.TensorSpec:
  """`spec` in the layer's fprop_dtype."""
  return tf.TensorSpec(spec.shape, FPropDtype(params))


def Declare(params: Any) -> Any:
  """A layer object of `params`, with its children, that allocates nothing."""
  p = params.Copy()
  p.name = p.name or 'layer'
  return p.Instantiate()


def Of(layer: base_layer.BaseLayer, *specs: Any) -> nested_map.NestedMap:
  """FPropMeta of a layer object, with the dtypes that it has from its parent."""
  return type(layer).FPropMeta(layer.params, *specs)


def Chain(layers: Iterable[base_layer.BaseLayer], *specs: Any) -> nested_map.NestedMap:
  """FPropMeta of layers of which each one's outputs are the arguments of the next."""
  flops = 0
  skips = nested_map.NestedMap()
  for layer in layers:
    meta, stashed = type(layer).FPropMetaSkips(layer.params, skips, *specs)
    skips.update(stashed)
    flops += meta.flops
    specs = tuple(meta.out_specs)
  return Meta(flops, *specs)
