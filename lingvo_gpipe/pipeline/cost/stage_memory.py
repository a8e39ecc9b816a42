# SPDX-License-Identifier: Apache-2.0
"""Predicts the peak memory of a stage: weights with their state, and activations.

In bytes, for each stage, if h is the most micro-batches that the stage holds under the schedule:

    state        weights, gradient accumulators, optimizer slots, and rows of embeddings whose
                 gradients wait for the update

    activations  under policy
      stage        h * stage input + inputs of its other layers + inner activations
      except_last  as `stage`, and all activations of the last micro-batch
      layer        h * inputs of all its layers + inner activations of its largest layer
      ByLayer      as `layer`, and h * what else its layers keep; of the inner activations only
                   what is computed again
      none         h * (stage input + inputs of its other layers + inner activations)

The terms with h are kept from F to B. The other terms exist within B, which recomputes the forward:
this is O(N + L/K * N/M) of GPipe section 2.3 for a mini-batch of N. If the schedule splits the
backward, `layer` is equal to `stage`. Skip connections count as input of the stage that takes them.

Inner activations are the tensors that a layer makes in addition to its inputs and outputs
(`fprop_trace.TraceLayer`), an upper estimate. The prediction does not include gradients of
activations and weights while they are computed, boundary tensors in transfer, the loss, workspaces
of kernels, and TensorFlow itself.
"""

from __future__ import annotations

import bisect
import dataclasses
import fractions
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from lingvo_gpipe.pipeline.cost import activation_memory
from lingvo_gpipe.pipeline.schedule import rematerialisation, step_work
from lingvo_gpipe.pipeline.schedule import schedule as schedule_lib

Part = activation_memory.Part


@dataclasses.dataclass(frozen=True)
class Option:
  """One way to keep a layer between its forward and its backward.

  Attributes:
    recomputed: the names of the parts that backward recomputes; None: the whole layer.
    kept_bytes: bytes of a micro-batch that forward keeps besides the layer's inputs.
    again: the share of the layer's forward pass that backward repeats.
    working: bytes that backward recomputes.
  """

  recomputed: frozenset[str] | None
  kept_bytes: int
  again: fractions.Fraction
  working: int


@dataclasses.dataclass(frozen=True)
class LayerBytes:
  """The memory of one layer, in bytes.

  Attributes:
    state: weights, gradient accumulators, optimizer slots, and gradients that wait for the update;
      if the replicas shard the slots, the mean over the replicas.
    inputs: the layer's arguments for one micro-batch.
    inner: the tensors that it makes for one micro-batch, without its inputs and outputs.
    skips_in: {name: bytes} of the skip connections that end here.
    skips_out: names of the skip connections that begin here.
    of_owner: with sharded slots, the bytes of the additional slots of the replica that owns the
      layer's largest weight.
    options: what may be kept of the layer, for the policy `auto`.
  """

  state: int
  inputs: int
  inner: int
  skips_in: Mapping[str, int] = dataclasses.field(default_factory=dict)
  skips_out: tuple[str, ...] = ()
  of_owner: int = 0
  options: tuple[Option, ...] = ()


class Held(NamedTuple):
  """The number of micro-batches of which a stage holds each kind of tensor at one time."""

  stage_input: int = 0
  layer_inputs: int = 0
  inner: int = 0
  largest_layer: int = 0

  def Plus(self, other: Held, factor: int = 1) -> Held:
    """Returns self + factor * other."""
    return Held(*(a + factor * b for a, b in zip(self, other, strict=True)))

  def Covers(self, other: Held) -> bool:
    """Whether no entry is smaller than that entry of `other`."""
    return all(a >= b for a, b in zip(self, other, strict=True))


_NOTHING = Held()
_HELD = {
  Part.NOTHING: _NOTHING,
  Part.INPUT: Held(1, 0, 0, 0),
  Part.LAYER_INPUTS: Held(1, 1, 0, 0),
  Part.ONE_LAYER: Held(1, 1, 0, 1),
  # An upper bound: the part that W does not need is unknown.
  Part.FOR_WEIGHTS: Held(1, 1, 1, 0),
  Part.EVERYTHING: Held(1, 1, 1, 0),
}


class StageMemory:
  """The memory of all stages that a list of layers can be cut into."""

  def __init__(
    self,
    layers: Sequence[LayerBytes],
    schedule: schedule_lib.Schedule,
    remat_policy: rematerialisation.Policy,
    first_trained: int = 0,
    held: Sequence[tuple[Held, ...]] | None = None,
  ) -> None:
    """Precomputes prefix sums, so that the memory of a stage is a few operations.

    Args:
      layers: the flat list of layers.
      schedule: the training schedule.
      remat_policy: the re-materialisation policy. For a `ByLayer` the methods need what is kept.
      first_trained: the first layer with trained weights; stages before it have no backward.
      held: `HeldAtPeaks` of the schedule and the policy; None: computed here.
    """
    self._layers = list(layers)
    self._shared = any(layer.of_owner for layer in layers)
    self._schedule = schedule
    self._first = first_trained
    self._state, self._inputs, self._inner = (
      [0, *itertools.accumulate(getattr(x, name) for x in layers)]
      for name in ('state', 'inputs', 'inner')
    )
    sources = {name: i for i, layer in enumerate(layers) for name in layer.skips_out}
    # {skip connection: (layer that begins it, bytes, layers that take it)}.
    self._skips: dict[str, tuple[int, int, list[int]]] = {}
    for i, layer in enumerate(layers):
      for name, num_bytes in layer.skips_in.items():
        self._skips.setdefault(name, (sources.get(name, -1), num_bytes, []))[2].append(i)
    held = HeldAtPeaks(schedule, remat_policy) if held is None else held
    # Stages with equal peaks share one entry, and one computation in `Rooms`.
    self._distinct = list(dict.fromkeys(held))
    self._held = [self._distinct.index(peaks) for peaks in held]

  def State(self, start: int, end: int) -> int:
    """Returns the bytes of weights, accumulators and slots of layers [start, end).

    For sharded slots this is the most that a replica can have: whole weights go to the replica with
    the least slots, which has at most the mean before it gets another weight.
    """
    of_owner = max((x.of_owner for x in self._layers[start:end]), default=0) if self._shared else 0
    return self._state[end] - self._state[start] + of_owner

  def Peaks(self, stage: int) -> tuple[Held, ...]:
    """Returns the candidates for the peak of a stage, see `HeldAtPeaks`."""
    return self._distinct[self._held[stage]]

  def Activations(
    self, stage: int, start: int, end: int, *, kept_bytes: int = 0, working: int | None = None
  ) -> int:
    """Returns the peak bytes of activations of stage `stage` if it has layers [start, end).

    Args:
      stage: the stage.
      start: its first layer.
      end: the index after its last layer.
      kept_bytes: under `ByLayer`, the bytes that the layers keep besides their inputs.
      working: under `ByLayer`, the most bytes that the backward of a layer recomputes; None: the
        inner activations of the largest layer.
    """
    return self._Activations(self._held[stage], start, end, kept_bytes, working)

  def RoomToKeep(
    self, stage: int, start: int, end: int, limit: float, working: int
  ) -> float | None:
    """Returns the most that the layers may keep besides their inputs; see `Activations`.

    Args:
      stage: the stage.
      start: its first layer.
      end: the index after its last layer.
      limit: bytes for the activations.
      working: the most bytes that the backward of a layer recomputes.

    Returns:
      The bytes of a micro-batch; None if not even the inputs fit.
    """
    stage_input, layer_inputs, inner, _ = self._Sizes(start, end)
    room = math.inf
    for held in self.Peaks(stage):
      sizes = (stage_input, layer_inputs, inner, working)
      space = limit - sum(n * size for n, size in zip(held, sizes, strict=True))
      if space < 0:
        return None
      if held.layer_inputs:
        room = min(room, space // held.layer_inputs)
    return room

  def Sizes(self, ends: Sequence[int]) -> activation_memory.ActivationSizes:
    """Returns the bytes of activations of each stage of a cut, for the simulator."""
    ranges = zip([0, *ends], ends, strict=False)
    stage_input, layer_inputs, inner, largest = zip(*(self._Sizes(*r) for r in ranges), strict=True)
    return activation_memory.ActivationSizes(
      stage_input=stage_input,
      inner=[a + b for a, b in zip(layer_inputs, inner, strict=True)],
      layer_inputs=layer_inputs,
      largest_layer=largest,
    )

  def Input(self, start: int, end: int) -> int:
    """Returns the bytes that layers [start, end) receive, including skip connections."""
    return self._layers[start].inputs + sum(
      num_bytes
      for source, num_bytes, takers in self._skips.values()
      if source < start and bisect.bisect_left(takers, start) < bisect.bisect_left(takers, end)
    )

  def _Sizes(self, start: int, end: int) -> tuple[int, int, int, int]:
    """Returns the bytes that the entries of a `Held` count, for layers [start, end)."""
    return (
      self.Input(start, end),
      self._inputs[end] - self._inputs[start + 1],
      self._inner[end] - self._inner[start],
      max(layer.inner for layer in self._layers[start:end]),
    )

  def _Activations(
    self, kind: int, start: int, end: int, kept_bytes: int = 0, working: int | None = None
  ) -> int:
    stage_input, layer_inputs, inner, largest = self._Sizes(start, end)
    if end <= self._first:
      return stage_input + largest
    sizes = (stage_input, layer_inputs + kept_bytes, inner, largest if working is None else working)
    return max(
      sum(n * size for n, size in zip(held, sizes, strict=True)) for held in self._distinct[kind]
    )

  def _Needs(self, kind: int, start: int, end: int) -> int:
    return self.State(start, end) + self._Activations(kind, start, end)

  def Rooms(self, limit: float) -> list[list[int]]:
    """Returns for each stage and each layer that it may start with its furthest end within `limit`.

    The peaks of several stages of one device are not additive. Each stage gets an equal share of
    the limit, which always suffices.

    Args:
      limit: bytes of one device.
    """
    owners = self._schedule.stage_to_device
    stages = [(kind, owners.count(owner)) for kind, owner in zip(self._held, owners, strict=True)]
    rooms = {}
    for kind, count in set(stages):
      share = limit / count
      room: list[int] = []
      for start in range(len(self._layers)):
        # Memory grows with the end, and the ends of neighbouring starts are close together.
        end = max(room[-1], start) if room else start
        while end > start and self._Needs(kind, start, end) > share:
          end -= 1
        while end < len(self._layers) and self._Needs(kind, start, end + 1) <= share:
          end += 1
        room.append(end)
      rooms[kind, count] = room
    return [rooms[stage] for stage in stages]


def HeldAtPeaks(
  schedule: schedule_lib.Schedule, remat_policy: rematerialisation.Policy
) -> list[tuple[Held, ...]]:
  """Returns for each stage the candidates for its peak, one of which is the peak for any sizes.

  `activation_memory.Peaks` computes the peak for known sizes.
  """
  now = [_NOTHING] * schedule.num_stages
  peaks: list[dict[Held, None]] = [{} for _ in now]
  for _, action, change in activation_memory.Changes(step_work.StepWork(schedule, remat_policy)):
    k = action.stage
    remaining = now[k].Plus(_HELD[change.before], -1)  # Without this micro-batch.
    peaks[k].update(dict.fromkeys(remaining.Plus(_HELD[part]) for part in change.within))
    now[k] = remaining.Plus(_HELD[change.after])
  return [Maximal(held) for held in peaks]


def Maximal(held: Collection[Held]) -> tuple[Held, ...]:
  """Returns the elements that no other one covers, in their order; all elements differ."""
  maximal: dict[Held, None] = {}
  # An element that covers another one has a larger sum. Few elements remain, so this is fast.
  for candidate in sorted(held, key=sum, reverse=True):
    if not any(x.Covers(candidate) for x in maximal):
      maximal[candidate] = None
  return tuple(x for x in held if x in maximal)
