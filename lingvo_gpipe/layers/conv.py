# SPDX-License-Identifier: Apache-2.0
"""Convolutions of images [batch, height, width, channels], without paddings tensors."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import base_layer, domain, hyperparams, nested_map, shapes, weight_params
from lingvo_gpipe.layers import activations, windows


class _ConvLayer(base_layer.BaseLayer):
  """Base class of the convolutions: Params, checks, bias and activation."""

  _FILTER_SHAPE = 'Height, width, input channels and output channels of the filter.'
  _NEEDS_EQUAL_STRIDES = False

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of a convolution, with Lingvo's names."""
    p = super().Params()
    p.Define('filter_shape', (0, 0, 0, 0), cls._FILTER_SHAPE, domain.ListOf(domain.SIZE, 4))
    p.Define(
      'filter_stride',
      (1, 1),
      'Strides of the filter along height and width.',
      domain.ListOf(domain.SIZE, 2),
    )
    p.Define(
      'padding', 'SAME', 'How borders are treated: SAME or VALID.', domain.OneOf(*windows.PADDINGS)
    )
    p.Define('bias', False, 'Whether to add a bias.')
    p.Define(
      'activation', 'NONE', 'Name of the activation; see layers/activations.py.', activations.NAME
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    self._activation = activations.GetFn(p.activation)
    if self._NEEDS_EQUAL_STRIDES and len(set(p.filter_stride)) > 1:
      raise ValueError(
        f'{type(self).__name__} {p.name!r}: depthwise convolutions need equal strides in '
        f'TensorFlow, got filter_stride {p.filter_stride!r}'
      )
    if p.bias:
      zero = weight_params.WeightInit.Constant(0.0)
      self.CreateVariable('b', weight_params.WeightParams([self._OutputDim(p)], zero))

  @classmethod
  def _OutputDim(cls, params: Any) -> int:
    return params.filter_shape[3]

  def FProp(self, theta: nested_map.NestedMap, inputs: tf.Tensor) -> tf.Tensor:
    """Maps [batch, height, width, input channels] to [batch, height', width', output channels]."""
    p = self.params
    shapes.CheckRank(self.path, inputs, 4)
    shapes.CheckLastDim(self.path, inputs, p.filter_shape[2])
    windows.CheckFits(self.path, inputs, p.filter_shape[:2], p.padding)
    y = self._Convolve(theta, self._CastToFPropDtype(inputs))
    if p.bias:
      y = tf.nn.bias_add(y, theta.b)
    return self._activation(y)

  def _Convolve(self, theta: nested_map.NestedMap, inputs: tf.Tensor) -> tf.Tensor:
    raise NotImplementedError(f'{type(self).__name__} must define _Convolve')


class Conv2DLayerNoPadding(_ConvLayer):
  """activation(convolution(x) + b). Lingvo's name: "NoPadding" means without a paddings tensor."""

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    self.CreateVariable('w', weight_params.WeightParams(self.params.filter_shape))

  def _Convolve(self, theta: nested_map.NestedMap, inputs: tf.Tensor) -> tf.Tensor:
    p = self.params
    return tf.nn.conv2d(inputs, theta.w, list(p.filter_stride), p.padding)


class DepthwiseConv2DLayerNoPadding(_ConvLayer):
  """Convolves each channel with its own filters."""

  _FILTER_SHAPE = 'Height, width, input channels and number of filters for each channel.'
  _NEEDS_EQUAL_STRIDES = True

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    self.CreateVariable('w', weight_params.WeightParams(self.params.filter_shape))

  @classmethod
  def _OutputDim(cls, params: Any) -> int:
    return params.filter_shape[2] * params.filter_shape[3]

  def _Convolve(self, theta: nested_map.NestedMap, inputs: tf.Tensor) -> tf.Tensor:
    return _Depthwise(self.params, inputs, theta.w)


class SeparableConv2DLayerNoPadding(_ConvLayer):
  """A depthwise convolution followed directly by a 1x1 convolution."""

  _NEEDS_EQUAL_STRIDES = True

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of a SeparableConv2DLayerNoPadding."""
    p = super().Params()
    p.Define('depth_multiplier', 1, 'Number of depthwise filters for each channel.', domain.SIZE)
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    height, width, dim_in, dim_out = p.filter_shape
    self.CreateVariable(
      'w_depthwise', weight_params.WeightParams([height, width, dim_in, p.depth_multiplier])
    )
    self.CreateVariable(
      'w_pointwise', weight_params.WeightParams([1, 1, dim_in * p.depth_multiplier, dim_out])
    )

  def _Convolve(self, theta: nested_map.NestedMap, inputs: tf.Tensor) -> tf.Tensor:
    y = _Depthwise(self.params, inputs, theta.w_depthwise)
    return tf.nn.conv2d(y, theta.w_pointwise, 1, 'SAME')


def _Depthwise(params: Any, inputs: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
  strides = [1, *params.filter_stride, 1]
  return tf.nn.depthwise_conv2d(inputs, w, strides, params.padding)
