# SPDX-License-Identifier: Apache-2.0
"""`SharedFunctions`: what the stages run, the same for stages of equal structure."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lingvo_gpipe.pipeline.stages import layer_backward, split_backward, stage_functions
from lingvo_gpipe.pipeline.stages import stage as stage_lib


class SharedFunctions:
  """Makes the functions of a stage when they are asked for.

  Attributes:
    xla: whether they are compiled by XLA.
    num_batch_shapes: how many shapes of batches are expected; for more a warning tells of the
      compilations.
  """

  def __init__(self, num_stages: int, loss_fn: stage_functions.LossFn | None, xla: bool) -> None:
    self._num_stages = num_stages
    self._loss_fn = loss_fn
    self.xla = xla
    self._functions: dict[Any, stage_functions.StageFunctions] = {}
    self._of_stage: dict[Any, stage_functions.StageFunctions] = {}
    self._split: dict[int, split_backward.SplitBackward] = {}
    self._by_layer: dict[int, layer_backward.LayerBackward] = {}
    self.num_batch_shapes = 1

  def WithoutXla(self) -> SharedFunctions:
    """Makes the same functions anew, without XLA."""
    plain = SharedFunctions(self._num_stages, self._loss_fn, xla=False)
    plain.num_batch_shapes = self.num_batch_shapes
    return plain

  @property
  def num_traces(self) -> int:
    """How many times a stage function was traced so far."""
    return sum(f.num_traces for f in self._functions.values())

  def Of(
    self, s: stage_lib.Stage, *, do_eval: bool, with_loss: bool
  ) -> stage_functions.StageFunctions:
    """The traced functions of a stage; stages of equal structure get the same object."""
    # Structures are dear to compare, and there are many actions.
    # Eager steps run one replica after the other: none may wait for another.
    is_one_of_all = with_loss and not do_eval and not tf.executing_eagerly()
    replica_sum = s.replica_sum if is_one_of_all else None
    of_stage = (s.index, do_eval, with_loss, replica_sum)
    if of_stage not in self._of_stage:
      self._of_stage[of_stage] = self._Shared(s, do_eval, with_loss, replica_sum)
    functions = self._of_stage[of_stage]
    functions.UseFor(s.index, s.layers)
    functions.num_batch_shapes = self.num_batch_shapes
    return functions

  def _Shared(
    self,
    s: stage_lib.Stage,
    do_eval: bool,
    with_loss: bool,
    replica_sum: stage_functions.ReplicaSum | None,
  ) -> stage_functions.StageFunctions:
    loss_fn = self._loss_fn if with_loss and s.index == self._num_stages - 1 else None
    # Evaluation has no backward, so what is trained does not tell its stages apart.
    trained = s.trained_mask if not do_eval else (False,) * len(s.trained_mask)
    needs_dx = s.needs_dx and not do_eval
    key = (do_eval, loss_fn is not None, s.exports, trained, needs_dx, s.structure, replica_sum)
    if key not in self._functions:
      self._functions[key] = stage_functions.StageFunctions(
        s.layers,
        loss_fn=loss_fn,
        exports=s.exports,
        trained=trained,
        needs_dx=needs_dx,
        do_eval=do_eval,
        xla=self.xla,
        replica_sum=replica_sum,
      )
    return self._functions[key]

  def Split(self, s: stage_lib.Stage, *, with_loss: bool) -> split_backward.SplitBackward:
    """The functions of a stage whose backward comes in pieces; shared as those of `Of` are."""
    functions = self.Of(s, do_eval=False, with_loss=with_loss)
    if id(functions) not in self._split:
      self._split[id(functions)] = split_backward.SplitBackward(functions, self.xla)
    return self._split[id(functions)]

  def ByLayer(self, s: stage_lib.Stage, *, with_loss: bool) -> layer_backward.LayerBackward:
    """The functions of a stage of which each layer's input is kept; shared as those of `Of` are."""
    functions = self.Of(s, do_eval=False, with_loss=with_loss)
    if id(functions) not in self._by_layer:
      self._by_layer[id(functions)] = layer_backward.LayerBackward(functions, self.xla)
    return self._by_layer[id(functions)]
