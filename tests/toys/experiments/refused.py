# SPDX-License-Identifier: Apache-2.0
"""Experiments that the trainer refuses or stops."""

import tensorflow as tf

from lingvo_gpipe import nested_map, registry, stream_input, synthetic, tf_record_stream
from tasks import regression


class BadFrom6(synthetic.SyntheticRegressionInput):
  def _Examples(self, indices):
    examples = super()._Examples(indices)
    bad = tf.where(indices < 6, 0.0, float('nan'))
    return nested_map.NestedMap(examples, targets=examples.targets + bad[:, tf.newaxis])


class Generated(stream_input.BaseStreamInput):
  def _Stream(self, epoch):
    spec = tf.TensorSpec([], tf.float32)
    numbers = tf.data.Dataset.from_generator(lambda: iter([1.0] * 9), output_signature=spec)
    return numbers.map(lambda x: {'inputs': tf.fill([4], x), 'targets': tf.fill([1], x)})

  def _FingerprintParts(self):
    return ['generated']


class Records(tf_record_stream.TfRecordStream):
  def _Example(self, record):
    values = tf.ensure_shape(tf.io.decode_raw(record, tf.float32), [5])
    return nested_map.NestedMap(inputs=values[:4], targets=values[4:])


@registry.RegisterSingleTaskModel
class Toy(registry.SingleTaskModelParams):
  INPUT = synthetic.SyntheticRegressionInput

  def Train(self):
    return self.INPUT.Params().Set(batch_size=3, num_examples=50, input_shape=[4])

  def Task(self):
    p = regression.Regression.Params().Set(name='toy', input_dim=4)
    p.train.Set(save_interval_steps=1, summary_interval_steps=10**6, max_nonfinite_steps=2)
    return p


@registry.RegisterSingleTaskModel
class Sampled(Toy):
  def Test(self):
    return self.Train()

  def Task_Test(self):
    return super().Task().Set(**{'eval.samples_per_summary': 3})


@registry.RegisterSingleTaskModel
class NotFinite(Toy):
  INPUT = BadFrom6

  def Train(self):
    return super().Train().Set(shuffle=False)


@registry.RegisterSingleTaskModel
class Unsaveable(Toy):
  def Train(self):
    return Generated.Params().Set(batch_size=3)


@registry.RegisterSingleTaskModel
class Stream(Toy):
  def Train(self):
    return Records.Params().Set(batch_size=3, file_pattern='points.tfrecord', shuffle=False)
