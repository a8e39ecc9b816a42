# SPDX-License-Identifier: Apache-2.0
"""`PipelinedModel` is used as a keras.Model, and gives the results of the plain model."""

import functools
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from lingvo_gpipe import PipelinedModel
from lingvo_gpipe.layers.keras import keras_variables
from tests import naming
from tests.toys import keras_fits, keras_layers

METRICS = keras.metrics
X, Y = keras_fits.Floats(22, 5), keras_fits.Floats(22, 3, seed=1)
CLASSES, ONE_HOT = keras_fits.Classes(22, 3)


# For the tests whose graphs differ most; the optimiser takes a fifth of the time of tracing.
optimised = pytest.mark.optimized_graphs


def _Squares():
  return {'loss': 'mse', 'metrics': ['mae']}


def _Softmax():
  return keras_fits.Mlp(activation='softmax')


def _Adam():
  return keras.optimizers.Adam(0.01, epsilon=1e-3)


def _ScaledAdam():
  return keras.optimizers.LossScaleOptimizer(_Adam(), initial_scale=4.0, dynamic_growth_steps=3)


def _Made(make=keras_fits.Mlp, num_stages=2, num_micro_batches=2, optimizer=_Adam, **options):
  """Returns a compiled PipelinedModel."""
  pipe = keras_fits.Pipe(keras_fits.Seeded(make), num_stages, num_micro_batches, **options)
  pipe.compile(optimizer=optimizer(), **_Squares())
  return pipe


class _Largest(METRICS.Metric):
  """The largest prediction of the last batch, which no sum over micro-batches gives."""

  def __init__(self, name='largest'):
    super().__init__(name=name)
    self.largest = self.add_variable(shape=(), initializer='zeros', name='largest')

  def update_state(self, y_true, y_pred, sample_weight=None):
    self.largest.assign(ops.max(y_pred))

  def result(self):
    return self.largest


def _ErrorOfMeans(y_true, y_pred):
  return ops.abs(ops.mean(y_true) - ops.mean(y_pred))


# ---- fit -----------------------------------------------------------------------------------------


@optimised
def testHistoryAndWeightsEqualKeras(caplog):
  """Micro-batches have four and three rows, and two and one at the end of an epoch."""
  keras_fits.CheckFit(
    _Softmax,
    X[:10],
    ONE_HOT[:10],
    lambda: {
      'loss': 'categorical_crossentropy',
      'metrics': [
        'accuracy',
        METRICS.AUC(name='auc'),
        METRICS.Precision(name='precision'),
        METRICS.OneHotMeanIoU(num_classes=3, name='iou'),
      ],
    },
    optimizer=_Adam,
    batch_size=7,
  )
  assert not caplog.messages  # TensorFlow warns of many traces.


def testMetricsOfUsersSeeAllPredictions():
  keras_fits.CheckFit(
    keras_fits.Mlp,
    X[:10],
    Y[:10],
    lambda: {'loss': 'mse', 'metrics': [_Largest(), _ErrorOfMeans, 'mae']},
    batch_size=5,
  )


class _Batches(keras.utils.PyDataset):
  """Batches of inputs, targets and weights."""

  def __len__(self):
    return 3

  def __getitem__(self, index):
    rows = slice(6 * index, 6 * index + 6)
    return X[rows], Y[rows], np.abs(X[rows, 0])


def _Generator():
  while True:
    yield from (_Batches()[i] for i in range(3))


def _Dataset():
  return tf.data.Dataset.from_generator(
    lambda: (_Batches()[i] for i in range(3)),
    output_signature=tuple(tf.TensorSpec([None, *shape], tf.float32) for shape in ([5], [3], [])),
  )


@functools.cache
def _FitOfArrays():
  """Returns the result of plain Keras with the data of `_Batches`."""
  options = {'sample_weight': np.abs(X[:18, 0]), 'batch_size': 6}
  return keras_fits.Fit(keras_fits.Seeded(keras_fits.Mlp), X[:18], Y[:18], _Squares, **options)


@pytest.mark.parametrize(
  'make_data, options',
  [(_Dataset, {}), (_Generator, {'steps_per_epoch': 3}), (_Batches, {})],
  ids=['dataset', 'generator', 'PyDataset'],
)
def testEachSourceOfDataTrainsEqually(make_data, options):
  """Most other tests have arrays."""
  pipe = keras_fits.Pipe(keras_fits.Seeded(keras_fits.Mlp), 2)
  actual = keras_fits.Fit(pipe, make_data(), None, _Squares, **options)
  keras_fits.CheckEqual(actual, _FitOfArrays())


@optimised
@pytest.mark.parametrize(
  'options',
  [
    {'validation_split': 0.25, 'batch_size': 4, 'class_weight': {0: 0.3, 1: 2.0, 2: 1.0}},
    {
      'validation_data': (X[:7], Y[:7], np.abs(X[:7, 0])),
      'validation_batch_size': 4,
      'initial_epoch': 1,
    },
  ],
  ids=lambda options: next(iter(options)),
)
def testFitTakesTheOptionsOfKeras(options):
  def Compiled():
    return {
      'loss': 'sparse_categorical_crossentropy',
      'metrics': ['accuracy'],
      'weighted_metrics': ['accuracy'],
    }

  if 'validation_data' in options:
    x, _, weights = options['validation_data']
    options = {**options, 'validation_data': (x, CLASSES[:7], weights)}
  keras_fits.CheckFit(_Softmax, X[:16], CLASSES[:16], Compiled, **options)


def testSeveralStepsPerExecution():
  """The second execution of an epoch has two steps instead of three."""

  def Compiled():
    return {**_Squares(), 'steps_per_execution': 3}

  keras_fits.CheckFit(keras_fits.Mlp, X[:20], Y[:20], Compiled, batch_size=4)


# ---- single batches, evaluate, predict -----------------------------------------------------------


def testMethodsForSingleBatchesEqualKeras():
  model = keras_fits.Seeded(keras_fits.Mlp)
  model.compile(optimizer=_Adam(), run_eagerly=True, **_Squares())
  pipe = _Made()
  weights = np.abs(X[:6, 0])
  for method in ('train_on_batch', 'test_on_batch'):
    actual, expected = (
      getattr(m, method)(X[:6], Y[:6], sample_weight=weights, return_dict=True)
      for m in (pipe, model)
    )
    assert actual == pytest.approx(expected, rel=1e-5)
  np.testing.assert_allclose(pipe.predict_on_batch(X), model.predict_on_batch(X), rtol=1e-4)


@optimised
def testEvaluateAndPredict():
  """Without training, and with a last batch of one row for four micro-batches."""
  model = keras_fits.Seeded(keras_fits.TwoOutputs)
  pipe = keras_fits.Pipe(keras_fits.Seeded(keras_fits.TwoOutputs), 2, 4)
  model.compile(run_eagerly=True)
  actual = pipe.predict(X[:9], batch_size=4, verbose=0)  # It has not been compiled.
  expected = model.predict(X[:9], batch_size=4, verbose=0)
  assert actual.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(actual[name], value, rtol=1e-5, atol=1e-6)
  for m in (model, pipe):
    m.compile(loss='mse', weighted_metrics={'a': ['mae']}, run_eagerly=m is model)
  y = {'a': Y[:8], 'b': X[:8, :2]}
  results = [m.evaluate(X[:8], y, batch_size=4, verbose=0, return_dict=True) for m in (model, pipe)]
  assert results[1] == pytest.approx(results[0], rel=1e-5)


# ---- weights and files ---------------------------------------------------------------------------


def testVariablesDoNotMoveBeforeTheFirstBatch():
  model = keras_fits.Seeded(keras_fits.Mlp)
  before = [v.value for v in model.weights]
  pipe = keras_fits.Pipe(model, 3)
  pipe.compile(optimizer=_Adam(), **_Squares())
  assert pipe.stack is None
  assert all(v.value is b for v, b in zip(model.weights, before, strict=True))
  pipe.train_on_batch(X, Y)
  names = [tf.DeviceSpec.from_string(v.value.device).device_index for v in model.weights]
  assert names == [0, 0, 1, 1, 2, 2]
  slots = [v for v in pipe.optimizer.variables if 'momentum' in v.path]
  assert [v.value.device for v in slots] == [v.value.device for v in model.weights]


def testSavedModelsAreThePlainCompiledModel(tmp_path):
  """With two optimizers, one of which wraps the other."""
  x, y = X[:12], Y[:12]
  pipe = _Made(optimizer=_ScaledAdam)
  pipe.fit(x, y, batch_size=6, epochs=2, shuffle=False, verbose=0)
  path = str(tmp_path / 'model.keras')
  pipe.save(path)
  model = keras.models.load_model(path)
  assert type(model) is type(pipe.model)
  assert model.optimizer.iterations == pipe.optimizer.iterations == 4
  for a, b in zip(model.optimizer.variables, pipe.optimizer.variables, strict=True):
    np.testing.assert_array_equal(a, b)
  expected = pipe.evaluate(x, y, verbose=0)
  model.run_eagerly = True  # Tracing plain Keras takes longer than a batch.
  assert model.evaluate(x, y, verbose=0) == pytest.approx(expected, rel=1e-5)
  model.run_eagerly = False
  # It continues on other stages as if it had not been interrupted.
  pipe.fit(x, y, batch_size=6, shuffle=False, verbose=0)
  again = keras_fits.Pipe(model, 3)
  again.fit(x, y, batch_size=6, shuffle=False, verbose=0)
  for a, b in zip(again.get_weights(), pipe.get_weights(), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def _Tied():
  """Returns a model whose embedding is also its output matrix."""
  inputs = keras.Input([6], dtype='int32')
  embedding = layers.ReversibleEmbedding(9, 4, tie_weights=True)
  x = layers.Dense(4, activation='tanh')(embedding(inputs))
  return keras.Model(inputs, embedding(layers.Dense(4)(x), reverse=True))


@optimised
def testSetWeightsReachesTiedWeights():
  ids, y = keras_fits.PaddedIds(6), keras_fits.Floats(6, 6, 9)
  model = keras_fits.Seeded(_Tied)
  pipe = _Made(_Tied, num_stages=3, optimizer=keras_fits.Sgd)
  model.compile(optimizer=keras_fits.Sgd(), run_eagerly=True, **_Squares())
  for seed in (1, 2):
    weights = [keras_fits.Floats(*w.shape, seed=seed) for w in model.get_weights()]
    model.set_weights(weights)
    pipe.set_weights(weights)
    assert pipe.test_on_batch(ids, y) == pytest.approx(model.test_on_batch(ids, y), rel=1e-5)
    np.testing.assert_allclose(pipe.predict(ids, verbose=0), model(ids), rtol=1e-4, atol=1e-5)
    assert pipe.train_on_batch(ids, y) == pytest.approx(model.train_on_batch(ids, y), rel=1e-5)
    for a, b in zip(pipe.get_weights(), model.get_weights(), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def testTrainableMayChange():
  """Each time all weights of a stage are frozen."""
  pipe = _Made(num_micro_batches=1, splits=[1, 3])
  first, second, third = (x for x in pipe.model.layers if x.weights)
  for frozen in ([first], [second, third]):
    for layer in (first, second, third):
      layer.trainable = layer not in frozen
    pipe.compile(optimizer=_Adam(), **_Squares())
    before = {x: x.kernel.numpy() for x in (first, second, third)}
    pipe.train_on_batch(X, Y)
    same = [x for x, kernel in before.items() if np.array_equal(kernel, x.kernel.numpy())]
    assert same == frozen


def testAPipelineContinuesWithABuiltOptimizer():
  """Plain steps, then steps of a pipeline, with one optimizer."""
  model, mixed = (keras_fits.Seeded(keras_fits.Mlp) for _ in range(2))
  for m in (model, mixed):
    m.compile(optimizer=_Adam(), run_eagerly=True, **_Squares())
    m.train_on_batch(X, Y)
  pipe = keras_fits.Pipe(mixed, 2)
  pipe.compile(optimizer=mixed.optimizer, **_Squares())
  for _ in range(2):
    pipe.train_on_batch(X, Y)
    model.train_on_batch(X, Y)
  for a, b in zip(mixed.get_weights(), model.get_weights(), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
  assert {v.value.device for v in mixed.optimizer.variables if 'momentum' in v.path} == {
    v.value.device for v in mixed.weights
  }


# ---- the rest of the interface -------------------------------------------------------------------


def testXlaAndEagerStepsEqualKeras():
  model = keras_fits.Seeded(keras_fits.Mlp)
  model.compile(optimizer=_Adam(), run_eagerly=True, **_Squares())
  expected = model.train_on_batch(X, Y)
  assert _Made(xla=True).train_on_batch(X, Y) == pytest.approx(expected, rel=1e-5)
  pipe = _Made()
  pipe.compile(optimizer=_Adam(), run_eagerly=True, **_Squares())
  assert pipe.train_on_batch(X, Y) == pytest.approx(expected, rel=1e-5)


def testWrongModelsAreRefused():
  class Stepping(keras.Model):
    def train_step(self, data):
      return {}

  with pytest.raises(ValueError, match=naming.Naming('Stepping', 'train_step')):
    PipelinedModel(Stepping(), 1, devices=['/cpu:0'])
  model = keras_fits.Mlp()
  model.own = METRICS.Mean('own')
  with pytest.raises(ValueError, match=naming.Naming('own', 'compile')):
    PipelinedModel(model, 1, devices=['/cpu:0']).compile(loss='mse')
  with pytest.raises(TypeError, match=naming.Naming('keras.Model', 'Dense')):
    PipelinedModel(layers.Dense(3), 1, devices=['/cpu:0'])
  with pytest.raises(ValueError, match=naming.Naming(3, 4, 'dense', 'dense_1', 'dense_2')):
    _Made(num_stages=4).train_on_batch(X, Y)


@pytest.mark.parametrize('name', ['fit', 'predict', 'train_on_batch', 'metrics', '__call__'])
def testOverridesThatAPipelineWouldNotCallAreRefused(name):
  """Overrides of the class, and of the object, set before or after the model is wrapped."""
  model = type('Own', (keras.Sequential,), {name: lambda self: None})
  with pytest.raises(ValueError, match=naming.Naming('Own', name)):
    PipelinedModel(object.__new__(model), 1, devices=['/cpu:0'])
  model = keras_fits.Mlp()
  pipe = PipelinedModel(model, 1, devices=['/cpu:0'])
  model.compute_loss = lambda *args: 0
  with pytest.raises(ValueError, match=naming.Naming('compute_loss')):
    pipe.compile(loss='mse')
  with pytest.raises(ValueError, match=naming.Naming('compute_loss')):
    PipelinedModel(model, 1, devices=['/cpu:0'])


def testLossesAreTheModels():
  """A custom loop of the user needs them."""
  inputs = keras.Input([5])
  model = keras.Model(inputs, layers.Dense(3, kernel_regularizer='l2')(inputs))
  pipe = keras_fits.Pipe(model, 1)
  pipe.compile(loss='mse')
  assert float(sum(pipe.losses)) == pytest.approx(float(sum(model.losses)))
  expected = pipe.evaluate(X, Y, verbose=0)
  assert float(pipe.compute_loss(X, Y, pipe(X))) == pytest.approx(expected, rel=1e-5)


def testFunctionsOfModelsThatShareLayersFollowTheVariables():
  """A user's function that was traced before does not silently read the old places."""
  model = keras_fits.Mlp()
  encoder = keras.Model(model.inputs, model.layers[-2].output)
  outer = keras.Sequential([model, layers.Softmax()])
  call = tf.function(model)
  for function in (encoder.predict, outer.predict, model.predict):
    function(X, verbose=0)
  call(tf.constant(X))
  pipe = keras_fits.Pipe(model, 2)
  pipe.compile(loss='mse', optimizer=keras_fits.Sgd())
  pipe.fit(X, Y, verbose=0)
  for other in (encoder, outer):
    np.testing.assert_allclose(other.predict(X, verbose=0), other(X), rtol=1e-5, atol=1e-6)
  with pytest.raises(tf.errors.OpError):
    call(tf.constant(X))


def testTrainableDoesNotChangeWhenAnotherPipelineMovesTheVariables():
  model = keras_fits.Mlp()
  pipe, other = keras_fits.Pipe(model, 2), keras_fits.Pipe(model, 1)
  pipe.compile(loss='mse', optimizer=keras_fits.Sgd())
  pipe.train_on_batch(X, Y)
  model.layers[-1].trainable = False
  pipe.train_on_batch(X, Y)  # As in Keras, a change counts after compile().
  other.predict(X, verbose=0)
  with pytest.raises(ValueError, match=naming.Naming('trainable', model.layers[-1].kernel.path)):
    pipe.train_on_batch(X, Y)
  pipe.compile(loss='mse', optimizer=keras_fits.Sgd())
  before = model.layers[-1].kernel.numpy()
  pipe.train_on_batch(X, Y)
  np.testing.assert_array_equal(model.layers[-1].kernel.numpy(), before)


@pytest.mark.parametrize('num_micro_batches', [1, 2])
def testLabelsOfAnotherBatchSizeAreRefused(num_micro_batches):
  pipe = keras_fits.Pipe(keras_fits.Mlp(), 2, num_micro_batches)
  pipe.compile(loss='mse')
  with pytest.raises(ValueError, match=naming.Naming(1, 4, 'y')):
    pipe.fit(tf.data.Dataset.from_tensors((X[:4], Y[:1])), verbose=0)


def testACallbackMayStopTheModel():
  model = keras_fits.Mlp()
  pipe = keras_fits.Pipe(model, 1)
  pipe.compile(loss='mse')
  stop = keras.callbacks.LambdaCallback(
    on_epoch_end=lambda epoch, logs: setattr(model, 'stop_training', True)
  )
  for _ in range(2):  # The next `fit` begins without.
    assert len(pipe.fit(X, Y, epochs=3, verbose=0, callbacks=[stop]).epoch) == 1


def testFloat8IsRefused():
  """The gradients of its scales are their next values, which micro-batches would add up."""
  model = keras_fits.Mlp()
  for layer in model.layers:
    if isinstance(layer, layers.Dense):
      layer.quantize('float8')
  pipe = PipelinedModel(model, 2, num_micro_batches=2)
  pipe.compile(optimizer=_Adam(), **_Squares())
  with pytest.raises(ValueError, match=naming.Naming('its next value', 'float8')):
    pipe.train_on_batch(X, Y)


def testLoraOnQuantizedWeights():
  """`tools.keras_models` compares GPT-2."""

  def Make():
    model = keras_fits.Mlp(depth=1)
    for layer in model.layers[1:]:
      layer.quantize('int8')
      layer.enable_lora(2)
      layer.lora_kernel_b.assign(0.1 * keras.ops.ones_like(layer.lora_kernel_b))  # From 0.
    return model

  keras_fits.CheckFit(Make, X, Y, _Squares, epochs=1)


def testAMetricOfAnotherModelIsResetFirst():
  metric = METRICS.MeanAbsoluteError(name='mae')
  metric.update_state(Y, Y + 5.0)
  pipe = _Made()
  pipe.compile(optimizer=_Adam(), loss='mse', metrics=[metric])
  expected = np.abs(Y - pipe.model(X)).mean()
  assert pipe.evaluate(X, Y, verbose=0)[1] == pytest.approx(expected, rel=1e-5)


class Rounds(METRICS.Metric):
  """Counts from 1 to the first reset, then from 0; and counts the resets."""

  def __init__(self, name='rounds'):
    super().__init__(name=name)
    self.batches = self.add_variable(shape=(), initializer='ones', name='batches')
    self.resets = self.add_variable(shape=(), initializer='zeros', name='resets')

  def update_state(self, y_true, y_pred, sample_weight=None):
    self.batches.assign_add(1)

  def result(self):
    return self.batches + 100 * self.resets

  def reset_state(self):
    self.batches.assign(0)
    self.resets.assign_add(1)


def testAMetricBeginsAsItWasMade():
  def Results(model):
    model.compile(optimizer=_Adam(), loss='mse', metrics=[Rounds()], run_eagerly=True)
    return [model.train_on_batch(X, Y, return_dict=True)['rounds'] for _ in range(3)]

  assert Results(_Made()) == Results(keras_fits.Mlp())


def testABatchIsNotTakenForABias():
  """Keras adds [3, 1] to [3, 3] as if it was [3]: to three rows of known number, three channels."""

  def Make():
    inputs = keras.Input([5])
    x = keras.layers.Dense(3)(keras.layers.Dense(5)(inputs))
    return keras.Model(inputs, keras.layers.Add()([x, inputs[:, :1]]))

  def Loss(y, y_pred):
    return keras.ops.mean(keras.ops.add(y_pred, y_pred[:, :1]) ** 2, axis=-1)

  def Compiled():
    return {'loss': Loss, 'metrics': [keras.metrics.MeanMetricWrapper(Loss, name='metric')]}

  keras_fits.CheckFit(Make, X[:12], Y[:12], Compiled, batch_size=6)


class FirstIsSlow(keras.optimizers.SGD):
  """Depends on the order of the variables."""

  def apply(self, grads, trainable_variables=None):
    super().apply([grads[0] * 0.1, *grads[1:]], trainable_variables)


class FirstIsFast(keras.optimizers.SGD):
  """Depends on the order of the variables; overrides a method that Keras's `train_step` calls."""

  def apply_gradients(self, grads_and_vars):
    (first, variable), *later = grads_and_vars
    return super().apply_gradients([(first * 10.0, variable), *later])


@pytest.mark.parametrize(
  ('optimizer', 'clipped'),
  [
    (FirstIsSlow, {'global_clipnorm': 0.1}),
    (FirstIsFast, {'global_clipnorm': 0.1}),
    (FirstIsFast, {}),
  ],
  ids=['slow', 'fast', 'fast, not clipped'],
)
def testTheOptimizerGetsTheVariablesInKerassOrder(optimizer, clipped):
  """It gets their gradients before these are clipped."""
  model = keras_fits.Seeded(keras_fits.Mlp)
  model.compile(optimizer=optimizer(0.05, **clipped), run_eagerly=True, **_Squares())
  model.train_on_batch(X, Y)
  pipe = _Made(num_micro_batches=1, optimizer=lambda: optimizer(0.05, **clipped))
  pipe.train_on_batch(X, Y)
  for a, b in zip(pipe.get_weights(), model.get_weights(), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
  ('options', 'name'),
  [
    ({'num_stages': 2.0}, 'num_stages'),
    ({'num_stages': 0}, 'num_stages'),
    ({'num_stages': 2, 'num_micro_batches': '4'}, 'num_micro_batches'),
    ({'num_stages': 2, 'xla': 'no'}, 'xla'),
    ({'num_stages': 2, 'stages_per_device': 3, 'schedule': 'looped_bfs'}, 'stages_per_device'),
  ],
)
def testWrongArgumentsAreRefused(options, name):
  with pytest.raises(ValueError, match=name):
    PipelinedModel(keras_fits.Mlp(), **options)


def testAPipelineIsNotWrappedAgain():
  with pytest.raises(TypeError, match=naming.Naming('PipelinedModel', '`model`')):
    PipelinedModel(_Made(), 2)


def testPredictIgnoresLabels():
  ragged = tf.RaggedTensor.from_row_lengths(tf.range(22), [1] * 22)
  data = tf.data.Dataset.from_tensor_slices((X, ragged)).batch(22)
  pipe = _Made()
  np.testing.assert_allclose(pipe.predict(data, verbose=0), pipe.model(X), rtol=1e-5, atol=1e-6)


def testALearningRateMayBeAFunction():
  optimizer = lambda: keras.optimizers.SGD(lambda: 0.1, momentum=0.9)  # noqa: E731
  pipe = _Made(num_micro_batches=1, optimizer=optimizer)
  pipe.train_on_batch(X, Y)
  assert pipe.cut.weights.slots_per_weight == 1


def testTheCutCountsTheSlotsOfTheOptimizer():
  def StateBytes(optimizer):
    pipe = _Made(num_micro_batches=1, optimizer=optimizer)
    pipe.predict(X, verbose=0)
    return sum(stage.state for stage in pipe.cut.memory)

  sizes = [StateBytes(make) for make in (keras_fits.Sgd, keras.optimizers.Lion, _Adam)]
  weight = sizes[1] - sizes[0]
  assert sizes == [2 * weight, 3 * weight, 4 * weight]


def testModelsWithoutWeightsAreRefused():
  pipe = _Made()
  pipe.model.trainable = False
  pipe.compile(optimizer=_Adam(), **_Squares())
  with pytest.raises(ValueError, match=naming.Naming(pipe.model.name, 'weights')):
    pipe.train_on_batch(X, Y)


def testSparseInputsAreRefused():
  sparse = tf.sparse.from_dense(X)
  with pytest.raises(ValueError, match=naming.Naming('SparseTensor')):
    _Made().train_on_batch(sparse, Y)


def testSeedsOfKerasAreNotConsumed():
  """Dropout depends on the step, so a step can be repeated."""
  parts = [layers.Dense(4), layers.Dropout(0.5), layers.Dense(3)]
  pipe = _Made(lambda: keras.Sequential([keras.Input([5]), *parts]), num_micro_batches=1)
  states = [v for v in pipe.model.variables if keras_variables.IsSeed(v)]
  before = [v.numpy() for v in states]
  assert states
  pipe.train_on_batch(X, Y)
  for v, value in zip(states, before, strict=True):
    np.testing.assert_array_equal(v, value)


class _Recurrent(keras.Model):
  """Takes sequences; takes a step of them by their length."""

  def __init__(self, length):
    super().__init__()
    self.rnn = layers.SimpleRNN(4, return_sequences=True)
    self.dense = layers.Dense(3)
    self.length = length

  def call(self, x):
    x = self.rnn(x)
    return self.dense(ops.take(x, self.length(x) - 1, axis=1))


@optimised
def testASubclassedModelTakesSequencesOfEachLength():
  pipe = keras_fits.Pipe(_Recurrent(lambda x: ops.shape(x)[1]), 2, 2)
  for length in (5, 9, 3):
    x = keras_fits.Floats(4, length, 2)
    np.testing.assert_allclose(pipe.predict(x, verbose=0), pipe.model(x), rtol=1e-4, atol=1e-5)


def testALengthThatACallComputesWithIsRefusedIfItChanges():
  """The step of the first length would be taken from all sequences."""
  pipe = keras_fits.Pipe(_Recurrent(lambda x: x.shape[1]), 2)
  x = keras_fits.Floats(4, 5, 2)
  np.testing.assert_allclose(pipe.predict(x, verbose=0), pipe.model(x), rtol=1e-4, atol=1e-5)
  with pytest.raises(ValueError, match=naming.Naming('_Recurrent.call', __file__)):
    pipe.predict(keras_fits.Floats(4, 9, 2), verbose=0)


def testASubclassedModelKeepsTheKindOfItsInputs():
  """Floats are not truncated to the integers of the first batch."""
  pipe = keras_fits.Pipe(_Recurrent(lambda x: ops.shape(x)[1]), 2)
  pipe.predict(np.ones([4, 5, 2], 'int32'), verbose=0)
  with pytest.raises(ValueError, match=naming.Naming('int32', 'float32')):
    pipe.predict(keras_fits.Floats(4, 5, 2), verbose=0)


def testTrainableCountsAtTheFirstStep():
  def Fit(model):
    is_plain = not isinstance(model, PipelinedModel)
    model.compile(optimizer=keras_fits.Sgd(), loss='mse', run_eagerly=is_plain)
    model.evaluate(X, Y, verbose=0)
    model.get_layer('frozen').trainable = False
    model.fit(X, Y, shuffle=False, verbose=0)
    return model.get_weights()

  def Make():
    x = inputs = keras.Input([5])
    x = layers.Dense(4, name='frozen')(x)
    return keras.Model(inputs, layers.Dense(3)(x))

  expected = Fit(keras_fits.Seeded(Make))
  pipe = keras_fits.Pipe(keras_fits.Seeded(Make), 2)
  for a, e in zip(Fit(pipe), expected, strict=True):
    np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)
  assert [x.name for x in pipe.layers] == [x.name for x in pipe.model.layers]
  assert pipe.input_shape == pipe.model.input_shape


@pytest.mark.parametrize('trainable', [False, True])
def testAnUntrackedVariableIsConstantOrRefused(trainable):
  """Keras leaves it constant; one that says it is trained is refused."""
  variable = keras.Variable(np.full([8], 2, 'float32'), trainable=trainable, name='lonely')

  def Make():
    x = inputs = keras.Input([5])
    x = layers.Dense(8)(x) * variable
    return keras.Model(inputs, layers.Dense(3)(x))

  if not trainable:
    keras_fits.CheckFit(Make, X, Y, lambda: {'loss': 'mse'}, ((2, 1),))
    return
  with pytest.raises(ValueError, match=naming.Naming('lonely', 'trainable=False')):
    keras_fits.Pipe(Make(), 2).predict(X, verbose=0)


def testTextVectorizationIsRefused():
  model = keras.Sequential(
    [
      keras.Input([1], dtype='string'),
      layers.TextVectorization(vocabulary=['a', 'b'], output_sequence_length=4),
      layers.Embedding(4, 3),
      layers.Flatten(),
      layers.Dense(2),
    ]
  )
  with pytest.raises(ValueError, match=naming.Naming('text_vectorization', 'dataset.map')):
    keras_fits.Pipe(model, 2).predict(tf.constant([['a b'], ['b']]), verbose=0)


# ---- weights that the loss does not depend on ----------------------------------------------------


def _Branches(stop):
  x = keras.Input([5])
  joined = stop(layers.Dense(8, name='stopped')(x)) + layers.Dense(8)(x)
  return keras.Model(x, layers.Dense(3)(joined))


@pytest.mark.parametrize(
  ('stop', 'num_micro_batches'),
  [(ops.stop_gradient, 2), (keras_layers.StopsGradients(), 1), (ops.floor, 2)],
)
def testWeightsWithoutGradientsAreNotDecayed(stop, num_micro_batches):
  keras_fits.CheckFit(
    lambda: _Branches(stop),
    X,
    Y,
    _Squares,
    ((2, num_micro_batches),),
    optimizer=lambda: keras.optimizers.SGD(0.1, weight_decay=0.1),
  )


# ---- subclassed models ---------------------------------------------------------------------------


class _Unbuilt(keras.Model):
  """Is built by its first batch; `training` defaults to True, and a layer is not called."""

  def __init__(self, **options):
    super().__init__(**options)
    self.normalise = layers.BatchNormalization(momentum=0.5)
    self.dense = layers.Dense(8)
    self.last = layers.Dense(3)

  def call(self, x, training=True):
    return self.last(self.dense(self.normalise(x, training=training)))


def testTheFirstBatchIsSeenOnce():
  """Building a model calls it on symbols, which changes no moving averages."""
  expected = keras_fits.Fit(keras_fits.Seeded(_Unbuilt), X, Y, _Squares)
  pipe = keras_fits.Pipe(keras_fits.Seeded(_Unbuilt), 2)
  keras_fits.CheckEqual(keras_fits.Fit(pipe, X, Y, _Squares), expected, bound=1e-4)


def testAnActivityRegularizerOfTheModelIsRefused():
  pipe = _Made(lambda: _Unbuilt(activity_regularizer='l2', name='net'))
  with pytest.raises(ValueError, match=naming.Naming('net', 'activity')):
    pipe.train_on_batch(X, Y)


def testARegularizerOfAnUnusedWeightIsRefused():
  class Unused(_Unbuilt):
    def __init__(self):
      super().__init__()
      self.unused = layers.Dense(2, kernel_regularizer='l2', name='unused')
      self.unused.build([None, 5])

  with pytest.raises(ValueError, match=naming.Naming('unused/kernel', 'regularizer')):
    _Made(Unused).train_on_batch(X, Y)


# ---- several pipelines of a model ----------------------------------------------------------------


def testEachPipelineHasItsOwnOptimizer():
  model = keras_fits.Seeded(keras_fits.Mlp)
  first, second = (keras_fits.Pipe(model, k) for k in (2, 3))
  optimizers = [keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01)]
  for pipe, optimizer in zip((first, second), optimizers, strict=True):
    pipe.compile(optimizer=optimizer, **_Squares())
  assert [first.optimizer, second.optimizer] == optimizers
  first.fit(X, Y, verbose=0)
  assert [int(o.iterations) for o in optimizers] == [1, 0]
  expected = keras_fits.Fit(keras_fits.Seeded(keras_fits.Mlp), X, Y, _Squares, epochs=1)
  for w, e in zip(model.get_weights(), expected.weights, strict=True):
    np.testing.assert_allclose(w, e, rtol=1e-5, atol=1e-6)


def testSummaryShowsTheStages():
  """They are gone after compiling again, until the next batch."""
  pipe = keras_fits.Pipe(keras_fits.Seeded(keras_fits.Mlp), 2, 2)
  pipe.predict(keras_fits.Floats(4, 5), verbose=0)
  lines = []
  pipe.summary(print_fn=lambda text, **_: lines.append(text))
  assert any(text.startswith('stage 1: ') for text in lines)
  assert 'dense_2' in '\n'.join(lines)
  for end in pipe.cut.ends:
    assert str(end) in '\n'.join(lines)
  pipe.compile(optimizer='sgd', loss='mse')
  lines.clear()
  pipe.summary(print_fn=lambda text, **_: lines.append(text))
  assert lines and not any(text.startswith('stage') for text in lines)


def testOnlyThePlainModelHasAConfiguration():
  pipe = keras_fits.Pipe(keras_fits.Seeded(keras_fits.Mlp), 2, 2)
  with pytest.raises(ValueError, match=naming.Naming('PipelinedModel', '`save`')):
    pipe.get_config()


@optimised
def testAFailedStepNamesItsLayerAndChangesNothing():
  model = keras.Sequential(
    [keras.Input([5]), layers.Dense(4), layers.Dense(4), keras_layers.Guard()]
  )
  pipe = keras_fits.Pipe(model, 2, 2)
  pipe.compile(optimizer='sgd', loss='mse')
  x, y = keras_fits.Floats(4, 5), keras_fits.Floats(4, 4, seed=1)
  pipe.train_on_batch(x, y)
  weights = model.get_weights()
  x[3] = 1e6
  with pytest.raises(tf.errors.InvalidArgumentError) as e:
    pipe.train_on_batch(x, y)
  notes = '\n'.join(e.value.__notes__)
  assert 'model.layers[1]' in notes and 'stage 1' in notes and 'micro-batch 1' in notes
  for before, after in zip(weights, model.get_weights(), strict=True):
    np.testing.assert_array_equal(before, after)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
