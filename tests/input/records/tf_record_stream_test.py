# SPDX-License-Identifier: Apache-2.0
"""Streams of records: each record comes once; damaged records are named, or left out."""

import itertools
import os
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.input import batches
from lingvo_gpipe.input.records import tf_record_stream
from tests import naming, tf_record_files

FILES, RECORDS = 6, 5
SIZE = 16 + 4  # Bytes of a record in its file.


class _Numbers(tf_record_stream.TfRecordStream):
  """Each record is a number."""

  def _Example(self, record):
    return nested_map.NestedMap(i=tf.io.decode_raw(record, tf.int32)[0])


@pytest.fixture
def folder(tmp_path):
  """File f has the numbers 10 * f + (0 ... RECORDS - 1)."""
  for file in range(FILES):
    with tf.io.TFRecordWriter(str(tmp_path / f'{file}.tfrecord')) as writer:
      for number in range(RECORDS):
        writer.write(np.int32(10 * file + number).tobytes())
  return tmp_path


def _Input(folder, **values):
  p = _Numbers.Params().Set(name='Train', batch_size=2, num_epochs=1)
  return p.Set(**{'file_pattern': str(folder / '*.tfrecord'), **values}).Instantiate()


def _Seen(iterator, count=None):
  """Returns the numbers in some batches, without padded rows."""
  batches_seen = itertools.islice(iterator, count)
  return [i for b in batches_seen for i in b.i[b.example_weights > 0].numpy().tolist()]


def _Damage(folder, *numbers, byte=12):
  for number in numbers:
    file, record = divmod(number, 10)
    path = folder / f'{file}.tfrecord'
    data = bytearray(path.read_bytes())
    data[record * SIZE + byte] ^= 1
    path.write_bytes(data)


def testEachEpochHasEachRecordOnceInItsOwnOrder(folder):
  numbers = [10 * file + number for file in range(FILES) for number in range(RECORDS)]
  assert _Seen(_Input(folder, shuffle=False).Dataset()) == numbers
  # A shuffle of the files alone.
  source = _Input(folder, shuffle_buffer_size=1, num_epochs=2)
  source.CheckRestarts()
  first_epoch, second_epoch = np.reshape(_Seen(source.Dataset()), [2, -1]).tolist()
  assert (
    sorted(first_epoch) == sorted(second_epoch) == numbers
    and first_epoch != second_epoch != numbers != first_epoch
  )
  assert source.Fingerprint() == _Input(folder).Fingerprint()


def testDamagedRecordIsNamedWithTheBatch(folder):
  _Damage(folder, 32)
  source = _Input(folder, shuffle=False)
  source.CheckRestarts()  # Does not read that far.
  path = folder / '3.tfrecord'
  message = naming.Naming(path, 'record 3', f'byte {2 * SIZE}', "'Train'", 'damaged_records')
  with pytest.raises(ValueError, match=message) as e:
    list(batches.Batches(source))
  (note,) = e.value.__notes__
  assert naming.Names(note, "_Numbers 'Train'", 'example 16', 'data set')
  _Damage(folder, 0)
  with pytest.raises(ValueError, match=naming.Naming('0.tfrecord', 'record 1', 'byte 0')):
    source.CheckRestarts()


def testFileTruncatedWithinALengthIsNamedAtTheStart(folder):
  path = folder / '3.tfrecord'
  os.truncate(path, 4 * SIZE + 7)
  with pytest.raises(
    ValueError, match=naming.Naming(path, 'record 5', f'byte {4 * SIZE}', 'truncated')
  ):
    _Input(folder).Describe()
  assert _Input(folder, damaged_records='skip').NumDamaged() == 1


def testALengthBeyondTheFileIsNamedOrLeftOut(folder):
  """TensorFlow would crash on it."""
  path = folder / '3.tfrecord'
  tf_record_files.SetLength(path, 4 * SIZE, 2**36)
  with pytest.raises(ValueError, match=naming.Naming(path, 'record 5', 'damaged_records')):
    _Input(folder).CheckRestarts()
  skipping = _Input(folder, damaged_records='skip')
  assert len(_Seen(skipping.Dataset())) == FILES * RECORDS - 1
  assert skipping.NumDamaged() == 1


@pytest.mark.parametrize('length', [2**36, 2**62])
@pytest.mark.parametrize('url', ['file://', 'ram://'])
def testAHugeLengthIsDamageAtAnyPathOfThisMachine(folder, tmp_path, url, length):
  """TensorFlow would allocate the length, and end the process."""
  path = f'{url}{tmp_path}/huge.records'
  tf_record_files.SetLength(folder / '0.tfrecord', SIZE, length)
  if url == 'ram://':
    tf.io.gfile.makedirs(f'{url}{tmp_path}')
  tf.io.gfile.copy(str(folder / '0.tfrecord'), path)
  with pytest.raises(ValueError, match=naming.Naming(path, 'record 2', 'truncated')):
    _Input(folder, file_pattern=path).Dataset()
  assert _Seen(_Input(folder, file_pattern=path, damaged_records='skip').Dataset()) == [0]


def testDamagedRecordsAreLeftOutAndCounted(folder):
  intact = set(_Seen(_Input(folder).Dataset()))
  _Damage(folder, 0, 12, 13, 31, 44)
  _Damage(folder, 52, byte=0)  # Its length: no later record can be found.
  source = _Input(folder, damaged_records='skip')
  remaining = intact - {0, 12, 13, 31, 44} - {52, 53, 54}
  source.CheckRestarts()
  seen = _Seen(source.Dataset())
  assert sorted(seen) == sorted(remaining)
  assert source.NumDamaged() == 6
  assert naming.Names(source.Describe(), 'stream', '6 damaged records')
  with pytest.raises(
    ValueError, match=naming.Naming('damaged_records', "'stop'", "'skip'", "'skp'")
  ):
    _Input(folder, damaged_records='skp')


def testResumesWhenDamageComesAndGoes(folder):
  """Damage in the file that is being read, and in a later file."""
  values = {'shuffle': False, 'num_prefetch': 0}
  run = _Input(folder, **values).Iterator()
  assert _Seen(run, 1) == [0, 1]
  _Damage(folder, 2, 11)
  skipping = _Input(folder, damaged_records='skip', **values)
  assert skipping.PipelineDigest() == _Input(folder, **values).PipelineDigest()
  other = skipping.Iterator()
  other.Restore(run.Save())
  assert _Seen(other, 1) == [3, 4]
  _Damage(folder, 2, 11)
  repaired = _Input(folder, **values).Iterator()
  repaired.Restore(other.Save())
  assert _Seen(repaired, 2) == [10, 11, 12, 13]
  assert _Seen(other, 2) == [10, 12, 13, 14]


def testPipelineDigestDependsOnTheFiles(folder):
  digest = _Input(folder).PipelineDigest()
  (folder / '0.tfrecord').rename(folder / '7.tfrecord')
  assert _Input(folder).PipelineDigest() != digest


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
