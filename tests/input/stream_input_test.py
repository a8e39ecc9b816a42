# SPDX-License-Identifier: Apache-2.0
"""Streams: batches, weights and padding; resuming from a saved iterator; rejected streams."""

import itertools
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.input import stream_input
from tests import naming

SIZE = 10


class _Numbers(stream_input.BaseStreamInput):
  """The numbers 0 ... SIZE - 1."""

  def _Stream(self, epoch):
    return self._Indices(epoch).map(lambda i: nested_map.NestedMap(i=i, weights=tf.ones([2])))

  def _Indices(self, epoch):
    return tf.data.Dataset.range(SIZE)

  def _FingerprintParts(self):
    return ['numbers']


def _Input(cls=_Numbers, **values):
  return cls.Params().Set(name='Train', batch_size=4, **values).Instantiate()


def _Seen(iterator, count=None):
  return [batch.i.numpy().tolist() for batch in itertools.islice(iterator, count)]


def testEachExampleComesOnceInFiniteData():
  source = _Input(shuffle=False, num_epochs=1)
  batches = list(source.Dataset())
  assert _Seen(batches) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 9, 9]]
  np.testing.assert_array_equal(batches[-1].example_weights, [1.0, 1.0, 0.0, 0.0])
  np.testing.assert_array_equal(batches[-1].weights[:, 0], [1.0, 1.0, 0.0, 0.0])
  for batch in batches:
    spec = batch.Transform(lambda x: tf.TensorSpec(x.shape, x.dtype))
    assert spec == source.BatchSpec()
  assert _Seen(_Input(shuffle=False).Dataset(), 3)[2] == [8, 9, 0, 1]


def testShuffleDrawsEachExampleOncePerEpochBySeed():
  epochs = np.reshape(_Seen(_Input(shuffle_buffer_size=5).Dataset(), 5), [2, SIZE])
  np.testing.assert_array_equal(np.sort(epochs), [range(SIZE)] * 2)
  assert epochs[0].tolist() != epochs[1].tolist()
  np.testing.assert_array_equal(
    epochs.reshape([5, 4]), _Seen(_Input(shuffle_buffer_size=5).Dataset(), 5)
  )
  other = _Seen(_Input(shuffle_buffer_size=5, random_seed=1).Dataset(), 5)
  assert other != epochs.reshape([5, 4]).tolist()


class _Interleaved(_Numbers):
  """Shuffles the parts in each epoch, and reads and mixes them in parallel."""

  def _Indices(self, epoch):
    parts = tf.data.Dataset.range(3).shuffle(3, epoch, reshuffle_each_iteration=False)
    mixed = parts.interleave(
      lambda i: tf.data.Dataset.range(i, SIZE, 3), cycle_length=2, num_parallel_calls=2
    )
    shuffled = mixed.shuffle(4, seed=3, reshuffle_each_iteration=False)
    return shuffled.map(lambda i: i + 0, num_parallel_calls=2)


class _WithTable(_Numbers):
  """Looks up words in a table, as a vocabulary does."""

  def __init__(self, params):
    super().__init__(params)
    keys = tf.constant([str(i) for i in range(SIZE)])
    self._table = tf.lookup.StaticHashTable(
      tf.lookup.KeyValueTensorInitializer(keys, tf.range(SIZE, dtype=tf.int64)), -1
    )

  def _Indices(self, epoch):
    table = self._table
    return super()._Indices(epoch).map(lambda i: table.lookup(tf.strings.as_string(i)))


@pytest.mark.parametrize('cls', [_Numbers, _Interleaved, _WithTable])
@pytest.mark.parametrize('num_epochs', [0, 3])
def testResumesFromASavedIterator(cls, num_epochs):
  values = {'shuffle_buffer_size': 6, 'num_epochs': num_epochs, 'num_prefetch': 3}
  _Input(cls, **values).CheckRestarts()
  run = _Input(cls, **values).Iterator()
  states, seen = [run.Save()], []
  for batch in itertools.islice(run, 9):  # 7.5 batches in 3 epochs.
    seen += _Seen([batch])
    states.append(run.Save())
  assert len(seen) == (8 if num_epochs else 9)
  # A new iterator continues in the middle, and then, as it is not traced again, from each state.
  other = _Input(cls, **values).Iterator()
  for count in (4, *range(len(states))):
    other.Restore(states[count])
    assert _Seen(other, len(seen) - count) == seen[count:]
    assert bool(num_epochs) == (next(other, None) is None)


class _FromGenerator(_Numbers):
  def _Indices(self, epoch):
    spec = tf.TensorSpec([], tf.int64)
    return tf.data.Dataset.from_generator(lambda: iter(range(SIZE)), output_signature=spec)


class _ByPython(_Numbers):
  def _Indices(self, epoch):
    def Same(i):
      return tf.ensure_shape(tf.numpy_function(lambda x: x, [i], tf.int64), [])

    return super()._Indices(epoch).map(Same)


class _Drawing(_Numbers):
  def _Indices(self, epoch):
    draw = lambda _: tf.random.uniform([], maxval=10, dtype=tf.int64)  # noqa: E731
    return super()._Indices(epoch).map(draw)


class _OtherEachTime(_Numbers):
  first = 0

  def _Indices(self, epoch):
    type(self).first += 1
    return super()._Indices(epoch).map(lambda i, first=self.first: i + first)


class _Unseeded(_Numbers):
  def _Indices(self, epoch):
    return super()._Indices(epoch).shuffle(SIZE, reshuffle_each_iteration=False)


class _Reshuffled(_Numbers):
  def _Indices(self, epoch):
    mixed = super()._Indices(epoch).batch(2)
    return mixed.flat_map(lambda i: tf.data.Dataset.from_tensor_slices(i).shuffle(2, seed=1))


class _Mixed(_Numbers):
  def _Indices(self, epoch):
    return tf.data.Dataset.sample_from_datasets([super()._Indices(epoch)] * 2, seed=1)


class _Ignoring(_Numbers):
  def _Indices(self, epoch):
    return super()._Indices(epoch).ignore_errors()


class _Empty(_Numbers):
  def _Indices(self, epoch):
    return super()._Indices(epoch).take(0)


class _Missing(_Numbers):
  def _Indices(self, epoch):
    return tf.data.TextLineDataset('nowhere/points').map(lambda _: tf.constant(0, tf.int64))


class _NoneMatches(_Numbers):
  def _Indices(self, epoch):
    return tf.data.Dataset.list_files('nowhere/*', shuffle=False).map(lambda _: 0)


class _Opening(_Numbers):
  def _Indices(self, epoch):
    with open('nowhere/points'):
      return super()._Indices(epoch)


class _Bare(_Numbers):
  def _Stream(self, epoch):
    return self._Indices(epoch)


class _AnyLength(_Numbers):
  def _Stream(self, epoch):
    return self._Indices(epoch).map(lambda i: nested_map.NestedMap(i=tf.range(i)))


@pytest.mark.parametrize(
  'cls, names',
  [
    (
      _FromGenerator,
      ("_FromGenerator 'Train'", 'PyFunc', 'stateful', 'from_generator'),
    ),
    (_ByPython, ("_ByPython 'Train'", 'PyFunc', 'stateful', 'numpy_function')),
    (_Drawing, ("_Drawing 'Train'", 'RandomUniformInt', 'tf.random.stateless_uniform')),
    (_OtherEachTime, ('_OtherEachTime', '_Stream(epoch)', 'epoch')),
    (_Unseeded, ('_Unseeded', '_Stream(epoch)', 'seed')),
    (_Reshuffled, ("_Reshuffled 'Train'", 'reshuffle_each_iteration=False')),
    (_Mixed, ("_Mixed 'Train'", 'stop_on_empty_dataset=True')),
    (_Ignoring, ("_Ignoring 'Train'", 'ignore_errors', 'TfRecordStream')),
    (_Empty, ("_Empty 'Train'", 'empty')),
    (_Missing, ("_Missing 'Train'", 'nowhere/points', 'No such file')),
    (_NoneMatches, ("_NoneMatches 'Train'", 'pattern', 'nowhere/*')),
    (_Opening, ("_Opening 'Train'", "'nowhere/points'")),
    (_Bare, ('_Bare._Stream', 'NestedMaps', 'TensorSpec')),
    (
      _AnyLength,
      ('_AnyLength', "'i'", '(4, None)', 'static'),
    ),
  ],
)
def testStreamsThatCannotBeResumedAreRejected(cls, names):
  tf.random.set_seed(None)  # A seed set by another test would seed unseeded operations.
  with pytest.raises(ValueError, match=naming.Naming(*names)) as e:
    _Input(cls).CheckRestarts()
  assert '\n' not in str(e.value)


def testNumPaddedCountsPaddedRows():
  source = _Input(shuffle=False, num_epochs=1)
  assert [source.NumPadded(batch) for batch in source.Dataset()] == [0, 0, 2]


def testStreamHasNoPositions():
  source = _Input()
  assert (source.NumExamples(), source.NumBatches(), source.PositionAfter(8, 4)) == (0, None, 12)
  assert source.Describe() == 'a stream of examples'
  assert source.Fingerprint() == _Input(shuffle=False).Fingerprint()
  with pytest.raises(ValueError, match=naming.Naming("_Numbers 'Train'", 'start=0', 4)):
    source.Dataset(start=4)
  with pytest.raises(AttributeError, match='num_parallel_calls'):  # Has no effect here.
    _Input(num_parallel_calls=None)
  with pytest.raises(ValueError, match=naming.Naming('shuffle_buffer_size', 1, 0)):
    _Input(shuffle_buffer_size=0)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
