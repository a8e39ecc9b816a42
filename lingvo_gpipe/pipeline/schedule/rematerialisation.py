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

POLICIES = ('stage', 'except_last', 'layer', 'none')


def CheckPolicy(policy: str, prefix: str = '') -> None:
  """Raises ValueError if the policy is not in `POLICIES`; its message begins with `prefix`."""
  if policy not in POLICIES:
    known = ', '.join(POLICIES)
    raise ValueError(f'{prefix}unknown remat_policy {policy!r}; expected one of {known}')


def RunsAgain(policy: str, is_last: bool) -> bool:
  """Whether backward repeats the forward pass of a micro-batch.

  Args:
    policy: one of `POLICIES`.
    is_last: whether the micro-batch is the last one of the step.
  """
  return policy != 'none' and not (policy == 'except_last' and is_last)
