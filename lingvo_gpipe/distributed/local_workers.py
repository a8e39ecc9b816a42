# SPDX-License-Identifier: Apache-2.0
"""Starts workers on this machine as processes that end with the process that started them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from lingvo_gpipe.distributed import cluster_spec

_START_SECONDS = 300.0
_END_SECONDS = 5.0

# PR_SET_PDEATHSIG of <linux/prctl.h>.
_SET_PARENT_DEATH_SIGNAL = 1


class LocalWorkers:
  """Starts workers that serve free ports of this machine.

  The workers end when this process ends, even by SIGKILL: their standard input is a pipe whose
  other end only this process holds and never closes, and they exit when it is closed. So they serve
  TensorFlow until this process has ended, and a worker that is still starting ends, too. Each has
  its own session: Ctrl-C in a terminal reaches only this process, which needs the workers for its
  last step.

  Attributes:
    spec: addresses of the workers.
    processes: processes of the workers, by task index.
  """

  def __init__(self, num_workers: int, options: Sequence[str] = ()) -> None:
    """Starts the workers; returns when all of them serve.

    Args:
      num_workers: number of workers.
      options: further arguments of the program `worker`.

    Raises:
      OSError: a worker ended, or does not serve in time.
    """
    program, environment = WorkerCommand(['--local', *options])
    # Linux sends the parent death signal when the thread that started a process ends.
    if threading.current_thread() is threading.main_thread():
      program.append(f'--starter={os.getpid()}')
    read, self._lifeline = os.pipe()
    self.processes: list[subprocess.Popen[str]] = []
    try:
      for index in range(num_workers):
        self.processes.append(
          subprocess.Popen(
            [*program, f'--task_index={index}'],
            stdin=read,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
          )
        )
      deadline = time.monotonic() + _START_SECONDS
      addresses = [_ReadAddress(i, p, deadline) for i, p in enumerate(self.processes)]
    except BaseException:
      for process in self.processes:
        process.kill()  # A worker that does not serve yet would not notice the closed pipe.
      self.Close()
      raise
    finally:
      os.close(read)
    self.spec = cluster_spec.ClusterSpec(tuple(addresses))

  def DetachInFork(self) -> None:
    """Closes a fork's end of the pipe, so that the workers do not wait for the fork to end."""
    os.close(self._lifeline)

  def AnyHasEnded(self) -> bool:
    """Whether a worker has exited or was killed."""
    return any(process.poll() is not None for process in self.processes)

  def Close(self) -> None:
    """Ends the workers and waits for their end; kills workers that do not exit in time."""
    os.close(self._lifeline)
    deadline = time.monotonic() + _END_SECONDS
    for process in self.processes:
      try:
        process.wait(max(0.0, deadline - time.monotonic()))
      except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
      assert process.stdout
      process.stdout.close()


def WorkerCommand(args: Sequence[str]) -> tuple[list[str], dict[str, str]]:
  """Returns (command line, environment) that start a worker with this Python and arguments."""
  home = str(pathlib.Path(__file__).resolve().parents[2])
  path = os.pathsep.join(filter(None, [home, os.environ.get('PYTHONPATH')]))
  # -P keeps the working directory out of sys.path: it holds experiments, whose code must not run
  # in a worker.
  command = [sys.executable, '-P', '-m', 'lingvo_gpipe.worker', *args]
  return command, {**os.environ, 'PYTHONPATH': path}


def EndWithParent(parent: int) -> None:
  """Lets Linux kill this process when the thread that started it ends. No-op on other systems.

  Unlike the end of a pipe, this does not depend on other processes that hold the pipe open.

  Args:
    parent: id of the process that started this one. If it has ended already, this process exits.
  """
  if not sys.platform.startswith('linux'):
    return
  with contextlib.suppress(OSError, AttributeError):
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
  if os.getppid() != parent:
    os._exit(1)


def _ReadAddress(index: int, process: subprocess.Popen[str], deadline: float) -> str:
  """Waits until a worker serves and returns its address."""
  assert process.stdout is not None
  with selectors.DefaultSelector() as selector:
    selector.register(process.stdout, selectors.EVENT_READ)
    is_ready = selector.select(max(0.0, deadline - time.monotonic()))
  line = process.stdout.readline() if is_ready else ''
  if line:
    return f'localhost:{int(line)}'
  if is_ready:
    raise OSError(f'worker {index} ended at its start, with status {process.wait()}')
  raise OSError(f'worker {index}, process {process.pid}, did not start in {_START_SECONDS:g} s')
