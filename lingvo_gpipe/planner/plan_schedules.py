# SPDX-License-Identifier: Apache-2.0
"""The schedules of choices, of which a part tells the whole.

Beyond some micro-batches a step grows by the same time with each round of them, and so does what
stages hold: long schedules are not played to their end.
"""

from __future__ import annotations

import functools

from lingvo_gpipe.pipeline.cost import stage_memory
from lingvo_gpipe.pipeline.schedule import schedules
from lingvo_gpipe.planner import plan_choice

Choice = plan_choice.Choice

# Schedules of more actions are played in part.
_MAX_ACTIONS = 2048
_FILL_DRAIN = ('gpipe', 'fused_fill_drain')


def Get(choice: Choice, num_micro_batches: int) -> schedules.Schedule:
  """The choice's schedule, for so many micro-batches."""
  return _Cached(choice.schedule, choice.num_stages, num_micro_batches, choice.num_devices)


@functools.lru_cache(maxsize=64)
def _Cached(name: str, num_stages: int, m: int, num_devices: int) -> schedules.Schedule:
  return schedules.Get(name, num_stages, m, num_devices)


def Part(choice: Choice) -> tuple[int, int]:
  """(micro-batches to play, more micro-batches of a second play); (M, 0) for the whole schedule.

  After three rounds of K micro-batches a pipeline is in its stride. Fill and drain have none to
  fall into: each micro-batch takes as much from the first on.
  """
  m, k = choice.num_micro_batches, choice.num_devices
  short, more = (4, 1) if choice.schedule in _FILL_DRAIN else (3 * k, k)
  if 2 * m * choice.num_stages <= _MAX_ACTIONS or m <= short + more or not _IsKnown(choice):
    return m, 0
  return short, more


def _IsKnown(choice: Choice) -> bool:
  """Whether the schedule is none of the user's own, of which nothing is known."""
  ours = (*plan_choice.ONE_STAGE_A_DEVICE, *plan_choice.LOOPED, *_FILL_DRAIN)
  return choice.schedule in ours


def Held(choice: Choice) -> list[tuple[stage_memory.Held, ...]]:
  """`stage_memory.HeldAtPeaks`, that of a long schedule from two shorter ones.

  What a stage holds grows with each micro-batch, or no more after two rounds of K.
  """
  m, k = choice.num_micro_batches, choice.num_devices
  grows = choice.schedule in (*_FILL_DRAIN, 'looped_bfs')
  short, more = (4, 1) if grows else (2 * k, k)
  if m <= short + more or not _IsKnown(choice):
    return _HeldBy(choice, m)
  low = _HeldBy(choice, short)
  rounds = (m - short) // more
  return [
    tuple(a.Plus(b.Plus(a, -1), rounds) for a, b in zip(first, second, strict=True))
    for first, second in zip(low, _HeldBy(choice, short + more), strict=True)
  ]


def _HeldBy(choice: Choice, m: int) -> list[tuple[stage_memory.Held, ...]]:
  sizes = choice.num_stages, m, choice.num_devices
  return _CachedHeld(choice.schedule, *sizes, choice.remat_policy)


@functools.lru_cache(maxsize=4096)
def _CachedHeld(
  name: str, num_stages: int, m: int, num_devices: int, policy: str
) -> list[tuple[stage_memory.Held, ...]]:
  return stage_memory.HeldAtPeaks(_Cached(name, num_stages, m, num_devices), policy)
