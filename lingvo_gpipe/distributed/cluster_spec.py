# SPDX-License-Identifier: Apache-2.0
"""Reads the addresses of a run's processes on several hosts from a JSON file or TF_CONFIG.

The file has the form of `cluster` in TF_CONFIG:

    {"worker": ["a:2222", "b:2222"], "chief": ["c:2221"]}

Imports no TensorFlow.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

_ADDRESS = re.compile(r'(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_]+)?\]):([0-9]{1,5})')
_FORM = 'expected {"worker": ["host:port", ...]}, optionally "chief": ["host:port"] (the trainer)'


@dataclasses.dataclass(frozen=True)
class ClusterSpec:
  """The addresses at which the processes of a run reach each other.

  Attributes:
    workers: 'host:port' of each worker, by task index; the worker listens at this port.
    chief: 'host:port' of the trainer, or '' to let the trainer find an address.
    task_type: type of this process in TF_CONFIG, such as 'chief' or 'worker', or '' if unset.
    task_index: index of this process among the processes of its type.
  """

  workers: tuple[str, ...]
  chief: str = ''
  task_type: str = ''
  task_index: int = 0

  def Address(self, task_index: int) -> str:
    """Returns the address of a worker.

    Raises:
      ValueError: the cluster has no such worker.
    """
    if not 0 <= task_index < len(self.workers):
      raise ValueError(
        f'there is no worker {task_index}: the cluster has workers 0 to '
        f'{len(self.workers) - 1}: {", ".join(self.workers)}'
      )
    return self.workers[task_index]


def FromText(text: str, path: str) -> ClusterSpec:
  """Reads the text of a file of addresses.

  Raises:
    ValueError: the content is invalid; the message is one line that names the file and the entry.
  """
  return _FromJobs(_Parse(path, text), path)


def FromEnvironment(environment: Mapping[str, str]) -> ClusterSpec | None:
  """Reads TF_CONFIG; returns None if it is not set or names no workers.

  Raises:
    ValueError: the content is invalid.
  """
  name = 'TF_CONFIG'
  if not environment.get(name):
    return None
  config = _Parse(name, environment[name])
  if not isinstance(config, dict):
    raise ValueError(f'{name} is not a JSON object')
  jobs, task = config.get('cluster', {}), config.get('task', {})
  if not jobs:
    return None
  spec = _FromJobs(jobs, name)
  if not isinstance(task, dict):
    raise ValueError(f'{name}: "task" must be an object such as {{"type": "worker", "index": 0}}')
  kind, index = task.get('type', ''), task.get('index', 0)
  if not isinstance(kind, str) or type(index) is not int:
    raise ValueError(f'{name}: "type" of "task" must be a string, and "index" an integer')
  return dataclasses.replace(spec, task_type=kind, task_index=index)


def _Parse(name: str, text: str) -> Any:
  def Unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if twice := {key for key in keys if keys.count(key) > 1}:
      raise ValueError(f'{", ".join(map(repr, sorted(twice)))} occurs twice')
    return dict(pairs)

  try:
    return json.loads(text, object_pairs_hook=Unique)
  except (ValueError, RecursionError) as e:
    raise ValueError(f'{name} cannot be read as JSON: {e}; {_FORM}') from e


def _FromJobs(jobs: Any, name: str) -> ClusterSpec:
  if not isinstance(jobs, dict):
    raise ValueError(f'{name} is not a JSON object; {_FORM}')
  if unknown := sorted(jobs.keys() - {'worker', 'chief'}):
    raise ValueError(f'{name} has unknown keys: {", ".join(map(repr, unknown))}; {_FORM}')
  addresses_of: dict[str, tuple[str, ...]] = {}
  for job in ('worker', 'chief'):
    addresses = jobs.get(job, [])
    if not isinstance(addresses, list) or not all(isinstance(a, str) for a in addresses):
      raise ValueError(f'{name}: {job!r} must be a list of addresses, got {addresses!r}; {_FORM}')
    for address in addresses:
      match = _ADDRESS.fullmatch(address)
      if not match or not 0 < int(match[1]) < 2**16:
        raise ValueError(f'{name}: {job!r} has {address!r}, which is not host:port')
    addresses_of[job] = tuple(addresses)
  workers, chiefs = addresses_of['worker'], addresses_of['chief']
  if not workers:
    raise ValueError(f'{name} names no worker; {_FORM}')
  if len(chiefs) > 1:
    raise ValueError(f'{name} has {len(chiefs)} addresses of the chief, but a run has one trainer')
  everyone = [*workers, *chiefs]
  if twice := sorted({a for a in everyone if everyone.count(a) > 1}):
    raise ValueError(f'{name} has {", ".join(twice)} twice; each process needs its own address')
  return ClusterSpec(workers, ''.join(chiefs))
