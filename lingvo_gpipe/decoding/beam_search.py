# SPDX-License-Identifier: Apache-2.0
"""Batched beam search over a model that gives the logits of the next token.

Knows no layers and no pipelines: logits and states come from functions, as those of
`PipeliningLayer`, and the states are theirs alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe.core import hyperparams, nested_map

# (states, ids int32 [rows, 1], position of these ids) -> (logits [rows, 1, vocab], states).
ExtendStepFn = Callable[[Any, np.ndarray, int], tuple[Any, Any]]
# (states, int32 [rows]) -> states, whose row i is what row indices[i] was.
ReorderFn = Callable[[Any, np.ndarray], Any]

_NEVER = -np.inf  # The log-probability of what cannot be, and of an empty place.


@dataclasses.dataclass(frozen=True)
class Hypotheses:
  """What a search found, the best hypothesis of each example first.

  Attributes:
    ids: int32 [batch, num_hyps, time], the end-of-sequence id included; 0 behind it.
    lengths: int32 [batch, num_hyps], how many of the ids count; 0 in an empty place.
    scores: float32 [batch, num_hyps], not rising: log-probability / `LengthNorm`; -inf in an empty
      place.
    ended: bool [batch], whether the hypotheses of an example end in the end-of-sequence id. Where
      none did within the time, they are those that were open then.
  """

  ids: np.ndarray
  lengths: np.ndarray
  scores: np.ndarray
  ended: np.ndarray

  def Best(self, example: int) -> np.ndarray:
    """The ids of an example's best hypothesis, without the end-of-sequence id."""
    length = int(self.lengths[example, 0]) - int(self.ended[example])
    return self.ids[example, 0, :length]


def LengthNorm(length: Any, alpha: float) -> Any:
  """What a log-probability is divided by: ((5 + length) / 6) ** alpha.

  Wu et al. 2016 (arXiv 1609.08144), equation 14. The length counts the end-of-sequence id.
  """
  return ((5.0 + length) / 6.0) ** alpha


class BeamSearch:
  """Keeps the likeliest `num_hyps_per_beam` open hypotheses of each example.

  Each step ranks all continuations of an example's open hypotheses by log-probability. Those among
  the first `num_hyps_per_beam` that end in the end-of-sequence id are hypotheses that ended: they
  have a score, and the best `num_hyps_per_beam` by score are kept. The likeliest others go on. An
  example is done when so many are kept and no open one has, at its present length, a better score
  than the worst of them. With `num_hyps_per_beam=1` this is greedy search: it takes the likeliest
  id until that ends the sequence.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of the search; the defaults are those of Vaswani et al. 2017, section 6.1."""
    p = hyperparams.InstantiableParams(cls)
    p.Define('num_hyps_per_beam', 4, 'Hypotheses of an example; 1: greedy search.')
    p.Define('length_normalization', 0.6, 'The exponent alpha of `LengthNorm`; 0: none.')
    p.Define('target_seq_len', 0, 'The most ids of a hypothesis, its end included. Must be set.')
    p.Define('target_eos_id', 2, 'The id that ends a sequence.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    """Checks and keeps a copy of `params`.

    Raises:
      ValueError: a param is out of range.
    """
    p = self.params = params.Copy()
    for name, least in (
      ('num_hyps_per_beam', 1),
      ('length_normalization', 0),
      ('target_eos_id', 0),
    ):
      if p.Get(name) < least:
        raise ValueError(f'BeamSearch: {name} must be at least {least}, got {p.Get(name)}')
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
    """Searches the likeliest continuations of prompts.

    A prompt is the start of a sequence, be it one id: that of sentences or of a target language. It
    is no part of the hypotheses. With `num_hyps_per_beam` k there are k rows for each example, next
    to each other, from the first call of `extend_step` on.

    Args:
      logits: floating [batch, time, vocab], of which the last position counts: what follows each
        prompt. -inf forbids an id.
      states: what `reorder` takes, of the batch; anything.
      extend_step: gives the logits after one more id in each row.
      reorder: gathers rows of the states: at first from `batch` of them to batch * k, then among
        the k of each example. Not called in greedy search.
      first_time_step: the position of the first id to be found: the length of the prompts.
      target_seq_len: the most ids of a hypothesis; None: that of the Params. A new value means a
        new trace.

    Returns:
      At least one hypothesis for each example.

    Raises:
      ValueError: a param, or the shape of logits, does not fit; or logits of an open hypothesis are
        NaN or +inf.
    """
    p = self.params
    limit = p.target_seq_len if target_seq_len is None else target_seq_len
    if limit < 1:
      raise ValueError(f'BeamSearch: target_seq_len must be at least 1, got {limit}; set it')
    last = self._LastLogits(logits, None)
    batch = last.shape[0]
    beams = self._Start(batch, limit)
    for time in range(limit):
      beams, ids, indices, is_wrong = self._advance(beams, last, tf.constant(time))
      if np.any(is_wrong):
        raise ValueError(
          f'BeamSearch: logits for position {first_time_step + time} are NaN or +inf in the '
          f'examples {np.flatnonzero(is_wrong).tolist()} of the batch: look for a weight or an '
          'input that is not finite'
        )
      if time == limit - 1 or np.all(beams.is_done):
        break
      if p.num_hyps_per_beam > 1:
        states = reorder(states, indices.numpy())
      logits, states = extend_step(states, ids.numpy(), first_time_step + time)
      last = self._LastLogits(logits, batch * p.num_hyps_per_beam)
    return self._Result(beams.Transform(lambda x: x.numpy()))

  def _Start(self, batch: int, limit: int) -> nested_map.NestedMap:
    """One open hypothesis an example, the empty one."""
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
    """The logits [rows, vocab] of the last position."""
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
        f'BeamSearch: target_eos_id {eos} is no id of a vocabulary of {shape[2]}; set it'
      )
    return logits[:, -1]

  def _Advance(
    self, beams: nested_map.NestedMap, logits: tf.Tensor, time: tf.Tensor
  ) -> tuple[nested_map.NestedMap, tf.Tensor, tf.Tensor, tf.Tensor]:
    """One step of all examples.

    Args:
      beams: of `batch` examples with k places each, from `_Start` or the step before.
      logits: [batch * n, vocab], n = 1 in the first step and k later.
      time: how many ids the open hypotheses have.

    Returns:
      The beams, the next ids [batch * k, 1], the rows of the logits they go on from [batch * k],
      and for each example whether its logits make no sense.
    """
    k, eos = self.params.num_hyps_per_beam, self.params.target_eos_id
    batch, _, limit = beams.open_ids.shape
    n, vocab = logits.shape[0] // batch, logits.shape[1]
    logits = tf.reshape(tf.cast(logits, tf.float32), [batch, n, vocab])
    so_far = beams.open_log_probs[:, :n]
    is_open = (so_far > _NEVER) & ~beams.is_done[:, tf.newaxis]
    is_bad = tf.reduce_any(tf.math.is_nan(logits) | (logits == np.inf), axis=-1)
    log_probs = tf.nn.log_softmax(logits)
    # Where no id is allowed it is NaN; places that are not open may have any logits.
    log_probs = tf.where(tf.math.is_nan(log_probs), _NEVER, log_probs)
    totals = tf.reshape(so_far[:, :, tf.newaxis] + log_probs, [batch, n * vocab])
    # In the first step there may be fewer ids than places.
    totals = tf.pad(totals, [[0, 0], [0, max(0, k - n * vocab)]], constant_values=_NEVER)
    # Of 2k at most k end: each place can end in one way only.
    log_probs, flat = tf.math.top_k(totals, min(2 * k, totals.shape[1]))
    places, tokens = tf.minimum(flat // vocab, n - 1), flat % vocab
    ids = _Gather(beams.open_ids, places)
    ids = tf.where(tf.range(limit) == time, tokens[:, :, tf.newaxis], ids)
    length = time + 1
    norm = LengthNorm(tf.cast(length, tf.float32), self.params.length_normalization)

    is_eos = tokens == eos
    scores = tf.where(is_eos & (tf.range(tokens.shape[1]) < k), log_probs / norm, _NEVER)
    ended_scores, chosen = tf.math.top_k(tf.concat([beams.ended_scores, scores], 1), k)
    ended_ids = _Gather(tf.concat([beams.ended_ids, ids], 1), chosen)
    lengths = tf.concat([beams.ended_lengths, tf.fill(tokens.shape, length)], 1)

    open_log_probs, chosen_open = tf.math.top_k(tf.where(is_eos, _NEVER, log_probs), k)
    # A place that nothing was found for is no better than an empty one, so this holds too where
    # all have ended.
    is_over = open_log_probs[:, 0] / norm <= ended_scores[:, -1]
    # Where no hypothesis can go on or end, they stay as they are, and are what was found.
    is_stuck = log_probs[:, 0] == _NEVER
    new = nested_map.NestedMap(
      open_ids=_Gather(ids, chosen_open),
      open_log_probs=open_log_probs,
      open_lengths=tf.fill([batch], length),
      ended_ids=ended_ids,
      ended_scores=ended_scores,
      ended_lengths=_Gather(lengths, chosen),
      is_done=is_over,
    )
    keep = beams.is_done | is_stuck
    beams = tf.nest.map_structure(lambda old, x: tf.where(_Rows(keep, x), old, x), beams, new)
    beams.is_done |= keep
    here = tf.minimum(tf.range(k), n - 1)[tf.newaxis]
    places = tf.where(keep[:, tf.newaxis], here, _Gather(places, chosen_open))
    indices = tf.reshape(places + n * tf.range(batch)[:, tf.newaxis], [batch * k])
    next_ids = tf.reshape(_Gather(tokens, chosen_open), [batch * k, 1])
    return beams, next_ids, indices, tf.reduce_any(is_bad & is_open, axis=1)

  def _Result(self, beams: nested_map.NestedMap) -> Hypotheses:
    """What ended, or where nothing did what is open; empty places are zeros."""
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
  """A condition [batch] in the rank of a tensor [batch, ...]."""
  return tf.reshape(condition, [-1] + [1] * (like.shape.rank - 1))
