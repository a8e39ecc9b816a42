# SPDX-License-Identifier: Apache-2.0
"""A task with a wrong loss weight. `projects.Write` copies this file into `tasks`."""

import tensorflow as tf

from lingvo_gpipe import linear, pipelining_layer, task


class WrongTask(task.BaseTask):
  """A weighted mean of squares, whose loss weight is a constant."""

  def __init__(self, params):
    super().__init__(params)
    layer = linear.ProjectionLayer.Params().Set(input_dim=4, output_dim=4, activation='TANH')
    stack = pipelining_layer.PipeliningLayer.Params().Set(
      num_stages=2, num_micro_batches=2, xla=False, sub=[layer, layer]
    )
    self.CreateChild('stack', stack)

  def PipelineInputs(self, input_batch):
    return (input_batch.x,)

  def LossWeight(self, input_batch):
    return tf.constant(1.0)  # It should be the sum of w.

  def ComputeLoss(self, theta, predictions, input_batch):
    squares = tf.reduce_sum(predictions**2, axis=1)
    total = tf.reduce_sum(input_batch.w)
    return {'loss': (tf.reduce_sum(squares * input_batch.w) / total, total)}, {}
