# SPDX-License-Identifier: Apache-2.0
"""Windows that move over an image, of convolutions and pools: checks and the size of the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PADDINGS = ('SAME', 'VALID')


def CheckSizes(params: Any, name: str, length: int) -> None:
  """ValueError unless this param is a sequence of `length` positive integers."""
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
  """ValueError unless the param called `stride` and `padding` are legal."""
  CheckSizes(params, stride, 2)
  if params.padding not in PADDINGS:
    raise ValueError(
      f'{params.cls.__name__} {params.name!r}: padding must be {" or ".join(PADDINGS)}, '
      f'got {params.padding!r}'
    )


def OutputSize(
  path: str, inputs: Any, window: Sequence[int], stride: Sequence[int], padding: str
) -> tuple[int, int]:
  """Height and width of what a window makes of `inputs` [batch, height, width, channels].

  Raises:
    ValueError: a size is not known, or a VALID window is larger than the image.
  """
  sizes = []
  for axis in (0, 1):
    size = inputs.shape[1 + axis]
    if size is None:
      raise ValueError(f'{path}: expected static height and width, got shape {inputs.shape}')
    if padding == 'VALID':
      size -= window[axis] - 1
      if size <= 0:
        raise ValueError(
          f'{path}: a VALID window of {tuple(window)} does not fit into shape {inputs.shape}'
        )
    sizes.append(-(-size // stride[axis]))
  return sizes[0], sizes[1]
