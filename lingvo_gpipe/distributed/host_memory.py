# SPDX-License-Identifier: Apache-2.0
"""Refuses batches and weights that exceed the memory of this machine, before they are made."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import text_table, weight_params

_CONTAINER_LIMIT = pathlib.Path('/sys/fs/cgroup/memory.max')


def CheckBatch(name: str, spec: Any, devices: Sequence[str]) -> None:
  """Checks a batch, unless workers may read their parts of it.

  Args:
    name: the name of its input, for the message.
    spec: a nest of tf.TensorSpec.
    devices: the devices of the stages.

  Raises:
    ValueError: it does not fit.
  """
  if _AreLocal(devices):
    size = sum((x.shape.num_elements() or 0) * x.dtype.size for x in tf.nest.flatten(spec))
    CheckBytes(
      f'the examples of a batch of {name}', size, 'take smaller batches, or shorter examples'
    )


def CheckWeights(
  specs: Mapping[str, tuple[weight_params.WeightParams, bool]], devices: Sequence[str]
) -> None:
  """Checks weights that are all on CPUs of this machine.

  Args:
    specs: `WeightSpecs` of the layers.
    devices: the devices of the stages.

  Raises:
    ValueError: they do not fit.
  """
  if specs and _AreLocal(devices) and all(_Parse(d).device_type == 'CPU' for d in devices):
    sizes = {path: w.num_elements * w.dtype.size for path, (w, _) in specs.items()}
    largest = max(sizes, key=sizes.__getitem__)
    advice = 'take a smaller model, or more machines'
    CheckBytes(f'weights such as {largest}', sum(sizes.values()), advice)


def _Parse(device: str) -> tf.DeviceSpec:
  return tf.DeviceSpec.from_string(device)


def _AreLocal(devices: Sequence[str]) -> bool:
  return all(_Parse(d).job in (None, 'localhost') for d in devices)


def Bytes() -> int:
  """Returns the bytes of memory that processes of this machine, or of this container, can have."""
  memory = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
  with contextlib.suppress(OSError, ValueError):  # A container without a limit has "max".
    memory = min(memory, int(_CONTAINER_LIMIT.read_text()))
  return memory


def CheckBytes(content: str, num_bytes: int, advice: str) -> None:
  """Checks that something else fits the memory of this machine.

  Args:
    content: the beginning of the message, in the plural.
    num_bytes: its size.
    advice: the end of the message.

  Raises:
    ValueError: it does not fit.
  """
  memory = Bytes()
  if num_bytes > memory:
    raise ValueError(
      f'{content} take {text_table.FormatBytes(num_bytes)}, more than the memory of '
      f'{text_table.FormatBytes(memory)}: {advice}'
    )
