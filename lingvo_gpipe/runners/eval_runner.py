# SPDX-License-Identifier: Apache-2.0
"""`EvalRunner`: a task placed on devices that evaluates and decodes; `TrainRunner` also trains."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import heartbeat, nested_map, shapes
from lingvo_gpipe.distributed import host_memory
from lingvo_gpipe.experiment import task as task_lib
from lingvo_gpipe.input import batches
from lingvo_gpipe.learning import multi_learner, shared_weights
from lingvo_gpipe.pipeline import engine, failed_step
from lingvo_gpipe.pipeline.stages import micro_batch
from lingvo_gpipe.reporting import weighted_means
from lingvo_gpipe.runners import batch_placement, task_cut


class EvalRunner:
  """Owns the weights of a task. It trains nothing, so the weights are all the memory it needs.

  Attributes:
    task: the task.
    batch_spec: the spec of its batches.
    learner: knows the trained weights, on which the cut depends.
    cut: the cut into stages.
    engine: the pipeline engine.
    global_step: int64 variable, the number of training steps so far.
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
      devices: at least one per stage, for each replica in turn.
      batch_spec: NestedMap of tf.TensorSpec of the batches, static shapes; the spec of the largest
        batch if there are several shapes (see `ExpectBatches`).
      splits: the cut, as for `task_cut.CutTask`.
      num_replicas: number of copies of the pipeline; each gets its share of a mini-batch.
      shared: weights and step that this task shares with other tasks.

    Raises:
      ValueError: the task cannot be cut as its Params say, or it has no pipeline but several
        replicas.
    """
    if task.pipeline is None and num_replicas > 1:
      raise ValueError(
        f'{type(task).__name__} has no pipeline, and {num_replicas} replicas need one: give it a '
        'PipeliningLayer, with one stage if one device is enough'
      )
    self.task = task
    self.batch_spec = batch_spec
    self.learner = multi_learner.MultiLearner(task.params.train.learner)
    if shared is not None:
      task.SetVariableMaker(shared.Variable)
    if task.pipeline is None:
      host_memory.CheckWeights(task.WeightSpecs(), devices)
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
    self._shapes = {shapes.FormatNest(batch_spec)}  # Shapes of the expected batches.
    self._traced: set[tuple[Any, str]] = set()

  @property
  def task_runners(self) -> Mapping[str, EvalRunner]:
    """{'': self}, like the runners of a `MultiTaskRunner` by task."""
    return {'': self}

  def Precision(self) -> str:
    """Returns a line about the dtypes and whether XLA compiles the stages."""
    p, xla = self.task.params, 'on' if self.engine.xla else 'off'
    return f'weights {p.dtype.name}, activations {p.fprop_dtype.name}, XLA {xla}'

  def Variables(self) -> dict[str, tf.Variable]:
    """Returns the variables to read from a checkpoint, by names that do not depend on the cut."""
    return {**self.task.VariablesByPath(), 'global_step': self.global_step}

  def AfterRestore(self) -> None:
    """Must be called after `Variables()` were assigned from a checkpoint."""
    self.engine.SyncReplicas()

  @contextlib.contextmanager
  def AveragedWeights(self) -> Iterator[None]:
    """Enters a context in which the weights are their moving averages, if the task has any.

    A runner that does not train restores the averages as its weights, so nothing changes here.
    The context may be nested. Do not train or save in it.
    """
    yield

  def ExpectBatches(self, batch_specs: Iterable[nested_map.NestedMap]) -> None:
    """Announces batches of other shapes. The stages are compiled for each shape at its first batch.

    A batch of a shape that was not announced works too, but its compilation logs a warning.

    Args:
      batch_specs: NestedMaps of tf.TensorSpec that differ from the runner's batch spec only in
        their sizes.

    Raises:
      ValueError: a spec has another structure or rank.
      TypeError: a spec has another dtype.
    """
    for spec in batch_specs:
      shapes.CheckNest(self.task.path, 'batch', spec, self.batch_spec)
      self._shapes.add(shapes.FormatNest(spec))
    self.engine.functions.num_batch_shapes = len(self._shapes)

  def Evaluate(self, data: Iterable[batches.AnyBatch]) -> dict[str, tuple[float, float]]:
    """Returns {name: (mean, total weight)} over batches, in eval mode, with `AveragedWeights`."""
    total = weighted_means.MetricsAccumulator()
    with self.AveragedWeights():
      for batch in data:
        self._CheckBatch(batch)
        heartbeat.Begin(heartbeat.EVALUATE)
        if self._NoteShape(self._eval_step, batch):
          self._eval_step.get_concrete_function(batch)
        with failed_step.Locate(self.engine, functools.partial(self._EvalStep, batch)):
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
    """Returns the names of the metrics for batches of this spec; traces, but computes nothing."""
    self._NoteShape(self._eval_step, batch_spec)
    return list(self._eval_step.get_concrete_function(batch_spec).structured_outputs)

  def Decode(
    self, batch: nested_map.NestedMap, input_generator: Any, first_example: int = 0
  ) -> dict[str, Any]:
    """Decodes a batch with `AveragedWeights`; returns {name: one entry per row}.

    Args:
      batch: NestedMap that matches the batch spec.
      input_generator: the input that the batch was read from.
      first_example: position of its first row in the data set; the other rows follow. Ignored if
        the batch has an `example_index`.
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
    """The placement of the parts of a batch on the hosts of the stages."""
    return batch_placement.Placement(self.task, self.engine, self.batch_spec)

  def Shares(self, batch: batches.AnyBatch) -> list[nested_map.NestedMap]:
    """Returns the rows of a batch: in one piece if this process read it, or one per replica."""
    if not isinstance(batch, batches.PlacedBatch):
      return [batch]
    return [view for _, _, view in self.placement.Views(batch)]

  def MicroBatches(self, batch: batches.AnyBatch) -> list[micro_batch.MicroBatch]:
    """Splits a batch into micro-batches; a `PlacedBatch` stays on the hosts that have its rows."""
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
    """Splits a batch, or the share of one replica, into micro-batches.

    Args:
      batch: the rows, for the first layer.
      batch_for_loss: the rows, for the loss.
      num_micro_batches: number of micro-batches.
      device: device of the first layer's arguments; None lets TensorFlow choose.
      device_of_loss: device of the loss's inputs and weights; None lets TensorFlow choose.
    """
    with tf.device(device_of_loss):
      side = self.task.LossInputs(batch_for_loss)
    pipeline = self.task.pipeline
    if pipeline is None:
      args, sides = [(batch,)], [side]
    else:
      batch_dim = pipeline.params.batch_dim
      with tf.device(device):
        inputs = self.task.PipelineInputs(batch)
        sizes = micro_batch.BatchSize(inputs, batch_dim), micro_batch.BatchSize(side)
        if sizes[0] != sizes[1]:
          raise ValueError(
            f'{self.task.path}: PipelineInputs has a batch of {sizes[0]} at dimension {batch_dim} '
            f'(batch_dim of its PipeliningLayer), but LossInputs one of {sizes[1]} at dimension 0'
          )
        args = micro_batch.Split(inputs, num_micro_batches, batch_dim)
      with tf.device(device_of_loss):
        sides = micro_batch.Split(side, num_micro_batches)
    with tf.device(device_of_loss):
      weights = [self.task.LossWeight(side) for side in sides]
    return [micro_batch.MicroBatch(*fields) for fields in zip(args, sides, weights, strict=True)]

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

  def _NoteShape(self, step: Any, batch: batches.AnyBatch) -> bool:
    """Records the shape of a batch for a step; returns whether it is new.

    The caller then traces the step, without a time limit. TensorFlow would trace it anyway, but
    warns if several new shapes follow each other.
    """
    key = (step, shapes.FormatNest(batch))
    if key in self._traced:
      return False
    heartbeat.SuspendTimeout()
    self._traced.add(key)
    return True

  def _EvalStep(self, batch: batches.AnyBatch) -> dict[str, tf.Tensor]:
    return self.engine.Evaluate(self.MicroBatches(batch))
