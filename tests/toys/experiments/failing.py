# SPDX-License-Identifier: Apache-2.0
"""Experiments that need too much memory, wait, or have bad data."""

import os
import time

import tensorflow as tf

from lingvo_gpipe import nested_map, registry, synthetic, task, weight_params
from lingvo_gpipe.core import files
from lingvo_gpipe.input.text import parallel_files
from tasks import regression


def Wait(value):
  print('waiting', flush=True)
  time.sleep(60.0)
  return value


class Wide(regression.Regression):
  @classmethod
  def Params(cls):
    return super().Params().Set(num_targets=500)


class Hungry(Wide):
  def ComputeLoss(self, theta, predictions, batch):
    size = tf.reduce_max(batch.size)
    loss = tf.reduce_mean(tf.square(predictions - batch.targets))
    return {'loss': (loss + tf.reduce_sum(tf.zeros([size, size])), self.LossWeight(batch))}, {}


class SlowToTrace(Wide):
  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('until', '', 'A file: tracing takes until it exists.')
    return p

  def ComputeLoss(self, theta, predictions, batch):
    print('tracing', flush=True)
    while not os.path.exists(self.params.until):
      time.sleep(0.01)
    return super().ComputeLoss(theta, predictions, batch)


class Words(task.BaseTask):
  def __init__(self, params):
    super().__init__(params)
    self.CreateVariable('w', weight_params.WeightParams([300]))

  def ComputePredictions(self, theta, batch):
    return tf.gather(theta.w, batch.tgt_ids)

  def ComputeLoss(self, theta, predictions, batch):
    return {'loss': (tf.reduce_mean(tf.square(predictions - 1.0)), self.LossWeight(batch))}, {}


class TooLarge(Wide):
  def __init__(self, params):
    super().__init__(params)
    self.CreateVariable('large', weight_params.WeightParams([1 << 15, 1 << 15]))


class Data(synthetic.SyntheticRegressionInput):
  def _ExampleSpec(self):
    return nested_map.NestedMap(super()._ExampleSpec(), size=tf.TensorSpec([], tf.int32))

  def _Examples(self, indices):
    examples = super()._Examples(indices)
    examples.size = tf.where(indices < 12, 1, 1 << 20)
    return examples


class SlowData(Data):
  def _Examples(self, indices):
    examples = super()._Examples(indices)
    targets = tf.numpy_function(Wait, [examples.targets], tf.float32)
    examples.targets = tf.ensure_shape(targets, examples.targets.shape)
    return examples


class FailingData(regression.FailingInput, Data):
  pass


def Input(cls):
  return cls.Params().Set(batch_size=3, num_examples=50, num_targets=500)


@registry.RegisterSingleTaskModel
class Toy(registry.SingleTaskModelParams):
  TASK = Wide
  DATASETS = ('Slow', 'Failing')

  def Train(self):
    return Input(Data)

  def Slow(self):
    return Input(SlowData)

  def Failing(self):
    return Input(FailingData).Set(bad_example=7)

  def Task(self):
    p = self.TASK.Params().Set(name='toy')
    p.train.Set(save_interval_steps=1, save_max_to_keep=2, summary_interval_steps=10**6)
    return p


@registry.RegisterSingleTaskModel
class Memory(Toy):
  TASK = Hungry

  def Train(self):
    return super().Train().Set(shuffle=False)


@registry.RegisterSingleTaskModel
class Large(Toy):
  TASK = TooLarge


@registry.RegisterSingleTaskModel
class Tracing(Toy):
  TASK = SlowToTrace


@registry.RegisterSingleTaskModel
class SlowDisk(Toy):
  def Task(self):
    sync = files.Sync
    files.Sync = lambda path: sync(path) or ('00000003' in path and Wait(path))
    return super().Task()


@registry.RegisterSingleTaskModel
class Pairs(Toy):
  TASK = Words

  def Train(self):
    return parallel_files.TfRecordPairs.Params().Set(
      file_pattern='pairs.tfrecord',
      vocab_filepath='v.model',
      bucket_upper_bound=[16],
      bucket_batch_limit=2,
    )
