# SPDX-License-Identifier: Apache-2.0
"""Stage functions that stages share: the inputs that one trace serves."""

import collections
import sys

import pytest
import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.pipeline.stages import leaves
from tests.toys import layers, stacks

_Pair = collections.namedtuple('_Pair', 'a b')


def testKeysOfEqualLeavesInOtherStructuresDiffer():
  x, y = tf.TensorSpec([2]), tf.TensorSpec([3])
  nests = [
    *((x, y), [x, y], _Pair(x, y), (x, (y,)), ((x,), y), (x, y, None), (None, x, y)),
    *({'a': x, 'b': y}, {'a': x, 'c': y}, {'a': {'b': x, 'c': y}}),
    *((y, x), (x, x), (x, tf.TensorSpec([3], tf.float64)), (x,), x, None, (), []),
  ]
  keys = [leaves.TraceKey(nest) for nest in nests]
  assert len(set(keys)) == len(keys)
  assert keys == [leaves.TraceKey(nest) for nest in nests]
  # What tf.function takes for one structure is one.
  assert leaves.TraceKey({'a': x, 'b': y}) == leaves.TraceKey(nested_map.NestedMap(b=y, a=x))


def _Rename(w, x):
  """{'a': x} -> {'b': x w}, {'b': x} -> {'a': sin(x) w}."""
  ((name, value),) = x.items()
  return {'b': value * w} if name == 'a' else {'a': tf.sin(value) * w}


@pytest.mark.parametrize('policy', ['layer', 'none'])
def testEqualStagesMayTakeOtherStructures(policy):
  rename = layers.FnLayer.Params().Set(fn=_Rename)
  first = layers.FnLayer.Params().Set(fn=lambda w, x: {'a': x * w})
  last = layers.FnLayer.Params().Set(fn=lambda w, x: x['a'] * w)
  sub = [first, rename, rename, last]
  options = {'num_stages': 4, 'splits': [1, 2, 3, 4], 'num_micro_batches': 2}
  stack = stacks.MakeStack(sub, remat_policy=policy, **options)
  x = (tf.reshape(tf.range(12.0, dtype=tf.float64) / 12, [4, layers.DIM]),)
  side = stacks.ExampleWeights(4)
  actual = stacks.Train(stack, x, side)
  stacks.CheckEqual(actual, stacks.Reference(sub, 2, x, side))
  shared = [stacks.StageFunctions(stack, s) for s in stack.engine.stages]
  assert shared[1] is shared[2]


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
