# SPDX-License-Identifier: Apache-2.0
"""Heartbeats that a training process sends to its supervisor. Imports no TensorFlow."""

from __future__ import annotations

import os

# The bytes of the protocol. LONG: the next operation may take long. END: the process ends; the exit
# status follows. A capital letter begins a step of a kind, the small letter ends it. A WRITE runs
# concurrently with the other kinds; neither ends the other.
LONG, END = b'l', b'e'
TRAIN, EVALUATE, COPY, READ, WRITE = b't', b'v', b'c', b'r', b'w'
KINDS = TRAIN + EVALUATE + COPY + READ + WRITE

_descriptor: int | None = None


def SendTo(descriptor: int) -> None:
  """Sends all further heartbeats to this file descriptor, a pipe. Before, none are sent."""
  global _descriptor
  _descriptor = descriptor


def Begin(kind: bytes) -> None:
  """Reports that a step begins which should take about as long as other steps of its kind."""
  _Send(kind.upper())


def Step(kind: bytes) -> None:
  """Reports that a step of this kind ended. The next operation may take long."""
  _Send(kind)


def SuspendTimeout() -> None:
  """Suspends the timeout until the next heartbeat, for compiling or waiting.

  The step in progress, if any, is left out of the timing statistics.
  """
  _Send(LONG)


def End(status: int) -> None:
  """Reports that all work is done, with the exit status; only the process has yet to end."""
  _Send(END + bytes([status]))


def _Send(message: bytes) -> None:
  if _descriptor is not None:
    os.write(_descriptor, message)
