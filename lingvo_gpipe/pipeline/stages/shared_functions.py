# SPDX-License-Identifier: Apache-2.0
"""`SharedFunctions`: the traced functions of stages, shared by stages of equal structure."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lingvo_gpipe.pipeline.schedule import rematerialisation
from lingvo_gpipe.pipeline.stages import (
  layer_backward,
  retraces,
  split_backward,
  stage_functions,
  stage_math,
  vocabulary_slices,
  vocabulary_tables,
)
from lingvo_gpipe.pipeline.stages import stage as stage_lib

Recompute = rematerialisation.Recompute | rematerialisation.ByLayer


class SharedFunctions:
  """Makes the functions of a stage when they are first asked for.

  Attributes:
    xla: whether XLA compiles the functions.
    keeps_sparse: whether sparse gradients are results of backward, see `stage_math.StageMath`.
    num_batch_shapes: number of expected shapes of batches; more shapes log a warning about the
      compilations.
  """

  def __init__(
    self,
    num_stages: int,
    loss_fn: stage_math.LossFn | None,
    xla: bool,
    shares_vocabulary: bool = False,
    keeps_sparse: bool = False,
  ) -> None:
    self._num_stages = num_stages
    self._loss_fn = loss_fn
    self._shares_vocabulary = shares_vocabulary
    self.xla = xla
    self.keeps_sparse = keeps_sparse
    self.num_batch_shapes = 1
    self._math: dict[Any, stage_math.StageMath] = {}
    self._math_of_stage: dict[Any, stage_math.StageMath] = {}
    self._functions: dict[tuple[int, Recompute], Any] = {}
    self._shared_loss: dict[bool, vocabulary_slices.SharedLoss] = {}
    self._shared_table: vocabulary_tables.SharedTable | None = None

  def With(self, *, xla: bool, keeps_sparse: bool) -> SharedFunctions:
    """Returns the same functions with other settings, not yet traced."""
    functions = SharedFunctions(
      self._num_stages, self._loss_fn, xla, self._shares_vocabulary, keeps_sparse
    )
    functions.num_batch_shapes = self.num_batch_shapes
    return functions

  @property
  def num_traces(self) -> int:
    """Number of times that a stage function was traced."""
    return sum(math.num_traces for math in self._math.values())

  def For(self, s: stage_lib.Stage, recompute: Recompute, *, do_eval: bool, with_loss: bool) -> Any:
    """Returns a stage's functions; stages of equal structure get the same object.

    Args:
      s: the stage.
      recompute: the part that backward recomputes, which chooses the class of the functions.
      do_eval: the layers' mode.
      with_loss: whether the last stage runs the loss.
    """
    return self._For(self.Math(s, do_eval=do_eval, with_loss=with_loss), recompute)

  def _For(self, math: stage_math.StageMath, recompute: Recompute) -> Any:
    key = (id(math), recompute)
    if key not in self._functions:
      self._functions[key] = self._Make(math, recompute)
    return self._functions[key]

  def SharedLoss(self, head: stage_lib.Stage, *, do_eval: bool) -> vocabulary_slices.SharedLoss:
    """Returns the functions of the loss, if the vocabulary is shared out."""
    if do_eval not in self._shared_loss:
      math = self.Math(head, do_eval=do_eval, with_loss=True)
      assert isinstance(math, vocabulary_slices.LossMath)
      self._shared_loss[do_eval] = vocabulary_slices.SharedLoss(math, self.xla)
    return self._shared_loss[do_eval]

  def SharedTable(self, table: vocabulary_tables.Table) -> vocabulary_tables.SharedTable:
    """Returns the functions of an embedding that is shared out."""
    if self._shared_table is None:
      self._shared_table = vocabulary_tables.SharedTable(table.layers[0], self.xla)
    return self._shared_table

  def _Make(self, math: stage_math.StageMath, recompute: Recompute) -> Any:
    """Traces nothing, so functions that no action calls cost nothing."""
    split, by_layer = split_backward.SplitBackward, layer_backward.LayerBackward
    if isinstance(recompute, rematerialisation.ByLayer):
      return (split if recompute.is_split else by_layer)(math, self.xla, recompute.layers)
    if recompute is rematerialisation.Recompute.STAGE:
      halves = self._For(math, rematerialisation.Recompute.NOTHING)
      return stage_functions.StageFunctions(math, self.xla, halves)
    return (by_layer if recompute is rematerialisation.Recompute.LAYER else split)(math, self.xla)

  def Math(self, s: stage_lib.Stage, *, do_eval: bool, with_loss: bool) -> stage_math.StageMath:
    """Returns a stage's computations.

    Args:
      s: the stage.
      do_eval: the layers' mode.
      with_loss: whether the last stage runs the loss.
    """
    # Eager steps run one replica after another, so none may wait for another.
    sums_over_replicas = with_loss and not do_eval and not tf.executing_eagerly()
    replica_sum = s.replica_sum if sums_over_replicas else None
    # Structures are expensive to compare, and there are many actions.
    stage_key = (s.index, do_eval, with_loss, replica_sum)
    if stage_key not in self._math_of_stage:
      self._math_of_stage[stage_key] = self._SharedMath(s, do_eval, with_loss, replica_sum)
    return self._math_of_stage[stage_key]

  def _SharedMath(
    self,
    s: stage_lib.Stage,
    do_eval: bool,
    with_loss: bool,
    replica_sum: stage_math.ReplicaSum | None,
  ) -> stage_math.StageMath:
    loss_fn = self._loss_fn if with_loss and s.index == self._num_stages - 1 else None
    # Evaluation has no backward, so its stages may differ in what is trained.
    trained = s.trained_mask if not do_eval else (False,) * len(s.trained_mask)
    needs_dx = s.needs_dx and not do_eval
    # Slices share functions with slices of their size.
    size = s.size if isinstance(s, vocabulary_slices.Slice) else 0
    has_loss = loss_fn is not None
    cls = stage_math.StageMath
    if size and with_loss:
      cls = vocabulary_slices.SliceMath
    elif has_loss and self._shares_vocabulary:
      cls = vocabulary_slices.LossMath
    num_weights = tuple(len(tf.nest.flatten(v)) for v in s.variables)
    key = (
      *(cls, do_eval, has_loss, s.exports, trained, needs_dx, s.structure, replica_sum, size),
      num_weights,
    )
    if key not in self._math:
      self._math[key] = cls(
        s.layers,
        loss_fn=loss_fn,
        exports=s.exports,
        trained=trained,
        needs_dx=needs_dx,
        do_eval=do_eval,
        seen_shapes=retraces.Retraces(lambda: self.num_batch_shapes),
        num_weights=num_weights,
        replica_sum=replica_sum,
        # The softmax of a shared vocabulary looks nothing up.
        keeps_sparse=self.keeps_sparse and cls is stage_math.StageMath,
      )
    return self._math[key]
