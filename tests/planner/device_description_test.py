# SPDX-License-Identifier: Apache-2.0
"""Descriptions of devices: parsing, errors, and the links between devices."""

import json
import pathlib
import sys

import pytest

from lingvo_gpipe.planner import device_description
from tests import naming

_DEVICES = {
  'num_devices': 16,
  'devices_per_host': 4,
  'memory_bytes': 16e9,
  'flops_per_second': 1e13,
  'within_host': {'bandwidth': 1e11, 'latency': 1e-6},
  'between_hosts': {'bandwidth': 1e10, 'latency': 1e-5},
}
_FAST, _SLOW = (device_description.Link(**_DEVICES[k]) for k in ('within_host', 'between_hosts'))


def _Read(**changes):
  values = {**_DEVICES, **changes}
  return device_description.FromMapping({k: v for k, v in values.items() if v is not None})


def testMappingsReadBack():
  for to_host in (None, {'bandwidth': 1e9}):
    devices = _Read(name='x', memory_bandwidth=1e12, to_host=to_host)
    text = json.dumps(device_description.ToMapping(devices))
    assert device_description.FromMapping(json.loads(text)) == devices


def testSlowdownOfDevicesOfOneHost():
  devices = _Read(slowdown=1.6)
  assert [devices.Slowdown(n) for n in (1, 2, 4, 16)] == pytest.approx([1, 1.2, 1.6, 1.6])
  assert _Read(slowdown=1.6, devices_per_host=1).Slowdown(4) == 1
  assert _Read().Slowdown(4) == 1


def testOneHostNeedsNoLinkBetweenHosts():
  devices = _Read(num_devices=4, devices_per_host=None, between_hosts=None)
  assert devices.devices_per_host == 4 and devices.between_hosts == devices.within_host


@pytest.mark.parametrize(
  'changes, words',
  [
    ({'num_devices': 0}, ['num_devices', 'at least 1', '0']),
    ({'num_devices': 2.5}, ['num_devices', '2.5']),
    ({'num_devices': True}, ['num_devices']),
    ({'memory_bytes': None}, ['memory_bytes is missing']),
    ({'memory_bytes': '16GB'}, ['memory_bytes', '16GB']),
    ({'flops_per_second': -1}, ['flops_per_second', '-1']),
    ({'flops_per_second': float('nan')}, ['flops_per_second', 'nan']),
    ({'flops_per_second': 10**400}, ['flops_per_second', 'inf in float32']),
    ({'num_devices': 10**400}, ['num_devices', '1000']),
    ({'flops': 1}, ["unknown key 'flops'", 'flops_per_second']),
    ({'within_host': 1e9}, ['within_host', 'bandwidth']),
    ({'to_host': {'bandwidth': 0}}, ['to_host: bandwidth', '0']),
    ({'within_host': {'latency': 1}}, ['within_host: bandwidth is missing']),
    ({'within_host': {'bandwidth': 1, 'latency': -1}}, ['within_host: latency', '-1']),
    ({'within_host': {'bandwidth': 1, 'delay': 1}}, ["within_host: unknown key 'delay'"]),
    ({'between_hosts': None}, ['between_hosts is missing', '16 devices']),
    ({'all_reduce': 'ring'}, ['all_reduce', 'collective', 'ring']),
    ({'transfers': 'block'}, ['transfers', 'overlap', 'occupy', 'block']),
    ({'slowdown': 0.5}, ['slowdown', 'at least 1', '0.5']),
    ({'slowdown': '2x'}, ['slowdown', '2x']),
    ({'name': 3}, ['name', '3']),
  ],
)
def testErrorsNameTheKeyAndTheValue(changes, words):
  with pytest.raises(ValueError) as e:
    _Read(**changes)
  for word in ['devices: ', *words]:
    assert word in str(e.value)


def testOtherValuesAreRefused():
  with pytest.raises(ValueError, match=naming.Naming('d.json', 'num_devices', '[1]')):
    device_description.FromMapping([1], 'd.json')


def testABoundaryIsTheSlowestLinkOfAnyReplica():
  devices = _Read()
  assert devices.LinkBetween(0, 3) == _FAST and devices.LinkBetween(3, 4) == _SLOW
  # Replicas of two or four devices are within hosts, replicas of three are not.
  assert devices.Boundary(8, 2, 0, 1) == _FAST
  assert devices.Boundary(1, 3, 1, 2) == _FAST
  assert devices.Boundary(5, 3, 0, 1) == _SLOW
  assert devices.Boundary(2, 8, 2, 3) == _FAST
  assert devices.Boundary(2, 8, 3, 4) == _SLOW


def testReplicasInOneHostUseItsLinks():
  devices = _Read()
  assert devices.Ring(4, 1) == devices.Ring(2, 2) == _FAST
  assert devices.Ring(5, 1) == devices.Ring(2, 3) == devices.Ring(4, 4) == _SLOW


def testTheFilesInToolsAreValid():
  paths = sorted((pathlib.Path(__file__).parents[2] / 'tools' / 'devices').glob('*.json'))
  assert paths
  for path in paths:
    devices = device_description.FromMapping(json.loads(path.read_text()), path.name)
    assert devices.name and devices.source


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
