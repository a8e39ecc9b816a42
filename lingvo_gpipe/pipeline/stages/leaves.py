# SPDX-License-Identifier: Apache-2.0
"""The leaves of nests of tensors; floating leaves have gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf


def Tensors(nest: Any) -> list[tf.Tensor]:
  """Returns the tensors of a nest, without None, in tf.nest order."""
  return [x for x in tf.nest.flatten(nest) if x is not None]


def HasGradient(x: Any) -> bool:
  """Whether a leaf of a nest can have a gradient: a floating tensor, complex ones included."""
  return x is not None and (x.dtype.is_floating or x.dtype.is_complex)


def Floats(nest: Any) -> list[tf.Tensor]:
  """Returns the floating tensors of a nest, which have gradients, in tf.nest order."""
  return [x for x in tf.nest.flatten(nest) if HasGradient(x)]


def WithFloats(nest: Any, floats: Sequence[tf.Tensor]) -> Any:
  """Returns the nest with its floating tensors replaced."""
  values = iter(floats)
  flat = [next(values) if HasGradient(x) else x for x in tf.nest.flatten(nest)]
  return tf.nest.pack_sequence_as(nest, flat)


def TraceKey(nest: Any) -> tuple[Any, ...]:
  """Returns structure, dtypes and shapes of a nest: calls that differ in them need two traces."""
  # As for tf.function, neither the type of a mapping nor the order of its keys matters.
  if isinstance(nest, Mapping):
    return tuple((name, TraceKey(nest[name])) for name in sorted(nest))
  if isinstance(nest, (list, tuple)):
    return (type(nest), *map(TraceKey, nest))
  return tuple(None if x is None else (x.dtype, *x.shape) for x in tf.nest.flatten(nest))


def DenseGradients(tensors: Sequence[tf.Tensor], grads: Sequence[Any]) -> list[tf.Tensor]:
  """Returns the gradients as tensors, with zeros for None."""
  return [
    tf.zeros_like(t) if g is None else tf.convert_to_tensor(g)
    for t, g in zip(tensors, grads, strict=True)
  ]


def AddUp(gradients: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
  """Returns the sums of lists of gradients."""
  return [tf.add_n(g) if len(g) > 1 else g[0] for g in zip(*gradients, strict=True)]
