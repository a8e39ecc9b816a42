# SPDX-License-Identifier: Apache-2.0
"""`MultiTaskModel`: several tasks that train in turn and may share weights.

Each task has its own input, learner, metrics and pipeline. Each step trains one task, drawn at
random by the tasks' probabilities (`task_scheduler`). Tasks share a weight if
`variable_renaming_rules` give it the same name in both: the two are then one variable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from lingvo_gpipe.core import domain, hyperparams, weight_params
from lingvo_gpipe.experiment import model, task_scheduler
from lingvo_gpipe.experiment import task as task_lib

_T = TypeVar('_T')
_NAME = re.compile(r'[a-z][a-z0-9_]*')

# Params of `train` that each task sets for itself; all others apply to the whole run.
_PER_TASK_PARAMS = ('learner', 'ema_decay', 'ema_decay_moving_vars')
_RULES = 'variable_renaming_rules'


class MultiTaskModel(model.BaseModel):
  """A model with several named tasks.

  Overrides address, for example, `train.max_steps`, `task_params.NAME.stack.num_stages` and
  `input.NAME.batch_size`.

  Attributes:
    shared: {weight name: {task: path of the weight in that task}} for weights of several tasks.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params of the tasks and of the whole run."""
    p = super().Params()
    p.Define('task_params', hyperparams.Params(), 'Params of each task, by task name.')
    p.Define(
      'task_probs',
      hyperparams.Params(),
      'Relative probability that a step trains each task; the sum need not be 1. Empty: all equal.',
    )
    p.Define(
      'task_schedule',
      None,
      'Params of a scheduler of `task_scheduler`, in place of task_probs.',
      domain.ParamsOf(task_scheduler.TaskScheduler) | domain.NONE,
    )
    p.Define(
      'task_name', '', 'The only task to train, evaluate and export; the flag --model_task_name.'
    )
    p.Define(
      'variable_renaming_rules',
      [],
      "Pairs [regex, name]: a weight whose whole path matches gets this name; '\\1' is a group.",
      domain.ListOf(domain.ListOf(domain.STR, 2)),
    )
    p.Define(
      'random_seed', 0, 'Seed for drawing tasks, and default seed of each task.', domain.Int()
    )
    p.Define(
      'train', task_lib.TrainParams().Delete(*_PER_TASK_PARAMS), 'How to train, for all tasks.'
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    """Creates the tasks and their inputs; allocates no variables.

    Raises:
      ValueError: there are no tasks, a name is invalid, a task has no probability, weights to be
        shared differ, or a task sets a param that applies to the whole run.
      TypeError: the Params of a task do not describe a `BaseTask`.
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
    self._CheckWeights(self._scheduler.Weights(0))
    self.TaskAtStep(0)
    self._rules = self._Rules()
    self._names = {
      path: self._Name(path) for task in self.tasks.values() for path in task.WeightSpecs()
    }
    self._CheckRules()
    self.shared = self._SharedWeights()

  @property
  def task(self) -> task_lib.BaseTask:
    """The task named by `task_name`, or the only task."""
    return self.tasks[self._ActiveTaskName()]

  @property
  def input(self) -> Any:
    """The input of `task`, or None."""
    return self.inputs.get(self._ActiveTaskName())

  @property
  def active_tasks(self) -> list[str]:
    """Names of the tasks to train, evaluate and inspect: `task_name` if set, otherwise all."""
    return [self.params.task_name] if self.params.task_name else list(self.tasks)

  def TaskAtStep(self, step: int) -> str:
    """Draws the task that the next step trains, from the seed and the number of steps done."""
    p = self.params
    return p.task_name or task_scheduler.Draw(self._scheduler.Weights(step), p.random_seed, step)

  def SharedCut(self, name: str, cuts: Mapping[str, Sequence[int]]) -> list[int]:
    """Returns the cut of the first task with shared weights and as many layers and stages."""
    pipeline = self.tasks[name].pipeline
    if pipeline is None or pipeline.params.splits:
      return []
    for other, ends in cuts.items():
      other_pipeline = self.tasks[other].pipeline
      share = any(name in paths and other in paths for paths in self.shared.values())
      if share and other_pipeline and len(other_pipeline.layers) == len(pipeline.layers):
        if len(ends) == pipeline.params.num_stages:
          return list(ends)
    return []

  def CheckInputs(self, name: str, inputs: Any) -> None:
    """Raises ValueError unless these are Params of inputs by the names of tasks."""
    if not isinstance(inputs, hyperparams.Params) or 'cls' in inputs:
      raise ValueError(
        f'{name}: a multi-task model needs an input for each task: return {{task: Params}} from '
        f"the data set's method, got {inputs!r}"
      )
    self._CheckNames(name, inputs.GetKeys())

  def CheckReplicas(self, num_replicas: int) -> None:
    """Raises ValueError if tasks share weights and there is more than one replica."""
    if num_replicas > 1 and self.shared:
      name, paths = next(iter(self.shared.items()))
      raise ValueError(
        f'{num_replicas} replicas cannot train tasks that share weights, such as {name} of '
        f'{" and ".join(paths)}: drop --num_replicas, or remove the rule from {_RULES}'
      )

  def ByCheckpointName(self, variables: Mapping[str, _T]) -> dict[str, _T]:
    """Renames the keys `path` or `path/slot` of a mapping to the names used in checkpoints."""
    renamed = {}
    for key, value in variables.items():
      path, slash, slot = key.partition('/')
      renamed[f'{self._names.get(path, path)}{slash}{slot}'] = value
    return renamed

  def WeightSpecs(self) -> dict[str, tuple[weight_params.WeightParams, bool]]:
    """Returns {name: (weight, trainable)} over all tasks; allocates no variables."""
    specs: dict[str, tuple[weight_params.WeightParams, bool]] = {}
    for task in self.tasks.values():
      for name, spec in self.ByCheckpointName(task.WeightSpecs()).items():
        specs.setdefault(name, spec)
    return specs

  # ---- parts -----------------------------------------------------------------------------------

  def _ActiveTaskName(self) -> str:
    if len(self.active_tasks) > 1:
      raise ValueError(
        f'expected one task, but the model has {", ".join(self.tasks)}: choose one with '
        '--model_task_name'
      )
    return self.active_tasks[0]

  def _TaskParams(self, name: str) -> hyperparams.InstantiableParams:
    """Returns the Params of a task with its name, and with the params of the whole run set."""
    p = self.params
    task = p.task_params.Get(name)
    if not _NAME.fullmatch(name):
      raise ValueError(f'{name!r} is not a valid task name: it must match {_NAME.pattern}')
    if not isinstance(task, hyperparams.InstantiableParams) or 'train' not in task:
      raise TypeError(f'task_params.{name}: expected the Params of a task, got {task!r}')
    task = task.Copy().Set(name=name)
    if task.random_seed is None:
      task.random_seed = p.random_seed
    for key, value in p.train.IterParams():
      if task.train.Get(key) != task.train.GetDefault(key):
        raise ValueError(
          f'task_params.{name}.train.{key} is {task.train.Get(key)!r}, but it applies to the whole '
          f'run: set train.{key}'
        )
      task.train.Set(**{key: value})
    return task

  def _Inputs(self) -> dict[str, Any]:
    inputs = self.params.input
    if inputs is None:
      return {}
    self.CheckInputs('input', inputs)
    return {name: p.Instantiate() for name, p in inputs.IterParams() if p is not None}

  def _Scheduler(self) -> task_scheduler.TaskScheduler:
    p = self.params
    if not isinstance(p.task_probs, hyperparams.Params):
      raise ValueError(
        f'task_probs must be Params with a weight for each task, got {p.task_probs!r}: return '
        '{name: weight} from TaskProbs()'
      )
    self._CheckNames('task_probs', p.task_probs.GetKeys())
    weights = dict(p.task_probs.IterParams())
    if p.task_schedule is None:
      weights = weights or dict.fromkeys(self.tasks, 1.0)
      return task_scheduler.ConstantScheduler.Params().Set(task_probs=weights).Instantiate()
    if weights:
      raise ValueError(f'task_schedule and task_probs are both set ({weights}): set one of them')
    return p.task_schedule.Instantiate()

  def _CheckWeights(self, weights: Mapping[str, float]) -> None:
    """Raises ValueError unless the scheduler's weights name all tasks and nothing else."""
    param = 'task_probs' if self.params.task_schedule is None else 'task_schedule'
    self._CheckNames(param, weights)
    if missing := [name for name in self.tasks if name not in weights]:
      raise ValueError(
        f'{param} does not name the task {" and ".join(missing)}, only {", ".join(weights)}: give '
        'each task a weight; a task with weight 0 is not trained'
      )

  def _CheckNames(self, param: str, names: Any) -> None:
    known = self.params.task_params.GetKeys()
    for name in names:
      if name not in known:
        raise ValueError(
          f'{param} names the unknown task {name!r}; the tasks are {", ".join(known)}'
        )

  # ---- names of weights ------------------------------------------------------------------------

  def _Name(self, path: str) -> str:
    """Returns the name of a weight by the first rule that matches, or its path if none does."""
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
        raise TypeError('a string is not a pair')
      return [(re.compile(pattern), name) for pattern, name in pairs]
    except (TypeError, ValueError, re.error) as e:
      raise ValueError(
        f'{_RULES} must be pairs of a regular expression and a name, such as '
        rf"[['\w+\.stack\.layers\[0\]\.(.*)', 'shared.\1']]; got {pairs!r}: {e}"
      ) from e

  def _CheckRules(self) -> None:
    """Raises ValueError if a rule matches no weight or produces an invalid name."""
    for pattern, _ in self._rules:
      if not any(pattern.fullmatch(path) for path in self._names):
        raise ValueError(
          f'{_RULES}: {pattern.pattern!r} matches none of the {len(self._names)} weights, such as '
          f'{next(iter(self._names), "none")}; a rule must match the whole path'
        )
    for path, name in self._names.items():
      if '.' not in name or '/' in name:
        raise ValueError(
          f'{_RULES}: {path} would be named {name!r}; a name needs a dot and no slash, for '
          'example shared.w'
        )

  def _SharedWeights(self) -> dict[str, dict[str, str]]:
    """Returns {name: {task: path}} for the weights that several tasks share.

    Raises:
      ValueError: two weights of a task have the same name, or a shared weight differs between
        tasks in shape, dtype or trainability.
    """
    paths_by_name: dict[str, dict[str, str]] = {}
    first: dict[str, tuple[str, Any]] = {}
    for task_name, task in self.tasks.items():
      for path, (weight, trainable) in task.WeightSpecs().items():
        name = self._names[path]
        paths = paths_by_name.setdefault(name, {})
        if task_name in paths:
          raise ValueError(
            f'{_RULES}: {paths[task_name]} and {path} of the task {task_name!r} would both be '
            f'named {name}: to tie weights of one task, use task_params.{task_name}.stack.ties'
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
            f'{_RULES}: {other_path} and {path} would share the weight {name}, but differ: {other} '
            f'and {spec}'
          )
    return {name: paths for name, paths in paths_by_name.items() if len(paths) > 1}
