# SPDX-License-Identifier: Apache-2.0
"""Random changes of images that are functions of a seed for each image, and nothing else.

Seeds are int64 [n]: one hash an image. Draws do not depend on the batch that an image is in, so a
run that is restarted, or reads batches of another size, sees the same images.
"""

from __future__ import annotations

import math

import tensorflow as tf

from lingvo_gpipe.input import index_order

# What a draw is for; the draws of an image for different purposes are unrelated.
_TOP, _LEFT, _FLIP, _AREA, _RATIO, _ANGLE, _ZOOM = range(7)
# The relative area and the ratio of width to height of what RandomWindow cuts out.
_AREA_RANGE = (0.08, 1.0)
_RATIO_RANGE = (3 / 4, 4 / 3)


def RandomShift(images: tf.Tensor, seeds: tf.Tensor, max_shift: int) -> tf.Tensor:
  """Moves each image by up to `max_shift` pixels along height and width; zeros come in.

  The same as padding by `max_shift` and cutting the size out at a random place.

  Args:
    images: [n, height, width, channels].
    seeds: int64 [n].
    max_shift: pixels, 0 or more.
  """
  if not max_shift:
    return images
  height, width = images.shape[1:3]
  padded = tf.pad(images, [[0, 0], [max_shift, max_shift], [max_shift, max_shift], [0, 0]])
  rows = _Below(seeds, _TOP, 2 * max_shift + 1)[:, tf.newaxis] + tf.range(height, dtype=tf.int64)
  columns = _Below(seeds, _LEFT, 2 * max_shift + 1)[:, tf.newaxis] + tf.range(width, dtype=tf.int64)
  return tf.gather(tf.gather(padded, rows, axis=1, batch_dims=1), columns, axis=2, batch_dims=1)


def RandomFlip(images: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
  """Exchanges left and right of half of the images, [n, height, width, channels]."""
  is_flipped = _Below(seeds, _FLIP, 2)[:, tf.newaxis, tf.newaxis, tf.newaxis] == 1
  return tf.where(is_flipped, tf.reverse(images, [2]), images)


def RandomRotation(
  images: tf.Tensor, seeds: tf.Tensor, max_degrees: float, max_zoom: float
) -> tf.Tensor:
  """Turns each image around its centre and makes it larger or smaller; zeros come in.

  Args:
    images: [n, height, width, channels], float32.
    seeds: int64 [n].
    max_degrees: angles are uniform up to this, both ways.
    max_zoom: sizes are multiplied by a factor that is uniform in 1 - max_zoom ... 1 + max_zoom.
  """
  height, width = images.shape[1:3]
  angle = _Uniform(seeds, _ANGLE, -max_degrees, max_degrees) * (math.pi / 180.0)
  zoom = 1.0 / _Uniform(seeds, _ZOOM, 1.0 - max_zoom, 1.0 + max_zoom)
  cosine, sine = tf.cos(angle) * zoom, tf.sin(angle) * zoom
  x, y = (width - 1) / 2.0, (height - 1) / 2.0
  zero = tf.zeros_like(angle)
  # Output point (x, y) is taken from (a0 x + a1 y + a2, a3 x + a4 y + a5).
  rows = [cosine, -sine, x - cosine * x + sine * y, sine, cosine, y - sine * x - cosine * y]
  return tf.raw_ops.ImageProjectiveTransformV3(
    images=images,
    transforms=tf.cast(tf.stack([*rows, zero, zero], axis=1), tf.float32),
    output_shape=[height, width],
    interpolation='BILINEAR',
    fill_mode='CONSTANT',
    fill_value=0.0,
  )


def RandomWindow(height: tf.Tensor, width: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
  """A random window of one image (Szegedy et al. 2015): int32 [top, left, height, width].

  Its share of the image's area is uniform in 0.08 ... 1, the ratio of its sides uniform in
  3/4 ... 4/3; where such a window sticks out, it is cut off.

  Args:
    height: integer scalar, of the image.
    width: integer scalar, of the image.
    seed: int64 scalar.
  """
  height, width = tf.cast(height, tf.float64), tf.cast(width, tf.float64)
  area = _Uniform(seed, _AREA, *_AREA_RANGE) * height * width
  ratio = _Uniform(seed, _RATIO, *_RATIO_RANGE)
  rows = tf.clip_by_value(tf.round(tf.sqrt(area / ratio)), 1.0, height)
  columns = tf.clip_by_value(tf.round(tf.sqrt(area * ratio)), 1.0, width)
  top = tf.floor(_Uniform(seed, _TOP, 0.0, 1.0) * (height - rows + 1.0))
  left = tf.floor(_Uniform(seed, _LEFT, 0.0, 1.0) * (width - columns + 1.0))
  return tf.cast(tf.stack([top, left, rows, columns]), tf.int32)


def CentralWindow(height: tf.Tensor, width: tf.Tensor, share: float) -> tf.Tensor:
  """The central square of one image: int32 [top, left, size, size].

  Args:
    height: integer scalar, of the image.
    width: integer scalar, of the image.
    share: the square's side by the image's shorter side, above 0 and at most 1.
  """
  shorter = tf.cast(tf.minimum(height, width), tf.float64)
  size = tf.maximum(tf.cast(tf.round(shorter * share), tf.int32), 1)
  top = (tf.cast(height, tf.int32) - size) // 2
  left = (tf.cast(width, tf.int32) - size) // 2
  return tf.stack([top, left, size, size])


def _Bits(seeds: tf.Tensor, purpose: int) -> tf.Tensor:
  """uint64, well mixed."""
  return index_order.TensorHash64(purpose, seeds)


def _Below(seeds: tf.Tensor, purpose: int, limit: int) -> tf.Tensor:
  """int64 0 ... limit - 1."""
  return tf.cast(tf.math.floormod(_Bits(seeds, purpose), tf.constant(limit, tf.uint64)), tf.int64)


def _Uniform(seed: tf.Tensor, purpose: int, low: float, high: float) -> tf.Tensor:
  """float64 in [low, high)."""
  bits = tf.bitwise.right_shift(_Bits(seed, purpose), tf.constant(11, tf.uint64))
  return low + (high - low) * tf.cast(tf.cast(bits, tf.int64), tf.float64) / 2.0**53
