# SPDX-License-Identifier: Apache-2.0
"""Invalid text raises the documented errors, changes nothing and runs nothing."""

import dataclasses
import enum
import sys
import types

import hypothesis
import pytest
from hypothesis import strategies as st

from lingvo_gpipe.core import hyperparams, literals, params_diff, params_text
from lingvo_gpipe.pipeline.schedule import actions, schedules
from tests import fuzzing

_calls = []


class _Colour(enum.Enum):
  RED = 1


@dataclasses.dataclass
class _Record:
  x: int = 0
  y: object = None


@dataclasses.dataclass(frozen=True)
class _Pair:
  a: int
  b: str = ''


def _Boom(*args, **kwargs):
  _calls.append((args, kwargs))


class _Called:
  """A class that text must not instantiate: it is not a record."""

  def __init__(self, *args, **kwargs):
    _Boom(*args, **kwargs)


class _Lazy(types.ModuleType):
  """A module that imports on attribute access."""

  def __getattr__(self, name):
    if not name.startswith('__'):
      _Boom(name)
    raise AttributeError(name)


_CANARIES = (_Boom, _Called, _Record, _Pair, _Colour)
for _value in _CANARIES:
  _value.__module__ = 'canary'
literals.AllowPackageOf(_Record)


@pytest.fixture(scope='module', autouse=True)
def _Canaries():
  """A module of functions that no text may call."""
  canary = _Lazy('canary')
  for value in _CANARIES:
    setattr(canary, value.__qualname__, value)
  canary.sub = _Lazy('canary.sub')
  sys.modules['canary'] = canary
  yield
  del sys.modules['canary']


def _Params():
  """Returns Params with a value of every kind."""
  p = hyperparams.Params()
  inner = hyperparams.InstantiableParams(_Record)
  inner.Define('x', 1, '')
  inner.Define('names', ['a', 'b'], '')
  values = {
    'flag': True, 'count': 3, 'rate': 0.5, 'text': 'some words', 'none': None, 'data': b'\x00',
    'items': [1, 2.5, 'c'], 'pair': (1, 'b'), 'table': {'k': 1, 2: [3]}, 'some': {1, 2},
    'frozen': frozenset([1]), 'span': range(3), 'number': 1 + 2j, 'record': _Record(1, [2]),
    'named': _Pair(1, 'x'), 'colour': _Colour.RED, 'cls': _Record, 'fn': _Boom, 'inner': inner,
    'layers': [inner.Copy(), inner.Copy()], 'groups': {'k': inner.Copy()},
  }  # fmt: skip
  for name, value in values.items():
    p.Define(name, value, '')
  return p


_TEXTS = [
  _Params().ToText(),
  'count:1; rate : 1e-3;text:\'a;b\';layers[1].x:2\n# a comment\ninner.names:["a"]',
  *(line + '\n' for line in _Params().ToText().splitlines()),
  'record : type/canary/_Record(x=3, y=type/canary/_Boom)',
  'named : type/canary/_Pair(a=1)',
  'record[x] : 3',
  "groups['k'].x : 3",
  'layers[-1].names[0] : c',
]
_PARTS = [
  ':', ';', '\n', '\\', "'", '"', '"""', "b'", '[', ']', '(', ')', '{', '}', ',', '=', '.', '#',
  '/', '*', '**', '-', '--', '~', '@', '%', 'f"{x}"', 'lambda: 0', '...', 'None', 'nan', 'inf',
  '-inf', '1e999', '1_0', '0x', '0b2', '9' * 5000, '1e99999999', 'True', 'type/',
  'type/canary/_Boom', 'type/canary/_Called()', 'type/canary/_Called', 'type/canary/_Boom()',
  'type/canary/sub.thing', 'type/canary/other', 'type/canary/_Record(x={[]: 1})',
  'type/canary/_Pair()', 'type/builtins/eval', 'type/os/system("x")',
  'type/builtins/eval("_Boom()")', 'type/antigravity/x', 'range(', 'range(1, 2, 0)', 'set(',
  'set(range(10**9))', 'set(range(999999999999))', 'frozenset(range(999999999999))',
  'frozenset([[]])', 'complex("x")', '<a.b>', 'tf.float32', 'tf.nope', '__import__("os")',
  'inner', 'layers[', 'layers[9]', "groups['x']", '[x]', '\x00', '\ud800', '\u2028', '\r',
  'e\u0301', '(((', ')))', '{1: 2, **{}}', '{[]}', '[*a]', '*[1]', 'a if b else c',
  '1 if 1 else 2', 'x := 1', '(yield)', 'await x', '[x for x in y]', "'a' 'b'", '5 #1', '\t', ' ',
]  # fmt: skip

_text = st.one_of(
  fuzzing.NearlyRight(_TEXTS, _PARTS, st.text(max_size=6)),
  st.sampled_from(_PARTS),
  st.lists(st.sampled_from(_PARTS), max_size=8).map(''.join),
  st.text(),
)


def _Check(read, *documented):
  """Calls `read`, which may raise a documented error only, and must not import anything."""
  _calls.clear()
  modules = set(sys.modules)
  try:
    read()
  except documented as e:
    assert '\n' not in str(e)
  assert not _calls
  assert set(sys.modules) == modules


@fuzzing.Settings(2)
@hypothesis.given(_text)
@hypothesis.example('[1,\r2')  # Python also ends lines at these characters.
@hypothesis.example('\r0')
def testLiterals(text):
  _Check(lambda: literals.ParseLiteral(text), ValueError)
  _Check(lambda: literals.ParseStrict(text), ValueError)
  _Check(lambda: params_text.ParseSteps(text), ValueError)


@fuzzing.Settings()
@hypothesis.given(_text)
def testParams(text):
  """FromText applies all of a text or nothing."""
  p, before = _Params(), _Params()

  def Read():
    try:
      p.FromText(text)
    except BaseException:
      assert p == before
      raise
    p.ToText()

  _Check(Read, ValueError, AttributeError)
  _Check(lambda: params_diff.FindChanges(text, before), ValueError)


@fuzzing.Settings()
@hypothesis.given(st.sampled_from(sorted(_Params().GetKeys())), _text)
def testValues(name, text):
  """The value of one param, whose type is known."""
  p = _Params()
  _Check(lambda: p.ApplyOverrides([(name, text)]), ValueError)
  _Check(lambda: p.ApplyOverrides([(text, '1')]), ValueError, AttributeError)
  types_of = {name: text}
  _Check(lambda: p.ApplyOverrides([(name, '1')], types_of), ValueError)
  _Check(lambda: _Params().FromTextWithTypes(text), ValueError, AttributeError)


@fuzzing.Settings()
@hypothesis.given(
  fuzzing.NearlyRight(
    [schedules.Get(name, 4, 4, 2 if schedules.TakesStagesPerDevice(name, 2) else 4).ToText()
     for name in schedules.Names()],
    ['F', 'B', 'V', 'I', 'W', '0F0', '9B9', '1F', 'F1', '0F99999999999', '0F' + '9' * 5000, '٣F٣',
     '-1F0', '0_0F0', '2SEND_F3', '(0F1;1B0)OVERLAP_F_B',
     ',', '\n', '#', 'None', '\u2028', '\x0c', '0F0,' * 50],
    st.text(max_size=4),
  )
)  # fmt: skip
def testSchedules(text):
  _Check(lambda: actions.Action.FromText(text), ValueError)

  def Read():
    schedule = schedules.Schedule.FromText(text)
    schedule.Validate()
    assert schedules.Schedule.FromText(schedule.ToText()) == schedule
    schedule.Picture()

  _Check(Read, ValueError)


def testTheSamplesAreValid():
  """Fuzzing starts from valid text; otherwise it would show little."""
  for text in _TEXTS:
    _Params().FromText(text)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
