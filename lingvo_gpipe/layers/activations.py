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


# Name -> (function, elementwise operations).
_ACTIVATIONS: dict[str, tuple[Callable[[tf.Tensor], tf.Tensor], int]] = {
  'NONE': (lambda x: x, 0),
  'RELU': (tf.nn.relu, 1),
  'RELU6': (tf.nn.relu6, 1),
  'LEAKY_RELU': (tf.nn.leaky_relu, 1),
  'SQUARED_RELU': (lambda x: tf.square(tf.nn.relu(x)), 2),
  'SIGMOID': (tf.sigmoid, 1),
  'TANH': (tf.tanh, 1),
  'GELU': (_Gelu, 5),
  'GELU_APPROXIMATE': (_GeluApproximate, 8),
  'SWISH': (_Swish, 2),
  'SILU': (_Swish, 2),
  'SOFTPLUS': (tf.nn.softplus, 1),
  'EXP': (tf.exp, 1),
}


def Names() -> list[str]:
  """The known names, in alphabetical order."""
  return sorted(_ACTIVATIONS)


def GetFn(name: str) -> Callable[[tf.Tensor], tf.Tensor]:
  """The function called `name`: one of NONE, RELU, GELU (exact), TANH, SIGMOID, SWISH ...

  Raises:
    ValueError: there is none of that name.
  """
  return _Find(name)[0]


def FlopsPerElement(name: str) -> int:
  """Elementwise operations of the activation `name`."""
  return _Find(name)[1]


def _Find(name: str) -> tuple[Callable[[tf.Tensor], tf.Tensor], int]:
  if name not in _ACTIVATIONS:
    close = difflib.get_close_matches(str(name).upper(), _ACTIVATIONS, n=1)
    hint = f'did you mean {close[0]!r}? ' if close else ''
    raise ValueError(f'unknown activation {name!r}; {hint}Known: {", ".join(Names())}')
  return _ACTIVATIONS[name]
