# SPDX-License-Identifier: Apache-2.0
"""Offload changes no bit of a training step, under any schedule and policy."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.layers import dropout, linear, skip
from lingvo_gpipe.pipeline import host_copies
from lingvo_gpipe.pipeline.schedule import rematerialisation, schedules
from tests import naming
from tests.toys import layers, stacks

pytestmark = pytest.mark.optimized_graphs

_DIM = 4


def _Scale(w, x, ids):
  """Returns tanh(x w), scaled by the ids, and the ids."""
  return tf.tanh(tf.matmul(x, w)) * tf.cast(ids, x.dtype)[:, None], ids


def _Stack(name, policy, num_stages, num_micro_batches, stages_per_device, xla):
  """Integers, random numbers and a skip from the first to the last stage."""
  drop = dropout.DropoutLayer.Params().Set(keep_prob=0.7)
  middle = [layers.MatrixLayer.Params().Set(fn=_Scale, dims=[_DIM, _DIM]), drop]
  sub = [layers.TableLayer.Params().Set(dim=_DIM), skip.StashLayer.Params().Set(key='table')]
  sub += middle * (num_stages - 1)
  take_first = layers.Without(lambda x, ids: x)
  sub += [skip.PopLayer.Params().Set(key='table'), take_first]
  sub += [linear.ProjectionLayer.Params().Set(input_dim=_DIM, output_dim=_DIM)]
  ends = [2 * (k + 1) + 1 for k in range(num_stages)]
  return stacks.MakeStack(
    sub,
    num_stages=num_stages,
    num_micro_batches=num_micro_batches,
    stages_per_device=stages_per_device,
    schedule=name,
    remat_policy=policy,
    splits=[*ends[:-1], len(sub)],
    xla=xla,
    dtype=tf.float32,
  )


@pytest.mark.parametrize(
  'name, policy, k, v, m, xla, size',
  # Micro-batches of two sizes take twice the traces.
  [
    ('gpipe', 'stage', 2, 1, 4, False, 7),
    ('gpipe', 'none', 2, 1, 4, True, 4),
    ('1f1b', 'layer', 4, 1, 4, False, 4),
    ('1f1b', 'except_last', 4, 1, 4, False, 4),
    ('interleaved_1f1b', 'none', 2, 2, 4, False, 4),
    ('zb_h1', 'none', 4, 1, 4, False, 4),
    ('zb_h1', 'stage', 4, 1, 4, False, 4),
    ('gpipe', 'by layer', 3, 1, 4, False, 4),
  ],
)
def testGradientsAreBitEqual(name, policy, k, v, m, xla, size):
  by_layer = policy == 'by layer'
  stack = _Stack(name, 'stage' if by_layer else policy, k * v, m, v, xla)
  rng = np.random.default_rng(1)
  ids = tf.constant(rng.integers(1, layers.VOCABULARY, [size]), tf.int32)
  side = stacks.ExampleWeights(size, tf.float32)
  stack.Place(stacks.Devices(), *stacks.Specs((ids,)), loss_fn=stacks.SquareLoss)
  if by_layer:
    # Every second layer is recomputed.
    policies = [([None, frozenset()] * len(s.layers))[: len(s.layers)] for s in stack.engine.stages]
    stack.engine.remat_policy = [rematerialisation.ByLayer(tuple(each)) for each in policies]
  sums, gradients = stacks.TakeStep(stack, (ids,), side)
  stack.engine.offload = 1.0
  stack.engine.host_copies.host_device = stacks.Devices()[-1]
  schedule = stack.engine.TrainingSchedule(m)
  assert schedule.offloaded
  other_sums, other_gradients = stacks.TakeStep(stack, (ids,), side)
  np.testing.assert_array_equal(sums['loss'], other_sums['loss'])
  assert stacks.GlobalNorm(gradients) > 0
  for path, gradient in gradients.items():
    np.testing.assert_array_equal(gradient, other_gradients[path], err_msg=path)


def _Cut(**options):
  layer = linear.ProjectionLayer.Params().Set(input_dim=_DIM, output_dim=_DIM)
  stack = stacks.MakeStack([layer] * 4, num_stages=2, num_micro_batches=6, **options)
  return stack.MakeCut(tf.TensorSpec([12, _DIM]))


@pytest.mark.parametrize('policy', ['none', 'stage'])
def testTheCutPredictsLessMemory(policy):
  plain, half, full = (_Cut(remat_policy=policy, offload=share) for share in (0.0, 0.5, 1.0))
  assert plain.ends == half.ends == full.ends
  of_stage = [[cut.memory[k].activations for cut in (plain, half, full)] for k in range(2)]
  for before, less, least in of_stage:
    assert before > less > least
  assert 'offload: 6 times' in half.Table() and 'offload' not in plain.Table()
  # A limit that only offload keeps.
  limit = {'remat_policy': policy, 'memory_limit': full.memory[0].total}
  assert _Cut(**limit, offload=1.0).ends == full.ends
  with pytest.raises(ValueError, match='memory_limit'):
    _Cut(**limit)


def testOffloadSparesRecomputation():
  """The policy `auto` recomputes what the limit asks for, and offload leaves room."""
  most, least = (_Cut(remat_policy=policy).memory[0].total for policy in ('none', 'stage'))
  again = [
    sum(_Cut(remat_policy='auto', memory_limit=(most + least) // 2, offload=share).again)
    for share in (0.0, 1.0)
  ]
  assert again[0] > again[1] == 0


def testAScheduleMayHaveCopiesOfItsOwn():
  text = '0F0,0O0,0F1,0F2,0F3,0B3,0L0,0B2,0B1,0B0\n1F0,1F1,1F2,1F3,1B3,1B2,1B1,1B0'
  schedule = schedules.Schedule.FromText(text)
  layer = linear.ProjectionLayer.Params().Set(input_dim=_DIM, output_dim=_DIM)
  options = {'num_stages': 2, 'num_micro_batches': 4, 'schedule': schedule}
  x, side = tf.ones([8, _DIM], tf.float64), stacks.ExampleWeights(8)
  actual = stacks.Train(stacks.MakeStack([layer] * 2, **options), (x,), side)
  stacks.CheckEqual(actual, stacks.Reference([layer] * 2, 4, (x,), side))
  with pytest.raises(ValueError, match=naming.Naming('offload', "'custom'", 'copies')):
    stacks.MakeStack([layer] * 2, **options, offload=0.5)


def testCopiesGoToTheHostOfTheDevice():
  copies = host_copies.HostCopies()
  assert copies.HostOf('/device:GPU:3') == '/device:CPU:0'
  worker = '/job:worker/replica:0/task:5'
  assert copies.HostOf(f'{worker}/device:GPU:1') == f'{worker}/device:CPU:0'


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
