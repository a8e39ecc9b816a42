# SPDX-License-Identifier: Apache-2.0
"""Tells when a stage is compiled for yet another shape, and which tensor is to blame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from absl import logging

from lingvo_gpipe import base_layer, shapes

# Micro-batches of one batch have at most two sizes.
_USUAL = 2


class Retraces:
  """The shapes that the functions of a stage were traced for."""

  def __init__(self, layers: Sequence[base_layer.BaseLayer]) -> None:
    self._layers = layers
    self._seen: list[dict[str, str]] = []

  def Add(self, x: Any, side: Any) -> None:
    """Notes a trace; logs a line where these shapes are new, a warning from the third on.

    Args:
      x: what the stage takes of a micro-batch.
      side: what the loss takes beside it.
    """
    leaves = shapes.Leaves({'x': x, 'side': side})
    specs = {path: shapes.NestText(leaf) for path, leaf in leaves}
    if specs in self._seen:
      return
    self._seen.append(specs)
    if len(self._seen) == 1:
      return
    before = self._seen[-2]
    path = next(p for p in [*specs, *before] if specs.get(p) != before.get(p))
    change = f'{path} was {before.get(path, "absent")} and is {specs.get(path, "absent")}'
    span = f'{self._layers[0].path} to {self._layers[-1].path}'
    if len(self._seen) <= _USUAL:
      logging.info('the stage of %s is traced for a second shape: %s', span, change)
    else:
      logging.warning(
        'the stage of %s is traced and compiled for shape number %d: %s. Each new shape costs a '
        'compilation: give batches of few shapes, pad or drop odd ones',
        span, len(self._seen), change,
      )  # fmt: skip
