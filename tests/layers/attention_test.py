# SPDX-License-Identifier: Apache-2.0
"""Multi-head attention against NumPy: values, masks and decoding."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import fprop_context
from lingvo_gpipe.layers import attention
from tests import naming
from tests.toys import layers

BATCH, TIME, DIM = 2, 5, 8


def _Make(**values):
  values = {'input_dim': DIM, 'num_heads': 2, 'dtype': tf.float64, **values}
  return layers.WithVariables(attention.MultiHeadedAttention.Params().Set(name='atten', **values))


def _Vectors(seed=0, time=TIME, dtype=tf.float64):
  return layers.RandomInput(BATCH, time, DIM, seed=seed, dtype=dtype)


def _Reference(layer, query, key, value, allowed):
  """Computes one head of one example at a time; `allowed` [batch, query time, key time]."""
  weights = {n: (w.w.numpy(), w.b.numpy() if 'b' in w else 0) for n, w in layer.vars.items() if w}
  q, k, v = (
    x.numpy() @ weights[n][0] + weights[n][1]
    for n, x in (('query', query), ('key', key), ('value', value))
  )
  heads = layer.params.num_heads
  size = q.shape[-1] // heads
  encoded = np.zeros_like(q)
  for b in range(q.shape[0]):
    for h in range(heads):
      part = np.s_[b, :, h * size : (h + 1) * size]
      logits = q[part] @ k[part].T / np.sqrt(size)
      probs = np.where(allowed[b], np.exp(logits), 0)
      encoded[part] = probs / probs.sum(-1, keepdims=True) @ v[part]
  return encoded @ weights['post'][0] + weights['post'][1]


@pytest.mark.parametrize(
  'values', [{}, {'hidden_dim': 6, 'num_heads': 3}, {'use_bias': False}], ids=str
)
def testEqualsTheFormula(values):
  layer = _Make(**values)
  if layer.params.use_bias:
    for v in layer.VariablesByPath().values():
      v.assign_add(tf.fill(v.shape, tf.constant(0.1, tf.float64)))
  query, key, value = _Vectors(0), _Vectors(1, 7), _Vectors(2, 7)
  allowed = np.ones([BATCH, TIME, 7], bool)
  y = layer(query, key, value)
  np.testing.assert_allclose(y, _Reference(layer, query, key, value, allowed), atol=1e-12)
  paddings = np.zeros([BATCH, 7], np.float32)
  paddings[1, 4:] = 1
  allowed[1, :, 4:] = False
  y = layer(query, key, value, tf.constant(paddings))
  np.testing.assert_allclose(y, _Reference(layer, query, key, value, allowed), atol=1e-12)
  allowed[:, 0, 1:3] = False
  mask = np.ones([1, 1, TIME, 7], bool)
  mask[0, 0, 0, 1:3] = False
  y = layer(query, key, value, tf.constant(paddings), tf.constant(mask))
  np.testing.assert_allclose(y, _Reference(layer, query, key, value, allowed), atol=1e-12)


def testCausalEqualsTheFormula():
  layer, x = _Make(is_causal=True), _Vectors()
  allowed = np.broadcast_to(np.tril(np.ones([TIME, TIME], bool)), [BATCH, TIME, TIME])
  np.testing.assert_allclose(layer(x, x, x), _Reference(layer, x, x, x, allowed), atol=1e-12)


def testNumParams():
  assert _Make().NumParams() == 4 * DIM * DIM + 4 * DIM
  assert _Make(use_bias=False, hidden_dim=6).NumParams() == 4 * DIM * 6


@pytest.mark.parametrize('dtypes', [(tf.float64, None), (tf.float32, tf.bfloat16)], ids=str)
def testOutputsDoNotDependOnTheFuture(dtypes):
  layer = _Make(is_causal=True, dtype=dtypes[0], fprop_dtype=dtypes[1])
  x = _Vectors(dtype=dtypes[1] or dtypes[0])
  for t in range(1, TIME):
    other = tf.concat([x[:, :t], 1e3 * _Vectors(7, TIME - t, x.dtype)], 1)
    np.testing.assert_array_equal(*(tf.cast(layer(z, z, z)[:, :t], tf.float64) for z in (x, other)))


def testPaddedKeysAreMaskedOut():
  layer, x = _Make(), _Vectors()
  paddings = tf.constant([[0, 0, 0, 1, 1]] * BATCH, tf.float32)
  other = tf.concat([x[:, :3], 1e3 * _Vectors(7, 2)], 1)
  y, z = (layer(x[:, :3], v, v, paddings) for v in (x, other))
  np.testing.assert_array_equal(y, z)
  np.testing.assert_allclose(y, layer(x[:, :3], x[:, :3], x[:, :3]), atol=1e-12)


def testExamplesDoNotMix():
  layer, x = _Make(is_causal=True), _Vectors()
  other = tf.concat([x[:1], _Vectors(7)[1:]], 0)
  np.testing.assert_allclose(layer(x, x, x)[0], layer(other, other, other)[0], atol=1e-12)


@pytest.mark.parametrize('dtype', [tf.float32, tf.bfloat16, tf.float16], ids=str)
def testAllPaddedIsFinite(dtype):
  layer = _Make(is_causal=True, dtype=tf.float32, fprop_dtype=dtype)
  x = _Vectors(dtype=dtype)
  with tf.GradientTape() as tape:
    tape.watch(x)
    y = layer(x, x, x, tf.ones([BATCH, TIME]))
  assert np.all(np.isfinite(tf.cast(y, tf.float32)))
  assert np.all(np.isfinite(tf.cast(tape.gradient(y, x), tf.float32)))


def testBfloat16IsNearFloat32():
  layer = _Make(is_causal=True, dtype=tf.float32)
  narrow = _Make(is_causal=True, dtype=tf.float32, fprop_dtype=tf.bfloat16)
  x = _Vectors(dtype=tf.float32)
  y = narrow(x, x, x)  # The layer casts its inputs.
  assert y.dtype == tf.bfloat16
  np.testing.assert_allclose(tf.cast(y, tf.float32), layer(x, x, x), atol=0.05)


def testDropsAttentionWeights():
  layer, x = _Make(atten_dropout_prob=0.5), _Vectors()
  with fprop_context.Scope(step=1):
    y, again = layer(x, x, x), layer(x, x, x)
  with fprop_context.Scope(step=2):
    other = layer(x, x, x)
  np.testing.assert_array_equal(y, again)
  assert np.all(y != other)
  with fprop_context.Scope(step=1, do_eval=True):
    np.testing.assert_array_equal(layer(x, x, x), _Make()(x, x, x))


def testAcceptsUnknownBatchAndTime():
  layer, x = _Make(is_causal=True), _Vectors()
  spec = tf.TensorSpec([None, None, DIM], tf.float64)
  run = tf.function(lambda z: layer(z, z, z), input_signature=[spec], autograph=False)
  np.testing.assert_allclose(run(x), layer(x, x, x), atol=1e-12)


def testAttendToEqualsFProp():
  layer, query, key, value = _Make(), _Vectors(0, 3), _Vectors(1), _Vectors(2)
  paddings = tf.constant([[0.0, 0, 0, 1, 1], [0, 0, 0, 0, 0]])
  mask = tf.constant(np.random.default_rng(3).random([BATCH, 1, 3, TIME]) < 0.7)
  projected = layer.ProjectKeyValue(layer.theta, key, value)
  assert projected.key.shape == projected.value.shape == [BATCH, 2, TIME, DIM // 2]
  for masks in ([], [paddings], [None, mask], [paddings, mask]):
    y = layer.AttendTo(layer.theta, query, projected, *masks)
    np.testing.assert_allclose(y, layer(query, key, value, *masks), rtol=0, atol=1e-12)


@pytest.mark.parametrize('dtypes', [(tf.float64, None), (tf.float32, tf.bfloat16)], ids=str)
def testCachesHoldThePastAndZeros(dtypes):
  layer = _Make(is_causal=True, dtype=dtypes[0], fprop_dtype=dtypes[1])
  x = _Vectors(dtype=layer.params.fprop_dtype)
  _, states = layer.Prefill(layer.theta, *[x[:, :3]] * 3, max_length=7)
  assert states.key.dtype == states.value.dtype == layer.params.fprop_dtype
  _, after = layer.ExtendStep(layer.theta, states, *[x[:, 3:4]] * 3, time_step=3)
  expected = layer.ProjectKeyValue(layer.theta, x, x)
  for name in ('key', 'value'):
    for time, cache in ((3, states[name]), (4, after[name])):
      assert cache.shape == [BATCH, 2, 7, DIM // 2]
      cache, rows = tf.cast(cache, tf.float64), tf.cast(expected[name][:, :, :time], tf.float64)
      np.testing.assert_allclose(cache[:, :, :time], rows, rtol=0.02 if dtypes[1] else 1e-12)
      np.testing.assert_array_equal(cache[:, :, time:], 0)


def testDecodesWithUnknownShapes():
  """As in an exported model: batch and prompt of any size, caches as tensors."""
  layer, x = _Make(is_causal=True), _Vectors()
  vectors = tf.TensorSpec([None, None, DIM], tf.float64)

  @tf.function(autograph=False, input_signature=[vectors])
  def Prefill(z):
    return layer.Prefill(layer.theta, z, z, z, max_length=9)

  _, states = Prefill(x[:, :2])
  cache = tf.TensorSpec([None, 2, None, DIM // 2], tf.float64)
  signature = [states.Transform(lambda _: cache), vectors, tf.TensorSpec([], tf.int32)]

  @tf.function(autograph=False, input_signature=signature)
  def Step(states, z, t):
    return layer.ExtendStep(layer.theta, states, z, z, z, time_step=t)

  for t in range(2, TIME):
    y, states = Step(states, x[:, t : t + 1], t)
    np.testing.assert_allclose(y[:, 0], layer(x, x, x)[:, t], rtol=0, atol=1e-12)


def testDecodingErrorsNameTheLayer():
  x, paddings = _Vectors(), tf.zeros([BATCH, TIME])
  vectors = [x[:, :1]] * 3
  layer = _Make()
  with pytest.raises(NotImplementedError, match=naming.Naming('atten', 'not causal', 'is_causal')):
    layer.Prefill(layer.theta, x, x, x, max_length=9)
  layer = _Make(is_causal=True)
  with pytest.raises(ValueError, match=naming.Naming('atten', '5 positions', 'max_length 4')):
    layer.Prefill(layer.theta, x, x, x, max_length=4)
  _, states = layer.Prefill(layer.theta, x, x, x, max_length=6)
  with pytest.raises(ValueError, match=naming.Naming('atten', 'time_step 6', '6 positions')):
    layer.ExtendStep(layer.theta, states, *vectors, time_step=6)
  with pytest.raises(
    ValueError, match=naming.Naming('atten', 'query_vec', '[2, 1, ?]', '[2, 5, 8]')
  ):
    layer.ExtendStep(layer.theta, states, x, x, x, time_step=5)
  with pytest.raises(
    ValueError, match=naming.Naming('atten', 'query_vec', '[2, 1, ?]', '[1, 1, 8]')
  ):
    layer.ExtendStep(layer.theta, states, *[x[:1, :1]] * 3, time_step=5)
  with pytest.raises(ValueError, match=naming.Naming('atten', 'paddings', 'Prefill')):
    layer.ExtendStep(layer.theta, states, *vectors, paddings[:, :1], time_step=5)
  with pytest.raises(NotImplementedError, match=naming.Naming('atten', 'not causal', 'is_causal')):
    _Make().ExtendStep(layer.theta, states, *vectors, time_step=5)


def testMask():
  assert attention.AttentionMask(3, 3, None, False) is None
  causal = attention.AttentionMask(3, 3, None, True)
  np.testing.assert_array_equal(causal[0, 0], [[1, 0, 0], [1, 1, 0], [1, 1, 1]])
  both = attention.AttentionMask(3, 3, tf.constant([[0.0, 0, 1], [1, 0, 0]]), True)
  np.testing.assert_array_equal(both[0, 0], [[1, 0, 0], [1, 1, 0], [1, 1, 0]])
  np.testing.assert_array_equal(both[1, 0], [[0, 0, 0], [0, 1, 0], [0, 1, 1]])


@pytest.mark.parametrize(
  ('args', 'names'),
  [
    ([(2, 5, 8), (2, 5, 7), (2, 5, 8)], ['key_vec', 8, '[2, 5, 7]']),
    ([(2, 5, 8), (2, 4, 8), (2, 5, 8)], ['value_vec', '[2, 4, 8]', 'got shape [2, 5, 8]']),
    ([(5, 8), (2, 5, 8), (2, 5, 8)], ['query_vec', 'rank 3', '[5, 8]']),
    ([(2, 5, 8), (2, 4, 8), (2, 4, 8)], ['causal', 'got 5 and 4']),
    ([(2, 5, 8), (2, 5, 8), (2, 5, 8), (2, 4)], ['paddings', '[2, 5]', 'got shape [2, 4]']),
  ],
)
def testWrongInputsRaise(args, names):
  layer = _Make(is_causal=True)
  with pytest.raises(ValueError, match=naming.Naming('atten', *names)):
    layer(*(tf.zeros(shape, tf.float64) for shape in args))
  specs = [tf.TensorSpec(shape, tf.float64) for shape in args]
  with pytest.raises(ValueError, match=naming.Naming('atten', *names)):
    layer.FPropMeta(layer.params, *specs)


def testWrongParamsRaise():
  with pytest.raises(ValueError, match=naming.Naming("'atten'", 'width 8', 'num_heads 3')):
    _Make(num_heads=3)
  with pytest.raises(
    ValueError, match=naming.Naming("'atten'", 'atten_dropout_prob', 'below 1', 1.0)
  ):
    _Make(atten_dropout_prob=1.0)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
