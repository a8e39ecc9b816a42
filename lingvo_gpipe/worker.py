# SPDX-License-Identifier: Apache-2.0
"""The worker: `worker --cluster=hosts.json --task_index=0 --local_only` serves its devices.

A trainer with the same --cluster computes on them. The worker runs until it is terminated. With
--local_only other machines reach it through a tunnel; see docs/network.md.
"""

from __future__ import annotations

from lingvo_gpipe.cli import binary  # First: it keeps TensorFlow quiet, and sees Ctrl-C.

# isort: split
import os
import signal
import stat
import sys
import threading

from absl import flags, logging

from lingvo_gpipe.cli import device_flags, subjects
from lingvo_gpipe.distributed import (
  cluster,
  local_port,
  local_workers,
  worker_restart,
  worker_server,
)

FLAGS = flags.FLAGS


def _Serve() -> int:
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_DFL)  # A worker has nothing to save.
  if FLAGS.local:
    if not stat.S_ISFIFO(os.fstat(0).st_mode):
      raise binary.UsageError(
        '--local is for programs that start workers and end them through a pipe. To start a worker '
        'by hand, give --cluster, --task_index and --local_only (docs/network.md)'
      )
    if FLAGS.starter:
      local_workers.EndWithParent(FLAGS.starter)
    threading.Thread(target=_EndWithStarter, name='starter', daemon=True).start()
    index, port = FLAGS.task_index or 0, 0
  else:
    index, port = _IndexAndPort()
  with device_flags.StartingTensorFlow():
    server = worker_server.WorkerServer(
      index,
      port,
      platform=FLAGS.platform,
      num_devices=FLAGS.num_devices,
      threads_per_device=FLAGS.threads_per_device,
      logical_devices_per_gpu=FLAGS.logical_devices_per_gpu,
      gpu_memory=FLAGS.gpu_memory,
      more_facts={} if FLAGS.local else worker_restart.RestartOnRequest(),
    )
  place = 'all interfaces of this machine'
  if FLAGS.local or FLAGS.local_only:
    try:
      local_port.CloseToOthers(server.port)
      place = 'the loopback interface of this machine'
    except OSError as e:
      if FLAGS.local_only:
        raise binary.UsageError(f'--local_only is not possible here: {e}') from e
      logging.warning('Other machines are not kept away from this worker: %s.', e)
  logging.log(
    logging.INFO if FLAGS.local else logging.WARNING,
    'worker %d serves %s at port %d of %s, without authentication: anyone who reaches this port '
    'has the rights of this process',
    index,
    server.description,
    server.port,
    place,
  )
  if FLAGS.local:
    print(server.port, flush=True)
    os.dup2(2, 1)  # The starter reads only the port.
  else:
    print(f'worker {index} serves {server.description} at port {port}', flush=True)
  while True:
    signal.pause()


def _IndexAndPort() -> tuple[int, int]:
  """Returns the index in the cluster, and the port, of a worker that a user starts."""
  if FLAGS.trusted_network == FLAGS.local_only:
    raise binary.UsageError(
      'give one of --local_only, which keeps other machines away unless they come through a '
      "tunnel, and --trusted_network, if only trusted hosts can reach this one: TensorFlow's "
      'server asks nobody for a password, and whoever reaches its port can read and write files '
      'as this user (docs/network.md)'
    )
  spec = device_flags.ClusterSpec()
  if spec is None:
    raise binary.UsageError('--cluster is needed: a file of addresses (or TF_CONFIG)')
  if FLAGS.task_index is None and spec.task_type != 'worker':
    raise binary.UsageError('--task_index is needed: the index of this worker in the cluster')
  index = spec.task_index if FLAGS.task_index is None else FLAGS.task_index
  address = spec.Address(index)
  if FLAGS.local_only and not local_port.IsLocal(address):
    raise binary.UsageError(
      f'worker {index} is {address} for the others, and --local_only lets nobody reach it there: '
      'name it localhost in the file of addresses, and let a tunnel end there, or give '
      '--trusted_network in place of --local_only (docs/network.md)'
    )
  return index, int(address.rpartition(':')[2])


def _EndWithStarter() -> None:
  """Ends this process with its starter, when the other end of its standard input is closed."""
  while os.read(sys.stdin.fileno(), 1024):
    pass
  os._exit(0)


def Run() -> None:
  """Entry point of the installed program."""
  binary.DefineDeviceFlags()
  flags.DEFINE_integer('task_index', None, 'Index of this worker in the cluster.', lower_bound=0)
  flags.DEFINE_bool(
    'local_only', False, 'Keeps other machines away from the port of this worker; needs Linux.'
  )
  flags.DEFINE_bool(
    'trusted_network', False, 'Confirms that only trusted hosts can reach the port of this worker.'
  )
  flags.DEFINE_integer(
    'num_devices', None, 'Number of logical CPU devices (default 1), or the most GPUs.',
    lower_bound=1, upper_bound=cluster.MAX_CPU_DEVICES,
  )  # fmt: skip
  flags.DEFINE_integer(
    'threads_per_device', None, 'Threads per operation on a CPU device.', 1, 4096
  )
  flags.DEFINE_bool(
    'local', False, 'For workers that a trainer starts: use a free port, end with standard input.'
  )
  flags.DEFINE_integer('starter', None, 'With --local: ID of the process with which this one ends.')
  binary.Run(_Serve, __doc__ or '', subjects=subjects.SUBJECTS)


if __name__ == '__main__':
  Run()
