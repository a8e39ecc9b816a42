# SPDX-License-Identifier: Apache-2.0
"""The order of examples that are batched by length: which examples form batch n of a run.

This module needs no TensorFlow and is a pure function of integers: batch n follows from the seed
and n alone, so a run can resume anywhere. Restarts rely on the values, so a test pins them.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import threading
from collections.abc import Sequence

import numpy as np

# The current epoch and the next one, which is prepared ahead.
_KEPT_EPOCHS = 2


@dataclasses.dataclass(frozen=True)
class Batch:
  """A batch of examples of one bucket.

  Attributes:
    bucket: index of the bucket.
    indices: int64 [batch], the examples.
    num_real: the first `num_real` rows count, the other rows are padding.
  """

  bucket: int
  indices: np.ndarray
  num_real: int


@dataclasses.dataclass(frozen=True)
class _GroupBucket:
  """The examples of one group in one bucket, and the number of them drawn per epoch."""

  group: int
  bucket: int
  members: np.ndarray
  num_draws: int


@dataclasses.dataclass(frozen=True)
class _Order:
  """The batches of an epoch, in order."""

  batches: list[Batch]
  firsts: np.ndarray  # Number of rows before each batch.


class BucketOrder:
  """Batches of examples of one bucket each, with groups mixed by temperature.

  An epoch draws as many examples as the data set has. With `shuffle` each group g gets a share of
  the draws proportional to n_g^(1/temperature) (Arivazhagan et al. 2019, "Massively Multilingual
  Neural Machine Translation in the Wild", section 4.2), rounded so that the sum is exact. The group
  divides its draws over its buckets in proportion to its examples there, with at least one draw
  each. Each (group, bucket) has an endless order, which passes over all of its examples before it
  repeats one and continues from epoch to epoch: a small group comes several times per epoch, a
  large one only in part. With temperature 1 an epoch is every example once. The examples of an
  epoch do not depend on the batch sizes.

  Without `shuffle` an epoch is every example once, and batches come in the order of their first
  examples.

  If the draws of a bucket are not a multiple of its batch size, its last batch of an epoch is
  filled with repeated rows that do not count.

  Attributes:
    num_batches: number of batches of each epoch.
    num_rows: number of rows of each epoch, padded rows included.
  """

  def __init__(
    self,
    buckets: np.ndarray,
    groups: np.ndarray,
    batch_sizes: Sequence[int],
    *,
    random_seed: int = 0,
    shuffle: bool = True,
    temperature: float = 1.0,
  ) -> None:
    """Counts the examples.

    Args:
      buckets: int [examples], the bucket of each example; at least one example.
      groups: int [examples], the group of each example: 0, 1, ... without gaps.
      batch_sizes: number of examples in a batch of each bucket.
      random_seed: any integer.
      shuffle: whether examples and batches come in random order.
      temperature: above 0; see above. Has no effect without `shuffle`.
    """
    self._batch_sizes = list(batch_sizes)
    self._random_seed = random_seed
    self._shuffle = shuffle
    if shuffle:
      self._group_buckets = _GroupBuckets(buckets, groups, temperature)
    else:
      members = [np.flatnonzero(buckets == j) for j in range(len(batch_sizes))]
      self._group_buckets = [_GroupBucket(0, j, m, m.size) for j, m in enumerate(members) if m.size]
    draws = self.Draws()
    num_batches = [-(-n // size) for n, size in zip(draws, self._batch_sizes, strict=True)]
    self.num_batches = sum(num_batches)
    self.num_rows = sum(n * size for n, size in zip(num_batches, self._batch_sizes, strict=True))
    self._epochs: collections.OrderedDict[int, _Order] = collections.OrderedDict()
    self._lock = threading.Lock()

  def Draws(self) -> list[int]:
    """Returns the number of examples of each bucket per epoch, without padded rows."""
    return [
      sum(pair.num_draws for pair in self._group_buckets if pair.bucket == j)
      for j in range(len(self._batch_sizes))
    ]

  def Batch(self, number: int) -> Batch:
    """Returns batch `number` since the start of the run; thread-safe."""
    epoch, offset = divmod(number, self.num_batches)
    return self._Epoch(epoch).batches[offset]

  def BatchAt(self, position: int) -> int:
    """Returns the number of the first batch that begins at or after a position, a count of rows."""
    epoch, offset = divmod(position, self.num_rows)
    within = np.searchsorted(self._Epoch(epoch).firsts, offset)
    return epoch * self.num_batches + int(within)

  def Position(self, number: int) -> int:
    """Returns the position at which a batch begins."""
    epoch, offset = divmod(number, self.num_batches)
    return epoch * self.num_rows + int(self._Epoch(epoch).firsts[offset])

  def _Epoch(self, epoch: int) -> _Order:
    with self._lock:
      if epoch not in self._epochs:
        while len(self._epochs) >= _KEPT_EPOCHS:
          self._epochs.popitem(last=False)
        self._epochs[epoch] = self._MakeEpoch(epoch)
      return self._epochs[epoch]

  def _MakeEpoch(self, epoch: int) -> _Order:
    batches = []
    for j, size in enumerate(self._batch_sizes):
      drawn = [self._Draw(pair, epoch) for pair in self._group_buckets if pair.bucket == j]
      if not drawn:
        continue
      indices = np.concatenate(drawn)
      if self._shuffle:
        indices = indices[self._Permutation(indices.size, 'bucket', epoch, j)]
      for first in range(0, indices.size, size):
        rows = indices[first : first + size]
        padding = np.full([size - rows.size], rows[-1])
        batches.append(Batch(j, np.concatenate([rows, padding]), rows.size))
    if self._shuffle:
      order = self._Permutation(len(batches), 'batches', epoch)
    else:
      order = np.argsort([batch.indices[0] for batch in batches], kind='stable')
    batches = [batches[i] for i in order]
    sizes = [batch.indices.size for batch in batches]
    return _Order(batches, np.cumsum([0, *sizes[:-1]]))

  def _Draw(self, pair: _GroupBucket, epoch: int) -> np.ndarray:
    """Returns the examples that an epoch takes from a pair's endless order."""
    size = pair.members.size
    if not self._shuffle:
      return pair.members
    begin, end = epoch * pair.num_draws, (epoch + 1) * pair.num_draws
    drawn = []
    for one_pass in range(begin // size, -(-end // size)):
      order = self._Permutation(size, 'cell', pair.group, pair.bucket, one_pass)
      first = one_pass * size
      drawn.append(order[max(begin - first, 0) : min(end - first, size)])
    return pair.members[np.concatenate(drawn)]

  def _Permutation(self, size: int, *purpose: str | int) -> np.ndarray:
    """Returns a random order of 0 ... size - 1 that depends on the seed and the purpose."""
    digest = hashlib.sha256(repr((self._random_seed, *purpose)).encode()).digest()
    # NumPy guarantees that a bit generator's raw numbers never change, unlike its permutations.
    numbers = np.random.Philox(key=np.frombuffer(digest[:16], '<u8')).random_raw(size)
    return np.argsort(numbers, kind='stable')


def Shares(sizes: Sequence[int] | np.ndarray, temperature: float) -> np.ndarray:
  """Returns float64 [groups]: the share of draws of each group of some size above 0."""
  logs = np.log(np.asarray(sizes, np.float64)) / temperature
  weights = np.exp(logs - logs.max())
  return weights / weights.sum()


def Apportion(total: int, weights: np.ndarray) -> np.ndarray:
  """Divides `total` into int64 [n] proportional to `weights`: the largest remainders round up."""
  quotas = total * weights / weights.sum()
  counts = np.floor(quotas).astype(np.int64)
  largest = np.argsort(counts - quotas, kind='stable')
  counts[largest[: total - counts.sum()]] += 1
  return counts


def _GroupBuckets(
  buckets: np.ndarray, groups: np.ndarray, temperature: float
) -> list[_GroupBucket]:
  """Returns the pairs that have examples, group by group."""
  num_buckets = int(buckets.max()) + 1
  keys = groups.astype(np.int64) * num_buckets + buckets
  order = np.argsort(keys, kind='stable')
  pair_keys, firsts = np.unique(keys[order], return_index=True)
  members = np.split(order, firsts[1:])
  sizes = np.array([m.size for m in members])
  pair_groups = pair_keys // num_buckets
  group_draws = Apportion(len(buckets), Shares(np.bincount(groups), temperature))
  pairs = []
  for group, num_draws in enumerate(group_draws):
    indices = np.flatnonzero(pair_groups == group)
    draws = _AtLeastOne(int(num_draws), sizes[indices])
    for i, n in zip(indices, draws, strict=True):
      pairs.append(_GroupBucket(group, int(pair_keys[i] % num_buckets), members[i], int(n)))
  return pairs


def _AtLeastOne(total: int, sizes: np.ndarray) -> np.ndarray:
  """Apportions `total` by `sizes` with at least one each, even if the sum then exceeds `total`."""
  excess = np.maximum(total * sizes / sizes.sum() - 1, 0)
  if total <= sizes.size or not excess.sum():
    return np.ones([sizes.size], np.int64)
  return 1 + Apportion(total - sizes.size, excess)
