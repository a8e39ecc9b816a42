# SPDX-License-Identifier: Apache-2.0
"""`TrainRunner`: a task placed on devices, with its training step as functions."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import fprop_context, heartbeat, nested_map, shapes
from lingvo_gpipe.experiment import task as task_lib
from lingvo_gpipe.input import batches
from lingvo_gpipe.learning import ema, shared_weights
from lingvo_gpipe.pipeline import check_numerics, layer_statistics
from lingvo_gpipe.pipeline.stages import failures, micro_batch
from lingvo_gpipe.runners import eval_runner, replica_update


class TrainRunner(eval_runner.EvalRunner):
  """Owns the state of a run: weights, slots and the step; does one step at a time.

  Attributes:
    trace_seconds: how long it took to trace the first training step; 0.0 before it.
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
      task: as for `EvalRunner`.
      devices: the same.
      batch_spec: the same.
      splits: the same.
      num_replicas: the same.
      shared: the same; where weights are shared there is one replica.

    Raises:
      ValueError: the task cannot be cut as its Params say, or has weights to be trained that are
        outside its pipeline.
    """
    super().__init__(
      task, devices, batch_spec, splits=splits, num_replicas=num_replicas, shared=shared
    )
    self._CheckOutside()
    self._CheckMicroBatches()
    self.engine.MakeAccumulators(
      functools.partial(shared.Auxiliary, 'accumulator') if shared else None
    )
    train = task.params.train
    self._replicas = replica_update.ReplicaUpdate(self.learner, self.engine, train, shared)
    self._ema: ema.ExponentialMovingAverage | None = None
    if train.ema_decay:
      self._ema = ema.ExponentialMovingAverage(train.ema_decay, self._Averaged(), shared)
    self._train_step = tf.function(self._TrainStep, autograph=False)
    self._clear = tf.function(self.engine.ClearAccumulators, autograph=False)
    self._accumulate = tf.function(self._Accumulate, autograph=False)
    self._next_state = tf.function(
      functools.partial(layer_statistics.Next, self.engine), autograph=False
    )
    self._update = tf.function(self._Update, autograph=False)
    # How many mini-batches and micro-batches of the update under way were accumulated, what came
    # of them, and what layers' state is to be after it.
    self._num_accumulated = 0
    self._num_micro_batches = 0
    self._accumulated: Any = None
    self._state: Any = None
    self._checked_weight = False
    self.trace_seconds = 0.0

  def Variables(self) -> dict[str, tf.Variable]:
    """{name: variable}: all that a checkpoint keeps; names do not know the cut."""
    found = {**self.task.VariablesByPath(), **self.learner.Variables()}
    if self._ema is not None:
      found.update(self._ema.Variables())
    return {**found, 'global_step': self.global_step}

  def TrainedNames(self) -> set[str]:
    """Which of `Variables` are the trained weights."""
    return set(self.engine.trained)

  def AfterRestore(self) -> None:
    """To be called when `Variables()` were assigned from a checkpoint."""
    self._num_accumulated = 0
    self._replicas.AfterRestore()

  def BeginAtWeights(self) -> None:
    """To be called when weights alone were assigned, as from another run's checkpoint.

    Averages, and slots that begin as their weight, begin anew.
    """
    self._replicas.BeginAtWeights()
    if self._ema is not None:
      self._ema.BeginAtWeights()

  @contextlib.contextmanager
  def AveragedWeights(self) -> Iterator[None]:
    """Within it the weights are their moving averages, if the task has any (`train.ema_decay`).

    It may be entered within itself. Nothing must be trained or saved in it.
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

  def _Averaged(self) -> dict[str, tf.Variable]:
    """What has a moving average: what is trained, and layers' moving statistics if wanted."""
    found = self.engine.trained
    if self.task.params.train.ema_decay_moving_vars:
      for path, v in self.task.VariablesByPath().items():
        if not v.trainable and v.dtype.is_floating:
          found[path] = v
    return found

  def TrainStep(self, batch: batches.AnyBatch) -> dict[str, float] | None:
    """One training step: forward, backward, update.

    Where the learner accumulates N mini-batches, a step takes N calls: the first N-1 end after
    backward. What they did is in no checkpoint.

    Args:
      batch: NestedMap that matches the batch spec, or one of `placement`.

    Returns:
      None where the update waits for more mini-batches. Else the metrics by name, loss_weight, and
      what the learners tell of the step (see `MultiLearner.Apply`), is_finite as 0 or 1, and
      num_skipped_steps, as `NumSkippedSteps` after it.

    Raises:
      ValueError: the task's LossWeight and ComputeLoss do not agree.
    """
    if self._checked_weight:  # The first step traces and compiles.
      heartbeat.Begin(heartbeat.TRAIN)
    self._CheckBatch(batch)
    if self.learner.num_accumulated_mini_batches == 1:
      self._Trace(self._train_step, batch)
      with failures.LocateFailure(self.engine, functools.partial(self._Accumulate, batch)):
        values, loss_weight = self._train_step(batch)
    elif self._AccumulateNext(batch):
      sums, loss_weight = self._accumulated
      values = self._update(sums, loss_weight, self._state)
    else:
      heartbeat.SuspendTimeout()
      return None
    result = {name: float(value) for name, value in values.items()}
    heartbeat.Step(heartbeat.TRAIN)
    if not self._checked_weight:
      self._CheckLossWeight(float(loss_weight), result['loss_weight'])
      self._checked_weight = True
    return result

  def _Trace(self, step: Any, batch: batches.AnyBatch, *args: tf.Tensor) -> bool:
    """As the parent says; notes how long the first training step took."""
    start = time.perf_counter()
    traced = super()._Trace(step, batch, *args)
    if traced and step is not self._eval_step:
      self.trace_seconds = self.trace_seconds or time.perf_counter() - start
    return traced

  def IsTraced(self, batch: batches.AnyBatch) -> bool:
    """Whether a training step of such a batch was traced before."""
    text = shapes.FormatNest(batch)
    return any(shape == text for step, shape in self._traced if step is not self._eval_step)

  def NumSkippedSteps(self) -> tf.Tensor:
    """How many steps of the run changed nothing: gradients not finite, or batches of no weight."""
    return self.global_step - self.learner.iterations

  def Gradients(self, loss_weight: float) -> dict[str, tf.Tensor]:
    """{path of a trained weight: gradient of the last update's loss}, before clipping.

    To be called between two updates, while the accumulators still hold it.

    Args:
      loss_weight: that of the update, as `TrainStep` returned it.
    """
    found = {}
    for s in self._replicas.stages:
      for path, accumulator in zip(s.trained, s.accumulators, strict=True):
        with tf.device(s.device):
          found[path] = tf.math.divide_no_nan(
            tf.convert_to_tensor(accumulator), tf.cast(loss_weight, accumulator.dtype)
          )
    return found

  def WhyNotFinite(self, *data: batches.AnyBatch) -> str:
    """Where the last step's first value that is not finite came from; see `check_numerics`.

    Args:
      *data: what `TrainStep` was given for it; it must have left the weights as they were.
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
    """Forward and backward of a mini-batch; True where it was the last one of an update."""
    # After an exception in here the update begins anew.
    index, self._num_accumulated = self._num_accumulated, 0
    first = self._num_micro_batches if index else 0
    if index == 0:
      self._clear()
    position = tf.constant(first, tf.int64)
    self._Trace(self._accumulate, batch, position)
    with failures.LocateFailure(self.engine, functools.partial(self._Accumulate, batch, position)):
      *new, layer_sums = self._accumulate(batch, position)
    self._accumulated = tf.nest.map_structure(tf.add, self._accumulated, new) if index else new
    # State follows every mini-batch, but changes with the weights or not at all.
    self._state = self._next_state(layer_sums, self._state if index else None)
    self._num_micro_batches = first + self._NumMicroBatches(batch)
    self._num_accumulated = (index + 1) % self.learner.num_accumulated_mini_batches
    return self._num_accumulated == 0

  def _Accumulate(
    self, batch: batches.AnyBatch, first_micro_batch: tf.Tensor | None = None
  ) -> tuple[dict[str, tf.Tensor], tf.Tensor, dict[str, nested_map.NestedMap]]:
    """The metrics' sums, the sum of the loss weights, and what layers report for their state.

    Gradients end in the accumulators; nothing else is changed.

    Args:
      batch: a mini-batch.
      first_micro_batch: how many micro-batches of this update came before; None where this is its
        only mini-batch. Else the gradients are added to what the accumulators hold.
    """
    micro_batches = self.MicroBatches(batch)
    sums, layer_sums = self.engine.Accumulate(
      micro_batches,
      self.global_step,
      first_micro_batch=0 if first_micro_batch is None else first_micro_batch,
      clear=first_micro_batch is None,
    )
    return sums, tf.add_n([b.loss_weight for b in micro_batches]), layer_sums

  def _Update(
    self, sums: dict[str, tf.Tensor], loss_weight: tf.Tensor, state: layer_statistics.State
  ) -> dict[str, tf.Tensor]:
    """Updates the weights from the accumulated gradients, and state; the values of the step."""
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
    # A step that fails must change nothing: it can be run again, to find out why.
    with tf.control_dependencies(list(values.values())):
      self.global_step.assign_add(1)
    return values

  def _CheckOutside(self) -> None:
    """Raises ValueError for weights that are to be trained, but that no stage holds."""
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
    """Raises ValueError where the random seeds cannot count the micro-batches of an update."""
    num = self.learner.num_accumulated_mini_batches
    of = self.cut.num_micro_batches * len(self.engine.replicas)
    if num * of > fprop_context.MAX_MICRO_BATCHES:
      raise ValueError(
        f'an update of {num} mini-batches of {of} micro-batches is more than the '
        f'{fprop_context.MAX_MICRO_BATCHES} micro-batches that random seeds tell apart'
      )

  def _CheckLossWeight(self, announced: float, returned: float) -> None:
    if abs(announced - returned) > 1e-3 * max(abs(announced), abs(returned), 1e-6):
      name = type(self.task).__name__
      raise ValueError(
        f"{name}.LossWeight said {announced:g} for this batch, but the 'loss' of "
        f'{name}.ComputeLoss came with a weight of {returned:g}; they must agree'
      )


def _Mean(sums: tf.Tensor) -> tf.Tensor:
  return tf.math.divide_no_nan(sums[0], sums[1])
