# SPDX-License-Identifier: Apache-2.0
"""Adds notes to an error that ends the training: the step, and remedies for a lack of memory."""

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
_NOT_MEMORY = re.compile('No space left|[Qq]uota exceeded|Too many open files')


def AddNotes(error: Exception, step: int, saved: checkpointer.Checkpointer) -> None:
  """Adds the last step of the training and the checkpoint from which it can resume.

  Args:
    error: the exception; receives a note.
    step: the last finished step.
    saved: the checkpoints of the run.
  """
  try:
    steps = [info.step for info in saved.All()]
  except (OSError, ValueError):  # The error may be that the checkpoints cannot be read.
    steps = []
  start = f'resumes from the checkpoint of step {steps[-1]}' if steps else 'starts over'
  error.add_note(f'training ended after step {step}; the next call {start}')


@contextlib.contextmanager
def Hints(params: hyperparams.Params) -> Iterator[None]:
  """Adds remedies to an exception of the enclosed code if memory ran out.

  Args:
    params: the model's Params.
  """
  try:
    yield
  except Exception as e:
    if _IsOutOfMemory(e):
      paths = ' and '.join(_PipelinePaths(params)) or 'a PipeliningLayer'
      e.add_note(
        f'out of memory: try more micro-batches (num_micro_batches of {paths}), more stages '
        "(num_stages), remat_policy 'stage' or 'layer', or a smaller batch_size of the input; "
        'trainer --mode=inspect_partition predicts the memory of each stage'
      )
    raise


def _PipelinePaths(params: hyperparams.Params) -> list[str]:
  """Returns the paths of the pipelines in a model's Params; [] if code makes them."""
  paths: list[str] = []

  def Enter(path: str, value: Any) -> bool:
    cls = getattr(value, 'cls', None)
    if isinstance(cls, type) and issubclass(cls, pipelining_layer.PipeliningLayer):
      paths.append(path)
      return False
    return True

  params.Visit(lambda path, value: None, Enter)
  return paths


def _IsOutOfMemory(error: Exception) -> bool:
  if isinstance(error, tf.errors.OpError):
    # A full disk, a quota and too many open files are reported as exhausted resources, too.
    is_resource = isinstance(error, tf.errors.ResourceExhaustedError)
    is_memory = is_resource or _OUT_OF_MEMORY.search(error.message)
    return bool(is_memory) and not _NOT_MEMORY.search(error.message)
  return isinstance(error, MemoryError)
