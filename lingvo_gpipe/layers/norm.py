# SPDX-License-Identifier: Apache-2.0
"""Layer normalisation."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import base_layer, domain, hyperparams, nested_map, shapes, weight_params


class LayerNorm(base_layer.BaseLayer):
  """Normalises the last axis: (x - mean) / sqrt(variance + epsilon) * scale + bias.

  See Ba et al. 2016, "Layer Normalization". `scale` starts at 1 and `bias` at 0. Activations
  narrower than float32 are normalised in float32.
  """

  is_position_wise = True

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of a LayerNorm."""
    p = super().Params()
    p.Define('input_dim', 0, 'Size of the last axis.', domain.SIZE)
    p.Define('epsilon', 1e-6, 'Added to the variance.', domain.POSITIVE)
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    ones, zeros = weight_params.WeightInit.Constant(1.0), weight_params.WeightInit.Constant(0.0)
    self.CreateVariable('scale', weight_params.WeightParams([p.input_dim], ones))
    self.CreateVariable('bias', weight_params.WeightParams([p.input_dim], zeros))

  def FProp(self, theta: nested_map.NestedMap, inputs: tf.Tensor, *extras: Any) -> Any:
    """Normalises the last axis.

    Args:
      theta: scale and bias, [input_dim].
      inputs: [..., input_dim].
      *extras: further outputs of the previous layer, such as paddings; returned unchanged.

    Returns:
      A tensor of the shape of `inputs` in fprop_dtype; if there are `extras`, the tuple (tensor,
      *extras).
    """
    shapes.CheckLastDim(self.path, inputs, self.params.input_dim)
    dtype = self.params.fprop_dtype
    compute = tf.float32 if dtype.size < 4 else dtype
    x = tf.cast(inputs, compute)
    x -= tf.reduce_mean(x, axis=-1, keepdims=True)
    variance = tf.reduce_mean(tf.square(x), axis=-1, keepdims=True)
    x *= tf.math.rsqrt(variance + self.params.epsilon)
    y = tf.cast(x * tf.cast(theta.scale, compute) + tf.cast(theta.bias, compute), dtype)
    return (y, *extras) if extras else y
