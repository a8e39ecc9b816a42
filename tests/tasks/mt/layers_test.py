# SPDX-License-Identifier: Apache-2.0
"""Layers of the translation pipeline: outputs, unchanged arguments and cost."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import fprop_context, nested_map
from lingvo_gpipe.layers import embedding, transformer
from tasks.mt import layers

BATCH, SOURCE_TIME, TIME, VOCAB, DIM = 3, 5, 4, 7, 8


def _Make(params, **values):
  layer = params.Set(name='layer', dtype=tf.float64, **values).Instantiate()
  layer.InstantiateVariables()
  return layer


def _Embedding(**values):
  p = layers.TranslationEmbeddingLayer.Params()
  return _Make(p, vocab_size=VOCAB, embedding_dim=DIM, **values)


def _Encoder():
  body = transformer.TransformerLayer.Params().Set(input_dim=DIM, hidden_dim=12, num_heads=2)
  return _Make(layers.EncoderLayer.Params(), body=body)


def _Ids(time, seed=0):
  return tf.constant(np.random.default_rng(seed).integers(0, VOCAB, [BATCH, time]), tf.int32)


def _Vecs(time, seed=0):
  return tf.constant(np.random.default_rng(seed).standard_normal([BATCH, time, DIM]))


def _Paddings(time):
  return tf.constant(np.arange(time) >= np.array([[1], [3], [time]]))


@pytest.mark.parametrize('share_embedding', [True, False])
def testEmbeddingOfBothSides(share_embedding):
  layer = _Embedding(share_embedding=share_embedding)
  tables = [v.numpy() for v in layer.variables]
  assert len(tables) == 2 - share_embedding
  source, target, paddings = _Ids(SOURCE_TIME), _Ids(TIME, 1), _Paddings(SOURCE_TIME)
  outputs = layer(source, paddings, target, None)
  position = embedding.PositionalEmbeddingLayer.Params().Set(name='p', embedding_dim=DIM)
  position = position.Set(dtype=tf.float64).Instantiate()
  position.InstantiateVariables()
  for y, ids, table in ((outputs[0], source, tables[0]), (outputs[2], target, tables[-1])):
    expected = position(tf.constant(np.sqrt(DIM) * table[ids]))
    np.testing.assert_allclose(y, expected, atol=1e-12)
  assert outputs[1].dtype == tf.float32 and outputs[3] is None
  np.testing.assert_array_equal(outputs[1], paddings)


def testSourceAndTargetHaveDifferentMasks():
  layer, ids = _Embedding(input_dropout_prob=0.5), _Ids(SOURCE_TIME)
  plain = layer(ids, None, ids, None)[0]
  with fprop_context.Scope(step=1):
    outputs = layer(ids, None, ids, None)
  masks = [outputs[side].numpy() != 0 for side in (0, 2)]
  for side, mask in zip((0, 2), masks, strict=True):
    assert 0.3 < np.mean(mask) < 0.7
    np.testing.assert_allclose(outputs[side], 2 * plain * mask)
  assert not np.array_equal(*masks)


def testEmbeddingStepByStepEqualsFProp():
  layer = _Embedding(share_embedding=False)
  source, target = _Ids(SOURCE_TIME), _Ids(TIME, 1)
  expected = layer(source, None, target, None)
  outputs, states = layer.Prefill(layer.theta, source, None, target[:, :2], None, max_length=9)
  np.testing.assert_array_equal(outputs[0], expected[0])
  steps = [outputs[2]]
  for t in range(2, TIME):
    step = tf.constant(t, tf.int32)
    (a, b, x, c), states = layer.ExtendStep(
      layer.theta, states, None, None, target[:, t : t + 1], None, time_step=step
    )
    assert (a, b, c) == (None, None, None)
    steps.append(x)
  np.testing.assert_allclose(tf.concat(steps, 1), expected[2], atol=1e-12)


def testEncoderTransformsOnlyTheSource():
  layer = _Encoder()
  source, target = _Vecs(SOURCE_TIME), _Vecs(TIME, 1)
  paddings, target_paddings = (tf.cast(_Paddings(t), tf.float32) for t in (SOURCE_TIME, TIME))
  outputs = layer(source, paddings, target, target_paddings)
  expected, _ = layer.body(source, paddings)
  np.testing.assert_array_equal(outputs[0], expected)
  assert outputs[1] is paddings and outputs[2] is target and outputs[3] is target_paddings
  prefilled, states = layer.Prefill(
    layer.theta, source, paddings, target, target_paddings, max_length=9
  )
  np.testing.assert_array_equal(prefilled[0], expected)
  assert not states
  args = (None, None, target[:, :1], None)
  extended, states = layer.ExtendStep(layer.theta, states, *args, time_step=tf.constant(3))
  assert extended == args and not states


def testDecoderOutputIsTheNormalisedTarget():
  layer = _Make(layers.DecoderOutputLayer.Params(), input_dim=DIM)
  target = _Vecs(TIME)
  y = layer(_Vecs(SOURCE_TIME, 1), None, target, None)
  np.testing.assert_allclose(y, layer.layer_norm(target))
  step, _ = layer.ExtendStep(
    layer.theta, nested_map.NestedMap(), None, None, target[:, :1], time_step=0
  )
  np.testing.assert_allclose(step, y[:, :1])


# Vectors of source and target, and their elements.
_SOURCE, _TARGET = BATCH * SOURCE_TIME, BATCH * TIME
_SIZE = (_SOURCE + _TARGET) * DIM
_SOURCE_SIZE = _SOURCE * DIM


@pytest.mark.parametrize(
  'layer, specs, flops',
  [
    # Scaling, positions and dropout.
    (lambda: _Embedding(input_dropout_prob=0.1), (tf.int32, tf.bool), (1 + 1 + 3) * _SIZE),
    (lambda: _Embedding(share_embedding=False), (tf.int32, None), 2 * _SIZE),
    (
      _Encoder,
      (tf.float64, tf.float32),
      # Four projections with bias, scaling, two products and a masked softmax of two heads.
      4 * (2 * _SOURCE_SIZE * DIM + _SOURCE_SIZE)
      + _SOURCE_SIZE
      + 4 * _SOURCE_SIZE * SOURCE_TIME
      + 6 * (2 * _SOURCE * SOURCE_TIME)
      # Two layer norms and residual sums.
      + 2 * (7 * _SOURCE_SIZE + 2 * _SOURCE + _SOURCE_SIZE)
      # Two projections with bias, and a ReLU.
      + 2 * (2 * _SOURCE_SIZE * 12)
      + 2 * _SOURCE * 12
      + _SOURCE_SIZE,
    ),
    (
      lambda: _Make(layers.DecoderOutputLayer.Params(), input_dim=DIM),
      (tf.float64, tf.float32),
      7 * _TARGET * DIM + 2 * _TARGET,
    ),
  ],
)
def testFPropMetaHasTheFlopsOfTheFormulaAndTheOutputSpecs(layer, specs, flops):
  layer = layer()
  args = []
  for time in (SOURCE_TIME, TIME):
    shape = [BATCH, time] if specs[0].is_integer else [BATCH, time, DIM]
    args.append(tf.TensorSpec(shape, specs[0]))
    args.append(specs[1] and tf.TensorSpec([BATCH, time], specs[1]))
  meta = type(layer).FPropMeta(layer.params, *args)
  assert abs(meta.flops - flops) <= 0.05 * meta.flops + 50
  inputs = [spec and tf.zeros(spec.shape, spec.dtype) for spec in args]
  outputs = layer(*inputs)
  outputs = outputs if isinstance(outputs, tuple) else (outputs,)
  assert tuple(meta.out_specs) == tuple(
    None if y is None else tf.TensorSpec(y.shape, y.dtype) for y in outputs
  )


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
