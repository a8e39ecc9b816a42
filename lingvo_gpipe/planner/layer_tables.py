# SPDX-License-Identifier: Apache-2.0
"""Collects the costs of layers for the planner: counted, traced and, on request, measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import base_layer, hyperparams, nested_map
from lingvo_gpipe.layers import chunked_logits
from lingvo_gpipe.pipeline.cutting import layer_costs, layer_profile, vocabulary_split
from lingvo_gpipe.pipeline.stages import stage_math, vocabulary_tables
from lingvo_gpipe.planner import model_costs


@dataclasses.dataclass(frozen=True)
class Loss:
  """The loss of a model.

  Attributes:
    loss_fn: the loss.
    side_specs: micro-batch size -> specs of its arguments other than the outputs.
  """

  loss_fn: stage_math.LossFn
  side_specs: Callable[[int], Any]


@dataclasses.dataclass(frozen=True)
class Measuring:
  """The way to measure layers.

  Attributes:
    devices: layers are measured on the first device. The other devices of the host slow it down
      (`Slowdown`).
    update: makes updates of weights.
  """

  devices: Sequence[str]
  update: layer_profile.UpdateMaker


def Collect(
  layers: Sequence[base_layer.BaseLayer],
  input_specs: Callable[[int], Sequence[Any]],
  sizes: Sequence[int],
  weights: layer_costs.Weights,
  loss: Loss,
  *,
  averages_per_weight: float = 0,
  xla: bool = True,
  measuring: Measuring | None = None,
) -> model_costs.ModelCosts:
  """Returns the costs of the layers for some micro-batch sizes.

  Args:
    layers: the flat list of layers.
    input_specs: micro-batch size -> specs of the first layer's arguments.
    sizes: micro-batch sizes, at least one.
    weights: the weights that are trained, and their optimizer slots.
    loss: the loss. If layers are measured, its time is added to the last layer's.
    averages_per_weight: number of moving averages of a trained weight.
    xla: whether XLA compiles the stages.
    measuring: how to measure each distinct layer at each size, and its update; None: nothing is
      measured, run or allocated.
  """
  samples = {}
  updates: Sequence[float | None] = [None] * len(layers)
  for size in sizes:
    counted = layer_costs.LayerCosts(layers, input_specs(size))
    num_bytes = counted.Bytes(weights, xla, with_options=True)
    seconds: Sequence[tuple[float, float] | None] = [None] * len(layers)
    if measuring is not None:
      seconds = _Seconds(counted, size, weights, loss, xla, measuring)
      if size == sizes[0]:
        updates = layer_profile.MeasureUpdates(
          counted.calls, weights, measuring.update, device=measuring.devices[0]
        )
    samples[size] = [
      model_costs.LayerSample(
        flops=cost.flops,
        inputs=b.inputs,
        outputs=layer_costs.SpecBytes(cost.out_specs),
        inner=b.inner,
        skips_in=b.skips_in,
        seconds=times,
        options=b.options,
      )
      for cost, b, times in zip(counted.costs, num_bytes, seconds, strict=True)
    ]
  return model_costs.ModelCosts(
    [_Weights(layer, weights, time) for layer, time in zip(layers, updates, strict=True)],
    samples,
    weights.slots_per_weight,
    averages_per_weight,
    _Vocabulary(counted.calls, weights, loss.loss_fn, loss.side_specs(size)),
  )


def _Vocabulary(
  calls: Sequence[layer_costs.LayerCall],
  weights: layer_costs.Weights,
  loss_fn: stage_math.LossFn,
  side_specs: Any,
) -> model_costs.Vocabulary | None:
  """Returns how devices can share the last layer; None if they cannot."""
  first, head = calls[0].layer, calls[-1].layer
  num_parts, part_classes = vocabulary_split.Parts(head)
  if not num_parts or not _TakesStatistics(calls[-1], loss_fn, side_specs):
    return None
  return model_costs.Vocabulary(
    num_parts,
    part_classes,
    None if head.class_shards else weights.CopyBytes(head),
    vocabulary_tables.CanShare(first, head),
  )


def _TakesStatistics(
  call: layer_costs.LayerCall, loss_fn: stage_math.LossFn, side_specs: Any
) -> bool:
  """Whether a loss needs statistics of the logits only, and no weights; traces it."""
  requests = []

  def StatisticsOf(
    class_ids: tf.Tensor, logits: chunked_logits.ChunkedLogits
  ) -> chunked_logits.Statistics:
    del logits
    requests.append(class_ids)
    zeros = tf.zeros(tf.shape(class_ids))
    return chunked_logits.Statistics(zeros, zeros, zeros)

  def Traced(args: Any, side: Any) -> list[tf.Tensor]:
    (logits,) = call.layer.ForLoss(nested_map.NestedMap(), *args)
    shared = chunked_logits.SharedLogits(logits, StatisticsOf)
    return tf.nest.flatten(loss_fn([], (shared,), side))

  try:
    tf.function(Traced, autograph=False).get_concrete_function(list(call.specs), side_specs)
  except Exception:  # A loss that reads logits or weights raises errors of any kind.
    return False
  return bool(requests)


def Slowdown(
  layers: Sequence[base_layer.BaseLayer],
  input_specs: Sequence[Any],
  weights: layer_costs.Weights,
  seconds: Sequence[tuple[float, float]],
  *,
  xla: bool = True,
  devices: Sequence[str],
) -> float:
  """Returns `layer_profile.MeasureSlowdown` of the kind of layer with the longest total time.

  Args:
    layers: the flat list of layers.
    input_specs: specs of the first layer's arguments.
    weights: the weights that are trained.
    seconds: for each layer (forward, backward) on one device while the others are idle.
    xla: whether XLA compiles the stages.
    devices: the devices that work at the same time.
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
  """The loss as a layer after the last one: (outputs, side) -> loss and the other metrics."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns Params with the loss function."""
    p = super().Params()
    p.Define('loss_fn', None, 'A stage_functions.LossFn.')
    return p

  def FProp(self, theta: nested_map.NestedMap, outputs: Any, side: Any) -> list[tf.Tensor]:
    """Returns the loss, and the other metrics without gradients."""
    metrics = self.params.loss_fn([], tuple(outputs), side)
    loss = metrics.pop('loss')[0]
    return [loss, *map(tf.stop_gradient, tf.nest.flatten(metrics))]


def _Seconds(
  counted: layer_costs.LayerCosts,
  size: int,
  weights: layer_costs.Weights,
  loss: Loss,
  xla: bool,
  measuring: Measuring,
) -> Sequence[tuple[float, float]]:
  """Returns (forward, backward) of each layer; the last layer's include the loss."""
  layer = _Loss.Params().Set(name='loss', loss_fn=loss.loss_fn).Instantiate()
  specs = (list(counted.costs[-1].out_specs), loss.side_specs(size))
  call = layer_costs.LayerCall(
    layer, nested_map.NestedMap(), specs, (stage_math.StructureKey(layer), size)
  )
  *times, (forward, backward) = layer_profile.Measure(
    [*counted.calls, call], weights, device=measuring.devices[0], xla=xla
  )
  times[-1] = times[-1][0] + forward, times[-1][1] + backward
  return times


def _Weights(
  layer: base_layer.BaseLayer, weights: layer_costs.Weights, update_seconds: float | None
) -> model_costs.LayerWeights:
  specs = layer.WeightSpecs()
  sizes = {
    path: weight.num_elements * tf.as_dtype(weight.dtype).size
    for path, (weight, _) in specs.items()
  }
  trained = weights.Trained(layer)
  untied = [sizes[path] for path in trained if path not in weights.ties]
  return model_costs.LayerWeights(
    num_bytes=sum(sizes.values()),
    gradient_bytes=sum(specs[path][0].accumulator_bytes for path in trained),
    trained_bytes=sum(untied),
    skips_out=tuple(layer.skips_out),
    largest_trained=max(untied, default=0),
    update_seconds=update_seconds,
  )
