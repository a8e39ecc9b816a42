# SPDX-License-Identifier: Apache-2.0
"""Measures the forward and backward times of the layers of a sequence on a device.

Each distinct layer (by structure, inputs and trained weights) is measured once, on a copy of the
layer whose weights are freed before the next layer is measured. The layers themselves and their
variables are not touched. Copies run as in a stage: in training mode, compiled by XLA or as a
function that is not inlined, with the shapes of one micro-batch. Floating-point inputs are random
in [0, 1), which suits activations, paddings and probabilities. Integers and bools are zero, a valid
index into any table.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import base_layer, fprop_context, nested_map, weight_params
from lingvo_gpipe.pipeline.cost import stage_work
from lingvo_gpipe.pipeline.cutting import layer_costs
from lingvo_gpipe.pipeline.stages import leaves, stage_math

_MAX_CALLS = 1 << 14

# (device, {path: variable}, an accumulator for each variable) -> a function that updates them.
UpdateMaker = Callable[[str, Mapping[str, tf.Variable], Sequence[tf.Variable]], Callable[[], Any]]


@dataclasses.dataclass(frozen=True)
class Timing:
  """The way to measure: the best of `repeats`, each with enough calls to take `min_seconds`."""

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
  """Returns for each layer the seconds of its forward and its backward, for one micro-batch.

  The backward does not include recomputation. It is the time of forward and backward together minus
  the forward's time, at least 0, and 0 for layers before the first trained layer. It includes the
  gradient of the inputs if an earlier layer is trained.

  Args:
    calls: the layers and the specs of their inputs.
    weights: the weights that are trained.
    device: the device to measure on; '' is TensorFlow's choice.
    xla: whether to compile with XLA.
    timing: how to measure.

  Raises:
    ValueError: called inside a tf.function.
  """
  # tf.init_scope would not do: it stops gradient tapes.
  if not tf.executing_eagerly():
    raise ValueError('layers cannot be measured inside a tf.function; make the cut before it')
  trained = [weights.Trained(call.layer) for call in calls]
  first = stage_work.FirstTrained([bool(paths) for paths in trained])
  known: dict[Any, tuple[float, float]] = {}
  times = []
  for i, (call, paths) in enumerate(zip(calls, trained, strict=True)):
    below = frozenset(path[len(call.layer.path) :] for path in paths)
    needs_dx = i > first
    key = (call.key, below, needs_dx)
    if key not in known:
      with layer_costs.LocateErrors(call.layer, call.specs):
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
  """Returns a layer's time while all devices run it, relative to the first device alone; >= 1.

  Measures forward and backward, including the gradient of the inputs.

  Args:
    call: the layer and the specs of its inputs.
    weights: the weights that are trained.
    devices: the devices that work at the same time.
    xla: whether to compile with XLA.
    timing: how to measure.
  """
  below = frozenset(path[len(call.layer.path) :] for path in weights.Trained(call.layer))
  # Longer than in `Measure`: the best of short repeats may be one in which other devices pause.
  timing = timing or Timing(min_seconds=0.2)
  runs = []
  for device in devices:
    with tf.device(device):
      functions = _Functions(call, below, True, device, xla)
    # Outside of tf.device, because the threads run without it and would trace the function again.
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
  """Returns for each layer the seconds that it adds to an update.

  Leaves out the constant part of an update, such as the norm of all gradients. With n distinct
  layers, the sum of their separate updates contains it n times and their common update once.

  Args:
    calls: the layers and the specs of their inputs.
    weights: the weights that are trained.
    maker: makes the updates.
    device: the device to measure on; '' is TensorFlow's choice.
    timing: how to measure.
  """
  updated = [[p for p in weights.Trained(call.layer) if p not in weights.ties] for call in calls]
  keys = [
    (call.key, frozenset(path[len(call.layer.path) :] for path in paths))
    for call, paths in zip(calls, updated, strict=True)
  ]
  kinds: dict[Any, tuple[layer_costs.LayerCall, list[str]]] = {}
  for key, call, paths in zip(keys, calls, updated, strict=True):
    if paths:
      kinds.setdefault(key, (call, paths))

  def Seconds(members: Sequence[tuple[layer_costs.LayerCall, list[str]]]) -> float:
    with tf.device(device or None):
      trained: dict[str, tf.Variable] = {}
      for call, paths in members:
        _, variables = _Copy(call, device)
        trained.update({path: variables[path[len(call.layer.path) :]] for path in paths})
      accumulators = list(map(weight_params.NewAccumulator, trained.values()))
      update = maker(device, trained, accumulators)

      @tf.function(autograph=False)  # Traced once, though `_Loop` calls it twice.
      def Update(seeds: tf.Tensor) -> Any:
        with tf.control_dependencies([seeds]):
          return update()

      return _Seconds(Update, device, timing or Timing())

  times = {key: Seconds([kind]) for key, kind in kinds.items()}
  constant = 0.0
  if len(kinds) > 1:
    together = Seconds(list(kinds.values()))
    constant = max((sum(times.values()) - together) / (len(kinds) - 1), 0.0)
  return tuple(max(times[key] - constant, 0.0) if key in times else 0.0 for key in keys)


def _Copy(
  call: layer_costs.LayerCall, device: str
) -> tuple[base_layer.BaseLayer, dict[str, tf.Variable]]:
  """Returns (a copy of the layer with new weights, {path below the layer: variable})."""
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
  """Returns the seconds of the forward and of the backward of a copy of the layer."""
  with tf.device(device or None):
    functions = _Functions(call, trained, needs_dx, device, xla)
    forward = _Seconds(functions.Forward, device, timing)
    if not trained and not needs_dx:
      return forward, 0.0
    both = _Seconds(functions.ForwardBackward, device, timing)
    return forward, max(both - forward, 0.0)


class _Functions:
  """The forward, and the forward with backward, of a copy of a layer on example inputs."""

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
    self._is_trained = [paths[id(v)] in trained for v in tf.nest.flatten(self._layer.vars)]
    self._needs_dx = needs_dx
    self._accumulators = list(
      map(weight_params.NewAccumulator, self._TrainedLeaves(self._layer.vars))
    )
    self._x = tf.nest.map_structure(_MakeExample, (dict(call.skips), call.specs))
    self._forward = stage_math.Traced(self._Forward, xla)
    self._backward = stage_math.Traced(self._ForwardBackward, xla)
    # Traced for its output specs. The output gradients are arguments, so that XLA cannot fold them.
    traced = self._forward.get_concrete_function(
      self._layer.vars, self._x, tf.TensorSpec([2], tf.int64)
    )
    self._dy = [
      _MakeExample(tf.TensorSpec(t.shape, t.dtype))
      for t in leaves.Floats(traced.structured_outputs)
    ]

  def Forward(self, seeds: tf.Tensor) -> Any:
    return self._forward(self._layer.vars, self._x, seeds)

  def ForwardBackward(self, seeds: tf.Tensor) -> Any:
    return self._backward(self._layer.vars, self._accumulators, self._x, seeds, self._dy)

  def _TrainedLeaves(self, variables: Any) -> list[Any]:
    flat = tf.nest.flatten(variables)
    return [v for v, is_trained in zip(flat, self._is_trained, strict=True) if is_trained]

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
    weights = self._TrainedLeaves(variables)
    floats = leaves.Floats(x) if self._needs_dx else []
    with tf.GradientTape() as tape:
      tape.watch(floats)
      y = self._Forward(variables, x, seeds)
    outputs = leaves.Floats(y)
    grads = tape.gradient(outputs, [*weights, *floats], output_gradients=dy)
    stage_math.Accumulate(accumulators, grads[: len(weights)])
    return y, leaves.DenseGradients(floats, grads[len(weights) :])


def _MakeExample(spec: tf.TensorSpec | None) -> tf.Tensor | None:
  if spec is None:
    return None
  if not spec.dtype.is_floating:
    return tf.zeros(spec.shape, spec.dtype)
  draw = tf.random.stateless_uniform(spec.shape, seed=[1, 2], dtype=tf.float32)
  return tf.cast(draw, spec.dtype)


def _Seconds(call: Callable[[tf.Tensor], Any], device: str, timing: Timing) -> float:
  """Returns the least seconds of one call within a graph; `call` takes seeds."""
  return _BestSeconds(_Loop(call, device), timing)


def _Loop(call: Callable[[tf.Tensor], Any], device: str) -> Callable[[int], None]:
  """Returns a function that runs `count` calls in one graph; it is already compiled."""

  def Turn(i: tf.Tensor, *_: tf.Tensor) -> list[tf.Tensor]:
    with tf.device(device or None):
      # The seeds differ in every turn, so that the call cannot be moved out of the loop.
      result = call(tf.stack([i, i]))
      return [i + 1, *leaves.Tensors(result)]

  @tf.function(autograph=False)
  def Run(count: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
    # All results are loop variables, because unused results would not be computed.
    start = Turn(tf.constant(0, tf.int64))
    results = tf.while_loop(lambda i, *_: i < count, Turn, start, parallel_iterations=1)
    with tf.device(device or None), tf.control_dependencies(results):
      return tf.zeros([]), results

  def Calls(count: int) -> None:
    done, _ = Run(tf.constant(count, tf.int64))
    done.numpy()  # Waits for this device; tf.test.experimental.sync_devices waits for all devices.

  Calls(1)  # Compiles.
  return Calls


def _BestSeconds(run: Callable[[int], object], timing: Timing) -> float:
  """Returns the least seconds of one call; `run` comes from `_Loop`."""
  best, count, repeat = float('inf'), 1, 0
  while repeat < timing.repeats:
    start = time.perf_counter()
    run(count)
    seconds = time.perf_counter() - start
    if seconds < timing.min_seconds and count < _MAX_CALLS:
      count *= 2  # Too short compared to the overhead.
      continue
    best = min(best, seconds / count)
    repeat += 1
  return best
