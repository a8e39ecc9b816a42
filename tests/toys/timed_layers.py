# SPDX-License-Identifier: Apache-2.0
"""Layers that count their measurements, take a nap or wait for another device."""

import time

import tensorflow as tf

from lingvo_gpipe.core import base_layer, nested_map, weight_params


class Measured(base_layer.BaseLayer):
  """x -> x, with the FLOPs and weights of its Params; counts its measurements."""

  num_measured = 0

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('flops', 0, 'FLOPs that it says it has.')
    p.Define('num_weights', 0, 'Number of weights.')
    p.Define('fn', None, 'A function that makes layers different.')
    p.Define('gives_tuple', True, 'Whether its specs are a tuple, as they must be.')
    return p

  def __init__(self, params):
    super().__init__(params)
    if self.params.num_weights:
      self.CreateVariable('w', weight_params.WeightParams([self.params.num_weights]))

  def FProp(self, theta, x):
    return x

  @classmethod
  def FPropMeta(cls, params, x):
    Measured.num_measured += 1
    return nested_map.NestedMap(flops=params.flops, out_specs=(x,) if params.gives_tuple else x)


class Sleeper(base_layer.BaseLayer):
  """(x, *extras) -> (x w, *extras), after a nap; counts the naps of all instances."""

  naps = 0
  modes = set()
  # Number of current naps, and the share by which each of them prolongs the other naps.
  napping = 0
  snoring = 0.0

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('forward', 0.0, 'Seconds of a nap of forward.')
    p.Define('backward', 0.0, 'Seconds of a nap of backward.')
    return p

  def __init__(self, params):
    super().__init__(params)
    self.CreateVariable('w', weight_params.WeightParams([]))

  def FProp(self, theta, x, *extras):
    p = self.params
    Sleeper.modes.add(self.do_eval)

    def Nap(x, seconds):
      def Sleep(value):
        Sleeper.naps += 1
        Sleeper.napping += 1
        time.sleep(seconds * (1 + Sleeper.snoring * (Sleeper.napping - 1)))
        Sleeper.napping -= 1
        return value

      y = tf.py_function(Sleep, [x], x.dtype)
      y.set_shape(x.shape)
      return y

    @tf.custom_gradient
    def Sleepy(x):
      return Nap(x, p.forward), lambda dy: Nap(dy, p.backward)

    y = Sleepy(x * theta.w)
    return (y, *extras) if extras else y


class Meeting(base_layer.BaseLayer):
  """(x, m) -> (x w, m); forward and backward of the micro-batch m == `at` wait for another one."""

  barrier = None

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('at', 0, 'The micro-batch.')
    return p

  def __init__(self, params):
    super().__init__(params)
    self.CreateVariable('w', weight_params.WeightParams([]))

  def FProp(self, theta, x, m):
    def Wait(value, m):
      if m[0] == self.params.at:
        Meeting.barrier.wait()
      return value

    def Meet(value):
      met = tf.numpy_function(Wait, [value, m], value.dtype)
      met.set_shape(value.shape)
      return met

    return tf.custom_gradient(lambda x: (Meet(x), Meet))(x * theta.w), m
