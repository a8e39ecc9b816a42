# SPDX-License-Identifier: Apache-2.0
"""GPUs that XLA cannot compile for, their memory, and workers with GPUs; on stand-ins."""

import json
import logging
import os
import subprocess
import sys
import types

import keras
import pytest
import tensorflow as tf

from lingvo_gpipe import PipelinedModel
from lingvo_gpipe.distributed import accelerators, worker_server
from lingvo_gpipe.layers import linear
from lingvo_gpipe.pipeline import pipelining_layer
from tests.naming import Naming
from tests.toys import fake_gpus, stacks

_GPU = '/job:localhost/replica:0/task:0/device:GPU:0'
_CPU = '/job:localhost/replica:0/task:0/device:CPU:0'
_WORKER = '/job:worker/replica:0/task:1/device:GPU:0'


@pytest.fixture
def new_gpu(monkeypatch):
  return fake_gpus.Install(monkeypatch, 1, capability=(12, 0), name='NVIDIA Y')


def testXlaIsOffOnAGpuThatIsTooNew(new_gpu, caplog):
  with caplog.at_level(logging.WARNING):
    assert not accelerators.UsesXla(None, [_CPU, _GPU])
  (record,) = caplog.records
  assert 'NVIDIA Y' in record.getMessage() and '12.0' in record.getMessage()
  assert not accelerators.UsesXla(None, [''])  # TensorFlow chooses the GPU.
  assert accelerators.UsesXla(None, [_CPU]) and accelerators.UsesXla(True, [_CPU])
  assert not accelerators.UsesXla(False, [_GPU])
  with pytest.raises(ValueError, match=Naming('xla=True', 'NVIDIA Y', '12.0')):
    accelerators.UsesXla(True, [_GPU])


def testXlaIsOnOnOlderGpus(monkeypatch):
  fake_gpus.Install(monkeypatch, 2, capability=(9, 0))
  assert accelerators.UsesXla(None, [_GPU]) and accelerators.UsesXla(True, [_GPU])


def testXlaIsOffOnWorkersThatReportAProblem(monkeypatch):
  monkeypatch.setitem(accelerators.worker_problems, 1, 'NVIDIA Z is too new')
  assert not accelerators.UsesXla(None, [_WORKER])
  assert accelerators.UsesXla(None, [_WORKER.replace('task:1', 'task:0')])
  with pytest.raises(ValueError, match='NVIDIA Z'):
    accelerators.UsesXla(True, [_WORKER])


@pytest.mark.parametrize('xla', [None, True, False])
def testPipelinesAreCompiledOnlyWhereXlaWorks(new_gpu, monkeypatch, xla):
  # The stages run on CPUs, whose names stand for GPUs.
  monkeypatch.setattr(accelerators, 'XlaProblem', lambda gpus: 'NVIDIA Y')
  uses_xla = accelerators.UsesXla
  monkeypatch.setattr(
    accelerators, 'UsesXla', lambda xla, devices: uses_xla(xla, [_GPU for _ in devices])
  )
  layer = linear.ProjectionLayer.Params().Set(input_dim=4, output_dim=4)
  p = pipelining_layer.PipeliningLayer.Params().Set(name='s', sub=[layer] * 2, num_stages=2)
  devices = stacks.Devices()[:2]

  def Run():
    stack = p.Set(xla=xla).Instantiate()
    stack.Place(devices, tf.TensorSpec([4, 4]))
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(4)])
    return stack.engine.xla, PipelinedModel(model, 1, xla=xla, devices=devices[:1])

  if xla:
    with pytest.raises(ValueError, match='NVIDIA Y'):
      Run()
  else:
    assert Run()[0] is False


def testCudasAllocatorIsChosenByAnArgument(new_gpu):
  accelerators.SetMemory('cuda_malloc_async')
  assert os.environ['TF_GPU_ALLOCATOR'] == 'cuda_malloc_async'
  with pytest.raises(ValueError, match=Naming('cuda_malloc_async', "'all'")):
    accelerators.SetMemory('all')


def testTheMemoryOfVisibleGpus(monkeypatch):
  gpus = fake_gpus.Install(monkeypatch, 2)
  monkeypatch.setenv('CUDA_VISIBLE_DEVICES', 'GPU-c,1')
  gpus.Smi('GPU-a, NVIDIA X, 10, 1\nGPU-b, NVIDIA X, 20, 2\nGPU-c, NVIDIA X, 30, [N/A]\n')
  assert [accelerators.Memory(g) for g in gpus.physical] == [None, (20, 2)]
  with pytest.raises(ValueError, match=Naming('GPU:0', 'nvidia-smi')):
    accelerators.Split(gpus.physical[:1], 2)
  with pytest.raises(ValueError, match=Naming('GPU:1', '2 MiB')):
    accelerators.Split(gpus.physical[1:], 2)
  gpus.Smi('GPU-a, NVIDIA X, 10, 1\nGPU-b, NVIDIA Z, 20, 2\n')  # Numbered in another order.
  assert accelerators.Memory(gpus.physical[1]) is None


def testAWorkerSplitsItsGpusAndReportsThatXlaIsOff(new_gpu, monkeypatch):
  new_gpu.Smi('GPU-a, NVIDIA Y, 16384, 16384\n')
  definitions, facts = [], []
  server = types.SimpleNamespace(target='grpc://localhost:7')
  monkeypatch.setattr(tf.distribute, 'Server', lambda x: definitions.append(x) or server)
  monkeypatch.setattr(worker_server, '_Publish', facts.append)
  worker = worker_server.WorkerServer(0, logical_devices_per_gpu=3, gpu_memory='cuda_malloc_async')
  assert worker.description == 'GPU:0, GPU:1, GPU:2'
  options = definitions[0].default_session_config.gpu_options
  (split,) = options.experimental.virtual_devices
  assert split.memory_limit_mb == [5120] * 3
  assert os.environ['TF_GPU_ALLOCATOR'] == 'cuda_malloc_async'
  assert os.environ['TF_FORCE_GPU_ALLOW_GROWTH'] == 'true'
  assert 'NVIDIA Y' in facts[0][accelerators.XLA_FACT]
  json.dumps(facts[0])


def testAWorkerServesNoTpuAndSplitsNoCpu():
  with pytest.raises(ValueError, match=Naming('--platform=tpu', 'gpu')):
    worker_server.WorkerServer(0, platform='tpu')
  with pytest.raises(ValueError, match='--logical_devices_per_gpu'):
    worker_server.WorkerServer(0, platform='cpu', logical_devices_per_gpu=2)


def testWithoutNvidiaSmiNothingIsKnown(monkeypatch):
  gpus = fake_gpus.Install(monkeypatch, 1)

  def Run(*args, **options):
    raise FileNotFoundError('nvidia-smi')

  monkeypatch.setattr(subprocess, 'run', Run)
  accelerators._Cards.cache_clear()
  assert accelerators.Memory(gpus.physical[0]) is None
  assert accelerators.Notes(gpus.physical) == ['NVIDIA X']


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
