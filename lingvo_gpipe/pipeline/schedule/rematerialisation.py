# SPDX-License-Identifier: Apache-2.0
"""Re-materialisation policies: the activations that a stage keeps, and those it recomputes.

| policy | kept of a micro-batch from F to B | recomputed in B |
| --- | --- | --- |
| stage | the stage's input | the whole stage, at once |
| except_last | as `stage`; of the last micro-batch everything | as `stage`; of the last nothing |
| layer | the input of each layer | the stage, one layer at a time from last to first |
| none | everything | nothing |

`stage` is GPipe's policy and `except_last` torchgpipe's. If the schedule splits the backward into I
and W, `layer` is equal to `stage`: I recomputes the stage, and W then needs the activations of all
its layers.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from lingvo_gpipe.pipeline.schedule import actions

POLICIES = ('stage', 'except_last', 'layer', 'none')


class Recompute(enum.Enum):
  """The part of a stage that backward of one micro-batch recomputes."""

  STAGE = 'the stage, from its input'
  LAYER = 'one layer at a time, from its kept input'
  NOTHING = 'nothing: forward keeps all that backward needs'


def CheckPolicy(policy: str) -> None:
  """Raises ValueError if the policy is not in `POLICIES`."""
  if policy not in POLICIES:
    known = ', '.join(POLICIES)
    raise ValueError(f'unknown remat_policy {policy!r}; expected one of {known}')


def RunsAgain(policy: str, is_last: bool) -> bool:
  """Whether backward repeats the forward pass of a micro-batch.

  Args:
    policy: one of `POLICIES`.
    is_last: whether the micro-batch is the last one of the step.
  """
  return policy != 'none' and not (policy == 'except_last' and is_last)


def ByMicroBatch(
  rows: Iterable[Iterable[actions.Action]], policy: str
) -> dict[tuple[int, int], Recompute]:
  """Returns {(stage, micro-batch): the part that backward recomputes}.

  Args:
    rows: for each device its actions. Pairs without B or I have no entry: forward-only schedules
      have none, and V, forward and backward in one, has nothing to recompute.
    policy: one of `POLICIES`.
  """
  backwards = {
    (a.stage, a.micro_batch): a.kind
    for row in rows
    for a in row
    if a.kind in (actions.Kind.BACKWARD, actions.Kind.INPUT_GRADIENT)
  }
  last = max((m for _, m in backwards), default=0)

  def Choose(kind: actions.Kind, m: int) -> Recompute:
    if not RunsAgain(policy, m == last):
      return Recompute.NOTHING
    is_whole = kind == actions.Kind.BACKWARD
    return Recompute.LAYER if policy == 'layer' and is_whole else Recompute.STAGE

  return {(k, m): Choose(kind, m) for (k, m), kind in backwards.items()}
