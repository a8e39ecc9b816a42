# SPDX-License-Identifier: Apache-2.0
"""Choosing devices of a process; a fork provides a fresh TensorFlow."""

import os
import socket
import sys

import pytest
import tensorflow as tf

from lingvo_gpipe.distributed import accelerators, cluster
from tests import naming, processes
from tests.toys import fake_gpus


def _Local(kind, n):
  return [f'/job:localhost/replica:0/task:0/device:{kind}:{i}' for i in range(n)]


def testCreatesLogicalDevicesInAFreshProcess(forks):
  done = processes.Succeeded(forks.Run(processes.Program('fresh_devices')))
  error, is_described = done.stdout.splitlines()
  assert naming.Names(error, '4 devices', '3 logical CPU devices', 'Cluster.Create(4)')
  assert is_described == 'True'


def testUsesTheDevicesOfAStartedTensorFlow():
  tf.constant(1)  # TensorFlow has started, with the four devices of conftest.
  assert cluster.Cluster.Create(2, platform='cpu').devices == _Local('CPU', 2)
  assert cluster.Cluster.Create(2, 3, platform='cpu').devices == _Local('CPU', 3)
  assert cluster.Cluster.Create(2, 9, platform='cpu').devices == _Local('CPU', 4)
  assert naming.Names(cluster.Cluster.Create(platform='cpu').Describe(), '1 logical CPU device')
  with pytest.raises(
    ValueError, match=naming.Naming('5 devices', '4 logical CPU devices', 'Cluster.Create(5)')
  ):
    cluster.Cluster.Create(5, platform='cpu')


def testCreateChecksItsArguments():
  with pytest.raises(ValueError, match=naming.Naming('num_devices', 1, 0)):
    cluster.Cluster.Create(0)
  with pytest.raises(ValueError, match=naming.Naming('4 devices', 'at most 2')):
    cluster.Cluster.Create(4, max_devices=2)
  with pytest.raises(ValueError, match=naming.Naming('auto, cpu, gpu, tpu', "'cuda'")):
    cluster.Cluster.Create(1, platform='cuda')


def testAGridNeedsTheSameNumberOfDevicesForEachReplica():
  devices = [f'/job:worker/task:{r}/device:CPU:{k}' for r in range(2) for k in range(3)]
  for available, num_replicas in (([], 1), (devices, 4), (devices, 0)):
    names = f'{num_replicas} replicas', f'{len(available)} devices'
    with pytest.raises(ValueError, match=naming.Naming(*names)):
      cluster.Cluster(available, num_replicas=num_replicas)


@pytest.fixture
def eight_gpus(monkeypatch):
  """Imitates a machine with 8 GPUs; records the settings."""
  return fake_gpus.Install(monkeypatch, 8)


def testGpusArePreferredUpToTheMaximum(eight_gpus):
  c = cluster.Cluster.Create(2, max_devices=4)
  assert c.devices == _Local('GPU', 4)
  assert c.Describe() == '4 GPUs (NVIDIA X)'
  assert os.environ['TF_FORCE_GPU_ALLOW_GROWTH'] == 'true'
  assert eight_gpus.visible == eight_gpus.physical[:4]


def testAllGpusAreUsedUnlessNumbersAreSet(eight_gpus):
  assert len(cluster.Cluster.Create().devices) == 8
  assert len(cluster.Cluster.Create(2).devices) == 2


def testTooFewGpusAreAnError(eight_gpus):
  with pytest.raises(ValueError, match=naming.Naming('9 devices', '8 GPUs', '--platform=cpu')):
    cluster.Cluster.Create(9)


def testChosenGpusKeepTheirOrder(eight_gpus):
  c = cluster.Cluster.Create(2, indices=[5, 2])
  assert eight_gpus.visible == [eight_gpus.physical[i] for i in (2, 5)]
  # TensorFlow renumbers the visible GPUs in the machine's order.
  assert c.devices == _Local('GPU', 2)[::-1]
  assert c.Describe() == '2 GPUs (NVIDIA X; 5, 2 of 8)'


def testTheMaximumLimitsTheChosenGpus(eight_gpus):
  c = cluster.Cluster.Create(1, max_devices=1, platform='gpu', indices=[7, 3])
  assert eight_gpus.visible == eight_gpus.physical[7:] and c.devices == _Local('GPU', 1)


@pytest.mark.parametrize(
  'indices, platform, names',
  [
    ([0, 8], 'auto', ('devices 0, 8', 'GPU 8', '8 GPUs', '0 to 7', 'CUDA_VISIBLE_DEVICES')),
    ([-1, 1], 'gpu', ('devices -1, 1', 'GPU -1')),
    ([3, 1, 3], 'auto', ('devices 3, 1, 3', 'GPU 3', 'twice')),
    ([4], 'auto', ('2 devices', 'at most 1')),
    ([], 'auto', ('2 devices', 'at most 0')),
    ([0, 1], 'cpu', ('devices 0, 1', 'platform is cpu', '8 GPUs', '--num_devices')),
  ],
)
def testWrongIndicesAreAnError(eight_gpus, indices, platform, names):
  with pytest.raises(ValueError, match=naming.Naming(*names)):
    cluster.Cluster.Create(2, platform=platform, indices=indices)
  assert eight_gpus.visible == eight_gpus.physical


def testCpuPlatformHidesGpus(eight_gpus):
  assert naming.Names(cluster.Cluster.Create(1, platform='cpu').Describe(), '8 GPUs', 'unused')
  assert eight_gpus.visible == []


def testASplitGpuCountsAsItsLogicalDevices(eight_gpus):
  for i, n in ((0, 2), (1, 1), (2, 3)):
    logical = [tf.config.LogicalDeviceConfiguration(memory_limit=100)] * n
    tf.config.set_logical_device_configuration(eight_gpus.physical[i], logical)
  with pytest.raises(ValueError, match='virtual'):  # It would have ended Cluster.Create.
    tf.config.experimental.set_memory_growth(eight_gpus.physical[0], True)
  c = cluster.Cluster.Create(2)
  assert c.devices == _Local('GPU', 2) and eight_gpus.visible == eight_gpus.physical[:1]
  eight_gpus.visible = eight_gpus.physical
  c = cluster.Cluster.Create(4, indices=[2, 0])
  assert eight_gpus.visible == [eight_gpus.physical[i] for i in (0, 2)]
  assert c.devices == [_Local('GPU', 5)[i] for i in (2, 3, 4, 0, 1)]
  assert naming.Names(c.Describe(), 'logical', '2 cards')
  assert cluster.Cluster.Create().devices == _Local('GPU', 5)


def testEachGpuIsSplit(eight_gpus):
  eight_gpus.Smi('GPU-a, NVIDIA X, 16384, 9216\n' * 8)
  c = cluster.Cluster.Create(4, logical_devices_per_gpu=2)
  assert c.devices == _Local('GPU', 4) and eight_gpus.visible == eight_gpus.physical[:2]
  limits = [[x.memory_limit for x in eight_gpus.logical[g]] for g in eight_gpus.visible]
  assert limits == [[4096, 4096]] * 2  # Shares of the free memory, after 1 GiB for CUDA.
  assert naming.Names(c.Describe(), 'GPU 1', '9.0 of 16.0 GiB')
  assert cluster.Cluster.Create(4, logical_devices_per_gpu=2).devices == c.devices
  with pytest.raises(ValueError, match=naming.Naming('logical_devices_per_gpu', 1, 0)):
    cluster.Cluster.Create(4, logical_devices_per_gpu=0)
  with pytest.raises(ValueError, match=naming.Naming('logical_devices_per_gpu', 'platform is cpu')):
    cluster.Cluster.Create(4, platform='cpu', logical_devices_per_gpu=2)


def testTheTpuIsStartedBeforeItsCoresAreListed(monkeypatch):
  calls = []
  server = socket.create_server(('127.0.0.1', 0))
  monkeypatch.setenv('TPU_NAME', f'grpc://127.0.0.1:{server.getsockname()[1]}')
  for owner, name in (
    (tf.config, 'experimental_connect_to_cluster'),
    (tf.tpu.experimental, 'initialize_tpu_system'),
  ):

    def Call(resolver, name=name):
      assert resolver.master().endswith(os.environ['TPU_NAME'].removeprefix('grpc://'))
      calls.append(name)

    monkeypatch.setattr(owner, name, Call)
  names = [f'/job:worker/replica:0/task:0/device:TPU:{i}' for i in range(8)]
  cores = [tf.config.LogicalDevice(name, 'TPU') for name in names]
  monkeypatch.setattr(tf.config, 'list_logical_devices', lambda kind: cores if calls[1:] else [])
  accelerators.StartTpu.cache_clear()
  assert cluster.Cluster.Create(2, platform='tpu').devices == names[:2]
  assert calls == ['experimental_connect_to_cluster', 'initialize_tpu_system']
  c = cluster.Cluster.Create(2, platform='tpu', indices=[5, 1])
  assert c.devices == [names[5], names[1]] and c.Describe() == '2 TPU cores'
  assert len(calls) == 2  # A second start would clear the memory of the cores.
  with pytest.raises(ValueError, match=naming.Naming('TPU core 8', '8 TPU cores', '0 to 7')):
    cluster.Cluster.Create(1, platform='tpu', indices=[8])
  accelerators.StartTpu.cache_clear()
  server.close()


def testATpuThatDoesNotAnswerIsAnError(monkeypatch):
  """TensorFlow would wait for it without end."""
  with socket.create_server(('127.0.0.1', 0)) as server:
    port = server.getsockname()[1]
  monkeypatch.setenv('TPU_NAME', f'grpc://127.0.0.1:{port}')
  with pytest.raises(
    ValueError, match=naming.Naming('platform tpu', f"'grpc://127.0.0.1:{port}'", 'TPU_NAME')
  ):
    cluster.Cluster.Create(1, platform='tpu')


@pytest.mark.parametrize(
  'message',
  [
    'no {tpu}',
    'Graph execution error:\n\nDetected at node host/_1 defined at (most recent call last):\n'
    '<stack traces unavailable>\nno {tpu} \n\t [[{{{{node host/_1}}}}]] [Op:__inference_init_4]',
  ],
)
def testNoTpuIsAnError(monkeypatch, message):
  monkeypatch.setenv('TPU_NAME', 'nowhere')

  def Refuse(tpu):
    raise tf.errors.InternalError(None, None, message.format(tpu=tpu))

  monkeypatch.setattr(tf.distribute.cluster_resolver, 'TPUClusterResolver', Refuse)
  with pytest.raises(
    ValueError, match=naming.Naming('platform tpu', "'nowhere'", 'no nowhere', 'TPU_NAME')
  ):
    cluster.Cluster.Create(1, platform='tpu')


def testNoGpuIsAnError():
  with pytest.raises(ValueError, match=naming.Naming('1 device', '0 GPUs')):
    cluster.Cluster.Create(1, platform='gpu')


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
