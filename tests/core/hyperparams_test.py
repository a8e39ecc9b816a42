# SPDX-License-Identifier: Apache-2.0
"""Tests of Params: definition, access, merging and text. params_tree_test has walks over Params."""

import itertools
import math
import os
import subprocess
import sys
import threading

import hypothesis
import pytest
from hypothesis import strategies as st

from lingvo_gpipe.core import hyperparams
from tests import naming
from tests.toys import params_samples

Layer, Options = params_samples.Layer, params_samples.Options
_Activation, _Leaf = params_samples.Activation, params_samples.Leaf
_Model, _Message = params_samples.Model, params_samples.Message


# --- Definition and access -----------------------------------------------------------------------


def testDefineAndAccess():
  p = _Leaf(x=1, y=None)
  p.x = 'another type'
  assert p.Get('x') == 'another type'
  assert 'y' in p and 'z' not in p and len(p) == 2 and dir(p) == ['x', 'y'] == p.GetKeys()
  assert p.ParamIsSet('x') and not p.ParamIsSet('y')
  assert list(p.IterParams()) == [('x', 'another type'), ('y', None)]
  assert p.GetDescription('x') == 'The x.' and p.GetDefault('x') == 1
  assert p.Delete('x') is p and 'x' not in p


@pytest.mark.parametrize('name', ['X', '1a', 'a.b', '', 'a-b', '__doc__', None, 3])
def testInvalidNamesRaise(name):
  _Message(ValueError, hyperparams.Params().Define, name, 1, '')


def testDefiningANameTwiceRaises():
  assert naming.Names(_Message(AttributeError, _Leaf(x=1).Define, 'x', 2, ''), 'x', 'defined')


def testIsNeitherHashableNorIterable():
  with pytest.raises(TypeError):
    hash(_Leaf(x=1))
  with pytest.raises(TypeError):
    iter(_Leaf(x=1))


def testWrongAttributeNamesGetHints():
  p = _Leaf(learning_rate=0.1)
  message = _Message(AttributeError, getattr, p, 'lerning_rate')
  assert naming.Names(message, 'lerning_rate', 'learning_rate?')
  assert _Message(AttributeError, setattr, p, 'lerning_rate', 1) == message
  assert not hasattr(p, '__array__') and not hasattr(p, 'other')


def testLongListsOfKeysAreShortened():
  p = _Leaf(**{f'key_{i}': i for i in range(100)})
  assert naming.Names(_Message(AttributeError, p.Get, 'zzz'), 'zzz', 100)


def testDefaultsAreIndependentOfValues():
  p = _Leaf(tpl=_Leaf(x=1), sizes=[1])
  p.tpl.x = 2
  p.sizes.append(2)
  assert p.GetDefault('tpl') == _Leaf(x=1) and p.GetDefault('sizes') == [1]
  p.GetDefault('sizes').append(3)
  assert p.GetDefault('sizes') == [1] and p.Copy().GetDefault('tpl').x == 1
  assert p.GetDefault('tpl.x') == 1


def testInstantiate():
  p = hyperparams.InstantiableParams(Layer)
  p.Define('dim', 4, '')
  layer = p.Instantiate(name='x')
  assert type(layer) is Layer and layer.params is p and layer.kwargs == {'name': 'x'}
  assert 'cls' in _Message(ValueError, hyperparams.InstantiableParams().Instantiate)


def testDefinitionsOfACopyAreItsOwn():
  p = hyperparams.Params()
  p.Define('a', 1, 'First.')
  new = p.Copy()
  new.Define('b', 2, 'Second.')
  p.Define('c', 3, 'Third.')
  new.Delete('a')
  assert (p.GetKeys(), new.GetKeys()) == (['a', 'c'], ['b'])
  assert p.Copy().GetDescription('a') == 'First.' and new.GetDefault('b') == 2


def testMergeAndCopyFields():
  source, sizes = hyperparams.InstantiableParams(Layer), [1]
  source.Define('sizes', sizes, '')
  source.Define('tpl', _Leaf(x=1), '')
  source.Define('only_here', 1, '')
  target = hyperparams.InstantiableParams(str)
  target.Define('sizes', None, '')
  target.Define('tpl', _Leaf(other=1), '')
  start = target.Copy()

  merged = start.Copy()
  assert merged.MergeCommonKeysFrom(source) is merged
  assert merged.cls is str and merged.sizes == [1] and merged.tpl == _Leaf(x=1)
  merged.sizes.append(2)
  merged.tpl.x = 2
  assert sizes == [1] and source.tpl.x == 1

  to = start.Copy()
  assert 'only_here' in _Message(AttributeError, hyperparams.CopyFieldsTo, source, to)
  assert to == start
  skip = ['tpl']
  assert hyperparams.CopyFieldsTo(source, to, skip, ignore_unknown_keys=True) is to
  assert to.sizes == [1] and to.tpl == start.tpl and to.cls is str and skip == ['tpl']
  hyperparams.CopyFieldsTo(source, to, 'only_here')
  assert to.tpl == source.tpl

  to = start.Copy()
  assert hyperparams.CopyFieldsSubsetTo(source, to, ['sizes']) is to
  assert to == start.Copy().Set(sizes=[1])


def testFieldsOfFrozenParamsAreCopied():
  values = {f'sizes_{i}': [[i]] for i in range(50)}
  source, target = _Leaf(**values), _Leaf(**dict.fromkeys(values))
  source.Freeze()
  assert hyperparams.CopyFieldsTo(source, target) == source
  target.sizes_0[0].append(1)
  assert source.sizes_0 == [[0]]


# --- Text ----------------------------------------------------------------------------------------


def testToText():
  p = _Leaf(
    b='it\'s "x"\n\n#;',
    a=_Leaf(y=None, x=True),
    empty=[],
    mixed=[1, _Leaf(x=2), []],
    groups={'k': _Leaf(x=3)},
    sub=[('first', _Leaf(x=4))],
    cls=Layer,
    options=Options(),
    steps={3},
  )
  module = params_samples.__name__
  assert p.ToText().splitlines() == [
    'a.x : True',
    'a.y : None',
    "b : 'it\\'s \"x\"\\n\\n#;'",
    f'cls : type/{module}/Layer',
    'empty : []',
    "groups['k'].x : 3",
    'mixed[0] : 1',
    'mixed[1].x : 2',
    'mixed[2] : []',
    f'options : type/{module}/Options(alpha=0.5, names=[])',
    'steps : <builtins.set(3)>',
    'sub[first].x : 4',
  ]
  text, types = p.ToText(include_types=True)
  assert text == p.ToText() and types['a.x'] == 'bool' and types['cls'] == 'type'
  assert p.Copy().FromText(text) == p
  assert p.ToText(separator='=').startswith('a.x = True\n')


def _Plain():
  scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.text(alphabet='\'"\\\n\r;:#[]{}() abnTrue\x00\u2028\ud800'),
    st.binary(),
    st.sampled_from([Layer, _Activation, Options]),
  )
  keys = st.one_of(st.integers(), st.text(), st.booleans(), st.tuples(st.integers(), st.text()))
  return st.recursive(
    scalars,
    lambda inner: st.one_of(
      st.lists(inner),
      st.lists(inner).map(tuple),
      st.dictionaries(keys, inner),
      st.builds(Options, st.floats(), st.lists(inner)),
    ),
    max_leaves=8,
  )


def _SameTypes(a, b):
  assert type(a) is type(b)
  if isinstance(a, (list, tuple)):
    assert all(map(_SameTypes, a, b))
  elif isinstance(a, dict):
    assert all(map(_SameTypes, a.items(), b.items()))
  elif isinstance(a, Options):
    assert _SameTypes(vars(a), vars(b))
  elif isinstance(a, float) and not math.isnan(a):
    assert math.copysign(1, a) == math.copysign(1, b)
  return True


@hypothesis.settings(deadline=None, max_examples=150)
@hypothesis.given(value=_Plain())
def testTextLosesNothing(value):
  p = _Leaf(x=value, nested=_Leaf(y=[value], z=None))
  text = p.ToText()
  assert len(text.split('\n')) == 4 and all(' : ' in line for line in text.split('\n')[:3])
  # Read over None, over values of the same type, and over values of other types.
  fresh = _Leaf(x=None, nested=_Leaf(y=None, z=None)).FromText(text)
  assert fresh == p and _SameTypes(fresh.x, value) and _SameTypes(fresh.nested.y, [value])
  same = p.Copy().FromText(text)
  assert same == p and _SameTypes(same.x, value)
  other = _Leaf(x='text', nested=_Leaf(y=3.5, z=3)).FromTextWithTypes(p.ToTextWithTypes())
  assert other == p and _SameTypes(other.x, value) and other.nested.z is None
  assert p.TextDiff(other) == ''


@hypothesis.settings(deadline=None, max_examples=200)
@hypothesis.given(a=_Plain(), b=_Plain())
def testTextKeepsTheTypeOfTheValueOrRaises(a, b):
  p, q = _Leaf(x=a), _Leaf(x=b)
  try:
    q.FromText(p.ToText())
  except ValueError as e:
    assert str(e).startswith('x ') and q == _Leaf(x=b)
  else:
    # A float accepts an int, a str unquoted text, and None anything. A dict replaces the fields of
    # a record that it names.
    is_part = isinstance(a, dict) and isinstance(q.x, type(b)) and not isinstance(b, dict)
    assert q == p or isinstance(b, (float, str)) or is_part or q.x == pytest.approx(a)


@hypothesis.settings(deadline=None, max_examples=300)
@hypothesis.given(text=st.text(alphabet='a.b:[]\'"(){};\n#1\\ type/<>'), kind=st.integers(0, 8))
def testAnyTextIsReadOrRaises(text, kind):
  values = [None, True, 1, 0.5, 'a', [1], (1,), {'a': 1}, Layer]
  p = _Leaf(a=values[kind], b=_Leaf(a=[_Leaf(b=values[kind])]))
  before = p.Copy()
  for attempt in (text, f'a:{text}'):
    try:
      p.FromText(attempt)
    except (ValueError, AttributeError) as e:
      assert '\n' not in str(e) and p == before
    p = before.Copy()


def testFromTextTakesOverrides():
  p = _Model()
  assert p.FromText('task.train.learning_rate:0.2;task.train.max_steps:1e6') is p
  assert p.task.train.learning_rate == 0.2 and p.task.train.max_steps == 1000000
  p.FromText("""
    # A comment; with a semicolon and a : colon.
    task.name : "a;b
c # no comment"
    task.layers[-1].sizes : [1,
      2]
    task.groups['b.c'].x : 9; task.sub[first].x : 10
    task.stages[1][0] : 11
  """)
  assert p.task.name == 'a;b\nc # no comment' and p.task.layers[2].sizes == [1, 2]
  assert p.task.groups['b.c'].x == 9 and p.task.sub[0][1].x == 10 and p.task.stages[1][0] == 11
  p.ApplyOverrides([('task.name', 'first'), ('task.name', 'second')])
  assert p.task.name == 'second'


@pytest.mark.parametrize(
  'text',
  [
    'task.train.max_steps:1.5',
    'task.train.zzz:1',
    'task.name',
    'task.train:1',
    'task.layers[9].dim:1',
    'task.layers[0].sizes:(1, 2)',
    'task.layers[0].dim:type/tests.no.such/Name',
  ],
)
def testFromTextIsAtomic(text):
  p = _Model()
  references = p.task.train, p.task.layers, p.task.stages
  start = 'task.train.max_steps:7;task.layers[0].sizes[0]:7;task.stages[1][0]:7;task.name:x\n'
  with pytest.raises((ValueError, AttributeError)):
    p.FromText(start + text)
  assert p == _Model()
  p.FromText(start)
  assert references[0].max_steps == 7 and references[1][0].sizes == [7] and references[2][1][0] == 7


def testTextForNestedParamsRaises():
  p = _Model()
  message = _Message(ValueError, p.FromText, 'task.train:0.1')
  assert naming.Names(message, 'task.train is Params', 'task.train.learning_rate', "'0.1'")
  message = _Message(ValueError, p.FromText, 'task.train:None')
  assert naming.Names(message, 'task.train', 'Params', 'None')
  p.task.train = None
  message = _Message(ValueError, p.FromText, 'task.train:5')
  assert naming.Names(message, 'task.train', 'None', 'Params')


def testTypeOfTheDefaultReplacesATypeOfNone():
  p = _Leaf(rate=0.5).Set(rate=None).FromText('rate:1')
  assert p.rate == 1.0 and type(p.rate) is float


class _Narrow:
  @classmethod
  def Params(cls):
    return hyperparams.InstantiableParams(cls)


class _Wide(_Narrow):
  @classmethod
  def Params(cls):
    p = super().Params()
    p.Define('width', 1, '')
    return p


def testAClassInTextMustHaveTheSameParams():
  name = f'type/{__name__}/_Narrow'
  p = _Wide.Params()
  assert 'width' in _Message(ValueError, p.FromText, f'cls:{name}')
  narrow = _Narrow.Params()
  assert 'width' in _Message(ValueError, narrow.FromText, f'cls:type/{__name__}/_Wide')
  p.cls = _Narrow  # By code; its text can be read back.
  assert p.Copy().FromText(p.ToText()) == p


class _TakesOne(_Narrow):
  def FProp(self, theta, x):
    return x


class _TakesTwo(_Narrow):
  def FProp(self, theta, x, y):
    return x + y


class _TakesOneOrTwo(_Narrow):
  def FProp(self, theta, x, y=None):
    return x if y is None else x + y


class _TakesAny(_Narrow):
  def FProp(self, theta, *args):
    return args


class _NoFunction(_Narrow):
  FProp = None


def testAClassInTextMustTakeTheSameNumberOfArguments():
  fits = {
    (former.__name__, new.__name__)
    for former, new in itertools.permutations(
      [_Narrow, _TakesOne, _TakesTwo, _TakesOneOrTwo, _TakesAny, _NoFunction], 2
    )
    if not _Refusal(former.Params(), f'cls:type/{__name__}/{new.__name__}')
  }
  assert ('_TakesOne', '_TakesTwo') not in fits and ('_TakesTwo', '_TakesOne') not in fits
  assert len(fits) == 6 * 5 - 2
  message = _Refusal(_TakesOne.Params(), f'cls:type/{__name__}/_TakesTwo')
  assert naming.Names(message, 'cls', '_TakesTwo', 'FProp(self, theta, x, y)', '_TakesOne')


def _Refusal(p, text):
  """Returns the message of a ValueError, or '' if `p` takes the text."""
  try:
    p.FromText(text)
  except ValueError as e:
    return str(e)
  return ''


def testTypeOverrides():
  p = _Leaf(x=1, y=None)
  p.FromText('x:a text\ny:5', {'x': 'str', 'y': 'str'})
  assert p.x == 'a text' and p.y == '5'
  message = _Message(ValueError, p.FromText, 'x:[1]', {'x': 'dict'})
  assert naming.Names(message, 'x', 'dict', "'[1]'")
  assert naming.Names(_Message(ValueError, p.FromTextWithTypes, 'x : 1\n'), 'types')
  assert p.Copy().FromTextWithTypes('') == p


def testTextKeepsObjectsWithoutATextForm():
  p = _Leaf(fn=lambda x: x, lock=threading.Lock(), many=[threading.Lock()], x=1)
  q = p.Copy().FromText(p.ToText().replace('x : 1', 'x : 2'))
  assert q.fn is p.fn and q.lock is p.lock and q.x == 2
  for text in p.ToText().splitlines()[:3]:
    _Message(ValueError, _Leaf(fn=None, lock=None, many=None).FromText, text)


def testTextDiff():
  a, b = _Model(), _Model()
  assert a.TextDiff(b) == ''
  b.Set(
    **{
      'task.train.learning_rate': 0.2,
      'task.layers[1].dim': 5,
      'task.name': None,
      'task.stages': (_Leaf(x=4), [5]),
      'cluster': None,
    }
  )
  b.cluster = 3
  b.Define('new', 'x', '')
  assert a.TextDiff(b).splitlines() == [
    '> cluster.devices: 2',
    '< cluster: 3',
    "< new: 'x'",
    '? task:',
    '  ? layers[1]:',
    '    > dim: 1',
    '    < dim: 5',
    "  > name: 'lm'",
    '  < name: None',
    '  > stages[1][1].x: 6',
    '  ? train:',
    '    > learning_rate: 0.1',
    '    < learning_rate: 0.2',
  ]


def testStrAndRepr():
  p = hyperparams.InstantiableParams(Layer)
  p.Define('name', 'x', '')
  p.Define('tpl', _Leaf(b=1, a=[2]), '')
  p.Define('layers', [_Leaf(x=1)], '')
  assert repr(p) == (
    f"InstantiableParams(cls=type/{params_samples.__name__}/Layer, name='x',"
    ' tpl=Params(<2 params>),'
    ' layers=<list with Params>)'
  )
  assert str(p).splitlines() == [
    'InstantiableParams {',
    f'  cls : type/{params_samples.__name__}/Layer',
    '  layers : [',
    '    [0] : {',
    '      x : 1',
    '    }',
    '  ]',
    "  name : 'x'",
    '  tpl : {',
    '    a : [2]',
    '    b : 1',
    '  }',
    '}',
  ]


def testLoadsNoTensorFlow():
  code = 'import sys; from lingvo_gpipe.core import hyperparams; print("tensorflow" in sys.modules)'
  done = subprocess.run(
    [sys.executable, '-c', code],
    env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)},
    capture_output=True,
    text=True,
    check=True,
  )
  assert done.stdout == 'False\n'


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
