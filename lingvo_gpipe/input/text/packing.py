# SPDX-License-Identifier: Apache-2.0
"""Documents in rows of equal length, for language modelling: which goes where, and a row's fields.

A document of n tokens has n + 1 *places*: each predicts a token, the last one eos, from what stands
before it, the first one from sos. The places of all documents, one after another, are one line; a
row is a piece of that line, so two integers say all about it.
"""

from __future__ import annotations

import bisect

import numpy as np
import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.input.text import sentencepiece_tokenizer, token_store


class Rows:
  """Rows of the documents of a store; a subclass says which piece of the line a row is.

  Attributes:
    efficiency: the share of the rows that is no padding.
  """

  efficiency: float

  def __init__(self, store: token_store.TokenStore, row_length: int, num_rows: int) -> None:
    """Takes a store of documents, each of a token or more, and the places of a row."""
    self._store = store
    self._row_length = row_length
    self._num_rows = num_rows

  def __len__(self) -> int:
    return self._num_rows

  def _Pieces(self, indices: tf.Tensor, offsets: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """Which pieces of the line some rows are.

    Args:
      indices: int64 [n].
      offsets: of the store, int64.

    Returns:
      int64 [n], four times: where the pieces begin and end, the first document that starts at that
      begin or behind it, and the first one that starts at that end or behind it.
    """
    raise NotImplementedError(f'_Pieces of {type(self).__name__}')

  def Fields(self, indices: tf.Tensor) -> nested_map.NestedMap:
    """The fields of some rows, by operations alone, so that any process can run them.

    Args:
      indices: int64 [n], which rows.

    Returns:
      NestedMap of tensors [n, row_length]: ids, labels, segment_ids (0 at padding, else 1, 2, ...
      by document) and segment_pos (from 0 in each segment), all int32, and weights float32 (0 at
      padding, else 1).
    """
    tokens, offsets = self._store.tensors
    begins, ends, documents, next_documents = self._Pieces(indices, offsets)

    # Whether a document starts at each place of a row, and at the one behind them all.
    next_documents += tf.cast(_Starts(offsets, next_documents) == ends, tf.int64)
    starting = tf.ragged.range(documents, next_documents)
    row = starting.value_rowids()
    column = _Starts(offsets, starting.flat_values) - tf.gather(begins, row)
    shape = [tf.size(indices, tf.int64), self._row_length + 1]
    starts = tf.scatter_nd(tf.stack([row, column], axis=1), tf.ones_like(row, tf.int32), shape)
    is_start = starts > 0

    # Document d is predicted at the places starts[d] + k; what is read there is token k - 1 of it,
    # which is tokens[starts[d] + k - 1 - d].
    nth = tf.cumsum(starts, axis=1)
    document = documents[:, tf.newaxis] - 1 + tf.cast(nth, tf.int64)
    places = begins[:, tf.newaxis] + tf.range(self._row_length + 1, dtype=tf.int64)
    read = tf.gather(
      tokens, tf.clip_by_value(places - document - 1, 0, self._store.tokens.size - 1)
    )
    firsts = tf.maximum(_Starts(offsets, document), begins[:, tf.newaxis])

    is_place = (places < ends[:, tf.newaxis])[:, :-1]
    # What is predicted is read at the next place, if that is of the same document.
    ids = tf.where(is_start, sentencepiece_tokenizer.SOS_ID, read)[:, :-1]
    labels = tf.where(is_start, sentencepiece_tokenizer.EOS_ID, read)[:, 1:]
    return nested_map.NestedMap(
      ids=tf.where(is_place, ids, sentencepiece_tokenizer.PAD_ID),
      labels=tf.where(is_place, labels, sentencepiece_tokenizer.PAD_ID),
      weights=tf.cast(is_place, tf.float32),
      segment_ids=tf.where(is_place, (nth - nth[:, :1])[:, :-1] + 1, 0),
      segment_pos=tf.where(is_place, tf.cast(places - firsts, tf.int32)[:, :-1], 0),
    )


class Packed(Rows):
  """Rows of whole documents, in their order: a document that does not fit begins the next row.

  A document that is longer than a row is cut anyway: it begins where the one before it ends, and
  goes on in the next row.
  """

  def __init__(self, store: token_store.TokenStore, row_length: int) -> None:
    """As `Rows`."""
    starts = store.offsets + np.arange(store.offsets.size)
    # Item by item a memoryview (`data`) is several times faster than an array. A step finds the end
    # of a row, tens of documents at once.
    line = starts.data
    num_documents = len(line) - 1
    begins = []
    place = document = 0
    while place < line[num_documents]:
      begins.append(place)
      limit = place + row_length
      # Each document has a place or more, so no more of them begin in this row.
      last = min(document + row_length + 1, num_documents)
      # The last document that begins at or before the limit; that behind the end counts as one.
      document = bisect.bisect_right(line, limit, document, last + 1) - 1
      if document == num_documents:
        break
      is_long = line[document + 1] - line[document] > row_length
      place = limit if is_long else line[document]
    super().__init__(store, row_length, len(begins))
    self.efficiency = line[num_documents] / max(1, len(begins) * row_length)
    borders = np.array([*begins, line[num_documents]], np.int64)
    with tf.init_scope(), tf.device('/device:CPU:0'):
      self._borders = tf.constant(borders)
      self._documents = tf.constant(np.searchsorted(starts, borders))

  def _Pieces(self, indices: tf.Tensor, offsets: tf.Tensor) -> tuple[tf.Tensor, ...]:
    del offsets
    values = (self._borders, self._documents)
    begins, documents = (tf.gather(x, indices) for x in values)
    ends, next_documents = (tf.gather(x, indices + 1) for x in values)
    return begins, ends, documents, next_documents


class OneDocumentEach(Rows):
  """A row for each document, which is cut at the row's end."""

  def __init__(self, store: token_store.TokenStore, row_length: int) -> None:
    """As `Rows`."""
    super().__init__(store, row_length, len(store))
    num_places = np.minimum(store.lengths + 1, row_length).sum()
    self.efficiency = float(num_places) / max(1, len(store) * row_length)

  def _Pieces(self, indices: tf.Tensor, offsets: tf.Tensor) -> tuple[tf.Tensor, ...]:
    begins = _Starts(offsets, indices)
    ends = tf.minimum(_Starts(offsets, indices + 1), begins + self._row_length)
    return begins, ends, indices, indices + 1


def _Starts(offsets: tf.Tensor, documents: tf.Tensor) -> tf.Tensor:
  """int64: the first place of each document; of the one behind the last, the number of places."""
  return tf.gather(offsets, documents) + documents
