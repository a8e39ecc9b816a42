# SPDX-License-Identifier: Apache-2.0
"""A linear regression. `projects.Write` copies this file into the `tasks` of a user's project."""

import tensorflow as tf

from lingvo_gpipe import task, weight_params


class Regression(task.BaseTask):
  """The mean square error of `inputs @ w`."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('input_dim', 32, 'Number of inputs.')
    p.Define('num_targets', 1, 'Number of targets.')
    return p

  def __init__(self, params):
    super().__init__(params)
    p = self.params
    self.CreateVariable('w', weight_params.WeightParams([p.input_dim, p.num_targets]))

  def ComputePredictions(self, theta, batch):
    return batch.inputs @ theta.w

  def ComputeLoss(self, theta, predictions, batch):
    loss = tf.reduce_mean(tf.square(predictions - batch.targets))
    return {'loss': (loss, self.LossWeight(batch))}, {}
