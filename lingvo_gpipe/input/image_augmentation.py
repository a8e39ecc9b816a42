# SPDX-License-Identifier: Apache-2.0
"""Random changes of images as functions of one seed per image.

Seeds are int64 [n], one hash per image. Draws do not depend on the batch of an image, so a
restarted run, or a run with another batch size, sees the same images.
"""

from __future__ import annotations

import math

import tensorflow as tf

from lingvo_gpipe.input import index_order

# The purposes of draws; draws of an image for different purposes are independent.
_TOP, _LEFT, _FLIP, _AREA, _RATIO, _ANGLE, _ZOOM = range(7)
# Ranges of the relative area and the aspect ratio (width / height) of a RandomWindow.
_AREA_RANGE = (0.08, 1.0)
_RATIO_RANGE = (3 / 4, 4 / 3)


def RandomShift(images: tf.Tensor, seeds: tf.Tensor, max_shift: int) -> tf.Tensor:
  """Shifts each image by up to `max_shift` pixels along height and width, filling with zeros.

  Equivalent to padding by `max_shift` and cropping to the original size at a random offset.

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
  """Mirrors half of the images, [n, height, width, channels], left to right."""
  is_flipped = _Below(seeds, _FLIP, 2)[:, tf.newaxis, tf.newaxis, tf.newaxis] == 1
  return tf.where(is_flipped, tf.reverse(images, [2]), images)


def RandomRotation(
  images: tf.Tensor, seeds: tf.Tensor, max_degrees: float, max_zoom: float
) -> tf.Tensor:
  """Rotates each image around its centre and scales it, filling with zeros.

  Args:
    images: [n, height, width, channels], float32.
    seeds: int64 [n].
    max_degrees: angles are uniform in -max_degrees ... max_degrees.
    max_zoom: sizes are multiplied by a factor that is uniform in 1 - max_zoom ... 1 + max_zoom.
  """
  height, width = images.shape[1:3]
  angle = _Uniform(seeds, _ANGLE, -max_degrees, max_degrees) * (math.pi / 180.0)
  zoom = 1.0 / _Uniform(seeds, _ZOOM, 1.0 - max_zoom, 1.0 + max_zoom)
  cosine, sine = tf.cos(angle) * zoom, tf.sin(angle) * zoom
  x, y = (width - 1) / 2.0, (height - 1) / 2.0
  zero = tf.zeros_like(angle)
  # The output point (x, y) is sampled from (a0 x + a1 y + a2, a3 x + a4 y + a5).
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
  """Returns a random window of one image (Szegedy et al. 2015): int32 [top, left, height, width].

  Its share of the image's area is uniform in 0.08 ... 1 and its aspect ratio uniform in 3/4 ...
  4/3; a window larger than the image is cropped.

  Args:
    height: integer scalar, height of the image.
    width: integer scalar, width of the image.
    seed: int64 scalar.
  """
  height, width = tf.cast(height, tf.float64), tf.cast(width, tf.float64)
  area = _Uniform(seed, _AREA, *_AREA_RANGE) * height * width
  ratio = _Uniform(seed, _RATIO, *_RATIO_RANGE)
  rows = tf.clip_by_value(tf.round(tf.sqrt(area / ratio)), 1.0, height)
  columns = tf.clip_by_value(tf.round(tf.sqrt(area * ratio)), 1.0, width)
  top_edge = tf.floor(_Uniform(seed, _TOP, 0.0, 1.0) * (height - rows + 1.0))
  left_edge = tf.floor(_Uniform(seed, _LEFT, 0.0, 1.0) * (width - columns + 1.0))
  return tf.cast(tf.stack([top_edge, left_edge, rows, columns]), tf.int32)


def CentralWindow(height: tf.Tensor, width: tf.Tensor, share: float) -> tf.Tensor:
  """Returns the central square of one image: int32 [top, left, size, size].

  Args:
    height: integer scalar, height of the image.
    width: integer scalar, width of the image.
    share: side of the square divided by the shorter side of the image, above 0 and at most 1.
  """
  shorter = tf.cast(tf.minimum(height, width), tf.float64)
  size = tf.maximum(tf.cast(tf.round(shorter * share), tf.int32), 1)
  top_edge = (tf.cast(height, tf.int32) - size) // 2
  left_edge = (tf.cast(width, tf.int32) - size) // 2
  return tf.stack([top_edge, left_edge, size, size])


def _Bits(seeds: tf.Tensor, purpose: int) -> tf.Tensor:
  """Returns well-mixed uint64 of the shape of `seeds`."""
  return index_order.TensorHash64(purpose, seeds)


def _Below(seeds: tf.Tensor, purpose: int, limit: int) -> tf.Tensor:
  """Returns random int64 in 0 ... limit - 1."""
  return tf.cast(tf.math.floormod(_Bits(seeds, purpose), tf.constant(limit, tf.uint64)), tf.int64)


def _Uniform(seed: tf.Tensor, purpose: int, low: float, high: float) -> tf.Tensor:
  """Returns random float64 in [low, high)."""
  bits = tf.bitwise.right_shift(_Bits(seed, purpose), tf.constant(11, tf.uint64))
  return low + (high - low) * tf.cast(tf.cast(bits, tf.int64), tf.float64) / 2.0**53
