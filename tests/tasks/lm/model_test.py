# SPDX-License-Identifier: Apache-2.0
"""Language models: loss, masks, causality, bits per byte, generation."""

import functools
import math
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.decoding import beam_search
from lingvo_gpipe.layers import embedding
from lingvo_gpipe.runners import eval_runner
from tasks.lm import model
from tests import naming

_BATCH, _TIME, _VOCAB, _DIM, _HIDDEN = 4, 7, 13, 8, 12


def _Params(cls=model.TransformerLm, **settings):
  p = cls.Params().Set(
    name='lm',
    vocab_size=_VOCAB,
    model_dim=_DIM,
    hidden_dim=_HIDDEN,
    num_heads=2,
    num_layers=2,
    random_seed=1,
  )
  p.stack.Set(num_stages=2, num_micro_batches=2, xla=False)
  return p.Set(**settings)


def _Batch(seed=0, vocab_size=_VOCAB):
  rng = np.random.default_rng(seed)
  ids = rng.integers(0, vocab_size, [_BATCH, _TIME + 1]).astype(np.int32)
  weights = rng.integers(0, 2, [_BATCH, _TIME]).astype(np.float32)
  weights[0, 0] = 1.0
  weights[3] = 0.0
  return nested_map.NestedMap(
    ids=tf.constant(ids[:, :-1]), labels=tf.constant(ids[:, 1:]), weights=tf.constant(weights)
  )


def _Spec(batch):
  return batch.Transform(lambda t: tf.TensorSpec(t.shape, t.dtype))


@functools.cache
def _Run(cls=model.TransformerLm):
  """Returns a runner whose model has random weights instead of the initial weights."""
  devices = [d.name for d in tf.config.list_logical_devices('CPU')]
  vocab_size = 256 if cls is model.ByteTransformerLm else _VOCAB
  p = _Params(cls, vocab_size=vocab_size)
  run = eval_runner.EvalRunner(p.Instantiate(), devices, _Spec(_Batch()))
  rng = np.random.default_rng(3)
  for v in run.task.variables:
    v.assign(v + rng.normal(size=v.shape, scale=0.3))
  return run


def _Logits(ids):
  return _Run().task.pipeline.Predict(tf.constant(ids)).numpy()


def _CrossEntropy(logits, labels):
  """Returns the loss of each position, in float64."""
  logits = logits.astype(np.float64)
  logits = logits - logits.max(axis=-1, keepdims=True)
  log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
  return -np.take_along_axis(log_probs, labels[..., np.newaxis], axis=-1)[..., 0]


def testLossIsTheCrossEntropyOfTheWeightedPositions():
  rng = np.random.default_rng(1)
  batch = _Batch()
  logits = rng.normal(size=[_BATCH, _TIME, _VOCAB], scale=3.0).astype(np.float32)
  task = _Params().Instantiate()
  metrics, per_example = task.ComputeLoss(nested_map.NestedMap(), tf.constant(logits), batch)
  weights = batch.weights.numpy()
  xent = _CrossEntropy(logits, batch.labels.numpy())
  total = weights.sum()
  loss = (xent * weights).sum() / total
  right = (logits.argmax(-1) == batch.labels.numpy()) * weights
  expected = {
    'loss': loss,
    'bits_per_token': loss / math.log(2),
    'accuracy': right.sum() / total,
  }
  assert metrics.keys() == expected.keys()
  for name, value in expected.items():
    assert float(metrics[name][0]) == pytest.approx(value, rel=1e-5), name
    assert float(metrics[name][1]) == total
  np.testing.assert_allclose(per_example['xent'].numpy(), (xent * weights).sum(-1), rtol=1e-5)
  assert float(task.LossWeight(task.LossInputs(batch))) == total
  assert 0 < expected['accuracy'] < 1


def _OfBlocks(layers_per_block, splits):
  """Returns metrics and texts of three blocks of layers, with random weights."""
  p = _Params(num_layers=3, layers_per_block=layers_per_block)
  p.stack.splits = list(splits)
  task = p.Instantiate()
  devices = [d.name for d in tf.config.list_logical_devices('CPU')]
  runner = eval_runner.EvalRunner(task, devices, _Spec(_Batch()))
  rng = np.random.default_rng(5)
  # The weights of a block have the same order for any number of layers.
  for variable in task.variables:
    variable.assign(rng.normal(size=variable.shape, scale=0.3))
  metrics = {name: value for name, (value, _) in runner.Evaluate([_Batch()]).items()}
  return metrics, task.Generate(_Batch().ids[:2, :3].numpy(), 4, temperature=0).tolist()


def testBlocksOfSeveralLayersComputeTheSame():
  """Three blocks with the same weights; the first stage ends within the second block."""
  metrics, texts = _OfBlocks(2, (5, 10))
  expected_metrics, expected_texts = _OfBlocks(1, ())
  assert expected_metrics == pytest.approx(metrics, rel=1e-6)
  assert texts == expected_texts


def testEmptyLossAndItsGradientAreZero():
  """A micro-batch of padding only must not make the mean NaN."""
  batch = _Batch()
  batch.weights = tf.zeros_like(batch.weights)
  logits = tf.zeros([_BATCH, _TIME, _VOCAB])
  with tf.GradientTape() as tape:
    tape.watch(logits)
    metrics, _ = _Params().Instantiate().ComputeLoss(nested_map.NestedMap(), logits, batch)
    loss = metrics['loss'][0]
  assert {float(x) for pair in metrics.values() for x in pair} == {0.0}
  np.testing.assert_array_equal(tape.gradient(loss, logits).numpy(), 0.0)


def testLossInHalfPrecisionAgreesWithTheLossWeight():
  """bfloat16 counts exactly only up to 256, so the weights are summed in float32."""
  task = _Params(fprop_dtype=tf.bfloat16).Instantiate()
  batch = nested_map.NestedMap(
    labels=tf.zeros([16, 67], tf.int32), weights=tf.ones([16, 67], tf.float32)
  )
  logits = tf.zeros([16, 67, _VOCAB], tf.bfloat16)
  metrics, _ = task.ComputeLoss(nested_map.NestedMap(), logits, batch)
  assert float(metrics['loss'][1]) == float(task.LossWeight(batch)) == 16 * 67
  assert float(metrics['loss'][0]) == pytest.approx(math.log(_VOCAB), rel=1e-3)


def testEvaluationEqualsTheFormulaOfTheModel():
  """Stages and micro-batches give the mean over all weighted tokens."""
  batches = [_Batch(seed) for seed in range(3)]
  result = _Run().Evaluate(batches)
  xent, weights = [], []
  for batch in batches:
    xent.append(_CrossEntropy(_Logits(batch.ids.numpy()), batch.labels.numpy()))
    weights.append(batch.weights.numpy())
  expected = np.sum(np.multiply(xent, weights)) / np.sum(weights)
  assert result['loss'][0] == pytest.approx(expected, rel=1e-5)
  assert result['loss'][1] == np.sum(weights)
  assert result['bits_per_token'][0] == pytest.approx(expected / math.log(2), rel=1e-5)


def testLogPerplexityPerWordIsTheTotalLossByTheNumberOfWords():
  """Holds for a whole evaluation, even if no word begins in a micro-batch."""
  p = _Params()
  batches = [_Batch(seed) for seed in range(3)]
  for seed, batch in enumerate(batches):
    batch.words = tf.constant(
      np.random.default_rng(seed).integers(0, 2, [_BATCH, _TIME]), tf.float32
    )
  batches[1].words *= [[0.0], [0.0], [1.0], [1.0]]
  devices = [d.name for d in tf.config.list_logical_devices('CPU')]
  result = eval_runner.EvalRunner(p.Instantiate(), devices, _Spec(batches[0])).Evaluate(batches)
  words = sum(float(tf.reduce_sum(b.words * b.weights)) for b in batches)
  value, weight = result['log_pplx_per_word']
  assert weight == pytest.approx(words, rel=1e-5)
  assert value == pytest.approx(result['loss'][0] * result['loss'][1] / words, rel=1e-5)
  assert result['loss'][1] > 1.5 * words


def testPredictionsDoNotDependOnTheFuture():
  """Changing token t changes only the logits from t on."""
  ids = _Batch().ids.numpy()
  before = _Logits(ids)
  for t in range(_TIME):
    changed = ids.copy()
    changed[:, t] = (changed[:, t] + 1) % _VOCAB
    after = _Logits(changed)
    np.testing.assert_array_equal(after[:, :t], before[:, :t])
    assert np.all(np.any(after[:, t] != before[:, t], axis=-1))
    # It changes all later logits.
    assert np.all(np.any(after[:, t:] != before[:, t:], axis=(0, 2)))


def testExamplesAreIndependent():
  ids = _Batch().ids.numpy()
  changed = ids.copy()
  changed[1] = (changed[1] + 1) % _VOCAB
  same = [0, 2, 3]
  np.testing.assert_array_equal(_Logits(changed)[same], _Logits(ids)[same])


def testPositionsMatter():
  ids = np.full([2, _TIME], 3, np.int32)
  logits = _Logits(ids)
  assert not np.allclose(logits[:, 0], logits[:, 1])


def testBitsPerByte():
  run = _Run(model.ByteTransformerLm)
  result = run.Evaluate([_Batch(5, 256)])
  assert set(result) == {'loss', 'bits_per_byte', 'accuracy'}
  assert result['bits_per_byte'][0] == pytest.approx(result['loss'][0] / math.log(2), rel=1e-6)
  assert result['bits_per_byte'][1] == result['loss'][1]

  class Input:
    def ByteEntropy(self):
      return 4.75

  text = run.task.Report({'bits_per_byte': 3.25}, Input())
  assert naming.Names(text, '3.250 bits per byte', '4.750')


def testGreedyGenerationIsTheStepByStepArgmax():
  """Compares with full recomputation, beyond the length of training batches."""
  prompt = _Batch().ids.numpy()[:3, :4]
  tokens = _Run().task.Generate(prompt, 5, temperature=0.0)
  text = np.concatenate([prompt, np.zeros([3, 5], np.int32)], axis=1)
  for t in range(4, 9):
    text[:, t] = _Logits(text)[:, t - 1].argmax(-1)
  np.testing.assert_array_equal(tokens, text[:, 4:])
  assert tokens.dtype == np.int32


def testGenerationDoesNotDependOnPromptLengthsOrTheCut():
  """Rows do not depend on each other, nor on the numbers of stages and micro-batches."""
  prompts, lengths = _Batch().ids.numpy(), np.array([3, 7, 1, 5])
  sampled = _Run().task.Generate(prompts, 4, lengths=lengths, top_k=4, seed=2)
  greedy = _Run().task.Generate(prompts, 4, lengths=lengths, temperature=0)
  for i in (0, 2):
    alone = _Run().task.Generate(prompts[i : i + 1, : lengths[i]], 4, temperature=0)
    np.testing.assert_array_equal(greedy[i], alone[0])
  p = _Params()
  p.stack.Set(num_stages=1, num_micro_batches=3)
  other = p.Instantiate()
  devices = [d.name for d in tf.config.list_logical_devices('CPU')]
  eval_runner.EvalRunner(other, devices, _Spec(_Batch()))
  for path, v in other.VariablesByPath().items():
    v.assign(_Run().task.VariablesByPath()[path])
  order = [3, 0, 2]
  again = other.Generate(prompts[order], 4, lengths=lengths[order], examples=order, top_k=4, seed=2)
  np.testing.assert_array_equal(again, sampled[order])


def testSamplingFollowsTheSoftmax():
  """Compares frequencies of the first token with its probabilities; checks the seed."""
  task = _Run().task
  prompt = np.repeat(_Batch().ids.numpy()[:1], 4000, axis=0)
  tokens = task.Generate(prompt, 1, temperature=1.5, seed=7)
  np.testing.assert_array_equal(tokens, task.Generate(prompt, 1, temperature=1.5, seed=7))
  assert not np.array_equal(tokens, task.Generate(prompt, 1, temperature=1.5, seed=8))
  logits = _Logits(prompt[:1])[0, -1].astype(np.float64) / 1.5
  probabilities = np.exp(logits) / np.exp(logits).sum()
  counts = np.bincount(tokens[:, 0], minlength=_VOCAB) / len(tokens)
  # Four standard deviations of each count.
  limit = 4 * np.sqrt(probabilities * (1 - probabilities) / len(tokens)) + 1e-3
  assert np.all(np.abs(counts - probabilities) < limit)


def testGenerateZeroTokens():
  tokens = _Run().task.Generate(_Batch().ids.numpy(), 0)
  assert (tokens.shape, tokens.dtype) == ((_BATCH, 0), np.int32)


def testPromptsOutsideTheVocabularyRaise():
  with pytest.raises(ValueError, match=naming.Naming('lm', 'prompts', '[0, 13)', '0 ... 13')):
    _Run().task.Generate(np.array([[0, _VOCAB]]), 1)


def testBeamSearchIsEqualWithAndWithoutCaches():
  """States follow their hypotheses over two stages and micro-batches of several rows."""
  search = beam_search.BeamSearch.Params().Set(num_hyps_per_beam=3, target_seq_len=6).Instantiate()
  stack = _Run().task.stack
  prompts = np.random.default_rng(5).integers(0, _VOCAB, [3, 4]).astype(np.int32)
  actual = search.Search(
    *stack.Prefill(tf.constant(prompts), max_length=10, last_only=True),
    lambda states, ids, t: stack.ExtendStep(states, tf.constant(ids), time_step=t),
    stack.ReorderStates,
    first_time_step=4,
  )

  def Logits(ids, time):
    # Later positions do not affect a position; a fixed length needs a single trace.
    padded = np.pad(ids, [[0, 0], [0, 10 - ids.shape[1]]])
    return stack.Predict(tf.constant(padded))[:, : time + 1]

  def Extend(ids, new, time):
    ids = np.concatenate([ids, new], axis=1)
    return Logits(ids, time), ids

  expected = search.Search(
    Logits(prompts, 3), prompts, Extend, lambda ids, rows: ids[rows], first_time_step=4
  )
  np.testing.assert_array_equal(actual.ids, expected.ids)
  np.testing.assert_array_equal(actual.lengths, expected.lengths)
  np.testing.assert_allclose(actual.scores, expected.scores, rtol=1e-4)
  assert len(np.unique(expected.lengths)) > 1  # Some hypotheses have ended and others continue.


def testDecodeReturnsTexts():
  task = _Run(model.ByteTransformerLm).task
  text = b'.def f(): pass;\0'  # The first character is the context, the last one no text.
  batch = nested_map.NestedMap(
    ids=tf.constant([list(text[:-1])] * 2, tf.int32),
    labels=tf.constant([list(text[1:])] * 2, tf.int32),
    weights=tf.constant([[1.0] * 14 + [0.0]] * 2),
  )
  decoded = task.Decode(batch, None)
  assert decoded['prompt'] == ['.def f()'] * 2
  assert decoded['reference'] == [': pass;'] * 2
  assert [type(continuation) for continuation in decoded['continuation']] == [str] * 2
  # Two examples with equal text have different draws, which depend on their numbers only.
  batch.example_index = tf.constant([6, 1], tf.int64)
  other = task.Decode(batch, None)['continuation']
  assert other[1] == decoded['continuation'][1] and other[0] != decoded['continuation'][0]
  assert task.DecodeFinalize({**decoded, 'continuation': [': p', ': past']}) == {
    'matched_prefix_length': 4.0
  }


def testNumberOfParameters():
  """Counts by hand: embedding, two layers (attention, feed-forward, two norms), norm, softmax."""
  attention = 4 * (_DIM * _DIM + _DIM)
  feed_forward = _DIM * _HIDDEN + _HIDDEN + _HIDDEN * _DIM + _DIM
  norm = 2 * _DIM
  softmax = _DIM * _VOCAB + _VOCAB
  expected = _VOCAB * _DIM + 2 * (attention + feed_forward + 2 * norm) + norm + softmax
  task = _Params().Instantiate()
  assert task.NumParams() == expected
  with pytest.raises(ValueError, match=naming.Naming('lm', 'InstantiateVariables()')):
    _ = task.vars
  # The input dropout is a layer without weights.
  assert _Params(input_dropout_prob=0.1).Instantiate().NumParams() == expected


def testParamsReachTheLayers():
  p = _Params(
    residual_dropout_prob=0.1, atten_dropout_prob=0.2, relu_dropout_prob=0.3, input_dropout_prob=0.4
  )
  p.stack.num_micro_batches = 4
  task = p.Instantiate()
  stack = task.stack
  assert stack.params.num_micro_batches == 4
  kinds = [type(layer).__name__ for layer in stack.layers]
  assert kinds == [
    'EmbeddingLayer',
    'PositionalEmbeddingLayer',
    'DropoutLayer',
    'TransformerLayer',
    'TransformerLayer',
    'LayerNorm',
    'SimpleFullSoftmax',
  ]
  assert stack.layers[2].params.keep_prob == pytest.approx(0.6)
  assert stack.layers[0].params.scale_sqrt_depth
  for layer in stack.layers[3:5]:
    p = layer.params
    assert p.is_causal
    dropouts = p.residual_dropout_prob, p.atten_dropout_prob, p.relu_dropout_prob
    assert dropouts == (0.1, 0.2, 0.3)
  assert isinstance(stack.layers[-1], embedding.SimpleFullSoftmax)
  assert stack.params.random_seed == 1
  assert _Params().FromText(task.params.ToText()) == task.params


def testDepthTricks():
  """Only the initial feed-forward weights are scaled by depth^-x; logits are clipped."""
  p = _Params(num_layers=4)
  plain, shrunk = p.Instantiate(), p.Copy().Set(ff_init_depth_exponent=0.25).Instantiate()
  for task in (plain, shrunk):
    task.InstantiateVariables()
  values = plain.VariablesByPath()
  for path, v in shrunk.VariablesByPath().items():
    scale = 4**-0.25 if '.fflayer.fc' in path and path.endswith('.w') else 1.0
    np.testing.assert_allclose(v, scale * values[path], rtol=1e-6, atol=1e-7, err_msg=path)
  p.softmax_tpl.logits_abs_max = 0.1
  task = p.Instantiate()
  assert task.stack.layers[-1].params.logits_abs_max == 0.1


def testThePaperHasNoLayerNormBeforeTheSoftmax():
  with_norm, without = _Params(), _Params(final_layer_norm=False)
  assert with_norm.Instantiate().NumParams() - without.Instantiate().NumParams() == 2 * _DIM


def testReportsThePerplexity():
  assert _Params().Instantiate().Report({'loss': math.log(8)}, None) == 'perplexity 8.00 a token'
  by_word = {'loss': math.log(8), 'log_pplx_per_word': math.log(16)}
  assert _Params().Instantiate().Report(by_word, None) == 'perplexity 8.00 a token, 16.00 a word'
  assert 'perplexity' in _Params().Instantiate().Report({'loss': 1e6}, None)


@pytest.mark.parametrize('name, value', [('ids', -1), ('ids', _VOCAB), ('labels', _VOCAB)])
def testIdsOutOfRangeRaise(name, value):
  batch = _Batch()
  task = _Run().task
  task.CheckBatch(batch)
  values = batch[name].numpy()
  values[2, 3] = value
  batch[name] = tf.constant(values)
  limits = '-1 ... 12' if value < 0 else '0 ... 13'
  with pytest.raises(ValueError, match=naming.Naming('lm', name, '[0, 13)', limits)):
    task.CheckBatch(batch)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
