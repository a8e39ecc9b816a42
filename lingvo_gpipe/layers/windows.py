# SPDX-License-Identifier: Apache-2.0
"""Checks of the windows of convolutions and pooling layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PADDINGS = ('SAME', 'VALID')


def CheckFits(path: str, inputs: Any, window: Sequence[int], padding: str) -> None:
  """Raises ValueError if a VALID window is larger than images [batch, height, width, channels].

  A height or width that is not static passes.
  """
  sizes = zip(inputs.shape[1:3], window, strict=True)
  if padding == 'VALID' and any(size is not None and size < w for size, w in sizes):
    raise ValueError(
      f'{path}: a VALID window of {tuple(window)} does not fit into shape {inputs.shape}'
    )
