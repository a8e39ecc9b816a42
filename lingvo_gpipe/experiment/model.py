# SPDX-License-Identifier: Apache-2.0
"""Models: tasks and their inputs, as an experiment names them. Here: what all have, and one task's.

`multi_task_model` has the model of several tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from lingvo_gpipe.core import hyperparams, weight_params
from lingvo_gpipe.experiment import task as task_lib

_T = TypeVar('_T')


class BaseModel:
  """Base class of models.

  Attributes:
    params: a copy of the Params.
    tasks: {name: task}; the name of a single task is ''.
    inputs: {name: input generator}, of the tasks that have one.
  """

  params: Any
  tasks: dict[str, task_lib.BaseTask]
  inputs: dict[str, Any]

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of a model."""
    p = hyperparams.InstantiableParams(cls)
    p.Define('name', 'model', 'Name of the model.')
    p.Define('model', '', 'The experiment: key@file:line. Set by the registry.')
    p.Define('input', None, 'Params of the input generator. Set by the registry.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    self.params = params.Copy()

  @property
  def task(self) -> task_lib.BaseTask:
    """The one task; ValueError where there are several."""
    return self.tasks['']

  @property
  def input(self) -> Any:
    """Its input, or None; ValueError as `task`."""
    return self.inputs.get('')

  @property
  def active_tasks(self) -> list[str]:
    """The names of the tasks that are trained, evaluated and looked at."""
    return list(self.tasks)

  def WeightSpecs(self) -> dict[str, tuple[weight_params.WeightParams, bool]]:
    """{name: (weight, trainable)} of all tasks; allocates nothing."""
    return self.task.WeightSpecs()

  def NumParams(self) -> int:
    """Count of the trainable weights of all tasks."""
    return sum(w.num_elements for w, trainable in self.WeightSpecs().values() if trainable)

  def TaskAtStep(self, step: int) -> str:
    """The name of the task that is trained after so many steps."""
    del step
    return ''

  def SharedCut(self, name: str, cuts: Mapping[str, Sequence[int]]) -> list[int]:
    """The cut that a task takes over from one that it shares weights with; [] where none fits.

    Args:
      name: the task.
      cuts: {task: for each stage the index after its last layer} of those that are cut already.
    """
    del name, cuts
    return []

  def CheckReplicas(self, num_replicas: int) -> None:
    """Raises ValueError where the model cannot be trained in so many replicas."""
    del num_replicas

  def ByCheckpointName(self, variables: Mapping[str, _T]) -> dict[str, _T]:
    """{path of a weight, maybe with /slot: x} by the names that checkpoints have."""
    return dict(variables)


class SingleTaskModel(BaseModel):
  """One task and one input. Its Params are what overrides address: `task.train.max_steps`."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of a model."""
    p = super().Params()
    p.Define('task', None, 'Params of the task.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    if 'task' not in p:
      raise ValueError(
        f'this is done with a model of one task, and {p.model or p.name} is a {p.cls.__name__}: '
        'name another experiment by --model'
      )
    if p.task is None:
      raise ValueError('a model needs a task: SingleTaskModel.Params().Set(task=...)')
    task_params = p.task.Copy()
    task_params.name = task_params.name or 'task'
    self.tasks = {'': MakeTask(task_params)}
    self.inputs = {} if p.input is None else {'': p.input.Instantiate()}


def MakeTask(params: Any) -> task_lib.BaseTask:
  """The task of these Params; TypeError where they are those of something else."""
  made = params.Instantiate()
  if not isinstance(made, task_lib.BaseTask):
    raise TypeError(f'expected the Params of a BaseTask, got {type(made).__name__}')
  return made


def FindTrainParams(params: hyperparams.Params) -> Any:
  """Of a model's Params those that say how long it trains, what it saves, and so on."""
  return params.Get('task.train' if 'task' in params else 'train')


def FindTaskParams(params: hyperparams.Params) -> dict[str, Any]:
  """{path: Params}: of a model's Params those of each task."""
  if 'task' in params:
    return {'task': params.task}
  return {f'task_params.{name}': p for name, p in params.task_params.IterParams()}


def TaskKey(name: str, task_name: str) -> str:
  """Returns the key of a metric or a piece of metadata: `name/task` in a model of several tasks."""
  return f'{name}/{task_name}' if task_name else name


def TaskDirectory(name: str, task_name: str) -> str:
  """Returns the name of a data set and its directory: `name_task` in a model of several tasks."""
  return f'{name}_{task_name}' if task_name else name
