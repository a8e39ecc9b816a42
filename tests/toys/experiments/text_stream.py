# SPDX-License-Identifier: Apache-2.0
"""An experiment on a stream of lines of a file."""

import tensorflow as tf

from lingvo_gpipe import nested_map, registry, stream_input
from tasks import regression


class Points(stream_input.BaseStreamInput):
  def _Stream(self, epoch):
    def Point(line):
      values = tf.ensure_shape(tf.strings.to_number(tf.strings.split(line)), [6])
      return nested_map.NestedMap(inputs=values[:4], targets=values[4:])

    return tf.data.TextLineDataset('points.txt').map(Point, num_parallel_calls=2)

  def _FingerprintParts(self):
    return ['points.txt']


@registry.RegisterSingleTaskModel
class Toy(registry.SingleTaskModelParams):
  def Train(self):
    return Points.Params().Set(batch_size=8, shuffle_buffer_size=20)

  Dev = Train

  def Task(self):
    p = regression.Regression.Params().Set(name='toy', input_dim=4, num_targets=2)
    p.train.Set(save_interval_steps=1, eval_datasets=['Dev'], summary_interval_steps=100)
    return p
