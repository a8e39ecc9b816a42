# SPDX-License-Identifier: Apache-2.0
"""What a planner needs to know of a sequence of layers: counted, traced and perhaps measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import base_layer, hyperparams, nested_map
from lingvo_gpipe.pipeline.cutting import layer_costs, layer_profile
from lingvo_gpipe.pipeline.stages import stage_math
from lingvo_gpipe.planner import model_costs


@dataclasses.dataclass(frozen=True)
class Measuring:
  """What is measured, and where.

  Attributes:
    devices: layers run on the first one; a host's others make it slower (`slowdown`).
    loss_fn: what the last stage runs behind the layers; its time is added to the last layer's.
    side_specs: the specs of what the loss takes beside the outputs, for a micro-batch of that size.
    update: makes updates of weights.
  """

  devices: Sequence[str]
  loss_fn: stage_math.LossFn
  side_specs: Callable[[int], Any]
  update: layer_profile.UpdateMaker


def Collect(
  layers: Sequence[base_layer.BaseLayer],
  input_specs: Callable[[int], Sequence[Any]],
  sizes: Sequence[int],
  weights: layer_costs.Weights,
  *,
  averages_per_weight: float = 0,
  xla: bool = True,
  measuring: Measuring | None = None,
) -> model_costs.ModelCosts:
  """The costs of the layers at some sizes of micro-batch; allocates no weight unless it measures.

  Args:
    layers: the flat list.
    input_specs: the specs of the first layer's arguments for a micro-batch of that size.
    sizes: at least one.
    weights: what is trained, and the optimizer slots.
    averages_per_weight: how many moving averages a trained weight has.
    xla: whether XLA compiles the stages.
    measuring: runs each distinct layer, too, with each size, and its update; None: nothing runs.
  """
  samples = {}
  updates: Sequence[float | None] = [None] * len(layers)
  for size in sizes:
    found = layer_costs.LayerCosts(layers, input_specs(size))
    num_bytes = found.Bytes(weights, xla)
    seconds: Sequence[tuple[float, float] | None] = [None] * len(layers)
    if measuring is not None:
      seconds = _Seconds(found, size, weights, xla, measuring)
      if size == sizes[0]:
        updates = layer_profile.MeasureUpdates(
          found.calls, weights, measuring.update, device=measuring.devices[0]
        )
    samples[size] = [
      model_costs.LayerSample(
        flops=cost.flops,
        inputs=b.inputs,
        outputs=layer_costs.SpecBytes(cost.out_specs),
        inner=b.inner,
        skips_in=b.skips_in,
        seconds=times,
      )
      for cost, b, times in zip(found.costs, num_bytes, seconds, strict=True)
    ]
  return model_costs.ModelCosts(
    [_Weights(layer, weights, time) for layer, time in zip(layers, updates, strict=True)],
    samples,
    weights.slots_per_weight,
    averages_per_weight,
  )


def Slowdown(
  layers: Sequence[base_layer.BaseLayer],
  input_specs: Sequence[Any],
  weights: layer_costs.Weights,
  seconds: Sequence[tuple[float, float]],
  *,
  xla: bool = True,
  devices: Sequence[str],
) -> float:
  """`layer_profile.MeasureSlowdown` of the layers that together take longest.

  Args:
    layers: the flat list.
    input_specs: those of the first layer's arguments.
    weights: what is trained.
    seconds: of each layer, forward and backward, on a device alone.
    xla: whether XLA compiles the stages.
    devices: all that are to work at one time.
  """
  if len(devices) == 1:
    return 1.0
  calls = layer_costs.LayerCosts(layers, input_specs).calls
  total: dict[Any, float] = {}
  for call, times in zip(calls, seconds, strict=True):
    total[call.key] = total.get(call.key, 0.0) + sum(times)
  slowest = max(total, key=lambda key: total[key])
  call = next(call for call in calls if call.key == slowest)
  return layer_profile.MeasureSlowdown(call, weights, devices, xla=xla)


class _Loss(base_layer.BaseLayer):
  """The loss as a layer behind all others: (outputs, side) -> the loss, and the other metrics."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params with the function."""
    p = super().Params()
    p.Define('loss_fn', None, 'A stage.LossFn.')
    return p

  def FProp(self, theta: nested_map.NestedMap, outputs: Any, side: Any) -> list[tf.Tensor]:
    """The loss, and what has no gradient."""
    found = self.params.loss_fn([], tuple(outputs), side)
    loss = found.pop('loss')[0]
    return [loss, *map(tf.stop_gradient, tf.nest.flatten(found))]


def _Seconds(
  found: layer_costs.LayerCosts,
  size: int,
  weights: layer_costs.Weights,
  xla: bool,
  measuring: Measuring,
) -> Sequence[tuple[float, float]]:
  """(forward, backward) of each layer, the last one's with the loss."""
  loss = _Loss.Params().Set(name='loss', loss_fn=measuring.loss_fn).Instantiate()
  specs = (list(found.costs[-1].out_specs), measuring.side_specs(size))
  call = layer_costs.LayerCall(
    loss, nested_map.NestedMap(), specs, (stage_math.StructureKey(loss), size)
  )
  *times, (forward, backward) = layer_profile.Measure(
    [*found.calls, call], weights, device=measuring.devices[0], xla=xla
  )
  times[-1] = times[-1][0] + forward, times[-1][1] + backward
  return times


def _Weights(
  layer: base_layer.BaseLayer, weights: layer_costs.Weights, update_seconds: float | None
) -> model_costs.LayerWeights:
  sizes = {
    path: weight.num_elements * tf.as_dtype(weight.dtype).size
    for path, (weight, _) in layer.WeightSpecs().items()
  }
  trained = weights.Trained(layer)
  own = [sizes[path] for path in trained if path not in weights.ties]
  return model_costs.LayerWeights(
    num_bytes=sum(sizes.values()),
    gradient_bytes=sum(sizes[path] for path in trained),
    trained_bytes=sum(own),
    skips_out=tuple(layer.skips_out),
    largest_trained=max(own, default=0),
    update_seconds=update_seconds,
  )
