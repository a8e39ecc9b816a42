# SPDX-License-Identifier: Apache-2.0
"""Batches by length: every example, the shares of languages, and resuming anywhere."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lingvo_gpipe.input import bucket_order

_SIZES = [5, 3, 2]


def _Examples(num=200, num_groups=4, seed=0):
  """Returns buckets and groups of examples; group g has about 2^g times as many as group 0."""
  rng = np.random.default_rng(seed)
  shares = 2.0 ** np.arange(num_groups)
  groups = np.concatenate(
    [np.arange(num_groups), rng.choice(num_groups, num - num_groups, p=shares / shares.sum())]
  )
  return rng.integers(0, len(_SIZES), num), groups


def _Order(examples=None, sizes=_SIZES, **options):
  return bucket_order.BucketOrder(*(examples or _Examples()), sizes, **options)


def _Epoch(order, epoch):
  first = epoch * order.num_batches
  return [order.Batch(n) for n in range(first, first + order.num_batches)]


def _Real(batches):
  return np.concatenate([batch.indices[: batch.num_real] for batch in batches])


@pytest.mark.parametrize('shuffle', [False, True])
def testEpochHasEveryExampleOnceInItsBucket(shuffle):
  buckets, groups = _Examples()
  order = _Order((buckets, groups), shuffle=shuffle)
  assert sum(order.Draws()) == buckets.size
  epochs = [_Epoch(order, epoch) for epoch in (0, 1, 7)]
  for batches in epochs:
    assert sorted(_Real(batches)) == list(range(buckets.size))
    for batch in batches:
      assert batch.indices.shape == (_SIZES[batch.bucket],)
      assert (buckets[batch.indices] == batch.bucket).all()
      assert (batch.indices[batch.num_real :] == batch.indices[batch.num_real - 1]).all()
    num_full = sum(batch.num_real == _SIZES[batch.bucket] for batch in batches)
    assert num_full >= len(batches) - len(_SIZES)
  orders = {tuple(_Real(batches)) for batches in epochs}
  assert len(orders) == (3 if shuffle else 1)
  if not shuffle:
    firsts = [batch.indices[0] for batch in epochs[0]]
    assert firsts == sorted(firsts)
    for j in range(len(_SIZES)):
      indices = _Real([batch for batch in epochs[0] if batch.bucket == j])
      np.testing.assert_array_equal(indices, np.flatnonzero(buckets == j))


def testBatchesOfAllBucketsAndGroupsAreMixed():
  buckets, groups = _Examples(2000)
  batches = _Epoch(_Order((buckets, groups)), 0)
  half = len(batches) // 2
  for j in range(len(_SIZES)):
    counts = [sum(b.bucket == j for b in part) for part in (batches[:half], batches[half:])]
    assert 0.7 < counts[0] / counts[1] < 1.4
  assert np.mean([len(set(groups[b.indices])) > 1 for b in batches if b.bucket == 0]) > 0.7


@settings(max_examples=25, deadline=None)
@given(
  counts=st.lists(st.integers(1, 60), min_size=1, max_size=5),
  temperature=st.sampled_from([0.5, 1.0, 2.0, 5.0, 100.0]),
  seed=st.integers(0, 10**6),
)
def testGroupsAreDrawnByTheirShares(counts, temperature, seed):
  rng = np.random.default_rng(seed)
  groups = rng.permutation(np.repeat(np.arange(len(counts)), counts))
  buckets = rng.integers(0, len(_SIZES), groups.size)
  order = _Order((buckets, groups), temperature=temperature, random_seed=seed)
  weights = np.array(counts) ** (1 / temperature)
  quotas = groups.size * weights / weights.sum()
  # A group is drawn at least once from each bucket in which it has examples.
  num_pairs = [len(set(buckets[groups == g])) for g in range(len(counts))]
  seen = np.zeros([groups.size], int)
  for epoch in range(4):
    real = _Real(_Epoch(order, epoch))
    drawn = np.bincount(groups[real], minlength=len(counts))
    for g, quota in enumerate(quotas):
      assert abs(drawn[g] - quota) < 1 or drawn[g] == num_pairs[g] > quota
    if (quotas >= num_pairs).all():
      assert real.size == groups.size
    np.add.at(seen, real, 1)
    # No example of a group and bucket repeats before all of them came.
    for g, j in set(zip(groups, buckets, strict=True)):
      pair_counts = seen[(groups == g) & (buckets == j)]
      assert pair_counts.max() - pair_counts.min() <= 1
  if temperature == 1:
    assert (seen == 4).all()


def testRareBucketsAreDrawn():
  # Bucket 1 has 2 of 1000 examples; its share of 0.3 draws is rounded up to 1.
  buckets = np.array([0] * 998 + [1] * 2 + [0] * 10)
  groups = np.array([0] * 1000 + [1] * 10)
  order = _Order((buckets, groups), sizes=[10, 10], temperature=1e6)
  drawn = np.concatenate([_Real(_Epoch(order, epoch)) for epoch in range(2)])
  assert np.bincount(groups[drawn]).tolist() == [2 * 505, 2 * 505]
  assert {998, 999} <= set(drawn)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.floats(0.01, 1e6), min_size=1, max_size=20))
def testApportionIsExactAndWithinOne(total, weights):
  weights = np.array(weights)
  counts = bucket_order.Apportion(total, weights)
  assert counts.sum() == total
  assert (np.abs(counts - total * weights / weights.sum()) < 1 + 1e-6).all()


def testSharesFollowTheFormula():
  sizes = np.array([1, 100, 10_000])
  np.testing.assert_allclose(bucket_order.Shares(sizes, 1), sizes / sizes.sum())
  roots = sizes**0.2
  np.testing.assert_allclose(bucket_order.Shares(sizes, 5), roots / roots.sum())
  np.testing.assert_allclose(bucket_order.Shares(sizes, 1e9), [1 / 3] * 3)
  # No overflow for a low temperature: the largest group takes all draws.
  np.testing.assert_allclose(bucket_order.Shares(sizes, 1e-3), [0, 0, 1])


@pytest.mark.parametrize('options', [{}, {'temperature': 5.0}, {'shuffle': False}])
def testPositionsCountRows(options):
  order = _Order(**options)
  position = 0
  for number in range(2 * order.num_batches + 3):
    assert order.Position(number) == position
    assert order.BatchAt(position) == number
    rows = order.Batch(number).indices.size
    # A position within a batch continues with the next batch.
    assert order.BatchAt(position + 1) == number + 1
    position += rows
  assert order.Position(order.num_batches) == order.num_rows
  # A far position and a near one, in another order.
  far = 10**9 * order.num_batches + 5
  other = _Order(**options)
  np.testing.assert_array_equal(other.Batch(far).indices, order.Batch(far).indices)
  np.testing.assert_array_equal(other.Batch(3).indices, order.Batch(3).indices)


def testExamplesOfAnEpochDoNotDependOnBatchSizes():
  for epoch in (0, 3):
    drawn = [
      sorted(_Real(_Epoch(_Order(sizes=sizes, temperature=3.0), epoch)))
      for sizes in (_SIZES, [1, 1, 1], [200, 7, 50])
    ]
    assert drawn[0] == drawn[1] == drawn[2]


def testOrderDependsOnTheSeed():
  orders = [tuple(_Real(_Epoch(_Order(random_seed=s), 0))) for s in (0, 1, -1, 2**70)]
  assert len(set(orders)) == len(orders)


def testOrderIsPinned():
  """Runs in progress rely on the order."""
  order = _Order((np.array([0, 0, 1, 0, 1, 0, 0]), np.array([0, 0, 0, 1, 1, 1, 1])), sizes=[2, 2])
  batches = [(b.bucket, b.indices.tolist(), b.num_real) for b in _Epoch(order, 1)]
  assert batches == [(0, [1, 1], 1), (1, [2, 4], 2), (0, [5, 3], 2), (0, [0, 6], 2)]


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
