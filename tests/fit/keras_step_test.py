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
from lingvo_gpipe.layers.keras import keras_cut
from lingvo_gpipe.pipeline import pipelining_layer
from tests.toys import keras_fits, stacks

OPTIMIZERS = keras.optimizers
X, Y = keras_fits.Floats(6, 5), keras_fits.Floats(6, 3, seed=1)
NUM_STEPS = 3


def _Squares(theta, outputs, labels):
  del theta
  rows = tf.cast(tf.shape(labels)[0], tf.float32)
  return {'loss': (tf.reduce_mean(tf.square(outputs[0] - labels)), rows)}


def _Adam(**options):
  return OPTIMIZERS.Adam(0.01, epsilon=1e-3, **options)


def _Mlp():
  return keras_fits.Mlp(depth=3)


def _Plain(optimizer):
  """Returns the losses of some steps of plain Keras, and the weights after them."""
  model = keras_fits.Seeded(_Mlp)
  # A few steps take less time than to trace them.
  model.compile(optimizer=optimizer, loss='mse', jit_compile=False, run_eagerly=True)
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
  losses, weights = _Plain(optimizer())
  model = keras_fits.Seeded(_Mlp)
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
    {'schedule': '1f1b_fused', 'num_stages': 3},
    {'schedule': 'interleaved_1f1b', 'num_stages': 4, 'stages_per_device': 2},
    {'schedule': 'zb_h1', 'num_stages': 3, 'remat_policy': 'none'},
    {'schedule': 'gpipe', 'num_replicas': 2, 'offload': 1.0},
    {'schedule': 'gpipe', 'remat_policy': 'except_last', 'xla': True},
  ],
  ids=lambda options: '-'.join(map(str, options.values())),
)
def testSchedules(options):
  _Check(_Adam, **options)


@pytest.mark.parametrize(
  'optimizer',
  [
    lambda: _Adam(global_clipnorm=0.05),
    lambda: OPTIMIZERS.SGD(0.1, clipnorm=0.02),
    lambda: OPTIMIZERS.SGD(0.1, clipvalue=0.01),
    lambda: _Adam(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    lambda: _Adam(gradient_accumulation_steps=2, global_clipnorm=0.05),
    lambda: OPTIMIZERS.LossScaleOptimizer(_Adam(global_clipnorm=0.05), dynamic_growth_steps=2),
    lambda: OPTIMIZERS.SGD(OPTIMIZERS.schedules.ExponentialDecay(0.3, 1, 0.5), momentum=0.9),
    lambda: OPTIMIZERS.AdamW(0.01, weight_decay=0.1, loss_scale_factor=8.0),
  ],
  ids=['global_clipnorm', 'clipnorm', 'clipvalue', 'ema', 'accumulation', 'loss_scale', 'schedule',
       'decay'],
)  # fmt: skip
def testOptimizers(optimizer):
  _Check(optimizer, num_stages=3, num_micro_batches=2)


def testClippingIsASettingOfTheOptimizerAfterTheStep():
  step = _Check(lambda: _Adam(global_clipnorm=0.05), num_micro_batches=2)
  assert step.optimizer.global_clipnorm == 0.05


def testSlotsAreOnTheDevicesOfTheirWeights():
  step = _Check(_Adam, num_stages=3, num_micro_batches=2)
  devices = [v.value.device for v in step.optimizer.variables if v.path.endswith('_momentum')]
  assert devices == [v.device for v in step.stack.engine.trained.values()]
  assert len(set(devices)) == 3


@pytest.mark.parametrize(
  'optimizer',
  [
    lambda: _Adam(use_ema=True, clipnorm=0.02),
    lambda: _Adam(gradient_accumulation_steps=2, global_clipnorm=0.05),
    lambda: OPTIMIZERS.LossScaleOptimizer(_Adam(global_clipnorm=0.05)),
  ],
  ids=['ema', 'accumulation', 'loss_scale'],
)
def testUpdatesAreComputedBesideTheirWeights(optimizer):
  """What has no device would be computed on one, to which all slots travelled."""
  stack = _Stack(keras_fits.Seeded(_Mlp), num_stages=3, num_micro_batches=2)
  step = keras_step.KerasStep(stack, optimizer())
  traced = step._step.get_concrete_function((tf.constant(X),), tf.constant(Y))
  definition = traced.graph.as_graph_def()
  branches = [node for f in definition.library.function for node in f.node_def]
  # Adam has one root for each weight, and roots of scalars.
  roots = [x.device for x in (*definition.node, *branches) if x.op == 'Sqrt' and x.device]
  assert len(roots) >= len(step.stack.engine.trained)
  assert {tf.DeviceSpec.from_string(device).device_index for device in roots} == {0, 1, 2}


def testADeviceUpdatesOneWeightAfterAnother():
  step = keras_step.KerasStep(_Stack(keras_fits.Seeded(_Mlp), num_micro_batches=2), _Adam())
  traced = step._step.get_concrete_function((tf.constant(X),), tf.constant(Y))
  roots = [op for op in traced.graph.get_operations() if op.type == 'Sqrt' and _Size(op) > 1]
  for index in range(2):
    of_device = [op for op in roots if tf.DeviceSpec.from_string(op.device).device_index == index]
    assert len(of_device) > 1
    for before, after in itertools.pairwise(of_device):
      assert before in _Before(after)


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


def _Table(**options):
  layers = [keras.layers.Embedding(5, 6, **options), keras.layers.Dense(6, activation='tanh')]
  end = [keras.layers.Flatten(), keras.layers.Dense(3)]
  return keras.Sequential([keras.Input([8], dtype='int32'), *layers, *end])


@pytest.mark.parametrize(
  'optimizer, policy, is_equal',
  [
    (_Adam, 'layer', False),
    (lambda: OPTIMIZERS.LossScaleOptimizer(_Adam()), 'stage', False),
    (lambda: OPTIMIZERS.SGD(0.1, clipnorm=0.01), 'none', False),
    (lambda: OPTIMIZERS.SGD(0.1, global_clipnorm=0.01), 'stage', False),
    (lambda: OPTIMIZERS.SGD(0.1, momentum=0.9), 'layer', True),
    (lambda: _Adam(gradient_accumulation_steps=2, clipnorm=0.01), 'stage', True),
  ],
)
def testRowsThatRecurAreWarnedOfIfKerasUpdatesThemOtherwise(optimizer, policy, is_equal, caplog):
  x = keras_fits.Integers(5, 6, 8)

  def Weights(model):
    eagerly = isinstance(model, keras.Sequential)
    model.compile(optimizer=optimizer(), loss='mse', jit_compile=False, run_eagerly=eagerly)
    for _ in range(2):
      model.train_on_batch(x, Y)
    return model.get_weights()

  expected = Weights(keras_fits.Seeded(_Table))
  options = {'num_micro_batches': 2, 'remat_policy': policy}
  actual = Weights(keras_fits.Pipe(keras_fits.Seeded(_Table), **options))
  differences = [np.max(np.abs(a - e)) for a, e in zip(actual, expected, strict=True)]
  assert (max(differences) < 1e-6) == is_equal
  assert ('embeddings: ' in caplog.text) == (not is_equal)


def testATableInARegularizerIsUpdatedAsInKeras(caplog):
  """Its gradient is a matrix in plain Keras, too."""
  x = keras_fits.Integers(5, 6, 8)
  options = {'optimizer': _Adam, 'batch_size': 6}
  make = functools.partial(_Table, embeddings_regularizer='l2')
  keras_fits.CheckFit(make, x, Y, lambda: {'loss': 'mse'}, **options)
  assert 'embeddings: ' not in caplog.text


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
