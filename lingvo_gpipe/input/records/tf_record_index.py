# SPDX-License-Identifier: Apache-2.0
"""Records of TFRecord files by index, read by TensorFlow's operations alone."""

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

# Who looks where records begin waits for the disk, mostly.
_FILES_AT_ONCE = 16


class FileRange(NamedTuple):
  """Records of a file, one after another.

  Attributes:
    path: of a file without compression; any path that tf.io.gfile takes.
    skip: the records before the first of these.
    take: how many there are.
    num_records: how many the whole file should have.
  """

  path: str
  skip: int
  take: int
  num_records: int


class TfRecordIndex:
  """The records of some parts of files, one part after another.

  Attributes:
    begins: the bytes where they begin in their files, int64 [records].
  """

  def __init__(self, parts: Sequence[FileRange], where: str = '', damaged: str = 'stop') -> None:
    """Finds where the records begin, from their lengths alone; what is in them is not read.

    Args:
      parts: where they are.
      where: what names the param `damaged` in messages; '' where there is none.
      damaged: one of `tf_records.POLICIES`; 'skip' reads the files through, and leaves out damaged
        records.

    Raises:
      ValueError: with 'stop', a file is damaged, or has not as many records as it should.
    """
    began = time.monotonic()
    find = functools.partial(tf_records.RecordLocations, where=where, damaged=damaged)
    places = {}
    self._where = where if damaged == 'stop' else ''  # For messages: skip is set already.
    with concurrent.futures.ThreadPoolExecutor(_FILES_AT_ONCE) as threads:
      paths = list(dict.fromkeys(part.path for part in parts))
      for path, found in zip(paths, threads.map(find, paths), strict=True):
        heartbeat.Long()  # Who looks into many files takes long, and does not hang.
        places[path] = found
    self._paths = [part.path for part in parts]
    for path, _, _, num_records in parts:
      if damaged == 'stop':
        tf_records.CheckCount(path, len(places[path]), num_records)
    of_parts = [np.empty([0, 3], np.int64)]  # There may be no parts.
    for path, skip, take, _ in parts:
      first, last = np.searchsorted(places[path][:, 0], [skip, skip + take])
      of_parts.append(places[path][first:last])
    counts = [len(x) for x in of_parts]
    self._parts = np.repeat(np.arange(-1, len(parts), dtype=np.int32), counts)
    _, self.begins, self._sizes = np.concatenate(of_parts).T.copy()
    seconds = time.monotonic() - began
    logging.info('found %d records of %d files in %.1f s', len(self.begins), len(paths), seconds)

  def Read(self, index: tf.Tensor) -> tf.Tensor:
    """The record of an index, an integer scalar -> string scalar; its checksums are checked.

    The operation fails with DataLossError where they are wrong; see `Explain`.
    """
    paths, parts, begins, sizes = self._tensors
    return tf_records.ReadRecord(paths[parts[index]], begins[index], sizes[index])

  def Explain(self, error: tf.errors.DataLossError) -> Exception:
    """What to raise in place of an error of `Read`: one that names file and record, if found."""
    # TensorFlow tells the byte where the record begins, or where what it holds does.
    told = np.array(re.findall(r' at (\d+)', error.message), np.int64)
    for part in np.unique(self._parts[np.isin(self.begins, [told, told - 12])]):
      try:
        tf_records.RaiseDamage([self._paths[part]], self._where)
      except ValueError as e:
        return e
      except files.FILE_ERRORS:  # It may be gone by now.
        pass
    return error

  @functools.cached_property
  def _tensors(self) -> tuple[tf.Tensor, ...]:
    # Made outside of the graph of a tf.data pipeline, they are inputs of it and not constants.
    with tf.init_scope(), tf.device('/device:CPU:0'):
      return tuple(map(tf.constant, (self._paths, self._parts, self.begins, self._sizes)))
