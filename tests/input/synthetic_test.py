# SPDX-License-Identifier: Apache-2.0
"""Synthetic data: the rule holds, examples depend on their index, another seed is another rule."""

import math
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.distributed import host_memory
from lingvo_gpipe.input import synthetic
from tests import naming


def _Lm(**kwargs):
  p = synthetic.SyntheticLmInput.Params().Set(batch_size=8, num_examples=100)
  return p.Set(**kwargs).Instantiate()


def _Regression(**kwargs):
  p = synthetic.SyntheticRegressionInput.Params().Set(batch_size=8, num_examples=100)
  return p.Set(**kwargs).Instantiate()


def _All(generator):
  """Returns every field of every example, in the order of indices."""
  batches = list(
    type(generator)(generator.params.Copy().Set(shuffle=False, num_epochs=1))
    .Dataset()
    .as_numpy_iterator()
  )
  fields = {key: np.concatenate([b[key] for b in batches]) for key in batches[0]}
  return {key: value[: generator.NumExamples()] for key, value in fields.items()}


@pytest.mark.parametrize('order', [1, 2, 5, 40])
@pytest.mark.parametrize('vocab_size', [2, 17])
def testIdsFollowOnePermutation(order, vocab_size):
  data = _All(_Lm(order=order, vocab_size=vocab_size, seq_len=33))
  ids, labels = data['ids'], data['labels']
  np.testing.assert_array_equal(ids[:, 1:], labels[:, :-1])
  assert (data['weights'] == 1).all()
  sequences = np.concatenate([ids, labels[:, -1:]], axis=1)
  assert sequences.min() == 0 and sequences.max() == vocab_size - 1
  rule = {}
  for before, after in zip(
    sequences[:, :-order].ravel(), sequences[:, order:].ravel(), strict=True
  ):
    assert rule.setdefault(before, after) == after
  assert len(set(rule.values())) == len(rule)


def testLossFloorCountsTheRandomLabels():
  assert _Lm(order=1).LossFloor() == 0.0
  assert _Lm(order=3, seq_len=10, vocab_size=7).LossFloor() == pytest.approx(0.2 * math.log(7))
  assert _Lm(order=99, seq_len=10, vocab_size=7).LossFloor() == pytest.approx(math.log(7))
  # The random ids are about uniform.
  ids = _All(_Lm(order=4, seq_len=4, vocab_size=4, num_examples=1000))['ids']
  assert np.abs(np.bincount(ids.ravel()) / ids.size - 0.25).max() < 0.03


def testTargetsFollowOneRule():
  generator = _Regression(input_shape=[2, 3], num_targets=2, num_hidden=5)
  data = _All(generator)
  assert data['inputs'].shape == (100, 2, 3) and data['targets'].shape == (100, 2)
  assert data['inputs'].dtype == data['targets'].dtype == np.float32
  hidden, target = (w.numpy() for w in generator._rule)
  expected = np.maximum(data['inputs'].reshape([100, 6]).astype(np.float64) @ hidden, 0) @ target
  np.testing.assert_array_equal(data['targets'], expected.astype(np.float32))
  assert 0.1 < data['targets'].std() < 10
  assert data['inputs'].min() < -1.8 and data['inputs'].max() > 1.8


@pytest.mark.parametrize('make', [_Lm, _Regression])
def testExamplesDependOnTheirIndexAlone(make):
  whole = _All(make())
  for batch_size in (1, 7, 100):
    other = _All(make(batch_size=batch_size))
    for key, value in whole.items():
      np.testing.assert_array_equal(other[key], value)
  shifted = _All(make(first_example=30, num_examples=70))
  for key, value in whole.items():
    np.testing.assert_array_equal(shifted[key], value[30:])
  other_seed = _All(make(data_seed=1))
  assert any((other_seed[key] != value).any() for key, value in whole.items())


@pytest.mark.parametrize('make', [_Lm, _Regression])
def testRestartIsExactFromAPositionWithinABatch(make):
  rows = [b for b in make(batch_size=1).Dataset().take(60).as_numpy_iterator()]
  batch = next(make().Dataset(37).as_numpy_iterator())
  for key, value in batch.items():
    np.testing.assert_array_equal(value, np.concatenate([row[key] for row in rows[37:45]]))


@pytest.mark.parametrize('make', [_Lm, _Regression])
def testSpecAndFingerprint(make):
  generator = make()
  assert dict(generator.Dataset().element_spec) == dict(generator.BatchSpec())
  assert make(random_seed=3, batch_size=2).Fingerprint() == generator.Fingerprint()
  for other in ({'data_seed': 1}, {'first_example': 1}, {'num_examples': 99}):
    assert make(**other).Fingerprint() != generator.Fingerprint()


def testExamplesArePinned():
  # Benchmarks and training tests compare runs of different days.
  data = _All(_Lm(seq_len=6, num_examples=2))
  assert data['ids'].tolist() == [[0, 4, 60, 34, 20, 28], [31, 55, 61, 21, 30, 63]]
  data = _All(_Regression(input_shape=[2], num_examples=2))
  assert data['inputs'].tolist() == [[0.26171875, 1.1640625], [-0.76171875, 0.984375]]
  assert data['targets'].tolist() == [[-0.129364013671875], [-0.101715087890625]]


@pytest.mark.parametrize(
  'make, params',
  [
    (_Lm, {'seq_len': 0}),
    (_Lm, {'vocab_size': 1}),
    (_Lm, {'order': 0}),
    (_Lm, {'num_examples': -1}),
    (_Lm, {'first_example': -1}),
    (_Regression, {'input_shape': []}),
    (_Regression, {'input_shape': [3, 0]}),
    (_Regression, {'num_targets': 0}),
    (_Regression, {'num_hidden': 0}),
  ],
)
def testInvalidParamsAreNamed(make, params):
  with pytest.raises(ValueError, match=next(iter(params))):
    make(**params)


@pytest.mark.parametrize(
  'make, params',
  [
    (_Lm, {'vocab_size': 2**31 - 1, 'seq_len': 2**20}),
    (_Regression, {'num_hidden': 2**31 - 1}),
    (_Regression, {'num_targets': 2**31 - 1, 'num_hidden': 2**10}),
  ],
)
def testRuleMustFitTheMemory(monkeypatch, make, params):
  monkeypatch.setattr(host_memory, 'Bytes', lambda: 2**34)
  with pytest.raises(ValueError, match=naming.Naming('the rule', 'memory')):
    make(num_examples=1, **params).Dataset()


def testEmptyDataAreAnError():
  with pytest.raises(ValueError, match=naming.Naming('SyntheticLmInput', 'NumExamples()', 'empty')):
    _Lm(num_examples=0).Dataset()


def testBigramTableLearnsTheRule():
  generator = _Lm(vocab_size=16, seq_len=8, batch_size=32)
  logits = tf.Variable(tf.zeros([16, 16]))
  for batch in generator.Dataset().take(60):
    with tf.GradientTape() as tape:
      rows = tf.gather(logits, batch.ids)
      loss = tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=batch.labels, logits=rows)
      )
    logits.assign_sub(50.0 * tf.convert_to_tensor(tape.gradient(loss, logits)))
  assert loss.numpy() < 0.1


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
