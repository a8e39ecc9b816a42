# SPDX-License-Identifier: Apache-2.0
"""Inputs of examples of many lengths: batches have a few fixed shapes, one per range of lengths."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from lingvo_gpipe.core import domain, hyperparams, nested_map
from lingvo_gpipe.input import base_input_generator, bucket_order

# Specs of the arguments of `Rows` for a batch: indices of examples, example weights, length of
# rows.
ROWS_SPEC = (
  tf.TensorSpec([None], tf.int64),
  tf.TensorSpec([None], tf.float32),
  tf.TensorSpec([], tf.int64),
)


class BucketedInput(base_input_generator.BaseInputGenerator):
  """Batches of examples of similar length, with languages mixed by temperature.

  An example belongs to the first bucket whose `p.bucket_upper_bound` is at least its length, and
  every batch of bucket j has the shape [p.bucket_batch_limit[j], p.bucket_upper_bound[j]].
  `BatchSpecs()` returns all shapes, `BatchSpec()` the largest one. See `bucket_order.BucketOrder`
  for the order.

  The position is the number of rows so far, padded rows included. It belongs to one choice of
  bounds and limits: with different ones a run resumes, but not exactly.

  With `p.shuffle`, as in training, examples longer than the last bound are left out, and so are
  examples with nothing to read or to predict. Without `p.shuffle`, as in evaluation, each example
  comes once, truncated to the last bound. The number of such examples is logged.

  A subclass implements the methods below, and extends `_FingerprintParts()` by parts that identify
  its data.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of an input in buckets."""
    p = super().Params()
    p.Define(
      'bucket_upper_bound',
      [],
      'Maximum length in each bucket, ascending.',
      domain.ListOf(domain.SIZE, increasing=True),
    )
    p.Define(
      'bucket_batch_limit',
      [],
      'Examples in a batch of each bucket: a list, or one number for all. Replaces batch_size.',
      domain.SIZES | domain.SIZE,
    )
    p.Define(
      'sampling_temperature',
      1.0,
      'With shuffle: a language of n examples is drawn in proportion to n^(1/temperature). 1: by '
      'size; 5 is usual for many languages.',
      domain.POSITIVE,
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    bounds = self.params.bucket_upper_bound
    if not bounds:
      raise ValueError(
        f'{self._Context("bucket_upper_bound")}: must be set, to a list such as [16, 32, 64]'
      )
    limits = self._limits
    if len(limits) != len(bounds):
      raise ValueError(
        f'{self._Context("bucket_batch_limit")}: expected a positive integer, or one for each of '
        f'the {len(bounds)} buckets of bucket_upper_bound, got {self.params.bucket_batch_limit!r}'
      )

  def _CheckBatchSize(self) -> None:
    if self.params.batch_size:
      raise ValueError(
        f'{self._Context("batch_size")} has no effect, got {self.params.batch_size!r}: set '
        'bucket_batch_limit'
      )

  @property
  def _limits(self) -> list[int]:
    limit = self.params.bucket_batch_limit
    if isinstance(limit, list | tuple):
      return list(limit)
    return [limit] * len(self.params.bucket_upper_bound)

  # Implemented by subclasses.

  def _Lengths(self) -> np.ndarray:
    """Returns int64 [n]: the length of each example."""
    raise NotImplementedError(f'_Lengths of {type(self).__name__}')

  def _IsEmpty(self) -> np.ndarray:
    """Returns bool [n]: whether an example has nothing to read or to predict."""
    raise NotImplementedError(f'_IsEmpty of {type(self).__name__}')

  def _Groups(self) -> np.ndarray:
    """Returns int64 [n]: the group of each example; temperature mixes the groups."""
    raise NotImplementedError(f'_Groups of {type(self).__name__}')

  def _GroupNames(self) -> list[str]:
    """Returns the names of the groups, for messages."""
    raise NotImplementedError(f'_GroupNames of {type(self).__name__}')

  def _RowSpec(self, length: int | None) -> nested_map.NestedMap:
    """Returns a NestedMap of tf.TensorSpec of an example in a bucket of this bound; None: any."""
    raise NotImplementedError(f'_RowSpec of {type(self).__name__}')

  def _Tensors(self) -> nested_map.NestedMap:
    """Returns a NestedMap of the tensors that rows are made from; workers get a copy of it."""
    raise NotImplementedError(f'_Tensors of {type(self).__name__}')

  def _Rows(
    self,
    tensors: nested_map.NestedMap,
    indices: tf.Tensor,
    length: tf.Tensor,
    example_weights: tf.Tensor,
  ) -> nested_map.NestedMap:
    """Returns a NestedMap of tensors [batch, ...] of some examples, each made independently.

    Consists of operations only, and runs in the graph of a tf.data pipeline or on a worker.

    Args:
      tensors: the result of `_Tensors`, or a copy.
      indices: int64 [batch].
      length: int64 [], the bound of the bucket; longer examples are truncated.
      example_weights: float32 [batch], 0 for padded rows; weights of tokens are multiplied by it.
    """
    raise NotImplementedError(f'_Rows of {type(self).__name__}')

  # Called by trainers and evaluators.

  def NumExamples(self) -> int:
    """Returns the number of examples in use."""
    return self._used.size

  def BatchSpecs(self) -> list[nested_map.NestedMap]:
    """Returns the shape of each bucket's batches, in the order of p.bucket_upper_bound."""
    return [
      self._BatchSpec(limit, bound)
      for limit, bound in zip(self._limits, self.params.bucket_upper_bound, strict=True)
    ]

  def BatchSpec(self) -> nested_map.NestedMap:
    """Returns the shape with the most tokens, and among equals with the longest examples."""
    shapes = zip(self._limits, self.params.bucket_upper_bound, strict=True)
    return self._BatchSpec(*max(shapes, key=lambda shape: (shape[0] * shape[1], shape[1])))

  def _BatchSpec(self, limit: int | None, bound: int | None) -> nested_map.NestedMap:
    spec = nested_map.NestedMap(self._RowSpec(bound))
    spec.example_weights = tf.TensorSpec([], tf.float32)
    return spec.Transform(lambda s: tf.TensorSpec([limit, *s.shape], s.dtype))

  def Dataset(self, start: int = 0) -> tf.data.Dataset:
    """See the base class; each batch matches an element of `BatchSpecs()`."""
    p = self.params
    parallel: dict[str, Any] = {}
    if p.num_parallel_calls != 1:
      parallel = {'num_parallel_calls': p.num_parallel_calls, 'deterministic': True}
    make = functools.partial(self.Rows, self.Tensors())
    dataset = self.BatchRows(start).map(make, **parallel)
    return dataset.prefetch(p.num_prefetch) if p.num_prefetch else dataset

  def BatchRows(self, start: int) -> tf.data.Dataset:
    """Returns the arguments of `Rows` for the batches from a position on.

    NumPy draws them in this process.

    Returns:
      tf.data.Dataset of (indices int64 [batch], example_weights float32 [batch], length int64 []).
    """
    p = self.params
    order = self._order
    first = order.BatchAt(self._CheckStart(start))
    if order.Position(first) != start:
      logging.warning(
        '%s: position %d is within a batch: resuming with the next batch, at %d. Were the buckets '
        'changed?', self._Context('bucket_batch_limit'), start, order.Position(first),
      )  # fmt: skip

    # Without AutoGraph an exception keeps its type and line.
    @tf.autograph.experimental.do_not_convert
    def RowsAt(number: tf.Tensor) -> tuple[tf.Tensor, ...]:
      values = tf.numpy_function(self._RowValues, [number], [spec.dtype for spec in ROWS_SPEC])
      return tuple(
        tf.ensure_shape(value, spec.shape) for value, spec in zip(values, ROWS_SPEC, strict=True)
      )

    if p.num_epochs:
      numbers = tf.data.Dataset.range(first, max(first, p.num_epochs * order.num_batches))
    else:
      numbers = tf.data.Dataset.counter(first, dtype=tf.int64)
    return self._DisableTuner(numbers.map(RowsAt))

  def Tensors(self) -> nested_map.NestedMap:
    """Returns the tensors that `Rows` takes, on this host."""
    with tf.init_scope(), tf.device('/device:CPU:0'):
      return self._Tensors()

  @tf.autograph.experimental.do_not_convert
  def Rows(
    self,
    tensors: nested_map.NestedMap,
    indices: tf.Tensor,
    example_weights: tf.Tensor,
    length: tf.Tensor,
  ) -> nested_map.NestedMap:
    """Returns the batch of some rows of one order.

    `tensors` may be a copy, so that any host can make the batch.

    Raises:
      ValueError: the batch does not match the spec.
    """
    batch = nested_map.NestedMap(self._Rows(tensors, indices, length, example_weights))
    batch.example_weights = example_weights
    # Dimensions that differ between buckets are unknown in this spec, but static in every batch.
    self._CheckMatches(batch, self._BatchSpec(None, None), '_Rows')
    return batch

  def PositionAfter(self, position: int, num_rows: int) -> int:
    """See the base class; padded rows count here."""
    return position + num_rows

  def NumBatches(self, start: int = 0) -> int | None:
    """Returns the number of batches from position `start` on; None if they never end."""
    if not self.params.num_epochs:
      return None
    end = self.params.num_epochs * self._order.num_batches
    return max(0, end - self._order.BatchAt(self._CheckStart(start)))

  def _RowValues(self, number: np.int64) -> tuple[np.ndarray, np.ndarray, np.int64]:
    batch = self._order.Batch(int(number))
    weights = (np.arange(batch.indices.size) < batch.num_real).astype(np.float32)
    length = self.params.bucket_upper_bound[batch.bucket]
    return self._used[batch.indices], weights, np.int64(length)

  def _FingerprintParts(self) -> list[Any]:
    p = self.params
    # These define the meaning of a position, in addition to the data.
    return ['buckets', list(p.bucket_upper_bound), self._limits, float(p.sampling_temperature)]

  # The examples in use, and their order.

  @functools.cached_property
  def _used(self) -> np.ndarray:
    """int64 [NumExamples()]: the indices of the examples in use, ascending."""
    bound = self.params.bucket_upper_bound[-1]
    too_long, is_empty = self._Lengths() > bound, self._IsEmpty()
    self._Warn(too_long, f'are longer than {bound}, the last bucket_upper_bound', 'truncated')
    self._Warn(is_empty, 'have an empty side', 'used as they are')
    if not self.params.shuffle:
      return np.arange(too_long.size)
    return np.flatnonzero(~(too_long | is_empty))

  def _Warn(self, is_affected: np.ndarray, predicate: str, use_in_evaluation: str) -> None:
    if is_affected.any():
      use = 'left out' if self.params.shuffle else use_in_evaluation
      name = f'{type(self).__name__} {self.params.name!r}'
      num_affected = is_affected.sum()
      logging.warning(
        '%s: %d of %d examples %s: they are %s',
        name,
        num_affected,
        is_affected.size,
        predicate,
        use,
      )

  @functools.cached_property
  def _order(self) -> bucket_order.BucketOrder:
    p = self.params
    groups = self._Groups()[self._used]
    counts = np.bincount(groups, minlength=len(self._GroupNames()))
    if p.shuffle and not counts.all():
      empty = [name for name, n in zip(self._GroupNames(), counts, strict=True) if not n]
      raise ValueError(
        f'{type(self).__name__} {p.name!r}: no usable example of {", ".join(empty)}: all are '
        f'empty or longer than {p.bucket_upper_bound[-1]}. Leave out such languages, or raise the '
        'last bucket_upper_bound'
      )
    self._CheckNumExamples()
    lengths = np.minimum(self._Lengths()[self._used], p.bucket_upper_bound[-1])
    order = bucket_order.BucketOrder(
      np.searchsorted(p.bucket_upper_bound, lengths),
      groups,
      self._limits,
      random_seed=p.random_seed,
      shuffle=p.shuffle,
      temperature=p.sampling_temperature,
    )
    buckets = zip(p.bucket_upper_bound, self._limits, order.Draws(), strict=True)
    logging.info(
      '%s %r: %d examples; an epoch has %s', type(self).__name__, p.name, self.NumExamples(),
      ', '.join(f'{n} up to length {bound} in batches of {limit}' for bound, limit, n in buckets),
    )  # fmt: skip
    return order
