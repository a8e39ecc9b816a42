# SPDX-License-Identifier: Apache-2.0
"""Micro-batches compute what a batch does, or a message names the layer whose results differ."""

import re
import sys

import keras
import numpy as np
import pytest
from keras import layers, ops

from tests.toys import keras_fits, keras_layers

X, Y = keras_fits.Floats(8, 4, 5), keras_fits.Floats(8, 4, 3, seed=1)
COMPILED = {'loss': 'mse'}.copy


def _SwapAxes(x):
  return ops.transpose(x, [1, 0, 2])


@pytest.mark.parametrize(
  'compare',
  [
    lambda x: x + ops.mean(x, axis=0),
    lambda x: x + ops.tensordot(x, x, 3),
    lambda x: x + ops.roll(x, 1, axis=0),
    lambda x: _SwapAxes(_SwapAxes(x) + ops.max(_SwapAxes(x), axis=1, keepdims=True)),
  ],
  ids=['mean', 'tensordot', 'roll', 'time first'],  # The last shows a cell later.
)
def testOutputsThatCompareExamplesAreWarnedOf(compare, caplog):
  _Evaluate(lambda: _Model([compare], []), 2)
  assert re.search(r'layers\[[12]\].*dense_[12].*num_micro_batches=1', caplog.text)


def _Evaluate(make, num_micro_batches, x=X, y=Y):
  """Tries a model in both modes, as before a step, and evaluates, which is traced faster."""
  pipe = keras_fits.Pipe(keras_fits.Seeded(make), 2, num_micro_batches)
  pipe.compile(loss='mse')
  pipe.evaluate(x, y, verbose=0)


def testOneMicroBatchMayCompareExamples(caplog):
  _Evaluate(lambda: _Model([lambda x: x + ops.mean(x, axis=0)], []), 1)
  assert 'num_micro_batches=1' not in caplog.text  # TensorFlow warns of many traces.


@pytest.mark.parametrize(
  'make, numbers',
  [(layers.BatchNormalization, [1, 2]), (lambda: keras_layers.Centers(name='batch_mean'), [2])],
  ids=['Keras', 'own'],
)
def testNormalisationByTheBatchIsWarnedOf(make, numbers, caplog):
  """There is no warning with one micro-batch."""
  for num_micro_batches in numbers:
    assert 'num_micro_batches=1' not in caplog.text  # TensorFlow warns of many traces.
    parts = [keras.Input([4, 5]), layers.Dense(4), make(), layers.Dense(3)]
    _Evaluate(lambda parts=parts: keras.Sequential(parts), num_micro_batches)
  assert re.search(r'layers\[0\].*batch_\w+ .*training.*num_micro_batches=1', caplog.text)


def testIndependentExamplesAreNotWarnedOf(caplog):
  """Random numbers of training are equal, and a frozen normalisation compares nothing."""
  ids = keras.Input([6], dtype='int32')
  x = layers.Embedding(9, 8, mask_zero=True)(ids)
  x = layers.BatchNormalization(trainable=False)(layers.Dense(8)(x))
  x = layers.GaussianDropout(0.5)(x)
  x = layers.MultiHeadAttention(2, 4)(x, x)
  x = layers.Bidirectional(layers.GRU(4))(x)
  model = keras.Model(ids, layers.Dense(3)(x))
  _Evaluate(lambda: model, 2, keras_fits.PaddedIds(8), Y[:, 0])
  assert 'num_micro_batches=1' not in caplog.text  # TensorFlow warns of many traces.


def _Model(*middle):
  """Returns a model of a cell, cells with a regularizer, and a cell.

  Args:
    *middle: for each cell with a regularizer its layers after the first.
  """
  x = inputs = keras.Input([4, 5])
  x = layers.Dense(6, activation='tanh')(x)
  for cell in middle:
    # More than the losses that the cell adds.
    x = layers.Dense(6, kernel_regularizer=keras.regularizers.L2(1.0))(x)
    for layer in cell:
      x = layer(x)
  return keras.Model(inputs, layers.Dense(3)(x))


def _Squares(reduction):
  return lambda x: 0.1 * reduction(ops.square(x))


NOT_MEANS = {
  'norm': lambda: [keras_layers.AddsLosses(lambda x: ops.sqrt(ops.sum(ops.square(x))))],
  'in training': lambda: [keras_layers.AddsLosses(_Squares(ops.sum), (True,))],
  'in evaluation': lambda: [keras_layers.AddsLosses(_Squares(ops.sum), (False,))],
  'after dropout': lambda: [layers.Dropout(0.5), keras_layers.AddsLosses(_Squares(ops.sum))],
  'nested': lambda: [
    keras.Sequential([keras_layers.AddsLosses(_Squares(ops.sum)), layers.Activation('tanh')])
  ],
  # Keras divides by the size of the first axis.
  'time first': lambda: [_SwapAxes, layers.ActivityRegularization(l2=0.1), _SwapAxes],
}


@pytest.mark.parametrize('name', NOT_MEANS)
def testOtherLossesAreRefused(name):
  pipe = keras_fits.Pipe(keras_fits.Seeded(lambda: _Model(NOT_MEANS[name]())), 2, 2)
  with pytest.raises(
    ValueError, match=r'layers\[1\].*(adds_losses|activity_).*num_micro_batches=1'
  ):
    keras_fits.Fit(pipe, X, Y, COMPILED)


def testOneMicroBatchTakesAnyLoss():
  keras_fits.CheckFit(lambda: _Model(NOT_MEANS['time first']()), X, Y, COMPILED, ((2, 1),))


@pytest.mark.parametrize(
  'loss, modes',
  [
    # Compares examples.
    (lambda x: ops.mean(ops.square(ops.mean(x, 0))), (True,)),
    # A mean over some values.
    (lambda x: ops.sum(ops.relu(x)) / ops.sum(ops.cast(x > 0, x.dtype)), (False, True)),
  ],
  ids=['examples, in training', 'values, always'],
)
def testOtherMeansAreWarnedOf(loss, modes, caplog):
  _Evaluate(lambda: _Model([keras_layers.AddsLosses(loss, modes)]), 2)
  assert re.search(r'layers\[1\].*adds_losses', caplog.text)


def testMeansCountAsInKeras(caplog):
  def Make():
    # Rounding makes a number, about 1e-9, that depends on how many examples there are.
    zero = [layers.LayerNormalization(), keras_layers.AddsLosses(ops.mean)]
    constant = [keras_layers.AddsLosses(lambda _: ops.ones([]))]
    return _Model(constant, zero, [keras_layers.AddsLosses(_Squares(ops.mean))])

  keras_fits.CheckFit(Make, X, Y, COMPILED, ((2, 2),), batch_size=8)
  assert 'num_micro_batches=1' not in caplog.text  # TensorFlow warns of many traces.


def testRandomLossesPass():
  dropout = [layers.Dropout(0.9), keras_layers.AddsLosses(_Squares(ops.mean), (True,))]
  noise = [layers.GaussianNoise(1.0), keras_layers.AddsLosses(ops.mean)]
  no_number = [keras_layers.AddsLosses(lambda x: np.nan * ops.sum(x))]
  _Evaluate(lambda: _Model(dropout, noise, no_number), 2)


def testNothingIsTrainedAfterPredict():
  """The trial reads an embedding whose rows are divided among the devices."""

  def Make():
    inputs = keras.Input([6], dtype='int32')
    x = layers.Embedding(8, 4)(inputs)
    x = keras_layers.AddsLosses(_Squares(ops.sum))(layers.Dense(4)(x))
    return keras.Model(inputs, layers.Dense(8)(x))

  ids = keras_fits.Integers(8, 4, 6)
  pipe = keras_fits.Pipe(keras_fits.Seeded(Make), 2, 2, vocabulary='shared')
  before = pipe.get_weights()
  pipe.predict(ids, verbose=0)
  loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  with pytest.raises(ValueError, match=r'layers\[1\].*adds_losses'):
    keras_fits.Fit(pipe, ids, ids, lambda: {'loss': loss})
  for a, b in zip(pipe.get_weights(), before, strict=True):
    np.testing.assert_array_equal(a, b)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
