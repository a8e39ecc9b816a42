# SPDX-License-Identifier: Apache-2.0
"""Tests of the text form of values; hyperparams_test has round trips of all kinds of values."""

import collections
import dataclasses
import enum
import fractions
import functools
import os
import pathlib
import re
import subprocess
import sys
import threading

import pytest

from lingvo_gpipe.core import hyperparams, literals, params_text
from tests import naming


class Level(enum.IntEnum):
  LOW = 1


Point = collections.namedtuple('Point', ['x', 'y'])
literals.AllowPackageOf(Level)


@pytest.mark.parametrize(
  ('value', 'text'),
  [
    (None, 'None'),
    (True, 'True'),
    (1.0, '1.0'),
    (0.1, '0.1'),
    (float('-inf'), '-inf'),
    ("it's\n", '"it\'s\\n"'),
    ((1,), '(1,)'),
    ((), '()'),
    ([1, 'a'], "[1, 'a']"),
    ({'a': {1: None}}, "{'a': {1: None}}"),
    (len, 'type/builtins/len'),
    (subprocess.Popen, 'type/subprocess/Popen'),
    (threading.Lock(), '<_thread.lock>'),
    ({'b', 1, 'a'}, "<builtins.set('a', 'b', 1)>"),
    (set(), '<builtins.set()>'),
    (frozenset({1}), '<builtins.frozenset(1)>'),
    (range(3), '<builtins.range(0, 3, 1)>'),
    (1j, '<builtins.complex(0.0, 1.0)>'),
    (Level.LOW, f"<{__name__}.Level('LOW')>"),
    (Point(1, 2), f'<{__name__}.Point(1, 2)>'),
    (fractions.Fraction(1, 3), '<fractions.Fraction(1, 3)>'),
    (functools.partial(len, [1]), '<functools.partial(type/builtins/len, [1], {})>'),
    ([1].append, "<builtins.builtin_function_or_method(type/builtins/getattr, [1], 'append')>"),
    (list[int], '<types.GenericAlias(type/builtins/list, (type/builtins/int,))>'),
  ],
)
def testWriteValue(value, text):
  assert literals.WriteValue(value) == text
  if not text.startswith(('<', 'type/')):
    assert literals.ParseLiteral(text) == value


def _Named(x, scale=1):
  return x * scale


def _Power(n, last=None):
  def Power(x):
    return x * _Power(n - 1)(x) if n else Power if last else 1

  return Power


def _Scaled(function, scale):
  @functools.wraps(function)
  def Scaled(x):
    return scale * function(x)

  return Scaled


def _Array(*items):
  return pytest.importorskip('numpy').array(items)


# Each makes one object, of a value that tells it apart.
_MAKERS = {
  'array': lambda x: _Array(1.0, x),
  'array of objects': lambda x: _Array('a', x, None),
  'partial': lambda x: functools.partial(_Named, scale=x),
  'set': lambda x: {1, x},
  'range': lambda x: range(x),
  'path': lambda x: pathlib.Path('/a', str(x)),
  'pattern': lambda x: re.compile(f'a{x}'),
  'method': lambda x: [x].append,
  'captured': lambda x: lambda y: x * y,
  'captured array': lambda x: (lambda array: lambda y: array * y)(_Array(x)),
  'default': lambda x: lambda y, z=x: y * z,
  'keyword default': lambda x: lambda y, *, z=x: y * z,
  'local function': lambda x: _Power(x),
  'keyword': lambda x: _Power(1, last=x > 2),
  'wrapped': lambda x: _Scaled(_Named, x),
  'code': lambda x: (lambda y: y * 2, lambda y: y * 50)[x > 2],
  'nested code': lambda x: (lambda y: [2 in {'a', 2} for _ in y], lambda y: [3 for _ in y])[x > 2],
  'operation': lambda x: (lambda y: y + 2, lambda y: y * 2)[x > 2],
}


@pytest.mark.parametrize('make', _MAKERS.values(), ids=_MAKERS)
def testTextDistinguishesObjects(make):
  assert literals.WriteValue(make(2)) == literals.WriteValue(make(2))
  assert literals.WriteValue([make(2)]) != literals.WriteValue([make(3)])
  assert literals.UnwrittenClasses(make(2)) == []


def testTextIsTheSameInEveryProcess():
  program = (
    'from tests.core import literals_test as t\n'
    'for make in t._MAKERS.values():\n'
    '  print(t.literals.WriteValue(make(2)))\n'
  )
  texts = {
    subprocess.run(
      [sys.executable, '-c', program],
      env={**os.environ, 'PYTHONHASHSEED': seed},
      check=True,
      capture_output=True,
      text=True,
    ).stdout
    for seed in '12'
  }
  assert len(texts) == 1


def testNamedFunctionsHaveOnlyTheirName():
  assert literals.WriteValue(_Named) == f'type/{__name__}/_Named'
  assert literals.WriteValue(literals.Shorten) == 'type/lingvo_gpipe.core.literals/Shorten'


def testUnknownClassesAreNamed():
  class Local:
    def Method(self):
      pass

  name, local = f'{__name__}.{Local.__qualname__}', Local()
  for value in (local, [1, {'a': local}], local.Method, lambda x: local, lambda x, y=local: x):
    assert literals.UnwrittenClasses(value) == [name]
  assert literals.UnwrittenClasses(threading.Event()) == ['threading.Event']
  cycle = []
  cycle.append(cycle)
  assert literals.UnwrittenClasses(lambda x: cycle)[0].startswith('type/')
  assert literals.UnwrittenClasses([1, 'a', Level.LOW, Local, len]) == []


@pytest.mark.parametrize('make', _MAKERS.values(), ids=_MAKERS)
def testTextOfObjectsKeepsThemAndMakesNone(make):
  p = hyperparams.Params()
  p.Define('x', {'a;b': make(2)}, '')
  p.Define('y', make(2), '')
  q = p.Copy().FromText(p.ToText())
  assert literals.WriteValue(q.y) == literals.WriteValue(p.y)
  text = literals.WriteValue(make(2))
  for like in (None, make(3)):
    with pytest.raises(ValueError, match=naming.Naming('p.x')):
      params_text.ParseValue(text, like, 'p.x')


def testTextWithSeparatorsIsOneValue():
  p = hyperparams.Params()
  p.Define('x', {"a;b # c\n' : "}, '')
  assert len(params_text.ParseOverrides(p.ToText())) == 1
  assert p.Copy().FromText(p.ToText()).x == p.x


def testTensorsAreDistinguished():
  tf = pytest.importorskip('tensorflow')
  for a, b in (([1.0, 2.0], [1.0, 3.0]), ('a', 'b'), (1, 1.0), ([[1]], [1])):
    assert literals.WriteValue(tf.constant(a)) == literals.WriteValue(tf.constant(a))
    assert literals.WriteValue(tf.constant(a)) != literals.WriteValue(tf.constant(b))

  @tf.function
  def Trace(x):
    assert literals.UnwrittenClasses(x) and literals.WriteValue(x).endswith('Tensor>')

  Trace(tf.constant(1))


def testNothingIsEvaluatedOrImported():
  assert 'this' not in sys.modules
  for text in (
    '__import__("this")',
    'type/this/s',
    '[type/this/s]',
    '(lambda: 1)()',
    '[1 for x in y]',
  ):
    try:
      value = params_text.ParseValue(text, None, 'x')
    except ValueError:
      continue
    assert value == text
  assert 'this' not in sys.modules


def testNumPyScalarsCountAsNumbers():
  numpy = pytest.importorskip('numpy')
  for value in (numpy.float32(0.1), numpy.int64(3), numpy.bool_(True), numpy.str_('a')):
    text = literals.WriteValue(value)
    assert 'np' not in text and params_text.ParseValue(text, None, 'x') == value
    assert literals.TypeName(value) == type(value.item()).__name__
  assert params_text.ParseValue('2', numpy.float32(1), 'x') == 2.0
  with pytest.raises(ValueError, match=naming.Naming('x', 'bool', "'2'")):
    params_text.ParseValue('2', numpy.bool_(True), 'x')


def testClassesLocalToAFunction():
  @dataclasses.dataclass
  class Local:
    x: int

  text = literals.WriteValue(Local(2))
  assert params_text.ParseValue(text, Local(1), 'x') == Local(2)
  assert params_text.ParseValue(literals.WriteValue(Local), Local, 'x') is Local
  with pytest.raises(
    ValueError, match=naming.Naming('x', 'testClassesLocalToAFunction.<locals>.Local', 'lambda')
  ):
    params_text.ParseValue(literals.WriteValue(Local), None, 'x')


def testTensorFlowDTypes():
  tf = pytest.importorskip('tensorflow')
  assert literals.WriteValue([tf.bfloat16]) == '[tf.bfloat16]'
  assert params_text.ParseValue('tf.bfloat16', None, 'x') is tf.bfloat16
  assert params_text.ParseValue('[tf.int32]', None, 'x') == [tf.int32]
  for text in ('float16', 'tf.float16', 'half'):
    assert params_text.ParseValue(text, tf.float32, 'x') is tf.float16
  for like, text in ((tf.float32, 'flot32'), (tf.float32, '5'), (None, 'tf.flot32')):
    with pytest.raises(ValueError, match='^x '):
      params_text.ParseValue(text, like, 'x')


def testAnOpenQuoteIsReadOnce():
  with pytest.raises(ValueError):
    literals.ParseLiteral("'" + "\\'" * 200_000)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
