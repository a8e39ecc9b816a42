# SPDX-License-Identifier: Apache-2.0
"""Activation functions by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable

import tensorflow as tf


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


def Names() -> list[str]:
  """Returns the known names, in alphabetical order."""
  return sorted(_ACTIVATIONS)


def GetFn(name: str) -> Callable[[tf.Tensor], tf.Tensor]:
  """Returns the activation function `name`, such as RELU, GELU (exact), TANH, SIGMOID or NONE.

  Raises:
    ValueError: the name is unknown; the message suggests a similar one.
  """
  if name not in _ACTIVATIONS:
    close = difflib.get_close_matches(str(name).upper(), _ACTIVATIONS, n=1)
    hint = f'did you mean {close[0]!r}? ' if close else ''
    raise ValueError(f'unknown activation {name!r}; {hint}Known: {", ".join(Names())}')
  return _ACTIVATIONS[name]
