# SPDX-License-Identifier: Apache-2.0
"""The learner: clipping over stages, skipped steps, schedules, filters, division by the weight."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.learning import learner, lr_schedules, optimizer
from tests import naming
from tests.toys import learner_stages


def _SGD(**settings):
  return learner.Learner.Params().Set(
    learning_rate=1.0, optimizer=optimizer.SGD.Params(), **settings
  )


@pytest.mark.parametrize('cuts', [(4,), (2, 4), (1, 2, 3, 4)])
@pytest.mark.parametrize('clip', [0.0, 0.5, 1e6])
def testClipsByTheNormOfAllStages(cuts, clip):
  stages = learner_stages.Stages(cuts)
  before = learner_stages.Weights(stages)
  _, update = learner_stages.Build(_SGD(clip_gradient_norm_to_value=clip), stages)
  grads = learner_stages.SetGrads(stages)
  values = update()
  norm = learner_stages.Norm(grads)
  scale = min(1.0, clip / norm) if clip else 1.0
  assert values['grad_norm'] == pytest.approx(norm, rel=1e-6)
  assert values['grad_scale'] == pytest.approx(scale, rel=1e-6)
  assert values['is_finite'] == 1.0
  for path, weight in learner_stages.Weights(stages).items():
    np.testing.assert_allclose(weight, before[path] - scale * grads[path], atol=1e-6)


def testWeightsOfAStageMayHaveSeveralDtypes():
  stages, double = learner_stages.Stages((4,)), learner_stages.Stages((4,), tf.float64)
  stages[0].trained['m.a.b'] = double[0].trained['m.a.b']
  stages[0].accumulators[1] = double[0].accumulators[1]
  before = learner_stages.Weights(stages)
  _, update = learner_stages.Build(_SGD(clip_gradient_norm_to_value=0.5), stages)
  grads = learner_stages.SetGrads(stages)
  norm = learner_stages.Norm(grads)
  assert update()['grad_norm'] == pytest.approx(norm, rel=1e-6)
  for path, weight in learner_stages.Weights(stages).items():
    np.testing.assert_allclose(weight, before[path] - 0.5 / norm * grads[path], atol=1e-6)


def testClippingEqualsTensorFlow():
  stages = learner_stages.Stages()
  before = learner_stages.Weights(stages)
  _, update = learner_stages.Build(_SGD(clip_gradient_norm_to_value=0.7), stages)
  grads = learner_stages.SetGrads(stages)
  update()
  clipped, _ = tf.clip_by_global_norm([tf.constant(g, tf.float32) for g in grads.values()], 0.7)
  for (path, weight), grad in zip(learner_stages.Weights(stages).items(), clipped, strict=True):
    np.testing.assert_allclose(weight, before[path] - grad.numpy(), atol=1e-6)


@pytest.mark.parametrize(
  'settings', [{'clip_gradient_norm_to_value': 0.7}, {'clip_gradient_value_to': 0.3}]
)
def testUpdatesCompiledByXlaAreEqual(settings):
  results = []
  for is_compiled in (False, True):
    stages = learner_stages.Stages()
    p = _SGD(**settings).Set(optimizer=optimizer.Adam.Params())
    learners, update = learner_stages.Build(p, stages, is_compiled=is_compiled)
    for step, bad in enumerate((0.0, 0.0, np.nan)):
      learner_stages.SetGrads(stages)
      stages[1].accumulators[0].assign_add([[bad, 0.0], [0.0, 0.0]])
      values = update(step=step, loss_weight=2.0)
      assert values['is_finite'] == np.isfinite(bad)
      variables = {name: v.numpy() for name, v in learners.Variables().items()}
      results.append({**values, **variables, **learner_stages.Weights(stages)})
  for plain, compiled in zip(results[:3], results[3:], strict=True):
    for name, expected in plain.items():
      np.testing.assert_allclose(compiled[name], expected, rtol=1e-6, atol=1e-7, err_msg=name)


def testAllTracesOfAStepHaveTheSameCompiledUpdates():
  """Each shape of a batch is a trace."""
  p = _SGD(clip_gradient_norm_to_value=0.7)
  learners, _ = learner_stages.Build(p, learner_stages.Stages(), is_compiled=True)
  names = []
  for _ in range(2):
    traced = tf.function(lambda: learners.Apply(tf.constant(0), tf.constant(1.0)))
    functions = traced.get_concrete_function().graph.as_graph_def().library.function
    names.append({f.signature.name for f in functions if f.attr['_XlaMustCompile'].b})
  assert len(names[0]) == 4  # The norm and the update on each of two stages.
  assert names[0] == names[1]


def testDividesByTheLossWeight():
  """Accumulators hold sums over tokens; norm, clipping and update use the mean."""
  stages = learner_stages.Stages()
  before = learner_stages.Weights(stages)
  _, update = learner_stages.Build(_SGD(clip_gradient_norm_to_value=0.5), stages)
  grads = learner_stages.SetGrads(stages)
  values = update(loss_weight=8.0)
  norm = learner_stages.Norm(grads) / 8
  assert values['grad_norm'] == pytest.approx(norm, rel=1e-6)
  scale = min(1.0, 0.5 / norm) / 8
  for path, weight in learner_stages.Weights(stages).items():
    np.testing.assert_allclose(weight, before[path] - scale * grads[path], atol=1e-6)


@pytest.mark.parametrize('cuts', [(4,), (1, 2, 3, 4)])
def testClipsEachGradientByItsOwnNorm(cuts):
  stages = learner_stages.Stages(cuts)
  before = learner_stages.Weights(stages)
  _, update = learner_stages.Build(_SGD(clip_gradient_single_norm_to_value=0.5), stages)
  grads = learner_stages.SetGrads(stages)
  grads['m.a.b'] *= 0.01  # Below the limit, so not scaled.
  for s in stages:
    for path, accumulator in zip(s.trained, s.accumulators, strict=True):
      accumulator.assign(8.0 * grads[path])
  values = update(loss_weight=8.0)
  assert values['grad_norm'] == pytest.approx(learner_stages.Norm(grads), rel=1e-6)
  for path, weight in learner_stages.Weights(stages).items():
    scale = min(1.0, 0.5 / np.sqrt(np.sum(grads[path] ** 2)))
    np.testing.assert_allclose(weight, before[path] - scale * grads[path], atol=1e-6)


def testClipsEachEntry():
  stages = learner_stages.Stages()
  before = learner_stages.Weights(stages)
  _, update = learner_stages.Build(_SGD(clip_gradient_value_to=0.3), stages)
  grads = learner_stages.SetGrads(stages, scale=2.0)
  assert update(loss_weight=2.0)['grad_scale'] == 1.0
  for path, weight in learner_stages.Weights(stages).items():
    clipped = np.clip(grads[path] / 2, -0.3, 0.3)
    assert not np.array_equal(clipped, grads[path] / 2)
    np.testing.assert_allclose(weight, before[path] - clipped, atol=1e-6)


def testOnlyOneClippingCanBeSet():
  p = _SGD(clip_gradient_norm_to_value=1.0, clip_gradient_value_to=1.0)
  with pytest.raises(
    ValueError,
    match=naming.Naming('only one', 'clip_gradient_norm_to_value', 'clip_gradient_value_to'),
  ):
    p.Instantiate()


@pytest.mark.parametrize('cuts', [(4,), (1, 3, 4)])
@pytest.mark.parametrize('clip', [0.0, 0.5])
def testRegularisationExcludesPaths(cuts, clip):
  """Equals the loss terms c / 2 |w|^2 + d |w|; biases are excluded."""
  stages = learner_stages.Stages(cuts)
  before = learner_stages.Weights(stages)
  rule = {'l2_regularizer_weight': 0.3, 'l1_regularizer_weight': 0.2}
  rule['lp_regularizer_exclusion'] = r'\.b$'
  _, update = learner_stages.Build(_SGD(clip_gradient_norm_to_value=clip, **rule), stages)
  grads = learner_stages.SetGrads(stages)
  values = update(loss_weight=4.0)
  for path, grad in grads.items():
    slope = 0.3 * before[path] + 0.2 * np.sign(before[path])
    grads[path] = grad / 4 + (slope if path.endswith('.w') else 0.0)
  norm = learner_stages.Norm(grads)
  assert values['grad_norm'] == pytest.approx(norm, rel=1e-6)
  scale = min(1.0, clip / norm) if clip else 1.0
  for path, weight in learner_stages.Weights(stages).items():
    np.testing.assert_allclose(weight, before[path] - scale * grads[path], atol=1e-6)


def testWeightDecayExcludesPaths():
  stages = learner_stages.Stages()
  before = learner_stages.Weights(stages)
  p = _SGD(weight_decay_exclusion=r'\.b$').Set(learning_rate=0.5)
  p.optimizer.weight_decay = 0.1
  _, update = learner_stages.Build(p, stages)
  learner_stages.SetGrads(stages, scale=0.0)
  update()
  for path, weight in learner_stages.Weights(stages).items():
    factor = 1 - 0.5 * 0.1 if path.endswith('.w') else 1.0
    np.testing.assert_allclose(weight, before[path] * factor, rtol=1e-6)


def testZeroGradientIsFinite():
  stages = learner_stages.Stages()
  before = learner_stages.Weights(stages)
  _, update = learner_stages.Build(_SGD(clip_gradient_norm_to_value=1.0), stages)
  values = update()
  assert (values['is_finite'], values['grad_norm'], values['grad_scale']) == (1.0, 0.0, 1.0)
  for path, weight in learner_stages.Weights(stages).items():
    np.testing.assert_array_equal(weight, before[path])


@pytest.mark.parametrize('skip', [True, False])
def testABatchWithoutWeightChangesNothing(skip):
  """In a batch of padding only, 0/0 must not reach the weights."""
  stages = learner_stages.Stages()
  built, update = learner_stages.Build(learner.Learner.Params().Set(skip_nonfinite=skip), stages)
  learner_stages.SetGrads(stages)
  update()
  before = {name: v.numpy() for name, v in built.Variables().items()} | learner_stages.Weights(
    stages
  )
  learner_stages.SetGrads(stages, scale=0.0)
  values = update(step=1, loss_weight=0.0)
  assert (values['is_finite'], values['grad_norm'], values['grad_scale']) == (1.0, 0.0, 0.0)
  after = {name: v.numpy() for name, v in built.Variables().items()} | learner_stages.Weights(
    stages
  )
  for name, value in before.items():
    np.testing.assert_array_equal(after[name], value, err_msg=name)


# Every two of them come together.
@pytest.mark.parametrize(
  'bad, index, clip',
  [
    (np.nan, 0, 0.0),
    (np.nan, -1, 1.0),
    (np.inf, 0, 1.0),
    (np.inf, -1, 0.0),
    (-np.inf, 0, 0.0),
    (-np.inf, -1, 1.0),
  ],
)
def testANonFiniteStepChangesNothing(bad, index, clip):
  stages = learner_stages.Stages()
  p = learner.Learner.Params().Set(clip_gradient_norm_to_value=clip)
  p.optimizer = optimizer.Adam.Params().Set(weight_decay=0.1)
  built, update = learner_stages.Build(p, stages)
  learner_stages.SetGrads(stages)
  update()
  state = {**built.Variables(), **{path: v for s in stages for path, v in s.trained.items()}}
  state |= {f'iterations {k}': n for k, n in enumerate(learner_stages.Iterations(built))}
  before = {name: v.numpy() for name, v in state.items()}

  learner_stages.SetGrads(stages, seed=2)
  accumulator = stages[index].accumulators[index]
  values = accumulator.numpy()
  values.flat[0] = bad
  accumulator.assign(values)
  values = update(step=1)
  assert values['is_finite'] == 0.0
  assert values['grad_scale'] == 0.0
  for name, v in state.items():
    assert v.numpy().tobytes() == before[name].tobytes(), name

  learner_stages.SetGrads(stages, seed=3)
  assert update(step=2)['is_finite'] == 1.0
  for name, v in state.items():
    assert np.all(np.isfinite(v.numpy())), name
    assert not np.array_equal(v.numpy(), before[name]), name


def testANonFiniteLossWeightIsSkipped():
  stages = learner_stages.Stages()
  _, update = learner_stages.Build(_SGD(), stages)
  before = learner_stages.Weights(stages)
  learner_stages.SetGrads(stages)
  assert update(loss_weight=np.nan)['is_finite'] == 0.0
  for path, weight in learner_stages.Weights(stages).items():
    np.testing.assert_array_equal(weight, before[path])


def testWithoutSkippingNanReachesTheWeights():
  stages = learner_stages.Stages()
  _, update = learner_stages.Build(_SGD(skip_nonfinite=False), stages)
  learner_stages.SetGrads(stages)
  stages[0].accumulators[0].assign(tf.fill([3, 2], np.nan))
  assert update()['is_finite'] == 0.0
  assert np.all(np.isnan(learner_stages.Weights(stages)['m.a.w']))
  assert np.all(np.isfinite(learner_stages.Weights(stages)['m.c.w']))


def testLearningRateFollowsTheSchedule():
  schedule = lr_schedules.LinearRampupCosineSchedule.Params().Set(warmup_steps=3, total_steps=8)
  stages = learner_stages.Stages()
  _, update = learner_stages.Build(_SGD(lr_schedule=schedule).Set(learning_rate=0.5), stages)
  expected_factor = schedule.Instantiate()
  weights = learner_stages.Weights(stages)
  for step in range(10):
    grads = learner_stages.SetGrads(stages, seed=step)
    rate = update(step)['learning_rate']
    assert rate == pytest.approx(0.5 * float(expected_factor.Value(step)), rel=1e-6)
    for path, weight in learner_stages.Weights(stages).items():
      np.testing.assert_allclose(weight, weights[path] - rate * grads[path], atol=1e-5)
    weights = learner_stages.Weights(stages)


@pytest.mark.parametrize(
  'filter_pattern, exclusion, trained',
  [
    ('', '', list(learner_stages.SHAPES)),
    (r'\.w$', '', ['m.a.w', 'm.c.w']),
    ('', r'\.b$', ['m.a.w', 'm.c.w']),
    (r'^m\.c', r'\.b$', ['m.c.w']),
    ('a', '', ['m.a.w', 'm.a.b']),
  ],
)
def testFiltersSelectTheTrainedVariables(filter_pattern, exclusion, trained):
  stages = learner_stages.Stages()
  before = learner_stages.Weights(stages)
  p = _SGD(bprop_variable_filter=filter_pattern, bprop_variable_exclusion=exclusion)
  p.optimizer.momentum = 0.9
  built, update = learner_stages.Build(p, stages)
  grads = learner_stages.SetGrads(stages)
  values = update()
  # Variables that are not trained do not count in the norm.
  norm = learner_stages.Norm({path: grads[path] for path in trained})
  assert values['grad_norm'] == pytest.approx(norm, rel=1e-6)
  for path, weight in learner_stages.Weights(stages).items():
    change = grads[path] if path in trained else 0.0
    np.testing.assert_allclose(weight, before[path] - change, atol=1e-6)
  assert set(built.Variables()) == {f'{path}/momentum' for path in trained} | {'learner/iterations'}


def testFiltersMustSelectAVariable():
  for settings in (
    {'bprop_variable_filter': 'decoder'},
    {'bprop_variable_exclusion': '^m'},
  ):
    built = _SGD(**settings).Instantiate()
    with pytest.raises(
      ValueError, match=naming.Naming('no variable', 'bprop_variable_filter')
    ) as e:
      built.Build(learner_stages.TrainedStages(learner_stages.Stages(), built.IsTrained))
    assert next(iter(settings.values())) in str(e.value)


@pytest.mark.parametrize(
  'name',
  [
    'bprop_variable_filter',
    'bprop_variable_exclusion',
    'weight_decay_exclusion',
    'lp_regularizer_exclusion',
  ],
)
def testAPatternMustMatchAVariable(name):
  _SGD(**{name: r'\.b$'}).Instantiate().CheckPatterns(learner_stages.SHAPES)
  bad = _SGD(name='lower', **{name: '^shared'}).Instantiate()
  parts = (f'train.learner: {name}', 'lower', "'^shared'", 'm.a.w', 'm.c.b')
  with pytest.raises(ValueError, match=naming.Naming(*parts)):
    bad.CheckPatterns(learner_stages.SHAPES)


@pytest.mark.parametrize('rate', [0.0, -1.0, float('nan')])
def testLearningRateMustBePositive(rate):
  with pytest.raises(ValueError, match=naming.Naming('Learner', 'learning_rate', 'above 0')):
    learner.Learner.Params().Set(learning_rate=rate).Instantiate()


@pytest.mark.parametrize(
  'name',
  [
    'clip_gradient_norm_to_value',
    'clip_gradient_single_norm_to_value',
    'clip_gradient_value_to',
    'l1_regularizer_weight',
    'l2_regularizer_weight',
  ],
)
def testLimitsMustNotBeNegative(name):
  for value in (-1.0, float('nan')):
    with pytest.raises(
      ValueError, match=naming.Naming('Learner', name, 'at least 0', f'got {value}')
    ):
      learner.Learner.Params().Set(**{name: value}).Instantiate()


@pytest.mark.parametrize('name', ['lr_schedule', 'optimizer'])
def testPartsOfALearnerMustBeParams(name):
  with pytest.raises(ValueError, match=naming.Naming('Learner', name, 'Params')):
    learner.Learner.Params().Set(**{name: None}).Instantiate()


@pytest.mark.parametrize('num', [0, -1, 1.5, True])
def testNumberOfAccumulatedMiniBatchesMustBePositive(num):
  with pytest.raises(
    ValueError, match=naming.Naming('Learner', 'num_accumulated_mini_batches', 'integer')
  ):
    learner.Learner.Params().Set(num_accumulated_mini_batches=num).Instantiate()


@pytest.mark.parametrize(
  'pattern',
  ['bprop_variable_filter', 'weight_decay_exclusion', 'lp_regularizer_exclusion'],
)
def testAnInvalidPatternIsReportedAtConstruction(pattern):
  with pytest.raises(
    ValueError, match=naming.Naming('Learner', pattern, 'regular expression', "'(w'")
  ):
    learner.Learner.Params().Set(**{pattern: '(w'}).Instantiate()


@pytest.mark.parametrize(
  'cls', [optimizer.SGD, optimizer.Adam, optimizer.Adafactor, optimizer.Nadam]
)
def testNamesAndUpdatesDoNotDependOnTheCut(cls):
  results = []
  for cuts in ((4,), (2, 4), (1, 3, 4)):
    stages = learner_stages.Stages(cuts, tf.float64)
    p = learner.Learner.Params().Set(optimizer=cls.Params(), clip_gradient_norm_to_value=1.0)
    built, update = learner_stages.Build(p, stages)
    for step in range(2):
      learner_stages.SetGrads(stages, seed=step)
      update(step)
    state = {name: v.numpy() for name, v in built.Variables().items()} | learner_stages.Weights(
      stages
    )
    results.append(state)
  for other in results[1:]:
    assert other.keys() == results[0].keys()
    for name, value in results[0].items():
      np.testing.assert_allclose(other[name], value, rtol=1e-12, err_msg=name)


def testSlotsAreOnTheDeviceOfTheirStage():
  stages = learner_stages.Stages()
  built, _ = learner_stages.Build(learner.Learner.Params(), stages)
  for name, slot in built.Variables().items():
    path = name.split('/')[0]
    for s in stages:
      if path in s.trained:
        assert slot.device == s.trained[path].device


def testAfterRestoreAllStagesHaveTheNumberOfUpdates():
  """The number of updates is saved once; Adam's bias correction needs it in every stage."""
  straight = learner_stages.Stages()
  _, update = learner_stages.Build(learner.Learner.Params(), straight)
  for step in range(4):
    learner_stages.SetGrads(straight, seed=step)
    update(step)

  saved_stages = learner_stages.Stages()
  saved, update = learner_stages.Build(learner.Learner.Params(), saved_stages)
  for step in range(2):
    learner_stages.SetGrads(saved_stages, seed=step)
    update(step)
  stages = learner_stages.Stages((1, 3, 4))
  built, update = learner_stages.Build(learner.Learner.Params(), stages)
  for name, v in built.Variables().items():
    v.assign(saved.Variables()[name])
  for s in stages:
    for path, v in s.trained.items():
      v.assign(learner_stages.Weights(saved_stages)[path])
  built.AfterRestore()
  for step in range(2, 4):
    learner_stages.SetGrads(stages, seed=step)
    update(step)
  assert list(map(int, learner_stages.Iterations(built))) == [4, 4, 4]
  for path, weight in learner_stages.Weights(stages).items():
    np.testing.assert_allclose(weight, learner_stages.Weights(straight)[path], rtol=1e-6)


def testParamsTextRoundTrip():
  p = learner.Learner.Params().Set(
    optimizer=optimizer.RMSprop.Params().Set(momentum=0.9),
    lr_schedule=lr_schedules.TransformerSchedule.Params().Set(warmup_steps=7),
    bprop_variable_filter=r'layers\[\d+\]',
  )
  fresh = learner.Learner.Params()
  fresh.Set(
    optimizer=optimizer.RMSprop.Params(), lr_schedule=lr_schedules.TransformerSchedule.Params()
  )
  assert fresh.FromText(p.ToText()) == p


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
