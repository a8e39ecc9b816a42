# SPDX-License-Identifier: Apache-2.0
"""Finds the devices for stages: GPUs, TPU cores, logical CPU devices, or devices of workers."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from lingvo_gpipe.distributed import (
  accelerators,
  cluster_spec,
  native_output,
  worker_connection,
  worker_restart,
)

PLATFORMS = ('auto', 'cpu', 'gpu', 'tpu')

# TensorFlow needs seconds for a thousand.
MAX_CPU_DEVICES = 4096


@dataclasses.dataclass(frozen=True)
class Cluster:
  """A grid of devices [num_replicas, stages], row by row.

  `Create` finds devices of this process, `Connect` finds devices of workers.

  Attributes:
    devices: full names for tf.device, replica by replica, and stage by stage within a replica.
    description: one human-readable line.
    num_replicas: number of rows of the grid.
    intra_op_threads: size of each worker's thread pool if all workers report the same size. None if
      it is unknown or the devices belong to this process.
    workers: {task index: address} of the connected workers. If there are any, the devices belong to
      them.
  """

  devices: Sequence[str]
  description: str = ''
  num_replicas: int = 1
  intra_op_threads: int | None = None
  workers: Mapping[int, str] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    """Checks the grid.

    Raises:
      ValueError: there are no devices, or their number is not a multiple of the replicas.
    """
    object.__setattr__(self, 'devices', list(self.devices))
    n, replicas = len(self.devices), self.num_replicas
    if not n or replicas < 1 or n % replicas:
      raise ValueError(
        f'A cluster needs the same number of devices, at least 1, for each of its {replicas} '
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
    logical_devices_per_gpu: int | None = None,
    gpu_memory: str = 'growth',
  ) -> Cluster:
    """Chooses devices of this process and configures TensorFlow for them.

    Call it before other uses of TensorFlow; if TensorFlow has already started, its devices and
    thread counts are used unchanged. With accelerators, uses up to `max_devices` (default:
    `num_devices`, otherwise all) and hides other GPUs from this process. A GPU that the caller has
    split counts as its logical devices. On the CPU, creates this many logical devices (default 1),
    each with an equal share of the cores.

    Args:
      num_devices: number of devices for each replica, which is the number of stages, or None for at
        least 1.
      max_devices: maximum number of devices to use.
      platform: 'auto' (GPUs if there are any, otherwise CPU), 'cpu', 'gpu' or 'tpu'. A TPU is only
        looked for if asked for; see `accelerators.StartTpu`.
      threads_per_device: threads of one operation on a CPU device; default cores // devices, at
        least 1. Two runs are only equal bit for bit with equal thread counts.
      num_replicas: number of copies of the pipeline.
      indices: indices of the accelerators to use, among the accelerators that TensorFlow sees
        (CUDA_VISIBLE_DEVICES hides others). The first index is the device of stage 0. None uses the
        first accelerators.
      logical_devices_per_gpu: splits each GPU into this many devices, with equal shares of its free
        memory; None leaves GPUs as they are. This way one GPU can try out a pipeline.
      gpu_memory: allocation of memory of GPUs, one of `accelerators.MEMORY`.

    Raises:
      ValueError: there are fewer devices than needed, or an argument is out of range; one line with
        the needed and the existing devices and a way out.
    """
    for name, value in (
      ('num_devices', num_devices),
      ('max_devices', max_devices),
      ('threads_per_device', threads_per_device),
      ('num_replicas', num_replicas),
      ('logical_devices_per_gpu', logical_devices_per_gpu),
    ):
      if value is not None and value < 1:
        raise ValueError(f'{name} must be at least 1, got {value}.')
    if platform not in PLATFORMS:
      raise ValueError(f'The platform must be one of {", ".join(PLATFORMS)}; got {platform!r}.')
    # Listing GPUs does not start TensorFlow's context.
    with native_output.DropOutputWithoutGpu():
      gpus = tf.config.get_visible_devices('GPU')
    if platform == 'auto':
      platform = 'gpu' if gpus else 'cpu'
    if logical_devices_per_gpu and platform != 'gpu':
      raise ValueError(
        f'logical_devices_per_gpu splits GPUs, but the platform is {platform}'
        f'{"" if gpus else " (no GPU found)"}. Leave it out.'
      )
    cores = accelerators.StartTpu() if platform == 'tpu' else ()
    if indices is not None:
      _CheckIndices(platform, {'tpu': len(cores), 'gpu': len(gpus)}, indices)
      size = len(indices)
      if platform == 'gpu':
        size = sum(logical_devices_per_gpu or accelerators.NumLogical(gpus[i]) for i in indices)
      max_devices = min(size, size if max_devices is None else max_devices)
    needed = (num_devices or 1) * num_replicas
    need = f'{_Count(needed, "device")} needed, one for each stage'
    if num_replicas > 1:
      need += f' of each of {num_replicas} replicas'
    if max_devices is not None and max_devices < needed:
      raise ValueError(
        f'{need}, but at most {max_devices} may be used: allow {needed} devices or use a model '
        f'with fewer stages{" or fewer replicas" if num_replicas > 1 else ""}.'
      )
    count = max_devices or (needed if num_devices else None)
    if platform == 'cpu':
      devices, description = _MakeCpuDevices(count or needed, needed, threads_per_device, gpus)
    else:
      if platform == 'gpu':
        accelerators.SetMemory(gpu_memory)
        devices, notes = _ChooseGpus(gpus, count, indices, logical_devices_per_gpu)
      else:
        chosen = range(len(cores)) if indices is None else indices
        devices, notes = _FullNames([cores[i] for i in chosen][:count]), []
      if len(devices) < needed:
        raise ValueError(
          f'{need}, but {_Count(len(devices), _Noun(platform))} '
          f'{"was" if len(devices) == 1 else "were"} found: use a model with fewer stages, '
          'logical_devices_per_gpu to split GPUs, or platform cpu (--platform=cpu), which creates '
          'logical CPU devices.'
        )
      description = _Count(len(devices), _Noun(platform))
      description += f' ({"; ".join(notes)})' if notes else ''
    devices = devices[: len(devices) // num_replicas * num_replicas]  # All rows have equal length.
    if num_replicas > 1:
      description += f', {num_replicas} replicas'
    logging.info('Devices: %s.', description)
    return cls(devices=devices, description=description, num_replicas=num_replicas)

  @classmethod
  def Connect(
    cls,
    spec: cluster_spec.ClusterSpec | Sequence[str],
    num_devices: int = 1,
    num_replicas: int = 1,
    platform: str = 'auto',
    timeout_seconds: float = 60.0,
    answers: Mapping[str, bytes] | None = None,
  ) -> Cluster:
    """Connects to workers and uses their devices in the order of workers, replicas and stages.

    Call it once per process and before other uses of TensorFlow. Operations without a device stay
    in this process: reading data, summaries, checkpoints.

    Args:
      spec: addresses of the workers, such as ['alpha:2222', 'beta:2222'].
      num_devices: number of devices for each replica, which is the number of stages.
      num_replicas: number of copies of the pipeline.
      platform: 'auto' (the workers' GPUs if they have any, otherwise their CPU devices), 'cpu' or
        'gpu'.
      timeout_seconds: time limit of the wait for workers that do not answer.
      answers: {address: answer} of workers that have answered already (see
        `worker_connection.AwaitWorkers`). Other workers are left out.

    Raises:
      TimeoutError: a worker does not answer; the message names it.
      ValueError: the workers have fewer devices than needed, or an address belongs to another
        process.
      tf.errors.OpError: a worker was lost meanwhile.
    """
    if not isinstance(spec, cluster_spec.ClusterSpec):
      spec = cluster_spec.ClusterSpec(tuple(spec))
    if answers is None:
      answers = worker_connection.AwaitWorkers(spec.workers, timeout_seconds)
    tf.config.set_visible_devices([], 'GPU')  # The GPUs of this host belong to its worker.
    facts = worker_connection.Connect(spec, answers)
    worker_restart.MarkUse(facts)
    accelerators.worker_problems.clear()
    for index, worker_facts in facts.items():
      if accelerators.XLA_FACT in worker_facts:
        accelerators.worker_problems[index] = worker_facts[accelerators.XLA_FACT]
    devices, kind = _ListWorkerDevices(spec, platform, num_devices, num_replicas)
    pools = {worker_facts.get('intra_op_threads') for worker_facts in facts.values()}
    description = f'{kind} of {_Count(len(facts), "worker")}'
    workers = {index: spec.workers[index] for index in facts}
    logging.info('Devices: %s at %s.', description, ', '.join(workers.values()))
    threads = pools.pop() if len(pools) == 1 else None
    return cls(devices, description, num_replicas, threads, workers)

  def Describe(self) -> str:
    """Returns one line such as '2 logical CPU devices on 2 cores (no GPU found)'."""
    return self.description or f'{len(self.devices)} devices: {", ".join(self.devices)}'


def Cores() -> int:
  """Returns the number of cores that this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def _Count(n: int, noun: str) -> str:
  return f'{n} {noun}' + ('' if n == 1 else 's')


def PoolSize(threads_per_device: int, num_devices: int) -> int:
  """Returns the size of the thread pool that runs single operations on CPU devices.

  All logical devices of a process share the pool. TensorFlow does not use a pool of one thread:
  each operation then runs in its caller's thread.
  """
  return 1 if threads_per_device == 1 else threads_per_device * num_devices


def _CheckIndices(platform: str, sizes: Mapping[str, int], indices: Sequence[int]) -> None:
  """Raises a ValueError unless the indices are distinct accelerators of this machine.

  Args:
    platform: 'cpu', 'gpu' or 'tpu'.
    sizes: {platform: number of its accelerators}.
    indices: the indices.
  """
  prefix = f'devices {", ".join(map(str, indices))}'
  if platform == 'cpu':
    counts = [_Count(size, _Noun(kind)) for kind, size in sizes.items() if size]
    raise ValueError(
      f'{prefix}: these are indices of GPUs or TPU cores, but the platform is cpu '
      f'({", ".join(counts) or "no accelerator"} found). Omit them; num_devices '
      '(--num_devices) limits the logical CPU devices.'
    )
  noun, size = _Noun(platform), sizes[platform]
  unknown = [i for i in indices if not 0 <= i < size]
  if unknown:
    known = f'0 to {size - 1}' if size > 1 else '0' if size else 'none'
    raise ValueError(
      f'{prefix}: there is no {noun} {unknown[0]}; {_Count(size, noun)} found: {known}. Indices '
      'count the devices that TensorFlow sees: CUDA_VISIBLE_DEVICES hides GPUs and renumbers the '
      'others.'
    )
  if len(set(indices)) < len(indices):
    twice = next(i for i in indices if list(indices).count(i) > 1)
    raise ValueError(
      f'{prefix}: {noun} {twice} is listed twice; each device holds one stage, or more with '
      "stages_per_device of the task's PipeliningLayer. logical_devices_per_gpu splits a GPU."
    )


def _Noun(platform: str) -> str:
  return 'GPU' if platform == 'gpu' else 'TPU core'


def _FullNames(names: Sequence[str]) -> list[str]:
  """Returns names of logical devices with their job, which the devices of variables include."""
  local = '/job:localhost/replica:0/task:0'
  return [name if name.startswith('/job:') else local + name for name in names]


def _ListNames(kind: str) -> list[str]:
  """Returns the names of the logical devices of a kind. Starts TensorFlow's context."""
  return _FullNames([device.name for device in tf.config.list_logical_devices(kind)])


def _MakeCpuDevices(
  count: int, needed: int, threads: int | None, gpus: list[Any]
) -> tuple[list[str], str]:
  """Creates logical CPU devices unless they exist; returns (names, description)."""
  if count > MAX_CPU_DEVICES:
    raise ValueError(
      f'at most {MAX_CPU_DEVICES} logical CPU devices can be made, got {count}: use fewer stages, '
      'replicas or devices'
    )
  cores = Cores()
  threads = threads or max(1, cores // count)
  physical = tf.config.list_physical_devices('CPU')[0]
  is_started = False
  try:
    if gpus:
      tf.config.set_visible_devices([], 'GPU')  # Does not allocate memory of unused GPUs.
    if len(tf.config.get_logical_device_configuration(physical) or ()) < count:
      tf.config.set_logical_device_configuration(
        physical, [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
      )
    tf.config.threading.set_intra_op_parallelism_threads(PoolSize(threads, count))
  except RuntimeError:
    is_started = True
  names = _ListNames('CPU')[:count]
  if len(names) < needed:
    raise ValueError(
      f'{_Count(needed, "device")} needed, one for each stage, but TensorFlow has already started '
      f'with {_Count(len(names), "logical CPU device")}: call Cluster.Create({needed}) before '
      'anything else that uses TensorFlow, or in a new process.'
    )
  if is_started:
    logging.info('TensorFlow has already started: using its devices and thread counts unchanged.')
  unused = f'{_Count(len(gpus), "GPU")} unused' if gpus else 'no GPU found'
  return names, f'{_Count(len(names), "logical CPU device")} on {_Count(cores, "core")} ({unused})'


def _ChooseGpus(
  gpus: list[Any], count: int | None, indices: Sequence[int] | None, num_logical: int | None
) -> tuple[list[str], list[str]]:
  """Makes GPUs visible, as many as have `count` logical devices; returns (names, notes).

  Args:
    gpus: the GPUs that TensorFlow sees.
    count: number of devices; None for all.
    indices: the GPUs to choose from, in the order of stages; None for all.
    num_logical: number of devices that each GPU is split into; None leaves GPUs as they are.
  """
  chosen = gpus if indices is None else [gpus[i] for i in indices]
  if count is not None:
    sizes = [num_logical or accelerators.NumLogical(gpu) for gpu in chosen]
    chosen = [gpu for i, gpu in enumerate(chosen) if sum(sizes[:i]) < count]
  notes = accelerators.Notes(chosen)
  try:
    if num_logical:
      accelerators.Split(chosen, num_logical)
    if chosen:
      # TensorFlow numbers visible devices in the machine's order, not in the order of this list.
      tf.config.set_visible_devices([gpu for gpu in gpus if gpu in chosen], 'GPU')
  except RuntimeError:
    logging.info('TensorFlow has already started: its GPUs stay unchanged.')
  names = iter(_ListNames('GPU'))
  names_of_gpu = {
    gpu.name: list(itertools.islice(names, accelerators.NumLogical(gpu)))
    for gpu in tf.config.get_visible_devices('GPU')
  }
  if indices is not None:
    notes.append(f'{", ".join(map(str, indices))} of {len(gpus)}')
  devices = [name for gpu in chosen for name in names_of_gpu[gpu.name]]
  if len(devices) > len(chosen):
    notes.append(f'logical devices of {_Count(len(chosen), "card")}')
  return devices[:count], notes


def _ListWorkerDevices(
  spec: cluster_spec.ClusterSpec, platform: str, num_devices: int, num_replicas: int
) -> tuple[list[str], str]:
  """Returns (names, description) of the needed number of devices of connected workers."""
  by_kind: dict[str, dict[int, list[str]]] = {}  # {kind: {worker: names}}
  for device in tf.config.list_logical_devices():
    parsed = tf.DeviceSpec.from_string(device.name)
    if parsed.job == 'worker':
      by_kind.setdefault(device.device_type, {}).setdefault(parsed.task, []).append(device.name)
  if platform == 'auto':
    platform = 'gpu' if 'GPU' in by_kind else 'cpu'
  kind = platform.upper()
  of_worker = by_kind.get(kind, {})
  names = [name for task in sorted(of_worker) for name in of_worker[task]]
  needed = num_devices * num_replicas
  if len(names) < needed:
    counts = ', '.join(
      f'{len(of_worker.get(task, []))} of worker {task} at {address}'
      for task, address in enumerate(spec.workers)
    )
    raise ValueError(
      f'{_Count(needed, "device")} needed, {_Count(num_devices, "stage")} of each of '
      f'{_Count(num_replicas, "replica")}, but the workers have {len(names)} of kind {kind}: '
      f'{counts}. Use more workers, fewer stages or replicas, or on CPUs `worker --num_devices`.'
    )
  return names[:needed], f'{_Count(needed, f"{kind} device")}'
