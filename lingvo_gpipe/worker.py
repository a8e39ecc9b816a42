# SPDX-License-Identifier: Apache-2.0
"""The worker: `worker --cluster=hosts.json --task_index=0 --trusted_network` serves its devices.

A trainer with the same --cluster computes on them. The worker runs until it is ended.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading

from absl import flags, logging

from lingvo_gpipe.cli import binary
from lingvo_gpipe.distributed import local_workers, worker_restart, worker_server

FLAGS = flags.FLAGS


def _Serve() -> int:
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_DFL)  # Nothing here is to be saved.
  if FLAGS.local:
    if not stat.S_ISFIFO(os.fstat(0).st_mode):
      raise binary.UsageError(
        '--local is for programs that start workers and end them by a pipe. By hand a worker takes '
        '--cluster, --task_index and --trusted_network (docs/distributed.md)'
      )
    if FLAGS.starter:
      local_workers.EndWithStarter(FLAGS.starter)
    threading.Thread(target=_EndWithStarter, name='starter', daemon=True).start()
    index, port = FLAGS.task_index or 0, 0
  else:
    if not FLAGS.trusted_network:
      raise binary.UsageError(
        "TensorFlow's server listens on all interfaces of this machine, without authentication or "
        'encryption, and whoever reaches its port can read and write files as this user. Give '
        '--trusted_network where only trusted hosts reach it (docs/distributed.md)'
      )
    spec = binary.ClusterSpec()
    if spec is None:
      raise binary.UsageError('--cluster is needed: a file of addresses (or TF_CONFIG)')
    if FLAGS.task_index is None and spec.task_type != 'worker':
      raise binary.UsageError('--task_index is needed: which worker of the cluster this one is')
    index = spec.task_index if FLAGS.task_index is None else FLAGS.task_index
    port = int(spec.Address(index).rpartition(':')[2])
  with binary.StartingTensorFlow():
    server = worker_server.WorkerServer(
      index,
      port,
      platform=FLAGS.platform,
      num_devices=FLAGS.num_devices,
      threads_per_device=FLAGS.threads_per_device,
      more_facts={} if FLAGS.local else {worker_restart.FACT: worker_restart.BeginAnewWhenTold()},
    )
  logging.log(
    logging.INFO if FLAGS.local else logging.WARNING,
    'worker %d serves %s at port %d of all interfaces of this machine, without authentication: '
    'whoever reaches that port has the rights of this process',
    index,
    server.description,
    server.port,
  )
  if FLAGS.local:
    print(server.port, flush=True)
    os.dup2(2, 1)  # Nobody reads on there.
  else:
    print(f'worker {index} serves {server.description} at port {port}', flush=True)
  while True:
    signal.pause()


def _EndWithStarter() -> None:
  """Ends this process when the other end of its standard input is closed: with its starter."""
  while os.read(sys.stdin.fileno(), 1024):
    pass
  os._exit(0)


def Run() -> None:
  """Entry point of the installed program."""
  binary.DefineDeviceFlags()
  flags.DEFINE_integer('task_index', None, 'Which worker of the cluster this is.', lower_bound=0)
  flags.DEFINE_bool(
    'trusted_network', False, 'Only trusted hosts reach the port of this worker: see --cluster.'
  )
  flags.DEFINE_integer(
    'num_devices', None, 'So many logical CPU devices (default 1), or at most so many others.',
    lower_bound=1,
  )  # fmt: skip
  flags.DEFINE_integer(
    'threads_per_device', None, 'Threads of one operation on a CPU device.', lower_bound=1
  )
  flags.DEFINE_bool(
    'local', False, 'Started by a trainer: serve a free port, end with standard input.'
  )
  flags.DEFINE_integer('starter', None, 'With --local: the process with which this one ends.')
  binary.Run(_Serve, __doc__ or '')


if __name__ == '__main__':
  Run()
