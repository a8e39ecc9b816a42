# SPDX-License-Identifier: Apache-2.0
"""The order of examples: one permutation per epoch, for every size, always the same."""

import math
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.input import index_order

# Sizes around powers of two, at which ciphers change their block. At 2^16 + 1 and 2^18 + 1 the op
# of TensorFlow alone is not a permutation.
_SIZES = sorted(
  {*range(1, 40), 100, 1797, 10007, *(2**k + d for k in range(5, 19) for d in (-1, 0, 1, 2))}
)


def _Order(num_examples, random_seed=0, first_epoch=0, num_epochs=1):
  positions = tf.range(num_examples * num_epochs, dtype=tf.int64) + first_epoch * num_examples
  indices = index_order.ShuffledIndices(positions, num_examples, random_seed).numpy()
  return indices.reshape([num_epochs, num_examples])


@pytest.mark.parametrize('num_examples', _SIZES)
def testEachEpochIsAPermutation(num_examples):
  for order in _Order(num_examples, random_seed=3, num_epochs=2):
    np.testing.assert_array_equal(np.sort(order), np.arange(num_examples))


def testOpAloneIsNotAPermutationOfSpecialSizes():
  # If this fails, TensorFlow has been fixed; the orders of these sizes must not change.
  size = 2**16 + 1
  raw = index_order._Shuffle(tf.range(size, dtype=tf.int64), tf.zeros([3], tf.uint32), size)
  assert len(np.unique(raw.numpy())) == size - 1


def testOrderIsEqualOnePositionAtATime():
  together = _Order(23, random_seed=5, num_epochs=3).ravel()
  alone = [
    index_order.ShuffledIndices(tf.constant([i], tf.int64), 23, 5).numpy()[0] for i in range(3 * 23)
  ]
  np.testing.assert_array_equal(together, alone)


def testOrderIsPinned():
  # The positions in checkpoints rely on these values.
  expected = [[3, 2, 8, 5, 1, 9, 7, 0, 4, 6], [3, 1, 2, 9, 4, 5, 8, 7, 6, 0]]
  np.testing.assert_array_equal(_Order(10, num_epochs=2), expected)
  assert _Order(2**16 + 1)[0, :5].tolist() == [54331, 51440, 21740, 63532, 53276]
  expected = [0x8E58975F6D0DC556, 0x4728CDD5EE342CC5, 0x0B1F3A78522375A5]
  assert index_order.TensorHash64(1, tf.range(3)).numpy().tolist() == expected


def testSpecialSizeMovesItsLastIndex():
  size = 2**16 + 1
  last_indices = [int(np.argmax(order)) for order in _Order(size, num_epochs=4)]
  assert len(set(last_indices)) == 4


@pytest.mark.parametrize('seeds', [(0, 1), (1, 2), (0, -1), (7, 7 + 2**32)])
def testSeedsAndEpochsGiveUnrelatedOrders(seeds):
  size = 5000
  orders = np.concatenate([_Order(size, random_seed=s, num_epochs=8) for s in seeds])
  correlations = np.corrcoef(np.concatenate([orders, [np.arange(size)]]))
  pairs = correlations[np.triu_indices(len(correlations), 1)] * math.sqrt(size)
  # Standard normal if unrelated; there are 136 pairs.
  assert np.abs(pairs).max() < 4.5
  assert np.sqrt(np.mean(pairs**2)) < 1.3


def testOrdersOfSmallSetsAreEquallyLikely():
  orders, counts = np.unique(_Order(4, num_epochs=1200), axis=0, return_counts=True)
  assert len(orders) == 24
  assert counts.min() > 20 and counts.max() < 90


def testHugePositionsStillWork():
  positions = tf.constant([2**62, 2**62 + 1], tf.int64)
  indices = index_order.ShuffledIndices(positions, 2**40, 0).numpy()
  assert (indices >= 0).all() and (indices < 2**40).all() and indices[0] != indices[1]


def testHashesMatchSplitMix64():
  # The first outputs of the published generator for seed 0.
  states = tf.constant([1, 2, 3], tf.uint64) * tf.constant(index_order._INCREMENT, tf.uint64)
  expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
  assert index_order._Finalize(states).numpy().tolist() == expected


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
