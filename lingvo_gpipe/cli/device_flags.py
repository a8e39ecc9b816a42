# SPDX-License-Identifier: Apache-2.0
"""The devices that the flags choose: of this process, of local workers, or of a cluster."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

import tensorflow as tf
from absl import flags

from lingvo_gpipe.cli import binary, compilation_cache
from lingvo_gpipe.core import files
from lingvo_gpipe.distributed import cluster, cluster_spec, local_workers, native_output

FLAGS = flags.FLAGS


def OwnDevices(num_devices: int | None, num_replicas: int = 1) -> cluster.Cluster:
  """Returns devices of this process that the flags allow; raises ValueError if there are too few.

  Args:
    num_devices: number of devices of each replica; None for all accelerators.
    num_replicas: number of replicas.
  """
  indices = None if FLAGS.devices is None else [int(text) for text in FLAGS.devices]
  with StartingTensorFlow():
    return cluster.Cluster.Create(
      num_devices,
      FLAGS.num_devices,
      FLAGS.platform,
      num_replicas=num_replicas,
      indices=indices,
      logical_devices_per_gpu=FLAGS.logical_devices_per_gpu,
      gpu_memory=FLAGS.gpu_memory,
    )


def OneDevice() -> cluster.Cluster:
  """Returns one device, for programs that inspect a model without running its stages."""
  with StartingTensorFlow():
    return cluster.Cluster.Create(1, 1, FLAGS.platform, gpu_memory=FLAGS.gpu_memory)


def Devices(num_devices: int) -> cluster.Cluster:
  """Returns the devices that the flags name, of workers or of this process; call it only once.

  Args:
    num_devices: number of devices of each of the --num_replicas.

  Raises:
    UsageError, ValueError, OSError: there are too few devices, or the workers do not answer.
  """
  if FLAGS.local_workers:
    return WorkersDevices(LocalWorkers(num_devices).spec, num_devices)
  spec = Workers()
  if spec is None:
    return OwnDevices(num_devices, FLAGS.num_replicas)
  return WorkersDevices(spec, num_devices)


def LocalWorkers(num_devices: int) -> local_workers.LocalWorkers:
  """Starts the workers of --local_workers, with at least this many devices for each replica."""
  if FLAGS.cluster:
    raise binary.UsageError(
      '--cluster names running workers, --local_workers starts workers: give only one of them'
    )
  if FLAGS.platform not in ('auto', 'cpu'):
    raise binary.UsageError(
      '--local_workers serve CPU devices only: without them, one process uses all GPUs of a host'
    )
  _CheckDevicesOfWorkers()
  per_worker = -(-num_devices * FLAGS.num_replicas // FLAGS.local_workers)
  threads = max(1, cluster.Cores() // (per_worker * FLAGS.local_workers))
  options = [f'--num_devices={per_worker}', f'--threads_per_device={threads}', '--platform=cpu']
  if FLAGS.xla_cache:
    options.append(f'--xla_cache={os.path.abspath(os.path.expanduser(FLAGS.xla_cache))}')
  return local_workers.LocalWorkers(FLAGS.local_workers, options)


def Workers() -> cluster_spec.ClusterSpec | None:
  """Returns the workers of --cluster or TF_CONFIG; None if this process computes itself."""
  spec = ClusterSpec()
  if spec is None or spec.task_type == 'evaluator':
    return None
  if spec.task_type == 'worker':
    raise binary.UsageError(
      f'TF_CONFIG declares this process worker {spec.task_index}: start the program `worker` here'
    )
  _CheckDevicesOfWorkers()
  return spec


def _CheckDevicesOfWorkers() -> None:
  """Raises UsageError for flags that choose devices of this process although workers compute."""
  if FLAGS.devices is not None:
    raise binary.UsageError(
      '--devices chooses GPUs of this process, but workers compute: set CUDA_VISIBLE_DEVICES for '
      'each worker instead'
    )
  if FLAGS.num_devices is not None:
    raise binary.UsageError(
      '--num_devices limits the devices of this process, but workers compute: leave it out. '
      '`worker --num_devices` sets the number of a worker; local workers have as many as needed'
    )
  for name in ('logical_devices_per_gpu', 'gpu_memory', 'deterministic'):
    if FLAGS[name].value != FLAGS[name].default:
      raise binary.UsageError(
        f'--{name} is for GPUs of this process, but workers compute: give it to each `worker`'
      )


def WorkersDevices(
  spec: cluster_spec.ClusterSpec,
  num_devices: int,
  timeout_seconds: float = 60.0,
  *,
  num_replicas: int | None = None,
  answers: Mapping[str, bytes] | None = None,
) -> cluster.Cluster:
  """Connects to workers, and returns devices of them.

  Args:
    spec: the workers.
    num_devices: number of devices of each replica.
    timeout_seconds: time within which the workers must answer.
    num_replicas: number of replicas; None for --num_replicas.
    answers: answers of the workers, if they are known (see `cluster.Cluster.Connect`).
  """
  with StartingTensorFlow():
    return cluster.Cluster.Connect(
      spec,
      num_devices,
      num_replicas or FLAGS.num_replicas,
      platform=FLAGS.platform,
      timeout_seconds=timeout_seconds,
      answers=answers,
    )


def ClusterSpec() -> cluster_spec.ClusterSpec | None:
  """Returns the workers of --cluster or TF_CONFIG; None if neither is set."""
  if FLAGS.cluster:
    text = files.ReadText(os.path.expanduser(FLAGS.cluster), '--cluster')
    return cluster_spec.FromText(text, FLAGS.cluster)
  return cluster_spec.FromEnvironment(os.environ)


@contextlib.contextmanager
def StartingTensorFlow() -> Iterator[None]:
  """Enters a context in which TensorFlow searches for devices for the first time."""
  if FLAGS.xla_cache:
    compilation_cache.Use(FLAGS.xla_cache)
  if FLAGS.deterministic:
    tf.config.experimental.enable_op_determinism()
  with native_output.DropOutputWithoutGpu():
    yield
