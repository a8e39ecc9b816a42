# SPDX-License-Identifier: Apache-2.0
"""Any Keras model is cut into cells, and a pipeline of any of the cuts computes as Keras does."""

import sys

import keras
import numpy as np
import pytest
from keras import layers, ops

from lingvo_gpipe.layers.keras import keras_cells, keras_graph
from tests.toys import keras_fits


def _Cells(model):
  return keras_cells.Cut(keras_graph.FromModel(model))


def _Kinds(cells):
  """Returns the class names of the calls of each cell."""
  return [[type(node.operation).__name__ for node in cell.nodes] for cell in cells]


def _Batch(tensor, rng):
  """Returns floats, or ids with many zeros, in the shape of a model's input or output."""
  shape = [6, *tensor.shape[1:]]
  if tensor.dtype == 'int32':
    return np.maximum(rng.integers(-4, 9, shape), 0).astype('int32')
  return rng.standard_normal(shape).astype('float32')


def _Check(make, num_stages, splits, num_micro_batches):
  """Checks outputs, loss and gradients of a pipeline with these splits."""
  model = keras_fits.Seeded(make)
  rng = np.random.default_rng(1)
  x = [_Batch(t, rng) for t in model.inputs]
  y = [_Batch(t, rng) for t in model.outputs]

  def Compiled():
    return {'loss': ['mse'] * len(y)}

  expected = keras_fits.Fit(model, x, y, Compiled, batch_size=6, epochs=1)
  outputs = model(x)
  pipe = keras_fits.Pipe(keras_fits.Seeded(make), num_stages, num_micro_batches, splits=splits)
  actual = keras_fits.Fit(pipe, x, y, Compiled, batch_size=6, epochs=1)
  keras_fits.CheckEqual(actual, expected)
  pairs = zip(
    keras.tree.flatten(pipe.predict(x, verbose=0)), keras.tree.flatten(outputs), strict=True
  )
  for a, b in pairs:
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def _RandomGraph(seed):
  """Returns a function that makes a model of random layers.

  It has one to three inputs, perhaps one of them with a mask, shared and regularised layers, and
  perhaps outputs in the middle.
  """

  def Make():
    rng = np.random.default_rng(seed)
    inputs = [keras.Input([4], name=f'x{i}') for i in range(rng.integers(1, 3))]
    values = list(inputs)
    if rng.random() < 0.5:
      inputs.append(keras.Input([3], dtype='int32', name='ids'))
      embedded = layers.Embedding(9, 4, mask_zero=True)(inputs[-1])
      if rng.random() < 0.5:
        embedded = layers.Dense(4)(embedded)
      values.append(layers.GlobalAveragePooling1D()(embedded))
    shared = [layers.Dense(4, activation='tanh') for _ in range(2)]
    losses = {'kernel_regularizer': 'l2', 'activity_regularizer': 'l1'}
    calls = [
      lambda a, b: layers.Dense(4, activation='relu')(a),
      lambda a, b: layers.Dense(4, **losses)(a),
      lambda a, b: layers.Add()([a, b]),
      lambda a, b: layers.Dense(4)(layers.Concatenate()([a, b])),
      lambda a, b: shared[0](a),
      lambda a, b: shared[1](b),
      lambda a, b: ops.tanh(a) * b,
      lambda a, b: layers.LayerNormalization()(a),
    ]
    for i in rng.integers(0, len(calls), rng.integers(5, 12)):
      a, b = (values[-k] for k in rng.integers(1, min(5, len(values)) + 1, 2))
      values.append(calls[i](a, b))
    outputs = [layers.Dense(2)(layers.Concatenate()([*values[:2], *values[-3:]]))]
    for i in rng.integers(len(inputs), len(values), rng.integers(0, 3)):
      outputs.append(values[i])
    if 'ids' in {t.name for t in inputs}:
      outputs[0] = layers.Dense(2)(layers.Concatenate()([outputs[0], *values[: len(inputs)]]))
    return keras.Model(inputs, outputs)

  return Make


@pytest.mark.parametrize('seed', [2, 4, 5, 6])
def testPipelinesOfRandomGraphs(seed):
  make = _RandomGraph(seed)
  num_cells = len(_Cells(make()))
  rng = np.random.default_rng(seed)
  num_stages = min(1 + seed % 3, num_cells)
  ends = rng.choice(np.arange(1, num_cells), num_stages - 1, replace=False)
  splits = [*sorted(map(int, ends)), num_cells]
  _Check(make, num_stages, splits, num_micro_batches=int(rng.integers(1, 4)))


def _UNet():
  x = inputs = keras.Input([8, 8, 1])
  skips = []
  for width in (2, 4):
    x = layers.Conv2D(width, 3, padding='same', activation='tanh')(x)
    skips.append(x)
    x = layers.MaxPooling2D()(x)
  for skip in reversed(skips):
    x = layers.UpSampling2D()(x)
    x = layers.Conv2D(2, 3, padding='same')(layers.Concatenate()([x, skip]))
  return keras.Model(inputs, layers.Conv2D(1, 1)(x))


@pytest.mark.parametrize('ends', [(1, 3), (2, 4)])
def testEveryPairOfCellsMayBeCut(ends):
  assert len(_Cells(_UNet())) == 5
  _Check(_UNet, 3, [*ends, 5], num_micro_batches=1)


def testACellHasOneMatrixAndTheSmallCallsAroundIt():
  x = inputs = keras.Input([8, 8, 3])
  for i in range(2):
    y = layers.Conv2D(3, 3, padding='same', name=f'conv_{i}')(x)
    x = layers.ReLU()(layers.Add()([layers.BatchNormalization()(y), x]))
  x = layers.GlobalAveragePooling2D()(x)
  cells = _Cells(keras.Model(inputs, layers.Dense(2, name='head')(x)))
  block = ['Conv2D', 'BatchNormalization', 'Add', 'ReLU']
  assert _Kinds(cells) == [block, [*block, 'GlobalAveragePooling2D'], ['Dense']]
  assert [cell.name for cell in cells] == ['conv_0', 'conv_1', 'head']


def testTheFewestBytesCrossTheCut():
  x = inputs = keras.Input([8, 8, 1])
  x = layers.ReLU()(layers.Conv2D(4, 3, padding='same')(x))
  x = layers.UpSampling2D()(layers.MaxPooling2D(4)(x))
  first, second = _Kinds(_Cells(keras.Model(inputs, layers.Conv2D(1, 3)(x))))
  assert first == ['Conv2D', 'ReLU', 'MaxPooling2D']
  assert second == ['UpSampling2D', 'Conv2D']


def testTensorsForLaterCellsPassTheOthersBy():
  inputs = keras.Input([4])
  a = layers.Dense(5)(inputs)
  b = layers.Dense(6)(a)
  c = layers.Dense(7)(b)
  model = keras.Model(inputs, [layers.Dense(8)(layers.Concatenate()([c, a])), b])
  cells = _Cells(model)

  def Sizes(name):
    return [[v.shape[1] for v in getattr(cell, name)] for cell in cells]

  assert Sizes('args') == [[4], [], [], [12]]
  assert Sizes('skips_out') == [[5], [6], [], []]
  assert Sizes('skips_in') == [[], [5], [5, 6], [6]]
  assert Sizes('outputs') == [[], [], [12], [8, 6]]


def testEqualBlocksHaveEqualStructures():
  x = inputs = keras.Input([4])
  for activation in ('relu', 'relu', 'tanh', 'relu'):
    x = layers.LayerNormalization()(layers.Dense(4, activation=activation)(x))
  cells = _Cells(keras.Model(inputs, layers.Dense(4)(x)))
  a, b, c, d, last = map(keras_cells.Structure, cells)
  assert a == b == d and hash(a) == hash(b) == hash(d)
  assert a not in (c, last)
  names = ['w_kernel', 'w_bias', 'w_gamma', 'w_beta']
  assert list(cells[0].Weights()) == list(cells[1].Weights()) == names


@pytest.mark.parametrize('is_swapped', [False, True])
def testOtherWiringIsAnotherStructure(is_swapped):
  """The calls are equal, but one block subtracts the other way round."""
  x = inputs = keras.Input([4])
  for swap in (False, is_swapped):
    y = layers.Dense(4)(x)
    x = layers.Subtract()([y, x] if swap else [x, y])
  first, second, _ = map(keras_cells.Structure, _Cells(keras.Model(inputs, layers.Dense(1)(x))))
  assert (first == second) != is_swapped


def testTiesNameTheFirstUseOfAVariable():
  x = inputs = keras.Input([4])
  shared = layers.Dense(4)
  for layer in (shared, layers.Dense(4), shared, shared):
    x = layer(x)
  ties = keras_cells.Ties(_Cells(keras.Model(inputs, x)))
  assert ties == {(k, name): (0, name) for k in (2, 3) for name in ('w_kernel', 'w_bias')}


def testALayerWithStateStaysInOneCell():
  """Calls in two cells would update the state twice."""
  inputs = keras.Input([4])
  norm = layers.BatchNormalization()
  x = norm(layers.Dense(4)(inputs))
  x = norm(layers.Dense(4)(x))
  calls = ['BatchNormalization', 'Dense', 'BatchNormalization']
  cells = _Cells(keras.Model(inputs, layers.Dense(4)(x)))
  assert _Kinds(cells) == [['Dense'], calls, ['Dense']]


def testAModelWithoutLayersIsOneCell():
  inputs = keras.Input([4])
  (cell,) = _Cells(keras.Model(inputs, inputs))
  assert cell.name == 'identity'
  assert cell.args == cell.outputs
  assert not cell.nodes


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
