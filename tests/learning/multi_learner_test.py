# SPDX-License-Identifier: Apache-2.0
"""Several learners over groups of variables, which update together or not at all."""

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import hyperparams
from lingvo_gpipe.learning import learner, lr_schedules, multi_learner, optimizer
from tests import naming
from tests.toys import learner_stages


def _Two(**settings):
  """Returns a learner for `m.a` and one for `m.c`, with different settings."""
  first = learner.Learner.Params().Set(
    name='lower',
    learning_rate=0.5,
    optimizer=optimizer.SGD.Params().Set(momentum=0.9),
    bprop_variable_filter=r'^m\.a',
    clip_gradient_norm_to_value=0.7,
    **settings,
  )
  second = learner.Learner.Params().Set(
    name='upper',
    learning_rate=0.02,
    optimizer=optimizer.Nadam.Params(),
    lr_schedule=lr_schedules.LinearSchedule.Params().Set(limit=(10, 0.0)),
    bprop_variable_filter=r'^m\.c',
    **settings,
  )
  return [first, second]


def _KerasReference(num_steps):
  """Returns {path: weight} after updates by plain Keras optimizers, one for each group."""
  variables = {
    path: keras.Variable(v, name=path)
    for s in learner_stages.Stages((4,))
    for path, v in s.trained.items()
  }
  lower = keras.optimizers.SGD(0.5, momentum=0.9, global_clipnorm=0.7)
  upper = keras.optimizers.Nadam(0.02)
  for step in range(num_steps):
    grads = learner_stages.SetGrads([], seed=step)
    upper.learning_rate = 0.02 * (1 - step / 10)
    for group_optimizer, prefix in ((lower, 'm.a'), (upper, 'm.c')):
      paths = [path for path in variables if path.startswith(prefix)]
      group_optimizer.apply(
        [tf.constant(grads[path] / 2, tf.float32) for path in paths],
        [variables[path] for path in paths],
      )
  return {path: v.numpy() for path, v in variables.items()}


# The second stage of the second cut has variables of both groups.
@pytest.mark.parametrize('cuts', [(4,), (1, 4), (1, 2, 3, 4)])
def testSameAsKerasOptimizersOfTheGroups(cuts):
  stages = learner_stages.Stages(cuts)
  built, update = learner_stages.Build(_Two(), stages)
  for step in range(3):
    grads = learner_stages.SetGrads(stages, seed=step)
    values = update(step, loss_weight=2.0)
  for path, weight in _KerasReference(3).items():
    np.testing.assert_allclose(
      learner_stages.Weights(stages)[path], weight, rtol=1e-5, atol=1e-6, err_msg=path
    )
  halves = {
    name: {path: g / 2 for path, g in grads.items() if path.startswith(prefix)}
    for name, prefix in (('lower', 'm.a'), ('upper', 'm.c'))
  }
  norms = {name: learner_stages.Norm(half) for name, half in halves.items()}
  assert values == {
    'learning_rate/lower': 0.5,
    'learning_rate/upper': pytest.approx(0.02 * 0.8),
    'grad_norm/lower': pytest.approx(norms['lower']),
    'grad_norm/upper': pytest.approx(norms['upper']),
    'grad_scale/lower': pytest.approx(min(1.0, 0.7 / norms['lower'])),
    'grad_scale/upper': 1.0,
    'grad_norm': pytest.approx(float(np.hypot(*norms.values()))),
    'is_finite': 1.0,
    'is_applied': 1.0,
  }
  assert set(built.Variables()) == {
    'm.a.w/momentum',
    'm.a.b/momentum',
    *(f'm.c.{name}/{slot}' for name in 'wb' for slot in ('momentum', 'velocity')),
    'learner/iterations',
    'learner/upper/u_product',
  }
  assert {int(n) for n in learner_stages.Iterations(built)} == {3}


@pytest.mark.parametrize('bad', ['m.a.b', 'm.c.w'])
def testOneNonFiniteGradientSkipsTheStepOfAllLearners(bad):
  stages = learner_stages.Stages()
  built, update = learner_stages.Build(_Two(), stages)
  learner_stages.SetGrads(stages)
  update()
  state = {**built.Variables(), **{path: v for s in stages for path, v in s.trained.items()}}
  before = {name: v.numpy() for name, v in state.items()}
  learner_stages.SetGrads(stages, seed=2)
  for s in stages:
    for path, accumulator in zip(s.trained, s.accumulators, strict=True):
      if path == bad:
        accumulator.assign(accumulator * np.nan)
  values = update(step=1)
  assert values['is_finite'] == values['grad_scale/lower'] == values['grad_scale/upper'] == 0.0
  for name, v in state.items():
    np.testing.assert_array_equal(v.numpy(), before[name], err_msg=name)


def testARunResumesInAnotherCut():
  """Nadam's product and the number of updates are saved once and restored on every stage."""
  straight = learner_stages.Stages()
  _, update = learner_stages.Build(_Two(), straight)
  saved_stages = learner_stages.Stages()
  saved, update_saved = learner_stages.Build(_Two(), saved_stages)
  for step in range(4):
    learner_stages.SetGrads(straight, seed=step)
    update(step)
    if step < 2:
      learner_stages.SetGrads(saved_stages, seed=step)
      update_saved(step)
  stages = learner_stages.Stages((1, 2, 3, 4))
  built, update = learner_stages.Build(_Two(), stages)
  for name, v in built.Variables().items():
    v.assign(saved.Variables()[name])
  for s in stages:
    for path, v in s.trained.items():
      v.assign(learner_stages.Weights(saved_stages)[path])
  built.AfterRestore()
  assert {int(n) for n in learner_stages.Iterations(built)} == {2}
  for step in range(2, 4):
    learner_stages.SetGrads(stages, seed=step)
    update(step)
  for path, weight in learner_stages.Weights(stages).items():
    np.testing.assert_allclose(weight, learner_stages.Weights(straight)[path], rtol=1e-6)


def testLearningRatesBelongToTheNextUpdate():
  stages = learner_stages.Stages()
  built, update = learner_stages.Build(_Two(), stages)
  for step in range(3):
    rates = built.LearningRates(step)
    assert list(rates) == ['learning_rate/lower', 'learning_rate/upper']
    learner_stages.SetGrads(stages, seed=step)
    values = update(step)
    assert rates == {name: float(values[name]) for name in rates}


def testAVariableOfTwoLearnersIsReportedWithBoth():
  both = _Two()
  both[1].bprop_variable_filter = r'\.w$'
  with pytest.raises(ValueError, match=naming.Naming('m.a.w', 'lower and upper')):
    multi_learner.MultiLearner(both).IsTrained('m.a.w')


def testALearnerWithoutVariablesIsReported():
  both = _Two()
  both[1].bprop_variable_filter = 'decoder'
  with pytest.raises(
    ValueError,
    match=naming.Naming('no variable', 'learner upper', 'bprop_variable_filter', "'decoder'"),
  ):
    learner_stages.Build(both, learner_stages.Stages())


def testVariablesWithoutALearnerAreFrozen():
  both = _Two()
  both[1].bprop_variable_filter = r'^m\.c\.w'
  built = multi_learner.MultiLearner(both)
  assert [built.IsTrained(path) for path in learner_stages.SHAPES] == [True, True, True, False]


def testLearnersMayShareAPatternThatMatchesOnlyVariablesOfOne():
  both = _Two(weight_decay_exclusion=r'm\.a\.b$')
  multi_learner.MultiLearner(both).CheckPatterns(learner_stages.SHAPES)
  both[1].weight_decay_exclusion = 'beta'
  with pytest.raises(ValueError, match=naming.Naming('weight_decay_exclusion', 'upper', "'beta'")):
    multi_learner.MultiLearner(both).CheckPatterns(learner_stages.SHAPES)


@pytest.mark.parametrize('names', [('', 'b'), ('a', 'a')])
def testNamesOfLearnersMustBeUnique(names):
  both = _Two()
  for p, name in zip(both, names, strict=True):
    p.name = name
  with pytest.raises(ValueError, match=naming.Naming('train.learner', 'names')) as e:
    multi_learner.MultiLearner(both)
  assert all(repr(name) in str(e.value) for name in names)
  for name in ('B', 'b/c', '1'):
    with pytest.raises(ValueError, match=naming.Naming('name', repr(name))):
      both[0].Copy().Set(name=name).Instantiate()


@pytest.mark.parametrize(
  'key, value', [('skip_nonfinite', False), ('num_accumulated_mini_batches', 2)]
)
def testParamsOfAStepMustBeEqualForAllLearners(key, value):
  both = _Two()
  both[1].Set(**{key: value})
  with pytest.raises(ValueError, match=naming.Naming(key, 'train.learner', f'{value!r}')):
    multi_learner.MultiLearner(both)
  assert multi_learner.MultiLearner(_Two(**{key: value})).num_accumulated_mini_batches in (1, 2)


def testOtherValuesInTheListAreRejected():
  with pytest.raises(ValueError, match=naming.Naming('train.learner', 'empty list')):
    multi_learner.MultiLearner([])
  with pytest.raises(TypeError, match=naming.Naming('train.learner', 'Params', 'got str')):
    multi_learner.MultiLearner(['adam'])


def testAListOfOneLearnerEqualsTheLearner():
  for p in (_Two()[0], _Two()[:1]):
    stages = learner_stages.Stages()
    built, update = learner_stages.Build(p, stages)
    learner_stages.SetGrads(stages)
    assert {'learning_rate', 'grad_norm', 'grad_scale'} <= set(update())
    assert 'learner/iterations' in built.Variables()


def testSlotsPerWeightIsTheMaximum():
  assert multi_learner.MultiLearner(_Two()).SlotsPerWeight() == 2


def testAListOfLearnersRoundTripsThroughText():
  p = hyperparams.Params()
  p.Define('learner', _Two(), 'A list.')
  p.FromText('learner[1].learning_rate:0.25;learner[0].optimizer.momentum:0.5')
  assert p.learner[1].learning_rate == 0.25
  fresh = hyperparams.Params()
  fresh.Define('learner', _Two(), 'A list.')
  assert fresh.FromText(p.ToText()) == p
  p.Freeze()
  assert len(multi_learner.AsList(p.learner)) == 2


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
