# SPDX-License-Identifier: Apache-2.0
"""Tasks with and without a pipeline."""

import tensorflow as tf

from lingvo_gpipe.core import base_layer, fprop_context, nested_map, weight_params
from lingvo_gpipe.experiment import task
from lingvo_gpipe.layers import batch_norm, dropout, linear
from lingvo_gpipe.pipeline import pipelining_layer

DIM = 3


class Stacked(task.BaseTask):
  """The mean square error of the outputs of a pipeline, weighted by example."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('stack', pipelining_layer.PipeliningLayer.Params().Set(xla=False), 'The pipeline.')
    return p

  def __init__(self, params):
    super().__init__(params)
    self.CreateChild('stack', self._Stack())

  def _Stack(self):
    """Returns the Params of the pipeline."""
    return self.params.stack

  def PipelineInputs(self, input_batch):
    return (input_batch.inputs,)

  def ComputeLoss(self, theta, predictions, input_batch):
    weights = input_batch.example_weights
    errors = tf.reduce_mean(tf.square(predictions - input_batch.targets), axis=1)
    total = tf.reduce_sum(weights)
    return {'loss': (tf.math.divide_no_nan(tf.reduce_sum(errors * weights), total), total)}, {}


def Stack(num_layers=2, dim=DIM, **values):
  """Returns Params of a pipeline of equal layers, with as many stages unless `values` differ."""
  layer = linear.ProjectionLayer.Params().Set(input_dim=dim, output_dim=dim, activation='TANH')
  return pipelining_layer.PipeliningLayer.Params().Set(
    **{
      'sub': [layer.Copy() for _ in range(num_layers)],
      'num_stages': num_layers,
      'xla': False,
      **values,
    }
  )


class LinearStack(task.BaseTask):
  """A task whose child `stack` is not a pipeline."""

  def __init__(self, params):
    super().__init__(params)
    self.CreateChild('stack', linear.LinearLayer.Params().Set(input_dim=2, output_dim=2))


class TwoOutputs(task.BaseTask):
  """Two outputs of one input, without a pipeline."""

  def __init__(self, params):
    super().__init__(params)
    self.CreateVariable('w', weight_params.WeightParams([DIM, 2]))

  def ComputePredictions(self, theta, input_batch):
    y = tf.matmul(tf.cast(input_batch.inputs, theta.w.dtype), theta.w)
    return y, -y


class WithMean(task.BaseTask):
  """A task without a pipeline, with a weight that is not trained."""

  def __init__(self, params):
    super().__init__(params)
    self.CreateVariable('w', weight_params.WeightParams([4, 2]))
    self.CreateVariable('mean', weight_params.WeightParams([2], dtype=tf.float64), trainable=False)

  def ComputePredictions(self, theta, input_batch):
    return tf.matmul(input_batch.inputs, theta.w)


class Huge(task.BaseTask):
  """A weight of four terabytes."""

  def __init__(self, params):
    super().__init__(params)
    self.CreateVariable('w', weight_params.WeightParams([1000, 1000, 1000, 1000]))


class TimesTheSize(base_layer.BaseLayer):
  """Multiplies by the size of the batch, which must be static."""

  def FProp(self, theta, x):
    if x.shape[0] is None:
      raise ValueError('no size')
    return x * x.shape[0]


class AddsLosses(base_layer.BaseLayer):
  """tanh(x w), with an auxiliary loss of its outputs and one of its weights."""

  def __init__(self, params):
    super().__init__(params)
    self.CreateVariable('w', weight_params.WeightParams([DIM, DIM]))

  def FProp(self, theta, x):
    y = tf.tanh(tf.matmul(x, theta.w))
    context = fprop_context.Current()
    context.AddAuxLoss(self, tf.reduce_mean(y) ** 2, 3.0, 'outputs')
    context.AddAuxLoss(self, tf.reduce_mean(theta.w**2), 0.5, 'weights')
    return y


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


class TiedAroundNet(task.BaseTask):
  """Projections around a given layer; the last weight is tied to the first."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('middle', 'dropout', 'The second layer: dropout, norm or losses.')
    p.Define('num_micro_batches', 2, 'Number of micro-batches.')
    return p

  def __init__(self, params):
    super().__init__(params)
    p = self.params
    project = linear.ProjectionLayer.Params().Set(
      input_dim=DIM, output_dim=DIM, has_bias=True, activation='TANH'
    )
    middle = {
      'dropout': dropout.DropoutLayer.Params().Set(keep_prob=0.7),
      'norm': batch_norm.BatchNormLayer.Params().Set(dim=DIM, decay=None),
      'losses': AddsLosses.Params(),
    }[p.middle]
    self.CreateChild(
      'stack',
      pipelining_layer.PipeliningLayer.Params().Set(
        sub=[project, middle, project, project],
        ties=[['layers[3].w', 'layers[0].w']],
        num_stages=2,
        splits=[2, 4],
        num_micro_batches=p.num_micro_batches,
        xla=False,
      ),
    )

  def PipelineInputs(self, input_batch):
    return (input_batch.x,)

  def ComputeLoss(self, theta, predictions, input_batch):
    errors = tf.reduce_mean(tf.square(predictions - input_batch.y), -1)
    weights = input_batch.example_weights
    total = tf.reduce_sum(weights)
    loss = tf.math.divide_no_nan(tf.reduce_sum(errors * weights), total)
    largest = tf.reduce_max(errors)
    return {'loss': (loss, total), 'largest': (largest, tf.ones_like(total))}, {}


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


class TimeMajor(task.BaseTask):
  """A task whose pipeline takes [time, batch, dim], and whose loss takes the batch unchanged."""

  def __init__(self, params):
    super().__init__(params)
    layer = linear.ProjectionLayer.Params().Set(input_dim=4, output_dim=4, activation='TANH')
    drop = dropout.DropoutLayer.Params().Set(keep_prob=0.8)
    stack = pipelining_layer.PipeliningLayer.Params().Set(
      num_stages=2, num_micro_batches=2, xla=False, batch_dim=1, sub=[layer, drop, layer]
    )
    self.CreateChild('stack', stack)

  def PipelineInputs(self, input_batch):
    return (tf.transpose(input_batch.x, [1, 0, 2]),)

  def LossWeight(self, input_batch):
    return tf.reduce_sum(input_batch.w)

  def ComputeLoss(self, theta, predictions, input_batch):
    squares = tf.reduce_mean(predictions**2, axis=[0, 2])
    total = tf.reduce_sum(input_batch.w)
    return {'loss': (tf.reduce_sum(squares * input_batch.w) / total, total)}, {}


def BatchSpec(batch_size, dtype=tf.float64):
  spec = tf.TensorSpec([batch_size, DIM], dtype)
  return nested_map.NestedMap(x=spec, y=spec)


def Batch(rng, batch_size, dtype=tf.float64):
  x, y = rng.normal(size=[2, batch_size, DIM])
  return nested_map.NestedMap(x=tf.constant(x, dtype), y=tf.constant(y, dtype))
