# SPDX-License-Identifier: Apache-2.0
"""Trains Keras models by plain Keras and as pipelines, and compares the results."""

from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from lingvo_gpipe import PipelinedModel
from tests import fast_tracing
from tests.toys import stacks

SEED = 3


class Result(NamedTuple):
  """The history of `fit`, and the weights after it."""

  history: dict[str, list[float]]
  weights: list[Any]


def Floats(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype('float32')


def Integers(top, *shape, seed=0):
  return np.random.default_rng(seed).integers(0, top, shape).astype('int32')


def Seeded(make):
  """Returns the model that `make` makes, with the same names and weights each time."""
  with fast_tracing.KernelsKept():
    keras.utils.clear_session(free_memory=False)  # Collecting garbage takes longer than a fit.
    keras.utils.set_random_seed(SEED)
  return make()


def Pipe(model, num_stages=2, num_micro_batches=1, **options):
  """Returns a PipelinedModel on logical CPU devices, by default without XLA."""
  num_devices = num_stages * options.get('num_replicas', 1)
  options = {'xla': False, 'devices': stacks.Devices()[:num_devices], **options}
  return PipelinedModel(model, num_stages, num_micro_batches=num_micro_batches, **options)


def Sgd():
  """Returns an optimizer whose step is the gradient."""
  return keras.optimizers.SGD(0.1)


def Fit(model, x, y, compiled, *, optimizer=Sgd, **options):
  """Compiles and fits; returns a Result.

  Args:
    model: a keras.Model.
    x: the inputs, or a data set.
    y: the targets.
    compiled: returns the arguments of `compile`, with new metrics each time.
    optimizer: returns the optimizer.
    **options: arguments of `fit`.
  """
  # Plain Keras would be traced twice, which takes longer than these few steps.
  is_plain = not isinstance(model, PipelinedModel)
  model.compile(optimizer=optimizer(), jit_compile=False, run_eagerly=is_plain, **compiled())
  options = {'epochs': 2, 'shuffle': False, 'verbose': 0, **options}
  history = model.fit(x, y, **options).history
  return Result(history, model.get_weights())


def CheckEqual(actual, expected, bound=1e-5):
  """Checks all figures of the history, relative, and all weights."""
  assert actual.history.keys() == expected.history.keys()
  for name, values in expected.history.items():
    np.testing.assert_allclose(
      actual.history[name], values, rtol=bound, atol=bound / 10, err_msg=name
    )
  assert len(actual.weights) == len(expected.weights)
  for w, e in zip(actual.weights, expected.weights, strict=True):
    np.testing.assert_allclose(w, e, rtol=10 * bound, atol=bound)


def CheckFit(make, x, y, compiled, pipelines=((2, 2),), bound=1e-5, **options):
  """Checks that pipelines of some (stages, micro-batches) fit as plain Keras does."""
  plain = Seeded(make)
  before = plain.get_weights()
  expected = Fit(plain, x, y, compiled, **options)
  changed = zip(expected.weights, before, strict=True)
  assert any(np.any(a != b) for a, b in changed)
  for num_stages, num_micro_batches in pipelines:
    pipe = Pipe(Seeded(make), num_stages, num_micro_batches)
    CheckEqual(Fit(pipe, x, y, compiled, **options), expected, bound)


def Mlp(outputs=3, activation=None, depth=2):
  """Returns a Functional model [5] -> [outputs] of `depth` + 1 cells."""
  x = inputs = keras.Input([5])
  for i in range(depth):
    x = keras.layers.Dense(8, activation=('tanh', 'relu')[i % 2])(x)
  return keras.Model(inputs, keras.layers.Dense(outputs, activation=activation)(x))


def TwoOutputs():
  """Returns a Functional model [5] -> {'a': [3], 'b': [2]}, outputs of different cells."""
  x = inputs = keras.Input([5])
  x = keras.layers.Dense(8, activation='tanh')(x)
  a = keras.layers.Dense(3, name='a')(x)
  x = keras.layers.Dense(8, activation='relu')(x)
  return keras.Model(inputs, {'a': a, 'b': keras.layers.Dense(2, name='b')(x)})


def MaskedSequence():
  """Returns a Functional model from ids [6] to masked outputs [6, 3]."""
  inputs = keras.Input([6], dtype='int32')
  x = keras.layers.Embedding(9, 4, mask_zero=True)(inputs)
  x = keras.layers.Dense(8, activation='tanh')(x)
  return keras.Model(inputs, keras.layers.Dense(3)(x))


def PaddedIds(batch, length=6, top=9):
  """Returns ids [batch, length] that end in different numbers of zeros; one row is all zeros."""
  ids = Integers(top - 1, batch, length, seed=4) + 1
  lengths = np.random.default_rng(5).integers(1, length + 1, [batch, 1])
  lengths[1] = 0
  return np.where(np.arange(length) < lengths, ids, 0).astype('int32')


def Classes(batch, top, *, seed=7):
  """Returns class numbers [batch] and the same as one-hot vectors."""
  classes = Integers(top, batch, seed=seed)
  return classes, np.asarray(tf.one_hot(classes, top))
