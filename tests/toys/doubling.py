# SPDX-License-Identifier: Apache-2.0
"""Layers, an input and a task of a user. `projects.Write` copies this file into `tasks`."""

import tensorflow as tf

from lingvo_gpipe import (
  base_input_generator,
  base_layer,
  nested_map,
  pipelining_layer,
  task,
  weight_params,
)


class Scale(base_layer.BaseLayer):
  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('dim', 0, 'Size.')
    return p

  def __init__(self, params):
    super().__init__(params)
    self.CreateVariable('w', weight_params.WeightParams([self.params.dim]))

  def FProp(self, theta, x):
    return x * theta.w


class Strict(Scale):
  def FProp(self, theta, x):
    if x.shape[-1] != 3:
      raise ValueError('only 3 columns')
    return x * theta.w


class Widens(Scale):
  def FProp(self, theta, x):
    return tf.concat([x, x], -1)


class Bounded(Scale):
  def FProp(self, theta, x):
    with tf.control_dependencies([tf.debugging.assert_less(x, 3.2, message='out of bounds')]):
      return x * theta.w

  @classmethod
  def FPropMeta(cls, params, x):
    return nested_map.NestedMap(flops=1, out_specs=(x,))


class Logarithm(Scale):
  def FProp(self, theta, x):
    return tf.math.log(3.2 - tf.stop_gradient(x)) * theta.w


class Points(base_input_generator.BaseInputGenerator):
  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('seconds', 0.0, 'How long the first batch takes.')
    return p

  def NumExamples(self):
    return 64

  def _Examples(self, indices):
    x = tf.cast(indices, tf.float32)[:, tf.newaxis] / 64.0 + tf.constant([[1.0, 2.0, 3.0]])
    if self.params.seconds:
      x = tf.ensure_shape(tf.py_function(self._Wait, [x], tf.float32), x.shape)
    return nested_map.NestedMap(x=x, y=2.0 * x)

  def _Wait(self, x):
    import time

    print('waiting', flush=True)
    time.sleep(self.params.seconds)
    return x

  def _FingerprintParts(self):
    return ['points']


class Doubling(task.BaseTask):
  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('stack', pipelining_layer.PipeliningLayer.Params(), 'Pipeline.')
    p.Define('first', [], 'Layers before the last three.')
    return p

  def __init__(self, params):
    super().__init__(params)
    layers = [*self.params.first, *(Scale.Params().Set(dim=3) for _ in range(3))]
    self.CreateChild('stack', self.params.stack.Copy().Set(sub=layers))

  def PipelineInputs(self, input_batch):
    return (input_batch.x,)

  def LossInputs(self, input_batch):
    return nested_map.NestedMap(y=input_batch.y)

  def ComputeLoss(self, theta, predictions, input_batch):
    size = tf.cast(tf.shape(predictions)[0], tf.float32)
    return {'loss': (tf.reduce_mean(tf.square(predictions - input_batch.y)), size)}, {}
