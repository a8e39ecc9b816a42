# SPDX-License-Identifier: Apache-2.0
"""The re-materialisation policies: what a stage keeps of a micro-batch, and what backward repeats.

| policy | kept from F to B | computed again in B |
| --- | --- | --- |
| stage | the stage's input | the stage, at once |
| except_last | the same; of the last micro-batch everything | the same; of the last nothing |
| layer | the input of each layer | the stage, a layer at a time from last to first |
| none | everything | nothing |

`stage` is GPipe's, `except_last` torchgpipe's. Where backward is split into I and W, `layer` is the
same as `stage`: I computes the stage again, and W needs what I leaves of all its layers anyway.
"""

from __future__ import annotations

POLICIES = ('stage', 'except_last', 'layer', 'none')


def CheckPolicy(policy: str, where: str = '') -> None:
  """Raises ValueError, its text beginning with `where`, unless it is one of `POLICIES`."""
  if policy not in POLICIES:
    known = ', '.join(POLICIES)
    raise ValueError(f'{where}unknown remat_policy {policy!r}; expected one of {known}')


def RunsAgain(policy: str, is_last: bool) -> bool:
  """Whether backward repeats the forward pass of a micro-batch, the step's last one or not."""
  return policy != 'none' and not (policy == 'except_last' and is_last)
