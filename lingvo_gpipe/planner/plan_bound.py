# SPDX-License-Identifier: Apache-2.0
"""The least time of a step, whatever the cut: a search leaves out what it rules out."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gpipe.pipeline.cost import stage_work
from lingvo_gpipe.planner import plan_choice


class _Sums:
  """What the layers cost together: each layer's cost, F + I + W, with or without recomputation."""

  def __init__(self, layers: Sequence[tuple[float, float]]) -> None:
    self.total = sum(cost for cost, _ in layers)
    self.largest = max(cost for cost, _ in layers)
    # Of what a layer does, the part that a stage before waits for.
    self.least_share = min((part / cost for cost, part in layers if cost), default=1.0)


class Totals:
  """The work of one micro-batch, layer by layer and together.

  Attributes:
    work: of each layer.
  """

  def __init__(self, work: Sequence[stage_work.LayerWork], first: int) -> None:
    """Adds up.

    Args:
      work: of each layer.
      first: the first layer that is trained.
    """
    self.work = work
    plain, recomputed = [], []
    for i, w in enumerate(work):
      cost, part = w.forward + w.input_gradient + w.weight_gradient, w.forward + w.input_gradient
      again = w.forward if i >= first else 0
      plain.append((cost, part))
      recomputed.append((cost + again, part + again))
    self.plain, self.recomputed = _Sums(plain), _Sums(recomputed)
    self.again = self.recomputed.total - self.plain.total
    pairs = zip(recomputed, plain, strict=True)
    self.largest_saving = max((a / b for (a, _), (b, _) in pairs if b), default=1.0)


def OfStep(choice: plan_choice.Choice, totals: Totals) -> float:
  """What a step takes at the least, in the unit of the work; without links, sums and updates.

  With T for the step, stage s works M c_s, after what stages before it do for one micro-batch
  forward, and before what they do for it backward: T >= M c_s + r (c_0 + ... + c_(s-1)), r being
  the least share of such work in theirs. The least T for which stages can have all of the work W
  is that with equality everywhere, r W / (1 - (1 - r/M)^K).
  """
  fused = choice.schedule in plan_choice.FUSED
  m, k = choice.num_micro_batches, choice.num_devices
  whole = totals.recomputed if choice.recomputes else totals.plain
  cheapest = totals.plain if fused else whole
  # One micro-batch passes all stages; W need not be waited for where it is an action of its own.
  path = whole.least_share * whole.total if choice.schedule == 'zb_h1' else cheapest.total
  bound = max(m * cheapest.largest, path)
  if choice.stages_per_device > 1:
    bound = max(bound, m * whole.total / k)
  elif choice.schedule == 'zb_h1':
    r = whole.least_share
    if r:
      bound = max(bound, r * whole.total / (1 - (1 - r / m) ** k))
  else:
    # In a fused last stage the work that it saves makes room for more layers.
    rest = (1 - 1 / m) ** (k - 1)
    last = totals.largest_saving if fused and choice.recomputes else 1.0
    bound = max(bound, whole.total / (1 - rest + rest * last / m))
  if choice.remat_policy == 'except_last':
    bound -= totals.again
  return max(bound, 0.0)
