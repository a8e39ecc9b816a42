# SPDX-License-Identifier: Apache-2.0
"""`MultiTaskRunner`: the runners of several tasks and their shared weights, as one runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import tensorflow as tf

from lingvo_gpipe.checkpoint import checkpointer
from lingvo_gpipe.distributed import host_memory
from lingvo_gpipe.experiment import model as model_lib
from lingvo_gpipe.experiment import multi_task_model
from lingvo_gpipe.input import batches
from lingvo_gpipe.learning import multi_learner, shared_weights
from lingvo_gpipe.runners import eval_runner, task_cut, train_runner

_Runner = TypeVar('_Runner', bound=eval_runner.EvalRunner)


class MultiTaskRunner:
  """Has a runner for each task; each step trains the task that the model chooses.

  Without a learner the runners are `EvalRunner`s, and the methods that train must not be called.

  Attributes:
    task_runners: {name: runner} of the tasks that are trained or evaluated.
    global_step: int64 variable, the number of steps of all tasks together.
  """

  def __init__(
    self,
    model: multi_task_model.MultiTaskModel,
    devices: Sequence[str],
    saved: checkpointer.Checkpointer | None = None,
    *,
    with_learner: bool = True,
    num_replicas: int = 1,
  ) -> None:
    """Places the tasks one after the other, all on the same devices.

    Args:
      model: the model. All tasks are placed if it is trained; otherwise the chosen tasks that have
        an input.
      devices: for each replica as many as the task with the most stages needs.
      saved: checkpoints of the run, if any, for cuts that depend on a measurement.
      with_learner: whether the model is trained.
      num_replicas: number of copies of each pipeline.

    Raises:
      ValueError: a task has no input, a shared weight would be on two devices or in several
        replicas, or tasks that share weights differ in settings that must be equal.
    """
    self._model = model
    names = list(model.tasks)
    if with_learner:
      model.CheckReplicas(num_replicas)
      missing = [name for name in names if name not in model.inputs]
    else:
      names = [name for name in model.active_tasks if name in model.inputs]
      missing = [] if names else model.active_tasks
    if missing:
      raise ValueError(
        f'the data set has no input for the task {" and ".join(missing)}; it has inputs for '
        f'{", ".join(model.inputs) or "no task"}'
      )
    shared = shared_weights.SharedWeights(_SharedWeights(model))
    self._runners: dict[str, eval_runner.EvalRunner] = {}
    self._trained: dict[str, train_runner.TrainRunner] = {}
    kind = train_runner.TrainRunner if with_learner else eval_runner.EvalRunner
    for name in names:
      cuts = {other: runner.cut.ends for other, runner in self._runners.items()}
      splits = task_cut.SavedCut(saved, model.tasks[name], name) or model.SharedCut(name, cuts)
      runner = _MakeRunner(
        kind, model, name, devices, splits=splits, num_replicas=num_replicas, shared=shared
      )
      self._runners[name] = runner
      if isinstance(runner, train_runner.TrainRunner):
        self._trained[name] = runner
    self._shared = shared
    self.global_step = shared.global_step
    self.task_runners = {name: self._runners[name] for name in model.active_tasks if name in names}
    self._last_task = next(iter(self.task_runners))  # The task of the last step.

  @property
  def _last_runner(self) -> train_runner.TrainRunner:
    return self._trained[self._last_task]

  @property
  def trace_seconds(self) -> float:
    """Time to trace the first training step of the last step's task."""
    return self._last_runner.trace_seconds

  def Variables(self) -> dict[str, tf.Variable]:
    """Returns the variables of a checkpoint by name; shared variables occur once."""
    variables = self._shared.Variables()
    for name, runner in self._runners.items():
      for key, variable in self._model.ByCheckpointName(runner.Variables()).items():
        folder, slash, suffix = key.partition('/')
        key = f'learner/{name}/{suffix}' if folder == 'learner' and slash else key
        assert variables.setdefault(key, variable) is variable, key
    return variables

  def TrainedNames(self) -> set[str]:
    """Returns the names of the trained weights among `Variables`."""
    paths = [path for runner in self._trained.values() for path in runner.TrainedNames()]
    return set(self._model.ByCheckpointName(dict.fromkeys(paths)))

  def AfterRestore(self) -> None:
    """Must be called after `Variables()` were assigned from a checkpoint."""
    for runner in self._runners.values():
      runner.AfterRestore()
    self._shared.AfterRestore()

  def BeginAtWeights(self) -> None:
    """Must be called after weights alone were assigned, for example from another checkpoint."""
    for runner in self._trained.values():
      runner.BeginAtWeights()

  def TrainStep(self, batch: batches.AnyBatch) -> dict[str, float] | None:
    """Takes a step of the task whose turn it is, see `TrainRunner.TrainStep`.

    Args:
      batch: a batch of this task.
    """
    self._last_task = self._model.TaskAtStep(int(self.global_step))
    values = self._last_runner.TrainStep(batch)
    if values is None:
      return None
    for runner in self._runners.values():
      if runner is not self._last_runner:
        runner.engine.SyncTies()  # The step may have changed a shared weight that is tied here.
    return {**values, 'num_skipped_steps': float(self.NumSkippedSteps())}

  def IsTraced(self, batch: batches.AnyBatch) -> bool:
    """Whether a step of the task whose turn is next was traced for the shapes of this batch."""
    return self._trained[self._model.TaskAtStep(int(self.global_step))].IsTraced(batch)

  def NumSkippedSteps(self) -> tf.Tensor:
    """Returns the number of steps of all tasks without an update."""
    return self.global_step - tf.add_n(
      [tf.convert_to_tensor(runner.learner.iterations) for runner in self._trained.values()]
    )

  def Gradients(self, loss_weight: float) -> dict[str, tf.Tensor]:
    """Returns the gradients of the last step's task, see `TrainRunner.Gradients`."""
    return self._last_runner.Gradients(loss_weight)

  def WhyNotFinite(self, *data: batches.AnyBatch) -> str:
    """Explains a last step that is not finite, see `TrainRunner.WhyNotFinite`."""
    return self._last_runner.WhyNotFinite(*data)


# Runners that train, and runners that at least evaluate.
TrainingRunner = train_runner.TrainRunner | MultiTaskRunner
AnyRunner = eval_runner.EvalRunner | MultiTaskRunner


def NumDevices(model: model_lib.BaseModel) -> int:
  """Returns the number of devices of one replica: the most that any task of the model needs."""
  return max(task_cut.NumDevices(task) for task in model.tasks.values())


def Make(
  model: model_lib.BaseModel,
  devices: Sequence[str],
  saved: checkpointer.Checkpointer | None = None,
  *,
  num_replicas: int = 1,
) -> TrainingRunner:
  """Returns a runner that trains a model of one or several tasks.

  Args:
    model: the model, with an input for each task.
    devices: for each replica as many as the task with the most stages needs.
    saved: checkpoints of the run, if any, for cuts that depend on a measurement.
    num_replicas: number of copies of each pipeline.
  """
  if isinstance(model, multi_task_model.MultiTaskModel):
    return MultiTaskRunner(model, devices, saved, num_replicas=num_replicas)
  splits = task_cut.SavedCut(saved, model.task)
  return _MakeRunner(
    train_runner.TrainRunner, model, '', devices, splits=splits, num_replicas=num_replicas
  )


def MakeEvaluated(
  model: model_lib.BaseModel,
  devices: Sequence[str],
  saved: checkpointer.Checkpointer | None = None,
  *,
  num_replicas: int = 1,
) -> AnyRunner:
  """Returns a runner that evaluates and decodes with a model of one or several tasks.

  Args:
    model: the model. If it has several tasks, the chosen ones with an input are placed.
    devices: for each replica as many as the task with the most stages needs.
    saved: checkpoints of the run, if any, for cuts that depend on a measurement.
    num_replicas: number of copies of each pipeline.
  """
  if isinstance(model, multi_task_model.MultiTaskModel):
    return MultiTaskRunner(model, devices, saved, with_learner=False, num_replicas=num_replicas)
  splits = task_cut.SavedCut(saved, model.task)
  return _MakeRunner(
    eval_runner.EvalRunner, model, '', devices, splits=splits, num_replicas=num_replicas
  )


def _MakeRunner(
  kind: type[_Runner],
  model: model_lib.BaseModel,
  name: str,
  devices: Sequence[str],
  **options: Any,
) -> _Runner:
  """Returns a runner of one task, made with `options`, that expects the batches of its input."""
  if name not in model.inputs:
    raise ValueError(
      f'input{f".{name}" if name else ""} is None: set the Params of the input that the task reads'
    )
  source = model.inputs[name]
  label = f'{type(source).__name__} {source.params.name!r}'
  host_memory.CheckBatch(label, source.BatchSpec(), devices)
  runner = kind(model.tasks[name], devices, source.BatchSpec(), **options)
  runner.ExpectBatches(source.BatchSpecs())
  return runner


def _SharedWeights(
  model: multi_task_model.MultiTaskModel,
) -> dict[str, shared_weights.SharedWeight]:
  """Returns the weights that several tasks share, by path.

  Raises:
    ValueError: a shared weight is averaged in only some of its tasks, or with different decays.
  """
  learners = {
    name: multi_learner.MultiLearner(t.params.train.learner) for name, t in model.tasks.items()
  }
  specs = model.WeightSpecs()
  weights = {}
  for name, paths in model.shared.items():
    trainers, averaged = [], set()
    is_trainable = specs[name][1]
    for task, path in paths.items():
      owner = learners[task].OwnerOf(path) if is_trainable else None
      train = model.tasks[task].params.train
      averages = owner is not None or (not is_trainable and train.ema_decay_moving_vars)
      averaged.add(train.ema_decay if averages else 0.0)
      if owner is not None:
        trainers.append(f'{task}.{owner}' if owner else task)
    if len(averaged) > 1:
      raise ValueError(
        f'{name} is a weight of the tasks {" and ".join(paths)}, but their ema_decay is '
        f'{" and ".join(map(str, sorted(averaged)))}: set the same value in all of them, and train '
        'the weight in all or none of them'
      )
    for task, path in paths.items():
      weights[path] = shared_weights.SharedWeight(name, task, '+'.join(trainers))
  return weights
