# SPDX-License-Identifier: Apache-2.0
"""Lets a run go on where nobody reads what it prints: a terminal was closed, a disk is full."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, TextIO


class _Steady:
  """A text stream that drops what it cannot write."""

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
  """Takes over standard output and standard error for the rest of the process.

  For programs whose work is elsewhere, in files that are written with care.
  """
  for name in ('stdout', 'stderr'):
    if (stream := getattr(sys, name)) is not None:  # It is where the program was started without.
      setattr(sys, name, _Steady(stream))
