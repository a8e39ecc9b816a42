# SPDX-License-Identifier: Apache-2.0
"""Iterates over the batches of an input; errors name the input and the examples of the batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.input import base_input_generator


class PlacedBatch(NamedTuple):
  """A batch whose tensors lie on the devices that need them, in place of a NestedMap.

  `runners.batch_placement` makes and reads it.

  Attributes:
    firsts: for each replica, the fields of its rows that are on the host of its first stage.
    lasts: for each replica, the fields that are on the host of its last stage and not in `firsts`.
  """

  firsts: tuple[tuple[tf.Tensor, ...], ...]
  lasts: tuple[tuple[tf.Tensor, ...], ...]


AnyBatch = nested_map.NestedMap | PlacedBatch
_Batch = TypeVar('_Batch', nested_map.NestedMap, PlacedBatch)


def _Never(error: Exception) -> bool:
  del error
  return False


def Batches(
  source: base_input_generator.BaseInputGenerator,
  start: int = 0,
  position_in: str = 'data set',
  is_lost_machine: Callable[[Exception], bool] = _Never,
) -> Iterator[nested_map.NestedMap]:
  """Yields the batches of an input from a position on.

  An error in making a batch gets notes, see `AddNotes`.

  Args:
    source: the input.
    start: position of the first batch, in examples.
    position_in: 'data set' or 'run', for the note: `start` is a position in it. A run may go
      through its data set many times.
    is_lost_machine: whether an error comes from a lost machine and not from the data.
  """
  dataset = iter(source.Dataset(start=start))
  yield from AddNotes(dataset, source, start, position_in, is_lost_machine)


def AddNotes(
  batches: Iterator[_Batch],
  source: base_input_generator.BaseInputGenerator,
  start: int,
  position_in: str = 'data set',
  is_lost_machine: Callable[[Exception], bool] = _Never,
) -> Iterator[_Batch]:
  """Yields batches; adds notes to an error in making a batch.

  The first note names the input and the examples of the batch. The second one says how to fix it;
  it is omitted if `source.Explain` does so or if the machine was lost.

  Args:
    batches: the batches of `source` from position `start` on.
    source: the input.
    start: position of the first batch, in examples.
    position_in: 'data set' or 'run', for the note: `start` is a position in it.
    is_lost_machine: whether an error comes from a lost machine and not from the data.
  """
  position = start
  while True:
    try:
      batch = next(batches)
    except StopIteration:
      return
    except Exception as e:
      explained = source.Explain(e)
      explained.add_note(
        f'while the input {InputName(source)} made the batch that begins at example {position:,} '
        f'of the {position_in}'
      )
      if explained is not e:  # Its message says what to do.
        raise explained from e
      if not is_lost_machine(e):
        # A stream has no known number of examples and can only be read from its first example.
        begin = f'start={position}' if source.NumExamples() else ''
        verb = 'begins with' if begin else 'comes to'
        e.add_note(
          'what to try: fix the data or the input; the next run retries this batch. To inspect it '
          f'without training, Dataset({begin}) of Params.Instantiate() {verb} it, with the Params '
          'of this input'
        )
      raise
    yield batch
    position += NumRows(batch)


def Range(values: tf.Tensor) -> tuple[int, int]:
  """Returns the minimum and maximum of integers, computed by one call on their device."""
  with tf.device(values.device):
    low, high = _RangeFunction(values.dtype)(values).numpy()
  return int(low), int(high)


@functools.cache
def _RangeFunction(dtype: tf.DType) -> Any:
  # One function for all shapes: sending another function to a worker while others run there can
  # break them, see `worker_hosts._Gate`.
  return tf.function(
    lambda values: tf.stack([tf.reduce_min(values), tf.reduce_max(values)]), autograph=False
  ).get_concrete_function(tf.TensorSpec(None, dtype))


def InputName(source: base_input_generator.BaseInputGenerator) -> str:
  """Returns the class of an input, and its name if it has one, for messages."""
  name = source.params.name
  return f'{type(source).__name__} {name!r}' if name else type(source).__name__


def NumRows(batch: AnyBatch) -> int:
  """Returns the number of rows of a batch, padded rows included: the batch's share of positions."""
  parts = batch.firsts if isinstance(batch, PlacedBatch) else [batch.Flatten()]
  return sum(int(part[0].shape[0]) for part in parts)
