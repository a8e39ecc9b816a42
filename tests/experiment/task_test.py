# SPDX-License-Identifier: Apache-2.0
"""BaseTask: its defaults and its required methods."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.experiment import task
from tests import naming
from tests.toys import tasks


def _Instantiate(cls):
  return cls.Params().Set(name='t').Instantiate()


def _Stacked():
  p = tasks.Stacked.Params().Set(name='t', stack=tasks.Stack(num_micro_batches=2))
  return p.Instantiate()


def testThePipelineIsTheChildNamedStack():
  instance = _Stacked()
  assert instance.pipeline is instance.stack
  assert _Instantiate(task.BaseTask).pipeline is None
  assert _Instantiate(tasks.LinearStack).pipeline is None


def testASubclassMustDefineLossAndPredictions():
  instance = _Instantiate(task.BaseTask)
  batch = nested_map.NestedMap(x=tf.ones([2]))
  with pytest.raises(NotImplementedError, match=naming.Naming('BaseTask', 'ComputeLoss')):
    instance.ComputeLoss(nested_map.NestedMap(), None, batch)
  with pytest.raises(
    NotImplementedError, match=naming.Naming('BaseTask', 'pipeline', 'predictions')
  ):
    instance.ComputePredictions(nested_map.NestedMap(), batch)


def testPredictionsAreTheOutputsOfThePipeline():
  instance = _Stacked()
  devices = [d.name for d in tf.config.list_logical_devices('CPU')]
  instance.stack.Place(devices, tf.TensorSpec([4, 3]))
  instance.InstantiateVariables()
  batch = nested_map.NestedMap(inputs=tf.random.stateless_uniform([4, 3], [1, 2]))
  expected = batch.inputs.numpy()
  for layer in instance.stack.layers:
    expected = np.tanh(expected @ layer.vars.w.numpy())
  for actual in (instance.ComputePredictions(instance.theta, batch), instance(batch)):
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-5, atol=1e-6)


def testLossWeightCountsExamples():
  instance = _Instantiate(task.BaseTask)
  batch = nested_map.NestedMap(ids=tf.zeros([3, 5], tf.int32), x=tf.zeros([3]))
  weight = instance.LossWeight(batch)
  assert (float(weight), weight.dtype) == (3.0, tf.float32)
  batch.example_weights = tf.constant([1.0, 0.5, 0.0])
  assert float(instance.LossWeight(batch)) == 1.5


def testByDefaultEachStageInputIsTheWholeBatch():
  instance = _Instantiate(task.BaseTask)
  batch = nested_map.NestedMap(x=tf.ones([2]))
  assert instance.PipelineInputs(batch)[0] is batch
  assert instance.LossInputs(batch) is batch
  assert instance.CheckBatch(batch) is None
  assert instance.Decode(batch, None) == {}
  assert instance.DecodeFinalize({}) == {}
  assert instance.Report({'loss': 1.0}, None) == ''


def testTrainParamsRoundTrip():
  p = task.BaseTask.Params().Set(name='t')
  p.train.Set(max_steps=5, eval_datasets=['Test', 'Dev'])
  p.train.learner.learning_rate = 0.5
  fresh = task.BaseTask.Params().FromText(p.ToText())
  assert fresh == p
  assert fresh.train.eval_datasets == ['Test', 'Dev']


@pytest.mark.parametrize('value', [None, 'adam', [None]])
def testLearnersAreParams(value):
  p = task.BaseTask.Params().Set(name='mine')
  p.train.learner = value
  with pytest.raises(ValueError, match=naming.Naming('mine', 'train.learner', 'Params')):
    p.Instantiate()


@pytest.mark.parametrize(
  'name, value',
  [
    ('train.summary_interval_steps', 0),
    ('train.save_max_to_keep', 0),
    ('train.max_steps', -1),
    ('eval.samples_per_summary', -3),
  ],
)
def testNumbersOutOfRange(name, value):
  p = task.BaseTask.Params().Set(name='mine', **{name: value})
  least = 0 if value < 0 else 1
  with pytest.raises(ValueError, match=naming.Naming("'mine'", name, f'at least {least}', value)):
    p.Instantiate()


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
