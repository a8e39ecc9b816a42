# SPDX-License-Identifier: Apache-2.0
"""Walks over a schedule and emits each action as a call of a stage function on its device.

Each device's actions are chained by control dependencies, so they run in the schedule's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from lingvo_gpipe.core import base_layer, nested_map
from lingvo_gpipe.pipeline.schedule import rematerialisation, schedules
from lingvo_gpipe.pipeline.stages import (
  failures,
  layer_backward,
  leaves,
  shared_functions,
  split_backward,
  stage_functions,
)
from lingvo_gpipe.pipeline.stages import stage as stage_lib


class Engine(Protocol):
  """What an emission needs of the engine."""

  remat_policy: str
  functions: shared_functions.SharedFunctions

  def SeedHashes(self, s: stage_lib.Stage) -> list[int]: ...


class Emission:
  """One walk over a schedule: what has been emitted so far, keyed by (stage, micro-batch)."""

  def __init__(
    self,
    engine: Engine,
    stages: Sequence[stage_lib.Stage],
    inputs: Sequence[tuple[Any, ...]],
    sides: Sequence[Any] | None,
    loss_weights: Sequence[tf.Tensor],
    counter: tf.Tensor | None,
    *,
    do_eval: bool,
    theta: Sequence[Sequence[Any]] | None = None,
  ) -> None:
    self._engine = engine
    self._stages = stages
    self._sides = sides
    self._loss_weights = loss_weights
    # The step counter (see fprop_context) of micro-batch 0; the others count on from it.
    self._counter = tf.constant(0, tf.int64) if counter is None else counter
    self._do_eval = do_eval
    self._theta = theta
    self._last_micro_batch = len(inputs) - 1
    self._actions: set[schedules.Action] = set()
    # What runs last on each device so far: the next action there waits for it.
    self._last: dict[str, list[tf.Tensor]] = {}
    self._sums: list[dict[str, tf.Tensor]] = []
    # For each stage and name there of a layer, what it reported for its state.
    self._layer_sums: dict[tuple[int, str], list[dict[str, tf.Tensor]]] = {}
    # args[k, m] are the arguments of stage k, args[S, m] what the last one returned; x[k, m] is
    # all that stage k takes. _dargs and _dskips hold the gradients of args and skips.
    self.args: dict[tuple[int, int], Any] = {(0, m): x for m, x in enumerate(inputs)}
    self.x: dict[tuple[int, int], nested_map.NestedMap] = {}
    self._skips: dict[tuple[str, int], Any] = {}
    self._dargs: dict[tuple[int, int], Any] = {}
    self._dskips: dict[tuple[str, int], list[Any]] = {}
    # What a forward kept for its backward, and what an input gradient left for the weights.
    self._kept: dict[tuple[int, int], list[tf.Tensor]] = {}
    self._for_weights: dict[tuple[int, int], tuple[Any, list[tf.Tensor]]] = {}

  def Emit(self, schedule: schedules.Schedule) -> None:
    """Emits every action of the schedule, whose stages are where the engine has them."""
    self._last_micro_batch = schedule.num_micro_batches - 1
    self._actions = {action for row in schedule.actions for action in row}
    for action in schedule.EmissionOrder():
      if not self._stages[action.stage].HasAction(action.kind):
        continue
      if self._GivesNothing(action):
        self._GiveGradient(action.stage, action.micro_batch, [])
        continue
      s = self._stages[action.stage]
      # The scopes name the action where TensorFlow reports an error, and in profiles.
      with failures.Named(s, str(action), action.micro_batch), tf.name_scope(f'action_{action}'):
        _ACTIONS[action.kind](self, action.stage, action.micro_batch)

  def _GivesNothing(self, action: schedules.Action) -> bool:
    """Whether it is a backward without any gradient: nothing trained, only integers taken.

    TensorFlow would make a NoOp of its call, with the mark that XLA has to run it.
    """
    if action.kind not in (schedules.Kind.BACKWARD, schedules.Kind.INPUT_GRADIENT):
      return False
    x = self.x[action.stage, action.micro_batch]
    return not self._stages[action.stage].has_weight_gradient and not leaves.Floats(x)

  def Sums(self) -> dict[str, tf.Tensor]:
    """The sums of the metrics and auxiliary losses over all micro-batches."""
    by_name: dict[str, list[tf.Tensor]] = {}
    for sums in self._sums:
      for name, value in sums.items():
        by_name.setdefault(name, []).append(value)
    with tf.device(self._stages[-1].device):
      return {name: tf.add_n(values) for name, values in by_name.items()}

  def LayerSums(self) -> list[tuple[base_layer.BaseLayer, nested_map.NestedMap]]:
    """(layer, what it reported for its state, over all micro-batches), on its stage's device."""
    found = []
    for (k, name), sums in self._layer_sums.items():
      s = self._stages[k]
      with tf.device(s.device):
        total = {key: tf.add_n([one[key] for one in sums]) for key in sums[0]}
      found.append((s.LayerOfSums(name), nested_map.NestedMap(total)))
    return found

  def LastActions(self) -> list[tf.Tensor]:
    """What waits for these comes after all that was emitted on any device."""
    return [t for tensors in self._last.values() for t in tensors]

  def _Call(self, k: int, m: int, call: Any) -> Any:
    """`call(stage, context)` on the stage's device, after all that was emitted there before."""
    s = self._stages[k]
    with tf.device(s.device), tf.control_dependencies(self._last.get(s.device, [])):
      counter = self._counter + m
      weight = self._loss_weights[m] if self._loss_weights else tf.constant(1.0)
      context = stage_functions.Context(
        stage_functions.SeedTensor(self._engine.SeedHashes(s), counter), weight
      )
      result = call(s, context)
    # An action may have nothing to return: the input gradient of a stage without floating inputs.
    returned = leaves.Tensors(result)
    if returned:
      self._last[s.device] = returned[-1:]
    return result

  def _Take(self, k: int, m: int) -> nested_map.NestedMap:
    """What stage k takes of micro-batch m: the stage before's outputs, and skips."""
    skips = {name: self._skips[name, m] for name in self._stages[k].imports}
    args = stage_functions.AsTuple(self.args[k, m])
    self.x[k, m] = nested_map.NestedMap(args=args, skips=nested_map.NestedMap(skips))
    return self.x[k, m]

  def _Give(self, k: int, m: int, y: Any, sums: nested_map.NestedMap) -> None:
    """Hands on what stage k returned; y is empty where the loss is inside the stage."""
    s = self._stages[k]
    if y:
      self.args[k + 1, m] = y.args
      self._skips.update({(name, m): y.skips[name] for name in s.exports})
    self._sums.append({s.AbsoluteName(name): value for name, value in sums.metrics.items()})
    for name, value in sums.layers.items():
      self._layer_sums.setdefault((k, name), []).append(value)

  def _TakeGradient(self, k: int, m: int) -> list[tf.Tensor] | None:
    """The gradients of the floating leaves of what stage k returned; None for the loss's stage."""
    s = self._stages[k]
    if (k + 1, m) not in self._dargs:
      return None
    with tf.device(s.device):
      dskips = {
        name: tf.nest.map_structure(_AddUp, *self._dskips.pop((name, m))) for name in s.exports
      }
    dy = nested_map.NestedMap(args=self._dargs[k + 1, m], skips=nested_map.NestedMap(dskips))
    return leaves.Floats(dy)

  def _GiveGradient(self, k: int, m: int, dx: list[tf.Tensor]) -> None:
    """Hands down the gradients of the floating leaves of what stage k took."""
    if not self._stages[k].needs_dx and self._theta is None:
      return
    gradient = leaves.WithFloats(self.x[k, m], dx)
    self._dargs[k, m] = gradient.args
    for name, value in gradient.skips.items():
      self._dskips.setdefault((name, m), []).append(value)

  def _Side(self, k: int, m: int) -> Any:
    last = self._sides is not None and k == len(self._stages) - 1
    return self._sides[m] if last and self._sides is not None else None

  def _Functions(self, s: stage_lib.Stage) -> stage_functions.StageFunctions:
    return self._engine.functions.Of(s, do_eval=self._do_eval, with_loss=self._sides is not None)

  def _Split(self, s: stage_lib.Stage) -> split_backward.SplitBackward:
    return self._engine.functions.Split(s, with_loss=self._sides is not None)

  def _Keeper(
    self, k: int, m: int
  ) -> split_backward.SplitBackward | layer_backward.LayerBackward | None:
    """Whose ForwardKeep and BackwardKept run; None where a backward starts from the input alone."""
    s = self._stages[k]
    has_backward = not self._do_eval and s.HasAction(schedules.Kind.BACKWARD)
    # The outer form's backward and forward-only steps are not in the schedule.
    halves, whole = (
      schedules.Action(k, kind, m) in self._actions
      for kind in (schedules.Kind.INPUT_GRADIENT, schedules.Kind.BACKWARD)
    )
    if not has_backward or not (halves or whole):
      return None
    policy = self._engine.remat_policy
    if not rematerialisation.RunsAgain(policy, m == self._last_micro_batch):
      return self._Split(s)
    if policy == 'layer' and whole:
      return self._engine.functions.ByLayer(s, with_loss=self._sides is not None)
    return None

  def _Variables(self, s: stage_lib.Stage) -> Sequence[Any]:
    return s.variables if self._theta is None else self._theta[s.index]

  def _RunForward(self, k: int, m: int) -> None:
    x, side = self._Take(k, m), self._Side(k, m)
    keeper = self._Keeper(k, m)
    if keeper is not None:
      y, sums, self._kept[k, m] = self._Call(
        k, m, lambda s, c: keeper.ForwardKeep(s.variables, x, side, c)
      )
    else:
      y, sums = self._Call(
        k, m, lambda s, c: self._Functions(s).Forward(self._Variables(s), x, side, c)
      )
    self._Give(k, m, y, sums)

  def _RunForwardBackward(self, k: int, m: int) -> None:
    x, side = self._Take(k, m), self._Side(k, m)
    dx, sums = self._Call(
      k,
      m,
      lambda s, c: self._Functions(s).ForwardBackward(s.variables, s.AllAccumulators(), x, side, c),
    )
    self._Give(k, m, (), sums)
    self._GiveGradient(k, m, dx)

  def _RunBackward(self, k: int, m: int) -> None:
    x, side, dy = self.x[k, m], self._Side(k, m), self._TakeGradient(k, m)
    keeper, kept = self._Keeper(k, m), self._kept.pop((k, m), None)

    def Call(s: stage_lib.Stage, context: Any) -> Any:
      if keeper is None:
        backward = self._Functions(s).Backward
        return backward(s.variables, s.AllAccumulators(), x, side, context, dy)
      backward = keeper.BackwardKept
      return backward(s.variables, s.AllAccumulators(), x, side, context, kept, dy)

    dx, _ = self._Call(k, m, Call)
    self._GiveGradient(k, m, dx)

  def _RunInputGradient(self, k: int, m: int) -> None:
    x, side, dy = self.x[k, m], self._Side(k, m), self._TakeGradient(k, m)
    kept = self._kept.get((k, m))
    dx, for_weights = self._Call(
      k, m, lambda s, c: self._Split(s).InputGradient(s.variables, x, side, c, kept, dy)
    )
    self._for_weights[k, m] = (dy, for_weights)
    self._GiveGradient(k, m, dx)

  def _RunWeightGradient(self, k: int, m: int) -> None:
    x, side, kept = self.x[k, m], self._Side(k, m), self._kept.pop((k, m), None)
    if (k, m) in self._for_weights:
      dy, for_weights = self._for_weights.pop((k, m))
    else:  # There was no input gradient to compute.
      dy, for_weights = self._TakeGradient(k, m), []

    def Call(s: stage_lib.Stage, context: Any) -> Any:
      gradient = self._Split(s).WeightGradient
      return gradient(s.variables, s.AllAccumulators(), x, side, context, kept, dy, for_weights)

    self._Call(k, m, Call)

  def EmitThetaBackward(
    self, x: Sequence[Sequence[nested_map.NestedMap]], dys: Sequence[Any]
  ) -> tuple[list[list[tf.Tensor]], list[Any]]:
    """Backward with the weights as tensors, micro-batches M-1 ... 0.

    Args:
      x: for each stage and micro-batch what the stage took.
      dys: for each micro-batch a nest like the outputs, with gradients for its floating leaves.

    Returns:
      For each stage the gradients of its floating weights; for each micro-batch a nest like the
      arguments, with gradients for its floating leaves.
    """
    dtheta: list[list[tf.Tensor]] = [[] for _ in self._stages]
    for m, dy in reversed(list(enumerate(dys))):
      self._dargs[len(x), m] = dy
      for s in reversed(self._stages):
        k = s.index
        self.x[k, m] = x[k][m]
        dy = self._TakeGradient(k, m)
        with failures.Named(s, f'{k}B{m}', m), tf.name_scope(f'action_{k}B{m}'):
          grads, dx = self._Call(
            k,
            m,
            lambda s, c, x=x[k][m], dy=dy: self._Functions(s).ThetaBackward(
              self._Variables(s), x, c, dy
            ),
          )
        self._GiveGradient(k, m, dx)
        with tf.device(s.device):
          dtheta[k] = [a + g for a, g in zip(dtheta[k], grads, strict=True)] if dtheta[k] else grads
    return dtheta, [self._dargs[0, m] for m in range(len(dys))]


def _AddUp(*values: Any) -> Any:
  """The sum of floating tensors; of others, which have no gradient, any one."""
  return tf.add_n(values) if len(values) > 1 and leaves.HasGradient(values[0]) else values[0]


_ACTIONS = {
  schedules.Kind.FORWARD: Emission._RunForward,
  schedules.Kind.BACKWARD: Emission._RunBackward,
  schedules.Kind.FORWARD_BACKWARD: Emission._RunForwardBackward,
  schedules.Kind.INPUT_GRADIENT: Emission._RunInputGradient,
  schedules.Kind.WEIGHT_GRADIENT: Emission._RunWeightGradient,
}
