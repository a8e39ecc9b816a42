# SPDX-License-Identifier: Apache-2.0
"""Which processes a run over several hosts consists of: from a JSON file, or from TF_CONFIG.

The form is that of TF_CONFIG's `cluster`: {"worker": ["a:2222", "b:2222"], "chief": ["c:2221"]}.
Imports no TensorFlow.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from typing import Any

_ADDRESS = re.compile(r'(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+(?:%\w+)?\]):(\d{1,5})')
_FORM = 'expected {"worker": ["host:port", ...]}, and perhaps "chief": ["host:port"], the trainer'


@dataclasses.dataclass(frozen=True)
class ClusterSpec:
  """The addresses of a run's processes, all of which reach each other at them.

  Attributes:
    workers: 'host:port' of each worker, by task index; a worker listens at that port.
    chief: 'host:port' of the trainer; '': it finds one that leads to its workers.
    task_type: what this process is, as TF_CONFIG says: 'chief', 'worker' ...; '': nothing says it.
    task_index: its number among those.
  """

  workers: tuple[str, ...]
  chief: str = ''
  task_type: str = ''
  task_index: int = 0

  def Address(self, task_index: int) -> str:
    """Returns the address of a worker.

    Raises:
      ValueError: there is no such worker.
    """
    if not 0 <= task_index < len(self.workers):
      raise ValueError(
        f'there is no worker {task_index}: the cluster has the workers 0 to '
        f'{len(self.workers) - 1}: {", ".join(self.workers)}'
      )
    return self.workers[task_index]


def FromFile(path: str) -> ClusterSpec:
  """Reads a file of addresses.

  Raises:
    ValueError: it is not what it should be, one line that names the file and the place.
    OSError: it cannot be read.
  """
  with open(os.path.expanduser(path), encoding='utf-8', errors='replace') as f:
    text = f.read()
  return _FromJobs(_Parse(path, text), path)


def FromEnvironment(environment: Mapping[str, str]) -> ClusterSpec | None:
  """Reads TF_CONFIG; None where it is not set, or names no workers.

  Raises:
    ValueError: it is not what it should be.
  """
  name = 'TF_CONFIG'
  if not environment.get(name):
    return None
  found = _Parse(name, environment[name])
  if not isinstance(found, dict):
    raise ValueError(f'{name} is not a JSON object')
  jobs, task = found.get('cluster', {}), found.get('task', {})
  if not jobs:
    return None
  spec = _FromJobs(jobs, name)
  if not isinstance(task, dict):
    raise ValueError(f'{name}: "task" is an object such as {{"type": "worker", "index": 0}}')
  kind, index = task.get('type', ''), task.get('index', 0)
  if not isinstance(kind, str) or type(index) is not int:
    raise ValueError(f'{name}: "task" has a type that is text and an index that is an integer')
  return dataclasses.replace(spec, task_type=kind, task_index=index)


def _Parse(name: str, text: str) -> Any:
  def Unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if twice := {key for key in keys if keys.count(key) > 1}:
      raise ValueError(f'{", ".join(map(repr, sorted(twice)))} is there twice')
    return dict(pairs)

  try:
    return json.loads(text, object_pairs_hook=Unique)
  except (ValueError, RecursionError) as e:
    raise ValueError(f'{name} cannot be read as JSON: {e}; {_FORM}') from e


def _FromJobs(jobs: Any, name: str) -> ClusterSpec:
  if not isinstance(jobs, dict):
    raise ValueError(f'{name} is not a JSON object; {_FORM}')
  if unknown := sorted(jobs.keys() - {'worker', 'chief'}):
    raise ValueError(f'{name} has the unknown {", ".join(map(repr, unknown))}; {_FORM}')
  found: dict[str, tuple[str, ...]] = {}
  for job in ('worker', 'chief'):
    addresses = jobs.get(job, [])
    if not isinstance(addresses, list) or not all(isinstance(a, str) for a in addresses):
      raise ValueError(f'{name}: {job!r} is a list of addresses, got {addresses!r}; {_FORM}')
    for address in addresses:
      match = _ADDRESS.fullmatch(address)
      if not match or not 0 < int(match[1]) < 2**16:
        raise ValueError(f'{name}: {job!r} has {address!r}, which is not host:port')
    found[job] = tuple(addresses)
  if not found['worker']:
    raise ValueError(f'{name} names no worker; {_FORM}')
  if len(found['chief']) > 1:
    raise ValueError(f'{name} has {len(found["chief"])} addresses of the chief; one trainer trains')
  everyone = [*found['worker'], *found['chief']]
  if twice := sorted({a for a in everyone if everyone.count(a) > 1}):
    raise ValueError(f'{name} has {", ".join(twice)} twice; each process has its own address')
  return ClusterSpec(found['worker'], ''.join(found['chief']))
