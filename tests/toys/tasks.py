# SPDX-License-Identifier: Apache-2.0
"""Tasks for tests of runners and learners."""

import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.experiment import task
from lingvo_gpipe.layers import batch_norm, dropout, linear
from lingvo_gpipe.pipeline import pipelining_layer

DIM = 3


class TiedNet(task.BaseTask):
  """A pipeline with dropout, a BatchNorm and a tie: the last layer uses the weight of the first."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('keep_prob', 1.0, 'Keep probability of the dropout layer.')
    p.Define('splits', [3, 5], 'End of each stage.')
    p.Define('num_micro_batches', 2, 'Number of micro-batches of each replica.')
    return p

  def __init__(self, params):
    super().__init__(params)
    p = self.params
    project = linear.ProjectionLayer.Params().Set(
      input_dim=DIM, output_dim=DIM, has_bias=True, activation='TANH'
    )
    self.CreateChild(
      'stack',
      pipelining_layer.PipeliningLayer.Params().Set(
        sub=[
          project,
          dropout.DropoutLayer.Params().Set(keep_prob=p.keep_prob),
          batch_norm.BatchNormLayer.Params().Set(dim=DIM, decay=0.5),
          project,
          project,
        ],
        ties=[['layers[4].w', 'layers[0].w']],
        num_stages=len(p.splits),
        splits=p.splits,
        num_micro_batches=p.num_micro_batches,
        xla=False,
      ),
    )

  def PipelineInputs(self, input_batch):
    return (input_batch.x,)

  def ComputeLoss(self, theta, predictions, input_batch):
    errors = tf.reduce_mean(tf.square(predictions - input_batch.y), -1)
    return {'loss': (tf.reduce_mean(errors), tf.cast(tf.size(errors), errors.dtype))}, {}

  def LossWeight(self, input_batch):
    return tf.cast(tf.shape(input_batch.y)[0], input_batch.y.dtype)


class StackTask(task.BaseTask):
  """A pipeline and the mean square of its outputs."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('stack', pipelining_layer.PipeliningLayer.Params(), 'The pipeline.')
    p.Define('fn', lambda w, y: y, 'Of 1 and the predictions, before the loss is made of them.')
    return p

  def __init__(self, params):
    super().__init__(params)
    self.CreateChild('stack', self.params.stack)

  def PipelineInputs(self, input_batch):
    return (input_batch.x,)

  def ComputeLoss(self, theta, predictions, input_batch):
    size = tf.cast(tf.shape(predictions)[0], tf.float32)
    predictions = self.params.fn(1.0, predictions)
    return {'loss': (tf.reduce_mean(predictions**2), size)}, {}


def BatchSpec(batch_size, dtype=tf.float64):
  spec = tf.TensorSpec([batch_size, DIM], dtype)
  return nested_map.NestedMap(x=spec, y=spec)


def Batch(rng, batch_size, dtype=tf.float64):
  x, y = rng.normal(size=[2, batch_size, DIM])
  return nested_map.NestedMap(x=tf.constant(x, dtype), y=tf.constant(y, dtype))
