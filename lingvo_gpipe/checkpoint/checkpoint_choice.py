# SPDX-License-Identifier: Apache-2.0
"""Which of a run's checkpoints is evaluated or exported: the last, the best, or that of a step."""

from __future__ import annotations

import re

from lingvo_gpipe.checkpoint import checkpoint_info, checkpointer

LAST, BEST = 'last', 'best'
HELP = 'Which checkpoint: last, best (of train.early_stop), or the number of a step.'


def Check(which: str) -> None:
  """Raises ValueError where the text is neither last nor best nor a step."""
  if which not in (LAST, BEST) and not re.fullmatch('[0-9]{1,18}', which):
    raise ValueError(f'--checkpoint is last, best or the number of a step, got {which!r}')


def Find(saved: checkpointer.Checkpointer, which: str = LAST) -> checkpoint_info.CheckpointInfo:
  """A checkpoint of a run.

  Args:
    saved: its checkpoints.
    which: last, the newest that can be read; best, that of the best evaluation by the rule of
      `task.train.early_stop`, as the newest tells; or a step.

  Raises:
    ValueError: there is none, or not this one; names the steps that there are.
    DamagedError: it cannot be read.
    OSError: the directory cannot be read.
  """
  Check(which)
  if which == LAST:
    last = saved.Latest()
    if last is None:
      raise _None(saved)
    return last
  found = {info.step: info for info in saved.All()}
  if not found:
    raise _None(saved)
  there = f'there are those of {", ".join(f"step {step}" for step in found)}'
  if which == BEST:
    step = found[max(found)].metadata.get('early_stop', {}).get('best_step')
    if step is None:
      raise ValueError(
        f'no checkpoint in {saved.directory} is the best one: training followed no metric, see '
        f'train.early_stop.metric; {there}'
      )
  else:
    step = int(which)
  if step not in found:
    best = f'the best evaluation was at step {step}, but ' if which == BEST else ''
    raise ValueError(f'{best}there is no checkpoint of step {step} in {saved.directory}; {there}')
  saved.Verify(found[step])
  return found[step]


def _None(saved: checkpointer.Checkpointer) -> ValueError:
  return ValueError(f'there is no checkpoint in {saved.directory}: train first')
