# SPDX-License-Identifier: Apache-2.0
"""Domains of params: their values, their checks from text and at Instantiate."""

import math
import re
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import domain, hyperparams, nested_map
from tests import naming


@pytest.mark.parametrize(
  ('tested', 'inside', 'outside'),
  [
    (domain.Int(1, 3), [1, 3, np.int64(2)], [0, 4, True, 2.0, None, '2', [2], math.nan]),
    (domain.Int(), [-(2**63), 2**63 - 1], [2**63, -(2**63) - 1, 1e3]),
    (domain.Number(0, below=1), [0, 0.5, np.float32(0.5)], [1, -0.1, math.nan, None, False, 'x']),
    (domain.Number(above=0, high=0.1), [1e-9, 0.1], [0, 0.11, 10**400, 1e-50]),
    (domain.Number(), [-3e38, 10**30], [math.inf, -math.inf, math.nan, 1j, 1e300, -4e38, 10**400]),
    (domain.Number(below=1), [0.9999999], [0.99999999999]),  # 1 in float32.
    (domain.Int(1) | domain.NONE, [None, 1], [0, '']),
    (nested_map.KEY, ['layer_1', 'A'], ['', 'A b', '1a', 'a.b', 'é', 'keys', '__x__', None]),
    (domain.Int(4, multiple_of=4), [4, 8], [0, 6, 7]),
    (domain.ListOf(domain.COUNT, not_empty=True), [[0]], [[], ()]),
    (domain.STR, ['', 'é', 'a\n'], ['\ud800', 'a\0', 1, None]),
    (domain.STR | domain.STRINGS, ['a', ['a', 'b'], ()], [1, [1], None]),
    (domain.OneOf('a', 'b'), ['a'], ['c', '', None, ['a']]),
    (domain.Int(-1, -1) | domain.Int(1), [-1, 1], [0, -2]),
    (domain.ListOf(domain.Int(), increasing=True), [[], [1], (1, 3)], [[1, 1], [2, 1], ['x', 1]]),
    (domain.PairOf(domain.STR, domain.COUNT), [('a', 0), ['a', 1]], [('a',), (0, 'a'), 'ab']),
    (domain.ListOf(domain.SIZE, 2), [[1, 2], (3, 4)], [[1], [1, 0], 'ab', None, {1: 1, 2: 2}]),
    (domain.DictOf(domain.STR, domain.COUNT), [{}, {'a': 0}], [{1: 1}, {'a': -1}, [], None]),
    (domain.REGEX,
     ['', 'a(b)', '[[a]', r'(layer_\d+/)*w', r'(/\d+)*', '(a|b)*', r'(\(a+)+', '(a+)',
      '[(a+)+]', '(a+)++'],
     ['(', '*', '(' * 9999, 1, None, '(a+)+!', '(.+)+$$x', r'(?:\w+\d*?)*', '([ab]{2,}){3,}',
      r'\\(a+)+', '(?i:a+)+']),
    (domain.FLOAT_DTYPE, [tf.float32, 'bfloat16', np.float64, 'float32'],
     [tf.string, tf.int32, 'x', 1, None, []]),
    (domain.BOOL, [True, np.bool_(False)], [0, 'true', None]),
    (domain.PARAMS, [hyperparams.Params()], [None, {}, 1]),
    (domain.ParamsOf(dict), [hyperparams.InstantiableParams(nested_map.NestedMap)],
     [None, dict, hyperparams.Params(), hyperparams.InstantiableParams(list)]),
  ],
)  # fmt: skip
def testValues(tested, inside, outside):
  for value in inside:
    tested.Check('a.x', value)
  for value in outside:
    with pytest.raises(ValueError) as e:
      tested.Check('a.x', value)
    message = str(e.value)
    assert message.startswith(f'a.x expects {tested.text}, got ')
    assert '\n' not in message and len(message) < 250


@pytest.mark.parametrize(
  ('tested', 'value', 'named'),
  [
    (domain.OneOf('RELU', 'GELU'), 'relu', "'RELU'?"),
    (domain.OneOf('RELU', 'GELU') | domain.NONE, 'GELLU', "'GELU'?"),
    (domain.NameOf('a schedule', lambda: ['gpipe', '1f1b']), 'gpip', "'gpipe'?"),
    (domain.NameOf('a schedule', lambda: ['gpipe', '1f1b']), 'xyz', 'gpipe, 1f1b'),
    (domain.POSITIVE, 1e300, 'inf in float32'),
    (domain.POSITIVE | domain.NONE, 1e-60, '0.0 in float32'),
    (domain.PROBABILITY, 0.99999999, '1.0 in float32'),
    (domain.POSITIVE, 0, 'got 0'),
    (domain.POSITIVE, False, 'got False'),
    (domain.POSITIVE, math.inf, 'got inf'),
  ],
)
def testAMessageHelpsWithAName(tested, value, named):
  with pytest.raises(
    ValueError, match=naming.Naming('a.x', repr(value)) + '.*' + re.escape(named) + '$'
  ):
    tested.Check('a.x', value)


def testANameMayBeAddedLater():
  names = ['a']
  tested = domain.NameOf('a schedule', lambda: names)
  names.append('b')
  tested.Check('schedule', 'b')


class _Layer:
  def __init__(self, params):
    self.params = params


def _Params():
  inner = hyperparams.Params()
  inner.Define('rate', 1, '', domain.POSITIVE)
  p = hyperparams.InstantiableParams(_Layer)
  p.Define('name', 'l', '')
  p.Define('size', 0, 'Must be set.', domain.SIZE)
  p.Define('seed', None, '', domain.Int() | domain.NONE)
  p.Define('pairs', [], '', domain.ListOf(domain.ListOf(domain.STR, 2)))
  p.Define('choice', 'a', '', domain.OneOf('a', 'b') | domain.STRINGS)
  p.Define('inner', inner, '')
  p.Define('plain', 3, 'Without a domain.')
  p.Define('some', None, 'Without a domain.')
  return p


@pytest.mark.parametrize(
  ('path', 'good', 'bad'),
  [
    ('size', '7', '-1'),
    ('size', '1e3', '1e30'),
    ('size', '0', 'None'),  # The default may be written; it is refused at Instantiate.
    ('seed', '1e6', '1e40'),
    ('seed', 'None', 'x'),
    ('pairs', "[['a', 'b']]", '[1]'),
    ('pairs[0][1]', 'b', 'None'),
    ('choice', 'b', 'c'),
    ('inner.rate', '0.5', '0'),
    ('plain', '-5', 'None'),
    ('plain', '1e3', '1e30'),
    ('some', '[1]', '[1'),
  ],
)
def testTextIsCheckedWhenItIsSet(path, good, bad):
  p = _Params().Set(pairs=[['x', 'y']])
  before = p.Copy()
  with pytest.raises(ValueError, match=r'^(pairs|' + path.replace('[', r'\[') + ') '):
    p.FromText(f'name:other;{path}:{bad}')
  assert p == before
  p.FromText(f'{path}:{good}')
  assert before.FromText(p.ToText()) == p


def testValuesFromCodeAreCheckedAtInstantiate():
  with pytest.raises(
    ValueError, match=naming.Naming('_Layer', "'l'", 'size', 'at least 1', 'got 0')
  ):
    _Params().Instantiate()
  p = _Params().Set(size=2, seed='x')
  with pytest.raises(ValueError, match=naming.Naming('_Layer', 'seed', 'None', "'x'")):
    p.Instantiate()
  p.Set(seed=None, plain='any', **{'inner.rate': -1})
  with pytest.raises(ValueError, match=naming.Naming('_Layer', 'inner.rate', 'above 0', 'got -1')):
    p.Copy().Instantiate()
  p.inner.rate = 0.5
  assert p.Instantiate().params.plain == 'any'


@pytest.mark.parametrize(
  ('default', 'text', 'value'), [(0, '7', 7), (0, '7.5', 7.5), (0.0, '7', 7.0)]
)
def testAnIntegerStaysAnInteger(default, text, value):
  p = hyperparams.Params()
  p.Define('warmup_steps', default, '', domain.NOT_NEGATIVE)
  p.FromText(f'warmup_steps:{text}')
  assert p.warmup_steps == value
  assert type(p.warmup_steps) is type(value)


@pytest.mark.parametrize('default', [True, False])
def testABoolHasTheDomainOfBools(default):
  p = hyperparams.InstantiableParams(_Layer)
  p.Define('shuffle', default, '')
  p.Define('cache', default, '', domain.BOOL | domain.NONE)
  assert p.Set(shuffle=np.bool_(True), cache=None).Instantiate().params is p
  for value in ('false', None, 0):
    with pytest.raises(ValueError, match=naming.Naming('_Layer', 'shuffle', repr(value))):
      p.Copy().Set(shuffle=value).Instantiate()


def testTheDomainIsKeptByCopies():
  p = _Params().Copy()
  assert p.GetDomain('inner.rate') is domain.POSITIVE and p.GetDomain('plain') is None
  assert p.GetDomain('pairs[0]') is None


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
