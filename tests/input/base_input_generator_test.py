# SPDX-License-Identifier: Apache-2.0
"""Input generators: exact restarts, full batches, and evaluations that count every example once."""

import itertools
import math
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.input import base_input_generator, synthetic
from tests import naming
from tests.toys import training


class _SquaresInput(base_input_generator.BaseInputGenerator):
  """Example i holds i, its square and a nested field."""

  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('size', 10, 'Number of examples.')
    return p

  def NumExamples(self):
    return self.params.size

  def _Examples(self, indices):
    return nested_map.NestedMap(
      index=indices,
      square=tf.cast(indices**2, tf.float32),
      weights=tf.ones([indices.shape[0], 3]),
      inner=nested_map.NestedMap(pair=tf.stack([indices, -indices], axis=1)),
    )

  def _FingerprintParts(self):
    return ['squares']


def _Input(**kwargs):
  return _SquaresInput.Params().Set(**{'batch_size': 4, **kwargs}).Instantiate()


def _Batches(generator, start=0, count=None):
  return list(itertools.islice(generator.Dataset(start).as_numpy_iterator(), count))


def _Indices(batches):
  return np.concatenate([b.index for b in batches])


def _AssertSameBatches(actual, expected):
  assert len(actual) == len(expected)
  for batch, expected_batch in zip(actual, expected, strict=True):
    tf.nest.map_structure(np.testing.assert_array_equal, batch, expected_batch)


def testBatchesAreNestedMapsOfTheSpec():
  generator = _Input()
  spec = generator.BatchSpec()
  assert spec.index == tf.TensorSpec([4], tf.int64)
  assert spec.inner.pair == tf.TensorSpec([4, 2], tf.int64)
  assert spec.example_weights == tf.TensorSpec([4], tf.float32)
  dataset = generator.Dataset()
  assert isinstance(dataset.element_spec, nested_map.NestedMap)
  assert dict(dataset.element_spec.FlattenItems()) == dict(spec.FlattenItems())
  batch = next(iter(dataset))
  assert isinstance(batch, nested_map.NestedMap)
  assert isinstance(batch.inner, nested_map.NestedMap)
  np.testing.assert_array_equal(batch.square, tf.cast(batch.index, tf.float32) ** 2)
  np.testing.assert_array_equal(batch.inner.pair[:, 1], -batch.index)


def testRepeatedPassesTraceTheExamplesOnce():
  traces = []

  class Counted(_SquaresInput):
    def _Examples(self, indices):
      traces.append(indices)
      return super()._Examples(indices)

  generator = Counted.Params().Set(batch_size=4, num_epochs=1).Instantiate()
  first = _Batches(generator)
  num_traces = len(traces)
  _AssertSameBatches(_Batches(generator), first)
  assert len(traces) == num_traces
  _AssertSameBatches(_Batches(generator, start=4), first[1:])
  _AssertSameBatches(_Batches(generator), first)


def testOnlyTunedDatasetsHaveATuner():
  """A tuner sleeps between its changes, and the end of the dataset waits for it."""
  assert _Input().Dataset().options().autotune.enabled is False
  for name in ('num_prefetch', 'num_parallel_calls'):
    assert _Input(**{name: -1}).Dataset().options().autotune.enabled is not False


@pytest.mark.parametrize(
  'size, shuffle', [(1, True), (3, True), (3, False), (10, True), (64, False), (101, True)]
)
def testEachEpochVisitsEveryExampleAcrossFullBatches(size, shuffle):
  generator = _Input(size=size, shuffle=shuffle)
  batches = _Batches(generator, count=2 * size)
  assert all(b.index.shape == (4,) and (b.example_weights == 1).all() for b in batches)
  epochs = _Indices(batches).reshape([-1, size])
  for epoch in epochs:
    np.testing.assert_array_equal(np.sort(epoch), np.arange(size))
  if not shuffle:
    np.testing.assert_array_equal(epochs[0], np.arange(size))
    assert (epochs == epochs[0]).all()
  elif size >= 10:
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


@pytest.mark.parametrize('num_parallel_calls, num_prefetch', [(1, 2), (3, 0), (-1, -1)])
def testRestartIsExactAtAnyPosition(num_parallel_calls, num_prefetch):
  options = {'num_parallel_calls': num_parallel_calls, 'num_prefetch': num_prefetch}
  whole = _Batches(_Input(**options), count=30)
  for consumed in (7, 29):
    tail = _Batches(_Input(**options), start=4 * consumed, count=30 - consumed)
    _AssertSameBatches(tail, whole[consumed:])


def testPositionDoesNotDependOnTheBatchSize():
  expected = _Indices(_Batches(_Input(batch_size=1), count=60))
  for batch_size in (3, 20):
    actual = _Indices(_Batches(_Input(batch_size=batch_size), count=60 // batch_size))
    np.testing.assert_array_equal(actual, expected)
  # Continue in batches of 2 from a position that is not a multiple of 2.
  actual = _Indices(_Batches(_Input(batch_size=2), start=15, count=10))
  np.testing.assert_array_equal(actual, expected[15:35])


def testRestartAtAFarPositionIsFast():
  epoch = 10**12
  batches = _Batches(_Input(size=7, batch_size=7), start=7 * epoch, count=2)
  for batch in batches:
    np.testing.assert_array_equal(np.sort(batch.index), np.arange(7))


def testOrderDependsOnTheSeed():
  first, again, other = (
    _Indices(_Batches(_Input(size=50, random_seed=s), count=25)) for s in (1, 1, 2)
  )
  np.testing.assert_array_equal(first, again)
  assert (first != other).any()


@pytest.mark.parametrize(
  'size, shuffle', [(1, True), (3, False), (4, True), (5, False), (8, False), (10, True)]
)
def testEvaluationCountsEveryExampleOnce(size, shuffle):
  generator = _Input(size=size, num_epochs=1, shuffle=shuffle)
  batches = _Batches(generator)
  assert len(batches) == generator.NumBatches() == -(-size // 4)
  assert all(b.index.shape == (4,) for b in batches)
  weights = np.concatenate([b.example_weights for b in batches])
  indices = _Indices(batches)
  assert weights.sum() == size
  np.testing.assert_array_equal(np.sort(indices[weights == 1]), np.arange(size))
  if not shuffle:
    np.testing.assert_array_equal(indices[:size], np.arange(size))
  # Padded rows are legal examples with weight 0 in both fields.
  assert (indices >= 0).all() and (indices < size).all()
  token_weights = np.concatenate([b.weights for b in batches])
  np.testing.assert_array_equal(token_weights, np.repeat(weights[:, None], 3, axis=1))


def testSeveralEpochsAreFinite():
  generator = _Input(size=5, num_epochs=3)
  batches = _Batches(generator)
  weights = np.concatenate([b.example_weights for b in batches])
  counts = np.bincount(_Indices(batches)[weights == 1], minlength=5)
  np.testing.assert_array_equal(counts, [3] * 5)
  _AssertSameBatches(_Batches(generator, start=8), batches[2:])
  assert generator.NumBatches(8) == 2


def testStartAfterTheEndIsEmpty():
  generator = _Input(size=5, num_epochs=1)
  for start in (5, 6, 100):
    assert _Batches(generator, start=start) == []
    assert generator.NumBatches(start) == 0


@pytest.mark.parametrize('num_epochs', [0, None])
def testWithoutNumEpochsTheDataAreEndless(num_epochs):
  generator = _Input(num_epochs=num_epochs)
  assert generator.NumBatches() is None
  assert generator.Dataset().cardinality().numpy() == tf.data.INFINITE_CARDINALITY


def testExampleWeightsOfASubclassAreMultiplied():
  class Halves(_SquaresInput):
    def _Examples(self, indices):
      examples = super()._Examples(indices)
      examples.example_weights = tf.fill([indices.shape[0]], 0.5)
      return examples

  generator = Halves.Params().Set(batch_size=4, size=6, num_epochs=1).Instantiate()
  weights = np.concatenate([b.example_weights for b in _Batches(generator)])
  np.testing.assert_array_equal(weights, [0.5] * 6 + [0, 0])


@pytest.mark.parametrize('field', ['example_weights', 'weights'])
@pytest.mark.parametrize('bad', [-1.0, math.nan])
def testNegativeWeightsAreRefused(field, bad):
  class Weighted(_SquaresInput):
    def _Examples(self, indices):
      examples = super()._Examples(indices)
      examples[field] = tf.where(indices == 5, bad, tf.ones_like(examples.square))
      return examples

  generator = Weighted.Params().Set(batch_size=4, shuffle=False).Instantiate()
  assert len(_Batches(generator, count=1)) == 1
  with pytest.raises(tf.errors.InvalidArgumentError, match=naming.Naming(field, 'negative')):
    _Batches(generator, count=2)


def testWeightsAtAnyDepthAreZeroInPaddedRows():
  class Nested(_SquaresInput):
    """The layout of Lingvo."""

    def _Examples(self, indices):
      ones = tf.ones([indices.shape[0], 3])
      sides = {
        name: nested_map.NestedMap(ids=indices, weights=ones, example_weights=ones[:, 0])
        for name in ('src', 'tgt')
      }
      return nested_map.NestedMap(sides)

  generator = Nested.Params().Set(batch_size=4, size=6, num_epochs=1).Instantiate()
  last = _Batches(generator)[-1]
  assert {key for key, _ in last.FlattenItems() if key.endswith('weights')} == {
    *('example_weights', 'src.example_weights', 'src.weights'),
    *('tgt.example_weights', 'tgt.weights'),
  }
  for key, value in last.FlattenItems():
    if key.endswith('weights'):
      np.testing.assert_array_equal(value.reshape([4, -1]).mean(axis=1), [1, 1, 0, 0], key)
  assert list(last.tgt.ids) == [last.tgt.ids[0], *[last.tgt.ids[1]] * 3]


def testDatasetWorksInsideATracedLoop():
  generator = _Input(num_epochs=1, shuffle=False)
  dataset = generator.Dataset()

  @tf.function
  def Total():
    total = tf.constant(0.0)
    for batch in dataset:
      total += tf.reduce_sum(batch.square * batch.example_weights)
    return total

  assert Total().numpy() == sum(i * i for i in range(10))


def testFingerprintDependsOnTheDataAlone():
  fingerprint = _Input().Fingerprint()
  assert len(fingerprint) == 16 and int(fingerprint, 16) >= 0
  assert (
    _Input(batch_size=7, random_seed=1, shuffle=False, num_epochs=1).Fingerprint() == fingerprint
  )
  assert _Input(size=11).Fingerprint() != fingerprint


def testParamsAreCopied():
  p = _SquaresInput.Params().Set(batch_size=4)
  generator = p.Instantiate()
  p.batch_size = 5
  assert generator.params.batch_size == 4


@pytest.mark.parametrize(
  'params, match',
  [
    ({'batch_size': 0}, naming.Naming("'squares'", 'param batch_size', 'set')),
    ({'batch_size': -1}, naming.Naming("'squares'", 'batch_size', 'at least 0', -1)),
    ({'num_epochs': -1}, 'num_epochs'),
    ({'num_prefetch': -2}, 'num_prefetch'),
    ({'read_on_workers': 1}, 'read_on_workers'),
    ({'num_parallel_calls': 0}, 'num_parallel_calls'),
  ],
)
def testInvalidParamsAreNamed(params, match):
  with pytest.raises(ValueError, match=match):
    _Input(name='squares', **params)


def testReadOnWorkersMayBeNoneAsInOldParams():
  assert _Input(read_on_workers=None).BatchSpec()


def testInvalidPositionsAndEmptyDataAreErrors():
  with pytest.raises(ValueError, match=naming.Naming('start', 0, -1)):
    _Input().Dataset(-1)
  with pytest.raises(TypeError):
    _Input().Dataset(1.5)
  with pytest.raises(ValueError, match=naming.Naming('_SquaresInput', 'NumExamples()', 'empty')):
    _Input(size=0).Dataset()
  with pytest.raises(ValueError, match=naming.Naming('_SquaresInput', 'NumExamples()', 'empty')):
    _Input(size=0, num_epochs=1).NumBatches()


class _BadInput(_SquaresInput):
  """Has an invalid field `x`."""

  def _Examples(self, indices):
    return nested_map.NestedMap(x=self._Bad(indices))

  def _Bad(self, indices):
    raise NotImplementedError


def testFieldsNeedStaticShapes():
  class Dynamic(_BadInput):
    def _Bad(self, indices):
      return tf.zeros([indices.shape[0], tf.cast(indices[0], tf.int32)])

  class Scalar(_BadInput):
    def _Bad(self, indices):
      return tf.constant(1.0)

  for cls, names in (
    (Dynamic, ('Dynamic', "'x'", '(4, None)', 'static')),
    (Scalar, ('Scalar._Examples', "'x'", 'rank')),
  ):
    with pytest.raises(ValueError, match=naming.Naming(*names)):
      cls.Params().Set(batch_size=4).Instantiate().Dataset()


def testFieldsMustMatchTheSpec():
  class WrongDtype(_BadInput):
    def _ExampleSpec(self):
      return nested_map.NestedMap(x=tf.TensorSpec([], tf.int32))

    def _Bad(self, indices):
      return tf.cast(indices, tf.float32)

  class WrongFields(WrongDtype):
    def _Examples(self, indices):
      return nested_map.NestedMap(y=indices)

  class IntegerWeights(_SquaresInput):
    def _Examples(self, indices):
      return nested_map.NestedMap(weights=indices)

  class NestedIntegerWeights(_SquaresInput):
    def _Examples(self, indices):
      return nested_map.NestedMap(tgt=nested_map.NestedMap(weights=indices))

  cases = (
    (WrongDtype, naming.Naming('WrongDtype._Examples', "'x'", 'int32 (4,)', 'float32 (4,)')),
    (
      WrongFields,
      naming.Naming('WrongFields', "['example_weights', 'x']", "['example_weights', 'y']"),
    ),
    (IntegerWeights, naming.Naming("'weights'", '[batch, ...]', 'int64 (4,)')),
    (NestedIntegerWeights, naming.Naming("'tgt.weights'", 'int64')),
  )
  for cls, match in cases:
    with pytest.raises(ValueError, match=match):
      cls.Params().Set(batch_size=4).Instantiate().Dataset()


def testExceptionInExamplesKeepsItsType():
  class Raises(_SquaresInput):
    def _ExampleSpec(self):
      return nested_map.NestedMap(x=tf.TensorSpec([], tf.int32))

    def _Examples(self, indices):
      raise KeyError('colour')

  with pytest.raises(KeyError, match='colour'):
    Raises.Params().Set(batch_size=4).Instantiate().Dataset()


def testPaddedRowsDoNotMoveThePosition():
  """A run with more epochs continues as if there were no padded batch."""
  first, more = _Input(num_epochs=1), _Input(num_epochs=2)
  position = 0
  for batch in _Batches(first):
    position = first.PositionAfter(position, len(batch.index))
  assert position == 10
  assert first.PositionAfter(position, 4) == 10
  later_batches = _Batches(more, start=position)
  seen = [b.index[b.example_weights > 0] for b in [*_Batches(first), *later_batches]]
  assert sorted(np.concatenate(seen)) == sorted([*range(10)] * 2)
  assert _Input().PositionAfter(8, 4) == 12


@pytest.mark.parametrize('options', [{}, {'num_epochs': 1}, {'shuffle': False}])
def testRowsDatasetReturnsTheRowsAndFieldsAskedFor(options):
  generator = _Input(**options)
  parts = list(generator.RowsDataset(3, range(1, 3), ['inner.pair', 'example_weights']).take(3))
  whole = _Batches(generator, 3, 3)
  assert len(parts) == len(whole) > 1
  for part, batch in zip(parts, whole, strict=True):
    np.testing.assert_array_equal(part[0], batch.inner.pair[1:3])
    np.testing.assert_array_equal(part[1], batch.example_weights[1:3])


# --- inputs that cannot be resumed ---


class _Skipping(_SquaresInput):
  """Reads from the start and skips the rows before the position."""

  def Dataset(self, start=0):
    return super().Dataset(0).skip(start // 4)


class _NoPosition(_SquaresInput):
  def Dataset(self):
    return super().Dataset(0)


class _AlwaysFromTheStart(_SquaresInput):
  def Dataset(self, start=0):
    return super().Dataset(0)


class _OtherOrder(_SquaresInput):
  def Dataset(self, start=0):
    return super().Dataset(start).shuffle(100)


class _OtherOrderLater(_SquaresInput):
  """Repeats the first batch but not the later ones, as an order without a seed may."""

  def Dataset(self, start=0):
    batches = super().Dataset(start)
    return batches.take(1).concatenate(batches.skip(2 if start else 1))


class _Jittered(_SquaresInput):
  def _Examples(self, indices):
    examples = super()._Examples(indices)
    examples.square = tf.map_fn(lambda x: x + tf.random.uniform([]), examples.square)
    return examples


class _SeededJitter(_SquaresInput):
  def _Examples(self, indices):
    examples = super()._Examples(indices)
    examples.square += tf.random.stateless_uniform([4], [1, indices[0]])
    return examples


class _SkippingBeforeRepeat(_SquaresInput):
  """Lacks its first batches in each epoch after a restart."""

  def Dataset(self, start=0):
    return self._Epoch().skip(start // 4).repeat()

  def _Epoch(self):
    return _Input(size=self.params.size, num_epochs=1).Dataset().take(self.params.size // 4)


class _SkippingAfterRepeat(_SkippingBeforeRepeat):
  def Dataset(self, start=0):
    return self._Epoch().repeat().skip(start // 4)


class _ForgettingEpochs(_SkippingBeforeRepeat):
  """Begins each restart in the order of the first epoch, and epochs have other orders."""

  def Dataset(self, start=0):
    epochs = self._Epoch().shuffle(100, seed=1, reshuffle_each_iteration=True).repeat()
    return epochs.skip(start // 4 % (self.params.size // 4))


def _EpochByPython(function, size):
  """Returns a data set of batches of 4 with the results for 0, 4, 8, ..."""
  firsts = tf.data.Dataset.range(0, size, 4)
  return firsts.map(
    lambda i: nested_map.NestedMap(x=tf.fill([4], tf.numpy_function(function, [i], tf.int64)))
  )


class _FailingInTheEpoch(_SkippingAfterRepeat):
  """Fails at a batch that is not read at the start."""

  def _Epoch(self):
    def Check(i):
      if i == 60:
        raise ValueError('example 60 is bad')
      return i

    return _EpochByPython(Check, self.params.size)


class _PythonJitter(_SquaresInput):
  def _Examples(self, indices):
    examples = super()._Examples(indices)
    jitter = tf.numpy_function(self._Jitter, [indices], tf.float32)
    examples.square += tf.ensure_shape(jitter, [4])
    return examples

  def _Jitter(self, indices):
    return np.random.normal(size=indices.shape).astype(np.float32)


class _SeededPythonJitter(_PythonJitter):
  def _Jitter(self, indices):
    np.random.seed(indices[0])  # The state of the process is not shared by two passes.
    return super()._Jitter(indices)


class _FailingPython(_PythonJitter):
  def _Jitter(self, indices):
    raise ValueError('an example is bad')


def testFailuresOfExamplesAreLeftToTheRun():
  for cls in (_FailingInTheEpoch, _FailingPython):
    generator = cls.Params().Set(batch_size=4, size=100).Instantiate()
    generator.CheckRestarts()
    with pytest.raises(tf.errors.OpError, match='is bad'):
      _Batches(generator, count=30)


def testALongEpochIsNotReadToItsEnd():
  read = []

  class Counted(_SkippingAfterRepeat):
    def _Epoch(self):
      def Count(i):
        read.append(i)
        return i

      return _EpochByPython(Count, self.params.size)

  for size, is_read in ((4000, True), (400_000, False)):
    read.clear()
    Counted.Params().Set(batch_size=4, size=size).Instantiate().CheckRestarts()
    assert (size - 4 in read) == is_read and len(read) < 4 * 4096


@pytest.mark.parametrize(
  'cls', [_SquaresInput, _Skipping, _SkippingAfterRepeat, _SeededJitter, _SeededPythonJitter]
)
def testResumableInputsPassTheCheck(cls):
  generator = cls.Params().Set(batch_size=4, size=100).Instantiate()
  generator.CheckRestarts()
  _AssertSameBatches(_Batches(generator, 4, 2), _Batches(generator, 0, 3)[1:])


@pytest.mark.parametrize(
  'cls, message',
  [
    (_NoPosition, naming.Naming('_NoPosition.Dataset', '`start`')),
    (
      _AlwaysFromTheStart,
      naming.Naming('_AlwaysFromTheStart.Dataset', 'position 4', '_Examples(indices)'),
    ),
    (_OtherOrder, naming.Naming('_OtherOrder.Dataset', 'position 4')),
    (_OtherOrderLater, naming.Naming('_OtherOrderLater.Dataset', 'position 4')),
    (
      _Jittered,
      naming.Naming('_Jittered._Examples', 'RandomUniform', 'tf.random.stateless_uniform'),
    ),
    (_SkippingBeforeRepeat, naming.Naming('_SkippingBeforeRepeat.Dataset', 96)),
    (_ForgettingEpochs, naming.Naming('_ForgettingEpochs.Dataset', 100)),
    (_PythonJitter, naming.Naming('_PythonJitter._Examples', 'numpy_function')),
  ],
)
def testInputsThatCannotBeResumedAreRejected(cls, message):
  generator = cls.Params().Set(batch_size=4, size=100).Instantiate()
  with pytest.raises(ValueError, match=message):
    generator.CheckRestarts()
    generator.Dataset()


class _Stream(synthetic.SyntheticRegressionInput):
  def Dataset(self, start=0):
    return super().Dataset(0)


def testRunIsRejectedBeforeItsFirstStep(tmp_path):
  params = training.Params()
  params.input = _Stream.Params().MergeCommonKeysFrom(params.input)
  program = training.Program(tmp_path, params)
  with pytest.raises(ValueError, match=naming.Naming('_Stream.Dataset', 'position 4')):
    program.Run()
  assert program._step == 0 and not list((tmp_path / 'train').glob('ckpt*'))


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
