# SPDX-License-Identifier: Apache-2.0
"""Activation, convolution and batch norm: the block of image networks with pre-activation."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gpipe.core import base_layer, domain, hyperparams, nested_map
from lingvo_gpipe.layers import activations, batch_norm, conv, windows


class ConvBatchNormLayer(base_layer.BaseLayer):
  """batch_norm(convolution(activation(x))); the activation comes first."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of a ConvBatchNormLayer; they override the templates' Params."""
    p = super().Params()
    p.Define(
      'filter_shape',
      (0, 0, 0, 0),
      'Height, width, input channels and output channels.',
      domain.ListOf(domain.SIZE, 4),
    )
    p.Define(
      'filter_stride',
      (1, 1),
      'Strides of the filter along height and width.',
      domain.ListOf(domain.SIZE, 2),
    )
    p.Define(
      'padding', 'SAME', 'How borders are treated: SAME or VALID.', domain.OneOf(*windows.PADDINGS)
    )
    p.Define('activation', 'RELU', 'Name of the activation of the inputs.', activations.NAME)
    p.Define('conv_tpl', conv.Conv2DLayerNoPadding.Params(), 'Template of the convolution.')
    p.Define('batch_norm_tpl', batch_norm.BatchNormLayer.Params(), 'Template of the batch norm.')
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
    """Maps [batch, height, width, input channels] to [batch, height', width', output channels]."""
    x = self._activation(self._CastToFPropDtype(inputs))
    return self.batch_norm.FProp(theta.batch_norm, self.conv.FProp(theta.conv, x))
