# SPDX-License-Identifier: Apache-2.0
"""Drop-path: drops whole examples, follows the schedule, and draws equal masks with XLA."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import fprop_context
from lingvo_gpipe.layers import drop_path

NUM_EXAMPLES = 4000


def _Layer(**values):
  return drop_path.DropPathLayer.Params().Set(name='drop', **values).Instantiate()


def _Run(layer, step, x=None, micro_batch=0):
  x = tf.ones([NUM_EXAMPLES, 2, 3]) if x is None else x
  with fprop_context.Scope(step=step, micro_batch=micro_batch):
    return layer.FProp(None, x).numpy()


@pytest.mark.parametrize(
  'step, total_steps, keep', [(0, 0, 0.7), (0, 100, 1.0), (50, 100, 0.85), (999, 100, 0.7)]
)
def testKeepProbFollowsTheSchedule(step, total_steps, keep):
  y = _Run(_Layer(keep_prob=0.7, total_steps=total_steps), step)
  # One decision for each example.
  assert np.all(y == y[:, :1, :1])
  is_kept = y[:, 0, 0] != 0
  np.testing.assert_allclose(y[is_kept], 1 / keep, rtol=1e-6)
  deviation = np.sqrt(keep * (1 - keep) / NUM_EXAMPLES)
  assert abs(np.mean(is_kept) - keep) <= 4 * deviation


def testDrawsDifferBetweenStepsMicroBatchesAndLayers():
  layer, other = (
    _Layer(keep_prob=0.5),
    drop_path.DropPathLayer.Params().Set(name='other', keep_prob=0.5).Instantiate(),
  )
  runs = [_Run(layer, 1), _Run(layer, 2), _Run(layer, 1, micro_batch=1), _Run(other, 1)]
  assert np.array_equal(runs[0], _Run(layer, 1))
  for i, a in enumerate(runs):
    for b in runs[:i]:
      assert 0.4 < np.mean(a != b) < 0.6


def testEvaluationIsTheIdentity():
  x = tf.ones([8, 2])
  assert _Layer(keep_prob=0.5).FProp(None, x) is x


@pytest.mark.parametrize('dtype', [tf.float32, tf.float64, tf.bfloat16], ids=lambda d: d.name)
def testXlaDrawsEqualMasks(dtype):
  layer = _Layer(keep_prob=0.6, total_steps=10, dtype=dtype)

  def Run(x, step):
    with fprop_context.Scope(step=step):
      return layer.FProp(None, x)

  args = tf.ones([64, 3], dtype), tf.constant(7, tf.int64)
  plain = tf.function(Run, autograph=False)(*args)
  xla = tf.function(Run, autograph=False, jit_compile=True)(*args)
  assert np.array_equal(tf.cast(plain, tf.float32), tf.cast(xla, tf.float32))
  assert 0 < np.mean(tf.cast(plain, tf.float32) == 0) < 1


@pytest.mark.parametrize(
  'values, name', [({'keep_prob': 0.0}, 'keep_prob'), ({'total_steps': -1}, 'total_steps')]
)
def testWrongParamsRaise(values, name):
  with pytest.raises(ValueError, match=name):
    _Layer(**values)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
