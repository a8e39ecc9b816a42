# SPDX-License-Identifier: Apache-2.0
"""Gradients of tables that batches only look up: a row for each occurrence, as in plain Keras.

TensorFlow has such a gradient as slices, which are rows and their indices. What is one batch in
plain Keras is several micro-batches here:

    ids of the examples      each micro-batch has rows of its own: they are put one after another
    ids without a batch      such as positions 0, 1, 2 ...: the batch of plain Keras has the rows
                             once, so equal rows of the micro-batches are added
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging

from lingvo_gpipe.core import base_layer
from lingvo_gpipe.pipeline.cutting import layer_costs
from lingvo_gpipe.pipeline.stages import stage as stage_lib


class Gradient(NamedTuple):
  """The gradient of a table in one stage of one replica.

  Attributes:
    s: the stage.
    leaf: the index of the table among the trained leaves of the stage.
    owner: the path of the weight; if it is tied, the owner's.
    slices: for each micro-batch the slices, in order.
  """

  s: stage_lib.Stage
  leaf: int
  owner: str
  slices: list[list[tf.IndexedSlices]]

  @property
  def path(self) -> str:
    """The path of the table in its layer in the stage."""
    return self.s.leaf_paths[self.leaf]


class TableGradients:
  """Joins the gradients of tables over the micro-batches and replicas of a step."""

  def __init__(self, layers: Sequence[base_layer.BaseLayer], batch_dim: int) -> None:
    """Traces nothing yet.

    Args:
      layers: the flat list of layers.
      batch_dim: the dimension of the batch, in the arguments of the first layer.
    """
    self._layers = list(layers)
    self._batch_dim = batch_dim
    # {path: whether the table has more rows for more examples; None: some look-ups do}.
    self._grows: dict[str, bool | None] = {}

  def Join(
    self, gradients: Sequence[Gradient], args: Any
  ) -> tuple[dict[str, tf.IndexedSlices], list[Gradient]]:
    """Joins gradients.

    Args:
      gradients: of all replicas.
      args: the arguments of the first layer of a micro-batch.

    Returns:
      {owner: its gradient}; and the gradients that must be added to accumulators, because a table
      is looked up by both kinds of ids, or by a number of ids that is not known.
    """
    counts = collections.Counter(g.path for g in gradients for _ in g.slices)
    unknown = {path for path, n in counts.items() if n > 1 and path not in self._grows}
    if unknown:
      self._Measure(unknown, args)
    mixed = {g.owner for g in gradients if self._grows.get(g.path, True) is None}
    of_owner: dict[str, dict[str, list[Gradient]]] = {}
    for g in gradients:
      if g.owner not in mixed:
        of_owner.setdefault(g.owner, {}).setdefault(g.path, []).append(g)
    joined = {}
    for owner, of_path in of_owner.items():
      with tf.device(next(iter(of_path.values()))[0].s.device):
        joined[owner] = _Concat(x for path in of_path for x in self._Slices(path, of_path[path]))
    return joined, [g for g in gradients if g.owner in mixed]

  def _Slices(self, path: str, gradients: Sequence[Gradient]) -> list[tf.IndexedSlices]:
    """Returns the slices of a table over all micro-batches and replicas."""
    by_micro_batch = [_Concat(x) for g in gradients for x in g.slices]
    return by_micro_batch if self._grows.get(path, True) else _Added(by_micro_batch)

  def _Measure(self, paths: Iterable[str], args: Any) -> None:
    """Traces the layers with tables for as many and for twice as many examples."""
    having = [x for x in self._layers if any(path.startswith(f'{x.path}.') for path in paths)]
    layers = self._layers[: self._layers.index(having[-1]) + 1]

    def NumRows(factor: int) -> dict[str, int]:
      def Spec(t: tf.Tensor | None) -> tf.TensorSpec | None:
        if t is None:
          return None
        shape = t.shape.as_list()
        shape[self._batch_dim] *= factor
        return tf.TensorSpec(shape, t.dtype)

      specs = tf.nest.map_structure(Spec, args)
      calls = [x for x in layer_costs.LayerCosts(layers, specs).calls if x.layer in having]
      return dict(collections.ChainMap(*map(layer_costs.SliceRows, calls)))

    once, twice = NumRows(1), NumRows(2)
    for path in paths:
      few, many = once.get(path, 0), twice.get(path, 0)
      self._grows[path] = {few: False, 2 * few: True}.get(many) if few else None
      if self._grows[path] is None:
        logging.warning(
          '%s: the number of look-ups is neither constant nor proportional to the batch. So the '
          'gradients of a row are added before the optimizer gets them. Plain Keras on TensorFlow '
          'squares and clips each alone.',
          path,
        )


def _Added(slices: list[tf.IndexedSlices]) -> list[tf.IndexedSlices]:
  """Adds rows of equal position and index to the first slices, and leaves zeros of them.

  Rows of other indices, which a micro-batch may have drawn at random, stay where they are.
  """
  first, *later = slices
  is_same = tf.reduce_all([x.indices == first.indices for x in later], axis=0)
  is_same = tf.reshape(is_same, [-1] + [1] * (first.values.shape.rank - 1))
  zeros = tf.zeros_like(first.values)
  sums = [tf.add_n([x.values for x in slices]), *(zeros for _ in later)]
  return [
    tf.IndexedSlices(tf.where(is_same, total, x.values), x.indices)
    for total, x in zip(sums, slices, strict=True)
  ]


def _Concat(slices: Iterable[tf.IndexedSlices]) -> tf.IndexedSlices:
  values, indices = zip(*((x.values, x.indices) for x in slices), strict=True)
  return tf.IndexedSlices(tf.concat(values, axis=0), tf.concat(indices, axis=0))
