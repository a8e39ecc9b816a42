# SPDX-License-Identifier: Apache-2.0
"""`PipeliningLayer`: a sequence of layers that runs as stages on several devices.

The cut is not in the model: the layers stay one flat list, whose paths (and so variable names,
initial values, dropout masks and checkpoints) do not know the number of stages, micro-batches or
the schedule. A stage is an index range of that list.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import (
  base_layer,
  fprop_context,
  hyperparams,
  nested_map,
  shapes,
  weight_params,
)
from lingvo_gpipe.layers import fprop_meta, sequential
from lingvo_gpipe.pipeline import decoder as decoder_lib
from lingvo_gpipe.pipeline import engine, tape_function, weight_ties
from lingvo_gpipe.pipeline.cutting import cut as cut_lib
from lingvo_gpipe.pipeline.cutting import layer_costs
from lingvo_gpipe.pipeline.schedule import rematerialisation, schedules
from lingvo_gpipe.pipeline.stages import failures, micro_batch, stage_math
from lingvo_gpipe.pipeline.stages import stage as stage_lib


class PipeliningLayer(base_layer.BaseLayer):
  """GPipe: stages on devices, micro-batches streamed through, inputs kept and the rest recomputed.

  Used in two ways. A task hands its loss to `Place` and trains through the engine, where the
  loss runs inside the last stage. Anybody else calls `FProp` under a tape of their own, after
  `Place` put the stages on devices:

      layer = p.Instantiate()
      layer.Place(devices, tf.TensorSpec([batch, dim]))
      with tf.GradientTape() as tape, fprop_context.Scope(step=step):
        loss = tf.reduce_mean(layer(x) ** 2)
      grads = tape.gradient(loss, layer.trainable_variables)
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of a pipelined sequence."""
    p = super().Params()
    p.Define('sub', [], 'Params of the layers, in order; SequentialLayers inside are opened.')
    p.Define('num_stages', 1, 'The number of stages.')
    p.Define(
      'stages_per_device',
      1,
      'How many stages a device holds: stage k is on device k mod K. A Schedule of your own has a '
      'map of its stages to devices instead.',
    )
    p.Define('num_micro_batches', 1, 'M: the number of micro-batches of a mini-batch.')
    p.Define('splits', [], 'Index after the last layer of each stage; empty: cut by cost.')
    p.Define(
      'ties',
      [],
      "Pairs ['layers[9].emb', 'layers[0].emb']: the first weight is the second one, used again.",
    )
    p.Define(
      'partition_by',
      'flops',
      'What an automatic cut balances: flops, params, or time, measured on the first device.',
    )
    p.Define(
      'memory_limit',
      0,
      'The most bytes that a device may need by the prediction of `stage_memory`; 0: no limit.',
    )
    p.Define('schedule', 'gpipe', 'Name of the training schedule, or a Schedule.')
    p.Define(
      'remat_policy',
      'stage',
      'What backward recomputes: stage (all), except_last (all but the last micro-batch), layer '
      '(one layer at a time, from its kept input) or none. FProp under a tape: always stage.',
    )
    p.Define('xla', True, 'Compile the stages by XLA.')
    p.Define('batch_dim', 0, 'The batch dimension of every input and output.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    flat = [q for layer in self.params.sub for q in sequential.FlattenSequential(layer)]
    if not flat:
      raise ValueError(f'{self.path}: sub is empty; a pipeline needs at least one layer')
    # What is wrong is better told now than when the first step is built.
    p = self.params
    shapes.CheckPositive(p, 'num_stages', 'stages_per_device', 'num_micro_batches')
    rematerialisation.CheckPolicy(p.remat_policy, f'{self.path}: ')
    if p.partition_by not in cut_lib.COSTS:
      raise ValueError(
        f'{self.path}: unknown partition_by {p.partition_by!r}; expected one of '
        f'{", ".join(cut_lib.COSTS)}'
      )
    if p.memory_limit < 0:
      raise ValueError(f'{self.path}: memory_limit must not be negative, got {p.memory_limit}')
    asked = -(-p.num_stages // p.stages_per_device)
    if isinstance(p.schedule, schedules.Schedule) and p.stages_per_device == 1:
      asked = p.schedule.num_devices
    chosen = schedules.Get(p.schedule, p.num_stages, p.num_micro_batches, asked)
    if chosen.forward_only:
      raise ValueError(f'{self.path}: schedule {chosen.name!r} has no backward; it cannot train')
    self._num_devices = chosen.num_devices
    # The same paths as a SequentialLayer's, so that a checkpoint of either fits the other.
    self.CreateChildren('layers', flat, seed_roots=True)
    stage_lib.Skips(self.layers, [len(self.layers)])
    specs = {path[len(self.path) + 1 :]: spec for path, spec in super().WeightSpecs().items()}
    self._ties = weight_ties.Checked(p.ties, specs, f'{self.path}: ')
    self._engine: engine.PipelineEngine | None = None
    self._decoder: decoder_lib.Decoder | None = None
    self._input_specs: tuple[Any, ...] = ()
    self._predict = tf.function(self._Predict, autograph=False)
    self._tape_functions: dict[bool, tape_function.TapeFunction] = {}

  def WeightSpecs(self) -> dict[str, tuple[weight_params.WeightParams, bool]]:
    """As BaseLayer's, tied weights counted once."""
    tied = self.absolute_ties
    return {path: spec for path, spec in super().WeightSpecs().items() if path not in tied}

  def VariablesByPath(self) -> dict[str, tf.Variable]:
    """As BaseLayer's, without the copies of tied weights."""
    tied = self.absolute_ties
    return {path: v for path, v in super().VariablesByPath().items() if path not in tied}

  @property
  def vars(self) -> nested_map.NestedMap:
    """As BaseLayer's, with the owner's variable in place of a tied one."""
    variables = super().vars
    for tied, owner in self._ties.items():
      variables.Set(tied, variables.GetItem(owner))
    return variables

  @property
  def num_devices(self) -> int:
    """K: how many devices the stages are put on."""
    return self._num_devices

  def MakeCut(
    self,
    *input_specs: Any,
    splits: Sequence[int] = (),
    weights: layer_costs.Weights | None = None,
    device: str = '',
    num_replicas: int = 1,
  ) -> cut_lib.Cut:
    """Where the cuts go for inputs of these specs.

    Args:
      *input_specs: a (nest of) tf.TensorSpec `[..., batch, ...]` of the whole mini-batch for each
        argument of the first layer.
      splits: a cut that goes before that of the Params.
      weights: what is trained, by default all, with two optimizer slots; the ties are the layer's.
      device: where partition_by='time' measures the layers; '' is TensorFlow's choice.
      num_replicas: how many replicas share the mini-batch, each in its num_micro_batches.
    """
    p = self.params
    batch_size = micro_batch.BatchSize(input_specs, p.batch_dim)
    sizes = micro_batch.Sizes(batch_size, p.num_micro_batches * num_replicas)
    largest = sizes[0]

    def MicroBatchSpec(spec: Any) -> Any:
      if spec is None:
        return None
      shape = list(spec.shape)
      shape[p.batch_dim] = largest
      return tf.TensorSpec(shape, spec.dtype)

    return cut_lib.MakeCut(
      self.layers,
      tf.nest.map_structure(MicroBatchSpec, tuple(input_specs)),
      schedule=schedules.GetForBatch(
        p.schedule, p.num_stages, -(-len(sizes) // num_replicas), self.num_devices
      ),
      splits=splits or p.splits,
      by=p.partition_by,
      num_params=self.NumParams(),
      remat_policy=p.remat_policy,
      xla=p.xla,
      weights=dataclasses.replace(weights or layer_costs.Weights(), ties=self.absolute_ties),
      memory_limit=p.memory_limit,
      device=device,
      prefix=f'{self.path}: ',
    )

  @property
  def absolute_ties(self) -> dict[str, str]:
    """{path of a tied weight: path of its owner}."""
    return {f'{self.path}.{a}': f'{self.path}.{b}' for a, b in self._ties.items()}

  @property
  def theta(self) -> nested_map.NestedMap:
    """The weights to compute with; ValueError before `Place`."""
    _ = self.engine  # Raises before `Place`.
    return super().theta

  @property
  def engine(self) -> engine.PipelineEngine:
    """The engine that runs the stages; ValueError before `Place`."""
    if self._engine is None:
      raise ValueError(f'{self.path} has no devices yet; call Place(devices, *input_specs) first')
    return self._engine

  def Place(
    self,
    devices: Sequence[str],
    *input_specs: Any,
    loss_fn: stage_math.LossFn | None = None,
    weights: layer_costs.Weights | None = None,
    splits: Sequence[int] = (),
    num_replicas: int = 1,
  ) -> cut_lib.Cut:
    """Cuts the layers for inputs of these specs and allocates each stage on its device.

    Args:
      devices: at least `num_devices` of them for each replica, replica by replica.
      *input_specs: as for `MakeCut`.
      loss_fn: the loss, where the engine trains (`stage_math.LossFn`); FProp does not use it.
      weights: as for `MakeCut`; the engine trains the same.
      splits: as for `MakeCut`.
      num_replicas: how often the stages are placed. The engine trains and evaluates in all
        replicas; everything else runs in the first.

    Returns:
      The cut.

    Raises:
      ValueError: the layers cannot be cut as the Params say, there are too few devices, or
        variables exist already on other devices.
    """
    p = self.params
    cut = self.MakeCut(
      *input_specs,
      splits=splits,
      weights=weights,
      device=devices[0] if devices else '',
      num_replicas=num_replicas,
    )
    self._input_specs = input_specs
    self._engine = engine.PipelineEngine(
      self.layers,
      cut.ends,
      devices,
      schedule=p.schedule,
      remat_policy=p.remat_policy,
      xla=p.xla,
      stage_to_device=cut.schedule.stage_to_device,
      loss_fn=loss_fn,
      is_trained=cut.weights.is_trained,
      ties=self.absolute_ties,
      num_replicas=num_replicas,
    )
    self.InstantiateVariables()
    self._decoder = None
    self._predict = tf.function(self._Predict, autograph=False)
    self._tape_functions = {}
    return cut

  @property
  def num_micro_batches(self) -> int:
    """How many micro-batches a mini-batch has over all replicas; before `Place` over one."""
    num_replicas = 1 if self._engine is None else len(self._engine.replicas)
    return int(self.params.num_micro_batches) * num_replicas

  def SplitBatch(self, nest: Any) -> list[Any]:
    """Cuts a nest of tensors `[..., batch, ...]` into this pipeline's micro-batches."""
    return micro_batch.Split(nest, self.num_micro_batches, self.params.batch_dim)

  def Predict(self, *args: Any) -> Any:
    """FProp in evaluation mode straight from the variables: no gradient, no copy of a weight."""
    args = self._Checked(args)
    with failures.LocateFailure(self.engine, lambda: self._Predict(args)):
      return self._predict(args)

  def _Checked(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments as tensors; an error where they are not what `Place` was told."""
    if self._engine is not None:
      args = tape_function.AsTensors(args)
      shapes.CheckNest(self.path, 'arguments', args, self._input_specs)
    return args

  def _Predict(self, args: tuple[Any, ...]) -> Any:
    self.engine.SyncTies()
    inputs = self.SplitBatch(args)
    outputs = self.engine.Forward(inputs).Outputs()
    return micro_batch.MergeOutputs(outputs, inputs, self.params.batch_dim)

  @property
  def decoder(self) -> decoder_lib.Decoder:
    """What decodes; ValueError before `Place`, NotImplementedError if a layer has skips."""
    if self._decoder is None:
      p = self.params
      if p.batch_dim:
        raise ValueError(f'{self.path}: decoding needs batch_dim 0, got {p.batch_dim}')
      self._decoder = decoder_lib.Decoder(
        self.engine, path=self.path, num_micro_batches=p.num_micro_batches
      )
    return self._decoder

  def Prefill(  # type: ignore[override]
    self, *args: Any, max_length: int, last_only: bool = False
  ) -> tuple[Any, decoder_lib.PipelineStates]:
    """Runs the first positions, a prompt, in evaluation mode, straight from the variables.

    Args:
      *args: as for FProp, nests of tensors [batch, time, ...].
      max_length: how many positions, those of the prompt included, there will be at most.
      last_only: whether the outputs are those of the last position only, [batch, 1, ...]: layers
        after the last one that mixes positions, as a softmax, then compute no others.

    Returns:
      What the last layer returns, and the states for `ExtendStep`.

    Raises:
      NotImplementedError: a layer cannot decode; the message names it.
    """
    # Not as `Place` was told: where packed rows are trained on, a prompt has no segments.
    return self.decoder.Prefill(tape_function.AsTensors(args), max_length, last_only)

  def ExtendStep(  # type: ignore[override]
    self, states: decoder_lib.PipelineStates, *args: Any, time_step: Any
  ) -> tuple[Any, decoder_lib.PipelineStates]:
    """Runs one more position.

    Args:
      states: from Prefill, the ExtendStep before or ReorderStates. They stay as they are.
      *args: of this position, nests of tensors [batch, 1, ...].
      time_step: the index of the position; the first of the prompt is 0.

    Returns:
      What the last layer returns, [batch, 1, ...], and the new states.

    Raises:
      ValueError: time_step is not below max_length, or the batch is not that of the states.
    """
    return self.decoder.ExtendStep(states, tape_function.AsTensors(args), time_step)

  def ReorderStates(
    self, states: decoder_lib.PipelineStates, indices: Any
  ) -> decoder_lib.PipelineStates:
    """Takes rows of the states, as of the hypotheses that a beam search goes on with.

    Args:
      states: as for ExtendStep.
      indices: integers [new batch]: row i becomes what row indices[i] was. The new batch may have
        another size, as where each example of a prompt begins several hypotheses.
    """
    return self.decoder.ReorderStates(states, indices)

  @classmethod
  def FPropMeta(
    cls, params: hyperparams.InstantiableParams, *input_specs: Any
  ) -> nested_map.NestedMap:
    """The layers' costs added up; see BaseLayer.FPropMeta."""
    return fprop_meta.Chain(fprop_meta.Declare(params).layers, *input_specs)

  def FProp(self, theta: nested_map.NestedMap, *args: Any) -> Any:
    """Runs the pipeline; differentiable from any tape.

    Backward recomputes each stage from its input, micro-batch by micro-batch, M-1 ... 0. In a
    Scope with do_eval=False layers draw their dropout masks from the scope's step and micro-batch,
    and what they report for their state goes into the scope (see `fprop_context.UpdateLayers`).

    Args:
      theta: the weights.
      *args: a nest of tensors `[..., batch, ...]` for each argument of the first layer.

    Returns:
      What the last layer returns, of the whole mini-batch.

    Raises:
      ValueError: `Place` was not called.
    """
    context = fprop_context.Current()
    counter = context.step_counter
    if counter is not None:
      # Micro-batch j of the scope, one of the user's own, is cut into M: the first is number j M.
      outer = counter % fprop_context.MAX_MICRO_BATCHES
      counter += outer * (self.num_micro_batches - 1)
    elif context.do_eval:
      counter = tf.constant(0, tf.int64)
    else:
      raise ValueError(f'{self.path}: a Scope with do_eval=False needs a step')
    if context.do_eval not in self._tape_functions:
      self._tape_functions[context.do_eval] = tape_function.TapeFunction(
        self.engine, self.SplitBatch, self.params.batch_dim, context.do_eval
      )
    return self._tape_functions[context.do_eval].Run(theta.layers, self._Checked(args), counter)


def PartitionSequentialLayers(
  params: hyperparams.InstantiableParams | Sequence[hyperparams.InstantiableParams],
  num_partitions: int,
  *input_specs: Any,
) -> list[int]:
  """Cuts a SequentialLayer (or a list of layers) into stages of balanced FLOPs (Lingvo's name).

  Unlike Lingvo's, the cut minimises the costliest stage exactly, leaves none empty and changes
  no name: it is a list of end indices, to be set as `PipeliningLayer`'s `splits`.

  Args:
    params: a SequentialLayer's Params, or a list of layers' Params.
    num_partitions: K.
    *input_specs: (nests of) tf.TensorSpec of one micro-batch.

  Returns:
    For each stage the index after its last layer in the flattened sequence.
  """
  p = PipeliningLayer.Params().Set(name='partition')
  p.sub = list(params) if isinstance(params, (list, tuple)) else [params]
  layer = p.Instantiate()
  schedule = schedules.Get('gpipe', num_partitions, 1)
  cut = cut_lib.MakeCut(layer.layers, input_specs, schedule=schedule)
  return list(cut.ends)
