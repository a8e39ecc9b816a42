# SPDX-License-Identifier: Apache-2.0
"""Batches and weights that exceed the memory of this machine are refused; others are not."""

import os
import sys

import pytest
import tensorflow as tf

from lingvo_gpipe.core import weight_params
from lingvo_gpipe.distributed import host_memory
from tests import naming

_CPU, _GPU, _WORKER = '/device:CPU:1', '/GPU:0', '/job:worker/task:0/device:CPU:0'
_SPECS = {
  'net.w': (weight_params.WeightParams([4, 4], dtype=tf.float32), True),
  'net.b': (weight_params.WeightParams([4], dtype=tf.bfloat16), False),
}
_BATCH = {'x': tf.TensorSpec([8, 2], tf.float32), 'n': tf.TensorSpec([], tf.int64)}


@pytest.fixture
def set_memory(monkeypatch):
  def Set(num_bytes):
    sizes = {'SC_PHYS_PAGES': num_bytes, 'SC_PAGE_SIZE': 1}
    monkeypatch.setattr(os, 'sysconf', sizes.__getitem__)

  return Set


def testWeightsOnCpusMustFit(set_memory):
  set_memory(64 + 8)
  host_memory.CheckWeights(_SPECS, [_CPU, _CPU])
  set_memory(64 + 8 - 1)
  host_memory.CheckWeights({}, [_CPU])
  for devices in ([_CPU, _GPU], [_GPU], [_CPU, _WORKER]):  # They have other memory.
    host_memory.CheckWeights(_SPECS, devices)
  with pytest.raises(ValueError, match=naming.Naming('net.w', '72B', '71B', 'memory')):
    host_memory.CheckWeights(_SPECS, [_CPU, _CPU])


def testTheLimitOfAContainerCounts(set_memory, monkeypatch, tmp_path):
  set_memory(1000)
  limit = tmp_path / 'memory.max'
  monkeypatch.setattr(host_memory, '_CONTAINER_LIMIT', limit)
  for text in ('max\n', '72\n'):
    limit.write_text(text)
    host_memory.CheckWeights(_SPECS, [_CPU])
  limit.write_text('71\n')
  with pytest.raises(ValueError, match=naming.Naming('71B')):
    host_memory.CheckWeights(_SPECS, [_CPU])


def testBatchesMustFit(set_memory):
  set_memory(64 + 8)
  host_memory.CheckBatch('the input', _BATCH, [_CPU])
  set_memory(64 + 8 - 1)
  host_memory.CheckBatch('the input', _BATCH, [_CPU, _WORKER])  # Workers may read it.
  for devices in ([_CPU], [_GPU]):
    with pytest.raises(ValueError, match=naming.Naming('the input', 'memory')):
      host_memory.CheckBatch('the input', _BATCH, devices)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
