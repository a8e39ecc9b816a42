# SPDX-License-Identifier: Apache-2.0
"""Labelled images, with random changes that differ in each epoch and are exact after a restart."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gpipe.core import domain, hyperparams, nested_map
from lingvo_gpipe.input import base_input_generator, index_order

# Added to the seed, so that the changes are independent of the order of examples.
_AUGMENTATION = 0x1A6E


class ImageInput(base_input_generator.BaseInputGenerator):
  """Batches of `images`, float32 [batch, image_size, image_size, channels], and `labels`, int32.

  A subclass implements `NumExamples()`, `_FingerprintParts()` and `_Images(indices, seeds)`.

  The random changes of an image are a function of (p.random_seed, index, epoch): the state of a run
  over the data stays one integer, the position, and does not depend on the batch size.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of an input of images."""
    p = super().Params()
    p.Define('image_size', 0, 'Height and width of the images.', domain.SIZE)
    p.Define('num_channels', 3, 'Channels of the images.', domain.SIZE)
    p.Define('augment', False, 'Whether to change the images at random, as in training.')
    p.Define(
      'num_fake_examples',
      0,
      'Above 0: number of noise images that replace the data set, for measuring time.',
      domain.EXAMPLES,
    )
    return p

  # Implemented by subclasses.

  def _NumImages(self) -> int:
    """Returns the number of images."""
    raise NotImplementedError(f'_NumImages of {type(self).__name__}')

  def _NumClasses(self) -> int:
    """Returns the number of classes: labels are 0 ... _NumClasses() - 1."""
    raise NotImplementedError(f'_NumClasses of {type(self).__name__}')

  def _Images(self, indices: tf.Tensor, seeds: tf.Tensor) -> nested_map.NestedMap:
    """Returns the `images` and `labels` at some indices.

    Runs inside the graph of a tf.data pipeline, on the host.

    Args:
      indices: int64 [n].
      seeds: int64 [n], for random changes if p.augment is set.
    """
    raise NotImplementedError(f'_Images of {type(self).__name__}')

  # Overrides of BaseInputGenerator.

  def NumExamples(self) -> int:
    """Returns the number of images."""
    return self.params.num_fake_examples or self._NumImages()

  def _ExampleSpec(self) -> nested_map.NestedMap:
    p = self.params
    return nested_map.NestedMap(
      images=tf.TensorSpec([p.image_size, p.image_size, p.num_channels], tf.float32),
      labels=tf.TensorSpec([], tf.int32),
    )

  def _ExamplesInEpochs(self, indices: tf.Tensor, epochs: tf.Tensor) -> nested_map.NestedMap:
    """See the base class."""
    p = self.params
    hashes = index_order.TensorHash64(
      p.random_seed + _AUGMENTATION, epochs * self.NumExamples() + indices
    )
    seeds = tf.bitcast(hashes, tf.int64)
    return (self._FakeImages if p.num_fake_examples else self._Images)(indices, seeds)

  def Fingerprint(self) -> str:
    """See the base class; 'noise' for fake images."""
    return 'noise' if self.params.num_fake_examples else super().Fingerprint()

  def _FakeImages(self, indices: tf.Tensor, seeds: tf.Tensor) -> nested_map.NestedMap:
    del seeds
    p = self.params
    # All fake images share one image of noise: making noise would be slower than reading images.
    shape = [p.image_size, p.image_size, p.num_channels]
    noise = tf.random.stateless_normal(shape, [p.random_seed, 1])
    shift = tf.cast(indices, tf.float32) / float(self.NumExamples())
    return nested_map.NestedMap(
      images=noise + shift[:, tf.newaxis, tf.newaxis, tf.newaxis],
      labels=tf.cast(tf.math.floormod(indices, self._NumClasses()), tf.int32),
    )
