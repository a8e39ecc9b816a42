# SPDX-License-Identifier: Apache-2.0
"""Tests of the text form of values; hyperparams_test has round trips of all kinds of values."""

import collections
import dataclasses
import enum
import subprocess
import sys

import pytest

from lingvo_gpipe.core import literals, params_text


class Level(enum.IntEnum):
  LOW = 1


Point = collections.namedtuple('Point', ['x', 'y'])


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
    (object(), '<builtins.object>'),
    ({1}, '<builtins.set>'),
    (range(3), '<builtins.range>'),
    (1j, '<builtins.complex>'),
    (Level.LOW, f'<{__name__}.Level>'),
    (Point(1, 2), f'<{__name__}.Point>'),
    ([].append, '<builtins.builtin_function_or_method>'),
    (list[int], '<types.GenericAlias>'),
  ],
)
def testWriteValue(value, text):
  assert literals.WriteValue(value) == text
  if not text.startswith(('<', 'type/')):
    assert literals.ParseLiteral(text) == value


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
  with pytest.raises(ValueError, match='expects bool'):
    params_text.ParseValue('2', numpy.bool_(True), 'x')


def testClassesLocalToAFunction():
  @dataclasses.dataclass
  class Local:
    x: int

  text = literals.WriteValue(Local(2))
  assert params_text.ParseValue(text, Local(1), 'x') == Local(2)
  assert params_text.ParseValue(literals.WriteValue(Local), Local, 'x') is Local
  with pytest.raises(ValueError, match='local or a lambda'):
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


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
