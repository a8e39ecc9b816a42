# SPDX-License-Identifier: Apache-2.0
"""Loss, metrics and checks of image classification."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import fprop_context, nested_map
from tasks.image import classifier, lenet
from tests import naming

NUM_CLASSES = 8


def _Task(**values):
  p = lenet.LeNet5.Params().Set(
    name='net', image_size=8, num_channels=1, num_classes=NUM_CLASSES, filters=[2, 3]
  )
  return p.Set(**values).Instantiate()


def _Logits(batch_size=6, seed=0):
  return tf.constant(np.random.default_rng(seed).standard_normal([batch_size, NUM_CLASSES]))


def _Batch(weights=(1, 1, 1, 0.5, 0, 1)):
  labels = tf.constant([0, 1, 2, 3, 4, 7], tf.int32)
  return nested_map.NestedMap(labels=labels, example_weights=tf.constant(weights, tf.float32))


def _Softmax(logits):
  e = np.exp(logits - np.max(logits, axis=-1, keepdims=True))
  return e / np.sum(e, axis=-1, keepdims=True)


def testEvaluationLossIsThePlainCrossEntropy():
  logits, batch = _Logits(), _Batch()
  metrics, per_example = _Task(label_smoothing=0.2).ComputeLoss(None, logits, batch)
  xent = -np.log(_Softmax(logits.numpy())[np.arange(6), batch.labels])
  weights = batch.example_weights.numpy()
  np.testing.assert_allclose(per_example['xent'], xent)
  np.testing.assert_allclose(metrics['loss'][0], np.average(xent, weights=weights))
  order = np.argsort(-logits.numpy(), axis=1)
  for name, k in (('accuracy', 1), ('acc5', 5)):
    hits = [label in row[:k] for row, label in zip(order, batch.labels.numpy(), strict=True)]
    np.testing.assert_allclose(metrics[name][0], np.average(hits, weights=weights))
    assert metrics[name][1] == np.sum(weights)


def testTrainingSmoothsTheTargets():
  logits, batch = _Logits(), _Batch()
  with fprop_context.Scope(step=0):
    metrics, _ = _Task(label_smoothing=0.2).ComputeLoss(None, logits, batch)
  targets = np.full([6, NUM_CLASSES], 0.2 / (NUM_CLASSES - 1))
  targets[np.arange(6), batch.labels] = 0.8
  xent = -np.sum(targets * np.log(_Softmax(logits.numpy())), axis=1)
  expected = np.average(xent, weights=batch.example_weights)
  np.testing.assert_allclose(metrics['loss'][0], expected)


def testAuxiliaryHeadAddsItsLoss():
  logits, aux, batch = _Logits(), _Logits(seed=1), _Batch()
  task = _Task(aux_loss_weight=0.4, label_smoothing=0.2)
  with fprop_context.Scope(step=0):
    both, _ = task.ComputeLoss(None, (logits, aux), batch)
    alone = [task.ComputeLoss(None, x, batch)[0] for x in (logits, aux)]
  np.testing.assert_allclose(both['loss'][0], alone[0]['loss'][0] + 0.4 * alone[1]['loss'][0])
  np.testing.assert_allclose(both['aux_loss'][0], alone[1]['loss'][0])
  assert both['accuracy'] == alone[0]['accuracy']


def testLossOfAPaddedBatchIsFinite():
  metrics, _ = _Task().ComputeLoss(None, _Logits(), _Batch([0.0] * 6))
  assert all(float(value) == 0 and float(weight) == 0 for value, weight in metrics.values())


def testBfloat16LogitsGiveAFloatLoss():
  metrics, _ = _Task().ComputeLoss(None, tf.cast(_Logits(), tf.bfloat16), _Batch())
  assert metrics['loss'][0].dtype == tf.float32


def testFewClassesHaveNoTopFiveAccuracy():
  batch = _Batch()
  batch.labels = tf.minimum(batch.labels, 4)
  metrics, _ = _Task(num_classes=5).ComputeLoss(None, _Logits()[:, :5], batch)
  assert 'accuracy' in metrics and 'acc5' not in metrics


@pytest.mark.parametrize('xla', [False, True])
def testRanks(xla):
  rank = tf.function(classifier.Ranks, autograph=False, jit_compile=xla)
  logits = tf.constant([[1.0, 3.0, 2.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [2.0, 1.0, 1.0]])
  labels = tf.constant([2, 0, 2, 2], tf.int32)
  assert rank(logits, labels).numpy().tolist() == [1, 0, 2, 2]
  broken = tf.constant([[np.nan] * 3, [1.0, np.nan, 0.0], [np.nan, 1.0, 0.0], [np.inf, 1.0, 0.0]])
  labels = tf.constant([1, 0, 0, 0], tf.int32)
  assert rank(broken, labels).numpy().tolist() == [2, 1, 2, 0]


@pytest.mark.parametrize(
  'labels, images, names',
  [
    ([0, 8], [2, 8, 8, 1], ('labels', '[0, 8)', '0 ... 8')),
    ([-1, 3], [2, 8, 8, 1], ('labels', '[0, 8)', '-1 ... 3')),
    ([0, 1], [2, 8, 8, 3], ('images', '[?, 8, 8, 1]', '[2, 8, 8, 3]')),
  ],
)
def testCheckBatch(labels, images, names):
  batch = nested_map.NestedMap(labels=tf.constant(labels), images=tf.zeros(images))
  with pytest.raises(ValueError, match=naming.Naming(*names)):
    _Task().CheckBatch(batch)


@pytest.mark.parametrize(
  'values, names',
  [
    ({'num_classes': 0}, ('num_classes', 0)),
    ({'label_smoothing': 1.0}, ('label_smoothing', '1.0')),
    ({'aux_loss_weight': -1.0}, ('aux_loss_weight', '-1.0')),
    ({'filters': [3]}, ('filters', 'list of 2', '[3]')),
    ({'image_size': 3}, ('image_size', 4, 3)),
  ],
)
def testWrongParamsRaise(values, names):
  with pytest.raises(ValueError, match=naming.Naming(*names)):
    _Task(**values)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
