# SPDX-License-Identifier: Apache-2.0
"""`TrainRunner`: a task placed on devices that takes training steps.

The step, in order, with one mini-batch per update:

    TrainStep(batch)                   checks the batch, traces the step at its first call
      _TrainStep(batch)                tf.function: the whole step is one graph
        _Accumulate(batch)
          MicroBatches(batch)          splits the mini-batch into micro-batches
          engine.Accumulate(...)       forward and backward by the schedule, into accumulators
        layer_statistics.Next(...)     new moving statistics of layers such as BatchNorm
        _Update(sums, ...)
          ReplicaUpdate.Apply(...)     sums gradients over replicas, clips, updates the weights
                                       and statistics, copies tied weights to other stages
          ema.Apply(step)              updates the averages of the weights
          global_step + 1

If an update accumulates several mini-batches, `TrainStep` runs `_Accumulate` for each of them as a
function of its own, and `_Update` after the last one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import fprop_context, heartbeat, nested_map, shapes
from lingvo_gpipe.experiment import task as task_lib
from lingvo_gpipe.input import batches
from lingvo_gpipe.learning import ema, shared_weights
from lingvo_gpipe.pipeline import check_numerics, failed_step, layer_statistics
from lingvo_gpipe.pipeline.stages import micro_batch
from lingvo_gpipe.runners import eval_runner, replica_update

# Values of a training step that are not metrics of its task. Several learners add `/NAME`.
STATISTICS = (
  'learning_rate',
  'grad_norm',
  'grad_scale',
  'is_finite',
  'num_skipped_steps',
  'loss_weight',
)


class TrainRunner(eval_runner.EvalRunner):
  """Owns the state of a run (weights, slots and the step number), and takes one step at a time.

  Attributes:
    trace_seconds: time to trace the first training step; 0.0 before it.
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
    """Cuts the task into stages and allocates its variables on their devices.

    Args:
      task: the task, without variables yet.
      devices: at least one per stage, for each replica in turn.
      batch_spec: NestedMap of tf.TensorSpec of the largest batch, static shapes.
      splits: the cut, as for `task_cut.CutTask`.
      num_replicas: number of copies of the pipeline; each gets its share of a mini-batch.
      shared: weights and step that this task shares with other tasks, in one replica.

    Raises:
      ValueError: the task cannot be cut as its Params say, computes in float16, has trained weights
        outside its pipeline, or a pattern of its learner matches none of its variables.
    """
    _CheckDtypes(task)
    super().__init__(
      task, devices, batch_spec, splits=splits, num_replicas=num_replicas, shared=shared
    )
    self.learner.CheckPatterns(self.task.VariablesByPath())
    self._CheckOutside()
    self._CheckMicroBatches()
    self.engine.MakeAccumulators(
      functools.partial(shared.Auxiliary, 'accumulator') if shared else None
    )
    train = task.params.train
    self._replicas = replica_update.ReplicaUpdate(self.learner, self.engine, train, shared)
    self._ema: ema.ExponentialMovingAverage | None = None
    if train.ema_decay:
      self._ema = ema.ExponentialMovingAverage(train.ema_decay, self._AveragedVariables(), shared)
    self._train_step = tf.function(self._TrainStep, autograph=False)
    self._clear = tf.function(self.engine.ClearAccumulators, autograph=False)
    self._accumulate = tf.function(self._Accumulate, autograph=False)
    self._next_state = tf.function(
      functools.partial(layer_statistics.Next, self.engine), autograph=False
    )
    self._update = tf.function(self._Update, autograph=False)
    # The update in progress: numbers of accumulated mini-batches and micro-batches, sums of metrics
    # and loss weights, and the state of the layers after the update.
    self._num_accumulated = 0
    self._num_micro_batches = 0
    self._accumulated: Any = None
    self._state: Any = None
    self._has_trained = False
    self.trace_seconds = 0.0

  def Variables(self) -> dict[str, tf.Variable]:
    """Returns the variables of a checkpoint by names that do not depend on the cut."""
    variables = {**self.task.VariablesByPath(), **self.learner.Variables()}
    if self._ema is not None:
      variables.update(self._ema.Variables())
    return {**variables, 'global_step': self.global_step}

  def TrainedNames(self) -> set[str]:
    """Returns the names of the trained weights among `Variables`."""
    return set(self.engine.trained)

  def AfterRestore(self) -> None:
    """Must be called after `Variables()` were assigned from a checkpoint."""
    self._num_accumulated = 0
    self._replicas.AfterRestore()

  def BeginAtWeights(self) -> None:
    """Must be called after weights alone were assigned, for example from another run's checkpoint.

    Averages, and slots whose initial value is their weight, start again from these weights.
    """
    self._replicas.BeginAtWeights()
    if self._ema is not None:
      self._ema.BeginAtWeights()

  @contextlib.contextmanager
  def AveragedWeights(self) -> Iterator[None]:
    """Enters a context in which the weights are their moving averages (`train.ema_decay`), if any.

    The context may be nested. Do not train or save in it.
    """
    if self._ema is None:
      yield
      return
    try:
      with self._ema.InPlaceOfWeights():
        self.engine.SyncReplicas()
        yield
    finally:
      self.engine.SyncReplicas()

  def _AveragedVariables(self) -> dict[str, tf.Variable]:
    """Returns the variables to average: trained weights and, if asked for, moving statistics."""
    averaged = self.engine.trained
    if self.task.params.train.ema_decay_moving_vars:
      for path, v in self.task.VariablesByPath().items():
        if not v.trainable and v.dtype.is_floating:
          averaged[path] = v
    return averaged

  def TrainStep(self, batch: batches.AnyBatch) -> dict[str, float] | None:
    """Takes one training step: forward, backward, update.

    If the learner accumulates N mini-batches, a step takes N calls. The first N-1 calls end after
    backward; checkpoints do not store their gradients.

    Args:
      batch: NestedMap that matches the batch spec, or a batch of `placement`.

    Returns:
      None if the update waits for more mini-batches. Otherwise the metrics by name, loss_weight,
      the learners' statistics (see `MultiLearner.Apply`), is_finite as 0 or 1, and
      num_skipped_steps, the value of `NumSkippedSteps` after the step.

    Raises:
      ValueError: the task's LossWeight and ComputeLoss return different weights, or a metric has
        the name of a value that the trainer adds.
    """
    if self._has_trained:  # The first step traces and compiles.
      heartbeat.Begin(heartbeat.TRAIN)
    self._CheckBatch(batch)
    if self.learner.num_accumulated_mini_batches == 1:
      self._TraceTraining(self._train_step, batch)
      with failed_step.Locate(self.engine, functools.partial(self._Accumulate, batch)):
        values, loss_weight = self._train_step(batch)
    elif self._AccumulateNext(batch):
      sums, loss_weight = self._accumulated
      values = self._update(sums, loss_weight, self._state)
    else:
      heartbeat.SuspendTimeout()
      return None
    result = {name: float(value) for name, value in values.items()}
    heartbeat.Step(heartbeat.TRAIN)
    # Later batches may round differently, and must not end a correct run.
    bound = 1e-2 if self._has_trained else 1e-3
    self._CheckLossWeight(float(loss_weight), result['loss_weight'], bound)
    self._has_trained = True
    return result

  def _TraceTraining(self, step: Any, batch: batches.AnyBatch, *args: tf.Tensor) -> None:
    """Traces a training step if the batch is the first of its shape; times the first one."""
    if self._NoteShape(step, batch):
      start = time.perf_counter()
      step.get_concrete_function(batch, *args)
      self.trace_seconds = self.trace_seconds or time.perf_counter() - start

  def IsTraced(self, batch: batches.AnyBatch) -> bool:
    """Whether a training step of such a batch was traced before."""
    text = shapes.FormatNest(batch)
    return any(shape == text for step, shape in self._traced if step is not self._eval_step)

  def NumSkippedSteps(self) -> tf.Tensor:
    """Returns the number of steps without an update: gradients not finite, or no loss weight."""
    return self.global_step - self.learner.iterations

  def Gradients(self, loss_weight: float) -> dict[str, tf.Tensor]:
    """Returns the gradient of the last update's loss by path of the weight, before clipping.

    Must be called between two updates, while the accumulators still hold it.

    Args:
      loss_weight: loss weight of the update, as `TrainStep` returned it.
    """
    gradients = {}
    for s in self._replicas.stages:
      for path, accumulator in zip(s.trained, s.accumulators, strict=True):
        with tf.device(s.device):
          gradients[path] = tf.math.divide_no_nan(
            tf.convert_to_tensor(accumulator), tf.cast(loss_weight, accumulator.dtype)
          )
    return gradients

  def WhyNotFinite(self, *data: batches.AnyBatch) -> str:
    """Returns the origin of the last step's first value that is not finite (`check_numerics`).

    Args:
      *data: mini-batches of the step, which must have left the weights unchanged.
    """
    micro_batches = list(itertools.chain(*map(self.MicroBatches, data)))
    return check_numerics.Explain(self.engine, micro_batches, int(self.global_step) - 1)

  def _NumMicroBatches(self, batch: batches.AnyBatch) -> int:
    if self.task.pipeline is None:
      return 1
    if isinstance(batch, batches.PlacedBatch):
      shares = self.placement.Shares(batches.NumRows(batch))
      return sum(share.num_micro_batches for share in shares)
    size = micro_batch.BatchSize(self.task.LossInputs(batch))
    return len(micro_batch.Sizes(size, self.task.pipeline.num_micro_batches))

  def _TrainStep(self, batch: batches.AnyBatch) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    sums, loss_weight, layer_sums = self._Accumulate(batch)
    state = layer_statistics.Next(self.engine, layer_sums)
    return self._Update(sums, loss_weight, state), loss_weight

  def _AccumulateNext(self, batch: batches.AnyBatch) -> bool:
    """Runs forward and backward of a mini-batch; returns whether it is the last of its update."""
    # After an exception the update starts again from its first mini-batch.
    index, self._num_accumulated = self._num_accumulated, 0
    first = self._num_micro_batches if index else 0
    if index == 0:
      self._clear()
    position = tf.constant(first, tf.int64)
    self._TraceTraining(self._accumulate, batch, position)
    with failed_step.Locate(self.engine, functools.partial(self._Accumulate, batch, position)):
      *new, layer_sums = self._accumulate(batch, position)
    self._accumulated = tf.nest.map_structure(tf.add, self._accumulated, new) if index else new
    # The state follows every mini-batch, but is assigned together with the weights or not at all.
    self._state = self._next_state(layer_sums, self._state if index else None)
    self._num_micro_batches = first + self._NumMicroBatches(batch)
    self._num_accumulated = (index + 1) % self.learner.num_accumulated_mini_batches
    return self._num_accumulated == 0

  def _Accumulate(
    self, batch: batches.AnyBatch, first_micro_batch: tf.Tensor | None = None
  ) -> tuple[dict[str, tf.Tensor], tf.Tensor, dict[str, nested_map.NestedMap]]:
    """Runs forward and backward of a mini-batch; changes nothing but the gradient accumulators.

    Args:
      batch: a mini-batch.
      first_micro_batch: number of earlier micro-batches of this update, whose gradients stay in the
        accumulators; None if this is the only mini-batch.

    Returns:
      The metrics' sums, the sum of the loss weights, and the sums that layers report for their
      state.
    """
    micro_batches = self.MicroBatches(batch)
    sums, layer_sums, _ = self.engine.Accumulate(
      micro_batches,
      self.global_step,
      first_micro_batch=0 if first_micro_batch is None else first_micro_batch,
      clear=first_micro_batch is None,
    )
    self._CheckMetricNames(sums)
    return sums, tf.add_n([b.loss_weight for b in micro_batches]), layer_sums

  def _Update(
    self, sums: dict[str, tf.Tensor], loss_weight: tf.Tensor, state: layer_statistics.State
  ) -> dict[str, tf.Tensor]:
    """Updates the weights from the accumulated gradients, and the state; returns the values."""
    values = {name: _Mean(s) for name, s in sums.items()}
    values['loss_weight'] = sums['loss'][1]
    # The accumulators are read only after the last backward action wrote them: TensorFlow orders
    # accesses to one variable inside a tf.function.
    applied = dict(self._replicas.Apply(self.global_step, loss_weight, state))
    is_applied = applied.pop('is_applied')
    if self._ema is not None:
      self._ema.Apply(self.global_step, is_applied)
    values.update(applied)
    values['is_finite'] = tf.cast(values['is_finite'], tf.float32)
    values['num_skipped_steps'] = self.NumSkippedSteps() + 1
    # A step that fails must change nothing, so that it can be repeated to find the cause.
    with tf.control_dependencies(list(values.values())):
      self.global_step.assign_add(1)
    return values

  def _CheckOutside(self) -> None:
    """Raises ValueError if a weight is trained but not part of any stage."""
    inside = self.TrainedNames()
    outside = [
      path
      for path, variable in self.task.VariablesByPath().items()
      if variable.trainable and path not in inside and self.learner.IsTrained(path)
    ]
    if outside:
      raise ValueError(
        f'{type(self.task).__name__} has weights outside the pipeline, which get no gradient: '
        f'{", ".join(outside)}. Make their layers part of the stack, or exclude them by '
        'train.learner.bprop_variable_exclusion'
      )

  def _CheckMicroBatches(self) -> None:
    """Raises ValueError if the random seeds cannot number the micro-batches of an update."""
    num_mini_batches = self.learner.num_accumulated_mini_batches
    num_micro_batches = self.cut.num_micro_batches * len(self.engine.replicas)
    if num_mini_batches * num_micro_batches > fprop_context.MAX_MICRO_BATCHES:
      raise ValueError(
        f'an update of {num_mini_batches} mini-batches of {num_micro_batches} micro-batches '
        f'exceeds the {fprop_context.MAX_MICRO_BATCHES} micro-batches for which there are distinct '
        'random seeds; reduce num_accumulated_mini_batches or num_micro_batches'
      )

  def _CheckMetricNames(self, names: Iterable[str]) -> None:
    """Raises ValueError for names in the summaries of training that are not the task's."""
    rates = {f'{unit}_per_second' for unit in ('examples', self.task.loss_unit)}
    reserved = {*STATISTICS, 'steps', *rates}
    if refused := [name for name in names if name.split('/')[0] in reserved]:
      raise ValueError(
        f'{type(self.task).__name__}.ComputeLoss returns the metric {" and ".join(refused)}, but '
        'the trainer writes a value of its own under this name: choose another one'
      )

  def _CheckLossWeight(self, announced: float, returned: float, bound: float) -> None:
    if abs(announced - returned) > bound * max(abs(announced), abs(returned), 1e-6):
      name = type(self.task).__name__
      raise ValueError(
        f"{name}.LossWeight returned {announced:g} for this batch, but the weight of the 'loss' of "
        f'{name}.ComputeLoss is {returned:g}; they must be equal'
      )


def _CheckDtypes(task: task_lib.BaseTask) -> None:
  """Raises ValueError if a layer computes in float16."""
  for layer in task.Descendants():
    if tf.float16 in layer.compute_dtypes:
      raise ValueError(
        f'{layer.path} computes in float16, in which small gradients become zero unless the loss '
        'is scaled, and the trainer does not scale it: set fprop_dtype to bfloat16 or float32. '
        'PipelinedModel trains in float16, with the LossScaleOptimizer of Keras'
      )


def _Mean(sums: tf.Tensor) -> tf.Tensor:
  return tf.math.divide_no_nan(sums[0], sums[1])
