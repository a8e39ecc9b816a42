# SPDX-License-Identifier: Apache-2.0
"""Restarts workers before a training process uses them.

The previous training process may leave harmful state in a worker: GPU memory, which TensorFlow
frees only after ten minutes, and collective operations of replicas, which never work again in a
process in which one was aborted. Without GPUs and replicas, a restart would only cost seconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping

import tensorflow as tf
from absl import logging

from lingvo_gpipe.distributed import cluster_spec, local_workers, worker_connection

# Key of a worker's facts: the file descriptor at which it waits for a request to restart. The
# trainer runs TensorFlow's operation that writes a file on the worker, with the path of this
# descriptor in /proc/self/fd.
FACT = 'restart_descriptor'

# Time limits in seconds: for finding the workers that answer, and for everything.
_ASK_SECONDS, _SECONDS = 5.0, 60.0


def RestartOnRequest() -> int:
  """Starts a thread that restarts this process, a `worker`, on request.

  It replaces the program and keeps the process id. A fork would not do: GPUs do not work in a fork
  of a process that has initialised them.

  Returns:
    The file descriptor at which the thread waits for a request.
  """
  read, written = os.pipe()

  def Wait() -> None:
    os.read(read, 1)
    logging.warning('restarting this worker for a new training process')
    for descriptor in os.listdir('/proc/self/fd'):
      if int(descriptor) > 2:
        with contextlib.suppress(OSError):  # It was closed meanwhile.
          os.set_inheritable(int(descriptor), False)
    os.execve(sys.executable, *local_workers.WorkerCommand(sys.argv[1:]))

  threading.Thread(target=Wait, name='restart on request', daemon=True).start()
  return written


def RestartWorkers(spec: cluster_spec.ClusterSpec, num_replicas: int) -> None:
  """Restarts the workers that answer and support it; returns when they serve again.

  Call it before this process uses TensorFlow. A fork connects to the workers, because a process
  cannot use TensorFlow any more after a worker that it was connected to has ended.

  Args:
    spec: the workers. Workers without GPUs are restarted only if there are several replicas.
    num_replicas: number of copies of the pipeline.
  """
  parent = os.getpid()
  requester = os.fork()
  if not requester:
    local_workers.EndWithParent(parent)
    try:
      _RequestRestart(spec, num_replicas)
    except Exception as e:  # The workers then continue as they are.
      logging.warning('cannot restart workers: %s', ' '.join(str(e).split()))
    finally:
      os._exit(0)
  deadline = time.monotonic() + _SECONDS
  while not os.waitpid(requester, os.WNOHANG)[0]:
    if time.monotonic() >= deadline:
      os.kill(requester, signal.SIGKILL)
      os.waitpid(requester, 0)
      return
    time.sleep(0.02)


def _RequestRestart(spec: cluster_spec.ClusterSpec, num_replicas: int) -> None:
  """Asks the workers to restart, and waits until they answer again."""

  def HasAskedEnough(answers: Mapping[str, bytes], seconds: float) -> bool:
    return seconds >= _ASK_SECONDS

  answers = worker_connection.AwaitWorkers(spec.workers, _SECONDS, HasAskedEnough)
  if not answers or (num_replicas == 1 and not worker_connection.NumDevices(answers, 'gpu')):
    return
  tf.config.set_visible_devices([], 'GPU')  # The GPUs of this host belong to its worker.
  restarting = []
  for index, facts in worker_connection.Connect(spec, answers).items():
    if FACT in facts:
      restarting.append(spec.workers[index])
      try:
        with tf.device(worker_connection.Host(index)):
          tf.io.write_file(f'/proc/self/fd/{facts[FACT]}', 'restart')
      except tf.errors.OpError:
        pass  # The worker restarted before it could answer.
  while restarting:
    time.sleep(0.1)
    # A restarted worker gives another answer: its devices have new numbers.
    new_answers = zip(restarting, worker_connection.AskAll(restarting), strict=True)
    restarting = [a for a, (answer, _) in new_answers if answer in (b'', answers[a])]
