# SPDX-License-Identifier: Apache-2.0
"""The records of a TFRecord file; damaged ones end the reading, or are skipped and counted."""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from lingvo_gpipe.core import files, heartbeat, hyperparams

# What to do where a record's checksum is wrong.
POLICIES = ('stop', 'skip')
_POLICY = 'Where a checksum is wrong: stop, or skip and count; then all is read at the start.'

# A record is its length (uint64) and the length's checksum, the bytes, and their checksum.
_HEADER = struct.Struct('<QI')
_CHECKSUM = struct.Struct('<I')
_AROUND = _HEADER.size + _CHECKSUM.size

# What TensorFlow chooses by itself.
_BUFFER_BYTES = 2**18


def DefinePolicy(p: hyperparams.Params) -> None:
  """Defines the param that is one of `POLICIES`."""
  p.Define('damaged_records', 'stop', _POLICY)


def CheckPolicy(policy: Any, where: str) -> None:
  """Raises ValueError, which names the param, where it is none of `POLICIES`."""
  if policy not in POLICIES:
    raise ValueError(f'{where}: expected {" or ".join(POLICIES)}, got {policy!r}')


def Dataset(path: str | tf.Tensor, first_byte: int | tf.Tensor = 0) -> tf.data.Dataset:
  """The records of a file, strings, from the one on that begins at a byte.

  Args:
    path: any path that tf.io.gfile takes; a file without compression.
    first_byte: int64 scalar.
  """
  # Seen in TensorFlow 2.21: an iterator cannot be made of it, but of what it is a part of.
  first_bytes = tf.data.Dataset.from_tensors(tf.cast(first_byte, tf.int64))
  return first_bytes.flat_map(functools.partial(_From, path))


def ReadRecord(path: str | tf.Tensor, first_byte: tf.Tensor, num_bytes: tf.Tensor) -> tf.Tensor:
  """One record of a file, a string scalar; DataLossError where its checksums are wrong.

  Args:
    path: as for `Dataset`.
    first_byte: int64 scalar, where it begins.
    num_bytes: int64 scalar, what it takes in the file: so much is read.
  """
  return _From(path, first_byte, num_bytes).take(1).get_single_element()


def _From(
  path: str | tf.Tensor, byte: tf.Tensor, buffer_bytes: int | tf.Tensor = _BUFFER_BYTES
) -> tf.data.Dataset:
  variant = tf.raw_ops.TFRecordDatasetV2(
    filenames=path, compression_type='', buffer_size=buffer_bytes, byte_offsets=byte
  )
  return tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string))


def RecordOffsets(path: str, where: str = '') -> np.ndarray:
  """The bytes where the records of a file begin, and its size: int64 [records + 1].

  Only their lengths are read: what is in them may be damaged.

  Args:
    path: as for `Dataset`.
    where: as for `Records`.

  Raises:
    ValueError: a length is damaged, or the file is none of TFRecords.
  """
  size = tf.io.gfile.stat(path).length
  borders = [0]
  # TensorFlow's own files would read half a MiB after each seek.
  with open(path, 'rb', 0) if os.path.exists(path) else tf.io.gfile.GFile(path, 'rb') as f:
    while borders[-1] < size:
      f.seek(borders[-1])
      borders.append(borders[-1] + _AROUND + int.from_bytes(f.read(8), 'little'))
  if borders[-1] != size:
    RaiseDamage([path], where)
  return np.array(borders, np.int64)


def Records(
  path: str, where: str = '', damaged: str = 'stop'
) -> Iterator[tuple[int, bytes | None]]:
  """Yields (number, bytes) of the records of a file, counted from 1; None for a damaged one.

  Where a length is damaged, nothing behind it can be found.

  Args:
    path: as for `Dataset`.
    where: what names the param `damaged` in messages; '' where there is none.
    damaged: one of `POLICIES`: raise, or go on; a warning at the end counts them.

  Raises:
    ValueError: a record is damaged, or the file is none of TFRecords.
  """
  for number, (_, record) in enumerate(_Records(path, where, damaged), 1):
    yield number, record


def RaiseDamage(paths: Iterable[str], where: str = '') -> None:
  """Raises the error of `Records` for the first damaged record of some files, if there is one."""
  for path in paths:
    for _ in Records(path, where):
      pass


def CheckCount(path: str, num_records: int, expected: int) -> None:
  """Raises ValueError where a file has not as many records as it should."""
  if num_records != expected:
    raise ValueError(f'{path} has {num_records:,} records, expected {expected:,}: restore it')


def IsIntact(path: str) -> bool:
  """Whether all records of a file are sound; faster than `Records`."""

  def Add(size: tf.Tensor, record: tf.Tensor) -> tf.Tensor:
    return size + _AROUND + tf.cast(tf.strings.length(record), tf.int64)

  heartbeat.Long()  # Who reads many files takes long, and does not hang.
  try:
    # What is too short for a record's length is the end to tf.data.
    size = tf.data.TFRecordDataset(path).reduce(tf.constant(0, tf.int64), Add)
    return int(size) == tf.io.gfile.stat(path).length
  except tf.errors.DataLossError:
    return False


def RecordLocations(path: str, where: str = '', damaged: str = 'stop') -> np.ndarray:
  """Where the records of a file are: their numbers from 0, first bytes and sizes, int64 [n, 3].

  Args:
    path: as for `Dataset`.
    where: as for `Records`.
    damaged: one of `POLICIES`. With 'stop' only the lengths are read; with 'skip' the whole file is
      read and damaged records are left out.

  Raises:
    ValueError: with 'stop', as `RecordOffsets`.
  """
  if damaged == 'skip' and not IsIntact(path):
    found = enumerate(_Records(path, '', 'skip'))
    places = [(i, byte, _AROUND + len(x)) for i, (byte, x) in found if x is not None]
    return np.array(places, np.int64).reshape(-1, 3)
  borders = RecordOffsets(path, where)
  return np.stack([np.arange(len(borders) - 1), borders[:-1], np.diff(borders)], axis=1)


def IntactRanges(path: str) -> tuple[list[tuple[int, int]], int]:
  """Reads a file through, and tells where its sound records are.

  Returns:
    [(byte, number of records from there on)], where -1 are all, and how many are damaged.
  """
  if IsIntact(path):
    return [(0, -1)], 0
  parts, num_damaged = [(0, 0)], 0
  is_behind = False
  for first_byte, record in _Records(path, '', 'skip'):
    if record is None:
      num_damaged += 1
    elif is_behind:
      parts.append((first_byte, 1))
    else:
      parts[-1] = (parts[-1][0], parts[-1][1] + 1)
    is_behind = record is None
  return parts, num_damaged


def _Records(path: str, where: str, damaged: str) -> Iterator[tuple[int, bytes | None]]:
  """As `Records`, but with the byte where each begins in place of its number."""
  number = num_damaged = offset = 0
  size = tf.io.gfile.stat(path).length
  with tf.device('/device:CPU:0'):
    first_byte = tf.Variable(0, dtype=tf.int64)
  # One pipeline, for it takes long to make: behind a damaged record it goes on where this says.
  parts = tf.data.Dataset.counter().flat_map(lambda _: _From(path, first_byte.read_value()))
  options = tf.data.Options()
  options.experimental_optimization.apply_default_optimizations = False  # They read ahead.
  records = parts.with_options(options).as_numpy_iterator()
  while offset < size:
    heartbeat.Long()
    error = None
    try:
      # What is shorter is the end to tf.data.
      while size - offset >= _HEADER.size:
        record = next(records)
        yield offset, record
        number += 1
        offset += _AROUND + len(record)
    except tf.errors.DataLossError as e:
      error = e
    if offset >= size:
      break
    if damaged == 'stop':
      why = 'truncated record' if error is None else files.OneLine(error)
      instead = f'; to go on without such records, set {where} to skip' if where else ''
      raise ValueError(
        f'{path} is damaged, or no TFRecord file: record {number + 1}, at byte {offset:,}: {why}. '
        f'Restore the file{instead}'
      ) from error
    yield offset, None
    number += 1
    num_damaged += 1
    offset = _NextRecordOffset(path, offset, size)
    first_byte.assign(offset)
  if num_damaged:
    logging.warning('%s: %d of %d records are damaged and were skipped', path, num_damaged, number)


def _NextRecordOffset(path: str, offset: int, size: int) -> int:
  """The byte behind the damaged record at another; the file's size where the length is damaged."""
  with tf.io.gfile.GFile(path, 'rb') as f:
    f.seek(offset)
    header = f.read(_HEADER.size)
  if len(header) == _HEADER.size:
    length, checksum = _HEADER.unpack(header)
    behind: int = offset + _AROUND + length
    if checksum == MaskedChecksum(header[:8]) and behind <= size:
      return behind
  logging.warning('%s: the last %d bytes have no records that can be found', path, size - offset)
  return size


def _Table() -> list[int]:
  """CRC-32C (Castagnoli, reflected polynomial 0x82f63b78) of each byte."""
  table = []
  for value in range(256):
    for _ in range(8):
      value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    table.append(value)
  return table


_TABLE = _Table()


def MaskedChecksum(data: bytes) -> int:
  """The checksum that TFRecord files hold: CRC-32C, rotated, plus a constant."""
  checksum = 0xFFFFFFFF
  for byte in data:
    checksum = _TABLE[(checksum ^ byte) & 0xFF] ^ checksum >> 8
  checksum ^= 0xFFFFFFFF
  return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF
