# SPDX-License-Identifier: Apache-2.0
"""`PipeliningLayer`: a sequence of layers that runs as stages on several devices.

The cut is not in the model: the layers stay one flat list, whose paths (and so variable names,
initial values, dropout masks and checkpoints) do not depend on the number of stages, micro-batches
or the schedule. A stage is an index range of that list.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import (
  base_layer,
  domain,
  fprop_context,
  hyperparams,
  nested_map,
  shapes,
  weight_params,
)
from lingvo_gpipe.distributed import accelerators, host_memory
from lingvo_gpipe.layers import sequential
from lingvo_gpipe.pipeline import decoder as decoder_lib
from lingvo_gpipe.pipeline import engine, failed_step, tape_function, weight_ties
from lingvo_gpipe.pipeline.cutting import cut as cut_lib
from lingvo_gpipe.pipeline.cutting import layer_costs
from lingvo_gpipe.pipeline.schedule import offload, rematerialisation, schedules
from lingvo_gpipe.pipeline.stages import micro_batch, stage_math
from lingvo_gpipe.pipeline.stages import stage as stage_lib


class PipeliningLayer(base_layer.BaseLayer):
  """A sequence of layers cut into stages, with micro-batches streamed through them (GPipe).

  There are two ways to use it. A task gives its loss to `Place` and trains through the engine,
  which runs the loss inside the last stage. Other code calls `FProp` under a gradient tape, after
  `Place` has put the stages on devices:

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
    p.Define(
      'sub',
      [],
      'Params of the layers, in order; nested SequentialLayers are flattened.',
      domain.ListOf(domain.ParamsOf(base_layer.BaseLayer)),
    )
    p.Define('num_stages', 1, 'Number of stages.', domain.Int(1, schedules.MAX_STAGES))
    p.Define(
      'stages_per_device',
      1,
      'Number of stages on each device: stage k is on device k mod K. A custom Schedule maps its '
      'stages to devices itself.',
      domain.Int(1, schedules.MAX_STAGES),
    )
    p.Define(
      'num_micro_batches',
      1,
      'M, the number of micro-batches in a mini-batch.',
      domain.Int(1, schedules.MAX_MICRO_BATCHES),
    )
    p.Define(
      'splits',
      [],
      'For each stage the index after its last layer; with a shared vocabulary the sizes of its '
      'slices may follow. Empty: cut by cost.',
      domain.ListOf(domain.Int(0)),
    )
    p.Define(
      'ties',
      [],
      "Pairs ['layers[9].emb', 'layers[0].emb']: the first weight is the second one, used again.",
      domain.ListOf(domain.ListOf(domain.STR, 2)),
    )
    p.Define(
      'partition_by',
      'flops',
      'The cost that an automatic cut balances: flops, params, or time, measured on the first '
      'device.',
      domain.OneOf(*cut_lib.COSTS),
    )
    p.Define(
      'memory_limit',
      0,
      'Most bytes that a device may need, as predicted by `stage_memory`; 0: no limit.',
      domain.NOT_NEGATIVE,
    )
    p.Define(
      'schedule',
      'gpipe',
      'Name of the training schedule, or a Schedule.',
      # `Get` explains how to use `search`.
      domain.NameOf('a schedule', lambda: [*schedules.Names(), 'search'])
      | domain.InstanceOf(schedules.Schedule),
    )
    p.Define(
      'remat_policy',
      'stage',
      'The part that backward recomputes: stage (everything), except_last (everything but the last '
      'micro-batch), layer (one layer at a time, from its kept input) or none. auto: in each stage '
      'the least that keeps memory_limit. FProp under a tape always uses stage.',
      domain.OneOf(*rematerialisation.POLICIES, rematerialisation.AUTO),
    )
    p.Define(
      'offload',
      0.0,
      'Greatest share of the stages and micro-batches of a device whose activations wait for '
      'backward in the memory of the host; only if that lowers the peak of the device. 0: '
      'none, '
      'unless a Schedule has copies.',
      domain.Number(0, 1),
    )
    p.Define(
      'xla',
      None,
      'Whether XLA compiles the stages. None: unless a GPU is too new for it.',
      domain.BOOL | domain.NONE,
    )
    p.Define(
      'vocabulary',
      'one',
      'Placement of the last layer, a softmax, in training: in the last stage (one), or a slice of '
      'its classes on each device (shared), which balances the devices.',
      domain.OneOf('one', 'shared'),
    )
    p.Define('batch_dim', 0, 'The batch dimension of every input and output.', domain.Int(0, 7))
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    flat = [q for layer in self.params.sub for q in sequential.FlattenSequential(layer)]
    if not flat:
      raise ValueError(f'{self.path}: sub is empty; a pipeline needs at least one layer')
    # Report mistakes now rather than when the first step is built.
    p = self.params
    num_devices = -(-p.num_stages // p.stages_per_device)
    if isinstance(p.schedule, schedules.Schedule) and p.stages_per_device == 1:
      num_devices = p.schedule.num_devices
    chosen = schedules.Get(p.schedule, p.num_stages, p.num_micro_batches, num_devices)
    offload.WithOffload(chosen, p.offload)  # Raises if the schedule has copies already.
    if p.vocabulary != 'one' and chosen.offloaded:
      raise ValueError(
        f'{self.path}: vocabulary={p.vocabulary!r}, but schedule {chosen.name!r} has copies to the '
        'host already; give it without them, and set `offload`'
      )
    if chosen.forward_only:
      raise ValueError(f'{self.path}: schedule {chosen.name!r} has no backward; it cannot train')
    if chosen.num_slices:
      raise ValueError(
        f'{self.path}: schedule {chosen.name!r} has slices of the vocabulary; give it without '
        "them, vocabulary='shared' adds them"
      )
    self._num_devices = chosen.num_devices
    # The same paths as a SequentialLayer's, so that a checkpoint of either fits the other.
    self.CreateChildren('layers', flat, seed_roots=True)
    stage_lib.Skips(self.layers, [len(self.layers)])
    specs = {path[len(self.path) + 1 :]: spec for path, spec in super().WeightSpecs().items()}
    self._ties = weight_ties.CheckTies(p.ties, specs, f'{self.path}: ')
    self._engine: engine.PipelineEngine | None = None
    self._decoder: decoder_lib.Decoder | None = None
    self._input_specs: tuple[Any, ...] = ()
    self._predict = tf.function(self._Predict, autograph=False)
    self._tape_functions: dict[bool, tape_function.TapeFunction] = {}

  def WeightSpecs(self) -> dict[str, tuple[weight_params.WeightParams, bool]]:
    """Returns the weights by path, as BaseLayer does, but each tied weight once."""
    tied = self.absolute_ties
    return {path: spec for path, spec in super().WeightSpecs().items() if path not in tied}

  def VariablesByPath(self) -> dict[str, tf.Variable]:
    """Returns the variables by path, as BaseLayer does, without the copies of tied weights."""
    tied = self.absolute_ties
    return {path: v for path, v in super().VariablesByPath().items() if path not in tied}

  @property
  def vars(self) -> nested_map.NestedMap:
    """The variables, with the owner's variable in place of a tied one."""
    variables = super().vars
    for tied, owner in self._ties.items():
      variables.Set(tied, variables.GetItem(owner))
    return variables

  @property
  def num_devices(self) -> int:
    """K, the number of devices that hold the stages."""
    return self._num_devices

  def MakeCut(
    self,
    *input_specs: Any,
    splits: Sequence[int] = (),
    weights: layer_costs.Weights | None = None,
    device: str = '',
    num_replicas: int = 1,
  ) -> cut_lib.Cut:
    """Returns the cut for inputs of these specs; allocates nothing.

    Args:
      *input_specs: a (nest of) tf.TensorSpec `[..., batch, ...]` of the whole mini-batch for each
        argument of the first layer.
      splits: overrides `splits` of the Params.
      weights: the trained weights and their slots; default: all weights, with two slots each. Ties
        come from the layer.
      device: the device on which partition_by='time' measures; '' lets TensorFlow choose.
      num_replicas: number of replicas that share the mini-batch, with num_micro_batches each.
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

    schedule = schedules.GetForBatch(
      p.schedule, p.num_stages, -(-len(sizes) // num_replicas), self.num_devices
    )
    return cut_lib.MakeCut(
      self.layers,
      tf.nest.map_structure(MicroBatchSpec, tuple(input_specs)),
      schedule=schedule,
      offload=p.offload,
      splits=splits or p.splits,
      by=p.partition_by,
      num_params=self.NumParams(),
      remat_policy=p.remat_policy,
      xla=self.UsesXla([device]),
      weights=dataclasses.replace(weights or layer_costs.Weights(), ties=self.absolute_ties),
      memory_limit=p.memory_limit,
      device=device,
      prefix=f'{self.path}: ',
      shares_vocabulary=p.vocabulary == 'shared',
    )

  def UsesXla(self, devices: Sequence[str]) -> bool:
    """Returns whether XLA compiles stages on these devices; see `accelerators.UsesXla`."""
    return accelerators.UsesXla(self.params.xla, devices)

  @property
  def absolute_ties(self) -> dict[str, str]:
    """{path of a tied weight: path of its owner}."""
    return {f'{self.path}.{a}': f'{self.path}.{b}' for a, b in self._ties.items()}

  @property
  def theta(self) -> nested_map.NestedMap:
    """The weights to compute with; raises ValueError before `Place`."""
    _ = self.engine  # Raises before `Place`.
    return super().theta

  @property
  def engine(self) -> engine.PipelineEngine:
    """The engine that runs the stages; raises ValueError before `Place`."""
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
    cut: cut_lib.Cut | None = None,
  ) -> cut_lib.Cut:
    """Cuts the layers for inputs of these specs and allocates each stage on its device.

    Args:
      devices: at least `num_devices` devices for each replica, replica by replica.
      *input_specs: a (nest of) tf.TensorSpec `[..., batch, ...]` of the whole mini-batch for each
        argument of the first layer.
      loss_fn: the loss with which the engine trains (`stage_math.LossFn`); FProp does not use it.
      weights: the weights that the engine trains, and their slots; see `MakeCut`.
      splits: overrides `splits` of the Params.
      num_replicas: number of copies of the pipeline. The engine trains and evaluates in all
        replicas; everything else runs in the first.
      cut: the result of `MakeCut` for the same arguments; None: it is called.

    Returns:
      The cut.

    Raises:
      ValueError: the Params do not allow a cut of these layers, there are too few devices, the
        weights exceed the memory of this machine of CPUs, or variables exist already on other
        devices.
    """
    p = self.params
    host_memory.CheckWeights(self.WeightSpecs(), devices)
    if cut is None:
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
      remat_policy=cut.policy,
      xla=self.UsesXla(devices),
      stage_to_device=cut.schedule.stage_to_device[: cut.schedule.num_layer_stages],
      loss_fn=loss_fn,
      is_trained=cut.weights.is_trained,
      ties=self.absolute_ties,
      num_replicas=num_replicas,
      offload=p.offload,
      vocabulary=cut.vocabulary,
    )
    self.InstantiateVariables()
    self._decoder = None
    self._predict = tf.function(self._Predict, autograph=False)
    self._tape_functions = {}
    return cut

  @property
  def num_micro_batches(self) -> int:
    """Number of micro-batches in a mini-batch, over all replicas; before `Place` over one."""
    num_replicas = 1 if self._engine is None else len(self._engine.replicas)
    return int(self.params.num_micro_batches) * num_replicas

  def SplitBatch(self, nest: Any) -> list[Any]:
    """Splits a nest of tensors `[..., batch, ...]` into this pipeline's micro-batches."""
    return micro_batch.Split(nest, self.num_micro_batches, self.params.batch_dim)

  def Predict(self, *args: Any) -> Any:
    """Runs FProp in evaluation mode straight from the variables, without copies or gradients."""
    args = self._CheckArgs(args)
    with failed_step.Locate(self.engine, lambda: self._Predict(args)):
      return self._predict(args)

  def _CheckArgs(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments as tensors; raises if they do not match the specs of `Place`."""
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
    """The decoder; raises ValueError before `Place`, NotImplementedError if a layer has skips."""
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
      *args: the arguments of the first layer, nests of tensors [batch, time, ...].
      max_length: the most positions that will ever be run, including the prompt.
      last_only: whether to return only the last position, [batch, 1, ...]. Layers after the last
        one that mixes positions, such as a softmax, then compute only that.

    Returns:
      The last layer's outputs, and the states for `ExtendStep`.

    Raises:
      NotImplementedError: a layer cannot decode; the message names it.
    """
    # Not checked against the specs of `Place`: packed training rows have segments, prompts do not.
    return self.decoder.Prefill(tape_function.AsTensors(args), max_length, last_only)

  def ExtendStep(  # type: ignore[override]
    self, states: decoder_lib.PipelineStates, *args: Any, time_step: Any
  ) -> tuple[Any, decoder_lib.PipelineStates]:
    """Runs one more position.

    Args:
      states: from Prefill, an earlier ExtendStep or ReorderStates; not changed.
      *args: arguments of the first layer at this position, nests of tensors [batch, 1, ...].
      time_step: index of the position; the first position of the prompt is 0.

    Returns:
      The last layer's outputs, [batch, 1, ...], and the new states.

    Raises:
      ValueError: time_step is not below max_length, or batch and states differ in size.
    """
    return self.decoder.ExtendStep(states, tape_function.AsTensors(args), time_step)

  def ReorderStates(
    self, states: decoder_lib.PipelineStates, indices: Any
  ) -> decoder_lib.PipelineStates:
    """Returns rows of the states, for example of the hypotheses that a beam search continues.

    Args:
      states: from Prefill, ExtendStep or an earlier ReorderStates; not changed.
      indices: integers [new batch]: the new row i is the old row indices[i]. The new batch may have
        another size: a beam search begins several hypotheses for each row of a prompt.
    """
    return self.decoder.ReorderStates(states, indices)

  @classmethod
  def FPropMeta(
    cls, params: hyperparams.InstantiableParams, *input_specs: Any
  ) -> nested_map.NestedMap:
    """Returns the sum of the layers' costs; the pipeline need not be placed on devices."""
    return sequential.FPropMetaLayers(params, *input_specs)

  def FProp(self, theta: nested_map.NestedMap, *args: Any) -> Any:
    """Runs the pipeline; differentiable from any tape.

    Backward recomputes each stage from its input, micro-batch by micro-batch, M-1 ... 0. In a
    Scope with do_eval=False, dropout masks depend on the scope's step and micro-batch, and sums
    that layers report for their state go to the scope (see `fprop_context.UpdateLayers`).

    Args:
      theta: the weights.
      *args: a nest of tensors `[..., batch, ...]` for each argument of the first layer.

    Returns:
      The last layer's outputs, of the whole mini-batch.

    Raises:
      ValueError: `Place` was not called.
    """
    context = fprop_context.Current()
    counter = context.step_counter
    if counter is not None:
      # Micro-batch j of the user's scope is split into M here: the first of them is number j M.
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
    return self._tape_functions[context.do_eval].Run(theta.layers, self._CheckArgs(args), counter)


def PartitionSequentialLayers(
  params: hyperparams.InstantiableParams | Sequence[hyperparams.InstantiableParams],
  num_partitions: int,
  *input_specs: Any,
) -> list[int]:
  """Cuts a SequentialLayer (or a list of layers) into stages of balanced FLOPs (Lingvo's name).

  Unlike Lingvo's function, this one minimises the cost of the most expensive stage exactly, leaves
  no stage empty and changes no name: it returns end indices for `splits` of a PipeliningLayer.

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
