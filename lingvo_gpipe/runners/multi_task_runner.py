# SPDX-License-Identifier: Apache-2.0
"""`MultiTaskRunner`: the runners of several tasks, and what they share, as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import tensorflow as tf

from lingvo_gpipe.checkpoint import checkpointer
from lingvo_gpipe.experiment import model as model_lib
from lingvo_gpipe.experiment import multi_task_model
from lingvo_gpipe.input import batches
from lingvo_gpipe.learning import multi_learner, shared_weights
from lingvo_gpipe.runners import eval_runner, task_cut, train_runner

_Runner = TypeVar('_Runner', bound=eval_runner.EvalRunner)


class MultiTaskRunner:
  """Has a runner for each task; a step is one of the task that the model names.

  Where nothing is trained these are `EvalRunner`s, and it has no steps.

  Attributes:
    task_runners: {name: runner} of the tasks that are drawn or evaluated.
    global_step: int64 variable, the steps of all tasks together.
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
      model: the model. Where it is trained all tasks are placed, else those that are chosen and
        have an input.
      devices: as many as the task with the most stages needs, and that for each replica.
      saved: the checkpoints of the run, if any, for cuts that hang on a measurement.
      with_learner: False where nothing is trained.
      num_replicas: how often the stages are there.

    Raises:
      ValueError: a task has no input, a shared weight would be on two devices or in several
        replicas, or tasks differ in what they must have alike to share weights.
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
        f'the data set has no input for the task {" and ".join(missing)}; it has '
        f'{", ".join(model.inputs) or "none"}'
      )
    shared = shared_weights.SharedWeights(_Shared(model))
    self._runners: dict[str, eval_runner.EvalRunner] = {}
    self._trained: dict[str, train_runner.TrainRunner] = {}
    kind = train_runner.TrainRunner if with_learner else eval_runner.EvalRunner
    for name in names:
      cuts = {other: made.cut.ends for other, made in self._runners.items()}
      splits = task_cut.SavedCut(saved, model.tasks[name], name) or model.SharedCut(name, cuts)
      one = _OfTask(
        kind, model, name, devices, splits=splits, num_replicas=num_replicas, shared=shared
      )
      self._runners[name] = one
      if isinstance(one, train_runner.TrainRunner):
        self._trained[name] = one
    self._shared = shared
    self.global_step = shared.global_step
    self.task_runners = {name: self._runners[name] for name in model.active_tasks if name in names}
    self._last = next(iter(self.task_runners))  # The task of the last step.

  @property
  def _now(self) -> train_runner.TrainRunner:
    return self._trained[self._last]

  @property
  def trace_seconds(self) -> float:
    """As `TrainRunner` has it, of the last step's task."""
    return self._now.trace_seconds

  def Variables(self) -> dict[str, tf.Variable]:
    """{name: variable}: all that a checkpoint keeps; what tasks share is there once."""
    found = self._shared.Variables()
    for name, one in self._runners.items():
      for key, variable in self._model.ByCheckpointName(one.Variables()).items():
        first, slash, rest = key.partition('/')
        key = f'learner/{name}/{rest}' if first == 'learner' and slash else key
        assert found.setdefault(key, variable) is variable, key
    return found

  def TrainedNames(self) -> set[str]:
    """Which of `Variables` are the trained weights."""
    paths = [path for one in self._trained.values() for path in one.TrainedNames()]
    return set(self._model.ByCheckpointName(dict.fromkeys(paths)))

  def AfterRestore(self) -> None:
    """To be called when `Variables()` were assigned from a checkpoint."""
    for one in self._runners.values():
      one.AfterRestore()
    self._shared.AfterRestore()

  def BeginAtWeights(self) -> None:
    """To be called when weights alone were assigned, as from another run's checkpoint."""
    for one in self._trained.values():
      one.BeginAtWeights()

  def TrainStep(self, batch: batches.AnyBatch) -> dict[str, float] | None:
    """As `TrainRunner.TrainStep`, of the task whose step it is.

    Args:
      batch: as there, of that task.
    """
    self._last = self._model.TaskAtStep(int(self.global_step))
    values = self._now.TrainStep(batch)
    if values is None:
      return None
    for one in self._runners.values():
      if one is not self._now:
        one.engine.SyncTies()  # A tied weight of theirs may have changed.
    return {**values, 'num_skipped_steps': float(self.NumSkippedSteps())}

  def IsTraced(self, batch: batches.AnyBatch) -> bool:
    """As `TrainRunner.IsTraced`, of the task whose step is next."""
    return self._trained[self._model.TaskAtStep(int(self.global_step))].IsTraced(batch)

  def NumSkippedSteps(self) -> tf.Tensor:
    """How many steps of the run changed nothing, whatever the task."""
    return self.global_step - tf.add_n(
      [tf.convert_to_tensor(one.learner.iterations) for one in self._trained.values()]
    )

  def Gradients(self, loss_weight: float) -> dict[str, tf.Tensor]:
    """As `TrainRunner.Gradients`, of the last step's task."""
    return self._now.Gradients(loss_weight)

  def WhyNotFinite(self, *data: batches.AnyBatch) -> str:
    """As `TrainRunner.WhyNotFinite`, of the last step's task."""
    return self._now.WhyNotFinite(*data)


# What trains, and what at least evaluates.
TrainingRunner = train_runner.TrainRunner | MultiTaskRunner
AnyRunner = eval_runner.EvalRunner | MultiTaskRunner


def NumDevices(model: model_lib.BaseModel) -> int:
  """How many devices the model needs: as many as its task with the most stages."""
  return max(task_cut.NumDevices(task) for task in model.tasks.values())


def Make(
  model: model_lib.BaseModel,
  devices: Sequence[str],
  saved: checkpointer.Checkpointer | None = None,
  *,
  num_replicas: int = 1,
) -> TrainingRunner:
  """What trains a model of one task or several; arguments as for `MultiTaskRunner`."""
  if isinstance(model, multi_task_model.MultiTaskModel):
    return MultiTaskRunner(model, devices, saved, num_replicas=num_replicas)
  splits = task_cut.SavedCut(saved, model.task)
  return _OfTask(
    train_runner.TrainRunner, model, '', devices, splits=splits, num_replicas=num_replicas
  )


def MakeEvaluated(
  model: model_lib.BaseModel,
  devices: Sequence[str],
  saved: checkpointer.Checkpointer | None = None,
  *,
  num_replicas: int = 1,
) -> AnyRunner:
  """What evaluates and decodes with a model; arguments as for `MultiTaskRunner`."""
  if isinstance(model, multi_task_model.MultiTaskModel):
    return MultiTaskRunner(model, devices, saved, with_learner=False, num_replicas=num_replicas)
  splits = task_cut.SavedCut(saved, model.task)
  return _OfTask(
    eval_runner.EvalRunner, model, '', devices, splits=splits, num_replicas=num_replicas
  )


def _OfTask(
  kind: type[_Runner],
  model: model_lib.BaseModel,
  name: str,
  devices: Sequence[str],
  **options: Any,
) -> _Runner:
  """The runner of one task, with `options` of its kind; it knows the batches of the input."""
  source = model.inputs[name]
  made = kind(model.tasks[name], devices, source.BatchSpec(), **options)
  made.ExpectBatches(source.BatchSpecs())
  return made


def _Shared(
  model: multi_task_model.MultiTaskModel,
) -> dict[str, shared_weights.SharedWeight]:
  """{path: what is known of a weight that several tasks have}.

  Raises:
    ValueError: such weights have moving averages in some of their tasks, or of other decays.
  """
  made = {
    name: multi_learner.MultiLearner(t.params.train.learner) for name, t in model.tasks.items()
  }
  specs = model.WeightSpecs()
  found = {}
  for name, paths in model.shared.items():
    trainers, averaged = [], set()
    is_trainable = specs[name][1]
    for task, path in paths.items():
      owner = made[task].OwnerOf(path) if is_trainable else None
      train = model.tasks[task].params.train
      averages = owner is not None or (not is_trainable and train.ema_decay_moving_vars)
      averaged.add(train.ema_decay if averages else 0.0)
      if owner is not None:
        trainers.append(f'{task}.{owner}' if owner else task)
    if len(averaged) > 1:
      raise ValueError(
        f'{name} is a weight of the tasks {" and ".join(paths)}, but has the ema_decay '
        f'{" and ".join(map(str, sorted(averaged)))} there: set the same in all of them, and train '
        'it in all or none'
      )
    for task, path in paths.items():
      found[path] = shared_weights.SharedWeight(name, task, '+'.join(trainers))
  return found
