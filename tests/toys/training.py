# SPDX-License-Identifier: Apache-2.0
"""A model with two weights, and the programs that train and evaluate it in this process."""

import tensorflow as tf

from lingvo_gpipe.core import hyperparams, params_text, weight_params
from lingvo_gpipe.distributed import cluster, stop_request
from lingvo_gpipe.evaluation import eval_program
from lingvo_gpipe.experiment import model, task
from lingvo_gpipe.input import synthetic
from lingvo_gpipe.learning import optimizer
from lingvo_gpipe.training import train_program

_DIM, _TARGETS = 4, 2


class Regression(task.BaseTask):
  """A linear layer without a pipeline; `Decode` returns the first target as text."""

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    self.CreateVariable('w', weight_params.WeightParams([_DIM, _TARGETS]))
    self.CreateVariable('b', weight_params.WeightParams([_TARGETS]))

  def ComputePredictions(self, theta, input_batch):
    return tf.matmul(input_batch.inputs, theta.w) + theta.b

  def ComputeLoss(self, theta, predictions, input_batch):
    weights = input_batch.example_weights
    errors = tf.reduce_mean(tf.square(predictions - input_batch.targets), axis=1)
    total = tf.reduce_sum(weights)
    loss = tf.math.divide_no_nan(tf.reduce_sum(errors * weights), total)
    return {'loss': (loss, total)}, {}

  def Decode(self, input_batch, input_generator):
    predictions = tf.matmul(input_batch.inputs, self.vars.w) + self.vars.b
    return {'said': [f'{y:.3f}' for y in predictions[:, 0].numpy()]}

  def DecodeFinalize(self, decoded):
    return {'mean': sum(map(float, decoded['said'])) / len(decoded['said'])}


class WithRecall(Regression):
  """Has a metric of a class that does not occur: its mean over nothing is not 0."""

  def ComputeLoss(self, theta, predictions, input_batch):
    metrics, per_example = super().ComputeLoss(theta, predictions, input_batch)
    metrics['recall'] = (tf.constant(0.0), tf.constant(0.0))
    return metrics, per_example


def Input(dataset):
  """Returns Params of the input of Train, Dev or Test: different examples of one function."""
  first = {'Train': 0, 'Dev': 1000, 'Test': 2000}[dataset]
  return synthetic.SyntheticRegressionInput.Params().Set(
    batch_size=4,
    num_examples=40 if dataset == 'Train' else 6,
    first_example=first,
    input_shape=[_DIM],
    num_targets=_TARGETS,
  )


def Params(more='', **train):
  """Returns Params of a model that trains for 20 steps and writes summaries after each.

  Args:
    more: overrides, as in --params_override.
    **train: values of task.train.
  """
  p = model.SingleTaskModel.Params().Set(task=Regression.Params().Set(name='toy'))
  p.input = Input('Train')
  p.task.train.Set(**{'max_steps': 20, 'summary_interval_steps': 1, **train})
  # SGD with momentum has slots, and is traced fast.
  p.task.train.learner.optimizer = optimizer.SGD.Params().Set(momentum=0.9)
  p.task.train.learner.learning_rate = 0.01
  p.ApplyOverrides(params_text.ParseOverrides(more))
  return p


def Program(logdir, params, stop=None, **options):
  """Returns a TrainProgram for these Params."""
  return train_program.TrainProgram(
    params,
    str(logdir),
    cluster.Cluster.Create(1, platform='cpu'),
    Input,
    stop or stop_request.StopRequest(),
    train_program.RunOptions(**options),
  )


def Train(logdir, params, **options):
  """Trains to the last step."""
  assert Program(logdir, params, **options).Run() == 0


def Evaluator(logdir, params, dataset='Test', **options):
  """Returns an EvalProgram for these Params and a data set."""
  return eval_program.EvalProgram(
    params.Copy().Set(input=Input(dataset)),
    str(logdir),
    cluster.Cluster.Create(1, platform='cpu'),
    dataset,
    stop_request.StopRequest(),
    **options,
  )
