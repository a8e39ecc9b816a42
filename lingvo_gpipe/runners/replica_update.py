# SPDX-License-Identifier: Apache-2.0
"""`ReplicaUpdate`: updates the weights of all replicas of a pipeline to bit-equal values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from lingvo_gpipe.core import hyperparams, text_table
from lingvo_gpipe.learning import learner, multi_learner, shared_weights
from lingvo_gpipe.pipeline import engine as engine_lib
from lingvo_gpipe.pipeline import layer_statistics, replicas


class ReplicaUpdate:
  """Adds the gradients over the replicas and lets the learners update the weights of each.

  Each replica has its own learners, which all compute the same update; or, with
  `shard_optimizer_slots`, one replica updates each weight and has the only copy of its slots.
  """

  def __init__(
    self,
    first: multi_learner.MultiLearner,
    engine: engine_lib.PipelineEngine,
    train: hyperparams.Params,
    shared: shared_weights.SharedWeights | None = None,
  ) -> None:
    """Makes the slots.

    Args:
      first: the learners whose state checkpoints store; not built yet.
      engine: the engine, with its accumulators.
      train: `task.train`.
      shared: slots of weights that several tasks share; such tasks have one replica.
    """
    self._first = first
    self._engine = engine
    self._others: list[multi_learner.MultiLearner] = []
    self._shards: replicas.ShardedWeights | None = None
    # The accumulators in these stages hold the gradients of all micro-batches.
    self.stages: Sequence[learner.LearnerStage] = engine.holders
    if len(engine.replicas) > 1 and train.shard_optimizer_slots:
      self._shards = replicas.ShardedWeights(engine.replicas)
      self.stages = self._shards.Stages()
    else:
      self._gradient_sum = replicas.GradientSum(engine.replicas, train.all_reduce)
      for replica in engine.replicas[1:]:
        self._others.append(multi_learner.MultiLearner(train.learner))
        self._others[-1].Build(replica.holders, is_compiled=engine.compiles_updates)
    first.Build(self.stages, shared, is_compiled=engine.compiles_updates)
    if self._shards is not None:
      logging.info(
        'Optimizer slots are shared out over %d replicas: %s.',
        len(engine.replicas),
        ', '.join(map(text_table.FormatBytes, _SlotBytes(engine.replicas, first))),
      )

  def AfterRestore(self) -> None:
    """Must be called after the weights of the first replica and learners were assigned."""
    self._engine.SyncReplicas()
    self._first.AfterRestore()
    restored = self._first.Variables()
    for other in self._others:
      for name, variable in other.Variables().items():
        with tf.device(variable.device):
          variable.assign(tf.identity(restored[name]))
      other.AfterRestore()

  def BeginAtWeights(self) -> None:
    """Must be called after the first replica's weights were assigned, but no slots."""
    self._engine.SyncReplicas()
    for learners in [self._first, *self._others]:
      learners.BeginAtWeights()

  def Apply(
    self, step: tf.Tensor, loss_weight: tf.Tensor, state: layer_statistics.State
  ) -> Mapping[str, Any]:
    """Updates the weights, slots and layers' state in all replicas, from the full accumulators.

    Args:
      step: int64 scalar, the training step.
      loss_weight: scalar, the sum of the loss weights of all micro-batches.
      state: the layers' new state, as `layer_statistics.Next` returned it. It is assigned together
        with the weights, or not at all.

    Returns:
      See `MultiLearner.Apply`.
    """
    if self._shards is not None:
      self._shards.AddGradients()
    else:
      self._gradient_sum.Add()
    # The first replica's squares serve all: if gradients were clipped differently by a rounding,
    # the weights would drift apart.
    squares = self._first.Prepare(loss_weight)
    values = self._first.Apply(step, loss_weight, squares)
    for other in self._others:
      other.Prepare(loss_weight)
      other.Apply(step, loss_weight, squares)
    if self._shards is not None:
      self._shards.SyncWeights()
    layer_statistics.Assign(self._engine, state, values['is_applied'])
    self._engine.SyncTies()
    return values


def _SlotBytes(
  all_replicas: Sequence[replicas.Replica], built: multi_learner.MultiLearner
) -> list[int]:
  """Returns the bytes of the learners' variables on each replica's devices."""
  sizes = []
  for replica in all_replicas:
    devices = {v.device for v in replica.variables.values()}
    variables = [v for v in built.Variables().values() if v.device in devices]
    sizes.append(sum(v.shape.num_elements() * v.dtype.size for v in variables))
  return sizes
