# SPDX-License-Identifier: Apache-2.0
"""Streams the records of TFRecord files; damaged records end the run or are left out."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import domain, files, heartbeat, hyperparams, nested_map
from lingvo_gpipe.input import file_pattern, index_order, stream_input
from lingvo_gpipe.input.records import tf_records

# With shuffle, records of this many files are interleaved.
_FILES_AT_ONCE = 4


class TfRecordStream(stream_input.BaseStreamInput):
  """Examples from uncompressed TFRecord files.

  A subclass implements `_Example(record)`. With `shuffle` each epoch has its own order of the
  files. To skip damaged records, all files are read completely at the start. Otherwise only the
  lengths of records in files of this machine are checked at the start: tf.data takes a file that is
  truncated within a length for a complete one, and a huge length ends the process. Files must not
  change after that.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of a stream of records."""
    p = super().Params()
    p.Define(
      'file_pattern',
      '',
      'Glob of the files, or a list of globs; any tf.io.gfile path.',
      domain.STR | domain.STRINGS,
    )
    tf_records.DefinePolicy(p)
    return p

  def _Example(self, record: tf.Tensor) -> nested_map.NestedMap:
    """Returns the example of a record, a scalar string: NestedMap of tensors [...].

    The restrictions on `_Stream` apply here, too.
    """
    raise NotImplementedError(f'_Example of {type(self).__name__}')

  def Explain(self, error: Exception) -> Exception:
    """See the base class; names the damaged file and record."""
    if isinstance(error, tf.errors.DataLossError):
      is_skipped = self.params.damaged_records == 'skip'
      context = '' if is_skipped else self._Context('damaged_records')
      try:
        tf_records.RaiseDamage(itertools.filterfalse(tf_records.IsIntact, self._files), context)
      except ValueError as e:
        return e
      except files.FILE_ERRORS as e:  # The file may be gone by now.
        return super().Explain(e)
    return super().Explain(error)

  def NumDamaged(self) -> int:
    """See the base class."""
    return sum(num_damaged for _, num_damaged in self._parts)

  def PipelineDigest(self) -> str:
    """See the base class; depends on the file names, too, as a state refers to files by number."""
    parts = [super().PipelineDigest(), *map(os.path.basename, self._files)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

  def _Stream(self, epoch: tf.Tensor) -> tf.data.Dataset:
    p = self.params
    paths = tf.constant(self._files)
    all_parts = tf.constant([part for parts, _ in self._parts for part in parts], tf.int64)
    borders = tf.constant([0, *itertools.accumulate(len(parts) for parts, _ in self._parts)])

    def Records(file: tf.Tensor) -> tf.data.Dataset:
      first_bytes, counts = tf.unstack(all_parts[borders[file] : borders[file + 1]], axis=1)

      def Part(first_byte: tf.Tensor) -> tf.data.Dataset:
        # The state of an iterator holds the first byte of a range. If it is not in this list any
        # more, files were damaged or repaired since, and -1 reads to the end of the file.
        count = tf.reduce_max(tf.where(first_bytes == first_byte, counts, -1))
        return tf_records.Dataset(paths[file], first_byte).take(count)

      return tf.data.Dataset.from_tensor_slices(first_bytes).flat_map(Part)

    indices = tf.data.Dataset.range(len(self._files))
    if p.shuffle:
      seed = tf.cast(index_order.TensorHash64(p.random_seed, epoch), tf.int64)
      indices = indices.shuffle(len(self._files), seed, reshuffle_each_iteration=False)
    records = indices.interleave(Records, cycle_length=_FILES_AT_ONCE if p.shuffle else 1)
    return records.map(self._Example)

  def _FingerprintParts(self) -> list[Any]:
    return ['tf_records'] + [
      (os.path.basename(path), tf.io.gfile.stat(path).length) for path in self._files
    ]

  @functools.cached_property
  def _files(self) -> list[str]:
    return file_pattern.Files(self.params.file_pattern, self._Context('file_pattern'))

  @functools.cached_property
  def _parts(self) -> list[tuple[list[tuple[int, int]], int]]:
    """Returns the intact ranges of each file, and its number of damaged records."""
    if self.params.damaged_records == 'stop':
      for path in filter(tf_records.IsOnThisMachine, self._files):
        heartbeat.SuspendTimeout()  # Reading many records is slow, not hung: suspend the timeout.
        tf_records.RecordOffsets(path, self._Context('damaged_records'))
      return [([(0, -1)], 0)] * len(self._files)
    with tf.init_scope():  # Run now, not in the graph of a pipeline.
      return [tf_records.IntactRanges(path) for path in self._files]
