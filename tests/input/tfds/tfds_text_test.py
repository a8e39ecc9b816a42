# SPDX-License-Identifier: Apache-2.0
"""Texts of TFDS, from small data sets that the test prepares."""

import inspect
import os
import pathlib
import shutil
import sys
import textwrap

import pytest
import tensorflow_datasets as tfds

from lingvo_gpipe.input.records import tf_records
from lingvo_gpipe.input.text import sentencepiece_training
from lingvo_gpipe.input.tfds import tfds_builder, tfds_text
from tests import naming, tf_record_files

_WORDS = 'the quick brown fox jumps over lazy dogs and naïve cats'.split()


def _Text(split, i):
  return ' '.join(_WORDS[(i * k + len(split)) % len(_WORDS)] for k in range(1, 2 + i % 7))


class LgTexts(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  VERSION = tfds.core.Version('1.0.0')

  def _info(self):
    features = {'text': tfds.features.Text(), 'label': tfds.features.ClassLabel(num_classes=2)}
    return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

  def _split_generators(self, dl_manager):
    return {split: self._generate_examples(split, n) for split, n in (('train', 60), ('test', 7))}

  def _generate_examples(self, split, count):
    for i in range(count):
      yield i, {'text': _Text(split, i), 'label': 0}


@pytest.fixture(scope='module')
def data_dirs(tmp_path_factory):
  """{format: directory of the data set in that format}."""
  directories = {}
  for file_format in ('tfrecord', 'array_record'):
    directories[file_format] = str(tmp_path_factory.mktemp(file_format))
    builder = LgTexts(data_dir=directories[file_format], file_format=file_format)
    # By default TFDS interleaves the files, 16 examples of each at a time.
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=3))
  return directories


@pytest.fixture(scope='module')
def vocab(tmp_path_factory):
  prefix = tmp_path_factory.mktemp('vocab') / 'v'
  sentencepiece_training.Train([inspect.getsource(textwrap)], str(prefix), 400)
  return f'{prefix}.model'


def _Input(data_dir, vocab, **values):
  p = tfds_text.TfdsTextInput.Params().Set(
    name='Train',
    dataset='lg_texts',
    data_dir=data_dir,
    vocab_filepath=vocab,
    batch_size=2,
    seq_len=64,
  )
  return p.Set(**values).Instantiate()


def _Flip(path, place):
  data = bytearray(path.read_bytes())
  data[place] ^= 1
  path.write_bytes(data)


@pytest.mark.parametrize('file_format', ['tfrecord', 'array_record'])
def testAllTextsOfASplitComeOnce(data_dirs, vocab, file_format, monkeypatch):
  monkeypatch.setattr(tfds_builder, '_READ_AT_ONCE', 4)
  for split, count in (('train', 60), ('test', 7)):
    generator = _Input(data_dirs[file_format], vocab, split=split, shuffle=False, num_epochs=1)
    texts = list(generator.VocabularyTexts())
    # TFDS shuffles as it writes.
    assert sorted(texts) == sorted(_Text(split, i) for i in range(count))
    assert texts == list(generator.VocabularyTexts())
    assert texts == list(_Input(data_dirs['tfrecord'], vocab, split=split).VocabularyTexts())
    labels = [b.labels[b.weights == 1] for b in generator.Dataset().as_numpy_iterator()]
    decoded = ' '.join(generator.tokenizer.Decode(row) for row in labels)
    assert sorted(decoded.split()) == sorted(' '.join(texts).split())


@pytest.mark.parametrize('name', ['dataset_info.json', 'features.json'])
@pytest.mark.parametrize('content', [b'', b'[1]', b'\xff', b'{"splits": 5}'])
def testDamagedDescriptionsAreRefused(data_dirs, vocab, tmp_path, name, content):
  folder = str(tmp_path / 'data')
  shutil.copytree(data_dirs['tfrecord'], folder)
  (path,) = pathlib.Path(folder).rglob(name)
  path.write_bytes(content)
  with pytest.raises(ValueError, match=naming.Naming('dataset', folder)) as e:
    list(_Input(folder, vocab).VocabularyTexts())
  assert '\n' not in str(e.value)


def testCacheAndFingerprintDependOnTheData(data_dirs, vocab, tmp_path):
  cache = tmp_path / 'cache'
  options = [{}, {'split': 'test'}, {'split': 'train[:9]'}]
  prints = {
    _Input(data_dirs['tfrecord'], vocab, cache_dir=str(cache), **x).Fingerprint() for x in options
  }
  assert len(prints) == len(list(cache.iterdir())) == 3
  assert _Input(data_dirs['tfrecord'], vocab).Fingerprint() in prints


def testMissingDataSetGetsAdvice(tmp_path, vocab):
  generator = _Input(str(tmp_path), vocab, dataset='lm1b')
  assert generator.BatchSpec().ids.shape == [2, 64]
  with pytest.raises(ValueError) as caught:
    generator.Fingerprint()
  message = str(caught.value)
  assert f'in {tmp_path}/lm1b: run `python -c' in message
  assert f'tfds.builder("lm1b", data_dir="{tmp_path}").download_and_prepare()' in message
  assert 'lm.stdlib.ByteTransformerGPipe2' in message and 'num_fake_examples' in message


@pytest.mark.parametrize(
  'values, names',
  [
    ({'dataset': ''}, ('dataset', 'TFDS')),
    ({'dataset': 'lm1bb'}, ('param dataset', "'lm1bb'", 'lm1b?')),
    ({'feature': 'label'}, ('param feature', "['text']", "'label'")),
    ({'split': 'dev'}, ("'dev'", "['train', 'test']")),
    ({'split': 'dev', 'cache_dir': 'not made'}, ('param split', "['train', 'test']", "'dev'")),
  ],
)
def testInvalidParamsAreNamed(data_dirs, vocab, values, names):
  with pytest.raises(ValueError, match=naming.Naming(*names)):
    _Input(data_dirs['tfrecord'], vocab, **values).Fingerprint()


def testDamagedRecordIsNamedOrLeftOut(data_dirs, vocab, tmp_path):
  data_dir = shutil.copytree(data_dirs['tfrecord'], tmp_path / 'data')
  first, _, path = sorted(data_dir.rglob('*train.tfrecord*'))
  _Flip(path, -5)  # In the last record.
  with pytest.raises(
    ValueError,
    match=naming.Naming(path.name, 'record 20', 'damaged_records', 'skip'),
  ):
    _Input(str(data_dir), vocab, split='train[10%:]').NumExamples()
  # Intact files are unaffected.
  assert _Input(str(data_dir), vocab, split='test').NumExamples()
  _Flip(first, 20)  # In the first record, which is not in the split.
  whole = list(_Input(data_dirs['tfrecord'], vocab, split='train[10%:]').VocabularyTexts())
  options = {
    'split': 'train[10%:]',
    'damaged_records': 'skip',
    'cache_dir': str(tmp_path / 'cache'),
  }
  for _ in range(2):  # The second time its tokens are cached.
    skipping = _Input(str(data_dir), vocab, **options)
    assert list(skipping.VocabularyTexts()) == whole[:-1]
    assert skipping.NumExamples() and skipping.NumDamaged() == 1
  assert naming.Names(skipping.Describe(), '1 damaged records')


@pytest.mark.parametrize('num_bytes', [15, 0, None])
def testTruncatedFileIsNamed(data_dirs, vocab, tmp_path, num_bytes):
  """To tf.data a file ends within the header of a record as it does between two records.

  A length that exceeds the file would crash TensorFlow.
  """
  data_dir = shutil.copytree(data_dirs['tfrecord'], tmp_path / 'data')
  path = sorted(data_dir.rglob('*train.tfrecord*'))[1]
  begin = tf_records.RecordOffsets(str(path))[-2]
  if num_bytes is None:
    tf_record_files.SetLength(path, begin, 2**36)
  else:
    os.truncate(path, begin + num_bytes)
  names = ('19 records', 20) if num_bytes == 0 else ('record 20', 'truncated')
  with pytest.raises(ValueError, match=naming.Naming(path.name, *names)):
    _Input(str(data_dir), vocab).NumExamples()
  skipping = _Input(str(data_dir), vocab, damaged_records='skip')
  whole = list(_Input(data_dirs['tfrecord'], vocab).VocabularyTexts())
  assert list(skipping.VocabularyTexts()) == whole[:39] + whole[40:]
  assert skipping.NumDamaged() == 1


def testDamagedArrayRecordIsNamed(data_dirs, vocab, tmp_path):
  data_dir = shutil.copytree(data_dirs['array_record'], tmp_path / 'data')
  path = sorted(data_dir.rglob('*train.array_record*'))[1]
  data = bytearray(path.read_bytes())
  at = data.index(b'quick')
  data[at : at + 5] = bytes(5)
  path.write_bytes(data)
  with pytest.raises(ValueError, match=naming.Naming(path.name, 'example', "'train'", 'Corrupted')):
    _Input(str(data_dir), vocab).NumExamples()


def testOnlyTfRecordsCanBeSkipped(data_dirs, vocab):
  skipping = _Input(data_dirs['array_record'], vocab, damaged_records='skip')
  for read in (skipping.NumExamples, skipping.NumDamaged, lambda: list(skipping.VocabularyTexts())):
    with pytest.raises(ValueError, match=naming.Naming('damaged_records', 'array_record')) as e:
      read()
    assert 'restore' not in str(e.value)
  with pytest.raises(
    ValueError, match=naming.Naming('damaged_records', "'stop'", "'skip'", "'skp'")
  ):
    _Input(data_dirs['tfrecord'], vocab, damaged_records='skp')


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
