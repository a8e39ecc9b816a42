# SPDX-License-Identifier: Apache-2.0
"""Models of two pipelined tasks that share the weights of their first two layers."""

import numpy as np
import tensorflow as tf

from lingvo_gpipe.core import hyperparams, nested_map
from lingvo_gpipe.experiment import multi_task_model
from lingvo_gpipe.input import synthetic
from lingvo_gpipe.layers import linear
from lingvo_gpipe.learning import optimizer
from tests.toys import tasks

DIM = 4
# Shares the first two layers of all tasks.
SHARE = [[r'\w+\.stack\.layers\[([01])\]\.(.*)', r'shared.\1.\2']]


class PipelinedRegression(tasks.Stacked):
  """Projection layers in a pipeline; the last layer is never shared."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('num_targets', 2, 'Number of outputs.')
    p.Define('num_layers', 3, 'Number of projection layers.')
    return p

  def _Stack(self):
    p = self.params
    sub = [
      linear.ProjectionLayer.Params().Set(
        input_dim=DIM, output_dim=DIM, has_bias=True, activation='TANH'
      )
      for _ in range(p.num_layers)
    ]
    sub[-1].Set(output_dim=p.num_targets, activation='NONE')
    return p.stack.Copy().Set(sub=sub)


def Task(num_targets=2, **learner):
  """Returns Params of a task that learns with Adam, which counts its updates."""
  p = PipelinedRegression.Params().Set(num_targets=num_targets)
  p.train.learner.Set(**{'learning_rate': 0.05, 'optimizer': optimizer.Adam.Params(), **learner})
  return p


def Input(name, dataset='Train', num_targets=2, **more):
  """Returns Params of the input of a task; each task and data set has different examples."""
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
  """Returns Params that define each of these values."""
  p = hyperparams.Params()
  for name, value in values.items():
    p.Define(name, value, '')
  return p


def Params(a=None, b=None, rules=SHARE, **values):
  """Returns Params of a model: task `a` has two targets, `b` one; only the heads are not shared."""
  p = multi_task_model.MultiTaskModel.Params().Set(
    task_params=AsParams({'a': a or Task(2), 'b': b or Task(1)}),
    variable_renaming_rules=rules,
    input=Inputs('Train'),
  )
  p.train.Set(max_steps=20, summary_interval_steps=1)
  return p.Set(**values)


def Inputs(dataset):
  """Returns Params that map each task to the Params of its input."""
  return AsParams({'a': Input('a', dataset, 2), 'b': Input('b', dataset, 1)})


def Devices():
  return [d.name for d in tf.config.list_logical_devices('CPU')]


def Batch(seed, num_targets):
  """Returns a batch for a task with this many targets."""
  rng = np.random.default_rng(seed)
  return nested_map.NestedMap(
    inputs=tf.constant(rng.normal(size=[4, DIM]), tf.float32),
    targets=tf.constant(rng.normal(size=[4, num_targets]), tf.float32),
    example_weights=tf.ones([4]),
  )
