# SPDX-License-Identifier: Apache-2.0
"""`EvalProgress`: what an evaluator has done, for the process that goes on where one has failed."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from typing import TypeVar

_Part = TypeVar('_Part')


class _Numbers(ctypes.Structure):
  _fields_ = [(name, ctypes.c_int64) for name in ('step', 'num_done', 'finished', 'total')]


class EvalProgress:
  """What is done of each checkpoint's work; this process and all its forks read and write it."""

  def __init__(self) -> None:
    """Nothing is done."""
    self._numbers = _Numbers.from_buffer(mmap.mmap(-1, ctypes.sizeof(_Numbers)))
    self._numbers.step = self._numbers.finished = -1

  @property
  def step(self) -> int:
    """That of the checkpoint that was begun last; -1: none was."""
    return int(self._numbers.step)

  @property
  def finished(self) -> int:
    """The step of the last checkpoint of which all is done; -1: there is none."""
    return int(self._numbers.finished)

  @property
  def total(self) -> int:
    """How many parts are done, of all checkpoints."""
    return int(self._numbers.total)

  def Undone(self, step: int, parts: Sequence[_Part]) -> Iterator[_Part]:
    """Begins or goes on with a checkpoint.

    Args:
      step: that of the checkpoint.
      parts: of the work on it, always the same.

    Yields:
      Those that are not done. One is when the next is asked for.
    """
    if step != self._numbers.step:
      self._numbers.num_done, self._numbers.step = 0, step
    for part in parts[self._numbers.num_done :]:
      yield part
      self._numbers.num_done += 1
      self._numbers.total += 1
    self._numbers.finished = step
