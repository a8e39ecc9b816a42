# SPDX-License-Identifier: Apache-2.0
"""Beam search on small models equals exhaustive, greedy and plain Python searches."""

import functools
import itertools
import math
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.decoding import beam_search
from tests import naming

_EOS, _NUM_STATES = 2, 50


class _Model:
  """Logits that depend on all previous ids: each example has a table, and states are rows in it."""

  def __init__(self, tables, num_hyps, dtype):
    self.tables, self.num_hyps, self.dtype = tables, num_hyps, dtype
    self.times = []

  def Prefill(self, first_ids):
    states = _NextState(np.zeros(len(first_ids), np.int64), np.array(first_ids))
    return self._Logits(self.tables, states), states

  def ExtendStep(self, states, ids, time_step):
    assert ids.shape == (len(self.tables) * self.num_hyps, 1) and ids.dtype == np.int32
    self.times.append(time_step)
    states = _NextState(states, ids[:, 0])
    return self._Logits(np.repeat(self.tables, self.num_hyps, axis=0), states), states

  def Reorder(self, states, indices):
    rows = len(states) // len(self.tables)  # 1 before the first call.
    examples = np.repeat(np.arange(len(self.tables)), self.num_hyps)
    np.testing.assert_array_equal(indices // rows, examples)
    return states[indices]

  def _Logits(self, tables, states):
    return tf.constant(tables[np.arange(len(tables)), states][:, np.newaxis], self.dtype)


def _NextState(state, token):
  return (state * 31 + token * 7 + 1) % _NUM_STATES


def _LogProbs(table, ids):
  """Returns float64 [vocab]: log-probabilities of the id after these ids, the first id included."""
  state = 0
  for token in ids:
    state = _NextState(state, token)
  logits = table[state].astype(np.float64)
  with np.errstate(invalid='ignore'):
    log_probs = logits - np.logaddexp.reduce(logits)
  return np.where(np.isnan(log_probs), -np.inf, log_probs)


def _Score(table, first, ids, alpha):
  terms = [_LogProbs(table, (first, *ids[:i]))[token] for i, token in enumerate(ids)]
  return sum(terms) / ((5 + len(ids)) / 6) ** alpha


def _Tables(seed, batch=4, vocab=5, forbidden=0.0):
  rng = np.random.default_rng(seed)
  tables = rng.normal(size=[batch, _NUM_STATES, vocab], scale=1.5).astype(np.float32)
  tables[rng.random(tables.shape) < forbidden] = -np.inf
  return tables


@functools.cache
def _Search(**settings):
  """Returns a cached search, so that all tests trace each shape once."""
  p = beam_search.BeamSearch.Params().Set(target_eos_id=_EOS, **settings)
  return p.Instantiate()


def _Run(search, tables, first_ids, dtype=tf.float32, first_time_step=1, **more):
  model = _Model(tables, search.params.num_hyps_per_beam, dtype)
  hyps = search.Search(
    *model.Prefill(first_ids), model.ExtendStep, model.Reorder, first_time_step=first_time_step,
    **more,
  )  # fmt: skip
  return hyps, model


def _Texts(hyps, example):
  """Returns [(ids, score)] of an example, without unused slots."""
  rows = zip(hyps.ids[example], hyps.lengths[example], hyps.scores[example], strict=True)
  return [(tuple(ids[:n].tolist()), score) for ids, n, score in rows if score > -np.inf]


def _AssertSame(actual, expected):
  assert [ids for ids, _ in actual] == [ids for ids, _ in expected]
  np.testing.assert_allclose([s for _, s in actual], [s for _, s in expected], rtol=1e-5, atol=1e-5)


def _Plain(table, first, k, limit, alpha, *, stops=True):
  """Searches as `BeamSearch` says, for one example.

  Returns:
    Whether any hypothesis ended, and [(ids, score)].
  """

  def Norm(length):
    return ((5 + length) / 6) ** alpha

  live, ended = [((), 0.0)], []
  for time in range(limit):
    continuations = [
      (ids + (token,), total + float(log_prob))
      for ids, total in live
      for token, log_prob in enumerate(_LogProbs(table, (first, *ids)))
      if log_prob > -np.inf
    ]
    if not continuations:
      break
    continuations.sort(key=lambda pair: -pair[1])
    ended += [(ids, s / Norm(time + 1)) for ids, s in continuations[:k] if ids[-1] == _EOS]
    ended = sorted(ended, key=lambda pair: -pair[1])[:k]
    live = [pair for pair in continuations if pair[0][-1] != _EOS][:k]
    best = live[0][1] / Norm(time + 1) if live else -np.inf
    if not live or (stops and len(ended) == k and best <= ended[-1][1]):
      break
  return (True, ended) if ended else (False, [(ids, s / Norm(len(ids))) for ids, s in live])


@pytest.mark.parametrize('alpha', [0.0, 0.6, 1.5])
@pytest.mark.parametrize('forbidden', [0.0, 0.4])
def testEqualsThePlainSearch(alpha, forbidden):
  search = _Search(num_hyps_per_beam=3, length_normalization=alpha, target_seq_len=7)
  first = np.array([1, 3, 4, 1])
  kinds = set()
  for seed in range(12):
    tables = _Tables(seed, forbidden=forbidden)
    hyps, _ = _Run(search, tables, first)
    for i, table in enumerate(tables):
      ended, expected = _Plain(table, first[i], 3, 7, alpha)
      assert hyps.ended[i] == ended
      _AssertSame(_Texts(hyps, i), expected)
      kinds.add((ended, len(expected)))
  if forbidden:
    assert len(kinds) > 3  # Dead ends and examples with few hypotheses occurred.


def testEarlyStopChangesNothingWithoutNormalization():
  search = _Search(num_hyps_per_beam=3, length_normalization=0.0, target_seq_len=7)
  stopped = 0
  for seed in range(12):
    tables = _Tables(seed)
    hyps, model = _Run(search, tables, [1] * 4)
    stopped += len(model.times) < 6
    for i, table in enumerate(tables):
      _AssertSame(_Texts(hyps, i), _Plain(table, 1, 3, 7, 0.0, stops=False)[1])
  assert stopped


@pytest.mark.parametrize('alpha', [0.0, 1.0])
@pytest.mark.parametrize('forbidden', [0.0, 0.3])
def testAWideBeamIsExhaustive(alpha, forbidden):
  vocab, limit = 3, 4
  ids_but_eos = [token for token in range(vocab) if token != _EOS]
  middles = [m for n in range(limit) for m in itertools.product(ids_but_eos, repeat=n)]
  search = _Search(num_hyps_per_beam=24, length_normalization=alpha, target_seq_len=limit)
  for seed in range(6):
    tables = _Tables(seed, batch=3, vocab=vocab, forbidden=forbidden)
    hyps, _ = _Run(search, tables, [1, 1, 0])
    for i, table in enumerate(tables):
      scored = [((*m, _EOS), _Score(table, [1, 1, 0][i], (*m, _EOS), alpha)) for m in middles]
      possible = sorted((pair for pair in scored if pair[1] > -np.inf), key=lambda pair: -pair[1])
      if possible:
        _AssertSame(_Texts(hyps, i), possible)
      assert hyps.ended[i] == bool(possible)


@pytest.mark.parametrize('alpha', [0.0, 2.0])
def testABeamOfOneIsGreedy(alpha):
  search = _Search(num_hyps_per_beam=1, length_normalization=alpha, target_seq_len=8)
  lengths = set()
  for seed in range(10):
    tables = _Tables(seed)
    hyps, _ = _Run(search, tables, [1, 1, 3, 3])
    for i, table in enumerate(tables):
      ids = ()
      while len(ids) < 8 and _EOS not in ids:
        ids += (int(np.argmax(_LogProbs(table, ([1, 1, 3, 3][i], *ids)))),)
      ((hypothesis, score),) = _Texts(hyps, i)
      assert hypothesis == ids
      assert score == pytest.approx(_Score(table, [1, 1, 3, 3][i], ids, alpha), rel=1e-5)
      assert hyps.ended[i] == (_EOS in ids)
      assert tuple(hyps.Best(i)) == tuple(token for token in ids if token != _EOS)
      lengths.add(len(ids))
  assert len(lengths) > 3


def testGreedySearchTakesTheFirstOfEqualIds():
  tables = np.zeros([1, _NUM_STATES, 5], np.float32)
  tables[:, :, 0] = -1.0
  search = _Search(num_hyps_per_beam=1, length_normalization=0.0, target_seq_len=8)
  hyps, _ = _Run(search, np.repeat(tables, 4, axis=0), [1] * 4)
  assert _Texts(hyps, 0)[0][0] == (1,) * 8


def testExamplesOfABatchAreIndependent():
  search = _Search(num_hyps_per_beam=3, length_normalization=0.6, target_seq_len=7)
  tables, first = _Tables(5), np.array([1, 3, 4, 1])
  whole, _ = _Run(search, tables, first)
  order = np.array([2, 0, 3, 1])
  reordered, _ = _Run(search, tables[order], first[order])
  for row, i in enumerate(order):
    alone, _ = _Run(search, tables[i : i + 1], first[i : i + 1])
    for hyps, hyps_row in ((reordered, row), (alone, 0)):
      np.testing.assert_array_equal(whole.ids[i], hyps.ids[hyps_row])
      np.testing.assert_array_equal(whole.scores[i], hyps.scores[hyps_row])
      np.testing.assert_array_equal(whole.lengths[i], hyps.lengths[hyps_row])


def testScoresBelongToTheReturnedIds():
  search = _Search(num_hyps_per_beam=3, length_normalization=0.6, target_seq_len=7)
  tables = _Tables(9)
  tables[:2, :, _EOS] = -np.inf
  hyps, _ = _Run(search, tables, [1] * 4)
  assert hyps.ended.tolist() == [False, False, True, True]
  for i, table in enumerate(tables):
    texts = _Texts(hyps, i)
    assert len(texts) == len({ids for ids, _ in texts}) > 1
    assert [s for _, s in texts] == sorted((s for _, s in texts), reverse=True)
    for ids, score in texts:
      assert score == pytest.approx(_Score(table, 1, ids, 0.6), rel=1e-5)
      assert ids.count(_EOS) == hyps.ended[i] == (ids[-1] == _EOS)
    for ids, n in zip(hyps.ids[i], hyps.lengths[i], strict=True):
      assert not ids[n:].any()


def testEndedHypothesesAreReplacedByBetterOnesOnly(monkeypatch):
  search = _Search(num_hyps_per_beam=3, length_normalization=0.6, target_seq_len=7)
  advance, scores = search._advance, []

  def Record(*args):
    results = advance(*args)
    scores.append(results[0].ended_scores.numpy())
    return results

  monkeypatch.setattr(search, '_advance', Record)
  hyps, _ = _Run(search, _Tables(2), [1] * 4)
  assert len(scores) > 3
  for before, after in itertools.pairwise(scores):
    assert np.all(after >= before)
  np.testing.assert_array_equal(hyps.scores[hyps.ended], scores[-1][hyps.ended])


def testFollowsTimeAndStopsWhenAllAreDone():
  tables = _Tables(0, batch=2)
  tables[:, :, _EOS] = 30.0
  search = _Search(num_hyps_per_beam=1, length_normalization=0.0, target_seq_len=8)
  hyps, model = _Run(search, tables, [1, 3], first_time_step=5)
  assert model.times == []
  assert hyps.lengths.tolist() == [[1], [1]] and len(hyps.Best(0)) == 0
  tables[1, :, _EOS] = -np.inf
  hyps, model = _Run(search, tables, [1, 3], first_time_step=5)
  assert model.times == list(range(5, 12))
  assert hyps.ended.tolist() == [True, False] and hyps.lengths.tolist() == [[1], [8]]
  hyps, model = _Run(search, tables, [1, 3], target_seq_len=3)
  assert hyps.lengths.tolist() == [[1], [3]] and model.times == [1, 2]


def testTwoTracesServeAllSteps():
  """The first step has one row per example, all later steps have k."""
  search = _Search(num_hyps_per_beam=2, length_normalization=0.6, target_seq_len=7)
  for seed in range(3):
    _Run(search, _Tables(seed), [1] * 4, first_time_step=seed)
  assert search._advance.experimental_get_tracing_count() == 2


def testABeamMayBeWiderThanTheVocabulary():
  search = _Search(num_hyps_per_beam=7, length_normalization=0.6, target_seq_len=5)
  tables = _Tables(4, vocab=3)
  hyps, _ = _Run(search, tables, [1] * 4)
  for i, table in enumerate(tables):
    _AssertSame(_Texts(hyps, i), _Plain(table, 1, 7, 5, 0.6)[1])


def testBfloat16Logits():
  tables = np.round(_Tables(3) * 8) / 8  # bfloat16 holds these.
  search = _Search(num_hyps_per_beam=3, length_normalization=0.6, target_seq_len=7)
  expected, _ = _Run(search, tables, [1] * 4)
  hyps, _ = _Run(search, tables, [1] * 4, dtype=tf.bfloat16)
  np.testing.assert_array_equal(hyps.ids, expected.ids)
  np.testing.assert_array_equal(hyps.scores, expected.scores)


def testDeadEndReturnsTheOpenHypotheses():
  search = _Search(num_hyps_per_beam=3, length_normalization=0.6, target_seq_len=7)
  tables = np.full([4, _NUM_STATES, 5], -np.inf, np.float32)
  tables[:, _NextState(0, 1), [3, 4]] = 0.0, 1.0
  hyps, _ = _Run(search, tables, [1, 1, 1, 3])
  assert not hyps.ended.any()
  for i in range(3):
    assert [ids for ids, _ in _Texts(hyps, i)] == [(4,), (3,)]
    assert hyps.lengths[i].tolist() == [1, 1, 0]
  # The last example allows no id at all: its result is the empty hypothesis.
  assert hyps.lengths[3].tolist() == [0, 0, 0] and hyps.scores[3, 0] == 0.0


@pytest.mark.parametrize('value', [math.nan, math.inf])
def testLogitsThatAreNotFiniteAreAnError(value):
  tables = _Tables(0)
  tables[1, _NextState(_NextState(0, 1), 4), 0] = value
  tables[1, _NextState(0, 1), 4] = 9.0
  search = _Search(num_hyps_per_beam=3, length_normalization=0.6, target_seq_len=7)
  with pytest.raises(ValueError, match=naming.Naming('position 8', 'NaN', '+inf', '[1]')):
    _Run(search, tables, [1] * 4, first_time_step=7)


def testFinishedExamplesMayHaveAnyLogits():
  search = _Search(num_hyps_per_beam=3, length_normalization=0.6, target_seq_len=7)
  tables = _Tables(0)
  tables[0] = math.nan
  tables[0, _NextState(0, 1)] = [-np.inf, -np.inf, 0.0, -np.inf, -np.inf]
  hyps, model = _Run(search, tables, [1] * 4)
  assert len(model.times) > 1
  assert _Texts(hyps, 0) == [((_EOS,), 0.0)]


@pytest.mark.parametrize(
  'settings, message',
  [
    ({'num_hyps_per_beam': 0}, naming.Naming('num_hyps_per_beam', 1, 0)),
    ({'length_normalization': -0.1}, naming.Naming('length_normalization', '-0.1')),
    ({}, naming.Naming('target_seq_len', 1, 0)),
    ({'target_seq_len': 3, 'eos': 5}, naming.Naming('target_eos_id 5', 'vocabulary of 5')),
    (
      {'target_seq_len': 3, 'shape': [2, 5]},
      naming.Naming('[batch, time, vocab]', 'float32 [2, 5]'),
    ),
    (
      {'target_seq_len': 3, 'dtype': tf.int32},
      naming.Naming('[batch, time, vocab]', 'int32 [2, 1, 5]'),
    ),
    ({'target_seq_len': 3}, naming.Naming('[8, time, vocab]', 'float32 [2, 1, 5]')),
  ],
)
def testInvalidParamsAndLogitsAreNamed(settings, message):
  logits = tf.zeros(settings.pop('shape', [2, 1, 5]), settings.pop('dtype', tf.float32))
  p = beam_search.BeamSearch.Params().Set(target_eos_id=settings.pop('eos', _EOS), **settings)
  with pytest.raises(ValueError, match=message):
    p.Instantiate().Search(
      logits, None, lambda *unused: (logits, None), lambda *unused: None, first_time_step=1
    )


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
