# SPDX-License-Identifier: Apache-2.0
"""Activation, convolution and batch norm: what image networks with pre-activation are made of."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gpipe.core import base_layer, hyperparams, nested_map
from lingvo_gpipe.layers import activations, batch_norm, conv


class ConvBatchNormLayer(base_layer.BaseLayer):
  """batch_norm(convolution(activation(x))); the activation comes first."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """The Params of a ConvBatchNormLayer; they override those in the templates."""
    p = super().Params()
    p.Define('filter_shape', (0, 0, 0, 0), 'Height, width, channels in and channels out.')
    p.Define('filter_stride', (1, 1), 'Steps of the filter along height and width.')
    p.Define('padding', 'SAME', 'SAME or VALID, what happens at the borders.')
    p.Define('activation', 'RELU', 'Name of the activation of the inputs.')
    p.Define('conv_tpl', conv.Conv2DLayerNoPadding.Params(), 'What the convolution is made from.')
    p.Define('batch_norm_tpl', batch_norm.BatchNormLayer.Params(), 'The same for the batch norm.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    self._activation = activations.GetFn(p.activation)
    conv_params = p.conv_tpl.Copy().Set(
      filter_shape=p.filter_shape, filter_stride=p.filter_stride, padding=p.padding
    )
    self.CreateChild('conv', conv_params)
    self.CreateChild('batch_norm', p.batch_norm_tpl.Copy().Set(dim=p.filter_shape[3]))

  def FProp(self, theta: nested_map.NestedMap, inputs: tf.Tensor) -> tf.Tensor:
    """Maps inputs [batch, height, width, channels in] to [batch, height', width', channels out]."""
    x = self._activation(self._CastToFPropDtype(inputs))
    return self.batch_norm.FProp(theta.batch_norm, self.conv.FProp(theta.conv, x))
