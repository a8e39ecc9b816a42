# SPDX-License-Identifier: Apache-2.0
"""The data sets that a trainer evaluates and decodes."""

import sys
import types

import pytest

from lingvo_gpipe.distributed import stop_request
from lingvo_gpipe.evaluation import pass_schedule
from lingvo_gpipe.experiment import multi_task_model
from tests import naming
from tests.toys import multi_task, training


def _Make(logdir, tasks, input_params):
  runners = {
    name: types.SimpleNamespace(task=task, ExpectBatches=lambda specs: None)
    for name, task in tasks.items()
  }
  return pass_schedule.DatasetPasses(
    types.SimpleNamespace(task_runners=runners), input_params, str(logdir),
    stop_request.StopRequest(), during_training=True, clock=lambda: 0.0,
  )  # fmt: skip


@pytest.mark.parametrize('job', ['eval', 'decode'])
def testNamesThatDifferOnlyByCaseAreRefused(tmp_path, job):
  p = training.Params(**{f'{job}_datasets': ['Dev', 'Test', 'DEV']})
  expected = naming.Naming(f'train.{job}_datasets', 'Dev', 'DEV', f'{job}_dev')
  with pytest.raises(ValueError, match=expected):
    _Make(tmp_path, p.Instantiate().tasks, lambda name: training.Input(name.capitalize()))


def testADataSetMayBeNamedTwiceAndForBothJobs(tmp_path):
  p = training.Params(eval_datasets=['Dev', 'Dev'], decode_datasets=['Dev'])
  assert _Make(tmp_path, p.Instantiate().tasks, training.Input).Describe() == ['Dev 6 examples']


def testADataSetAndATaskThatJoinToAnotherPairAreRefused(tmp_path):
  """`Dev` of the task en_fr, and `Dev_en` of the task fr."""
  tasks = {'fr': multi_task.Task(2), 'en_fr': multi_task.Task(1)}
  p = multi_task_model.MultiTaskModel.Params().Set(task_params=multi_task.AsParams(tasks))
  p.train.eval_datasets = ['Dev', 'Dev_en']
  inputs = {'Dev': ['fr', 'en_fr'], 'Dev_en': ['fr']}

  def Make():
    return _Make(
      tmp_path,
      p.Instantiate().tasks,
      lambda name: multi_task.AsParams({task: multi_task.Input('a') for task in inputs[name]}),
    )

  with pytest.raises(ValueError, match=naming.Naming('Dev', 'Dev_en', 'eval_dev_en_fr')):
    Make()
  inputs['Dev'] = ['fr']
  assert len(Make().Describe()) == 2


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
