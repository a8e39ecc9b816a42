# SPDX-License-Identifier: Apache-2.0
"""A packed row equals its documents in separate rows: losses, gradients and weights."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import nested_map
from tasks.lm import model
from tests.toys import stacks

_VOCAB, _TIME = 11, 8
# The lengths of the documents of each row.
_ROWS = [[3, 4], [8], [1, 2, 1, 3], [5]]


def _Documents():
  rng = np.random.default_rng(4)
  return [[rng.integers(0, _VOCAB, n + 1) for n in lengths] for lengths in _ROWS]


def _Batch(rows):
  """A packed batch; each row holds some documents, of which every token but the first is a label.

  Ids, labels and positions of padding are not zero, to test that the model ignores them.
  """
  shape = [len(rows), _TIME]
  batch = nested_map.NestedMap(
    ids=np.full(shape, 5),
    labels=np.full(shape, 6),
    weights=np.zeros(shape, np.float32),
    segment_ids=np.zeros(shape),
    segment_pos=np.full(shape, 3),
  )
  for row, documents in enumerate(rows):
    begin = 0
    for i, document in enumerate(documents, 1):
      length = len(document) - 1
      part = np.s_[row, begin : begin + length]
      batch.ids[part] = document[:-1]
      batch.labels[part] = document[1:]
      batch.weights[part] = 1
      batch.segment_ids[part] = i
      batch.segment_pos[part] = np.arange(length)
      begin += length
  return batch.TransformWithKey(
    lambda key, a: tf.constant(a, tf.float32 if key == 'weights' else tf.int32)
  )


def _Unpacked():
  """Returns a batch without segments, with each document in a separate row."""
  batch = _Batch([[document] for row in _Documents() for document in row])
  return nested_map.NestedMap(ids=batch.ids, labels=batch.labels, weights=batch.weights)


def _Task(num_stages, num_micro_batches):
  p = model.TransformerLm.Params().Set(
    name='lm',
    vocab_size=_VOCAB,
    model_dim=8,
    hidden_dim=12,
    num_heads=2,
    num_layers=2,
    dtype=tf.float64,
  )
  p.stack.Set(num_stages=num_stages, num_micro_batches=num_micro_batches, xla=False)
  return p.Instantiate()


def _TrainStep(batch, num_stages, num_micro_batches):
  """Returns a function batch -> (sums of the metrics, gradients) of a step in float64."""
  task = _Task(num_stages, num_micro_batches)
  task.stack.Place(
    stacks.Devices(),
    *stacks.Specs(task.PipelineInputs(batch)),
    loss_fn=lambda theta, outputs, side: task.ComputeLoss(theta, outputs[0], side)[0],
  )
  run = stacks.StepFunction(task.stack)

  def Step(batch):
    sums = run(task.PipelineInputs(batch), task.LossInputs(batch), tf.constant(0, tf.int64))
    return sums, stacks.Gradients(task.stack)

  return Step


def testPackedRowEqualsItsDocumentsInSeparateRows():
  """Differs without segments or positions, which shows that the test can fail."""
  unpacked, batch = _Unpacked(), _Batch(_Documents())
  expected = _TrainStep(unpacked, 1, 3)(unpacked)
  step = _TrainStep(batch, 2, 2)
  actual = step(batch)
  stacks.CheckEqual(actual, expected)
  assert actual[0]['loss'][1] == sum(map(sum, _ROWS))
  for field in ('segment_ids', 'segment_pos'):
    other = batch.copy()
    other[field] = tf.ones_like(other[field])
    stacks.CheckAnyDiffers(step(other)[1], expected[1])
  stacks.CheckEqual(step(batch), expected)  # Gradients begin at zero in each step.


def testModelTrainedOnPackedRowsContinuesAPrompt():
  continuations = []
  for batch in (_Batch(_Documents()), _Unpacked()):
    task = _Task(1, 1)
    task.stack.Place(stacks.Devices(), *stacks.Specs(task.PipelineInputs(batch)))
    continuations.append(task.Generate(np.array([[1, 2, 3]]), 4, temperature=0.0))
  np.testing.assert_array_equal(*continuations)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
