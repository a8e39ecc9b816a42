# SPDX-License-Identifier: Apache-2.0
"""Transformer blocks: outputs, size and attention masks."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import fprop_context
from lingvo_gpipe.layers import attention, embedding, norm, sequential, transformer
from tests import naming
from tests.toys import layers

BATCH, TIME, DIM, HIDDEN = 2, 6, 8, 12


def _Params(**values):
  return transformer.TransformerLayer.Params().Set(
    name='block', input_dim=DIM, hidden_dim=HIDDEN, num_heads=2, dtype=tf.float64, **values
  )


def _Make(**values):
  return layers.WithVariables(_Params(**values))


def _Stack(dtype, fprop_dtype, **values):
  block = _Params(**values).Set(dtype=None)
  stack = sequential.SequentialLayer.Params().Set(
    name='s', sub=[block], repeat=2, dtype=dtype, fprop_dtype=fprop_dtype
  )
  return layers.WithVariables(stack)


def _X(seed=0, time=TIME, dtype=tf.float64):
  return layers.RandomInput(BATCH, time, DIM, seed=seed, dtype=dtype)


@pytest.mark.parametrize(('d', 'h'), [(8, 12), (16, 64)])
def testNumParams(d, h):
  layer = _Make().params.Copy().Set(input_dim=d, hidden_dim=h).Instantiate()
  assert layer.NumParams() == 4 * d * d + 4 * d + 2 * d * h + h + d + 4 * d
  layer = layer.params.Copy().Set(atten_hidden_dim=4).Instantiate()
  assert layer.NumParams() == 4 * d * 4 + 3 * 4 + d + 2 * d * h + h + d + 4 * d


def testTransformerOfThePaperIsCountedWithoutAllocation():
  # Table 1: d 2048, hidden 8192, 32 heads, vocabulary 32,000; 3 layers have 282.2M parameters.
  d, h, vocab = 2048, 8192, 32000
  block = transformer.TransformerLayer.Params().Set(input_dim=d, hidden_dim=h, num_heads=32)
  stack = sequential.SequentialLayer.Params().Set(
    name='lm',
    sub=[
      embedding.EmbeddingLayer.Params().Set(vocab_size=vocab, embedding_dim=d),
      sequential.SequentialLayer.Params().Set(sub=[block], repeat=3),
      embedding.SimpleFullSoftmax.Params().Set(input_dim=d, num_classes=vocab),
    ],
  )
  per_block = 4 * d * d + 4 * d + 2 * d * h + h + d + 4 * d
  assert stack.Instantiate().NumParams() == 3 * per_block + 2 * vocab * d + vocab
  assert round(stack.Instantiate().NumParams() / 1e6, 1) == 282.2


def testBlockAppliesItsParts():
  layer, x = _Make(activation='TANH', is_causal=True), _X()
  theta, atten, ff = layer.theta, layer.self_atten, layer.fflayer
  n = norm.LayerNorm.FProp(atten.layer_norm, theta.self_atten.layer_norm, x)
  h = x + attention.MultiHeadedAttention.FProp(atten.atten, theta.self_atten.atten, n, n, n)
  n = norm.LayerNorm.FProp(ff.layer_norm, theta.fflayer.layer_norm, h).numpy()
  (w0, w1) = (fc.w.numpy() for fc in theta.fflayer.fflayer.fc)
  y, paddings = layer(x)
  assert paddings is None
  np.testing.assert_allclose(y, h + np.tanh(n @ w0) @ w1, atol=1e-12)


@pytest.mark.parametrize('dtypes', [(tf.float64, None), (tf.float32, tf.bfloat16)], ids=str)
def testOutputsDoNotDependOnTheFuture(dtypes):
  stack = _Stack(*dtypes, is_causal=True)
  x = _X(dtype=dtypes[1] or dtypes[0])
  for t in range(1, TIME):
    other = tf.concat([x[:, :t], 10 * _X(7, TIME - t, x.dtype)], 1)
    np.testing.assert_array_equal(*(tf.cast(stack(z)[0][:, :t], tf.float64) for z in (x, other)))


@pytest.mark.parametrize('is_causal', [False, True])
@pytest.mark.parametrize('pad_left', [False, True])
def testPaddedPositionsDoNotChangeOtherPositions(is_causal, pad_left):
  stack = _Stack(tf.float64, None, is_causal=is_causal)
  x = _X()
  keep = np.s_[:, 2:] if pad_left else np.s_[:, :-2]
  paddings = np.ones([BATCH, TIME], np.float32)
  paddings[keep] = 0
  other = 100 * _X(7).numpy()
  other[keep] = x.numpy()[keep]
  outputs = [stack(z, tf.constant(paddings))[0].numpy() for z in (x, tf.constant(other))]
  np.testing.assert_array_equal(outputs[0][keep], outputs[1][keep])
  # A padded batch has the outputs of the unpadded batch.
  np.testing.assert_allclose(outputs[0][keep], stack(x[keep])[0], atol=1e-12)


@pytest.mark.parametrize('is_causal', [False, True])
def testAttentionStaysWithinSegments(is_causal):
  stack = _Stack(tf.float64, None, is_causal=is_causal)
  x = _X()
  segment_ids = tf.constant([[1, 1, 2, 2, 2, 0], [3, 1, 1, 1, 1, 1]])
  y, paddings, handed_on = stack(x, None, segment_ids)
  assert paddings is None and handed_on is segment_ids
  for row, parts in enumerate([[(0, 2), (2, 5), (5, 6)], [(0, 1), (1, 6)]]):
    for begin, end in parts:
      alone = stack(x[row : row + 1, begin:end])[0][0]
      np.testing.assert_allclose(y[row, begin:end], alone, atol=1e-12)


def testWrongSegmentsRaise():
  layer, x = _Make(), _X()
  with pytest.raises(ValueError, match=naming.Naming('block.self_atten', 'segment_ids', 'float32')):
    layer(x, None, tf.zeros([BATCH, TIME]))
  with pytest.raises(
    ValueError, match=naming.Naming('block.self_atten', 'segment_ids', '[2, 6]', 'got shape [2, 5]')
  ):
    layer(x, None, tf.zeros([BATCH, 5], tf.int32))


def testEachDropoutIsApplied():
  x = _X()
  plain = _Make()(x)[0].numpy()
  for name in ('residual_dropout_prob', 'atten_dropout_prob', 'relu_dropout_prob'):
    layer = _Make(**{name: 0.5})
    with fprop_context.Scope(step=1):
      y, again = layer(x)[0].numpy(), layer(x)[0].numpy()
    assert not np.allclose(y, plain), name
    np.testing.assert_array_equal(y, again)
    np.testing.assert_array_equal(layer(x)[0], plain)  # Evaluation.


def testNamesDoNotDependOnDropout():
  names = [list(_Make(residual_dropout_prob=p).VariablesByPath()) for p in (0.0, 0.5)]
  assert names[0] == names[1]
  assert 'block.self_atten.atten.query.w' in names[0]
  assert 'block.fflayer.fflayer.fc[0].w' in names[0]


def testFlopsOfALargeBlockAreTheProducts():
  d, h, b, t = 2048, 8192, 4, 1024
  params = _Params(is_causal=True).Set(dtype=tf.float32, input_dim=d, hidden_dim=h, num_heads=32)
  spec = tf.TensorSpec([b, t, d], tf.float32)
  meta = params.cls.FPropMeta(params, spec)
  products = 2 * b * t * (4 * d * d + 2 * d * h) + 4 * b * t * t * d
  assert products < meta.flops < 1.03 * products


def testErrorsNameThePathDownToThePart():
  layer = _Make()
  with pytest.raises(
    ValueError, match=naming.Naming('block.self_atten.layer_norm', 'inputs', 8, '[2, 3, 4]')
  ):
    layer(tf.zeros([2, 3, 4], tf.float64))
  with pytest.raises(
    ValueError,
    match=naming.Naming('block.self_atten.atten', 'paddings', '[2, 3]', 'got shape [2, 4]'),
  ):
    layer(tf.zeros([2, 3, 8], tf.float64), tf.zeros([2, 4]))
  with pytest.raises(ValueError, match='hidden_dim'):
    transformer.TransformerLayer.Params().Set(name='b', input_dim=4).Instantiate()


def testDecodingRowsOfSeveralDocumentsRaises():
  layer = _Make(is_causal=True)
  x, ids = tf.zeros([2, 3, DIM], tf.float64), tf.ones([2, 3], tf.int32)
  with pytest.raises(
    NotImplementedError, match=naming.Naming('block.self_atten', 'documents', 'segment_ids')
  ):
    layer.Prefill(layer.theta, x, None, ids, max_length=5)
  _, states = layer.Prefill(layer.theta, x, max_length=5)
  with pytest.raises(
    NotImplementedError, match=naming.Naming('block.self_atten', 'documents', 'segment_ids')
  ):
    layer.ExtendStep(layer.theta, states, x[:, :1], None, ids[:, :1], time_step=3)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
