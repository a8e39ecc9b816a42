# SPDX-License-Identifier: Apache-2.0
"""An experiment with a wrong loss weight."""

import tensorflow as tf

from lingvo_gpipe import base_input_generator, nested_map, registry
from tasks import wrong_weight


class Numbers(base_input_generator.BaseInputGenerator):
  def NumExamples(self):
    return 64

  def _Examples(self, indices):
    i = tf.cast(indices, tf.float32)
    return nested_map.NestedMap(x=tf.sin(i[:, None] + tf.range(4.0)), w=1.0 + i)


@registry.RegisterSingleTaskModel
class Wrong(registry.SingleTaskModelParams):
  def Train(self):
    return Numbers.Params().Set(name='numbers', batch_size=8)

  def Task(self):
    return wrong_weight.WrongTask.Params().Set(name='task')
