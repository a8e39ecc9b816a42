# SPDX-License-Identifier: Apache-2.0
"""Experiments that pass the checks of all experiments, and some that each fail one of them."""

import tensorflow as tf

from lingvo_gpipe import (
  linear,
  pipelining_layer,
  registry,
  synthetic,
  task,
)


class Net(task.BaseTask):
  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('dim', 4, 'Size of every layer.')
    p.Define('num_layers', 2, 'Layers.')
    p.Define('gain', 1.0, 'Multiplies the loss.')
    p.Define('eager', False, 'Make a variable at once.')
    p.Define('stack', pipelining_layer.PipeliningLayer.Params().Set(xla=False), 'Pipeline.')
    return p

  def __init__(self, params):
    super().__init__(params)
    p = self.params
    layer = linear.ProjectionLayer.Params().Set(input_dim=p.dim, output_dim=p.dim)
    sub = [layer.Copy() for _ in range(p.num_layers)]
    self.CreateChild('stack', p.stack.Copy().Set(sub=sub))
    if p.eager:
      self.leak = tf.Variable(0.0)

  def PipelineInputs(self, input_batch):
    return (tf.repeat(input_batch.inputs, self.params.dim // 4, axis=-1),)

  def ComputeLoss(self, theta, predictions, input_batch):
    loss = self.params.gain * tf.reduce_mean((predictions - input_batch.targets) ** 2)
    return {'loss': (loss, tf.reduce_sum(input_batch.example_weights))}, {}


class Small(registry.SingleTaskModelParams):
  def Train(self):
    return synthetic.SyntheticRegressionInput.Params().Set(batch_size=2, input_shape=[4])

  def Task(self):
    return Net.Params().Set(name='net')


@registry.RegisterSingleTaskModel
class Good(Small):
  pass


@registry.RegisterSingleTaskModel
class Wide(Small):
  def Task(self):
    return super().Task().Set(dim=4000)


@registry.RegisterSingleTaskModel
class Deep(Small):
  def Task(self):
    p = super().Task().Set(num_layers=8)
    p.stack.num_stages = 8
    return p


@registry.RegisterSingleTaskModel
class WideWithSmoke(Wide):
  def Smoke(self):
    return {'task.dim': 4}


@registry.RegisterSingleTaskModel
class DeepWithSmoke(Deep):
  def Smoke(self):
    return 'task.num_layers:4; task.stack.num_stages:4'


@registry.RegisterSingleTaskModel
class SmokeDoesNotHelp(Wide):
  def Smoke(self):
    return {'task.num_layers': 1}


@registry.RegisterSingleTaskModel
class SmokeNamesNothing(Wide):
  def Smoke(self):
    return {'task.width': 4}


@registry.RegisterSingleTaskModel
class NoData(Small):
  Train = registry.SingleTaskModelParams.Train


@registry.RegisterSingleTaskModel
class NoSuchEvaluation(Small):
  def Task(self):
    p = super().Task()
    p.train.eval_datasets = ['Test']
    return p


@registry.RegisterSingleTaskModel
class Unsteady(Small):
  calls = []

  def Task(self):
    self.calls.append(1)
    return super().Task().Set(num_layers=len(self.calls))


@registry.RegisterSingleTaskModel
class Eager(Small):
  def Task(self):
    return super().Task().Set(eager=True)


@registry.RegisterSingleTaskModel
class Diverges(Small):
  def Task(self):
    return super().Task().Set(gain=float('nan'))


@registry.RegisterSingleTaskModel
class LearnsNothing(Small):
  def Task(self):
    return super().Task().Set(gain=0.0)
