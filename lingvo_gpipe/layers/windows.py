# SPDX-License-Identifier: Apache-2.0
"""Checks of the windows of convolutions and pooling layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PADDINGS = ('SAME', 'VALID')


def CheckSizes(params: Any, name: str, length: int) -> None:
  """Raises ValueError unless the param `name` is a sequence of `length` positive integers."""
  value = params.Get(name)
  if (
    not isinstance(value, (list, tuple))
    or len(value) != length
    or not all(isinstance(v, int) and v > 0 for v in value)
  ):
    raise ValueError(
      f'{params.cls.__name__} {params.name!r}: set {name} to {length} positive integers, '
      f'got {value!r}'
    )


def Check(params: Any, stride: str) -> None:
  """Raises ValueError unless `padding` and the param named by `stride` are valid."""
  CheckSizes(params, stride, 2)
  if params.padding not in PADDINGS:
    raise ValueError(
      f'{params.cls.__name__} {params.name!r}: padding must be {" or ".join(PADDINGS)}, '
      f'got {params.padding!r}'
    )


def CheckFits(path: str, inputs: Any, window: Sequence[int], padding: str) -> None:
  """Raises ValueError if a VALID window is larger than images [batch, height, width, channels].

  A height or width that is not static passes.
  """
  sizes = zip(inputs.shape[1:3], window, strict=True)
  if padding == 'VALID' and any(size is not None and size < w for size, w in sizes):
    raise ValueError(
      f'{path}: a VALID window of {tuple(window)} does not fit into shape {inputs.shape}'
    )
