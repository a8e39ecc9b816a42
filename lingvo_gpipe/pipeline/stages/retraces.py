# SPDX-License-Identifier: Apache-2.0
"""Tells when a stage is compiled for yet another shape, and which tensor is to blame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from absl import logging

from lingvo_gpipe.core import base_layer, shapes

# Micro-batches of batches of one shape have at most two sizes.
_USUAL = 2


class Retraces:
  """The shapes that the functions of a stage were traced for."""

  def __init__(self) -> None:
    self._seen: dict[int, list[dict[str, str]]] = {}

  def Add(
    self,
    layers: Sequence[base_layer.BaseLayer],
    x: Any,
    side: Any,
    user: int,
    num_batch_shapes: int = 1,
  ) -> None:
    """Notes a trace; logs a line where these shapes are new, a warning where they are too many.

    Args:
      layers: those of the stage that is traced.
      x: what the stage takes of a micro-batch.
      side: what the loss takes beside it.
      user: its index; those that share a trace may take other shapes.
      num_batch_shapes: how many shapes of batches are expected.
    """
    leaves = shapes.Leaves({'x': x, 'side': side})
    specs = {path: shapes.FormatNest(leaf) for path, leaf in leaves}
    if any(specs in seen for seen in self._seen.values()):
      return
    seen = self._seen.setdefault(user, [])
    seen.append(specs)
    if len(seen) == 1:
      return
    before = seen[-2]
    path = next(p for p in [*specs, *before] if specs.get(p) != before.get(p))
    change = f'{path} was {before.get(path, "absent")} and is {specs.get(path, "absent")}'
    span = f'{layers[0].path} to {layers[-1].path}'
    if len(seen) <= _USUAL * num_batch_shapes:
      logging.info('the stage of %s is traced for another shape: %s', span, change)
    else:
      logging.warning(
        'the stage of %s is traced and compiled for shape number %d: %s. Each new shape costs a '
        'compilation: give batches of few shapes, pad or drop odd ones',
        span, len(seen), change,
      )  # fmt: skip
