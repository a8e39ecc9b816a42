# SPDX-License-Identifier: Apache-2.0
"""Warm start: rules on names, and errors that leave all weights unchanged."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.checkpoint import checkpointer, warm_start
from tests import naming

_SAVED = {
  'old.emb.w': np.arange(6, dtype=np.float32).reshape(2, 3),
  'old.layers[0].w': np.full([3, 3], 1.0, np.float32),
  'old.layers[1].w': np.full([3, 3], 2.0, np.float32),
  'old.layers[0].w/m': np.full([3, 3], 9.0, np.float32),
  'global_step': np.int64(7),
}


@pytest.fixture(scope='module')
def logdir(tmp_path_factory):
  """Returns a log directory with checkpoints of steps 3 and 7."""
  logdir = tmp_path_factory.mktemp('other')
  saved = checkpointer.Checkpointer(logdir / 'train')
  saved.Save(3, {name: value * 0 for name, value in _SAVED.items()}, {})
  saved.Save(7, _SAVED, {})
  return str(logdir)


def _Weights():
  shapes = {'new.emb.w': [2, 3], 'new.body[0].w': [3, 3], 'new.body[1].w': [3, 3], 'head.b': [4]}
  return {name: tf.Variable(tf.fill(shape, -1.0)) for name, shape in shapes.items()}


_RULES = [(r'new\.emb\.(.*)', r'old.emb.\1'), (r'new\.body(\[\d\])\.w', r'old.layers\1.w')]


def testWeightsAreCopiedAndTheOtherWeightsAreListed(logdir):
  weights = _Weights()
  lines = warm_start.Load({logdir: (_RULES, [])}, weights)
  np.testing.assert_array_equal(weights['new.emb.w'], _SAVED['old.emb.w'])
  np.testing.assert_array_equal(weights['new.body[1].w'], _SAVED['old.layers[1].w'])
  np.testing.assert_array_equal(weights['head.b'], [-1.0] * 4)
  assert naming.Names(lines[0], '3 of 4', f'{logdir}/train/ckpt-00000007.json')
  (line,) = lines[1:]
  assert naming.Names(line, 'warm start: 1', 'initial', 'head.b')


@pytest.mark.parametrize('tail', ['', '/train', '/train/', '/train/ckpt-00000007.json'])
def testASourceIsALogdirACheckpointDirectoryOrACommitFile(logdir, tail):
  weights = _Weights()
  warm_start.Load({logdir + tail: (_RULES, [])}, weights)
  np.testing.assert_array_equal(weights['new.body[0].w'], _SAVED['old.layers[0].w'])


def testACommitFileNamesAnOlderCheckpoint(logdir):
  weights = _Weights()
  warm_start.Load({f'{logdir}/train/ckpt-00000003.json': (_RULES, [])}, weights)
  np.testing.assert_array_equal(weights['new.body[1].w'], np.zeros([3, 3]))


def testTheFirstMatchingRuleWinsAndIgnoredWeightsAreUnchanged(logdir):
  weights = _Weights()
  rules = [(r'new\.body.*', 'old.layers[1].w'), (r'(?!head)new\.(.*)', r'old.\1')]
  warm_start.Load({logdir: (rules, [r'new\.body\[1\].*'])}, weights)
  np.testing.assert_array_equal(weights['new.body[0].w'], _SAVED['old.layers[1].w'])
  np.testing.assert_array_equal(weights['new.body[1].w'], -np.ones([3, 3]))
  np.testing.assert_array_equal(weights['new.emb.w'], _SAVED['old.emb.w'])


def testSeveralWeightsMayHaveTheSameNameInTheCheckpoint(logdir):
  weights = _Weights()
  warm_start.Load({logdir: ([(r'new\.body.*', 'old.layers[1].w')], [])}, weights)
  for i in range(2):
    np.testing.assert_array_equal(weights[f'new.body[{i}].w'], _SAVED['old.layers[1].w'])


def testARuleMustMatchTheWholeName(logdir):
  with pytest.raises(ValueError, match=naming.Naming(r"'new\\.emb'", '4 weights', 'new.emb.w')):
    warm_start.Load({logdir: ([(r'new\.emb', 'old.emb.w')], [])}, _Weights())


@pytest.mark.parametrize(
  'rules, names',
  [
    ([(r'(.*)', r'\1')], ('new.emb.w for new.emb.w', 'head.b for head.b')),
    ([(r'head\.b', 'old.emb.w'), *_RULES], ('head.b is float32[4]', 'old.emb.w float32[2, 3]')),
    ([(r'head\.b', 'global_step')], ('head.b', 'global_step int64[]')),
    ([(r'new\.emb\.w', 'old.emb.v')], ('old.emb.v for new.emb.w', '(closest: old.emb.w)')),
    ([(r'new\.emb\.(', 'x')], (r"'new\\.emb\\.('", 'regular expression')),
    ([(r'new\.emb\.w', r'old\2')], (r"'old\\2'", r"'new\\.emb\\.w'", 'group reference 2')),
    ([(r'new\.emb\.(.*)', 'old.emb.%s')], ("'old.emb.%s'", r'\1, \2', '%s')),
  ],
)
def testRulesThatDoNotFitChangeNothing(logdir, rules, names):
  weights = _Weights()
  with pytest.raises(ValueError, match=naming.Naming(*names)):
    warm_start.Load({logdir: (rules, [])}, weights)
  for value in weights.values():
    np.testing.assert_array_equal(value, -tf.ones_like(value))


@pytest.mark.parametrize(
  'value', ['x', ([], 'head.*'), ([('a', 'b', 'c')], []), ([(1, 'b')], []), []]
)
def testRulesOfTheWrongFormAreAnError(value):
  with pytest.raises(
    ValueError,
    match=naming.Naming("train.init_from_checkpoint_rules['runs/other']", 'pair of lists'),
  ):
    warm_start.Check({'runs/other': value})


def testTwoCheckpointsForOneWeightAreAnError(logdir):
  rules = {logdir: (_RULES, []), f'{logdir}/train': ([(r'new\.emb\.w', 'old.emb.w')], [])}
  with pytest.raises(
    ValueError, match=naming.Naming(f"'{logdir}'", f"'{logdir}/train'", 'new.emb.w')
  ):
    warm_start.Load(rules, _Weights())


def testAMissingCheckpointIsAnError(tmp_path):
  with pytest.raises(ValueError, match=naming.Naming('no checkpoint', f"'{tmp_path}'")):
    warm_start.Load({str(tmp_path): (_RULES, [])}, _Weights())


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
