# SPDX-License-Identifier: Apache-2.0
"""Choosing devices of a process; a subprocess provides a fresh TensorFlow."""

import os
import subprocess
import sys
import types

import pytest
import tensorflow as tf

from lingvo_gpipe.distributed import cluster

_FRESH = """
import os
import tensorflow as tf
from lingvo_gpipe import cluster
c = cluster.Cluster.Create(2, max_devices=3, platform='cpu')
cores = len(os.sched_getaffinity(0))
for i in range(3):
  with tf.device(c.devices[i]):
    v = tf.Variable(tf.ones([2]))
  assert v.device == c.devices[i] == f'/job:localhost/replica:0/task:0/device:CPU:{i}', v.device
assert len(tf.config.list_logical_devices('CPU')) == 3
per_device = max(1, cores // 3)
expected = 1 if per_device == 1 else 3 * per_device
assert tf.config.threading.get_intra_op_parallelism_threads() == expected
assert cluster.Cluster.Create(2, max_devices=3, platform='cpu') == c
try:
  cluster.Cluster.Create(4, platform='cpu')
except ValueError as e:
  print(e)
core = 'core' if cores == 1 else 'cores'
print(c.Describe() == f'3 logical CPU devices on {cores} {core} (no GPU found)')
"""


def _Local(kind, n):
  return [f'/job:localhost/replica:0/task:0/device:{kind}:{i}' for i in range(n)]


def testCreatesLogicalDevicesInAFreshProcess():
  done = subprocess.run(
    [sys.executable, '-c', _FRESH], capture_output=True, text=True, timeout=150, check=False,
    env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)},
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  error, is_described = done.stdout.splitlines()
  assert error.startswith('4 devices needed') and '3 logical CPU devices' in error
  assert 'Cluster.Create(4) before' in error
  assert is_described == 'True'


def testUsesTheDevicesOfAStartedTensorFlow():
  tf.constant(1)  # TensorFlow has started, with the four devices of conftest.
  assert cluster.Cluster.Create(2, platform='cpu').devices == _Local('CPU', 2)
  assert cluster.Cluster.Create(2, 3, platform='cpu').devices == _Local('CPU', 3)
  assert cluster.Cluster.Create(2, 9, platform='cpu').devices == _Local('CPU', 4)
  assert cluster.Cluster.Create(platform='cpu').Describe().startswith('1 logical CPU device on ')
  with pytest.raises(ValueError, match='5 devices needed, .*4 logical CPU devices.*new process'):
    cluster.Cluster.Create(5, platform='cpu')


def testCreateChecksItsArguments():
  with pytest.raises(ValueError, match='num_devices must be at least 1, got 0'):
    cluster.Cluster.Create(0)
  with pytest.raises(ValueError, match='4 devices needed.*at most 2 may be used'):
    cluster.Cluster.Create(4, max_devices=2)
  with pytest.raises(ValueError, match="auto, cpu, gpu, tpu; got 'cuda'"):
    cluster.Cluster.Create(1, platform='cuda')


def testAGridNeedsTheSameNumberOfDevicesForEachReplica():
  devices = [f'/job:worker/task:{r}/device:CPU:{k}' for r in range(2) for k in range(3)]
  for wrong in (([], 1), (devices, 4), (devices, 0)):
    with pytest.raises(ValueError, match='same number of devices'):
      cluster.Cluster(*wrong[:1], num_replicas=wrong[1])


@pytest.fixture
def eight_gpus(monkeypatch):
  """Imitates a machine with 8 GPUs; records the settings."""
  physical = [types.SimpleNamespace(name=f'/physical_device:GPU:{i}') for i in range(8)]
  state = types.SimpleNamespace(grown=[], visible=physical)

  def SetVisible(devices, kind):
    assert kind == 'GPU'
    state.visible = list(devices)

  config = tf.config
  monkeypatch.setattr(config, 'get_visible_devices', lambda k: state.visible if k == 'GPU' else [])
  monkeypatch.setattr(config, 'set_visible_devices', SetVisible)
  list_logical = config.list_logical_devices
  monkeypatch.setattr(
    config,
    'list_logical_devices',
    lambda k: (
      [types.SimpleNamespace(name=f'/device:GPU:{i}') for i in range(len(state.visible))]
      if k == 'GPU'
      else list_logical(k)
    ),
  )
  monkeypatch.setattr(
    config.experimental, 'set_memory_growth', lambda g, on: state.grown.append((g, on))
  )
  monkeypatch.setattr(
    config.experimental, 'get_device_details', lambda g: {'device_name': 'NVIDIA X'}
  )
  state.physical = physical
  return state


def testGpusArePreferredUpToTheMaximum(eight_gpus):
  c = cluster.Cluster.Create(2, max_devices=4)
  assert c.devices == _Local('GPU', 4)
  assert c.Describe() == '4 GPUs (NVIDIA X)'
  assert eight_gpus.grown == [(g, True) for g in eight_gpus.physical[:4]]
  assert eight_gpus.visible == eight_gpus.physical[:4]


def testAllGpusAreUsedUnlessNumbersAreSet(eight_gpus):
  assert len(cluster.Cluster.Create().devices) == 8
  assert len(cluster.Cluster.Create(2).devices) == 2


def testTooFewGpusAreAnError(eight_gpus):
  with pytest.raises(ValueError, match='9 devices needed.* 8 GPUs were found: .*--platform=cpu'):
    cluster.Cluster.Create(9)


def testChosenGpusKeepTheirOrder(eight_gpus):
  c = cluster.Cluster.Create(2, indices=[5, 2])
  assert eight_gpus.visible == [eight_gpus.physical[i] for i in (2, 5)]
  assert eight_gpus.grown == [(g, True) for g in eight_gpus.visible]
  # TensorFlow renumbers the visible GPUs in the machine's order.
  assert c.devices == _Local('GPU', 2)[::-1]
  assert c.Describe() == '2 GPUs (NVIDIA X; 5, 2 of 8)'


def testTheMaximumLimitsTheChosenGpus(eight_gpus):
  c = cluster.Cluster.Create(1, max_devices=1, platform='gpu', indices=[7, 3])
  assert eight_gpus.visible == eight_gpus.physical[7:] and c.devices == _Local('GPU', 1)


@pytest.mark.parametrize(
  'indices, platform, message',
  [
    ([0, 8], 'auto', 'devices 0, 8: there is no GPU 8; 8 GPUs found: 0 to 7.*CUDA_VISIB'),
    ([-1, 1], 'gpu', 'there is no GPU -1'),
    ([3, 1, 3], 'auto', 'GPU 3 is listed twice'),
    ([4], 'auto', '2 devices needed.*at most 1 may be used'),
    ([], 'auto', '2 devices needed.*at most 0 may be used'),
    ([0, 1], 'cpu', r'indices of GPUs .*platform is cpu \(8 GPUs found\).*--num_devices'),
    ([0, 1], 'tpu', 'there is no TPU core 0; 0 TPU cores found'),
  ],
)
def testWrongIndicesAreAnError(eight_gpus, indices, platform, message):
  with pytest.raises(ValueError, match=message):
    cluster.Cluster.Create(2, platform=platform, indices=indices)
  assert eight_gpus.visible == eight_gpus.physical and not eight_gpus.grown


def testCpuPlatformHidesGpus(eight_gpus):
  assert 'GPUs unused)' in cluster.Cluster.Create(1, platform='cpu').Describe()
  assert eight_gpus.visible == [] and not eight_gpus.grown


def testNoGpuIsAnError():
  with pytest.raises(ValueError, match='1 device needed.*0 GPUs were found'):
    cluster.Cluster.Create(1, platform='gpu')


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
