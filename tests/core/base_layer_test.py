# SPDX-License-Identifier: Apache-2.0
"""Tests of BaseLayer: structure, inheritance, weights and theta, costs by tracing."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import base_layer, nested_map, weight_params
from tests import naming
from tests.toys import decoding_layers, layers, nested_layers

WeightInit = weight_params.WeightInit


def _Make(cls=nested_layers.Tree, variables=True, **values):
  layer = cls.Params().Set(**{'name': 'top', **values}).Instantiate()
  if variables:
    layer.InstantiateVariables()
  return layer


PATHS = ['top.one', 'top.some[0]', 'top.some[1]', 'top.named.x', 'top.named.y']


# ---- structure


def testPathsNamesAndOrder():
  tree = _Make(variables=False)
  assert [layer.path for layer in tree.Descendants()] == ['top', *PATHS]
  assert [layer.params.name for layer in tree.ChildLayers()] == [
    *('one', 'some_0', 'some_1', 'named_x', 'named_y')
  ]
  assert tree.children.one is tree.one and tree.children.some[1] is tree.some[1]
  assert list(tree.WeightSpecs())[:3] == ['top.one.w', 'top.one.mean', 'top.one.steps']


def testPathUsesTheNameInTheParentNotInTheParams():
  tree = _Make(variables=False, **{'tpl.name': 'other'})
  assert tree.one.params.name == 'other'
  assert tree.one.path == 'top.one'


def testUnknownAttributeNamesTheChildren():
  tree = _Make(variables=False)
  with pytest.raises(AttributeError, match=naming.Naming('Tree', "'two'", 'one', 'some')):
    _ = tree.two
  assert not hasattr(tree, 'two')


def _Creating(*calls):
  p = nested_layers.ConstructorLayer.Params().Set(name='top', calls=calls)
  return p.Instantiate


def _Child(name):
  return lambda layer: layer.CreateChild(name, nested_layers.Scale.Params())


def _Weight(name):
  return lambda layer: layer.CreateVariable(name, weight_params.WeightParams([2]))


@pytest.mark.parametrize(
  'name_and_calls',
  [
    ('a', _Child('a'), _Child('a')),
    ('a', _Child('a'), _Weight('a')),
    ('a', _Weight('a'), _Weight('a')),
    ('a', _Weight('a'), lambda layer: layer.CreateChildren('a', [nested_layers.Scale.Params()])),
    ('theta', _Child('theta')),
    ('path', _Weight('path')),
  ],
)
def testUsedNamesRaise(name_and_calls):
  name, *calls = name_and_calls
  with pytest.raises(ValueError, match=naming.Naming('top', repr(name), 'taken')):
    _Creating(*calls)()


@pytest.mark.parametrize('name', ['a.b', 'a[0]', '', '1a'])
def testInvalidNamesRaise(name):
  with pytest.raises(ValueError):
    _Creating(_Child(name))()
  with pytest.raises(ValueError):
    _Make(nested_layers.Scale, name=name)


def testCreatingAfterInstantiateVariablesRaises():
  tree = _Make()
  for call in (_Child('late'), _Weight('late')):
    with pytest.raises(ValueError, match=naming.Naming('top', "'late'", '__init__')):
      call(tree)


def testAChildMustBeParams():
  with pytest.raises(TypeError, match=naming.Naming('top.a', 'Params', 'Scale')):
    _Creating(lambda layer: layer.CreateChild('a', _Make(nested_layers.Scale)))()


def testParamsAreCopiedAndFrozen():
  p = nested_layers.Tree.Params().Set(name='top')
  tree = p.Instantiate()
  p.Set(name='changed', **{'tpl.shape': [7]})
  assert tree.params.name == 'top' and tree.params.tpl.shape == [3]
  for change in ({'name': 'x'}, {'tpl.shape': [4]}):
    with pytest.raises(TypeError):
      tree.params.Set(**change)
  assert nested_layers.Scale.Params().name == ''


def testChildrenDoNotChangeTheirTemplate():
  tree = _Make(variables=False, dtype=tf.float64)
  assert tree.params.tpl.dtype is None and tree.params.tpl.name == ''


# ---- inheritance


def testRootDefaults():
  p = _Make(variables=False).one.params
  assert (p.dtype, p.fprop_dtype, p.random_seed) == (tf.float32, tf.float32, 0)
  assert p.params_init == WeightInit.Xavier()


def testChildrenInheritParamsThatTheyLeaveNone():
  values = {
    'dtype': tf.float64,
    'fprop_dtype': tf.bfloat16,
    'random_seed': 7,
    'params_init': WeightInit.Gaussian(0.1),
  }
  for layer in _Make(variables=False, **values).Descendants():
    assert {k: layer.params.Get(k) for k in values} == values


def testAChildKeepsItsOwnValueEvenIfItIsTheDefault():
  tree = _Make(
    variables=False, fprop_dtype=tf.bfloat16, random_seed=7, **{'tpl.fprop_dtype': tf.float32}
  )
  tree2 = _Make(variables=False, random_seed=7, **{'tpl.random_seed': 0})
  assert (tree.params.fprop_dtype, tree.one.params.fprop_dtype) == (tf.bfloat16, tf.float32)
  assert (tree2.params.random_seed, tree2.one.params.random_seed) == (7, 0)


def testParamsGoThroughText():
  p = _Make(variables=False, dtype=tf.float64, params_init=WeightInit.Gaussian(0.1)).params
  again = nested_layers.Tree.Params().Set(dtype=tf.float32, params_init=WeightInit.Xavier())
  again.Set(fprop_dtype=tf.float32, random_seed=1).FromText(p.ToText())
  assert again == p


# ---- weights


def testCountingAllocatesNothing():
  tree = _Make(variables=False, **{'tpl.shape': [10**6, 10**6]})  # Four terabytes each.
  assert tree.NumParams() == 5 * 10**12
  assert len(tree.WeightSpecs()) == 15


def testInitialValuesDependOnSeedAndPathOnly():
  def Values(tree):
    return {k: v.numpy() for k, v in tree.VariablesByPath().items()}

  base = Values(_Make())
  weights = [v for k, v in base.items() if k.endswith('.w')]
  assert len({w.tobytes() for w in weights}) == 5
  tf.random.set_seed(77)
  for path, value in Values(_Make()).items():
    np.testing.assert_array_equal(value, base[path])
  # In another order, piece by piece, on another device.
  tree = _Make(variables=False)
  tree.named.y.InstantiateVariables('CPU:1')
  tree.some[1].InstantiateVariables()
  tree.InstantiateVariables()
  for path, value in Values(tree).items():
    np.testing.assert_array_equal(value, base[path])
  assert tree.vars.named.y.w.device.endswith('CPU:1')
  assert tree.vars.one.w.device.endswith('CPU:0')
  other = Values(_Make(random_seed=1))
  assert not np.array_equal(other['top.one.w'], base['top.one.w'])


def testInstantiatingAgainKeepsTheVariables():
  tree = _Make()
  before = tree.VariablesByPath()
  tree.InstantiateVariables()
  assert all(v is before[path] for path, v in tree.VariablesByPath().items())


def testVariablesCanBeCreatedWhileTracing():
  tree = _Make(variables=False)

  @tf.function(autograph=False)
  def Run(x):
    tree.InstantiateVariables()
    return tree(x)

  assert len(Run(tf.ones([2, 3]))) == 3
  assert tree.vars.one.w.numpy().shape == (3,)


def testVarsMirrorTheTree():
  tree = _Make()
  assert tree.vars.named.x.w is tree.named.x.vars.w
  assert tree.vars.some[1].w is tree.VariablesByPath()['top.some[1].w']
  assert list(tree.VariablesByPath()) == list(tree.WeightSpecs())
  assert isinstance(tree.vars.some[1], nested_map.NestedMap)


def testTrainableVariablesAndTheirCount():
  tree = _Make()
  assert {p for p, v in tree.VariablesByPath().items() if v.trainable} == {f'{p}.w' for p in PATHS}
  assert tree.NumParams() == 15
  assert len(tree.trainable_variables) == 5 and len(tree.variables) == 15


def testALayerDoesNotListItsParentsVariables():
  # The parent is reachable from a child; tf.Module must not walk up to it.
  tree = _Make()
  assert len(tree.one.variables) == 3
  assert len(tree.one.trainable_variables) == 1


def testMissingVariablesRaiseWithAdvice():
  tree = _Make(variables=False)
  for ask in (lambda: tree.vars, lambda: tree.theta, tree.VariablesByPath, lambda: tree.one(1)):
    with pytest.raises(ValueError, match=naming.Naming('top', 'InstantiateVariables')):
      ask()


def testThetaIsInFPropDtype():
  tree = _Make(fprop_dtype=tf.bfloat16)
  theta = tree.theta
  assert theta.one.w.dtype == tf.bfloat16
  assert theta.some[1].mean.dtype == tf.bfloat16
  assert theta.named.x.steps.dtype == tf.int32
  assert tree.vars.one.w.dtype == tf.float32
  y, *_ = tree(tf.ones([2, 3], tf.bfloat16))
  assert y.dtype == tf.bfloat16


def testThetaWithoutCastIsTheVariable():
  tree = _Make()
  assert tree.theta.one.w is tree.vars.one.w


def testGradientsPassTheCast():
  tree = _Make(fprop_dtype=tf.bfloat16)
  with tf.GradientTape() as tape:
    y, *_ = tree(tf.ones([2, 3], tf.bfloat16))
  grad = tape.gradient(y, tree.vars.one.w)
  assert grad.dtype == tf.float32 and np.all(np.isfinite(grad))


def testFPropTakesWeightsFromTheta():
  tree = _Make()
  theta = tree.ThetaFrom(tf.nest.map_structure(tf.zeros_like, tree.vars))
  y, *_ = tree.FProp(theta, tf.ones([2, 3]))
  assert not y.numpy().any()
  np.testing.assert_array_equal(
    tree(tf.ones([2, 3]))[0], tree.FPropDefaultTheta(tf.ones([2, 3]))[0]
  )


# ---- costs


def testMetaIsTracedWithoutVariables():
  spec = tf.TensorSpec([3, 4], tf.float32)
  nest = nested_map.NestedMap(a=spec, b=None, ids=tf.TensorSpec([2], tf.int32))

  def TwoProducts(w, nest, unused, x):
    y = tf.matmul(nest.a, w)
    return nested_map.NestedMap(y=y, none=None, ids=nest.ids), tf.matmul(x, w)

  p = layers.MatrixLayer.Params().Set(fn=TwoProducts, dims=[4, 5])
  meta = p.cls.FPropMeta(p, nest, None, spec)
  assert meta.flops == 2 * (2 * 3 * 4 * 5)
  out = tf.TensorSpec([3, 5], tf.float32)
  assert meta.out_specs[0] == {'y': out, 'none': None, 'ids': tf.TensorSpec([2], tf.int32)}
  assert meta.out_specs[1] == out
  assert len(meta.out_specs) == 2


def testMetaOfALayerLargerThanMemory():
  p = layers.MatrixLayer.Params().Set(fn=lambda w, x: tf.matmul(x, w), dims=[10**6, 10**6])
  meta = p.cls.FPropMeta(p, tf.TensorSpec([2, 10**6], tf.float32))
  assert meta.flops == 4 * 10**12


def testPositionWiseLayersDecodeByFProp():
  tpl = nested_layers.PositionWiseScale.Params()
  layer, x = _Make(nested_layers.PositionWiseTree, tpl=tpl), tf.ones([2, 4, 3])
  for outputs, states in (
    layer.Prefill(layer.theta, x, max_length=9),
    layer.ExtendStep(layer.theta, nested_map.NestedMap(), x, time_step=8),
  ):
    assert states == nested_map.NestedMap()
    for a, b in zip(outputs, layer(x), strict=True):
      np.testing.assert_array_equal(a, b)
  # A parent is position-wise only if its children are.
  layer = _Make(nested_layers.PositionWiseTree)
  with pytest.raises(NotImplementedError, match=naming.Naming('top.one', 'Scale', 'decode')):
    layer.Prefill(layer.theta, x, max_length=9)


def testALayerThatOnlyExtendsPrefillsByFProp():
  """For example a layer that adds positions: it has no states, but its positions differ."""
  layer = decoding_layers.PositionsLayer.Params().Set(name='positions').Instantiate()
  x, none = tf.zeros([1, 3]), nested_map.NestedMap()
  y, states = layer.Prefill(none, x, max_length=4)
  assert y.numpy().tolist() == [[0, 1, 2]] and not states
  extended, _ = layer.ExtendStep(none, states, x[:, :1], time_step=3)
  assert extended.numpy().tolist() == [[3]]


def testAClassThatOverridesFPropDoesNotInheritPositionWise():
  class Reversed(nested_layers.PositionWiseScale):
    def FProp(self, theta, x):
      return super().FProp(theta, x[:, ::-1])

  class Doubled(nested_layers.PositionWiseScale):
    is_position_wise = True

    def FProp(self, theta, x):
      return 2 * super().FProp(theta, x)

  class Renamed(Doubled):
    """Inherits everything."""

  classes = (nested_layers.PositionWiseScale, Reversed, Doubled, Renamed)
  assert [cls.is_position_wise for cls in classes] == [True, False, True, True]


def testALayerWithoutFPropRaises():
  with pytest.raises(NotImplementedError, match=naming.Naming('Bare', 'FProp')):

    class Bare(base_layer.BaseLayer):
      """Has no FProp."""

    _Make(Bare)(1)


def testALayerNeedsAName():
  for name in ('', 'a b', 'keys'):
    with pytest.raises(ValueError, match=naming.Naming('Scale', 'name', repr(name))):
      nested_layers.Scale.Params().Set(name=name).Instantiate()


def testAChildDoesNotReachItsParentsVariables():
  top = _Make()
  child = top.some[0]
  assert len(child.variables) == 3
  assert len(child.trainable_variables) == 1
  assert len(child.non_trainable_variables) == 2
  assert child.submodules == ()
  assert set(top.submodules) == {top.one, *top.some, *top.named.values()}


def testParamsOfAnotherClassRaise():
  with pytest.raises(ValueError, match=naming.Naming('Tree', 'Params', 'Scale')):
    nested_layers.Tree(nested_layers.Scale.Params().Set(name='x'))


@pytest.mark.parametrize('name', ['FProp', 'FPropSkips'])
def testFPropMayNotBeATfFunction(name):
  """Its trace would lose auxiliary losses and sums of other calls."""
  with pytest.raises(TypeError, match=naming.Naming(f'Decorated.{name}', 'tf.function')):
    type('Decorated', (base_layer.BaseLayer,), {name: tf.function(lambda self, theta, x: x)})


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
