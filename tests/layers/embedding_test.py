# SPDX-License-Identifier: Apache-2.0
"""Embeddings, positions, the softmax head and its cross entropy, against NumPy."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import nested_map, weight_params
from lingvo_gpipe.layers import embedding, linear
from tests import naming
from tests.toys import layers, stacks, vocabulary_layers


def _Make(cls, **values):
  return layers.WithVariables(cls.Params().Set(name='layer', **values))


def testEmbeddingLooksUpRows():
  layer = _Make(embedding.EmbeddingLayer, vocab_size=10, embedding_dim=4)
  ids = tf.constant([[1, 2], [9, 1]])
  vectors, paddings = layer(ids)
  assert paddings is None
  np.testing.assert_array_equal(vectors, layer.vars.emb.numpy()[ids.numpy()])
  _, paddings = layer(ids, tf.zeros([2, 2]))
  assert paddings.shape == (2, 2)


def testVectorsStartWithUnitLengthOrUnitVariance():
  layer = _Make(embedding.EmbeddingLayer, vocab_size=2000, embedding_dim=64)
  assert abs(layer.vars.emb.numpy().std() - 1 / 8) < 0.01
  scaled = _Make(embedding.EmbeddingLayer, vocab_size=2000, embedding_dim=64, scale_sqrt_depth=True)
  ids = tf.range(2000)[tf.newaxis]
  np.testing.assert_allclose(scaled(ids)[0], 8 * layer(ids)[0], rtol=1e-6)


@pytest.mark.parametrize('cls', [embedding.SimpleFullSoftmax, embedding.SharedSoftmaxLayer])
def testShardsOfASoftmaxAreOneSoftmax(cls):
  layer = _Make(cls, input_dim=4, num_classes=900, num_shards=30, dtype=tf.float64)
  whole = _Make(cls, input_dim=4, num_classes=900, dtype=tf.float64)
  assert layer.NumParams() == whole.NumParams()
  for name, axis in whole.class_axes.items():
    parts = [shard.vars.GetItem(name).numpy() for shard in layer.shards]
    variable = whole.vars.GetItem(name)
    joined = np.concatenate(parts, axis=axis)
    assert abs(joined.std() - variable.numpy().std()) <= 0.03 * joined.std()
    variable.assign(joined)
  x = tf.constant(np.random.default_rng(0).standard_normal([2, 3, 4]))
  np.testing.assert_allclose(layer(x), whole(x), atol=1e-12)
  some = nested_map.NestedMap(shards=layer.vars.shards[3:5])
  np.testing.assert_allclose(layer.FProp(layer.ThetaFrom(some), x), whole(x)[..., 90:150])


@pytest.mark.parametrize(
  'method',
  ['GeoMeanXavier', 'GaussianSqrtFanOut', 'GaussianSqrtFanIn', 'UniformUnitScalingFanAvg',
   'KaimingUniformFanInLeakyRelu', 'Uniform'],
)  # fmt: skip
def testShardsStartAsWideAsOneSoftmax(method):
  init = getattr(weight_params.WeightInit, method)()
  options = {'input_dim': 8, 'num_classes': 960, 'params_init': init, 'use_bias': False}
  whole = _Make(embedding.SimpleFullSoftmax, **options)
  layer = _Make(embedding.SimpleFullSoftmax, num_shards=30, **options)
  joined = np.concatenate([shard.vars.linear.w.numpy() for shard in layer.shards])
  assert abs(joined.std() - whole.vars.linear.w.numpy().std()) <= 0.03 * joined.std()


def testShardsOfAnEmbeddingAreOneTable():
  layer = _Make(
    embedding.EmbeddingLayer, vocab_size=12, embedding_dim=4, num_shards=3, scale_sqrt_depth=True
  )
  table = np.concatenate([shard.vars.emb.numpy() for shard in layer.shards])
  ids = tf.reshape(tf.range(12), [3, 4])
  np.testing.assert_allclose(layer(ids)[0], 2 * table[ids.numpy()], rtol=1e-6)


def testUnequalShardsAreRefused():
  for cls in (embedding.SimpleFullSoftmax, embedding.SharedSoftmaxLayer):
    with pytest.raises(ValueError, match=naming.Naming('layer', 6, 'num_shards 4')):
      _Make(cls, input_dim=4, num_classes=6, num_shards=4)
  with pytest.raises(ValueError, match=naming.Naming('layer', 6, 'num_shards 4')):
    _Make(embedding.EmbeddingLayer, vocab_size=6, embedding_dim=4, num_shards=4)


def testGradientIsSparse():
  layer = _Make(embedding.EmbeddingLayer, vocab_size=10, embedding_dim=4)
  with tf.GradientTape() as tape:
    vectors, _ = layer(tf.constant([[3, 3]]))
  grad = tape.gradient(vectors, layer.vars.emb)
  assert isinstance(grad, tf.IndexedSlices)


def testWrongIdsRaise():
  layer = _Make(embedding.EmbeddingLayer, vocab_size=10, embedding_dim=4)
  with pytest.raises(ValueError, match=naming.Naming('layer', 'ids', 'float32')):
    layer(tf.zeros([2, 2]))
  with pytest.raises(ValueError, match=naming.Naming('layer', 'ids', 'rank 2', 'got shape [2]')):
    layer(tf.zeros([2], tf.int32))
  with pytest.raises(
    ValueError, match=naming.Naming('layer', 'paddings', '[2, 2]', 'got shape [2, 3]')
  ):
    layer(tf.zeros([2, 2], tf.int32), tf.zeros([2, 3]))


@pytest.mark.parametrize('dim', [1, 2, 7, 8])
def testSinusoids(dim):
  layer = _Make(embedding.PositionalEmbeddingLayer, embedding_dim=dim, dtype=tf.float64)
  assert layer.NumParams() == 0
  x = np.ones([2, 5, dim])
  expected = np.zeros([5, dim])
  half = dim // 2
  for t in range(5):
    for i in range(half):
      angle = t / 10000 ** (i / max(half - 1, 1))
      expected[t, i], expected[t, half + i] = np.sin(angle), np.cos(angle)
  np.testing.assert_allclose(layer(tf.constant(x)), x + expected, atol=1e-12)
  at = layer.FPropWithPosition(layer.theta, tf.constant([[4], [2]]))
  np.testing.assert_allclose(at[:, 0], expected[[4, 2]], atol=1e-12)


def testSinusoidsAreExactAtLargePositions():
  layer = _Make(embedding.PositionalEmbeddingLayer, embedding_dim=4, fprop_dtype=tf.bfloat16)
  # bfloat16 cannot represent 4001; the angle must not be rounded before the sine.
  at = layer.FPropWithPosition(layer.theta, tf.constant([4001]))
  assert at.dtype == tf.bfloat16
  np.testing.assert_allclose(tf.cast(at, tf.float64)[0, 0], np.sin(4001.0), atol=0.01)


def testLearnedPositions():
  layer = _Make(embedding.LearnablePositionalEmbeddingLayer, embedding_dim=4, max_pos=6)
  x = tf.ones([2, 5, 4])
  y, paddings = layer(x, None)
  assert paddings is None
  np.testing.assert_allclose(y, 1 + layer.vars.emb.numpy()[np.newaxis, :5].repeat(2, 0))
  at = layer.FPropWithPosition(layer.theta, tf.constant([3]))
  np.testing.assert_array_equal(at, layer.vars.emb[3:4])
  with pytest.raises(ValueError, match=naming.Naming('layer', 'time 7', 'max_pos is 6')):
    layer(tf.ones([2, 7, 4]))
  with pytest.raises(ValueError, match=naming.Naming('layer', 'max_length 7', 'max_pos 6')):
    layer.Prefill(layer.theta, x, max_length=7)


def testPositionsWithinSegments():
  position = tf.constant([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
  segment_ids = tf.ones_like(position)
  for cls, values in (
    (embedding.PositionalEmbeddingLayer, {}),
    (embedding.LearnablePositionalEmbeddingLayer, {'max_pos': 6}),
  ):
    layer = _Make(cls, embedding_dim=4, **values)
    x = tf.ones([2, 5, 4])
    y, paddings, handed_on = layer(x, None, segment_ids, position)
    assert paddings is None and handed_on is segment_ids
    np.testing.assert_allclose(y, tf.gather(layer(x)[0], position), atol=1e-6)
    with pytest.raises(ValueError, match=naming.Naming('layer', 'segment_pos', 'float32')):
      layer(x, None, None, tf.zeros([2, 5]))


def testPositionsAcceptAnUnknownTime():
  for cls, values in (
    (embedding.PositionalEmbeddingLayer, {}),
    (embedding.LearnablePositionalEmbeddingLayer, {'max_pos': 6}),
  ):
    layer = _Make(cls, embedding_dim=4, **values)
    run = tf.function(layer, input_signature=[tf.TensorSpec([None, None, 4], tf.float32)])
    x = tf.ones([2, 5, 4])
    np.testing.assert_allclose(run(x), layer(x), atol=1e-6)


def testLogits():
  layer = _Make(embedding.SimpleFullSoftmax, input_dim=4, num_classes=7, dtype=tf.float64)
  assert layer.NumParams() == 4 * 7 + 7
  x = np.random.default_rng(0).standard_normal([2, 3, 4])
  layer.vars.linear.b.assign(np.arange(7))
  expected = x @ layer.vars.linear.w.numpy() + np.arange(7)
  np.testing.assert_allclose(layer(tf.constant(x), None), expected, atol=1e-12)
  capped = {'logits_soft_max': 2.0}, {'logits_abs_max': 1.5}
  for values, formula in zip(
    capped, (lambda z: 2 * np.tanh(z / 2), lambda z: np.clip(z, -1.5, 1.5)), strict=True
  ):
    other = _Make(
      embedding.SimpleFullSoftmax, input_dim=4, num_classes=7, dtype=tf.float64, **values
    )
    logits = other.FProp(layer.theta, tf.constant(x))
    np.testing.assert_allclose(logits, formula(expected), atol=1e-12)


def testLogitsOfWrongInputsRaise():
  layer = _Make(embedding.SimpleFullSoftmax, input_dim=4, num_classes=7)
  with pytest.raises(ValueError, match=naming.Naming('layer', 'inputs', 4, 'got shape [2, 3]')):
    layer(tf.zeros([2, 3]))


@pytest.mark.parametrize('smoothing', [0.0, 0.1])
@pytest.mark.parametrize('dtype', [tf.float32, tf.float64], ids=str)
def testCrossEntropy(smoothing, dtype):
  rng = np.random.default_rng(0)
  logits = 5 * rng.standard_normal([2, 3, 6])
  ids = rng.integers(0, 6, [2, 3])
  log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  target = np.full([2, 3, 6], smoothing / 5)
  np.put_along_axis(target, ids[..., np.newaxis], 1 - smoothing, -1)
  loss = embedding.XentLossFromLogits(tf.constant(logits, dtype), tf.constant(ids), smoothing)
  assert loss.dtype == dtype
  atol = 1e-12 if dtype == tf.float64 else 1e-5
  np.testing.assert_allclose(loss, -(target * log_probs).sum(-1), atol=atol)


@pytest.mark.parametrize('smoothing', [0.0, 0.1])
def testCrossEntropyOfBfloat16LogitsIsFloat32(smoothing):
  logits = tf.cast(tf.random.stateless_normal([4, 300], [1, 2], 0.0, 20.0), tf.bfloat16)
  ids = tf.constant([0, 1, 2, 299])
  loss = embedding.XentLossFromLogits(logits, ids, smoothing)
  exact = embedding.XentLossFromLogits(tf.cast(logits, tf.float64), ids, smoothing)
  assert loss.dtype == tf.float32
  np.testing.assert_allclose(loss, exact, rtol=1e-5)


def testCrossEntropyStaysFiniteAtHugeLogits():
  logits = tf.constant([[1e4, -1e4, 0.0]])
  for smoothing in (0.0, 0.2):
    with tf.GradientTape() as tape:
      tape.watch(logits)
      loss = embedding.XentLossFromLogits(logits, tf.constant([1]), smoothing)
    assert np.isfinite(loss.numpy()).all()
    assert np.isfinite(tape.gradient(loss, logits)).all()


def testWrongLabelSmoothingRaises():
  with pytest.raises(ValueError, match=naming.Naming('label_smoothing', 'below 1', 'got 1.0')):
    embedding.XentLossFromLogits(tf.zeros([2, 3]), tf.constant([1, 2]), 1.0)


@pytest.mark.parametrize(
  'cls',
  [
    vocabulary_layers.NormalisedHead,
    vocabulary_layers.MixedHead,
    vocabulary_layers.NormalisedWeightsHead,
  ],
)
@pytest.mark.parametrize('values', [{'chunk_size': 2}, {'num_shards': 2}])
def testACustomHeadIsNotComputedInParts(values, cls):
  """The loss would use the logits of the base class."""
  values = {'name': 'head', 'input_dim': 3, 'num_classes': 8, **values}
  with pytest.raises(ValueError, match=naming.Naming(cls.__name__, 'head', 'class_axes')):
    cls.Params().Set(**values).Instantiate()
  vocabulary_layers.DoubledHead.Params().Set(**values).Instantiate()


def testTheVocabularyOfACustomHeadIsNotSharedOut():
  project = linear.ProjectionLayer.Params().Set(input_dim=3, output_dim=3)
  spec = tf.TensorSpec([4, 3], tf.float64)

  def Make(cls):
    sub = [project, project, cls.Params().Set(input_dim=3, num_classes=8)]
    return stacks.MakeStack(sub, num_stages=2, num_micro_batches=2, vocabulary='shared')

  assert Make(vocabulary_layers.DoubledHead).MakeCut(spec).vocabulary
  with pytest.raises(ValueError, match=naming.Naming('NormalisedHead', 'vocabulary')):
    Make(vocabulary_layers.NormalisedHead).MakeCut(spec)
  with pytest.raises(ValueError, match=naming.Naming('temperature', 'class_axes', 'TemperedHead')):
    Make(vocabulary_layers.TemperedHead).Place(stacks.Devices(), spec, loss_fn=stacks.SquareLoss)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
