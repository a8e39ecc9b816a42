# SPDX-License-Identifier: Apache-2.0
"""Schedules for the planner; long ones are extrapolated from a prefix.

After a number of micro-batches, each further round of micro-batches adds the same time to a step
and the same activations to each stage. So long schedules need not be simulated to their end.
"""

from __future__ import annotations

import functools

from lingvo_gpipe.pipeline.cost import stage_memory
from lingvo_gpipe.pipeline.schedule import offload as offload_lib
from lingvo_gpipe.pipeline.schedule import rematerialisation, schedules, shared_vocabulary
from lingvo_gpipe.planner import plan_choice

Choice = plan_choice.Choice

# Schedules with more actions are extrapolated.
_MAX_ACTIONS = 2048
_FILL_DRAIN = ('gpipe', 'fused_fill_drain')


def Get(choice: Choice, num_micro_batches: int) -> schedules.Schedule:
  """Returns the choice's schedule for this number of micro-batches."""
  return _GetCached(*_Key(choice, num_micro_batches))


def _Key(choice: Choice, num_micro_batches: int) -> tuple[str, int, int, int, float, bool]:
  """Returns the arguments of `_GetCached`, all that a schedule depends on."""
  sizes = choice.num_stages, num_micro_batches, choice.num_devices
  return choice.schedule, *sizes, choice.offload, choice.num_slices > 0


@functools.lru_cache(maxsize=128)
def _GetCached(
  name: str, num_stages: int, m: int, num_devices: int, offload: float, is_shared: bool
) -> schedules.Schedule:
  schedule = schedules.Get(name, num_stages, m, num_devices)
  if is_shared:
    schedule = shared_vocabulary.Share(schedule)
  return offload_lib.WithOffload(schedule, offload)


def Prefix(choice: Choice) -> tuple[int, int]:
  """Returns the lengths to simulate: (micro-batches, additional ones in a second simulation).

  (M, 0) stands for the whole schedule. A pipeline reaches its steady state after three rounds of K
  micro-batches; with slices of a vocabulary, or with offload, when copies wait for each other,
  later. In other fill-and-drain schedules each micro-batch adds the same time from the start.
  """
  m, k = choice.num_micro_batches, choice.num_devices
  short, more = (4, 1) if choice.schedule in _FILL_DRAIN else (3 * k, k)
  if choice.offload or choice.num_slices:
    short, more = 6 * max(k, 2), 2 * max(k, 2)
  num_stages = len(choice.stage_to_device)
  if 2 * m * num_stages <= _MAX_ACTIONS or m <= short + more or not _IsKnown(choice):
    return m, 0
  return short, more


def _IsKnown(choice: Choice) -> bool:
  """Whether the schedule is not a custom one, which may not be extrapolated."""
  named = (*plan_choice.ONE_STAGE_A_DEVICE, *plan_choice.LOOPED, *plan_choice.IN_A_V)
  return choice.schedule in (*named, *_FILL_DRAIN)


def NumOffloaded(choice: Choice) -> list[float]:
  """Returns for each stage the number of micro-batches that are offloaded in a step."""
  m = choice.num_micro_batches
  short, more = Prefix(choice)
  counts = _CountOffloaded(choice, short)
  if short < m:
    pairs = zip(counts, _CountOffloaded(choice, short + more), strict=True)
    counts = [a + (m - short) / more * (b - a) for a, b in pairs]
  return counts


def _CountOffloaded(choice: Choice, m: int) -> list[float]:
  counts = [0.0] * len(choice.stage_to_device)
  for stage, _ in Get(choice, m).offloaded:
    counts[stage] += 1
  return counts


def HeldAtPeaks(
  choice: Choice, policy: rematerialisation.Policy
) -> list[tuple[stage_memory.Held, ...]]:
  """Returns `stage_memory.HeldAtPeaks`, extrapolated from two shorter schedules for a long one.

  The number of micro-batches that a stage holds grows with each micro-batch, or stays constant
  after two rounds of K, or four with slices of a vocabulary; with offload it stays constant, if
  later.
  """
  m, k = choice.num_micro_batches, choice.num_devices
  grows = choice.schedule in (*_FILL_DRAIN, 'looped_bfs')
  short, more = (4, 1) if grows else (2 * k, k)
  if choice.num_slices:
    short = 4 * k
  if choice.offload:
    return _CountHeld(choice, policy, min(m, 3 * max(k, 2)) if _IsKnown(choice) else m)
  if m <= short + more or not _IsKnown(choice):
    return _CountHeld(choice, policy, m)
  low = _CountHeld(choice, policy, short)
  rounds = (m - short) // more
  return [
    tuple(a.Plus(b.Plus(a, -1), rounds) for a, b in zip(first, second, strict=True))
    for first, second in zip(low, _CountHeld(choice, policy, short + more), strict=True)
  ]


def _CountHeld(
  choice: Choice, policy: rematerialisation.Policy, m: int
) -> list[tuple[stage_memory.Held, ...]]:
  return _CountHeldCached(_Key(choice, m), policy)


@functools.lru_cache(maxsize=4096)
def _CountHeldCached(
  key: tuple[str, int, int, int, float, bool], policy: rematerialisation.Policy
) -> list[tuple[stage_memory.Held, ...]]:
  return stage_memory.HeldAtPeaks(_GetCached(*key), policy)
