# SPDX-License-Identifier: Apache-2.0
"""Documents in rows of equal length, for language modelling: which goes where, and a row's fields.

A document of n tokens has n + 1 *places*: each predicts a token, the last one eos, from what stands
before it, the first one from sos. The places of all documents, one after another, are one line; a
row is a piece of that line, so two integers say all about it.
"""

from __future__ import annotations

import bisect
import dataclasses

import numpy as np

from lingvo_gpipe import nested_map
from lingvo_gpipe.input import sentencepiece_tokenizer, token_store


@dataclasses.dataclass(frozen=True)
class Rows:
  """Rows as pieces of the line of places: row r is [begins[r], ends[r])."""

  begins: np.ndarray  # int64 [rows].
  ends: np.ndarray  # int64 [rows].
  row_length: int

  def __len__(self) -> int:
    return self.begins.size

  @property
  def efficiency(self) -> float:
    """The share of the rows that is no padding."""
    return float(np.sum(self.ends - self.begins)) / max(1, len(self) * self.row_length)


def Starts(store: token_store.TokenStore) -> np.ndarray:
  """int64 [n + 1]: the first place of each document, and the number of places."""
  return store.offsets + np.arange(store.offsets.size)


def Packed(starts: np.ndarray, row_length: int) -> Rows:
  """Rows of whole documents, in their order: a document that does not fit begins the next row.

  A document that is longer than a row is cut anyway: it begins where the one before it ends, and
  goes on in the next row.

  Args:
    starts: int64 [n + 1], from `Starts`.
    row_length: places of a row.
  """
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
  ends = [*begins[1:], line[num_documents]] if begins else []
  return Rows(np.array(begins, np.int64), np.array(ends, np.int64), row_length)


def OneDocumentEach(starts: np.ndarray, row_length: int) -> Rows:
  """A row for each document, which is cut at the row's end.

  Args:
    starts: int64 [n + 1], from `Starts`.
    row_length: places of a row.
  """
  return Rows(starts[:-1], np.minimum(starts[1:], starts[:-1] + row_length), row_length)


def Fields(
  store: token_store.TokenStore, starts: np.ndarray, rows: Rows, indices: np.ndarray
) -> nested_map.NestedMap:
  """The fields of some rows.

  Args:
    store: the documents; each has a token or more.
    starts: from `Starts`.
    rows: from `Packed` or `OneDocumentEach`.
    indices: integers [n], which rows.

  Returns:
    NestedMap of arrays [n, row_length]: ids, labels, segment_ids (0 at padding, else 1, 2, ... by
    document) and segment_pos (from 0 in each segment), all int32, and weights float32 (0 at
    padding, else 1).
  """
  begins, ends = rows.begins[indices], rows.ends[indices]
  places = begins[:, np.newaxis] + np.arange(rows.row_length)
  is_place = places < ends[:, np.newaxis]
  places = np.minimum(places, ends[:, np.newaxis] - 1)

  # Which document each place is of: that of the row's first place, and one more at each start.
  first = np.searchsorted(starts, begins, side='right') - 1
  counts = np.searchsorted(starts, ends, side='left') - 1 - first
  which_row = np.repeat(np.arange(begins.size), counts)
  within = np.arange(which_row.size) - np.repeat(np.cumsum(counts) - counts, counts)
  later = starts[first[which_row] + 1 + within] - begins[which_row]
  is_later_start = np.zeros(places.shape, np.int64)
  is_later_start[which_row, later] = 1
  nth = np.cumsum(is_later_start, axis=1)
  documents = first[:, np.newaxis] + nth

  # Token k of document d is predicted at place starts[d] + k and is tokens[starts[d] + k - d].
  is_first = places == starts[documents]
  is_last = places == starts[documents + 1] - 1
  tokens = places - documents
  last_token = store.tokens.size - 1
  labels = np.where(
    is_last, sentencepiece_tokenizer.EOS_ID, store.tokens[np.minimum(tokens, last_token)]
  )
  ids = np.where(is_first, sentencepiece_tokenizer.SOS_ID, store.tokens[np.maximum(tokens - 1, 0)])
  positions = places - np.maximum(starts[documents], begins[:, np.newaxis])

  def Padded(values: np.ndarray, padding: int) -> np.ndarray:
    return np.where(is_place, values, padding).astype(np.int32)

  return nested_map.NestedMap(
    ids=Padded(ids, sentencepiece_tokenizer.PAD_ID),
    labels=Padded(labels, sentencepiece_tokenizer.PAD_ID),
    weights=is_place.astype(np.float32),
    segment_ids=Padded(nth + 1, 0),
    segment_pos=Padded(positions, 0),
  )
