# SPDX-License-Identifier: Apache-2.0
"""Tasks that decode numbers, and inputs of the numbers 0 ... 4."""

import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.experiment import task
from lingvo_gpipe.input import base_input_generator


class Numbers(base_input_generator.BaseInputGenerator):
  """The numbers 0 ... 4."""

  def NumExamples(self):
    return 5

  def _Examples(self, indices):
    return nested_map.NestedMap(number=indices)


class Shuffled(Numbers):
  """The numbers in another order, with their positions."""

  def _Examples(self, indices):
    numbers = tf.gather(tf.constant([3, 0, 4, 1, 2], tf.int64), indices)
    return nested_map.NestedMap(number=numbers, example_index=numbers)


class Weighted(Numbers):
  """The numbers, the second with weight 0."""

  def _Examples(self, indices):
    return nested_map.NestedMap(number=indices, example_weights=tf.cast(indices != 1, tf.float32))


class Decoder(task.BaseTask):
  """Decodes numbers by a given function."""

  decode, finalize = None, None

  def Decode(self, input_batch, input_generator):
    assert isinstance(input_generator, Numbers)
    return self.decode(input_batch.number.numpy())

  def DecodeFinalize(self, decoded):
    return self.finalize(decoded) if self.finalize else {}


class PositionDecoder(Decoder):
  """Decodes the position in the data set, which equals the number."""

  def Decode(self, input_batch, input_generator):
    return {'got': input_batch.example_index.numpy(), 'number': input_batch.number.numpy()}
