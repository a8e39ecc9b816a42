# SPDX-License-Identifier: Apache-2.0
"""Translation models: sizes, loss, masks, and equal training with any cut."""

import functools
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import fprop_context, nested_map
from lingvo_gpipe.decoding import beam_search
from lingvo_gpipe.input.text import sentence_pairs
from tasks.mt import model
from tests import naming
from tests.toys import stacks

BATCH, SOURCE_TIME, TIME = 5, 6, 4
VOCAB, DIM, HIDDEN, HEADS, DIM_PER_HEAD, LAYERS = 11, 8, 12, 2, 3, 1


def _Params(**values):
  return model.TransformerMt.Params().Set(
    name='mt',
    vocab_size=VOCAB,
    model_dim=DIM,
    hidden_dim=HIDDEN,
    num_heads=HEADS,
    dim_per_head=DIM_PER_HEAD,
    num_layers=LAYERS,
    **values,
  )


def _Batch(seed=0):
  rng = np.random.default_rng(seed)

  def Side(time):
    ids = rng.integers(0, VOCAB, [BATCH, time + 1])
    lengths = rng.integers(1, time + 1, [BATCH, 1])
    return tf.constant(ids, tf.int32), tf.constant(np.arange(time) >= lengths, tf.float32)

  src_ids, src_paddings = Side(SOURCE_TIME)
  tgt_ids, tgt_paddings = Side(TIME)
  return nested_map.NestedMap(
    src_ids=src_ids[:, 1:],
    src_paddings=src_paddings,
    tgt_ids=tgt_ids[:, :-1],
    tgt_labels=tgt_ids[:, 1:],
    tgt_paddings=tgt_paddings,
    tgt_weights=1.0 - tgt_paddings,
  )


# ---- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'num_layers, hidden_dim, num_heads, matrices, published',
  [
    # GPipe (arXiv:1811.06965), section 5: the stack, and with two tables of 64,000 x 1024.
    (6, 8192, 16, 276_824_064, '276.8M'),
    (24, 8192, 16, 1_107_296_256, '1107.3M'),
    (12, 16384, 32, 1_107_296_256, '1107.3M'),
    (32, 16384, 32, 2_952_790_016, '2952.8M'),
    (64, 16384, 32, 5_905_580_032, '5905.6M'),
  ],
)
def testSizesOfThePaper(num_layers, hidden_dim, num_heads, matrices, published):
  def Refuse(next_creator, **kwargs):
    raise AssertionError('a variable was made')

  # Two layers are enough to count, because all layers are alike.
  p = model.TransformerMt.Params().Set(
    name='mt', num_layers=2, hidden_dim=hidden_dim, num_heads=num_heads
  )
  with tf.variable_creator_scope(Refuse):
    task = p.Instantiate()
  tables = ('source_emb.emb', 'layers[7].linear.w')
  of_layers, of_tables, of_vectors = 0, 0, 0
  for path, (weight, _) in task.WeightSpecs().items():
    if path.endswith(tables):
      of_tables += weight.num_elements
    elif len(weight.shape) == 2:
      of_layers += weight.num_elements
    else:
      of_vectors += weight.num_elements
  d, w = 1024, 64 * num_heads
  assert of_layers * num_layers // 2 == matrices == num_layers * (12 * d * w + 4 * d * hidden_dim)
  assert f'{matrices / 1e6:.1f}M' == published
  assert of_tables == 2 * 64_000 * d
  # Biases, norms, and the bias of the softmax.
  assert of_vectors == 2 * (9 * w + 2 * hidden_dim + 15 * d) + 4 * d + 64_000
  assert task.NumParams() == of_layers + of_tables + of_vectors


def testSeparateEmbeddingTables():
  shared, separate = (
    _Params(share_embedding=share).Instantiate().NumParams() for share in (True, False)
  )
  assert separate - shared == VOCAB * DIM


def testParamsReachTheLayers():
  p = _Params(
    input_dropout_prob=0.1,
    residual_dropout_prob=0.2,
    atten_dropout_prob=0.3,
    relu_dropout_prob=0.4,
  )
  p.encoder_tpl.activation, p.decoder_tpl.activation = 'TANH', 'SIGMOID'
  p.softmax_tpl.logits_abs_max = 5.0
  embeddings, encoder, encoder_norm, decoder, output, softmax = p.Instantiate().stack.layers
  assert embeddings.params.input_dropout_prob == 0.1
  for block, activation in ((encoder.body, 'TANH'), (decoder, 'SIGMOID')):
    probs = [block.params.Get(f'{x}_dropout_prob') for x in ('residual', 'atten', 'relu')]
    assert probs == [0.2, 0.3, 0.4]
    assert block.params.activation == activation
  kinds = [type(layer).__name__ for layer in (encoder_norm.body, output, softmax)]
  assert kinds == ['LayerNorm', 'DecoderOutputLayer', 'SimpleFullSoftmax']
  assert softmax.params.logits_abs_max == 5.0


# ---- the loss ------------------------------------------------------------------------------------


def _LogProbs(logits):
  shifted = logits - logits.max(axis=-1, keepdims=True)
  return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def testLossIsTheSmoothedCrossEntropyOfTheWeightedTokens():
  smoothing = 0.1
  task, batch = _Params(label_smoothing=smoothing).Instantiate(), _Batch()
  logits = np.random.default_rng(1).normal(size=[BATCH, TIME, VOCAB], scale=3.0)
  side = task.LossInputs(batch)

  def Metrics(do_eval):
    with fprop_context.Scope(do_eval=do_eval, step=0):
      return task.ComputeLoss(nested_map.NestedMap(), tf.constant(logits), side)

  labels, weights = batch.tgt_labels.numpy(), batch.tgt_weights.numpy()
  target = np.full([BATCH, TIME, VOCAB], smoothing / (VOCAB - 1))
  np.put_along_axis(target, labels[..., np.newaxis], 1 - smoothing, axis=-1)
  xent = -np.take_along_axis(_LogProbs(logits), labels[..., np.newaxis], -1)[..., 0]
  smoothed = -(target * _LogProbs(logits)).sum(-1)
  total = weights.sum()
  expected = {
    'loss': (smoothed * weights).sum() / total,
    'log_pplx': (xent * weights).sum() / total,
    'accuracy': ((logits.argmax(-1) == labels) * weights).sum() / total,
  }
  trained, per_example = Metrics(False)
  assert trained.keys() == expected.keys()
  for name, value in expected.items():
    assert float(trained[name][0]) == pytest.approx(value, rel=1e-9), name
    assert float(trained[name][1]) == total == float(task.LossWeight(side))
  np.testing.assert_allclose(per_example['xent'], (xent * weights).sum(-1))
  evaluated, _ = Metrics(True)
  assert float(evaluated['loss'][0]) == float(evaluated['log_pplx'][0]) < expected['loss']


def testEmptyLossIsZero():
  task, batch = _Params().Instantiate(), _Batch()
  batch.tgt_weights = tf.zeros_like(batch.tgt_weights)
  metrics, _ = task.ComputeLoss(None, tf.zeros([BATCH, TIME, VOCAB]), task.LossInputs(batch))
  assert {float(x) for pair in metrics.values() for x in pair} == {0.0}


@pytest.mark.parametrize('name', ['src_ids', 'tgt_ids', 'tgt_labels'])
@pytest.mark.parametrize('value', [-1, VOCAB])
def testIdsOutOfRangeRaise(name, value):
  task, batch = _Params().Instantiate(), _Batch()
  task.CheckBatch(batch)
  values = batch[name].numpy()
  values[2, 3] = value
  batch[name] = tf.constant(values)
  limits = '-1 ... 10' if value < 0 else '0 ... 11'
  with pytest.raises(ValueError, match=naming.Naming('mt', name, '[0, 11)', limits)):
    task.CheckBatch(batch)


# ---- masks -------------------------------------------------------------------------------


@functools.cache
def _Plain():
  """Returns (the layers as one sequence, theta), with random weights."""
  layer, theta = stacks.PlainLayers(_Params().Instantiate().stack.params.sub)
  rng = np.random.default_rng(3)
  for v in layer.variables:
    v.assign_add(rng.normal(size=v.shape, scale=0.3))
  return layer, theta()


def _Logits(batch):
  layer, theta = _Plain()
  return layer.FProp(theta, *_Params().Instantiate().PipelineInputs(batch)).numpy()


def _Changed(batch, name, place):
  values = batch[name].numpy()
  values[place] = (values[place] + 1) % VOCAB
  return nested_map.NestedMap(batch, **{name: tf.constant(values)})


def testPredictionsDependOnThePastTargetAndTheWholeSource():
  batch = _Batch()
  batch.src_paddings = tf.zeros_like(batch.src_paddings)
  batch.tgt_paddings = tf.zeros_like(batch.tgt_paddings)
  before = _Logits(batch)
  for t in range(TIME):
    after = _Logits(_Changed(batch, 'tgt_ids', np.s_[:, t]))
    np.testing.assert_array_equal(after[:, :t], before[:, :t])
    assert np.all(np.any(after[:, t:] != before[:, t:], axis=-1))
  for t in range(SOURCE_TIME):
    after = _Logits(_Changed(batch, 'src_ids', np.s_[:, t]))
    assert np.all(np.any(after != before, axis=-1))


def testPaddingDoesNotChangePredictions():
  batch = _Batch()
  before = _Logits(batch)
  real = batch.tgt_paddings.numpy() < 0.5
  for side in ('src', 'tgt'):
    padded = batch[f'{side}_paddings'].numpy() > 0.5
    assert padded.any()
    after = _Logits(_Changed(batch, f'{side}_ids', padded))
    np.testing.assert_array_equal(after[real], before[real])
  # A longer padding gives the same outputs.
  short = {k: v[:1] for k, v in batch.items()}
  length = int(np.sum(short['src_paddings'].numpy() < 0.5))
  for name in ('src_ids', 'src_paddings'):
    short[name] = short[name][:, :length]
  after = _Logits(nested_map.NestedMap(short))
  np.testing.assert_allclose(after[0][real[0]], before[0][real[0]], atol=1e-12)


def testExamplesAreIndependent():
  batch = _Batch()
  same = [0, 1, 2, 4]
  for name in ('src_ids', 'tgt_ids'):
    after = _Logits(_Changed(batch, name, 3))
    np.testing.assert_array_equal(after[same], _Logits(batch)[same])


# ---- pipelined -----------------------------------------------------------------------------------


def testPipelinedEqualsUnpipelined():
  """With dropout and smoothing; cuts around the encoder.

  The embedded target crosses two boundaries, and the encoded source one.
  """
  task = _Params(label_smoothing=0.1, residual_dropout_prob=0.2).Instantiate()
  batch = _Batch(7).Transform(lambda x: x[:4])  # Micro-batches of one size are traced once.
  inputs, side = task.PipelineInputs(batch), task.LossInputs(batch)
  side.weights = side.tgt_weights  # What `stacks.LossWeight` looks for.

  def Loss(theta, outputs, side):
    del theta
    # The reference computes the loss outside its context.
    with fprop_context.Scope(step=0):
      return task.ComputeLoss(None, outputs[0], side)[0]

  sub = task.stack.params.sub
  assert len(sub) == 6
  stack = stacks.MakeStack(
    sub,
    num_stages=4,
    splits=[1, 2, 4, 6],
    num_micro_batches=2,
    schedule='1f1b',
    remat_policy='layer',
  )
  expected = stacks.Reference(sub, 2, inputs, side, Loss)
  stacks.CheckEqual(stacks.Train(stack, inputs, side, Loss), expected)


# ---- decoding ------------------------------------------------------------------------------------


@functools.cache
def _Placed():
  """Returns a task in two stages, with random weights."""
  p = _Params(random_seed=3)
  p.stack.Set(num_stages=2, num_micro_batches=2, splits=[3, 6], xla=False)
  p.beam_search.Set(num_hyps_per_beam=3, target_seq_len=5)
  task = p.Instantiate()
  task.stack.Place(stacks.Devices(), *stacks.Specs(task.PipelineInputs(_Batch())))
  rng = np.random.default_rng(3)
  for v in task.stack.variables:
    v.assign_add(rng.normal(size=v.shape, scale=0.3))
  return task


def _TargetLogProbs(task, batch, ids):
  """Returns log-probabilities [batch, time, vocab] of ids [batch, time], by FProp."""
  args = task.PipelineInputs(batch)[:2] + (tf.constant(ids, tf.int32), None)
  for layer in task.stack.layers:
    outputs = layer.FProp(layer.theta, *args)
    args = outputs if isinstance(outputs, tuple) else (outputs,)
  return _LogProbs(args[0].numpy().astype(np.float64))


def testBeamScoreIsTheScoreOfTheHypothesis():
  """Steps with cached and reordered keys and values equal FProp of the whole sequence."""
  task, batch = _Placed(), _Batch(5)
  hyps = task.Translate(batch)
  for k in range(3):
    ids = np.concatenate([batch.tgt_ids.numpy()[:, :1], hyps.ids[:, k]], axis=1)
    log_probs = _TargetLogProbs(task, batch, ids[:, :-1])
    chosen = np.take_along_axis(log_probs, ids[:, 1:, np.newaxis], -1)[..., 0]
    for i in range(BATCH):
      length = hyps.lengths[i, k]
      if length:
        expected = chosen[i, :length].sum() / beam_search.LengthNorm(length, 0.6)
        assert hyps.scores[i, k] == pytest.approx(expected, abs=1e-4)
  assert np.all(hyps.lengths[:, 0] > 0)


def testHypothesesMayBeTwiceAsLongAsTheSourceByDefault(monkeypatch):
  task, batch, seen = _Params().Instantiate(), _Batch(), {}

  def Prefill(*args, **options):
    seen['prefill'] = options['max_length']
    return None, None

  monkeypatch.setattr(task.pipeline, 'Prefill', Prefill)
  monkeypatch.setattr(task._search, 'Search', lambda *args, **options: seen.update(options))
  task.Translate(batch)
  assert seen['prefill'] == seen['target_seq_len'] == 2 * SOURCE_TIME


def testDecodeReturnsTextsAndScores():
  """Decodes a fake input: texts of all rows in order, empty for padded rows."""
  task, batch = _Placed(), _Batch(5)
  batch.example_weights = tf.constant([1.0, 1.0, 0.0, 1.0, 0.0])
  hyps = task.Translate(batch)

  class Input:
    def Text(self, ids):
      return ' '.join(map(str, ids))

    def SentencePairs(self, batch):
      best = [self.Text(hyps.Best(i)) for i in (0, 1)]
      pairs = [('de', 'en', 'a', best[0]), ('fr', 'en', 'b', best[1]), ('fr', 'en', 'c', 'no')]
      return [sentence_pairs.SentencePair(*pair) for pair in pairs]

  decoded = task.Decode(batch, Input())
  assert decoded['source'] == ['a', 'b', '', 'c', '']
  assert decoded['source_language'] == ['de', 'fr', '', 'fr', '']
  assert decoded['hypothesis'][:2] == decoded['reference'][:2]
  assert decoded['hypothesis'][3] == Input().Text(hyps.Best(3))
  real = {name: [values[i] for i in (0, 1, 3)] for name, values in decoded.items()}
  metrics = task.DecodeFinalize(real)
  assert metrics['exact/de-en'] == 1 and metrics['exact/fr-en'] == 0.5
  assert metrics['exact'] == 0.75
  assert metrics['chrf/fr-en'] < metrics['chrf/de-en'] == pytest.approx(100)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
