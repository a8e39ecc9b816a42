# SPDX-License-Identifier: Apache-2.0
"""Actions, the elements of schedules: one call of one stage's function on one micro-batch.

The text form is `<stage><kind><micro-batch>`, as in torch.distributed.pipelining:

    1F0   forward of stage 1 on micro-batch 0
    0B3   full backward: gradients of the stage's input and of its weights
    2I1   gradient of the stage's input only
    2W1   gradient of the stage's weights only
    3V0   fused forward and backward ("value and gradient") of the last stage
    0O3   offload: copies the tensors that wait for backward to the memory of the host
    0L3   load: copies them back

`ActionsOfCell` also reads the other marks in PyTorch's CSV files.

V, O and L are not part of PyTorch's notation. Only the last stage can run V, because it computes
the loss and so needs no gradient from a later stage. O and L are copies: they take the link between
a device and its host, and not the device.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterable, Iterator


class Kind(enum.StrEnum):
  """The computation of an action; the value is its letter in text."""

  FORWARD = 'F'
  BACKWARD = 'B'
  INPUT_GRADIENT = 'I'
  WEIGHT_GRADIENT = 'W'
  FORWARD_BACKWARD = 'V'
  OFFLOAD = 'O'
  LOAD = 'L'


# Copies between a device and its host.
COPIES = (Kind.OFFLOAD, Kind.LOAD)


def HasWork(kind: Kind, *, needs_dx: bool, is_trained: bool) -> bool:
  """Whether actions of this kind compute anything in a stage.

  Args:
    kind: the kind of action.
    needs_dx: whether an earlier stage has trained weights and so needs the gradient of this stage's
      input. If not, I is empty and W is the whole backward.
    is_trained: whether the stage itself has trained weights.
  """
  if kind is Kind.INPUT_GRADIENT:
    return needs_dx
  if kind is Kind.WEIGHT_GRADIENT:
    return is_trained
  # Without a backward nothing waits, and there is nothing to copy.
  return needs_dx or is_trained or kind not in (Kind.BACKWARD, *COPIES)


_TOKEN = re.compile(r'([0-9]+)([A-Z_]+)([0-9]*)')
# A forward and a backward that PyTorch runs at the same time, such as `(0F3;3B1)OVERLAP_F_B`.
_PAIR = re.compile(r'\(([^()]*)\)OVERLAP_F_B')
# Transfers, which follow from the order here; sharded weights, which do not exist; and the sum of
# gradients over replicas, which is part of the update.
_IMPLIED = re.compile(r'[0-9]+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*')
KINDS_TEXT = (
  'F (forward), B (full backward), I (input gradient), W (weight gradient), '
  'V (fused forward and backward of the last stage), O (offload to the host) or L (load back)'
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
    """Parses text such as `1F0`; raises ValueError if it is not an action."""
    match = _TOKEN.fullmatch(text.strip())
    if match and match[3] and match[2] in list(Kind):
      return cls(int(match[1]), Kind(match[2]), int(match[3]))
    hint = ''
    if match and ('_' in match[2] or 'SHARD' in match[2]):
      hint = '; transfers and sharding are implied here, write only the compute actions'
    raise ValueError(
      f'{text.strip()!r} is not an action: expected <stage><kind><micro-batch>, such as 1F0, '
      f'with kind {KINDS_TEXT}{hint}'
    )


def ActionsOfCell(text: str) -> tuple[Action, ...]:
  """Returns the actions that a cell of PyTorch's CSV files stands for.

  A cell may be idle (empty or `None`), and transfers, sharding and the sum of gradients over
  replicas are implied here: these have no actions. If two actions have the same time, the first
  one runs first, because a device runs one action at a time.

  Raises:
    ValueError: the cell holds anything else.
  """
  text = text.strip()
  if text in ('', 'None') or _IMPLIED.fullmatch(text):
    return ()
  if pair := _PAIR.fullmatch(text):
    return tuple(Action.FromText(part) for part in pair[1].split(';'))
  return (Action.FromText(text),)


def WithEndsOfCopies(row: Iterable[Action]) -> Iterator[Action]:
  """Yields the actions of a device, but each O when the device has its memory back.

  A copy to the host may last as long as the next computation of the device. The computation after
  that one waits for the end of the copy. So do copies from the host that precede that computation.
  """
  ending: list[Action] = []
  running: list[Action] = []
  for action in row:
    if action.kind is Kind.OFFLOAD:
      running.append(action)
      continue
    yield from ending
    ending = []
    if action.kind is not Kind.LOAD:
      ending, running = running, []
    yield action
  yield from (*ending, *running)
