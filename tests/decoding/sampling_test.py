# SPDX-License-Identifier: Apache-2.0
"""Sampling: distributions, top-k and seeds; continuations of prompts of any lengths."""

import sys

import numpy as np
import pytest

from lingvo_gpipe.decoding import sampling
from tests import naming

_VOCAB = 7


def _Params(**settings):
  return sampling.SamplingParams().Set(**settings)


def _Softmax(logits):
  probs = np.exp(logits - logits.max())
  return probs / probs.sum()


def _CheckFrequencies(tokens, probs):
  """Chi-square test: sum of (seen - expected)^2 / expected; values of probability 0 never occur."""
  seen, expected = np.bincount(tokens, minlength=len(probs)), len(tokens) * probs
  assert not seen[expected == 0].any()
  cells = expected > 0
  chi_square = np.sum((seen - expected)[cells] ** 2 / expected[cells])
  degrees = cells.sum() - 1
  # Mean `degrees`, variance 2 `degrees`: five standard deviations.
  assert chi_square <= degrees + 5 * np.sqrt(2 * degrees)


@pytest.mark.parametrize('temperature', [0.5, 1.0, 3.0])
@pytest.mark.parametrize('top_k', [0, 1, 3, _VOCAB, 100])
def testDrawsFollowTheSoftmaxOfTheTopK(temperature, top_k):
  logits = np.random.default_rng(1).normal(size=_VOCAB, scale=2.0)
  likeliest = np.argsort(-logits)[: top_k or _VOCAB]
  expected = np.zeros(_VOCAB)
  expected[likeliest] = _Softmax(logits[likeliest] / temperature)
  params = _Params(temperature=temperature, top_k=top_k, seed=3)
  examples = np.arange(4000)
  _CheckFrequencies(
    sampling.Sample(np.tile(logits, (len(examples), 1)), params, examples, 5), expected
  )
  # Draws must not repeat from position to position or from seed to seed, either.
  example = np.array([11])
  drawn = [sampling.Sample(logits[np.newaxis], params, example, t)[0] for t in range(2000)]
  _CheckFrequencies(np.array(drawn), expected)
  drawn = [
    sampling.Sample(logits[np.newaxis], params.Copy().Set(seed=s), example, 5)[0]
    for s in range(2000)
  ]
  _CheckFrequencies(np.array(drawn), expected)


def testNeighboursAreIndependent():
  """Draws of neighbouring examples and positions, and of an example and a position swapped."""
  params = _Params(seed=2**64 - 1)
  logits = np.log([0.2, 0.3, 0.5])
  grid = np.stack(
    [sampling.Sample(np.tile(logits, (80, 1)), params, np.arange(80), t) for t in range(80)]
  )
  expected = np.outer(np.exp(logits), np.exp(logits)).ravel()
  upper = np.triu_indices(80, 1)
  for a, b in (
    (grid[:, ::2], grid[:, 1::2]),
    (grid[::2], grid[1::2]),
    (grid[upper], grid.T[upper]),
  ):
    _CheckFrequencies((3 * a + b).ravel(), expected)


def testTemperatureZeroTakesTheFirstOfTheMostLikely():
  logits = np.array([[0.0, 2.0, 2.0], [-900.0, -1.0, -2.0], [-np.inf, -9.0, -np.inf]])
  tokens = sampling.Sample(logits, _Params(temperature=0), np.arange(3), 0)
  assert tokens.tolist() == [1, 1, 1] and tokens.dtype == np.int32
  assert sampling.Sample(logits, _Params(), np.arange(3), 0)[2] == 1


def testDrawDependsOnSeedExampleAndPositionOnly():
  logits = np.random.default_rng(2).normal(size=(50, _VOCAB))
  params = _Params(seed=4)
  tokens = sampling.Sample(logits, params, np.arange(50), 9)
  order = np.random.default_rng(3).permutation(50)[:20]
  np.testing.assert_array_equal(sampling.Sample(logits[order], params, order, 9), tokens[order])


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
def testLogitsThatAreNotFiniteAreAnError(value):
  logits = np.zeros((3, 2))
  logits[1] = value
  with pytest.raises(ValueError, match=r'position 6: .*row 1 is -?(nan|inf)'):
    sampling.Sample(logits, _Params(), np.arange(3), 6)


class _Model:
  """Logits that depend on all tokens so far; records how many positions it computed."""

  def __init__(self):
    self.num_positions = []

  def Logits(self, ids):
    """[batch, time] -> [batch, time, vocab]."""
    history = np.cumsum((ids + 1) * np.arange(1, ids.shape[1] + 1), axis=1)
    return 3 * np.sin(history[..., np.newaxis] * (1 + np.arange(_VOCAB)))

  def Prefill(self, ids):
    assert ids.dtype == np.int32
    self.num_positions.append(ids.shape[1])
    return self.Logits(ids)[:, -1:], ids

  def ExtendStep(self, ids, new, position):
    assert new.shape == (len(ids), 1) and ids.shape[1] == position
    self.num_positions.append(1)
    ids = np.concatenate([ids, new], axis=1)
    return self.Logits(ids)[:, -1:], ids

  def Generate(self, *args, **kwargs):
    return sampling.Generate(self.Prefill, self.ExtendStep, *args, **kwargs)


def _Prompts(batch=5, time=4):
  return np.random.default_rng(5).integers(0, _VOCAB, (batch, time))


def _OneByOne(prompt, num_tokens, params, example):
  text = list(prompt)
  for _ in range(num_tokens):
    logits = _Model().Logits(np.array([text]))[:, -1]
    text.append(int(sampling.Sample(logits, params, np.array([example]), len(text))[0]))
  return text[len(prompt) :]


@pytest.mark.parametrize('settings', [{'temperature': 0}, {}, {'top_k': 2, 'seed': 8}], ids=str)
def testPromptsOfAnyLengthsContinueAsTheyWouldAlone(settings):
  params, prompts, lengths = _Params(**settings), _Prompts(), np.array([2, 4, 1, 3, 4])
  model = _Model()
  tokens = model.Generate(prompts, 6, params, lengths=lengths)
  assert tokens.dtype == np.int32
  for i, n in enumerate(lengths):
    assert tokens[i].tolist() == _OneByOne(prompts[i, :n], 6, params, i)
  # The shortest prompt has one token, which is prefilled; the last new token is not computed.
  assert model.num_positions == [1] * (4 + 6 - 1)
  model = _Model()
  tokens = model.Generate(prompts, 6, params, examples=np.arange(10, 15))
  assert tokens[3].tolist() == _OneByOne(prompts[3], 6, params, 13)
  assert model.num_positions == [4] + [1] * 5


def testEosEndsAContinuation():
  params, prompts = _Params(), _Prompts(batch=8)
  free = _Model().Generate(prompts, 12, params)
  eos_id = int(free[0, 3])
  model = _Model()
  tokens = model.Generate(prompts, 12, params.Copy().Set(eos_id=eos_id))
  for row, whole in zip(tokens.tolist(), free.tolist(), strict=True):
    end = whole.index(eos_id) if eos_id in whole else len(whole)
    assert row == whole[:end] + [eos_id] * (len(whole) - end)
  # An eos within a prompt does not end it; nothing is computed after all prompts are done.
  model = _Model()
  tokens = model.Generate(np.full((1, 4), eos_id), 50, _Params(eos_id=eos_id, seed=1))
  end = tokens[0].tolist().index(eos_id)
  assert 0 < end < 49
  assert model.num_positions == [4] + [1] * end


def testZeroTokensComputeNothing():
  model = _Model()
  tokens = model.Generate(_Prompts(), 0, _Params())
  assert (tokens.shape, tokens.dtype, model.num_positions) == ((5, 0), np.int32, [])


@pytest.mark.parametrize(
  ('prompts', 'options', 'settings', 'names'),
  [
    (np.zeros((2, 3)), {}, {}, ('prompts', '[batch, time]', 'float64 [2, 3]')),
    (np.zeros((2, 0), int), {}, {}, ('prompts', '[batch, time]', 'int64 [2, 0]')),
    (np.zeros(3, int), {}, {}, ('prompts', '[batch, time]', 'int64 [3]')),
    (None, {'lengths': [1, 2]}, {}, ('length', '1 to 4', '5 prompts', '[1, 2]')),
    (None, {'lengths': [1, 2, 3, 4, 5]}, {}, ('length', '1 to 4', '[1, 2, 3, 4, 5]')),
    (None, {'lengths': [0, 2, 3, 4, 4]}, {}, ('length', '1 to 4', '[0, 2, 3, 4, 4]')),
    (None, {'examples': [0, 1, 2, 3, -1]}, {}, ('5 examples', '[0, 1, 2, 3, -1]')),
    (None, {}, {'temperature': -0.1}, ('temperature', '-0.1')),
    (None, {}, {'temperature': float('nan')}, ('temperature', 'nan')),
    (None, {}, {'top_k': -1}, ('top_k', 0, -1)),
    (None, {}, {'seed': 2**64}, ('seed', 0, 2**64)),
  ],
)
def testInvalidArgumentsAreNamed(prompts, options, settings, names):
  prompts = _Prompts() if prompts is None else prompts
  with pytest.raises(ValueError, match=naming.Naming(*names)):
    _Model().Generate(prompts, 3, _Params(**settings), **options)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
