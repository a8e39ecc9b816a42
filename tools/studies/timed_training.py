# SPDX-License-Identifier: Apache-2.0
"""Trains an experiment for a given time, keeps the best weights on Dev, and decodes Test."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import params_text
from lingvo_gpipe.distributed import stop_request
from lingvo_gpipe.evaluation import decode_pass
from lingvo_gpipe.experiment import model as model_lib
from lingvo_gpipe.experiment import registry
from lingvo_gpipe.runners import train_runner

# Number of evaluations on Dev if a model uses all of its time.
_NUM_EVALUATIONS = 24
# A model is done if its loss on Dev has not fallen by this share in this many evaluations.
_LEAST_GAIN = 0.002
_PATIENCE = 6


@dataclasses.dataclass(frozen=True)
class Setting:
  """One model of a study.

  Attributes:
    name: name of the model in results, and of its folder.
    key: key of the experiment.
    overrides: overrides of the model's Params, as for the trainer's --model_params_override.
    share: the model's share of the time of the study, relative to the shares of other models.
  """

  name: str
  key: str
  overrides: Sequence[str] = ()
  share: float = 1.0

  def Params(self, dataset: str) -> Any:
    """Returns the model's Params for a data set."""
    p = registry.GetParams(self.key, dataset)
    for text in self.overrides:
      p.ApplyOverrides(params_text.ParseOverrides(text))
    return p


@dataclasses.dataclass(frozen=True)
class Result:
  """The results of a model.

  Attributes:
    name: name of the setting.
    key: key of the experiment.
    overrides: overrides of the setting.
    num_params: number of trainable weights.
    steps: number of optimizer updates.
    best_step: step of the weights that were kept.
    seconds: seconds from the second step on, including evaluations on Dev but not decoding.
    is_done: whether training ended early because the loss on Dev stopped improving.
    dev_loss: cross entropy per token on Dev, in nats, of the weights that were kept.
    metrics: metrics of the task for the decoded Test set.
  """

  name: str
  key: str
  overrides: Sequence[str]
  num_params: int
  steps: int
  best_step: int
  seconds: float
  is_done: bool
  dev_loss: float
  metrics: dict[str, float]


def Train(setting: Setting, devices: Sequence[str], seconds: float, logdir: str) -> Result:
  """Trains a model and decodes the Test set.

  Args:
    setting: the model.
    devices: devices for its stages.
    seconds: number of seconds after which training stops, after at least one step.
    logdir: directory for the decoded examples, in `decode_test/`.
  """
  params = setting.Params('Train')
  model = model_lib.SingleTaskModel(params)
  dev = setting.Params('Dev').input.Set(shuffle=False, num_epochs=1).Instantiate()
  run = train_runner.TrainRunner(model.task, devices, model.input.BatchSpec())
  for generator in (model.input, dev):
    run.ExpectBatches(generator.BatchSpecs())
  weights = model.task.VariablesByPath()
  batches = iter(model.input.Dataset())
  start = 0.0
  best_loss, best_step, best = math.inf, 0, {path: v.numpy() for path, v in weights.items()}
  num_worse, next_evaluation = 0, seconds / _NUM_EVALUATIONS
  step = 0
  while True:
    while run.TrainStep(next(batches)) is None:
      pass
    step += 1
    if step == 1:
      start = time.monotonic()  # The first step traces, which does not count as training.
    used = time.monotonic() - start
    if used < min(next_evaluation, seconds):
      continue
    loss, _ = run.Evaluate(dev.Dataset())['log_pplx']
    num_worse = 0 if loss < best_loss * (1 - _LEAST_GAIN) else num_worse + 1
    if loss < best_loss:
      best_loss, best_step = loss, step
      best = {path: v.numpy() for path, v in weights.items()}
    used = time.monotonic() - start
    next_evaluation = used + seconds / _NUM_EVALUATIONS
    if used >= seconds or num_worse >= _PATIENCE:
      break
  for path, value in best.items():
    weights[path].assign(value)
  run.AfterRestore()
  test = setting.Params('Test').input
  decoder = decode_pass.Decoding(run, test, 'Test', logdir, stop_request.StopRequest())
  tf.io.gfile.makedirs(logdir)
  return Result(
    name=setting.name,
    key=setting.key,
    overrides=list(setting.overrides),
    num_params=model.task.NumParams(),
    steps=step,
    best_step=best_step,
    seconds=round(used, 1),
    is_done=used < seconds,
    dev_loss=round(best_loss, 5),
    metrics=decoder.Run(best_step) or {},
  )
