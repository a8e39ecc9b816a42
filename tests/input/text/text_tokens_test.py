# SPDX-License-Identifier: Apache-2.0
"""Text files as tokens: every token once, exact restarts, the cache."""

import inspect
import json
import os
import sys
import textwrap

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.input import file_pattern
from lingvo_gpipe.input.text import sentencepiece_training, text_bytes, text_files
from tests import naming

VOCAB_SIZE, BATCH, LENGTH = 400, 3, 16
_SOURCE = inspect.getsource(textwrap)
_LINES = [line for line in (textwrap.__doc__ + json.__doc__).splitlines() if line.strip()][:40]


@pytest.fixture(scope='module')
def vocab(tmp_path_factory):
  prefix = tmp_path_factory.mktemp('vocab') / 'v'
  sentencepiece_training.Train([_SOURCE], str(prefix), VOCAB_SIZE)
  return f'{prefix}.model'


@pytest.fixture
def files(tmp_path):
  folder = tmp_path / 'text'
  folder.mkdir()
  (folder / 'b.txt').write_text('\n'.join(_LINES[20:]))
  (folder / 'a.txt').write_text('\n\n'.join(_LINES[:20]) + '\r\n')
  return str(folder / '*.txt')


def _Params(files, vocab, **values):
  p = text_files.TextFilesInput.Params().Set(
    name='Train', file_pattern=files, vocab_filepath=vocab, batch_size=BATCH, seq_len=LENGTH
  )
  return p.Set(**values)


def _Input(files, vocab, **values):
  return _Params(files, vocab, **values).Instantiate()


def _Batches(generator, start=0):
  return list(generator.Dataset(start).as_numpy_iterator())


def _Documents(generator, batches):
  """Returns the texts of the documents in the labels; checks that ids are the shifted labels."""
  stream = [
    (i, j)
    for b in batches
    for i, j in zip(b.ids[b.weights == 1], b.labels[b.weights == 1], strict=True)
  ]
  documents, read, predicted = [], [], []
  for i, j in stream:
    read.append(i)
    predicted.append(j)
    if j == 2:
      assert read == [1, *predicted[:-1]]
      documents.append(generator.tokenizer.Decode(predicted))
      read, predicted = [], []
  assert not read
  return documents


@pytest.mark.parametrize('seq_len', [5, LENGTH, 200])
def testEveryLineComesOnce(files, vocab, seq_len):
  generator = _Input(files, vocab, seq_len=seq_len, shuffle=False, num_epochs=1)
  batches = _Batches(generator)
  expected = [' '.join(line.split()) for line in _LINES]
  assert _Documents(generator, batches) == expected
  assert sum(b.weights.sum() for b in batches) == generator.NumTokens() + len(_LINES)
  spec = generator.BatchSpec()
  for batch in batches:
    assert set(batch) == set(spec)
    for key, value in batch.items():
      assert value.shape == spec[key].shape and value.dtype == spec[key].dtype.as_numpy_dtype
    # Rows after the last example repeat it, with weight 0.
    assert np.array_equal(batch.weights.any(axis=1), batch.example_weights == 1)


def testFilesMayBeDocuments(files, vocab):
  generator = _Input(files, vocab, documents='files', shuffle=False, num_epochs=1)
  texts = list(generator.VocabularyTexts())
  assert texts[0].startswith(_LINES[0] + '\n\n') and len(texts) == 2
  documents = _Documents(generator, _Batches(generator))
  assert documents == [' '.join(text.split()) for text in texts]


def testUnpackedRowsHoldOneDocument(files, vocab):
  generator = _Input(files, vocab, packed=False, shuffle=False, num_epochs=1, seq_len=8)
  assert generator.NumExamples() == len(_LINES)
  batches = _Batches(generator)
  assert set(batches[0]) == {'ids', 'labels', 'weights', 'example_weights'}
  ids = np.concatenate([b.ids for b in batches])[: len(_LINES)]
  for row, line in zip(ids, _LINES, strict=True):
    (tokens,) = generator.tokenizer.Encode([line])
    expected = [1, *tokens][:8]
    assert list(row) == expected + [0] * (8 - len(expected))


@pytest.mark.parametrize('values', [{'seq_len': 5}, {}, {'packed': False, 'seq_len': 99}])
def testWordsCountTheTextAndItsEnds(files, vocab, values):
  generator = _Input(files, vocab, count_words=True, shuffle=False, num_epochs=1, **values)
  assert generator.BatchSpec().words == tf.TensorSpec([BATCH, generator.params.seq_len], tf.float32)
  batches = _Batches(generator)
  counted = sum((b.words * b.weights).sum() for b in batches)
  assert counted == sum(len(line.split()) + 1 for line in _LINES)
  for batch in batches:
    assert not batch.words[batch.labels == 0].any() and (batch.words[batch.labels == 2] == 1).all()


def testRestartIsExact(files, vocab):
  whole = list(_Input(files, vocab).Dataset().take(30).as_numpy_iterator())
  tail = list(_Input(files, vocab).Dataset(25 * BATCH).take(5).as_numpy_iterator())
  for batch, expected in zip(tail, whole[25:], strict=True):
    tf.nest.map_structure(np.testing.assert_array_equal, batch, expected)
  # Epochs have different orders.
  assert not np.array_equal(whole[0].ids, whole[_Input(files, vocab).NumExamples() // BATCH].ids)


def testMaxDocumentsLimitsTheText(files, vocab):
  generator = _Input(files, vocab, max_documents=5, shuffle=False, num_epochs=1)
  assert len(list(generator.VocabularyTexts())) == 5
  expected = [' '.join(line.split()) for line in _LINES[:3]]  # Every second line is empty.
  assert _Documents(generator, _Batches(generator)) == expected


def testEfficiencyIsLogged(files, vocab, caplog):
  caplog.set_level('INFO', logger='absl')
  generator = _Input(files, vocab)
  share = 100 * (generator.NumTokens() + len(_LINES)) / (generator.NumExamples() * LENGTH)
  rows = f'{generator.NumExamples()} rows of {LENGTH}', f'{share:.1f} %'
  counts = f'{len(_LINES)} documents', f'{generator.NumTokens()} tokens', *rows
  assert naming.AnyLineNames(caplog.text, 'Train', *counts)
  _Input(files, vocab, packed=False, seq_len=2).NumExamples()
  assert naming.AnyLineNames(caplog.text, 'Train', f'{len(_LINES)} are truncated')


# ---- the cache -----------------------------------------------------------------------------------


def testCacheIsWrittenOnce(files, vocab, tmp_path, monkeypatch):
  cache = str(tmp_path / 'cache')
  plain, cached = _Input(files, vocab), _Input(files, vocab, cache_dir=cache)
  assert cached.Fingerprint() == plain.Fingerprint()
  (folder,) = os.listdir(cache)
  monkeypatch.setattr(text_files.TextFilesInput, '_Documents', None)
  for values in ({}, {'packed': False}, {'seq_len': 7}):
    again = _Input(files, vocab, cache_dir=cache, **values)
    assert again.NumTokens() == plain.NumTokens()
  batch = next(iter(_Input(files, vocab, cache_dir=cache).Dataset()))
  tf.nest.map_structure(np.testing.assert_array_equal, batch, next(iter(plain.Dataset())))
  assert os.listdir(cache) == [folder]


def testCacheDependsOnDocumentsAndVocabulary(files, vocab, tmp_path):
  cache = tmp_path / 'cache'
  other = str(tmp_path / 'w')
  sentencepiece_training.Train([_SOURCE], other, 380)
  inputs = [
    {},
    {'documents': 'files'},
    {'max_documents': 3},
    {'vocab_filepath': f'{other}.model'},
  ]
  prints = {_Input(files, vocab, cache_dir=str(cache), **x).Fingerprint() for x in inputs}
  (tmp_path / 'text' / 'a.txt').write_text('something else')
  prints.add(_Input(files, vocab, cache_dir=str(cache)).Fingerprint())
  assert len(list(cache.iterdir())) == len(prints) == 5


def testDamagedCacheIsRewritten(files, vocab, tmp_path, caplog):
  cache = tmp_path / 'cache'
  fingerprint = _Input(files, vocab, cache_dir=str(cache)).Fingerprint()
  (tokens,) = cache.glob('*/tokens.int32')
  content = tokens.read_bytes()
  tokens.write_bytes(content[:-4])
  assert _Input(files, vocab, cache_dir=str(cache)).Fingerprint() == fingerprint
  assert f'expected {len(content)}' in caplog.text
  assert tokens.read_bytes() == content


# ---- missing data, and invalid params ------------------------------------------------------------


def testFingerprintDependsOnRowsAndVocabularyOnly(files, vocab):
  fingerprint = _Input(files, vocab).Fingerprint()
  assert _Input(files, vocab, batch_size=2, shuffle=False).Fingerprint() == fingerprint
  assert _Input(files, vocab, seq_len=9).Fingerprint() != fingerprint
  assert _Input(files, vocab, packed=False).Fingerprint() != fingerprint


def testFakeExamplesNeedNoFiles():
  p = _Params('', '', num_fake_examples=5, vocab_size=50, shuffle=False, num_epochs=1)
  p.count_words = True
  generator = p.Instantiate()
  assert generator.Fingerprint() == 'noise' and generator.Assets() == []
  batches = _Batches(generator)
  assert len(batches) == 2
  assert generator.BatchSpec().ids == tf.TensorSpec([BATCH, LENGTH], tf.int32)
  ids = np.concatenate([b.ids for b in batches])
  assert ids.min() >= 4 and ids.max() < 50 and len(np.unique(ids)) > 20
  for batch in batches:
    assert np.array_equal(batch.ids[:, 1:], batch.labels[:, :-1])
    assert (
      (batch.words == 1).all()
      and (batch.segment_ids == 1).all()
      and (batch.segment_pos == np.arange(LENGTH)).all()
    )


def testSpecNeedsNoData():
  generator = _Input('/missing/*', '/missing/v.model')
  assert generator.BatchSpec().segment_ids == tf.TensorSpec([BATCH, LENGTH], tf.int32)
  assert generator.Assets() == ['/missing/v.model']


@pytest.mark.parametrize(
  'values, names',
  [
    ({'vocab_filepath': ''}, ('param vocab_filepath', 'tools.train_sentencepiece')),
    ({'vocab_filepath': '/missing/v'}, ('param vocab_filepath', "'/missing/v'")),
    ({'vocab_size': 399}, ('400 pieces', 'vocab_size', 399)),
    ({'file_pattern': ''}, ('param file_pattern', 'glob')),
    ({'file_pattern': '/missing/*'}, ('param file_pattern', "'/missing/*'")),
    ({'documents': 'words'}, ('documents', "'lines'", "'files'", "'words'")),
    ({'seq_len': 0}, ('seq_len', 0)),
    ({'max_documents': -1}, ('max_documents', -1)),
    ({'num_fake_examples': 3}, ('num_fake_examples', 'vocab_size above 4', 0)),
  ],
)
def testInvalidParamsAreNamed(files, vocab, values, names):
  with pytest.raises(ValueError, match=naming.Naming("'Train'", *names)):
    _Input(files, vocab, **values).Dataset()


def testLosslessVocabularyCannotCountWords(files, tmp_path):
  sentencepiece_training.Train([_SOURCE], str(tmp_path / 'w'), VOCAB_SIZE, lossless=True)
  generator = _Input(files, str(tmp_path / 'w.model'), count_words=True)
  with pytest.raises(
    ValueError, match=naming.Naming("'Train'", 'param count_words', 'w.model', '--lossless')
  ):
    generator.Dataset()


def testInvalidTextsAreNamed(files, vocab, tmp_path):
  (tmp_path / 'text' / 'b.txt').write_bytes(b'good\nbad \xff\n')
  for documents in ('lines', 'files'):
    with pytest.raises(ValueError, match=naming.Naming('b.txt', 'UTF-8', 'line 2')):
      _Input(files, vocab, documents=documents).Dataset()
  for path in (tmp_path / 'text').iterdir():
    path.write_text('\n')
  with pytest.raises(ValueError, match=naming.Naming("'Train'", 'NumExamples()', 'empty')):
    _Input(files, vocab).Dataset()


def testOnlyTheEndOfALineLosesACarriageReturn(files, vocab, tmp_path, monkeypatch):
  content = b'\xef\xbb\xbf1\r2\r\n\n\r\r\n3\r'
  (tmp_path / 'text' / 'a.txt').write_bytes(content)
  (tmp_path / 'text' / 'b.txt').write_bytes(b'4')
  lines = ['1\r2', '', '\r', '3', '4']
  for size in (1, 4, 1 << 20):
    monkeypatch.setattr(file_pattern, '_READ_AT_ONCE', size)
    assert list(_Input(files, vocab).VocabularyTexts()) == lines
  assert list(_Input(files, vocab, documents='files').VocabularyTexts()) == [
    content.decode('utf-8-sig'), '4'
  ]  # fmt: skip


@pytest.mark.parametrize('target', ['/nowhere', 'a.txt'])
def testFilesThatCannotBeReadAreNamed(files, vocab, tmp_path, target):
  link = tmp_path / 'text' / 'a.txt'
  link.unlink()
  link.symlink_to(target)
  p = text_bytes.TextBytesInput.Params().Set(file_pattern=files, batch_size=1, seq_len=4)
  for source in (_Input(files, vocab), p.Instantiate()):
    with pytest.raises(
      OSError, match=naming.Naming('param file_pattern', f"'{link}'", 'read')
    ) as e:
      source.Dataset()
    assert '\n' not in str(e.value)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
