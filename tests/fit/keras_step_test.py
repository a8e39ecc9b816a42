# SPDX-License-Identifier: Apache-2.0
"""`KerasStep` trains as plain Keras does, with every schedule and every kind of optimizer."""

import functools
import itertools
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.fit import keras_step
from lingvo_gpipe.layers import linear
from lingvo_gpipe.layers.keras import keras_cut, keras_variables
from lingvo_gpipe.pipeline import engine, pipelining_layer
from tests.toys import keras_fits, keras_layers, stacks

OPTIMIZERS = keras.optimizers
X, Y = keras_fits.Floats(6, 5), keras_fits.Floats(6, 3, seed=1)
NUM_STEPS = 3


def _Squares(theta, outputs, labels):
  del theta
  rows = tf.cast(tf.shape(labels)[0], tf.float32)
  return {'loss': (tf.reduce_mean(tf.square(outputs[0] - labels)), rows)}


def _Adam(**options):
  return OPTIMIZERS.Adam(0.01, epsilon=1e-3, **options)


def _Mlp(num_cells=3):
  return keras_fits.Mlp(depth=num_cells - 1)


def _UpdateTwice(optimizer, grads, variables, learning_rate):
  before = [tf.identity(v) for v in variables]
  super(type(optimizer), optimizer)._backend_update_step(grads, variables, learning_rate)
  for v, old in zip(variables, before, strict=True):
    v.assign(2 * v - old)


# An optimizer of a user that works on the weights after they were updated.
DoublesSteps = type('DoublesSteps', (OPTIMIZERS.SGD,), {'_backend_update_step': _UpdateTwice})


@functools.cache
def _Plain(make_optimizer, num_cells):
  """Returns the losses of some steps of plain Keras, and the weights after them."""
  model = keras_fits.Seeded(lambda: _Mlp(num_cells))
  # A few steps take less time than to trace them.
  model.compile(optimizer=make_optimizer(), loss='mse', jit_compile=False, run_eagerly=True)
  return [model.train_on_batch(X, Y) for _ in range(NUM_STEPS)], model.get_weights()


def _Stack(model, num_replicas=1, **options):
  """Returns a placed pipeline of a Keras model."""
  options = {'num_stages': 2, 'num_micro_batches': 4, 'xla': False, **options}
  p = pipelining_layer.PipeliningLayer.Params().Set(name='net', **options)
  stack = p.Set(**keras_cut.Cut(model)).Instantiate()
  num_devices = num_replicas * stack.num_devices
  spec = tf.TensorSpec(X.shape)
  stack.Place(stacks.Devices()[:num_devices], spec, loss_fn=_Squares, num_replicas=num_replicas)
  return stack


def _Check(optimizer, **options):
  """Checks losses and weights against plain Keras."""
  num_cells = max(3, options.get('num_stages', 2))
  losses, weights = _Plain(optimizer, num_cells)
  model = keras_fits.Seeded(lambda: _Mlp(num_cells))
  stack = _Stack(model, **options)
  step = keras_step.KerasStep(stack, optimizer())
  actual = [step((tf.constant(X),), tf.constant(Y))['loss'] for _ in range(NUM_STEPS)]
  np.testing.assert_allclose(actual, losses, rtol=1e-5)
  for a, b in zip(model.get_weights(), weights, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
  return step


@pytest.mark.parametrize(
  'options',
  [
    {'schedule': '1f1b', 'remat_policy': 'layer'},
    {'schedule': '1f1b_fused', 'num_stages': 3, 'num_micro_batches': 3},
    {
      'schedule': 'interleaved_1f1b',
      'num_stages': 4,
      'stages_per_device': 2,
      'num_micro_batches': 2,
    },
    {'schedule': 'zb_h1', 'num_stages': 3, 'remat_policy': 'none', 'num_micro_batches': 3},
    {'schedule': 'gpipe', 'num_replicas': 2, 'offload': 1.0, 'num_micro_batches': 2},
    {'schedule': 'gpipe', 'remat_policy': 'except_last', 'xla': True, 'num_micro_batches': 2},
  ],
  ids=lambda options: options['schedule'],
)
def testSchedules(options):
  """The first one has micro-batches of two rows and of one."""
  _Check(_Adam, **options)


@pytest.mark.parametrize(
  'optimizer',
  [
    lambda: _Adam(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2, clipnorm=0.02),
    lambda: _Adam(gradient_accumulation_steps=2, global_clipnorm=0.05),
    lambda: OPTIMIZERS.LossScaleOptimizer(_Adam(global_clipnorm=0.05), dynamic_growth_steps=2),
    lambda: OPTIMIZERS.SGD(
      OPTIMIZERS.schedules.ExponentialDecay(0.3, 1, 0.5), momentum=0.9, clipvalue=0.01
    ),
    lambda: OPTIMIZERS.AdamW(0.01, weight_decay=0.1, loss_scale_factor=8.0),
  ],
  ids=['ema', 'accumulation', 'loss_scale', 'schedule', 'decay'],
)
def testOptimizers(optimizer):
  """Slots and updates are on the devices of their weights.

  Operations without a device would all run on one device, to which all slots would be sent.
  """
  step = _Check(optimizer, num_stages=2, num_micro_batches=2)
  weights = step.stack.engine.trained.values()
  assert len({w.device for w in weights}) == 2
  inner = keras_variables.Inner(step.optimizer)
  slots = [v.value.device for v in inner.variables if v.path.endswith('_momentum')]
  assert slots == [w.device for w in weights] or type(inner) is OPTIMIZERS.SGD
  expected = keras_variables.Inner(optimizer())
  for name in ('global_clipnorm', 'clipnorm', 'clipvalue'):  # The step has set them aside.
    assert getattr(inner, name) == getattr(expected, name)
  if isinstance(inner, OPTIMIZERS.Adam):
    definition = _Traced(step).as_graph_def()
    branches = [node for f in definition.library.function for node in f.node_def]
    # Adam has one root for each weight, and roots of scalars.
    roots = [x.device for x in (*definition.node, *branches) if x.op == 'Sqrt' and x.device]
    assert len(roots) >= len(weights)
    assert {tf.DeviceSpec.from_string(device).device_index for device in roots} == {0, 1}


def _Traced(step, num_rows=None):
  """Returns the graph of the steps that `_Check` makes, or for some rows of their batch."""
  args = (tf.constant(X[:num_rows]),), tf.constant(Y[:num_rows])
  return step._step.get_concrete_function(*args).graph


def _Compiled(graph):
  """Returns the names of the functions that XLA compiles."""
  functions = graph.as_graph_def().library.function
  return {f.signature.name for f in functions if f.attr['_XlaMustCompile'].b}


def _CheckOrder(graph, index):
  """Checks that the updates on a device wait for each other."""
  roots = [op for op in graph.get_operations() if op.type == 'Sqrt' and _Size(op) > 1]
  of_device = [op for op in roots if tf.DeviceSpec.from_string(op.device).device_index == index]
  assert len(of_device) > 1
  for before, after in itertools.pairwise(of_device):
    assert before in _Before(after)


def testADeviceUpdatesOneWeightAfterAnother():
  """The optimizer is one that XLA cannot compile; see below."""
  step = keras_step.KerasStep(_Stack(keras_fits.Seeded(_Mlp), num_micro_batches=1), _Adam())
  for index in (0, 1):
    _CheckOrder(_Traced(step), index)


@pytest.mark.parametrize(
  ('optimizer', 'num_compiled'),
  [
    (lambda: _Adam(use_ema=True, clipnorm=0.02), 2),
    (lambda: _Adam(gradient_accumulation_steps=2, global_clipnorm=0.05), 2),
    (lambda: OPTIMIZERS.LossScaleOptimizer(_Adam(global_clipnorm=0.05)), 2),
    (lambda: OPTIMIZERS.SGD(OPTIMIZERS.schedules.ExponentialDecay(0.3, 1, 0.5)), 2),
    # Nadam has a variable for all weights on the first device.
    (lambda: OPTIMIZERS.Nadam(0.01), 1),
    (lambda: DoublesSteps(0.05), 0),
  ],
  ids=['ema', 'accumulation', 'loss_scale', 'schedule', 'nadam', 'user'],
)
def testXlaCompilesTheUpdatesOfEachDevice(optimizer, num_compiled, monkeypatch):
  """It does so on accelerators; here only the updates are compiled, not the stages."""
  monkeypatch.setattr(engine.PipelineEngine, 'compiles_updates', True)
  step = _Check(optimizer, num_micro_batches=1)
  graph = _Traced(step)
  assert len(_Compiled(graph)) == num_compiled
  if num_compiled == 1:
    _CheckOrder(graph, 1)
  if num_compiled < 2 or step.optimizer.use_ema:  # Others are compiled by the same lines.
    # The last batch of an epoch may be smaller, which does not change the weights.
    assert _Compiled(_Traced(step, num_rows=2)) == _Compiled(graph)


def testOnCpusXlaCompilesNoUpdates():
  stack = _Stack(keras_fits.Seeded(_Mlp), xla=True)
  assert stack.engine.xla and not stack.engine.compiles_updates


def _Size(op):
  return op.outputs[0].shape.num_elements()


def _Before(op):
  """Returns the operations that an operation waits for."""
  waiting, seen = [op], set()
  while waiting:
    op = waiting.pop()
    new = {t.op for t in op.inputs}.union(op.control_inputs) - seen
    seen |= new
    waiting += new
  return seen


def testWeightsThatWereSetReachReplicas():
  plain, model = (keras_fits.Seeded(_Mlp) for _ in range(2))
  plain.compile(optimizer=OPTIMIZERS.SGD(0.01), loss='mse', run_eagerly=True)
  step = keras_step.KerasStep(_Stack(model, num_replicas=2), OPTIMIZERS.SGD(0.01))
  for seed in (1, 2):
    weights = [keras_fits.Floats(*w.shape, seed=seed) for w in plain.get_weights()]
    plain.set_weights(weights)
    model.set_weights(weights)
    loss = step((tf.constant(X),), tf.constant(Y))['loss']
    assert float(loss) == pytest.approx(plain.train_on_batch(X, Y), rel=1e-4)


def testOwnLayersAreTrained():
  """The weight of a micro-batch's loss is its number of tokens, known before the forward."""
  sub = [
    linear.ProjectionLayer.Params().Set(name=f'l{i}', input_dim=4, output_dim=4) for i in range(3)
  ]
  x = tf.constant(keras_fits.Floats(6, 4), tf.float64)
  weights = stacks.ExampleWeights(6)
  stack = stacks.MakeStack(sub, num_stages=2, num_micro_batches=3)
  stack.Place(stacks.Devices(), *stacks.Specs((x,)), loss_fn=stacks.SquareLoss)
  before = {path: v.numpy() for path, v in stack.engine.trained.items()}
  step = keras_step.KerasStep(stack, OPTIMIZERS.SGD(0.5), loss_weight=stacks.LossWeight)
  loss = step((x,), weights)['loss']
  sums, gradients = stacks.Reference(sub, 3, (x,), weights)
  total, weight = sums['loss']
  np.testing.assert_allclose(loss, total / weight, rtol=1e-6)
  for path, v in stack.engine.trained.items():
    expected = before[path] - 0.5 * gradients[path] / weight
    np.testing.assert_allclose(v, expected, rtol=1e-6, atol=1e-9)
  assert step.optimizer.iterations == 1


def testOnlyStacksOfKerasKeepSparseGradientsAndTheLastStepDecides():
  dense = linear.LinearLayer.Params().Set(input_dim=5, output_dim=5)
  of_library = stacks.MakeStack([dense.Copy().Set(name=name) for name in 'ab'], num_stages=2)
  spec = tf.TensorSpec(X.shape, tf.float64)
  of_library.Place(stacks.Devices(), spec, loss_fn=stacks.SquareLoss)
  of_keras = _Stack(keras_fits.Seeded(_Mlp))
  for stack, optimizer, is_sum, keeps in [
    (of_library, _Adam(), False, False),
    (of_keras, _Adam(), False, True),
    (of_keras, _Adam(), True, False),
    (of_keras, OPTIMIZERS.SGD(0.1), False, False),
  ]:
    keras_step.KerasStep(stack, optimizer, sum_embedding_gradients=is_sum)
    assert stack.engine.functions.keeps_sparse == keeps


def _Table(use='once', **options):
  """Returns a model [8] -> [3] with a table of 8 rows, five of which recur.

  Args:
    use: the table is looked up `once`; `twice` in one stage; `again` in another stage; there by
      `positions`; by the positions `only`; or it is also the `matrix` of a later cell.
    **options: arguments of the table.
  """
  layers, table = keras.layers, keras.layers.ReversibleEmbedding(8, 6, **options)
  inputs = keras.Input([8], dtype='int32')
  x = layers.Embedding(5, 6)(inputs) if use == 'only' else table(inputs)
  if use == 'twice':
    x -= table(keras.ops.flip(inputs, axis=1))
  if use == 'only':
    x = keras_layers.AddsRows(table)(x)
  x = layers.Dense(6, activation='tanh')(x)
  if use == 'again':
    x += table(inputs)
  if use == 'positions':
    x = keras_layers.AddsRows(table)(x)
  x = layers.Dense(6, activation='relu')(x)
  if use == 'matrix':
    x = table(x, reverse=True)
  return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x)))


def _TrainedTable(optimizer, make, sizes=(4, 4), **options):
  """Returns the weights of a model after some steps, in plain Keras if there are no options.

  Args:
    optimizer: makes the optimizer.
    make: makes the model.
    sizes: numbers of examples of the steps; of an odd number, micro-batches are unequal.
    **options: arguments of the pipeline.
  """
  model = keras_fits.Seeded(make)
  if options:
    model = keras_fits.Pipe(model, **options)
  model.compile(optimizer=optimizer(), loss='mse', jit_compile=False, run_eagerly=not options)
  for size in sizes:
    model.train_on_batch(keras_fits.Integers(5, size, 8), Y[:size])
  return model.get_weights()


def _AssertClose(actual, expected):
  for a, e in zip(actual, expected, strict=True):
    np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)


_PlainTable = functools.cache(_TrainedTable)


@functools.cache
def _Using(use):
  """Returns the function that makes the model for a use of a table, one object for each use."""
  return functools.partial(_Table, use)


def _CheckTable(optimizer, make, sizes=(4, 4), **options):
  actual = _TrainedTable(optimizer, make, sizes, **options)
  _AssertClose(actual, _PlainTable(optimizer, make, sizes))


def _Begins(layer):
  """Returns a model [8] -> [3] that begins with a layer of this class."""
  layers = [layer(), keras.layers.Flatten(), keras.layers.Dense(3)]
  return keras.Sequential([keras.Input([8], dtype='int32'), *layers])


@pytest.mark.parametrize(
  'optimizer',
  [
    lambda: OPTIMIZERS.LossScaleOptimizer(_Adam(global_clipnorm=0.05)),
    lambda: OPTIMIZERS.SGD(0.1, clipnorm=0.01),
    lambda: OPTIMIZERS.RMSprop(0.01, clipvalue=0.01, epsilon=1e-3),
    lambda: _Adam(gradient_accumulation_steps=2, clipnorm=0.01),
  ],
  ids=['loss_scale', 'clipnorm', 'clipvalue', 'accumulation'],
)
def testRowsThatRecurAreUpdatedAsInKeras(optimizer):
  """Keras squares and clips the gradient of each occurrence of a row alone."""
  _CheckTable(optimizer, _Using('once'), num_micro_batches=2)


@pytest.mark.parametrize(
  'use, options',
  [
    ('twice', {'schedule': '1f1b', 'remat_policy': 'layer'}),
    ('again', {'schedule': 'zb_h1', 'remat_policy': 'none'}),
    ('positions', {'schedule': 'gpipe', 'num_replicas': 2}),
    ('only', {'schedule': '1f1b', 'remat_policy': 'none'}),
    ('matrix', {'schedule': '1f1b', 'remat_policy': 'none'}),
    ('once', {'schedule': '1f1b_fused', 'num_stages': 1}),
    ('once', {'schedule': 'gpipe', 'remat_policy': 'layer', 'xla': True}),
  ],
  ids=str,
)
def testEachUseOfATableTrainsAsInKeras(use, options):
  """The case of one stage has batches of different sizes."""
  sizes = 2 * (5 if use in ('twice', 'positions') else 4,)
  sizes = (6, 5) if 'num_stages' in options else sizes
  _CheckTable(_Adam, _Using(use), sizes, **{'num_micro_batches': 2, **options})


def _Regularised():
  return _Table(embeddings_regularizer=keras.regularizers.L2(0.0))


@pytest.mark.parametrize(
  'optimizer, is_sum',
  # Plain Keras fails if it divides sparse gradients by the factor.
  [(_Adam, True), (lambda: _Adam(loss_scale_factor=8.0), False)],
  ids=['asked', 'loss_scale_factor'],
)
def testGradientsOfARowMayBeAddedFirst(optimizer, is_sum):
  """Plain Keras does so if the table is in a regularizer: its gradient is then a matrix."""
  expected = _PlainTable(_Adam, _Regularised)
  table, *_ = _PlainTable(_Adam, _Using('once'))
  assert np.max(np.abs(table - expected[0])) > 1e-4
  options = {'num_micro_batches': 2, 'sum_embedding_gradients': is_sum}
  actual = _TrainedTable(optimizer, _Table, **options)
  _AssertClose(actual, expected)


@pytest.mark.parametrize(
  'layer, optimizer, num_micro_batches',
  [
    (keras_layers.IdsAndPositions, lambda: OPTIMIZERS.SGD(0.1, momentum=0.9), 2),
    (keras_layers.MaskedRows, _Adam, 1),
  ],
  ids=['mixed', 'masked'],
)
def testALayerWithMicroBatchesUnlikeTheBatchIsWarnedOf(layer, optimizer, num_micro_batches, caplog):
  """Its gradients are added; they equal Keras's with one micro-batch, or with SGD."""
  make = functools.partial(_Begins, layer)
  _CheckTable(optimizer, make, num_micro_batches=num_micro_batches)
  assert 'layers[0]' not in caplog.text
  _TrainedTable(_Adam, make, (4,), num_micro_batches=2)
  assert 'layers[0]' in caplog.text


def testOnlyRowsOfEqualIdsAreAddedOverMicroBatches():
  """As many rows in each batch need not be the same rows; a smaller batch has fewer."""

  def Clipped():
    return OPTIMIZERS.SGD(0.1, clipvalue=1e9)

  make = functools.partial(_Begins, keras_layers.FirstExamples)
  actual, expected = (
    _TrainedTable(Clipped, make, (5, 6), num_micro_batches=2, sum_embedding_gradients=is_sum)
    for is_sum in (False, True)
  )
  _AssertClose(actual, expected)


def testALayerThatCannotTakeTwiceTheExamplesIsTrained(caplog):
  pipe = keras_fits.Pipe(_Begins(keras_layers.ThreeExamples), num_micro_batches=2)
  pipe.compile(optimizer=_Adam(), loss='mse')
  before = pipe.get_weights()
  pipe.train_on_batch(keras_fits.Integers(5, 6, 8), Y)
  assert np.any(pipe.get_weights()[0] != before[0])
  assert 'layers[0]' in caplog.text


@pytest.mark.parametrize('use, num_stages, num_rows', [('twice', 1, 192), ('matrix', 2, 0)])
def testMemoryIncludesRowsThatWaitAndAreJoined(use, num_stages, num_rows):
  x, state = keras_fits.Integers(5, 6, 8), []
  for sums in (False, True):
    pipe = keras_fits.Pipe(_Table(use), num_stages, 2, sum_embedding_gradients=sums)
    pipe.compile(optimizer=_Adam(), loss='mse')
    pipe.predict(x, verbose=0)
    state.append(pipe.cut.memory[0].state)
  assert state[0] - state[1] == num_rows * 6 * 4


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
