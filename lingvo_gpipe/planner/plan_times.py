# SPDX-License-Identifier: Apache-2.0
"""How long everything of a plan takes: what stages do, transfers, sums of gradients, updates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from lingvo_gpipe.pipeline.cost import partitioner, simulator, stage_memory, stage_work
from lingvo_gpipe.planner import device_description, model_costs, plan_choice

Choice = plan_choice.Choice

# Of `simulator.Costs`, what layers do.
_PARTS = ('forward', 'input_gradient', 'weight_gradient', 'recompute')


class Times:
  """How long everything of a cut takes, in ticks.

  Attributes:
    stages: all that each stage does for one micro-batch.
    again: the recomputation in it.
    update: of each device.
    after: what comes after the update: weights on their way from who has their slots.
  """

  def __init__(
    self,
    costs: model_costs.ModelCosts,
    devices: device_description.Devices,
    choice: Choice,
    work: Sequence[stage_work.LayerWork],
    ends: Sequence[int],
    memory: stage_memory.StageMemory,
  ) -> None:
    self._choice = choice
    ranges = partitioner.StageRanges(ends)
    r, k = choice.grid
    slowdown = devices.Slowdown(r * k)
    alone = stage_work.SimulatorCosts(work, ends)
    slowed = {name: [slowdown * t for t in getattr(alone, name)] for name in _PARTS}
    self._costs = dataclasses.replace(alone, **slowed)
    # From stage to stage.
    links = [devices.Boundary(r, k, s % k, (s + 1) % k) for s in range(len(ends) - 1)]
    self._transfer = [
      link.Seconds(memory.Input(*span)) / model_costs.TICK if k > 1 else 0.0
      for link, span in zip(links, ranges[1:], strict=True)
    ]
    self._latency = [link.latency / model_costs.TICK if k > 1 else 0.0 for link in links]
    # A gradient comes back where a stage before is trained.
    self._ways = [1 + any(costs.trained[:start]) for start, _ in ranges[1:]]
    # From replica to replica.
    self._all_reduce, self.after = [0.0] * len(ends), 0.0
    self._is_first_trained = any(costs.trained[: ends[0]])
    self.update = [0.0] * k
    weights_back = [0.0] * k
    for s, (start, end) in enumerate(ranges):
      num_bytes = sum(w.trained_bytes for w in costs.weights[start:end])
      there, back = ReduceSeconds(devices, choice, num_bytes)
      self._all_reduce[s] = there / model_costs.TICK
      weights_back[s % k] += back / model_costs.TICK
      seconds = costs.UpdateSeconds(start, end, choice.num_shards, devices)
      self.update[s % k] += slowdown * seconds / model_costs.TICK
    self.after = max(weights_back)
    # Of one micro-batch.
    forward, inputs, weights, again = (slowed[name] for name in _PARTS)
    if not choice.recomputes:
      again = [0] * len(ends)
    if choice.schedule in plan_choice.FUSED:
      again = [*again[:-1], 0]
    self.again = again
    self.stages = [sum(x) for x in zip(forward, inputs, weights, again, strict=True)]
    self._waited_for = self.stages
    if choice.schedule == 'zb_h1':
      self._waited_for = [sum(x) for x in zip(forward, inputs, again, strict=True)]

  def Costs(self, with_links: bool = True) -> simulator.Costs:
    """What the simulator takes."""
    if not with_links:
      return dataclasses.replace(self._costs, update=self.update)
    return dataclasses.replace(
      self._costs,
      update=self.update,
      transfer=self._transfer,
      latency=self._latency,
      all_reduce=self._all_reduce,
    )

  def Bound(self) -> float:
    """What a step takes at the least; see `plan_bound.OfStep`."""
    k, m = self._choice.num_devices, self._choice.num_micro_batches
    bound = m * max(self._transfer, default=0.0)
    before = 0.0
    for d in range(k):
      bound = max(bound, before + m * sum(self.stages[d::k]))
      before += self._waited_for[d]
      if d + 1 < k:
        before += self._ways[d] * (self._transfer[d] + self._latency[d])
    if self._choice.remat_policy == 'except_last':
      bound -= sum(self.again)
    if self._is_first_trained:
      # Both end with the first stage.
      bound += self._all_reduce[0]
    return bound + max(self.update) + self.after


def ReduceSeconds(
  devices: device_description.Devices, choice: Choice, num_bytes: float
) -> tuple[float, float]:
  """(seconds of adding gradients over the replicas, of sending weights back) of one stage.

  A collective sum is optimal in bytes, 2 (R-1)/R of them, and takes 2 log2 R messages one after the
  other. Where slots are shared out, gradients go to their owners and weights come back, (R-1)/R of
  the bytes each. On CPUs, each replica gets the gradients of all others.
  """
  r = choice.num_replicas
  if r == 1 or not num_bytes:
    return 0.0, 0.0
  link = devices.Ring(r, choice.num_devices)
  share = link.Seconds(num_bytes) * (r - 1) / r
  if choice.shard_slots:
    return share + link.latency, share + link.latency
  if devices.all_reduce == 'send':
    return share * r + link.latency, 0.0
  return 2 * (share + math.ceil(math.log2(r)) * link.latency), 0.0
