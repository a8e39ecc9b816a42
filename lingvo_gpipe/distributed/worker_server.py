# SPDX-License-Identifier: Apache-2.0
"""Runs TensorFlow's server in a worker, with the devices of its host."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import tensorflow as tf
from absl import logging

from lingvo_gpipe.distributed import accelerators, cluster, worker_connection

# No TPU: TensorFlow's server does not start the TPU runtime.
PLATFORMS = ('auto', 'cpu', 'gpu')

# Without this option gRPC shares connections between workers across trainers. If the network drops
# a connection without closing it, the next trainer would wait on it forever.
_CHANNEL_OPTIONS = 'grpc.use_local_subchannel_pool=1'


class WorkerServer:
  """Serves devices of this host, from its construction on, to everybody who reaches the port.

  `local_port.CloseToOthers` keeps other machines away from it.

  Leaves TensorFlow's context of this process untouched, because the server has its own devices. The
  server learns about the other processes from the trainer that connects to it.

  Attributes:
    port: port at which the server listens on all interfaces.
    description: the served devices, such as 'CPU:0, CPU:1'.
  """

  def __init__(
    self,
    task_index: int,
    port: int = 0,
    *,
    platform: str = 'auto',
    num_devices: int | None = None,
    threads_per_device: int | None = None,
    logical_devices_per_gpu: int | None = None,
    gpu_memory: str = 'growth',
    more_facts: Mapping[str, str | int] | None = None,
  ) -> None:
    """Starts the server.

    Args:
      task_index: index of this worker in the cluster.
      port: port to listen at, or 0 for a free one.
      platform: 'auto' (GPUs if there are any, otherwise CPU), 'cpu' or 'gpu'.
      num_devices: number of logical CPU devices (default 1), or the maximum number of GPUs.
      threads_per_device: threads of one operation on a CPU device; default cores // devices, at
        least 1.
      logical_devices_per_gpu: splits each GPU into this many devices, with equal shares of its free
        memory; None leaves GPUs as they are.
      gpu_memory: allocation of memory of GPUs, one of `accelerators.MEMORY`.
      more_facts: further facts about this worker that trainers can read.

    Raises:
      OSError: the port is in use.
      ValueError: platform is 'tpu', or there is no GPU to serve or to split, or the memory of a GPU
        that is to be split is unknown.
    """
    if platform not in PLATFORMS:
      raise ValueError(f'a worker serves one of {", ".join(PLATFORMS)}; got --platform={platform}')
    gpus = [] if platform == 'cpu' else tf.config.list_physical_devices('GPU')[:num_devices]
    if platform == 'gpu' and not gpus:
      raise ValueError('no GPU was found on this host; --platform=cpu serves logical CPU devices')
    if logical_devices_per_gpu and not gpus:
      raise ValueError('--logical_devices_per_gpu splits GPUs, but this worker has none')
    num_cpus = 1 if gpus else num_devices or 1
    definition = tf.train.ServerDef(
      cluster=tf.train.ClusterSpec({'worker': {task_index: f'localhost:{port}'}}).as_cluster_def(),
      job_name='worker',
      task_index=task_index,
      protocol='grpc',
    )
    config = definition.default_session_config
    config.device_count['CPU'] = num_cpus
    config.device_count['GPU'] = len(gpus)
    if logical_devices_per_gpu:
      for gpu in gpus:
        limit = accelerators.LogicalMemory(gpu, logical_devices_per_gpu)
        config.gpu_options.experimental.virtual_devices.add(
          memory_limit_mb=[limit] * logical_devices_per_gpu
        )
    accelerators.SetMemory(gpu_memory)
    pool = cluster.PoolSize(threads_per_device or max(1, cluster.Cores() // num_cpus), num_cpus)
    config.intra_op_parallelism_threads = pool
    os.environ.setdefault('TF_GRPC_DEFAULT_OPTIONS', _CHANNEL_OPTIONS)
    try:
      self._server = tf.distribute.Server(definition)
    except tf.errors.OpError as e:
      raise OSError(f'worker {task_index} cannot listen at port {port}: {e.message}') from e
    self.port = int(self._server.target.rpartition(':')[2])
    num_gpus = len(gpus) * (logical_devices_per_gpu or 1)
    kind, count = ('GPU', num_gpus) if gpus else ('CPU', num_cpus)
    self.description = ', '.join(f'{kind}:{i}' for i in range(count))
    facts = {'tensorflow': tf.__version__, 'intra_op_threads': pool, **(more_facts or {})}
    if problem := accelerators.XlaProblem(gpus):
      facts[accelerators.XLA_FACT] = problem
    _Publish(facts)


def _Publish(facts: dict[str, str | int]) -> None:
  """Lets trainers read facts about this process; see `worker_connection.FACTS_DESCRIPTOR`."""
  published = worker_connection.FACTS_DESCRIPTOR
  try:
    if os.path.exists(f'/proc/self/fd/{published}'):
      raise OSError(f'file descriptor {published} is in use')
    descriptor = os.memfd_create('lingvo_gpipe_worker')
    os.write(descriptor, json.dumps(facts).encode())
    os.dup2(descriptor, published)
    os.close(descriptor)
  except (OSError, AttributeError) as e:
    logging.info('Trainers cannot read the version of this worker: %s.', e)
