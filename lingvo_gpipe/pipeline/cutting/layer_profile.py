# SPDX-License-Identifier: Apache-2.0
"""Measures the layers of a sequence on a device: forward and backward of each kind of layer.

Each distinct layer (equal structure, equal inputs, the same weights trained) is measured once: as a
copy of its own, whose weights are allocated, used and thrown away before the next one's turn. The
layers themselves, and what variables they may have, are not touched. It runs as stages do: in
training mode, compiled by XLA or not inlined, from inputs of one micro-batch's shapes. Floating
inputs are random in [0, 1), which suits activations, paddings and probabilities; integers and bools
are zero, for that is an index into any table.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import base_layer, fprop_context, nested_map
from lingvo_gpipe.pipeline.cost import stage_work
from lingvo_gpipe.pipeline.cutting import layer_costs
from lingvo_gpipe.pipeline.stages import leaves, stage_functions

_MAX_CALLS = 1 << 14

# Given a device, {path: variable} and an accumulator for each of these it makes what updates them.
UpdateMaker = Callable[[str, Mapping[str, tf.Variable], Sequence[tf.Variable]], Callable[[], Any]]


@dataclasses.dataclass(frozen=True)
class Timing:
  """How to measure: the best of `repeats`, each of enough calls to take `min_seconds`."""

  repeats: int = 3
  min_seconds: float = 0.02


def Measure(
  calls: Sequence[layer_costs.LayerCall],
  weights: layer_costs.Weights,
  *,
  device: str = '',
  xla: bool = True,
  timing: Timing | None = None,
) -> tuple[tuple[float, float], ...]:
  """For each layer the seconds of its forward and of its backward, for one micro-batch.

  The backward has no recomputation in it. It is the time of forward and backward together less that
  of the forward, at least 0; and 0 for layers before the first trained one. The gradient of its
  inputs is part of it where a layer before is trained.

  Args:
    calls: the layers, and the specs of what they take.
    weights: what is trained.
    device: where to measure; '' is TensorFlow's choice.
    xla: True to compile by XLA.
    timing: how to measure.

  Raises:
    ValueError: called inside a tf.function.
  """
  # tf.init_scope would not do: it stops gradient tapes.
  if not tf.executing_eagerly():
    raise ValueError('layers cannot be measured inside a tf.function; plan the cut before it')
  trained = [weights.Trained(call.layer) for call in calls]
  first = stage_work.FirstTrained([bool(paths) for paths in trained])
  known: dict[Any, tuple[float, float]] = {}
  times = []
  for i, (call, paths) in enumerate(zip(calls, trained, strict=True)):
    below = frozenset(path[len(call.layer.path) :] for path in paths)
    needs_dx = i > first
    key = (call.key, below, needs_dx)
    if key not in known:
      with layer_costs.Naming(call.layer, call.specs):
        known[key] = _MeasureCopy(call, below, needs_dx, device, xla, timing or Timing())
    times.append(known[key])
  return tuple(times)


def MeasureSlowdown(
  call: layer_costs.LayerCall,
  weights: layer_costs.Weights,
  devices: Sequence[str],
  *,
  xla: bool = True,
  timing: Timing | None = None,
) -> float:
  """How many times as long a layer takes while all devices run it as on the first one alone.

  Forward and backward, with the gradient of its inputs; at least 1.

  Args:
    call: the layer, and the specs of what it takes.
    weights: what is trained.
    devices: where; all that are to work at one time.
    xla: True to compile by XLA.
    timing: how to measure.
  """
  below = frozenset(path[len(call.layer.path) :] for path in weights.Trained(call.layer))
  # Longer than a layer is measured for: best turns while the others pause would tell nothing.
  timing = timing or Timing(min_seconds=0.2)
  runs = []
  for device in devices:
    with tf.device(device):
      functions = _Functions(call, below, True, device, xla)
    # Outside of tf.device: in another thread, without it, it would be traced again.
    runs.append(_Loop(functions.ForwardBackward, device))
  alone = _BestSeconds(runs[0], timing)
  with concurrent.futures.ThreadPoolExecutor(len(runs)) as pool:
    together = _BestSeconds(lambda count: list(pool.map(lambda run: run(count), runs)), timing)
  return max(together / alone, 1.0)


def MeasureUpdates(
  calls: Sequence[layer_costs.LayerCall],
  weights: layer_costs.Weights,
  maker: UpdateMaker,
  *,
  device: str = '',
  timing: Timing | None = None,
) -> tuple[float, ...]:
  """For each layer the seconds by which it makes an update longer.

  What an update takes in any case, as for the norm of all gradients, is told from the updates of
  each distinct layer and that of all of them together, and left out.

  Args:
    calls: as for `Measure`.
    weights: what is trained.
    maker: makes the updates.
    device: where to measure; '' is TensorFlow's choice.
    timing: how to measure.
  """
  own = [[p for p in weights.Trained(call.layer) if p not in weights.ties] for call in calls]
  keys = [
    (call.key, frozenset(path[len(call.layer.path) :] for path in paths))
    for call, paths in zip(calls, own, strict=True)
  ]
  kinds: dict[Any, tuple[layer_costs.LayerCall, list[str]]] = {}
  for key, call, paths in zip(keys, calls, own, strict=True):
    if paths:
      kinds.setdefault(key, (call, paths))

  def Seconds(members: Sequence[tuple[layer_costs.LayerCall, list[str]]]) -> float:
    with tf.device(device or None):
      trained: dict[str, tf.Variable] = {}
      for call, paths in members:
        _, variables = _Copy(call, device)
        trained.update({path: variables[path[len(call.layer.path) :]] for path in paths})
      accumulators = [tf.Variable(tf.zeros_like(v), trainable=False) for v in trained.values()]
      update = maker(device, trained, accumulators)

      def Update(seeds: tf.Tensor) -> Any:
        with tf.control_dependencies([seeds]):
          return update()

      return _Seconds(Update, device, timing or Timing())

  times = {key: Seconds([kind]) for key, kind in kinds.items()}
  always = 0.0
  if len(kinds) > 1:
    together = Seconds(list(kinds.values()))
    always = max((sum(times.values()) - together) / (len(kinds) - 1), 0.0)
  return tuple(max(times[key] - always, 0.0) if key in times else 0.0 for key in keys)


def _Copy(
  call: layer_costs.LayerCall, device: str
) -> tuple[base_layer.BaseLayer, dict[str, tf.Variable]]:
  """A copy of the layer with weights of its own: (it, {path below it: variable})."""
  layer: base_layer.BaseLayer = call.layer.params.Instantiate()
  layer.InstantiateVariables(device or None)
  start = len(layer.path)
  return layer, {path[start:]: v for path, v in layer.VariablesByPath().items()}


def _MeasureCopy(
  call: layer_costs.LayerCall,
  trained: frozenset[str],
  needs_dx: bool,
  device: str,
  xla: bool,
  timing: Timing,
) -> tuple[float, float]:
  """(seconds of the forward, seconds of the backward) of a copy of the layer."""
  with tf.device(device or None):
    functions = _Functions(call, trained, needs_dx, device, xla)
    forward = _Seconds(functions.Forward, device, timing)
    if not trained and not needs_dx:
      return forward, 0.0
    both = _Seconds(functions.ForwardBackward, device, timing)
    return forward, max(both - forward, 0.0)


class _Functions:
  """Forward, and forward with backward, of a copy of a layer on inputs of its own."""

  def __init__(
    self,
    call: layer_costs.LayerCall,
    trained: frozenset[str],
    needs_dx: bool,
    device: str,
    xla: bool,
  ) -> None:
    self._layer, variables = _Copy(call, device)
    paths = {id(v): path for path, v in variables.items()}
    self._chosen = [paths[id(v)] in trained for v in tf.nest.flatten(self._layer.vars)]
    self._needs_dx = needs_dx
    self._accumulators = [
      tf.Variable(tf.zeros_like(v), trainable=False) for v in self._Trained(self._layer.vars)
    ]
    self._x = tf.nest.map_structure(_Example, (dict(call.skips), call.specs))
    options = stage_functions.FunctionOptions(xla)
    self._forward = tf.function(self._Forward, **options)
    self._backward = tf.function(self._ForwardBackward, **options)
    # What comes back is traced only; the gradients handed in are no constants to XLA.
    traced = self._forward.get_concrete_function(
      self._layer.vars, self._x, tf.TensorSpec([2], tf.int64)
    )
    self._dy = [
      _Example(tf.TensorSpec(t.shape, t.dtype)) for t in leaves.Floats(traced.structured_outputs)
    ]

  def Forward(self, seeds: tf.Tensor) -> Any:
    return self._forward(self._layer.vars, self._x, seeds)

  def ForwardBackward(self, seeds: tf.Tensor) -> Any:
    return self._backward(self._layer.vars, self._accumulators, self._x, seeds, self._dy)

  def _Trained(self, variables: Any) -> list[Any]:
    flat = tf.nest.flatten(variables)
    return [v for v, chosen in zip(flat, self._chosen, strict=True) if chosen]

  def _Forward(self, variables: Any, x: Any, seeds: tf.Tensor) -> Any:
    skips, args = x
    context = fprop_context.FPropContext(False, seed_rows={id(self._layer): seeds})
    with fprop_context.Enter(context):
      theta = self._layer.ThetaFrom(variables)
      out, stashed = self._layer.FPropSkips(theta, nested_map.NestedMap(skips), *args)
    # Auxiliary losses count as outputs.
    return out, dict(stashed), [value for _, _, value, _ in context.aux_losses]

  def _ForwardBackward(
    self,
    variables: Any,
    accumulators: Sequence[tf.Variable],
    x: Any,
    seeds: tf.Tensor,
    dy: Sequence[tf.Tensor],
  ) -> Any:
    weights = self._Trained(variables)
    floats = leaves.Floats(x) if self._needs_dx else []
    with tf.GradientTape() as tape:
      tape.watch(floats)
      y = self._Forward(variables, x, seeds)
    outputs = leaves.Floats(y)
    grads = tape.gradient(outputs, [*weights, *floats], output_gradients=dy)
    stage_functions.Accumulate(accumulators, grads[: len(weights)])
    return y, leaves.DenseGradients(floats, grads[len(weights) :])


def _Example(spec: tf.TensorSpec | None) -> tf.Tensor | None:
  if spec is None:
    return None
  if not spec.dtype.is_floating:
    return tf.zeros(spec.shape, spec.dtype)
  draw = tf.random.stateless_uniform(spec.shape, seed=[1, 2], dtype=tf.float32)
  return tf.cast(draw, spec.dtype)


def _Seconds(call: Callable[[tf.Tensor], Any], device: str, timing: Timing) -> float:
  """The least seconds of one call, as part of a graph; `call` takes seeds."""
  return _BestSeconds(_Loop(call, device), timing)


def _Loop(call: Callable[[tf.Tensor], Any], device: str) -> Callable[[int], None]:
  """What runs so many calls in a graph; it is compiled."""

  def Turn(i: tf.Tensor, *_: tf.Tensor) -> list[tf.Tensor]:
    with tf.device(device or None):
      result = call(tf.stack([i, i]))  # Not the same in every turn: a loop may not leave it out.
      return [i + 1, *leaves.Tensors(result)]

  @tf.function(autograph=False)
  def Run(count: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
    # All results go from turn to turn: what nobody takes would not be computed.
    start = Turn(tf.constant(0, tf.int64))
    results = tf.while_loop(lambda i, *_: i < count, Turn, start, parallel_iterations=1)
    with tf.device(device or None), tf.control_dependencies(results):
      return tf.zeros([]), results

  def Calls(count: int) -> None:
    done, _ = Run(tf.constant(count, tf.int64))
    done.numpy()  # Waits for this device; tf.test.experimental.sync_devices would for all.

  Calls(1)  # Compiles.
  return Calls


def _BestSeconds(run: Callable[[int], object], timing: Timing) -> float:
  """The least seconds of one call of what `_Loop` made."""
  best, count, repeat = float('inf'), 1, 0
  while repeat < timing.repeats:
    start = time.perf_counter()
    run(count)
    seconds = time.perf_counter() - start
    if seconds < timing.min_seconds and count < _MAX_CALLS:
      count *= 2  # Too short to be told from what surrounds it.
      continue
    best = min(best, seconds / count)
    repeat += 1
  return best
