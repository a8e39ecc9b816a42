# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint tells of a run beside its weights: how far it is, and what its bits hang on."""

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
  """What a checkpoint counts of a run beside its step."""

  examples_consumed: int = 0
  train_seconds: float = 0.0
  # {task: steps in a row that were not finite}.
  nonfinite_in_a_row: dict[str, int] = dataclasses.field(default_factory=dict)
  # {task: steps and examples}, where a model has several.
  tasks: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)

  @classmethod
  def Of(cls, metadata: Mapping[str, Any]) -> Self:
    """Those of a checkpoint; what it does not tell begins anew."""
    names = [field.name for field in dataclasses.fields(cls)]
    return cls(**{name: metadata[name] for name in names if name in metadata})

  def Step(self, task_name: str, position: int) -> None:
    """Counts a step of a task, whose data are at that position after it."""
    self.examples_consumed += position - self.Position(task_name)
    if task_name:
      of_task = self.tasks.setdefault(task_name, {'steps': 0, 'examples': 0})
      of_task['steps'] += 1
      of_task['examples'] = position

  def Position(self, task_name: str) -> int:
    """How many examples of a task's data were consumed."""
    if not task_name:
      return self.examples_consumed
    return self.tasks.get(task_name, {}).get('examples', 0)

  def NumSteps(self, task_name: str) -> int:
    """How many steps were of a task; 0 where the model has one task alone."""
    return self.tasks.get(task_name, {}).get('steps', 0)


def Circumstances(
  model: model_lib.BaseModel, runner: multi_task_runner.TrainingRunner, devices: cluster.Cluster
) -> dict[str, Any]:
  """What a bit-equal continuation depends on beside the weights (design 4.15).

  Args:
    model: the model, with the inputs of its tasks.
    runner: what trains it.
    devices: on what.
  """
  found: dict[str, Any] = {'model': model.params.model}
  for task_name, one in runner.task_runners.items():
    p, pipeline = one.task.params, one.task.pipeline
    of_task = {
      'data': model.inputs[task_name].Fingerprint(),
      'random_seed': p.random_seed,
      'cut': list(one.cut.ends),
      'num_micro_batches': one.cut.num_micro_batches,
      'num_accumulated_mini_batches': multi_learner.NumAccumulated(p.train.learner),
      # To be read, and compared: what a schedule gives hangs on the step alone.
      **one.learner.LearningRates(int(runner.global_step)),
      **({} if pipeline is None else task_cut.PipelineSettings(pipeline.params)),
    }
    found.update({model_lib.TaskKey(name, task_name): x for name, x in of_task.items()})
  return {
    **found,
    'num_replicas': devices.num_replicas,
    'intra_op_threads': devices.intra_op_threads
    or tf.config.threading.get_intra_op_parallelism_threads(),
    'tensorflow': tf.__version__,
  }


def LogChanges(metadata: Mapping[str, Any], now: Mapping[str, Any]) -> None:
  """Warns of each circumstance that is not what it was at a checkpoint, which may not tell all."""
  for key, value in now.items():
    if metadata.get(key, value) != value:
      logging.warning('%s was %s at the checkpoint and is %s now', key, metadata[key], value)
