# SPDX-License-Identifier: Apache-2.0
"""A trial of the losses that Keras layers add: micro-batches need means over the examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from lingvo_gpipe.core import fprop_context, nested_map
from lingvo_gpipe.layers import sequential
from lingvo_gpipe.layers.keras import keras_cell_layer, keras_equality
from lingvo_gpipe.pipeline.stages import micro_batch

_ADDED = keras_cell_layer.ADDED

# Largest number of examples to try.
_MOST_ROWS = 8

# A mean over repeated examples may change by this part of it: layers round, for example the number
# of tokens that an expert takes.
_TOLERANCE = 0.2
_ROUNDING = 1e-6


def CheckMeans(
  layers: Sequence[keras_cell_layer.KerasCellLayer], args: tuple[Any, ...], num_micro_batches: int
) -> None:
  """Raises ValueError if a cell adds a loss that grows with the number of examples.

  The cells run on examples of a batch, and on the same examples twice: a mean stays, but a sum
  doubles. They run on two parts of the examples, too: if the mean of the two losses is another,
  as for a loss that compares examples, a warning says so. Losses that are random pass.

  Args:
    layers: the cells of the model.
    args: the arguments of the first cell, tensors `[batch, ...]`.
    num_micro_batches: the number of micro-batches of a batch.
  """
  unknown = {layer: names for layer in layers if (names := _LayersWithLoss(layer))}
  if num_micro_batches == 1 or not unknown:
    return
  called = layers[: max(map(layers.index, unknown)) + 1]

  def Losses(rows: tf.Tensor, do_eval: bool, step: int = 0) -> dict[Any, float]:
    examples = tf.nest.map_structure(lambda t: None if t is None else tf.gather(t, rows), args)
    with fprop_context.Scope(do_eval=do_eval, step=step) as context:
      sequential.RunLayers(called, _Run, examples)
    losses = [(layer, x) for layer, name, x, _ in context.aux_losses if name == _ADDED]
    return {layer: float(x) for layer, x in losses}

  batch_size = micro_batch.BatchSize(args)
  # Twice the examples take no more memory than a micro-batch, unless it has very few.
  num_rows = min(max(2, batch_size // (2 * num_micro_batches)), _MOST_ROWS, batch_size)
  rows = tf.range(num_rows) * batch_size // num_rows
  parts = micro_batch.Split(rows, 2)
  for do_eval in (True, False):  # Some losses are added in training only.
    if not unknown:
      break
    once, again = Losses(rows, do_eval), Losses(rows[::-1], do_eval, step=1)
    twice = Losses(tf.concat([rows, rows], axis=0), do_eval)
    of_parts = [Losses(part, do_eval) for part in parts]
    for layer, loss in once.items():
      # Another order and other random numbers change no mean and no sum. NaN is never close.
      if layer in unknown and _AreClose(loss, again[layer], 1e-3):
        mean = sum(len(part) * x[layer] for part, x in zip(parts, of_parts, strict=True)) / num_rows
        _CheckMean(layer.path, unknown.pop(layer), loss, twice[layer], mean)


def _CheckMean(path: str, names: str, loss: float, twice: float, mean: float) -> None:
  """Raises ValueError if a loss is not a mean; warns if only micro-batches make it another.

  Args:
    path: the path of the cell.
    names: the names of the layers that add the loss.
    loss: the loss of some examples.
    twice: the loss of the same examples, each twice.
    mean: the mean of the losses of two parts of the examples.
  """
  if not _AreClose(loss, twice, _TOLERANCE):
    raise ValueError(
      f'{path}: expected a loss that is a mean over the examples from {names} (add_loss or '
      f'activity regularizer), as micro-batches need it, got {loss:g}, and {twice:g} with each '
      'example twice; divide it by the number of examples, or set num_micro_batches=1'
    )
  if not _AreClose(loss, mean, 1e-3):
    logging.warning(
      '%s: the loss that %s adds is %g for some examples, but %g as the mean of two micro-batches '
      'of them: it compares examples, or is a mean over something else. Only num_micro_batches=1 '
      'counts it as Keras does.',
      path,
      names,
      loss,
      mean,
    )


def _AreClose(a: float, b: float, tolerance: float) -> bool:
  return abs(a - b) <= tolerance * max(abs(a), abs(b)) + _ROUNDING


def _LayersWithLoss(layer: keras_cell_layer.KerasCellLayer) -> str:
  """Returns the names of the layers of a cell that add losses.

  They have an activity regularizer, or a class outside of Keras that calls add_loss.
  """
  return ', '.join(
    x.name
    for x in layer.params.cell.Layers()
    if x.activity_regularizer is not None or keras_equality.Reads(type(x), {'add_loss'})
  )


def _Run(
  _: int, layer: keras_cell_layer.KerasCellLayer, args: tuple[Any, ...], skips: nested_map.NestedMap
) -> Any:
  weights = layer.params.cell.Weights()
  theta = nested_map.NestedMap({name: tf.convert_to_tensor(v) for name, v in weights.items()})
  return layer.FPropSkips(theta, skips, *args)
