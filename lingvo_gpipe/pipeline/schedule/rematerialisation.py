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

Stages may have different policies, and a stage may treat its layers differently: `ByLayer` says of
each layer whether it is recomputed, or which parts of it are. The policy `auto` stands for the
choice among all of these that takes the least time within the memory limit; the cut makes it
(`cost.recomputation`).
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Iterable, Sequence

from lingvo_gpipe.pipeline.schedule import actions

POLICIES = ('stage', 'except_last', 'layer', 'none')
# A policy for a cut to choose; the engine takes the choice.
AUTO = 'auto'


class Recompute(enum.Enum):
  """The part of a stage that backward of one micro-batch recomputes."""

  STAGE = 'the stage, from its input'
  LAYER = 'one layer at a time, from its kept input'
  NOTHING = 'nothing: forward keeps all that backward needs'


@dataclasses.dataclass(frozen=True)
class ByLayer:
  """A policy that recomputes some layers of a stage, or parts of them, one layer at a time.

  Attributes:
    layers: for each layer the names of its parts (see `fprop_context.Part`) that backward
      recomputes; None: the whole layer, from its input.
    is_split: whether the schedule splits the backward. All layers are then recomputed at once.
  """

  layers: tuple[frozenset[str] | None, ...]
  is_split: bool = False

  def __str__(self) -> str:
    counts = collections.Counter(
      name for parts in self.layers for name in (['all'] if parts is None else sorted(parts))
    )
    return ', '.join(f'{name} of {count}' for name, count in sorted(counts.items())) or 'none'


# The policy of one stage; and of all stages, the same for all or one for each.
StagePolicy = str | ByLayer
Policy = StagePolicy | Sequence[StagePolicy]


def CheckPolicy(policy: Policy) -> None:
  """Raises ValueError if a policy is not a ByLayer or in `POLICIES`."""
  for each in policy if isinstance(policy, (list, tuple)) else [policy]:
    if not isinstance(each, ByLayer) and each not in POLICIES:
      known = ', '.join(POLICIES)
      raise ValueError(f'unknown remat_policy {each!r}; expected one of {known}')


def OfStage(policy: Policy, stage: int) -> StagePolicy:
  """Returns the policy of a stage."""
  return policy if isinstance(policy, (str, ByLayer)) else policy[stage]


def RunsAgain(policy: StagePolicy, is_last: bool) -> bool:
  """Whether backward repeats the forward pass of a micro-batch, or parts of it.

  Args:
    policy: the policy of the stage.
    is_last: whether the micro-batch is the last one of the step.
  """
  return policy != 'none' and not (policy == 'except_last' and is_last)


def ByMicroBatch(
  rows: Iterable[Iterable[actions.Action]], policy: Policy
) -> dict[tuple[int, int], Recompute | ByLayer]:
  """Returns {(stage, micro-batch): the part that backward recomputes}.

  Args:
    rows: for each device its actions. Pairs without B, I and W have no entry: forward-only
      schedules have none, and V, forward and backward in one, has nothing to recompute.
    policy: the policy of all stages, or of each.
  """
  kinds = (actions.Kind.BACKWARD, actions.Kind.INPUT_GRADIENT, actions.Kind.WEIGHT_GRADIENT)
  are_whole = {
    (a.stage, a.micro_batch): a.kind is actions.Kind.BACKWARD
    for row in rows
    for a in row
    if a.kind in kinds
  }
  last = max((m for _, m in are_whole), default=0)

  def Choose(is_whole: bool, k: int, m: int) -> Recompute | ByLayer:
    of_stage = OfStage(policy, k)
    if not RunsAgain(of_stage, m == last):
      return Recompute.NOTHING
    if isinstance(of_stage, ByLayer):
      return dataclasses.replace(of_stage, is_split=not is_whole)
    return Recompute.LAYER if of_stage == 'layer' and is_whole else Recompute.STAGE

  return {(k, m): Choose(is_whole, k, m) for (k, m), is_whole in are_whole.items()}
