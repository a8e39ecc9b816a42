# SPDX-License-Identifier: Apache-2.0
"""Activation functions by name."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from lingvo_gpipe.core import domain


def _Gelu(x: tf.Tensor) -> tf.Tensor:
  return tf.nn.gelu(x, approximate=False)


def _GeluApproximate(x: tf.Tensor) -> tf.Tensor:
  return tf.nn.gelu(x, approximate=True)


def _Swish(x: tf.Tensor) -> tf.Tensor:
  # tf.nn.silu carries a custom gradient that saves memory; here stages are recomputed anyway.
  return x * tf.sigmoid(x)


_ACTIVATIONS: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
  'NONE': lambda x: x,
  'RELU': tf.nn.relu,
  'RELU6': tf.nn.relu6,
  'LEAKY_RELU': tf.nn.leaky_relu,
  'SQUARED_RELU': lambda x: tf.square(tf.nn.relu(x)),
  'SIGMOID': tf.sigmoid,
  'TANH': tf.tanh,
  'GELU': _Gelu,
  'GELU_APPROXIMATE': _GeluApproximate,
  'SWISH': _Swish,
  'SILU': _Swish,
  'SOFTPLUS': tf.nn.softplus,
  'EXP': tf.exp,
}


NAME = domain.OneOf(*sorted(_ACTIVATIONS))


def GetFn(name: str) -> Callable[[tf.Tensor], tf.Tensor]:
  """Returns the activation function `name`, such as RELU, GELU (exact), TANH, SIGMOID or NONE.

  Raises:
    ValueError: the name is unknown; the message suggests a similar one.
  """
  NAME.Check('activation', name)
  return _ACTIVATIONS[name]
