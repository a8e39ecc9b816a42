# SPDX-License-Identifier: Apache-2.0
"""Layers with children, and layers that are made to be children."""

import tensorflow as tf

from lingvo_gpipe.core import base_layer, nested_map, weight_params
from lingvo_gpipe.layers import dropout, linear, sequential
from tests.toys import layers

WeightInit = weight_params.WeightInit


class Scale(base_layer.BaseLayer):
  """x * w + steps, with a non-trainable float and a non-trainable integer."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('shape', [3], 'Shape of w.')
    return p

  def __init__(self, params):
    super().__init__(params)
    self.CreateVariable('w', weight_params.WeightParams(self.params.shape))
    self.CreateVariable('mean', weight_params.WeightParams([], WeightInit.Constant(0.5)), False)
    steps = weight_params.WeightParams([], WeightInit.Constant(2), tf.int32)
    self.CreateVariable('steps', steps, trainable=False)

  def FProp(self, theta, x):
    return x * theta.w + tf.cast(theta.steps, x.dtype)


class PositionWiseScale(Scale):
  """A `Scale` that decodes by its FProp."""

  is_position_wise = True


class Tree(base_layer.BaseLayer):
  """A child, a list of children and a dict of children."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('tpl', Scale.Params(), 'Params of all children.')
    return p

  def __init__(self, params):
    super().__init__(params)
    tpl = self.params.tpl
    self.CreateChild('one', tpl)
    self.CreateChildren('some', [tpl, tpl])
    self.CreateChildren('named', {'x': tpl, 'y': tpl})

  def FProp(self, theta, x):
    x = self.one.FProp(theta.one, x)
    for layer, layer_theta in zip(self.some, theta.some, strict=True):
      x = layer.FProp(layer_theta, x)
    return x, self.named.x.FProp(theta.named.x, x), self.named.y.FProp(theta.named.y, x)


class PositionWiseTree(Tree):
  """A `Tree` that decodes by its FProp if its children do."""

  is_position_wise = True


class ConstructorLayer(layers.NoWeightsLayer):
  """Runs functions of the layer in its constructor."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('calls', (), 'Functions of the layer.')
    return p

  def __init__(self, params):
    super().__init__(params)
    for call in self.params.calls:
      call(self)


class Pair(base_layer.BaseLayer):
  """Two equal children, a and b, with the same input."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('tpl', layers.NoWeightsLayer.Params(), 'Params of both children.')
    return p

  def __init__(self, params):
    super().__init__(params)
    self.CreateChild('a', self.params.tpl)
    self.CreateChild('b', self.params.tpl)

  def FProp(self, theta, x):
    return self.a.FProp(theta.a, x), self.b.FProp(theta.b, x)


class SeedRoots(base_layer.BaseLayer):
  """A sequence of children, each with a row of seeds of its own."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('sub', [], 'Params of the children.')
    return p

  def __init__(self, params):
    super().__init__(params)
    self.CreateChildren('layers', self.params.sub, seed_roots=True)


class OpaqueSequence(sequential.SequentialLayer):
  """A SequentialLayer by another name, which no outer sequence may expand."""


class ResidualSequence(base_layer.BaseLayer):
  """x + a sequence of a projection and two dropouts."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('dim', layers.DIM, 'Size of x.')
    return p

  def __init__(self, params):
    super().__init__(params)
    dim = self.params.dim
    square = linear.ProjectionLayer.Params().Set(input_dim=dim, output_dim=dim)
    drop = dropout.DropoutLayer.Params().Set(keep_prob=0.7)
    self.CreateChild('inner', sequential.SequentialLayer.Params().Set(sub=[square, drop, drop]))

  def FProp(self, theta, x):
    return x + self.inner.FProp(theta.inner, x)


class UserModel(base_layer.BaseLayer):
  """A projection, a body and a projection, as in a model that a pipeline is a part of."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('dim', layers.DIM, 'Size of inputs and outputs.')
    p.Define('body', None, 'The pipeline, or a SequentialLayer.')
    return p

  def __init__(self, params):
    super().__init__(params)
    dim = self.params.dim
    square = linear.ProjectionLayer.Params().Set(input_dim=dim, output_dim=dim)
    self.CreateChild('first', square)
    self.CreateChild('body', self.params.body)
    self.CreateChild('last', square.Copy().Set(activation='NONE', has_bias=True))

  def FProp(self, theta, x):
    x = self.first.FProp(theta.first, x)
    return self.last.FProp(theta.last, self.body.FProp(theta.body, x))


class WideLayer(base_layer.BaseLayer):
  """Two products with a wide, masked layer between."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('dim', layers.DIM, 'Size of x; the layer between has eight times as many units.')
    return p

  def __init__(self, params):
    super().__init__(params)
    dim = self.params.dim
    self.CreateVariable('a', weight_params.WeightParams([dim, 8 * dim]))
    self.CreateVariable('b', weight_params.WeightParams([8 * dim, dim]))
    self.CreateChild('drop', dropout.DropoutLayer.Params().Set(keep_prob=0.5))

  def FProp(self, theta, x):
    h = self.drop.FProp(theta.drop, tf.tanh(tf.matmul(x, theta.a)))
    return tf.tanh(tf.matmul(h, theta.b))


class Tangle(base_layer.BaseLayer):
  """x and a nest of everything there is -> the same; batch at any dimension but the last."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('dim', layers.DIM, 'Last dimension of x.')
    return p

  def __init__(self, params):
    super().__init__(params)
    dim = self.params.dim
    self.CreateVariable('w', weight_params.WeightParams([dim, dim]))
    self.CreateVariable('unused', weight_params.WeightParams([2]))
    self.CreateVariable('frozen', weight_params.WeightParams([dim]), trainable=False)
    self.CreateChild('drop', dropout.DropoutLayer.Params().Set(keep_prob=0.8))

  def FProp(self, theta, x, nest):
    ids, (half, nothing, (flag,)) = nest.ids, nest.others
    assert nothing is None and nest.none is None
    scale = tf.cast(ids, x.dtype)[..., tf.newaxis]
    y = tf.tanh(linear.MatMulLastDim(x, theta.w) + theta.frozen) + 0.1 * scale * half
    y = self.drop.FProp(theta.drop, y)
    keep = tf.where(flag[..., tf.newaxis], y, half)
    side_values = (keep, None, (tf.logical_not(flag),))
    return y, nested_map.NestedMap(ids=(ids + 1) % 3, none=None, others=side_values)
