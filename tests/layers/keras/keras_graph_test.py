# SPDX-License-Identifier: Apache-2.0
"""The graph of a live Keras model has the calls of the model and of all models nested in it."""

import collections
import re
import sys

import keras
import numpy as np
import pytest
from keras import layers, ops

from lingvo_gpipe.layers.keras import keras_graph, keras_nodes
from tests import naming
from tests.toys import keras_fits

X = keras_fits.Floats(4, 5)


def _Run(graph, x, training=False):
  """Computes the calls of a graph one after another; returns the model's outputs."""
  values = dict(zip(graph.inputs, graph.FlatInputs(x), strict=True))

  def Fill(nest):
    return keras.tree.map_structure(
      lambda v: values[v] if isinstance(v, keras_nodes.Value) else v, nest
    )

  for node in graph.nodes:
    kwargs = Fill(node.kwargs)
    if 'training' in getattr(node.operation, '_call_context_args', ()):
      kwargs['training'] = training if node.training is None else node.training
    outputs = keras.tree.flatten(node.operation(*Fill(node.args), **kwargs))
    values.update(zip(node.outputs, outputs, strict=True))
  return graph.PackOutputs([values[v] for v in graph.outputs])


def _Names(graph):
  """Returns the names of the calls, without the numbers that Keras adds."""
  return [re.sub(r'_\d+$', '', node.operation.name) for node in graph.nodes]


def _Check(model, x, names):
  """Checks the names of the calls, that their layers are the model's, and what they compute."""
  graph = keras_graph.FromModel(model, x)
  assert _Names(graph) == names
  live = {id(layer) for layer in keras_nodes.Sublayers(model)}
  assert all(id(n.operation) in live for n in graph.nodes if isinstance(n.operation, keras.Layer))
  actual, expected = _Run(graph, x), model(x)
  keras.tree.assert_same_structure(actual, expected)
  for a, e in zip(keras.tree.flatten(actual), keras.tree.flatten(expected), strict=True):
    np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)
  return graph


def _Dense(name, size=5):
  return layers.Dense(size, activation='tanh', name=name)


def _Sequential(*names):
  return keras.Sequential([keras.Input([5]), *map(_Dense, names)])


class _Functional(keras.Model):
  """A subclass that makes itself a Functional model."""

  def __init__(self):
    inputs = keras.Input([5])
    super().__init__(inputs, _Dense('b')(_Dense('a')(inputs)))


class _Subclassed(keras.Model):
  """A model without a graph; `call` is a function of its layers and the tensor."""

  def __init__(self, function, *parts):
    super().__init__()
    self.parts = parts
    self.function = function

  def call(self, x):
    return self.function(*self.parts, x)


def testModelsWithAGraphAreTraced():
  _Check(_Sequential('a', 'b'), X, ['a', 'b'])
  _Check(_Functional(), X, ['a', 'b'])
  _Check(keras_fits.Mlp(), X, ['dense', 'dense', 'dense'])


def testModelsMayBeNestedThreeDeep():
  inputs = keras.Input([5])
  inner = _Sequential('a', 'b')
  middle = keras.Model(inputs, _Dense('c')(inner(inputs)))
  outer = keras.Sequential([keras.Input([5]), _Dense('d'), middle, _Functional()])
  x = keras.Input([5])
  _Check(keras.Model(x, _Dense('e')(outer(x))), X, ['d', 'a', 'b', 'c', 'a', 'b', 'e'])
  subclassed = _Subclassed(lambda outer, last, x: last(outer(x) + x), outer, _Dense('e'))
  _Check(subclassed, X, ['d', 'a', 'b', 'c', 'a', 'b', 'add', 'e'])


@pytest.mark.parametrize('keyword', [False, True])
def testANestedModelMayBeCalledTwice(keyword):
  inputs = keras.Input([5])
  inner = _Sequential('a', 'b')
  x = inputs
  for _ in range(2):
    x = inner(inputs=x) if keyword else inner(x)
  graph = _Check(keras.Model(inputs, x), X, ['a', 'b', 'a', 'b'])
  assert graph.nodes[0].operation is graph.nodes[2].operation


def testDictsOfInputsAreTakenByName():
  """The dict has another order than the model."""
  inputs = {name: keras.Input([size], name=name) for name, size in (('b', 5), ('a', 2), ('c', 3))}
  model = keras.Model(inputs, layers.Concatenate(name='all')(list(inputs.values())))
  x = {name: X[:, : inputs[name].shape[1]] for name in 'cab'}
  graph = _Check(model, x, ['all'])
  assert sorted(v.shape[1] for v in graph.inputs) == [2, 3, 5]
  outer = {name: keras.Input([t.shape[1]], name=name) for name, t in inputs.items()}
  nested = keras.Model(outer, {'y': model(dict(reversed(outer.items())))})
  _Check(nested, x, ['all'])
  _Check(keras.Sequential([keras.Input([5], name='x'), _Dense('a')]), {'x': X}, ['a'])


@pytest.mark.filterwarnings('ignore:When providing')
@pytest.mark.parametrize('is_nested', [False, True])
def testKeysOfInputsMayDifferFromTheirNames(is_nested):
  a, b, c = (keras.Input([size], name=name) for name, size in (('a', 2), ('b', 5), ('c', 3)))
  inputs = {'y': [c, a], 'x': b} if is_nested else {'y': a, 'z': b, 'x': c}
  model = keras.Model(inputs, layers.Concatenate(name='all')([a, b, c]))
  x = keras.tree.map_structure(lambda t: X[:, : t.shape[1]], dict(reversed(inputs.items())))
  graph = _Check(model, x, ['all'])
  with pytest.raises(ValueError, match=naming.Naming(model.name, sorted(inputs), "missing: ['y']")):
    graph.FlatInputs({name: value for name, value in x.items() if name != 'y'})
  # Neither unknown keys count, nor the order.
  more = collections.OrderedDict(xy=X, **x)
  for tensor, expected in zip(graph.FlatInputs(more), graph.FlatInputs(x), strict=True):
    np.testing.assert_array_equal(tensor, expected)


def testOutputsKeepTheirStructure():
  inputs = keras.Input([5])
  a, b = _Dense('a')(inputs), _Dense('b', 3)(inputs)
  _Check(keras.Model(inputs, {'b': b, 'a': [a, b]}), X, ['a', 'b'])
  _Check(keras.Model(inputs, [a]), X, ['a'])
  pair = _Subclassed(lambda a, b, x: (b(a(x)), {'a': a(x)}), _Dense('a'), _Dense('b'))
  _Check(pair, X, ['a', 'b', 'a'])


def testASubclassedModelIsTracedByItsCall():
  def Call(a, b, x):
    y = ops.concatenate([a(x), x[:, :2]], axis=-1)
    return b(y) * 2 + ops.mean(y, axis=-1, keepdims=True)

  model = _Subclassed(Call, _Dense('a'), _Dense('b', 1))
  _Check(model, X, ['a', 'item', 'concatenate', 'b', 'mul', 'mean', 'add'])


def testASubclassedModelNeedsAnExample():
  with pytest.raises(ValueError, match=naming.Naming('_Subclassed', 'example')):
    keras_graph.FromModel(_Subclassed(lambda x: x))
  with pytest.raises(TypeError, match=naming.Naming('keras.Model', 'Dense')):
    keras_graph.FromModel(_Dense('a'))


# ---- training ------------------------------------------------------------------------------------


class _Modes(keras.Model):
  """Calls a nested model twice, as in evaluation and in its own mode."""

  def __init__(self):
    super().__init__()
    self.inner = keras.Sequential([keras.Input([5]), layers.Dropout(0.5, name='drop'), _Dense('a')])
    self.drop = layers.Dropout(0.5, name='last')

  def call(self, x, training=False):
    x = self.inner(x, training=False)
    return self.drop(self.inner(x), training=training)


def testAnExplicitModeOfANestedModelIsKept():
  """In Keras it also holds for the layers that are called next."""
  graph = _Check(_Modes(), X, ['drop', 'a', 'drop', 'a', 'last'])
  assert [n.training for n in graph.nodes] == [False, False, False, False, None]


class _Branching(keras.Model):
  """Calls its layer in training only."""

  def __init__(self):
    super().__init__()
    self.dense = _Dense('a')

  def call(self, x, training=False):
    return self.dense(x) if training else self.dense(self.dense(x))


def testACallThatBranchesOnTrainingIsRefused():
  line = _Branching.call.__code__.co_firstlineno + 1
  with pytest.raises(ValueError, match=naming.Naming('_Branching.call', 'training', line)):
    keras_graph.FromModel(_Branching(), X)


class _Outside(keras.Model):
  """Computes something outside layers, which one trace makes constant."""

  def __init__(self, compute):
    super().__init__()
    self.dense = layers.Dense(3)
    self.w = self.add_weight(shape=[3], initializer='ones', name='w')
    self.compute = compute

  def call(self, x):
    return self.compute(self, self.dense(x))


@pytest.mark.parametrize(
  'compute',
  [
    lambda model, x: x + keras.random.normal([3]),
    lambda model, x: x * ops.exp(model.w.value),
    lambda model, x: x * model.w.value,
  ],
  ids=['random', 'function of a value', 'value'],
)
def testWeightsAndRandomNumbersOutsideLayersAreRefused(compute):
  model = _Outside(compute)
  line = compute.__code__.co_firstlineno
  with pytest.raises(ValueError, match=naming.Naming('_Outside.call', 'weight', line, __file__)):
    keras_graph.FromModel(model, X)


class _Changing(keras.Model):
  """Changes something of its own in its call."""

  def __init__(self, change):
    super().__init__()
    self.dense = layers.Dense(3)
    self.count = self.add_weight(shape=[], trainable=False, initializer='zeros', name='count')
    self.change = change

  def call(self, x):
    y = self.dense(x)
    self.change(self, y)
    return y


@pytest.mark.parametrize(
  'change, name',
  [
    (lambda model, y: model.count.assign(model.count + 1), 'count'),
    (lambda model, y: model.add_loss(ops.mean(y)), 'add_loss of the model'),
    (lambda model, y: model.add_metric(ops.mean(y), name='mean'), 'add_metric of the model'),
  ],
  ids=['variable', 'add_loss', 'add_metric'],
)
def testChangesOutsideLayersAreRefused(change, name):
  """Only the trace would make them."""
  model = _Changing(change)
  model.dense.build([None, *X.shape[1:]])
  model.built = True
  line = change.__code__.co_firstlineno
  with pytest.raises(ValueError, match=naming.Naming('_Changing.call', line, name)):
    keras_graph.FromModel(model, X)
  assert model.count.numpy() == 0


def testConstantsOutsideLayersAreEqualInEachTrace():
  model = _Outside(lambda model, x: x * model.w + ops.arange(3, dtype='float32'))
  _Check(model, X, ['dense', 'mul', 'add'])


def testAFunctionalModelRefusesOtherSizesAsInKeras():
  """A Sequential model, and a model of unknown sizes, take any size."""
  x = keras_fits.Floats(4, 3, 5)
  fixed, free = (keras.Input([size, 5], name='x') for size in (2, None))
  for model in (keras.Sequential([fixed, _Dense('a')]), keras.Model(free, _Dense('a')(free))):
    _Check(model, x, ['a'])
  graph = keras_graph.FromModel(keras.Model(fixed, _Dense('a')(fixed), name='net'))
  assert len(graph.FlatInputs(x[:, :2])) == 1
  with pytest.raises(ValueError, match=naming.Naming('net', 'x', (4, 3, 5), (None, 2, 5))):
    graph.FlatInputs(x)


def testAnUnknownShapeIsRefused():
  model = _Outside(lambda model, x: ops.reshape(x, [x.shape[0], 3, 1]))
  model(X)
  line = model.compute.__code__.co_firstlineno
  with pytest.raises(ValueError, match=naming.Naming('reshape', '-1', line)):
    keras_graph.FromModel(model, X)


class _Untraceable(keras.Model):
  """Needs values."""

  def __init__(self):
    super().__init__()
    self.built = True

  def call(self, x):
    y = ops.relu(x)
    return y if float(ops.sum(y)) > 0 else x


def testTheModelOfANotebookIsTraced():
  """Its class belongs to a module without a file."""
  notebook = {'__name__': 'notebook', 'keras': keras}
  lines = ['class Net(keras.Model):', '  def call(self, x):', '    return keras.ops.relu(x) + 1']
  exec(compile('\n'.join(lines), '<cell 1>', 'exec'), notebook)
  _Check(notebook['Net'](), X, ['relu', 'add'])
  lines[2] = '    return x if x.sum() else -x'
  exec(compile('\n'.join(lines), '<cell 2>', 'exec'), notebook)
  with pytest.raises(ValueError, match=naming.Naming('Net.call', 3, '<cell 2>')):
    keras_graph.FromModel(notebook['Net'](), X)


def testACallThatCannotBeTracedNamesItsLine():
  line = _Untraceable.call.__code__.co_firstlineno + 2
  with pytest.raises(ValueError, match=naming.Naming('_Untraceable.call', line, __file__)):
    keras_graph.FromModel(_Untraceable(), X)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
