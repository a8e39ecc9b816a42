# SPDX-License-Identifier: Apache-2.0
"""Steps of several tasks: a shared weight is one variable with one slot in any cut."""

import os
import sys

import keras
import numpy as np
import pytest

from lingvo_gpipe.checkpoint import checkpointer
from lingvo_gpipe.experiment import task_scheduler
from lingvo_gpipe.learning import ema, optimizer
from lingvo_gpipe.runners import multi_task_runner
from tests import naming
from tests.toys import multi_task

_HEADS = {f'{task}.stack.layers[2].{weight}' for task in 'ab' for weight in 'wb'}
_SHARED = {f'shared.{layer}.{weight}' for layer in (0, 1) for weight in 'wb'}


def _Sequence(order):
  """Returns a schedule of tasks with one letter per step."""
  pairs = [[task, 1] for task in order]
  return task_scheduler.SequentialScheduler.Params().Set(task_steps=pairs)


def _Runner(order='ab', **values):
  p = multi_task.Params(task_schedule=_Sequence(order), **values)
  return multi_task_runner.Make(p.Instantiate(), multi_task.Devices())


def _Step(run, task, seed):
  values = run.TrainStep(multi_task.Batch(seed, {'a': 2, 'b': 1}[task]))
  assert values['is_finite']
  return values


def _Arrays(run):
  return {name: v.numpy() for name, v in run.Variables().items()}


def _Changed(before, after):
  return {name for name in before if not np.array_equal(before[name], after[name])}


@pytest.fixture(scope='module')
def trained():
  """(runner, all variables before, after a step of a and after one of b, gradients of b)."""
  run = _Runner('ab')
  arrays = [_Arrays(run)]
  for task in 'ab':
    _Step(run, task, seed=1)
    arrays.append(_Arrays(run))
  return run, arrays, run.Gradients(4.0)


def testSharedWeightsAreUpdatedByBothTasksAndHeadsByTheirOwn(trained):
  _, (before, after_a, after_b), _ = trained
  weights = _HEADS | _SHARED
  assert _Changed(before, after_a) & weights == _SHARED | {n for n in _HEADS if n[0] == 'a'}
  assert _Changed(after_a, after_b) & weights == _SHARED | {n for n in _HEADS if n[0] == 'b'}


def testSharedWeightsHaveOneSlotAndOneCount(trained):
  _, (_, after_a, after_b), gradients = trained
  slots = {f'{name}/{slot}' for name in _HEADS | _SHARED for slot in ('momentum', 'velocity')}
  counts = {'learner/a/iterations': 1, 'learner/b/iterations': 1, 'learner/a+b/iterations': 2}
  assert after_b.keys() == _HEADS | _SHARED | slots | counts.keys() | {'global_step'}
  assert {name: after_b[name] for name in counts} == counts and after_b['global_step'] == 2
  # The step of b continues from the slot of a's step.
  decayed = 0.9 * after_a['shared.0.w/momentum']
  assert np.abs(decayed).max() > 0
  contribution = after_b['shared.0.w/momentum'] - decayed
  np.testing.assert_allclose(
    contribution, 0.1 * gradients['b.stack.layers[0].w'], rtol=1e-4, atol=1e-7
  )


def testEqualsOneKerasOptimizerForEachGroup():
  """Adam corrects its moments by the number of updates of a weight, not by the run's steps."""
  order = 'abbaab'
  run = _Runner(order)
  start = _Arrays(run)
  groups = {'a': 'a.', 'b': 'b.', 'a+b': 'shared.'}
  names = {group: [n for n in sorted(_HEADS | _SHARED) if n.startswith(start_of)]
           for group, start_of in groups.items()}  # fmt: skip
  reference = {n: keras.Variable(start[n]) for n in _HEADS | _SHARED}
  adams = {group: keras.optimizers.Adam(0.05) for group in groups}
  for step, task in enumerate(order):
    values = _Step(run, task, seed=step)
    gradients = run._model.ByCheckpointName(run.Gradients(values['loss_weight']))
    for group in (task, 'a+b'):
      adams[group].apply([gradients[n] for n in names[group]], [reference[n] for n in names[group]])
  for name, weight in reference.items():
    np.testing.assert_allclose(run.Variables()[name], weight, rtol=1e-5, atol=1e-6, err_msg=name)


def testStagesOfTasksMayDifferIfSharedLayersStayOnTheirDevice():
  two = {'stack.num_stages': 2}
  run = _Runner(
    a=multi_task.Task(2).Set(**two, **{'stack.splits': [2, 3]}),
    b=multi_task.Task(1).Set(num_layers=4, **two, **{'stack.splits': [2, 4]}),
  )
  variables = run.Variables()
  assert len({variables[name].device for name in _SHARED}) == 1
  assert variables['a.stack.layers[2].w'].device != variables['shared.0.w'].device


def testSharedLayersOnTwoDevicesAreRefused():
  a = multi_task.Task(2).Set(**{'stack.num_stages': 2, 'stack.splits': [1, 3]})
  with pytest.raises(ValueError) as e:
    _Runner(a=a)
  text = str(e.value)
  for part in (
    "'a'",
    "'b'",
    'a.stack.layers[1].w',
    'b.stack.layers[1].w',
    'CPU:1',
    'CPU:0',
    'splits',
  ):
    assert part in text, text


def testDifferentOptimizersForSharedWeightsAreRefused():
  with pytest.raises(
    ValueError,
    match=naming.Naming('b.stack.layers[0].b', 'tasks a and b', 'beta_1: 0.9', 'beta_1: 0.8'),
  ):
    _Runner(b=multi_task.Task(1, optimizer=optimizer.Adam.Params().Set(beta_1=0.8)))
  with pytest.raises(ValueError, match='weight_decay_exclusion'):
    _Runner(b=multi_task.Task(1, weight_decay_exclusion=r'\.b$'))


def testPatternsSeeThePathsOfATaskAndNotTheNamesOfSharedWeights():
  frozen = {'bprop_variable_exclusion': r'^shared\.'}
  parts = ('bprop_variable_exclusion', r'^shared\\.', 'a.stack.layers[0].w')
  with pytest.raises(ValueError, match=naming.Naming(*parts)):
    _Runner(a=multi_task.Task(2, **frozen), b=multi_task.Task(1, **frozen))


def testEachTaskHasItsOwnRateAndFilter():
  """A task that freezes the shared weights does not change them, and needs no slots for them."""
  b = multi_task.Task(
    1, optimizer=optimizer.SGD.Params(), bprop_variable_filter=r'layers\[2\]', learning_rate=0.5
  )
  run = _Runner('ba', b=b)
  before = _Arrays(run)
  assert 'learner/a+b/iterations' not in before
  values = _Step(run, 'b', seed=0)
  assert values['learning_rate'] == 0.5
  assert _Changed(before, _Arrays(run)) & (_HEADS | _SHARED) == {n for n in _HEADS if n[0] == 'b'}
  _Step(run, 'a', seed=0)
  assert _SHARED <= _Changed(before, _Arrays(run))


def testTasksThatShareAllWeightsCountTheirOwnUpdates():
  rule = [[r'\w+\.stack\.(.*)', r'shared.\1']]
  run = _Runner('abb', b=multi_task.Task(2), rules=rule, input=multi_task.AsParams(
    {name: multi_task.Input(name) for name in 'ab'}
  ))  # fmt: skip
  for seed, _ in enumerate('abb'):
    values = run.TrainStep(multi_task.Batch(seed, 2))
  assert values['num_skipped_steps'] == 0.0
  counts = {n: int(v) for n, v in _Arrays(run).items() if n.endswith('iterations')}
  assert counts == {
    'learner/a/iterations': 1, 'learner/b/iterations': 2, 'learner/a+b/iterations': 3
  }  # fmt: skip


def testASkippedStepIsCountedOnceAndChangesNothing(trained):
  run, *_ = trained
  run.global_step.assign(0)
  for count in (n for n in run.Variables() if n.endswith('iterations')):
    run.Variables()[count].assign(0)
  before = _Arrays(run)
  bad = multi_task.Batch(0, 2)
  bad.targets = bad.targets * np.nan
  values = run.TrainStep(bad)
  assert not values['is_finite'] and values['num_skipped_steps'] == 1.0
  assert _Changed(before, _Arrays(run)) == {'global_step'}
  assert _Step(run, 'b', seed=0)['num_skipped_steps'] == 1.0


def _Tied(num_targets):
  """A task whose second layer has the weights of the first."""
  p = multi_task.Task(num_targets)
  return p.Set(
    **{
      'stack.ties': [['layers[1].w', 'layers[0].w']],
      'stack.splits': [1, 3],
      'stack.num_stages': 2,
    }
  )


def testATiedCopyFollowsTheOtherTasksUpdates():
  rule = [[r'\w+\.stack\.layers\[0\]\.w', 'shared.w']]
  run = _Runner('aab', a=_Tied(2), b=_Tied(1).Set(**{'stack.splits': []}), rules=rule)
  # Without splits a task is cut like the other task.
  assert {runner.cut.ends for runner in run.task_runners.values()} == {(1, 3)}
  for seed, task in enumerate('aab'):
    _Step(run, task, seed)
    for runner in run.task_runners.values():
      (tied, owner), = runner.engine.ties.items()  # fmt: skip
      np.testing.assert_array_equal(
        runner.engine.replicas[0].variables[tied], runner.engine.replicas[0].variables[owner]
      )


def testSharedWeightsHaveOneAverage(tmp_path):
  averaged = {'train.ema_decay': 0.5}
  run = _Runner('ab', a=multi_task.Task(2).Set(**averaged), b=multi_task.Task(1).Set(**averaged))
  reference = {n: v.copy() for n, v in _Arrays(run).items() if n in _SHARED}
  for step, task in enumerate('ab'):
    _Step(run, task, seed=step)
    decay = min(0.5, (1 + step) / (10 + step))
    for name, value in reference.items():
      reference[name] = value * decay + (1 - decay) * run.Variables()[name].numpy()
  for name, value in reference.items():
    np.testing.assert_allclose(run.Variables()[f'{name}/ema'], value, rtol=1e-5, atol=1e-6)
  # A checkpoint has them once, and the evaluation of either task reads them.
  saved = checkpointer.Checkpointer(str(tmp_path))
  saved.Save(2, run.Variables(), {})
  p = multi_task.Params(
    a=multi_task.Task(2).Set(**averaged), b=multi_task.Task(1).Set(**averaged), task_name='b'
  )
  evaluated = multi_task_runner.MakeEvaluated(p.Instantiate(), multi_task.Devices())
  assert evaluated.task_runners.keys() == {'b'}
  weights = _SHARED | {h for h in _HEADS if h[0] == 'b'}
  assert evaluated.Variables().keys() == {'global_step', *weights}
  assert ema.Restore(saved, saved.Latest(), evaluated.Variables()) == len(weights)
  for name in weights:
    np.testing.assert_array_equal(evaluated.Variables()[name], run.Variables()[f'{name}/ema'])
  with pytest.raises(
    ValueError, match=naming.Naming('shared.0.w', 'tasks a and b', 'ema_decay', '0.0', '0.5')
  ):
    _Runner(a=multi_task.Task(2).Set(**averaged))


def testReplicasOfTasksWithoutSharedWeights():
  """The steps equal those in one replica except for rounding; shared weights need one replica."""
  order = 'abba'
  arrays = []
  for num_replicas in (1, 2):
    p = multi_task.Params(
      a=multi_task.Task(2).Set(**{'stack.num_micro_batches': 2 // num_replicas}),
      b=multi_task.Task(1).Set(**{'stack.num_micro_batches': 2 // num_replicas}),
      task_schedule=_Sequence(order),
      rules=[],
    )
    devices = multi_task.Devices()[:num_replicas]
    run = multi_task_runner.Make(p.Instantiate(), devices, num_replicas=num_replicas)
    for seed, task in enumerate(order):
      _Step(run, task, seed)
    arrays.append(_Arrays(run))
  assert arrays[0].keys() == arrays[1].keys()
  for name, value in arrays[0].items():
    np.testing.assert_allclose(arrays[1][name], value, rtol=1e-5, atol=1e-6, err_msg=name)
  shared = multi_task.Params()
  with pytest.raises(ValueError, match=naming.Naming('2 replicas', 'shared.0.w', '--num_replicas')):
    multi_task_runner.Make(shared.Instantiate(), devices, num_replicas=2)
  # Without training each replica has the restored values.
  evaluated = multi_task_runner.MakeEvaluated(shared.Instantiate(), devices, num_replicas=2)
  evaluated.AfterRestore()
  for task, runner in evaluated.task_runners.items():
    metrics = runner.Evaluate([multi_task.Batch(0, {'a': 2, 'b': 1}[task])])
    assert np.isfinite(metrics['loss'][0])


def testEachTrainedTaskNeedsAnInput():
  with pytest.raises(ValueError, match=naming.Naming('task b', 'inputs for a')):
    _Runner(input=multi_task.AsParams({'a': multi_task.Input('a')}))


# A batch of task a takes 112 bytes, its weights 200.
@pytest.mark.parametrize(
  ('memory_bytes', 'names'), [(111, ['SyntheticRegressionInput']), (112, ['a.stack.layers'])]
)
def testABatchOrWeightsLargerThanTheMemoryAreRefused(monkeypatch, memory_bytes, names):
  sizes = {'SC_PHYS_PAGES': 1, 'SC_PAGE_SIZE': memory_bytes}
  monkeypatch.setattr(os, 'sysconf', sizes.__getitem__)
  with pytest.raises(ValueError, match=naming.Naming(*names, 'memory')):
    _Runner(a=multi_task.Task(2))


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
