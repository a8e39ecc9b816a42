# SPDX-License-Identifier: Apache-2.0
"""Two pipelined tasks whose first two layers are the same weights: for tests of several tasks."""

import numpy as np
import tensorflow as tf

from lingvo_gpipe.core import hyperparams, nested_map
from lingvo_gpipe.experiment import multi_task_model, task
from lingvo_gpipe.input import synthetic
from lingvo_gpipe.layers import linear
from lingvo_gpipe.learning import optimizer
from lingvo_gpipe.pipeline import pipelining_layer

DIM = 4
# The first two layers of any task.
SHARE = [[r'\w+\.stack\.layers\[([01])\]\.(.*)', r'shared.\1.\2']]


class Net(task.BaseTask):
  """Projections; the last one is the task's own."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('num_targets', 2, 'Outputs.')
    p.Define('num_layers', 3, 'Projections.')
    p.Define('stack', pipelining_layer.PipeliningLayer.Params().Set(xla=False), 'The pipeline.')
    return p

  def __init__(self, params):
    super().__init__(params)
    p = self.params
    sub = [
      linear.ProjectionLayer.Params().Set(
        input_dim=DIM, output_dim=DIM, has_bias=True, activation='TANH'
      )
      for _ in range(p.num_layers)
    ]
    sub[-1].Set(output_dim=p.num_targets, activation='NONE')
    self.CreateChild('stack', p.stack.Copy().Set(sub=sub))

  def PipelineInputs(self, input_batch):
    return (input_batch.inputs,)

  def ComputeLoss(self, theta, predictions, input_batch):
    weights = input_batch.example_weights
    errors = tf.reduce_mean(tf.square(predictions - input_batch.targets), axis=1)
    total = tf.reduce_sum(weights)
    return {'loss': (tf.math.divide_no_nan(tf.reduce_sum(errors * weights), total), total)}, {}


def Task(num_targets=2, **learner):
  """A task's Params: Adam, which counts its updates."""
  p = Net.Params().Set(num_targets=num_targets)
  p.train.learner.Set(**{'learning_rate': 0.05, 'optimizer': optimizer.Adam.Params(), **learner})
  return p


def Input(name, dataset='Train', num_targets=2, **more):
  """Each task has examples of its own."""
  first = {'Train': 0, 'Dev': 1000, 'Test': 2000}[dataset] + (0 if name == 'a' else 10_000)
  return synthetic.SyntheticRegressionInput.Params().Set(
    **{
      'batch_size': 4,
      'num_examples': 40 if dataset == 'Train' else 6,
      'first_example': first,
      'input_shape': [DIM],
      'num_targets': num_targets,
      **more,
    }
  )


def AsParams(values):
  """Params with these values by name."""
  p = hyperparams.Params()
  for name, value in values.items():
    p.Define(name, value, '')
  return p


def Params(a=None, b=None, rules=SHARE, **values):
  """The model's Params: tasks `a` of two targets and `b` of one, all but the heads shared."""
  p = multi_task_model.MultiTaskModel.Params().Set(
    task_params=AsParams({'a': a or Task(2), 'b': b or Task(1)}),
    variable_renaming_rules=rules,
    input=Inputs('Train'),
  )
  p.train.Set(max_steps=20, summary_interval_steps=1)
  return p.Set(**values)


def Inputs(dataset):
  """{task: Params of its input} as Params."""
  return AsParams({'a': Input('a', dataset, 2), 'b': Input('b', dataset, 1)})


def Devices():
  return [d.name for d in tf.config.list_logical_devices('CPU')]


def Batch(seed, num_targets):
  """A batch that any task of so many targets takes."""
  rng = np.random.default_rng(seed)
  return nested_map.NestedMap(
    inputs=tf.constant(rng.normal(size=[4, DIM]), tf.float32),
    targets=tf.constant(rng.normal(size=[4, num_targets]), tf.float32),
    example_weights=tf.ones([4]),
  )
