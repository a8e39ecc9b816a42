# SPDX-License-Identifier: Apache-2.0
"""Logs when a stage is compiled for another shape, and which tensor caused that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from absl import logging

from lingvo_gpipe.core import base_layer, shapes

# Micro-batches of batches of one shape have at most two sizes.
_USUAL = 2


class Retraces:
  """The input shapes that the functions of a stage were traced for."""

  def __init__(self, num_batch_shapes: Callable[[], int] = lambda: 1) -> None:
    """Starts without shapes; num_batch_shapes() is the number of expected shapes of batches."""
    self._num_batch_shapes = num_batch_shapes
    self._seen: dict[int, list[dict[str, str]]] = {}

  def Add(
    self,
    layers: Sequence[base_layer.BaseLayer],
    x: Any,
    side: Any,
    index: int,
  ) -> None:
    """Records a trace; logs a line if its shapes are new, a warning if there are too many shapes.

    Args:
      layers: layers of the traced stage.
      x: input of the stage for a micro-batch.
      side: inputs of the loss for the micro-batch.
      index: number of the stage; stages that share a trace may take different shapes.
    """
    leaves = shapes.Leaves({'x': x, 'side': side})
    specs = {path: shapes.FormatNest(leaf) for path, leaf in leaves}
    if any(specs in seen for seen in self._seen.values()):
      return
    seen = self._seen.setdefault(index, [])
    seen.append(specs)
    if len(seen) == 1:
      return
    before = seen[-2]
    path = next(p for p in [*specs, *before] if specs.get(p) != before.get(p))
    change = f'{path} was {before.get(path, "absent")} and is {specs.get(path, "absent")}'
    span = f'{layers[0].path} to {layers[-1].path}'
    if len(seen) <= _USUAL * self._num_batch_shapes():
      logging.info('the stage of %s is traced for another shape: %s', span, change)
    else:
      logging.warning(
        'the stage of %s is traced and compiled for shape number %d: %s. Each new shape costs a '
        'compilation: give batches of few shapes, pad or drop odd ones',
        span, len(seen), change,
      )  # fmt: skip
