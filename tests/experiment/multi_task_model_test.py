# SPDX-License-Identifier: Apache-2.0
"""MultiTaskModel: names of tasks and weights, params of the run and of a task, and errors."""

import sys

import pytest

from lingvo_gpipe.experiment import model as model_lib
from lingvo_gpipe.experiment import task_scheduler
from lingvo_gpipe.layers import linear
from lingvo_gpipe.learning import learner
from lingvo_gpipe.training import inspection
from tests import naming
from tests.toys import multi_task

_TRAIN_A = 'task_params.a.train'
_RULES = 'variable_renaming_rules'


def testSharedWeightsAreNamedAndCountedOnce():
  model = multi_task.Params().Instantiate()
  heads = [f'{task}.stack.layers[2].{weight}' for task in 'ab' for weight in 'wb']
  assert list(model.WeightSpecs()) == [
    *(f'shared.{layer}.{weight}' for layer in (0, 1) for weight in 'wb'), *heads
  ]  # fmt: skip
  assert model.NumParams() == 2 * (16 + 4) + (8 + 2) + (4 + 1)
  assert model.shared['shared.1.w'] == {'a': 'a.stack.layers[1].w', 'b': 'b.stack.layers[1].w'}
  named = model.ByCheckpointName(
    {'a.stack.layers[0].w/momentum': 1, 'learner/iterations': 2, 'global_step': 3}
  )
  assert named == {'shared.0.w/momentum': 1, 'learner/iterations': 2, 'global_step': 3}


def testWithoutRulesNothingIsShared():
  model = multi_task.Params(rules=[]).Instantiate()
  assert model.shared == {} and len(model.WeightSpecs()) == 12


def testParamsOfTheRunReachEachTask():
  p = multi_task.Params(random_seed=7)
  p.train.Set(eval_datasets=['Dev'], max_steps=5)
  p.task_params.b.random_seed = 8
  tasks = p.Instantiate().tasks
  assert [t.params.train.max_steps for t in tasks.values()] == [5, 5]
  assert tasks['a'].params.train.eval_datasets == ['Dev']
  assert [t.params.random_seed for t in tasks.values()] == [7, 8]
  assert [t.path for t in tasks.values()] == ['a', 'b']


def testOnlyTheTaskNamedByTaskNameIsTrained():
  model = multi_task.Params().Instantiate()
  assert {model.TaskAtStep(step) for step in range(50)} == {'a', 'b'}
  with pytest.raises(ValueError, match=naming.Naming('a, b', '--model_task_name')):
    _ = model.task
  model = multi_task.Params(task_name='b').Instantiate()
  assert {model.TaskAtStep(step) for step in range(50)} == {'b'}
  assert model.task is model.tasks['b'] and model.input is model.inputs['b']
  assert model.active_tasks == ['b']


def testParamsTextRoundTrip():
  p = multi_task.Params(task_probs=multi_task.AsParams({'a': 1.0, 'b': 2.0}))
  p.FromText('task_probs.b:0.5; task_params.a.train.learner.learning_rate:0.25; train.max_steps:3')
  assert p.task_probs.b == 0.5 and p.task_params.a.train.learner.learning_rate == 0.25
  fresh = multi_task.Params(task_probs=multi_task.AsParams({'a': 1.0, 'b': 2.0}))
  assert fresh.FromText(p.ToText()) == p


def testInspectionListsEachTaskAndSharedWeightsOnce():
  two = {'stack.num_stages': 2}
  p = multi_task.Params(
    a=multi_task.Task(2).Set(**two, **{'stack.splits': [1, 3]}), b=multi_task.Task(1).Set(**two)
  )
  lines = inspection.ModelText(p.Instantiate()).splitlines()
  assert sum(line.startswith('shared.0.w ') for line in lines) == 1
  assert lines[-1] == '55 parameters'
  first, second = inspection.PartitionText(p).split('task b:\n')
  assert first.startswith('task a:\n')
  for text in (first.removeprefix('task a:\n'), second):
    # The second task has the cut of the first.
    assert [line.split()[1] for line in text.splitlines()[1:3]] == ['1', '2']
  assert 'task a' not in inspection.PartitionText(p.Set(task_name='b'))


def testATaskWithProbability0IsNotTrained():
  model = multi_task.Params(task_probs=multi_task.AsParams({'b': 0.0, 'a': 1.0})).Instantiate()
  assert {model.TaskAtStep(step) for step in range(50)} == {'a'}


def _Scheduler(task='c'):
  return task_scheduler.SequentialScheduler.Params().Set(task_steps=[[task, 3]])


@pytest.mark.parametrize(
  'values, message',
  [
    ({'task_params': multi_task.AsParams({})}, naming.Naming('tasks', 'Tasks()')),
    ({'task_params.a': None}, naming.Naming('task_params.a', 'None')),
    ({'task_params': multi_task.AsParams({'a': multi_task.Task(), '_x': multi_task.Task()}),
      'input': None}, naming.Naming("'_x'", '[a-z][a-z0-9_]*')),
    ({'task_name': 'c'}, naming.Naming('task_name', "'c'", 'a, b')),
    ({'task_probs': multi_task.AsParams({'c': 1.0})}, naming.Naming('task_probs', "'c'", 'a, b')),
    ({'task_probs': multi_task.AsParams({'a': 0.0})}, naming.Naming('task_probs', "{'a': 0.0}")),
    ({'task_probs': multi_task.AsParams({'a': 1.0})}, naming.Naming('task_probs', 'b', 'weight 0')),
    ({'task_schedule': _Scheduler('a')}, naming.Naming('task_schedule', 'b', 'weight 0')),
    ({'task_probs': multi_task.AsParams({'a': 1.0}), 'task_schedule': _Scheduler()},
     naming.Naming('task_schedule', 'task_probs', "{'a': 1.0}")),
    ({'task_schedule': _Scheduler()}, naming.Naming('task_schedule', "'c'", 'a, b')),
    ({'task_schedule': 5}, naming.Naming('task_schedule', 'TaskScheduler', '5')),
    ({'task_schedule': learner.Learner.Params()}, naming.Naming('task_schedule', 'TaskScheduler')),
    ({'task_probs': {'a': 1.0}}, naming.Naming('task_probs', 'Params', "{'a': 1.0}")),
    ({'task_probs': multi_task.AsParams({'a': 'x'})}, naming.Naming('task_probs', "{'a': 'x'}")),
    ({'random_seed': 'x'}, naming.Naming('random_seed', 'integer', "'x'")),
    ({'input': multi_task.Input('a')}, naming.Naming('input', '{task: Params}')),
    ({'input': multi_task.AsParams({'c': multi_task.Input('a')})},
     naming.Naming('input', "'c'", 'a, b')),
    ({'task_params.a.train.max_steps': 3},
     naming.Naming(f'{_TRAIN_A}.max_steps', '3', 'set train.max_steps')),
    ({'variable_renaming_rules': [r'.*']}, naming.Naming(_RULES, "['.*']")),
    ({'variable_renaming_rules': [['(', 'x.w']]}, naming.Naming(_RULES, "[['(', 'x.w']]")),
    ({'variable_renaming_rules': [['c\\..*', 'x.w']]},
     naming.Naming(_RULES, r"'c\\..*'", '12 weights', 'a.stack.layers[0].w')),
    ({'variable_renaming_rules': [[r'a\.(.*)', r's.\2']]}, naming.Naming(_RULES, r"'s.\\2'")),
    ({'variable_renaming_rules': [[r'a\.stack\.layers\[0\]\.w', 'w']]},
     naming.Naming(_RULES, 'a.stack.layers[0].w', "'w'")),
    ({'variable_renaming_rules': [[r'\w+\.stack.*\.w', 'all.w']]},
     naming.Naming(_RULES, 'all.w', 'task_params.a.stack.ties')),
    ({'variable_renaming_rules': [[r'\w+\.stack\.layers\[2\]\.w', 'x.w']]},
     naming.Naming(_RULES, 'x.w', "([4, 2], 'float32', 'trainable')", '([4, 1]')),
  ],
)  # fmt: skip
def testInvalidParamsAreRejected(values, message):
  with pytest.raises((ValueError, TypeError), match=message):
    multi_task.Params(**values).Instantiate()


def testTheInputsOfAnotherDataSetAreChecked():
  model = multi_task.Params(task_name='a').Instantiate()
  for inputs in (multi_task.Inputs('Dev'), multi_task.AsParams({'b': None})):
    model.CheckInputs('Dev', inputs)
  for inputs, expected in (
    (multi_task.AsParams({'aa': multi_task.Input('a')}), naming.Naming('Dev', "'aa'", 'a, b')),
    (multi_task.Input('a'), naming.Naming('Dev', '{task: Params}')),
  ):
    with pytest.raises(ValueError, match=expected):
      model.CheckInputs('Dev', inputs)


def testASingleTaskModelRejectsParamsOfSeveralTasks():
  with pytest.raises(ValueError, match=naming.Naming('one task', 'MultiTaskModel', '--model')):
    model_lib.SingleTaskModel(multi_task.Params())


def testTaskParamsMustDescribeATask():
  layer = linear.LinearLayer.Params().Set(input_dim=2, output_dim=2)
  with pytest.raises(TypeError, match=naming.Naming('task_params.a', 'LinearLayer')):
    multi_task.Params(a=layer).Instantiate()
  with pytest.raises(TypeError, match=naming.Naming('task_params.a', 'Learner')):
    multi_task.Params(a=learner.Learner.Params()).Instantiate()


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
