# SPDX-License-Identifier: Apache-2.0
"""Cuts Keras models into cells that compute the same, and copies weights in both directions."""

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.layers import sequential
from lingvo_gpipe.layers.keras import keras_config, keras_cut
from tests import naming

KerasInput = keras_config.KerasInput
LAYERS = keras.layers


def _Sequence(sub):
  layer = sequential.SequentialLayer.Params().Set(name='net', sub=sub).Instantiate()
  layer.InstantiateVariables()
  return layer


def _Randomise(variables, seed):
  rng = np.random.default_rng(seed)
  for v in variables:
    v.assign(rng.uniform(0.1, 1.0, v.shape).astype(v.dtype if isinstance(v.dtype, str) else 'f'))


def _Check(model, args, inputs=(), call=None, **options):
  """Returns the cells of the model after checking that weights copy in both directions."""
  sub = keras_cut.Cut(model, inputs, **options)
  layer = _Sequence(sub)
  call = call or model
  want = tf.nest.flatten(call(args if len(args) > 1 else args[0]))
  _Randomise(tf.nest.flatten([x.weights for x in (model if inputs else [model])]), 1)
  before = tf.nest.flatten(call(args if len(args) > 1 else args[0]))
  if layer.variables:
    assert np.abs(want[0] - before[0]).max() > 0
  keras_cut.LoadWeights(layer.layers, model, inputs, **options)
  for a, b in zip(tf.nest.flatten(layer(*args)), before, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
  _Randomise(layer.variables, 2)
  keras_cut.SaveWeights(layer.layers, model, inputs, **options)
  after = tf.nest.flatten(call(args if len(args) > 1 else args[0]))
  for a, b in zip(tf.nest.flatten(layer(*args)), after, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
  return sub


def _Names(sub):
  return [p.name for p in sub]


def _X(*shape, seed=0):
  return tf.constant(np.random.default_rng(seed).standard_normal(shape), tf.float32)


def _Residual(x, units, name):
  y = LAYERS.Dense(units, activation='relu', name=f'{name}_in')(x)
  y = LAYERS.BatchNormalization(name=f'{name}_bn')(y)
  y = LAYERS.Dense(x.shape[-1], name=f'{name}_out')(y)
  return LAYERS.Add(name=f'{name}_add')([x, y])


def _Network(blocks=2):
  x = inputs = keras.Input([5])
  x = LAYERS.Dense(4, name='stem')(x)
  for i in range(blocks):
    x = _Residual(x, 3, f'block{i}')
  return keras.Model(inputs, LAYERS.Dense(2, name='head')(x))


def testSequentialIsCutIntoOneCellPerLayer():
  net = keras.Sequential(
    [keras.Input([6, 6, 1]), LAYERS.Conv2D(2, 3), LAYERS.BatchNormalization(), LAYERS.Flatten()]
  )
  net.add(keras.Sequential([LAYERS.Dense(4, name='Inner'), LAYERS.ReLU()]))
  sub = _Check(net, [_X(3, 6, 6, 1)])
  kinds = [p.config['class_name'] for p in sub]
  assert kinds == ['Conv2D', 'BatchNormalization', 'Flatten', 'Dense', 'ReLU']
  assert _Names(sub)[3] == 'inner'


def testListOfUnbuiltLayers():
  layers = [LAYERS.Dense(4), LAYERS.Dense(3, activation='relu')]
  inputs = [KerasInput((None, 5))]
  sub = keras_cut.Cut(layers, inputs)
  assert not layers[0].built
  assert [p.inputs[0].shape for p in sub] == [(None, 5), (None, 4)]
  net = keras.Sequential(layers)
  net.build([None, 5])
  _Check(layers, [_X(2, 5)], inputs, call=net)


def testFunctionalModelIsCutAtSingleTensors():
  sub = _Check(_Network(), [_X(3, 5)])
  assert _Names(sub) == ['stem', 'block0_add', 'block1_add', 'head']
  assert sub[1].config == sub[2].config  # Equal blocks share their traces.
  keys = [key for key in _Sequence(sub).VariablesByPath() if 'layers[2]' in key]
  assert keys[:3] == [
    'net.layers[2].dense_kernel',
    'net.layers[2].dense_bias',
    'net.layers[2].batch_normalization_gamma',
  ]
  assert keys[-1] == 'net.layers[2].dense_1_bias'


def testAfterSelectsTheCuts():
  options = {'after': ['block0_add']}
  sub = _Check(_Network(), [_X(3, 5)], **options)
  assert _Names(sub) == ['block0_add', 'head']
  with pytest.raises(ValueError, match=naming.Naming('block1_out', 'block1_add')):
    keras_cut.Cut(_Network(), after=['block1_out'])
  with pytest.raises(ValueError, match=naming.Naming('head')):
    keras_cut.Cut(_Network(), after=['head'])
  layer = _Sequence(sub)
  with pytest.raises(ValueError, match=naming.Naming('KerasLayers', 4, 2)):
    keras_cut.LoadWeights(layer.layers, _Network())
  before = [v.numpy() for v in layer.variables]
  with pytest.raises(ValueError, match=naming.Naming('net.layers[1]', 'head')):
    keras_cut.LoadWeights(layer.layers, _Network(3), **options)
  for v, value in zip(layer.variables, before, strict=True):
    np.testing.assert_array_equal(v, value)


def testNestedModelsAreCutUnlessATensorBypassesThem():
  inputs = keras.Input([5])
  inner = _Network()
  alone = keras.Model(inputs, LAYERS.Dense(3, name='last')(inner(inputs)))
  sub = _Check(alone, [_X(3, 5)])
  assert _Names(sub) == ['stem', 'block0_add', 'block1_add', 'head', 'last']
  beside = keras.Model(inputs, LAYERS.Concatenate(name='last')([inner(inputs), inputs]))
  assert _Names(_Check(beside, [_X(3, 5)])) == ['last']


def testCallsOfASharedLayerStayTogether():
  inputs = keras.Input([4])
  shared = LAYERS.Dense(4, name='shared')
  x = LAYERS.ReLU(name='between')(shared(LAYERS.Dense(4, name='first')(inputs)))
  model = keras.Model(inputs, LAYERS.Dense(2, name='last')(LAYERS.Dense(4, name='b')(shared(x))))
  sub = _Check(model, [_X(3, 4)])
  assert _Names(sub) == ['first', 'shared', 'b', 'last']


def testOperationsAndCallArguments():
  inputs = keras.Input([3, 4])
  x = LAYERS.Dense(4, name='first')(inputs)
  x = keras.ops.tanh(x) * 2.0 + 1.0
  x = LAYERS.MultiHeadAttention(2, 3, name='attention')(x, x, use_causal_mask=True)
  model = keras.Model(inputs, LAYERS.LayerNormalization(name='last')(x))
  sub = _Check(model, [_X(2, 3, 4)])
  assert _Names(sub)[0] == 'first'
  assert _Names(sub)[-2:] == ['attention', 'last']


def testSeveralInputsAndOutputs():
  a, b = keras.Input([4], name='z'), keras.Input([3], name='a')
  x = LAYERS.Concatenate(name='join')([LAYERS.Dense(2)(a), b])
  x = LAYERS.Dense(4, name='middle')(x)
  outputs = [LAYERS.Dense(1)(x), LAYERS.Dense(2, name='last')(x)]
  model = keras.Model([a, b], outputs)
  sub = _Check(model, [_X(3, 4), _X(3, 3)])
  assert _Names(sub) == ['join', 'middle', 'last']
  assert isinstance(_Sequence(sub)(_X(3, 4), _X(3, 3)), tuple)


def testQuantisedModel():
  net = keras.Sequential([keras.Input([5]), LAYERS.Dense(4), LAYERS.Dense(2)])
  net.quantize('int8')
  net.layers[0].enable_lora(2)
  layer = _Sequence(keras_cut.Cut(net))
  keras_cut.LoadWeights(layer.layers, net)
  np.testing.assert_allclose(layer(_X(3, 5)), net(_X(3, 5)), rtol=1e-6)
  assert [layer.layers[i].VariableOf('kernel').dtype for i in range(2)] == [tf.int8] * 2
  trained = {v.name.split('.')[-1].split(':')[0]: v for v in layer.trainable_variables}
  assert trained.keys() == {'bias', 'lora_kernel_a', 'lora_kernel_b'}

  @tf.function(autograph=False)
  def Gradients(x):
    with tf.GradientTape() as tape:
      y = layer(x)
    return tape.gradient(y, trained)

  assert Gradients(_X(3, 5)).keys() == trained.keys()


def testWrongArgumentsRaise():
  class Own(keras.Model):
    def call(self, inputs):
      return inputs

  with pytest.raises(TypeError, match=naming.Naming('Own', 'KerasLayer.FromKeras')):
    keras_cut.Cut(Own())
  with pytest.raises(ValueError, match='^the inputs of the Keras model'):
    keras_cut.Cut(keras.Sequential([LAYERS.Dense(2)]))


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
