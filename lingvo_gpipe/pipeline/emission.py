# SPDX-License-Identifier: Apache-2.0
"""The walk over a schedule: each action becomes a call of a stage function on its device.

`Walk` emits actions in any order that it is given; training, the backward under a user's tape and
decoding all use it. `Emission` is a walk that passes activations forward and gradients back:

    F[k, m]   takes x[k, m] = (args[k, m], skips)      gives args[k + 1, m], skips, sums
    B[k, m]   takes x[k, m], dargs[k + 1, m], dskips   gives dargs[k, m], dskips

O[k, m] and L[k, m] replace what waits for B[k, m] by a copy on the host, and back.

args[0, m] are the inputs of micro-batch m; args[S, m] are the outputs of the last of S stages.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import base_layer, nested_map, pipeline_element, weight_params
from lingvo_gpipe.pipeline import host_copies
from lingvo_gpipe.pipeline.schedule import actions, rematerialisation, schedules
from lingvo_gpipe.pipeline.stages import failures, leaves, micro_batch, shared_functions, stage_math
from lingvo_gpipe.pipeline.stages import stage as stage_lib

_Kind = actions.Kind


class Walk:
  """Emits actions, each on its stage's device after the action before it on that device."""

  def __init__(self, stages: Sequence[stage_lib.Stage]) -> None:
    self._stages = stages
    # The last result on each device: the next action there waits for it.
    self._last: dict[str, list[tf.Tensor]] = {}
    # Tensors that were copied to the host from each device since its last action, and before it.
    # The next action waits for the latter (see `actions.WithEndsOfCopies`).
    self._copying: dict[str, list[tf.Tensor]] = {}
    self._ending: dict[str, list[tf.Tensor]] = {}

  def Run(
    self, order: Iterable[actions.Action], emit: Callable[[stage_lib.Stage, actions.Action], None]
  ) -> None:
    """Calls emit(stage, action) for each action, which enters `On` and then calls `Done`."""
    for action in order:
      s = self._stages[action.stage]
      # The scopes name the action in TensorFlow's errors and in profiles.
      with failures.NoteAction(str(s), s.layers, str(action), action.micro_batch):
        with tf.name_scope(f'action_{action}'):
          emit(s, action)

  @contextlib.contextmanager
  def On(self, s: stage_lib.Stage) -> Iterator[None]:
    """Runs the enclosed call of a stage's function on its device, after all earlier calls there."""
    with tf.device(s.device), tf.control_dependencies(self.Before(s)):
      with stage_math.Running(s.index, s.layers):
        yield

  def Done(self, s: stage_lib.Stage, result: Any) -> None:
    """Makes the next call on the stage's device wait for the result of this one."""
    # A call may return nothing: the input gradient of a stage without floating inputs.
    if results := leaves.Tensors(result):
      self._last[s.device] = results[-1:]
      self._ending[s.device] = self._copying.pop(s.device, [])

  def Before(self, s: stage_lib.Stage) -> list[tf.Tensor]:
    """Returns the results that the next call on the stage's device waits for."""
    return [*self._last.get(s.device, []), *self._ending.get(s.device, [])]

  def RegisterOffload(self, s: stage_lib.Stage, tensors: Any) -> None:
    """Makes the call after the next one on the stage's device wait for tensors on the host."""
    self._copying.setdefault(s.device, []).extend(leaves.Tensors(tensors))

  def LastResults(self, device: str | None = None) -> list[tf.Tensor]:
    """Returns the last result on the device, or on every device; the walk there ends with it."""
    return [t for d, tensors in self._last.items() if device in (None, d) for t in tensors]


class Emission:
  """The calls of one walk over a schedule, and the tensors that pass between them."""

  def __init__(
    self,
    stages: Sequence[stage_lib.Stage],
    functions: shared_functions.SharedFunctions,
    micro_batches: Sequence[micro_batch.MicroBatch],
    counter: tf.Tensor | None,
    *,
    do_eval: bool,
    with_loss: bool,
    theta: Sequence[Sequence[Any]] | None = None,
    copies: host_copies.HostCopies | None = None,
    is_dense: Callable[[stage_lib.Stage, int], bool] = lambda s, leaf: True,
  ) -> None:
    """Emits nothing yet.

    Args:
      stages: the stages of one replica.
      functions: the functions of the stages.
      micro_batches: the micro-batches of this replica.
      counter: int64 scalar, the step counter (see `fprop_context`) of micro-batch 0; the following
        ones count up from it. None in evaluation.
      do_eval: the layers' mode.
      with_loss: whether the last stage runs the loss.
      theta: for each stage the weights of its layers as tensors; None for the variables.
      copies: copies tensors to the host and back, if the schedule says so.
      is_dense: whether a trained leaf of a stage is known to get dense gradients; its sparse
        gradients are then added to its accumulator at once instead of kept.
    """
    self._walk = Walk(stages)
    self._stages = stages
    self._functions = functions
    self._micro_batches = micro_batches
    # In the form of `SeedTensor`: micro-batches add their number to the constant part.
    self._counter = tf.stack([tf.zeros([], tf.int64), 0 if counter is None else counter])
    self._do_eval = do_eval
    self._with_loss = with_loss
    self._theta = theta
    self._copies = copies or host_copies.HostCopies()
    self._is_dense = is_dense
    # The part that backward of (stage, micro-batch) recomputes; pairs without one are missing.
    self._recompute: dict[tuple[int, int], shared_functions.Recompute] = {}
    # Between actions: activations and gradients, see the module. Gradients are flat lists, one
    # tensor for each floating leaf; dskips has one list for each stage that took the skip.
    self._args: dict[tuple[int, int], Any] = {(0, m): b.args for m, b in enumerate(micro_batches)}
    self._skips: dict[tuple[str, int], Any] = {}
    self._x: dict[tuple[int, int], nested_map.NestedMap] = {}
    self._dargs: dict[tuple[int, int], list[tf.Tensor]] = {}
    self._dskips: dict[tuple[str, int], list[list[tf.Tensor]]] = {}
    # Tensors that F keeps for backward, and tensors that I passes to W.
    self._residuals: dict[tuple[int, int], list[tf.Tensor] | None] = {}
    self._for_weights: dict[tuple[int, int], tuple[Any, list[tf.Tensor]]] = {}
    # The sums of metrics of each action, and the sums that each layer reported for its state.
    self._sums: list[dict[str, tf.Tensor]] = []
    self._rows: dict[int, dict[str, tf.Tensor]] = {}
    self._layer_sums: dict[tuple[int, str], list[dict[str, tf.Tensor]]] = {}
    # {(stage, index of a trained leaf): {micro-batch: sparse gradients}}.
    self._sparse_gradients: dict[tuple[int, int], dict[int, list[tf.IndexedSlices]]] = {}

  def Emit(
    self, schedule: schedules.Schedule, remat_policy: rematerialisation.Policy = 'stage'
  ) -> None:
    """Emits every action of the schedule that has any work at its stage."""
    order = [a for a in schedule.EmissionOrder() if self._stages[a.stage].HasAction(a.kind)]
    self._recompute = rematerialisation.ByMicroBatch([order], remat_policy)
    self._walk.Run(order, self._EmitAction)

  def EmitThetaBackward(
    self, stage_inputs: Sequence[Sequence[nested_map.NestedMap]], dys: Sequence[Any]
  ) -> tuple[list[list[tf.Tensor]], list[Any]]:
    """Emits backward of weights given as tensors, micro-batches M-1 ... 0.

    Args:
      stage_inputs: for each stage and micro-batch its x, as `StageInputs` returned it.
      dys: for each micro-batch a nest like the outputs, with gradients for its floating leaves.

    Returns:
      For each stage the gradients of its floating weights; for each micro-batch a nest like the
      arguments, with gradients for its floating leaves.
    """
    num_stages, num_micro_batches = len(stage_inputs), len(dys)
    dtheta: list[list[tf.Tensor]] = [[] for _ in self._stages]
    dtypes: list[list[tf.DType]] = [[] for _ in self._stages]
    for m, dy in enumerate(dys):
      self._dargs[num_stages, m] = leaves.Floats(dy)
      self._x.update({(k, m): stage_inputs[k][m] for k in range(num_stages)})

    def Backward(s: stage_lib.Stage, action: actions.Action) -> None:
      k, m = s.index, action.micro_batch
      dy, functions = self._TakeGradient(s, m), self._FunctionsFor(s, m)
      grads, dx = self._Call(s, m, functions.ThetaBackward, dy)
      self._GiveGradient(s, m, dx)
      with tf.device(s.device):
        wide = [tf.cast(g, weight_params.AccumulatorDtype(g.dtype)) for g in grads]
        dtheta[k] = list(map(tf.add, dtheta[k], wide)) if dtheta[k] else wide
        dtypes[k] = [g.dtype for g in grads]

    pairs = itertools.product(reversed(range(num_micro_batches)), reversed(range(num_stages)))
    self._walk.Run([actions.Action(k, _Kind.BACKWARD, m) for m, k in pairs], Backward)
    for s in self._stages:
      with tf.device(s.device):
        dtheta[s.index] = list(map(tf.cast, dtheta[s.index], dtypes[s.index]))
    return dtheta, [
      leaves.WithFloats(self._x[0, m].args, self._dargs[0, m]) for m in range(num_micro_batches)
    ]

  # ---- results -----------------------------------------------------------------------------------

  def Outputs(self) -> list[Any]:
    """Returns the last layer's outputs of each micro-batch, of a walk without a loss."""
    return [self._args[len(self._stages), m] for m in range(len(self._micro_batches))]

  def StageInputs(self) -> list[list[nested_map.NestedMap]]:
    """Returns x = NestedMap(args, skips) of each stage and micro-batch."""
    micro_batches = range(len(self._micro_batches))
    return [[self._x[s.index, m] for m in micro_batches] for s in self._stages]

  def Sums(self) -> dict[str, tf.Tensor]:
    """Returns the sums of the metrics and auxiliary losses over all micro-batches."""
    with tf.device(self._stages[-1].device):
      return {name: tf.add_n(values) for name, values in _ByName(self._sums).items()}

  def Rows(self) -> dict[str, tf.Tensor]:
    """Returns the metrics with a row for each example, of all micro-batches in order."""
    rows = [self._rows[m] for m in sorted(self._rows)]
    with tf.device(self._stages[-1].device):
      return {name: tf.concat(values, axis=0) for name, values in _ByName(rows).items()}

  def LayerSums(self) -> list[tuple[base_layer.BaseLayer, nested_map.NestedMap]]:
    """Returns the layers that reported sums for their state, and the sums over all micro-batches.

    The sums are on the device of the layer's stage.
    """
    totals = []
    for (k, name), sums in self._layer_sums.items():
      s = self._stages[k]
      with tf.device(s.device):
        total = {key: tf.add_n([each[key] for each in sums]) for key in sums[0]}
      totals.append((s.LayerOfSums(name), nested_map.NestedMap(total)))
    return totals

  def SparseGradients(self) -> Iterator[tuple[stage_lib.Stage, int, list[list[tf.IndexedSlices]]]]:
    """Yields stages, trained leaves and for each micro-batch the sparse gradients that wait."""
    for (k, leaf), by_micro_batch in self._sparse_gradients.items():
      yield self._stages[k], leaf, [by_micro_batch[m] for m in sorted(by_micro_batch)]

  def LastResults(self, device: str | None = None) -> list[tf.Tensor]:
    """See `Walk.LastResults`."""
    return self._walk.LastResults(device)

  # ---- one action --------------------------------------------------------------------------------

  def _EmitAction(self, s: stage_lib.Stage, action: actions.Action) -> None:
    m = action.micro_batch
    if action.kind == _Kind.FORWARD:
      self._Forward(s, m)
    elif action.kind == _Kind.FORWARD_BACKWARD:
      self._ForwardBackward(s, m)
    elif action.kind == _Kind.WEIGHT_GRADIENT:
      self._WeightGradient(s, m)
    elif action.kind == _Kind.OFFLOAD:
      self._Offload(s, m)
    elif action.kind == _Kind.LOAD:
      self._Load(s, m)
    elif not s.has_weight_gradient and not leaves.Floats(self._x[s.index, m]):
      # A backward without any gradient: nothing is trained, and x has integers only. TensorFlow
      # would replace its call by a NoOp, but still ask XLA to run it.
      self._GiveGradient(s, m, [])
    elif action.kind == _Kind.BACKWARD:
      self._Backward(s, m)
    else:
      self._InputGradient(s, m)

  def _Forward(self, s: stage_lib.Stage, m: int) -> None:
    self._TakeInput(s, m)
    y, sums, self._residuals[s.index, m] = self._Call(s, m, self._FunctionsFor(s, m).Forward)
    self._Give(s, m, y, sums)

  def _ForwardBackward(self, s: stage_lib.Stage, m: int) -> None:
    self._TakeInput(s, m)
    functions, sinks = self._FunctionsFor(s, m), s.AllAccumulators()
    dx, sums, accumulated = self._Call(s, m, functions.ForwardBackward, sinks)
    self._Give(s, m, (), sums)
    self._TakeSparse(s, m, accumulated)
    self._GiveGradient(s, m, dx)

  def _Backward(self, s: stage_lib.Stage, m: int) -> None:
    dy, residuals = self._TakeGradient(s, m), self._residuals.pop((s.index, m))
    functions, sinks = self._FunctionsFor(s, m), s.AllAccumulators()
    dx, accumulated = self._Call(s, m, functions.Backward, sinks, residuals, dy)
    self._TakeSparse(s, m, accumulated)
    self._GiveGradient(s, m, dx)

  def _InputGradient(self, s: stage_lib.Stage, m: int) -> None:
    dy, residuals = self._TakeGradient(s, m), self._residuals.get((s.index, m))
    functions = self._FunctionsFor(s, m)
    dx, for_weights = self._Call(s, m, functions.InputGradient, residuals, dy)
    self._for_weights[s.index, m] = (dy, for_weights)
    self._GiveGradient(s, m, dx)

  def _WeightGradient(self, s: stage_lib.Stage, m: int) -> None:
    residuals = self._residuals.pop((s.index, m), None)
    if (s.index, m) in self._for_weights:
      dy, for_weights = self._for_weights.pop((s.index, m))
    else:  # There was no input gradient to compute.
      dy, for_weights = self._TakeGradient(s, m), []
    functions, sinks = self._FunctionsFor(s, m), s.AllAccumulators()
    accumulated = self._Call(s, m, functions.WeightGradient, sinks, residuals, dy, for_weights)
    self._TakeSparse(s, m, accumulated)

  def _Offload(self, s: stage_lib.Stage, m: int) -> None:
    on_host = self._copies.Offload(self._WaitingTensors(s, m), s.device, self._walk.Before(s))
    self._walk.RegisterOffload(s, on_host)
    self._SetWaiting(s, m, on_host)

  def _Load(self, s: stage_lib.Stage, m: int) -> None:
    self._SetWaiting(
      s, m, self._copies.Load(self._WaitingTensors(s, m), s.device, self._walk.Before(s))
    )

  # ---- parts of an action ------------------------------------------------------------------------

  def _FunctionsFor(self, s: stage_lib.Stage, m: int) -> Any:
    """Returns the functions of all actions of a micro-batch in a stage; see `StageFunctions`."""
    recompute = self._recompute.get(
      (self._StageInSchedule(s), m), rematerialisation.Recompute.STAGE
    )
    return self._functions.For(s, recompute, do_eval=self._do_eval, with_loss=self._with_loss)

  def _StageInSchedule(self, s: stage_lib.Stage) -> int:
    """Returns the number of the stage in the schedule."""
    return s.index

  def _Call(self, s: stage_lib.Stage, m: int, function: Callable[..., Any], *args: Any) -> Any:
    """Returns function(StageCall of micro-batch m, *args), as the next call of the walk."""
    with self._walk.On(s):
      result = function(self._StageCall(s, m), *args)
    self._walk.Done(s, result)
    return result

  def _WaitingTensors(self, s: stage_lib.Stage, m: int) -> Any:
    """Returns all tensors of a micro-batch that wait for its backward: x and the residuals."""
    return self._x[s.index, m], self._residuals[s.index, m]

  def _SetWaiting(self, s: stage_lib.Stage, m: int, tensors: Any) -> None:
    self._x[s.index, m], self._residuals[s.index, m] = tensors

  def _StageCall(self, s: stage_lib.Stage, m: int) -> stage_math.StageCall:
    weight = self._micro_batches[m].loss_weight if self._with_loss else tf.constant(1.0)
    return stage_math.StageCall(
      variables=s.variables if self._theta is None else self._theta[s.index],
      x=self._x[s.index, m],
      side=self._micro_batches[m].side if self._HasLoss(s) else None,
      context=stage_math.Context(stage_math.SeedTensor(s.seed_hashes, self._counter, m), weight),
    )

  def _HasLoss(self, s: stage_lib.Stage) -> bool:
    return self._with_loss and s.index == len(self._stages) - 1

  def _TakeInput(self, s: stage_lib.Stage, m: int) -> None:
    """Sets x of the stage: the outputs of the stage before, and the skips that end here."""
    skips = nested_map.NestedMap({name: self._skips[name, m] for name in s.imports})
    args = pipeline_element.AsTuple(self._args[s.index, m])
    self._x[s.index, m] = nested_map.NestedMap(args=args, skips=skips)

  def _Give(self, s: stage_lib.Stage, m: int, y: Any, sums: nested_map.NestedMap) -> None:
    """Passes the results of a stage on; y is empty in the stage with the loss."""
    if y:
      self._args[s.index + 1, m] = y.args
      self._skips.update({(name, m): y.skips[name] for name in s.exports})
    self._sums.append({s.AbsoluteName(name): value for name, value in sums.metrics.items()})
    if sums.rows:
      self._rows[m] = sums.rows
    for name, value in sums.layers.items():
      self._layer_sums.setdefault((s.index, name), []).append(value)

  def _TakeSparse(self, s: stage_lib.Stage, m: int, accumulated: stage_math.Accumulated) -> None:
    for leaf, gradients in accumulated.sparse.items():
      # Saves memory: a table that is also the output matrix has another use in a later stage, whose
      # backward came before.
      if self._is_dense(s, leaf):
        AddSparse(s, leaf, gradients)
      else:
        self._sparse_gradients.setdefault((s.index, leaf), {})[m] = gradients

  def _TakeGradient(self, s: stage_lib.Stage, m: int) -> list[tf.Tensor] | None:
    """Returns the gradients of the floating leaves of y; None in the stage with the loss."""
    if (s.index + 1, m) not in self._dargs:
      return None
    with tf.device(s.device):
      dskips = [leaves.AddUp(self._dskips.pop((name, m))) for name in s.exports]
    return [*self._dargs.pop((s.index + 1, m)), *(g for grads in dskips for g in grads)]

  def _GiveGradient(self, s: stage_lib.Stage, m: int, dx: list[tf.Tensor]) -> None:
    """Passes on the gradients of the floating leaves of x, if an earlier stage needs them."""
    if not s.needs_dx and self._theta is None:
      return
    # In tf.nest order: the arguments, then the skips by name.
    grads, x = iter(dx), self._x[s.index, m]
    self._dargs[s.index, m] = [next(grads) for _ in leaves.Floats(x.args)]
    for name in s.imports:
      dskip = [next(grads) for _ in leaves.Floats(x.skips[name])]
      self._dskips.setdefault((name, m), []).append(dskip)


def AddSparse(s: stage_lib.Stage, leaf: int, gradients: Iterable[tf.IndexedSlices]) -> None:
  """Adds sparse gradients to the accumulator of a trained leaf of a stage."""
  with tf.device(s.device):
    for gradient in gradients:
      stage_math.Accumulate([s.AllAccumulators()[leaf]], [gradient])


def _ByName(mappings: Iterable[Mapping[str, tf.Tensor]]) -> dict[str, list[tf.Tensor]]:
  by_name: dict[str, list[tf.Tensor]] = {}
  for mapping in mappings:
    for name, value in mapping.items():
      by_name.setdefault(name, []).append(value)
  return by_name
