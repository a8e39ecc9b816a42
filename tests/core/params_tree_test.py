# SPDX-License-Identifier: Apache-2.0
"""Tests of walks over Params: paths and hints, copies, freezing, equality, Visit."""

import collections
import copy
import dataclasses
import math
import pickle
import sys
import threading

import pytest

from lingvo_gpipe.core import hyperparams, nested_map, params_tree
from tests import naming
from tests.toys import params_samples

Layer, Options = params_samples.Layer, params_samples.Options
_Activation, _Leaf = params_samples.Activation, params_samples.Leaf
_Model, _Message = params_samples.Model, params_samples.Message


# --- Paths -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('path', 'value'),
  [
    ('task.train.learning_rate', 0.1),
    ('task.layers[1].dim', 1),
    ('task.layers[-1].dim', 2),
    ('task.layers[2].sizes[0]', 2),
    ("task.groups['a'].x", 1),
    ('task.groups["b.c"].x', 2),
    ('task.groups[7].x', 3),
    ('task.stages[0].x', 4),
    ('task.stages[1][0]', 5),
    ('task.stages[1][1].x', 6),
    ('task.sub[second].x', 8),
    ('task.sub[1][1].x', 8),
  ],
)
def testPathsReadAndWrite(path, value):
  p = _Model()
  assert p.Get(path) == value
  assert p.Set(**{path: 'new'}) is p
  assert p.Get(path) == 'new'
  assert p != _Model()
  assert p.Set(**{path: value}) == _Model()


def testSetInTuplesAndRecordsReplacesThem():
  p = _Leaf(t=(1, [2, (3, 4)]), o=Options(names=[1]))
  before = p.o
  p.Set(**{'t[1][1][0]': 'new', 'o[alpha]': 6})
  assert p.t == (1, [2, ('new', 4)]) and p.o == Options(6, [1])
  assert before.alpha == 0.5


def testSetIsAllOrNothing():
  p = _Model()
  changes = {
    'task.train.max_steps': 5,
    'task.layers[0].sizes[0]': 9,
    'task.stages[1][0]': 1,
    'no': 1,
  }
  _Message(AttributeError, p.Set, **changes)
  assert p == _Model()


@pytest.mark.parametrize(
  ('path', 'names'),
  [
    ('task.train.lerning_rate', ['task.train.lerning_rate', 'task.train.learning_rate?']),
    ('taks', ['taks', 'task?']),
    ('task.trian.max_steps', ['task.trian (in task.trian.max_steps)', 'task.train?']),
    ('task.layers[1].dmi', ['task.layers[1].dmi', 'task.layers[1].dim?']),
    ('task.max_steps', ['task.max_steps', 'task.train.max_steps?']),
    ('train.max_steps', ['train (in train.max_steps)', 'task.train.max_steps?']),
    ('tasks.a.train.max_steps', ['tasks (in tasks.a.train.max_steps)', 'task.train.max_steps?']),
    ('task.train.zzz', ['task.train.zzz', 'learning_rate, max_steps, shuffle, warmup']),
    ('zzz', ['zzz', 'cluster, task']),
    ('task.layers[3].dim', ['task.layers[3]', '3 entries']),
    ("task.groups['A'].x", ["task.groups['A'] (in task.groups['A'].x)", "task.groups['a']?"]),
    ('task.name.x', ['task.name.x', 'task.name is', 'str']),
    ('task.train.warmup.x', ['task.train.warmup.x', 'task.train.warmup is None']),
  ],
)
def testUnknownPathsGetHints(path, names):
  p = _Model()
  message = _Message(AttributeError, p.Get, path)
  assert naming.Names(message, *names)
  assert _Message(AttributeError, p.Set, **{path: 1}) == message
  assert _Message(AttributeError, p.ParamIsSet, path) == message
  assert _Message(AttributeError, p.Delete, path) == message
  assert _Message(AttributeError, p.FromText, f'{path}:1') == message


@pytest.mark.parametrize(
  'path', ['', '.', 'a.', '.a', 'a..b', 'a[', 'a[]', 'a[b c]', 'a[0]b', 'a b']
)
def testInvalidPathsRaise(path):
  assert naming.Names(_Message(ValueError, _Model().Get, path), 'path', repr(path))


# --- Copies, freezing, equality ------------------------------------------------------------------


def testAssigningSharesAndCopyDoesNot():
  child = _Leaf(x=1)
  a, b = _Leaf(child=child), _Leaf(child=None).Set(child=child)
  child.x = 2
  assert a.child.x == b.child.x == 2
  for copied in (a.Copy(), copy.deepcopy(a), copy.copy(a)):
    copied.child.x = 3
    assert child.x == 2 and type(copied) is hyperparams.Params
  assert type(hyperparams.InstantiableParams(Layer).Copy()) is hyperparams.InstantiableParams


def testCopyKeepsSharingAndSharesObjectsThatCannotBeCopied():
  child, lock = _Leaf(x=1), threading.Lock()
  p = _Leaf(a=child, b=[child], lock=lock, cls=Layer, fn=_Activation).Copy()
  assert p.a is p.b[0] and p.a is not child
  assert p.lock is lock and p.cls is Layer and p.fn is _Activation


def testDeepTreesAreCopiedInLinearTime():
  p = _Leaf(x=1)
  for _ in range(100):  # If copies did not share defaults, this would take exponential time.
    p = _Leaf(child=p)
  assert p.Copy() == p


def _Containers():
  return _Leaf(
    plain=[1, [2]],
    mapping={'k': [1]},
    ordered=collections.OrderedDict(b=1, a=[2]),
    nested=nested_map.NestedMap(a=[1]),
    pair=(1, [2]),
    options=Options(names=[1]),
    some={1, 2},
    tpl=_Leaf(x=[1]),
    tpls=[_Leaf(x=[1]), {'k': _Leaf(x=[1])}],
  )


def testFreezeIsDeep():
  p = _Containers()
  p.Freeze()
  assert p.IsImmutable() and p == _Containers()
  attempts = [
    lambda: setattr(p, 'plain', 1),
    lambda: p.Set(plain=1),
    lambda: p.Set(**{'tpl.x': 1}),
    lambda: p.Set(**{'plain[0]': 1}),
    lambda: p.Set(**{'pair[1][0]': 1}),
    lambda: p.Define('new', 1, ''),
    lambda: p.Delete('plain'),
    lambda: p.Delete('tpl.x'),
    lambda: p.FromText('tpl.x:[2]'),
    lambda: p.MergeCommonKeysFrom(_Containers()),
    lambda: setattr(p.tpl, 'x', 1),
    lambda: setattr(p.tpls[1]['k'], 'x', 1),
  ]
  for attempt in attempts:
    assert len(_Message(TypeError, attempt)) < 100
  assert p == _Containers()
  p.Freeze()
  assert 'plain' in _Message(TypeError, attempts[0])
  assert 'tpl.x' in _Message(TypeError, attempts[2])


_REFUSED_CHANGES = [
  lambda p: p.plain.append(1),
  lambda p: p.plain[1].append(1),
  lambda p: p.plain.__setitem__(0, 1),
  lambda p: p.plain.__delitem__(0),
  lambda p: p.plain.__iadd__([1]),
  lambda p: p.Get('plain').append(1),
  lambda p: p.Get('plain[1]').append(1),
  lambda p: p.mapping['k'].append(1),
  lambda p: p.nested.a.append(1),
  lambda p: p.pair[1].append(1),
  lambda p: p.options.names.append(1),
  lambda p: p.tpl.x.append(1),
  lambda p: p.Get('tpl.x').append(1),
  lambda p: _Leaf(child=p).Get('child.plain[1]').append(1),
  lambda p: p.tpls.pop(),
  lambda p: p.tpls[0].x.append(1),
  lambda p: [value.clear() for name, value in p.IterParams() if name == 'plain'],
]


@pytest.mark.parametrize('change', _REFUSED_CHANGES)
def testListsOfFrozenParamsRefuseChanges(change):
  p = _Containers()
  p.Freeze()
  assert 'frozen' in _Message(TypeError, change, p)
  assert p == _Containers()


@pytest.mark.parametrize(
  'change',
  [
    lambda p: p.mapping.update(k=1),
    lambda p: p.mapping.pop('k'),
    lambda p: p.ordered.move_to_end('b'),
    lambda p: setattr(p.nested, 'a', 1),
    lambda p: p.nested.Set('a', 1),
    lambda p: p.some.add(3),
    lambda p: p.GetDefault('plain').append(1),
  ],
)
def testChangesOfContainersDoNotReachFrozenParams(change):
  p = _Containers()
  p.Freeze()
  change(p)
  assert p == _Containers() and p.GetDefault('plain') == _Containers().plain


def testContainersOfFrozenParamsKeepTheirTypes():
  p = _Containers()
  p.Freeze()
  for name, value in _Containers().IterParams():
    assert isinstance(p.Get(name), type(value)), name
    assert p.Get(name) == value
  assert list(p.ordered) == ['b', 'a']
  assert (
    p.ToText() == _Containers().ToText() and p.ToTextWithTypes() == _Containers().ToTextWithTypes()
  )
  assert repr(p) == repr(_Containers()) and str(p) == str(_Containers())


@pytest.mark.parametrize('copies', [lambda p: p.Copy(), copy.deepcopy, copy.copy])
def testCopyOfFrozenCanBeChanged(copies):
  p = _Containers()
  p.Freeze()
  q = copies(p)
  assert q == p and not q.IsImmutable() and not q.tpl.IsImmutable()
  for name, value in _Containers().IterParams():
    assert type(q.Get(name)) is type(value), name
  q.plain[1].append(1)
  q.mapping['k'].append(1)
  q.nested.a.append(1)
  q.options.names.append(1)
  q.tpls[1]['k'].x.append(1)
  assert p == _Containers()


def testCopiesOfListsOfFrozenParamsCanBeChanged():
  p = _Containers()
  p.Freeze()
  copies = (list(p.plain), copy.copy(p.plain), p.plain.copy(), p.plain[:], p.plain + [2])
  for mutable in (*copies, copy.deepcopy(p.plain), pickle.loads(pickle.dumps(p.plain))):
    assert type(mutable) is list
    mutable.append(1)
  assert type(copy.deepcopy(p.plain)[1]) is list
  assert p == _Containers()


def testOtherParamsCanHoldAListOfFrozenParams():
  p = _Containers()
  p.Freeze()
  q = _Leaf(plain=p.plain)
  assert q.ToTextWithTypes() == _Leaf(plain=_Containers().plain).ToTextWithTypes()
  q.Set(**{'plain[0]': 7, 'plain[1][0]': 8})
  assert q.plain[0] == 7 and q.plain[1][0] == 8
  q.Copy().plain.append(1)
  assert p == _Containers()


def testFreezeCopiesTheCallersContainers():
  sizes = [1]
  p = _Leaf(sizes=sizes)
  p.Freeze()
  sizes.append(2)
  assert p.sizes == [1]


def testPickle():
  p = _Containers()
  assert pickle.loads(pickle.dumps(p)) == p
  p.Freeze()
  q = pickle.loads(pickle.dumps(p))
  assert q == p and q.IsImmutable()
  _Message(TypeError, setattr, q, 'plain', 1)


def testEquality():
  assert _Model() == _Model() and _Model() != _Model().Set(**{'task.layers[2].sizes[0]': 7})
  assert _Leaf(a=1, b=2) == _Leaf(b=2, a=1)
  assert _Leaf(a=1) != _Leaf(a=1, b=None) and _Leaf(a=1) != {'a': 1}
  assert _Leaf(a=[math.nan]) == _Leaf(a=[float('nan')])
  assert _Leaf(a=[1]) != _Leaf(a=(1,))
  assert _Leaf(a=1) == _Leaf(a=1.0) != _Leaf(a=True)
  assert _Leaf(a=0.0) != _Leaf(a=-0.0)
  numpy = pytest.importorskip('numpy')
  assert _Leaf(a=numpy.ones(3)) == _Leaf(a=numpy.ones(3)) != _Leaf(a=numpy.zeros(3))
  assert _Leaf(a=numpy.ones(3)) != _Leaf(a=numpy.ones(4))


@dataclasses.dataclass
class _Cached:
  size: int
  cache: int = dataclasses.field(compare=False, default=0)


@pytest.mark.parametrize(
  'a, b',
  [
    (1, 1.0),
    ([0.0], [-0.0]),
    ({'a': 1, 'b': 2}, {'b': 2, 'a': 1}),
    ({'a': 1}, {'a': True}),
    (frozenset([0, 8]), frozenset([8, 0])),
    (_Cached(1, 2), _Cached(1, 3)),
  ],
)
def testValuesThatAComputationDistinguishesAreNotExactlyEqual(a, b):
  assert a == b
  assert params_tree.Equal(a, a, exactly=True)
  assert not params_tree.Equal(a, b, exactly=True)


# --- Walks ---------------------------------------------------------------------------------------


def testVisit():
  p = _Leaf(
    a=_Leaf(b=1),
    c=[2, (3,)],
    d={'k': _Leaf(x=4)},
    e=[('first', _Leaf(x=5))],
    f=[7],
    g=Options(names=[6]),
  )
  visited, entered, exited = {}, [], []
  p.Visit(
    visited.__setitem__,
    lambda key, value: entered.append(key) or key != 'f',
    lambda key, value: exited.append(key),
  )
  assert visited == {
    'a.b': 1,
    'c[0]': 2,
    'c[1][0]': 3,
    "d['k'].x": 4,
    'e[first].x': 5,
    'f': [7],
    'g[alpha]': 0.5,
    'g[names][0]': 6,
  }
  assert entered == [
    *('', 'a', 'c', 'c[1]', 'd', "d['k']", 'e', 'e[first]', 'f', 'g', 'g[names]'),
  ]
  assert exited == ['a', 'c[1]', 'c', "d['k']", 'd', 'e[first]', 'e', 'g[names]', 'g', '']


def testVisitedKeysArePaths():
  p = _Model()
  p.Visit(lambda key, value: p.Get(key) is value or pytest.fail(key))


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
