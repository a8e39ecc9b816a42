# SPDX-License-Identifier: Apache-2.0
"""Random changes of images: their effects, and that they depend on the seeds alone."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.input import image_augmentation, index_order


def _Seeds(n, seed=0):
  return tf.bitcast(index_order.TensorHash64(seed, tf.range(n, dtype=tf.int64)), tf.int64)


def _Images(n, height=6, width=5):
  return np.random.default_rng(0).uniform(1, 2, [n, height, width, 2]).astype(np.float32)


def testShiftIsACropOfThePaddedImage():
  images = _Images(200)
  moved = image_augmentation.RandomShift(tf.constant(images), _Seeds(200), 2).numpy()
  padded = np.pad(images, [[0, 0], [2, 2], [2, 2], [0, 0]])
  offsets = set()
  for before, after in zip(padded, moved, strict=True):
    matches = [
      (y, x)
      for y in range(5)
      for x in range(5)
      if np.array_equal(before[y : y + 6, x : x + 5], after)
    ]
    assert len(matches) == 1
    offsets.add(matches[0])
  assert len(offsets) == 25


def testFlipMirrorsHalfOfTheImages():
  images = _Images(200)
  flipped = image_augmentation.RandomFlip(tf.constant(images), _Seeds(200)).numpy()
  is_same = np.all(flipped == images, axis=(1, 2, 3))
  assert np.array_equal(flipped[~is_same], images[~is_same, :, ::-1])
  assert 70 < np.sum(is_same) < 130


def testRotationByZeroKeepsTheImage():
  images = _Images(4)
  same = image_augmentation.RandomRotation(tf.constant(images), _Seeds(4), 0.0, 0.0)
  np.testing.assert_allclose(same, images, rtol=1e-6)


def testRotationIsAroundTheCentre():
  images = np.zeros([50, 7, 7, 1], np.float32)
  images[:, 3, 3] = 1.0
  images[:, 3, 6] = 1.0
  turned = image_augmentation.RandomRotation(tf.constant(images), _Seeds(50), 40.0, 0.0).numpy()
  np.testing.assert_allclose(turned[:, 3, 3], 1.0, atol=1e-5)
  # The point on the right moves up or down by at most 3 sin(40 degrees) pixels.
  rows = np.sum(turned[:, :, 4:, 0].sum(2) * np.arange(7), 1) / turned[:, :, 4:, 0].sum((1, 2))
  assert rows.min() < 2 and rows.max() > 4
  assert np.all(np.abs(rows - 3) < 2.5)


def testRotationCommutesWithQuarterTurns():
  """A quarter turn before or after the rotation gives the same image."""
  images = _Images(8, width=6)

  def Changed(x):
    return image_augmentation.RandomRotation(tf.constant(x), _Seeds(8), 40.0, 0.2).numpy()

  def Quarter(x):
    return np.rot90(x, axes=(1, 2))

  np.testing.assert_allclose(Changed(Quarter(images)), Quarter(Changed(images)), atol=1e-4)


def testZoomMovesPointsAlongRays():
  """A point moves along its ray from the centre, inwards or outwards."""
  images = np.zeros([60, 9, 9, 1], np.float32)
  images[:, 4, 4] = images[:, 4, 7] = 1.0
  zoomed = image_augmentation.RandomRotation(tf.constant(images), _Seeds(60), 0.0, 0.3).numpy()
  np.testing.assert_allclose(zoomed[:, 4, 4], 1.0, atol=1e-5)
  columns = zoomed[:, 4, 6:, 0]
  positions = np.sum(columns * np.arange(6, 9), 1) / np.sum(columns, 1)
  assert positions.min() < 6.5 and positions.max() > 7.5
  assert np.all(zoomed[:, :, :3] == 0)


@pytest.mark.parametrize('height, width', [(40, 60), (7, 3), (1, 1)])
def testRandomWindowIsInsideTheImage(height, width):

  def Window(seed):
    return image_augmentation.RandomWindow(height, width, seed)

  @tf.function(autograph=False)
  def Windows(seeds):
    return tf.map_fn(Window, seeds, fn_output_signature=tf.int32)

  windows = Windows(_Seeds(300)).numpy()
  assert windows.dtype == np.int32
  top_edge, left_edge, rows, columns = windows.T
  assert np.all((top_edge >= 0) & (left_edge >= 0) & (rows >= 1) & (columns >= 1))
  assert np.all((top_edge + rows <= height) & (left_edge + columns <= width))
  if height > 10:
    share = rows * columns / (height * width)
    assert share.min() < 0.15 and share.max() > 0.9
    inside = (rows < height) & (columns < width)
    ratios = (columns / rows)[inside & (rows > 15)]
    assert 0.7 < ratios.min() < 0.8 and 1.25 < ratios.max() < 1.4
    # Windows reach the edges of the image, independently along height and width.
    top_edge, left_edge, rows, columns = windows[inside].T
    offsets = [top_edge / (height - rows), left_edge / (width - columns)]
    assert all(np.any(offset == 0) and np.any(offset == 1) for offset in offsets)
    assert abs(np.corrcoef(*offsets)[0, 1]) < 0.25
    assert len({tuple(w) for w in windows}) > 250


def testCentralWindowIsTheCentralSquare():
  assert image_augmentation.CentralWindow(40, 61, 0.5).numpy().tolist() == [10, 20, 20, 20]
  assert image_augmentation.CentralWindow(1, 5, 0.1).numpy().tolist() == [0, 2, 1, 1]


@pytest.mark.parametrize(
  'change',
  [
    lambda x, s: image_augmentation.RandomShift(x, s, 2),
    image_augmentation.RandomFlip,
    lambda x, s: image_augmentation.RandomRotation(x, s, 20.0, 0.2),
  ],
  ids=['shift', 'flip', 'rotation'],
)
def testChangesDependOnTheSeedOfTheImageAlone(change):
  images, seeds = tf.constant(_Images(12)), _Seeds(12)
  whole = change(images, seeds).numpy()
  for i in range(12):
    alone = change(images[i : i + 1], seeds[i : i + 1]).numpy()
    assert np.array_equal(alone[0], whole[i])
  assert not np.array_equal(whole, change(images, _Seeds(12, seed=1)).numpy())


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
