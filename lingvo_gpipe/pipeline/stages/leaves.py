# SPDX-License-Identifier: Apache-2.0
"""The leaves of nests of tensors, and which of them have gradients: the floating ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf


def Tensors(nest: Any) -> list[tf.Tensor]:
  """The tensors of a nest, without None, in tf.nest order."""
  return [x for x in tf.nest.flatten(nest) if x is not None]


def HasGradient(x: Any) -> bool:
  """Whether a leaf of a nest can have a gradient: a floating tensor, complex numbers included."""
  return x is not None and (x.dtype.is_floating or x.dtype.is_complex)


def Floats(nest: Any) -> list[tf.Tensor]:
  """The floating tensors of a nest, those that have gradients, in tf.nest order."""
  return [x for x in tf.nest.flatten(nest) if HasGradient(x)]


def WithFloats(nest: Any, floats: Sequence[tf.Tensor]) -> Any:
  """The nest with its floating tensors replaced."""
  rest = list(floats)
  flat = [rest.pop(0) if HasGradient(x) else x for x in tf.nest.flatten(nest)]
  return tf.nest.pack_sequence_as(nest, flat)


def TraceKey(nest: Any) -> tuple[Any, ...]:
  """Structure, dtypes and shapes of a nest: what one trace has in common."""
  # As tf.function has it: neither the type of a mapping counts nor the order of its keys.
  if isinstance(nest, Mapping):
    return tuple((name, TraceKey(nest[name])) for name in sorted(nest))
  if isinstance(nest, (list, tuple)):
    return (type(nest), *map(TraceKey, nest))
  return tuple(None if x is None else (x.dtype, *x.shape) for x in tf.nest.flatten(nest))


def DenseGradients(tensors: Sequence[tf.Tensor], grads: Sequence[Any]) -> list[tf.Tensor]:
  """The gradients as tensors: zeros for None."""
  return [
    tf.zeros_like(t) if g is None else tf.convert_to_tensor(g)
    for t, g in zip(tensors, grads, strict=True)
  ]
