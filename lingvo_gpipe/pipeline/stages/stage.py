# SPDX-License-Identifier: Apache-2.0
"""Stages: a flat list of layers, cut and placed on devices, with the skips that pass their ends."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import base_layer, weight_params
from lingvo_gpipe.pipeline.cost import partitioner
from lingvo_gpipe.pipeline.schedule import actions
from lingvo_gpipe.pipeline.stages import stage_math


@dataclasses.dataclass
class Stage:
  """Consecutive layers on one device, with their variables and gradient accumulators.

  Attributes:
    index: the stage's number, from 0.
    layers: its layers.
    device: the device that holds their weights and runs them.
    variables: for each layer its nest of variables.
    imports: names of the skip connections that end here and begin in an earlier stage.
    exports: names of the skip connections that begin here and end in a later stage.
    trained: {path: variable} of the trained variables, in tf.nest order.
    mirrors: {path: variable} of the trained copies of tied weights, whose owner is another layer.
    needs_dx: whether an earlier stage has trained weights, and so needs a gradient from this one.
    accumulators: for each of `trained` a variable that sums its gradient over the micro-batches;
      empty until the first training step is built.
    mirror_accumulators: for each of `mirrors` such a variable.
    replica_sum: adds statistics over the replicas; None if no layer asks for that.
  """

  index: int
  layers: list[base_layer.BaseLayer]
  device: str
  variables: list[Any]
  imports: tuple[str, ...]
  exports: tuple[str, ...]
  trained: dict[str, tf.Variable]
  mirrors: dict[str, tf.Variable]
  needs_dx: bool
  accumulators: list[tf.Variable] = dataclasses.field(default_factory=list)
  mirror_accumulators: list[tf.Variable] = dataclasses.field(default_factory=list)
  replica_sum: stage_math.ReplicaSum | None = None

  def __str__(self) -> str:
    first, last = self.layers[0].path, self.layers[-1].path
    return f'stage {self.index} ({first if first == last else f"{first} to {last}"})'

  @functools.cached_property
  def structure(self) -> tuple[stage_math.StructureKey, ...]:
    """Equal for stages that can share their traced functions."""
    return tuple(stage_math.StructureKey(layer) for layer in self.layers)

  @functools.cached_property
  def seed_hashes(self) -> list[int]:
    """The first number of each layer's seed pair, see `stage_math.SeedTensor`."""
    return [weight_params.Hash64(layer.params.random_seed, layer.path) for layer in self.layers]

  def AbsoluteName(self, name: str) -> str:
    """Returns the name of a sum: `<index>:<suffix>` becomes `<layer's path><suffix>`."""
    index, colon, suffix = name.partition(':')
    is_aux_loss = colon and index.isdigit()  # A metric may have a colon in its name.
    return f'{self.layers[int(index)].path}{suffix}' if is_aux_loss else name

  def LayerOfSums(self, name: str) -> base_layer.BaseLayer:
    """Returns the layer that reported sums for its state as `<index>:<path below it>`."""
    path = self.AbsoluteName(name)
    below = self.layers[int(name.partition(':')[0])].Descendants()
    return next(layer for layer in below if layer.path == path)

  @functools.cached_property
  def trained_mask(self) -> tuple[bool, ...]:
    """Whether each leaf of `variables` is trained."""
    chosen = {id(v) for v in (*self.trained.values(), *self.mirrors.values())}
    return tuple(id(v) in chosen for v in tf.nest.flatten(self.variables))

  @functools.cached_property
  def leaf_paths(self) -> list[str]:
    """The paths of the trained leaves of `variables`."""
    path_of = {id(v): path for path, v in (*self.trained.items(), *self.mirrors.items())}
    return [path_of[id(v)] for v in tf.nest.flatten(self.variables) if id(v) in path_of]

  def OfVariables(self, variables: Any) -> tuple[dict[str, tf.Variable], dict[str, tf.Variable]]:
    """Returns the parts of `trained` and `mirrors` that are in a nest of variables."""
    ids = set(map(id, tf.nest.flatten(variables)))
    trained, mirrors = (
      {path: v for path, v in weights.items() if id(v) in ids}
      for weights in (self.trained, self.mirrors)
    )
    return trained, mirrors

  @property
  def has_weight_gradient(self) -> bool:
    """Whether backward adds to any accumulator."""
    return any(self.trained_mask)

  def AllAccumulators(self) -> list[tf.Variable]:
    """Returns the accumulators of all trained leaves of `variables`, in tf.nest order."""
    variables = (*self.trained.values(), *self.mirrors.values())
    sinks = (*self.accumulators, *self.mirror_accumulators)
    sink_of = {id(v): sink for v, sink in zip(variables, sinks, strict=True)}
    return [sink_of[id(v)] for v in tf.nest.flatten(self.variables) if id(v) in sink_of]

  def HasAction(self, kind: actions.Kind) -> bool:
    """Whether the stage has any work in actions of this kind; frozen stages have less."""
    # An empty function may not reach XLA: TensorFlow's optimiser breaks a call of it.
    return actions.HasWork(kind, needs_dx=self.needs_dx, is_trained=self.has_weight_gradient)


def Stages(
  layers: Sequence[base_layer.BaseLayer],
  ends: Sequence[int],
  devices: Sequence[str],
  ties: Mapping[str, str],
  is_trained: Callable[[str], bool] | None,
  shard_devices: Mapping[str, Sequence[str]] = types.MappingProxyType({}),
) -> list[Stage]:
  """Returns the stages, with their variables on their devices.

  Args:
    layers: the flat list.
    ends: for each stage the index after its last layer.
    devices: for each stage its device.
    ties: {path of a tied weight: path of its owner}.
    is_trained: whether to train the trainable variable of a path; None: train all.
    shard_devices: {path of a layer: for each of its `class_shards` its device}; the others are on
      their stages' devices.

  Raises:
    ValueError: the cut is not valid, skips do not match, or a variable is on another device.
  """
  stages: list[Stage] = []
  skips = Skips(layers, ends)
  ranges = partitioner.StageRanges(partitioner.CheckSplits(ends, len(layers)))
  for index, ((start, end), device) in enumerate(zip(ranges, devices, strict=True)):
    members = list(layers[start:end])
    for layer in members:
      if layer.path in shard_devices:
        for shard, place in zip(layer.class_shards, shard_devices[layer.path], strict=True):
          shard.InstantiateVariables(place)
          _CheckDevice(shard, place)
        layer.InstantiateVariables()  # It has no weights but the shards'.
        continue
      layer.InstantiateVariables(device)
      _CheckDevice(layer, device)
    variables = [m.vars for m in members]
    paths = {id(v): path for m in members for path, v in m.VariablesByPath().items()}
    trained: dict[str, tf.Variable] = {}
    mirrors: dict[str, tf.Variable] = {}
    for v in tf.nest.flatten(variables):
      path = paths[id(v)]
      if v.trainable and (is_trained is None or is_trained(ties.get(path, path))):
        (mirrors if path in ties else trained)[path] = v
    needs_dx = any(s.has_weight_gradient for s in stages)
    stages.append(
      Stage(index, members, device, variables, *skips[index], trained, mirrors, needs_dx)
    )
  return stages


def Skips(
  layers: Sequence[base_layer.BaseLayer], ends: Sequence[int]
) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
  """Returns for each stage the names of the skip connections that enter it and that leave it.

  Raises:
    ValueError: two layers begin a skip of one name, or a layer takes a skip that no layer before it
      begins.
  """
  begun: dict[str, tuple[int, str]] = {}
  imports: list[set[str]] = [set() for _ in ends]
  exports: list[set[str]] = [set() for _ in ends]
  for k, (start, end) in enumerate(partitioner.StageRanges(ends)):
    for layer in layers[start:end]:
      for name in layer.skips_in:
        if name not in begun:
          known = ', '.join(begun) or 'none'
          raise ValueError(
            f'{layer.path} takes the skip {name!r}, which no layer before it begins; known: {known}'
          )
        if begun[name][0] != k:
          imports[k].add(name)
          exports[begun[name][0]].add(name)
      for name in layer.skips_out:
        if name in begun:
          raise ValueError(f'{layer.path} and {begun[name][1]} both begin a skip {name!r}')
        begun[name] = (k, layer.path)
  return [(tuple(sorted(i)), tuple(sorted(e))) for i, e in zip(imports, exports, strict=True)]


def _CheckDevice(layer: base_layer.BaseLayer, device: str) -> None:
  """Raises ValueError if the layer has variables on another device."""
  expected = tf.DeviceSpec.from_string(device)
  for path, variable in layer.VariablesByPath().items():
    actual = tf.DeviceSpec.from_string(variable.device)
    if actual.make_merged_spec(expected) != actual:
      raise ValueError(
        f'{path} was allocated on {variable.device} before, but its stage belongs on {device}; '
        'place the stages once, and before InstantiateVariables is called'
      )
