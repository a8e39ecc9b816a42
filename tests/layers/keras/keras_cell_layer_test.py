# SPDX-License-Identifier: Apache-2.0
"""Cells of a live Keras model: state, dropout, masks, precision, refusals and shared traces."""

import functools
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests import naming
from tests.toys import keras_fits

X, Y = keras_fits.Floats(7, 5), keras_fits.Floats(7, 3, seed=1)


def _Squares():
  return {'loss': 'mse'}


def _Compiled(make, num_stages=2, num_micro_batches=1, **options):
  """Returns a PipelinedModel that is compiled for steps by the gradient."""
  pipe = keras_fits.Pipe(keras_fits.Seeded(make), num_stages, num_micro_batches, **options)
  pipe.compile(optimizer=keras_fits.Sgd(), **_Squares())
  return pipe


# ---- BatchNormalization --------------------------------------------------------------------------


def _Normalised():
  x = inputs = keras.Input([5])
  x = layers.BatchNormalization(momentum=0.8)(x)
  for _ in range(2):
    x = layers.BatchNormalization()(layers.Dense(5, activation='tanh')(x))
  return keras.Model(inputs, layers.Dense(3)(x))


def testBatchNormalizationOfOneMicroBatchEqualsKeras():
  """The weights that are compared include the moving averages."""
  keras_fits.CheckFit(_Normalised, X, Y, _Squares, ((2, 1),), batch_size=4)


def testMovingAveragesFollowAllRows():
  """Seven rows make micro-batches of unequal sizes; the first layer sees the same rows anyway."""
  pipe = _Compiled(_Normalised, 2, 3)
  norm = next(x for x in pipe.model.layers if isinstance(x, layers.BatchNormalization))
  mean, variance = np.zeros(5), np.ones(5)
  for i in (1, 2):
    pipe.train_on_batch(i * X + i, Y)
    rows = (i * X + i).astype('float64')
    mean = 0.8 * mean + 0.2 * rows.mean(0)
    variance = 0.8 * variance + 0.2 * rows.var(0)
    np.testing.assert_allclose(norm.moving_mean, mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(norm.moving_variance, variance, rtol=1e-5)


@functools.cache
def _TrainedWithTime(time, axes):
  """Returns the weights after a step of a model whose cells see the axes in this order."""

  def Make():
    x = inputs = keras.Input([time, 5])
    x = layers.Dense(5)(ops.transpose(x, axes))
    x = layers.BatchNormalization()(layers.Dense(5)(x))
    return keras.Model(inputs, ops.transpose(x, axes))

  pipe = _Compiled(Make, 2, 2)
  pipe.train_on_batch(keras_fits.Floats(7, 4, 5), keras_fits.Floats(7, 4, 5, seed=1))
  return pipe.get_weights()


@pytest.mark.parametrize('time', [4, None])
def testExamplesMayBeOnAnotherAxisThanTheFirst(time):
  """If steps of time counted as examples, all micro-batches would have the same weight."""
  weights = _TrainedWithTime(time, (1, 0, 2))
  for a, b in zip(weights, _TrainedWithTime(4, (0, 1, 2)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def testEachMicroBatchIsNormalisedByItself():
  model = keras_fits.Seeded(_Normalised)
  halves = [
    np.mean(np.square(model(X[rows], training=True) - Y[rows]))
    for rows in (slice(0, 2), slice(2, 4))
  ]
  loss = _Compiled(_Normalised, 2, 2).train_on_batch(X[:4], Y[:4])
  assert loss == pytest.approx(np.mean(halves), rel=1e-5)


class Frozen(keras.Model):
  """Calls its BatchNormalization as in evaluation."""

  def __init__(self):
    super().__init__()
    self.norm = keras.Sequential([layers.BatchNormalization()])
    self.dense = [layers.Dense(5), layers.Dense(3)]

  def call(self, x, training=False):
    return self.dense[1](self.norm(self.dense[0](x), training=False))


def testANormCalledAsInEvaluationKeepsItsAverages():
  def Make():
    model = Frozen()
    model(X)
    return model

  keras_fits.CheckFit(Make, X, Y, _Squares, ((2, 3),), batch_size=7)


class _Average(layers.Layer):
  """Adds a moving average, which it has just changed."""

  def build(self, input_shape):
    self.average = self.add_weight(shape=(5,), initializer='zeros', trainable=False)

  def call(self, x, training=False):
    if training:
      self.average.assign(0.9 * self.average + 0.1 * ops.mean(x, 0))
    return x + self.average


def testStateThatIsReadAfterAChangeLetsNoGradientThrough():
  keras_fits.CheckFit(lambda: _With(_Average()), X, Y, _Squares, ((2, 1),), batch_size=7)


# ---- dropout -------------------------------------------------------------------------------------


class _Predictions(keras.metrics.Metric):
  """Keeps the predictions of the last batch."""

  def __init__(self, shape):
    super().__init__(name='predictions')
    self.last = self.add_variable(shape=shape, initializer='zeros', name='last')

  def update_state(self, y_true, y_pred, sample_weight=None):
    self.last.assign(y_pred)

  def result(self):
    return 0.0


WIDTH, RATE = 20, 0.1


def _Dropouts():
  """Returns a model of ones: its outputs in training are the masks of six dropouts, times two."""
  x = inputs = keras.Input([5])
  masked = []
  for _ in range(3):
    x = layers.Dense(WIDTH, kernel_initializer='zeros', bias_initializer='ones')(x)
    masked += [layers.Dropout(0.5)(x), layers.Dropout(0.5)(x)]
  return keras.Model(inputs, layers.Concatenate()(masked))


def _Masks(num_stages, **options):
  """Returns the pipeline, masks [step, row, dropout, channel] of two steps, and first biases."""
  pipe = keras_fits.Pipe(keras_fits.Seeded(_Dropouts), num_stages, 2, **options)
  x, y = keras_fits.Floats(8, 5), np.zeros([8, 6 * WIDTH], 'float32')
  predictions = _Predictions(y.shape)

  def Mean(y_true, y_pred):
    del y_true
    return ops.mean(y_pred, axis=-1)

  pipe.compile(optimizer=keras.optimizers.SGD(RATE), loss=Mean, metrics=[predictions])
  masks, weights = [], []
  for _ in range(2):
    pipe.train_on_batch(x, y)
    weights.append(pipe.get_weights())
    masks.append(predictions.last.numpy().reshape([8, 6, WIDTH]) != 0)
  return pipe, np.array(masks), [w for w in weights[0] if w.ndim == 1]


def testDropoutDependsOnStepAndMicroBatchAlone():
  """Backward uses the masks of forward."""
  pipe, masks, _ = _Masks(1)
  np.testing.assert_array_equal(pipe.predict(keras_fits.Floats(8, 5), verbose=0) > 0.5, True)
  pieces = [masks[step, rows] for step in (0, 1) for rows in (slice(0, 4), slice(4, 8))]
  parts = [piece[:, i].ravel() for piece in pieces for i in range(6)]
  assert len({part.tobytes() for part in parts}) == 24
  # Independent masks agree in half of the places.
  agreement = [np.mean(a == b) for i, a in enumerate(parts) for b in parts[:i]]
  assert 0.2 < min(agreement) and max(agreement) < 0.8
  for options in (
    {'num_stages': 2, 'schedule': '1f1b', 'splits': [1, 3], 'remat_policy': 'layer'},
    {'num_stages': 2, 'schedule': 'zb_h1', 'splits': [2, 3], 'remat_policy': 'none'},
  ):
    _, same, biases = _Masks(**options)
    np.testing.assert_array_equal(same, masks)
    # The gradient of a bias is the number of its outputs that are not masked.
    for i, bias in enumerate(biases):
      gradient = 2 * masks[0][:, 2 * i : 2 * i + 2].sum((0, 1)) / (8 * 6 * WIDTH)
      np.testing.assert_allclose((1 - bias) / RATE, gradient, rtol=1e-3, atol=1e-5)


class _Block(layers.Layer):
  """Layers in a layer that does not pass on the mode."""

  def __init__(self):
    super().__init__()
    self.dense = layers.Dense(5)
    self.parts = keras.Sequential([layers.Dropout(0.5), layers.BatchNormalization()])

  def call(self, x):
    return self.parts(self.dense(x))


def _Blocks():
  x = inputs = keras.Input([5])
  return keras.Model(inputs, layers.Dense(3)(_Block()(_Block()(x))))


def testTrainingReachesNestedLayers():
  pipe = _Compiled(_Blocks, 2, 2)
  norm = pipe.model.layers[2].parts.layers[1]
  losses = [pipe.train_on_batch(X, Y)]
  mean = norm.moving_mean.numpy()
  assert np.all(mean != 0)
  pipe.optimizer.learning_rate.assign(0.0)
  losses += [pipe.train_on_batch(X, Y) for _ in range(2)]
  assert losses[1] != losses[2]
  mean = norm.moving_mean.numpy()
  evaluated = [pipe.test_on_batch(X, Y) for _ in range(2)]
  assert evaluated[0] == evaluated[1]
  np.testing.assert_array_equal(norm.moving_mean, mean)
  np.testing.assert_allclose(pipe.predict(X, verbose=0), pipe.model(X), rtol=1e-4, atol=1e-5)


class _Noise(layers.Layer):
  """Returns noise in place of its inputs, in evaluation, too, as a variational autoencoder does."""

  def __init__(self, generator):
    super().__init__()
    self.generator = generator

  def call(self, x):
    return keras.random.normal(ops.shape(x), seed=self.generator)


def testRandomNumbersDifferInEachCallAndMicroBatch():
  """The layer has a generator, or uses Keras's."""

  def Make():
    x = inputs = keras.Input([5])
    x = layers.Dense(5)(x)
    noises = {'a': _Noise(keras.random.SeedGenerator(1)), 'b': _Noise(None)}
    return keras.Model(inputs, {k: layers.Dense(3, name=k)(v(x)) for k, v in noises.items()})

  pipe = _Compiled(Make, 2, 2)
  y = dict.fromkeys('ab', Y)
  outputs = [pipe.predict(X, verbose=0) for _ in range(2)]
  for name in 'ab':
    values = np.concatenate([of_call[name] for of_call in outputs])
    assert len(np.unique(values)) == values.size
  pipe.optimizer.learning_rate.assign(0.0)
  for run in (pipe.train_on_batch, pipe.test_on_batch):
    results = [run(X, y, return_dict=True) for _ in range(3)]
    for name in 'ab':
      assert len({float(result[f'{name}_loss']) for result in results}) == 3


# ---- masks and precision -------------------------------------------------------------------------


def testMasksTravelBetweenCells():
  """The mask of the first cell counts in the third and in the last."""

  def Make(mask_zero=True):
    inputs = keras.Input([6], dtype='int32')
    x = layers.Embedding(9, 4, mask_zero=mask_zero)(inputs)
    x = layers.Dense(4, activation='tanh')(x)
    x = layers.LSTM(4, return_sequences=True)(x)
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))

  ids = keras_fits.PaddedIds(7)
  ids[:, 0] = 1
  options = {'splits': [1, 2, 3, 4]}
  model, pipe = keras_fits.Seeded(Make), keras_fits.Pipe(keras_fits.Seeded(Make), 4, **options)
  actual, expected = (keras_fits.Fit(m, ids, Y, _Squares, epochs=1) for m in (pipe, model))
  keras_fits.CheckEqual(actual, expected)
  without = Make(mask_zero=False)
  without.set_weights(pipe.get_weights())
  assert np.max(np.abs(pipe.predict(ids, verbose=0) - without(ids))) > 1e-3


@pytest.fixture(params=['bfloat16', 'float16'])
def dtype(request):
  yield request.param
  keras.config.set_dtype_policy('float32')


def testMixedPrecision(dtype):
  def Make():
    keras.config.set_dtype_policy(f'mixed_{dtype}')
    return keras_fits.Mlp()

  expected = keras_fits.Fit(keras_fits.Seeded(Make), X, Y, _Squares)
  pipe = keras_fits.Pipe(keras_fits.Seeded(Make), 2, 2)
  keras_fits.CheckEqual(keras_fits.Fit(pipe, X, Y, _Squares), expected, bound=2e-2)
  assert {v.dtype for v in pipe.weights} == {'float32'}
  assert pipe.predict(X, verbose=0).dtype == dtype
  is_scaled = isinstance(pipe.optimizer, keras.optimizers.LossScaleOptimizer)
  assert is_scaled == (dtype == 'float16')


@pytest.mark.parametrize('scales', [True, False])
def testTheLossIsScaledIfTheUserWantsIt(scales):
  policy = keras.DTypePolicy('mixed_float16')
  layer = layers.Dense(3, dtype=policy)
  model = keras.Sequential([keras.Input([5]), layer])
  model.dtype_policy = policy
  pipe = keras_fits.Pipe(model, 1)
  pipe.compile(optimizer=keras_fits.Sgd(), auto_scale_loss=scales, **_Squares())
  assert isinstance(pipe.optimizer, keras.optimizers.LossScaleOptimizer) == scales
  assert pipe.optimizer is model.optimizer


# ---- gradients that layers define ----------------------------------------------------------------


class _Recomputing(layers.Layer):
  """Recomputes a product by a function of TensorFlow or Keras."""

  def __init__(self, recompute, **options):
    super().__init__(**options)
    self.recompute = recompute

  def build(self, input_shape):
    self.kernel = self.add_weight(shape=(5, 5), name='kernel')

  def call(self, x):
    return self.recompute(lambda x: ops.tanh(ops.matmul(x, self.kernel)))(x)

  def compute_output_shape(self, input_shape):
    return input_shape


_POLICIES = [
  {},
  {'schedule': 'gpipe'},
  {'schedule': '1f1b', 'remat_policy': 'layer'},
  {'schedule': 'zb_h1', 'remat_policy': 'none'},
]


def _InScope():
  """Returns a model whose first layers plain Keras recomputes."""
  with keras.RematScope(mode='full'):
    blocks = [layers.Dense(5, activation='tanh') for _ in range(2)]
  return keras.Sequential([keras.Input([5]), *blocks, layers.Dense(3)])


def _RecomputingBlocks(recompute):
  return keras.Sequential([keras.Input([5]), *[_Recomputing(recompute) for _ in range(2)]])


def _RecomputingByKeras():
  return _RecomputingBlocks(keras.remat)


@functools.cache
def _FitByKeras(make):
  y = keras_fits.Floats(7, make().output_shape[-1])
  return y, keras_fits.Fit(keras_fits.Seeded(make), X, y, _Squares, batch_size=7)


@pytest.mark.parametrize(
  ('make', 'options'),
  [
    (_InScope, _POLICIES[1]),
    (_InScope, _POLICIES[3]),
    (_RecomputingByKeras, _POLICIES[2]),
  ],
)
def testRecomputationByKerasKeepsTheGradients(make, options):
  """Otherwise the weights would not be trained."""
  y, expected = _FitByKeras(make)
  pipe = keras_fits.Pipe(keras_fits.Seeded(make), 2, 2, **options)
  keras_fits.CheckEqual(keras_fits.Fit(pipe, X, y, _Squares, batch_size=7), expected)


class _FromOutside(layers.Layer):
  """Has a custom gradient that leaves its weight out of its arguments."""

  def build(self, input_shape):
    self.kernel = self.add_weight(shape=(5, 5), name='kernel')

  def call(self, x):
    @tf.custom_gradient
    def Product(x):
      kernel = tf.convert_to_tensor(self.kernel)

      def Gradient(dy, variables=None):
        dx = tf.matmul(dy, kernel, transpose_b=True)
        return (dx, [tf.matmul(x, dy, transpose_a=True)]) if variables else dx

      return tf.matmul(x, kernel), Gradient

    return Product(x)


class _Traced(layers.Layer):
  """Has a function that is traced when the model is made, for any number of examples."""

  def build(self, input_shape):
    self.kernel = self.add_weight(shape=(5, 5), name='kernel')

  @tf.function
  def Product(self, x):
    return tf.matmul(x, tf.convert_to_tensor(self.kernel))

  def call(self, x):
    return self.Product(x)


@pytest.mark.parametrize('options', _POLICIES, ids=str)
@pytest.mark.parametrize(
  'make, reason',
  [
    (lambda: _Recomputing(tf.recompute_grad), 'remat_policy'),
    (_FromOutside, 'argument of the function'),
    (_Traced, 'tf.function'),
  ],
  ids=['recompute_grad', 'custom_gradient', 'function'],
)
def testWeightsWithoutTheirGradientAreRefused(make, reason, options):
  """They would not be trained."""
  pipe = _Compiled(lambda: _With(make()), 2, 2, **options)
  path = pipe.model.layers[1].kernel.path
  with pytest.raises(ValueError, match=naming.Naming(path, reason)):
    pipe.train_on_batch(X, Y)


# ---- refusals ------------------------------------------------------------------------------------


class _Doubling(layers.Layer):
  """Assigns its trained weight."""

  def build(self, input_shape):
    self.scale = self.add_weight(shape=(), initializer='ones', name='scale')

  def call(self, x):
    self.scale.assign(2 * self.scale)
    return x * self.scale


class _Tracked(layers.Layer):
  """Has a metric."""

  def __init__(self):
    super().__init__(name='tracked')
    self.size = keras.metrics.Mean(name='size')

  def call(self, x):
    self.size.update_state(ops.mean(ops.square(x)))
    return x


def _With(layer):
  return keras.Sequential([keras.Input([5]), layers.Dense(5), layer, layers.Dense(3)])


def testCallsThatChangeTrainedWeightsAreRefused():
  for make in (_Doubling, lambda: layers.SpectralNormalization(layers.Dense(5))):
    pipe = _Compiled(lambda make=make: _With(make()))
    weight = pipe.model.layers[1].trainable_variables[0]
    with pytest.raises(ValueError, match=naming.Naming('trained', weight.path)):
      pipe.train_on_batch(X, Y)


def testLayersWithMetricsAreRefused():
  with pytest.raises(ValueError, match=naming.Naming('tracked', 'metrics', 'compile')):
    _Compiled(lambda: _With(_Tracked())).train_on_batch(X, Y)


class _Counting(layers.Layer):
  """Changes a variable that it does not track."""

  def __init__(self, variable):
    super().__init__()
    self.variable = lambda: variable

  def call(self, x):
    self.variable().assign_add(1.0)
    return x * self.variable()


def testACallThatChangesAVariableOutsideItsLayersIsRefused():
  """A pipeline would lose the change."""
  variable = keras.Variable(0.0, trainable=False, name='outside')
  pipe = _Compiled(lambda: _With(_Counting(variable)))
  with pytest.raises(ValueError, match=naming.Naming(variable.path, '_Counting', 'add_weight')):
    pipe.train_on_batch(X, Y)


class _Steps(layers.Layer):
  """Counts the calls in training."""

  def __init__(self):
    super().__init__()
    self.steps = self.add_weight(shape=(), initializer='zeros', trainable=False, name='steps')

  def call(self, x):
    self.steps.assign_add(1.0)
    return x


class _Growing(layers.Layer):
  """Multiplies by the count of another layer, or only tracks it."""

  def __init__(self, steps, reads=True):
    super().__init__()
    self.steps = steps
    self.reads = reads

  def call(self, x):
    return x * self.steps.steps if self.reads else x + 0.0


def _WithDense(*following):
  """Returns a model that has a Dense before each of the layers."""
  blocks = [layer for x in following for layer in (layers.Dense(5), x)]
  return keras.Sequential([keras.Input([5]), *blocks, layers.Dense(3)])


def testACallThatReadsStateAfterAChangeIsRefused():
  """It would read the state of the previous step."""

  def Make(num_counts, reads=True):
    counts = [_Steps() for _ in range(num_counts)]
    return _WithDense(*counts, _Growing(counts[-1], reads))

  for num_counts in (1, 2):  # Two equal cells share the trace of the first.
    pipe = _Compiled(lambda n=num_counts: Make(n))
    with pytest.raises(ValueError, match=naming.Naming('steps', 'step before')):
      pipe.train_on_batch(X, Y)
  keras_fits.CheckFit(lambda: Make(1, reads=False), X, Y, _Squares, batch_size=7)


def testACallThatChangesStateOfAnEarlierCellIsRefused():
  def Make():
    steps = _Steps()
    return _WithDense(_Growing(steps), steps)

  with pytest.raises(ValueError, match=naming.Naming("another cell's", 'steps')):
    _Compiled(Make).train_on_batch(X, Y)


class _Reading(layers.Layer):
  """Multiplies by a weight of another layer, which it does not track."""

  def __init__(self, variable):
    super().__init__(name='reading')
    self.variable = lambda: variable

  def call(self, x):
    return ops.matmul(x, ops.transpose(self.variable()))


def testACallThatReadsAWeightOfAnotherLayerIsRefused():
  """A pipeline would lose the gradient."""

  def Make(make_head):
    inputs = keras.Input([5])
    first = layers.Dense(4, name='first')
    x = layers.Dense(4)(first(inputs))
    return keras.Model(inputs, make_head(first, x))

  pipe = _Compiled(lambda: Make(lambda first, x: _Reading(first.kernel)(x)))
  with pytest.raises(ValueError, match=naming.Naming('first/kernel', 'keras.ops')):
    pipe.train_on_batch(X, X)

  def Head(first, x):
    return ops.matmul(x, ops.transpose(first.kernel))

  keras_fits.CheckFit(lambda: Make(Head), X, X, _Squares, ((2, 1),))


# ---- traces --------------------------------------------------------------------------------------


def _NumTraces(activations):
  """Returns the number of traces of a step with four stages, a block for each activation."""

  def Make():
    x = inputs = keras.Input([5])
    for activation in activations:
      x = layers.Add()([x, layers.Dense(5, activation=activation)(x)])
    return keras.Model(inputs, x)

  num_blocks = len(activations)
  pipe = _Compiled(Make, 4, splits=[num_blocks * (k + 1) // 4 for k in range(4)])
  pipe.train_on_batch(X, X)
  return pipe.stack.engine.functions.num_traces


def testStagesOfEqualBlocksShareTheirTraces():
  """Only the first stage, which needs no gradient of its inputs, and the last have others."""
  # Forward and backward of each kind of stage; the last one has both in one trace.
  assert _NumTraces(['tanh'] * 8) == 5
  assert _NumTraces(['tanh', 'relu', 'elu', 'gelu']) == 7


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
