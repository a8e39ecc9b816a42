# SPDX-License-Identifier: Apache-2.0
"""scikit-learn's handwritten digits: 1,797 images of 8x8 pixels; needs no download."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe import domain, hyperparams, image_augmentation, image_input, nested_map

IMAGE_SIZE, NUM_CHANNELS, NUM_CLASSES = 8, 1, 10

# {target: number of classes}. Labels are the digits modulo the number of classes.
_TARGETS = {'digit': NUM_CLASSES, 'parity': 2}

# Upper bounds of the hash values, modulo 100, of each split.
_SPLIT_ENDS = {'train': 70, 'dev': 80, 'test': 100}


class DigitsInput(image_input.ImageInput):
  """The digits 0 ... 9 (UCI's Optical Recognition of Handwritten Digits, its test part).

  A hash of its index assigns an image to a split: about 70 % of the images are in train, 10 % in
  dev and 20 % in test. Pixels 0 ... 16 are scaled to a mean of about 0 and a deviation of about 1.
  With p.augment, images are shifted, rotated and zoomed a little.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of the digits."""
    p = super().Params().Set(image_size=IMAGE_SIZE, num_channels=NUM_CHANNELS)
    p.Define('split', 'train', 'Which images: train, dev or test.', domain.OneOf(*_SPLIT_ENDS))
    p.Define(
      'target',
      'digit',
      'Meaning of labels: digit, 0 ... 9, or parity, 1 for odd digits.',
      domain.OneOf(*_TARGETS),
    )
    p.Define('max_shift', 1, 'With augment: largest shift in pixels.', domain.Int(0, 4096))
    p.Define(
      'max_degrees', 15.0, 'With augment: largest rotation in degrees.', domain.Number(0, below=360)
    )
    p.Define('max_zoom', 0.1, 'With augment: largest relative change of size.', domain.PROBABILITY)
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    if (p.image_size, p.num_channels) != (IMAGE_SIZE, NUM_CHANNELS):
      raise ValueError(
        f'{self._Context("image_size")}: the digits have {IMAGE_SIZE}x{IMAGE_SIZE} pixels of '
        f'{NUM_CHANNELS} channel, got {p.image_size} and {p.num_channels}'
      )

  def _NumImages(self) -> int:
    return len(self._arrays[1])

  def _NumClasses(self) -> int:
    return _TARGETS[self.params.target]

  @functools.cached_property
  def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
    """Returns images uint8 [n, 8, 8, 1] and labels int32 [n] of the split."""
    images, labels = _LoadDigits()
    indices = [i for i in range(len(labels)) if GetSplit(i) == self.params.split]
    return images[indices], labels[indices] % self._NumClasses()

  @functools.cached_property
  def _tensors(self) -> tuple[tf.Tensor, tf.Tensor]:
    with tf.init_scope(), tf.device('/device:CPU:0'):
      return tf.constant(self._arrays[0]), tf.constant(self._arrays[1])

  def _Images(self, indices: tf.Tensor, seeds: tf.Tensor) -> nested_map.NestedMap:
    all_images, all_labels = self._tensors
    p = self.params
    images = tf.cast(tf.gather(all_images, indices), tf.float32)
    if p.augment:
      images = image_augmentation.RandomShift(images, seeds, p.max_shift)
      images = image_augmentation.RandomRotation(images, seeds, p.max_degrees, p.max_zoom)
    return nested_map.NestedMap(images=(images - 5.0) / 6.0, labels=tf.gather(all_labels, indices))

  def _FingerprintParts(self) -> list[Any]:
    digests = [hashlib.sha256(np.ascontiguousarray(a).data).hexdigest() for a in self._arrays]
    return ['digits', self.params.split, *digests]


def GetSplit(index: int) -> str:
  """Returns the split of an image, 'train', 'dev' or 'test', by SHA-256 of its index."""
  digest = hashlib.sha256(str(index).encode()).digest()
  value = int.from_bytes(digest[:8], 'big') % 100
  return next(split for split, end in _SPLIT_ENDS.items() if value < end)


@functools.cache
def _LoadDigits() -> tuple[np.ndarray, np.ndarray]:
  try:
    from sklearn import datasets
  except ImportError as e:
    raise ValueError(
      'the digits are part of scikit-learn, which is not installed: run pip install '
      "'lingvo_gpipe[image]' or pip install 'scikit-learn'"
    ) from e
  digits = datasets.load_digits()
  images = digits.images.astype(np.uint8)[..., np.newaxis]
  return images, digits.target.astype(np.int32)
