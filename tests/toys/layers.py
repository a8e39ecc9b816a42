# SPDX-License-Identifier: Apache-2.0
"""Layers whose forward pass is a function that the test passes, and a table of rows for ids."""

import tensorflow as tf

from lingvo_gpipe.core import base_layer, nested_map, weight_params

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
