# SPDX-License-Identifier: Apache-2.0
"""Pooling of images [batch, height, width, channels]."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import base_layer, hyperparams, nested_map, shapes
from lingvo_gpipe.layers import windows

TYPES = ('MAX', 'AVG')


def _CheckType(params: Any) -> None:
  if params.pooling_type not in TYPES:
    raise ValueError(
      f'{params.cls.__name__} {params.name!r}: pooling_type must be {" or ".join(TYPES)}, '
      f'got {params.pooling_type!r}'
    )


class PoolingLayer(base_layer.BaseLayer):
  """Takes the maximum or mean of each window; positions outside the image do not count."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of a PoolingLayer, with Lingvo's names."""
    p = super().Params()
    p.Define('window_shape', (0, 0), 'Height and width of the window.')
    p.Define('window_stride', (1, 1), 'Strides of the window along height and width.')
    p.Define('pooling_type', 'MAX', 'MAX or AVG.')
    p.Define('padding', 'SAME', 'How borders are treated: SAME or VALID.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    windows.CheckSizes(self.params, 'window_shape', 2)
    windows.Check(self.params, 'window_stride')
    _CheckType(self.params)

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
    p.Define('pooling_type', 'AVG', 'MAX or AVG.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    _CheckType(self.params)

  def FProp(self, theta: nested_map.NestedMap, inputs: tf.Tensor) -> tf.Tensor:
    """Maps inputs [batch, height, width, channels] to [batch, channels]."""
    del theta
    shapes.CheckRank(self.path, inputs, 4)
    reduce = tf.reduce_max if self.params.pooling_type == 'MAX' else tf.reduce_mean
    return reduce(self._CastToFPropDtype(inputs), axis=[1, 2])
