# SPDX-License-Identifier: Apache-2.0
"""The stage table: layers, work, memory and device of every stage, as text."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from lingvo_gpipe.core import text_table

# Longer paths lose their front, which keeps the table within 140 columns.
_PATH_COLUMNS = 20
_HEAD = 'stage layers from to params {work} share idle weights activations device'
_TEXT_COLUMNS = {2, 3, 10, 11}


@dataclasses.dataclass(frozen=True)
class Row:
  """One stage of the table.

  Attributes:
    num_layers: number of layers.
    first_path: path of the first layer.
    last_path: path of the last layer.
    num_params: number of weights.
    work: the work of one micro-batch: milliseconds if times were measured, MFLOPs otherwise.
    share: the stage's share of the work of a step.
    idle: the predicted idle share of its device.
    state_bytes: predicted bytes of weights, accumulators and optimizer slots.
    activation_bytes: predicted bytes of activations at their peak.
    recomputes: what backward recomputes, if each stage has a policy of its own, or ''.
    device: the full name of the device, '' if it is not known.
  """

  num_layers: int
  first_path: str
  last_path: str
  num_params: int
  work: float
  share: float
  idle: float
  state_bytes: int
  activation_bytes: int
  recomputes: str
  device: str


def Lines(rows: Sequence[Row], in_time: bool) -> list[str]:
  """Returns the lines of the table: the head, then one line per stage.

  Args:
    rows: the stages in order.
    in_time: whether the work is in milliseconds, not in MFLOPs.
  """
  cells = [_HEAD.format(work='ms' if in_time else 'MFLOPs').split()]
  has_policies = any(row.recomputes for row in rows)
  if has_policies:
    cells[0].append('recomputes')
  for k, row in enumerate(rows):
    cells.append(
      [
        str(k),
        str(row.num_layers),
        _ShortenPath(row.first_path),
        _ShortenPath(row.last_path),
        f'{row.num_params:,}',
        f'{row.work:,.2f}' if in_time else f'{row.work:,.1f}',
        f'{row.share:.1%}',
        f'{row.idle:.1%}',
        text_table.FormatBytes(row.state_bytes),
        text_table.FormatBytes(row.activation_bytes),
        _ShortenDevice(row.device) or '-',
        *([row.recomputes] if has_policies else []),
      ]
    )
  return text_table.FormatTable(cells, text_columns=_TEXT_COLUMNS)


def _ShortenDevice(device: str) -> str:
  """Returns `device:GPU:0`, or `task:1/device:GPU:0` for the device of a worker."""
  return re.sub(r'^/(job:worker/replica:0/|.*/)?', '', device)


def _ShortenPath(path: str) -> str:
  return path if len(path) <= _PATH_COLUMNS else f'...{path[3 - _PATH_COLUMNS :]}'
