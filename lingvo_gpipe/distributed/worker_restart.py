# SPDX-License-Identifier: Apache-2.0
"""Restarts workers before a training process uses them, if another process used them before.

The previous process may leave harmful state in a worker: GPU memory, which TensorFlow frees only
after ten minutes, and collective operations of replicas, which never work again in a process in
which one was aborted. Without GPUs and replicas, a restart would only cost seconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from lingvo_gpipe.distributed import cluster_spec, local_workers, worker_connection

# Keys of a worker's facts. They are file descriptors of the worker: of a pipe at which it waits for
# a request to restart, and of a file in memory, which is empty until a process uses the worker.
# TensorFlow's operations on files, executed by the worker, open them through /proc/self/fd.
_REQUEST, _USE = 'restart_descriptor', 'use_descriptor'

# Time limits in seconds: for finding the workers that answer, and for everything.
_ASK_SECONDS, _SECONDS = 5.0, 60.0


def RestartOnRequest() -> dict[str, int]:
  """Starts a thread that restarts this process, a `worker`, on request.

  It replaces the program and keeps the process id. A fork would not do: GPUs do not work in a fork
  of a process that has initialised them.

  Returns:
    Facts that the worker publishes for `RestartWorkers` and `MarkUse`.
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
  facts = {_REQUEST: written}
  with contextlib.suppress(OSError, AttributeError):  # Not every system has files in memory.
    facts[_USE] = os.memfd_create('lingvo_gpipe_use')
  return facts


def MarkUse(facts: Mapping[int, Mapping[str, Any]]) -> None:
  """Tells workers that this process uses them, so that they restart before another one does.

  Args:
    facts: {task index: facts of the worker}, from `worker_connection.Connect`.
  """
  for index, worker_facts in facts.items():
    if _USE in worker_facts:
      with tf.device(worker_connection.Host(index)):
        tf.io.write_file(_Path(worker_facts[_USE]), 'used')


def _IsUsed(index: int, facts: Mapping[str, Any]) -> bool:
  """Whether a process has used a worker since the worker started, or may have."""
  if _USE not in facts:
    return _REQUEST in facts
  try:
    with tf.device(worker_connection.Host(index)):
      return bool(tf.io.read_file(_Path(facts[_USE])).numpy())
  except tf.errors.OpError:
    return True


def _Path(descriptor: int) -> str:
  return f'/proc/self/fd/{descriptor}'


def RestartWorkers(spec: cluster_spec.ClusterSpec, num_replicas: int) -> None:
  """Restarts the workers that answer and were used; returns when they serve again.

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
  facts = worker_connection.Connect(spec, answers)
  # All are asked before the first one ends, after which this process cannot use TensorFlow.
  used = [index for index in facts if _IsUsed(index, facts[index])]
  restarting = [spec.workers[index] for index in used]
  for index in used:
    try:
      with tf.device(worker_connection.Host(index)):
        tf.io.write_file(_Path(facts[index][_REQUEST]), 'restart')
    except tf.errors.OpError:
      pass  # The worker restarted before it could answer.
  while restarting:
    time.sleep(0.1)
    # A restarted worker gives another answer: its devices have new numbers.
    new_answers = zip(restarting, worker_connection.AskAll(restarting), strict=True)
    restarting = [a for a, (answer, _) in new_answers if answer in (b'', answers[a])]
