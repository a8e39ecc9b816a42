# SPDX-License-Identifier: Apache-2.0
"""The times of a plan: of its stages, transfers, gradient sums and updates."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from lingvo_gpipe.pipeline.cost import (
  activation_memory,
  partitioner,
  simulator,
  stage_memory,
  stage_work,
)
from lingvo_gpipe.pipeline.schedule import rematerialisation, step_work
from lingvo_gpipe.planner import device_description, model_costs, plan_choice, plan_schedules

Choice = plan_choice.Choice

# The fields of `simulator.Costs` that layers determine.
_PARTS = ('forward', 'input_gradient', 'weight_gradient', 'recompute')


class Times:
  """The times of a choice with its cut, in ticks.

  Attributes:
    sizes: the bytes of activations, if some are offloaded.
    stages: the work of each stage for one micro-batch.
    of_last: the recomputations of all stages in `stages` that the last micro-batch is spared.
    update: the update of each device.
    after: the time after the update: with sharded slots, weights are sent from their owners; and
      weights of a shared vocabulary without shards to the slices, whose gradients came back.
  """

  def __init__(
    self,
    costs: model_costs.ModelCosts,
    devices: device_description.Devices,
    choice: Choice,
    weights: Sequence[model_costs.LayerWeights],
    work: Sequence[stage_work.LayerWork],
    ends: Sequence[int],
    memory: stage_memory.StageMemory,
    policies: Sequence[rematerialisation.StagePolicy],
    recompute: Sequence[float] | None = None,
    sizes: activation_memory.ActivationSizes | None = None,
  ) -> None:
    """Computes all times.

    Args:
      costs: the costs of the model.
      devices: the devices.
      choice: the choice.
      weights: the weights of each layer. Slices of the vocabulary are the last layers.
      work: the work of each layer for one micro-batch.
      ends: the cut.
      memory: has the bytes of each stage's input.
      policies: the policy of each stage.
      recompute: for each stage the time of a recomputation; None: its forward.
      sizes: the bytes of activations of each stage; None: from `memory`.
    """
    self._choice = choice
    self._policies = policies
    self._owners = owners = choice.stage_to_device
    self._occupies_devices = devices.transfers == 'occupy'
    self._to_host = self.sizes = None
    self._copies = 0.0
    trained = [w.gradient_bytes > 0 for w in weights]
    if choice.offload:
      link = devices.to_host
      if link is None:
        raise ValueError('a plan with offload needs to_host in the description of the devices')
      self.sizes = sizes or memory.Sizes(ends)
      self._to_host = simulator.HostLink(
        link.bandwidth * model_costs.TICK, link.latency / model_costs.TICK
      )
      self._copies = self._LeastCopies(trained, ends)
    ranges = partitioner.StageRanges(ends)
    r, k = choice.grid
    slowdown = devices.Slowdown(r * k)
    alone = stage_work.SimulatorCosts(work, ends)
    if recompute is not None:
      alone = dataclasses.replace(alone, recompute=recompute)
    slowed: dict[str, Any] = {name: [slowdown * t for t in getattr(alone, name)] for name in _PARTS}
    self._costs = dataclasses.replace(alone, **slowed)
    # Transfers between stages.
    pairs = list(itertools.pairwise(owners[: choice.num_stages]))
    links = [devices.Boundary(r, k, a, b) if a != b else None for a, b in pairs]
    if choice.num_slices:  # All slices are behind one boundary.
      last = owners[choice.num_stages - 1]
      to_slices = [devices.Boundary(r, k, last, d) for d in range(k) if d != last]
      links.append(min(to_slices, key=lambda link: (link.bandwidth, -link.latency)))
    self._transfer = [
      link.Seconds(memory.Input(*span)) / model_costs.TICK if link else 0.0
      for link, span in zip(links, ranges[1:], strict=False)
    ]
    self._latency = [link.latency / model_costs.TICK if link else 0.0 for link in links]
    # Over each boundary: the activation, and the gradient if an earlier stage is trained.
    self._num_transfers = [1 + any(trained[:start]) for start, _ in ranges[1:]]
    # Transfers between replicas.
    self._all_reduce, self.after = [0.0] * len(ends), 0.0
    self._is_first_trained = any(trained[: ends[0]])
    self.update = [0.0] * k
    send_weights = [0.0] * k
    for s, (start, end) in enumerate(ranges):
      num_bytes = sum(w.trained_bytes for w in weights[start:end])
      reduce_seconds, send_seconds = ReduceSeconds(devices, choice, num_bytes)
      self._all_reduce[s] = reduce_seconds / model_costs.TICK
      send_weights[owners[s]] += send_seconds / model_costs.TICK
      seconds = costs.UpdateSeconds(weights[start:end], choice.num_shards, devices)
      self.update[owners[s]] += slowdown * seconds / model_costs.TICK
    self.after = max(send_weights)
    if choice.num_slices and costs.vocabulary and costs.vocabulary.copy_bytes is not None:
      # Once a step the weights of the last stage go to the slices, and gradients come back.
      link = links[-1]
      assert link is not None
      seconds = link.Seconds(costs.vocabulary.copy_bytes * (k - 1) / k) + 2 * link.latency
      self.after += seconds / model_costs.TICK
    # The work for one micro-batch.
    forward, inputs, gradients, recompute = (slowed[name] for name in _PARTS)
    recompute = [x * (p != 'none') for x, p in zip(recompute, policies, strict=True)]
    if choice.is_fused:
      recompute = [*recompute[:-1], 0]
    self.of_last = sum(
      x for x, policy in zip(recompute, policies, strict=True) if policy == 'except_last'
    )
    self.stages = [sum(x) for x in zip(forward, inputs, gradients, recompute, strict=True)]
    # The actions of earlier stages while a later one cannot work. With a split backward they are F
    # only, because the later one may run W while they run I.
    self._critical = forward if choice.schedule in plan_choice.SPLIT else self.stages

  def Costs(self, with_links: bool = True) -> simulator.Costs:
    """Returns the costs for the simulator."""
    if not with_links:
      return dataclasses.replace(self._costs, update=self.update)
    return dataclasses.replace(
      self._costs,
      update=self.update,
      transfer=self._transfer,
      latency=self._latency,
      transfer_occupies_devices=self._occupies_devices,
      all_reduce=self._all_reduce,
      host_link=self._to_host,
    )

  def Bound(self) -> float:
    """Returns a lower bound of the time of a step with this cut; see `plan_bound.BoundStep`."""
    k, m = self._choice.num_devices, self._choice.num_micro_batches
    bound = max(m * max(self._transfer, default=0.0), self._copies)
    before = 0.0
    for d in range(k):
      work = sum(t for t, owner in zip(self.stages, self._owners, strict=True) if owner == d)
      bound = max(bound, before + m * work)
      before += self._critical[d]
      if d + 1 < k:
        times = 1 if self._choice.schedule in plan_choice.SPLIT else self._num_transfers[d]
        before += times * (self._transfer[d] + self._latency[d])
    bound -= self.of_last
    if self._is_first_trained and self._choice.schedule not in plan_choice.SPLIT:
      # The first stage ends last, and its gradients are added after that.
      bound += self._all_reduce[0]
    return bound + max(self.update) + self.after

  def _LeastCopies(self, layers_trained: Sequence[bool], ends: Sequence[int]) -> float:
    """Returns the time of all copies of the device that has the most, in one direction."""
    assert self._to_host is not None and self.sizes is not None
    trained = [any(layers_trained[a:b]) for a, b in partitioner.StageRanges(ends)]
    # The bytes of the first micro-batch, the least of all micro-batches.
    schedule = plan_schedules.Get(self._choice, self._choice.num_devices)
    work = step_work.StepWork(schedule, self._policies, trained)
    num_bytes = activation_memory.StoredBytes(work, self.sizes, [1] * schedule.num_micro_batches)
    totals = [0.0] * self._choice.num_devices
    for stage, count in enumerate(plan_schedules.NumOffloaded(self._choice)):
      if work.HasBackward(stage):
        totals[self._owners[stage]] += count * num_bytes(stage, 0)
    return max(totals) / self._to_host.bandwidth


def ReduceSeconds(
  devices: device_description.Devices, choice: Choice, num_bytes: float
) -> tuple[float, float]:
  """Returns the seconds of adding a stage's gradients over the replicas, and of sending weights.

  A collective sum sends the least possible bytes, 2 (R-1)/R of the gradients', in 2 log2 R
  consecutive messages. With sharded slots, gradients are sent to their owners and weights back,
  (R-1)/R of the bytes each. On CPUs ('send'), gradients go to the replica that adds them, and sums
  come back: as many bytes as by a collective sum, in two messages, or one if R is 2.
  """
  r = choice.num_replicas
  if r == 1 or not num_bytes:
    return 0.0, 0.0
  link = devices.Ring(r, choice.num_devices)
  share = link.Seconds(num_bytes) * (r - 1) / r
  if choice.shard_slots:
    return share + link.latency, share + link.latency
  if devices.all_reduce == 'send':
    return 2 * share + min(r - 1, 2) * link.latency, 0.0
  return 2 * (share + math.ceil(math.log2(r)) * link.latency), 0.0
