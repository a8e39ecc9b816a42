# SPDX-License-Identifier: Apache-2.0
"""GPUs and TPUs before TensorFlow uses them: memory, logical devices, XLA, and starting a TPU."""

from __future__ import annotations

import functools
import itertools
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from lingvo_gpipe.core import files

MEMORY = ('growth', 'cuda_malloc_async')

# TensorFlow 2.21's XLA generates code for older GPUs only, and ends the process on newer ones.
_FIRST_WITHOUT_XLA = (12, 0)
# A GPU with less than this share of its memory free is used by other processes.
_FREE_SHARE = 0.9
# The memory of CUDA's context and libraries, which no limit of TensorFlow includes.
_CUDA_MIB = 1024

# The time that a TPU on another machine has to accept a connection.
_TPU_SECONDS = 60.0

# The fact that a worker publishes if XLA does not run on its GPUs.
XLA_FACT = 'xla_problem'
# {task index of a connected worker: why XLA does not run on its GPUs}.
worker_problems: dict[int, str] = {}


def SetMemory(memory: str = 'growth') -> None:
  """Chooses how TensorFlow allocates the memory of GPUs; has no effect once it has started.

  The settings are environment variables because `set_memory_growth` refuses logical devices.

  Args:
    memory: one of MEMORY. 'growth' allocates on demand. 'cuda_malloc_async' takes CUDA's allocator
      instead of TensorFlow's, against fragmentation.
  """
  if memory not in MEMORY:
    raise ValueError(f'expected memory of GPUs to be one of {", ".join(MEMORY)}, got {memory!r}')
  os.environ.setdefault('TF_FORCE_GPU_ALLOW_GROWTH', 'true')
  if memory == 'cuda_malloc_async':
    os.environ['TF_GPU_ALLOCATOR'] = memory


def NumLogical(gpu: Any) -> int:
  """Returns the number of logical devices that a physical GPU is split into."""
  return len(tf.config.get_logical_device_configuration(gpu) or [gpu])


def Split(gpus: Sequence[Any], num_logical: int) -> None:
  """Splits each GPU into logical devices, unless it has as many already.

  Raises:
    RuntimeError: TensorFlow has started.
    ValueError: the memory of a GPU is unknown or too small.
  """
  for gpu in gpus:
    if NumLogical(gpu) != num_logical:
      limit = LogicalMemory(gpu, num_logical)
      logical = [tf.config.LogicalDeviceConfiguration(memory_limit=limit)] * num_logical
      tf.config.set_logical_device_configuration(gpu, logical)


def LogicalMemory(gpu: Any, num_logical: int) -> int:
  """Returns the MiB of each of several logical devices of a GPU: equal shares of its free memory.

  Raises:
    ValueError: the memory of the GPU is unknown or too small.
  """
  memory = Memory(gpu)
  if memory is None:
    raise ValueError(
      f'{num_logical} logical devices of {gpu.name}: nvidia-smi does not report its free memory, '
      'of which each gets a share. Call tf.config.set_logical_device_configuration before'
    )
  limit = (memory[1] - _CUDA_MIB) // num_logical
  if limit < 1:
    raise ValueError(
      f'{num_logical} logical devices of {gpu.name}: only {memory[1]} MiB of it are free: end the '
      'processes that use it, or choose another GPU'
    )
  return limit


def Memory(gpu: Any) -> tuple[int, int] | None:
  """Returns the (total, free) MiB of a GPU before this process used it; None if unknown."""
  cards, index = _Cards(), int(gpu.name.rsplit(':', 1)[-1])
  if index >= len(cards):
    return None
  name, total, free = cards[index]
  # CUDA may number different GPUs in another order than nvidia-smi.
  return (int(total), int(free)) if name == Model(gpu) and (total + free).isdecimal() else None


@functools.cache
def _Cards() -> list[tuple[str, str, str]]:
  """Returns (name, total MiB, free MiB) of the visible GPUs, or [] without nvidia-smi."""
  query = '--query-gpu=uuid,name,memory.total,memory.free'
  try:
    text = subprocess.run(
      ['nvidia-smi', query, '--format=csv,noheader,nounits'],
      capture_output=True,
      text=True,
      timeout=20,
      check=True,
    ).stdout
  except (OSError, subprocess.SubprocessError):
    return []
  rows = [[cell.strip() for cell in line.split(',')] for line in text.splitlines()]
  rows = [row for row in rows if len(row) == 4]
  by_name = {str(i): row for i, row in enumerate(rows)} | {row[0]: row for row in rows}
  visible = os.environ.get('CUDA_VISIBLE_DEVICES', ','.join(map(str, range(len(rows)))))
  unknown = ['', '', '', '']
  chosen = [by_name.get(entry.strip(), unknown) for entry in visible.split(',')]
  return [(name, total, free) for _, name, total, free in chosen]


def Notes(gpus: Sequence[Any]) -> list[str]:
  """Returns the models of GPUs, and the free memory of each GPU that other processes use."""
  notes = sorted({Model(gpu) for gpu in gpus} - {''})
  for gpu in gpus:
    total, free = Memory(gpu) or (0, 0)
    if free < _FREE_SHARE * total:
      notes.append(
        f'GPU {gpu.name.rsplit(":", 1)[-1]} is used by others: {free / 1024:.1f} of '
        f'{total / 1024:.1f} GiB free'
      )
  return notes


def Model(gpu: Any) -> str:
  """Returns the name of a GPU's model, or '' if it is unknown."""
  return str(_Details(gpu).get('device_name', ''))


def _Details(gpu: Any) -> dict[str, Any]:
  try:
    details: dict[str, Any] = tf.config.experimental.get_device_details(gpu)
  except (tf.errors.OpError, ValueError, RuntimeError):
    return {}
  return details


def XlaProblem(gpus: Sequence[Any]) -> str | None:
  """Returns why XLA does not run on some of these physical GPUs, or None if it does."""
  for gpu in gpus:
    capability = _Details(gpu).get('compute_capability') or (0, 0)
    if tuple(capability) >= _FIRST_WITHOUT_XLA:
      return (
        f'{Model(gpu) or "the GPU"} has compute capability {".".join(map(str, capability))}, on '
        f"which TensorFlow's XLA ends the process"
      )
  return None


def UsesXla(xla: bool | None, devices: Sequence[str]) -> bool:
  """Returns whether XLA compiles stages on these devices.

  Args:
    xla: the user's choice; None: wherever XLA runs.
    devices: names of the devices; '' is the first GPU if there is one.

  Raises:
    ValueError: the user asks for XLA, which would end the process.
  """
  if xla is False:
    return False
  names = [tf.DeviceSpec.from_string(device) for device in devices]
  problems = [worker_problems.get(name.task) for name in names if name.job == 'worker']
  if any(name.job != 'worker' and name.device_type in (None, 'GPU') for name in names):
    problems.append(XlaProblem(tf.config.get_visible_devices('GPU')))
  problem = next(filter(None, problems), None)
  if problem is None:
    return True
  if xla:
    raise ValueError(f'xla=True: {problem}; leave it at None, or set it to False')
  logging.log_first_n(logging.WARNING, 'XLA is off: %s.', 1, problem)
  return False


@functools.cache
def StartTpu() -> tuple[str, ...]:
  """Connects to a TPU, starts it and returns the names of its cores, once per process.

  The environment variable TPU_NAME names the TPU; without it, the TPU belongs to this machine.
  TensorFlow does not list the cores before that.

  Raises:
    ValueError: there is no such TPU, it accepts no connection, or this TensorFlow cannot use it.
  """
  name = os.environ.get('TPU_NAME') or 'local'
  try:
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
    # TensorFlow waits without end for a TPU that does not answer.
    deadline = time.monotonic() + _TPU_SECONDS
    for address in itertools.chain(*resolver.cluster_spec().as_dict().values()):
      host, _, port = address.rpartition(':')
      seconds = max(deadline - time.monotonic(), 1.0)
      socket.create_connection((host, int(port)), timeout=seconds).close()
    tf.config.experimental_connect_to_cluster(resolver)
    tf.tpu.experimental.initialize_tpu_system(resolver)
  except (tf.errors.OpError, ValueError, RuntimeError, OSError) as e:
    raise ValueError(
      f'platform tpu: the TPU {name!r} did not start: {files.OneLine(e)}. It needs the '
      'package tensorflow-tpu, and TPU_NAME if it belongs to another machine'
    ) from e
  return tuple(device.name for device in tf.config.list_logical_devices('TPU'))
