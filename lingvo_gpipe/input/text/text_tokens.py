# SPDX-License-Identifier: Apache-2.0
"""Language modelling on documents, split into the pieces of a SentencePiece vocabulary."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from lingvo_gpipe.core import domain, hyperparams, nested_map
from lingvo_gpipe.input import base_input_generator, index_order
from lingvo_gpipe.input.text import packing, sentencepiece_tokenizer, token_store

# Number of characters to tokenise in one call, by all threads.
_CHARACTERS_AT_ONCE = 1 << 22
_PACKED_FIELDS = ('segment_ids', 'segment_pos')
_FIRST_TEXT_ID = sentencepiece_tokenizer.UNK_ID + 1


class TextTokensInput(base_input_generator.BaseInputGenerator):
  """Rows of `p.seq_len` tokens from documents; a subclass implements `_Documents()`.

  A row reads sos and the tokens of a document, and predicts its tokens and eos. A batch has

  * `ids`, int32 [batch, time]: the tokens to read; pad after the end of the row,
  * `labels`, int32 [batch, time]: the tokens to predict,
  * `weights`, float32 [batch, time]: 1; 0 at padding and in padded rows,
  * `example_weights`, float32 [batch],

  and with p.packed, which puts several complete documents into a row (`packing.Packed`),

  * `segment_ids`, int32 [batch, time]: 1, 2, ... by document, 0 at padding,
  * `segment_pos`, int32 [batch, time]: the position in the segment, from 0 on.

  With p.count_words there is also

  * `words`, float32 [batch, time]: the number of words that begin with each token of `labels`; eos
    counts as one word, as in perplexities of the literature, and padding as none.

  Every token of every document is predicted once. Without p.packed a row is one document, truncated
  to p.seq_len. Documents without tokens are left out.

  Documents are tokenised once: at the first use, in memory, or into a folder of p.cache_dir, which
  every later process with the same documents and vocabulary maps into memory.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    p = super().Params()
    p.Define('vocab_filepath', '', 'SentencePiece model, made by tools/train_sentencepiece.py.')
    p.Define(
      'vocab_size',
      0,
      'Vocabulary size of the model: ids are below it; 0: not checked.',
      domain.INDEX,
    )
    p.Define('seq_len', 512, 'Number of tokens that a row predicts.', domain.SIZE)
    p.Define('packed', True, 'Whether a row holds several documents.')
    p.Define('count_words', False, 'Whether batches count the words that begin at each token.')
    p.Define(
      'max_documents',
      0,
      'Maximum number of documents to use, from the first on; 0: all.',
      domain.COUNT,
    )
    p.Define('cache_dir', '', 'Local folder that keeps the tokens between runs; empty: none.')
    p.Define(
      'num_fake_examples',
      0,
      'Above 0: number of rows of random tokens that replace the documents, for measuring time.',
      domain.EXAMPLES,
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    if self.params.num_fake_examples and self.params.vocab_size <= _FIRST_TEXT_ID:
      raise ValueError(
        f'{self._Context("num_fake_examples")} needs a vocab_size above {_FIRST_TEXT_ID}, '
        f'got {self.params.vocab_size}'
      )

  # Implemented by subclasses.

  def _Documents(self) -> Iterator[str]:
    """Yields all documents, always in the same order."""
    raise NotImplementedError(f'_Documents of {type(self).__name__}')

  def _SourceParts(self) -> list[Any]:
    """Returns strings and numbers that identify the documents without tokenising them."""
    raise NotImplementedError(f'_SourceParts of {type(self).__name__}')

  # Used by tasks and tools.

  def VocabularyTexts(self) -> Iterator[str]:
    """Yields the documents, to train a vocabulary on."""
    return itertools.islice(self._Documents(), self.params.max_documents or None)

  @functools.cached_property
  def tokenizer(self) -> sentencepiece_tokenizer.SentencePieceTokenizer:
    """The vocabulary; ValueError if it is missing or does not fit p.vocab_size."""
    p = self.params
    context = self._Context('vocab_filepath')
    return sentencepiece_tokenizer.Load(p.vocab_filepath, p.vocab_size, context)

  def NumTokens(self) -> int:
    """Returns the number of tokens of all documents, without sos and eos."""
    return int(self._store.offsets[-1])

  def Assets(self) -> list[str]:
    """Returns the path of the vocabulary."""
    p = self.params
    return [p.vocab_filepath] if p.vocab_filepath and not p.num_fake_examples else []

  def NumExamples(self) -> int:
    return self.params.num_fake_examples or len(self._rows)

  def Fingerprint(self) -> str:
    """See the base class; 'noise' for random tokens."""
    return 'noise' if self.params.num_fake_examples else super().Fingerprint()

  # Tokens.

  @functools.cached_property
  def _store(self) -> token_store.TokenStore:
    p = self.params
    if not p.cache_dir:
      return token_store.TokenStore.Build(self._Sequences())
    parts = [*self._SourceParts(), p.max_documents, self.tokenizer.fingerprint]
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    directory = os.path.join(os.path.expanduser(p.cache_dir), f'tokens-{key}')
    return token_store.LoadOrWrite(directory, self._Sequences)

  def _Sequences(self) -> Iterator[np.ndarray]:
    """Yields the tokens of the documents, except empty ones."""
    num_documents = num_left_out = 0
    for texts in _Portions(self.VocabularyTexts()):
      for tokens in self.tokenizer.Encode(texts):
        if tokens.size:
          yield tokens
        else:
          num_left_out += 1
      num_documents += len(texts)
      logging.log_every_n_seconds(
        logging.INFO, '%s: tokenised %d documents', 30, self.params.name, num_documents
      )
    if num_left_out:
      logging.info('%s: left out %d empty documents', self.params.name, num_left_out)

  # Rows.

  @functools.cached_property
  def _rows(self) -> packing.Rows:
    p = self.params
    rows = (packing.Packed if p.packed else packing.OneDocumentEach)(self._store, p.seq_len)
    logging.info(
      '%s: %d documents of %d tokens in %d rows of %d, %.1f %% full%s',
      p.name or type(self).__name__,
      len(self._store),
      self.NumTokens(),
      len(rows),
      p.seq_len,
      100 * rows.efficiency,
      '' if p.packed else f' ({self._NumTruncated()} are truncated)',
    )
    return rows

  @functools.cached_property
  def _words(self) -> np.ndarray:
    """float32 [vocabulary]: the number of words that begin with each token; see the class."""
    try:
      words = self.tokenizer.WordStarts()
    except ValueError as e:
      raise ValueError(f'{self._Context("count_words")}: {e}') from e
    words[sentencepiece_tokenizer.EOS_ID] = 1.0
    return words

  def _NumTruncated(self) -> int:
    return int(np.sum(self._store.lengths >= self.params.seq_len))  # Eos needs a slot, too.

  def _ExampleSpec(self) -> nested_map.NestedMap:
    shape = [self.params.seq_len]
    spec = nested_map.NestedMap(
      ids=tf.TensorSpec(shape, tf.int32),
      labels=tf.TensorSpec(shape, tf.int32),
      weights=tf.TensorSpec(shape, tf.float32),
    )
    if self.params.packed:
      for name in _PACKED_FIELDS:
        spec[name] = tf.TensorSpec(shape, tf.int32)
    if self.params.count_words:
      spec.words = tf.TensorSpec(shape, tf.float32)
    return spec

  def _Examples(self, indices: tf.Tensor) -> nested_map.NestedMap:
    if self.params.num_fake_examples:
      return self._FakeExamples(indices)
    fields = self._rows.Fields(indices)
    if self.params.count_words:
      fields.words = tf.gather(self._words, fields.labels)
    return nested_map.NestedMap({name: fields[name] for name in self._ExampleSpec()})

  def _FakeExamples(self, indices: tf.Tensor) -> nested_map.NestedMap:
    p = self.params
    offsets = tf.range(p.seq_len + 1, dtype=tf.int64)
    hashes = index_order.TensorHash64(
      p.random_seed, indices[:, tf.newaxis] * (p.seq_len + 1) + offsets
    )
    num_ids = tf.constant(p.vocab_size - _FIRST_TEXT_ID, tf.uint64)
    tokens = tf.cast(tf.math.floormod(hashes, num_ids), tf.int32) + _FIRST_TEXT_ID
    ids = tokens[:, :-1]
    examples = nested_map.NestedMap(
      ids=ids, labels=tokens[:, 1:], weights=tf.ones_like(ids, tf.float32)
    )
    if p.packed:
      examples.segment_ids = tf.ones_like(ids)
      examples.segment_pos = tf.zeros_like(ids) + tf.range(p.seq_len)
    if p.count_words:
      examples.words = tf.ones_like(ids, tf.float32)
    return examples

  def _FingerprintParts(self) -> list[Any]:
    p = self.params
    tokens = [self.tokenizer.fingerprint, self._store.fingerprint]
    return ['text_tokens', p.seq_len, p.packed, *tokens]


def _Portions(texts: Iterator[str]) -> Iterator[list[str]]:
  """Yields lists of consecutive texts of a bounded total length, with at least one text each."""
  portion: list[str] = []
  length = 0
  for text in texts:
    portion.append(text)
    length += len(text) + 1
    if length >= _CHARACTERS_AT_ONCE:
      yield portion
      portion, length = [], 0
  if portion:
    yield portion
