# SPDX-License-Identifier: Apache-2.0
"""Splits any nest of tensors into micro-batches along the batch dimension, and merges them.

Leaves may have any dtype; None stays None. Sizes differ by at most one, larger ones first (7 into 4
is 2, 2, 2, 1). A batch smaller than the requested number gives one micro-batch for each example.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from lingvo_gpipe.core import shapes


class MicroBatch(NamedTuple):
  """A piece of a mini-batch.

  Attributes:
    args: the arguments of the first layer, nests of tensors `[..., batch, ...]`.
    side: the inputs of the loss, besides the outputs of the last layer: a nest of tensors.
    loss_weight: the weight of the micro-batch's loss, a scalar; known before its forward runs.
  """

  args: tuple[Any, ...]
  side: Any = None
  loss_weight: Any = 1.0


def Sizes(batch_size: int, num_micro_batches: int) -> list[int]:
  """Returns the sizes of the micro-batches that a batch is split into."""
  if num_micro_batches < 1:
    raise ValueError(f'num_micro_batches must be at least 1, got {num_micro_batches}')
  if batch_size < 1:
    raise ValueError(f'a batch needs at least one example, got {batch_size}')
  number = min(batch_size, num_micro_batches)
  small, larger = divmod(batch_size, number)
  return [small + 1] * larger + [small] * (number - larger)


def BatchSize(nest: Any, batch_dim: int = 0) -> int:
  """Returns the static size of `batch_dim`, which all tensors of the nest must share.

  Raises:
    ValueError: there is no tensor, a rank is too low, a size is unknown, or sizes differ.
  """
  sizes: dict[int, str] = {}
  for path, leaf in shapes.Leaves(nest, 'input'):
    if leaf is None:
      continue
    shape = leaf.shape
    if shape.rank is None or shape.rank <= batch_dim or shape[batch_dim] is None:
      raise ValueError(
        f'{path}: expected a static size at dimension {batch_dim} (the batch), got shape {shape}'
      )
    sizes.setdefault(shape[batch_dim], path)
  if not sizes:
    raise ValueError('expected at least one tensor to take the batch size from, got none')
  if len(sizes) > 1:
    text = ', '.join(f'{size} at {path}' for size, path in sizes.items())
    raise ValueError(f'all tensors must share the size of dimension {batch_dim}, got {text}')
  return next(iter(sizes))


def Split(nest: Any, num_micro_batches: int, batch_dim: int = 0) -> list[Any]:
  """Splits a nest of tensors `[..., batch, ...]` into nests of the same structure.

  Args:
    nest: tensors with a static, equal size at `batch_dim`; None leaves stay None.
    num_micro_batches: the requested number of nests.
    batch_dim: the dimension of the batch.
  """
  sizes = Sizes(BatchSize(nest, batch_dim), num_micro_batches)
  flat = tf.nest.flatten(nest)
  pieces = [
    [None] * len(sizes) if leaf is None else tf.split(leaf, sizes, axis=batch_dim) for leaf in flat
  ]
  return [tf.nest.pack_sequence_as(nest, [p[m] for p in pieces]) for m in range(len(sizes))]


def Merge(nests: Sequence[Any], batch_dim: int = 0) -> Any:
  """Undoes `Split`: concatenates equal leaves of the nests along the batch dimension."""
  flats = [tf.nest.flatten(nest) for nest in nests]
  merged = [
    None if leaves[0] is None else tf.concat(leaves, axis=batch_dim)
    for leaves in zip(*flats, strict=True)
  ]
  return tf.nest.pack_sequence_as(nests[0], merged)


def MergeOutputs(outputs: Sequence[Any], inputs: Sequence[Any], batch_dim: int = 0) -> Any:
  """Merges the outputs of micro-batches.

  Args:
    outputs: for each micro-batch a nest of tensors.
    inputs: for each micro-batch the nest of tensors that it was computed from.
    batch_dim: the batch dimension of both.

  Raises:
    ValueError: an output does not have its micro-batch's examples at `batch_dim`.
  """
  for m, (nest, args) in enumerate(zip(outputs, inputs, strict=True)):
    size = BatchSize(args, batch_dim)
    for path, leaf in shapes.Leaves(nest, 'outputs'):
      if leaf is None or leaf.shape.rank is None:
        continue
      if leaf.shape.rank <= batch_dim or leaf.shape[batch_dim] not in (None, size):
        raise ValueError(
          f'{path} of micro-batch {m}: expected {size} examples at dimension {batch_dim}, got '
          f'{shapes.FormatNest(leaf)}; compute results of all examples together, such as a loss, '
          'after the pipeline'
        )
  return Merge(outputs, batch_dim)
