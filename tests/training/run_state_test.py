# SPDX-License-Identifier: Apache-2.0
"""Checkpoints store the learning rate for reading and comparing, not for resuming."""

import json
import re
import sys

import pytest

from lingvo_gpipe.checkpoint import checkpoint_table, checkpointer
from lingvo_gpipe.learning import lr_schedules, multi_learner
from tests import processes
from tests.toys import training


def _Params(**train):
  params = training.Params(**train)
  params.task.train.learner.lr_schedule = lr_schedules.LinearSchedule.Params().Set(limit=(8, 0.5))
  return params


def _Rates(logdir):
  """Returns {step: learning rate} of the updates from the summaries."""
  return {step - 1: rate for step, rate in processes.Scalars(logdir / 'train')['learning_rate']}


def testTheLearningRateIsStoredButNotRestored(tmp_path, caplog, monkeypatch):
  # A checkpoint without it.
  with monkeypatch.context() as patched:
    patched.setattr(multi_learner.MultiLearner, 'LearningRates', lambda self, step: {})
    training.Train(tmp_path, _Params(max_steps=4))
  training.Train(tmp_path, _Params(max_steps=6))
  info = checkpointer.Checkpointer(tmp_path / 'train').Latest()
  rate = info.metadata['learning_rate']
  assert f'  learning_rate: {json.dumps(rate)}\n' in checkpoint_table.Describe(str(tmp_path))[0]
  training.Train(tmp_path, _Params(max_steps=8))
  assert rate == _Rates(tmp_path)[6] < _Rates(tmp_path)[5]
  assert not caplog.messages
  assert _Rates(tmp_path)[7] == pytest.approx(0.01 * (1 - 0.5 * 7 / 8))
  # Another schedule.
  params = _Params(max_steps=9)
  params.task.train.learner.learning_rate = 0.001
  training.Train(tmp_path, params, allow_params_change=True)
  assert re.search(r'\blearning_rate\b.* 0\.0049+\d* .* 0\.00050\d*\b', caplog.messages[-1])
  assert _Rates(tmp_path)[8] == pytest.approx(0.0005)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
