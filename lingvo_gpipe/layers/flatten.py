# SPDX-License-Identifier: Apache-2.0
"""From images to vectors."""

from __future__ import annotations

import math

import tensorflow as tf

from lingvo_gpipe.core import base_layer, hyperparams, nested_map, shapes
from lingvo_gpipe.layers import fprop_meta


class FlattenLayer(base_layer.BaseLayer):
  """Makes one axis of all axes but the first."""

  def FProp(self, theta: nested_map.NestedMap, inputs: tf.Tensor) -> tf.Tensor:
    """Maps inputs [batch, ...], all but the batch static, to [batch, elements]."""
    del theta
    batch, *rest = shapes.GetShape(inputs)
    return tf.reshape(inputs, [batch, math.prod(rest)])

  @classmethod
  def FPropMeta(
    cls, params: hyperparams.InstantiableParams, inputs: tf.TensorSpec
  ) -> nested_map.NestedMap:
    """Costs nothing; see BaseLayer.FPropMeta."""
    del params
    batch = inputs.shape[0]
    elements = shapes.NumElements(inputs) // batch
    return fprop_meta.Meta(0, tf.TensorSpec([batch, elements], inputs.dtype))
