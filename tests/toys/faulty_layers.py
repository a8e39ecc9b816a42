# SPDX-License-Identifier: Apache-2.0
"""Layers that break a rule, and layers that look equal and are not."""

import functools

import numpy as np
import tensorflow as tf

from lingvo_gpipe.core import base_layer, weight_params
from lingvo_gpipe.layers import linear, transformer
from tests.toys import layers

# ---- weights taken past the arguments ------------------------------------------------------------


class TakesItsWeight(layers.SilentLayer):
  """Its weight would get no gradient if backward is in halves, or nothing is recomputed."""

  def FProp(self, theta, x):
    return self.theta.w * x


class CallsItsChild(layers.SilentLayer):
  """Calls its child without a theta."""

  def __init__(self, params):
    super().__init__(params)
    self.CreateChild('child', layers.FnLayer.Params())

  def FProp(self, theta, x):
    return self.child(theta.w * x)


class HasAVariable(layers.SilentLayer):
  """fn(its variable, x); nobody declared the variable."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('trainable', True, 'Whether the variable is trainable.')
    return p

  def __init__(self, params):
    super().__init__(params)
    self.variable = tf.Variable(
      tf.ones([layers.DIM], tf.float64), trainable=self.params.trainable, name='undeclared'
    )

  def FProp(self, theta, x):
    return self.params.fn(self.variable, x * theta.w)


class ReadsOtherVariables(HasAVariable):
  """Declares that it reads a variable that is not its own."""

  reads_other_variables = True


class RecomputingProjection(linear.ProjectionLayer):
  """Recomputes its product by TensorFlow, which takes the weights from the surroundings."""

  def FProp(self, theta, x):
    return tf.recompute_grad(lambda x: super(RecomputingProjection, self).FProp(theta, x))(x)


class AnnouncesASkip(layers.MatrixLayer):
  """Announces the skip 'a', which it never begins."""

  @property
  def skips_out(self):
    return ('a',)


# ---- values that no layer may use ----------------------------------------------------------------


class FactorLayer(base_layer.BaseLayer):
  """x w times factor(layer, x), and the further arguments, or None."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('dim', layers.DIM, 'Size of x.')
    p.Define('factor', lambda layer, x: layer.number, 'Function of the layer and x.')
    return p

  def __init__(self, params):
    super().__init__(params)
    # A test may change it, though no Param has it.
    self.number = 1.0
    self.CreateVariable('w', weight_params.WeightParams([self.params.dim] * 2))

  def FProp(self, theta, x, paddings=None):
    factor = tf.cast(self.params.factor(self, x), x.dtype)
    return linear.MatMulLastDim(x, theta.w) * factor, paddings


class EqualAttributes(transformer.TransformerLayer):
  """Has children, and attributes that are equal in each layer."""

  def __init__(self, params):
    super().__init__(params)
    self._values = {'ones': [np.ones(2)], 'half': 0.5}
    self._mask = tf.constant([True, False])
    self._functions = [tf.nn.gelu]
    self._partial = functools.partial(tf.nn.gelu, approximate=True)
    self._method = self._Same

  def _Same(self, x):
    return x


class NumberedLayer(base_layer.BaseLayer):
  """x * w, scaled by what a subclass makes of the next number: it differs for equal Params."""

  numbers = iter(())

  def __init__(self, params):
    self.before = 1.0
    super().__init__(params)
    self.CreateVariable('w', weight_params.WeightParams([layers.DIM]))
    self.SetScale(next(self.numbers))

  def FProp(self, theta, x):
    return x * theta.w * self.Scale()


class NamedLikeAChild(NumberedLayer):
  """Keeps the number in an attribute that is named like the attributes for children."""

  def SetScale(self, number):
    self._child_scale = number

  def Scale(self):
    return self._child_scale


class SetBeforeInit(NumberedLayer):
  """Keeps the number in an attribute that is older than the attributes of BaseLayer."""

  def SetScale(self, number):
    self.before = number

  def Scale(self):
    return self.before


class ArrayOfOnes(NumberedLayer):
  """Keeps the number as the rank of an array."""

  def SetScale(self, number):
    self.array = np.ones([number] * (number - 1))  # Equal if one is broadcast.

  def Scale(self):
    return 1.0 + self.array.ndim


class OrderOfAMap(NumberedLayer):
  """Keeps the number as the order of two entries."""

  def SetScale(self, number):
    self.scales = {'a': 1, 'b': 2} if number == 1 else {'b': 2, 'a': 1}

  def Scale(self):
    return next(iter(self.scales.values()))
