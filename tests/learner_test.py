# SPDX-License-Identifier: Apache-2.0
"""The learner: clipping over stages, skipped steps, schedules, filters, division by the weight."""

import dataclasses
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe import learner, lr_schedules, optimizer

_SHAPES = {'m.a.w': [3, 2], 'm.a.b': [2], 'm.c.w': [2, 2], 'm.c.b': [2]}


@dataclasses.dataclass
class _Stage:
  """What the learner sees of a stage."""

  device: str
  trained: dict
  accumulators: list


def _Stages(cuts=(2, 4), dtype=tf.float32):
  """The variables of `_SHAPES` in stages, each on a device of its own."""
  rng = np.random.default_rng(0)
  values = {path: rng.normal(size=shape) for path, shape in _SHAPES.items()}
  devices = [d.name for d in tf.config.list_logical_devices('CPU')]
  stages = []
  for k, (start, end) in enumerate(zip([0, *cuts[:-1]], cuts, strict=True)):
    with tf.device(devices[k]):
      paths = list(_SHAPES)[start:end]
      variables = {path: tf.Variable(values[path], dtype=dtype) for path in paths}
      accumulators = [tf.Variable(tf.zeros_like(v), trainable=False) for v in variables.values()]
    stages.append(_Stage(devices[k], variables, accumulators))
  return stages


def _SGD(**settings):
  return learner.Learner.Params().Set(
    learning_rate=1.0, optimizer=optimizer.SGD.Params(), **settings
  )


def _Chosen(stages, is_trained):
  """The stages as the engine makes them: with what is trained alone."""
  chosen = []
  for s in stages:
    pairs = [pair for pair in zip(s.trained, s.accumulators, strict=True) if is_trained(pair[0])]
    trained = {path: s.trained[path] for path, _ in pairs}
    chosen.append(_Stage(s.device, trained, [accumulator for _, accumulator in pairs]))
  return chosen


def _Build(p, stages):
  """The learner, and a function of (step, loss weight) that does one update."""
  built = p.Instantiate()
  built.Build(_Chosen(stages, built.IsTrained))

  @tf.function(autograph=False)
  def Apply(step, loss_weight):
    return built.Apply(step, loss_weight)

  def Update(step=0, loss_weight=1.0):
    values = Apply(tf.constant(step, tf.int64), tf.constant(loss_weight))
    return {name: float(value) for name, value in values.items()}

  return built, Update


def _Weights(stages):
  return {path: v.numpy() for s in stages for path, v in s.trained.items()}


def _SetGrads(stages, seed=1, scale=1.0):
  """Puts gradients into the accumulators; returns {path: gradient}, the same however it is cut."""
  rng = np.random.default_rng(seed)
  grads = {path: scale * rng.normal(size=shape) for path, shape in _SHAPES.items()}
  for s in stages:
    for path, accumulator in zip(s.trained, s.accumulators, strict=True):
      accumulator.assign(tf.cast(grads[path], accumulator.dtype))
  return grads


def _Norm(grads):
  return float(np.sqrt(sum(np.sum(g**2) for g in grads.values())))


@pytest.mark.parametrize('cuts', [(4,), (2, 4), (1, 2, 3, 4)])
@pytest.mark.parametrize('clip', [0.0, 0.5, 1e6])
def testClipsByTheNormOfAllStages(cuts, clip):
  stages = _Stages(cuts)
  before = _Weights(stages)
  _, update = _Build(_SGD(clip_gradient_norm_to_value=clip), stages)
  grads = _SetGrads(stages)
  values = update()
  norm = _Norm(grads)
  scale = min(1.0, clip / norm) if clip else 1.0
  assert values['grad_norm'] == pytest.approx(norm, rel=1e-6)
  assert values['grad_scale'] == pytest.approx(scale, rel=1e-6)
  assert values['is_finite'] == 1.0
  for path, weight in _Weights(stages).items():
    np.testing.assert_allclose(weight, before[path] - scale * grads[path], atol=1e-6)


def testSameAsTensorFlowsClipping():
  stages = _Stages()
  before = _Weights(stages)
  _, update = _Build(_SGD(clip_gradient_norm_to_value=0.7), stages)
  grads = _SetGrads(stages)
  update()
  clipped, _ = tf.clip_by_global_norm([tf.constant(g, tf.float32) for g in grads.values()], 0.7)
  for (path, weight), grad in zip(_Weights(stages).items(), clipped, strict=True):
    np.testing.assert_allclose(weight, before[path] - grad.numpy(), atol=1e-6)


def testDividesByTheLossWeight():
  """Accumulators hold the sum over tokens: norm, clipping and update are those of the mean."""
  stages = _Stages()
  before = _Weights(stages)
  _, update = _Build(_SGD(clip_gradient_norm_to_value=0.5), stages)
  grads = _SetGrads(stages)
  values = update(loss_weight=8.0)
  norm = _Norm(grads) / 8
  assert values['grad_norm'] == pytest.approx(norm, rel=1e-6)
  scale = min(1.0, 0.5 / norm) / 8
  for path, weight in _Weights(stages).items():
    np.testing.assert_allclose(weight, before[path] - scale * grads[path], atol=1e-6)


def testZeroGradientIsFinite():
  stages = _Stages()
  before = _Weights(stages)
  _, update = _Build(_SGD(clip_gradient_norm_to_value=1.0), stages)
  values = update()
  assert (values['is_finite'], values['grad_norm'], values['grad_scale']) == (1.0, 0.0, 1.0)
  for path, weight in _Weights(stages).items():
    np.testing.assert_array_equal(weight, before[path])


@pytest.mark.parametrize('skip', [True, False])
def testABatchWithoutWeightChangesNothing(skip):
  """All padding: there is nothing to learn, and 0/0 must not reach the weights."""
  stages = _Stages()
  built, update = _Build(learner.Learner.Params().Set(skip_nonfinite=skip), stages)
  _SetGrads(stages)
  update()
  before = {name: v.numpy() for name, v in built.Variables().items()} | _Weights(stages)
  _SetGrads(stages, scale=0.0)
  values = update(step=1, loss_weight=0.0)
  assert (values['is_finite'], values['grad_norm'], values['grad_scale']) == (1.0, 0.0, 0.0)
  after = {name: v.numpy() for name, v in built.Variables().items()} | _Weights(stages)
  for name, value in before.items():
    np.testing.assert_array_equal(after[name], value, err_msg=name)


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('where', [0, -1])
@pytest.mark.parametrize('clip', [0.0, 1.0])
def testANonFiniteStepLeavesEverythingAsItWas(bad, where, clip):
  stages = _Stages()
  p = learner.Learner.Params().Set(clip_gradient_norm_to_value=clip)
  p.optimizer = optimizer.Adam.Params().Set(weight_decay=0.1)
  built, update = _Build(p, stages)
  _SetGrads(stages)
  update()
  state = {**built.Variables(), **{path: v for s in stages for path, v in s.trained.items()}}
  state |= {f'iterations {k}': s[2].iterations for k, s in enumerate(built._stages)}
  before = {name: v.numpy() for name, v in state.items()}

  _SetGrads(stages, seed=2)
  accumulator = stages[where].accumulators[where]
  values = accumulator.numpy()
  values.flat[0] = bad
  accumulator.assign(values)
  values = update(step=1)
  assert values['is_finite'] == 0.0
  assert values['grad_scale'] == 0.0
  for name, v in state.items():
    assert v.numpy().tobytes() == before[name].tobytes(), name

  _SetGrads(stages, seed=3)
  assert update(step=2)['is_finite'] == 1.0
  for name, v in state.items():
    assert np.all(np.isfinite(v.numpy())), name
    assert not np.array_equal(v.numpy(), before[name]), name


def testANonFiniteLossWeightIsSkippedToo():
  stages = _Stages()
  _, update = _Build(_SGD(), stages)
  before = _Weights(stages)
  _SetGrads(stages)
  assert update(loss_weight=np.nan)['is_finite'] == 0.0
  for path, weight in _Weights(stages).items():
    np.testing.assert_array_equal(weight, before[path])


def testWithoutSkippingNanGoesThrough():
  stages = _Stages()
  _, update = _Build(_SGD(skip_nonfinite=False), stages)
  _SetGrads(stages)
  stages[0].accumulators[0].assign(tf.fill([3, 2], np.nan))
  assert update()['is_finite'] == 0.0
  assert np.all(np.isnan(_Weights(stages)['m.a.w']))
  assert np.all(np.isfinite(_Weights(stages)['m.c.w']))


def testLearningRateFollowsTheSchedule():
  schedule = lr_schedules.LinearRampupCosineSchedule.Params().Set(warmup_steps=3, total_steps=8)
  stages = _Stages()
  _, update = _Build(_SGD(lr_schedule=schedule).Set(learning_rate=0.5), stages)
  expected_factor = schedule.Instantiate()
  weights = _Weights(stages)
  for step in range(10):
    grads = _SetGrads(stages, seed=step)
    rate = update(step)['learning_rate']
    assert rate == pytest.approx(0.5 * float(expected_factor.Value(step)), rel=1e-6)
    for path, weight in _Weights(stages).items():
      np.testing.assert_allclose(weight, weights[path] - rate * grads[path], atol=1e-5)
    weights = _Weights(stages)


@pytest.mark.parametrize(
  'wanted, unwanted, trained',
  [
    ('', '', list(_SHAPES)),
    (r'\.w$', '', ['m.a.w', 'm.c.w']),
    ('', r'\.b$', ['m.a.w', 'm.c.w']),
    (r'^m\.c', r'\.b$', ['m.c.w']),
    ('a', '', ['m.a.w', 'm.a.b']),
  ],
)
def testFilters(wanted, unwanted, trained):
  stages = _Stages()
  before = _Weights(stages)
  p = _SGD(bprop_variable_filter=wanted, bprop_variable_exclusion=unwanted)
  p.optimizer.momentum = 0.9
  built, update = _Build(p, stages)
  grads = _SetGrads(stages)
  values = update()
  # What is not trained does not count in the norm either.
  norm = _Norm({path: grads[path] for path in trained})
  assert values['grad_norm'] == pytest.approx(norm, rel=1e-6)
  for path, weight in _Weights(stages).items():
    change = grads[path] if path in trained else 0.0
    np.testing.assert_allclose(weight, before[path] - change, atol=1e-6)
  assert set(built.Variables()) == {f'{path}/momentum' for path in trained} | {'learner/iterations'}


def testNothingLeftToTrain():
  for settings in (
    {'bprop_variable_filter': 'decoder'},
    {'bprop_variable_exclusion': '^m'},
  ):
    built = _SGD(**settings).Instantiate()
    with pytest.raises(ValueError, match='no variable is left to train') as e:
      built.Build(_Chosen(_Stages(), built.IsTrained))
    assert next(iter(settings.values())) in str(e.value)


@pytest.mark.parametrize('rate', [0.0, -1.0, float('nan')])
def testLearningRateMustBePositive(rate):
  with pytest.raises(ValueError, match='learning_rate must be positive'):
    learner.Learner.Params().Set(learning_rate=rate).Instantiate()


def testClippingMustNotBeNegative():
  with pytest.raises(ValueError, match='clip_gradient_norm_to_value must not be negative'):
    learner.Learner.Params().Set(clip_gradient_norm_to_value=-1.0).Instantiate()


@pytest.mark.parametrize('num', [0, -1, 1.5, True])
def testCountOfAccumulatedMiniBatches(num):
  with pytest.raises(ValueError, match='num_accumulated_mini_batches must be a positive integer'):
    learner.Learner.Params().Set(num_accumulated_mini_batches=num).Instantiate()


@pytest.mark.parametrize('pattern', ['bprop_variable_filter', 'bprop_variable_exclusion'])
def testABrokenPatternIsToldAtOnce(pattern):
  with pytest.raises(ValueError, match=f'learner.{pattern}.*regular expression'):
    learner.Learner.Params().Set(**{pattern: '(w'}).Instantiate()


@pytest.mark.parametrize(
  'cls', [optimizer.SGD, optimizer.Adam, optimizer.Adafactor, optimizer.RMSprop]
)
def testNamesAndUpdatesDoNotDependOnTheCut(cls):
  results = []
  for cuts in ((4,), (2, 4), (1, 3, 4)):
    stages = _Stages(cuts, tf.float64)
    p = learner.Learner.Params().Set(optimizer=cls.Params(), clip_gradient_norm_to_value=1.0)
    built, update = _Build(p, stages)
    for step in range(2):
      _SetGrads(stages, seed=step)
      update(step)
    state = {name: v.numpy() for name, v in built.Variables().items()} | _Weights(stages)
    results.append(state)
  for other in results[1:]:
    assert other.keys() == results[0].keys()
    for name, value in results[0].items():
      np.testing.assert_allclose(other[name], value, rtol=1e-12, err_msg=name)


def testSlotsLieWithTheirStage():
  stages = _Stages()
  built, _ = _Build(learner.Learner.Params(), stages)
  for name, slot in built.Variables().items():
    path = name.split('/')[0]
    for s in stages:
      if path in s.trained:
        assert slot.device == s.trained[path].device


def testAfterRestoreAllStagesKnowTheCount():
  """The count of updates is saved once; Adam's bias correction needs it in every stage."""
  straight = _Stages()
  _, update = _Build(learner.Learner.Params(), straight)
  for step in range(4):
    _SetGrads(straight, seed=step)
    update(step)

  saved_stages = _Stages()
  saved, update = _Build(learner.Learner.Params(), saved_stages)
  for step in range(2):
    _SetGrads(saved_stages, seed=step)
    update(step)
  stages = _Stages((1, 3, 4))
  built, update = _Build(learner.Learner.Params(), stages)
  for name, v in built.Variables().items():
    v.assign(saved.Variables()[name])
  for s in stages:
    for path, v in s.trained.items():
      v.assign(_Weights(saved_stages)[path])
  built.AfterRestore()
  for step in range(2, 4):
    _SetGrads(stages, seed=step)
    update(step)
  assert [int(s[2].iterations) for s in built._stages] == [4, 4, 4]
  for path, weight in _Weights(stages).items():
    np.testing.assert_allclose(weight, _Weights(straight)[path], rtol=1e-6)


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
