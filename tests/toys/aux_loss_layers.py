# SPDX-License-Identifier: Apache-2.0
"""Layers that add auxiliary losses."""

import tensorflow as tf

from lingvo_gpipe.core import base_layer, fprop_context, weight_params
from tests.toys import layers


class AuxLossLayer(layers.NoWeightsLayer):
  """fn(x), by default x; adds losses that are functions of x."""

  @classmethod
  def Params(cls):
    p = super().Params().Set(fn=lambda x: x)
    p.Define('losses', [], 'Lists [name, coefficient, function of x].')
    return p

  def FProp(self, theta, x):
    for name, coefficient, loss_fn in self.params.losses:
      fprop_context.Current().AddAuxLoss(self, loss_fn(x), coefficient, name)
    return self.params.fn(x)


class ProductWithLosses(base_layer.BaseLayer):
  """tanh(x w), which adds losses of its output and of w."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('losses', {}, 'Coefficient of each auxiliary loss.')
    return p

  def __init__(self, params):
    super().__init__(params)
    self.CreateVariable('w', weight_params.WeightParams([layers.DIM, layers.DIM]))

  def FProp(self, theta, x):
    y = tf.tanh(tf.matmul(x, theta.w))
    for i, (name, coefficient) in enumerate(self.params.losses.items()):
      value = tf.reduce_mean((y - 0.2 * i) ** 2) + tf.reduce_mean(theta.w**2)
      fprop_context.Current().AddAuxLoss(self, value, coefficient, name)
    return y


class ChildrenWithLosses(base_layer.BaseLayer):
  """Two layers that add losses of one name, in a layer that adds a loss of its input alone."""

  def __init__(self, params):
    super().__init__(params)
    for name, coefficient in (('a', 0.3), ('b', 3.0)):
      self.CreateChild(name, ProductWithLosses.Params().Set(losses={'z': coefficient}))

  def FProp(self, theta, x):
    fprop_context.Current().AddAuxLoss(self, tf.reduce_mean(x**3), 0.5)
    return x + self.b.FProp(theta.b, self.a.FProp(theta.a, x))
