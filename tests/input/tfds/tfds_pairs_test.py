# SPDX-License-Identifier: Apache-2.0
"""Sentence pairs of TFDS, from small data sets that the test prepares."""

import shutil
import sys

import pytest
import tensorflow_datasets as tfds

from lingvo_gpipe.input.text import sentence_pairs
from lingvo_gpipe.input.tfds import tfds_pairs
from tests import naming


class _Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  VERSION = tfds.core.Version('1.0.0')
  LANGUAGES = ('de', 'en')
  FEATURES = tfds.features.Translation(languages=LANGUAGES)

  def _info(self):
    return tfds.core.DatasetInfo(
      builder=self, features=self.FEATURES, supervised_keys=self.LANGUAGES
    )

  def _split_generators(self, dl_manager):
    return {'train': self._generate_examples(7), 'test': self._generate_examples(3)}

  def _generate_examples(self, count):
    for i in range(count):
      yield i, {language: f'{language} ß {i}' for language in self.LANGUAGES}


class LgGermanEnglish(_Builder):
  pass


class LgRussianFrench(_Builder):
  LANGUAGES = ('ru', 'fr')  # Not in alphabetical order.
  FEATURES = tfds.features.Translation(languages=LANGUAGES)


class LgNoTranslation(_Builder):
  FEATURES = tfds.features.FeaturesDict(
    {language: tfds.features.Text() for language in _Builder.LANGUAGES}
  )


@pytest.fixture(scope='module')
def data_dir(tmp_path_factory):
  directory = str(tmp_path_factory.mktemp('tfds'))
  formats = ((LgGermanEnglish, 'tfrecord'), (LgRussianFrench, 'array_record'))
  for cls, file_format in (*formats, (LgNoTranslation, 'tfrecord')):
    cls(data_dir=directory, file_format=file_format).download_and_prepare()
  return directory


def _Input(data_dir, datasets=('lg_german_english', 'lg_russian_french'), **values):
  p = tfds_pairs.TfdsPairs.Params().Set(
    name='Train', datasets=list(datasets), data_dir=data_dir, bucket_upper_bound=[64]
  )
  return p.Set(bucket_batch_limit=2, **values).Instantiate()


@pytest.mark.parametrize('split, count', [('train', 7), ('test', 3), ('train[:2]', 2)])
def testPairsOfAllDataSetsComeOnce(data_dir, split, count):
  generator = _Input(data_dir, split=split)
  pairs = list(generator._Pairs())
  assert pairs == list(generator._Pairs())
  assert len(set(pairs)) == 2 * count
  for languages, part in ((('de', 'en'), pairs[:count]), (('ru', 'fr'), pairs[count:])):
    numbers = [pair.source.split()[-1] for pair in part]
    assert part == [
      sentence_pairs.SentencePair(*languages, *(f'{name} ß {i}' for name in languages))
      for i in numbers
    ]
  assert _Input(data_dir, split=split)._SourceParts() == generator._SourceParts()
  assert _Input(data_dir, split='train[1:]')._SourceParts() != generator._SourceParts()


def testDamagedRecordsAreNamedOrSkippedAndCounted(data_dir, tmp_path):
  copied = shutil.copytree(data_dir, tmp_path / 'data')
  (path,) = (copied / 'lg_german_english').rglob('*train.tfrecord*')
  data = bytearray(path.read_bytes())
  data[-5] ^= 1  # In the last record.
  path.write_bytes(data)
  only = {'datasets': ['lg_german_english']}
  with pytest.raises(ValueError, match=naming.Naming('record 7', 'damaged_records', 'skip')):
    list(_Input(str(copied), **only)._Pairs())
  skipping = _Input(str(copied), **only, damaged_records='skip')
  assert list(skipping._Pairs()) == list(_Input(data_dir, **only)._Pairs())[:-1]
  assert skipping._num_damaged_read == 1
  assert skipping._SourceParts() != _Input(str(copied), **only)._SourceParts()


def testInvalidParamsAreNamed(data_dir, tmp_path):
  with pytest.raises(ValueError, match=naming.Naming('datasets', 'wmt14_translate/de-en', '[]')):
    _Input(data_dir, datasets=[])
  builder = f'tfds.builder("wmt14_translate/de-en", data_dir="{tmp_path}")'
  names = 'param datasets', 'python -c', builder, '--model=mt.cldr.Bilingual', 'num_fake_examples'
  with pytest.raises(ValueError, match=naming.Naming("'Train'", *names)):
    _Input(str(tmp_path), datasets=['wmt14_translate/de-en'])._SourceParts()
  with pytest.raises(ValueError, match=naming.Naming("'lg_german_englisch'", 'lg_german_english')):
    _Input(data_dir, datasets=['lg_german_englisch'])._SourceParts()
  with pytest.raises(ValueError, match=naming.Naming('Translation', "'lg_no_translation'")):
    _Input(data_dir, datasets=['lg_no_translation'])._SourceParts()
  with pytest.raises(ValueError, match=naming.Naming('param split', "['train', 'test']", "'dev'")):
    _Input(data_dir, split='dev')._SourceParts()


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
