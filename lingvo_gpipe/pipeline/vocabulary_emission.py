# SPDX-License-Identifier: Apache-2.0
"""The walk over a schedule with slices of the vocabulary.

    F[slice, m]   takes args[S, m], class ids     gives statistics
    loss[m]       takes statistics of all slices  gives their gradients, sums
    B[slice, m]   takes these gradients           gives a part of dargs[S, m]

S is the number of stages with layers. The loss is not an action: it runs on the device of the last
of these stages, outside of the chain of actions, as soon as the statistics of all slices have
arrived. Without a loss, slices give their logits, which are joined on that device.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import nested_map, pipeline_element
from lingvo_gpipe.layers import chunked_logits
from lingvo_gpipe.pipeline import emission, host_copies
from lingvo_gpipe.pipeline.schedule import rematerialisation, schedules
from lingvo_gpipe.pipeline.stages import (
  failures,
  leaves,
  micro_batch,
  shared_functions,
  stage_math,
  vocabulary_slices,
  vocabulary_tables,
)
from lingvo_gpipe.pipeline.stages import stage as stage_lib


class VocabularyEmission(emission.Emission):
  """The calls of one walk over a schedule with slices of the vocabulary."""

  def __init__(
    self,
    stages: Sequence[stage_lib.Stage],
    slices: Sequence[vocabulary_slices.Slice],
    functions: shared_functions.SharedFunctions,
    micro_batches: Sequence[micro_batch.MicroBatch],
    counter: tf.Tensor | None,
    *,
    do_eval: bool,
    with_loss: bool = True,
    copies: host_copies.HostCopies | None = None,
    tables: Sequence[vocabulary_tables.Table] = (),
    is_dense: Callable[[stage_lib.Stage, int], bool] = lambda s, leaf: True,
  ) -> None:
    """Emits nothing yet.

    Args:
      stages: the stages of one replica, of which the last one is the head.
      slices: its slices.
      functions: the functions of the stages.
      micro_batches: the micro-batches of this replica.
      counter: see Emission.
      do_eval: see Emission.
      with_loss: whether slices give statistics for a loss; if not, they give logits.
      copies: see Emission.
      tables: the parts of the embedding, if that is shared out.
      is_dense: see Emission.
    """
    super().__init__(
      [*stages[:-1], *slices],
      functions,
      micro_batches,
      counter,
      do_eval=do_eval,
      with_loss=with_loss,
      copies=copies,
      is_dense=is_dense,
    )
    self._head = stages[-1]
    self._slices = slices
    self._tables = tables
    if tables:
      self._table = functions.SharedTable(tables[0])
    # A look-up waits for the action before the last one of its device, so that rows arrive in time,
    # but not all at once. Gradients of rows are added in the order of backward.
    self._before_lookup: list[tf.Tensor] = []
    self._last_gradient: dict[str, list[tf.Tensor]] = {}
    if with_loss:
      self._loss = functions.SharedLoss(self._head, do_eval=do_eval)
    # By micro-batch: the class ids, the logits of each slice, the statistics and their gradients by
    # slice, and the gradients of the head's input, one list for each slice.
    self._class_ids: dict[int, list[tf.Tensor]] = {}
    self._logits: dict[int, list[tf.Tensor]] = collections.defaultdict(list)
    self._statistics: dict[int, dict[int, list[chunked_logits.SliceStatistics]]] = (
      collections.defaultdict(dict)
    )
    self._loss_gradients: dict[int, list[list[tf.Tensor]]] = {}
    self._dargs_of_slices: dict[int, list[list[tf.Tensor]]] = collections.defaultdict(list)

  def Emit(
    self, schedule: schedules.Schedule, remat_policy: rematerialisation.Policy = 'stage'
  ) -> None:
    """Emits every action of the schedule that has any work, and the loss."""
    super().Emit(schedule, remat_policy)
    for m in list(self._statistics):  # No backward has asked for the loss.
      if self._do_eval:
        sums = self._CallLoss(m, self._loss.Loss, self._TakeStatistics(m))
        super()._Give(self._head, m, (), sums)
      else:  # Nothing is trained.
        self._TakeGradient(self._slices[0], m)

  def _StageInSchedule(self, s: stage_lib.Stage) -> int:
    # The schedule has slices in the place of the head.
    if isinstance(s, vocabulary_slices.Slice):
      return self._head.index + s.number
    return super()._StageInSchedule(s)

  def _HasLoss(self, s: stage_lib.Stage) -> bool:
    return s is self._head

  def _TakeInput(self, s: stage_lib.Stage, m: int) -> None:
    if not isinstance(s, vocabulary_slices.Slice):
      super()._TakeInput(s, m)
      if self._tables and not s.index:
        self._LookUp(s, m)
      return
    args, skips = pipeline_element.AsTuple(self._args[self._head.index, m]), nested_map.NestedMap()
    if not self._with_loss:
      self._x[s.index, m] = nested_map.NestedMap(args=args, skips=skips)
      return
    if m not in self._class_ids:
      self._x[self._head.index, m] = nested_map.NestedMap(args=args, skips=skips)
      self._class_ids[m] = self._CallLoss(m, self._loss.ClassIds)
    with tf.device(s.device):
      ids = [each - s.first for each in self._class_ids[m]]
    self._x[s.index, m] = nested_map.NestedMap(args=(*args, ids), skips=skips)

  def _Give(self, s: stage_lib.Stage, m: int, y: Any, sums: nested_map.NestedMap) -> None:
    if not isinstance(s, vocabulary_slices.Slice):
      super()._Give(s, m, y, sums)
    elif self._with_loss:
      self._statistics[m][s.number] = y.args
    else:
      self._logits[m].append(y.args)
      if s is self._slices[-1]:
        with tf.device(self._head.device):
          self._args[len(self._stages), m] = tf.concat(self._logits.pop(m), axis=-1)

  def _TakeStatistics(self, m: int) -> list[list[chunked_logits.SliceStatistics]]:
    slice_statistics = self._statistics.pop(m)
    return [slice_statistics[s.number] for s in self._slices]

  def _TakeGradient(self, s: stage_lib.Stage, m: int) -> list[tf.Tensor] | None:
    if not isinstance(s, vocabulary_slices.Slice):
      if m in self._dargs_of_slices and s.index + 1 == self._head.index:
        with tf.device(s.device):
          self._dargs[self._head.index, m] = leaves.AddUp(self._dargs_of_slices.pop(m))
      return super()._TakeGradient(s, m)
    if m not in self._loss_gradients:
      gradients, sums = self._CallLoss(
        m, self._loss.LossGradient, self._head.AllAccumulators(), self._TakeStatistics(m)
      )
      self._loss_gradients[m] = gradients
      super()._Give(self._head, m, (), sums)
    return self._loss_gradients[m][s.number]

  def _GiveGradient(self, s: stage_lib.Stage, m: int, dx: list[tf.Tensor]) -> None:
    if not isinstance(s, vocabulary_slices.Slice):
      super()._GiveGradient(s, m, dx)
      if self._tables and not s.index and s.needs_dx:
        self._AddGradientOfRows(m, self._dargs.pop((0, m))[0])
    elif s.needs_dx:
      self._dargs_of_slices[m].append(dx)

  def _LookUp(self, s: stage_lib.Stage, m: int) -> None:
    """Replaces the ids of stage 0 by their rows."""
    ids, *extras = self._x[0, m].args
    with tf.control_dependencies(self._before_lookup), tf.name_scope(f'look_up_{m}'):
      rows = self._table.LookUpIn(self._tables, ids, s.device)
    self._before_lookup = self._walk.Before(s)
    self._x[0, m] = nested_map.NestedMap(args=(rows, *extras), skips=self._x[0, m].skips)

  def _AddGradientOfRows(self, m: int, dy: tf.Tensor) -> None:
    ids, *_ = pipeline_element.AsTuple(self._args[0, m])
    for table in self._tables:
      if not table.has_weight_gradient:
        continue
      last = self._last_gradient.get(table.device, [])
      with tf.device(table.device), tf.control_dependencies(last):
        done = self._table.Backward(
          table.variables, table.trained_mask, table.AllAccumulators(), ids - table.first, dy
        )
      self._last_gradient[table.device] = [done]

  def LastResults(self, device: str | None = None) -> list[tf.Tensor]:
    """See `Walk.LastResults`; includes the gradients of rows."""
    row_gradients = [t for d, ts in self._last_gradient.items() if device in (None, d) for t in ts]
    return [*super().LastResults(device), *row_gradients]

  def _CallLoss(self, m: int, function: Any, *args: Any) -> Any:
    """Returns function(StageCall of the head, *args), on its device, outside the walk's chain."""
    s = self._head
    with (
      failures.NoteAction(str(s), s.layers, 'loss', m),
      tf.name_scope(f'loss_{m}'),
      tf.device(s.device),
      stage_math.Running(s.index, s.layers),
    ):
      return function(self._StageCall(s, m), *args)
