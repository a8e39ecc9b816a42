# SPDX-License-Identifier: Apache-2.0
"""Predicts the most memory that a stage needs: weights with what belongs to them, and activations.

For each stage, with every size in bytes and every tensor of one micro-batch:

    state        weights, gradient accumulators and optimizer slots
    activations  h · (stage input) + (inputs of its other layers) + (inner activations)

where h is the most micro-batches that the schedule has the stage hold. The first term is kept from
F to B, the others exist within B, in which the forward runs again: GPipe section 2.3's
O(N + L/K · N/M) for a mini-batch of N. Policy `none` keeps all of it h times, `except_last` once
more for the last micro-batch, and `layer` keeps the inputs of all layers h times and has the inner
activations of one layer at a time (but is the same as `stage` where backward is split). Skip
connections count as input of the stage that takes them.

Inner activations are what a layer makes beyond its inputs and outputs (`fprop_trace.TraceCost`): an
upper estimate. Not in the prediction: gradients of activations and of weights while they are
computed, boundary tensors under way, the loss, workspaces of kernels, and TensorFlow itself.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lingvo_gpipe.pipeline.cost import activation_memory
from lingvo_gpipe.pipeline.schedule import schedule as schedule_lib
from lingvo_gpipe.pipeline.schedule import step_work

Part = activation_memory.Part


@dataclasses.dataclass(frozen=True)
class LayerBytes:
  """What one layer needs, in bytes.

  Attributes:
    state: its weights, gradient accumulators and optimizer slots.
    inputs: its arguments, of one micro-batch.
    inner: what it makes of one micro-batch beyond its inputs and outputs.
    skips_in: {name: bytes} of the skip connections that it takes.
    skips_out: names of those that it begins.
    of_owner: where replicas share out slots, and `state` has their mean: how much more of them who
      owns the layer's largest weight may have.
  """

  state: int
  inputs: int
  inner: int
  skips_in: Mapping[str, int] = dataclasses.field(default_factory=dict)
  skips_out: tuple[str, ...] = ()
  of_owner: int = 0


class Held(NamedTuple):
  """How many micro-batches' worth of each of a stage's tensors is there at one time."""

  stage_input: int = 0
  layer_inputs: int = 0
  inner: int = 0
  largest_layer: int = 0

  def Plus(self, other: Held, sign: int = 1) -> Held:
    return Held(*(a + sign * b for a, b in zip(self, other, strict=True)))

  def Covers(self, other: Held) -> bool:
    return all(a >= b for a, b in zip(self, other, strict=True))


_NOTHING = Held()
_HELD = {
  Part.NOTHING: _NOTHING,
  Part.INPUT: Held(1, 0, 0, 0),
  Part.LAYER_INPUTS: Held(1, 1, 0, 0),
  Part.ONE_LAYER: Held(1, 1, 0, 1),
  # What W could do without is not known.
  Part.FOR_WEIGHTS: Held(1, 1, 1, 0),
  Part.EVERYTHING: Held(1, 1, 1, 0),
}


class StageMemory:
  """The memory of any stage that a list of layers may be cut into."""

  def __init__(
    self,
    layers: Sequence[LayerBytes],
    schedule: schedule_lib.Schedule,
    remat_policy: str,
    first_trained: int = 0,
    held: Sequence[tuple[Held, ...]] | None = None,
  ) -> None:
    """Nothing is simulated here; see `HeldAtPeaks`.

    Args:
      layers: the flat list.
      schedule: the training schedule.
      remat_policy: what backward recomputes.
      first_trained: the first layer with trained weights; stages before it have no backward.
      held: `HeldAtPeaks` of schedule and policy, where it is known already.
    """
    self._layers = list(layers)
    self._shared = any(layer.of_owner for layer in layers)
    self._schedule = schedule
    self._first = first_trained
    self._state, self._inputs, self._inner = (
      [0, *itertools.accumulate(getattr(x, name) for x in layers)]
      for name in ('state', 'inputs', 'inner')
    )
    makers = {name: i for i, layer in enumerate(layers) for name in layer.skips_out}
    self._takers: dict[str, tuple[int, int, list[int]]] = {}  # (maker, bytes, layers that take it).
    for i, layer in enumerate(layers):
      for name, num_bytes in layer.skips_in.items():
        self._takers.setdefault(name, (makers.get(name, -1), num_bytes, []))[2].append(i)
    held = HeldAtPeaks(schedule, remat_policy) if held is None else held
    # Stages that hold the same share what is known of them.
    self._distinct = list(dict.fromkeys(held))
    self._held = [self._distinct.index(peaks) for peaks in held]

  def State(self, start: int, end: int) -> int:
    """The bytes of weights, accumulators and slots of layers [start, end).

    Of slots that are shared out, the most that a replica can have: weights are not divided, and
    each goes to who has least, which has at most the mean then.
    """
    of_owner = max((x.of_owner for x in self._layers[start:end]), default=0) if self._shared else 0
    return self._state[end] - self._state[start] + of_owner

  def Activations(self, stage: int, start: int, end: int) -> int:
    """The most bytes of activations of stage `stage`, if it has layers [start, end)."""
    return self._Activations(self._held[stage], start, end)

  def Input(self, start: int, end: int) -> int:
    """The bytes that layers [start, end) get of others, skip connections included."""
    return self._layers[start].inputs + sum(
      num_bytes
      for maker, num_bytes, takers in self._takers.values()
      if maker < start and bisect.bisect_left(takers, start) < bisect.bisect_left(takers, end)
    )

  def _Activations(self, kind: int, start: int, end: int) -> int:
    stage_input = self.Input(start, end)
    peaks = self._distinct[kind]
    largest = 0
    if end <= self._first or any(held.largest_layer for held in peaks):
      largest = max(layer.inner for layer in self._layers[start:end])
    if end <= self._first:
      return stage_input + largest
    layer_inputs = self._inputs[end] - self._inputs[start + 1]
    inner = self._inner[end] - self._inner[start]
    sizes = (stage_input, layer_inputs, inner, largest)
    return max(sum(n * size for n, size in zip(held, sizes, strict=True)) for held in peaks)

  def _Needs(self, kind: int, start: int, end: int) -> int:
    return self.State(start, end) + self._Activations(kind, start, end)

  def Rooms(self, limit: float) -> list[list[int]]:
    """For each stage and each layer it may start with, its furthest end within `limit` bytes.

    What several stages of one device need together is not additive; each gets an equal share of
    the limit, which is always enough.
    """
    owners = self._schedule.stage_to_device
    stages = [(kind, owners.count(owner)) for kind, owner in zip(self._held, owners, strict=True)]
    rooms = {}
    for kind, count in set(stages):
      share = limit / count
      room: list[int] = []
      for start in range(len(self._layers)):
        # The memory never falls as the end moves on; the next start's end is near the last one's.
        end = max(room[-1], start) if room else start
        while end > start and self._Needs(kind, start, end) > share:
          end -= 1
        while end < len(self._layers) and self._Needs(kind, start, end + 1) <= share:
          end += 1
        room.append(end)
      rooms[kind, count] = room
    return [rooms[stage] for stage in stages]


def HeldAtPeaks(schedule: schedule_lib.Schedule, remat_policy: str) -> list[tuple[Held, ...]]:
  """For each stage what it holds at those moments, one of which is its peak for any sizes.

  `simulator.Simulate` finds the same peak for given sizes; here sizes are not known yet.
  """
  now = [_NOTHING] * schedule.num_stages
  peaks: list[dict[Held, None]] = [{} for _ in now]
  for _, action, change in activation_memory.Changes(step_work.StepWork(schedule, remat_policy)):
    k = action.stage
    rest = now[k].Plus(_HELD[change.before], -1)
    peaks[k].update(dict.fromkeys(rest.Plus(_HELD[part]) for part in change.within))
    now[k] = rest.Plus(_HELD[change.after])
  return [
    tuple(a for a in found if not any(b != a and b.Covers(a) for b in found)) for found in peaks
  ]
