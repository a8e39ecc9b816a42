# SPDX-License-Identifier: Apache-2.0
"""`EvalRunner`: a task placed on devices, which evaluates and decodes; `runner` has what trains."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import heartbeat, nested_map, shapes
from lingvo_gpipe.experiment import task as task_lib
from lingvo_gpipe.input import batches
from lingvo_gpipe.learning import multi_learner, shared_weights
from lingvo_gpipe.pipeline import engine
from lingvo_gpipe.pipeline.stages import failures, micro_batch
from lingvo_gpipe.reporting import weighted_means
from lingvo_gpipe.runners import batch_placement, task_cut


class EvalRunner:
  """Owns the weights of a task, and needs no memory but theirs: nothing is trained.

  Attributes:
    task: the task.
    batch_spec: the spec of its batches.
    learner: says what is trained, for the cut depends on it.
    plan: the cut into stages.
    engine: the pipeline engine.
    global_step: int64 variable, how many training steps were done.
  """

  def __init__(
    self,
    task: task_lib.BaseTask,
    devices: Sequence[str],
    batch_spec: nested_map.NestedMap,
    *,
    splits: Sequence[int] = (),
    num_replicas: int = 1,
    shared: shared_weights.SharedWeights | None = None,
  ) -> None:
    """Cuts the task into stages and allocates its weights on their devices.

    Args:
      task: the task, without variables yet.
      devices: at least one a stage, and that for each replica, replica by replica.
      batch_spec: NestedMap of tf.TensorSpec of the batches to come, static shapes; the largest one
        where there are several (see `ExpectBatches`).
      splits: the cut, as for `task_cut.CutTask`.
      num_replicas: how often the stages are there; each replica gets its share of a mini-batch.
      shared: what this task and others have in common.

    Raises:
      ValueError: the task cannot be cut as its Params say, or has no pipeline and is to have
        several replicas.
    """
    if task.pipeline is None and num_replicas > 1:
      raise ValueError(
        f'{type(task).__name__} has no pipeline, and {num_replicas} replicas need one: give it a '
        'PipeliningLayer, of one stage if one is enough'
      )
    self.task = task
    self.batch_spec = batch_spec
    self.learner = multi_learner.MultiLearner(task.params.train.learner)
    if shared is not None:
      task.SetVariableMaker(shared.Variable)
    if task.pipeline is None:
      self.cut = task_cut.CutTask(task, batch_spec)
      self.engine = engine.PipelineEngine(
        [task],
        [1],
        devices,
        xla=False,
        loss_fn=lambda theta, y, side: self._Metrics(theta[0], y, side),
        is_trained=self.learner.IsTrained,
      )
    else:
      self.cut = task.pipeline.Place(
        devices,
        *task_cut.PipelineInputSpecs(task, batch_spec),
        loss_fn=lambda theta, y, side: self._Metrics(nested_map.NestedMap(), y, side),
        weights=task_cut.Weights(task, self.learner, num_replicas),
        splits=splits,
        num_replicas=num_replicas,
      )
      self.engine = task.pipeline.engine
    # Layers outside the pipeline, if the task has any.
    task.InstantiateVariables(devices[0])
    if shared is not None:
      self.global_step = shared.global_step
    else:
      with tf.device('/device:CPU:0'):
        self.global_step = tf.Variable(0, trainable=False, dtype=tf.int64, name='global_step')
    self._eval_step = tf.function(self._EvalStep, autograph=False)
    self._shapes = {shapes.FormatNest(batch_spec)}  # Of the batches that are expected.
    self._traced: set[tuple[Any, str]] = set()

  @property
  def task_runners(self) -> Mapping[str, EvalRunner]:
    """{'': this}: as a `MultiTaskRunner` has one for each task."""
    return {'': self}

  def Precision(self) -> str:
    """The dtypes and whether XLA compiles, for people."""
    p, pipeline = self.task.params, self.task.pipeline
    xla = 'on' if pipeline is not None and pipeline.params.xla else 'off'
    return f'weights {p.dtype.name}, activations {p.fprop_dtype.name}, XLA {xla}'

  def Variables(self) -> dict[str, tf.Variable]:
    """{name: variable}: what is read of a checkpoint, see `ema.Restore`; the names know no cut."""
    return {**self.task.VariablesByPath(), 'global_step': self.global_step}

  def AfterRestore(self) -> None:
    """To be called when `Variables()` were assigned from a checkpoint."""
    self.engine.SyncReplicas()

  @contextlib.contextmanager
  def AveragedWeights(self) -> Iterator[None]:
    """Within it the weights are their moving averages, if the task has any; here they always are.

    It may be entered within itself. Nothing must be trained or saved in it.
    """
    yield

  def ExpectBatches(self, batch_specs: Iterable[nested_map.NestedMap]) -> None:
    """Announces batches of other shapes; the stages are compiled for each of them when it comes.

    Batches whose shape was not announced are taken, too, but a warning tells of the compilations.

    Args:
      batch_specs: NestedMaps of tf.TensorSpec that differ from the runner's batch spec in sizes
        alone.

    Raises:
      ValueError: another structure or rank.
      TypeError: another dtype.
    """
    for spec in batch_specs:
      shapes.CheckNest(self.task.path, 'batch', spec, self.batch_spec)
      self._shapes.add(shapes.FormatNest(spec))
    self.engine.functions.num_batch_shapes = len(self._shapes)

  def Evaluate(self, data: Iterable[batches.AnyBatch]) -> dict[str, tuple[float, float]]:
    """{name: (mean, total weight)} over batches, in evaluation mode, with `AveragedWeights`."""
    total = weighted_means.MetricsAccumulator()
    with self.AveragedWeights():
      for batch in data:
        self._CheckBatch(batch)
        heartbeat.Begin(heartbeat.EVALUATE)
        self._Trace(self._eval_step, batch)
        with failures.LocateFailure(self.engine, functools.partial(self._EvalStep, batch)):
          sums = self._eval_step(batch)
        total.Update(
          {
            name: (float(value) / max(float(weight), 1e-30), float(weight))
            for name, (value, weight) in sums.items()
          }
        )
        heartbeat.Step(heartbeat.EVALUATE)
    return total.Result()

  def MetricNames(self, batch_spec: nested_map.NestedMap) -> list[str]:
    """What `Evaluate` returns for batches of this spec; traces, and computes nothing."""
    self._Trace(self._eval_step, batch_spec)
    return list(self._eval_step.get_concrete_function(batch_spec).structured_outputs)

  def Decode(
    self, batch: nested_map.NestedMap, input_generator: Any, first_example: int = 0
  ) -> dict[str, Any]:
    """What the task decodes of a batch, with `AveragedWeights`: {name: an entry for each row}.

    Args:
      batch: NestedMap that matches the batch spec.
      input_generator: where it comes from.
      first_example: the number of its first row in the data set, from which the others follow;
        unless the batch has an `example_index`.
    """
    self._CheckBatch(batch)
    if 'example_index' not in batch:
      rows = tf.range(micro_batch.BatchSize(batch), dtype=tf.int64)
      batch = nested_map.NestedMap(batch, example_index=first_example + rows)
    heartbeat.SuspendTimeout()
    with self.AveragedWeights():
      decoded = self.task.Decode(batch, input_generator)
    heartbeat.SuspendTimeout()
    return decoded

  @functools.cached_property
  def placement(self) -> batch_placement.Placement:
    """Where the parts of a batch belong."""
    return batch_placement.Placement(self.task, self.engine, self.batch_spec)

  def Shares(self, batch: batches.AnyBatch) -> list[nested_map.NestedMap]:
    """The rows of a batch: in one where the trainer read it, else in one for each replica."""
    if not isinstance(batch, batches.PlacedBatch):
      return [batch]
    return [view for _, _, view in self.placement.Views(batch)]

  def MicroBatches(self, batch: batches.AnyBatch) -> list[micro_batch.MicroBatch]:
    """Splits a batch into micro-batches; those of a `PlacedBatch` stay on its devices."""
    if not isinstance(batch, batches.PlacedBatch):
      pipeline = self.task.pipeline
      return self._Split(batch, batch, 1 if pipeline is None else pipeline.num_micro_batches)
    return [
      piece
      for share, first, last in self.placement.Views(batch)
      for piece in self._Split(first, last, share.num_micro_batches, share.first, share.last)
    ]

  def _Split(
    self,
    batch: nested_map.NestedMap,
    batch_for_loss: nested_map.NestedMap,
    num_micro_batches: int,
    device: str | None = None,
    device_of_loss: str | None = None,
  ) -> list[micro_batch.MicroBatch]:
    """Splits a batch on these devices; None lets TensorFlow choose the device."""
    with tf.device(device_of_loss):
      side = self.task.LossInputs(batch_for_loss)
    pipeline = self.task.pipeline
    if pipeline is None:
      pieces, sides = [(batch,)], [side]
    else:
      batch_dim = pipeline.params.batch_dim
      with tf.device(device):
        args = self.task.PipelineInputs(batch)
        sizes = micro_batch.BatchSize(args, batch_dim), micro_batch.BatchSize(side)
        if sizes[0] != sizes[1]:
          raise ValueError(
            f'{self.task.path}: PipelineInputs has a batch of {sizes[0]} at dimension {batch_dim} '
            f'(batch_dim of its PipeliningLayer), but LossInputs one of {sizes[1]} at dimension 0'
          )
        pieces = micro_batch.Split(args, num_micro_batches, batch_dim)
      with tf.device(device_of_loss):
        sides = micro_batch.Split(side, num_micro_batches)
    with tf.device(device_of_loss):
      weights = [self.task.LossWeight(side) for side in sides]
    return [micro_batch.MicroBatch(*piece) for piece in zip(pieces, sides, weights, strict=True)]

  def _Metrics(
    self, theta: nested_map.NestedMap, outputs: tuple[Any, ...], side: nested_map.NestedMap
  ) -> task_lib.Metrics:
    predictions = outputs[0] if len(outputs) == 1 else outputs
    metrics, _ = self.task.ComputeLoss(theta, predictions, side)
    return metrics

  def _CheckBatch(self, batch: batches.AnyBatch) -> None:
    if isinstance(batch, batches.PlacedBatch):  # Checked when it was read.
      return
    shapes.CheckNest(self.task.path, 'batch', batch, self.batch_spec)
    self.task.CheckBatch(batch)

  def _Trace(self, step: Any, batch: batches.AnyBatch, *args: tf.Tensor) -> bool:
    """Traces a step for a batch that is the first of its shape; returns whether it did.

    TensorFlow would do it as well, and warn where some new shapes come in a row.
    """
    key = (step, shapes.FormatNest(batch))
    if key in self._traced:
      return False
    heartbeat.SuspendTimeout()
    step.get_concrete_function(batch, *args)
    self._traced.add(key)
    return True

  def _EvalStep(self, batch: batches.AnyBatch) -> dict[str, tf.Tensor]:
    return self.engine.Evaluate(self.MicroBatches(batch))
