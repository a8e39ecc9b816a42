# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's server of one worker, with the devices of its host."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import tensorflow as tf
from absl import logging

from lingvo_gpipe.distributed import cluster, worker_connection

# TPU cores are a runtime of their own, which such a server does not start.
PLATFORMS = ('auto', 'cpu', 'gpu')

# Else gRPC shares connections between all trainers that come: where a network has swallowed one
# between two workers, and so nobody has closed it, the next trainer would wait on it for ever.
_CHANNEL_OPTIONS = 'grpc.use_local_subchannel_pool=1'


class WorkerServer:
  """Serves devices of this host from its construction on, to whoever reaches the port.

  TensorFlow's context of this process stays untouched: the server has devices of its own. It needs
  to know no other process; a trainer that connects tells it of the others.

  Attributes:
    port: where it listens, on all interfaces.
    description: its devices, such as 'CPU:0, CPU:1'.
  """

  def __init__(
    self,
    task_index: int,
    port: int = 0,
    *,
    platform: str = 'auto',
    num_devices: int | None = None,
    threads_per_device: int | None = None,
    more_facts: Mapping[str, str | int] | None = None,
  ) -> None:
    """Starts the server.

    Args:
      task_index: the number of this worker.
      port: 0: a free one.
      platform: 'auto' (GPUs, else CPU), 'cpu' or 'gpu'.
      num_devices: how many logical CPU devices (default 1); or at most so many GPUs.
      threads_per_device: threads of one operation on a CPU device; default cores // devices, at
        least 1.
      more_facts: what a trainer can ask for beside what is known here.

    Raises:
      OSError: the port is taken.
      ValueError: platform gpu, and there are none.
    """
    gpus = [] if platform == 'cpu' else tf.config.list_physical_devices('GPU')[:num_devices]
    if platform == 'gpu' and not gpus:
      raise ValueError('no GPU was found on this host; --platform=cpu serves logical CPU devices')
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
    config.gpu_options.allow_growth = True
    pool = cluster.PoolSize(threads_per_device or max(1, cluster.Cores() // num_cpus), num_cpus)
    config.intra_op_parallelism_threads = pool
    os.environ.setdefault('TF_GRPC_DEFAULT_OPTIONS', _CHANNEL_OPTIONS)
    try:
      self._server = tf.distribute.Server(definition)
    except tf.errors.OpError as e:
      raise OSError(f'worker {task_index} cannot listen at port {port}: {e.message}') from e
    self.port = int(self._server.target.rpartition(':')[2])
    kind, count = ('GPU', len(gpus)) if gpus else ('CPU', num_cpus)
    self.description = ', '.join(f'{kind}:{i}' for i in range(count))
    _Tell({'tensorflow': tf.__version__, 'intra_op_threads': pool, **(more_facts or {})})


def _Tell(facts: dict[str, str | int]) -> None:
  """Lets a trainer read what this process is; see `worker_connection.FACTS_DESCRIPTOR`."""
  wanted = worker_connection.FACTS_DESCRIPTOR
  try:
    if os.path.exists(f'/proc/self/fd/{wanted}'):
      raise OSError(f'file descriptor {wanted} is in use')
    made = os.memfd_create('lingvo_gpipe_worker')
    os.write(made, json.dumps(facts).encode())
    os.dup2(made, wanted)
    os.close(made)
  except (OSError, AttributeError) as e:
    logging.info('A trainer cannot ask for the version of this worker: %s.', e)
