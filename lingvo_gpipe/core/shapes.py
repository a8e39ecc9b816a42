# SPDX-License-Identifier: Apache-2.0
"""Checks of static shapes, with messages that say where, what was expected and what came.

They run while a layer is traced and put nothing into the graph. What takes `x` takes anything with
a `.shape`: tensors, variables and tf.TensorSpec. A dimension that is not known passes.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf


def GetShape(x: Any) -> list[Any]:
  """The shape of `x` as a list: integers where known, scalar tensors elsewhere."""
  static = x.shape.as_list()
  if None not in static:
    return static
  dynamic = tf.shape(x)
  return [dynamic[i] if dim is None else dim for i, dim in enumerate(static)]


def NumElements(spec: Any) -> int:
  """The product of a static shape; ValueError if a dimension is not known."""
  if not spec.shape.is_fully_defined():
    raise ValueError(f'counting operations needs a static shape, got {spec.shape}')
  return math.prod(spec.shape.as_list())


def CheckRank(path: str, x: Any, rank: int, name: str = 'inputs') -> None:
  """ValueError unless `x` has `rank` dimensions."""
  if x.shape.rank not in (None, rank):
    raise ValueError(f'{path}: {name} must have rank {rank}, got shape {_Text(x.shape)}')


def CheckLastDim(path: str, x: Any, dim: int, name: str = 'inputs') -> None:
  """ValueError unless the last dimension of `x` is `dim`."""
  if x.shape.rank is None:
    return
  if x.shape.rank == 0 or x.shape[-1] not in (None, dim):
    raise ValueError(
      f'{path}: the last dimension of {name} must be {dim}, got shape {_Text(x.shape)}'
    )


def CheckShape(path: str, x: Any, expected: Sequence[int | None], name: str = 'inputs') -> None:
  """ValueError unless the shape of `x` is `expected`; None stands for any size."""
  if not x.shape.is_compatible_with(list(expected)):
    raise ValueError(
      f'{path}: {name} must have shape {_Text(expected)}, got shape {_Text(x.shape)}'
    )


def CheckPaddings(path: str, paddings: Any, x: Any) -> None:
  """ValueError unless `paddings` is None or has the shape of `x` without its last dimension."""
  if paddings is not None and x.shape.rank is not None:
    CheckShape(path, paddings, x.shape.as_list()[:-1], 'paddings')


def CheckIntegers(path: str, values: Any, x: Any, name: str) -> None:
  """ValueError unless `values` is None or integers, one for each vector of `x` [..., dim]."""
  if values is None:
    return
  if not values.dtype.is_integer:
    raise ValueError(f'{path}: {name} must be integers, got {values.dtype.name}')
  if x.shape.rank is not None:
    CheckShape(path, values, x.shape.as_list()[:-1], name)


def CheckPositive(params: Any, *names: str) -> None:
  """ValueError unless each of these integer params is above zero; most start at 0, as not set."""
  for name in names:
    value = params.Get(name)
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value <= 0:
      raise ValueError(
        f'{params.cls.__name__} {params.name!r}: set {name} to a positive integer, got {value!r}'
      )


def CheckProbability(params: Any, *names: str) -> None:
  """ValueError unless each of these params is a probability in [0, 1)."""
  for name in names:
    value = params.Get(name)
    if not 0 <= value < 1:
      raise ValueError(
        f'{params.cls.__name__} {params.name!r}: {name} must be at least 0 and below 1, '
        f'got {value!r}'
      )


def NestText(nest: Any) -> str:
  """A nest of tensors or specs in short: `(float32[2, 3], {ids: int32[2], none: None})`."""
  if isinstance(nest, Mapping):
    return '{' + ', '.join(f'{k}: {NestText(v)}' for k, v in sorted(nest.items())) + '}'
  if isinstance(nest, tuple | list):
    left, right = '()' if isinstance(nest, tuple) else '[]'
    return left + ', '.join(NestText(v) for v in nest) + right
  if hasattr(nest, 'shape') and isinstance(getattr(nest, 'dtype', None), tf.DType):
    return f'{nest.dtype.name}{_Text(nest.shape)}'
  return type(nest).__name__ if nest is not None else 'None'


def Leaves(nest: Any, path: str = '') -> list[tuple[str, Any]]:
  """(path, leaf) of every leaf of a nest, None included, in tf.nest order."""
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
  """Checks that a nest has the structure, dtypes and ranks of `specs`; sizes may be others.

  Args:
    path: the layer's, begins the message.
    name: of the nest.
    nest: tensors, and None where `specs` has None.
    specs: a nest of tensors or tf.TensorSpec.

  Raises:
    ValueError: another structure or rank, or None on one side alone.
    TypeError: another dtype.
  """
  leaves, expected = Leaves(nest, name), Leaves(specs, name)
  if [place for place, _ in leaves] != [place for place, _ in expected]:
    raise ValueError(f'{path}: {name}: expected {NestText(specs)}, got {NestText(nest)}')
  for (place, leaf), (_, spec) in zip(leaves, expected, strict=True):
    if leaf is None and spec is None:
      continue
    message = f'{path}: {place}: expected {NestText(spec)}, got {NestText(leaf)}'
    if leaf is None or spec is None or not _SameRank(leaf.shape, spec.shape):
      raise ValueError(message)
    if leaf.dtype != spec.dtype:
      raise TypeError(message)


def _SameRank(a: tf.TensorShape, b: tf.TensorShape) -> bool:
  return None in (a.rank, b.rank) or a.rank == b.rank


def _Text(shape: Any) -> str:
  dims = shape.as_list() if isinstance(shape, tf.TensorShape) and shape.rank is not None else shape
  return str(list(dims)).replace('None', '?') if isinstance(dims, Sequence) else str(dims)
