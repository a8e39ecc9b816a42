# SPDX-License-Identifier: Apache-2.0
"""Decides which old checkpoints to remove after a new one was saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from lingvo_gpipe.checkpoint import checkpoint_info


@dataclasses.dataclass(frozen=True)
class Retention:
  """The rule by which checkpoints are kept.

  Attributes:
    max_to_keep: number of checkpoints of the highest steps to keep, or None to keep all.
    keep_every_n_hours: in addition, keep the oldest checkpoint for good, and then each checkpoint
      that was saved at least this long after the last one kept for good (or before it, if the clock
      was set back by this much). None keeps no checkpoints beyond `max_to_keep`.
  """

  max_to_keep: int | None = 3
  keep_every_n_hours: float | None = None

  def __post_init__(self) -> None:
    if self.max_to_keep is not None and self.max_to_keep < 1:
      raise ValueError(
        f'max_to_keep must be at least 1, or None to keep all; got {self.max_to_keep}.'
      )
    if self.keep_every_n_hours is not None and not self.keep_every_n_hours > 0:
      raise ValueError(
        f'keep_every_n_hours must be positive, or None; got {self.keep_every_n_hours}.'
      )

  def Removable(
    self,
    saved_step: int,
    good: Sequence[checkpoint_info.CheckpointInfo],
    damaged: Sequence[int],
    protected: Collection[int],
  ) -> list[int]:
    """Returns the steps to remove. Depends only on its arguments, so a restart changes nothing.

    Args:
      saved_step: step of the checkpoint that was just saved, which is kept.
      good: the readable checkpoints by ascending step, including the one just saved.
      damaged: steps of the unreadable checkpoints. They do not count towards `max_to_keep`. They
        are removed once they are older than every checkpoint kept by step, but never if
        `keep_every_n_hours` is set: a checkpoint that cannot be read now may be kept for good.
      protected: steps to keep in addition.
    """
    if self.max_to_keep is None:
      return []
    older = [info.step for info in good if info.step != saved_step]
    # Keep the step just saved, the highest step, and the next highest ones. A slice [-0:] would
    # keep all.
    kept_steps = {saved_step, *older[max(0, len(older) - self.max_to_keep + 1) :]}
    kept_steps.add(max(kept_steps | set(older)))
    oldest = min(kept_steps)
    kept_steps.update(protected)
    if self.keep_every_n_hours is not None:
      last_time = None
      for info in good:
        if last_time is None or abs(info.time - last_time) >= self.keep_every_n_hours * 3600:
          last_time = info.time
          kept_steps.add(info.step)
      damaged = []
    candidates = (*older, *(step for step in damaged if step < oldest))
    return [step for step in candidates if step not in kept_steps]
