# SPDX-License-Identifier: Apache-2.0
"""Finds the first output or gradient of a step that is NaN or infinite.

The step runs once more as plain eager code without XLA, micro-batch by micro-batch and layer by
layer, with the same weights and seeds: forward, then backward, which recomputes each layer from its
input. Nothing is changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe.core import fprop_context, nested_map, pipeline_element, shapes
from lingvo_gpipe.pipeline import engine as engine_lib
from lingvo_gpipe.pipeline.stages import (
  leaves,
  micro_batch,
  stage_math,
  weighted_loss,
)
from lingvo_gpipe.pipeline.stages import stage as stage_lib


class _NotFinite(Exception):
  """Ends the search; its text describes the value."""


@dataclasses.dataclass(frozen=True)
class _Call:
  """One layer's run on one micro-batch: its place and its inputs."""

  stage: stage_lib.Stage
  index: int
  args: tuple[Any, ...]
  skips: nested_map.NestedMap

  @property
  def layer(self) -> Any:
    return self.stage.layers[self.index]


def Explain(
  engine: engine_lib.PipelineEngine,
  micro_batches: Sequence[micro_batch.MicroBatch],
  step: int,
) -> str:
  """Returns in one line the origin of the step's first value that is not finite.

  Args:
    engine: the engine, with the weights from before the step.
    micro_batches: the micro-batches of the step, as for `PipelineEngine.Accumulate`.
    step: the training step, on which random numbers depend.

  Raises:
    ValueError: the engine has no loss.
  """
  if engine.loss_fn is None:
    raise ValueError('the engine was made without a loss (loss_fn): there is no step to check')
  largest = _Largest()
  try:
    for m, batch in enumerate(micro_batches):
      _MicroBatchRun(engine, m, step, engine.loss_fn, largest).Run(*batch)
  except _NotFinite as e:
    text = str(e)
  else:
    text = (
      'run again without XLA, layer by layer, every output and gradient is finite; '
      f'{largest}. Either a sum over micro-batches or of squares overflows (lower the loss or its '
      'scale), or XLA computes something differently (try xla=False)'
    )
  return text + ('; here no statistics were summed over replicas' if engine.sums_statistics else '')


class _Largest:
  """The largest entry of any gradient so far."""

  def __init__(self) -> None:
    self._value, self._path = 0.0, ''

  def Add(self, path: str, gradient: tf.Tensor) -> None:
    value = float(tf.reduce_max(tf.abs(gradient))) if tf.size(gradient) else 0.0
    if value >= self._value:
      self._value, self._path = value, path

  def __str__(self) -> str:
    return f'the largest gradient is {self._value:.3g}, of {self._path or "nothing"}'


class _MicroBatchRun:
  """The run of all layers on one micro-batch."""

  def __init__(
    self,
    engine: engine_lib.PipelineEngine,
    micro_batch: int,
    step: int,
    loss_fn: stage_math.LossFn,
    largest: _Largest,
  ) -> None:
    self._engine = engine
    self._m = micro_batch
    self._step = step
    self._loss_fn = loss_fn
    self._largest = largest

  def Run(self, args: tuple[Any, ...], side: Any, loss_weight: tf.Tensor) -> None:
    """Runs forward and backward; raises _NotFinite at the first value that is not finite."""
    for label, nest in (('input', args), ('loss input', side), ('loss weight', loss_weight)):
      if values := _Describe(nest):
        raise _NotFinite(f'the batch is at fault: {label} of micro-batch {self._m}: {values}')
    calls, outputs = self._Forward(args)
    gradient = self._LossGradient(outputs, side, loss_weight)
    self._Backward(calls, gradient, loss_weight)

  def _Forward(self, args: tuple[Any, ...]) -> tuple[list[_Call], tuple[Any, ...]]:
    calls: list[_Call] = []
    places = [(s, i) for s in self._engine.stages for i in range(len(s.layers))]

    def Run(n: int, layer: Any, args: tuple[Any, ...], skips: nested_map.NestedMap) -> Any:
      call = _Call(*places[n], args, skips)
      outputs, stashed, aux = self._Outputs(call, layer.vars)
      self._Check(call, 'output', outputs)
      self._Check(call, 'skip', stashed)
      for name, value, _ in aux:
        self._Check(call, f'auxiliary loss {name!r}', value)
      calls.append(call)
      return outputs, stashed

    outputs, _ = pipeline_element.RunLayers([s.layers[i] for s, i in places], Run, args)
    return calls, outputs

  def _Outputs(self, call: _Call, variables: Any) -> tuple[Any, Any, list[Any]]:
    """Returns (outputs, skips that begin here, [(name, auxiliary loss, coefficient)])."""
    layer = call.layer
    with (
      tf.device(call.stage.device),
      fprop_context.Scope(step=self._step, micro_batch=self._m) as context,
    ):
      out, stashed = layer.FPropSkips(layer.ThetaFrom(variables), call.skips, *call.args)
    aux = [(name, value, coefficient) for _, name, value, coefficient in context.aux_losses]
    out, stashed = stage_math.AsTensors(layer, out), stage_math.AsTensors(layer, stashed)
    return pipeline_element.AsTuple(out), stashed, aux

  def _LossGradient(self, outputs: tuple[Any, ...], side: Any, loss_weight: tf.Tensor) -> Any:
    """Returns a nest like the outputs, with the gradient of the weighted loss."""
    last = self._engine.stages[-1]
    floats, weights = leaves.Floats(outputs), [*last.trained.values(), *last.mirrors.values()]
    with (
      tf.device(last.device),
      fprop_context.Scope(step=self._step, micro_batch=self._m),
      tf.GradientTape() as tape,
    ):
      tape.watch(floats)
      theta = [layer.theta for layer in last.layers]
      counted = [weighted_loss.WhereItCounts(x, loss_weight) for x in floats]
      metrics = self._loss_fn(theta, leaves.WithFloats(outputs, counted), side)
      loss = metrics['loss'][0]
      objective = loss * tf.cast(loss_weight, loss.dtype)
    name = f'the loss of micro-batch {self._m} in stage {last.index}'
    if float(loss_weight) and (values := _Describe(loss)):
      raise _NotFinite(f'{name} is the first value that is not finite: {values}')
    gradients = tape.gradient(objective, [*floats, *weights])
    if values := _Describe(gradients):
      raise _NotFinite(
        f'the gradient of {name} is the first value that is not finite: {values}; the loss is '
        f'{float(loss):.6g}, its inputs are finite'
      )
    dense = leaves.DenseGradients(floats, gradients[: len(floats)])
    return leaves.WithFloats(outputs, dense)

  def _Backward(self, calls: list[_Call], gradient: Any, loss_weight: tf.Tensor) -> None:
    """Runs backward from the last layer to the first.

    Args:
      calls: the runs of the layers.
      gradient: a nest like the last layer's outputs, with the gradient at its floating leaves.
      loss_weight: weight of the auxiliary losses.
    """
    skip_gradients: dict[str, list[Any]] = {}
    holders = self._engine.holders
    trained = {id(v) for s in holders for v in (*s.trained.values(), *s.mirrors.values())}
    for call in reversed(calls):
      variables = call.layer.vars
      paths = {id(v): path for path, v in call.layer.VariablesByPath().items()}
      weights = [v for v in tf.nest.flatten(variables) if id(v) in trained]
      floats = leaves.Floats([call.args, call.skips])
      with tf.device(call.stage.device), tf.GradientTape() as tape:
        tape.watch(floats)
        out, stashed, aux = self._Outputs(call, variables)
        targets = [*leaves.Floats(out), *(value for _, value, _ in aux)]
        above = leaves.Floats(gradient)
        above += [tf.cast(c * tf.cast(loss_weight, v.dtype), v.dtype) for _, v, c in aux]
        for name, value in stashed.items():
          for other in skip_gradients.pop(name, []):
            targets += leaves.Floats(value)
            above += leaves.Floats(other)
      gradients = tape.gradient(targets, [*weights, *floats], output_gradients=above)
      for v, g in zip(weights, gradients, strict=False):
        if g is not None:
          self._Check(call, f'gradient of the weight {paths[id(v)]}', g, above)
          self._largest.Add(paths[id(v)], tf.convert_to_tensor(g))
      dense = leaves.DenseGradients(floats, gradients[len(weights) :])
      self._Check(call, 'gradient of its input', dense, above)
      gradient, below = leaves.WithFloats([call.args, call.skips], dense)
      for name, value in below.items():
        skip_gradients.setdefault(name, []).append(value)

  def _Check(self, call: _Call, label: str, nest: Any, above: Any = None) -> None:
    if not (values := _Describe(nest)):
      return
    layer, s = call.layer, call.stage
    inputs = _Describe([call.args, call.skips]) or 'finite'
    weights = _Describe(list(layer.VariablesByPath().values())) or 'finite'
    coming = '' if above is None else f', the gradient of its output {_Describe(above) or "finite"}'
    raise _NotFinite(
      f'the first value that is not finite is the {label} of layer {layer.path} '
      f'({type(layer).__name__}) in stage {s.index}, micro-batch {self._m}: {values}; its inputs '
      f'are {inputs}, its weights {weights}{coming}'
    )


def _Describe(nest: Any) -> str:
  """Returns a description of the first leaf that is not finite; '' if all are finite."""
  for path, leaf in shapes.Leaves(nest):
    if leaf is None:
      continue
    leaf = tf.convert_to_tensor(leaf)
    if not leaves.HasGradient(leaf):
      continue
    values = tf.cast(leaf, tf.complex128 if leaf.dtype.is_complex else tf.float64).numpy()
    values = np.atleast_1d(values).view(np.float64)  # A complex number is two.
    finite = np.isfinite(values)
    if finite.all():
      continue
    good = values[finite]
    extent = f'the others are in [{good.min():.4g}, {good.max():.4g}]' if good.size else 'no other'
    name = f' at {path}' if path and path != '[0]' else ''
    return (
      f'{np.isnan(values).sum()} NaN and {np.isinf(values).sum()} Inf in '
      f'{shapes.FormatNest(leaf)}{name}, {extent}'
    )
  return ''
