# SPDX-License-Identifier: Apache-2.0
"""Descriptions of devices for the planner: number, memory, speed and links.

A description is a mapping, as in JSON:

    {"num_devices": 64, "devices_per_host": 8, "memory_bytes": 16e9,
     "flops_per_second": 3e13, "memory_bandwidth": 4.5e11,
     "within_host": {"bandwidth": 4e10, "latency": 1e-6},
     "between_hosts": {"bandwidth": 1e10, "latency": 1e-5}}

Units are bytes and seconds. `flops_per_second` is the rate that layers reach, not the peak rate in
the data sheet. `memory_bandwidth` is optional, and so is `between_hosts` if there is one host. The
bandwidth of a link applies to one device and one direction, while all other links are in use.
`to_host` is a link like these to the memory of the host; the planner offloads only if it is set.
`all_reduce` is `collective`, or `send` as on CPUs (see `replicas.GradientSum`). `transfers` between
stages `overlap` with work, or `occupy` both devices as on GPUs (see `simulator.Costs`). `slowdown`
is 1 by default and should be measured. `name` and `source` are human-readable texts.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Any

from lingvo_gpipe.core import domain

ALL_REDUCES = ('collective', 'send')
TRANSFERS = ('overlap', 'occupy')


@dataclasses.dataclass(frozen=True)
class Link:
  """A link between two devices: bytes per second in one direction, and latency in seconds."""

  bandwidth: float
  latency: float = 0.0

  def Seconds(self, num_bytes: float) -> float:
    """Returns the time for which the bytes occupy the link, without its latency."""
    return num_bytes / self.bandwidth


@dataclasses.dataclass(frozen=True)
class Devices:
  """Equal devices in equal hosts; see the module's docstring.

  Attributes:
    num_devices: number of devices; device d is on host d // devices_per_host.
    memory_bytes: memory of one device that the model may use.
    flops_per_second: FLOPs per second that layers reach on one device.
    within_host: the link between two devices of one host.
    between_hosts: the link between devices of different hosts.
    devices_per_host: number of devices of a host.
    memory_bandwidth: bytes per second between a device and its memory.
    all_reduce: the way to add gradients over replicas, one of `ALL_REDUCES`.
    transfers: whether transfers between stages take the devices' time, one of `TRANSFERS`.
    to_host: the link between a device and the memory of its host; None: no plan offloads.
    slowdown: the time of a layer while all devices of its host are busy, relative to its time
      alone; devices share memory, caches and threads.
    name: the devices' name.
    source: the source of the figures.
  """

  num_devices: int
  memory_bytes: float
  flops_per_second: float
  within_host: Link
  between_hosts: Link
  devices_per_host: int
  memory_bandwidth: float = math.inf
  all_reduce: str = 'collective'
  transfers: str = 'overlap'
  to_host: Link | None = None
  slowdown: float = 1.0
  name: str = ''
  source: str = ''

  def Slowdown(self, num_devices: int) -> float:
    """Returns the relative time of a layer while `num_devices` devices are busy.

    Assumes that busy devices fill their hosts. Linear in the number of other busy devices of a
    host.
    """
    num_others = min(num_devices, self.devices_per_host) - 1
    return 1.0 + (self.slowdown - 1.0) * num_others / max(self.devices_per_host - 1, 1)

  def LinkBetween(self, a: int, b: int) -> Link:
    """Returns the link between devices a and b."""
    same = a // self.devices_per_host == b // self.devices_per_host
    return self.within_host if same else self.between_hosts

  def Boundary(self, num_replicas: int, devices_per_replica: int, a: int, b: int) -> Link:
    """Returns the slowest link between the a-th and the b-th device of any replica."""
    # The position of replicas in hosts is periodic. If one size divides the other, all replicas
    # have equal links, and one of them tells for all.
    larger, smaller = sorted((self.devices_per_host, devices_per_replica), reverse=True)
    num_distinct = min(num_replicas, self.devices_per_host) if larger % smaller else 1
    starts = (r * devices_per_replica for r in range(num_distinct))
    links = {self.LinkBetween(start + a, start + b) for start in starts}
    return min(links, key=lambda link: (link.bandwidth, -link.latency))

  def Ring(self, num_replicas: int, devices_per_replica: int) -> Link:
    """Returns the slowest link between the replicas of a stage."""
    span = (num_replicas - 1) * devices_per_replica
    # If all replicas fit into one host, the replicas of each stage do.
    is_local = span + devices_per_replica <= self.devices_per_host
    return self.within_host if is_local else self.between_hosts


def FromMapping(values: Any, name: str = 'devices') -> Devices:
  """Parses a description.

  Args:
    values: a mapping, as parsed from JSON.
    name: the name of the description in error messages.

  Raises:
    ValueError: a key is missing, unknown or has an impossible value; the message names it.
  """
  fields = {f.name for f in dataclasses.fields(Devices)}
  required = ('num_devices', 'memory_bytes', 'flops_per_second', 'within_host')
  _CheckKeys(values, fields, required, name)
  read: dict[str, Any] = {'all_reduce': 'collective', 'transfers': 'overlap', **values}
  for key in ('num_devices', 'devices_per_host'):
    read[key] = _Count(read.get(key, read.get('num_devices')), f'{name}: {key}')
  for key in ('memory_bytes', 'flops_per_second', 'memory_bandwidth'):
    if key in read:
      read[key] = _Positive(read[key], f'{name}: {key}')
  domain.Number(1).Check(f'{name}: slowdown', read.get('slowdown', 1.0))
  if 'to_host' in read:
    read['to_host'] = _Link(read['to_host'], f'{name}: to_host')
  read['within_host'] = _Link(read['within_host'], f'{name}: within_host')
  if 'between_hosts' in read:
    read['between_hosts'] = _Link(read['between_hosts'], f'{name}: between_hosts')
  elif read['num_devices'] > read['devices_per_host']:
    raise ValueError(
      f'{name}: between_hosts is missing: {read["num_devices"]} devices are on more than one host '
      f'of {read["devices_per_host"]}'
    )
  else:
    read['between_hosts'] = read['within_host']
  for key, choices in (('all_reduce', ALL_REDUCES), ('transfers', TRANSFERS)):
    domain.OneOf(*choices).Check(f'{name}: {key}', read[key])
  for key in ('name', 'source'):
    domain.STR.Check(f'{name}: {key}', read.get(key, ''))
  return Devices(**read)


def ToMapping(devices: Devices) -> dict[str, Any]:
  """Returns the mapping that `FromMapping` parses."""
  values = dataclasses.asdict(devices)
  return {k: v for k, v in values.items() if v not in ('', None, math.inf)}


def _CheckKeys(values: Any, known: set[str], required: tuple[str, ...], name: str) -> None:
  if not isinstance(values, Mapping):
    raise ValueError(f'{name}: expected a mapping with {", ".join(required)}, got {values!r}')
  for key in values:
    if key not in known:
      close = difflib.get_close_matches(str(key), known, n=2)
      hint = f'; did you mean {" or ".join(close)}?' if close else f'; known: {sorted(known)}'
      raise ValueError(f'{name}: unknown key {key!r}{hint}')
  for key in required:
    if key not in values:
      raise ValueError(f'{name}: {key} is missing')


def _Link(values: Any, name: str) -> Link:
  _CheckKeys(values, {'bandwidth', 'latency'}, ('bandwidth',), name)
  latency = values.get('latency', 0.0)
  domain.NOT_NEGATIVE.Check(f'{name}: latency', latency)
  return Link(_Positive(values['bandwidth'], f'{name}: bandwidth'), float(latency))


def _Positive(value: Any, name: str) -> float:
  domain.POSITIVE.Check(name, value)
  return float(value)


def _Count(value: Any, name: str) -> int:
  if isinstance(value, float) and value.is_integer():
    value = int(value)
  domain.Int(1).Check(name, value)
  return int(value)
