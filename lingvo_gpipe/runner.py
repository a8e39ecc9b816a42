# SPDX-License-Identifier: Apache-2.0
"""`TaskRunner`: a task placed on devices, with its training and evaluation steps as functions."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe import ema, fprop_context, learners, metrics, nested_map, shapes
from lingvo_gpipe import task as task_lib
from lingvo_gpipe.pipeline import (
  check_numerics,
  engine,
  failures,
  layer_costs,
  micro_batch,
  plan,
  schedules,
)


def NumDevices(task: task_lib.BaseTask) -> int:
  """How many devices the task needs."""
  return 1 if task.pipeline is None else task.pipeline.num_devices


def PlanTask(
  task: task_lib.BaseTask, batch_spec: nested_map.NestedMap, splits: Sequence[int] = ()
) -> plan.Plan:
  """The cut of the task's layers into stages for batches of this spec; `splits` as TaskRunner's.

  Allocates nothing, but that with partition_by='time' one layer at a time is run.
  """
  learner = learners.Learners(task.params.train.learner)
  slots_per_weight = _SlotsPerWeight(task, learner)
  if task.pipeline is None:
    return plan.MakePlan(
      [task],
      [batch_spec],
      schedule=schedules.Get('gpipe', 1, 1),
      xla=False,
      weights=layer_costs.Weights(learner.IsTrained, {}, slots_per_weight),
    )
  return task.pipeline.MakePlan(
    *PipelineInputSpecs(task, batch_spec),
    splits=splits,
    is_trained=learner.IsTrained,
    slots_per_weight=slots_per_weight,
  )


def _SlotsPerWeight(task: task_lib.BaseTask, learner: learners.Learners) -> int:
  """How many copies of a trained weight there are beside it and its gradient."""
  return learner.SlotsPerWeight() + (task.params.train.ema_decay > 0)


def PipelineInputSpecs(
  task: task_lib.BaseTask, batch_spec: nested_map.NestedMap
) -> tuple[Any, ...]:
  """Specs of the arguments of the pipeline's first layer for batches of this spec."""
  traced = tf.function(task.PipelineInputs, autograph=False).get_concrete_function(batch_spec)
  return tf.nest.map_structure(
    lambda t: None if t is None else tf.TensorSpec(t.shape, t.dtype), traced.structured_outputs
  )


class TaskRunner:
  """Owns the state of a run: weights, slots and the step; does one step at a time.

  Attributes:
    task: the task.
    plan: the cut into stages.
    engine: the pipeline engine.
    global_step: int64 variable, how many training steps were done.
    trace_seconds: how long it took to trace the first training step; 0.0 before it.
  """

  def __init__(
    self,
    task: task_lib.BaseTask,
    devices: Sequence[str],
    batch_spec: nested_map.NestedMap,
    *,
    with_learner: bool = True,
    splits: Sequence[int] = (),
  ) -> None:
    """Cuts the task into stages and allocates its variables on their devices.

    Args:
      task: the task, without variables yet.
      devices: at least one a stage.
      batch_spec: NestedMap of tf.TensorSpec of the batches to come, static shapes; the largest one
        where there are several (see `ExpectBatches`).
      with_learner: False where nothing is trained: no accumulators and no slots.
      splits: the cut, where it is neither to be found nor that of the Params: for each stage the
        index after its last layer.

    Raises:
      ValueError: the task cannot be cut as its Params say, or has weights to be trained that are
        outside its pipeline.
    """
    self.task = task
    train = task.params.train
    self.batch_spec = batch_spec
    learner = learners.Learners(train.learner)
    self.learner: learners.Learners | None = learner if with_learner else None
    if task.pipeline is None:
      self.plan = PlanTask(task, batch_spec)
      self.engine = engine.PipelineEngine(
        [task],
        [1],
        devices,
        xla=False,
        loss_fn=lambda theta, y, side: self._Metrics(theta[0], y, side),
        is_trained=learner.IsTrained,
      )
    else:
      self.plan = task.pipeline.Place(
        devices,
        *PipelineInputSpecs(task, batch_spec),
        loss_fn=lambda theta, y, side: self._Metrics(nested_map.NestedMap(), y, side),
        is_trained=learner.IsTrained,  # Without training too: the cut depends on it.
        splits=splits,
        slots_per_weight=_SlotsPerWeight(task, learner),
      )
      self.engine = task.pipeline.engine
    # Layers outside the pipeline, if the task has any.
    task.InstantiateVariables(devices[0])
    with tf.device('/device:CPU:0'):
      self.global_step = tf.Variable(0, trainable=False, dtype=tf.int64, name='global_step')
    if self.learner is not None:
      self._CheckOutside(self.learner)
      self._CheckMicroBatches(self.learner)
      self.engine.MakeAccumulators()
      self.learner.Build(self.engine.stages)
    self._ema: ema.ExponentialMovingAverage | None = None
    self._restored_averages: ema.RestoredAverages | None = None
    if train.ema_decay and with_learner:
      self._ema = ema.ExponentialMovingAverage(train.ema_decay, self._Averaged())
    elif train.ema_decay:
      self._restored_averages = ema.RestoredAverages(self._Averaged())
    self._train_step = tf.function(self._TrainStep, autograph=False)
    self._clear = tf.function(self.engine.ClearAccumulators, autograph=False)
    self._accumulate = tf.function(self._Accumulate, autograph=False)
    self._next_state = tf.function(self.engine.NextState, autograph=False)
    self._update = tf.function(self._Update, autograph=False)
    # How many mini-batches and micro-batches of the update under way were accumulated, what came
    # of them, and what layers' state is to be after it.
    self._num_accumulated = 0
    self._num_micro_batches = 0
    self._accumulated: Any = None
    self._state: Any = None
    self._eval_step = tf.function(self._EvalStep, autograph=False)
    self._shapes = {shapes.NestText(batch_spec)}  # Of the batches that are expected.
    self._traced: set[tuple[Any, str]] = set()
    self._checked_weight = False
    self.trace_seconds = 0.0

  def Variables(self) -> dict[str, tf.Variable]:
    """{name: variable}: all that a checkpoint keeps; names do not know the cut.

    Without a learner, what is read of it: averages, if there are any, go into the weights.
    """
    found = self.task.VariablesByPath()
    if self._restored_averages is not None:
      found = self._restored_averages.Variables(found)
    if self.learner is not None:
      found.update(self.learner.Variables())
    if self._ema is not None:
      found.update(self._ema.Variables())
    found['global_step'] = self.global_step
    return found

  def AfterRestore(self) -> None:
    """To be called when `Variables()` were assigned from a checkpoint."""
    if self._restored_averages is not None:
      self._restored_averages.AfterRestore()
    self.engine.SyncTies()
    self._num_accumulated = 0
    if self.learner is not None:
      self.learner.AfterRestore()

  def BeginAtWeights(self) -> None:
    """To be called when weights alone were assigned, as from another run's checkpoint.

    Averages, and slots that begin as their weight, begin anew.
    """
    self.engine.SyncTies()
    if self.learner is not None:
      self.learner.BeginAtWeights()
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
        self.engine.SyncTies()
        yield
    finally:
      self.engine.SyncTies()

  def _Averaged(self) -> dict[str, tf.Variable]:
    """What has a moving average: what is trained, and layers' moving statistics if wanted."""
    found = {path: v for s in self.engine.stages for path, v in s.trained.items()}
    if self.task.params.train.ema_decay_moving_vars:
      for path, v in self.task.VariablesByPath().items():
        if not v.trainable and v.dtype.is_floating:
          found[path] = v
    return found

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
      self._shapes.add(shapes.NestText(spec))
    self.engine.num_batch_shapes = len(self._shapes)

  def TrainStep(self, batch: nested_map.NestedMap) -> dict[str, float] | None:
    """One training step: forward, backward, update.

    Where the learner accumulates N mini-batches, a step takes N calls: the first N-1 end after
    backward. What they did is in no checkpoint.

    Args:
      batch: NestedMap that matches the batch spec.

    Returns:
      None where the update waits for more mini-batches. Else the metrics by name, loss_weight, and
      what the learners tell of the step (see `Learners.Apply`), is_finite as 0 or 1, and
      num_skipped_steps, as `NumSkippedSteps` after it.

    Raises:
      ValueError: the task's LossWeight and ComputeLoss do not agree.
    """
    self._CheckBatch(batch)
    assert self.learner is not None
    if self.learner.num_accumulated_mini_batches == 1:
      self._Trace(self._train_step, batch)
      with failures.Located(functools.partial(self._Accumulate, batch)):
        values, loss_weight = self._train_step(batch)
    elif self._AccumulateNext(batch):
      sums, loss_weight = self._accumulated
      values = self._update(sums, loss_weight, self._state)
    else:
      return None
    result = {name: float(value) for name, value in values.items()}
    if not self._checked_weight:
      self._CheckLossWeight(float(loss_weight), result['loss_weight'])
      self._checked_weight = True
    return result

  def _Trace(self, step: Any, batch: nested_map.NestedMap, *args: tf.Tensor) -> None:
    """Traces a step for a batch that is the first of its shape.

    TensorFlow would do it untimed, and warn where some new shapes come in a row.
    """
    key = (step, shapes.NestText(batch))
    if key in self._traced:
      return
    start = time.perf_counter()
    step.get_concrete_function(batch, *args)
    if step is not self._eval_step:
      self.trace_seconds = self.trace_seconds or time.perf_counter() - start
    self._traced.add(key)

  def NumSkippedSteps(self) -> tf.Tensor:
    """How many steps of the run changed nothing: gradients not finite, or batches of no weight."""
    assert self.learner is not None
    return self.global_step - self.learner.iterations

  def Gradients(self, loss_weight: float) -> dict[str, tf.Tensor]:
    """{path of a trained weight: gradient of the last update's loss}, before clipping.

    To be called between two updates, while the accumulators still hold it.

    Args:
      loss_weight: that of the update, as `TrainStep` returned it.
    """
    found = {}
    for s in self.engine.stages:
      for path, accumulator in zip(s.trained, s.accumulators, strict=True):
        with tf.device(s.device):
          found[path] = tf.math.divide_no_nan(
            tf.convert_to_tensor(accumulator), tf.cast(loss_weight, accumulator.dtype)
          )
    return found

  def WhyNotFinite(self, *batches: nested_map.NestedMap) -> str:
    """Where the last step's first value that is not finite came from; see `check_numerics`.

    Args:
      *batches: what `TrainStep` was given for it; it must have left the weights as they were.
    """
    pieces = [self.MicroBatches(batch) for batch in batches]
    inputs = [x for found, _ in pieces for x in found]
    sides = [side for _, found in pieces for side in found]
    weights = [self.task.LossWeight(side) for side in sides]
    step = int(self.global_step) - 1
    return check_numerics.Explain(self.engine, inputs, sides, weights, step)

  def Evaluate(self, batches: Iterable[nested_map.NestedMap]) -> dict[str, tuple[float, float]]:
    """{name: (mean, total weight)} over batches, in evaluation mode, with `AveragedWeights`."""
    total = metrics.MetricsAccumulator()
    with self.AveragedWeights():
      for batch in batches:
        self._CheckBatch(batch)
        self._Trace(self._eval_step, batch)
        with failures.Located(functools.partial(self._EvalStep, batch)):
          sums = self._eval_step(batch)
        total.Update(
          {
            name: (float(value) / max(float(weight), 1e-30), float(weight))
            for name, (value, weight) in sums.items()
          }
        )
    return total.Result()

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
    with self.AveragedWeights():
      return self.task.Decode(batch, input_generator)

  def MicroBatches(self, batch: nested_map.NestedMap) -> tuple[list[Any], list[Any]]:
    """For each micro-batch of a batch the arguments of the first layer, and the loss's inputs."""
    pipeline = self.task.pipeline
    if pipeline is None:
      return [(batch,)], [self.task.LossInputs(batch)]
    p = pipeline.params
    inputs, side = self.task.PipelineInputs(batch), self.task.LossInputs(batch)
    sizes = micro_batch.BatchSize(inputs, p.batch_dim), micro_batch.BatchSize(side)
    if sizes[0] != sizes[1]:
      raise ValueError(
        f'{self.task.path}: PipelineInputs has a batch of {sizes[0]} at dimension {p.batch_dim} '
        f'(stack.batch_dim), but LossInputs one of {sizes[1]} at dimension 0'
      )
    return pipeline.SplitBatch(inputs), micro_batch.Split(side, p.num_micro_batches)

  def _NumMicroBatches(self, batch: nested_map.NestedMap) -> int:
    if self.task.pipeline is None:
      return 1
    size = micro_batch.BatchSize(self.task.LossInputs(batch))
    return len(micro_batch.Sizes(size, self.task.pipeline.params.num_micro_batches))

  def _Metrics(
    self, theta: nested_map.NestedMap, outputs: tuple[Any, ...], side: nested_map.NestedMap
  ) -> task_lib.Metrics:
    predictions = outputs[0] if len(outputs) == 1 else outputs
    found, _ = self.task.ComputeLoss(theta, predictions, side)
    if 'loss' not in found:
      raise ValueError(
        f"{type(self.task).__name__}.ComputeLoss must return a metric 'loss', got {sorted(found)}"
      )
    return found

  def _CheckBatch(self, batch: nested_map.NestedMap) -> None:
    shapes.CheckNest(self.task.path, 'batch', batch, self.batch_spec)
    self.task.CheckBatch(batch)

  def _TrainStep(self, batch: nested_map.NestedMap) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    sums, loss_weight, layer_sums = self._Accumulate(batch)
    state = self.engine.NextState(layer_sums)
    return self._Update(sums, loss_weight, state), loss_weight

  def _AccumulateNext(self, batch: nested_map.NestedMap) -> bool:
    """Forward and backward of a mini-batch; True where it was the last one of an update."""
    assert self.learner is not None
    # After an exception in here the update begins anew.
    index, self._num_accumulated = self._num_accumulated, 0
    first = self._num_micro_batches if index else 0
    if index == 0:
      self._clear()
    position = tf.constant(first, tf.int64)
    self._Trace(self._accumulate, batch, position)
    with failures.Located(functools.partial(self._Accumulate, batch, position)):
      *new, layer_sums = self._accumulate(batch, position)
    self._accumulated = tf.nest.map_structure(tf.add, self._accumulated, new) if index else new
    # State follows every mini-batch, but changes with the weights or not at all.
    self._state = self._next_state(layer_sums, self._state if index else None)
    self._num_micro_batches = first + self._NumMicroBatches(batch)
    self._num_accumulated = (index + 1) % self.learner.num_accumulated_mini_batches
    return self._num_accumulated == 0

  def _Accumulate(
    self, batch: nested_map.NestedMap, first_micro_batch: tf.Tensor | None = None
  ) -> tuple[dict[str, tf.Tensor], tf.Tensor, dict[str, nested_map.NestedMap]]:
    """The metrics' sums, the sum of the loss weights, and what layers report for their state.

    Gradients end in the accumulators; nothing else is changed.

    Args:
      batch: a mini-batch.
      first_micro_batch: how many micro-batches of this update came before; None where this is its
        only mini-batch. Else the gradients are added to what the accumulators hold.
    """
    inputs, sides = self.MicroBatches(batch)
    weights = [self.task.LossWeight(side) for side in sides]
    sums, layer_sums = self.engine.Accumulate(
      inputs,
      sides,
      weights,
      self.global_step,
      first_micro_batch=0 if first_micro_batch is None else first_micro_batch,
      clear=first_micro_batch is None,
    )
    return sums, tf.add_n(weights), layer_sums

  def _Update(
    self, sums: dict[str, tf.Tensor], loss_weight: tf.Tensor, state: dict[str, dict[str, tf.Tensor]]
  ) -> dict[str, tf.Tensor]:
    """Updates the weights from the accumulated gradients, and state; the values of the step."""
    assert self.learner is not None
    values = {name: _Mean(s) for name, s in sums.items()}
    values['loss_weight'] = sums['loss'][1]
    # The accumulators are read only after the last backward action wrote them: TensorFlow orders
    # accesses to one variable inside a tf.function.
    applied = dict(self.learner.Apply(self.global_step, loss_weight))
    is_applied = applied.pop('is_applied')
    self.engine.AssignState(state, is_applied)
    if self._ema is not None:
      self._ema.Apply(self.global_step, is_applied)
    values.update(applied)
    self.engine.SyncTies()
    values['is_finite'] = tf.cast(values['is_finite'], tf.float32)
    values['num_skipped_steps'] = self.NumSkippedSteps() + 1
    # A step that fails must change nothing: it can be run again, to find out why.
    with tf.control_dependencies(list(values.values())):
      self.global_step.assign_add(1)
    return values

  def _EvalStep(self, batch: nested_map.NestedMap) -> dict[str, tf.Tensor]:
    inputs, sides = self.MicroBatches(batch)
    weights = [self.task.LossWeight(side) for side in sides]
    return self.engine.Evaluate(inputs, sides, weights)

  def _CheckOutside(self, learner: learners.Learners) -> None:
    """Raises ValueError for weights that are to be trained, but that no stage holds."""
    inside = {path for s in self.engine.stages for path in s.trained}
    outside = [
      path
      for path, variable in self.task.VariablesByPath().items()
      if variable.trainable and path not in inside and learner.IsTrained(path)
    ]
    if outside:
      raise ValueError(
        f'{type(self.task).__name__} has weights outside the pipeline, which get no gradient: '
        f'{", ".join(outside)}. Make their layers part of the stack, or exclude them by '
        'task.train.learner.bprop_variable_exclusion'
      )

  def _CheckMicroBatches(self, learner: learners.Learners) -> None:
    """Raises ValueError where the random seeds cannot count the micro-batches of an update."""
    num, of = learner.num_accumulated_mini_batches, self.plan.num_micro_batches
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
