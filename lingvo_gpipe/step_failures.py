# SPDX-License-Identifier: Apache-2.0
"""Adds to an error that ends the training what a person needs: step, data, what to try."""

from __future__ import annotations

import re
from collections.abc import Iterator

import tensorflow as tf

from lingvo_gpipe import checkpointer, evaluation, nested_map
from lingvo_gpipe.input import base_input_generator

# XLA and CUDA report it as an error of another kind.
_OUT_OF_MEMORY = re.compile(r'RESOURCE_EXHAUSTED|[Oo]ut of memory|\bOOM\b|OUT_OF_MEMORY')


def Batches(
  source: base_input_generator.BaseInputGenerator, start: int
) -> Iterator[nested_map.NestedMap]:
  """The batches of an input from a position on; an error in making one tells of which examples."""
  position = start
  batches = iter(source.Dataset(start=start))
  while True:
    try:
      batch = next(batches)
    except StopIteration:
      return
    except Exception as e:
      name = f' {source.params.name!r}' if source.params.name else ''
      e.add_note(
        f'while the input {type(source).__name__}{name} made the batch that begins at example '
        f'{position:,} of the run'
      )
      raise
    yield batch
    position += evaluation.NumRows(batch)


def AddNotes(error: Exception, step: int, saved: checkpointer.Checkpointer) -> None:
  """Says after which step the training ended, what to try, and where it can go on.

  Args:
    error: what was raised; gets notes.
    step: the last one that was done.
    saved: the checkpoints of the run.
  """
  if _IsOutOfMemory(error):
    error.add_note(
      'out of memory: try more micro-batches (task.stack.num_micro_batches), more stages '
      "(task.stack.num_stages), task.stack.remat_policy 'stage' or 'layer', or a smaller "
      'input.batch_size; trainer --mode=inspect_partition predicts the memory of each stage'
    )
  try:
    steps = [info.step for info in saved.All()]
  except (OSError, ValueError):  # Perhaps it is why the training ended.
    steps = []
  there = f'goes on from the checkpoint of step {steps[-1]}' if steps else 'begins anew'
  error.add_note(f'training ended after step {step}; the next call {there}')


def _IsOutOfMemory(error: Exception) -> bool:
  if isinstance(error, tf.errors.OpError):
    is_resource = isinstance(error, tf.errors.ResourceExhaustedError)
    # A full disk is reported so, too.
    return bool(_OUT_OF_MEMORY.search(error.message)) or (
      is_resource and 'No space left' not in error.message
    )
  return isinstance(error, MemoryError)
