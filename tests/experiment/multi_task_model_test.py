# SPDX-License-Identifier: Apache-2.0
"""MultiTaskModel: names of tasks and weights, what is the run's and what the task's, mistakes."""

import sys

import pytest

from lingvo_gpipe.experiment import model as model_lib
from lingvo_gpipe.experiment import task_scheduler
from lingvo_gpipe.layers import linear
from lingvo_gpipe.learning import learner
from lingvo_gpipe.training import inspection
from tests.toys import multi_task

_OWN = r'task_params\.a\.train\.'


def testSharedWeightsAreNamedAndCountedOnce():
  made = multi_task.Params().Instantiate()
  heads = [f'{task}.stack.layers[2].{weight}' for task in 'ab' for weight in 'wb']
  assert list(made.WeightSpecs()) == [
    *(f'shared.{layer}.{weight}' for layer in (0, 1) for weight in 'wb'), *heads
  ]  # fmt: skip
  assert made.NumParams() == 2 * (16 + 4) + (8 + 2) + (4 + 1)
  assert made.shared['shared.1.w'] == {'a': 'a.stack.layers[1].w', 'b': 'b.stack.layers[1].w'}
  named = made.ByCheckpointName(
    {'a.stack.layers[0].w/momentum': 1, 'learner/iterations': 2, 'global_step': 3}
  )
  assert named == {'shared.0.w/momentum': 1, 'learner/iterations': 2, 'global_step': 3}


def testWithoutRulesNothingIsShared():
  made = multi_task.Params(rules=[]).Instantiate()
  assert made.shared == {} and len(made.WeightSpecs()) == 12


def testWhatHoldsForTheRunReachesEachTask():
  p = multi_task.Params(random_seed=7)
  p.train.Set(eval_datasets=['Dev'], max_steps=5)
  p.task_params.b.random_seed = 8
  tasks = p.Instantiate().tasks
  assert [t.params.train.max_steps for t in tasks.values()] == [5, 5]
  assert tasks['a'].params.train.eval_datasets == ['Dev']
  assert [t.params.random_seed for t in tasks.values()] == [7, 8]
  assert [t.path for t in tasks.values()] == ['a', 'b']


def testTheChosenTaskIsTheOneThatIsTrained():
  made = multi_task.Params().Instantiate()
  assert {made.TaskAtStep(step) for step in range(50)} == {'a', 'b'}
  with pytest.raises(ValueError, match='has the tasks a, b, .* --model_task_name'):
    _ = made.task
  made = multi_task.Params(task_name='b').Instantiate()
  assert {made.TaskAtStep(step) for step in range(50)} == {'b'}
  assert made.task is made.tasks['b'] and made.input is made.inputs['b']
  assert made.active_tasks == ['b']


def testParamsTextRoundTrip():
  p = multi_task.Params(task_probs=multi_task.AsParams({'a': 1.0, 'b': 2.0}))
  p.FromText('task_probs.b:0.5; task_params.a.train.learner.learning_rate:0.25; train.max_steps:3')
  assert p.task_probs.b == 0.5 and p.task_params.a.train.learner.learning_rate == 0.25
  fresh = multi_task.Params(task_probs=multi_task.AsParams({'a': 1.0, 'b': 2.0}))
  assert fresh.FromText(p.ToText()) == p


def testTheTextsOfAModelTellEachTaskAndWhatIsSharedOnce():
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
    # The second is cut as the first is.
    assert [line.split()[1] for line in text.splitlines()[1:3]] == ['1', '2']
  assert 'task a' not in inspection.PartitionText(p.Set(task_name='b'))


def _Scheduler():
  return task_scheduler.SequentialScheduler.Params().Set(task_steps=[['c', 3]])


@pytest.mark.parametrize(
  'values, message',
  [
    ({'task_params': multi_task.AsParams({})}, 'needs tasks'),
    ({'task_params.a': None}, 'task_params.a: expected the Params of a task, got None'),
    ({'task_params': multi_task.AsParams({'a': multi_task.Task(), '_x': multi_task.Task()}),
      'input': None}, "'_x' is no name for a task"),
    ({'task_name': 'c'}, "task_name names the task 'c', which there is not; the tasks are a, b"),
    ({'task_probs': multi_task.AsParams({'c': 1.0})}, "task_probs names the task 'c'"),
    ({'task_probs': multi_task.AsParams({'a': 0.0})}, 'one above 0'),
    ({'task_probs': multi_task.AsParams({'a': 1.0}), 'task_schedule': _Scheduler()}, 'both set'),
    ({'task_schedule': _Scheduler()}, "task_schedule names the task 'c'"),
    ({'task_schedule': 5}, 'task_schedule must be the Params of a TaskScheduler, .* got 5'),
    ({'task_schedule': learner.Learner.Params()}, 'must be the Params of a TaskScheduler'),
    ({'task_probs': {'a': 1.0}}, "task_probs must be Params .* got {'a': 1.0}"),
    ({'task_probs': multi_task.AsParams({'a': 'x'})}, "task_probs must be .* got {'a': 'x'}"),
    ({'random_seed': 'x'}, "random_seed .* must be an integer, got 'x'"),
    ({'input': multi_task.Input('a')}, r'return \{task: Params\}'),
    ({'input': multi_task.AsParams({'c': multi_task.Input('a')})}, "input names the task 'c'"),
    ({'task_params.a.train.max_steps': 3}, _OWN + r'max_steps is 3, .*: set train\.max_steps'),
    ({'variable_renaming_rules': [r'.*']}, 'must be pairs of a regular expression'),
    ({'variable_renaming_rules': [['(', 'x.w']]}, 'must be pairs of a regular expression'),
    ({'variable_renaming_rules': [['c\\..*', 'x.w']]}, r'fits none of the 12 weights, such as a\.'),
    ({'variable_renaming_rules': [[r'a\.(.*)', r's.\2']]}, 'cannot be filled in'),
    ({'variable_renaming_rules': [[r'a\.stack\.layers\[0\]\.w', 'w']]}, 'has a dot and no slash'),
    ({'variable_renaming_rules': [[r'\w+\.stack.*\.w', 'all.w']]}, r'tied by task_params\.a\.'),
    ({'variable_renaming_rules': [[r'\w+\.stack\.layers\[2\]\.w', 'x.w']]},
     r"x\.w, but differ: \(\[4, 2\], 'float32', 'trainable'\) and \(\[4, 1\]"),
  ],
)  # fmt: skip
def testMistakes(values, message):
  with pytest.raises((ValueError, TypeError), match=message):
    multi_task.Params(**values).Instantiate()


def testWhatIsDoneWithAModelOfOneTaskRefusesIt():
  with pytest.raises(ValueError, match='this is done with a model of one task, and .* MultiTaskM'):
    model_lib.SingleTaskModel(multi_task.Params())


def testALayerIsNoTask():
  layer = linear.LinearLayer.Params().Set(input_dim=2, output_dim=2)
  with pytest.raises(TypeError, match='expected the Params of a task'):
    multi_task.Params(a=layer).Instantiate()
  with pytest.raises(TypeError, match='expected the Params of a task'):
    multi_task.Params(a=learner.Learner.Params()).Instantiate()


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
