# SPDX-License-Identifier: Apache-2.0
"""An experiment of two tasks that share a weight."""

import tensorflow as tf

from lingvo_gpipe import registry, synthetic, task, weight_params


class Net(task.BaseTask):
  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('num_targets', 1, 'Outputs.')
    return p

  def __init__(self, params):
    super().__init__(params)
    self.CreateVariable('w', weight_params.WeightParams([4, 4]))
    self.CreateVariable('head', weight_params.WeightParams([4, self.params.num_targets]))

  def ComputePredictions(self, theta, batch):
    return tf.tanh(batch.inputs @ theta.w) @ theta.head

  def ComputeLoss(self, theta, predictions, batch):
    weights = batch.example_weights
    errors = tf.reduce_mean(tf.square(predictions - batch.targets), axis=1)
    loss = tf.math.divide_no_nan(tf.reduce_sum(errors * weights), tf.reduce_sum(weights))
    return {'loss': (loss, tf.reduce_sum(weights))}, {}

  def LossWeight(self, batch):
    return tf.reduce_sum(batch.example_weights)


class Speaker(Net):
  def Decode(self, input_batch, input_generator):
    return {'said': ['word'] * input_batch.inputs.shape[0]}


@registry.RegisterMultiTaskModel
class Two(registry.MultiTaskModelParams):
  def _Input(self, num_targets, num_examples):
    return synthetic.SyntheticRegressionInput.Params().Set(
      batch_size=4,
      num_examples=num_examples,
      input_shape=[4],
      num_targets=num_targets,
      first_example=100 * num_targets,
    )

  def Train(self):
    # Data of different lengths, whose epochs end within a batch.
    return {'a': self._Input(2, 30), 'b': self._Input(1, 10)}

  def Dev(self):
    return {'a': self._Input(2, 5)}

  def Test(self):
    return {'a': self._Input(2, 6), 'b': self._Input(1, 7)}

  def Tasks(self):
    tasks = {'a': Speaker.Params().Set(num_targets=2), 'b': Net.Params()}
    # An update of `b` takes two batches.
    tasks['b'].train.learner.num_accumulated_mini_batches = 2
    return tasks

  def TaskProbs(self):
    return {'a': 2.0, 'b': 1.0}

  def Model(self):
    p = super().Model()
    p.variable_renaming_rules = [[r'\w+\.w', 'shared.w']]
    p.train.Set(save_interval_steps=5, save_interval_seconds=0.0, summary_interval_steps=1)
    p.train.Set(eval_datasets=['Dev', 'Test'], eval_interval_steps=7)
    p.train.decode_datasets = ['Test']
    p.train.early_stop.Set(jobname='eval_test_b', metric='loss')
    return p
