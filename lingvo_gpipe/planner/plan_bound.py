# SPDX-License-Identifier: Apache-2.0
"""A lower bound of the time of a step for any cut, with which the search skips choices."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gpipe.pipeline.cost import stage_work
from lingvo_gpipe.planner import plan_choice


class _Sums:
  """Sums over the layers of one micro-batch, with or without recomputation.

  Attributes:
    total: the cost of all layers, F + I + W.
    largest: the cost of the most expensive layer.
    head: the cost of the last layer, which may be a softmax.
    largest_but_head: the cost of the most expensive of the other layers.
    least_share: the least share of a layer's cost that another stage waits for, which is all but W.
    least_forward_share: the least share of F in a layer's cost.
  """

  def __init__(self, layers: Sequence[tuple[float, float, float]]) -> None:
    """Sums up.

    Args:
      layers: for each layer its cost, the part of it that another stage waits for, and F.
    """
    self.total = sum(cost for cost, _, _ in layers)
    self.largest = max(cost for cost, _, _ in layers)
    self.head = layers[-1][0]
    self.largest_but_head = max((cost for cost, _, _ in layers[:-1]), default=0.0)
    self.least_share = min((part / cost for cost, part, _ in layers if cost), default=1.0)
    self.least_forward_share = min((f / cost for cost, _, f in layers if cost), default=1.0)


class Totals:
  """The work of one micro-batch, of each layer and in total.

  Attributes:
    work: the work of each layer.
    plain: sums without recomputation.
    recomputed: sums with recomputation.
    recompute: the recomputation of all layers.
    largest_saving: the greatest ratio of a layer's cost with recomputation to that without.
  """

  def __init__(self, work: Sequence[stage_work.LayerWork], first: int) -> None:
    """Sums up.

    Args:
      work: the work of each layer.
      first: the first trained layer.
    """
    self.work = work
    plain, recomputed = [], []
    for i, w in enumerate(work):
      cost, part = w.forward + w.input_gradient + w.weight_gradient, w.forward + w.input_gradient
      recompute = w.forward if i >= first else 0
      plain.append((cost, part, w.forward))
      recomputed.append((cost + recompute, part + recompute, w.forward))
    self.plain, self.recomputed = _Sums(plain), _Sums(recomputed)
    self.recompute = self.recomputed.total - self.plain.total
    pairs = zip(recomputed, plain, strict=True)
    self.largest_saving = max((a / b for (a, *_), (b, *_) in pairs if b), default=1.0)


def BoundStep(choice: plan_choice.Choice, totals: Totals) -> float:
  """Returns a lower bound of a step's time, in the unit of the work.

  Ignores transfers, gradient sums and updates. Let c_s be the work of stage s for one micro-batch,
  and T the time of the step. Stage s works for M c_s. Before that, the earlier stages run the first
  micro-batch forward, and after that, they run the last micro-batch backward:

      T >= M c_s + r (c_0 + ... + c_(s-1))

  with r the least share of this work in a stage's work. If W is an action of its own, stage s may
  run it while the earlier stages run backward, and r counts F only. T is least for the total work
  W = c_0 + ... + c_(K-1) if equality holds for all stages:

      T = r W / (1 - (1 - r/M)^K)
  """
  if choice.num_slices:
    return _BoundShared(choice, totals)
  fused = choice.schedule in plan_choice.FUSED
  m, k = choice.num_micro_batches, choice.num_devices
  sums = totals.recomputed if choice.recomputes else totals.plain
  cheapest = totals.plain if fused else sums
  # One micro-batch passes through all stages. If W is a separate action, nothing waits for it.
  is_split = choice.schedule in plan_choice.SPLIT
  path = sums.least_share * sums.total if is_split else cheapest.total
  bound = max(m * cheapest.largest, path)
  if choice.stages_per_device > 1:
    bound = max(bound, m * sums.total / k)
  elif is_split:
    r = sums.least_forward_share
    if r:
      bound = max(bound, r * sums.total / (1 - (1 - r / m) ** k))
  else:
    # A fused last stage saves work and so has time for more layers.
    share = (1 - 1 / m) ** (k - 1)
    last = totals.largest_saving if fused and choice.recomputes else 1.0
    bound = max(bound, sums.total / (1 - share + share * last / m))
  if choice.remat_policy == 'except_last':
    bound -= totals.recompute
  return max(bound, 0.0)


def _BoundShared(choice: plan_choice.Choice, totals: Totals) -> float:
  """Returns `BoundStep` for a shared vocabulary: work H, which devices may share in any way.

  A device runs its slices after the first micro-batch comes and before the last one leaves. With
  l_s the work of other layers in stage s, L in all, and h_s the work of its slice:

      T >= M (l_s + h_s) + r (l_0 + ... + l_(s-1))

  T is least if early devices have slices only and the last i + 1 ones the layers. For each i, the
  sum of these inequalities with weights 1, ..., 1, 1/q, ..., 1/q^i for q = 1 - r/M is a bound:

      T >= (H + L/q^i) / ((K-i)/M + (1/q^i - 1)/r)
  """
  m, k = choice.num_micro_batches, choice.num_devices
  sums = totals.recomputed if choice.recomputes else totals.plain
  is_split = choice.schedule in plan_choice.SPLIT
  layers_work = sums.total - sums.head
  path = (layers_work + sums.head / k) * (sums.least_share if is_split else 1.0)
  bound = max(m * sums.largest_but_head, path, m * sums.total / k)
  r = sums.least_forward_share if is_split else 1.0
  if choice.stages_per_device == 1 and r and m > 1:
    for i in range(1, k):
      inverse = (1 - r / m) ** -i
      bound = max(bound, (sums.head + layers_work * inverse) / ((k - i) / m + (inverse - 1) / r))
  if choice.remat_policy == 'except_last':
    bound -= totals.recompute
  return max(bound, 0.0)
