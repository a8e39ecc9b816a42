# SPDX-License-Identifier: Apache-2.0
"""Adds to an error that ends the training what a person needs: the step, and what to try."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from lingvo_gpipe.checkpoint import checkpointer
from lingvo_gpipe.core import hyperparams
from lingvo_gpipe.pipeline import pipelining_layer

# XLA and CUDA report it as an error of another kind.
_OUT_OF_MEMORY = re.compile(r'RESOURCE_EXHAUSTED|[Oo]ut of memory|\bOOM\b|OUT_OF_MEMORY')
_OTHERS = re.compile('No space left|[Qq]uota exceeded|Too many open files')


def AddNotes(error: Exception, step: int, saved: checkpointer.Checkpointer) -> None:
  """Says after which step the training ended, and where it can go on.

  Args:
    error: what was raised; gets a note.
    step: the last one that was done.
    saved: the checkpoints of the run.
  """
  try:
    steps = [info.step for info in saved.All()]
  except (OSError, ValueError):  # Perhaps it is why the training ended.
    steps = []
  there = f'goes on from the checkpoint of step {steps[-1]}' if steps else 'begins anew'
  error.add_note(f'training ended after step {step}; the next call {there}')


@contextlib.contextmanager
def Hints(params: hyperparams.Params) -> Iterator[None]:
  """Adds to an exception of the enclosed code what to try where memory ran out.

  Args:
    params: the model's Params.
  """
  try:
    yield
  except Exception as e:
    if _IsOutOfMemory(e):
      where = ' and '.join(_PipelinePaths(params)) or 'a PipeliningLayer'
      e.add_note(
        f'out of memory: try more micro-batches (num_micro_batches of {where}), more stages '
        "(num_stages), remat_policy 'stage' or 'layer', or a smaller batch_size of the input; "
        'trainer --mode=inspect_partition predicts the memory of each stage'
      )
    raise


def _PipelinePaths(params: hyperparams.Params) -> list[str]:
  """Where pipelines are set in a model's Params; [] where there is none, or code makes them."""
  found: list[str] = []

  def Enter(path: str, value: Any) -> bool:
    cls = getattr(value, 'cls', None)
    if isinstance(cls, type) and issubclass(cls, pipelining_layer.PipeliningLayer):
      found.append(path)
      return False
    return True

  params.Visit(lambda path, value: None, Enter)
  return found


def _IsOutOfMemory(error: Exception) -> bool:
  if isinstance(error, tf.errors.OpError):
    # A full disk, a quota and too many open files are reported as exhausted resources, too.
    is_resource = isinstance(error, tf.errors.ResourceExhaustedError)
    found = is_resource or _OUT_OF_MEMORY.search(error.message)
    return bool(found) and not _OTHERS.search(error.message)
  return isinstance(error, MemoryError)
