# SPDX-License-Identifier: Apache-2.0
"""Signs of life of a training process, for its supervisor. Imports no TensorFlow."""

from __future__ import annotations

import os

# What is written: what comes now may take long; the process ends, and its status. A capital letter
# says that a step of that kind begins, the small one that it was done. A write goes on beside the
# others, which do not end it, nor it them.
LONG, END = b'l', b'e'
TRAIN, EVALUATE, COPY, READ, WRITE = b't', b'v', b'c', b'r', b'w'
KINDS = TRAIN + EVALUATE + COPY + READ + WRITE

_descriptor: int | None = None


def SendTo(descriptor: int) -> None:
  """From now on signs go to this file descriptor, a pipe; without it there are none."""
  global _descriptor
  _descriptor = descriptor


def Begin(kind: bytes) -> None:
  """Says that a step of this kind begins, which takes about as long as others of its kind."""
  _Send(kind.upper())


def Step(kind: bytes) -> None:
  """Says that a step of this kind was done; what follows may take long."""
  _Send(kind)


def Long() -> None:
  """Says that until the next sign more time may pass: something is compiled, or waited for.

  A step that had begun is none whose time counts.
  """
  _Send(LONG)


def End(status: int) -> None:
  """Says that all is done, with the exit status, and that only the process has to end."""
  _Send(END + bytes([status]))


def _Send(message: bytes) -> None:
  if _descriptor is not None:
    os.write(_descriptor, message)
