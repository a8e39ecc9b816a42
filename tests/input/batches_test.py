# SPDX-License-Identifier: Apache-2.0
"""Batches of an input, and the notes on errors in making them."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.distributed import worker_connection
from lingvo_gpipe.input import batches, stream_input, synthetic
from tests import naming


class _Failing(synthetic.SyntheticRegressionInput):
  """Raises when it makes example 9."""

  def _Examples(self, indices):
    with tf.control_dependencies(
      [tf.debugging.assert_none_equal(indices, tf.constant(9, tf.int64))]
    ):
      return super()._Examples(tf.identity(indices))


def _Input(cls=_Failing, **values):
  p = cls.Params().Set(name='Train', batch_size=2, num_examples=20, shuffle=False, num_epochs=1)
  return p.Set(**values).Instantiate()


@pytest.mark.parametrize('start', [0, 3])
def testErrorNamesTheExamplesOfTheBatch(start):
  iterator = batches.Batches(_Input(), start)
  first = 8 if start == 0 else 9
  for position in range(start, first, 2):
    assert next(iterator).example_weights.shape == [2], position
  with pytest.raises(tf.errors.InvalidArgumentError) as e:
    next(iterator)
  note, hint = e.value.__notes__
  assert naming.Names(note, "_Failing 'Train'", f'example {first}', 'data set')
  assert naming.Names(hint, f'Dataset(start={first})')
  with pytest.raises(tf.errors.InvalidArgumentError):
    next(iter(_Input().Dataset(start=first)))


class _FailingStream(stream_input.BaseStreamInput):
  """Raises when it makes example 9."""

  def _Stream(self, epoch):
    return tf.data.Dataset.range(20).map(lambda i: {'x': 1 // (i - 9)})


def testHintForAStreamReadsItFromTheStart():
  source = _FailingStream.Params().Set(batch_size=2, shuffle=False).Instantiate()
  with pytest.raises(tf.errors.InvalidArgumentError) as e:
    list(batches.Batches(source))
  note, hint = e.value.__notes__
  assert naming.Names(note, 'example 8') and naming.Names(hint, 'Dataset()', 'Params.Instantiate()')


def testLostWorkerGetsNoHintAboutTheData(monkeypatch):
  monkeypatch.setattr(worker_connection, '_answers', {'host:1': b''})  # There are workers.

  def LostWorker():
    raise tf.errors.UnavailableError(None, None, 'failed to connect to all addresses')
    yield

  with pytest.raises(tf.errors.UnavailableError) as e:
    next(batches.AddNotes(LostWorker(), _Input(), 4, 'run', worker_connection.IsFailure))
  (note,) = e.value.__notes__
  assert naming.Names(note, "'Train'", 'example 4', 'run')


def testBatchesEqualTheDataSets():
  source = _Input(synthetic.SyntheticRegressionInput, batch_size=3, shuffle=True)
  expected = [b.inputs.numpy() for b in source.Dataset(start=4)]
  actual = [b.inputs.numpy() for b in batches.Batches(source, 4)]
  np.testing.assert_array_equal(actual, expected)


def testRangeTakesIntegersOfAnyShape():
  for dtype, values in ((tf.int32, [[3, -2], [5, 0]]), (tf.int64, [2**40]), (tf.int32, [7, 7, 7])):
    with tf.device('/device:CPU:1'):
      low_and_high = batches.Range(tf.constant(values, dtype))
    assert low_and_high == (np.min(values), np.max(values))


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
