# SPDX-License-Identifier: Apache-2.0
"""Pairs of sentences in two or more languages, for translation."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe.core import domain, hyperparams, nested_map
from lingvo_gpipe.input import bucketed_input
from lingvo_gpipe.input.text import sentence_pairs, sentencepiece_tokenizer, token_store

_DIRECTIONS = ('given', 'reversed', 'both')
_SYMBOL_PLACES = ('', 'source', 'target')
_FIRST_TEXT_ID = sentencepiece_tokenizer.UNK_ID + 1
_FAKE_LANGUAGES = ('source', 'target')


def LanguageSymbol(language: str) -> str:
  """Returns the vocabulary piece that asks for a translation into a language: '<2de>'."""
  return f'<2{language}>'


class ParallelText(bucketed_input.BucketedInput):
  """Sentence pairs as tokens, in buckets by the longer side; a subclass implements `_Pairs()`.

  A batch of the bucket [b, t] has

  * `src_ids`, int32 [b, t]: the source's tokens and eos, then pad; before them the symbol of the
    target language if p.target_language_token is 'source',
  * `tgt_ids`, int32 [b, t]: sos (or that symbol, for 'target') and the target's tokens,
  * `tgt_labels`, int32 [b, t]: the target's tokens and eos: `tgt_ids` shifted by one,
  * `src_paddings`, `tgt_paddings`, float32 [b, t]: 1 after the end, 0 before it,
  * `tgt_weights`, float32 [b, t]: 1 for each label; 0 after the end and in padded rows,
  * `src_lang`, `tgt_lang`, int32 [b]: indices into `languages`,
  * `example_index`, int64 [b]: the example of each row, for `SentencePairs`,
  * `example_weights`, float32 [b]: 0 for padded rows.

  The length of a pair is the length of its longer side with eos and symbol; a truncated side has no
  eos. The groups that temperature mixes (see BucketedInput) are the pairs of languages.

  With many target languages, a symbol tells the model the language to translate into (Johnson et
  al. 2017, "Google's Multilingual Neural Machine Translation System", section 3).

  The text is tokenised once: at the first use, in memory, or into a folder of p.cache_dir, which
  every later process with the same text and vocabulary maps into memory.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of an input of sentence pairs."""
    p = super().Params()
    p.Define('vocab_filepath', '', 'SentencePiece model, made by tools/train_sentencepiece.py.')
    p.Define(
      'vocab_size',
      0,
      'Vocabulary size of the model: ids are below it; 0: not checked.',
      domain.INDEX,
    )
    p.Define(
      'direction',
      'given',
      "Direction of translation: 'given', 'reversed', or 'both', each pair as two examples.",
      domain.OneOf(*_DIRECTIONS),
    )
    p.Define(
      'target_language_token',
      '',
      "Place of the target language's symbol: before the 'source', or instead of sos in the "
      "'target'; empty: no symbol.",
      domain.OneOf(*_SYMBOL_PLACES),
    )
    p.Define('cache_dir', '', 'Local folder that keeps the tokens between runs; empty: none.')
    p.Define(
      'num_fake_examples',
      0,
      'Above 0: number of pairs of random tokens that replace the text, for measuring time.',
      domain.Int(0, 1 << 24),
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    self._num_damaged_read = 0  # `_Pairs` sets it at its end if it leaves any out.
    p = self.params
    if p.num_fake_examples and p.vocab_size <= _FIRST_TEXT_ID:
      raise ValueError(
        f'{self._Context("num_fake_examples")} needs a vocab_size above {_FIRST_TEXT_ID}, '
        f'got {p.vocab_size}'
      )

  # Implemented by subclasses.

  def _Pairs(self) -> Iterable[sentence_pairs.SentencePair]:
    """Returns all sentence pairs, always in the same order; their languages may differ."""
    raise NotImplementedError(f'_Pairs of {type(self).__name__}')

  def _SourceParts(self) -> list[Any]:
    """Returns values that identify the pairs without tokenising them, for p.cache_dir."""
    raise NotImplementedError(f'_SourceParts of {type(self).__name__}')

  # Used by tasks and tools.

  @functools.cached_property
  def tokenizer(self) -> sentencepiece_tokenizer.SentencePieceTokenizer:
    """The vocabulary of both sides; ValueError if it is missing or too large."""
    p = self.params
    return sentencepiece_tokenizer.Load(
      p.vocab_filepath, p.vocab_size, self._Context('vocab_filepath')
    )

  @property
  def languages(self) -> list[str]:
    """The languages of the data, sorted."""
    return self._sentences.languages

  def NumDamaged(self) -> int:
    """See the base class; stored with the tokens."""
    return self._sentences.num_damaged

  def SentencePairs(self, batch: nested_map.NestedMap) -> list[sentence_pairs.SentencePair]:
    """Returns the original, complete pairs of the rows of a batch, without padded rows.

    Reads the text once more and keeps it in memory, which an evaluation can afford.
    """
    indices = np.asarray(batch.example_index)[np.asarray(batch.example_weights) > 0]
    pairs = self._texts
    originals = []
    for i in indices:
      is_reversed = self.params.direction == 'reversed' or i >= len(pairs)
      pair = pairs[i % len(pairs)]
      originals.append(pair.Reversed() if is_reversed else pair)
    return originals

  def Text(self, ids: Iterable[int]) -> str:
    """Returns the text of some tokens; their numbers if they are random and have no text."""
    if self.params.num_fake_examples:
      return ' '.join(str(i) for i in ids)
    return self.tokenizer.Decode(ids)

  def VocabularyTexts(self) -> Iterator[str]:
    """Yields sources and targets, to train a vocabulary on."""
    for pair in self._Pairs():
      yield pair.source
      yield pair.target

  def ControlSymbols(self) -> list[str]:
    """Returns the symbols of target languages, which the vocabulary needs besides the text."""
    p = self.params
    if not p.target_language_token:
      return []
    languages = set()
    for pair in self._Pairs():
      if p.direction != 'reversed':
        languages.add(pair.target_language)
      if p.direction != 'given':
        languages.add(pair.source_language)
    return [LanguageSymbol(language) for language in sorted(languages)]

  def Assets(self) -> list[str]:
    """Returns the path of the vocabulary."""
    p = self.params
    return [p.vocab_filepath] if p.vocab_filepath and not p.num_fake_examples else []

  def Fingerprint(self) -> str:
    """See the base class; 'noise' for random tokens."""
    return 'noise' if self.params.num_fake_examples else super().Fingerprint()

  # The sentences, and the pairs of them that form examples.

  @functools.cached_property
  def _texts(self) -> list[sentence_pairs.SentencePair]:
    if not self.params.num_fake_examples:
      return list(self._Pairs())
    *sentences, _ = (self.Text(sequence[1:]) for sequence in self._FakeSequences())
    sides = zip(sentences[::2], sentences[1::2], strict=True)
    return [sentence_pairs.SentencePair(*_FAKE_LANGUAGES, *pair) for pair in sides]

  @functools.cached_property
  def _sentences(self) -> sentence_pairs.Sentences:
    p = self.params
    if p.num_fake_examples:
      store = token_store.TokenStore.Build(self._FakeSequences())
    elif not p.cache_dir:
      store = token_store.TokenStore.Build(self._Sequences())
    else:
      parts = [sentence_pairs.LAYOUT, *self._SourceParts(), self.tokenizer.fingerprint]
      key = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
      directory = os.path.join(os.path.expanduser(p.cache_dir), f'pairs-{key}')
      store = token_store.LoadOrWrite(directory, self._Sequences)
    return sentence_pairs.Sentences(store)

  def _Sequences(self) -> Iterator[np.ndarray]:
    pairs = self._Pairs()
    return sentence_pairs.Sequences(pairs, self.tokenizer, lambda: self._num_damaged_read)

  def _FakeSequences(self) -> Iterator[np.ndarray]:
    p = self.params
    # The bit generator's raw numbers are equal in all versions of NumPy.
    numbers = np.random.Philox(key=p.random_seed % 2**64)
    longest = p.bucket_upper_bound[-1] - 1 - (p.target_language_token == 'source')
    for i in range(2 * p.num_fake_examples):
      length = 1 + int(numbers.random_raw()) % max(longest, 1)
      tokens = numbers.random_raw(length) % (p.vocab_size - _FIRST_TEXT_ID) + _FIRST_TEXT_ID
      yield np.concatenate([[i % 2], tokens.astype(np.int64)])
    yield sentence_pairs.Description(['source', 'target'])

  def _Sides(self, examples: Any) -> tuple[Any, Any]:
    """Returns the source and target sentences of examples, int64 each, as arrays or tensors."""
    num_pairs = max(1, len(self._sentences) // 2)
    # With both directions, the second half of the examples is reversed.
    is_reversed = examples // num_pairs + (self.params.direction == 'reversed')
    first = 2 * (examples % num_pairs)
    return first + is_reversed, first + 1 - is_reversed

  @functools.cached_property
  def _examples(self) -> tuple[np.ndarray, np.ndarray]:
    """int64 [n] and [n]: the source and target sentences of each example."""
    num_directions = 2 if self.params.direction == 'both' else 1
    return self._Sides(np.arange(len(self._sentences) // 2 * num_directions))

  @functools.cached_property
  def _symbols(self) -> np.ndarray:
    """int32 [languages]: the id of each target language's symbol.

    Raises:
      ValueError: the vocabulary lacks some of them.
    """
    p = self.params
    languages = self._sentences.languages
    ids = np.full([len(languages)], _FIRST_TEXT_ID, np.int32)
    if not p.target_language_token or p.num_fake_examples:
      return ids
    missing = []
    for i in np.unique(self._sentences.languages_of[self._examples[1]]):
      symbol = LanguageSymbol(languages[i])
      try:
        ids[i] = self.tokenizer.PieceId(symbol)
      except ValueError:
        missing.append(symbol)
    if missing:
      raise ValueError(
        f'{self._Context("target_language_token")}: the vocabulary {p.vocab_filepath!r} lacks the '
        f'symbols {", ".join(missing)}: train it again by `python -m tools.train_sentencepiece` '
        f'with --control_symbols={",".join(missing)}'
      )
    return ids

  # Overrides of BucketedInput.

  def _Lengths(self) -> np.ndarray:
    sources, targets = self._examples
    num_tokens = self._sentences.num_tokens
    num_symbols = int(self.params.target_language_token == 'source')
    return np.maximum(num_tokens[sources] + num_symbols, num_tokens[targets]) + 1

  def _IsEmpty(self) -> np.ndarray:
    sources, targets = self._examples
    num_tokens = self._sentences.num_tokens
    return (num_tokens[sources] == 0) | (num_tokens[targets] == 0)

  @functools.cached_property
  def _language_pairs(self) -> tuple[list[str], np.ndarray]:
    sources, targets = (self._sentences.languages_of[side] for side in self._examples)
    names = self._sentences.languages
    pair_keys, groups = np.unique(sources * len(names) + targets, return_inverse=True)
    return [f'{names[i // len(names)]}-{names[i % len(names)]}' for i in pair_keys], groups

  def _Groups(self) -> np.ndarray:
    return self._language_pairs[1]

  def _GroupNames(self) -> list[str]:
    return self._language_pairs[0]

  def _FingerprintParts(self) -> list[Any]:
    p = self.params
    tokens = [self.tokenizer.fingerprint, self._sentences.fingerprint]
    return [*super()._FingerprintParts(), *tokens, p.direction, p.target_language_token]

  def _RowSpec(self, length: int | None) -> nested_map.NestedMap:
    ids, numbers = tf.TensorSpec([length], tf.int32), tf.TensorSpec([length], tf.float32)
    return nested_map.NestedMap(
      src_ids=ids,
      src_paddings=numbers,
      src_lang=tf.TensorSpec([], tf.int32),
      tgt_ids=ids,
      tgt_labels=ids,
      tgt_paddings=numbers,
      tgt_weights=numbers,
      tgt_lang=tf.TensorSpec([], tf.int32),
      example_index=tf.TensorSpec([], tf.int64),
    )

  def _Tensors(self) -> nested_map.NestedMap:
    return nested_map.NestedMap(self._sentences.Tensors(), symbols=tf.constant(self._symbols))

  def _Rows(
    self,
    tensors: nested_map.NestedMap,
    indices: tf.Tensor,
    length: tf.Tensor,
    example_weights: tf.Tensor,
  ) -> nested_map.NestedMap:
    place = self.params.target_language_token
    sources, targets = self._Sides(indices)
    target_languages = sentence_pairs.LanguagesOf(tensors, targets)
    symbols = tf.gather(tensors.symbols, target_languages)
    src_ids, src_paddings = sentence_pairs.Rows(
      tensors, sources, length, symbols if place == 'source' else None
    )
    labels, tgt_paddings = sentence_pairs.Rows(tensors, targets, length)
    if place != 'target':
      symbols = tf.fill(tf.shape(symbols), sentencepiece_tokenizer.SOS_ID)
    # The target input has no eos, because no token follows it.
    following = tf.where(tgt_paddings[:, 1:] == 0, labels[:, :-1], sentencepiece_tokenizer.PAD_ID)
    return nested_map.NestedMap(
      src_ids=src_ids,
      src_paddings=src_paddings,
      src_lang=sentence_pairs.LanguagesOf(tensors, sources),
      tgt_ids=tf.concat([symbols[:, tf.newaxis], following], axis=1),
      tgt_labels=labels,
      tgt_paddings=tgt_paddings,
      tgt_weights=(1 - tgt_paddings) * example_weights[:, tf.newaxis],
      tgt_lang=target_languages,
      example_index=indices,
    )
