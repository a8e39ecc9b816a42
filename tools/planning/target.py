# SPDX-License-Identifier: Apache-2.0
"""Measures the devices themselves: what hosts they are on, their links and their memory."""

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
_CACHES = 1 << 24  # Bytes that do not fit into them.
_TURNS, _REPEATS = 4, 10


def NumCpus() -> int | None:
  """How many logical CPU devices to measure with: one a core; None where there are GPUs."""
  return None if glob.glob('/dev/nvidia[0-9]*') else cluster.Cores()


def Hosts(devices: Sequence[str]) -> list[list[str]]:
  """The devices of each machine: workers of one machine are one host, and share what it has.

  Raises:
    ValueError: devices of another machine are between those of one.
  """
  found: dict[str, list[str]] = {}
  for machine, own in itertools.groupby(
    devices, lambda d: _FileAt(d, '/proc/sys/kernel/random/boot_id')
  ):
    if machine in found:
      raise ValueError(
        f'a plan counts devices host by host, and between those of the host of '
        f'{_Name(found[machine][0])} there are others: list the workers of a host one after another'
      )
    found[machine] = list(own)
  return list(found.values())


def Describe(
  devices: cluster.Cluster,
  hosts: Sequence[Sequence[str]],
  costs: model_costs.ModelCosts,
  slowdown: float,
  given: dict[str, Any] | None,
) -> device_description.Devices:
  """The devices of this process or of workers, as measured.

  Args:
    devices: those to use.
    hosts: what `Hosts` says of them.
    costs: with measured seconds, from which FLOP/s follow.
    slowdown: measured, of all devices of a host together.
    given: a description, whose numbers and memory are kept, and links for which there are no
      devices here; None: all is measured, with an equal share of the host's memory for each CPU
      device.

  Raises:
    ValueError: the memory of an accelerator was not given, hosts have different numbers of devices,
      or the description is malformed.
  """
  first = hosts[0][0]
  on_cpu = tf.DeviceSpec.from_string(first).device_type == 'CPU'
  values: dict[str, Any] = dict(given or {})
  values.setdefault('num_devices', len(devices.devices))
  if 'devices_per_host' not in values:
    counts = [len(own) for own in hosts]
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
    values['memory_bytes'] = min(_HostMemory(own[0]) / len(own) for own in hosts)
  values['flops_per_second'] = FlopsPerSecond(costs)
  values['memory_bandwidth'] = MemoryBandwidth(first)
  source = f'measured: layers on {_Name(first)}'
  # Of workers on one machine the outermost ones: their link is slower than that in a worker.
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
  values.setdefault('name', f'({devices.Describe()})')
  return device_description.FromMapping(values)


def _Name(device: str) -> str:
  """Such as `worker 1 CPU:0`."""
  spec = tf.DeviceSpec.from_string(device)
  worker = worker_hosts.WorkerOf(device)
  where = '' if worker is None else f'worker {worker} '
  return f'{where}{spec.device_type}:{spec.device_index}'


def _FileAt(device: str, path: str) -> str:
  """A file's text, as the process that has the device reads it."""
  with tf.device(worker_hosts.Host(device)):
    text: str = tf.io.read_file(path).numpy().decode()
  return text


def _HostMemory(device: str) -> float:
  match = re.search(r'MemTotal: +([0-9]+) kB', _FileAt(device, '/proc/meminfo'))
  assert match
  return float(match[1]) * 1024


def FlopsPerSecond(costs: model_costs.ModelCosts) -> float:
  """What all layers together reach forward with the largest micro-batch that was measured."""
  layers = [s for s in costs.samples[max(costs.samples)] if s.seconds is not None]
  seconds = sum(s.seconds[0] for s in layers if s.seconds)
  return max(sum(s.flops for s in layers), 1.0) / max(seconds, 1e-9)


def Transfer(source: str, target: str) -> device_description.Link:
  """The link between two devices, from a small and a large tensor that go to and fro.

  They go from worker to worker as activations do, and not by this process. Two logical CPU devices
  of a process share their memory: what they send takes hardly any time.
  """
  small, large = (_TransferSeconds(source, target, n) for n in (_SMALL, _LARGE))
  return device_description.Link((_LARGE - _SMALL) / max(large - small, 1e-9), max(small, 0.0))


def _TransferSeconds(source: str, target: str, num_bytes: int) -> float:
  """The seconds of one way: by these, turns to `target` and back are longer than on `source`."""
  variables = {}
  for device in {source, target}:
    with tf.device(device):
      variables[device] = tf.Variable(tf.zeros([num_bytes // 4]))

  def Turns(other: str) -> Callable[[], tf.Tensor]:
    @tf.function(autograph=False)
    def Step() -> tf.Tensor:
      with tf.device(source):  # Else it is read here.
        value = variables[source].read_value()
      for device in (other, source) * _TURNS:
        with tf.device(device):
          value = tf.maximum(value, variables[device])  # Unlike sums these stay as they are.
      with tf.device(source):
        return value[-1]

    return Step

  return (_Best(Turns(target)) - _Best(Turns(source))) / (2 * _TURNS)


def MemoryBandwidth(device: str) -> float:
  """Bytes a second of adding to a variable, which is read and written."""
  with tf.device(device):
    x, one = tf.Variable(tf.zeros([_CACHES // 4])), tf.ones([_CACHES // 4])

    @tf.function(autograph=False)
    def Step() -> tf.Tensor:
      with tf.device(device):
        for _ in range(_TURNS):
          x.assign_add(one)
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
