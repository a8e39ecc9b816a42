# SPDX-License-Identifier: Apache-2.0
"""`tools.planning.target`: hosts, memory, links, and the route of tensors."""

import re
import sys

import pytest
import tensorflow as tf

from lingvo_gpipe.distributed import cluster
from lingvo_gpipe.planner import device_description
from tests import naming
from tools.planning import target

_MIB = 1 << 20


@pytest.fixture
def machines(monkeypatch):
  """Places worker i on machines[i], whose memory in MiB is the code of its letter."""
  names = []

  def FileAt(device, path):
    machine = names[tf.DeviceSpec.from_string(device).task]
    return f'MemTotal:  {ord(machine) * 1024} kB\n' if path == '/proc/meminfo' else machine

  monkeypatch.setattr(target, '_FileAt', FileAt)
  monkeypatch.setattr(target, 'MemoryBandwidth', lambda _: 1e9)
  monkeypatch.setattr(target, 'FlopsPerSecond', lambda _: 1e9)
  monkeypatch.setattr(
    target, 'Transfer', lambda *ends: device_description.Link(*[float(e[-1]) + 1 for e in ends])
  )
  return names


def _Describe(num_devices, known=None, kind='CPU'):
  """Describes workers with these numbers of devices."""
  devices = [
    f'/job:worker/replica:0/task:{task}/device:{kind}:{i}'
    for task, count in enumerate(num_devices)
    for i in range(count)
  ]
  return target.Describe(cluster.Cluster(devices), target.Hosts(devices), None, 1.5, known)


@pytest.mark.parametrize(
  'where, num_devices, per_host, memory, links',
  [
    ('ab', [2, 2], 2, ord('a') / 2, [('within', 0, 0, 0, 1), ('between', 0, 1, 1, 0)]),
    ('aa', [1, 1], 2, ord('a') / 2, [('within', 0, 0, 1, 0)]),
    ('ba', [1, 1], 1, ord('a'), [('between', 0, 0, 1, 0)]),
    ('aabb', [1, 2, 2, 1], 3, ord('a') / 3, [('within', 0, 0, 1, 1), ('between', 1, 1, 2, 0)]),
    ('a', [1], 1, ord('a'), []),
  ],
)
def testWorkersOfOneMachineShareAHost(machines, where, num_devices, per_host, memory, links):
  machines[:] = where
  devices = _Describe(num_devices)
  assert devices.num_devices == sum(num_devices)
  assert devices.devices_per_host == per_host
  assert devices.memory_bytes == pytest.approx(memory * _MIB)
  assert devices.slowdown == 1.5
  matches = re.findall(
    r'(within|between) hosts? from \D+(\d) CPU:(\d) to \D+(\d) CPU:(\d)', devices.source
  )
  assert [(name, *map(int, ends)) for name, *ends in matches] == links
  for name, _, a, _, b in links:
    link = devices.within_host if name == 'within' else devices.between_hosts
    assert link == device_description.Link(a + 1, b + 1)


def testDescribedValuesThatCannotBeMeasuredAreKept(machines):
  machines[:] = 'a'
  known = {
    'num_devices': 64,
    'devices_per_host': 8,
    'memory_bytes': 5,
    'flops_per_second': 7,
    'within_host': {'bandwidth': 9},
    'between_hosts': {'bandwidth': 11},
  }
  devices = _Describe([2], known)
  assert (devices.num_devices, devices.devices_per_host, devices.memory_bytes) == (64, 8, 5)
  assert devices.between_hosts.bandwidth == 11
  assert devices.flops_per_second == 1e9 and devices.within_host.latency == 2


@pytest.mark.parametrize('kind, transfers', [('GPU', 'occupy'), ('CPU', 'overlap')])
def testTransfersOfGpusOccupyThem(machines, kind, transfers):
  machines[:] = 'a'
  assert _Describe([2], {'memory_bytes': 5}, kind).transfers == transfers


def testHostsWithDifferentNumbersOfDevicesAreRejected(machines):
  machines[:] = 'ab'
  with pytest.raises(
    ValueError, match=naming.Naming('hosts', 'devices', '2, 1', 'devices_per_host')
  ):
    _Describe([2, 1])


def testWorkersOfAMachineMustBeConsecutive(machines):
  machines[:] = 'abab'
  with pytest.raises(ValueError, match=naming.Naming('consecutive', 'worker 0 CPU:0')):
    _Describe([1, 1, 1, 1])


def testTensorsOfATransferPassNoOtherDevice(monkeypatch):
  """Operations without a device would run in this process and receive all bytes."""
  graphs = []

  def Trace(step):
    graphs.append(step.get_concrete_function().graph)
    return 1.0 * len(graphs)

  monkeypatch.setattr(target, '_Best', Trace)
  ends = [d.name for d in tf.config.list_logical_devices('CPU')[1:3]]
  target.Transfer(*ends)
  both, alone = graphs[:2]
  for graph, expected in ((both, set(ends)), (alone, {ends[0]})):
    large = [
      op
      for op in graph.get_operations()
      if op.type != 'ReadVariableOp'  # Runs on the device of its variable.
      and any(x.dtype == tf.float32 and x.shape.rank == 1 for x in op.outputs)
    ]
    assert {op.device for op in large} == expected


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
