# SPDX-License-Identifier: Apache-2.0
"""Metadata of a checkpoint: counts of the run, and the settings that its exact results need."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import tensorflow as tf
from absl import logging

from lingvo_gpipe.distributed import cluster
from lingvo_gpipe.experiment import model as model_lib
from lingvo_gpipe.learning import multi_learner
from lingvo_gpipe.runners import multi_task_runner, task_cut


@dataclasses.dataclass
class Counts:
  """Numbers of a run that a checkpoint stores alongside the step."""

  examples_consumed: int = 0
  train_seconds: float = 0.0
  # {task: number of steps in a row that were not finite}.
  nonfinite_in_a_row: dict[str, int] = dataclasses.field(default_factory=dict)
  # {task: numbers of steps and examples} of a model of several tasks.
  tasks: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)

  @classmethod
  def FromMetadata(cls, metadata: Mapping[str, Any]) -> Self:
    """Returns the counts of a checkpoint; counts that it does not have start at zero."""
    names = [field.name for field in dataclasses.fields(cls)]
    return cls(**{name: metadata[name] for name in names if name in metadata})

  def AddStep(self, task_name: str, position: int) -> None:
    """Counts a step of a task.

    Args:
      task_name: name of the task.
      position: position of the task's data after the step.
    """
    self.examples_consumed += position - self.Position(task_name)
    if task_name:
      counts = self.tasks.setdefault(task_name, {'steps': 0, 'examples': 0})
      counts['steps'] += 1
      counts['examples'] = position

  def Position(self, task_name: str) -> int:
    """Returns the number of examples of a task's data that were consumed."""
    if not task_name:
      return self.examples_consumed
    return self.tasks.get(task_name, {}).get('examples', 0)

  def NumSteps(self, task_name: str) -> int:
    """Returns the number of steps of a task; 0 in a model of one task."""
    return self.tasks.get(task_name, {}).get('steps', 0)


def Circumstances(
  model: model_lib.BaseModel, runner: multi_task_runner.TrainingRunner, devices: cluster.Cluster
) -> dict[str, Any]:
  """Returns everything except the weights that a bit-for-bit resumption depends on.

  Args:
    model: the model with the inputs of its tasks.
    runner: runner that trains the model.
    devices: devices of the run.
  """
  circumstances: dict[str, Any] = {'model': model.params.model}
  for task_name, runner_of_task in runner.task_runners.items():
    task, cut = runner_of_task.task, runner_of_task.cut
    settings = {
      'data': model.inputs[task_name].Fingerprint(),
      'random_seed': task.params.random_seed,
      'cut': list(cut.splits),
      'num_micro_batches': cut.num_micro_batches,
      'num_accumulated_mini_batches': multi_learner.NumAccumulated(task.params.train.learner),
      # Stored to be read and compared only: a schedule's value depends on nothing but the step.
      **runner_of_task.learner.LearningRates(int(runner.global_step)),
      **({} if task.pipeline is None else task_cut.PipelineSettings(task.pipeline.params)),
      'xla': runner_of_task.engine.xla,
    }
    circumstances.update({model_lib.TaskKey(key, task_name): x for key, x in settings.items()})
  return {
    **circumstances,
    'num_replicas': devices.num_replicas,
    'intra_op_threads': devices.intra_op_threads
    or tf.config.threading.get_intra_op_parallelism_threads(),
    'tensorflow': tf.__version__,
  }


def LogChanges(metadata: Mapping[str, Any], now: Mapping[str, Any]) -> None:
  """Warns of each circumstance that has changed since a checkpoint; it may lack some of them."""
  for key, value in now.items():
    if metadata.get(key, value) != value:
      logging.warning('%s was %s at the checkpoint and is %s now', key, metadata[key], value)
