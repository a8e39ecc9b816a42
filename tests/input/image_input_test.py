# SPDX-License-Identifier: Apache-2.0
"""Images come in a seeded order, with different changes in each epoch; restarts are exact."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.input import image_input
from tests import naming

NUM_IMAGES = 10


class _Seeded(image_input.ImageInput):
  """Images of which the labels are indices and the pixels seeds."""

  def _NumImages(self):
    return NUM_IMAGES

  def _NumClasses(self):
    return 3

  def _Images(self, indices, seeds):
    low = tf.cast(tf.math.floormod(seeds, 1 << 20), tf.float32)
    images = low[:, tf.newaxis, tf.newaxis, tf.newaxis] * tf.ones([1, 2, 2, 1])
    return nested_map.NestedMap(images=images, labels=tf.cast(indices, tf.int32))

  def _FingerprintParts(self):
    return ['seeded']


def _Input(**values):
  p = _Seeded.Params().Set(name='seeded', batch_size=4, image_size=2, num_channels=1)
  return p.Set(**values).Instantiate()


def _Examples(generator, count, start=0):
  """Returns [(label, seed)] of `count` images from a position on."""
  examples = []
  for batch in generator.Dataset(start):
    rows = zip(batch.labels.numpy(), batch.images.numpy()[:, 0, 0, 0], strict=True)
    examples.extend((int(label), float(seed)) for label, seed in rows)
    if len(examples) >= count:
      return examples[:count]
  return examples


def testEveryEpochHasEachImageOnceWithNewChanges():
  examples = _Examples(_Input(), 3 * NUM_IMAGES)
  epochs = [examples[i : i + NUM_IMAGES] for i in range(0, 3 * NUM_IMAGES, NUM_IMAGES)]
  for epoch in epochs:
    assert sorted(label for label, _ in epoch) == list(range(NUM_IMAGES))
  assert len({seed for _, seed in examples}) == 3 * NUM_IMAGES


@pytest.mark.parametrize('start', [1, 9, 10, 23])
@pytest.mark.parametrize('batch_size', [4, 7])
def testRestartIsExactWithAnyBatchSize(start, batch_size):
  expected = _Examples(_Input(), 45)[start:]
  assert _Examples(_Input(batch_size=batch_size), 45 - start, start) == expected
  parallel = _Input(batch_size=batch_size, num_parallel_calls=3)
  assert _Examples(parallel, 45 - start, start) == expected


def testRowsDatasetHasTheSameChanges():
  both = tf.data.Dataset.zip(_Input().RowsDataset(7, range(3), ['images']), _Input().Dataset(7))
  for (images,), batch in both.take(3):
    np.testing.assert_array_equal(images, batch.images[:3])


def testChangesDependOnIndexAndEpochOnly():
  shuffled, plain = _Examples(_Input(), 20), _Examples(_Input(shuffle=False), 20)
  assert [label for label, _ in plain] == 2 * list(range(NUM_IMAGES))
  for first in (0, NUM_IMAGES):
    assert sorted(shuffled[first : first + 10]) == sorted(plain[first : first + 10])
  assert _Examples(_Input(random_seed=1, shuffle=False), 20) != plain


def testOneEpochInOrderIsPadded():
  batches = list(_Input(shuffle=False, num_epochs=1).Dataset())
  assert [b.example_weights.numpy().tolist() for b in batches] == [[1] * 4, [1] * 4, [1, 1, 0, 0]]
  assert batches[-1].labels.numpy().tolist() == [8, 9, 9, 9]
  assert _Input(num_epochs=1).NumBatches() == 3


def testBatchesMatchTheSpec():
  generator = _Input()
  spec = generator.BatchSpec()
  batch = next(iter(generator.Dataset()))
  assert {k: (v.shape, v.dtype) for k, v in batch.FlattenItems()} == {
    k: (v.shape, v.dtype) for k, v in spec.FlattenItems()
  }


def testInvalidImagesAndPositionsAreErrors():
  with pytest.raises(ValueError, match=naming.Naming("'images'", '(4, 3, 3, 1)', '(4, 2, 2, 1)')):
    _Input(image_size=3).Dataset()
  with pytest.raises(ValueError, match=naming.Naming('start', 0, -1)):
    _Input().Dataset(-1)


def testFakeExamplesNeedNoData():
  generator = _Input(num_fake_examples=8, image_size=5, num_channels=3)
  batch = next(iter(generator.Dataset()))
  assert batch.images.shape == [4, 5, 5, 3]
  assert np.all((batch.labels >= 0) & (batch.labels < 3))
  assert generator.NumExamples() == 8
  assert generator.Fingerprint() != _Input().Fingerprint()


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
