# SPDX-License-Identifier: Apache-2.0
"""The costs of a model's layers for any micro-batch size, interpolated between sampled sizes.

FLOPs and bytes are linear in the number of examples, so two sizes determine all others. Measured
seconds are not linear; they are interpolated piecewise. Imports no TensorFlow.

Without measured seconds, a layer's forward takes the time of its FLOPs, or the time to read and
write its bytes if that is longer: weights, inputs, outputs, and twice the inner activations. I
takes as long as the forward. W reads and writes accumulators instead of reading weights.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence

from lingvo_gpipe.pipeline.cost import stage_memory, stage_work
from lingvo_gpipe.planner import device_description

# The unit of times, in seconds. Times are integers, so that sums are exact and cuts fast to find.
TICK = 1e-12


@dataclasses.dataclass(frozen=True)
class LayerWeights:
  """The weights of a layer.

  Attributes:
    num_bytes: bytes of all weights.
    gradient_bytes: bytes of the accumulators of the trained weights.
    trained_bytes: bytes of the trained weights, without tied copies.
    skips_out: names of the skip connections that begin here.
    largest_trained: bytes of the largest weight in `trained_bytes`; None: there is only one.
    update_seconds: measured seconds of an update; None: computed from bytes.
  """

  num_bytes: int
  gradient_bytes: int
  trained_bytes: int
  skips_out: tuple[str, ...] = ()
  largest_trained: int | None = None
  update_seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class LayerSample:
  """The costs of a layer for one micro-batch size.

  Attributes:
    flops: FLOPs of the forward.
    inputs: bytes of the arguments.
    outputs: bytes of the outputs.
    inner: bytes of the inner activations.
    skips_in: {name: bytes} of the skip connections that end here.
    seconds: measured seconds of (forward, backward); None if not measured. The last layer's include
      the loss.
    options: what may be kept of the layer, the same ones for each size.
  """

  flops: float
  inputs: float
  outputs: float
  inner: float
  skips_in: Mapping[str, float] = dataclasses.field(default_factory=dict)
  seconds: tuple[float, float] | None = None
  options: tuple[stage_memory.Option, ...] = ()


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """The costs of sharing the last layer, a softmax, out over devices.

  Attributes:
    num_parts: number of parts, classes or shards, of which slices consist.
    of_part: number of classes of a part.
    copy_bytes: bytes of a copy of the weights with accumulators, of which each slice has its share;
      None: the weights themselves are in the slices.
    has_table: whether the slices have the weights of the first layer, too.
  """

  num_parts: int
  of_part: int = 1
  copy_bytes: int | None = None
  has_table: bool = False


class ModelCosts:
  """The costs of a model's layers, for planning.

  Attributes:
    weights: the `LayerWeights` of each layer.
    samples: {micro-batch size: the `LayerSample` of each layer}, at least one size.
    slots_per_weight: number of optimizer slots of a trained weight.
    averages_per_weight: number of moving averages of a trained weight.
    vocabulary: how devices can share the last layer; None: they cannot.
    trained: for each layer whether it has trained weights.
  """

  def __init__(
    self,
    weights: Sequence[LayerWeights],
    samples: Mapping[int, Sequence[LayerSample]],
    slots_per_weight: float = 2,
    averages_per_weight: float = 0,
    vocabulary: Vocabulary | None = None,
  ) -> None:
    if not samples or any(len(row) != len(weights) for row in samples.values()):
      raise ValueError('samples: expected at least one size, with an entry for each layer')
    self.weights = tuple(weights)
    self.samples = {size: tuple(samples[size]) for size in sorted(samples)}
    self.slots_per_weight = slots_per_weight
    self.averages_per_weight = averages_per_weight
    self.vocabulary = vocabulary
    self._known = dict(self.samples)
    self.trained = tuple(w.gradient_bytes > 0 for w in weights)

  @property
  def num_layers(self) -> int:
    """L."""
    return len(self.weights)

  def At(self, size: int) -> tuple[LayerSample, ...]:
    """Returns the layers' costs for micro-batches of `size` examples."""
    if size not in self._known:
      sizes = list(self.samples)
      if len(sizes) > 1:
        i = min(max(bisect.bisect_left(sizes, size), 1), len(sizes) - 1)
        start, end = sizes[i - 1], sizes[i]
        low = self.samples[start]
      else:  # One sample: in proportion to the size.
        start, end = 0, sizes[0]
        low = tuple(map(_Zero, self.samples[end]))
      share = (size - start) / (end - start)
      self._known[size] = tuple(
        _Interpolate(a, b, share) for a, b in zip(low, self.samples[end], strict=True)
      )
    return self._known[size]

  def Work(
    self, size: int, devices: device_description.Devices
  ) -> tuple[stage_work.LayerWork, ...]:
    """Returns F, I and W of each layer on one device while the others are idle, in ticks."""
    first = stage_work.FirstTrained(self.trained)
    work = []
    for i, (w, s) in enumerate(zip(self.weights, self.At(size), strict=True)):
      if s.seconds is not None:
        forward, backward = s.seconds
        halves = int(i > first) + int(w.gradient_bytes > 0)
        inputs = weights = backward / halves if halves else 0.0
      else:
        touched = s.inputs + s.outputs + 2 * s.inner
        computing = s.flops / devices.flops_per_second
        forward = inputs = max(computing, (touched + w.num_bytes) / devices.memory_bandwidth)
        weights = max(computing, (touched + 2 * w.gradient_bytes) / devices.memory_bandwidth)
      work.append(
        stage_work.LayerWork(
          _Ticks(forward),
          _Ticks(inputs) if i > first else 0,
          _Ticks(weights) if w.gradient_bytes else 0,
          w.gradient_bytes > 0,
        )
      )
    return tuple(work)

  def Bytes(self, size: int, num_shards: int = 1) -> list[stage_memory.LayerBytes]:
    """Returns the memory of each layer if `num_shards` replicas shard the optimizer slots."""
    copies = self.slots_per_weight / num_shards + self.averages_per_weight
    owner_slots = self.slots_per_weight * (1 - 1 / num_shards)
    return [
      stage_memory.LayerBytes(
        state=round(w.num_bytes + w.gradient_bytes + copies * w.trained_bytes),
        inputs=round(s.inputs),
        inner=round(s.inner),
        skips_in={name: round(b) for name, b in s.skips_in.items()},
        skips_out=w.skips_out,
        of_owner=round(
          owner_slots * (w.trained_bytes if w.largest_trained is None else w.largest_trained)
        ),
        options=s.options,
      )
      for w, s in zip(self.weights, self.At(size), strict=True)
    ]

  def WithSlices(self, slices: Sequence[int], owner: int) -> tuple[LayerWeights, ...]:
    """Returns the weights of layers, and of each slice the weights that it updates.

    Args:
      slices: for each slice its number of classes.
      owner: the device of the last stage, which updates weights that the slices copy.
    """
    assert self.vocabulary is not None
    first, *between, head = self.weights

    def WithoutUpdate(layer: LayerWeights) -> LayerWeights:
      return dataclasses.replace(layer, trained_bytes=0, largest_trained=0, update_seconds=0.0)

    if self.vocabulary.copy_bytes is not None:
      parts = [head if device == owner else WithoutUpdate(head) for device in range(len(slices))]
      return (*self.weights[:-1], *parts)
    tables = [head]
    if self.vocabulary.has_table:
      tables.append(first)
      first = WithoutUpdate(first)
    measured = [w.update_seconds for w in tables if w.update_seconds is not None]
    parts = [
      dataclasses.replace(
        head,
        trained_bytes=round(sum(w.trained_bytes for w in tables) * size / sum(slices)),
        update_seconds=sum(measured) * size / sum(slices) if measured else None,
      )
      for size in slices
    ]
    return (first, *between, *parts)

  def UpdateSeconds(
    self, weights: Sequence[LayerWeights], num_shards: int, devices: device_description.Devices
  ) -> float:
    """Returns the seconds of the update of some layers' weights on one replica.

    An update that was not measured takes the time to read and write weights, gradients and slots
    once.
    """
    seconds = 0.0
    for w in weights:
      if w.update_seconds is None:
        touched = (4 + 2 * self.slots_per_weight) * w.trained_bytes
        seconds += touched / devices.memory_bandwidth
      else:
        seconds += w.update_seconds
    return seconds / num_shards


def _Zero(s: LayerSample) -> LayerSample:
  options = tuple(dataclasses.replace(x, kept_bytes=0, working=0) for x in s.options)
  seconds = s.seconds and (0.0, 0.0)
  return LayerSample(0, 0, 0, 0, dict.fromkeys(s.skips_in, 0), seconds, options)


def _Interpolate(a: LayerSample, b: LayerSample, share: float) -> LayerSample:
  def Mix(x: float, y: float) -> float:
    return max(x + share * (y - x), 0.0)

  seconds = None
  if a.seconds is not None and b.seconds is not None:
    seconds = (Mix(a.seconds[0], b.seconds[0]), Mix(a.seconds[1], b.seconds[1]))
  return LayerSample(
    Mix(a.flops, b.flops),
    Mix(a.inputs, b.inputs),
    Mix(a.outputs, b.outputs),
    Mix(a.inner, b.inner),
    {name: Mix(num_bytes, b.skips_in[name]) for name, num_bytes in a.skips_in.items()},
    seconds,
    tuple(
      dataclasses.replace(
        y,
        kept_bytes=round(Mix(x.kept_bytes, y.kept_bytes)),
        working=round(Mix(x.working, y.working)),
      )
      for x, y in zip(a.options, b.options, strict=True)
    ),
  )


def _Ticks(seconds: float) -> int:
  return round(seconds / TICK)
