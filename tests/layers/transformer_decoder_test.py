# SPDX-License-Identifier: Apache-2.0
"""Decoder blocks: outputs, size, attention masks, and decoding one position at a time."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import fprop_context
from lingvo_gpipe.layers import attention, norm, sequential, transformer_decoder
from tests import naming
from tests.toys import layers

BATCH, SOURCE_TIME, TIME, DIM, HIDDEN = 2, 5, 6, 8, 12


def _Params(**values):
  p = transformer_decoder.TransformerDecoderLayer.Params()
  return p.Set(
    name='block', input_dim=DIM, hidden_dim=HIDDEN, num_heads=2, dtype=tf.float64, **values
  )


def _Make(repeat=2, **values):
  layer = sequential.SequentialLayer.Params().Set(
    name='s', sub=[_Params(**values)], repeat=repeat, dtype=tf.float64
  )
  return layers.WithVariables(layer)


def _X(time=TIME, seed=0):
  return layers.RandomInput(BATCH, time, DIM, seed=seed)


def _Source(seed=5):
  return _X(SOURCE_TIME, seed)


@pytest.mark.parametrize('width', [0, 4, 16])
def testNumParams(width):
  layer = _Params(atten_hidden_dim=width).Instantiate()
  d, h, w = DIM, HIDDEN, width or DIM
  matrices = 8 * d * w + 2 * d * h
  assert layer.NumParams() == matrices + 2 * (3 * w + d) + h + d + 6 * d


def testBlockAppliesItsParts():
  stack = _Make(1)
  block, theta = stack.layers[0], stack.theta.layers[0]
  x, source = _X(), _Source()

  def Normed(part, x):
    return norm.LayerNorm.FProp(getattr(block, part).layer_norm, theta[part].layer_norm, x)

  def Attended(part, q, k):
    atten = getattr(block, part).atten
    return attention.MultiHeadedAttention.FProp(atten, theta[part].atten, q, k, k)

  n = Normed('self_atten', x)
  h = x + Attended('self_atten', n, n)
  h += Attended('cross_atten', Normed('cross_atten', h), source)
  w0, w1 = (fc.w.numpy() for fc in theta.fflayer.fflayer.fc)
  expected = h + np.maximum(Normed('fflayer', h).numpy() @ w0, 0) @ w1
  passed, source_paddings, y, paddings = stack(source, None, x)
  assert passed is source and source_paddings is None and paddings is None
  np.testing.assert_allclose(y, expected, atol=1e-12)


def testOutputsDependOnThePastAndTheWholeSource():
  stack, x, source = _Make(), _X(), _Source()
  before = stack(source, None, x)[2].numpy()
  for t in range(1, TIME):
    other = tf.concat([x[:, :t], 10 * _X(TIME - t, 7)], 1)
    np.testing.assert_array_equal(stack(source, None, other)[2][:, :t], before[:, :t])
  for t in range(SOURCE_TIME):
    changed = source.numpy()
    changed[:, t] += 1
    after = stack(tf.constant(changed), None, x)[2].numpy()
    assert np.all(np.any(after != before, axis=-1))


@pytest.mark.parametrize('pad_left', [False, True])
def testPaddingDoesNotChangeOtherPositions(pad_left):
  stack, x, source = _Make(), _X(), _Source()
  keep = np.s_[:, 2:] if pad_left else np.s_[:, :-2]

  def Padded(x, seed):
    paddings = np.ones(x.shape[:2], np.float32)
    paddings[keep] = 0
    other = 100 * _X(x.shape[1], seed).numpy()
    other[keep] = x.numpy()[keep]
    return tf.constant(other), tf.constant(paddings)

  outputs = [
    stack(*Padded(source, seed), *Padded(x, seed + 1))[2].numpy()[keep] for seed in (11, 13)
  ]
  np.testing.assert_array_equal(*outputs)
  # A padded batch has the outputs of the unpadded batch.
  np.testing.assert_allclose(outputs[0], stack(source[keep], None, x[keep])[2], atol=1e-12)


def testEachDropoutIsApplied():
  x, source = _X(), _Source()
  plain = _Make()(source, None, x)[2].numpy()
  for name in ('residual_dropout_prob', 'atten_dropout_prob', 'relu_dropout_prob'):
    stack = _Make(**{name: 0.5})
    with fprop_context.Scope(step=1):
      y, again = (stack(source, None, x)[2].numpy() for _ in range(2))
    assert not np.allclose(y, plain), name
    np.testing.assert_array_equal(y, again)
    np.testing.assert_array_equal(stack(source, None, x)[2], plain)  # Evaluation.


@pytest.mark.parametrize('name', ['residual_dropout_prob', 'atten_dropout_prob'])
def testCrossAttentionHasItsOwnDropout(name):
  """Tests the attention alone, because a block has other dropouts."""
  assert _Params(**{name: 0.5}).Instantiate().cross_atten.params.Get(name) == 0.5
  p = transformer_decoder.TransformerCrossAttentionLayer.Params().Set(
    name='cross', input_dim=DIM, num_heads=2, dtype=tf.float64, random_seed=1
  )
  x, source, added = _X(), _Source(), []
  for layer in (p.Instantiate(), p.Set(**{name: 0.5}).Instantiate()):
    layer.InstantiateVariables()
    with fprop_context.Scope(step=1):
      added.append((layer(x, source) - x).numpy())
  plain, dropped = added
  if name == 'residual_dropout_prob':
    assert 0.3 < np.mean(dropped == 0) < 0.7
    np.testing.assert_allclose(dropped, np.where(dropped == 0, 0, 2 * plain), atol=1e-12)
  else:
    assert np.all(np.any(dropped != plain, axis=-1))


@pytest.mark.parametrize('prompt', [1, 4])
@pytest.mark.parametrize('padded', [False, True])
def testStepByStepEqualsFProp(prompt, padded):
  stack, x, source = _Make(1), _X(), _Source()
  block, theta = stack.layers[0], stack.theta.layers[0]
  paddings = None
  if padded:
    paddings = tf.constant([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]], tf.float32)
  expected = block.FProp(theta, source, paddings, x)[2].numpy()
  (*_, y, _), states = block.Prefill(theta, source, paddings, x[:, :prompt], max_length=TIME + 2)
  outputs = [y]
  for t in range(prompt, TIME):
    step = tf.constant(t, tf.int32)
    (*source_side, y, _), states = block.ExtendStep(
      theta, states, None, None, x[:, t : t + 1], time_step=step
    )
    assert source_side == [None, None]
    outputs.append(y)
  np.testing.assert_allclose(tf.concat(outputs, 1), expected, atol=1e-12)


def testErrorsNameThePathDownToThePart():
  stack = _Make()
  with pytest.raises(
    ValueError, match=naming.Naming('s.layers[0].cross_atten.atten', 'key_vec', 8, '[2, 3, 4]')
  ):
    stack(tf.zeros([BATCH, 3, 4], tf.float64), None, _X())


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
