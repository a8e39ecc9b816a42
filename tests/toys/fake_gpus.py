# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the functions of tf.config that find and set up GPUs."""

import subprocess
import types

import tensorflow as tf

from lingvo_gpipe.distributed import accelerators


def Install(monkeypatch, count, capability=(8, 0), name='NVIDIA X'):
  """Replaces the functions; returns the state: `physical`, `visible`, `logical`, `Smi`.

  As in TensorFlow, logical devices of a GPU exclude memory growth and need a limit.
  """
  physical = [tf.config.PhysicalDevice(f'/physical_device:GPU:{i}', 'GPU') for i in range(count)]
  state = types.SimpleNamespace(physical=physical, visible=physical, logical={})
  config, list_logical = tf.config, tf.config.list_logical_devices
  list_physical, get_logical = config.list_physical_devices, config.get_logical_device_configuration

  def Get(kind=None):
    return list(state.visible) if kind == 'GPU' else []

  def ListPhysical(kind=None):
    return list(physical) if kind == 'GPU' else list_physical(kind)

  def GetLogical(device):
    return state.logical.get(device) if device.device_type == 'GPU' else get_logical(device)

  def SetVisible(devices, kind):
    assert kind == 'GPU'
    state.visible = list(devices)

  def SetGrowth(gpu, enable):
    if gpu in state.logical:
      raise ValueError('Cannot set memory growth on device when virtual devices configured')

  def SetLogical(gpu, logical):
    assert all(x.memory_limit for x in logical)
    state.logical[gpu] = logical

  def ListLogical(kind=None):
    n = sum(len(state.logical.get(g, [g])) for g in state.visible)
    gpus = [tf.config.LogicalDevice(f'/device:GPU:{i}', 'GPU') for i in range(n)]
    return gpus if kind == 'GPU' else list_logical(kind)

  def Smi(text):
    def Run(command, **options):
      assert command[0] == 'nvidia-smi'
      return subprocess.CompletedProcess(command, 0, text, '')

    monkeypatch.setattr(subprocess, 'run', Run)
    accelerators._Cards.cache_clear()

  state.Smi = Smi
  Smi('')
  details = {'device_name': name, 'compute_capability': capability}
  for owner, attribute, function in (
    (config, 'get_visible_devices', Get),
    (config, 'list_physical_devices', ListPhysical),
    (config, 'set_visible_devices', SetVisible),
    (config, 'list_logical_devices', ListLogical),
    (config, 'get_logical_device_configuration', GetLogical),
    (config, 'set_logical_device_configuration', SetLogical),
    (config.experimental, 'set_memory_growth', SetGrowth),
    (config.experimental, 'get_device_details', lambda gpu: details),
  ):
    monkeypatch.setattr(owner, attribute, function)
  for variable in ('TF_FORCE_GPU_ALLOW_GROWTH', 'TF_GPU_ALLOCATOR'):
    monkeypatch.setenv(variable, 'x')  # So that monkeypatch removes what is set meanwhile.
    monkeypatch.delenv(variable)
  monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
  return state
