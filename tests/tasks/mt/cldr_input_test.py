# SPDX-License-Identifier: Apache-2.0
"""Names of CLDR as sentence pairs: the vocabulary, the directions, the choice of names."""

import sys

import numpy as np
import pytest

from lingvo_gpipe.input.text import sentencepiece_tokenizer
from tasks.mt import cldr_input, cldr_names
from tests import naming

_LANGUAGES = ('de', 'el', 'fr')


@pytest.fixture(autouse=True)
def few_languages(monkeypatch):
  monkeypatch.setattr(cldr_names, 'Languages', lambda min_names: _LANGUAGES)


@pytest.fixture(scope='module')
def vocabulary(tmp_path_factory):
  return str(tmp_path_factory.mktemp('vocabulary') / 'new' / 'names.model')


def _Make(vocabulary, **values):
  p = cldr_input.CldrInput.Params().Set(
    name='names',
    vocab_filepath=vocabulary,
    vocab_size=800,
    bucket_upper_bound=[80],
    bucket_batch_limit=64,
  )
  return p.Set(**values).Instantiate()


def testVocabularyIsTrainedOnceForAllLanguages(vocabulary):
  first = _Make(vocabulary, languages=['fr'], max_names={'fr': 5})
  assert first.tokenizer.vocab_size == 800
  assert first.languages == ['en', 'fr'] and first.NumExamples() == 5
  with open(vocabulary, 'rb') as f:
    before = f.read()
  second = _Make(vocabulary, split='test')
  assert second.tokenizer.fingerprint == first.tokenizer.fingerprint
  with open(vocabulary, 'rb') as f:
    assert f.read() == before
  # The vocabulary has pieces of a language that the first input does not use.
  name = cldr_names.Names('el')['territories/GR']
  ids = second.tokenizer.Encode([name])[0]
  assert sentencepiece_tokenizer.UNK_ID not in ids and len(ids) < len(name.encode())
  assert second.Assets() == [vocabulary]


def testBatchesHoldTheNames(vocabulary):
  names = _Make(vocabulary, split='dev', shuffle=False, num_epochs=1)
  expected = {
    (language, cldr_names.Names(language)[entry], cldr_names.Names('en')[entry])
    for language in _LANGUAGES
    for entry in cldr_names.Entries(language, 'dev')
  }
  actual = set()
  for batch in names.Dataset():
    pairs = names.SentencePairs(batch)
    actual |= {(pair.source_language, pair.source, pair.target) for pair in pairs}
    for row, pair in enumerate(pairs):
      assert names.languages[int(batch.src_lang[row])] == pair.source_language
      assert names.languages[int(batch.tgt_lang[row])] == pair.target_language == 'en'
      assert batch.tgt_ids[row, 0] == sentencepiece_tokenizer.SOS_ID
      decoded = names.tokenizer.Decode(batch.tgt_labels[row].numpy())
      assert decoded == pair.target
  assert actual == expected


def testBothDirectionsBeginWithTheSymbolOfTheTarget(vocabulary):
  names = _Make(vocabulary, direction='both', target_language_token='source', max_names={'de': 20})
  one_way = _Make(vocabulary, max_names={'de': 20})
  assert names.NumExamples() == 2 * one_way.NumExamples()
  batch = next(iter(names.Dataset()))
  symbols = [names.tokenizer.PieceId(f'<2{language}>') for language in names.languages]
  np.testing.assert_array_equal(batch.src_ids[:, 0], np.take(symbols, batch.tgt_lang))
  english = names.languages.index('en')
  np.testing.assert_array_equal(batch.src_lang == english, batch.tgt_lang != english)


@pytest.mark.parametrize(
  'values, names',
  [
    ({'split': 'training'}, ('split', "'train'", "'dev'", "'test'", "'training'")),
    ({'languages': ['de', 'sv']}, ('param languages', 'sv', '3 languages')),
    ({'max_names': {'sv': 3}}, ('param max_names', 'sv', '3 languages')),
    ({'min_names': 0}, ('min_names', 0)),
  ],
)
def testWrongArgumentsRaise(vocabulary, values, names):
  with pytest.raises(ValueError, match=naming.Naming(*names)):
    _Make(vocabulary, **values).NumExamples()


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
