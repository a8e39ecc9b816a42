# SPDX-License-Identifier: Apache-2.0
"""What a planner knows of the devices: how many, how large, how quick, and how they are connected.

A description is a mapping, as JSON has it:

    {"num_devices": 64, "devices_per_host": 8, "memory_bytes": 16e9,
     "flops_per_second": 3e13, "memory_bandwidth": 4.5e11,
     "within_host": {"bandwidth": 4e10, "latency": 1e-6},
     "between_hosts": {"bandwidth": 1e10, "latency": 1e-5}}

Units are bytes and seconds. `flops_per_second` is what layers reach, not what the maker names;
`memory_bandwidth` and `between_hosts` may be left out where they do not matter. A bandwidth of a
link is what one device gets in one direction while all others use theirs. `name` and `source` are
for people; `all_reduce` is `collective`, or `send` as on CPUs (see `replicas.GradientSum`).
`slowdown`, 1 if it is left out, is best measured.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
from collections.abc import Mapping
from typing import Any

ALL_REDUCES = ('collective', 'send')


@dataclasses.dataclass(frozen=True)
class Link:
  """A link between two devices: bytes a second in one direction, and seconds until the first."""

  bandwidth: float
  latency: float = 0.0

  def Seconds(self, num_bytes: float) -> float:
    """How long the link is busy with so many bytes, without its latency."""
    return num_bytes / self.bandwidth


@dataclasses.dataclass(frozen=True)
class Devices:
  """Equal devices in equal hosts; see the module.

  Attributes:
    num_devices: how many there are; device d is on host d // devices_per_host.
    memory_bytes: of one device, as far as the model may use it.
    flops_per_second: what layers reach on one device.
    within_host: between two devices of one host.
    between_hosts: between devices of different hosts.
    devices_per_host: as many as there are devices, if there is one host.
    memory_bandwidth: bytes a second between a device and its memory.
    all_reduce: how gradients are added over replicas.
    slowdown: how many times as long a layer takes while all devices of its host work, for what they
      share: memory, caches, threads.
    name: what it is called.
    source: where the figures are from.
  """

  num_devices: int
  memory_bytes: float
  flops_per_second: float
  within_host: Link
  between_hosts: Link
  devices_per_host: int
  memory_bandwidth: float = math.inf
  all_reduce: str = 'collective'
  slowdown: float = 1.0
  name: str = ''
  source: str = ''

  def Slowdown(self, num_devices: int) -> float:
    """How many times as long a layer takes where so many devices work, in hosts as full as can be.

    In proportion to the others that work on a host.
    """
    others = min(num_devices, self.devices_per_host) - 1
    return 1.0 + (self.slowdown - 1.0) * others / max(self.devices_per_host - 1, 1)

  def LinkBetween(self, a: int, b: int) -> Link:
    """The link between devices a and b."""
    same = a // self.devices_per_host == b // self.devices_per_host
    return self.within_host if same else self.between_hosts

  def Boundary(self, num_replicas: int, devices_per_replica: int, a: int, b: int) -> Link:
    """The slowest of the links between the a-th and the b-th device of each replica."""
    # Where replicas are in their hosts repeats itself, at once if hosts hold whole ones or parts.
    larger, smaller = sorted((self.devices_per_host, devices_per_replica), reverse=True)
    turns = min(num_replicas, self.devices_per_host) if larger % smaller else 1
    starts = (r * devices_per_replica for r in range(turns))
    links = {self.LinkBetween(start + a, start + b) for start in starts}
    return min(links, key=lambda link: (link.bandwidth, -link.latency))

  def Ring(self, num_replicas: int, devices_per_replica: int) -> Link:
    """The slowest link of those that connect a stage's replicas with each other."""
    span = (num_replicas - 1) * devices_per_replica
    # Where all fit into a host, each stage's replicas do.
    is_local = span + devices_per_replica <= self.devices_per_host
    return self.within_host if is_local else self.between_hosts


def FromMapping(values: Any, where: str = 'devices') -> Devices:
  """Reads a description.

  Args:
    values: a mapping, such as JSON makes.
    where: what messages begin with.

  Raises:
    ValueError: a key is missing, unknown or has an impossible value; it is named.
  """
  fields = {f.name for f in dataclasses.fields(Devices)}
  required = ('num_devices', 'memory_bytes', 'flops_per_second', 'within_host')
  _CheckKeys(values, fields, required, where)
  read: dict[str, Any] = {'all_reduce': 'collective', **values}
  for key in ('num_devices', 'devices_per_host'):
    read[key] = _Count(read.get(key, read.get('num_devices')), f'{where}: {key}')
  for key in ('memory_bytes', 'flops_per_second', 'memory_bandwidth'):
    if key in read:
      read[key] = _Positive(read[key], f'{where}: {key}')
  read['slowdown'] = _Positive(read.get('slowdown', 1.0), f'{where}: slowdown')
  if read['slowdown'] < 1.0:
    raise ValueError(f'{where}: slowdown: expected at least 1, got {read["slowdown"]:g}')
  read['within_host'] = _Link(read['within_host'], f'{where}: within_host')
  if 'between_hosts' in read:
    read['between_hosts'] = _Link(read['between_hosts'], f'{where}: between_hosts')
  elif read['num_devices'] > read['devices_per_host']:
    raise ValueError(
      f'{where}: between_hosts is missing: {read["num_devices"]} devices are on more than one host '
      f'of {read["devices_per_host"]}'
    )
  else:
    read['between_hosts'] = read['within_host']
  if read['all_reduce'] not in ALL_REDUCES:
    raise ValueError(
      f'{where}: all_reduce: expected one of {", ".join(ALL_REDUCES)}, got {read["all_reduce"]!r}'
    )
  for key in ('name', 'source'):
    if not isinstance(read.get(key, ''), str):
      raise ValueError(f'{where}: {key}: expected a text, got {read[key]!r}')
  return Devices(**read)


def ToMapping(devices: Devices) -> dict[str, Any]:
  """What `FromMapping` reads."""
  values = dataclasses.asdict(devices)
  return {k: v for k, v in values.items() if v != '' and v != math.inf}


def _CheckKeys(values: Any, known: set[str], required: tuple[str, ...], where: str) -> None:
  if not isinstance(values, Mapping):
    raise ValueError(f'{where}: expected a mapping with {", ".join(required)}, got {values!r}')
  for key in values:
    if key not in known:
      close = difflib.get_close_matches(str(key), known, n=2)
      hint = f'; did you mean {" or ".join(close)}?' if close else f'; known: {sorted(known)}'
      raise ValueError(f'{where}: unknown key {key!r}{hint}')
  for key in required:
    if key not in values:
      raise ValueError(f'{where}: {key} is missing')


def _Link(values: Any, where: str) -> Link:
  _CheckKeys(values, {'bandwidth', 'latency'}, ('bandwidth',), where)
  latency = values.get('latency', 0.0)
  if not _IsNumber(latency) or not 0 <= latency < math.inf:
    raise ValueError(f'{where}: latency: expected seconds from 0 up, got {latency!r}')
  return Link(_Positive(values['bandwidth'], f'{where}: bandwidth'), float(latency))


def _Positive(value: Any, where: str) -> float:
  if not _IsNumber(value) or not 0 < value < math.inf:
    raise ValueError(f'{where}: expected a positive number, got {value!r}')
  return float(value)


def _Count(value: Any, where: str) -> int:
  if not _IsNumber(value) or value != int(value) or value < 1:
    raise ValueError(f'{where}: expected a whole number of at least 1, got {value!r}')
  return int(value)


def _IsNumber(value: Any) -> bool:
  return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
