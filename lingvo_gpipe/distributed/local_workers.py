# SPDX-License-Identifier: Apache-2.0
"""Workers on this machine, as processes that live as long as the one that started them."""

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

  They end when this process does, even by SIGKILL: their standard input is a pipe whose other end
  this process alone holds and never closes, and they leave when it is closed. So they are there for
  whatever TensorFlow still wants of them while this process ends, and it does not matter how far a
  worker has come. They have sessions of their own: Ctrl-C in a terminal reaches this process alone,
  which needs them for its last step.

  Attributes:
    spec: their addresses.
    processes: by task index.
  """

  def __init__(self, num_workers: int, options: Sequence[str] = ()) -> None:
    """Returns when all serve.

    Args:
      num_workers: how many.
      options: further arguments of `worker`.

    Raises:
      OSError: one ended, or does not serve in time.
    """
    program, environment = Program(['--local', *options])
    # Linux takes the end of the thread that started a process for that of its starter.
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
      addresses = [_Address(i, p, deadline) for i, p in enumerate(self.processes)]
    except BaseException:
      for process in self.processes:
        process.kill()  # One that does not serve yet would not notice that it is to end.
      self.Close()
      raise
    finally:
      os.close(read)
    self.spec = cluster_spec.ClusterSpec(tuple(addresses))

  def LeaveToStarter(self) -> None:
    """To be called in a fork of the process that started them: they do not wait for its end."""
    os.close(self._lifeline)

  def HaveEnded(self) -> bool:
    """Whether one of them has, be it by itself or killed."""
    return any(process.poll() is not None for process in self.processes)

  def Close(self) -> None:
    """Ends the workers now and waits for it; what does not end by itself is killed."""
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


def Program(args: Sequence[str]) -> tuple[list[str], dict[str, str]]:
  """The command line that starts a worker of this Python with these arguments; its environment."""
  home = str(pathlib.Path(__file__).resolve().parents[2])
  path = os.pathsep.join(filter(None, [home, os.environ.get('PYTHONPATH')]))
  # -P: the working directory is for experiments, and a worker runs none of their code.
  command = [sys.executable, '-P', '-m', 'lingvo_gpipe.worker', *args]
  return command, {**os.environ, 'PYTHONPATH': path}


def EndWithStarter(starter: int) -> None:
  """Has Linux kill this process when the thread that started it ends; elsewhere nothing is done.

  Unlike the end of a pipe it does not depend on who else holds that open.

  Args:
    starter: the id of the process that started this one, which ends now if that is gone.
  """
  if not sys.platform.startswith('linux'):
    return
  with contextlib.suppress(OSError, AttributeError):
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
  if os.getppid() != starter:
    os._exit(1)


def _Address(index: int, process: subprocess.Popen[str], deadline: float) -> str:
  """What a worker writes when it serves."""
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
