# SPDX-License-Identifier: Apache-2.0
"""Actions, what schedules are made of: one call of one stage's function on one micro-batch.

They are written as torch.distributed.pipelining writes them, `<stage><kind><micro-batch>`: `1F0`
forward, `0B3` full backward, `2I1` gradient of the stage's input, `2W1` gradient of its weights.
`3V0` is ours (that notation gives V no meaning): value and gradient in one, the fused forward and
backward of the last stage, which holds the loss and so needs no gradient from above.
"""

from __future__ import annotations

import dataclasses
import enum
import re


class Kind(enum.StrEnum):
  """What an action computes; the value is its letter in text."""

  FORWARD = 'F'
  BACKWARD = 'B'
  INPUT_GRADIENT = 'I'
  WEIGHT_GRADIENT = 'W'
  FORWARD_BACKWARD = 'V'


def HasWork(kind: Kind, *, needs_dx: bool, is_trained: bool) -> bool:
  """Whether actions of this kind compute anything at a stage.

  Args:
    kind: what the action would compute.
    needs_dx: whether a stage before has weights that are trained, and so needs a gradient. Where
      it does not, I is empty: W, which then is all of the backward, takes its place.
    is_trained: whether the stage itself has any.
  """
  return {
    Kind.BACKWARD: needs_dx or is_trained,
    Kind.INPUT_GRADIENT: needs_dx,
    Kind.WEIGHT_GRADIENT: is_trained,
  }.get(kind, True)


_TOKEN = re.compile(r'([0-9]+)([A-Z_]+)([0-9]*)')
KINDS_TEXT = (
  'F (forward), B (full backward), I (input gradient), W (weight gradient) or '
  'V (fused forward and backward of the last stage)'
)


@dataclasses.dataclass(frozen=True, order=True)
class Action:
  """One call of one stage function on one micro-batch."""

  stage: int
  kind: Kind
  micro_batch: int

  def __str__(self) -> str:
    return f'{self.stage}{self.kind.value}{self.micro_batch}'

  @classmethod
  def FromText(cls, text: str) -> Action:
    """Reads `1F0`. Raises: ValueError that says what was expected."""
    match = _TOKEN.fullmatch(text.strip())
    if match and match[3] and match[2] in list(Kind):
      return cls(int(match[1]), Kind(match[2]), int(match[3]))
    hint = ''
    if match and ('_' in match[2] or 'SHARD' in match[2]):
      hint = '; transfers and sharding are implied here, write the compute actions only'
    raise ValueError(
      f'{text.strip()!r} is no action: expected <stage><kind><micro-batch>, such as 1F0, '
      f'with kind {KINDS_TEXT}{hint}'
    )
