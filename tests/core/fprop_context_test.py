# SPDX-License-Identifier: Apache-2.0
"""Tests of FPropContext: nesting, and seeds."""

import itertools
import sys
import threading

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import fprop_context, weight_params
from tests import naming
from tests.toys import nested_layers


def _Sequence(sub, name, random_seed=0):
  p = nested_layers.SeedRoots.Params().Set(sub=sub, name=name, random_seed=random_seed)
  return p.Instantiate()


def _MakeStack(name='stack', random_seed=0):
  return _Sequence([nested_layers.Pair.Params()] * 3, name, random_seed)


def _Seed(layer, name='', **where):
  with fprop_context.Scope(**{'step': 1, **where}) as context:
    return tuple(context.OpSeed(layer, name).numpy().tolist())


def testTheDefaultContextIsEvaluationWithoutAStep():
  context = fprop_context.Current()
  assert context.do_eval
  with pytest.raises(ValueError, match=naming.Naming('stack.layers[0]', 'step')):
    context.OpSeed(_MakeStack().layers[0].a)


def testScopesNestAndEndOnErrors():
  with fprop_context.Scope(step=1) as outer:
    assert fprop_context.Current() is outer
    assert not outer.do_eval
    with fprop_context.Scope(do_eval=True) as inner:
      assert fprop_context.Current() is inner
    with pytest.raises(KeyError), fprop_context.Scope(do_eval=True):
      raise KeyError
    assert fprop_context.Current() is outer
  assert fprop_context.Current().do_eval


def testThreadsDoNotSeeEachOther():
  seen = []
  with fprop_context.Scope(step=1):
    thread = threading.Thread(target=lambda: seen.append(fprop_context.Current().do_eval))
    thread.start()
    thread.join()
  assert seen == [True]


def testSeedsDifferByLayerNameRunSeedStepAndMicroBatch():
  blocks = [*_MakeStack().layers, *_MakeStack(random_seed=1).layers]
  leaves = [leaf for block in blocks for leaf in (block.a, block.b)]
  seeds = [
    _Seed(leaf, name, step=step, micro_batch=m)
    for leaf, name, step, m in itertools.product(leaves, ('', 'x'), (0, 1), range(4))
  ]
  assert len(set(seeds)) == len(seeds)
  assert seeds[0] == _Seed(leaves[0], step=0)


def testSeedsAreExactForLargeSteps():
  leaf = _MakeStack().layers[0].a
  steps = (10**7, 10**7 + 1, 2**24, 2**24 + 1, 2**42)
  seeds = [
    _Seed(leaf, step=tf.constant(step, tf.int64), micro_batch=m)
    for step in steps
    for m in range(32)
  ]
  assert len(set(seeds)) == len(steps) * 32
  counter = fprop_context.StepCounter(tf.constant(10**7, tf.int64), 31)
  assert counter.dtype == tf.int64
  assert int(counter) == 10**7 * 2**20 + 31


@pytest.mark.parametrize('step', [10**7, 2**40, np.int64(2**40), np.int32(5)], ids=repr)
def testStepMayBeANumber(step):
  assert int(fprop_context.StepCounter(step, 3)) == int(step) * 2**20 + 3


def testAStepTensorIsAnInputOfTheTrace():
  leaf = _MakeStack().layers[0].a

  @tf.function(autograph=False)
  def Run(step, micro_batch):
    with fprop_context.Scope(step=step, micro_batch=micro_batch) as context:
      return context.OpSeed(leaf)

  for step, m in ((1, 0), (10**7, 31)):
    seed = Run(tf.constant(step, tf.int64), tf.constant(m))
    assert tuple(seed.numpy().tolist()) == _Seed(leaf, step=step, micro_batch=m)


def testSeedRowsGiveTheSameSeeds():
  stack = _MakeStack(random_seed=5)
  counter = fprop_context.StepCounter(7, 3)
  for block in stack.layers:
    row = fprop_context.SeedPair(5, block.path, counter)
    context = fprop_context.FPropContext(False, seed_rows={id(block): row})
    for leaf in (block, block.a, block.b):
      assert tuple(context.OpSeed(leaf).numpy().tolist()) == _Seed(leaf, step=7, micro_batch=3)


def testSeedsOfEqualLayersDependOnTheirRowAlone():
  """With the same row, two equal layers draw the same numbers, so they can share a trace."""
  stack = _MakeStack()
  row = tf.constant([11, 12], tf.int64)
  seeds = set()
  for block in stack.layers:
    context = fprop_context.FPropContext(False, seed_rows={id(block): row})
    seeds.add(tuple(context.OpSeed(block.a).numpy().tolist()))
  assert len(seeds) == 1


def testPairIsHashAndCounter():
  pair = fprop_context.SeedPair(5, 'stack.layers[0]', fprop_context.StepCounter(2, 1))
  assert pair.dtype == tf.int64
  assert pair.numpy().tolist() == [weight_params.Hash64(5, 'stack.layers[0]'), 2 * 2**20 + 1]


def testSeedsWrapAroundAsIntegersDo():
  leaf = _MakeStack().layers[0].a
  row = tf.constant([2**63 - 1, 0], tf.int64)
  context = fprop_context.FPropContext(False, seed_rows={id(leaf.seed_root): row})
  plain = context.OpSeed(leaf)
  xla = tf.function(lambda: context.OpSeed(leaf), autograph=False, jit_compile=True)()
  np.testing.assert_array_equal(plain, xla)


def testTheOutermostSequenceDeterminesTheRow():
  """A stage has rows only for its own layers, which may be sequences themselves."""
  inner = nested_layers.SeedRoots.Params().Set(sub=[nested_layers.Pair.Params()] * 3)
  outer = _Sequence([inner] * 2, 'outer')
  leaf = outer.layers[1].layers[2].a
  assert leaf.seed_root is outer.layers[1]
  row = fprop_context.SeedPair(0, outer.layers[1].path, fprop_context.StepCounter(7, 3))
  context = fprop_context.FPropContext(False, seed_rows={id(outer.layers[1]): row})
  assert tuple(context.OpSeed(leaf).numpy().tolist()) == _Seed(leaf, step=7, micro_batch=3)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
