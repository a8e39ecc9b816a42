# SPDX-License-Identifier: Apache-2.0
"""Reads the intact records of a damaged file, or stops at the first damaged record."""

import os
import random
import sys

import pytest
import tensorflow as tf

from lingvo_gpipe.input.records import tf_records
from tests import naming, tf_record_files

_RNG = random.Random(1)
_RECORDS = [_RNG.randbytes(size) for size in (5, 0, 300, 17, 1, 40)]


def _File(tmp_path, changes=(), cut=None):
  """Writes a file of _RECORDS, then changes some bytes and truncates it; returns its path."""
  path = tmp_path / 'some.tfrecord'
  with tf.io.TFRecordWriter(str(path)) as writer:
    for record in _RECORDS:
      writer.write(record)
  starts = [sum(16 + len(r) for r in _RECORDS[:i]) for i in range(len(_RECORDS))]
  data = bytearray(path.read_bytes())
  assert len(data) == starts[-1] + 16 + len(_RECORDS[-1])
  for record, byte in changes:
    data[starts[record] + byte] ^= 0x10
  path.write_bytes(bytes(data)[:cut])
  return str(path)


def _Numbers(path, damaged):
  """Returns the numbers of the records that were read."""
  records = list(tf_records.Records(path, 'the param', damaged))
  assert [number for number, _ in records] == list(range(1, len(records) + 1))
  intact = [(number, record) for number, record in records if record is not None]
  assert all(record == _RECORDS[number - 1] for number, record in intact)
  return [number for number, _ in intact]


@pytest.mark.parametrize('damaged', tf_records.POLICIES)
def testIntactFilesAreReadCompletely(tmp_path, damaged, caplog):
  assert _Numbers(_File(tmp_path), damaged) == [1, 2, 3, 4, 5, 6]
  (tmp_path / 'empty').write_bytes(b'')
  assert _Numbers(str(tmp_path / 'empty'), damaged) == []
  assert not caplog.records


@pytest.mark.parametrize(
  'changes, cut, intact',
  [
    ([(2, 12 + 299)], None, [1, 2, 4, 5, 6]),  # A byte of the record,
    ([(0, 12), (3, 12)], None, [2, 3, 5, 6]),
    ([(i, 12) for i in (0, 1, 2, 4)], None, [4, 6]),
    ([(1, 12)], None, [1, 3, 4, 5, 6]),  # its checksum; an empty record has nothing else.
    ([(5, 12 + 40)], None, [1, 2, 3, 4, 5]),
    ([(3, 0)], None, [1, 2, 3]),  # The length,
    ([(3, 7)], None, [1, 2, 3]),
    ([(3, 8)], None, [1, 2, 3]),  # and its checksum.
    ([], -1, [1, 2, 3, 4, 5]),
    ([], -48, [1, 2, 3, 4, 5]),
    ([(0, 12)], -50, [2, 3, 4, 5]),  # In the last record's header.
  ],
)
def testDamagedRecordsAreSkippedAndCountedOrRaise(tmp_path, caplog, changes, cut, intact):
  path = _File(tmp_path, changes, cut)
  assert _Numbers(path, 'skip') == intact
  warning = caplog.records[-1].getMessage()
  num_skipped = max(len(changes), 1) + (cut == -50)
  assert naming.Names(warning, path, f'{num_skipped} of', 'skipped')
  with pytest.raises(ValueError, match=naming.Naming(path, 'record', 'byte', 'param', 'skip')):
    _Numbers(path, 'stop')


# Lengths that TensorFlow takes for its own memory: it crashes, or fails with another error.
_HUGE = (2**36, 2**62, 2**63, 2**64 - 1)


@pytest.mark.parametrize('length', [500, *_HUGE])
@pytest.mark.parametrize('number, first_byte', [(1, 0), (6, 5 * 16 + 323)])
def testALengthBeyondTheFileIsDamage(tmp_path, length, number, first_byte):
  path = _File(tmp_path)
  tf_record_files.SetLength(path, first_byte, length)
  intact = [*range(1, number)]
  assert _Numbers(path, 'skip') == intact
  with pytest.raises(ValueError, match=naming.Naming(path, f'record {number}', 'truncated')):
    _Numbers(path, 'stop')
  assert not tf_records.IsIntact(path) and not tf_records.LengthsFit(path)
  assert tf_records.RecordLocations(path, '', 'skip')[:, 0].tolist() == [i - 1 for i in intact]
  with pytest.raises(ValueError, match=naming.Naming(path, f'record {number}')):
    tf_records.RecordLocations(path)
  ranges, num_damaged = tf_records.IntactRanges(path)
  assert sum(count for _, count in ranges) == len(intact) and num_damaged == 1


def testALengthBeyondTheMemoryIsDamage(tmp_path, monkeypatch):
  """In a sparse file it fits, and TensorFlow would allocate it."""
  monkeypatch.setattr(tf_records, '_Memory', lambda: 2**20 - 1)
  path = _File(tmp_path)
  tf_record_files.SetLength(path, 0, 2**20)
  os.truncate(path, 2**20 + 16)
  assert not tf_records.LengthsFit(path) and not tf_records.IsIntact(path)
  assert _Numbers(path, 'skip') == []
  with pytest.raises(ValueError, match=naming.Naming(path, 'record 1', 'memory')):
    _Numbers(path, 'stop')


@pytest.mark.parametrize('num_intact', [0, 2])
def testLengthsOfZeroBytesAreDamage(tmp_path, monkeypatch, num_intact):
  """A file of zero bytes looks like a long row of empty records without checksums."""
  path = _File(tmp_path, cut=sum(16 + len(r) for r in _RECORDS[:num_intact]))
  with open(path, 'ab') as f:
    f.write(bytes(16 * 5))
  read = []
  read_length = tf_records._RecordEnd
  monkeypatch.setattr(
    tf_records, '_RecordEnd', lambda *args: read.append(args[1]) or read_length(*args)
  )
  assert not tf_records.LengthsFit(path) and len(read) == num_intact + 1
  assert not tf_records.IsIntact(path)
  message = naming.Naming(path, f'record {num_intact + 1}', 'byte', 'corrupted length', 'param')
  with pytest.raises(ValueError, match=message):
    tf_records.RecordLocations(path, 'the param')
  assert len(tf_records.RecordLocations(path, '', 'skip')) == num_intact


def testAChangedLengthThatFitsTheFileIsDamage(tmp_path):
  path = _File(tmp_path, [(1, 0)], cut=16 + len(_RECORDS[0]) + 16 + 16)
  assert not tf_records.LengthsFit(path)
  with pytest.raises(ValueError, match=naming.Naming(path, 'record 2', 'corrupted length')):
    tf_records.RecordLocations(path)


def testNoTunerMayDelayTheCheckOfAFile(tmp_path, monkeypatch):
  """See BaseInputGenerator._DisableTuner."""
  options = []
  monkeypatch.setattr(tf.data.Dataset, 'reduce', lambda self, *args: options.append(self.options()))
  assert tf_records.IsIntact(_File(tmp_path))
  assert [x.autotune.enabled for x in options] == [False]


def testTextFileHasNoRecords(tmp_path):
  path = tmp_path / 'text'
  path.write_text('no record at all, but text')
  assert _Numbers(str(path), 'skip') == []
  with pytest.raises(ValueError, match=naming.Naming(path, 'record 1', 'byte 0')):
    _Numbers(str(path), 'stop')


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
