# SPDX-License-Identifier: Apache-2.0
"""Lets a run continue if its output cannot be written.

Closing a terminal, or a reader such as `head` that ends, makes each `print` raise an OSError. So
does a full disk under a log file. Training must not die of this: after a terminal is closed it
still has to finish the step and save (SIGHUP), and under `nohup` it continues.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any, TextIO


class _Steady:
  """A text stream that drops text that it cannot write."""

  def __init__(self, stream: TextIO) -> None:
    self._stream = stream

  def write(self, text: str) -> int:
    with contextlib.suppress(OSError):
      self._stream.write(text)
    return len(text)

  def flush(self) -> None:
    with contextlib.suppress(OSError):
      self._stream.flush()

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)


def Install() -> None:
  """Replaces standard output and standard error for the rest of the process.

  For programs whose results are files, which report their own errors.
  """
  for name in ('stdout', 'stderr'):
    if (stream := getattr(sys, name)) is not None:  # None if the program was started without it.
      setattr(sys, name, _Steady(stream))
