# SPDX-License-Identifier: Apache-2.0
"""`MultiTaskModel`: several tasks that train in turn, and may have weights in common.

Each task has its own input, learner, metrics and pipeline. Which one a step trains is drawn by
their weights (`task_scheduler`). Weights are shared by their names: where `variable_renaming_rules`
give those of two tasks one name, they are one variable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from lingvo_gpipe.core import hyperparams, weight_params
from lingvo_gpipe.experiment import model, task_scheduler
from lingvo_gpipe.experiment import task as task_lib

_T = TypeVar('_T')
_NAME = re.compile(r'[a-z][a-z0-9_]*')

# What of `train` each task has for itself; all else is the run's.
_TASKS_OWN = ('learner', 'ema_decay', 'ema_decay_moving_vars')
_RULES = 'variable_renaming_rules'


class MultiTaskModel(model.BaseModel):
  """Tasks by name. Overrides address `train.max_steps`, `task_params.NAME...`, `input.NAME...`.

  Attributes:
    shared: {name of a weight: {task: its path there}} of those that several tasks have.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of the tasks, and of the run as a whole."""
    p = super().Params()
    p.Define('task_params', hyperparams.Params(), 'Params of each task, by its name.')
    p.Define(
      'task_probs',
      hyperparams.Params(),
      'How likely a step trains each task; need not add up to 1.',
    )
    p.Define(
      'task_schedule', None, 'In place of task_probs: Params of a schedule of `task_scheduler`.'
    )
    p.Define('task_name', '', 'Train, evaluate and export this task alone; --model_task_name.')
    p.Define(
      'variable_renaming_rules',
      [],
      "Pairs [regex, name]: the weights whose whole path it fits are called so; '\\1' is a group.",
    )
    p.Define('random_seed', 0, 'Seed of the draw of tasks, and of tasks that have none.')
    p.Define('train', task_lib.TrainParams().Delete(*_TASKS_OWN), 'How to train, for all tasks.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    """Makes the tasks and their inputs; allocates nothing.

    Raises:
      ValueError: there are no tasks, a name is wrong, weights that are to be one differ, or a task
        sets what holds for the run.
      TypeError: a task's Params are not those of a BaseTask.
    """
    super().__init__(params)
    p = self.params
    names = p.task_params.GetKeys()
    if not names:
      raise ValueError(
        'a multi-task model needs tasks: return {name: Params} from Tasks(), or define them in '
        'MultiTaskModel.Params().task_params'
      )
    self._CheckNames('task_name', [p.task_name] if p.task_name else [])
    self.tasks = {name: model.MakeTask(self._TaskParams(name)) for name in names}
    self.inputs = self._Inputs()
    self._scheduler = self._Scheduler()
    self._CheckNames('task_schedule', self._scheduler.Weights(0))
    if not isinstance(p.random_seed, int):
      raise ValueError(
        f'random_seed of a multi-task model must be an integer, got {p.random_seed!r}'
      )
    self.TaskAtStep(0)
    self._rules = self._Rules()
    self._names = {
      path: self._Name(path) for task in self.tasks.values() for path in task.WeightSpecs()
    }
    self._CheckRules()
    self.shared = self._Shared()

  @property
  def task(self) -> task_lib.BaseTask:
    """The task of `task_name`, or the only one."""
    return self.tasks[self._OneName()]

  @property
  def input(self) -> Any:
    """The input of `task`, or None."""
    return self.inputs.get(self._OneName())

  @property
  def active_tasks(self) -> list[str]:
    """The names of the tasks that this is about: all, or that of `task_name`."""
    return [self.params.task_name] if self.params.task_name else list(self.tasks)

  def TaskAtStep(self, step: int) -> str:
    """The name of the task that is trained after so many steps; a draw by seed and step."""
    p = self.params
    return p.task_name or task_scheduler.Draw(self._scheduler.Weights(step), p.random_seed, step)

  def SharedCut(self, name: str, cuts: Mapping[str, Sequence[int]]) -> list[int]:
    """See the parent: that of the first task with as many layers and stages."""
    own = self.tasks[name].pipeline
    if own is None or own.params.splits:
      return []
    for other, ends in cuts.items():
      theirs = self.tasks[other].pipeline
      share = any(name in paths and other in paths for paths in self.shared.values())
      if share and theirs and len(theirs.layers) == len(own.layers):
        if len(ends) == own.params.num_stages:
          return list(ends)
    return []

  def CheckReplicas(self, num_replicas: int) -> None:
    """See the parent: where tasks share weights there is one replica."""
    if num_replicas > 1 and self.shared:
      name, paths = next(iter(self.shared.items()))
      raise ValueError(
        f'{num_replicas} replicas cannot train tasks that share weights, such as {name} of '
        f'{" and ".join(paths)}: leave --num_replicas out, or take the rule from {_RULES}'
      )

  def ByCheckpointName(self, variables: Mapping[str, _T]) -> dict[str, _T]:
    """{path of a weight, maybe with /slot: x} by the names that checkpoints have."""
    found = {}
    for key, value in variables.items():
      path, slash, rest = key.partition('/')
      found[f'{self._names.get(path, path)}{slash}{rest}'] = value
    return found

  def WeightSpecs(self) -> dict[str, tuple[weight_params.WeightParams, bool]]:
    """{name: (weight, trainable)} of all tasks, shared ones once; allocates nothing."""
    specs: dict[str, tuple[weight_params.WeightParams, bool]] = {}
    for task in self.tasks.values():
      for name, spec in self.ByCheckpointName(task.WeightSpecs()).items():
        specs.setdefault(name, spec)
    return specs

  # ---- parts -----------------------------------------------------------------------------------

  def _OneName(self) -> str:
    if len(self.active_tasks) > 1:
      raise ValueError(
        f'this model has the tasks {", ".join(self.tasks)}, and this is done with one: name it by '
        '--model_task_name'
      )
    return self.active_tasks[0]

  def _TaskParams(self, name: str) -> hyperparams.InstantiableParams:
    """The Params of a task with its name, and with what holds for the run."""
    p = self.params
    own = p.task_params.Get(name)
    if not _NAME.fullmatch(name):
      raise ValueError(f'{name!r} is no name for a task: it must match {_NAME.pattern}')
    if not isinstance(own, hyperparams.InstantiableParams) or 'train' not in own:
      raise TypeError(f'task_params.{name}: expected the Params of a task, got {own!r}')
    own = own.Copy().Set(name=name)
    if own.random_seed is None:
      own.random_seed = p.random_seed
    for key, value in p.train.IterParams():
      if own.train.Get(key) != own.train.GetDefault(key):
        raise ValueError(
          f'task_params.{name}.train.{key} is {own.train.Get(key)!r}, but it holds for the whole '
          f'run: set train.{key}'
        )
      own.train.Set(**{key: value})
    return own

  def _Inputs(self) -> dict[str, Any]:
    found = self.params.input
    if found is None:
      return {}
    if not isinstance(found, hyperparams.Params) or 'cls' in found:
      raise ValueError(
        'the input of a multi-task model is that of each task: return {task: Params} from the '
        f"data set's method, got {found!r}"
      )
    self._CheckNames('input', found.GetKeys())
    return {name: p.Instantiate() for name, p in found.IterParams() if p is not None}

  def _Scheduler(self) -> task_scheduler.TaskScheduler:
    p = self.params
    if not isinstance(p.task_probs, hyperparams.Params):
      raise ValueError(
        f'task_probs must be Params with a weight for each task, got {p.task_probs!r}; return '
        '{name: weight} from TaskProbs()'
      )
    self._CheckNames('task_probs', p.task_probs.GetKeys())
    weights = dict(p.task_probs.IterParams())
    if p.task_schedule is None:
      weights = weights or dict.fromkeys(self.tasks, 1.0)
      return task_scheduler.ConstantScheduler(
        task_scheduler.ConstantScheduler.Params().Set(task_probs=weights)
      )
    if weights:
      raise ValueError(f'task_schedule and task_probs are both set ({weights}): set one of them')
    is_params = isinstance(p.task_schedule, hyperparams.InstantiableParams)
    made = p.task_schedule.Instantiate() if is_params else None
    if not isinstance(made, task_scheduler.TaskScheduler):
      raise ValueError(
        'task_schedule must be the Params of a TaskScheduler, such as '
        f'task_scheduler.SequentialScheduler.Params(); got {p.task_schedule!r}'
      )
    return made

  def _CheckNames(self, where: str, names: Any) -> None:
    known = self.params.task_params.GetKeys()
    for name in names:
      if name not in known:
        raise ValueError(
          f'{where} names the task {name!r}, which there is not; the tasks are {", ".join(known)}'
        )

  # ---- names of weights ------------------------------------------------------------------------

  def _Name(self, path: str) -> str:
    """The name of a weight by the first rule that fits, else its path."""
    for pattern, name in self._rules:
      if match := pattern.fullmatch(path):
        try:
          return match.expand(name)
        except (re.error, IndexError) as e:
          raise ValueError(
            f'{_RULES}: {name!r} cannot be filled in from {pattern.pattern!r}: {e}'
          ) from e
    return path

  def _Rules(self) -> list[tuple[re.Pattern[str], str]]:
    pairs = self.params.Get(_RULES)
    try:
      if any(isinstance(pair, str) for pair in pairs):
        raise TypeError('a text is no pair')
      return [(re.compile(pattern), name) for pattern, name in pairs]
    except (TypeError, ValueError, re.error) as e:
      raise ValueError(
        f'{_RULES} must be pairs of a regular expression and a name, such as '
        rf"[['\w+\.stack\.layers\[0\]\.(.*)', 'shared.\1']]; got {pairs!r}: {e}"
      ) from e

  def _CheckRules(self) -> None:
    """Raises ValueError for a rule that fits no weight, or a name no checkpoint can have."""
    for pattern, _ in self._rules:
      if not any(pattern.fullmatch(path) for path in self._names):
        raise ValueError(
          f'{_RULES}: {pattern.pattern!r} fits none of the {len(self._names)} weights, such as '
          f'{next(iter(self._names), "none")}; a rule fits the whole path'
        )
    for path, name in self._names.items():
      if '.' not in name or '/' in name:
        raise ValueError(
          f'{_RULES}: {path} would be called {name!r}; a name has a dot and no slash, as shared.w'
        )

  def _Shared(self) -> dict[str, dict[str, str]]:
    """{name: {task: path}} of weights of several tasks.

    Raises:
      ValueError: two weights of a task have one name, or those of two tasks differ.
    """
    found: dict[str, dict[str, str]] = {}
    first: dict[str, tuple[str, Any]] = {}
    for task_name, task in self.tasks.items():
      for path, (weight, trainable) in task.WeightSpecs().items():
        name = self._names[path]
        paths = found.setdefault(name, {})
        if task_name in paths:
          raise ValueError(
            f'{_RULES}: {paths[task_name]} and {path} of the task {task_name!r} would both be '
            f'called {name}; within a task weights are tied by task_params.{task_name}.stack.ties'
          )
        paths[task_name] = path
        spec = (
          list(weight.shape),
          weight.dtype.name,
          'trainable' if trainable else 'not trainable',
        )
        other_path, other = first.setdefault(name, (path, spec))
        if spec != other:
          raise ValueError(
            f'{_RULES}: {other_path} and {path} would be one weight {name}, but differ: {other} '
            f'and {spec}'
          )
    return {name: paths for name, paths in found.items() if len(paths) > 1}
