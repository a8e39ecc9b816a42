# SPDX-License-Identifier: Apache-2.0
"""Chooses the checkpoint to evaluate or export: the last, the best, or the one of a step."""

from __future__ import annotations

import re

from lingvo_gpipe.checkpoint import catalogue, checkpoint_info

LAST, BEST = 'last', 'best'
HELP = 'Which checkpoint: last, best (of train.early_stop), or the number of a step.'


def Check(which: str) -> None:
  """Raises a ValueError if the text is not 'last', 'best' or a step."""
  if which not in (LAST, BEST) and not re.fullmatch('[0-9]{1,18}', which):
    raise ValueError(f'--checkpoint must be last, best or the number of a step, got {which!r}')


def Find(saved: catalogue.Catalogue, which: str = LAST) -> checkpoint_info.CheckpointInfo:
  """Returns a checkpoint of a run.

  Args:
    saved: the run's checkpoints.
    which: 'last' for the newest readable checkpoint, 'best' for the checkpoint of the best
      evaluation by the rule of `task.train.early_stop` (recorded in the newest checkpoint), or a
      step.

  Raises:
    ValueError: the checkpoint does not exist; the message lists the steps that have one.
    DamagedError: the checkpoint cannot be read.
    OSError: the directory cannot be read.
  """
  Check(which)
  if which == LAST:
    last = saved.Latest()
    if last is None:
      raise _NoCheckpointError(saved)
    return last
  infos = {info.step: info for info in saved.All()}
  if not infos:
    raise _NoCheckpointError(saved)
  existing = f'there are checkpoints of {", ".join(f"step {step}" for step in infos)}'
  if which == BEST:
    step = infos[max(infos)].metadata.get('early_stop', {}).get('best_step')
    if step is None:
      raise ValueError(
        f'there is no best checkpoint in {saved.directory}: training followed no metric, see '
        f'train.early_stop.metric; {existing}'
      )
  else:
    step = int(which)
  if step not in infos:
    best = f'the best evaluation was at step {step}, but ' if which == BEST else ''
    raise ValueError(
      f'{best}there is no checkpoint of step {step} in {saved.directory}; {existing}'
    )
  saved.Verify(infos[step])
  return infos[step]


def _NoCheckpointError(saved: catalogue.Catalogue) -> ValueError:
  return ValueError(f'there is no checkpoint in {saved.directory}: train first')
