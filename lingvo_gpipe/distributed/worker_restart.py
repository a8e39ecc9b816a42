# SPDX-License-Identifier: Apache-2.0
"""Has workers begin anew before a training process uses them.

What the process before it leaves there may harm it: the memory of GPUs, which TensorFlow frees
after ten minutes, and collective operations of replicas, which never work again in a process
where one was broken off. Where there is neither, nothing is worth the seconds that it takes.
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

# What a worker tells of itself: the file descriptor at which it waits to be told. TensorFlow's own
# operation that writes a file, run by the worker, reaches it there.
FACT = 'begins_anew_by'

# So long it is asked who is there, and so long it may all take.
_ASK_SECONDS, _SECONDS = 5.0, 60.0


def BeginAnewWhenTold() -> int:
  """From now on this process, a `worker`, begins anew when it is told to.

  It becomes another one of the same number: what a fork of one that has looked for GPUs does on
  them fails.

  Returns:
    The file descriptor at which it waits.
  """
  read, written = os.pipe()

  def Wait() -> None:
    os.read(read, 1)
    logging.warning('this worker begins anew: another training process is to use it')
    for descriptor in os.listdir('/proc/self/fd'):
      if int(descriptor) > 2:
        with contextlib.suppress(OSError):  # It was closed since.
          os.set_inheritable(int(descriptor), False)
    os.execve(sys.executable, *local_workers.Program(sys.argv[1:]))

  threading.Thread(target=Wait, name='begins anew', daemon=True).start()
  return written


def Renew(spec: cluster_spec.ClusterSpec, num_replicas: int) -> None:
  """Returns when the workers that answer, and know how to, have begun anew.

  To be called before this process uses TensorFlow: a fork connects to the workers, since what is
  connected to one that has ended is of no more use.

  Args:
    spec: the workers; without GPUs they begin anew for several replicas alone.
    num_replicas: R.
  """
  caller = os.getpid()
  teller = os.fork()
  if not teller:
    local_workers.EndWithStarter(caller)
    try:
      _Tell(spec, num_replicas)
    except Exception as e:  # Then they go on as they are.
      logging.warning('workers do not begin anew: %s', ' '.join(str(e).split()))
    finally:
      os._exit(0)
  deadline = time.monotonic() + _SECONDS
  while not os.waitpid(teller, os.WNOHANG)[0]:
    if time.monotonic() >= deadline:
      os.kill(teller, signal.SIGKILL)
      os.waitpid(teller, 0)
      return
    time.sleep(0.02)


def _Tell(spec: cluster_spec.ClusterSpec, num_replicas: int) -> None:
  def WereAsked(answers: Mapping[str, bytes], seconds: float) -> bool:
    return seconds >= _ASK_SECONDS

  answers = worker_connection.AwaitWorkers(spec.workers, _SECONDS, WereAsked)
  if not answers or (num_replicas == 1 and not worker_connection.NumDevices(answers, 'gpu')):
    return
  tf.config.set_visible_devices([], 'GPU')  # Those of this host are for its worker.
  told = []
  for index, facts in worker_connection.Connect(spec, answers).items():
    if FACT in facts:
      told.append(spec.workers[index])
      try:
        with tf.device(worker_connection.Host(index)):
          tf.io.write_file(f'/proc/self/fd/{facts[FACT]}', 'begin anew')
      except tf.errors.OpError:
        pass  # It has ended before it could say so.
  while told:
    time.sleep(0.1)
    found = zip(told, worker_connection.AskAll(told), strict=True)
    told = [address for address, (answer, _) in found if answer in (b'', answers[address])]
