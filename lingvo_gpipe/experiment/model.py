# SPDX-License-Identifier: Apache-2.0
"""Models: the tasks of an experiment and their inputs.

`BaseModel` is the base class, and `SingleTaskModel` has one task. `multi_task_model` adds models
with several tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from lingvo_gpipe.core import domain, hyperparams, weight_params
from lingvo_gpipe.experiment import task as task_lib

_T = TypeVar('_T')


class BaseModel:
  """Base class of models.

  Attributes:
    params: a copy of the Params.
    tasks: {name: task}; the task of a single-task model has the name ''.
    inputs: {name: input generator} for the tasks that have an input.
  """

  params: Any
  tasks: dict[str, task_lib.BaseTask]
  inputs: dict[str, Any]

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params common to all models."""
    p = hyperparams.InstantiableParams(cls)
    p.Define('name', 'model', 'Name of the model.')
    p.Define('model', '', 'The experiment, as key@file:line. Set by the registry.')
    p.Define(
      'input',
      None,
      'Params of the input generator. Set by the registry.',
      domain.PARAMS | domain.NONE,
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    self.params = params.Copy()

  @property
  def task(self) -> task_lib.BaseTask:
    """The only task; raises ValueError if there are several."""
    return self.tasks['']

  @property
  def input(self) -> Any:
    """The input of the only task, or None; raises ValueError if there are several tasks."""
    return self.inputs.get('')

  @property
  def active_tasks(self) -> list[str]:
    """Names of the tasks to train, evaluate and inspect."""
    return list(self.tasks)

  def WeightSpecs(self) -> dict[str, tuple[weight_params.WeightParams, bool]]:
    """Returns {name: (weight, trainable)} over all tasks; allocates no variables."""
    return self.task.WeightSpecs()

  def NumParams(self) -> int:
    """Returns the number of trainable parameters of all tasks."""
    return sum(w.num_elements for w, trainable in self.WeightSpecs().values() if trainable)

  def TaskAtStep(self, step: int) -> str:
    """Returns the name of the task that the next step trains, after `step` steps."""
    del step
    return ''

  def SharedCut(self, name: str, cuts: Mapping[str, Sequence[int]]) -> list[int]:
    """Returns the cut of another task that shares weights with this task, or [] if none fits.

    Args:
      name: the name of the task to cut.
      cuts: {task: index after the last layer of each stage} for the tasks that are already cut.
    """
    del name, cuts
    return []

  def CheckInputs(self, name: str, inputs: Any) -> None:
    """Raises ValueError if the Params of inputs do not fit the tasks.

    Args:
      name: what the message calls them, such as the name of the data set.
      inputs: Params of the input; for several tasks, Params with one input per task name.
    """
    del name, inputs

  def CheckReplicas(self, num_replicas: int) -> None:
    """Raises ValueError if the model cannot be trained in `num_replicas` replicas."""
    del num_replicas

  def ByCheckpointName(self, variables: Mapping[str, _T]) -> dict[str, _T]:
    """Renames the keys `path` or `path/slot` of a mapping to the names used in checkpoints."""
    return dict(variables)


class SingleTaskModel(BaseModel):
  """A model with one task and one input; overrides address, for example, `task.train.max_steps`."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of a model with one task."""
    p = super().Params()
    p.Define('task', None, 'Params of the task.', domain.ParamsOf(task_lib.BaseTask) | domain.NONE)
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    if 'task' not in p:
      raise ValueError(
        f'expected a model with one task, but {p.model or p.name} is a {p.cls.__name__}: choose '
        'another experiment with --model'
      )
    if p.task is None:
      raise ValueError('a model needs a task: SingleTaskModel.Params().Set(task=...)')
    task_params = p.task.Copy()
    task_params.name = task_params.name or 'task'
    self.tasks = {'': MakeTask(task_params)}
    self.inputs = {} if p.input is None else {'': p.input.Instantiate()}


def MakeTask(params: Any) -> task_lib.BaseTask:
  """Instantiates a task; raises TypeError if the Params do not describe a `BaseTask`."""
  task = params.Instantiate()
  if not isinstance(task, task_lib.BaseTask):
    raise TypeError(f'expected the Params of a BaseTask, got {type(task).__name__}')
  return task


def FindTrainParams(params: hyperparams.Params) -> Any:
  """Returns the training Params of a model: `task.train`, or `train` if it has several tasks."""
  return params.Get('task.train' if 'task' in params else 'train')


def FindTaskParams(params: hyperparams.Params) -> dict[str, Any]:
  """Returns {path: Params} for each task in a model's Params."""
  if 'task' in params:
    return {'task': params.task}
  return {f'task_params.{name}': p for name, p in params.task_params.IterParams()}


def TaskKey(name: str, task_name: str) -> str:
  """Returns the key of a metric or metadata entry: `name/task` if the model has several tasks."""
  return f'{name}/{task_name}' if task_name else name


def TaskDirectory(name: str, task_name: str) -> str:
  """Returns the name of a data set and its directory: `name_task` if there are several tasks."""
  return f'{name}_{task_name}' if task_name else name
