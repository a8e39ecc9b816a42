# SPDX-License-Identifier: Apache-2.0
"""Of a damaged file the sound records come, or none of those behind the first damage."""

import random
import sys

import pytest
import tensorflow as tf

from lingvo_gpipe.input.records import tf_records

_RNG = random.Random(1)
_RECORDS = [_RNG.randbytes(size) for size in (5, 0, 300, 17, 1, 40)]


def _File(tmp_path, changes=(), cut=None):
  """A file of _RECORDS in which some bytes are changed; also where each record begins."""
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
  """The records that come, told by their numbers."""
  records = list(tf_records.Records(path, 'the param', damaged))
  assert [number for number, _ in records] == list(range(1, len(records) + 1))
  found = [(number, record) for number, record in records if record is not None]
  assert all(record == _RECORDS[number - 1] for number, record in found)
  return [number for number, _ in found]


@pytest.mark.parametrize('damaged', tf_records.POLICIES)
def testSoundFilesAreReadWhole(tmp_path, damaged, caplog):
  assert _Numbers(_File(tmp_path), damaged) == [1, 2, 3, 4, 5, 6]
  (tmp_path / 'empty').write_bytes(b'')
  assert _Numbers(str(tmp_path / 'empty'), damaged) == []
  assert not caplog.records


@pytest.mark.parametrize(
  'changes, cut, sound',
  [
    ([(2, 12 + 299)], None, [1, 2, 4, 5, 6]),  # A byte of the record,
    ([(0, 12), (3, 12)], None, [2, 3, 5, 6]),
    ([(i, 12) for i in (0, 1, 2, 4)], None, [4, 6]),
    ([(1, 12)], None, [1, 3, 4, 5, 6]),  # its checksum; there is nothing else of an empty one.
    ([(5, 12 + 40)], None, [1, 2, 3, 4, 5]),
    ([(3, 0)], None, [1, 2, 3]),  # The length,
    ([(3, 7)], None, [1, 2, 3]),
    ([(3, 8)], None, [1, 2, 3]),  # and its checksum.
    ([], -1, [1, 2, 3, 4, 5]),
    ([], -48, [1, 2, 3, 4, 5]),
    ([(0, 12)], -50, [2, 3, 4, 5]),  # In the last one's header.
  ],
)
def testDamagedOnesAreSkippedAndCountedOrEndTheReading(tmp_path, caplog, changes, cut, sound):
  path = _File(tmp_path, changes, cut)
  assert _Numbers(path, 'skip') == sound
  warning = caplog.records[-1].getMessage()
  num_skipped = max(len(changes), 1) + (cut == -50)
  assert warning.startswith(f'{path}: {num_skipped} of ') and 'were skipped' in warning
  with pytest.raises(ValueError, match=r'damaged, .*record \d, at byte .*set the param to skip'):
    _Numbers(path, 'stop')


def testAFileOfOtherThingsHasNoRecords(tmp_path):
  path = tmp_path / 'text'
  path.write_text('no record at all, but text')
  assert _Numbers(str(path), 'skip') == []
  with pytest.raises(
    ValueError, match=r'text is damaged, or no TFRecord file: record 1, at byte 0'
  ):
    _Numbers(str(path), 'stop')


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
