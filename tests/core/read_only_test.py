# SPDX-License-Identifier: Apache-2.0
"""Tests of read-only containers. What frozen Params make of them is in hyperparams_test."""

import collections
import copy
import json
import pickle
import sys

import pytest

from lingvo_gpipe.core import nested_map, read_only

VALUES = [
  [1, [2]],
  {'a': 1},
  {1, 2},
  collections.OrderedDict(b=1, a=2),
  nested_map.NestedMap(a=1, b=2),
]


@pytest.mark.parametrize('value', VALUES, ids=lambda value: type(value).__name__)
def testReadsLikeTheOriginal(value):
  frozen = read_only.MakeReadOnly(value)
  assert read_only.IsReadOnly(frozen) and not read_only.IsReadOnly(value)
  assert frozen == value and isinstance(frozen, type(value)) and list(frozen) == list(value)
  assert read_only.BaseClass(frozen) is type(value) and read_only.MakeReadOnly(frozen) is frozen
  if not isinstance(value, set):
    assert json.dumps(frozen) == json.dumps(value)


@pytest.mark.parametrize('value', VALUES, ids=lambda value: type(value).__name__)
def testNoMethodChangesIt(value):
  frozen = read_only.MakeReadOnly(value)
  before = copy.deepcopy(value)
  argument = {list: 0, set: 1}.get(type(value), 'a')
  arguments = [(), (argument,), (argument, argument), ([argument],), ({'a': 5},)]
  for name in dir(type(value)):
    if name in ('__new__', '__class__', '__init__', '__setstate__', '__init_subclass__'):
      continue
    for args in arguments:
      try:
        getattr(frozen, name)(*args)
      except Exception:
        pass
      assert frozen == before, name
  with pytest.raises(TypeError, match='part of frozen Params'):
    frozen.clear()


@pytest.mark.parametrize('value', VALUES, ids=lambda value: type(value).__name__)
def testCopiesCanBeChanged(value):
  frozen = read_only.MakeReadOnly(value)
  for new in (copy.copy(frozen), frozen.copy(), copy.deepcopy(frozen), read_only.Thaw(frozen)):
    assert type(new) is type(value) and new == value
    new.clear()
  assert frozen == value
  again = pickle.loads(pickle.dumps(frozen))
  assert read_only.IsReadOnly(again) and again == value and list(again) == list(value)


def testNestsOfTensorFlow():
  tf = pytest.importorskip('tensorflow')
  for value in ([1, 2], {'a': 1}, nested_map.NestedMap(a=1)):
    frozen = read_only.MakeReadOnly(value)
    mapped = tf.nest.map_structure(lambda x: x + 1, frozen)
    assert tf.nest.flatten(mapped) == [x + 1 for x in tf.nest.flatten(value)]
    assert isinstance(mapped, type(value))


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
