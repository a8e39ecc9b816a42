# SPDX-License-Identifier: Apache-2.0
"""Regressions with and without a pipeline, whose metrics have different weights."""

import tensorflow as tf

from lingvo_gpipe.core import nested_map, weight_params
from lingvo_gpipe.experiment import task
from lingvo_gpipe.layers import dropout, linear
from lingvo_gpipe.pipeline import pipelining_layer

DIM = 6


def Metrics(predictions, batch):
  """Returns metrics of a regression, weighted by example; the mean over no example is 0."""
  errors = tf.reduce_mean(tf.square(predictions - batch.targets), axis=-1)
  weights = batch.example_weights
  total = tf.reduce_sum(weights)
  loss = tf.math.divide_no_nan(tf.reduce_sum(errors * weights), total)
  close = tf.cast(errors < 0.5, tf.float32)
  share = tf.math.divide_no_nan(tf.reduce_sum(close * weights), total)
  # A metric with another weight: it counts values, not examples.
  mean = tf.math.divide_no_nan(tf.reduce_sum(predictions * weights[:, tf.newaxis]), 2 * total)
  return {'loss': (loss, total), 'close': (share, total), 'mean': (mean, 2 * total)}, {'e': errors}


class Linear(task.BaseTask):
  """A task without a pipeline, with two variables, one of which only the loss uses."""

  def __init__(self, params):
    super().__init__(params)
    self.CreateVariable('w', weight_params.WeightParams([DIM, 2]))
    self.CreateVariable(
      'b', weight_params.WeightParams([2], weight_params.WeightInit.Constant(0.0))
    )
    self.CreateVariable(
      'scale', weight_params.WeightParams([], weight_params.WeightInit.Constant(1.0))
    )
    self.CreateVariable(
      'fixed', weight_params.WeightParams([], weight_params.WeightInit.Constant(2.0)), False
    )

  def ComputePredictions(self, theta, input_batch):
    return nested_map.NestedMap(y=tf.matmul(input_batch.inputs, theta.w) + theta.b)

  def ComputeLoss(self, theta, predictions, input_batch):
    return Metrics(predictions.y * theta.scale * theta.fixed, input_batch)


class Pipelined(task.BaseTask):
  """Four layers with dropout between, pipelined."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('keep_prob', 0.9, 'Of dropout.')
    p.Define('stack', pipelining_layer.PipeliningLayer.Params().Set(xla=False), 'The pipeline.')
    return p

  def __init__(self, params):
    super().__init__(params)
    p = self.params
    sub = []
    for output_dim, activation in ((10, 'TANH'), (10, 'RELU'), (6, 'TANH'), (2, 'NONE')):
      input_dim = sub[-2].output_dim if sub else DIM
      sub.append(
        linear.ProjectionLayer.Params().Set(
          input_dim=input_dim, output_dim=output_dim, has_bias=True, activation=activation
        )
      )
      sub.append(dropout.DropoutLayer.Params().Set(keep_prob=p.keep_prob))
    self.CreateChild('stack', p.stack.Copy().Set(sub=sub[:-1]))

  def PipelineInputs(self, input_batch):
    return (input_batch.inputs,)

  def LossInputs(self, input_batch):
    return nested_map.NestedMap(
      targets=input_batch.targets, example_weights=input_batch.example_weights
    )

  def ComputeLoss(self, theta, predictions, input_batch):
    assert not theta
    return Metrics(predictions, input_batch)
