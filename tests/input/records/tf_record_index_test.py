# SPDX-License-Identifier: Apache-2.0
"""Reads records by index equal to the files; names damaged records."""

import random
import re
import sys

import pytest
import tensorflow as tf

from lingvo_gpipe.input.records import tf_record_index
from tests import naming

_RNG = random.Random(1)
# Long records exceed the read buffer.
_RECORDS = [[_RNG.randbytes(size) for size in sizes] for sizes in ((5, 0, 900_000), (7, 1, 40, 3))]


@pytest.fixture
def paths(tmp_path):
  written = []
  for i, records in enumerate(_RECORDS):
    written.append(tmp_path / f'{i}.tfrecord')
    with tf.io.TFRecordWriter(str(written[-1])) as writer:
      for record in records:
        writer.write(record)
  return written


def _Index(paths, damaged='stop'):
  parts = [
    tf_record_index.FileRange(str(path), 0, len(records), len(records))
    for path, records in zip(paths, _RECORDS, strict=True)
  ]
  return tf_record_index.TfRecordIndex(parts, 'the param', damaged)


def testRecordsOfRangesAreReadInAnyOrder(paths):
  index = tf_record_index.TfRecordIndex(
    [
      tf_record_index.FileRange(str(paths[0]), 1, 2, 3),
      tf_record_index.FileRange(str(paths[1]), 0, 4, 4),
      tf_record_index.FileRange(str(paths[0]), 0, 1, 3),
    ]
  )
  expected = _RECORDS[0][1:] + _RECORDS[1] + _RECORDS[0][:1]
  order = [3, 6, 0, 1, 5, 2, 4, 3]
  records = tf.data.Dataset.from_tensor_slices(order).map(index.Read).as_numpy_iterator()
  assert list(records) == [expected[i] for i in order]


def _FlipBit(path, byte):
  data = bytearray(path.read_bytes())
  data[byte] ^= 1
  path.write_bytes(data)


# The checksum of the length, and of a record of one byte, which only reading it finds damaged.
@pytest.mark.parametrize('byte, is_damaged_before', [(23 + 8, False), (23 + 12 + 1, True)])
def testDamagedRecordIsNamedWhenItIsRead(paths, byte, is_damaged_before):
  if is_damaged_before:
    _FlipBit(paths[1], byte)
  index = _Index(paths)
  if not is_damaged_before:
    _FlipBit(paths[1], byte)
  with pytest.raises(tf.errors.DataLossError) as caught:
    for i in range(7):
      index.Read(tf.constant(i))
  with pytest.raises(ValueError, match=naming.Naming(paths[1], 'record 2', 'byte 23', 'corrupted')):
    raise index.Explain(caught.value)


def testADamagedLengthIsNamedAtTheStart(paths):
  _FlipBit(paths[1], 23 + 8)
  with pytest.raises(ValueError, match=naming.Naming(paths[1], 'record 2', 'byte 23', 'length')):
    _Index(paths)


@pytest.mark.parametrize('damaged', ['stop', 'skip'])
def testDamageAfterTheStartIsNamed(paths, damaged):
  index = _Index(paths, damaged)
  _FlipBit(paths[1], 12)
  with pytest.raises(tf.errors.DataLossError) as caught:
    index.Read(tf.constant(3))
  with pytest.raises(ValueError, match=naming.Naming(paths[1], 'record 1', 'byte 0')) as explained:
    raise index.Explain(caught.value)
  assert bool(re.search(naming.Naming('param', 'skip'), str(explained.value))) == (
    damaged == 'stop'
  )


@pytest.mark.parametrize('damaged', ['stop', 'skip'])
def testAMissingFileIsNamed(paths, damaged):
  paths[1].unlink()
  with pytest.raises(OSError, match=naming.Naming(f"'{paths[1]}'", 'read')):
    _Index(paths, damaged)


@pytest.mark.parametrize('damaged', ['stop', 'skip'])
def testIndexWithoutRangesIsEmpty(damaged):
  assert tf_record_index.TfRecordIndex([], '', damaged).begins.size == 0


def testErrorOfAnotherFileIsUnchanged(paths):
  error = tf.errors.DataLossError(None, None, 'truncated record at 1')
  assert _Index(paths).Explain(error) is error


@pytest.mark.parametrize(
  'damage, names',
  [
    (lambda data: data[:-1], ('record 4', 'truncated')),
    (lambda data: data[:-15], ('record 4', 'byte 96', 'truncated')),  # In its length.
    (lambda data: data[:-19], ('3 records', 4)),
    (lambda data: b'\1\1' + data[2:], ('record 1', 'byte 0', 'corrupted')),
    (lambda data: b'no record at all', ('TFRecord', 'record 1', 'byte 0')),
  ],
)
def testIncompleteFilesAreNamed(paths, damage, names):
  paths[1].write_bytes(damage(paths[1].read_bytes()))
  with pytest.raises(ValueError, match=naming.Naming(paths[1], *names)):
    _Index(paths)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
