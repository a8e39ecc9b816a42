# SPDX-License-Identifier: Apache-2.0
"""Tests of the text of params: typed values, paths, lists of overrides."""

import dataclasses
import enum
import math
import sys
from importlib import import_module  # noqa: F401  (A function that text must not name.)

import hypothesis
import keras
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from lingvo_gpipe.core import literals, nested_map, params_text
from lingvo_gpipe.input import synthetic
from lingvo_gpipe.layers import linear, norm
from tests import naming


class Color(enum.Enum):
  RED = 1
  GREEN = 2


@dataclasses.dataclass(frozen=True)
class Options:
  alpha: float = 0.5
  name: str = 'x'

  def __post_init__(self):
    if self.alpha == 13:
      raise RuntimeError('unlucky\nnumber')


def _Function(x):
  return x


MODULE = __name__
literals.AllowPackageOf(Options)
_REFUSED = [
  'type/os/system', 'type/builtins/eval', 'type/dataclasses/Field', 'type/subprocess/Popen',
  f'type/{MODULE}/import_module', 'type/lingvo_gpipe.core.hyperparams/Any',
  'type/tensorflow.python.ops.gen_io_ops/write_file', 'type/keras.src.saving.saving_api/load_model',
]  # fmt: skip


@pytest.mark.parametrize(
  ('like', 'text', 'value'),
  [
    *((False, text, True) for text in ('true', 'True', 'TRUE')),
    *((True, text, False) for text in ('false', 'False', 'FALSE')),
    *((1, text, 1000000) for text in ('1e6', '1000000', '1_000_000', '+1000000', '1000000.0')),
    (1, '0x10', 16),
    (1, '-3', -3),
    (1, '1e23', 10**23),
    (1, '007', 7),
    (0.5, '1', 1.0),
    (0.5, '-1e-3', -0.001),
    (0.5, 'inf', math.inf),
    (0.5, '-inf', -math.inf),
    ('a', 'some words', 'some words'),
    ('a', '', ''),
    ('a', '[1, 2]', '[1, 2]'),
    ('a', '5', '5'),
    ('a', "it's", "it's"),
    ('a', '"it\'s"', "it's"),
    ('a', "'None'", 'None'),
    ('a', "'two\nlines'", 'two\nlines'),
    ('a', r"'a\\b\'\n'", "a\\b'\n"),
    ([1], '[]', []),
    ([1], "['a', (1, {'b': None}), true]", ['a', (1, {'b': None}), True]),
    ((1,), '(2, 3)', (2, 3)),
    ((1,), '2, 3', (2, 3)),
    ((1,), '()', ()),
    ({'a': 1}, '{}', {}),
    (Color.RED, f"<{MODULE}.Color('RED')>", Color.RED),
    ({1}, '<builtins.set(1)>', {1}),
    (Options(), "{'alpha': 0.25}", Options(0.25, 'x')),
    (Options(), f"type/{MODULE}/Options(name='y')", Options(0.5, 'y')),
    (Options, f'type/{MODULE}/Color', Color),
    (_Function, f'type/{MODULE}/_Function', _Function),
    (_Function, f'type/{MODULE}/Options', Options),
    (_Function, literals.TypePath(tf.nn.relu), tf.nn.relu),
    (_Function, literals.TypePath(keras.activations.gelu), keras.activations.gelu),
    (linear.LinearLayer, literals.TypePath(norm.LayerNorm), norm.LayerNorm),
    (None, '5', 5),
    (None, '5.0', 5.0),
    (None, '-1e-3', -0.001),
    (None, 'true', True),
    (None, 'FALSE', False),
    (None, 'none', 'none'),
    (None, 'some words', 'some words'),
    (None, '5 # no comment', '5 # no comment'),
    (None, '2024-01-01', '2024-01-01'),
    (None, '/data/a*.txt', '/data/a*.txt'),
    (None, 'print(1)', 'print(1)'),
    (None, '...', '...'),
    (None, '', ''),
    (None, '1.2.3', '1.2.3'),
    (None, "'5'", '5'),
    (None, f'[type/{MODULE}/Color, inf]', [Color, math.inf]),
    (None, f'type/{MODULE}/Options(alpha=-1)', Options(-1)),
  ],
)
def testValues(like, text, value):
  read = params_text.ParseValue(f' {text} ', like, 'p.x')
  assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
  'like', [None, True, 1, 0.5, 'a', [1], (1,), {}, Color.RED, Options(), Options]
)
def testNoneIsAcceptedForEveryType(like):
  for text in ('None', 'NoneType'):
    assert params_text.ParseValue(text, like, 'p.x') is None


@pytest.mark.parametrize(
  ('like', 'text', 'expected'),
  [
    *((True, text, 'bool (true or false)') for text in ('0', '1', 'no', 'off', 'yes', '', 'Tru')),
    *((1, text, 'int') for text in ('1.5', 'true', 'abc', '', '1e-1', '1e999999999', 'inf', '[1]')),
    *((like, '0x' + 'f' * 5000, 'too large') for like in (1, [1], None)),
    *((0.5, text, 'float') for text in ('true', 'abc', '', '1e999', '0,5')),
    *(('a', text, 'str') for text in ("'open", "'a' or 'b'", "'tis", '"a" 5')),
    *(
      ([1], text, 'list') for text in ('(1, 2)', '5', '1, 2', '[1', 'abc', '[abc]', '{}', '[1]+[2]')
    ),
    *(((1,), text, 'tuple') for text in ('[1]', '1', '(1)')),
    *(({}, text, 'dict') for text in ('[1]', '{1}', '{[]: 1}', '{**{}}')),
    *((Color.RED, text, 'no text form') for text in ('1', f'type/{MODULE}/Color.RED')),
    *((like, '[0, 1]', 'no text form') for like in ({0}, range(2), 1j)),
    *((Options(), text, 'Options') for text in ('5', "{'alpa': 1}", "{'alpha': 13}", '[1]')),
    *(
      (Options, text, '<name> of a class')
      for text in ('5', 'Options', f'type/{MODULE}/Color.RED', 'type/os/system')
    ),
    (_Function, f'type/{MODULE}/Color.RED', 'class or function'),
    (Options, 'type/tests.no.such/Options', "'tests.no.such' is not imported"),
    (Options, f'type/{MODULE}/Optoins', 'did you mean Options?'),
    (Options, f'type/{MODULE}/MODULE', 'not a class'),
    (None, f'type/{MODULE}/Color.RED', 'not a class'),
    (object(), 'x', 'no text form'),
    *(
      (None, text, 'cannot take')
      for text in ('[1', "'open", '{', '(1, abc)', '<a.b>', '[<a.b>]', '<a.b(1)>')
    ),
    (None, 'type/tests.no.such/X', 'not imported'),
    *((None, text, 'cannot name') for text in _REFUSED),
    *((_Function, text, 'cannot name') for text in _REFUSED),
    (None, '{1: [type/os/system]}', "cannot name 'os.system'"),
    (linear.LinearLayer, literals.TypePath(Options), 'not a BaseLayer'),
    (linear.LinearLayer, literals.TypePath(synthetic.SyntheticRegressionInput), 'not a BaseLayer'),
    (None, f"type/{MODULE}/_Function(x='rm')", 'not a dataclass'),
    (None, "[type/os/system(command='true')]", "cannot name 'os.system'"),
    *((None, text, 'cannot take') for text in ('[range(3)]', '{1}', '[1j]', '[set([1])]')),
    (None, '[' * 5000, 'cannot take'),
    (None, '[f"{1}"]', 'not a literal'),
  ],
)
def testValuesOfAnotherTypeRaise(like, text, expected):
  with pytest.raises(ValueError) as info:
    params_text.ParseValue(text, like, 'task.train.x')
  message = str(info.value)
  assert type(info.value) is ValueError and '\n' not in message and len(message) < 400
  assert message.startswith('task.train.x ') and expected in message
  assert literals.Shorten(text) in message


def testMappingsKeepTheirClass():
  value = params_text.ParseValue("{'a': 1}", nested_map.NestedMap(b=2), 'x')
  assert type(value) is nested_map.NestedMap and value.a == 1 and 'b' not in value


@pytest.mark.parametrize(
  ('text', 'pairs'),
  [
    ('', []),
    (' ;\n; ', []),
    ('a.b:0.1;c:100', [('a.b', '0.1'), ('c', '100')]),
    ('b:1\na:2\nb:3', [('b', '1'), ('a', '2'), ('b', '3')]),
    (' a : 1 ; b : 2 \r\n', [('a', '1'), ('b', '2')]),
    ('a:\'x;y\';b:"p:q\n;";c:2', [('a', "'x;y'"), ('b', '"p:q\n;"'), ('c', '2')]),
    (r"a:'it\'s;';b:1", [('a', r"'it\'s;'"), ('b', '1')]),
    ("a:['x;y',\n 2];b:{'k': ';'}", [('a', "['x;y',\n 2]"), ('b', "{'k': ';'}")]),
    ("a:type/m/C(x=';');b:1", [('a', "type/m/C(x=';')"), ('b', '1')]),
    ("a:r'\\;';b:1", [('a', "r'\\;'"), ('b', '1')]),
    ("a:it's;b:it's", [('a', "it's"), ('b', "it's")]),
    ("a:'tis;b:1", [('a', "'tis"), ('b', '1')]),
    ('a:gs://bucket/x:y;b:1', [('a', 'gs://bucket/x:y'), ('b', '1')]),
    ('a:;b:', [('a', ''), ('b', '')]),
    ('a:\nb:1', [('a', ''), ('b', '1')]),
    ('# x:1; y:2\na:1;# z\n b:2 # no comment', [('a', '1'), ('b', '2 # no comment')]),
    ("d['a:b;c'].x:1;l[0].y:2", [("d['a:b;c'].x", '1'), ('l[0].y', '2')]),
  ],
)
def testParseOverrides(text, pairs):
  assert params_text.ParseOverrides(text) == pairs


@pytest.mark.parametrize(
  ('text', 'quoted'),
  [
    ('a', "'a'"),
    ('a:1;b', "'b'"),
    ('a;b:1', "'a'"),
    (':1', "':1'"),
    ('a=1', "'a=1'"),
    ("it's", '"it\'s"'),
    ("a['b:1\nc:2", '"a[\'b:1"'),
  ],
)
def testOverridesWithoutKeyOrColonRaise(text, quoted):
  with pytest.raises(ValueError, match=naming.Naming(quoted, 'key:value')):
    params_text.ParseOverrides(text)


def testManyValuesWithOpenBracketsAreRefusedAtOnce():
  assert len(params_text.ParseOverrides('a:[;' * 500)) == 500
  assert len(params_text.ParseOverrides('a:[;' + 'b:1;' * (1 << 16))) == 1 + (1 << 16)
  for text in ('a:[;' * 100_000, 'a:[;' * 10 + 'b' * (1 << 20)):
    with pytest.raises(ValueError, match=naming.Naming("'a'", 'brackets')):
      params_text.ParseOverrides(text)


@hypothesis.settings(deadline=None)
@hypothesis.given(
  values=st.lists(st.text() | st.lists(st.text(alphabet='\'"\\;:\n#[](){}'))),
  separator=st.sampled_from([';', '\n', ' ;\n# a comment; x:1\n']),
)
def testQuotedValuesSurviveEverySeparator(values, separator):
  pairs = [(f'k{i}', literals.WriteValue(value)) for i, value in enumerate(values)]
  text = separator.join(f'{key}:{value}' for key, value in pairs)
  assert params_text.ParseOverrides(text) == pairs


@hypothesis.settings(deadline=None)
@hypothesis.given(text=st.text(alphabet='ab.:;\n\'"[]()# \\'))
def testAnyTextIsSplitOrRaises(text):
  try:
    pairs = params_text.ParseOverrides(text)
  except ValueError as e:
    assert '\n' not in str(e)
  else:
    assert all(key and key == key.strip() and value == value.strip() for key, value in pairs)


def testParseSteps():
  steps = params_text.ParseSteps("a.b[1][-1]['x.y]'][z].c[(1, 'k')]")
  assert [(step.kind, step.value) for step in steps] == [
    ('param', 'a'),
    ('param', 'b'),
    ('item', 1),
    ('item', -1),
    ('item', 'x.y]'),
    ('field', 'z'),
    ('param', 'c'),
    ('item', (1, 'k')),
  ]


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
