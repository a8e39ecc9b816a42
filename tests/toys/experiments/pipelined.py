# SPDX-License-Identifier: Apache-2.0
"""An experiment of two stages, which may be two workers."""

import tensorflow as tf

from lingvo_gpipe import dropout, linear, optimizer, pipelining_layer, registry, synthetic, task


class Regression(task.BaseTask):
  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('stack', pipelining_layer.PipeliningLayer.Params(), 'Layers.')
    return p

  def __init__(self, params):
    super().__init__(params)
    self.CreateChild('stack', self.params.stack)

  def PipelineInputs(self, batch):
    return (batch.inputs,)

  def ComputeLoss(self, theta, predictions, batch):
    loss = tf.reduce_mean(tf.square(predictions - batch.targets))
    return {'loss': (loss, self.LossWeight(batch))}, {}


@registry.RegisterSingleTaskModel
class Toy(registry.SingleTaskModelParams):
  def Train(self):
    return synthetic.SyntheticRegressionInput.Params().Set(batch_size=8)

  def Task(self):
    hidden = linear.ProjectionLayer.Params().Set(input_dim=32, output_dim=32, has_bias=True)
    drop = dropout.DropoutLayer.Params().Set(keep_prob=0.5)
    head = linear.LinearLayer.Params().Set(input_dim=32, output_dim=1)
    p = Regression.Params().Set(name='toy')
    p.stack.Set(sub=[hidden, drop, hidden, head], num_stages=2, num_micro_batches=2, splits=[2, 4])
    p.train.learner.optimizer = optimizer.Adam.Params()
    return p
