# SPDX-License-Identifier: Apache-2.0
"""Stages for tests of learners: a few variables on several devices, with gradients."""

import dataclasses

import numpy as np
import tensorflow as tf

from lingvo_gpipe.learning import multi_learner

SHAPES = {'m.a.w': [3, 2], 'm.a.b': [2], 'm.c.w': [2, 2], 'm.c.b': [2]}


@dataclasses.dataclass
class Stage:
  """The attributes of a stage that learners use."""

  device: str
  trained: dict
  accumulators: list


def Stages(cuts=(2, 4), dtype=tf.float32):
  """Returns stages, each on its own device, that hold the variables of `SHAPES`."""
  rng = np.random.default_rng(0)
  values = {path: rng.normal(size=shape) for path, shape in SHAPES.items()}
  devices = [d.name for d in tf.config.list_logical_devices('CPU')]
  stages = []
  for k, (start, end) in enumerate(zip([0, *cuts[:-1]], cuts, strict=True)):
    with tf.device(devices[k]):
      paths = list(SHAPES)[start:end]
      variables = {path: tf.Variable(values[path], dtype=dtype) for path in paths}
      accumulators = [tf.Variable(tf.zeros_like(v), trainable=False) for v in variables.values()]
    stages.append(Stage(devices[k], variables, accumulators))
  return stages


def TrainedStages(stages, is_trained):
  """Returns the stages with the trained variables only, as the engine makes them."""
  trained_stages = []
  for s in stages:
    pairs = [pair for pair in zip(s.trained, s.accumulators, strict=True) if is_trained(pair[0])]
    trained = {path: s.trained[path] for path, _ in pairs}
    trained_stages.append(Stage(s.device, trained, [accumulator for _, accumulator in pairs]))
  return trained_stages


def Build(p, stages, **options):
  """Returns the learners of these Params, and a function (step, loss weight) that updates once.

  `options` are arguments of `MultiLearner.Build`.
  """
  learners = multi_learner.MultiLearner(p)
  learners.Build(TrainedStages(stages, learners.IsTrained), **options)

  @tf.function(autograph=False)
  def Apply(step, loss_weight):
    return learners.Apply(step, loss_weight)

  def Update(step=0, loss_weight=1.0):
    values = Apply(tf.constant(step, tf.int64), tf.constant(loss_weight))
    return {name: float(value) for name, value in values.items()}

  return learners, Update


def Iterations(learners):
  """Returns the update counters of the optimizers of all stages."""
  return [part.optimizer.iterations for each in learners.learners for part in each._parts]


def Weights(stages):
  """Returns {path: value}."""
  return {path: v.numpy() for s in stages for path, v in s.trained.items()}


def SetGrads(stages, seed=1, scale=1.0):
  """Fills the accumulators; returns {path: gradient}, which does not depend on the cut."""
  rng = np.random.default_rng(seed)
  grads = {path: scale * rng.normal(size=shape) for path, shape in SHAPES.items()}
  for s in stages:
    for path, accumulator in zip(s.trained, s.accumulators, strict=True):
      accumulator.assign(tf.cast(grads[path], accumulator.dtype))
  return grads


def Norm(grads):
  """Returns the global norm."""
  return float(np.sqrt(sum(np.sum(g**2) for g in grads.values())))
