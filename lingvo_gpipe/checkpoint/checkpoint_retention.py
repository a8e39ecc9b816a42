# SPDX-License-Identifier: Apache-2.0
"""The rule by which old checkpoints go when a new one was saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from lingvo_gpipe.checkpoint import checkpoint_info


@dataclasses.dataclass(frozen=True)
class Retention:
  """How many checkpoints stay.

  Attributes:
    max_to_keep: this many of the highest steps stay; None keeps all.
    keep_every_n_hours: beyond those, the oldest one stays for good, and then each one saved at
      least this long after the last that stayed, or before it, where a clock was set back by so
      much. None: nothing beyond `max_to_keep`.
  """

  max_to_keep: int | None = 3
  keep_every_n_hours: float | None = None

  def __post_init__(self) -> None:
    if self.max_to_keep is not None and self.max_to_keep < 1:
      raise ValueError(f'max_to_keep is at least 1, or None to keep all; got {self.max_to_keep}.')
    if self.keep_every_n_hours is not None and not self.keep_every_n_hours > 0:
      raise ValueError(f'keep_every_n_hours is above 0, or None; got {self.keep_every_n_hours}.')

  def Removable(
    self,
    saved_step: int,
    good: Sequence[checkpoint_info.CheckpointInfo],
    damaged: Sequence[int],
    protected: Collection[int],
  ) -> list[int]:
    """The steps that go; decided from what lies there, so a restart changes nothing.

    Args:
      saved_step: of what was just saved, which stays.
      good: what can be read, by ascending step, what was just saved among it.
      damaged: the steps of the rest; they do not count, and go when older than what stays by step,
        but not where some stay for good: what cannot be read now may be one of these.
      protected: steps that stay, too.
    """
    if self.max_to_keep is None:
      return []
    others = [info.step for info in good if info.step != saved_step]
    # What was just saved, the highest step, and the next highest ones; [-0:] would be all.
    kept = {saved_step, *others[max(0, len(others) - self.max_to_keep + 1) :]}
    kept.add(max(kept | set(others)))
    oldest = min(kept)
    kept.update(protected)
    if self.keep_every_n_hours is not None:
      last_time = None
      for info in good:
        if last_time is None or abs(info.time - last_time) >= self.keep_every_n_hours * 3600:
          last_time = info.time
          kept.add(info.step)
      damaged = []
    return [step for step in (*others, *(d for d in damaged if d < oldest)) if step not in kept]
