# SPDX-License-Identifier: Apache-2.0
"""A wrapped Keras layer computes the same as Keras, with our weights, seeds and dtypes."""

import random
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import fprop_context
from lingvo_gpipe.layers.keras import keras_config, keras_cut, keras_layer
from lingvo_gpipe.pipeline.stages import stage_math

KerasInput = keras_config.KerasInput
LAYERS = keras.layers


@keras.saving.register_keras_serializable('test')
class Composite(LAYERS.Layer):
  """Builds unnamed layers itself, and does not take `training`."""

  def __init__(self, units=4, **options):
    super().__init__(**options)
    self.units = units
    self.first, self.second = LAYERS.Dense(units), LAYERS.Dense(units)
    self.drop = LAYERS.Dropout(0.5)

  def build(self, input_shape):
    self.first.build(input_shape)
    self.second.build([*input_shape[:-1], self.units])

  def call(self, inputs):
    y = self.drop(self.second(self.first(inputs)))
    self.add_loss(keras.ops.mean(y**2))
    return y

  def get_config(self):
    return {**super().get_config(), 'units': self.units}


class Counting(LAYERS.Layer):
  """Counts its calls in a variable."""

  def build(self, input_shape):
    self.calls = self.add_weight(name='calls', shape=(), initializer='zeros', trainable=False)

  def call(self, inputs):
    self.calls.assign_add(1.0)
    return inputs


def _Params(layer, *shape, **values):
  values = {'name': 'cell', 'random_seed': 3, **values}
  return keras_layer.KerasLayer.FromKeras(layer, [KerasInput((None, *shape))]).Set(**values)


def _Make(layer, *shape, **values):
  made = _Params(layer, *shape, **values).Instantiate()
  made.InstantiateVariables()
  return made


def _Input(*shape, dtype=tf.float64):
  return tf.constant(np.random.default_rng(1).standard_normal(shape), dtype)


def _Net():
  """A network with every kind of loss that Keras collects; no dropout or BatchNormalization."""
  return keras.Sequential(
    [
      keras.Input([6, 6, 3]),
      LAYERS.Conv2D(4, 3, kernel_regularizer=keras.regularizers.L2(0.1)),
      LAYERS.LayerNormalization(),
      LAYERS.Activation('gelu', activity_regularizer=keras.regularizers.L1(0.05)),
      LAYERS.Flatten(),
      LAYERS.Dense(5, bias_regularizer='l2', trainable=False),  # Has no effect, as in Keras.
      LAYERS.Dense(2),
    ]
  )


def testLossesAndGradientsEqualKeras():
  net = _Net()
  cells = [p.Instantiate() for p in keras_cut.Cut(net)]
  for cell in cells:
    cell.InstantiateVariables()
  keras_cut.LoadWeights(cells, net)
  x = _Input(5, 6, 6, 3, dtype=tf.float32)
  with tf.GradientTape() as tape:
    y = net(x, training=True)
    loss = tf.reduce_sum(y**2) + tf.add_n(net.losses)
  expected = tape.gradient(loss, [v.value for v in net.trainable_weights])

  variables = [v for cell in cells for v in cell.trainable_variables]
  with tf.GradientTape() as tape, fprop_context.Scope(step=0) as context:
    y = x
    for cell in cells:
      y = cell(y)
    aux = [coefficient * value for _, _, value, coefficient in context.aux_losses]
    assert len(aux) == 2
    total = tf.reduce_sum(y**2) + tf.add_n(aux)
  actual = tape.gradient(total, variables)
  np.testing.assert_allclose(total, loss, rtol=1e-6)
  assert len(actual) == len(expected) == 6
  for a, b in zip(actual, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


# --- weights ---


def testFrozenWeightsAreNotTrainable():
  layer = _Make(_Net(), 6, 6, 3)
  frozen = {path for path, v in layer.VariablesByPath().items() if not v.trainable}
  assert frozen == {'cell.dense_kernel', 'cell.dense_bias'}
  assert layer.NumParams() == sum(v.shape.num_elements() for v in layer.trainable_variables)


def testCountingAndCuttingAllocateNothing():
  # 40 GB of weights.
  p = _Params(LAYERS.Dense(100_000), 100_000)
  assert p.Instantiate().NumParams() == 100_000 * 100_001
  meta = keras_layer.KerasLayer.FPropMeta(p, tf.TensorSpec([2, 100_000]))
  assert meta.flops == pytest.approx(2 * 2 * 100_000**2, rel=1e-4)
  assert meta.out_specs == (tf.TensorSpec([2, 100_000]),)


def testInitialValuesDependOnSeedAndPath():
  dense = LAYERS.Dense(50, bias_initializer='ones')

  def Values(**values):
    layer = _Make(dense, 40, **values)
    return {path: v.numpy() for path, v in layer.VariablesByPath().items()}

  state = random.getstate()
  first = Values()
  assert random.getstate() == state
  keras.utils.set_random_seed(77)
  second = Values()
  for path, value in first.items():
    np.testing.assert_array_equal(value, second[path])
  np.testing.assert_array_equal(first['cell.bias'], 1)
  limit = np.sqrt(6 / 90)  # Keras's GlorotUniform.
  assert 0.95 * limit < np.abs(first['cell.kernel']).max() <= limit
  assert np.any(first['cell.kernel'] != Values(random_seed=4)['cell.kernel'])
  assert np.any(first['cell.kernel'] != Values(name='other')['other.kernel'])


def testKeysDoNotDependOnEarlierKerasLayers():
  net = [LAYERS.Dense(3), Composite()]
  first = list(_Make(keras.Sequential(net), 5).VariablesByPath())
  for _ in range(3):
    LAYERS.Dense(1), LAYERS.Dropout(0.1)
  net = [LAYERS.Dense(3), Composite(name='my_own_name')]
  assert list(_Make(keras.Sequential(net), 5).VariablesByPath()) == first
  assert first == [
    'cell.dense_kernel',
    'cell.dense_bias',
    'cell.composite_dense_kernel',
    'cell.composite_dense_bias',
    'cell.composite_dense_1_kernel',
    'cell.composite_dense_1_bias',
  ]


def testWeightsMayHaveAnyName():
  class Named(LAYERS.Layer):
    def build(self, input_shape):
      for name in ('path', 'keys', 'w-1', 'w.1', '_2'):
        setattr(self, f'v{name}', self.add_weight(name=name, shape=(2,)))

    def call(self, inputs):
      return inputs

  layer = _Make(Named(), 2)
  paths = ['cell.path_', 'cell.w_keys', 'cell.w_1', 'cell.w_1_1', 'cell._2']
  assert list(layer.VariablesByPath()) == paths
  assert layer(tf.ones([1, 2])).shape == [1, 2]


# --- Params ---


def testParamsAreEqualAfterToTextAndFromText():
  for layer in (_Net(), Composite()):
    p = _Params(layer, 6, 6, 3)
    again = keras_layer.KerasLayer.Params()
    again.FromText(p.ToText())
    assert again == p
    assert list(again.Instantiate().WeightSpecs()) == list(p.Instantiate().WeightSpecs())


def testEqualLayersShareStructureAndTemplate():
  a, b = _Params(LAYERS.Dense(3, name='a'), 5), _Params(LAYERS.Dense(3, name='b'), 5)
  a, b = a.Instantiate(), b.Set(name='other').Instantiate()
  other = _Params(LAYERS.Dense(3, activation='relu'), 5).Instantiate()
  assert stage_math.StructureKey(a) == stage_math.StructureKey(b)
  assert a.template is b.template
  assert stage_math.StructureKey(a) != stage_math.StructureKey(other)
  assert a.template is not other.template


# --- mode and random numbers ---


def testTrainingReachesNestedLayers():
  layer = _Make(Composite(), 6)
  x = _Input(50, 6, dtype=tf.float32)
  assert not np.any(layer(x) == 0)
  with fprop_context.Scope(step=1):
    zeros = np.mean(layer(x) == 0)
  assert 0.35 < zeros < 0.65
  # A layer whose call does not take `training` is called without it.
  assert _Make(LAYERS.Dense(2), 6)(x).shape == [50, 2]


def _Mask(layer, step, micro_batch=0):
  with fprop_context.Scope(step=step, micro_batch=micro_batch):
    return np.array(layer(tf.ones([64, 8]))) != 0


def testMasksDependOnTheStep():
  net = keras.Sequential([LAYERS.Dropout(0.5, seed=1)])
  layer = _Make(net, 8)
  assert not layer.VariablesByPath()
  np.testing.assert_array_equal(layer(tf.ones([2, 8])), 1)
  masks = {
    at: _Mask(layer, *at).tobytes()
    for at in [(0, 0), (0, 1), (0, 2), (1, 0), (2048, 0), (10**7, 0), (10**7, 1), (10**7 + 1, 0)]
  }
  assert len(set(masks.values())) == len(masks)
  assert _Mask(layer, 0).tobytes() == masks[0, 0]
  assert _Mask(_Make(net, 8, random_seed=4), 0).tobytes() != masks[0, 0]
  assert _Mask(_Make(net, 8, name='other'), 0).tobytes() != masks[0, 0]


@pytest.mark.parametrize(
  'layer, shape, shared',
  [
    (LAYERS.Dropout(0.4), [5, 8], ()),
    (LAYERS.Dropout(0.4, noise_shape=[None, 5, 1]), [5, 8], (2,)),
    (LAYERS.SpatialDropout1D(0.4), [5, 8], (1,)),
    (LAYERS.SpatialDropout2D(0.4), [3, 2, 8], (1, 2)),
    (LAYERS.SpatialDropout2D(0.4, data_format='channels_first'), [8, 3, 2], (2, 3)),
    (LAYERS.SpatialDropout3D(0.4), [2, 2, 2, 8], (1, 2, 3)),
    (LAYERS.TimeDistributed(LAYERS.Dropout(0.4)), [5, 8], ()),
  ],
  ids=lambda value: getattr(value, 'name', ''),
)
def testMasksAreEqualWithAndWithoutXla(layer, shape, shared):
  cell = _Make(layer, *shape, dtype=tf.float64)
  x = tf.ones([64, *shape], tf.float64)
  outputs = []
  for xla in (False, True):
    run = tf.function(cell, jit_compile=xla, autograph=False)
    with fprop_context.Scope(step=10**7):
      outputs.append(run(x).numpy())
  np.testing.assert_array_equal(*outputs)
  y = outputs[0]
  assert y.dtype == np.float64
  np.testing.assert_allclose(y[y != 0], 1 / 0.6, rtol=1e-6)
  for axis in shared:
    np.testing.assert_array_equal(y, np.repeat(y.take([0], axis), y.shape[axis], axis))
  y = y[tuple(slice(0, 1) if i in shared else slice(None) for i in range(y.ndim))]
  assert abs(np.mean(y != 0) - 0.6) < 5 * np.sqrt(0.24 / y.size)
  assert len({row.tobytes() for row in y != 0}) > 12
  np.testing.assert_array_equal(cell(x), x)


def testDropoutRatesOneAndZero():
  x = tf.ones([4, 8])
  with fprop_context.Scope(step=1):
    np.testing.assert_array_equal(_Make(LAYERS.Dropout(1.0), 8)(x), 0 * x)
    np.testing.assert_array_equal(_Make(LAYERS.SpatialDropout1D(0.0), 4, 8)(x[None]), x[None])


def testGeneratorsOfOneCellDiffer():
  inputs = keras.Input([8])
  outputs = [LAYERS.Dropout(0.5)(inputs), LAYERS.Dropout(0.5)(inputs)]
  net = keras.Model(inputs, outputs)
  with fprop_context.Scope(step=0):
    a, b = _Make(net, 8)(tf.ones([64, 8]))
  assert 0.4 < np.mean(np.array(a) == np.array(b)) < 0.6


def testTrainingNeedsAStep():
  layer = _Make(LAYERS.Dropout(0.5), 8)
  with fprop_context.Scope(do_eval=False), pytest.raises(ValueError, match='no step is known'):
    layer(tf.ones([2, 8]))


# --- dtypes ---


def testMixedPrecision():
  net = keras.Sequential([LAYERS.Dense(4), LAYERS.BatchNormalization(), LAYERS.Dense(3)])
  layer = _Make(net, 5, dtype=tf.float32, fprop_dtype=tf.bfloat16)
  assert {v.dtype for v in layer.variables} == {tf.float32}
  y = layer(_Input(2, 5, dtype=tf.bfloat16))
  assert y.dtype == tf.bfloat16
  assert {w.dtype for w in tf.nest.flatten(layer.theta)} == {tf.float32}
  layer = _Make(net, 5, dtype=tf.float64)
  assert layer(_Input(2, 5)).dtype == tf.float64


def testPoliciesOfTheKerasModelAreKept():
  layers = [LAYERS.Dense(4, dtype='mixed_bfloat16'), LAYERS.Dense(3, dtype='float32')]
  first, second = (p.Instantiate() for p in keras_cut.Cut(layers, [KerasInput((None, 5))]))
  for layer in (first, second):
    layer.InstantiateVariables()
  y = first(_Input(2, 5, dtype=tf.float32))
  assert y.dtype == tf.bfloat16
  assert second(y).dtype == tf.float32


# --- errors ---


@pytest.mark.parametrize(
  'layer, message',
  [
    (LAYERS.Dense(2, kernel_constraint='non_neg'), 'kernel has a Keras constraint'),
    (LAYERS.BatchNormalization(synchronized=True), 'synchronized=True.*num_micro_batches'),
    (LAYERS.BatchNormalization(renorm=True), 'renorm=True'),
    (keras.Sequential([LAYERS.TimeDistributed(LAYERS.BatchNormalization(renorm=True))]), 'renorm'),
  ],
  ids=str,
)
def testUnsupportedLayersRaise(layer, message):
  with pytest.raises(ValueError, match=f'cell: .*{message}|cell: {message}'):
    _Params(layer, 4, 3).Instantiate()


def testUnsupportedStateRaisesWithTheVariable():
  layer = _Make(Counting(), 3)
  with pytest.raises(ValueError, match="cell: .* Counting changes its variable 'calls'"):
    layer(tf.ones([2, 3]))
  layer = _Make(LAYERS.SpectralNormalization(LAYERS.Dense(2)), 3)
  layer(tf.ones([2, 3]))
  with (
    fprop_context.Scope(step=0),
    pytest.raises(ValueError, match=r'^cell: .*SpectralNormalization'),
  ):
    layer(tf.ones([2, 3]))


def testLostMasksRaise():
  ids = tf.constant([[1, 2, 0]])
  embedding = LAYERS.Embedding(5, 4, mask_zero=True)
  p = keras_layer.KerasLayer.FromKeras(embedding, [KerasInput((None, 3), 'int32')])
  layer = p.Set(name='cell').Instantiate()
  layer.InstantiateVariables()
  with pytest.raises(ValueError, match='cell: the output of the Keras Embedding has a mask'):
    layer(ids)
  layer = p.Set(drop_mask=True).Instantiate()
  layer.InstantiateVariables()
  assert layer(ids).shape == [1, 3, 4]
  # Within a cell the mask is used: the mean leaves the third position out.
  pool = keras.Sequential([embedding, LAYERS.GlobalAveragePooling1D()])
  p = keras_layer.KerasLayer.FromKeras(pool, [KerasInput((None, 3), 'int32')])
  layer = p.Set(name='cell').Instantiate()
  layer.InstantiateVariables()
  (table,) = layer.variables
  np.testing.assert_allclose(layer(ids)[0], (table[1] + table[2]) / 2, rtol=1e-6)


def testConfigDoesNotImportModules():
  p = _Params(LAYERS.Dense(2), 3)
  p.config = {
    'class_name': 'Bomb',
    'config': {},
    'module': 'antigravity',
    'registered_name': None,
  }
  with pytest.raises(ValueError, match="^cell: .*'Bomb' .*'antigravity'"):
    p.Instantiate()
  assert 'antigravity' not in sys.modules
  # Nor does a nested config.
  p = _Params(keras.Sequential([LAYERS.Dense(2)]), 3)
  p.config['config']['layers'][-1].update(module='antigravity', registered_name=None)
  with pytest.raises(ValueError, match="^cell: .*'Dense' .*'antigravity'"):
    p.Instantiate()
  assert 'antigravity' not in sys.modules


def testOtherMistakesRaise():
  with pytest.raises(ValueError, match='^cell: .*KerasLayer.FromKeras'):
    keras_layer.KerasLayer.Params().Set(name='cell').Instantiate()
  with pytest.raises(ValueError, match='no dtype policy for weights in float64'):
    _Params(LAYERS.Dense(2), 3, dtype=tf.float64, fprop_dtype=tf.bfloat16).Instantiate()
  with pytest.raises(ValueError, match='Lambda') as e:
    _Params(LAYERS.Lambda(lambda x: x), 3).Instantiate()
  assert 'while cell built the Keras Lambda' in e.value.__notes__[0]


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
