# SPDX-License-Identifier: Apache-2.0
"""Early stopping: the best step, gains, the end of training, and restarts."""

import json
import math
import random
import sys

import pytest

from lingvo_gpipe.learning import early_stopping
from tests import naming


def _Make(**settings):
  settings = {'metric': 'loss', **settings}
  return early_stopping.EarlyStopping.Params().Set(**settings).Instantiate()


def _Follow(values, start=0, interval=10, **settings):
  """Returns [(step, is best, stops)] for evaluations every `interval` steps."""
  early_stop = _Make(**settings)
  results = []
  for i, value in enumerate(values):
    step = start + interval * (i + 1)
    best = early_stop.Update(step, 'eval_dev', {'loss': value})
    results.append((step, best, early_stop.StopReason(step) is not None))
  return results


def _Stops(results):
  return next((step for step, _, stops in results if stops), None)


def testSmallerOrLargerValuesAreBetter():
  values = [3.0, 2.0, 2.5, 1.0]
  assert [best for _, best, _ in _Follow(values)] == [True, True, False, True]
  assert [best for _, best, _ in _Follow(values, minimize=False)] == [True, False, False, False]


def testWithoutALimitTrainingNeverStops():
  assert _Stops(_Follow([1.0, *range(2, 100)])) is None


def testStopsAfterEvaluationsOrStepsWithoutAGain():
  values = [3.0, 2.0, 2.0, 2.5, 2.1, 2.2]
  assert _Stops(_Follow(values, max_evaluations=2)) == 40
  assert _Stops(_Follow(values, max_evaluations=4)) == 60
  # The last gain is at step 20. As in Lingvo, the distance must exceed the window.
  assert _Stops(_Follow(values, window=19)) == 40
  assert _Stops(_Follow(values, window=20)) == 50
  assert _Stops(_Follow(values, window=20, min_steps=55)) == 60
  assert _Stops(_Follow(values, max_evaluations=5)) is None


def testSmallImprovementsAreBestButNotGains():
  values = [1.0, 0.99, 0.98, 0.97, 0.96]
  results = _Follow(values, tolerance=0.025, max_evaluations=2)
  assert all(best for _, best, _ in results)
  # Small improvements add up: 0.97 improves on 1.0 by 0.03.
  assert _Stops(results) == 30
  assert _Stops(_Follow(values, tolerance=0.025, max_evaluations=3)) is None


@pytest.mark.parametrize('bad', [math.nan, math.inf, -math.inf])
def testNonFiniteValuesAreNeverBestNorGains(bad):
  results = _Follow([bad, 2.0, bad, bad], max_evaluations=2)
  assert [best for _, best, _ in results] == [False, True, False, False]
  assert _Stops(results) == 40
  assert _Stops(_Follow([bad] * 3, window=15)) == 30


def testAnExtraEvaluationMayBeBestButDoesNotChangeTheEnd():
  def Follow(extra):
    early_stop = _Make(max_evaluations=2)
    for step, value in ((10, 3.0), (20, 2.0), (30, 2.5), (40, 2.2)):
      assert not early_stop.StopReason(step)
      early_stop.Update(step, 'eval_dev', {'loss': value})
      for i, other in enumerate(extra):
        early_stop.Update(step + i + 1, 'eval_dev', {'loss': other}, is_extra=True)
    return early_stop.StopReason(40), early_stop.best_step

  assert Follow([])[0] and Follow([])[1] == 20
  assert Follow([9.0, 9.0, 9.0]) == Follow([])
  assert Follow([1.0]) == (Follow([])[0], 11)


def testOtherJobsAreNotFollowed():
  early_stop = _Make()
  assert not early_stop.Update(10, 'eval_test', {'loss': 1.0})
  assert early_stop.best_step is None
  assert not _Make(metric='').Update(10, 'eval_dev', {'loss': 1.0})


def testAMissingMetricIsReported():
  with pytest.raises(
    ValueError,
    match=naming.Naming('train.early_stop.metric', "'loss'", 'eval_dev', 'accuracy', 'log_pplx'),
  ):
    _Make().Update(1, 'eval_dev', {'log_pplx': 1.0, 'accuracy': 0.5})


@pytest.mark.parametrize('name', ['window', 'max_evaluations', 'tolerance', 'min_steps'])
def testNumbersOutOfRange(name):
  with pytest.raises(ValueError, match=naming.Naming('EarlyStopping', name, 'at least 0', -1)):
    _Make(**{name: -1})


def testALimitNeedsAMetric():
  with pytest.raises(
    ValueError, match=naming.Naming('train.early_stop', 'window', 'max_evaluations', 'metric')
  ):
    _Make(metric='', window=100)


@pytest.mark.parametrize('seed', range(5))
def testARestartAnywhereChangesNothing(seed):
  """The state survives JSON, as in a checkpoint, and holds the whole history."""
  rng = random.Random(seed)
  settings = {'window': 60, 'max_evaluations': 4, 'tolerance': 0.05, 'minimize': seed % 2 == 0}
  values = [rng.choice([math.nan, rng.random(), rng.random() + i / 9]) for i in range(30)]
  straight, restarted = _Make(**settings), _Make(**settings)
  for i, value in enumerate(values):
    step = 10 * (i + 1)
    results = [
      (each.Update(step, 'eval_dev', {'loss': value}), each.StopReason(step), each.best_step)
      for each in (straight, restarted)
    ]
    assert results[0] == results[1]
    if rng.random() < 0.5:
      state = json.loads(json.dumps(restarted.State()))
      restarted = _Make(**settings)
      restarted.Restore(state)
  assert straight.State() == restarted.State()


def testAChangedMetricStartsOver(caplog):
  before = _Make()
  before.Update(10, 'eval_dev', {'loss': 1.0})
  after = _Make(metric='accuracy', minimize=False)
  after.Restore(before.State())
  assert after.best_step is None
  (message,) = caplog.messages
  assert naming.Names(message, 'metric', 'minimize', 'train.early_stop', 'best', 10)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
