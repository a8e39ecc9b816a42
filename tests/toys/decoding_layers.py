# SPDX-License-Identifier: Apache-2.0
"""Layers that decode step by step without attention."""

import tensorflow as tf

from lingvo_gpipe.core import base_layer, nested_map, shapes
from tests.toys import layers


class PositionsLayer(base_layer.BaseLayer):
  """Adds each column's position: a step has other positions than a prompt, but no states."""

  def FProp(self, theta, x):
    return x + tf.range(x.shape[1], dtype=x.dtype)

  def ExtendStep(self, theta, states, x, *, time_step):
    return x + tf.cast(time_step, x.dtype), states


class RunningSumLayer(base_layer.BaseLayer):
  """Adds the running sum of its inputs; passes a nest of all dtypes on."""

  def FProp(self, theta, x, nest):
    return x + tf.cumsum(x, axis=1), nest

  def Prefill(self, theta, x, nest, *, max_length):
    states = nested_map.NestedMap(
      total=tf.reduce_sum(x, axis=1, keepdims=True), flag=nest['flag'][:, -1:]
    )
    return self.FProp(theta, x, nest), states

  def ExtendStep(self, theta, states, x, nest, *, time_step):
    states = nested_map.NestedMap(total=states.total + x, flag=nest['flag'])
    return (x + states.total, nest), states


class PositionWiseLayer(layers.NoWeightsLayer):
  """fn(*args), which decodes by its FProp."""

  is_position_wise = True


class DoublingLayer(layers.SilentLayer):
  """x -> x twice, as its cost does not say; takes no more than `most` columns."""

  is_position_wise = True

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('most', 2 * layers.DIM, 'The largest number of columns.')
    return p

  def FProp(self, theta, x):
    shapes.CheckLastDim(self.path, x, min(x.shape[-1], self.params.most))
    return tf.concat([x, x], axis=-1)
