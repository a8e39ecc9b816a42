# SPDX-License-Identifier: Apache-2.0
"""Pooling of images [batch, height, width, channels]."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gpipe.core import base_layer, domain, hyperparams, nested_map, shapes
from lingvo_gpipe.layers import windows

TYPES = ('MAX', 'AVG')


class PoolingLayer(base_layer.BaseLayer):
  """Takes the maximum or mean of each window; positions outside the image do not count."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of a PoolingLayer, with Lingvo's names."""
    p = super().Params()
    p.Define(
      'window_shape', (0, 0), 'Height and width of the window.', domain.ListOf(domain.SIZE, 2)
    )
    p.Define(
      'window_stride',
      (1, 1),
      'Strides of the window along height and width.',
      domain.ListOf(domain.SIZE, 2),
    )
    p.Define('pooling_type', 'MAX', 'MAX or AVG.', domain.OneOf(*TYPES))
    p.Define(
      'padding', 'SAME', 'How borders are treated: SAME or VALID.', domain.OneOf(*windows.PADDINGS)
    )
    return p

  def FProp(self, theta: nested_map.NestedMap, inputs: tf.Tensor) -> tf.Tensor:
    """Maps inputs [batch, height, width, channels] to [batch, height', width', channels]."""
    del theta
    p = self.params
    shapes.CheckRank(self.path, inputs, 4)
    windows.CheckFits(self.path, inputs, p.window_shape, p.padding)
    pool = tf.nn.max_pool2d if p.pooling_type == 'MAX' else tf.nn.avg_pool2d
    x = self._CastToFPropDtype(inputs)
    return pool(x, list(p.window_shape), list(p.window_stride), p.padding)


class GlobalPoolingLayer(base_layer.BaseLayer):
  """Takes the maximum or mean of all positions."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of a GlobalPoolingLayer."""
    p = super().Params()
    p.Define('pooling_type', 'AVG', 'MAX or AVG.', domain.OneOf(*TYPES))
    return p

  def FProp(self, theta: nested_map.NestedMap, inputs: tf.Tensor) -> tf.Tensor:
    """Maps inputs [batch, height, width, channels] to [batch, channels]."""
    del theta
    shapes.CheckRank(self.path, inputs, 4)
    reduce = tf.reduce_max if self.params.pooling_type == 'MAX' else tf.reduce_mean
    return reduce(self._CastToFPropDtype(inputs), axis=[1, 2])
