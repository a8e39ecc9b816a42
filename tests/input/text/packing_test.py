# SPDX-License-Identifier: Apache-2.0
"""Packing: each token of each document is predicted once, from the tokens before it."""

import sys

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lingvo_gpipe.input.text import packing, token_store

SOS, EOS = 1, 2
_LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=30)


def _Documents(lengths):
  """Returns documents of different tokens, so that each token identifies its document."""
  ends = 10 + np.cumsum(lengths)
  return [list(range(end - n, end)) for n, end in zip(lengths, ends, strict=True)]


def _Fields(rows, indices):
  return rows.Fields(tf.constant(indices, tf.int64)).Transform(lambda x: x.numpy())


def _All(documents, make, row_length):
  rows = make(token_store.TokenStore.Build(documents), row_length)
  return _Fields(rows, range(len(rows))), rows


def _Segments(fields):
  """Returns [(row, ids, labels)] of the segments, in order."""
  segments = []
  for row in range(len(fields.ids)):
    segment_ids = fields.segment_ids[row]
    for segment in range(1, segment_ids.max() + 1):
      (columns,) = np.nonzero(segment_ids == segment)
      assert np.array_equal(columns, np.arange(columns[0], columns[-1] + 1))
      assert np.array_equal(fields.segment_pos[row, columns], np.arange(columns.size))
      segments.append((row, list(fields.ids[row, columns]), list(fields.labels[row, columns])))
  return segments


def _CheckPadding(fields):
  is_padding = fields.segment_ids == 0
  assert np.array_equal(fields.weights == 0, is_padding)
  assert set(np.unique(fields.weights)) <= {0.0, 1.0}
  for field in (fields.ids, fields.labels, fields.segment_pos):
    assert not field[is_padding].any()
  # Padding comes after the tokens only, and no row is empty.
  assert (np.diff(is_padding.astype(int), axis=1) >= 0).all() and not is_padding[:, 0].any()
  assert fields.weights.dtype == np.float32
  assert {fields[k].dtype for k in fields if k != 'weights'} == {np.dtype(np.int32)}


@settings(max_examples=40)
@given(_LENGTHS, st.integers(1, 10))
@example([9, 1, 1], 10)  # Fits exactly.
@example([10, 3], 10)  # One slot too long.
@example([3, 12, 12, 1], 5)  # Long documents, the first one after a short one.
@example([1] * 30, 2)
def testEveryTokenIsPredictedOnceFromThePreviousOne(lengths, row_length):
  documents = _Documents(lengths)
  fields, rows = _All(documents, packing.Packed, row_length)
  _CheckPadding(fields)
  segments = _Segments(fields)
  # The segments are the documents, in order: each slot once.
  slots = [slot for _, ids, labels in segments for slot in zip(ids, labels, strict=True)]
  assert slots == [slot for d in documents for slot in zip([SOS, *d], [*d, EOS], strict=True)]
  # Only documents that are longer than a row are split.
  whole = sorted(labels for _, ids, labels in segments if ids[0] == SOS and labels[-1] == EOS)
  assert [d for d in documents if len(d) < row_length] == [
    labels[:-1] for labels in whole if len(labels) <= row_length
  ]
  assert rows.efficiency == pytest.approx(fields.weights.mean())


@settings(max_examples=40)
@given(_LENGTHS, st.integers(1, 10))
def testRowEndsOnlyIfTheNextDocumentDoesNotFit(lengths, row_length):
  fields, _ = _All(_Documents(lengths), packing.Packed, row_length)
  segments = _Segments(fields)
  filled = fields.weights.sum(axis=1)
  for (row, _, _), (next_row, ids, labels) in zip(segments, segments[1:], strict=False):
    if next_row != row:
      # The rest of the row is too small for the next document; a long one would have filled it.
      is_whole = ids[0] == SOS and labels[-1] == EOS
      assert filled[row] == row_length or (is_whole and filled[row] + len(ids) > row_length)


@settings(max_examples=40)
@given(_LENGTHS, st.integers(1, 10))
def testOneDocumentPerRow(lengths, row_length):
  documents = _Documents(lengths)
  fields, rows = _All(documents, packing.OneDocumentEach, row_length)
  _CheckPadding(fields)
  assert len(rows) == len(documents)
  for (_, ids, labels), document in zip(_Segments(fields), documents, strict=True):
    assert ids == [SOS, *document][:row_length]
    assert labels == [*document, EOS][:row_length]


@pytest.mark.parametrize('make', [packing.Packed, packing.OneDocumentEach])
def testRowsInAnyOrderFromMemoryAndFiles(make, tmp_path):
  documents = _Documents([3, 1, 9, 4, 4, 2, 11])
  fields, rows = _All(documents, make, 6)
  token_store.TokenStore.Write(str(tmp_path / 'store'), documents)
  mapped = make(token_store.TokenStore.Load(str(tmp_path / 'store')), 6)
  chosen = [len(rows) - 1, 0, 2, 2]
  for actual in (_Fields(rows, chosen), _Fields(mapped, chosen)):
    for key, value in actual.items():
      np.testing.assert_array_equal(value, fields[key][chosen])


def testStoreWithoutDocumentsHasNoRows():
  store = token_store.TokenStore.Build([])
  for make in (packing.Packed, packing.OneDocumentEach):
    rows = make(store, 4)
    assert len(rows) == 0 and rows.efficiency == 0


def testSentencesFillLongRows():
  lengths = np.random.default_rng(0).poisson(28, 20_000) + 1
  store = token_store.TokenStore.Build(np.zeros(n, np.int32) for n in lengths)
  # On average each row loses half a sentence.
  assert packing.Packed(store, 1024).efficiency > 0.98


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
