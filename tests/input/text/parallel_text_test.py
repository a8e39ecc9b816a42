# SPDX-License-Identifier: Apache-2.0
"""Sentence pairs in buckets: fields, each pair once, restarts, language symbols, bad params."""

import itertools
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.input.text import (
  parallel_text,
  sentence_pairs,
  sentencepiece_tokenizer,
  sentencepiece_training,
)
from tests import naming

_BOUNDS, _LIMITS = [6, 10, 20], [4, 3, 2]
_WORDS = 'eins zwei drei vier fünf Haus Straße über ß — zum Garten der Hund läuft'.split()


def _Pairs(num_de=40, num_fr=12, seed=0):
  """Returns different German-English and French-English pairs of 1 to 8 words per side."""
  rng = np.random.default_rng(seed)
  pairs = []
  for i in range(num_de + num_fr):
    language = 'de' if i < num_de else 'fr'
    source, target = (' '.join(rng.choice(_WORDS, rng.integers(1, 9))) for _ in range(2))
    pairs.append(
      sentence_pairs.SentencePair(language, 'en', f'{source} {i}', f'{target} {i} \U0001f600')
    )
  return pairs


class _Memory(parallel_text.ParallelText):
  """Pairs from memory."""

  pairs = _Pairs()
  num_reads = 0

  def _Pairs(self):
    type(self).num_reads += 1
    return iter(self.pairs)

  def _SourceParts(self):
    return [self.pairs]


@pytest.fixture(scope='module')
def vocab(tmp_path_factory):
  prefix = str(tmp_path_factory.mktemp('vocab') / 'small')
  texts = [text for pair in _Pairs() for text in (pair.source, pair.target)]
  symbols = ['<2de>', '<2en>', '<2fr>']
  sentencepiece_training.Train(texts, prefix, 340, control_symbols=symbols)
  return f'{prefix}.model'


def _Input(vocab, cls=_Memory, **values):
  p = cls.Params().Set(
    name='Train', vocab_filepath=vocab, bucket_upper_bound=[12, 24, 48], bucket_batch_limit=_LIMITS
  )
  return p.Set(**values).Instantiate()


def _InputClass(pairs):
  return type('_Other', (_Memory,), {'pairs': pairs, 'num_reads': 0})


def _Batches(generator, start=0, count=None):
  return list(itertools.islice(generator.Dataset(start).as_numpy_iterator(), count))


def _Evaluation(vocab, **values):
  return _Input(vocab, shuffle=False, num_epochs=1, **values)


@pytest.mark.parametrize('place', ['', 'source', 'target'])
@pytest.mark.parametrize('direction', ['given', 'reversed', 'both'])
def testFieldsAreTheTokensOfThePairs(vocab, place, direction):
  generator = _Evaluation(vocab, target_language_token=place, direction=direction)
  tokenizer = sentencepiece_tokenizer.SentencePieceTokenizer(vocab)
  sos, eos = sentencepiece_tokenizer.SOS_ID, sentencepiece_tokenizer.EOS_ID
  originals = []
  for batch in _Batches(generator):
    pairs = generator.SentencePairs(batch)
    originals += pairs
    for i, pair in enumerate(pairs):
      (symbol,) = [tokenizer.PieceId(f'<2{pair.target_language}>')]
      source, target = (list(ids) for ids in tokenizer.Encode([pair.source, pair.target]))

      def Row(name, paddings, batch=batch, i=i):
        length = int(np.sum(batch[paddings][i] == 0))
        assert not np.any(batch[paddings][i][:length])
        assert not np.any(batch[name][i][length:])
        return batch[name][i][:length].tolist()

      assert Row('src_ids', 'src_paddings') == [symbol] * (place == 'source') + source + [eos]
      assert Row('tgt_labels', 'tgt_paddings') == [*target, eos]
      assert Row('tgt_ids', 'tgt_paddings') == [symbol if place == 'target' else sos, *target]
      np.testing.assert_array_equal(batch.tgt_weights[i], 1 - batch.tgt_paddings[i])
      assert generator.languages[batch.src_lang[i]] == pair.source_language
      assert generator.languages[batch.tgt_lang[i]] == pair.target_language
  pairs_as_given = _Pairs()
  reversed_pairs = [pair.Reversed() for pair in pairs_as_given]
  expected = {
    'given': pairs_as_given,
    'reversed': reversed_pairs,
    'both': pairs_as_given + reversed_pairs,
  }[direction]
  assert sorted(originals) == sorted(expected)


def testEachBucketHasOneShape(vocab):
  generator = _Evaluation(vocab)
  specs = {tuple(spec.src_ids.shape): spec for spec in generator.BatchSpecs()}
  assert list(specs) == [(4, 12), (3, 24), (2, 48)]
  assert generator.BatchSpec().tgt_ids.shape == (2, 48)
  seen = set()
  for batch in _Batches(generator):
    shape = tuple(batch.src_ids.shape)
    actual = batch.Transform(lambda x: tf.TensorSpec(x.shape, x.dtype))
    assert dict(actual.FlattenItems()) == dict(specs[shape].FlattenItems())
    assert isinstance(batch, nested_map.NestedMap)
    longest = max(np.sum(1 - batch[k], axis=1).max() for k in ('src_paddings', 'tgt_paddings'))
    lower = max([bound for _, bound in specs if bound < shape[1]], default=0)
    assert lower < longest <= shape[1]
    padded = batch.example_weights == 0
    assert not np.any(batch.tgt_weights[padded])
    seen.add(shape)
  assert seen == set(specs)
  single_limit = _Input(vocab, bucket_batch_limit=3)
  assert [spec.src_ids.shape[0] for spec in single_limit.BatchSpecs()] == [3, 3, 3]
  assert single_limit.BatchSpec().src_ids.shape == (3, 48)


@pytest.mark.parametrize('temperature', [1.0, 5.0])
def testRestartIsExactAtAnyBatch(vocab, temperature):
  options = {'sampling_temperature': temperature, 'direction': 'both'}
  generator = _Input(vocab, **options)
  whole = _Batches(generator, count=90)
  num_epoch = generator._order.num_batches
  assert num_epoch < 60
  position = 0
  ways = itertools.cycle([(2, 1), (0, 3)])
  for i, batch in enumerate(whole):
    if i in (1, num_epoch // 2, num_epoch - 1, num_epoch, num_epoch + 7):
      num_prefetch, num_parallel_calls = next(ways)
      other = _Input(
        vocab, num_prefetch=num_prefetch, num_parallel_calls=num_parallel_calls, **options
      )
      for actual, expected in zip(_Batches(other, position, 12), whole[i : i + 12], strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, actual, expected)
    position += batch.example_weights.shape[0]


def testLanguagesAreDrawnByTemperature(vocab):
  generator = _Input(vocab, sampling_temperature=5.0, num_epochs=1)
  counts = np.zeros([3])
  batches = _Batches(generator)
  assert len(batches) == generator.NumBatches()
  for batch in batches:
    np.add.at(counts, batch.src_lang, batch.example_weights)
  assert generator.languages == ['de', 'en', 'fr']
  roots = np.array([40, 12]) ** 0.2
  # 52 examples are drawn: 29.1 and 22.9 of them by the formula.
  assert counts.tolist() == [29, 0, 23]
  np.testing.assert_allclose(52 * roots / roots.sum(), [29, 23], atol=0.5)
  assert generator.NumBatches(start=10**6) == 0 and _Batches(generator, 10**6) == []


def testLongAndEmptyPairsAreLeftOutInTrainingOnly(vocab, caplog):
  pair = sentence_pairs.SentencePair
  odd = [pair('de', 'en', 'Hund ' * 30, 'short'), pair('de', 'en', '', 'Hund Hund Hund')]
  cls = _InputClass([*_Pairs(10, 0), *odd])
  with caplog.at_level('WARNING', logger='absl'):
    assert _Input(vocab, cls).NumExamples() == 10
  warnings = [r.getMessage() for r in caplog.records]
  assert any(naming.Names(text, '1 of 12', 48, 'left out') for text in warnings)
  assert any(naming.Names(text, '1 of 12', 'empty', 'left out') for text in warnings)
  caplog.clear()
  with caplog.at_level('WARNING', logger='absl'):
    generator = _Evaluation(vocab, cls=cls)
    batches = _Batches(generator)
  assert any('truncated' in r.getMessage() for r in caplog.records)
  assert sorted(p for b in batches for p in generator.SentencePairs(b)) == sorted(cls.pairs)
  (row,) = [
    (batch, i)
    for batch in batches
    for i in np.flatnonzero((batch.example_index == 10) & (batch.example_weights == 1))
  ]
  batch, i = row
  tokens = generator.tokenizer.Encode([odd[0].source])[0]
  np.testing.assert_array_equal(batch.src_ids[i], tokens[:48])
  assert not np.any(batch.src_paddings[i])


def testPositionWithinABatchContinuesWithTheNext(vocab, caplog):
  generator = _Input(vocab)
  whole = _Batches(generator, count=4)
  rows = [batch.example_weights.shape[0] for batch in whole]
  with caplog.at_level('WARNING', logger='absl'):
    position = sum(rows[:2]) + 1
    actual = _Batches(generator, position, 1)[0]
  tf.nest.map_structure(np.testing.assert_array_equal, actual, whole[3])
  assert naming.AnyLineNames(caplog.text, f'position {position}', sum(rows[:3]))


def testTokensAreCachedForTheNextRun(vocab, tmp_path):
  cls = _InputClass(_Pairs(9, 3))
  cache = str(tmp_path / 'cache')
  first = _Evaluation(vocab, cls=cls, cache_dir=cache)
  batches = _Batches(first)
  assert cls.num_reads == 1
  again = _Evaluation(vocab, cls=cls, cache_dir=cache)
  for actual, expected in zip(_Batches(again), batches, strict=True):
    tf.nest.map_structure(np.testing.assert_array_equal, actual, expected)
  assert cls.num_reads == 1
  plain = _Evaluation(vocab, cls=cls)
  assert plain.Fingerprint() == first.Fingerprint() == again.Fingerprint()
  other = _InputClass(_Pairs(9, 2))
  assert _Evaluation(vocab, cls=other, cache_dir=cache).NumExamples() == 11


def testFingerprintDefinesTheMeaningOfAPosition(vocab):
  prints = [
    _Input(vocab, **values).Fingerprint()
    for values in (
      {},
      {'direction': 'reversed'},
      {'target_language_token': 'source'},
      {'bucket_upper_bound': [11, 24, 48]},
      {'bucket_batch_limit': [3, 3, 3]},
      {'sampling_temperature': 2.0},
    )
  ]
  assert len(set(prints)) == len(prints)
  assert _Input(vocab, num_prefetch=0, random_seed=3).Fingerprint() == prints[0]


def testVocabularyTextsAndSymbols(vocab):
  generator = _Input(vocab)
  assert list(generator.VocabularyTexts())[:2] == [_Pairs()[0].source, _Pairs()[0].target]
  assert generator.ControlSymbols() == []
  assert generator.Assets() == [vocab]
  symbols = {
    direction: _Input(vocab, target_language_token='source', direction=direction).ControlSymbols()
    for direction in ('given', 'reversed', 'both')
  }
  assert symbols == {
    'given': ['<2en>'],
    'reversed': ['<2de>', '<2fr>'],
    'both': ['<2de>', '<2en>', '<2fr>'],
  }


def testRandomTokensNeedNoText():
  p = parallel_text.ParallelText.Params().Set(
    bucket_upper_bound=_BOUNDS, bucket_batch_limit=_LIMITS, num_fake_examples=50, vocab_size=32
  )
  p.Set(target_language_token='source')
  generator = p.Instantiate()
  batches = _Batches(generator, count=40)
  assert {tuple(b.src_ids.shape) for b in batches} == set(zip(_LIMITS, _BOUNDS, strict=True))
  for batch in batches:
    assert np.max(batch.src_ids) < 32 and np.max(batch.tgt_labels) < 32
  assert generator.Fingerprint() == 'noise' and generator.Assets() == []
  # An evaluation shows tokens and outputs as numbers, because there is no vocabulary.
  batch = next(b for b in batches if np.all(b.example_weights))
  labels = [
    row[: np.flatnonzero(row == sentencepiece_tokenizer.EOS_ID)[0]] for row in batch.tgt_labels
  ]
  assert [pair.target for pair in generator.SentencePairs(batch)] == list(
    map(generator.Text, labels)
  )
  assert all(text.split()[0].isdecimal() for text in map(generator.Text, labels))
  with pytest.raises(
    ValueError, match=naming.Naming('num_fake_examples', 'vocab_size above 4', 'got 4')
  ):
    p.Set(vocab_size=4).Instantiate()


@pytest.mark.parametrize(
  'values, names',
  [
    ({'batch_size': 3}, ("'Train'", 'param batch_size', 3, 'bucket_batch_limit')),
    ({'bucket_upper_bound': []}, ('bucket_upper_bound', '[16, 32, 64]')),
    ({'bucket_upper_bound': [8, 8]}, ('bucket_upper_bound', 'increasing', '[8, 8]')),
    ({'bucket_upper_bound': 8}, ('bucket_upper_bound', 'list', 8)),
    ({'bucket_batch_limit': [1, 2]}, ('bucket_batch_limit', '3 buckets', '[1, 2]')),
    ({'bucket_batch_limit': 0}, ('bucket_batch_limit', 0)),
    ({'bucket_batch_limit': None}, ('bucket_batch_limit', None)),
    ({'sampling_temperature': 0.0}, ('sampling_temperature', 'above 0', '0.0')),
    ({'direction': 'back'}, ('direction', "'reversed'", "'both'", "'back'")),
    ({'target_language_token': 'end'}, ('target_language_token', "''", "'source'", "'end'")),
    ({'num_epochs': -1}, ('num_epochs', -1)),
  ],
)
def testInvalidParamsAreNamed(vocab, values, names):
  with pytest.raises(ValueError, match=naming.Naming(*names)):
    _Input(vocab, **values)


def testMissingLanguageSymbolIsNamed(vocab):
  pairs = [*_Pairs(), sentence_pairs.SentencePair('en', 'tlh', 'house', 'qach')]
  generator = _Input(vocab, _InputClass(pairs), target_language_token='target')
  message = naming.Naming('tools.train_sentencepiece', '--control_symbols=<2tlh>')
  with pytest.raises(ValueError, match=message):
    generator.Dataset()
  with pytest.raises(
    ValueError, match=naming.Naming('vocab_filepath', 'tools.train_sentencepiece')
  ):
    _Input('').Dataset()


def testLanguageWithoutUsablePairsIsNamed(vocab):
  long = sentence_pairs.SentencePair('hu', 'en', 'Hund ' * 50, 'dog')
  with pytest.raises(ValueError, match=naming.Naming('hu-en', 48, 'bucket_upper_bound')):
    _Input(vocab, _InputClass([*_Pairs(), long])).Dataset()
  with pytest.raises(ValueError, match=naming.Naming("_Other 'Train'", 'NumExamples()', 'empty')):
    _Input(vocab, _InputClass([])).Dataset()


def testBucketMayBeEmpty(vocab):
  generator = _Input(vocab, bucket_upper_bound=[1, 48, 999], num_epochs=1)
  assert {b.src_ids.shape[1] for b in _Batches(generator)} == {48}


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
