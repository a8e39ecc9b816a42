# SPDX-License-Identifier: Apache-2.0
"""Same result for random pipelines: everything that the engine offers, together.

    RANDOM_STACKS=1000:1100 make test ARGS=tests/pipeline/random_stacks_test.py

also tries the pipelines of these seeds, every tenth of them compiled by XLA.
"""

import functools
import os
import random
import sys

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gpipe.core import fprop_context
from lingvo_gpipe.pipeline.schedule import rematerialisation, schedules
from lingvo_gpipe.pipeline.stages import micro_batch, stage
from tests.toys import random_stacks, stacks

pytestmark = pytest.mark.optimized_graphs


def _Stack(case):
  return stacks.MakeStack(case.sub, **case.options)


def CheckTraining(case, policy=None):
  """Losses, metrics, auxiliary losses and every gradient."""
  options = case.options
  actual = stacks.Train(
    _Stack(case),
    case.inputs,
    case.side,
    case.Loss,
    step=case.step,
    is_trained=case.is_trained,
    policy=policy,
  )
  expected = stacks.Reference(
    case.sub,
    options['num_micro_batches'],
    case.inputs,
    case.side,
    case.Loss,
    step=case.step,
    batch_dim=options['batch_dim'],
    ties=options['ties'],
    is_trained=case.is_trained,
  )
  stacks.CheckEqual(actual, expected, bound=_Bound(case), may_be_zero=True)


def _Bound(case):
  return 1e-6 if 'float32' in case.features else 1e-10


def _PlainOutputs(case, layer, theta, inputs, **scope):
  """The whole batch's outputs of the plain layers, micro-batch by micro-batch."""
  m, batch_dim = case.options['num_micro_batches'], case.options['batch_dim']
  pieces = []
  for i, args in enumerate(micro_batch.Split(inputs, m, batch_dim)):
    with fprop_context.Scope(micro_batch=i, **scope):
      pieces.append(layer.FProp(theta, *args))
  return micro_batch.Merge(pieces, batch_dim)


def _CheckClose(actual, expected, bound):
  tf.nest.assert_same_structure(actual, expected)
  for a, b in zip(tf.nest.flatten(actual), tf.nest.flatten(expected), strict=True):
    if b is not None:
      assert a.dtype == b.dtype
      np.testing.assert_allclose(a, b, rtol=10 * bound, atol=bound)


def CheckTape(case):
  """FProp under a user's tape, whose gradients come from the loss of the whole batch."""
  stack = _Stack(case)
  stack.Place(stacks.Devices(), *stacks.Specs(case.inputs))
  layer, theta_fn = stacks.PlainLayers(case.sub, case.options['ties'])
  results = []
  for variables, run in (
    (stack.VariablesByPath(), lambda: stack(*case.inputs)),
    (
      layer.VariablesByPath(),
      lambda: _PlainOutputs(case, layer, theta_fn(), case.inputs, step=case.step),
    ),
  ):
    floats = [x for x in tf.nest.flatten(case.inputs) if x is not None and x.dtype.is_floating]
    trained = {p: variables[p] for p in stacks.TrainedVariables(layer, case.options['ties'])}
    with tf.GradientTape() as tape, fprop_context.Scope(step=case.step):
      tape.watch(floats)
      outputs = run()
      loss = case.Loss([{}], outputs, case.side)['loss'][0]
    grads = tape.gradient(loss, [trained, floats], unconnected_gradients='zero')
    results.append((outputs, tf.nest.map_structure(tf.convert_to_tensor, grads)))
  _CheckClose(results[0], results[1], _Bound(case))


def CheckEvaluation(case):
  """Predict and Evaluate."""
  stack = _Stack(case)
  stack.Place(stacks.Devices(), *stacks.Specs(case.inputs), loss_fn=case.Loss)
  layer, theta_fn = stacks.PlainLayers(case.sub, case.options['ties'])
  theta, bound = theta_fn(), _Bound(case)
  outputs = _PlainOutputs(case, layer, theta, case.inputs, do_eval=True)
  _CheckClose(stack.Predict(*case.inputs), outputs, bound)
  sums = stacks.Evaluate(stack, case.inputs, case.side)
  pieces = zip(stack.SplitBatch(outputs), stack.SplitBatch(case.side), strict=True)
  # Auxiliary losses are reported, too; aux_loss_test looks at their values.
  expected = [case.Loss(theta.layers, y, side) for y, side in pieces]
  for name in ('loss', 'greatest'):
    total = sum(float(metrics[name][0] * metrics[name][1]) for metrics in expected)
    np.testing.assert_allclose(sums[name][0], total, rtol=10 * bound)


# Few, and small, but with all features together; others may find what these do not.
_SEEDS = (16, 136, 175, 204, 307, 396)
_MIXED_SEEDS = (8,)
_XLA_SEEDS = (39,)
_TAPE_SEEDS = (16,)  # Without auxiliary losses, which a user's tape cannot see.
_EVALUATION_SEEDS = (396,)
_MORE_SEEDS = range(*map(int, os.environ.get('RANDOM_STACKS', '0:0').split(':')))
_FEATURES = {
  *random_stacks.SCHEDULES,
  *random_stacks.POLICIES,
  *('own schedule', 'several stages a device', 'K=1', 'K=2', 'K=3', 'K=4'),
  *('batch smaller than M', 'micro-batches of two sizes', 'micro-batch of weight 0', 'batch_dim 1'),
  *('nest', 'integers only', 'float32', 'unused input', 'no arguments', 'no weights'),
  *('skip', 'skip used twice', 'skip to several stages', 'skip within a stage', 'skip over stages'),
  *('ties', 'tied to a later weight', 'auxiliary losses', 'dropout', 'sparse gradients'),
  *('not trainable', 'gradients stop', 'frozen: first', 'frozen: last', 'frozen: layer'),
  *('frozen: some', 'frozen: all but one'),
}


@functools.cache
def _Case(seed):
  return random_stacks.Make(seed)


def _Check(check, case):
  try:
    check(case)
  except Exception as e:
    e.add_note(case.Text())
    raise


@pytest.mark.parametrize('seed', [*_SEEDS, *_MORE_SEEDS])
def testTraining(seed):
  _Check(CheckTraining, _Case(seed))


def _PolicyOfEachStage(case):
  """Returns for each stage a random policy, or a choice of layers to recompute."""
  choose, policies, start = random.Random(case.seed), [], 0
  for end in case.options['splits']:
    layers = tuple(choose.choice((None, frozenset())) for _ in range(start, end))
    policies.append(choose.choice((*[rematerialisation.ByLayer(layers)] * 4, 'none', 'stage')))
    start = end
  return policies


@pytest.mark.parametrize('seed', [*_MIXED_SEEDS, *_MORE_SEEDS])
def testTrainingWithAPolicyForEachLayer(seed):
  _Check(functools.partial(CheckTraining, policy=_PolicyOfEachStage(_Case(seed))), _Case(seed))


@pytest.mark.parametrize('seed', [*_XLA_SEEDS, *_MORE_SEEDS[::10]])
def testTrainingCompiledByXla(seed):
  _Check(CheckTraining, random_stacks.Make(seed, xla=True))


@pytest.mark.parametrize('seed', [*_TAPE_SEEDS, *_MORE_SEEDS])
def testGradientsUnderAUsersTapeAreEqual(seed):
  if seed in _MORE_SEEDS and 'auxiliary losses' in _Case(seed).features:
    pytest.skip('it has auxiliary losses')
  _Check(CheckTape, _Case(seed))


@pytest.mark.parametrize('seed', [*_EVALUATION_SEEDS, *_MORE_SEEDS])
def testPredictAndEvaluate(seed):
  _Check(CheckEvaluation, _Case(seed))


def testTheSeedsCoverEveryFeatureAndPolicy():
  of_training = set().union(*(_Case(seed).features for seed in (*_SEEDS, *_XLA_SEEDS)))
  # The mixed seed has other policies in place of its own.
  assert of_training.union(*(_Case(seed).features for seed in _MIXED_SEEDS)) == _FEATURES
  assert set(random_stacks.POLICIES) <= of_training


def testAFailureShowsThePipeline(monkeypatch):
  case = _Case(16)
  monkeypatch.setattr(stage.Stage, 'seed_hashes', property(lambda s: [1] * len(s.layers)))
  with pytest.raises(AssertionError) as failure:
    _Check(CheckTraining, case)
  (text,) = failure.value.__notes__
  assert text.startswith('seed 16: ') and 'layers[0] RandomLayer' in text
  assert 'zb_h1' in text and 'num_micro_batches' in text


@pytest.mark.parametrize('seed', range(20))
def testRandomSchedulesAreValid(seed):
  choose = random.Random(seed)
  num_devices = choose.randint(1, 3)
  num_stages = num_devices * choose.randint(1, 2)
  num_micro_batches = choose.randint(1, 5)
  schedule = random_stacks.RandomSchedule(choose, num_stages, num_micro_batches, num_devices)
  assert schedules.Get(schedule, num_stages, num_micro_batches, num_devices) is schedule
  again = schedules.Schedule.FromText(schedule.ToText(), name='own')
  assert again.actions == schedule.actions


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
