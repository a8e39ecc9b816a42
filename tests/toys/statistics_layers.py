# SPDX-License-Identifier: Apache-2.0
"""Layers with state that follows sums over the mini-batch, some with auxiliary losses."""

import tensorflow as tf

from lingvo_gpipe.core import base_layer, fprop_context, weight_params
from lingvo_gpipe.layers import batch_norm
from tests.toys import aux_loss_layers, layers

_DIM = layers.DIM


def Norm(**params):
  """Returns Params of a BatchNorm whose averages move fast."""
  return batch_norm.BatchNormLayer.Params().Set(dim=_DIM, **{'decay': 0.8, **params})


class Counter(base_layer.BaseLayer):
  """Counts training examples, and reports the sums in `sums`."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('sums', {}, 'Further sums to report.')
    p.Define('wrong', '', 'Name of an unknown weight to assign.')
    return p

  def __init__(self, params):
    super().__init__(params)
    zero = weight_params.WeightInit.Constant(0.0)
    self.CreateVariable('total', weight_params.WeightParams([], zero), trainable=False)
    self.CreateVariable('untouched', weight_params.WeightParams([], zero), trainable=False)

  def FProp(self, theta, x):
    count = tf.cast(tf.shape(x)[0], tf.float32)
    fprop_context.Current().AddSums(self, {'count': count, **self.params.sums})
    return x

  def StateFromSums(self, state, sums):
    total = state.total + tf.cast(sums.count, state.total.dtype)
    return {self.params.wrong or 'total': total}


class _MayAddLosses(base_layer.BaseLayer):
  """The base of layers that add auxiliary losses if their Params say so."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('adds_losses', False, 'Whether to add auxiliary losses.')
    return p

  def _AddLoss(self, value, *coefficient_and_name):
    if self.params.adds_losses:
      fprop_context.Current().AddAuxLoss(self, value, *coefficient_and_name)


class NormBlock(_MayAddLosses):
  """A projection and two BatchNorms below the layer of the stage; x stays in reach."""

  def __init__(self, params):
    super().__init__(params)
    self.CreateChild('a', Norm(decay=0.9))
    self.CreateChild('b', Norm(scale=False))
    self.CreateVariable('w', weight_params.WeightParams([_DIM, _DIM]))

  def FProp(self, theta, x):
    h = self.b.FProp(theta.b, tf.matmul(self.a.FProp(theta.a, x), theta.w))
    self._AddLoss(tf.reduce_mean((h - 0.2) ** 2) + tf.reduce_mean(theta.w**2), 2.0)
    return x + tf.tanh(h)


def _MeanSquare(x):
  return tf.reduce_mean(tf.tanh(x - 1.0) ** 2)


class NormBetweenLosses(_MayAddLosses):
  """A BatchNorm between two layers that add losses of one name; adds one of its input alone."""

  def __init__(self, params):
    super().__init__(params)
    self.CreateChild('a', self._Penalty(0.3))
    self.CreateChild('norm', Norm(decay=None))
    self.CreateChild('b', self._Penalty(3.0))

  def _Penalty(self, coefficient):
    losses = [['z', coefficient, _MeanSquare]] if self.params.adds_losses else []
    return aux_loss_layers.AuxLossLayer.Params().Set(losses=losses)

  def FProp(self, theta, x):
    self._AddLoss(tf.reduce_mean(tf.tanh(x) ** 3), 0.5)
    x = self.norm.FProp(theta.norm, self.a.FProp(theta.a, x))
    return self.b.FProp(theta.b, x)


class CountingProduct(_MayAddLosses):
  """tanh(x w), which counts its examples: a repeated run would count twice."""

  def __init__(self, params):
    super().__init__(params)
    zero = weight_params.WeightInit.Constant(0.0)
    self.CreateVariable('w', weight_params.WeightParams([_DIM, _DIM]))
    self.CreateVariable('total', weight_params.WeightParams([], zero), trainable=False)

  def FProp(self, theta, x):
    fprop_context.Current().AddSums(self, {'count': tf.cast(tf.shape(x)[0], tf.float32)})
    y = tf.tanh(tf.matmul(x, theta.w))
    self._AddLoss(tf.reduce_mean(y**2), 0.1, 'one')
    self._AddLoss(tf.reduce_mean((y - 0.2) ** 2) + tf.reduce_mean(theta.w**2), 0.7, 'other')
    return y

  def StateFromSums(self, state, sums):
    return {'total': state.total + tf.cast(sums.count, state.total.dtype)}


class NormBranches(base_layer.BaseLayer):
  """Three independent sums, one of them of a layer that is called twice."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('norm', Norm(), 'Params of the BatchNorms, the second of which has no scale.')
    return p

  def __init__(self, params):
    super().__init__(params)
    norm = self.params.norm
    self.CreateChild('a', norm)
    self.CreateChild('b', norm.Copy().Set(scale=False))
    self.CreateVariable('w', weight_params.WeightParams([norm.dim, norm.dim]))

  def FProp(self, theta, x):
    paddings = tf.cast(x[..., 0] > 1.0, tf.float32)
    first, _ = self.a.FProp(theta.a, x, paddings)
    second = self.a.FProp(theta.a, tf.tanh(tf.matmul(x, theta.w)))
    return first + second + tf.tanh(self.b.FProp(theta.b, x))
