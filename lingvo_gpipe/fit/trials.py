# SPDX-License-Identifier: Apache-2.0
"""Trials of a Keras model on a few examples: whether micro-batches compute what a batch does.

Before the first step the cells run eagerly on examples of the first batch:

    0 1 and 0 2                  the outputs for example 0 are equal, unless examples are compared
    all, and each twice          an added loss that is a mean stays; a sum doubles
    all, and the two halves      the mean of the halves' added losses is the loss of all
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from lingvo_gpipe.core import fprop_context, nested_map, pipeline_element
from lingvo_gpipe.layers.keras import keras_cell_layer, keras_equality
from lingvo_gpipe.pipeline.stages import micro_batch

_Layers = Sequence[keras_cell_layer.KerasCellLayer]
_Device = Callable[[keras_cell_layer.KerasCellLayer], str]

# Largest number of examples to try.
_MOST_ROWS = 8

# A mean over repeated examples may change by this fraction: layers round, for example the number of
# tokens that an expert takes.
_TOLERANCE = 0.2
_ROUNDING = 1e-6


class Trial:
  """Runs the cells of a model on some examples of a batch."""

  def __init__(self, layers: _Layers, args: tuple[Any, ...], device: _Device) -> None:
    """Takes the examples.

    Args:
      layers: the cells of the model.
      args: the arguments of the first cell, tensors `[batch, ...]`.
      device: returns the device on which a cell runs, which has the weights of one cell at a time.
    """
    self._layers = layers
    self._args = args
    self._device = device
    self._size = micro_batch.BatchSize(args)

  def CheckIndependence(self) -> None:
    """Warns if outputs for an example depend on the other examples, in evaluation or in training.

    Layers that draw numbers of their own in training pass.
    """
    if self._size == 1:
      return
    batches = [[0, self._size // 3], [0, 2 * self._size // 3]]
    outputs, _ = self._Run(self._layers, batches)
    if layer := self._FirstDependent(outputs):
      _WarnOfDependence(layer, layer.params.cell.name, 'computes')
    elif any(map(_LayersWithMode, self._layers)):
      repeated = [*batches, batches[0]]  # Unequal to the first if random numbers differ.
      outputs, _ = self._Run(self._layers, repeated, do_eval=False)
      layer = self._FirstDependent(outputs)
      if layer and _IsEqual(outputs[-1][0], outputs[-1][2]):
        names = _LayersWithMode(layer) or layer.params.cell.name
        _WarnOfDependence(layer, names, 'computes in training')

  def CheckAddedLosses(self, num_micro_batches: int) -> None:
    """Raises ValueError if a cell adds a loss that grows with the number of examples.

    Warns if a loss is not a mean over the examples, because it compares them or is a mean over
    something else. Losses that random numbers change pass.

    Args:
      num_micro_batches: the number of micro-batches of a batch.
    """
    unknown = {layer: names for layer in self._layers if (names := _LayersWithLoss(layer))}
    if not unknown:
      return
    called = self._layers[: max(map(self._layers.index, unknown)) + 1]
    # Twice the examples take no more memory than a micro-batch, unless it has very few.
    num_rows = min(max(2, self._size // (2 * num_micro_batches)), _MOST_ROWS, self._size)
    rows = [i * self._size // num_rows for i in range(num_rows)]
    sizes = micro_batch.Sizes(num_rows, 2)
    parts = [rows[: sizes[0]], rows[sizes[0] :]][: len(sizes)]
    for do_eval in (True, False):  # Some losses are added in training only.
      if not unknown:
        break
      batches = [rows, rows[::-1], [*rows, *rows], *parts]
      _, losses = self._Run(called, batches, steps=[0, 1, 0, 0, 0], do_eval=do_eval)
      for layer, (loss, again, twice, *part_values) in losses.items():
        # Another order and other random numbers change no mean and no sum. NaN is never close.
        if layer in unknown and _AreClose(loss, again, 1e-3):
          mean = float(np.average(part_values, weights=sizes))
          _CheckMean(layer.path, unknown.pop(layer), loss, twice, mean)

  def _FirstDependent(self, outputs: list[list[Any]]) -> keras_cell_layer.KerasCellLayer | None:
    """Returns the first cell whose first two outputs differ; None if the last cell's are equal."""
    if _IsEqual(*outputs[-1][:2]):
      return None
    pairs = zip(self._layers, outputs, strict=True)
    return next(layer for layer, batches in pairs if not _IsEqual(*batches[:2]))

  def _Run(
    self,
    layers: _Layers,
    batches: Sequence[Sequence[int]],
    *,
    steps: Sequence[int] = (),
    do_eval: bool = True,
  ) -> tuple[list[list[Any]], dict[Any, list[float]]]:
    """Runs cells on several batches.

    Args:
      layers: the cells.
      batches: for each batch the indices of its examples.
      steps: for each batch a number that seeds its random numbers; default: 0 for all.
      do_eval: whether the cells compute as in evaluation.

    Returns:
      For each cell its outputs by batch; and {cell: the loss that it adds by batch}.
    """
    counters = map(fprop_context.StepCounter, steps or [0] * len(batches))
    contexts = [fprop_context.FPropContext(do_eval, counter) for counter in counters]
    outputs: list[list[Any]] = []

    def Run(_: int, layer: Any, args: tuple[Any, ...], skips: nested_map.NestedMap) -> Any:
      results = []
      with tf.device(self._device(layer)):
        weights = layer.params.cell.Weights()
        theta = nested_map.NestedMap({name: tf.convert_to_tensor(v) for name, v in weights.items()})
        for k, context in enumerate(contexts):
          own_skips = nested_map.NestedMap({name: of_batch[k] for name, of_batch in skips.items()})
          with fprop_context.Enter(context):
            results.append(layer.FPropSkips(theta, own_skips, *args[0][k]))
      outputs.append([y for y, _ in results])
      begun = {name: [skips[name] for _, skips in results] for name in layer.skips_out}
      return (outputs[-1],), nested_map.NestedMap(begun)

    def Take(rows: Sequence[int]) -> Any:
      take = lambda t: None if t is None else tf.gather(t, rows)  # noqa: E731
      return tf.nest.map_structure(take, self._args)

    pipeline_element.RunLayers(layers, Run, ([Take(rows) for rows in batches],))
    losses: dict[Any, list[float]] = {}
    for context in contexts:
      for layer, name, value, _ in context.aux_losses:
        if name == keras_cell_layer.ADDED:
          losses.setdefault(layer, []).append(float(value))
    return outputs, losses


def _WarnOfDependence(layer: keras_cell_layer.KerasCellLayer, names: str, computes: str) -> None:
  logging.warning(
    '%s: the value that %s %s for an example depends on the other examples of the batch. Here only '
    'the examples of its micro-batch count; num_micro_batches=1 computes it as Keras does.',
    layer.path,
    names,
    computes,
  )


def _CheckMean(path: str, names: str, loss: float, twice: float, mean: float) -> None:
  """Raises ValueError if a loss is not a mean; warns if only micro-batches change it.

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


def _LayersWithMode(layer: keras_cell_layer.KerasCellLayer) -> str:
  """Returns the names of the layers of a cell that may compare examples in training only.

  They are BatchNormalization, or of a class outside of Keras. Keras's other layers take `training`
  for dropout.
  """
  return ', '.join(
    x.name
    for x in layer.params.cell.Layers()
    if isinstance(x, keras.layers.BatchNormalization)
    or (
      not keras_equality.IsOfKeras(type(x)) and 'training' in inspect.signature(x.call).parameters
    )
  )


def _IsEqual(a: Any, b: Any) -> bool:
  """Whether the first examples of two results are equal, in all tensors of two examples."""
  for x, y in zip(tf.nest.flatten(a), tf.nest.flatten(b), strict=True):
    if x is not None and x.shape.rank and x.shape[0] == 2 and x.dtype.is_floating:
      x, y = (np.asarray(tf.cast(t[0], tf.float64)) for t in (x, y))
      size = np.max(np.abs(x), initial=0, where=np.isfinite(x))
      if not np.allclose(x, y, rtol=0, atol=1e-3 * size + _ROUNDING, equal_nan=True):
        return False
  return True
