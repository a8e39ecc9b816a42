# SPDX-License-Identifier: Apache-2.0
"""Layers that run a function of the test, a table of rows for ids, and inputs of such layers."""

import numpy as np
import tensorflow as tf

from lingvo_gpipe.core import base_layer, nested_map, weight_params
from lingvo_gpipe.layers import skip

DIM = 3
VOCABULARY = 6


class FnLayer(base_layer.BaseLayer):
  """fn(w, *args), where w [DIM] is 1."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('fn', lambda w, x: x * w, 'Maps the weight and the arguments to outputs.')
    return p

  def __init__(self, params):
    super().__init__(params)
    ones = weight_params.WeightInit.Constant(1.0)
    self.CreateVariable('w', weight_params.WeightParams([DIM], ones))

  def FProp(self, theta, *args):
    return self.params.fn(theta.w, *args)


class SilentLayer(FnLayer):
  """A `FnLayer` with a hand-written cost, so that counting does not trace its function."""

  @classmethod
  def FPropMeta(cls, params, *specs):
    return nested_map.NestedMap(flops=1, out_specs=specs)


class NoWeightsLayer(base_layer.BaseLayer):
  """fn(*args)."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('fn', None, 'Maps the arguments to outputs.')
    return p

  def FProp(self, theta, *args):
    return self.params.fn(*args)


def TanhProduct(w, x, *extras):
  """Returns tanh(x w) and the further arguments, always as a tuple."""
  return (tf.tanh(tf.matmul(x, w)), *extras)


class MatrixLayer(base_layer.BaseLayer):
  """fn(w, *args), where w is a random matrix; the default is `TanhProduct`."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('fn', TanhProduct, 'Maps the weight and the arguments to outputs.')
    p.Define('dims', (DIM, DIM), 'Shape of w.')
    p.Define('trainable', True, 'Whether w is trainable.')
    return p

  def __init__(self, params):
    super().__init__(params)
    p = self.params
    self.CreateVariable('w', weight_params.WeightParams(list(p.dims)), trainable=p.trainable)

  def FProp(self, theta, *args):
    return self.params.fn(theta.w, *args)


class TableLayer(base_layer.BaseLayer):
  """ids [batch] -> rows of a table [batch, dim], and the ids, which are below VOCABULARY."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('dim', DIM, 'Size of a row.')
    return p

  def __init__(self, params):
    super().__init__(params)
    self.CreateVariable('table', weight_params.WeightParams([VOCABULARY, self.params.dim]))

  def FProp(self, theta, ids):
    return tf.gather(theta.table, ids), ids


def WithVariables(params):
  """Returns a layer with its variables."""
  layer = params.Instantiate()
  layer.InstantiateVariables()
  return layer


def RandomInput(*shape, seed=0, dtype=tf.float64):
  """Returns normally distributed numbers."""
  return tf.cast(np.random.default_rng(seed).standard_normal(shape), dtype)


def Without(fn):
  """Returns Params of a layer that computes fn(*args), without weights."""
  return NoWeightsLayer.Params().Set(fn=fn)


def Stash(key):
  """Returns Params of a layer at which a skip begins."""
  return skip.StashLayer.Params().Set(key=key)


def Pop(key, combine='add'):
  """Returns Params of a layer at which a skip ends."""
  return skip.PopLayer.Params().Set(key=key, combine=combine)
