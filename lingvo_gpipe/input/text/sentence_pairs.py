# SPDX-License-Identifier: Apache-2.0
"""Sentence pairs as tokens: what is read, and how it lies in a TokenStore."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.input.text import sentencepiece_tokenizer, token_store

# Pairs that are given to the tokenizer at a time.
_PORTION = 1 << 14

# Changes when the layout of a store does.
LAYOUT = 2


class SentencePair(NamedTuple):
  """A sentence, its translation, and their languages, such as 'de' and 'en'."""

  source_language: str
  target_language: str
  source: str
  target: str

  def Reversed(self) -> SentencePair:
    """The translation as the source."""
    return SentencePair(self.target_language, self.source_language, self.target, self.source)


def Sequences(
  pairs: Iterable[SentencePair],
  tokenizer: sentencepiece_tokenizer.SentencePieceTokenizer,
  num_damaged: Callable[[], int] = lambda: 0,
) -> Iterator[np.ndarray]:
  """What a store of sentence pairs consists of.

  Sequences 2i and 2i + 1 are source and target of pair i: the index of the sentence's language,
  and its tokens. The last sequence is the `Description`.

  Args:
    pairs: the pairs.
    tokenizer: makes tokens of them.
    num_damaged: asked behind the last pair, how many were damaged and left out.
  """
  indices: dict[str, int] = {}
  rest = iter(pairs)
  while portion := list(itertools.islice(rest, _PORTION)):
    names = [name for pair in portion for name in (pair.source_language, pair.target_language)]
    texts = [text for pair in portion for text in (pair.source, pair.target)]
    for name, tokens in zip(names, tokenizer.Encode(texts), strict=True):
      index = indices.setdefault(name, len(indices))
      yield np.concatenate([np.array([index], np.int32), tokens])
  yield Description(list(indices), num_damaged())


def Description(languages: Sequence[str], num_damaged: int = 0) -> np.ndarray:
  """The last sequence of a store: the languages' names, in the order of indices, as JSON."""
  text = json.dumps({'languages': languages, 'num_damaged': num_damaged})
  return np.frombuffer(text.encode(), np.uint8)


class Sentences:
  """The sentences of a store of pairs, sentence 2i the source of pair i and 2i + 1 its target.

  Attributes:
    fingerprint: changes with any token or language.
    languages: their names, sorted.
    num_damaged: how many pairs were damaged and left out.
    languages_of: int32 [sentences], indices into `languages`.
    num_tokens: int64 [sentences], without sos and eos.
  """

  def __init__(self, store: token_store.TokenStore) -> None:
    """Takes a store of what `Sequences` gave."""
    self._store = store
    self.fingerprint = store.fingerprint
    found = json.loads(bytes(store[len(store) - 1].astype(np.uint8)))
    names, self.num_damaged = found['languages'], int(found['num_damaged'])
    self.languages: list[str] = sorted(names)
    self._index_of_name = np.array([self.languages.index(name) for name in names], np.int32)
    self.languages_of = self._index_of_name[store.tokens[store.offsets[:-2]]]
    self.num_tokens = store.lengths[:-1] - 1

  def __len__(self) -> int:
    return len(self._store) - 1

  def Tensors(self) -> nested_map.NestedMap:
    """What `Rows` and `LanguagesOf` read: the store, and `languages` by the indices in it."""
    tokens, offsets = self._store.tensors
    return nested_map.NestedMap(
      tokens=tokens, offsets=offsets, languages=tf.constant(self._index_of_name)
    )


def LanguagesOf(sentences: nested_map.NestedMap, which: tf.Tensor) -> tf.Tensor:
  """int32 [n], indices into `Sentences.languages`: those of some sentences, int64 [n]."""
  begins = tf.gather(sentences.offsets, which)
  return tf.gather(sentences.languages, tf.gather(sentences.tokens, begins))


def Rows(
  sentences: nested_map.NestedMap,
  which: tf.Tensor,
  length: tf.Tensor,
  symbols: tf.Tensor | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
  """Some sentences, each with eos behind it, in rows of one length; what is too long is cut off.

  Operations alone make them, so that any process can.

  Args:
    sentences: the `Sentences.Tensors()`, or a copy.
    which: int64 [n].
    length: int64 [], of the rows.
    symbols: int32 [n], ids that the rows begin with; None: they begin with the sentence.

  Returns:
    ids int32 [n, length], PAD_ID behind the end, and paddings float32 [n, length]: 1 there.
  """
  begins = tf.gather(sentences.offsets, which)[:, tf.newaxis]
  ends = tf.gather(sentences.offsets, which + 1)[:, tf.newaxis]
  # The language is in the place of the symbol.
  if symbols is None:
    begins += 1
  places = begins + tf.range(length)
  ids = tf.gather(sentences.tokens, tf.minimum(places, sentences.offsets[-1] - 1))
  if symbols is not None:
    ids = tf.where(places == begins, symbols[:, tf.newaxis], ids)
  ids = tf.where(places < ends, ids, sentencepiece_tokenizer.PAD_ID)
  ids = tf.where(places == ends, sentencepiece_tokenizer.EOS_ID, ids)
  return ids, tf.cast(places > ends, tf.float32)
