# SPDX-License-Identifier: Apache-2.0
"""`SingleTaskModel`: a task and its input, as an experiment names them."""

from __future__ import annotations

from typing import Any

from lingvo_gpipe import hyperparams
from lingvo_gpipe import task as task_lib


class SingleTaskModel:
  """One task and one input. Its Params are what overrides address: `task.train.max_steps`."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of a model."""
    p = hyperparams.InstantiableParams(cls)
    p.Define('name', 'model', 'Name of the model.')
    p.Define('model', '', 'The experiment: key@file:line. Set by the registry.')
    p.Define('task', None, 'Params of the task.')
    p.Define('input', None, 'Params of the input generator. Set by the registry.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    p = self.params = params.Copy()
    if p.task is None:
      raise ValueError('a model needs a task: SingleTaskModel.Params().Set(task=...)')
    task_params = p.task.Copy()
    task_params.name = task_params.name or 'task'
    self.task: task_lib.BaseTask = task_params.Instantiate()
    if not isinstance(self.task, task_lib.BaseTask):
      raise TypeError(f'expected the Params of a BaseTask, got {type(self.task).__name__}')
    self.input: Any = None if p.input is None else p.input.Instantiate()
