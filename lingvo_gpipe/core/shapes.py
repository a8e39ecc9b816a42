# SPDX-License-Identifier: Apache-2.0
"""Checks of static shapes. Messages name the layer and both the expected and the actual shape.

The checks run while a layer is traced and add nothing to the graph. An argument `x` is anything
with a `.shape`: a tensor, a variable or a tf.TensorSpec. Unknown dimensions pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf


def GetShape(x: Any) -> list[Any]:
  """Returns the shape of `x` as a list of integers, with scalar tensors for unknown dimensions."""
  static = x.shape.as_list()
  if None not in static:
    return static
  dynamic = tf.shape(x)
  return [dynamic[i] if dim is None else dim for i, dim in enumerate(static)]


def CheckRank(path: str, x: Any, rank: int, name: str = 'inputs') -> None:
  """Raises ValueError unless `x` has `rank` dimensions."""
  if x.shape.rank not in (None, rank):
    raise ValueError(f'{path}: {name} must have rank {rank}, got shape {_FormatShape(x.shape)}')


def CheckLastDim(path: str, x: Any, dim: int, name: str = 'inputs') -> None:
  """Raises ValueError unless the last dimension of `x` is `dim`."""
  if x.shape.rank is None:
    return
  if x.shape.rank == 0 or x.shape[-1] not in (None, dim):
    raise ValueError(
      f'{path}: the last dimension of {name} must be {dim}, got shape {_FormatShape(x.shape)}'
    )


def CheckShape(path: str, x: Any, expected: Sequence[int | None], name: str = 'inputs') -> None:
  """Raises ValueError unless the shape of `x` is `expected`; None stands for any size."""
  if not x.shape.is_compatible_with(list(expected)):
    raise ValueError(
      f'{path}: {name} must have shape {_FormatShape(expected)}, got shape {_FormatShape(x.shape)}'
    )


def CheckPaddings(path: str, paddings: Any, x: Any) -> None:
  """Raises ValueError unless `paddings` is None or has the shape of `x` but its last dimension."""
  if paddings is not None and x.shape.rank is not None:
    CheckShape(path, paddings, x.shape.as_list()[:-1], 'paddings')


def CheckIntegers(path: str, values: Any, x: Any, name: str) -> None:
  """Raises ValueError unless `values` is None or an integer for each vector of `x` [..., dim]."""
  if values is None:
    return
  if not values.dtype.is_integer:
    raise ValueError(f'{path}: {name} must be integers, got {values.dtype.name}')
  if x.shape.rank is not None:
    CheckShape(path, values, x.shape.as_list()[:-1], name)


def FormatNest(nest: Any) -> str:
  """Formats a nest of tensors or specs: `(float32[2, 3], {ids: int32[2], none: None})`."""
  if isinstance(nest, Mapping):
    return '{' + ', '.join(f'{k}: {FormatNest(v)}' for k, v in sorted(nest.items())) + '}'
  if isinstance(nest, tuple | list):
    opening, closing = '()' if isinstance(nest, tuple) else '[]'
    return opening + ', '.join(FormatNest(v) for v in nest) + closing
  if hasattr(nest, 'shape') and isinstance(getattr(nest, 'dtype', None), tf.DType):
    return f'{nest.dtype.name}{_FormatShape(nest.shape)}'
  return type(nest).__name__ if nest is not None else 'None'


def Leaves(nest: Any, path: str = '') -> list[tuple[str, Any]]:
  """Returns (path, leaf) of every leaf of a nest, including None, in tf.nest order."""
  if isinstance(nest, Mapping):
    return [
      leaf
      for key in sorted(nest)
      for leaf in Leaves(nest[key], f'{path}.{key}' if path else str(key))
    ]
  if isinstance(nest, tuple | list):
    return [leaf for i, n in enumerate(nest) for leaf in Leaves(n, f'{path}[{i}]')]
  return [(path, nest)]


def CheckNest(path: str, name: str, nest: Any, specs: Any) -> None:
  """Checks that a nest has the structure, dtypes and ranks of `specs`; sizes may differ.

  Args:
    path: the layer's path, at the beginning of the message.
    name: the name of the nest in the message.
    nest: tensors, with None in the same places as in `specs`.
    specs: a nest of tensors or tf.TensorSpec.

  Raises:
    ValueError: the structure or a rank differs, or only one of the two is None.
    TypeError: a dtype differs.
  """
  leaves, expected = Leaves(nest, name), Leaves(specs, name)
  if [place for place, _ in leaves] != [place for place, _ in expected]:
    raise ValueError(f'{path}: {name}: expected {FormatNest(specs)}, got {FormatNest(nest)}')
  for (place, leaf), (_, spec) in zip(leaves, expected, strict=True):
    if leaf is None and spec is None:
      continue
    message = f'{path}: {place}: expected {FormatNest(spec)}, got {FormatNest(leaf)}'
    if leaf is None or spec is None or not _SameRank(leaf.shape, spec.shape):
      raise ValueError(message)
    if leaf.dtype != spec.dtype:
      raise TypeError(message)


def _SameRank(a: tf.TensorShape, b: tf.TensorShape) -> bool:
  return None in (a.rank, b.rank) or a.rank == b.rank


def _FormatShape(shape: Any) -> str:
  dims = shape.as_list() if isinstance(shape, tf.TensorShape) and shape.rank is not None else shape
  return str(list(dims)).replace('None', '?') if isinstance(dims, Sequence) else str(dims)
