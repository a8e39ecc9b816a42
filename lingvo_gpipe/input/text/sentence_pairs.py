# SPDX-License-Identifier: Apache-2.0
"""Sentence pairs as tokens, and their layout in a TokenStore."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.input.text import sentencepiece_tokenizer, token_store

# Number of pairs to tokenise in one call.
_PORTION = 1 << 14

# Version of the layout of a store.
LAYOUT = 2


class SentencePair(NamedTuple):
  """A sentence, its translation, and their languages, such as 'de' and 'en'."""

  source_language: str
  target_language: str
  source: str
  target: str

  def Reversed(self) -> SentencePair:
    """Returns the pair with source and target exchanged."""
    return SentencePair(self.target_language, self.source_language, self.target, self.source)


def Sequences(
  pairs: Iterable[SentencePair],
  tokenizer: sentencepiece_tokenizer.SentencePieceTokenizer,
  num_damaged: Callable[[], int] = lambda: 0,
) -> Iterator[np.ndarray]:
  """Yields the sequences of a store of sentence pairs.

  Sequences 2i and 2i + 1 are the source and target of pair i: the index of the sentence's language,
  and its tokens. The last sequence is the `Description`.

  Args:
    pairs: the pairs.
    tokenizer: tokenises the sentences.
    num_damaged: called after the last pair; returns the number of damaged pairs left out.
  """
  indices: dict[str, int] = {}
  iterator = iter(pairs)
  while portion := list(itertools.islice(iterator, _PORTION)):
    names = [name for pair in portion for name in (pair.source_language, pair.target_language)]
    texts = [text for pair in portion for text in (pair.source, pair.target)]
    for name, tokens in zip(names, tokenizer.Encode(texts), strict=True):
      index = indices.setdefault(name, len(indices))
      yield np.concatenate([np.array([index], np.int32), tokens])
  yield Description(list(indices), num_damaged())


def Description(languages: Sequence[str], num_damaged: int = 0) -> np.ndarray:
  """Returns the last sequence of a store: JSON with the names of the languages by index."""
  text = json.dumps({'languages': languages, 'num_damaged': num_damaged})
  return np.frombuffer(text.encode(), np.uint8)


class Sentences:
  """The sentences of a store of pairs: sentence 2i is the source of pair i, and 2i + 1 its target.

  Attributes:
    fingerprint: changes with any token or language.
    languages: names of the languages, sorted.
    num_damaged: number of damaged pairs left out.
    languages_of: int32 [sentences], indices into `languages`.
    num_tokens: int64 [sentences], without sos and eos.
  """

  def __init__(self, store: token_store.TokenStore) -> None:
    """Takes a store of the sequences from `Sequences`."""
    self._store = store
    self.fingerprint = store.fingerprint
    description = json.loads(bytes(store[len(store) - 1].astype(np.uint8)))
    names, self.num_damaged = description['languages'], int(description['num_damaged'])
    self.languages: list[str] = sorted(names)
    self._index_of_name = np.array([self.languages.index(name) for name in names], np.int32)
    self.languages_of = self._index_of_name[store.tokens[store.offsets[:-2]]]
    self.num_tokens = store.lengths[:-1] - 1

  def __len__(self) -> int:
    return len(self._store) - 1

  def Tensors(self) -> nested_map.NestedMap:
    """Returns the tensors for `Rows` and `LanguagesOf`: the store, and its languages."""
    tokens, offsets = self._store.tensors
    return nested_map.NestedMap(
      tokens=tokens, offsets=offsets, languages=tf.constant(self._index_of_name)
    )


def LanguagesOf(sentences: nested_map.NestedMap, indices: tf.Tensor) -> tf.Tensor:
  """Returns int32 [n], indices into `Sentences.languages`, of some sentences, int64 [n]."""
  begins = tf.gather(sentences.offsets, indices)
  return tf.gather(sentences.languages, tf.gather(sentences.tokens, begins))


def Rows(
  sentences: nested_map.NestedMap,
  indices: tf.Tensor,
  length: tf.Tensor,
  symbols: tf.Tensor | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns some sentences, each followed by eos, in rows of one length; longer ones are truncated.

  Consists of operations only, so that any process can run it.

  Args:
    sentences: `Sentences.Tensors()`, or a copy.
    indices: int64 [n], the sentences.
    length: int64 [], length of the rows.
    symbols: int32 [n], ids that start the rows; None: rows start with the sentence.

  Returns:
    ids int32 [n, length], PAD_ID after the end, and paddings float32 [n, length], 1 after the end.
  """
  begins = tf.gather(sentences.offsets, indices)[:, tf.newaxis]
  ends = tf.gather(sentences.offsets, indices + 1)[:, tf.newaxis]
  # The stored sequence begins with its language; a symbol takes its place.
  if symbols is None:
    begins += 1
  offsets = begins + tf.range(length)
  ids = tf.gather(sentences.tokens, tf.minimum(offsets, sentences.offsets[-1] - 1))
  if symbols is not None:
    ids = tf.where(offsets == begins, symbols[:, tf.newaxis], ids)
  ids = tf.where(offsets < ends, ids, sentencepiece_tokenizer.PAD_ID)
  ids = tf.where(offsets == ends, sentencepiece_tokenizer.EOS_ID, ids)
  return ids, tf.cast(offsets > ends, tf.float32)
