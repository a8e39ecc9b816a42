# SPDX-License-Identifier: Apache-2.0
"""Vocabularies: tokens decode to their text, and training is reproducible."""

import inspect
import io
import json
import sys
import textwrap

import numpy as np
import pytest

from lingvo_gpipe.input.text import sentencepiece_tokenizer, sentencepiece_training
from tests import naming

_SOURCES = [inspect.getsource(module) for module in (textwrap, json)]
_UNICODE = ['Grüße, Ελλάδα', '漢字かな交じり文', 'smile 😀 e\u0301', 'العربية', 'naïve ﬁne']


def _Train(path, texts=None, vocab_size=400, **options):
  texts = _SOURCES if texts is None else texts
  return sentencepiece_training.Train(texts, str(path), vocab_size, **options)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('vocabularies')


@pytest.fixture(scope='module')
def tokenizer(folder):
  return _Train(
    folder / 'prose', control_symbols=['<2de>', '<2fr>'], user_defined_symbols=['xyzzy']
  )


@pytest.fixture(scope='module')
def lossless(folder):
  return _Train(folder / 'code', lossless=True)


def testSpecialIdsAreEqualInEveryVocabulary(tokenizer, lossless):
  for vocabulary in (tokenizer, lossless):
    assert vocabulary.vocab_size == 400
    pieces = [line.split('\t')[0] for line in vocabulary.Text().splitlines()]
    assert len(pieces) == 400
    assert pieces[:4] == ['<pad>', '<s>', '</s>', '<unk>']


def testDecodeReversesEncode(tokenizer):
  texts = ['a plain sentence, with words.', *_UNICODE[:2], _UNICODE[3]]
  encoded = tokenizer.Encode(texts)
  assert [e.dtype for e in encoded] == [np.int32] * len(texts)
  assert [tokenizer.Decode(ids) for ids in encoded] == texts
  for ids in encoded:
    assert ids.min() > sentencepiece_tokenizer.UNK_ID and ids.max() < tokenizer.vocab_size
  # Learnt pieces are longer than letters.
  assert encoded[0].size < len(texts[0])
  assert [list(e) for e in tokenizer.Encode([])] == []
  assert [e.size for e in tokenizer.Encode(['', '  \n'])] == [0, 0]
  assert tokenizer.Encode([''])[0].dtype == np.int32


def testProseIsNormalised(tokenizer):
  (ids,) = tokenizer.Encode(['  two\n\tlines  ﬁne '])
  assert tokenizer.Decode(ids) == 'two lines fine'


def testWordStartsCountWords(tokenizer, lossless):
  starts = tokenizer.WordStarts()
  assert (starts.dtype, starts.shape) == (np.float32, (400,)) and not starts[:4].any()
  texts = [' two\n\tlines ', 'antidisestablishmentarianism', *_SOURCES, *_UNICODE, '']
  for text, ids in zip(texts, tokenizer.Encode(texts), strict=True):
    assert starts[ids].sum() == len(text.split()), text
  with pytest.raises(ValueError, match=naming.Naming('code.model', '--lossless')):
    lossless.WordStarts()


def testLosslessKeepsEveryCharacter(lossless):
  texts = [*_SOURCES, *_UNICODE, '  two\n\n\tlines\r\n  ', ' ', '\n', '\n\n  x']
  assert [lossless.Decode(ids) for ids in lossless.Encode(texts)] == texts
  # Indentation has its own pieces.
  assert lossless.Encode(['        x'])[0].size <= 3


def testDecodeDropsSpecialTokens(tokenizer):
  (ids,) = tokenizer.Encode(['some words'])
  framed = [sentencepiece_tokenizer.SOS_ID, *ids, sentencepiece_tokenizer.EOS_ID, 0, 0]
  framed[1:1] = [tokenizer.PieceId('<2de>')]
  assert tokenizer.Decode(framed) == tokenizer.Decode(np.array(framed)) == 'some words'
  assert tokenizer.Decode([]) == ''
  unknown = tokenizer.Decode([sentencepiece_tokenizer.UNK_ID])
  assert tokenizer.Decode([400]) == tokenizer.Decode([-1]) == unknown != ''


def testSymbolsHaveIds(tokenizer):
  german, french = tokenizer.PieceId('<2de>'), tokenizer.PieceId('<2fr>')
  assert len({german, french, 0, 1, 2, 3}) == 6
  # A control symbol in a text does not get its id.
  (ids,) = tokenizer.Encode(['<2de> words'])
  assert german not in ids and tokenizer.Decode(ids) == '<2de> words'
  assert tokenizer.PieceId('xyzzy') in tokenizer.Encode(['the xyzzy'])[0]
  assert tokenizer.PieceId('<unk>') == sentencepiece_tokenizer.UNK_ID
  with pytest.raises(ValueError, match=naming.Naming('prose.model', "'<2xx>'")):
    tokenizer.PieceId('<2xx>')


def testTrainingIsReproducible(folder, tokenizer, lossless):
  again = _Train(folder / 'again', lossless=True)
  assert again.fingerprint == lossless.fingerprint != tokenizer.fingerprint
  files = [(folder / f'{name}.model').read_bytes() for name in ('again', 'code')]
  assert files[0] == files[1]
  assert (folder / 'code.vocab').read_text() == lossless.Text()


def testSampleIsBoundedAndSeeded():
  def Sample(seed, size=50):
    return sentencepiece_training._Sample(map(str, range(1000)), size, seed)

  assert Sample(1) == Sample(1) != Sample(2)
  assert len(set(Sample(1))) == 50
  assert Sample(1, 2000) == list(map(str, range(1000)))
  counts = np.zeros(1000)
  for seed in range(400):
    counts[[int(x) for x in Sample(seed)]] += 1
  # Expects 20 of each; blocks of 100 have 2000, with a standard deviation of about 42.
  assert np.abs(counts.reshape([10, 100]).sum(axis=1) - 2000).max() < 200


def testLongLinesAreSplit():
  text = 'word ' * 5000
  pieces = list(sentencepiece_training._Sentences([text, '', ' \n \n'], lossless=False))
  assert ''.join(pieces) == text
  assert max(len(piece.encode()) for piece in pieces) <= 4000
  code = 'a\n\n  b\nc'
  assert list(sentencepiece_training._Sentences([code], lossless=True)) == ['a', '\n\n  b', '\nc']


@pytest.mark.parametrize(
  'options, names',
  [
    ({'texts': ['', '\n']}, ('no text',)),
    ({'vocab_size': 100_000}, ('100000 pieces', 'too high')),
    (
      {'vocab_size': 100},
      ('100 pieces', 'Vocabulary size'),
    ),
    ({'model_type': 'word'}, ('model_type', "'word'")),
    ({'max_sentences': 0}, ('max_sentences', 0)),
    ({'character_coverage': 0.9}, ('character_coverage', '0.98', '0.9')),
  ],
)
def testInvalidTrainingArgumentsAreNamed(tmp_path, options, names):
  with pytest.raises(ValueError, match=naming.Naming(*names)):
    _Train(tmp_path / 'v', **options)
  assert not list(tmp_path.iterdir())


def testFolderThatCannotBeCreatedIsNamed(tmp_path):
  (tmp_path / 'file').touch()
  with pytest.raises(OSError, match=naming.Naming(f"'{tmp_path}/file/below'")):
    _Train(tmp_path / 'file' / 'below' / 'v')


def testVocabularyIsReplacedOnlyWithOverwrite(folder, tokenizer):
  with pytest.raises(ValueError, match=naming.Naming('prose.model', 'exists', 'overwrite')):
    _Train(folder / 'prose')
  before = tokenizer.fingerprint
  assert _Train(folder / 'replaced').fingerprint != before
  assert _Train(folder / 'replaced', vocab_size=390, overwrite=True).vocab_size == 390


def _OtherIds():
  model = io.BytesIO()
  sentencepiece_tokenizer.Library().SentencePieceTrainer.Train(
    sentence_iterator=iter(_SOURCES[0].splitlines()), model_writer=model, vocab_size=200,
    minloglevel=2,
  )  # fmt: skip
  return model.getvalue()


@pytest.mark.parametrize(
  'content, names',
  [
    (lambda: None, ('No such file', 'tools.train_sentencepiece')),
    (lambda: b'', ('SentencePiece model',)),
    (lambda: b'no model', ('SentencePiece model',)),
    (_OtherIds, ("{'pad': 0", "{'pad': -1, 'sos': 1")),
  ],
)
def testInvalidModelsAreNamed(tmp_path, content, names):
  path = tmp_path / 'missing'
  if (model := content()) is not None:
    path.write_bytes(model)
  with pytest.raises(ValueError, match=naming.Naming(path, *names)):
    sentencepiece_tokenizer.SentencePieceTokenizer(str(path))


def testMissingLibraryIsExplained(folder, tokenizer, monkeypatch):
  del tokenizer
  monkeypatch.setitem(sys.modules, 'sentencepiece', None)
  with pytest.raises(ValueError, match=r"pip install 'lingvo_gpipe\[text\]'"):
    sentencepiece_tokenizer.SentencePieceTokenizer(str(folder / 'prose.model'))


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
