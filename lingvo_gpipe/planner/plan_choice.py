# SPDX-License-Identifier: Apache-2.0
"""The planner's choices: replicas, devices, micro-batches, schedule, re-materialisation."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator

from lingvo_gpipe.pipeline.schedule import orders, rematerialisation, schedules

# In order of complexity: of plans that take equally long the planner chooses the simplest.
ONE_STAGE_A_DEVICE = ('gpipe', '1f1b', '1f1b_fused', 'zb_h1', 'zb_2p')
LOOPED = ('interleaved_1f1b', 'looped_bfs', 'interleaved_zb')
IN_A_V = ('zb_v', 'v_half', 'v_min', 'dualpipe_v')
# Schedules with I and W, or both and B.
SPLIT = ('zb_h1', 'zb_2p', 'interleaved_zb', *IN_A_V)
# Schedules whose last stage runs V and so recomputes nothing.
FUSED = ('1f1b_fused', 'fused_fill_drain')
VOCABULARIES = ('one', 'shared')
POLICIES = ('none', 'stage', 'except_last', 'layer', rematerialisation.AUTO)
assert {*POLICIES} == {*rematerialisation.POLICIES, rematerialisation.AUTO}


@dataclasses.dataclass(frozen=True)
class Choice:
  """One way to run a model.

  Attributes:
    num_replicas: R.
    num_devices: K, the devices of one replica.
    stages_per_device: number of stages of each device.
    num_micro_batches: M, the micro-batches of one replica.
    micro_batch_size: number of examples in the largest micro-batch.
    schedule: the schedule's name.
    remat_policy: the re-materialisation policy.
    shard_slots: whether the replicas shard the optimizer slots.
    offload: the greatest share of the micro-batches that wait for backward in the host's memory.
    vocabulary: one of `VOCABULARIES`: whether all devices share the last layer, a softmax.
  """

  num_replicas: int
  num_devices: int
  stages_per_device: int
  num_micro_batches: int
  micro_batch_size: int
  schedule: str
  remat_policy: str
  shard_slots: bool = False
  offload: float = 0.0
  vocabulary: str = 'one'

  @property
  def num_stages(self) -> int:
    """S, without slices of the vocabulary."""
    return self.num_devices * self.stages_per_device

  @property
  def num_slices(self) -> int:
    """The number of slices of the vocabulary, which are further stages."""
    return self.num_devices if self.vocabulary == 'shared' else 0

  @property
  def stage_to_device(self) -> list[int]:
    """The device of each stage, and of each slice."""
    if self.schedule in IN_A_V:
      owners = orders.VOwners(self.num_devices)
    else:
      owners = orders.LoopOwners(self.num_stages, self.num_devices)
    return [*owners, *range(self.num_slices)]

  @property
  def is_fused(self) -> bool:
    """Whether the last stage runs V; slices turn V into F and B."""
    return self.schedule in FUSED and not self.num_slices

  @property
  def grid(self) -> tuple[int, int]:
    """(R, K)."""
    return self.num_replicas, self.num_devices

  @property
  def recomputes(self) -> bool:
    """Whether backward repeats forward passes, whatever the memory."""
    return self.remat_policy not in ('none', rematerialisation.AUTO)

  @property
  def num_shards(self) -> int:
    """The number of replicas that shard the slots; 1 without sharding."""
    return self.num_replicas if self.shard_slots else 1


@dataclasses.dataclass(frozen=True)
class Space:
  """The space of choices that the planner searches.

  Attributes:
    schedules: names of schedules.
    remat_policies: re-materialisation policies; `auto` chooses among the others in each stage.
    stages_per_device: numbers of stages of a device.
    shard_slots: False for plans without sharded slots, True for plans with them.
    offloads: shares of micro-batches to offload, 0 or 1; for devices with a link to their host.
    vocabularies: `one` for plans whose last stage has the whole softmax, `shared` for plans in
      which all devices share it, if they can.
    num_replicas: numbers of replicas; None: any.
    num_devices: numbers of devices of a replica; None: any.
  """

  schedules: Collection[str] = (
    *ONE_STAGE_A_DEVICE,
    'interleaved_1f1b',
    'interleaved_zb',
    *IN_A_V,
  )
  remat_policies: Collection[str] = (rematerialisation.AUTO,)
  stages_per_device: Collection[int] = (1, 2, 4)
  shard_slots: Collection[bool] = (False, True)
  offloads: Collection[float] = (0.0, 1.0)
  vocabularies: Collection[str] = VOCABULARIES
  num_replicas: Collection[int] | None = None
  num_devices: Collection[int] | None = None


def Grids(
  space: Space, num_layers: int, num_devices: int, global_batch: int
) -> list[tuple[int, int]]:
  """Returns the pairs (R, K) to search.

  With at most 8 devices K is any number, otherwise a divisor of the number of devices or a power of
  two. R is a power of two or the largest possible number. `space` may prescribe both.
  """
  if space.num_devices is not None:
    ks = [k for k in space.num_devices if k <= num_devices]
  elif num_devices <= 8:
    ks = list(range(1, num_devices + 1))
  else:
    ks = [k for k in range(1, num_devices + 1) if not num_devices % k or _IsPowerOfTwo(k)]
  grids = []
  for k in ks:
    most = min(num_devices // k, global_batch)
    if space.num_replicas is None:
      rs = [r for r in range(1, most + 1) if r == most or _IsPowerOfTwo(r)]
    else:
      rs = [r for r in space.num_replicas if r <= most]
    grids += [(r, k) for r in rs if k <= num_layers]
  return grids


def Choices(
  space: Space, num_layers: int, grid: tuple[int, int], batch: int, num_parts: int = 0
) -> Iterator[Choice]:
  """Yields all choices with R replicas of K devices for mini-batches of `batch` examples.

  Several devices share a vocabulary if each stage has a layer besides the softmax, and each slice
  at least one part.

  Args:
    space: the space.
    num_layers: number of layers.
    grid: (R, K).
    batch: number of examples.
    num_parts: number of parts into which the vocabulary can be divided; 0: it cannot be shared.
  """
  r, k = grid
  for m, size in MicroBatches(-(-batch // r)):
    for v in space.stages_per_device:
      if k * v > num_layers or (k == 1 and v > 1):
        continue
      for schedule in space.schedules:
        if not _Takes(schedule, v) or (schedule in schedules.IN_ROUNDS and m % k):
          continue
        for policy, shard, offload, vocabulary in itertools.product(
          space.remat_policies, space.shard_slots, space.offloads, space.vocabularies
        ):
          if vocabulary == 'shared' and not (1 < k <= num_parts and k * v < num_layers):
            continue
          # Two micro-batches leave no time for copies.
          if (not shard or r > 1) and (not offload or m > 2):
            yield Choice(r, k, v, m, size, schedule, policy, shard, offload, vocabulary)


def MicroBatches(batch: int) -> list[tuple[int, int]]:
  """Returns pairs (M, size of the largest micro-batch): M or the size is a power of two.

  M = 1 and M = batch are always included.
  """
  sizes = {}
  power = 1
  while power < 2 * batch:
    for m in (min(power, batch), -(-batch // power)):
      sizes[m] = -(-batch // m)
    power *= 2
  return sorted(sizes.items())


def Complexity(choice: Choice) -> tuple[float, ...]:
  """Returns a sort key that puts the simpler one of two equally fast choices first."""
  known = (*ONE_STAGE_A_DEVICE, *LOOPED, *IN_A_V)
  return (
    known.index(choice.schedule) if choice.schedule in known else len(known),
    choice.offload,
    choice.num_slices > 0,
    POLICIES.index(choice.remat_policy),
    choice.shard_slots,
    choice.num_replicas * choice.num_devices,
    choice.num_micro_batches,
    choice.num_devices,
    choice.stages_per_device,
  )


def _Takes(schedule: str, stages_per_device: int) -> bool:
  """Whether the planner gives the schedule this many stages on each device."""
  if schedule in IN_A_V:
    return stages_per_device == 2
  return (schedule in LOOPED) == (stages_per_device > 1)


def _IsPowerOfTwo(n: int) -> bool:
  return n & (n - 1) == 0
