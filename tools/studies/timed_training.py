# SPDX-License-Identifier: Apache-2.0
"""Trains an experiment for a given time, keeps the weights that were best on Dev, decodes Test."""

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

# Evaluations on Dev in the time that a model has, if it takes all of it.
_NUM_EVALUATIONS = 24
# A model is done when its loss on Dev has not fallen by this share for so many evaluations.
_LEAST_GAIN = 0.002
_PATIENCE = 6


@dataclasses.dataclass(frozen=True)
class Setting:
  """One model of a study.

  Attributes:
    name: of the model, in results and as a folder.
    key: the experiment.
    overrides: of the model's Params, texts as the trainer's --model_params_override.
    share: how much of the study's time it may take, beside the other models' shares.
  """

  name: str
  key: str
  overrides: Sequence[str] = ()
  share: float = 1.0

  def Params(self, dataset: str) -> Any:
    """The model's Params for a data set."""
    p = registry.GetParams(self.key, dataset)
    for text in self.overrides:
      p.ApplyOverrides(params_text.ParseOverrides(text))
    return p


@dataclasses.dataclass(frozen=True)
class Result:
  """What came of a model.

  Attributes:
    name: of the setting.
    key: the experiment.
    overrides: of the setting.
    num_params: trainable weights.
    steps: optimizer updates until the end.
    best_step: of the weights that were kept.
    seconds: from the second step on, evaluations on Dev included, without decoding.
    is_done: whether it ended because Dev got no better, before its time was over.
    dev_loss: cross entropy a token on Dev, in nats, of the weights that were kept.
    metrics: what the task made of the decoded Test.
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
  """Trains and decodes.

  Args:
    setting: the model.
    devices: for its stages.
    seconds: after so many it stops training; at least one step is done.
    logdir: gets what was decoded, in `decode_test/`.
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
      start = time.monotonic()  # The first step traces: that is no training.
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
