# SPDX-License-Identifier: Apache-2.0
"""Copies of tensors to the memory of the host and back, for the actions O and L of a schedule.

    device   F ──> [O] ─┐                 ┌──> B
    host                └──> [O] ──> [L] ─┘        L waits for an earlier action of the device

Each box is a call of a function that returns its arguments. TensorFlow sends a result to another
device as soon as it exists, so the box L on the host keeps the tensors from going back at once. The
functions are never inlined: TensorFlow's optimiser would remove a copy that it can see. On the
device nothing but F and O takes the tensors, so that their memory is free when O has sent them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.pipeline.stages import leaves, stage_math


class HostCopies:
  """The functions that move tensors between devices and hosts; traced once for each kind of nest.

  Attributes:
    host_device: the device that stands for the memory of the host; None: the first CPU device of
      each device's own task.
  """

  def __init__(self, host_device: str | None = None) -> None:
    self.host_device = host_device
    self._functions: dict[Any, Any] = {}

  def HostOf(self, device: str) -> str:
    """Returns the device that stands for the memory of the host of a device."""
    if self.host_device is not None:
      return self.host_device
    spec = tf.DeviceSpec.from_string(device)
    return spec.replace(device_type='CPU', device_index=0).to_string()

  def Offload(self, nest: Any, device: str, after: Sequence[tf.Tensor]) -> Any:
    """Returns the nest of tensors in the memory of the device's host.

    Args:
      nest: tensors on the device; None entries stay None.
      device: the device that has the tensors.
      after: results that the copy waits for.
    """
    with tf.device(device), tf.control_dependencies(after):
      # This device sends the tensors of other devices too, after `after`.
      nest = self._Pass(nest)
    with tf.device(self.HostOf(device)):
      return self._Pass(nest)

  def Load(self, nest: Any, device: str, after: Sequence[tf.Tensor]) -> Any:
    """Returns a nest that `Offload` returned, for functions on the device to take."""
    with tf.device(self.HostOf(device)), tf.control_dependencies(after):
      return self._Pass(nest)

  def _Pass(self, nest: Any) -> Any:
    """Returns the same nest from a function call; each tensor once."""
    tensors = {id(t): t for t in leaves.Tensors(nest)}
    key = leaves.TraceKey(list(tensors.values()))
    if key not in self._functions:
      self._functions[key] = stage_math.Traced(_Identities, xla=False)
    passed = dict(zip(tensors, self._functions[key](list(tensors.values())), strict=True))
    return tf.nest.map_structure(lambda t: None if t is None else passed[id(t)], nest)


def _Identities(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
  return [tf.identity(t) for t in tensors]
