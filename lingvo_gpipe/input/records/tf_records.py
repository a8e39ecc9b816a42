# SPDX-License-Identifier: Apache-2.0
"""Reads the records of a TFRecord file; damaged records raise, or are skipped and counted."""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from lingvo_gpipe.core import domain, files, heartbeat, hyperparams
from lingvo_gpipe.distributed import host_memory

# Policies for a record with a wrong checksum.
POLICIES = ('stop', 'skip')
_POLICY = 'On a wrong checksum: stop, or skip and count, which reads all files at the start.'

# Layout of a record: its length (uint64), the checksum of the length, the bytes, their checksum.
_HEADER = struct.Struct('<QI')
_CHECKSUM = struct.Struct('<I')
_OVERHEAD = _HEADER.size + _CHECKSUM.size

# The default of TensorFlow.
_BUFFER_BYTES = 2**18
# Start of the URL of a file of this machine.
_LOCAL = 'file://'


def DefinePolicy(p: hyperparams.Params) -> None:
  """Defines the param `damaged_records`, one of `POLICIES`."""
  p.Define('damaged_records', 'stop', _POLICY, domain.OneOf(*POLICIES))


def Dataset(path: str | tf.Tensor, first_byte: int | tf.Tensor = 0) -> tf.data.Dataset:
  """Returns the records of a file, strings, from a byte offset on.

  Args:
    path: any path that tf.io.gfile takes; an uncompressed file.
    first_byte: int64 scalar, the offset of the first record.
  """
  # TensorFlow 2.21 cannot make an iterator over a data set from a variant itself, only over a data
  # set that contains it.
  first_bytes = tf.data.Dataset.from_tensors(tf.cast(first_byte, tf.int64))
  return first_bytes.flat_map(functools.partial(_DatasetFrom, path))


def ReadRecord(path: str | tf.Tensor, first_byte: tf.Tensor, num_bytes: tf.Tensor) -> tf.Tensor:
  """Returns one record of a file, a string scalar.

  The operation fails with DataLossError if the checksums are wrong.

  Args:
    path: any path that tf.io.gfile takes; an uncompressed file.
    first_byte: int64 scalar, the offset of the record.
    num_bytes: int64 scalar, the size of the record in the file; this many bytes are read.
  """
  return _DatasetFrom(path, first_byte, num_bytes).take(1).get_single_element()


def _DatasetFrom(
  path: str | tf.Tensor, byte: tf.Tensor, buffer_bytes: int | tf.Tensor = _BUFFER_BYTES
) -> tf.data.Dataset:
  variant = tf.raw_ops.TFRecordDatasetV2(
    filenames=path, compression_type='', buffer_size=buffer_bytes, byte_offsets=byte
  )
  return tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string))


def RecordOffsets(path: str, context: str = '') -> np.ndarray:
  """Returns the byte offsets of a file's records, and its size: int64 [records + 1].

  Reads only the lengths of the records: their contents may be damaged.

  Args:
    path: any path that tf.io.gfile takes; an uncompressed file.
    context: name of the param that sets the policy, for messages; '' if there is no such param.

  Raises:
    ValueError: a length is damaged, or the file is not a TFRecord file.
  """
  offsets = _Offsets(path)
  if offsets[-1] != tf.io.gfile.stat(path).length:
    RaiseDamage([path], context)
  return np.array(offsets, np.int64)


def LengthsFit(path: str) -> bool:
  """Whether the lengths of a file's records are intact and add up to the size of the file.

  TensorFlow allocates the length of a record before it reads the record, and crashes if there is
  too little memory. So no operation may read a file whose lengths do not fit.
  """
  return _Offsets(path)[-1] == tf.io.gfile.stat(path).length


def _Offsets(path: str) -> list[int]:
  """Returns the byte offsets of records: up to the file's size, or the first damaged length."""
  size = tf.io.gfile.stat(path).length
  offsets = [0]
  with _Open(path) as f:
    while offsets[-1] < size:
      end, damage = _RecordEnd(f, offsets[-1], size)
      if damage:
        break
      offsets.append(end)
  return offsets


def IsOnThisMachine(path: str) -> bool:
  """Whether a file is on this machine: then reading its lengths does not read all of it."""
  return os.path.exists(path.removeprefix(_LOCAL)) or path.startswith('ram://')


def _Open(path: str) -> Any:
  """Opens a file for reading a few bytes here and there."""
  local = path.removeprefix(_LOCAL)
  # `GFile` would read half a MiB after each seek.
  return open(local, 'rb', 0) if os.path.exists(local) else tf.io.gfile.GFile(path, 'rb')


def Records(
  path: str, context: str = '', damaged: str = 'stop'
) -> Iterator[tuple[int, bytes | None]]:
  """Yields (number from 1, bytes) of the records of a file, with None for a damaged record.

  After a damaged length no further record can be found.

  Args:
    path: any path that tf.io.gfile takes; an uncompressed file.
    context: name of the param that sets the policy, for messages; '' if there is no such param.
    damaged: one of `POLICIES`: raise, or continue and log the number of damaged records at the end.

  Raises:
    ValueError: with 'stop', a record is damaged or the file is not a TFRecord file.
  """
  for number, (_, record) in enumerate(_Records(path, context, damaged), 1):
    yield number, record


def RaiseDamage(paths: Iterable[str], context: str = '') -> None:
  """Raises the error of `Records` for the first damaged record of some files, if any."""
  for path in paths:
    for _ in Records(path, context):
      pass


def CheckCount(path: str, num_records: int, expected: int) -> None:
  """Raises ValueError if a file has a wrong number of records."""
  if num_records != expected:
    raise ValueError(f'{path} has {num_records:,} records, expected {expected:,}: restore it')


def IsIntact(path: str) -> bool:
  """Whether all records of a file are intact; faster than `Records`."""

  heartbeat.SuspendTimeout()  # Reading many files is slow, not hung: suspend the timeout.
  if not LengthsFit(path):
    return False
  options = tf.data.Options()
  options.autotune.enabled = False  # A tuner may wait for a minute, see `_Records`.
  try:
    records = tf.data.TFRecordDataset(path).with_options(options)
    records.reduce(0, lambda number, record: number + 1)
  except tf.errors.DataLossError:
    return False
  return True


def RecordLocations(path: str, context: str = '', damaged: str = 'stop') -> np.ndarray:
  """Returns the numbers from 0, first bytes and sizes of the records of a file: int64 [n, 3].

  Args:
    path: any path that tf.io.gfile takes; an uncompressed file.
    context: name of the param that sets the policy, for messages; '' if there is no such param.
    damaged: one of `POLICIES`. With 'stop' only the lengths are read; with 'skip' the whole file is
      read and damaged records are left out.

  Raises:
    ValueError: with 'stop', a length is damaged or the file is not a TFRecord file.
  """
  if damaged == 'skip' and not IsIntact(path):
    records = enumerate(_Records(path, '', 'skip'))
    locations = [(i, byte, _OVERHEAD + len(x)) for i, (byte, x) in records if x is not None]
    return np.array(locations, np.int64).reshape(-1, 3)
  offsets = RecordOffsets(path, context)
  return np.stack([np.arange(len(offsets) - 1), offsets[:-1], np.diff(offsets)], axis=1)


def IntactRanges(path: str) -> tuple[list[tuple[int, int]], int]:
  """Reads a file completely and returns the ranges of its intact records.

  Returns:
    [(first byte, number of records)], with -1 records for the rest of the file; and the number of
    damaged records.
  """
  if IsIntact(path):
    return [(0, -1)], 0
  ranges, num_damaged = [(0, 0)], 0
  follows_damage = False
  for first_byte, record in _Records(path, '', 'skip'):
    if record is None:
      num_damaged += 1
    elif follows_damage:
      ranges.append((first_byte, 1))
    else:
      ranges[-1] = (ranges[-1][0], ranges[-1][1] + 1)
    follows_damage = record is None
  return ranges, num_damaged


def _Records(path: str, context: str, damaged: str) -> Iterator[tuple[int, bytes | None]]:
  """Yields (first byte, bytes) of each record; otherwise like `Records`."""
  number = num_damaged = offset = 0
  size = tf.io.gfile.stat(path).length
  with tf.device('/device:CPU:0'):
    first_byte = tf.Variable(0, dtype=tf.int64)
  # A pipeline is slow to make, so there is one: after a damaged record it continues from this byte.
  parts = tf.data.Dataset.counter().flat_map(lambda _: _DatasetFrom(path, first_byte.read_value()))
  options = tf.data.Options()
  options.experimental_optimization.apply_default_optimizations = False  # They read ahead.
  # With a tuner the end of the iterator may wait, see BaseInputGenerator._DisableTuner.
  options.autotune.enabled = False
  records = parts.with_options(options).as_numpy_iterator()
  heartbeat.SuspendTimeout()
  with _Open(path) as f:
    while offset < size:
      end, damage = _RecordEnd(f, offset, size)
      record = error = None
      if not damage:
        try:
          record = next(records)
        except tf.errors.DataLossError as e:
          error, damage = e, files.OneLine(e)
      if damage and damaged == 'stop':
        hint = f'; to leave out such records, set {context} to skip' if context else ''
        raise ValueError(
          f'{path} is damaged, or not a TFRecord file: record {number + 1}, at byte {offset:,}: '
          f'{damage}. Restore the file{hint}'
        ) from error
      yield offset, record
      number += 1
      if damage:
        heartbeat.SuspendTimeout()
        num_damaged += 1
        if error is None:
          logging.warning('%s: no record can be found in the last %d bytes', path, size - offset)
        first_byte.assign(end)
      offset = end
  if num_damaged:
    logging.warning('%s: %d of %d records are damaged and were skipped', path, num_damaged, number)


def _RecordEnd(f: Any, offset: int, size: int) -> tuple[int, str]:
  """Returns the byte offset after a record, and the damage of its length: '' if there is none.

  After a damaged length, the offset is the size of the file.
  """
  f.seek(offset)
  header = f.read(_HEADER.size)
  if len(header) < _HEADER.size:
    return size, 'truncated record'
  length, checksum = _HEADER.unpack(header)
  if checksum != _LengthChecksum(length):
    return size, 'corrupted length'
  end = offset + _OVERHEAD + length
  if end > size:
    return size, f'truncated record: {end - offset:,} bytes expected, {size - offset:,} are left'
  if length > _Memory():  # In a sparse file any length fits.
    return size, f'record of {length:,} bytes, more than the memory'
  return end, ''


_Memory = functools.cache(host_memory.Bytes)


@functools.lru_cache(1 << 16)  # Lengths repeat, and checksums take long in Python.
def _LengthChecksum(length: int) -> int:
  return MaskedChecksum(length.to_bytes(8, 'little'))


def _Table() -> list[int]:
  """Returns the CRC-32C (Castagnoli, reflected polynomial 0x82f63b78) of each byte."""
  table = []
  for value in range(256):
    for _ in range(8):
      value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    table.append(value)
  return table


_TABLE = _Table()


def MaskedChecksum(data: bytes) -> int:
  """Returns the checksum in TFRecord files: CRC-32C, rotated, plus a constant."""
  checksum = 0xFFFFFFFF
  for byte in data:
    checksum = _TABLE[(checksum ^ byte) & 0xFF] ^ checksum >> 8
  checksum ^= 0xFFFFFFFF
  return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF
