# SPDX-License-Identifier: Apache-2.0
"""Sentence pairs from files, and errors that name the file and the line."""

import sys

import pytest
import tensorflow as tf

from lingvo_gpipe.input.text import parallel_files, sentence_pairs, sentencepiece_training
from tests import naming

# Characters that end a line for str.splitlines, but not in a file.
_PAIRS = [
  sentence_pairs.SentencePair('de', 'en', 'Straße\u2028über\x85', 'street \x0b over'),
  sentence_pairs.SentencePair('el', 'en', 'Καλημέρα κόσμε', '“hello”, "world"'),
  sentence_pairs.SentencePair('zh', 'en', '你好 \U0001f600', ' spaces '),
  sentence_pairs.SentencePair('de', 'en', 'e\u0301', '\u00e9'),
]


def _Tsv(path, rows, end='\n'):
  path.write_bytes(end.join('\t'.join(row) for row in rows).encode())
  return str(path)


def _Records(path, examples):
  with tf.io.TFRecordWriter(str(path)) as writer:
    for example in examples:
      writer.write(example)
  return str(path)


def _Example(**features):
  def Feature(values):
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))

  proto = tf.train.Features(feature={name: Feature(values) for name, values in features.items()})
  return tf.train.Example(features=proto).SerializeToString()


def _Whole(pair):
  return _Example(**{name: [text.encode()] for name, text in pair._asdict().items()})


def _Input(cls, **values):
  p = cls.Params().Set(name='Train', bucket_upper_bound=[64], bucket_batch_limit=2)
  return p.Set(shuffle=False, num_epochs=1, **values).Instantiate()


def _Read(cls, **values):
  return list(_Input(cls, **values)._Pairs())


def testAFileThatVanishesIsNamed(tmp_path):
  path = tmp_path / 'a.tsv'
  source = _Input(parallel_files.TsvPairs, file_pattern=_Tsv(path, _PAIRS))
  pairs = source._Pairs()
  files = source._Files()
  path.unlink()
  source._Files = lambda: files
  for read in (lambda: next(pairs), source._SourceParts):
    with pytest.raises(OSError, match=naming.Naming('param file_pattern', f"'{path}'", 'read')):
      read()


@pytest.mark.parametrize('end', ['\n', '\r\n'])
def testLinesHaveFourColumns(tmp_path, end):
  _Tsv(tmp_path / 'b.tsv', _PAIRS[2:], end)
  _Tsv(tmp_path / 'a.tsv', [*_PAIRS[:1], _PAIRS[1]], end)
  assert _Read(parallel_files.TsvPairs, file_pattern=str(tmp_path / '*.tsv')) == _PAIRS


def testByteOrderMarkIsDropped(tmp_path):
  path = tmp_path / 'a.tsv'
  _Tsv(path, _PAIRS)
  path.write_bytes(b'\xef\xbb\xbf' + path.read_bytes())
  assert _Read(parallel_files.TsvPairs, file_pattern=str(path)) == _PAIRS


def testPairFilesHaveTwoColumns(tmp_path):
  _Tsv(tmp_path / 'x.de-en.tsv', [(p.source, p.target) for p in _PAIRS if p[0] == 'de'])
  _Tsv(tmp_path / 'x.el-en.tsv', [(p.source, p.target) for p in _PAIRS if p[0] == 'el'])
  mixed = _Tsv(tmp_path / 'mixed.tsv', [_PAIRS[2]])
  pair_files = [[name, 'en', str(tmp_path / f'x.{name}-en.tsv')] for name in ('de', 'el')]
  generator = _Input(parallel_files.TsvPairs, pair_files=pair_files, file_pattern=mixed)
  assert list(generator._Pairs()) == [_PAIRS[i] for i in (2, 0, 3, 1)]
  parts = generator._SourceParts()
  _Tsv(tmp_path / 'x.el-en.tsv', [('α', 'a')])
  assert generator._SourceParts() != parts


def testRecordsAreRead(tmp_path):
  path = _Records(tmp_path / 'pairs.tfrecord', [_Whole(pair) for pair in _PAIRS])
  assert _Read(parallel_files.TfRecordPairs, file_pattern=path) == _PAIRS


def testBatchesOfBothKindsAreEqual(tmp_path):
  """Examples are equal for both kinds of files."""
  tsv = _Tsv(tmp_path / 'pairs.tsv', _PAIRS)
  records = _Records(tmp_path / 'pairs.tfrecord', [_Whole(pair) for pair in _PAIRS])
  sentencepiece_training.Train(
    [text for pair in _PAIRS for text in (pair.source, pair.target)], str(tmp_path / 'v'), 300
  )
  vocab = str(tmp_path / 'v.model')
  generators = [
    _Input(cls, file_pattern=path, vocab_filepath=vocab, cache_dir=str(tmp_path / 'cache'))
    for cls, path in ((parallel_files.TsvPairs, tsv), (parallel_files.TfRecordPairs, records))
  ]
  assert generators[0].Fingerprint() == generators[1].Fingerprint()
  assert len(list((tmp_path / 'cache').iterdir())) == 2
  for generator in generators:
    pairs = [p for batch in generator.Dataset() for p in generator.SentencePairs(batch)]
    assert pairs == _PAIRS


@pytest.mark.parametrize(
  'line, names',
  [
    (b'de\ten\tone side', ('4 columns', '(source_language', 'tabs', 3)),
    (b'', ('4 columns', 1)),
    (b'de\ten\ta\tb\tc', ('4 columns', 5)),
    (b'de\ten\ta\t\xff', ('UTF-8', 'invalid start byte')),
    (b'\ten\ta\tb', ('language', "source_language=''")),
  ],
)
def testMalformedLinesAreNamed(tmp_path, line, names):
  path = tmp_path / 'bad.tsv'
  path.write_bytes(b'de\ten\ta\tb\n' + line + b'\nde\ten\ta\tb\n')
  with pytest.raises(ValueError, match=naming.Naming('bad.tsv', 'line 2', *names)):
    _Read(parallel_files.TsvPairs, file_pattern=str(path))
  names = 'bad.tsv', 'line 2', '2 columns', '(source, target)', 1
  with pytest.raises(ValueError, match=naming.Naming(*names)):
    _Tsv(path, [('a', 'b'), ('a',)])
    _Read(parallel_files.TsvPairs, pair_files=[['de', 'en', str(path)]])


@pytest.mark.parametrize(
  'record, names',
  [
    (b'\x0a\xff', ('tf.Example',)),
    (_Example(source=[b'a']), ('source_language has 0 strings', "['source']")),
    (
      _Example(**{name: [b'a', b'b'] for name in parallel_files.FIELDS}),
      ('source_language has 2 strings',),
    ),
    (_Example(**{name: [b'\xff'] for name in parallel_files.FIELDS}), ('UTF-8',)),
  ],
  # Not the bytes themselves: serialised maps have no fixed order.
  ids=['no example', 'no language', 'two of each', 'no UTF-8'],
)
def testMalformedRecordsAreNamed(tmp_path, record, names):
  path = _Records(tmp_path / 'bad.tfrecord', [_Whole(_PAIRS[0]), record])
  with pytest.raises(ValueError, match=naming.Naming('bad.tfrecord', 'record 2', *names)):
    _Read(parallel_files.TfRecordPairs, file_pattern=path)


def testDamagedAndMissingFilesAreNamed(tmp_path):
  path = tmp_path / 'damaged.tfrecord'
  _Records(path, [_Whole(pair) for pair in _PAIRS])
  path.write_bytes(path.read_bytes()[:-5])
  with pytest.raises(
    ValueError,
    match=naming.Naming(path, 'record 4', "'Train'", 'damaged_records', 'skip'),
  ):
    _Read(parallel_files.TfRecordPairs, file_pattern=str(path))
  skipping = _Input(parallel_files.TfRecordPairs, file_pattern=str(path), damaged_records='skip')
  assert list(skipping._Pairs()) == _PAIRS[:3]
  stopping = _Input(parallel_files.TfRecordPairs, file_pattern=str(path))
  assert skipping._SourceParts() != stopping._SourceParts()
  with pytest.raises(
    ValueError, match=naming.Naming('damaged_records', "'stop'", "'skip'", "'skp'")
  ):
    _Input(parallel_files.TfRecordPairs, file_pattern=str(path), damaged_records='skp')
  with pytest.raises(
    ValueError, match=naming.Naming("'Train'", 'param file_pattern', f"'{tmp_path}/gone*'")
  ):
    _Read(parallel_files.TsvPairs, file_pattern=str(tmp_path / 'gone*'))
  with pytest.raises(ValueError, match=naming.Naming('pair_files', f"'{tmp_path}/gone*'")):
    _Read(parallel_files.TsvPairs, pair_files=[['de', 'en', str(tmp_path / 'gone*')]])
  with pytest.raises(ValueError, match=naming.Naming('pair_files', 'list of 3', "[['de', 'en']]")):
    _Input(parallel_files.TsvPairs, pair_files=[['de', 'en']])


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
