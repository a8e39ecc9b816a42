# SPDX-License-Identifier: Apache-2.0
"""The devices that stages run on: finds local GPUs or TPU cores, else makes logical CPU devices."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from lingvo_gpipe.distributed import cluster_spec, worker_connection

PLATFORMS = ('auto', 'cpu', 'gpu', 'tpu')


@dataclasses.dataclass(frozen=True)
class Cluster:
  """A grid of devices [num_replicas, stages], row by row, and how it came about.

  `Create` finds this process's own devices, `Connect` those of workers.

  Attributes:
    devices: full names for tf.device, replica by replica; in each replica stage by stage.
    description: one line for people.
    num_replicas: rows of the grid.
    intra_op_threads: of each worker's pool, where all tell the same; None: it is not known, or the
      devices are this process's own.
    workers: {task index: address} of those that are connected; the devices are theirs, if any are.
  """

  devices: Sequence[str]
  description: str = ''
  num_replicas: int = 1
  intra_op_threads: int | None = None
  workers: Mapping[int, str] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    """Checks the grid.

    Raises:
      ValueError: no devices, or they are not a multiple of the replicas.
    """
    object.__setattr__(self, 'devices', list(self.devices))
    n, replicas = len(self.devices), self.num_replicas
    if not n or replicas < 1 or n % replicas:
      raise ValueError(
        f'A cluster has the same number of devices, at least 1, for each of its {replicas} '
        f'replicas; got {n} devices.'
      )

  @classmethod
  def Create(
    cls,
    num_devices: int | None = None,
    max_devices: int | None = None,
    platform: str = 'auto',
    threads_per_device: int | None = None,
    num_replicas: int = 1,
    indices: Sequence[int] | None = None,
  ) -> Cluster:
    """Chooses devices of this process and sets TensorFlow up for them. Call it before other uses.

    On accelerators: up to `max_devices` (default: `num_devices`, or all where that is None too);
    the others are hidden from this process, and memory is taken as it is needed. On the CPU: that
    many logical devices are made (default 1), each with one thread pool's share of the cores. Where
    TensorFlow has already started, its devices and threads are taken as they are.

    Args:
      num_devices: needed for each replica, that is the number of stages; None: at least 1.
      max_devices: at most so many are used.
      platform: 'auto' (TPU cores, else GPUs, else CPU), 'cpu', 'gpu' or 'tpu'.
      threads_per_device: threads of one operation on a CPU device; default cores // devices, at
        least 1. The counts of threads are part of what makes two runs bit-equal (design 4.15).
      num_replicas: how often the stages are there.
      indices: which accelerators of this machine are used, of those that TensorFlow sees
        (CUDA_VISIBLE_DEVICES hides others): the first one is stage 0's. None: the first ones.

    Raises:
      ValueError: fewer devices than needed, or an argument out of range: one line with what is
        needed, what was found, and what to do.
    """
    for name, value in (
      ('num_devices', num_devices),
      ('max_devices', max_devices),
      ('threads_per_device', threads_per_device),
      ('num_replicas', num_replicas),
    ):
      if value is not None and value < 1:
        raise ValueError(f'{name} is at least 1, got {value}.')
    if platform not in PLATFORMS:
      raise ValueError(f'The platform is one of {", ".join(PLATFORMS)}; got {platform!r}.')
    if indices is not None:
      indices = list(indices)[:max_devices]
      max_devices = len(indices)
    needed = (num_devices or 1) * num_replicas
    need = f'{_Count(needed, "device")} needed, one a stage'
    if num_replicas > 1:
      need += f' of each of {num_replicas} replicas'
    if max_devices is not None and max_devices < needed:
      raise ValueError(
        f'{need}, and at most {max_devices} may be used: allow {needed} devices or use a model of '
        f'fewer stages{" or fewer replicas" if num_replicas > 1 else ""}.'
      )
    # Neither of these starts TensorFlow's context.
    found = {k: tf.config.get_visible_devices(k.upper()) for k in ('tpu', 'gpu')}
    if platform == 'auto':
      platform = next((k for k in ('tpu', 'gpu') if found[k]), 'cpu')
    if indices is not None:
      _CheckIndices(platform, found, indices)
    if platform == 'cpu':
      wanted = max_devices or needed
      devices, description = _CpuDevices(wanted, needed, threads_per_device, found)
    else:
      wanted = max_devices or (needed if num_devices else len(found[platform]))
      devices, description = _Accelerators(platform, found[platform], wanted, needed, indices)
    devices = devices[: len(devices) // num_replicas * num_replicas]  # All rows alike.
    if num_replicas > 1:
      description += f', {num_replicas} replicas'
    logging.info('Devices: %s.', description)
    return cls(devices=devices, description=description, num_replicas=num_replicas)

  @classmethod
  def Connect(
    cls,
    spec: cluster_spec.ClusterSpec,
    num_devices: int = 1,
    num_replicas: int = 1,
    platform: str = 'auto',
    timeout_seconds: float = 60.0,
    answers: Mapping[str, bytes] | None = None,
  ) -> Cluster:
    """Takes devices of workers: stage by stage and replica by replica, worker after worker.

    Call it once in a process and before other uses of TensorFlow. What no device is named for stays
    in this process: reading data, summaries, checkpoints.

    Args:
      spec: the workers.
      num_devices: needed for each replica, that is the number of stages.
      num_replicas: rows of the grid.
      platform: 'auto' (the accelerators of the workers if there are any, else their CPU devices),
        'cpu', 'gpu' or 'tpu'.
      timeout_seconds: so long it waits for workers that do not answer.
      answers: of workers that were asked already (see `worker_connection.AwaitWorkers`); the others
        are left out.

    Raises:
      TimeoutError: a worker does not answer; the message names it.
      ValueError: the workers have fewer devices than needed, or something else runs there.
    """
    if answers is None:
      answers = worker_connection.AwaitWorkers(spec.workers, timeout_seconds)
    tf.config.set_visible_devices([], 'GPU')  # Those of this host are for its worker.
    facts = worker_connection.Connect(spec, answers)
    devices, what = _OfWorkers(spec, platform, num_devices, num_replicas)
    pools = {found.get('intra_op_threads') for found in facts.values()}
    description = f'{what} of {_Count(len(facts), "worker")}'
    workers = {index: spec.workers[index] for index in facts}
    logging.info('Devices: %s at %s.', description, ', '.join(workers.values()))
    threads = pools.pop() if len(pools) == 1 else None
    return cls(devices, description, num_replicas, threads, workers)

  def Describe(self) -> str:
    """Returns one line such as '2 logical CPU devices on 2 cores (no GPU found)'."""
    return self.description or f'{len(self.devices)} devices: {", ".join(self.devices)}'


def Cores() -> int:
  """Counts the cores this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def _Count(n: int, what: str) -> str:
  return f'{n} {what}' + ('' if n == 1 else 's')


def PoolSize(threads_per_device: int, num_devices: int) -> int:
  """How many threads the pool of a process has for the insides of operations on CPU devices.

  All its logical devices share it. A pool of one is not used at all: each operation then runs in
  its caller's thread.
  """
  return 1 if threads_per_device == 1 else threads_per_device * num_devices


def _CheckIndices(platform: str, found: dict[str, list[Any]], indices: Sequence[int]) -> None:
  """Raises ValueError where indices are no accelerators of this machine, each once."""
  named = f'devices {", ".join(map(str, indices))}'
  if platform == 'cpu':
    seen = [_Count(len(v), k.upper()) for k, v in found.items() if v]
    raise ValueError(
      f'{named}: these are indices of GPUs or TPU cores, and the platform is cpu '
      f'({", ".join(seen) or "no accelerator"} found): leave them out; num_devices '
      '(--num_devices) limits the logical CPU devices.'
    )
  what, size = _What(platform), len(found[platform])
  unknown = [i for i in indices if not 0 <= i < size]
  if unknown:
    known = f'they are 0 to {size - 1}' if size > 1 else 'it is 0' if size else 'none'
    raise ValueError(
      f'{named}: there is no {what} {unknown[0]}; {_Count(size, what)} found, {known}. They are '
      'counted as TensorFlow sees them: CUDA_VISIBLE_DEVICES hides GPUs and counts the others anew.'
    )
  if len(set(indices)) < len(indices):
    twice = next(i for i in indices if list(indices).count(i) > 1)
    raise ValueError(
      f'{named}: {what} {twice} is named twice; each holds one stage, or more by '
      "stages_per_device of the task's PipeliningLayer."
    )


def _What(platform: str) -> str:
  return 'GPU' if platform == 'gpu' else 'TPU core'


def _FullNames(kind: str, limit: int | None = None) -> list[str]:
  """Returns the first logical devices of a kind; starts TensorFlow's context."""
  names = [device.name for device in tf.config.list_logical_devices(kind)][:limit]
  # Without workers the job is left out of the name; variables' own device names have it.
  local = '/job:localhost/replica:0/task:0'
  return [name if name.startswith('/job:') else local + name for name in names]


def _CpuDevices(
  wanted: int, needed: int, threads: int | None, found: dict[str, list[Any]]
) -> tuple[list[str], str]:
  """Returns (names, description) of logical CPU devices, made now unless they are there."""
  cores = Cores()
  threads = threads or max(1, cores // wanted)
  physical = tf.config.list_physical_devices('CPU')[0]
  started = False
  try:
    if found['gpu']:
      tf.config.set_visible_devices([], 'GPU')  # Takes no memory of GPUs it does not use.
    if len(tf.config.get_logical_device_configuration(physical) or ()) < wanted:
      tf.config.set_logical_device_configuration(
        physical, [tf.config.LogicalDeviceConfiguration() for _ in range(wanted)]
      )
    tf.config.threading.set_intra_op_parallelism_threads(PoolSize(threads, wanted))
  except RuntimeError:
    started = True
  names = _FullNames('CPU', wanted)
  if len(names) < needed:
    raise ValueError(
      f'{_Count(needed, "device")} needed, one a stage, and TensorFlow runs already with '
      f'{_Count(len(names), "logical CPU device")}: call Cluster.Create({needed}) before anything '
      'else that uses TensorFlow, or in a new process.'
    )
  if started:
    logging.info('TensorFlow runs already: its devices and thread counts are taken as they are.')
  others = [_Count(len(v), k.upper()) + ' left' for k, v in found.items() if v]
  return names, (
    f'{_Count(len(names), "logical CPU device")} on {_Count(cores, "core")} '
    f'({", ".join(others) or "no GPU found"})'
  )


def _Accelerators(
  platform: str,
  physical: list[Any],
  wanted: int,
  needed: int,
  indices: Sequence[int] | None,
) -> tuple[list[str], str]:
  """Returns (names, description) of up to `wanted` GPUs or TPU cores of this machine."""
  kind, what = platform.upper(), _What(platform)
  # TensorFlow counts what is visible in the machine's order, in whatever order it is named.
  chosen = physical[:wanted] if indices is None else [physical[i] for i in sorted(indices)]
  names: list[str] = []
  if physical:
    try:
      if platform == 'gpu':
        for gpu in chosen:
          tf.config.experimental.set_memory_growth(gpu, True)
        # One physical GPU may have been split into several logical ones before.
        tf.config.set_visible_devices(chosen, 'GPU')
    except RuntimeError:
      logging.info('TensorFlow runs already: GPU memory and visibility are taken as they are.')
    if indices is None:
      names = _FullNames(kind, wanted)
    else:
      names, visible = _FullNames(kind), tf.config.get_visible_devices(kind)
      names = [names[visible.index(physical[i])] for i in indices]
  if len(names) < needed:
    raise ValueError(
      f'{_Count(needed, "device")} needed, one a stage, and {_Count(len(names), what)} '
      f'{"was" if len(names) == 1 else "were"} found: use a model of fewer stages, or platform cpu '
      '(--platform=cpu), which makes logical CPU devices.'
    )
  notes = sorted({_Model(device) for device in chosen} - {''})
  if indices is not None:
    notes.append(f'{", ".join(map(str, indices))} of {len(physical)}')
  return names, _Count(len(names), what) + (f' ({"; ".join(notes)})' if notes else '')


def _OfWorkers(
  spec: cluster_spec.ClusterSpec, platform: str, num_devices: int, num_replicas: int
) -> tuple[list[str], str]:
  """Returns (names, description) of as many devices of connected workers as are needed."""
  found: dict[str, dict[int, list[str]]] = {}  # {kind: {worker: names}}
  for device in tf.config.list_logical_devices():
    parsed = tf.DeviceSpec.from_string(device.name)
    if parsed.job == 'worker':
      found.setdefault(device.device_type, {}).setdefault(parsed.task, []).append(device.name)
  if platform == 'auto':
    platform = next((kind for kind in ('tpu', 'gpu') if kind.upper() in found), 'cpu')
  kind = platform.upper()
  of_worker = found.get(kind, {})
  names = [name for task in sorted(of_worker) for name in of_worker[task]]
  needed = num_devices * num_replicas
  if len(names) < needed:
    counts = ', '.join(
      f'{len(of_worker.get(task, []))} of worker {task} at {address}'
      for task, address in enumerate(spec.workers)
    )
    raise ValueError(
      f'{_Count(needed, "device")} needed, {_Count(num_devices, "stage")} of each of '
      f'{_Count(num_replicas, "replica")}, and the workers have {len(names)} of kind {kind}: '
      f'{counts}. Take more workers, fewer stages or replicas, or on CPUs `worker --num_devices`.'
    )
  return names[:needed], f'{_Count(needed, f"{kind} device")}'


def _Model(device: Any) -> str:
  """Returns the name of a GPU's model, '' where it is not known."""
  try:
    return str(tf.config.experimental.get_device_details(device).get('device_name', ''))
  except (tf.errors.OpError, ValueError, RuntimeError):
    return ''
