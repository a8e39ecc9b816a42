# SPDX-License-Identifier: Apache-2.0
"""How a task is cut into stages, and on how many devices; nothing is allocated for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.experiment import task as task_lib
from lingvo_gpipe.learning import multi_learner
from lingvo_gpipe.pipeline.cutting import cut as cut_lib
from lingvo_gpipe.pipeline.cutting import layer_costs
from lingvo_gpipe.pipeline.schedule import schedules


def NumDevices(task: task_lib.BaseTask) -> int:
  """How many devices the task needs."""
  return 1 if task.pipeline is None else task.pipeline.num_devices


def CutTask(
  task: task_lib.BaseTask,
  batch_spec: nested_map.NestedMap,
  splits: Sequence[int] = (),
  num_replicas: int = 1,
) -> cut_lib.Cut:
  """The cut of the task's layers into stages for batches of this spec.

  Allocates nothing, but that with partition_by='time' one layer at a time is run.

  Args:
    task: the task, with or without variables.
    batch_spec: NestedMap of tf.TensorSpec, static shapes.
    splits: the cut, where it is neither to be found nor that of the Params: for each stage the
      index after its last layer.
    num_replicas: how often the stages are there; each replica gets its share of a mini-batch.
  """
  weights = Weights(task, multi_learner.MultiLearner(task.params.train.learner), num_replicas)
  if task.pipeline is None:
    schedule = schedules.Get('gpipe', 1, 1)
    return cut_lib.MakeCut([task], [batch_spec], schedule=schedule, xla=False, weights=weights)
  return task.pipeline.MakeCut(
    *PipelineInputSpecs(task, batch_spec),
    splits=splits,
    weights=weights,
    num_replicas=num_replicas,
  )


def Weights(
  task: task_lib.BaseTask, learner: multi_learner.MultiLearner, num_replicas: int
) -> layer_costs.Weights:
  """What the learner trains of the task, and what the first replica keeps beside each weight."""
  train = task.params.train
  slots = learner.SlotsPerWeight()
  mean = slots / (num_replicas if train.shard_optimizer_slots else 1)
  return layer_costs.Weights(
    learner.IsTrained, slots_per_weight=mean + (train.ema_decay > 0), owner_slots=slots - mean
  )


def PipelineInputSpecs(
  task: task_lib.BaseTask, batch_spec: nested_map.NestedMap
) -> tuple[Any, ...]:
  """Specs of the arguments of the pipeline's first layer for batches of this spec."""
  traced = tf.function(task.PipelineInputs, autograph=False).get_concrete_function(batch_spec)
  return tf.nest.map_structure(
    lambda t: None if t is None else tf.TensorSpec(t.shape, t.dtype), traced.structured_outputs
  )
