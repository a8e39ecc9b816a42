# SPDX-License-Identifier: Apache-2.0
"""Adapts an experiment to the planner: costs of its layers, and overrides that apply a plan."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import hyperparams, nested_map
from lingvo_gpipe.experiment import model as model_lib
from lingvo_gpipe.learning import multi_learner
from lingvo_gpipe.pipeline import replicas
from lingvo_gpipe.pipeline.cutting import layer_costs
from lingvo_gpipe.pipeline.schedule import rematerialisation
from lingvo_gpipe.pipeline.stages import micro_batch
from lingvo_gpipe.planner import layer_tables, model_costs, planner
from lingvo_gpipe.runners import task_cut

# Costs at these micro-batch sizes are interpolated linearly.
_SIZES = (1, 16)


class Experiment:
  """The model of an experiment, without allocated weights.

  Attributes:
    model: the model.
    global_batch: number of examples per mini-batch over all replicas.
  """

  def __init__(self, params: hyperparams.InstantiableParams, global_batch: int | None) -> None:
    """Creates the model.

    Args:
      params: Params of the experiment's model.
      global_batch: number of examples per mini-batch; None uses the experiment's batch size.

    Raises:
      ValueError: the model has no pipeline or no input, or its batch size cannot be set.
    """
    self.model = model_lib.SingleTaskModel(params)
    task = self.model.task
    if task.pipeline is None or 'stack' not in task.params:
      raise ValueError(
        f'{type(task).__name__} has no pipeline with Params at task.stack, which a plan sets'
      )
    if self.model.input is None:
      raise ValueError('a plan needs an input, for the shapes of a batch: set params.input')
    self._pipeline = task.pipeline
    self._specs = task_cut.PipelineInputSpecs(task, self.model.input.BatchSpec())
    self._batch_dim = task.pipeline.params.batch_dim
    learner = multi_learner.MultiLearner(task.params.train.learner)
    self._weights = layer_costs.Weights(
      learner.IsTrained, task.pipeline.absolute_ties, learner.SlotsPerWeight()
    )
    self.global_batch = micro_batch.BatchSize(self._specs, self._batch_dim)
    self._is_batch_chosen = global_batch not in (None, self.global_batch)
    if global_batch is not None and self._is_batch_chosen:
      if not self.model.input.params.batch_size:
        raise ValueError(
          f'--global_batch={global_batch}: this input has bucket_batch_limit in place of a batch '
          f'size, {self.global_batch} rows at the most; change that, and leave out --global_batch'
        )
      self.global_batch = global_batch

  def _SpecsOf(self, size: int) -> tuple[Any, ...]:
    """Returns the specs of the pipeline's inputs for `size` examples."""
    return _Resize(tuple(self._specs), size, self._batch_dim)

  def _SideSpecsOf(self, size: int) -> Any:
    """Returns the specs of the loss's inputs other than the outputs."""
    assert self.model.input is not None
    traced = tf.function(self.model.task.LossInputs, autograph=False)
    specs = traced.get_concrete_function(self.model.input.BatchSpec()).structured_outputs
    return _Resize(specs, size, 0)

  def _Metrics(self, theta: Any, outputs: tuple[Any, ...], side: Any) -> dict[str, Any]:
    """Computes the loss as in the last stage."""
    del theta
    predictions = outputs[0] if len(outputs) == 1 else outputs
    metrics, _ = self.model.task.ComputeLoss(nested_map.NestedMap(), predictions, side)
    return dict(metrics)

  def _Update(
    self, device: str, trained: Mapping[str, tf.Variable], accumulators: Sequence[tf.Variable]
  ) -> Callable[[], Any]:
    """Returns an update of the weights; see `layer_profile.UpdateMaker`."""
    # A learner without weights to train would raise an error.
    params = multi_learner.AsList(self.model.task.params.train.learner)
    learner = multi_learner.MultiLearner(
      [p for p in params if any(map(p.Instantiate().IsTrained, trained))]
    )
    learner.Build([replicas.Shard(device, dict(trained), list(accumulators))])

    def Update() -> tf.Tensor:
      norm = learner.Apply(tf.constant(0, tf.int64), tf.constant(1.0))['grad_norm']
      for (
        accumulator
      ) in accumulators:  # Clear the accumulators, as the next step does before it starts.
        accumulator.assign(tf.zeros_like(accumulator))
      return norm

    return Update

  def Costs(self, measured_sizes: list[int], devices: Sequence[str] = ()) -> model_costs.ModelCosts:
    """Returns the costs of the layers.

    Args:
      measured_sizes: micro-batch sizes at which layers are timed on the first device; if empty,
        times follow from FLOPs and bytes.
      devices: the devices.
    """
    task = self.model.task
    unclipped = measured_sizes or _SIZES
    sizes = sorted({min(size, self.global_batch) for size in unclipped})
    measuring = layer_tables.Measuring(devices, self._Update)
    return layer_tables.Collect(
      self._pipeline.layers,
      self._SpecsOf,
      sizes,
      self._weights,
      layer_tables.Loss(self._Metrics, self._SideSpecsOf),
      averages_per_weight=float(task.params.train.ema_decay > 0),
      xla=self._pipeline.UsesXla(devices[:1]),
      measuring=measuring if measured_sizes else None,
    )

  def Slowdown(self, costs: model_costs.ModelCosts, devices: Sequence[str]) -> float:
    """Returns the slowdown of layers if all devices work; see `layer_tables.Slowdown`."""
    size = max(costs.samples)
    seconds = [s.seconds or (0.0, 0.0) for s in costs.samples[size]]
    return layer_tables.Slowdown(
      self._pipeline.layers,
      self._SpecsOf(size),
      self._weights,
      seconds,
      xla=self._pipeline.UsesXla(devices),
      devices=devices,
    )

  def Overrides(self, prediction: planner.Prediction) -> str:
    """Returns the `--model_params_override` that runs a plan, except for the number of replicas."""
    choice, policies = prediction.choice, {*prediction.policies}
    policy, limit = choice.remat_policy, {}
    if policy == rematerialisation.AUTO:
      if len(policies) == 1 and isinstance(prediction.policies[0], str):
        policy = prediction.policies[0]
      else:  # The trainer chooses within the same limit.
        limit = {'task.stack.memory_limit': int(prediction.memory_limit)}
    values = {
      'task.stack.num_stages': choice.num_stages,
      'task.stack.stages_per_device': choice.stages_per_device,
      'task.stack.num_micro_batches': choice.num_micro_batches,
      'task.stack.splits': [*prediction.ends, *prediction.vocabulary],
      'task.stack.vocabulary': choice.vocabulary,
      'task.stack.schedule': choice.schedule,
      'task.stack.remat_policy': policy,
      **limit,
      **({'task.stack.offload': choice.offload} if choice.offload else {}),
      'task.train.shard_optimizer_slots': choice.shard_slots,
    }
    if self._is_batch_chosen:
      values = {'input.batch_size': self.global_batch, **values}
    return ';'.join(f'{path}:{value}' for path, value in values.items())

  def Command(self, key: str, prediction: planner.Prediction, flags: Sequence[str] = ()) -> str:
    """Returns the command line that trains with a plan; `flags` are the flags of the Params."""
    parts = ['trainer', f'--model={key}', '--logdir=LOGDIR', *flags]
    if prediction.choice.num_replicas > 1:
      parts.append(f'--num_replicas={prediction.choice.num_replicas}')
    # After the user's overrides, because later overrides win.
    parts.append(f'--model_params_override={self.Overrides(prediction)}')
    return shlex.join(parts)


def _Resize(specs: Any, size: int, dim: int) -> Any:
  """Returns the specs with `size` examples in dimension `dim`."""

  def Change(spec: Any) -> Any:
    if spec is None:
      return None
    shape = list(spec.shape)
    shape[dim] = size
    return tf.TensorSpec(shape, spec.dtype)

  return tf.nest.map_structure(Change, specs)
