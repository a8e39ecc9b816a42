# SPDX-License-Identifier: Apache-2.0
"""Runs functions and the programs in forks of this process, which imports TensorFlow once.

This process must not use TensorFlow before it forks.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from absl import flags

# The programs need them: imported here, they are not imported by each fork.
from lingvo_gpipe.cli import interrupts
from lingvo_gpipe.training import elastic, export, inspection, train_program  # noqa: F401
from tools import program

_POLL_SECONDS = 0.02
# Exit status of a child whose function raised an exception.
_RAISED = 70
# Flags that exist before this program defines its own.
_LIBRARY_FLAGS = set(flags.FLAGS)


class FindingError(Exception):
  """Something that should not have happened."""


class Ended(NamedTuple):
  """An ended process.

  Attributes:
    status: exit status, or minus the number of a signal; None after the time limit.
    stdout: text of the standard output.
    stderr: text of the standard error.
  """

  status: int | None
  stdout: str
  stderr: str

  @property
  def messages(self) -> list[str]:
    """The lines for users: without absl's log."""
    return [line for line in self.stderr.splitlines() if not re.match(r'[IWE]\d{4} ', line)]


class Child:
  """A running fork.

  Attributes:
    pid: the id of the process, which leads a group of its own.
  """

  def __init__(self, run: Callable[[], None], folder: pathlib.Path) -> None:
    """Forks; the output goes to files in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    self._outputs = folder / 'stdout', folder / 'stderr'
    self._status: int | None = None
    self.pid = os.fork()
    if not self.pid:
      self._Run(run)
    with contextlib.suppress(OSError):  # Parent and child set the group, so that it is set in time.
      os.setpgid(self.pid, self.pid)

  def _Run(self, run: Callable[[], None]) -> None:
    status = _RAISED
    try:
      os.setpgid(0, 0)
      for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
      # As a program's first import does; here it was imported already.
      signal.signal(signal.SIGINT, lambda number, frame: interrupts.End())
      os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
      for descriptor, path in enumerate(self._outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
      run()
      status = 0
    except SystemExit as e:
      status = e.code if isinstance(e.code, int) else 1
    except BaseException:
      traceback.print_exc()
    finally:
      with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
      os._exit(status)

  def HasEnded(self) -> bool:
    """Whether the process has ended."""
    if self._status is None:
      pid, status = os.waitpid(self.pid, os.WNOHANG)
      if pid:
        self._status = os.waitstatus_to_exitcode(status)
    return self._status is not None

  def Signal(self, number: int) -> None:
    """Sends a signal to the process, unless it has ended."""
    if not self.HasEnded():
      os.kill(self.pid, number)

  def Text(self) -> str:
    """Returns the output so far."""
    return ''.join(path.read_text(errors='replace') for path in self._outputs if path.exists())

  def Wait(self, seconds: float) -> Ended:
    """Waits for the end; kills the process and its group after a time limit."""
    deadline = time.monotonic() + seconds
    while not self.HasEnded() and time.monotonic() < deadline:
      time.sleep(_POLL_SECONDS)
    is_late = not self.HasEnded()
    if is_late:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(self.pid, signal.SIGKILL)
      while not self.HasEnded():
        time.sleep(_POLL_SECONDS)
    texts = [path.read_text(errors='replace') if path.exists() else '' for path in self._outputs]
    return Ended(None if is_late else self._status, *texts)


class Runner:
  """Runs the programs for one case.

  Attributes:
    folder: an empty folder for the case.
  """

  def __init__(self, folder: pathlib.Path, seconds: float) -> None:
    """Creates a runner.

    Args:
      folder: an empty folder.
      seconds: time limit of a program.
    """
    self.folder = folder
    self._seconds = seconds
    self._count = 0

  def Start(
    self, name: str, args: Sequence[str], prepare: Callable[[], None] | None = None
  ) -> Child:
    """Starts a program in a fork.

    Args:
      name: the name of a program of lingvo_gpipe, or of a module, which has a dot.
      args: its arguments.
      prepare: a function that may limit its resources before.
    """

    def Run() -> None:
      if prepare:
        prepare()
      for flag in set(flags.FLAGS) - _LIBRARY_FLAGS:  # Some programs have flags of the same name.
        delattr(flags.FLAGS, flag)
      os.chdir(program.ROOT)
      sys.argv = [name, *args]
      module = name if '.' in name else f'lingvo_gpipe.{name}'
      sys.modules.pop(module, None)  # It may be imported already.
      runpy.run_module(module, run_name='__main__')

    self._count += 1
    return Child(Run, self.folder / f'process_{self._count}')

  def Wait(self, child: Child, seconds: float = 0.0) -> Ended:
    """Waits for a program; raises FindingError if it does not end in time.

    Args:
      child: the program.
      seconds: the time limit, if it is longer than the runner's.
    """
    seconds = max(seconds, self._seconds)
    ended = child.Wait(seconds)
    if ended.status is None:
      raise FindingError(f'no end within {seconds:g} s: {ended.stderr[-500:]}')
    return ended

  def Run(self, name: str, args: Sequence[str]) -> Ended:
    """Runs a program to its end."""
    return self.Wait(self.Start(name, args))

  def Call(self, run: Callable[[], None]) -> None:
    """Calls a function that uses TensorFlow in a fork; an exception there is a finding."""
    self._count += 1
    ended = self.Wait(Child(run, self.folder / f'process_{self._count}'))
    if ended.status:
      text = ended.stderr.partition('FindingError: ')[2] or ended.stderr[-1500:]
      raise FindingError(f'status {ended.status}: {text.strip()}')


def CheckEnd(ended: Ended, statuses: Sequence[int] = (0,)) -> None:
  """Checks that a program succeeded, or that it refused in one line with status 2.

  Args:
    ended: the ended program.
    statuses: statuses of success.
  """
  if ended.status in statuses:
    return
  if ended.status != 2 or len(ended.messages) != 1 or not ended.messages[0].strip():
    raise FindingError(f'status {ended.status}: {ended.stderr[-1500:]}')


@contextlib.contextmanager
def Refusals(*kinds: type[Exception]) -> Iterator[None]:
  """Accepts exceptions of these kinds with one line; any other one is a finding."""
  try:
    yield
  except kinds as e:
    if '\n' in str(e) or not str(e):
      raise FindingError(f'not one line: {e!r}') from e
