# SPDX-License-Identifier: Apache-2.0
"""Reads records of TFRecord files by index, with TensorFlow operations only."""

from __future__ import annotations

import concurrent.futures
import functools
import re
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from lingvo_gpipe.core import files, heartbeat
from lingvo_gpipe.input.records import tf_records

# Locating records mostly waits for the disk.
_FILES_AT_ONCE = 16


class FileRange(NamedTuple):
  """Consecutive records of a file.

  Attributes:
    path: an uncompressed file; any path that tf.io.gfile takes.
    skip: number of records before the first record of the range.
    take: number of records in the range.
    num_records: number of records that the whole file should have.
  """

  path: str
  skip: int
  take: int
  num_records: int


class TfRecordIndex:
  """The records of several file ranges, concatenated.

  Attributes:
    begins: int64 [records], the byte offset of each record in its file.
  """

  def __init__(self, parts: Sequence[FileRange], context: str = '', damaged: str = 'stop') -> None:
    """Locates the records by their lengths alone, without reading their contents.

    Args:
      parts: the ranges.
      context: name of the param `damaged` in messages; '' if there is no such param.
      damaged: one of `tf_records.POLICIES`; 'skip' reads the files completely and leaves out
        damaged records.

    Raises:
      ValueError: with 'stop', a file is damaged or has a wrong number of records.
      OSError: a file cannot be read.
    """
    began = time.monotonic()
    locate = functools.partial(_Locations, context=context, damaged=damaged)
    locations: dict[str, np.ndarray] = {}
    self._context = context if damaged == 'stop' else ''  # For messages that suggest to skip.
    with concurrent.futures.ThreadPoolExecutor(_FILES_AT_ONCE) as threads:
      paths = list(dict.fromkeys(part.path for part in parts))
      for path, file_locations in zip(paths, threads.map(locate, paths), strict=True):
        heartbeat.SuspendTimeout()  # Reading many files is slow, not hung: suspend the timeout.
        locations[path] = file_locations
    self._paths = [part.path for part in parts]
    for path, _, _, num_records in parts:
      if damaged == 'stop':
        tf_records.CheckCount(path, len(locations[path]), num_records)
    part_locations = [np.empty([0, 3], np.int64)]  # For an index without parts.
    for path, skip, take, _ in parts:
      first, last = np.searchsorted(locations[path][:, 0], [skip, skip + take])
      part_locations.append(locations[path][first:last])
    counts = [len(x) for x in part_locations]
    self._parts = np.repeat(np.arange(-1, len(parts), dtype=np.int32), counts)
    _, self.begins, self._sizes = np.concatenate(part_locations).T.copy()
    seconds = time.monotonic() - began
    logging.info('located %d records of %d files in %.1f s', len(self.begins), len(paths), seconds)

  def Read(self, index: tf.Tensor) -> tf.Tensor:
    """Returns the record at an index, an integer scalar, as a string scalar.

    The operation checks the checksums of the record and fails with DataLossError if they are wrong;
    see `Explain`.
    """
    paths, parts, begins, sizes = self._tensors
    return tf_records.ReadRecord(paths[parts[index]], begins[index], sizes[index])

  def Explain(self, error: tf.errors.DataLossError) -> Exception:
    """Returns the exception to raise for an error of `Read`.

    It names the file and the record, if they can be determined; otherwise it is `error`.
    """
    # TensorFlow's message has the byte offset of the record, or of the record's contents after the
    # header of 12 bytes.
    offsets = np.array(re.findall(r' at (\d+)', error.message), np.int64)
    for part in np.unique(self._parts[np.isin(self.begins, [offsets, offsets - 12])]):
      try:
        tf_records.RaiseDamage([self._paths[part]], self._context)
      except ValueError as e:
        return e
      except files.FILE_ERRORS:  # The file may be gone by now.
        pass
    return error

  @functools.cached_property
  def _tensors(self) -> tuple[tf.Tensor, ...]:
    # Created outside the graph of a tf.data pipeline, they are its inputs and not its constants.
    with tf.init_scope(), tf.device('/device:CPU:0'):
      return tuple(map(tf.constant, (self._paths, self._parts, self.begins, self._sizes)))


def _Locations(path: str, context: str, damaged: str) -> np.ndarray:
  with files.Reading(path, 'records'):
    return tf_records.RecordLocations(path, context, damaged)
