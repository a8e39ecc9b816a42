# SPDX-License-Identifier: Apache-2.0
"""Batched beam search over any model that returns the logits of the next token.

The search knows neither layers nor pipelines. It gets logits and states from two functions, for
example from `PipeliningLayer`, and only those functions look into the states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe.core import domain, hyperparams, nested_map

# (states, ids int32 [rows, 1], position of these ids) -> (logits [rows, 1, vocab], states).
ExtendStepFn = Callable[[Any, np.ndarray, int], tuple[Any, Any]]
# (states, int32 [rows]) -> states: row i of the result is row indices[i] of the argument.
ReorderFn = Callable[[Any, np.ndarray], Any]

_NEVER = -np.inf  # The log-probability of an impossible continuation and of an unused slot.


@dataclasses.dataclass(frozen=True)
class Hypotheses:
  """The result of a search, with the best hypothesis of each example first.

  Attributes:
    ids: int32 [batch, num_hyps, time], the end-of-sequence id included; 0 after it.
    lengths: int32 [batch, num_hyps], the number of valid ids; 0 in an unused slot.
    scores: float32 [batch, num_hyps], in descending order: log-probability / `LengthNorm`; -inf in
      an unused slot.
    ended: bool [batch], whether the hypotheses of an example end in the end-of-sequence id. False
      if none ended within the time limit; the hypotheses then are the ones that were still open.
  """

  ids: np.ndarray
  lengths: np.ndarray
  scores: np.ndarray
  ended: np.ndarray

  def Best(self, example: int) -> np.ndarray:
    """Returns the ids of an example's best hypothesis, without the end-of-sequence id."""
    length = int(self.lengths[example, 0]) - int(self.ended[example])
    return self.ids[example, 0, :length]


def LengthNorm(length: Any, alpha: float) -> Any:
  """Returns the divisor of a log-probability: ((5 + length) / 6) ** alpha.

  Wu et al. 2016 (arXiv 1609.08144), equation 14. The length counts the end-of-sequence id.
  """
  return ((5.0 + length) / 6.0) ** alpha


class BeamSearch:
  """Keeps the most likely `num_hyps_per_beam` open hypotheses of each example.

  Each step ranks all continuations of an example's open hypotheses by log-probability. A
  continuation among the first `num_hyps_per_beam` that ends in the end-of-sequence id is an ended
  hypothesis: it gets a score, and the `num_hyps_per_beam` best scores are kept. The most likely
  continuations without that id stay open. An example is done when `num_hyps_per_beam` hypotheses
  have ended and no open hypothesis, at its present length, has a better score than the worst of
  them. With `num_hyps_per_beam=1` this is greedy search: it takes the most likely id until that id
  ends the sequence.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of the search; the defaults are from Vaswani et al. 2017, section 6.1."""
    p = hyperparams.InstantiableParams(cls)
    p.Define('num_hyps_per_beam', 4, 'Hypotheses per example; 1: greedy search.', domain.SIZE)
    p.Define(
      'length_normalization',
      0.6,
      'The exponent alpha of `LengthNorm`; 0: none.',
      domain.NOT_NEGATIVE,
    )
    p.Define(
      'target_seq_len',
      0,
      'Maximum number of ids of a hypothesis, with its end. Must be set.',
      domain.INDEX,
    )
    p.Define('target_eos_id', 2, 'The id that ends a sequence.', domain.INDEX)
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    """Copies `params`."""
    self.params = params.Copy()
    self._advance = tf.function(self._Advance, autograph=False)

  def Search(
    self,
    logits: Any,
    states: Any,
    extend_step: ExtendStepFn,
    reorder: ReorderFn,
    *,
    first_time_step: int,
    target_seq_len: int | None = None,
  ) -> Hypotheses:
    """Searches for the most likely continuations of prompts.

    A prompt is the start of a sequence, at least one id: a start-of-sentence id, a target language,
    or some words. Hypotheses do not include it. With `num_hyps_per_beam` = k each example has k
    adjacent rows from the first call of `extend_step` on.

    Args:
      logits: floating [batch, time, vocab]; the last position holds the logits of the id after each
        prompt. -inf forbids an id.
      states: decoding states of `batch` rows, passed to `reorder` and `extend_step`; of any type.
      extend_step: returns the logits and states after one more id in each row.
      reorder: gathers rows of the states: first `batch` rows into batch * k, later within the k
        rows of each example. Not called in greedy search.
      first_time_step: position of the first id to be searched: the length of the prompts.
      target_seq_len: maximum number of ids of a hypothesis; None: `target_seq_len` of the Params. A
        new value causes a retrace.

    Returns:
      At least one hypothesis for each example.

    Raises:
      ValueError: a param or the shape of the logits is invalid; or logits of an open hypothesis are
        NaN or +inf.
    """
    p = self.params
    limit = p.target_seq_len if target_seq_len is None else target_seq_len
    if limit < 1:
      raise ValueError(f'BeamSearch: target_seq_len must be at least 1, got {limit}: set it')
    last = self._LastLogits(logits, None)
    batch = last.shape[0]
    beams = self._Start(batch, limit)
    for time in range(limit):
      beams, ids, indices, is_wrong = self._advance(beams, last, tf.constant(time))
      if np.any(is_wrong):
        raise ValueError(
          f'BeamSearch: logits for position {first_time_step + time} are NaN or +inf in the '
          f'examples {np.flatnonzero(is_wrong).tolist()} of the batch: check that the weights and '
          'the inputs are finite'
        )
      if time == limit - 1 or np.all(beams.is_done):
        break
      if p.num_hyps_per_beam > 1:
        states = reorder(states, indices.numpy())
      logits, states = extend_step(states, ids.numpy(), first_time_step + time)
      last = self._LastLogits(logits, batch * p.num_hyps_per_beam)
    return self._Result(beams.Transform(lambda x: x.numpy()))

  def _Start(self, batch: int, limit: int) -> nested_map.NestedMap:
    """Returns the beams before the first step: one open hypothesis per example, without ids."""
    k = self.params.num_hyps_per_beam
    open_scores = np.full([batch, k], _NEVER, np.float32)
    open_scores[:, 0] = 0.0
    return nested_map.NestedMap(
      open_ids=tf.zeros([batch, k, limit], tf.int32),
      open_log_probs=tf.constant(open_scores),
      open_lengths=tf.zeros([batch], tf.int32),
      ended_ids=tf.zeros([batch, k, limit], tf.int32),
      ended_scores=tf.fill([batch, k], np.float32(_NEVER)),
      ended_lengths=tf.zeros([batch, k], tf.int32),
      is_done=tf.zeros([batch], tf.bool),
    )

  def _LastLogits(self, logits: Any, rows: int | None) -> tf.Tensor:
    """Returns the logits [rows, vocab] of the last position, after checking their shape."""
    logits, eos = tf.convert_to_tensor(logits), self.params.target_eos_id
    shape = logits.shape
    fits = shape.rank == 3 and rows in (None, shape[0]) and shape.num_elements()
    if not fits or not logits.dtype.is_floating:
      raise ValueError(
        f'BeamSearch: expected floating logits [{rows or "batch"}, time, vocab], got '
        f'{logits.dtype.name} {list(shape)}'
      )
    if eos >= shape[2]:
      raise ValueError(
        f'BeamSearch: target_eos_id {eos} is outside the vocabulary of {shape[2]} ids: set it'
      )
    return logits[:, -1]

  def _Advance(
    self, beams: nested_map.NestedMap, logits: tf.Tensor, time: tf.Tensor
  ) -> tuple[nested_map.NestedMap, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Advances all examples by one id.

    Args:
      beams: the open and ended hypotheses of `batch` examples with k slots each, from `_Start` or
        the previous step.
      logits: [batch * n, vocab]: n = 1 row per example in the first step, k later.
      time: int32 [], the number of ids of the open hypotheses.

    Returns:
      The new beams; the next ids int32 [batch * k, 1]; for each of these the row of `logits` whose
      hypothesis it continues, int32 [batch * k]; and whether an example has an open hypothesis with
      NaN or +inf logits, bool [batch].
    """
    # One example with k = 2, open hypotheses a and b, and x, which ended before; . is the eos id:
    #
    #   open [k]              a         b      sums of the log-probabilities of their ids
    #                        /|\       /|\
    #   totals [n * vocab]   continuations      + log_softmax of the logits
    #                              | top_k
    #   candidates [2 k]     ap  b.  aq  br     best first; b. has ended
    #                        |   |   |
    #   next open [k]        ap  |   aq         the k best candidates that do not end
    #   next ended [k]           b.  x          the k best scores: x, and the candidates among the
    #                                           first k that end
    #
    # An example is done when the score of its best open hypothesis does not exceed the worst of k
    # ended scores. An unused slot has the log-probability and score -inf.
    k, eos = self.params.num_hyps_per_beam, self.params.target_eos_id
    batch, _, limit = beams.open_ids.shape
    n, vocab = logits.shape[0] // batch, logits.shape[1]
    logits = tf.reshape(tf.cast(logits, tf.float32), [batch, n, vocab])
    open_before = beams.open_log_probs[:, :n]  # [batch, n]
    is_open = (open_before > _NEVER) & ~beams.is_done[:, tf.newaxis]  # [batch, n]
    is_bad = tf.reduce_any(tf.math.is_nan(logits) | (logits == np.inf), axis=-1)  # [batch, n]
    log_probs = tf.nn.log_softmax(logits)  # [batch, n, vocab]
    # log_softmax is NaN if every id is forbidden; slots that are not open may hold any logits.
    log_probs = tf.where(tf.math.is_nan(log_probs), _NEVER, log_probs)
    totals = tf.reshape(open_before[:, :, tf.newaxis] + log_probs, [batch, n * vocab])
    # The first step may have fewer continuations than slots.
    totals = tf.pad(totals, [[0, 0], [0, max(0, k - n * vocab)]], constant_values=_NEVER)

    # Candidates [batch, c]. Each open hypothesis has one continuation by eos, so at most k of 2k
    # candidates end and k remain to stay open.
    num_candidates = min(2 * k, totals.shape[1])
    candidate_log_probs, flat = tf.math.top_k(totals, num_candidates)
    candidate_slots = tf.minimum(flat // vocab, n - 1)  # [batch, c], the slots they continue.
    candidate_tokens = flat % vocab  # [batch, c]
    candidate_ids = _Gather(beams.open_ids, candidate_slots)  # [batch, c, limit]
    candidate_ids = tf.where(
      tf.range(limit) == time, candidate_tokens[:, :, tf.newaxis], candidate_ids
    )
    length = time + 1
    norm = LengthNorm(tf.cast(length, tf.float32), self.params.length_normalization)

    # Ended hypotheses: the k best of the ones so far and of this step's, [batch, k + c] -> k.
    is_eos = candidate_tokens == eos  # [batch, c]
    may_end = tf.range(num_candidates) < k  # [c]
    scores = tf.where(is_eos & may_end, candidate_log_probs / norm, _NEVER)
    ended_scores, best_ended = tf.math.top_k(tf.concat([beams.ended_scores, scores], 1), k)
    ended_ids = _Gather(tf.concat([beams.ended_ids, candidate_ids], 1), best_ended)
    ended_lengths = tf.concat([beams.ended_lengths, tf.fill(candidate_tokens.shape, length)], 1)

    # Open hypotheses: the k best candidates that do not end, [batch, c] -> k.
    open_log_probs, best_open = tf.math.top_k(tf.where(is_eos, _NEVER, candidate_log_probs), k)
    # Without open hypotheses both sides may be -inf: the example is over then, too.
    is_over = open_log_probs[:, 0] / norm <= ended_scores[:, -1]  # [batch]
    new_beams = nested_map.NestedMap(
      open_ids=_Gather(candidate_ids, best_open),
      open_log_probs=open_log_probs,
      open_lengths=tf.fill([batch], length),
      ended_ids=ended_ids,
      ended_scores=ended_scores,
      ended_lengths=_Gather(ended_lengths, best_ended),
      is_done=is_over,
    )

    # An example that is done keeps its beams, and so does one without any possible continuation.
    is_stuck = candidate_log_probs[:, 0] == _NEVER  # [batch]
    is_final = beams.is_done | is_stuck  # [batch]
    beams = tf.nest.map_structure(
      lambda old, new: tf.where(_Rows(is_final, new), old, new), beams, new_beams
    )
    beams.is_done |= is_final

    # The row of `logits` that each open slot continues; a final example keeps its rows in order.
    same_slots = tf.minimum(tf.range(k), n - 1)[tf.newaxis]  # [1, k]
    open_slots = _Gather(candidate_slots, best_open)  # [batch, k]
    slots = tf.where(is_final[:, tf.newaxis], same_slots, open_slots)
    indices = tf.reshape(slots + n * tf.range(batch)[:, tf.newaxis], [batch * k])
    next_ids = tf.reshape(_Gather(candidate_tokens, best_open), [batch * k, 1])
    return beams, next_ids, indices, tf.reduce_any(is_bad & is_open, axis=1)

  def _Result(self, beams: nested_map.NestedMap) -> Hypotheses:
    """Returns the ended hypotheses, or the open ones if none ended; unused slots are zero."""
    ended = beams.ended_scores[:, 0] > _NEVER
    rows = ended[:, np.newaxis]
    open_lengths = beams.open_lengths[:, np.newaxis]
    norm = LengthNorm(open_lengths, self.params.length_normalization).astype(np.float32)
    scores = np.where(rows, beams.ended_scores, beams.open_log_probs / norm)
    is_empty = scores == _NEVER
    lengths = np.where(rows, beams.ended_lengths, open_lengths)
    lengths = np.where(is_empty, 0, lengths).astype(np.int32)
    ids = np.where(rows[:, :, np.newaxis], beams.ended_ids, beams.open_ids)
    ids = np.where(is_empty[:, :, np.newaxis], 0, ids)
    return Hypotheses(ids, lengths, scores, ended)


def _Gather(values: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
  return tf.gather(values, indices, batch_dims=1)


def _Rows(condition: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
  """Reshapes a condition [batch] to [batch, 1, ...], the rank of a tensor [batch, ...]."""
  return tf.reshape(condition, [-1] + [1] * (like.shape.rank - 1))
