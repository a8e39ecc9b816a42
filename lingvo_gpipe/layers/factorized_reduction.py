# SPDX-License-Identifier: Apache-2.0
"""Halving an image's height and width without losing the pixels in between."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gpipe.core import base_layer, hyperparams, nested_map, shapes
from lingvo_gpipe.layers import activations, batch_norm, conv


class FactorizedReductionLayer(base_layer.BaseLayer):
  """batch_norm(concat(conv(even pixels), conv(odd pixels))) of activated inputs.

  Two paths take every second pixel, the second one shifted by one along height and width (zeros
  come in at the bottom and right), and map them by 1x1 convolutions to half of the channels each
  (Real et al. 2019; Zoph et al. 2018).
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """The Params of a FactorizedReductionLayer."""
    p = super().Params()
    p.Define('input_dim', 0, 'Channels in.')
    p.Define('output_dim', 0, 'Channels out; an even number.')
    p.Define('activation', 'RELU', 'Name of the activation of the inputs.')
    p.Define('conv_tpl', conv.Conv2DLayerNoPadding.Params(), 'What the convolutions are made from.')
    p.Define('batch_norm_tpl', batch_norm.BatchNormLayer.Params(), 'The same for the batch norm.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    shapes.CheckPositive(p, 'input_dim', 'output_dim')
    if p.output_dim % 2:
      raise ValueError(
        f'{type(self).__name__} {p.name!r}: output_dim must be even, got {p.output_dim}'
      )
    self._activation = activations.GetFn(p.activation)
    path = p.conv_tpl.Copy().Set(filter_shape=(1, 1, p.input_dim, p.output_dim // 2))
    self.CreateChildren('conv', [path, path])
    self.CreateChild('batch_norm', p.batch_norm_tpl.Copy().Set(dim=p.output_dim))

  def FProp(self, theta: nested_map.NestedMap, inputs: tf.Tensor) -> tf.Tensor:
    """Maps [batch, height, width, input_dim] to [batch, height / 2, width / 2, output_dim].

    Odd sizes are rounded up.
    """
    shapes.CheckRank(self.path, inputs, 4)
    x = self._activation(self._CastToFPropDtype(inputs))
    shifted = tf.pad(x, [[0, 0], [0, 1], [0, 1], [0, 0]])[:, 1:, 1:, :]
    halves = [
      layer.FProp(theta.conv[i], pixels[:, ::2, ::2, :])
      for i, (layer, pixels) in enumerate(zip(self.conv, (x, shifted), strict=True))
    ]
    return self.batch_norm.FProp(theta.batch_norm, tf.concat(halves, axis=-1))
