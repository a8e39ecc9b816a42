# SPDX-License-Identifier: Apache-2.0
"""A linear regression, and inputs for it.

`projects.Write` copies this file into the `tasks` of a user's project.
"""

import tensorflow as tf

from lingvo_gpipe import nested_map, stream_input, synthetic, task, weight_params


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


class Draws(stream_input.BaseStreamInput):
  """A stream of random inputs [32] and targets [1], which differ from epoch to epoch."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('num_draws', 50, 'Number of examples of an epoch.')
    return p

  def _Stream(self, epoch):
    def Example(i):
      numbers = tf.random.stateless_uniform([33], tf.stack([epoch, i]))
      return nested_map.NestedMap(inputs=numbers[:32], targets=numbers[32:])

    return tf.data.Dataset.range(self.params.num_draws).map(Example)

  def _FingerprintParts(self):
    return ['draws']


class FailingInput(synthetic.SyntheticRegressionInput):
  """Raises an error of Python when it makes one example."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('bad_example', 0, 'Index of the example that it cannot make.')
    return p

  def _Examples(self, indices):
    examples = super()._Examples(indices)
    targets = tf.numpy_function(self._Check, [indices, examples.targets], tf.float32)
    examples.targets = tf.ensure_shape(targets, examples.targets.shape)
    return examples

  def _Check(self, indices, targets):
    bad_example = self.params.bad_example
    if bad_example in indices:
      raise ValueError(f'example {bad_example} is bad')
    return targets
