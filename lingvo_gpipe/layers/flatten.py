# SPDX-License-Identifier: Apache-2.0
"""Flattens images to vectors."""

from __future__ import annotations

import math

import tensorflow as tf

from lingvo_gpipe.core import base_layer, nested_map, shapes


class FlattenLayer(base_layer.BaseLayer):
  """Merges all axes but the first."""

  def FProp(self, theta: nested_map.NestedMap, inputs: tf.Tensor) -> tf.Tensor:
    """Maps inputs [batch, ...], static but for the batch, to [batch, elements]."""
    del theta
    batch, *sizes = shapes.GetShape(inputs)
    return tf.reshape(inputs, [batch, math.prod(sizes)])
