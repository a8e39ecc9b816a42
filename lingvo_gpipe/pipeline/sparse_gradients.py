# SPDX-License-Identifier: Apache-2.0
"""Gradients of tables that batches only look up: a row for each occurrence, as in plain Keras.

TensorFlow has such a gradient as `tf.IndexedSlices`, which are rows and their indices. One batch of
plain Keras is several micro-batches here:

    ids of the examples      each micro-batch has rows of its own: they are put one after another
    ids without a batch      such as positions 0, 1, 2 ...: the batch of plain Keras has the rows
                             once, so equal rows of the micro-batches are added
"""

from __future__ import annotations

import collections
import enum
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging

from lingvo_gpipe.core import base_layer
from lingvo_gpipe.pipeline import emission
from lingvo_gpipe.pipeline.cutting import layer_costs
from lingvo_gpipe.pipeline.stages import stage as stage_lib
from lingvo_gpipe.pipeline.stages import stage_math


class _Gradient(NamedTuple):
  """The gradient of a table in one stage of one replica.

  Attributes:
    s: the stage.
    leaf: the index of the table among the trained leaves of the stage.
    owner: the path of the weight, or of its owner if the weight is tied.
    by_micro_batch: for each micro-batch its gradients, in order.
  """

  s: stage_lib.Stage
  leaf: int
  owner: str
  by_micro_batch: list[list[tf.IndexedSlices]]

  @property
  def path(self) -> str:
    """The path of the table in its layer in the stage."""
    return self.s.leaf_paths[self.leaf]


class _LookUps(enum.Enum):
  """How the rows that a table is looked up for depend on the number of examples."""

  PROPORTIONAL = 'a fixed number for each example'
  CONSTANT = 'the same'
  CONSTANT_NUMBER = 'a fixed number, of varying rows'
  MIXED = 'some of each kind, or an unknown number'


class SparseGradients:
  """Finds the trained weights that are only looked up, and joins their gradients of a step.

  Attributes:
    uses: {path of a trained weight, or of its owner if it is tied: all stages and trained leaves
      that hold it}.
  """

  def __init__(
    self,
    layers: Sequence[base_layer.BaseLayer],
    stages: Sequence[stage_lib.Stage],
    ties: Mapping[str, str],
    math: Callable[[stage_lib.Stage], stage_math.StageMath],
  ) -> None:
    """Looks up the uses of each weight.

    Args:
      layers: the flat list of layers, whose first arguments have the batch first.
      stages: all stages of a replica, with the slices of the vocabulary.
      ties: {path of a tied weight: path of its owner}.
      math: returns what training traced for a stage.
    """
    self._layers = list(layers)
    self._ties = ties
    self._math = math
    self._look_ups: dict[str, _LookUps] = {}
    self.uses: dict[str, list[tuple[stage_lib.Stage, int]]] = {}
    for s in stages:
      for leaf in range(len(s.leaf_paths)):
        self.uses.setdefault(self._Owner(s, leaf), []).append((s, leaf))

  def _Owner(self, s: stage_lib.Stage, leaf: int) -> str:
    """Returns the path of a trained leaf of a stage, or of its owner if the leaf is tied."""
    return self._ties.get(s.leaf_paths[leaf], s.leaf_paths[leaf])

  def IsDense(self, s: stage_lib.Stage, leaf: int) -> bool:
    """Whether a trained leaf of a stage, or another use of it, got a dense gradient in a trace."""
    return any(i in self._math(u).dense for u, i in self.uses[self._Owner(s, leaf)])

  def Join(self, walks: Sequence[emission.Emission], args: Any) -> dict[str, tf.IndexedSlices]:
    """Joins the sparse gradients of a step, or adds them to accumulators.

    Accumulators get the gradients of weights that have another use besides look-ups, and of tables
    whose look-ups are mixed.

    Args:
      walks: of all replicas, complete.
      args: the arguments of the first layer for a micro-batch.

    Returns:
      {path of a table: its gradient over all replicas}.
    """
    gradients = [
      _Gradient(s, leaf, self._Owner(s, leaf), by_micro_batch)
      for walk in walks
      for s, leaf, by_micro_batch in walk.SparseGradients()
    ]
    # Known only now that every stage was traced: the walks keep gradients of these weights, too.
    dense = {g.owner for g in gradients if self.IsDense(g.s, g.leaf)}
    counts = collections.Counter(g.path for g in gradients for _ in g.by_micro_batch)
    # A single micro-batch is the batch of plain Keras: there is nothing to join.
    unknown = {g.path for g in gradients if counts[g.path] > 1 and g.owner not in dense}
    if unknown := unknown - self._look_ups.keys():
      self._Measure(unknown, args)
    is_mixed = (self._look_ups.get(g.path) is _LookUps.MIXED for g in gradients)
    # By owner: all gradients of a weight are joined, or all are in its accumulator.
    summed = {*dense, *(g.owner for g in itertools.compress(gradients, is_mixed))}
    # By path, too, because each use of a tied table may look it up in another way.
    of_owner: dict[str, dict[str, list[_Gradient]]] = {}
    for g in gradients:
      if g.owner not in summed:
        of_owner.setdefault(g.owner, {}).setdefault(g.path, []).append(g)
    joined = {}
    for owner, of_path in of_owner.items():
      (first, *_), *_ = of_path.values()
      shape = first.s.AllAccumulators()[first.leaf].shape.as_list()
      with tf.device(first.s.device):
        rows = _Concat(x for path in of_path for x in self._JoinUse(path, of_path[path]))
        joined[owner] = tf.IndexedSlices(rows.values, rows.indices, tf.constant(shape, tf.int64))
    for g in gradients:
      if g.owner in summed:
        emission.AddSparse(g.s, g.leaf, itertools.chain(*g.by_micro_batch))
    return joined

  def _JoinUse(self, path: str, gradients: Sequence[_Gradient]) -> list[tf.IndexedSlices]:
    """Returns the gradients of one use of a table, over all micro-batches and replicas."""
    # Replicas and micro-batches are in the order of the examples.
    by_micro_batch = [_Concat(x) for g in gradients for x in g.by_micro_batch]
    look_ups = self._look_ups.get(path, _LookUps.PROPORTIONAL)
    # The last micro-batch may have fewer examples than the constant number of rows.
    is_constant = len({x.indices.shape[0] for x in by_micro_batch}) == 1
    if is_constant and look_ups is _LookUps.CONSTANT:
      total = tf.add_n([x.values for x in by_micro_batch])
      return [tf.IndexedSlices(total, by_micro_batch[0].indices)]
    if is_constant and look_ups is _LookUps.CONSTANT_NUMBER:
      return _AddRows(by_micro_batch)
    return by_micro_batch

  def _Measure(self, paths: Collection[str], args: Any) -> None:
    """Traces the layers with tables for a micro-batch, and for twice as many examples."""
    once = self._Rows(paths, args, 1)
    try:
      twice = self._Rows(paths, args, 2)
    except Exception:  # For example, a layer limits the size of its batch.
      twice = {}
    for path in paths:
      rows, is_constant = once.get(path, (0, False))
      num_twice, _ = twice.get(path, (0, False))
      # No rows, or None for an unknown number, show nothing about the look-ups.
      if rows and num_twice == 2 * rows:
        self._look_ups[path] = _LookUps.PROPORTIONAL
      elif rows and num_twice == rows:
        self._look_ups[path] = _LookUps.CONSTANT if is_constant else _LookUps.CONSTANT_NUMBER
      else:
        self._look_ups[path] = _LookUps.MIXED
        logging.warning(
          '%s: the number of look-ups is neither constant nor proportional to the batch. So the '
          'gradients of a row are added before the optimizer gets them. Plain Keras on TensorFlow '
          'squares and clips each alone.',
          path,
        )

  def _Rows(
    self, paths: Collection[str], args: Any, factor: int
  ) -> dict[str, tuple[int | None, bool]]:
    """Returns `layer_costs.SparseRows` of layers with these tables, for more examples."""

    def Spec(t: tf.Tensor | None) -> tf.TensorSpec | None:
      return None if t is None else tf.TensorSpec([t.shape[0] * factor, *t.shape[1:]], t.dtype)

    # With the dot: the path of another layer may begin with this one's.
    having = [x for x in self._layers if any(path.startswith(f'{x.path}.') for path in paths)]
    # The rows do not depend on the layers after the last table.
    layers = self._layers[: self._layers.index(having[-1]) + 1]
    calls = layer_costs.LayerCosts(layers, tf.nest.map_structure(Spec, args)).calls
    known: dict[Any, Any] = {}  # Equal layers are traced once.
    rows = {}
    for call in calls:
      if call.layer in having:
        if call.key not in known:
          known[call.key] = layer_costs.SparseRows(call)
        rows.update({f'{call.layer.path}.{name}': x for name, x in known[call.key].items()})
    return rows


def _AddRows(gradients: list[tf.IndexedSlices]) -> list[tf.IndexedSlices]:
  """Adds rows of equal position and index to the first gradient; zeros replace them.

  Rows of other indices, which a micro-batch may have drawn at random, stay where they are.
  """
  first, *later = gradients
  is_same = tf.reduce_all([x.indices == first.indices for x in later], axis=0)
  is_same = tf.reshape(is_same, [-1] + [1] * (first.values.shape.rank - 1))
  # Which rows are equal is known only when the step runs, and shapes must not depend on it: a row
  # of zeros, which adds nothing to a sum or a norm, takes the place of a row that was added.
  zeros = tf.zeros_like(first.values)
  sums = [tf.add_n([x.values for x in gradients]), *(zeros for _ in later)]
  return [
    tf.IndexedSlices(tf.where(is_same, total, x.values), x.indices)
    for total, x in zip(sums, gradients, strict=True)
  ]


def _Concat(gradients: Iterable[tf.IndexedSlices]) -> tf.IndexedSlices:
  """Puts the rows one after another."""
  values, indices = zip(*((x.values, x.indices) for x in gradients), strict=True)
  return tf.IndexedSlices(tf.concat(values, axis=0), tf.concat(indices, axis=0))
