# SPDX-License-Identifier: Apache-2.0
"""Complex tensors between layers and stages have the gradients of the plain layers."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import fprop_context
from lingvo_gpipe.layers import skip
from tests.toys import layers, stacks

_BATCH = 4


def _Complex(w, x):
  return tf.complex(x, x * w)


def _Turn(w, z):
  return z * z * tf.complex(tf.cos(w), tf.sin(w))


def _Real(w, z):
  return tf.math.real(z) + tf.math.imag(z) * w


def _Sub():
  """Real numbers go in and come out; a complex skip goes to two layers."""
  real, turn, back = (layers.FnLayer.Params().Set(fn=fn) for fn in (_Complex, _Turn, _Real))
  pop = skip.PopLayer.Params().Set(key='z', combine='add')
  return [
    *(layers.FnLayer.Params(), real, skip.StashLayer.Params().Set(key='z'), turn),
    *(turn, pop),
    *(turn, pop, back),
  ]


_SPLITS = {1: [9], 2: [4, 9], 3: [4, 6, 9]}


def _X():
  return tf.constant(0.3 * np.random.default_rng(0).normal(size=[_BATCH, layers.DIM]))


def _Stack(num_stages, **options):
  options = {'num_stages': num_stages, 'splits': _SPLITS[num_stages], **options}
  return stacks.MakeStack(_Sub(), num_micro_batches=2, **options)


@pytest.mark.parametrize(
  'num_stages, schedule, policy, xla',
  [
    (1, 'gpipe', 'layer', False),
    (2, 'gpipe', 'stage', False),
    (2, 'gpipe', 'none', False),
    (2, 'zb_h1', 'stage', False),
    (3, '1f1b', 'layer', True),
  ],
)
def testGradientsEqual(num_stages, schedule, policy, xla):
  stack = _Stack(num_stages, schedule=schedule, remat_policy=policy, xla=xla)
  side = stacks.ExampleWeights(_BATCH)
  actual = stacks.Train(stack, (_X(),), side)
  stacks.CheckEqual(actual, stacks.Reference(_Sub(), 2, (_X(),), side))


def testGradientsUnderAUsersTapeAreEqual():
  stack = _Stack(3)
  stack.Place(stacks.Devices(), *stacks.Specs((_X(),)))
  plain, theta = stacks.PlainLayers(_Sub())
  with tf.GradientTape() as tape, fprop_context.Scope(step=1):
    loss = tf.reduce_sum(stack(_X()) ** 2)
  with tf.GradientTape() as plain_tape:
    expected = tf.reduce_sum(plain.FProp(theta(), _X()) ** 2)
  grads = tape.gradient(loss, stack.VariablesByPath())
  for path, g in plain_tape.gradient(expected, plain.VariablesByPath()).items():
    np.testing.assert_allclose(grads[path], g, rtol=1e-12)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
