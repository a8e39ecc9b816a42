# SPDX-License-Identifier: Apache-2.0
"""The order of examples that are batched by length: which examples make batch n of a run.

Without TensorFlow, and a pure function of integers: batch n follows from the seed and n alone, so
that a run can go on anywhere. The values are part of the restart promise: a test pins them.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import threading
from collections.abc import Sequence

import numpy as np

# The epoch under way and the one that is prepared ahead.
_KEPT_EPOCHS = 2


@dataclasses.dataclass(frozen=True)
class Batch:
  """One batch: `indices` int64 [batch]; the first `num_real` rows count, the others are padding."""

  bucket: int
  indices: np.ndarray
  num_real: int


@dataclasses.dataclass(frozen=True)
class _Cell:
  """The examples of one group in one bucket, and how many of them are drawn an epoch."""

  group: int
  bucket: int
  members: np.ndarray
  num_draws: int


@dataclasses.dataclass(frozen=True)
class _Order:
  """The batches of an epoch, in their order."""

  batches: list[Batch]
  firsts: np.ndarray  # The count of rows before each batch.


class BucketPlan:
  """Batches of examples of one bucket each, the groups mixed by temperature.

  An epoch is as many draws as there are examples. With `shuffle` group g gets its share of them,
  proportional to n_g^(1/temperature) (Arivazhagan et al. 2019, "Massively Multilingual Neural
  Machine Translation in the Wild", section 4.2), rounded so that the sum is exact, and divides it
  over its buckets in proportion to its examples there, at least one draw each. Each (group, bucket)
  has an endless order of its own, which passes over all of its examples before it repeats one and
  goes on from epoch to epoch: small groups come several times an epoch, of large ones others come
  in the next. With temperature 1 an epoch is every example once. Which examples an epoch has does
  not depend on the batch sizes.

  Without `shuffle` an epoch is every example once; batches come in the order of their first
  example.

  Where a bucket's draws are no multiple of its batch size, its last batch of an epoch is filled up
  with repeated rows that do not count.

  Attributes:
    num_batches: batches of an epoch; each epoch has as many.
    num_rows: rows of an epoch, padded ones included.
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
      buckets: int [examples], the bucket of each example, at least one example.
      groups: int [examples], its group: 0, 1, ... without gaps.
      batch_sizes: examples in a batch of each bucket.
      random_seed: any integer.
      shuffle: whether examples and batches come in random order.
      temperature: above 0; see above. Has no effect without `shuffle`.
    """
    self._batch_sizes = list(batch_sizes)
    self._random_seed = random_seed
    self._shuffle = shuffle
    if shuffle:
      self._cells = _Cells(buckets, groups, temperature)
    else:
      members = [np.flatnonzero(buckets == j) for j in range(len(batch_sizes))]
      self._cells = [_Cell(0, j, m, m.size) for j, m in enumerate(members) if m.size]
    draws = self.Draws()
    num_batches = [-(-n // size) for n, size in zip(draws, self._batch_sizes, strict=True)]
    self.num_batches = sum(num_batches)
    self.num_rows = sum(n * size for n, size in zip(num_batches, self._batch_sizes, strict=True))
    self._epochs: collections.OrderedDict[int, _Order] = collections.OrderedDict()
    self._lock = threading.Lock()

  def Draws(self) -> list[int]:
    """How many examples of each bucket an epoch has, without the padded rows."""
    return [
      sum(cell.num_draws for cell in self._cells if cell.bucket == j)
      for j in range(len(self._batch_sizes))
    ]

  def Batch(self, number: int) -> Batch:
    """Batch `number` since the beginning of the run; any thread may ask."""
    epoch, offset = divmod(number, self.num_batches)
    return self._Epoch(epoch).batches[offset]

  def BatchAt(self, position: int) -> int:
    """The number of the first batch that begins at or behind a position, a count of rows."""
    epoch, offset = divmod(position, self.num_rows)
    within = np.searchsorted(self._Epoch(epoch).firsts, offset)
    return epoch * self.num_batches + int(within)

  def Position(self, number: int) -> int:
    """The position at which a batch begins."""
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
      drawn = [self._Drawn(cell, epoch) for cell in self._cells if cell.bucket == j]
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

  def _Drawn(self, cell: _Cell, epoch: int) -> np.ndarray:
    """The examples that an epoch takes of a cell's endless order."""
    size = cell.members.size
    if not self._shuffle:
      return cell.members
    begin, end = epoch * cell.num_draws, (epoch + 1) * cell.num_draws
    drawn = []
    for one_pass in range(begin // size, -(-end // size)):
      order = self._Permutation(size, 'cell', cell.group, cell.bucket, one_pass)
      first = one_pass * size
      drawn.append(order[max(begin - first, 0) : min(end - first, size)])
    return cell.members[np.concatenate(drawn)]

  def _Permutation(self, size: int, *purpose: str | int) -> np.ndarray:
    """A random order of 0 ... size - 1 that belongs to the seed and to a purpose."""
    digest = hashlib.sha256(repr((self._random_seed, *purpose)).encode()).digest()
    # NumPy promises that a bit generator's raw numbers stay as they are, unlike its permutations.
    numbers = np.random.Philox(key=np.frombuffer(digest[:16], '<u8')).random_raw(size)
    return np.argsort(numbers, kind='stable')


def Shares(sizes: Sequence[int] | np.ndarray, temperature: float) -> np.ndarray:
  """float64 [groups]: the share of the draws of groups of these sizes, above 0."""
  logs = np.log(np.asarray(sizes, np.float64)) / temperature
  weights = np.exp(logs - logs.max())
  return weights / weights.sum()


def Apportion(total: int, weights: np.ndarray) -> np.ndarray:
  """int64 [n], of the sum `total`, proportional to `weights`: the largest remainders go up."""
  quotas = total * weights / weights.sum()
  counts = np.floor(quotas).astype(np.int64)
  largest = np.argsort(counts - quotas, kind='stable')
  counts[largest[: total - counts.sum()]] += 1
  return counts


def _Cells(buckets: np.ndarray, groups: np.ndarray, temperature: float) -> list[_Cell]:
  """The cells that have examples, group by group."""
  num_buckets = int(buckets.max()) + 1
  keys = groups.astype(np.int64) * num_buckets + buckets
  order = np.argsort(keys, kind='stable')
  found, firsts = np.unique(keys[order], return_index=True)
  members = np.split(order, firsts[1:])
  sizes = np.array([m.size for m in members])
  group_of = found // num_buckets
  of_groups = Apportion(len(buckets), Shares(np.bincount(groups), temperature))
  cells = []
  for group, num_draws in enumerate(of_groups):
    own = np.flatnonzero(group_of == group)
    draws = _AtLeastOne(int(num_draws), sizes[own])
    for i, n in zip(own, draws, strict=True):
      cells.append(_Cell(group, int(found[i] % num_buckets), members[i], int(n)))
  return cells


def _AtLeastOne(total: int, sizes: np.ndarray) -> np.ndarray:
  """`total` apportioned by `sizes`, but at least one each, even where that makes more."""
  rest = np.maximum(total * sizes / sizes.sum() - 1, 0)
  if total <= sizes.size or not rest.sum():
    return np.ones([sizes.size], np.int64)
  return 1 + Apportion(total - sizes.size, rest)
