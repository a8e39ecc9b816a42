# SPDX-License-Identifier: Apache-2.0
"""Tests that all differences between two sets of Params are reported by path."""

import sys

import hypothesis
import pytest
from hypothesis import strategies as st

from lingvo_gpipe.core import hyperparams, params_diff
from tests import naming


def _Params(**values):
  p = hyperparams.Params()
  for name, value in values.items():
    p.Define(name, value, '')
  return p


def testChangedAddedAndRemovedParamsAreReportedInOrder():
  old = _Params(rate=0.1, text='a: b; c', gone=None, layers=[_Params(n=i) for i in range(12)])
  new = _Params(rate=0.2, text='a: b; c', layers=[_Params(n=i) for i in range(13)], made='x\ny')
  new.layers[2].n = 20
  new.layers[11].n = 110
  expected = [
    '- gone : None',
    '~ layers[2].n : 2 -> 20',
    '~ layers[11].n : 11 -> 110',
    '+ layers[12].n : 12',
    "+ made : 'x\\ny'",
    '~ rate : 0.1 -> 0.2',
  ]
  assert [str(c) for c in params_diff.FindChanges(old, new)] == expected
  assert [str(c) for c in params_diff.FindChanges(old.ToText(), new.ToText())] == expected
  assert params_diff.FindChanges(new, new.Copy()) == []


_VALUES = st.dictionaries(
  st.from_regex(r'[a-z_][a-z0-9_]{0,3}', fullmatch=True).filter(lambda s: not s.startswith('__')),
  st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.text()),
)


@hypothesis.settings(max_examples=50)
@hypothesis.given(_VALUES, _VALUES)
def testEveryDifferenceIsFoundForAnyValues(a, b):
  changes = params_diff.FindChanges(_Params(**a), _Params(**b))
  missing = object()
  different = {
    name
    for name in {*a, *b}
    if type(a.get(name, missing)) is not type(b.get(name, missing)) or a[name] != b[name]
  }
  assert {change.path for change in changes} == different
  for path, old, new in changes:
    assert (old is None, new is None) == (path not in a, path not in b)


def testInvalidTextRaises():
  with pytest.raises(ValueError, match=naming.Naming("'nonsense'", 'key:value')):
    params_diff.FindChanges('a : 1\n', 'nonsense')


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
