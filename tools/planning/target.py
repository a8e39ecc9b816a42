# SPDX-License-Identifier: Apache-2.0
"""Measures devices: their hosts, links and memory."""

from __future__ import annotations

import dataclasses
import glob
import itertools
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.distributed import cluster, worker_hosts
from lingvo_gpipe.planner import device_description, model_costs

_SMALL, _LARGE = 1 << 10, 1 << 22
_CACHES = 1 << 24  # Number of bytes that exceeds the caches.
_TURNS, _REPEATS = 4, 10


def NumCpus() -> int | None:
  """Returns the number of logical CPU devices to measure with, one per core; None with GPUs."""
  return None if glob.glob('/dev/nvidia[0-9]*') else cluster.Cores()


def Hosts(devices: Sequence[str]) -> list[list[str]]:
  """Returns the devices of each machine; workers on the same machine are one host.

  Raises:
    ValueError: the devices of a machine are not consecutive.
  """
  devices_of: dict[str, list[str]] = {}
  for machine, group in itertools.groupby(
    devices, lambda d: _FileAt(d, '/proc/sys/kernel/random/boot_id')
  ):
    if machine in devices_of:
      raise ValueError(
        'the devices of a host must be consecutive, but the host of '
        f'{_Name(devices_of[machine][0])} has others in between: list its workers one after another'
      )
    devices_of[machine] = list(group)
  return list(devices_of.values())


def Describe(
  devices: cluster.Cluster,
  hosts: Sequence[Sequence[str]],
  costs: model_costs.ModelCosts,
  slowdown: float,
  known: dict[str, Any] | None,
) -> device_description.Devices:
  """Returns a description of the devices of this process or of workers, from measurements.

  Args:
    devices: the devices to use.
    hosts: the result of `Hosts` for the devices.
    costs: costs of layers with measured seconds, from which FLOP/s follow.
    slowdown: measured slowdown if all devices of a host work.
    known: a description that supplies numbers of devices, memory, and the links that cannot be
      measured here. With None everything is measured, and each CPU device has an equal share of
      its host's memory.

  Raises:
    ValueError: the memory of an accelerator is unknown, hosts have different numbers of devices,
      or the description is malformed.
  """
  first = hosts[0][0]
  on_cpu = tf.DeviceSpec.from_string(first).device_type == 'CPU'
  values: dict[str, Any] = dict(known or {})
  values.setdefault('num_devices', len(devices.devices))
  if 'devices_per_host' not in values:
    counts = [len(host) for host in hosts]
    if len(set(counts)) > 1:
      raise ValueError(
        f'a plan is for hosts of equally many devices, and these have {", ".join(map(str, counts))}'
        ': leave some out (`worker --num_devices`), or give devices_per_host in --device_file'
      )
    values['devices_per_host'] = counts[0]
  if 'memory_bytes' not in values:
    if not on_cpu:
      raise ValueError(
        '--measure needs memory_bytes in --device_file: of an accelerator it is unknown'
      )
    values['memory_bytes'] = min(_HostMemory(host[0]) / len(host) for host in hosts)
  values['flops_per_second'] = FlopsPerSecond(costs)
  values['memory_bandwidth'] = MemoryBandwidth(first)
  source = f'measured: layers on {_Name(first)}'
  # Measure the outermost workers of a machine: their link is slower than a link within a worker.
  links = {'within_host': (first, hosts[0][-1])}
  if len(hosts) > 1:
    links['between_hosts'] = (hosts[0][-1], hosts[1][0])
  for name, ends in links.items():
    if ends[0] != ends[1] or name not in values:
      values[name] = dataclasses.asdict(Transfer(*ends))
    if ends[0] != ends[1]:
      source += f', {name.replace("_", " ")} from {" to ".join(map(_Name, ends))}'
  values['slowdown'] = slowdown
  values['source'] = source
  values.setdefault('all_reduce', 'send' if on_cpu else 'collective')
  is_gpu = tf.DeviceSpec.from_string(first).device_type == 'GPU'
  values.setdefault('transfers', 'occupy' if is_gpu else 'overlap')
  values.setdefault('name', f'({devices.Describe()})')
  return device_description.FromMapping(values)


def _Name(device: str) -> str:
  """Returns a name such as `worker 1 CPU:0`."""
  spec = tf.DeviceSpec.from_string(device)
  worker = worker_hosts.WorkerOf(device)
  where = '' if worker is None else f'worker {worker} '
  return f'{where}{spec.device_type}:{spec.device_index}'


def _FileAt(device: str, path: str) -> str:
  """Reads a file in the process that has the device."""
  with tf.device(worker_hosts.Host(device)):
    text: str = tf.io.read_file(path).numpy().decode()
  return text


def _HostMemory(device: str) -> float:
  match = re.search(r'MemTotal: +([0-9]+) kB', _FileAt(device, '/proc/meminfo'))
  assert match
  return float(match[1]) * 1024


def FlopsPerSecond(costs: model_costs.ModelCosts) -> float:
  """Returns the forward FLOP/s of all layers at the largest measured micro-batch."""
  layers = [s for s in costs.samples[max(costs.samples)] if s.seconds is not None]
  seconds = sum(s.seconds[0] for s in layers if s.seconds)
  return max(sum(s.flops for s in layers), 1.0) / max(seconds, 1e-9)


def Transfer(source: str, target: str) -> device_description.Link:
  """Measures the link between two devices by sending a small and a large tensor back and forth.

  The tensors go directly from worker to worker, as activations do. Two logical CPU devices of a
  process share their memory, so transfers between them take almost no time.
  """
  small, large = (_TransferSeconds(source, target, n) for n in (_SMALL, _LARGE))
  return device_description.Link((_LARGE - _SMALL) / max(large - small, 1e-9), max(small, 0.0))


def _TransferSeconds(source: str, target: str, num_bytes: int) -> float:
  """Returns the seconds of one way, from the extra time of turns to `target` and back."""
  variables = {}
  for device in {source, target}:
    with tf.device(device):
      variables[device] = tf.Variable(tf.zeros([num_bytes // 4]))

  def Turns(other: str) -> Callable[[], tf.Tensor]:
    @tf.function(autograph=False)
    def Step() -> tf.Tensor:
      with tf.device(source):  # Otherwise it would be read on this host.
        value = variables[source].read_value()
      for device in (other, source) * _TURNS:
        with tf.device(device):
          value = tf.maximum(
            value, variables[device]
          )  # Unlike sums, identities do not change the values.
      with tf.device(source):
        return value[-1]

    return Step

  return (_Best(Turns(target)) - _Best(Turns(source))) / (2 * _TURNS)


def MemoryBandwidth(device: str) -> float:
  """Returns the bytes per second of adding to a variable, which is read and written."""
  with tf.device(device):
    x, ones = tf.Variable(tf.zeros([_CACHES // 4])), tf.ones([_CACHES // 4])

    @tf.function(autograph=False)
    def Step() -> tf.Tensor:
      with tf.device(device):
        for _ in range(_TURNS):
          x.assign_add(ones)
        return x[0]

    return 3 * _TURNS * _CACHES / _Best(Step)


def _Best(step: Callable[[], tf.Tensor]) -> float:
  step().numpy()
  seconds = []
  for _ in range(_REPEATS):
    start = time.perf_counter()
    step().numpy()
    seconds.append(time.perf_counter() - start)
  return min(seconds)
