# SPDX-License-Identifier: Apache-2.0
"""Losses and metrics of micro-batches add up to the numbers of Keras, for every reduction."""

import sys

import keras
import pytest
from keras import layers, ops

from tests import naming
from tests.toys import keras_fits

LOSSES = keras.losses
X, Y = keras_fits.Floats(12, 5), keras_fits.Floats(12, 3, seed=1)
WEIGHTS = abs(keras_fits.Floats(12, seed=2)) + 0.1
IDS, TARGETS = keras_fits.PaddedIds(12), keras_fits.Floats(12, 6, 3, seed=3)
BOTH = {'a': Y, 'b': keras_fits.Floats(12, 2, seed=6)}
# Batches of six, so four micro-batches have two rows or one.
SIZES = ((2, 4),)


def _Squares(reduction):
  return LOSSES.MeanSquaredError(reduction=reduction)


def _SmallSteps():
  """A sum has large gradients."""
  return keras.optimizers.SGD(0.01)


@pytest.mark.parametrize('reduction', ['sum', 'sum_over_batch_size', 'mean_with_sample_weight'])
def testReductions(reduction):
  """Sample weights differ much, so that micro-batches have different sums of them."""
  keras_fits.CheckFit(
    keras_fits.Mlp,
    X,
    Y,
    lambda: {'loss': _Squares(reduction), 'weighted_metrics': ['mae'], 'metrics': ['mse']},
    SIZES,
    optimizer=_SmallSteps,
    batch_size=6,
    sample_weight=WEIGHTS**2,
  )


@pytest.mark.parametrize('reduction', ['sum', 'sum_over_batch_size', 'mean_with_sample_weight'])
def testMaskedOutputs(reduction):
  """Micro-batches keep different numbers of positions, and a micro-batch may keep none."""
  keras_fits.CheckFit(
    keras_fits.MaskedSequence,
    IDS,
    TARGETS,
    lambda: {'loss': _Squares(reduction), 'metrics': ['mae']},
    ((2, 6),),
    optimizer=_SmallSteps,
    batch_size=6,
  )


def testMaskedOutputsWithWeightsOfPositions():
  keras_fits.CheckFit(
    keras_fits.MaskedSequence,
    IDS,
    TARGETS,
    lambda: {'loss': 'mse', 'weighted_metrics': ['mae']},
    SIZES,
    batch_size=6,
    sample_weight=abs(keras_fits.Floats(12, 6, seed=8)),
  )


def testFunctionsAsMetricsOfMaskedOutputs():
  """They see all predictions of the batch, with the mask."""

  def Error(y, y_pred):
    return ops.mean(ops.abs(y - y_pred), -1)

  def Compiled():
    return {'loss': 'mse', 'metrics': [Error]}

  keras_fits.CheckFit(keras_fits.MaskedSequence, IDS, TARGETS, Compiled, batch_size=6)


def _Tokens():
  inputs = keras.Input([6, 3])
  return keras.Model(inputs, layers.Dense(4)(layers.Dense(8)(inputs)))


def testIgnoredClasses():
  """Micro-batches have different numbers of labels that count."""
  labels = keras_fits.Integers(4, 12, 6)
  labels[:4, 1:] = -1

  def Compiled():
    return {'loss': LOSSES.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)}

  keras_fits.CheckFit(_Tokens, TARGETS, labels, Compiled, SIZES, batch_size=6)


def testSeveralOutputs():
  def Compiled():
    return {
      'loss': {'a': 'mse', 'b': LOSSES.Huber()},
      'loss_weights': {'a': 0.3, 'b': 2.0},
      'metrics': {'b': ['mae']},
      'weighted_metrics': {'a': ['mse']},
    }

  weights = {'a': WEIGHTS, 'b': WEIGHTS**2}
  options = {'batch_size': 6, 'sample_weight': weights}
  keras_fits.CheckFit(keras_fits.TwoOutputs, X, BOTH, Compiled, SIZES, **options)


def _ListOfOutputs():
  model = keras_fits.TwoOutputs()
  return keras.Model(model.inputs, [model.output['b'], model.output['a'], model.output['b']])


def testSumsOfSeveralOutputs():
  """The loss of each output, which the history has too, is scaled as the sum of them is."""
  compiled = {'loss': {name: _Squares('sum') for name in 'ab'}}.copy
  options = {'optimizer': _SmallSteps, 'batch_size': 6}
  keras_fits.CheckFit(keras_fits.TwoOutputs, X, BOTH, compiled, SIZES, **options)


def testListsOfOutputs():
  """One tensor is two outputs, and an output has no loss."""
  y = [BOTH['b'], Y, BOTH['b']]

  def Compiled():
    return {'loss': ['mse', 'mae', None], 'loss_weights': [1.0, 0.5, 1.0]}

  keras_fits.CheckFit(_ListOfOutputs, X, y, Compiled, SIZES, batch_size=6)


class _Penalty(layers.Layer):
  """Adds the mean square of its input to the loss."""

  def call(self, x):
    self.add_loss(0.1 * ops.mean(ops.square(x)))
    return x


def _Penalised():
  x = inputs = keras.Input([5])
  for i in range(3):
    regularizer = 'l2' if i else keras.regularizers.OrthogonalRegularizer()
    x = layers.Dense(6, kernel_regularizer=regularizer, activity_regularizer='l1')(x)
    x = _Penalty()(x)
  return keras.Model(inputs, layers.Dense(3, bias_regularizer='l2', trainable=False)(x))


@pytest.mark.parametrize('loss', ['mse', None])
def testLossesOfLayers(loss):
  """The micro-batches have equal sizes, for an added mean counts by rows."""
  y = Y if loss else None
  keras_fits.CheckFit(_Penalised, X, y, lambda: {'loss': loss}, ((1, 1), (3, 3)), batch_size=6)


def testEvaluationCountsTheLossesOfLayers():
  model = keras_fits.Seeded(_Penalised)
  model.compile(loss='mse', metrics=['mae'])
  expected = model.evaluate(X, Y, batch_size=5, verbose=0)
  pipe = keras_fits.Pipe(keras_fits.Seeded(_Penalised), 2, 1)
  pipe.compile(loss='mse', metrics=['mae'])
  assert pipe.evaluate(X, Y, batch_size=5, verbose=0) == pytest.approx(expected, rel=1e-5)


def _SharedAndRegularised():
  x = inputs = keras.Input([5])
  shared = layers.Dense(5, activation='tanh', kernel_regularizer='l2')
  return keras.Model(inputs, layers.Dense(3)(shared(shared(x))))


def testASharedLayerIsRegularisedOnce():
  compiled = {'loss': 'mse'}.copy
  keras_fits.CheckFit(_SharedAndRegularised, X, Y, compiled, ((1, 1), (2, 2)), batch_size=6)


@pytest.fixture
def float64():
  keras.config.set_floatx('float64')
  yield
  keras.config.set_floatx('float32')
  keras.config.set_dtype_policy('float32')  # Keras has made it from floatx.


@pytest.mark.usefixtures('float64')
@pytest.mark.parametrize('reduction', ['sum_over_batch_size', 'mean_with_sample_weight'])
def testFloat64(reduction):
  """The shares of three micro-batches are exact in no dtype."""
  keras_fits.CheckFit(
    _SharedAndRegularised,
    X.astype('float64'),
    Y.astype('float64'),
    lambda: {'loss': _Squares(reduction), 'metrics': ['mae']},
    ((2, 3),),
    bound=1e-13,
    batch_size=6,
    sample_weight=WEIGHTS,
  )


def _TwoSharedAndRegularised():
  x = inputs = keras.Input([5])
  shared, other = (layers.Dense(5, kernel_regularizer='l2') for _ in range(2))
  return keras.Model(inputs, layers.Dense(3)(shared(other(shared(x)))))


def testASharedLayerIsRegularisedOnceInStagesOfOneStructure():
  """The second and the third stage make the same calls, but one of them reuses its weight."""
  compiled = {'loss': 'mse'}.copy
  keras_fits.CheckFit(_TwoSharedAndRegularised, X, Y, compiled, ((4, 2),), batch_size=6)


def testAFunctionAsLoss():
  def Squares(y, y_pred):
    return ops.mean(ops.square(y - y_pred), axis=-1)

  keras_fits.CheckFit(keras_fits.Mlp, X, Y, lambda: {'loss': Squares}, SIZES, batch_size=6)


def _Fit(make, x, y, num_micro_batches=2, **compiled):
  pipe = keras_fits.Pipe(keras_fits.Seeded(make), 2, num_micro_batches)
  return keras_fits.Fit(pipe, x, y, lambda: compiled, batch_size=6, epochs=1)


def testRefusals():
  with pytest.raises(ValueError, match=naming.Naming('reduction', 'None', 'sum')):
    _Fit(keras_fits.Mlp, X, Y, loss=_Squares(None))
  mixed = {'a': _Squares('sum'), 'b': _Squares('sum_over_batch_size')}
  refusal = naming.Naming('sum', 'sum_over_batch_size', 'num_micro_batches=1')
  with pytest.raises(ValueError, match=refusal):
    _Fit(keras_fits.TwoOutputs, X, BOTH, loss=mixed)
  _Fit(keras_fits.TwoOutputs, X, BOTH, 1, loss=mixed)


def testALossOfTheWholeBatchIsRefused():
  def NumberForAll(y, y_pred):
    return ops.sqrt(ops.mean(ops.square(y - y_pred)))

  with pytest.raises(ValueError, match=naming.Naming('number_for_all', 'num_micro_batches=1')):
    _Fit(keras_fits.Mlp, X, Y, loss=NumberForAll)
  _Fit(keras_fits.Mlp, X, Y, 1, loss=NumberForAll)


def testAMaskThatDependsOnWeightsIsRefused():
  class Thresholded(layers.Layer):
    def build(self, input_shape):
      self.level = self.add_weight(shape=())

    def call(self, x):
      return x * self.level

    def compute_mask(self, x, mask=None):
      return ops.any(x > self.level, axis=-1)

  def Make():
    inputs = keras.Input([6, 4])
    x = layers.Dense(3)(layers.Dense(4)(inputs))
    return keras.Model(inputs, Thresholded()(x))

  with pytest.raises(ValueError, match=naming.Naming('mask', 'weights', 'num_micro_batches=1')):
    _Fit(Make, keras_fits.Floats(12, 6, 4), TARGETS, loss='mse')


class _Moving(keras.losses.Loss):
  """Divides by a moving mean of its own."""

  def __init__(self):
    super().__init__()
    self.mean = keras.Variable(1.0, trainable=False, name='moving')

  def call(self, y_true, y_pred):
    self.mean.assign(0.5 * self.mean + 0.5 * ops.mean(ops.square(y_true)))
    return ops.mean(ops.square(y_true - y_pred), axis=-1) / self.mean


@pytest.mark.parametrize('num_micro_batches', [1, 2])
def testLossesWithVariablesAreRefused(num_micro_batches):
  """The gradient of a weight of another stage, and the new value, were lost."""

  def Pipe():
    return keras_fits.Pipe(keras_fits.Seeded(keras_fits.Mlp), 2, num_micro_batches)

  def Penalised(y_true, y_pred):
    error = ops.mean(ops.square(y_true - y_pred), axis=-1)
    return error + ops.sum(ops.square(reading.model.layers[1].kernel))

  reading, changing = Pipe(), Pipe()
  reading.compile(optimizer='sgd', loss=Penalised)
  with pytest.raises(ValueError, match=naming.Naming('kernel', 'regularizer')):
    reading.train_on_batch(X, Y)
  changing.compile(optimizer='sgd', loss=_Moving())
  with pytest.raises(ValueError, match=naming.Naming('moving', 'metric')):
    changing.train_on_batch(X, Y)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
