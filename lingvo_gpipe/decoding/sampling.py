# SPDX-License-Identifier: Apache-2.0
"""Continues prompts token by token: greedily, or by sampling from the k most likely tokens.

The module knows no layers: two functions compute logits, one for a prompt and one for one more
token. A draw depends only on the seed, the number of the example and the position of the token. So
a continuation is the same for any number of stages, micro-batches and examples in a batch, up to
float rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lingvo_gpipe.core import domain, hyperparams

# ids int32 [batch, time] -> (logits [batch, 1 or time, vocab], states).
PrefillFn = Callable[[np.ndarray], tuple[Any, Any]]
# (states, ids int32 [batch, 1], position of these ids) -> (logits [batch, 1, vocab], states).
ExtendStepFn = Callable[[Any, np.ndarray, int], tuple[Any, Any]]


def SamplingParams() -> hyperparams.Params:
  """Returns the Params that say how tokens are chosen."""
  p = hyperparams.Params()
  p.Define(
    'temperature', 1.0, 'Divisor of the logits; 0 takes the most likely token.', domain.NOT_NEGATIVE
  )
  p.Define('top_k', 0, 'Number of most likely tokens to draw from; 0: all.', domain.INDEX)
  p.Define('seed', 0, 'Seed of the draws, at least 0.', domain.Int(0, (1 << 64) - 1))
  p.Define(
    'eos_id',
    None,
    'The token that ends a continuation; None: no token does.',
    domain.INDEX | domain.NONE,
  )
  return p


def Sample(
  logits: np.ndarray, params: hyperparams.Params, examples: np.ndarray, position: int
) -> np.ndarray:
  """Chooses a token for each example.

  Args:
    logits: floating [batch, vocab].
    params: `SamplingParams`.
    examples: int [batch], the number of each example; examples with different numbers draw
      independently.
    position: position of the token in its sequence.

  Returns:
    Token ids, int32 [batch].

  Raises:
    ValueError: the logits of an example are not finite.
  """
  logits = np.asarray(logits, np.float64)
  best = logits.max(axis=-1, keepdims=True)
  if not np.isfinite(best).all():
    row = np.flatnonzero(~np.isfinite(best))[0]
    raise ValueError(
      f'no token can be chosen at position {position}: the largest logit of row {row} is '
      f'{best[row, 0]}; the weights or the inputs are not finite'
    )
  if not params.temperature:
    return np.argmax(logits, axis=-1).astype(np.int32)
  logits = (logits - best) / params.temperature
  probs = np.exp(logits)
  if 0 < params.top_k < logits.shape[-1]:
    unlikely = np.argpartition(logits, -params.top_k, axis=-1)[:, : -params.top_k]
    np.put_along_axis(probs, unlikely, 0.0, axis=-1)
  # The token whose interval of the cumulative distribution contains the draw.
  ends = np.cumsum(probs, axis=-1)
  draws = _Uniform(params.seed, examples, position)[:, np.newaxis]
  return np.argmax(ends > draws * ends[:, -1:], axis=-1).astype(np.int32)


def _Uniform(seed: int, examples: np.ndarray, position: int) -> np.ndarray:
  """Returns a number in [0, 1) for each example, from Philox counters (Salmon et al. 2011)."""
  key = np.array([seed, 0], np.uint64)
  counters = [np.array([0, 0, int(e), position], np.uint64) for e in examples]
  bits = [np.random.Philox(key=key, counter=counter).random_raw() for counter in counters]
  # 52 bits: the largest value, 1 - 2^-52, stays below 1 in any product.
  return (np.array(bits, np.uint64) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def Generate(
  prefill: PrefillFn,
  extend_step: ExtendStepFn,
  prompts: np.ndarray,
  num_tokens: int,
  params: hyperparams.Params,
  *,
  lengths: np.ndarray | None = None,
  examples: np.ndarray | None = None,
) -> np.ndarray:
  """Continues prompts, computing each token once.

  If prompts differ in length, the part that all of them have is computed in one call. After that
  longer prompts continue with their own tokens while shorter ones get new tokens.

  Args:
    prefill: returns the logits of prompts and the states; the states must have room for time +
      num_tokens positions.
    extend_step: returns the logits and states after one more token.
    prompts: integers [batch, time].
    num_tokens: number of tokens to add.
    params: `SamplingParams`.
    lengths: int [batch], the number of valid tokens of each prompt, at least 1; None: all.
    examples: int [batch], the number of each example, which its draws depend on; None: 0, 1, ...

  Returns:
    int32 [batch, num_tokens]; only `eos_id` after the first `eos_id`.

  Raises:
    ValueError: the prompts, their lengths or the params are invalid.
  """
  params.CheckDomains('sampling: ')
  prompts = np.asarray(prompts)
  if prompts.ndim != 2 or not prompts.size or not np.issubdtype(prompts.dtype, np.integer):
    raise ValueError(
      'expected prompts of integers [batch, time] with at least one token, got '
      f'{prompts.dtype} {list(prompts.shape)}'
    )
  prompts = prompts.astype(np.int32)
  batch, time = prompts.shape
  lengths = np.full(batch, time) if lengths is None else np.asarray(lengths)
  examples = np.arange(batch) if examples is None else np.asarray(examples)
  if lengths.shape != (batch,) or lengths.min() < 1 or lengths.max() > time:
    raise ValueError(
      f'expected a length from 1 to {time} for each of {batch} prompts, got {lengths.tolist()}'
    )
  if examples.shape != (batch,) or examples.min() < 0:
    raise ValueError(
      f'expected a number from 0 for each of {batch} examples, got {examples.tolist()}'
    )
  eos_id = -1 if params.eos_id is None else params.eos_id
  new_tokens = np.full([batch, num_tokens], max(eos_id, 0), np.int32)
  if not num_tokens:
    return new_tokens
  is_done = np.zeros(batch, bool)
  position = int(lengths.min())
  logits, states = prefill(prompts[:, :position])
  while True:
    tokens = Sample(np.asarray(logits)[:, -1], params, examples, position)
    nth = position - lengths  # Below 0 within the prompt.
    tokens = np.where(nth < 0, prompts[:, min(position, time - 1)], tokens)
    writes = np.flatnonzero((nth >= 0) & ~is_done)
    new_tokens[writes, nth[writes]] = tokens[writes]
    is_done[writes] = (tokens[writes] == eos_id) | (nth[writes] == num_tokens - 1)
    if is_done.all():
      return new_tokens
    logits, states = extend_step(states, tokens[:, np.newaxis], position)
    position += 1
