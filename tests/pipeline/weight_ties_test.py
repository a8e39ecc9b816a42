# SPDX-License-Identifier: Apache-2.0
"""Tied weights: one variable, one slot, a summed gradient, counted once, wherever the cut is."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import fprop_context, nested_map
from lingvo_gpipe.layers import dropout, embedding, linear
from lingvo_gpipe.learning import learner, multi_learner, optimizer
from lingvo_gpipe.pipeline import pipelining_layer
from tests import naming
from tests.toys import layers, stacks

_VOCAB, _DIM = 7, 4
_TIES = [['layers[3].emb', 'layers[0].emb']]


def _Params(**values):
  p = pipelining_layer.PipeliningLayer.Params().Set(
    name='stack', num_micro_batches=4, xla=False, dtype=tf.float64, ties=_TIES
  )
  p.sub = [
    embedding.EmbeddingLayer.Params().Set(vocab_size=_VOCAB, embedding_dim=_DIM),
    linear.ProjectionLayer.Params().Set(input_dim=_DIM, output_dim=_DIM, activation='TANH'),
    dropout.DropoutLayer.Params().Set(keep_prob=0.8),
    embedding.SharedSoftmaxLayer.Params().Set(input_dim=_DIM, num_classes=_VOCAB),
  ]
  return p.Set(**values)


def _Loss(theta, outputs, side):
  del theta
  xent = embedding.XentLossFromLogits(outputs[0], side)
  return {'loss': (tf.reduce_mean(xent), tf.cast(tf.size(side), xent.dtype))}


def _Data():
  rng = np.random.default_rng(0)
  return [tf.constant(rng.integers(0, _VOCAB, [8, 3]), tf.int32) for _ in range(2)]


def _Train(stack, step=3):
  ids, labels = _Data()
  stack.engine.MakeAccumulators()

  @tf.function(autograph=False)
  def Run(step):
    sides = stack.SplitBatch(labels)
    weights = [tf.cast(tf.size(s), tf.float64) for s in sides]
    return stacks.RunStep(stack.engine, [(x,) for x in stack.SplitBatch(ids)], sides, weights, step)

  return Run(tf.constant(step, tf.int64))['loss']


def _Placed(**values):
  stack = _Params(**values).Instantiate()
  stack.Place(stacks.Devices(), tf.TensorSpec([8, 3], tf.int32), loss_fn=_Loss)
  return stack


def _Reference():
  """(sum of losses, gradients) with one tensor in both places, micro-batch by micro-batch."""
  stack = layers.WithVariables(_Params(ties=[]))
  variables = stack.VariablesByPath()
  table = variables['stack.layers[0].emb']
  del variables['stack.layers[3].emb']
  ids, labels = _Data()
  with tf.GradientTape() as tape:
    total = tf.zeros([], tf.float64)
    for m, (x, y) in enumerate(zip(stack.SplitBatch(ids), stack.SplitBatch(labels), strict=True)):
      args = (x,)
      with fprop_context.Scope(step=3, micro_batch=m):
        for layer in stack.layers:
          theta = layer.theta
          if layer is stack.layers[3]:
            theta = nested_map.NestedMap(theta, emb=table)
          args = layer.FProp(theta, *args)
          args = args if isinstance(args, tuple) else (args,)
      value, weight = _Loss(None, args, y)['loss']
      total += value * weight
  grads = tape.gradient(total, variables)
  return float(total), {p: tf.convert_to_tensor(g).numpy() for p, g in grads.items()}


# Every cut, and every schedule with the two uses in one stage's neighbours and far apart.
@pytest.mark.parametrize(
  'splits, schedule',
  [
    ([4], '1f1b_fused'),
    ([1, 4], 'gpipe'),
    ([1, 4], 'zb_h1'),
    ([3, 4], '1f1b_fused'),
    ([1, 2, 3, 4], 'gpipe'),
    ([1, 2, 3, 4], '1f1b_fused'),
    ([1, 2, 3, 4], 'zb_h1'),
  ],
)
def testGradientIsTheSumOverBothUses(splits, schedule):
  stack = _Placed(splits=splits, num_stages=len(splits), schedule=schedule)
  total, expected = _Reference()
  loss = _Train(stack)
  np.testing.assert_allclose(float(loss[0]), total, rtol=1e-12)
  grads = stacks.Gradients(stack)
  assert set(grads) == set(expected)
  for path, grad in expected.items():
    np.testing.assert_allclose(grads[path], grad, rtol=0, atol=1e-12)


def testOneVariableOneSlotCountedOnce():
  stack = _Placed(splits=[2, 4], num_stages=2)
  assert 'stack.layers[3].emb' not in stack.VariablesByPath()
  assert stack.NumParams() == _VOCAB * _DIM + _DIM * _DIM + _VOCAB
  stack.engine.MakeAccumulators()
  built = multi_learner.MultiLearner(
    learner.Learner.Params().Set(optimizer=optimizer.Adam.Params())
  )
  built.Build(stack.engine.stages)
  assert not [name for name in built.Variables() if 'layers[3].emb' in name]
  assert len([name for name in built.Variables() if 'layers[0].emb' in name]) == 2


def testTheCopyFollowsItsOwner():
  stack = _Placed(splits=[2, 4], num_stages=2)
  owner, copy = stack.layers[0].vars.emb, stack.layers[3].vars.emb
  assert owner.device != copy.device
  np.testing.assert_array_equal(owner, copy)
  owner.assign(owner + 1.0)
  stack.engine.SyncTies()
  np.testing.assert_array_equal(owner, copy)


def testGradientsOfTiesUnderAUsersTapeAreEqual():
  stack = _Placed(splits=[2, 4], num_stages=2)
  ids, labels = _Data()
  with tf.GradientTape() as tape, fprop_context.Scope(step=3):
    xent = embedding.XentLossFromLogits(stack(ids), labels)
    loss = tf.reduce_sum(xent)
  variables = stack.VariablesByPath()
  grads = tape.gradient(loss, variables)
  total, expected = _Reference()
  np.testing.assert_allclose(float(loss), total, rtol=1e-12)
  for path, grad in expected.items():
    np.testing.assert_allclose(tf.convert_to_tensor(grads[path]), grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
  'ties, names',
  [
    (
      [['layers[3].em', 'layers[0].emb']],
      ["'layers[3].em'", 'mean layers[3].emb'],
    ),
    (
      [['layers[1].w', 'layers[0].emb']],
      ['layers[1].w of shape (4, 4)', 'layers[0].emb of shape (7, 4)', 'float64'],
    ),
    ([['layers[3].emb']], ['ties', 'list of 2', [['layers[3].emb']]]),
    (
      [['layers[3].emb', 'layers[0].emb'], ['layers[0].emb', 'layers[3].emb']],
      ['layers[0].emb', 'owner'],
    ),
  ],
)
def testErrors(ties, names):
  with pytest.raises(ValueError, match=naming.Naming('stack', *names)):
    _Params(ties=ties).Instantiate()


def testOneParamsObjectTwiceIsTwoLayers():
  """Sharing is asked for by ties; a layer instead of its Params is refused."""
  square = linear.LinearLayer.Params().Set(input_dim=_DIM, output_dim=_DIM)
  stack = _Params(ties=[], sub=[square, square], num_stages=2, splits=[1, 2]).Instantiate()
  stack.Place(stacks.Devices(), tf.TensorSpec([8, _DIM], tf.float64))
  first, second = stack.layers
  assert first.vars.w.device != second.vars.w.device
  assert np.any(first.vars.w.numpy() != second.vars.w.numpy())
  assert stack.NumParams() == 2 * _DIM * _DIM
  ties = [['layers[1].w', 'layers[0].w']]
  tied = _Params(ties=ties, sub=[square, square], num_stages=2, splits=[1, 2]).Instantiate()
  tied.Place(stacks.Devices(), tf.TensorSpec([8, _DIM], tf.float64))
  np.testing.assert_array_equal(*(layer.vars.w for layer in tied.layers))
  assert tied.NumParams() == _DIM * _DIM
  with pytest.raises(ValueError, match=naming.Naming("'stack'", 'sub', 'Params')):
    _Params(ties=[], sub=[square, first]).Instantiate()


@pytest.mark.parametrize('turned', [False, True])
def testATrainableWeightIsNotTiedToAConstant(turned):
  square = linear.ProjectionLayer.Params().Set(input_dim=_DIM, output_dim=_DIM)
  pair = ['layers[0].w', 'layers[1].w'][:: -1 if turned else 1]
  frozen = layers.MatrixLayer.Params().Set(dims=(_DIM, _DIM), trainable=False)
  names = naming.Naming('layers[0].w', 'layers[1].w is not')
  with pytest.raises(ValueError, match=names):
    _Params(sub=[square, frozen], ties=[pair]).Instantiate()


def testPredictSeesAUsersUpdate():
  stack = _Placed(splits=[2, 4], num_stages=2)
  ids, _ = _Data()
  for variable in stack.VariablesByPath().values():
    variable.assign(variable * 2.0)
  np.testing.assert_allclose(stack.Predict(ids), stack(ids), rtol=1e-12)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
