# SPDX-License-Identifier: Apache-2.0
"""The cut of a task into stages; allocates nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from lingvo_gpipe.checkpoint import checkpointer
from lingvo_gpipe.core import hyperparams, nested_map
from lingvo_gpipe.experiment import model as model_lib
from lingvo_gpipe.experiment import task as task_lib
from lingvo_gpipe.learning import multi_learner
from lingvo_gpipe.pipeline.cutting import cut as cut_lib
from lingvo_gpipe.pipeline.cutting import layer_costs
from lingvo_gpipe.pipeline.schedule import schedules


def NumDevices(task: task_lib.BaseTask) -> int:
  """Returns the number of devices that one replica of the task needs."""
  return 1 if task.pipeline is None else task.pipeline.num_devices


def CutTask(
  task: task_lib.BaseTask,
  batch_spec: nested_map.NestedMap,
  splits: Sequence[int] = (),
  num_replicas: int = 1,
) -> cut_lib.Cut:
  """Cuts the task's layers into stages for batches of this spec.

  Allocates no weights; with partition_by='time' it runs one layer at a time.

  Args:
    task: the task, with or without variables.
    batch_spec: NestedMap of tf.TensorSpec, static shapes.
    splits: for each stage the index after its last layer; overrides the search and the Params.
    num_replicas: number of copies of the pipeline; each gets its share of a mini-batch.
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
  """Returns the trained weights, and the slots and averages of each in the first replica."""
  train = task.params.train
  slots = learner.SlotsPerWeight()
  mean = slots / (num_replicas if train.shard_optimizer_slots else 1)
  return layer_costs.Weights(
    learner.IsTrained, slots_per_weight=mean + (train.ema_decay > 0), owner_slots=slots - mean
  )


def PipelineInputSpecs(
  task: task_lib.BaseTask, batch_spec: nested_map.NestedMap
) -> tuple[Any, ...]:
  """Returns specs of the first layer's arguments for batches of this spec."""
  traced = tf.function(task.PipelineInputs, autograph=False).get_concrete_function(batch_spec)
  return tf.nest.map_structure(
    lambda t: None if t is None else tf.TensorSpec(t.shape, t.dtype), traced.structured_outputs
  )


def PipelineSettings(p: hyperparams.Params) -> dict[str, Any]:
  """Returns the Params of a PipeliningLayer that a checkpoint stores alongside the cut."""
  return {
    'schedule': getattr(p.schedule, 'name', p.schedule),
    'stages_per_device': p.stages_per_device,
    'remat_policy': p.remat_policy,
    **({'offload': p.offload} if p.offload else {}),
    **({} if p.xla is None else {'xla': p.xla}),
    **({} if p.vocabulary == 'one' else {'vocabulary': p.vocabulary}),
  }


def SavedCut(
  saved: checkpointer.Checkpointer | None, task: task_lib.BaseTask, task_name: str = ''
) -> list[int]:
  """Returns the cut stored in the last checkpoint if the cut was chosen by measured times.

  Another measurement may choose another cut, and then a run would not resume bit-for-bit.

  Args:
    saved: the run's checkpoints; None if there are none.
    task: the task.
    task_name: its name in a model of several tasks.

  Returns:
    `splits` of the pipeline. Empty if there is no checkpoint, if it has other stages or pipeline
    settings, or if the cut does not depend on a measurement.
  """
  if saved is None or task.pipeline is None:
    return []
  p = task.pipeline.params
  if p.partition_by != 'time' or p.splits:
    return []
  infos = saved.All()
  metadata = saved.ReadMetadata(infos[-1]) if infos else {}
  cut: list[int] = metadata.get(model_lib.TaskKey('cut', task_name), [])
  settings = PipelineSettings(p)
  has_settings = all(
    metadata.get(model_lib.TaskKey(name, task_name)) == value for name, value in settings.items()
  )
  num_slices = task.pipeline.num_devices if p.vocabulary == 'shared' else 0
  has_size = len(cut) == p.num_stages + num_slices
  if not (has_settings and has_size and cut[p.num_stages - 1] == len(task.pipeline.layers)):
    return []
  logging.info('keeping the cut of the last checkpoint: %s', cut)
  return cut
