# SPDX-License-Identifier: Apache-2.0
"""Losses and metrics of micro-batches add up to the numbers of Keras, for every reduction."""

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests import naming
from tests.toys import keras_fits, keras_layers

LOSSES = keras.losses
X, Y = keras_fits.Floats(12, 5), keras_fits.Floats(12, 3, seed=1)
WEIGHTS = abs(keras_fits.Floats(12, seed=2)) + 0.1
IDS, TARGETS = keras_fits.PaddedIds(12), keras_fits.Floats(12, 6, 3, seed=3)
BOTH = {'a': Y, 'b': keras_fits.Floats(12, 2, seed=6)}
REDUCTIONS = ['sum', 'sum_over_batch_size', 'mean_with_sample_weight']
# Batches of four, so three micro-batches have two rows or one.
SIZES = ((2, 3),)


def _Squares(reduction):
  return LOSSES.MeanSquaredError(reduction=reduction)


def _SmallSteps():
  """Returns an optimizer with small steps, because a sum has large gradients."""
  return keras.optimizers.SGD(0.01)


def _Repeated(make):
  """Returns a function that makes a model with outputs named by the reductions of their losses."""

  def Make():
    model = make()
    heads = {name: layers.Dense(3, name=name)(model.layers[-2].output) for name in REDUCTIONS}
    return keras.Model(model.inputs, heads)

  return Make


def _CompiledWith(loss, **metrics):
  return {'loss': {name: loss(reduction=name) for name in REDUCTIONS}, **metrics}


def testEachReductionTrainsAsInKeras():
  """Sample weights differ much, so that micro-batches have different sums of them."""

  def Compiled():
    each = {'weighted_metrics': {'sum': ['mae']}, 'metrics': {'mean_with_sample_weight': ['mse']}}
    return _CompiledWith(LOSSES.MeanSquaredError, **each)

  y, weights = dict.fromkeys(REDUCTIONS, Y), dict.fromkeys(REDUCTIONS, WEIGHTS**2)
  options = {'optimizer': _SmallSteps, 'batch_size': 4, 'epochs': 1, 'sample_weight': weights}
  keras_fits.CheckFit(_Repeated(keras_fits.Mlp), X, y, Compiled, SIZES, **options)


def testLossesOfMaskedOutputsEqualKeras():
  """Micro-batches keep different numbers of positions, and a micro-batch may keep none.

  A function as metric sees all predictions of the batch, with the mask.
  """

  def Error(y, y_pred):
    return ops.mean(ops.abs(y - y_pred), -1)

  def Compiled():
    metrics = {'sum': ['mae'], 'sum_over_batch_size': [Error]}
    return _CompiledWith(LOSSES.MeanSquaredError, metrics=metrics)

  y = dict.fromkeys(REDUCTIONS, TARGETS[:6])
  options = {'optimizer': _SmallSteps, 'batch_size': 3}
  make = _Repeated(keras_fits.MaskedSequence)
  keras_fits.CheckFit(make, IDS[:6], y, Compiled, ((2, 3),), **options)


def _Tokens():
  inputs = keras.Input([6, 3])
  return keras.Model(inputs, layers.Dense(4)(layers.Dense(8)(inputs)))


def _LabelsToIgnore():
  """Returns labels of 12 examples: four have a single one that counts."""
  labels = keras_fits.Integers(3, 12, 6)
  labels[:4, 1:] = -1
  return labels


def testLossesWithIgnoredClassesEqualKeras():
  """Micro-batches have different numbers of labels that count."""

  def Compiled():
    return _CompiledWith(
      lambda **options: LOSSES.SparseCategoricalCrossentropy(True, ignore_class=-1, **options)
    )

  y = dict.fromkeys(REDUCTIONS, _LabelsToIgnore())
  options = {'optimizer': _SmallSteps, 'batch_size': 4, 'epochs': 1}
  keras_fits.CheckFit(_Repeated(_Tokens), TARGETS, y, Compiled, SIZES, **options)


def testIgnoredClassesMayHaveSampleWeights():
  def Compiled():
    loss = LOSSES.SparseCategoricalCrossentropy(
      from_logits=True, ignore_class=-1, reduction='mean_with_sample_weight'
    )
    return {'loss': loss}

  options = {'batch_size': 6, 'sample_weight': abs(keras_fits.Floats(12, 6, seed=8))}
  keras_fits.CheckFit(_Tokens, TARGETS, _LabelsToIgnore(), Compiled, **options)


class _Marked(keras.losses.Loss):
  """Leaves out the positions that `keep` marks, by a mask of its own."""

  def __init__(self, keep):
    super().__init__(name='marked')
    self.keep = keep

  def call(self, y_true, y_pred):
    values = ops.mean(ops.square(y_true - y_pred), axis=-1)
    values._keras_mask = self.keep(y_true, y_pred)
    return values


def testLossesMayAttachMasks():
  def Compiled():
    return {'loss': _Marked(lambda y, y_pred: y[:, :, 0] > 0)}

  keras_fits.CheckFit(_Tokens, TARGETS, keras_fits.Floats(12, 6, 4), Compiled, batch_size=6)


def testLossesWithMasksOfThePredictionsAreRefused():
  pipe = keras_fits.Pipe(keras_fits.Seeded(_Tokens), 2, 2)
  pipe.compile(loss=_Marked(lambda y, y_pred: y_pred[:, :, 0] > 0))
  with pytest.raises(ValueError, match=naming.Naming('mask', 'predictions', 'num_micro_batches=1')):
    pipe.train_on_batch(TARGETS, keras_fits.Floats(12, 6, 4))
  assert pipe.stack is None  # Nothing has moved.


def _MaskedAndPooled():
  """Ids [6] -> masked outputs 'a' [6, 3] and outputs 'b' [2] without a mask."""
  model = keras_fits.MaskedSequence()
  pooled = layers.Flatten()(model.output)
  b = layers.Dense(2)(layers.Dense(5, activation='tanh')(pooled))
  return keras.Model(model.inputs, {'a': model.output, 'b': b})


@pytest.mark.parametrize(
  ('a', 'b', 'num_stages', 'batch_size'),
  [
    ('mean_with_sample_weight', 'sum', 2, 4),
    ('sum_over_batch_size', 'mean_with_sample_weight', 1, 3),
  ],
)
def testEachOutputHasItsOwnDivisor(a, b, num_stages, batch_size):
  """One output has a mask, and the reductions differ; so do the weights of the examples."""
  y = {'a': TARGETS, 'b': keras_fits.Floats(12, 2, seed=6)}
  weights = {'a': abs(keras_fits.Floats(12, 6, seed=8)), 'b': WEIGHTS**2}

  def Compiled():
    return {
      'loss': {'a': _Squares(a), 'b': LOSSES.Huber(reduction=b)},
      'loss_weights': {'a': 0.3, 'b': 2.0},
      'metrics': {'b': ['mae']},
      'weighted_metrics': {'a': ['mae']},
    }

  options = {'optimizer': _SmallSteps, 'batch_size': batch_size, 'epochs': 1}
  options['sample_weight'] = weights
  keras_fits.CheckFit(_MaskedAndPooled, IDS, y, Compiled, ((num_stages, 3),), **options)


def _ListOfOutputs():
  model = keras_fits.TwoOutputs()
  return keras.Model(model.inputs, [model.output['b'], model.output['a'], model.output['b']])


def testAModelMayReturnAListOfOutputs():
  """One tensor is two outputs, and an output has no loss."""
  y = [BOTH['b'], Y, BOTH['b']]

  def Compiled():
    return {'loss': ['mse', 'mae', None], 'loss_weights': [1.0, 0.5, 1.0]}

  keras_fits.CheckFit(_ListOfOutputs, X, y, Compiled, batch_size=6)


def _Penalised():
  x = inputs = keras.Input([5])
  for i in range(2):
    regularizer = 'l2' if i else keras.regularizers.OrthogonalRegularizer()
    x = layers.Dense(6, kernel_regularizer=regularizer, activity_regularizer='l1')(x)
    x = keras_layers.Penalty()(x)
  return keras.Model(inputs, layers.Dense(3, bias_regularizer='l2', trainable=False)(x))


@pytest.mark.parametrize(('loss', 'num_stages'), [('mse', 2), (None, 1)])
def testLossesThatLayersAddEqualKeras(loss, num_stages):
  """The micro-batches have equal sizes, because an added mean counts by rows."""
  y = Y if loss else None
  pipelines = ((num_stages, num_stages),)
  keras_fits.CheckFit(_Penalised, X, y, lambda: {'loss': loss}, pipelines, batch_size=6)


def testEvaluationCountsTheLossesOfLayers():
  model = keras_fits.Seeded(_Penalised)
  model.compile(loss='mse', metrics=['mae'], run_eagerly=True)
  expected = model.evaluate(X, Y, batch_size=5, verbose=0)
  pipe = keras_fits.Pipe(keras_fits.Seeded(_Penalised), 2, 1)
  pipe.compile(loss='mse', metrics=['mae'])
  assert pipe.evaluate(X, Y, batch_size=5, verbose=0) == pytest.approx(expected, rel=1e-5)


_EXACT = ['sum_over_batch_size', 'mean_with_sample_weight']


def _SharedAndRegularised():
  x = inputs = keras.Input([5])
  shared = layers.Dense(5, activation='tanh', kernel_regularizer='l2')
  x = shared(shared(x))
  return keras.Model(inputs, {name: layers.Dense(3, name=name)(x) for name in _EXACT})


@pytest.fixture
def float64():
  keras.config.set_floatx('float64')
  yield
  keras.config.set_floatx('float32')
  keras.config.set_dtype_policy('float32')  # Keras has made it from floatx.


@pytest.mark.usefixtures('float64')
def testFloat64():
  """The shares of three micro-batches are exact in no dtype; a shared layer counts once."""
  keras_fits.CheckFit(
    _SharedAndRegularised,
    X.astype('float64'),
    dict.fromkeys(_EXACT, Y.astype('float64')),
    lambda: {
      'loss': {name: _Squares(name) for name in _EXACT},
      'metrics': {name: ['mae'] for name in _EXACT},
    },
    ((2, 3),),
    bound=1e-13,
    batch_size=6,
    sample_weight=dict.fromkeys(_EXACT, WEIGHTS),
  )


def _TwoSharedAndRegularised():
  x = inputs = keras.Input([5])
  shared, other = (layers.Dense(5, kernel_regularizer='l2') for _ in range(2))
  return keras.Model(inputs, layers.Dense(3)(shared(other(shared(x)))))


def testASharedLayerIsRegularisedOnceInStagesOfOneStructure():
  """The second and the third stage make the same calls, but one of them reuses its weight."""
  compiled = {'loss': 'mse'}.copy
  keras_fits.CheckFit(_TwoSharedAndRegularised, X, Y, compiled, ((4, 2),), batch_size=6)


def testALossMayBeAFunctionOfTensorFlow():
  """Keras casts integer labels, which TensorFlow's operators do not."""

  def Squares(y, y_pred):
    return tf.reduce_mean(tf.square(y - y_pred), axis=-1)

  labels = keras_fits.Integers(3, 12, 3)
  keras_fits.CheckFit(keras_fits.Mlp, X, labels, lambda: {'loss': Squares}, batch_size=6)


def _Fit(make, x, y, num_micro_batches=2, **compiled):
  pipe = keras_fits.Pipe(keras_fits.Seeded(make), 2, num_micro_batches)
  return keras_fits.Fit(pipe, x, y, lambda: compiled, batch_size=6, epochs=1)


def testALossMustBeAScalar():
  with pytest.raises(ValueError, match=naming.Naming('reduction', 'None', 'sum')):
    _Fit(keras_fits.Mlp, X, Y, loss=_Squares(None))


def testALossOfTheWholeBatchIsRefused():
  def NumberForAll(y, y_pred):
    return ops.sqrt(ops.mean(ops.square(y - y_pred)))

  with pytest.raises(ValueError, match=naming.Naming('number_for_all', 'num_micro_batches=1')):
    _Fit(keras_fits.Mlp, X, Y, loss=NumberForAll)
  _Fit(keras_fits.Mlp, X, Y, 1, loss=NumberForAll)


def PerFeature(y, y_pred):
  return ops.sqrt(ops.mean(ops.square(y - y_pred), axis=0))


def Pairs(y, y_pred):
  return ops.matmul(y_pred, ops.transpose(y_pred))


def Positive(y, y_pred):
  return tf.boolean_mask(tf.square(y - y_pred), y > 0)


def CircleInside(y, y_pred):
  return keras.losses.circle(y, y_pred)


def InBatchNegatives(y, y_pred):
  """Returns a number for each example that depends on the other examples of the batch."""
  similarities = ops.matmul(y_pred, ops.transpose(y))
  return ops.logsumexp(similarities, axis=-1) - ops.sum(y * y_pred, axis=-1)


def WithinGroups(y, y_pred):
  """Compares the rows of a group, which may lie in several micro-batches."""
  same = ops.cast(ops.equal(y[:, :1], ops.transpose(y[:, :1])), y_pred.dtype)
  return ops.logsumexp(ops.matmul(same, y_pred), axis=-1)


def Thresholded(y, y_pred):
  """Drops values that are small compared to the mean of the batch."""
  values = ops.mean(ops.square(y_pred), axis=-1)
  return ops.where(values > 0.05 * ops.mean(values), values, 0.0)


def MeanForEach(y, y_pred):
  """The sum is right, but not with weights."""
  values = ops.mean(ops.square(y - y_pred), axis=-1)
  return ops.mean(values) * ops.ones_like(values)


class _RootOfAll(keras.losses.Loss):
  def call(self, y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred), axis=-1)

  def __call__(self, y_true, y_pred, sample_weight=None):
    return ops.sqrt(super().__call__(y_true, y_pred, sample_weight))


@pytest.mark.parametrize(
  ('loss', 'name'),
  [
    ('circle', 'circle'),
    (keras.losses.circle, 'circle'),
    (CircleInside, 'circle_inside'),
    (InBatchNegatives, 'in_batch_negatives'),
    (keras.losses.Circle(name='rings'), 'rings'),
    (keras.losses.CosineSimilarity(axis=0, name='columns'), 'columns'),
    (PerFeature, 'per_feature'),
    (Pairs, 'pairs'),
    (Positive, 'positive'),
    (_RootOfAll(name='root'), 'root'),
  ],
)
def testLossesThatCompareExamplesAreRefused(loss, name):
  """The batch has as many rows as the outputs have features."""
  y = keras_fits.Integers(3, 12) if name in ('circle', 'circle_inside', 'rings') else Y
  pipe = keras_fits.Pipe(keras_fits.Seeded(lambda: keras_fits.Mlp(3)), 2, 3)
  pipe.compile(loss=loss)
  with pytest.raises(ValueError, match=naming.Naming(name, 'num_micro_batches=1')):
    pipe.train_on_batch(X[:3], y[:3])
  assert pipe.stack is None  # Nothing has moved.


@pytest.mark.parametrize(
  ('loss', 'name'),
  [(WithinGroups, 'within_groups'), (Thresholded, 'thresholded'), (MeanForEach, 'mean_for_each')],
)
def testLossesThatCompareExamplesOfTheBatchAreRefused(loss, name):
  """The rows of a group are neighbours; each has a weight."""
  y = np.repeat(np.arange(4), 3)[:, None] * np.ones([1, 3])
  pipe = keras_fits.Pipe(keras_fits.Seeded(lambda: keras_fits.Mlp(3)), 2, 3)
  pipe.compile(loss=loss)
  with pytest.raises(ValueError, match=naming.Naming(name, 'num_micro_batches=1')):
    pipe.train_on_batch(X[[0] * 12], y[[*range(12)]], sample_weight=WEIGHTS)
  assert pipe.stack is None


def testALossIsTriedOnMoreThanAFirstBatchOfOneRow():
  pipe = keras_fits.Pipe(keras_fits.Seeded(lambda: keras_fits.Mlp(3)), 2, 2)
  pipe.compile(loss=InBatchNegatives)
  with pytest.raises(ValueError, match=naming.Naming('in_batch_negatives', 'num_micro_batches=1')):
    pipe.test_on_batch(X[:1], Y[:1])


def PooledNegatives(y, y_pred):
  return InBatchNegatives(ops.mean(y, axis=1), ops.mean(y_pred, axis=1))


def _AnyLength():
  inputs = keras.Input([None, 3])
  return keras.Model(inputs, layers.Dense(4)(layers.Dense(8)(inputs)))


def testOutputsOfUnknownLengthGetTheLengthOfTheLabels():
  """They have the length of the labels, so losses with masks work and others are refused."""
  labels = keras_fits.Integers(4, 12, 6)
  labels[:4, 1:] = -1

  def Compiled():
    return {'loss': LOSSES.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)}

  keras_fits.CheckFit(_AnyLength, TARGETS, labels, Compiled, batch_size=6)
  for loss in (Positive, PooledNegatives):
    pipe = keras_fits.Pipe(keras_fits.Seeded(_AnyLength), 2, 2)
    pipe.compile(loss=loss)
    with pytest.raises(ValueError, match=naming.Naming('num_micro_batches=1')):
      pipe.train_on_batch(TARGETS, keras_fits.Floats(12, 6, 4))


def testLossesMayMakeAssertionsAboutPredictions():
  """Random predictions fail it, but the predictions of the model do not."""

  def Checked(y, y_pred):
    tf.debugging.assert_near(tf.reduce_sum(y_pred, axis=-1), tf.ones(tf.shape(y_pred)[:1]))
    return ops.categorical_crossentropy(y, y_pred)

  def Make():
    return keras_fits.Mlp(3, activation='softmax')

  keras_fits.CheckFit(Make, X, keras_fits.Classes(12, 3)[1], lambda: {'loss': Checked}, SIZES)


def testLossesMayHaveAnotherShapeThanTheBatch():
  """The values of all positions are in one dimension, or the examples in the last."""

  def Values(y, y_pred):
    return ops.mean(ops.square(y - y_pred), axis=-1)

  def Flat(y, y_pred):
    return ops.reshape(Values(y, y_pred), [-1])

  def Transposed(y, y_pred):
    return ops.transpose(Values(y, y_pred))

  def Make():
    x = inputs = keras.Input([6, 3])
    x = layers.Dense(8)(x)
    return keras.Model(inputs, {'a': layers.Dense(4)(x), 'b': layers.Dense(4)(x)})

  y = {name: keras_fits.Floats(12, 6, 4, seed=seed) for seed, name in enumerate('ab')}
  keras_fits.CheckFit(Make, TARGETS, y, lambda: {'loss': {'a': Flat, 'b': Transposed}})


@pytest.mark.parametrize('metrics', [['dice', 'tversky'], ['circle']], ids=str)
def testAMetricMayBeAFunctionOfAllExamples(metrics):
  """They are functions of Keras, but do not add up over micro-batches."""
  is_sparse = 'circle' in metrics
  y = keras_fits.Integers(3, 12) if is_sparse else abs(Y)

  def Make():
    return keras_fits.Mlp(3, activation='softmax', depth=1)

  def Compiled():
    loss = 'sparse_categorical_crossentropy' if is_sparse else 'mse'
    return {'loss': loss, 'metrics': [getattr(keras.losses, name) for name in metrics]}

  keras_fits.CheckFit(Make, X, y, Compiled, batch_size=6, epochs=1)


def testAMaskThatDependsOnWeightsIsRefused():
  def Make():
    inputs = keras.Input([6, 4])
    x = layers.Dense(3)(layers.Dense(4)(inputs))
    return keras.Model(inputs, keras_layers.LevelMask()(x))

  pipe = keras_fits.Pipe(keras_fits.Seeded(Make), 2, 2)
  pipe.compile(loss='mse')
  with pytest.raises(ValueError, match=naming.Naming('mask', 'weights', 'num_micro_batches=1')):
    pipe.train_on_batch(keras_fits.Floats(12, 6, 4), TARGETS)
  assert pipe.stack is None  # Nothing has moved.


def _MaskedBy(of):
  inputs = keras.Input([6, 5])
  return keras.Model(inputs, layers.Dense(3)(layers.Dense(8)(keras_layers.Masking(of)(inputs))))


def testMasksMayDependOnTheMode():
  """Evaluation keeps other positions; random numbers outside the mask do not matter."""
  x = keras_fits.Floats(12, 6, 5)
  options = {'batch_size': 6, 'validation_data': (x[:6], TARGETS[:6])}
  keras_fits.CheckFit(lambda: _MaskedBy('mode'), x, TARGETS, {'loss': 'mse'}.copy, **options)


def testPredictionNeedsNoMasks():
  pipe = keras_fits.Pipe(keras_fits.Seeded(lambda: _MaskedBy('random')), 2, 2)
  assert pipe.predict(keras_fits.Floats(4, 6, 5), verbose=0).shape == (4, 6, 3)


def testRandomMasksAreRefused():
  refusal = naming.Naming('mask', 'random', 'num_micro_batches=1')
  pipe = keras_fits.Pipe(keras_fits.Seeded(lambda: _MaskedBy('random')), 2, 2)
  pipe.compile(loss='mse')
  for _ in range(2):  # The first failure leaves no trace that would pass.
    with pytest.raises(ValueError, match=refusal):
      pipe.train_on_batch(keras_fits.Floats(12, 6, 5), TARGETS)
    assert pipe.stack is None  # Nothing has moved.


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
  """The gradient of a weight of another stage, and the new value, would be lost."""

  def Pipe():
    return keras_fits.Pipe(keras_fits.Seeded(keras_fits.Mlp), 2, num_micro_batches)

  def Penalised(y_true, y_pred):
    error = ops.mean(ops.square(y_true - y_pred), axis=-1)
    return error + ops.sum(ops.square(reading.model.layers[1].kernel))

  reading, changing = Pipe(), Pipe()
  reading.compile(optimizer='sgd', loss=Penalised)
  with pytest.raises(ValueError, match=naming.Naming('kernel', 'regularizer')):
    reading.train_on_batch(X, Y)
  assert reading.stack is None  # Nothing has moved.
  changing.compile(optimizer='sgd', loss=_Moving())
  with pytest.raises(ValueError, match=naming.Naming('moving', 'metric')):
    changing.train_on_batch(X, Y)
  assert changing.stack is None
  drawing = Pipe()
  drawing.compile(loss=lambda y, y_pred: ops.mean(tf.nn.dropout(y - y_pred, 0.5), axis=-1))
  with pytest.raises(ValueError, match=naming.Naming('loss', 'RandomUniform')):
    drawing.train_on_batch(X, Y)
  assert drawing.stack is None


@pytest.mark.parametrize(
  ('activation', 'loss', 'options'),
  [
    ('softmax', 'sparse_categorical_crossentropy', {'schedule': '1f1b', 'remat_policy': 'layer'}),
    ('sigmoid', 'binary_crossentropy', {}),
  ],
)
def testLossesOfSaturatedOutputsUseTheLogits(activation, loss, options):
  """Keras computes these losses from the logits that it has attached to the outputs.

  The output belongs to the first stage. The metric on all predictions takes their logits, too.
  """

  def Make():
    inputs = keras.Input([5])
    y = keras.layers.Dense(3, activation=activation, name='y')(inputs)
    return keras.Model(inputs, {'y': y, 'z': keras.layers.Dense(3, name='z')(y)})

  def Mean(y_true, y_pred):
    return keras.losses.get(loss)(y_true, y_pred)

  x = 100 * keras_fits.Floats(12, 5)
  classes = keras_fits.Integers(3, 12)
  y = {'y': classes, 'z': keras_fits.Floats(12, 3)}
  if activation == 'sigmoid':
    y['y'] = keras_fits.Classes(12, 3)[1]

  def Compiled():
    return {'loss': {'y': loss, 'z': 'mse'}, 'metrics': {'y': [Mean]}}

  expected = keras_fits.Fit(keras_fits.Seeded(Make), x, y, Compiled)
  assert expected.history['y_loss'][0] > 17  # Probabilities are at least 1e-7.
  pipe = keras_fits.Pipe(keras_fits.Seeded(Make), 2, 2, **options)
  keras_fits.CheckEqual(keras_fits.Fit(pipe, x, y, Compiled), expected, bound=1e-4)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
