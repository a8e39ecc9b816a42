# SPDX-License-Identifier: Apache-2.0
"""Tests of NestedMap alone and inside TensorFlow's nests."""

import collections
import copy
import pickle
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import pytest

from lingvo_gpipe.core import nested_map
from tests import naming

NestedMap = nested_map.NestedMap
Point = collections.namedtuple('Point', ['y', 'x'])


class MyMap(NestedMap):
  pass


_NAMES = st.from_regex(r'[a-zA-Z_][a-zA-Z0-9_]{0,5}', fullmatch=True).filter(
  lambda name: name not in dir(NestedMap) and not name.startswith('__')
)


def _Trees():
  """Returns a strategy for maps of nested containers, including empty ones."""

  def _Extend(children):
    return st.one_of(
      st.lists(children, max_size=3),
      st.lists(children, max_size=3).map(tuple),
      st.tuples(children, children).map(lambda c: Point(*c)),
      st.dictionaries(_NAMES, children, max_size=3),
      st.dictionaries(_NAMES, children, max_size=3).map(NestedMap),
    )

  leaves = st.none() | st.integers() | st.text(max_size=3)
  trees = st.recursive(leaves, _Extend, max_leaves=12)
  return st.dictionaries(_NAMES, trees, max_size=4).map(NestedMap)


def _Example():
  return NestedMap(
    w=1, enc=NestedMap(layers=[NestedMap(b=2, a=None), NestedMap(b=3)], pair=(4, 5)), empty=[]
  )


# --- keys and attributes ---


def testAttributesAreKeys():
  m = NestedMap({'b': 1}, a=2)
  m.c = 3
  assert m == {'a': 2, 'b': 1, 'c': 3} and m.c == m['c'] == 3
  assert {'a', 'b', 'c', 'Flatten', 'keys'} <= set(dir(m))
  assert not hasattr(m, '__dict__')
  del m.b
  assert 'b' not in m and not hasattr(m, 'b') and getattr(m, 'b', 7) == 7
  with pytest.raises(AttributeError, match=naming.Naming("'b'", ['a', 'c'])):
    del m.b


@pytest.mark.parametrize(
  ('key', 'names'),
  [
    ('a b', ['identifier']),
    ('a.b', ['identifier']),
    ('a\n', ['identifier']),
    ('1a', ['identifier']),
    ('', ['identifier']),
    ('\u00e4', ['identifier']),
    (3, ['str', 'got int']),
    (None, ['str', 'got NoneType']),
    ('keys', ['method', 'NestedMap']),
    ('copy', ['method', 'NestedMap']),
    ('Flatten', ['method', 'NestedMap']),
    ('__array__', ['reserved', 'Python']),
  ],
)
def testEveryWayToAddAKeyRejectsInvalidKeys(key, names):
  m = NestedMap(a=1)
  ways = [
    lambda: m.__setitem__(key, 1),
    lambda: NestedMap({key: 1}),
    lambda: NestedMap([(key, 1)]),
    lambda: NestedMap.fromkeys([key]),
    lambda: NestedMap.FromNestedDict({'x': [{key: 1}]}),
    lambda: m.update({'z': 1, key: 1}),
    lambda: m.setdefault(key, 1),
    lambda: m.__ior__({key: 1}),
    lambda: m | {key: 1},
    lambda: {key: 1} | m,
    lambda: m.Update({key: 1}),
    lambda: NestedMap.CheckKey(key),
  ]
  if isinstance(key, str):
    ways.append(lambda: setattr(m, key, 1))
  for way in ways:
    with pytest.raises(ValueError, match=naming.Naming(repr(key), *names)):
      way()
    assert m == {'a': 1}


def testErrorsOfMissingKeysSuggestSimilarKeys():
  m = NestedMap(encoder=1, decoder=2, softmax=3)
  with pytest.raises(AttributeError, match=naming.Naming("'encodr'", "mean 'encoder'")):
    _ = m.encodr
  with pytest.raises(KeyError, match=naming.Naming("'encodr'", "mean 'encoder'")):
    _ = m['encodr']
  with pytest.raises(
    AttributeError, match=naming.Naming("'zzz'", ['decoder', 'encoder', 'softmax'])
  ):
    _ = m.zzz
  with pytest.raises(KeyError, match=naming.Naming("'enc.layers[0]'", "key 'bb'")):
    NestedMap(enc=NestedMap(layers=[NestedMap(b=1)])).GetItem('enc.layers[0].bb')


def testDictUnionKeepsTheType():
  assert type(MyMap(a=1) | {'b': 2}) is MyMap
  assert type({'b': 2} | MyMap(a=1)) is MyMap
  assert NestedMap(a=1, b=1) | {'b': 2} == {'a': 1, 'b': 2}
  assert {'a': 1, 'b': 1} | NestedMap(b=2) == {'a': 1, 'b': 2}
  with pytest.raises(TypeError):
    NestedMap() | 3


# --- copies ---


def testCopyIsShallowAndDeepCopySharesTheLeavesOnly():
  leaf = object()
  m = MyMap(a=NestedMap(x=[leaf], t=({'p': leaf},)))
  for shallow in (m.copy(), copy.copy(m)):
    assert type(shallow) is MyMap and shallow is not m and shallow.a is m.a
  for deep in (m.DeepCopy(), copy.deepcopy(m)):
    assert type(deep) is MyMap and deep == m
    assert deep.a is not m.a and deep.a.x is not m.a.x and deep.a.t[0] is not m.a.t[0]
    assert deep.a.x[0] is leaf and deep.a.t[0]['p'] is leaf


@pytest.mark.parametrize('protocol', range(pickle.HIGHEST_PROTOCOL + 1))
def testPickle(protocol):
  m = MyMap(a=_Example(), p=(Point(1, 2),))
  n = pickle.loads(pickle.dumps(m, protocol))
  assert n == m and type(n) is MyMap and type(n.a.enc.layers[0]) is NestedMap
  assert n.p[0].x == 2


def testRepr():
  assert repr(NestedMap(a=[NestedMap(b=1)])) == "NestedMap({'a': [NestedMap({'b': 1})]})"


# --- conversion ---


def testFromAndToNestedDict():
  plain = {'a': {'b': [{'c': 1}, ({'d': None}, 2)]}, 'p': Point({'e': 3}, []), 'z': {}}
  m = NestedMap.FromNestedDict(plain)
  assert m == plain and m.a.b[0].c == 1 and m.a.b[1][0].d is None and m.p.y.e == 3
  assert type(m.z) is NestedMap and type(m.p) is Point
  back = m.ToNestedDict()
  assert back == plain
  types = {type(x) for x in (back, back['a'], back['a']['b'][0], back['a']['b'][1][0], back['p'].y)}
  assert types == {dict}
  assert NestedMap.FromNestedDict([{'a': 1}, 2]) == [NestedMap(a=1), 2]
  assert NestedMap.FromNestedDict(3) == 3
  assert type(MyMap.FromNestedDict({'a': {}}).a) is MyMap


@hypothesis.given(_Trees())
def testConversionsAreInverse(m):
  assert NestedMap.FromNestedDict(m.ToNestedDict()).ToNestedDict() == m.ToNestedDict() == m


# --- paths ---


def testGetItemGetHas():
  m = _Example()
  assert m.GetItem('enc.layers[1].b') == 3 and m.GetItem('enc.layers[-2].b') == 2
  assert m.GetItem('enc.pair[1]') == 5 and m.GetItem('enc') is m.enc
  assert NestedMap(a={'x y': [1]}).GetItem("a['x y'][0]") == 1
  with pytest.raises(IndexError, match=naming.Naming("'enc.layers'", '2 elements', 'index 2')):
    m.GetItem('enc.layers[2].b')
  with pytest.raises(TypeError, match=naming.Naming("'w'", 'int', "'x'")):
    m.GetItem('w.x')
  with pytest.raises(TypeError, match=naming.Naming("'enc.layers'", 'list', "'b'")):
    m.GetItem('enc.layers.b')
  for absent in ('nix', 'enc.layers[2]', 'w.x', 'enc.layers.b', 'w[0]'):
    assert m.Get(absent) is None and m.Get(absent, 9) == 9 and not m.Has(absent)
  assert m.Has('enc.layers[0].a') and m.Get('enc.layers[0].a', 9) is None  # None is a leaf.


@pytest.mark.parametrize('path', ['', '.', 'a.', '.a', 'a..b', 'a b', 'a[', 'a[x]', 'a[1]b', 3])
def testInvalidPathsRaise(path):
  m = NestedMap(a=1)
  for way in (m.GetItem, m.Get, m.Has, lambda key: m.Set(key, 1)):
    with pytest.raises(ValueError, match=naming.Naming('path', repr(path))):
      way(path)
  assert m == {'a': 1}


def testSetCreatesMissingContainers():
  m = MyMap()
  m.Set('a.b[0].c', 1)
  m.Set('a.b[1]', 2)
  m.Set('a.b[0].d', 3)
  m.Set('a.b[-1]', 4)
  assert m == {'a': {'b': [{'c': 1, 'd': 3}, 4]}} and type(m.a.b[0]) is MyMap
  m.t = (NestedMap(),)
  m.Set('t[0].x', 5)
  assert m.t[0].x == 5


@pytest.mark.parametrize(
  ('path', 'names'),
  [
    ('w.x', ["'w.x'", "'w'", 'int']),
    ('w.x.y', ["'w.x.y'", "'w'", 'int']),
    ('none.x', ["'none.x'", "'none'", 'NoneType']),
    ('list[2]', ["'list[2]'", '1 elements', 'got 2']),
    ('list[-2]', ["'list[-2]'", '1 elements', 'got -2']),
    ('list[2].x', ["'list[2].x'", '1 elements', 'got 2']),
    ('list.x', ["'list.x'", "'list'", 'is a list']),
    ('tuple[0]', ["'tuple[0]'", "'tuple'", 'is a tuple']),
    ('tuple[1].x', ["'tuple[1].x'", "'tuple'", 'is a tuple']),
    ('new[1]', ["'new[1]'", '[0]', 'got [1]']),
    ('new.list[0][1].x', ["'new.list[0][1].x'", '[0]', 'got [1]']),
    ('new.keys', ["'keys'", 'reserved']),
    ('new[0].items.x', ["'items'", 'reserved']),
  ],
)
def testAFailingSetChangesNothing(path, names):
  m = NestedMap(w=1, none=None, list=[0], tuple=(0,))
  before = m.DeepCopy()
  with pytest.raises(ValueError, match=naming.Naming(*names)):
    m.Set(path, 1)
  assert m == before


@hypothesis.given(_Trees())
def testEveryFlattenedPathLeadsToItsLeaf(m):
  items = m.FlattenItems()
  assert [m.GetItem(key) for key, _ in items] == [leaf for _, leaf in items] == m.Flatten()
  assert m.Keys() == [key for key, _ in items] and len(set(m.Keys())) == len(items)


def testGetSlice():
  m = _Example()
  assert m.GetSlice(['enc.layers[-1].b', 'w']) == {'w': 1, 'enc': {'layers': [{'b': 3}]}}
  part = m.GetSlice(('enc.layers', 'empty'))
  assert part == {'enc': {'layers': m.enc.layers}, 'empty': []}
  assert part.enc.layers is not m.enc.layers and type(part.enc) is NestedMap
  assert m.GetSlice([]) == {}
  with pytest.raises(KeyError, match='nix'):
    m.GetSlice(['w', 'enc.nix'])
  with pytest.raises(TypeError, match='collection'):
    m.GetSlice('w')


# --- merging ---


def testUpdateMergesLeafByLeaf():
  m = NestedMap(a=NestedMap(x=1, y=2), l=[NestedMap(p=1), 2], t=(1, 2), n=None)
  inner = m.a
  other = {'a': {'y': 3, 'z': {'q': 4}}, 'l': [{'r': 5}, 6, [7]], 't': (8,), 'n': 9, 'e': {}}
  assert m.Update(other) is m and m.a is inner
  assert m == {
    'a': {'x': 1, 'y': 3, 'z': {'q': 4}},
    'l': [{'p': 1, 'r': 5}, 6, [7]],
    't': (8,),
    'n': 9,
    'e': {},
  }
  assert type(m.a.z) is NestedMap
  m.a.z.q = 0
  assert other['a']['z']['q'] == 4  # Containers are not shared.


@pytest.mark.parametrize(
  'other, key',
  [({'z': 1, 'w': {'x': 1}}, 'w'), ({'z': 1, 'w': [1]}, 'w'), ({'z': 1, 'm': [1]}, 'm')],
)
def testUpdateDoesNotReplaceALeafByAContainer(other, key):
  m = NestedMap(w=1, m=NestedMap(x=1))
  with pytest.raises(ValueError, match=naming.Naming('Update', repr(key), 'delete')):
    m.Update(other)
  assert m == {'w': 1, 'm': {'x': 1}}


def testUnionChangesNeitherMap():
  m, n = NestedMap(a=NestedMap(x=1)), NestedMap(a=NestedMap(y=2))
  assert m.Union(n) == {'a': {'x': 1, 'y': 2}}
  assert m == {'a': {'x': 1}} and n == {'a': {'y': 2}}


# --- leaves ---


def testFlattenOrder():
  m = _Example()
  assert m.FlattenItems() == [
    ('enc.layers[0].a', None),
    ('enc.layers[0].b', 2),
    ('enc.layers[1].b', 3),
    ('enc.pair[0]', 4),
    ('enc.pair[1]', 5),
    ('w', 1),
  ]


@hypothesis.given(_Trees())
def testPackAndTransformKeepTheStructure(m):
  keys = m.Keys()
  named = m.Pack(keys)
  assert named.Flatten() == keys and named == m.TransformWithKey(lambda key, _: key)
  assert m.IsCompatible(named) and named.Pack(m.Flatten()) == m
  assert m.Transform(lambda leaf: (leaf,)).Transform(repr).Keys() != [] or not keys
  assert list(m.Transform(str)) == list(m)  # Insertion order too.


def testPackRequiresOneValuePerLeaf():
  m = NestedMap(a=1, b=[2, 3])
  assert m.Pack(iter('xyz')) == {'a': 'x', 'b': ['y', 'z']}
  for values in ([], [1, 2], [1, 2, 3, 4]):
    with pytest.raises(
      ValueError, match=naming.Naming('Pack', '3 leaves', f'{len(values)} values')
    ):
      m.Pack(values)


def testTransformCallsInFlattenOrderAndKeepsTypes():
  seen = []
  m = MyMap(b=Point(1, 2), a=[3], d=collections.defaultdict(list, x=4))
  n = m.TransformWithKey(lambda key, leaf: seen.append((key, leaf)) or -leaf)
  assert seen == m.FlattenItems() == [('a[0]', 3), ('b[0]', 1), ('b[1]', 2), ('d.x', 4)]
  assert n == {'b': Point(-1, -2), 'a': [-3], 'd': {'x': -4}}
  assert type(n) is MyMap and type(n.b) is Point and n.d.default_factory is list


def testFilter():
  m = _Example()
  assert m.Filter(lambda leaf: leaf is not None and leaf > 2) == {
    'enc': {'layers': [{'b': 3}], 'pair': (4, 5)},
    'empty': [],
  }
  assert m.FilterKeyVal(lambda key, _: key in ('w', 'enc.pair[1]')) == {
    'w': 1,
    'enc': {'pair': (5,)},
    'empty': [],
  }
  gone = MyMap(a=NestedMap(b=1)).Filter(lambda _: False)
  assert gone == {} and type(gone) is MyMap
  assert NestedMap(p=Point(1, 2)).Filter(lambda _: False) == {}
  with pytest.raises(ValueError, match=naming.Naming('Point', '2 fields')):
    NestedMap(p=Point(1, 2)).Filter(lambda leaf: leaf == 1)


def testIsCompatible():
  m = NestedMap(a=1, b=[2])
  assert m.IsCompatible({'b': ['x'], 'a': None, 'empty': []})
  assert not m.IsCompatible({'a': 1, 'b': []}) and not m.IsCompatible(NestedMap(a=1))


def testDebugString():
  m = NestedMap(w='x\ny', enc=NestedMap(b=None))
  assert m.DebugString() == 'enc.b    None\nw        x\n         y'
  assert NestedMap().DebugString() == ''


# --- TensorFlow ---


def testImportsNoTensorFlow():
  code = 'import sys, lingvo_gpipe.core.nested_map; sys.exit("tensorflow" in sys.modules)'
  env_path = [path for path in sys.path if path]
  subprocess.run(
    [sys.executable, '-c', f'import sys; sys.path[:0] = {env_path!r}\n{code}'], check=True
  )


@hypothesis.given(_Trees())
@hypothesis.settings(deadline=None)
def testFlattenOrderEqualsTfNest(m):
  import tensorflow as tf

  assert tf.nest.flatten(m) == m.Flatten()
  packed = tf.nest.pack_sequence_as(m, m.Keys())
  assert packed == m.Pack(m.Keys()) and type(packed) is NestedMap
  assert tf.nest.map_structure(str, m) == m.Transform(str)
  tf.nest.assert_same_structure(m, m.Transform(str))


def testTfNestKeepsTheTypeAtEveryLevel():
  import tensorflow as tf

  m = MyMap(b=[NestedMap(x=1)], a=(NestedMap(x=2), {'x': 3}))
  n = tf.nest.map_structure(lambda leaf: leaf, m)
  assert [type(x) for x in (n, n.b[0], n.a[0], n.a[1])] == [MyMap, NestedMap, NestedMap, dict]


def testTfDataKeepsNestedMaps():
  import tensorflow as tf

  source = NestedMap(x=[1, 2, 3, 4], sub=NestedMap(y=[1.0, 2.0, 3.0, 4.0]), t=([5, 6, 7, 8],))

  def _Map(m):
    assert type(m) is NestedMap and type(m.sub) is NestedMap
    return NestedMap(sum=tf.cast(m.x, tf.float32) + m.sub.y, again=NestedMap(t=m.t[0]), none=None)

  data = tf.data.Dataset.from_tensor_slices(source).map(_Map).batch(2).prefetch(1)
  assert type(data.element_spec) is NestedMap and type(data.element_spec.again) is NestedMap
  batches = list(data)
  assert all(type(b) is NestedMap and type(b.again) is NestedMap for b in batches)
  assert [b.sum.numpy().tolist() for b in batches] == [[2.0, 4.0], [6.0, 8.0]]
  assert batches[1].again.t.numpy().tolist() == [7, 8] and batches[0].none is None
  assert type(next(data.as_numpy_iterator()).again) is NestedMap
  generated = tf.data.Dataset.from_generator(
    lambda: iter([NestedMap(a=1)]), output_signature=NestedMap(a=tf.TensorSpec([], tf.int32))
  )
  assert type(next(iter(generated))) is NestedMap


@pytest.mark.parametrize('jit_compile', [False, True])
def testTfFunctionTakesAndReturnsNestedMaps(jit_compile):
  import tensorflow as tf

  traces = []

  @tf.function(jit_compile=jit_compile)
  def _F(m, scale):
    traces.append((type(m), type(m.sub), type(m.l[0])))
    return NestedMap(
      double=m.x * scale, l=[NestedMap(y=m.sub.y)], t=(m.l[0].z, NestedMap(n=None)), s=m.sub
    )

  m = NestedMap(x=tf.constant([1.0]), sub=NestedMap(y=tf.constant(2)), l=[NestedMap(z=3)])
  for _ in range(2):
    m = m.DeepCopy()
    out = _F(m, tf.constant(2.0))
  assert traces == [(NestedMap, NestedMap, NestedMap)]  # One trace for equal structures.
  types = [type(x) for x in (out, out.l[0], out.t[1], out.s)]
  assert types == [NestedMap] * 4
  assert out.double.numpy() == [2.0] and out.l[0].y.numpy() == 2 and out.t[1].n is None


def testTfControlFlowAndGradientsTakeNestedMaps():
  import tensorflow as tf

  m = NestedMap(w=tf.Variable([2.0, 3.0]), sub=NestedMap(b=tf.Variable([1.0])))
  with tf.GradientTape() as tape:
    loss = tf.reduce_sum(m.w * m.w) + tf.reduce_sum(m.sub.b)
  grads = tape.gradient(loss, m)
  assert type(grads) is NestedMap and type(grads.sub) is NestedMap
  assert grads.w.numpy().tolist() == [4.0, 6.0]

  @tf.function
  def _Loop():
    state = NestedMap(i=tf.constant(0), sub=NestedMap(total=tf.constant(0)))
    (state,) = tf.while_loop(
      lambda s: s.i < 4,
      lambda s: (NestedMap(i=s.i + 1, sub=NestedMap(total=s.sub.total + s.i)),),
      (state,),
    )
    return state

  assert _Loop().sub.total.numpy() == 6


def testTfModuleFindsVariablesAndKeepsTheType():
  import tensorflow as tf

  module = tf.Module()
  module.m = NestedMap(a=tf.Variable(1.0), l=[NestedMap(b=tf.Variable(2.0))])
  assert type(module.m) is NestedMap and type(module.m.l) is list
  assert len(module.trainable_variables) == 2


def testWrappersOfTfModuleAreContainers():
  import tensorflow as tf

  module = tf.Module()
  module.d, module.l, module.t = {'b': 1, 'a': 2}, [3], (4,)  # TensorFlow wraps all three.
  m = NestedMap(d=module.d, l=module.l, t=module.t)
  assert m.Flatten() == tf.nest.flatten(m) == [2, 1, 3, 4]
  assert NestedMap.FromNestedDict(m).d.a == 2
  assert m.ToNestedDict() == {'d': {'a': 2, 'b': 1}, 'l': [3], 't': (4,)}


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
