# SPDX-License-Identifier: Apache-2.0
"""BaseTask: what it is without a subclass's help, and its defaults."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.experiment import task
from lingvo_gpipe.layers import linear
from lingvo_gpipe.pipeline import pipelining_layer


class _Stacked(task.BaseTask):
  def __init__(self, params):
    super().__init__(params)
    layer = linear.ProjectionLayer.Params().Set(input_dim=3, output_dim=3, activation='TANH')
    stack = pipelining_layer.PipeliningLayer.Params().Set(
      sub=[layer.Copy(), layer.Copy()], num_stages=2, num_micro_batches=2, xla=False
    )
    self.CreateChild('stack', stack)

  def PipelineInputs(self, input_batch):
    return (input_batch.inputs,)


class _NoPipeline(task.BaseTask):
  """A child called stack that is no pipeline."""

  def __init__(self, params):
    super().__init__(params)
    self.CreateChild('stack', linear.LinearLayer.Params().Set(input_dim=2, output_dim=2))


def _Instantiate(cls):
  return cls.Params().Set(name='t').Instantiate()


def testThePipelineIsTheChildCalledStack():
  made = _Instantiate(_Stacked)
  assert made.pipeline is made.stack
  assert _Instantiate(task.BaseTask).pipeline is None
  assert _Instantiate(_NoPipeline).pipeline is None


def testWhatASubclassMustGive():
  made = _Instantiate(task.BaseTask)
  batch = nested_map.NestedMap(x=tf.ones([2]))
  with pytest.raises(NotImplementedError, match='BaseTask has no ComputeLoss'):
    made.ComputeLoss(nested_map.NestedMap(), None, batch)
  with pytest.raises(NotImplementedError, match='neither a pipeline nor predictions'):
    made.ComputePredictions(nested_map.NestedMap(), batch)


def testPredictionsOfAPipelineAreItsOutputs():
  made = _Instantiate(_Stacked)
  devices = [d.name for d in tf.config.list_logical_devices('CPU')]
  made.stack.Place(devices, tf.TensorSpec([4, 3]))
  made.InstantiateVariables()
  batch = nested_map.NestedMap(inputs=tf.random.stateless_uniform([4, 3], [1, 2]))
  expected = batch.inputs.numpy()
  for layer in made.stack.layers:
    expected = np.tanh(expected @ layer.vars.w.numpy())
  for got in (made.ComputePredictions(made.theta, batch), made(batch)):
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-6)


def testLossWeightCountsExamples():
  made = _Instantiate(task.BaseTask)
  batch = nested_map.NestedMap(ids=tf.zeros([3, 5], tf.int32), x=tf.zeros([3]))
  weight = made.LossWeight(batch)
  assert (float(weight), weight.dtype) == (3.0, tf.float32)
  batch.example_weights = tf.constant([1.0, 0.5, 0.0])
  assert float(made.LossWeight(batch)) == 1.5


def testTheWholeBatchGoesEverywhereByDefault():
  made = _Instantiate(task.BaseTask)
  batch = nested_map.NestedMap(x=tf.ones([2]))
  assert made.PipelineInputs(batch)[0] is batch
  assert made.LossInputs(batch) is batch
  assert made.CheckBatch(batch) is None
  assert made.Decode(batch, None) == {}
  assert made.DecodeFinalize({}) == {}
  assert made.Report({'loss': 1.0}, None) == ''


def testTrainParamsRoundTrip():
  p = task.BaseTask.Params().Set(name='t')
  p.train.Set(max_steps=5, eval_datasets=['Test', 'Dev'])
  p.train.learner.learning_rate = 0.5
  fresh = task.BaseTask.Params().FromText(p.ToText())
  assert fresh == p
  assert fresh.train.eval_datasets == ['Test', 'Dev']


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
  with pytest.raises(ValueError, match=rf'mine\.{name} must be at least [01], got {value}'):
    p.Instantiate()


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
