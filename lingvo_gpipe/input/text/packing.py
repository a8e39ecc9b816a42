# SPDX-License-Identifier: Apache-2.0
"""Documents in rows of equal length, for language modelling.

A document of n tokens has n + 1 *slots*. Slot k predicts token k of the document, or eos in the
last slot, and reads token k - 1, or sos in the first slot. The slots of all documents, one after
another, form one line. A row is a piece of that line, so two integers describe it.

  document    a b        c
  read        sos a  b   sos c
  predicted   a   b  eos c   eos
  line        0   1  2   3   4
"""

from __future__ import annotations

import bisect

import numpy as np
import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.input.text import sentencepiece_tokenizer, token_store


class Rows:
  """Rows of the documents of a store; a subclass defines the piece of the line in each row.

  Attributes:
    efficiency: the share of the rows' slots that is not padding.
  """

  efficiency: float

  def __init__(self, store: token_store.TokenStore, row_length: int, num_rows: int) -> None:
    """Takes a store of documents of at least one token each, and the number of slots of a row."""
    self._store = store
    self._row_length = row_length
    self._num_rows = num_rows

  def __len__(self) -> int:
    return self._num_rows

  def _Pieces(self, indices: tf.Tensor, offsets: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """Returns the pieces of the line that some rows hold.

    Args:
      indices: int64 [n], the rows.
      offsets: int64 [documents + 1], offsets of the store.

    Returns:
      int64 [n], four times: the begin and end of each piece, the first document that starts at or
      after the begin, and the first document that starts at or after the end.
    """
    raise NotImplementedError(f'_Pieces of {type(self).__name__}')

  def Fields(self, indices: tf.Tensor) -> nested_map.NestedMap:
    """Returns the fields of some rows, by operations only, so that any process can run them.

    Args:
      indices: int64 [n], the rows.

    Returns:
      NestedMap of tensors [n, row_length]: ids, labels, segment_ids (1, 2, ... by document, 0 at
      padding) and segment_pos (from 0 in each segment), all int32, and weights float32 (1, 0 at
      padding).
    """
    tokens, offsets = self._store.tensors
    begins, ends, documents, next_documents = self._Pieces(indices, offsets)

    # Shape [n, row_length + 1]: 1 if a document starts at a slot of a row, or at the slot after it.
    next_documents += tf.cast(_Starts(offsets, next_documents) == ends, tf.int64)
    starting = tf.ragged.range(documents, next_documents)
    row = starting.value_rowids()
    column = _Starts(offsets, starting.flat_values) - tf.gather(begins, row)
    shape = [tf.size(indices, tf.int64), self._row_length + 1]
    starts = tf.scatter_nd(tf.stack([row, column], axis=1), tf.ones_like(row, tf.int32), shape)
    is_start = starts > 0

    # Document d has the slots starts[d] + k. Each one reads token k - 1 of the document, which is
    # tokens[starts[d] + k - 1 - d].
    num_starts = tf.cumsum(starts, axis=1)
    document = documents[:, tf.newaxis] - 1 + tf.cast(num_starts, tf.int64)
    slots = begins[:, tf.newaxis] + tf.range(self._row_length + 1, dtype=tf.int64)
    read = tf.gather(tokens, tf.clip_by_value(slots - document - 1, 0, self._store.tokens.size - 1))
    firsts = tf.maximum(_Starts(offsets, document), begins[:, tf.newaxis])

    is_used = (slots < ends[:, tf.newaxis])[:, :-1]
    # A slot predicts the token that the next slot reads, unless a document starts there.
    ids = tf.where(is_start, sentencepiece_tokenizer.SOS_ID, read)[:, :-1]
    labels = tf.where(is_start, sentencepiece_tokenizer.EOS_ID, read)[:, 1:]
    return nested_map.NestedMap(
      ids=tf.where(is_used, ids, sentencepiece_tokenizer.PAD_ID),
      labels=tf.where(is_used, labels, sentencepiece_tokenizer.PAD_ID),
      weights=tf.cast(is_used, tf.float32),
      segment_ids=tf.where(is_used, (num_starts - num_starts[:, :1])[:, :-1] + 1, 0),
      segment_pos=tf.where(is_used, tf.cast(slots - firsts, tf.int32)[:, :-1], 0),
    )


class Packed(Rows):
  """Rows of complete documents, in order: a document that does not fit starts the next row.

  A document longer than a row is split anyway: it starts right after the previous document and
  continues in the next row.
  """

  def __init__(self, store: token_store.TokenStore, row_length: int) -> None:
    """See `Rows`."""
    starts = store.offsets + np.arange(store.offsets.size)
    # Reading single items of a memoryview (`data`) is several times faster than of an array. Each
    # iteration finds the end of a row, tens of documents at once.
    line = starts.data
    num_documents = len(line) - 1
    begins = []
    slot = document = 0
    while slot < line[num_documents]:
      begins.append(slot)
      limit = slot + row_length
      # A document has at least one slot, so this row has at most that many more documents.
      last = min(document + row_length + 1, num_documents)
      # The last document that starts at or before the limit; the index after the last document
      # counts as one.
      document = bisect.bisect_right(line, limit, document, last + 1) - 1
      if document == num_documents:
        break
      is_long = line[document + 1] - line[document] > row_length
      slot = limit if is_long else line[document]
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
  """One row per document, truncated at the end of the row."""

  def __init__(self, store: token_store.TokenStore, row_length: int) -> None:
    """See `Rows`."""
    super().__init__(store, row_length, len(store))
    num_slots = np.minimum(store.lengths + 1, row_length).sum()
    self.efficiency = float(num_slots) / max(1, len(store) * row_length)

  def _Pieces(self, indices: tf.Tensor, offsets: tf.Tensor) -> tuple[tf.Tensor, ...]:
    begins = _Starts(offsets, indices)
    ends = tf.minimum(_Starts(offsets, indices + 1), begins + self._row_length)
    return begins, ends, indices, indices + 1


def _Starts(offsets: tf.Tensor, documents: tf.Tensor) -> tf.Tensor:
  """Returns int64: the first slot of each document; after the last one, the number of slots."""
  return tf.gather(offsets, documents) + documents
