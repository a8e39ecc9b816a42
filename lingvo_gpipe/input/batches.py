# SPDX-License-Identifier: Apache-2.0
"""The batches of an input, one after the other; an error in making one tells of which examples."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.distributed import worker_connection
from lingvo_gpipe.input import base_input_generator


class PlacedBatch(NamedTuple):
  """A batch in parts that are where stages need them, in place of a NestedMap; see `placement`.

  Attributes:
    firsts: for each replica fields of its rows that are where its first stage is.
    lasts: the same of the last stage, without those that are there already.
  """

  firsts: tuple[tuple[tf.Tensor, ...], ...]
  lasts: tuple[tuple[tf.Tensor, ...], ...]


AnyBatch = nested_map.NestedMap | PlacedBatch
_Batch = TypeVar('_Batch', nested_map.NestedMap, PlacedBatch)


def Batches(
  source: base_input_generator.BaseInputGenerator, start: int = 0, of: str = 'data set'
) -> Iterator[nested_map.NestedMap]:
  """The batches of an input from a position on.

  An error in making one gets a note that says of which input and examples.

  Args:
    source: the input.
    start: the position.
    of: what positions count in, for the note: a data set, or a run, which goes through it often.
  """
  yield from Noted(iter(source.Dataset(start=start)), source, start, of)


def Noted(
  batches: Iterator[_Batch],
  source: base_input_generator.BaseInputGenerator,
  start: int,
  of: str = 'data set',
) -> Iterator[_Batch]:
  """Batches of an input, with the note on errors that `Batches` tells of."""
  position = start
  while True:
    try:
      batch = next(batches)
    except StopIteration:
      return
    except Exception as e:
      told = source.Explain(e)
      told.add_note(
        f'while the input {Named(source)} made the batch that begins at example {position:,} of '
        f'the {of}'
      )
      if told is not e:  # It says itself what to do.
        raise told from e
      if not worker_connection.IsFailure(e):  # Of that the data are not to blame.
        # A stream, of which nobody knows how many examples it has, begins at the first one alone.
        begin = f'start={position}' if source.NumExamples() else ''
        there = 'begins with' if begin else 'comes to'
        e.add_note(
          'what to try: mend the data or the input, for the next call makes that batch again; to '
          f'look at it without training, Dataset({begin}) of Params.Instantiate() {there} it, with '
          'the Params of this input'
        )
      raise
    yield batch
    position += NumRows(batch)


def Range(values: tf.Tensor) -> tuple[int, int]:
  """The least and the largest of some integers, found on the device where they are, by one call."""
  with tf.device(values.device):
    low, high = _RangeOf(values.dtype)(values).numpy()
  return int(low), int(high)


@functools.cache
def _RangeOf(dtype: tf.DType) -> Any:
  # For all shapes at once: to bring another function to a worker beside others that run there may
  # break them, see `worker_hosts._Gate`.
  return tf.function(
    lambda values: tf.stack([tf.reduce_min(values), tf.reduce_max(values)]), autograph=False
  ).get_concrete_function(tf.TensorSpec(None, dtype))


def Named(source: base_input_generator.BaseInputGenerator) -> str:
  """The class of an input, and its name if it has one, for messages."""
  name = source.params.name
  return f'{type(source).__name__} {name!r}' if name else type(source).__name__


def NumRows(batch: AnyBatch) -> int:
  """The rows of a batch, padded ones included: by so many it moves the position on."""
  parts = batch.firsts if isinstance(batch, PlacedBatch) else [batch.Flatten()]
  return sum(int(part[0].shape[0]) for part in parts)
