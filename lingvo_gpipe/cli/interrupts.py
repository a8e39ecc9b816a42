# SPDX-License-Identifier: Apache-2.0
"""Ends programs at Ctrl-C with one line and status 130, from their first imports on.

Importing TensorFlow takes seconds. Programs import this module before that; other processes, such
as a notebook, keep their own handler. Imports nothing that takes time.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import types
from typing import NoReturn

STATUS = 128 + signal.SIGINT

_PROGRAMS = ('trainer', 'evaluator', 'worker')
_MODULES = ('lingvo_gpipe.', 'tools.')


def _IsProgram() -> bool:
  """Whether this process runs one of the programs, rather than importing one."""
  spec = getattr(sys.modules.get('__main__'), '__spec__', None)
  if spec is not None:
    return str(spec.name).startswith(_MODULES)
  if sys.argv[:1] == ['-m']:  # The package of the module is being imported.
    return any(argument.startswith(_MODULES) for argument in sys.orig_argv)
  return bool(sys.argv) and os.path.basename(sys.argv[0]) in _PROGRAMS


def Install() -> None:
  """Ends this process at Ctrl-C, unless a handler is set or the signal is ignored."""
  is_main = threading.current_thread() is threading.main_thread()
  if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _Handle)


def Raise() -> None:
  """Lets Ctrl-C raise KeyboardInterrupt from now on; whoever catches it calls `End`.

  For programs that clean up, such as a program that waits for a process which it started.
  """
  if signal.getsignal(signal.SIGINT) is _Handle:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def End() -> NoReturn:
  """Ends this process with one line."""
  _End(2)


def _Handle(number: int, frame: types.FrameType | None) -> None:
  _End(_stderr)


def _End(stderr: int) -> NoReturn:
  # A KeyboardInterrupt would be lost where native code calls Python, and the end of the interpreter
  # may wait for threads.
  with contextlib.suppress(Exception):
    os.write(stderr, b'\n' * os.isatty(stderr) + b'ended by Ctrl-C\n')
    sys.stdout.flush()
  os._exit(STATUS)


_stderr = 2
if _IsProgram():
  # While TensorFlow is imported, descriptor 2 is not the terminal, see `native_output.DropOutput`.
  with contextlib.suppress(OSError):
    _stderr = os.dup(2)
  Install()
  # At its very end Python restores the default, which would kill the process without a word.
  if signal.getsignal(signal.SIGINT) is _Handle:
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
