# SPDX-License-Identifier: Apache-2.0
"""Decoding through the pipeline: a prompt fills the layers' caches, then one position at a time.

    logits, states = pipeline.Prefill(prompt, max_length=100)
    logits, states = pipeline.ExtendStep(states, token, time_step=prompt.shape[1])

Each call is one traced multi-device function: micro-batches are streamed through the stages as in
evaluation. The states of a stage and micro-batch are tensors that stay on the stage's device
between calls. The loop over positions belongs to the caller, who reads the logits in between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gpipe.core import base_layer, fprop_context, nested_map, pipeline_element
from lingvo_gpipe.graph import side_effects
from lingvo_gpipe.pipeline import emission, engine, failed_step
from lingvo_gpipe.pipeline.schedule import actions
from lingvo_gpipe.pipeline.stages import failures, micro_batch, stage_math
from lingvo_gpipe.pipeline.stages import stage as stage_lib


@dataclasses.dataclass(frozen=True)
class PipelineStates:
  """The states of a pipeline's layers after the positions so far; never changed in place.

  Attributes:
    stages: for each stage and micro-batch the states of its layers, nests of tensors [batch, ...]
      on the stage's device.
    batch_size: number of rows in all micro-batches together.
    max_length: number of positions that the caches have room for.
  """

  stages: list[list[Any]]
  batch_size: int
  max_length: int


class DecodingFunctions:
  """Prefill and ExtendStep of one structure of stage, shared by all stages that have it.

  Attributes:
    Prefill: tf.function (variables, args, max_length, first_of_tail) -> (outputs, states).
    ExtendStep: tf.function (variables, states, args, time_step) -> (outputs, states).
    num_traces: number of times that one of them was traced.

  `variables` and `states` are lists with one nest a layer; `args` are the arguments of the first
  layer, a tuple, and `outputs` the outputs of the last. From layer `first_of_tail` on, Prefill
  computes the last position only.
  """

  def __init__(self, layers: Sequence[base_layer.BaseLayer], *, xla: bool) -> None:
    self._layers = list(layers)
    self.num_traces = 0
    self.Prefill = stage_math.Traced(self._Prefill, xla)
    self.ExtendStep = stage_math.Traced(self._ExtendStep, xla)

  @property
  def layers(self) -> Sequence[base_layer.BaseLayer]:
    """The layers of the running stage, which errors name; see `stage_math.Running`."""
    return stage_math.RunningLayers() or self._layers

  def _Prefill(
    self, variables: Sequence[Any], args: tuple[Any, ...], max_length: int, first_of_tail: int
  ) -> tuple[Any, list[Any]]:
    def Layer(i: int, theta: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
      if i == first_of_tail:
        args = tf.nest.map_structure(lambda x: None if x is None else x[:, -1:], args)
      return self.layers[i].Prefill(theta, *args, max_length=max_length)

    return self._RunLayers(variables, args, Layer)

  def _ExtendStep(
    self,
    variables: Sequence[Any],
    states: Sequence[Any],
    args: tuple[Any, ...],
    time_step: tf.Tensor,
  ) -> tuple[Any, list[Any]]:
    def Layer(i: int, theta: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
      return self.layers[i].ExtendStep(theta, states[i], *args, time_step=time_step)

    return self._RunLayers(variables, args, Layer)

  def _RunLayers(
    self,
    variables: Sequence[Any],
    args: tuple[Any, ...],
    run: Callable[[int, Any, tuple[Any, ...]], tuple[Any, Any]],
  ) -> tuple[Any, list[Any]]:
    """Returns the last layer's outputs and each layer's states; run(i, theta, args) is layer i."""
    self.num_traces += 1
    states = []

    def Run(i: int, layer: Any, args: tuple[Any, ...], _: nested_map.NestedMap) -> Any:
      with failures.NoteLayer(layer, args):
        with failures.LayerScope(i), side_effects.Forbid(layer.path):
          outputs, state = run(i, layer.ThetaFrom(variables[i]), args)
          outputs = stage_math.AsTensors(layer, outputs)
      states.append(state)
      return outputs, {}

    with fprop_context.Enter(fprop_context.FPropContext(do_eval=True)):
      outputs, _ = pipeline_element.RunLayers(self.layers, Run, args)
    return outputs, states


class Decoder:
  """Runs Prefill and ExtendStep of the stages of an engine."""

  def __init__(self, pipeline: engine.PipelineEngine, *, path: str, num_micro_batches: int) -> None:
    """Prepares for the stages of `pipeline`.

    Args:
      pipeline: the engine; its variables are used as they are at each call.
      path: path of the pipelined layer, for messages.
      num_micro_batches: M.

    Raises:
      NotImplementedError: a layer has skip connections.
    """
    self._pipeline = pipeline
    self._path = path
    self._num_micro_batches = num_micro_batches
    self._functions: dict[Any, DecodingFunctions] = {}
    for s in pipeline.stages:
      for layer in s.layers:
        pipeline_element.CheckNoSkips(layer)
    self._prefill = tf.function(self._Prefill, autograph=False)
    self._extend_step = tf.function(self._ExtendStep, autograph=False)
    self._reorder = tf.function(self._Reorder, autograph=False)

  @property
  def num_traces(self) -> int:
    """Number of times that a function of a stage was traced."""
    return sum(f.num_traces for f in self._functions.values())

  # ---- called by PipeliningLayer -----------------------------------------------------------------

  def Prefill(
    self, args: tuple[Any, ...], max_length: int, last_only: bool
  ) -> tuple[Any, PipelineStates]:
    """See PipeliningLayer.Prefill."""
    batch_size = micro_batch.BatchSize(args)
    with failed_step.Locate(self._pipeline, lambda: self._Prefill(args, max_length, last_only)):
      outputs, stages = self._prefill(args, max_length, last_only)
    return outputs, PipelineStates(stages, batch_size, max_length)

  def ExtendStep(
    self, states: PipelineStates, args: tuple[Any, ...], time_step: Any
  ) -> tuple[Any, PipelineStates]:
    """See PipeliningLayer.ExtendStep."""
    position = int(time_step)
    if not 0 <= position < states.max_length:
      raise ValueError(
        f'{self._path}: time_step {position} lies outside the {states.max_length} positions of '
        'the caches; give Prefill a larger max_length'
      )
    batch_size = micro_batch.BatchSize(args)
    if batch_size != states.batch_size:
      raise ValueError(
        f'{self._path}: a step of {batch_size} examples, but the states have {states.batch_size}'
      )
    step = tf.constant(position, tf.int32)
    with failed_step.Locate(self._pipeline, lambda: self._ExtendStep(states.stages, args, step)):
      outputs, stages = self._extend_step(states.stages, args, step)
    return outputs, dataclasses.replace(states, stages=stages)

  def ReorderStates(self, states: PipelineStates, indices: Any) -> PipelineStates:
    """See PipeliningLayer.ReorderStates."""
    rows = np.asarray(indices)
    is_list = rows.ndim == 1 and rows.size > 0 and np.issubdtype(rows.dtype, np.integer)
    if not is_list or rows.min() < 0 or rows.max() >= states.batch_size:
      raise ValueError(
        f'{self._path}: expected a list of integers from 0 to {states.batch_size - 1}, the rows '
        f'of the states to take, got {rows.dtype} of shape {list(rows.shape)}'
        + (f' from {rows.min()} to {rows.max()}' if is_list else '')
      )
    stages = self._reorder(states.stages, tf.constant(rows, tf.int32))
    return dataclasses.replace(states, stages=stages, batch_size=len(rows))

  # ---- traced functions --------------------------------------------------------------------------

  def _Prefill(
    self, args: tuple[Any, ...], max_length: int, last_only: bool
  ) -> tuple[Any, list[list[Any]]]:
    self._pipeline.SyncTies()
    last = self._pipeline.stages[-1]
    tail = len(last.layers)  # No layer has this number.
    while last_only and tail and _IsPositionWise(last.layers[tail - 1]):
      tail -= 1

    def Call(s: stage_lib.Stage, k: int, m: int, args: tuple[Any, ...]) -> Any:
      del k, m
      first_of_tail = tail if s.layers is last.layers else len(s.layers)
      return self._Functions(s).Prefill(s.variables, args, max_length, first_of_tail)

    outputs, stages = self._Stream(args, Call)
    if last_only and tail == len(last.layers):
      with tf.device(last.device):
        outputs = tf.nest.map_structure(lambda x: None if x is None else x[:, -1:], outputs)
    return outputs, stages

  def _ExtendStep(
    self, states: list[list[Any]], args: tuple[Any, ...], time_step: tf.Tensor
  ) -> tuple[Any, list[list[Any]]]:
    def Call(s: stage_lib.Stage, k: int, m: int, args: tuple[Any, ...]) -> Any:
      return self._Functions(s).ExtendStep(s.variables, states[k][m], args, time_step)

    return self._Stream(args, Call)

  def _Stream(
    self,
    args: tuple[Any, ...],
    call: Callable[[stage_lib.Stage, int, int, tuple[Any, ...]], tuple[Any, list[Any]]],
  ) -> tuple[Any, list[list[Any]]]:
    """Streams micro-batches through the stages.

    Args:
      args: arguments of the first layer, of the whole batch.
      call: (stage, its index among the stages of this walk, micro-batch, arguments) -> (outputs of
        the stage, states of its layers).

    Returns:
      The outputs of the last stage, of the whole batch; for each stage and micro-batch the states.
    """
    stages = self._pipeline.forward_stages
    pieces = micro_batch.Split(args, self._num_micro_batches)
    stage_args: dict[tuple[int, int], Any] = {(0, m): x for m, x in enumerate(pieces)}
    states: list[list[Any]] = [[None] * len(pieces) for _ in stages]
    last = self._pipeline.stages[-1]
    first_slice = last.index
    tables, functions = self._pipeline.replicas[0].tables, self._pipeline.functions
    parts: list[list[Any]] = [[] for _ in pieces]
    walk = emission.Walk(stages)

    def Emit(s: stage_lib.Stage, action: actions.Action) -> None:
      k, m = action.stage, action.micro_batch
      # All slices of the head take the inputs of the head.
      args = pipeline_element.AsTuple(stage_args[min(k, first_slice), m])
      if tables and not k:
        ids, *extras = args
        args = (functions.SharedTable(tables[0]).LookUpIn(tables, ids, s.device), *extras)
      with walk.On(s):
        outputs, states[k][m] = call(s, k, m, args)
      walk.Done(s, (outputs, states[k][m]))
      if k < first_slice:
        stage_args[k + 1, m] = outputs
      else:
        parts[m].append(outputs)

    walk.Run(self._pipeline.ForwardSchedule(stages, len(pieces)).EmissionOrder(), Emit)
    with tf.device(last.device):
      outputs = [
        slice_outputs[0] if len(slice_outputs) == 1 else tf.concat(slice_outputs, axis=-1)
        for slice_outputs in parts
      ]
      return micro_batch.Merge(outputs), states

  def _Reorder(self, states: list[list[Any]], indices: tf.Tensor) -> list[list[Any]]:
    pieces = micro_batch.Split(indices, self._num_micro_batches)
    reordered = []
    for s, of_micro_batches in zip(self._pipeline.forward_stages, states, strict=True):
      with tf.device(s.device):
        # All micro-batches of a stage are on one device, so rows may move between them.
        whole = micro_batch.Merge(of_micro_batches)
        reordered.append(
          [tf.nest.map_structure(lambda x, p=p: tf.gather(x, p), whole) for p in pieces]
        )
    return reordered

  def _Functions(self, s: stage_lib.Stage) -> DecodingFunctions:
    key = (s.structure, self._pipeline.xla)
    if key not in self._functions:
      self._functions[key] = DecodingFunctions(s.layers, xla=self._pipeline.xla)
    return self._functions[key]


def _IsPositionWise(layer: base_layer.BaseLayer) -> bool:
  return all(below.is_position_wise for below in layer.Descendants())
