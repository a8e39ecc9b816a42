# SPDX-License-Identifier: Apache-2.0
"""Early stopping: what is best, what is a gain, when it stops; a restart changes nothing."""

import json
import math
import random
import sys

import pytest

from lingvo_gpipe.learning import early_stopping


def _Make(**settings):
  settings = {'metric': 'loss', **settings}
  return early_stopping.EarlyStopping.Params().Set(**settings).Instantiate()


def _Follow(values, start=0, interval=10, **settings):
  """[(step, is best, is to stop)] of evaluations each `interval` steps."""
  made = _Make(**settings)
  found = []
  for i, value in enumerate(values):
    step = start + interval * (i + 1)
    best = made.Update(step, 'eval_dev', {'loss': value})
    found.append((step, best, bool(made.StopReason(step))))
  return found


def _Stops(found):
  return next((step for step, _, stops in found if stops), None)


def testLessOrMoreIsBetter():
  values = [3.0, 2.0, 2.5, 1.0]
  assert [best for _, best, _ in _Follow(values)] == [True, True, False, True]
  assert [best for _, best, _ in _Follow(values, minimize=False)] == [True, False, False, False]


def testWithoutPatienceTheBestIsFollowedAndNothingStops():
  assert _Stops(_Follow([1.0, *range(2, 100)])) is None


def testStopsAfterEvaluationsOrStepsWithoutAGain():
  values = [3.0, 2.0, 2.0, 2.5, 2.1, 2.2]
  assert _Stops(_Follow(values, max_evaluations=2)) == 40
  assert _Stops(_Follow(values, max_evaluations=4)) == 60
  # Last gain at 20: as in Lingvo, more than the window.
  assert _Stops(_Follow(values, window=19)) == 40
  assert _Stops(_Follow(values, window=20)) == 50
  assert _Stops(_Follow(values, window=20, min_steps=55)) == 60
  assert _Stops(_Follow(values, max_evaluations=5)) is None


def testSmallImprovementsAreBestButNoGain():
  values = [1.0, 0.99, 0.98, 0.97, 0.96]
  found = _Follow(values, tolerance=0.025, max_evaluations=2)
  assert all(best for _, best, _ in found)
  # 0.97 gains 0.03 against 1.0: small steps add up.
  assert _Stops(found) == 30
  assert _Stops(_Follow(values, tolerance=0.025, max_evaluations=3)) is None


@pytest.mark.parametrize('bad', [math.nan, math.inf, -math.inf])
def testWhatIsNotFiniteIsNeverBestAndCountsAsNoGain(bad):
  found = _Follow([bad, 2.0, bad, bad], max_evaluations=2)
  assert [best for _, best, _ in found] == [False, True, False, False]
  assert _Stops(found) == 40
  assert _Stops(_Follow([bad] * 3, window=15)) == 30


def testAnExtraEvaluationMayBeBestAndDoesNotMoveTheEnd():
  def Follow(extra):
    made = _Make(max_evaluations=2)
    for step, value in ((10, 3.0), (20, 2.0), (30, 2.5), (40, 2.2)):
      assert not made.StopReason(step)
      made.Update(step, 'eval_dev', {'loss': value})
      for i, other in enumerate(extra):
        made.Update(step + i + 1, 'eval_dev', {'loss': other}, is_extra=True)
    return made.StopReason(40), made.best_step

  assert Follow([])[0] and Follow([])[1] == 20
  assert Follow([9.0, 9.0, 9.0]) == Follow([])
  assert Follow([1.0]) == (Follow([])[0], 11)


def testOtherJobsAreNotFollowed():
  made = _Make()
  assert not made.Update(10, 'eval_test', {'loss': 1.0})
  assert made.best_step is None
  assert not _Make(metric='').Update(10, 'eval_dev', {'loss': 1.0})


def testMetricThatIsNotThere():
  with pytest.raises(ValueError, match="metric is 'loss', but eval_dev has accuracy, log_pplx"):
    _Make().Update(1, 'eval_dev', {'log_pplx': 1.0, 'accuracy': 0.5})


@pytest.mark.parametrize('name', ['window', 'max_evaluations', 'tolerance', 'min_steps'])
def testNumbersOutOfRange(name):
  with pytest.raises(ValueError, match=rf'train\.early_stop\.{name} must be at least 0'):
    _Make(**{name: -1})


def testPatienceWithoutAMetric():
  with pytest.raises(ValueError, match='no metric'):
    _Make(metric='', window=100)


@pytest.mark.parametrize('seed', range(5))
def testARestartAnywhereChangesNothing(seed):
  """The state goes through JSON, as in a checkpoint, and says all that the history did."""
  rng = random.Random(seed)
  settings = {'window': 60, 'max_evaluations': 4, 'tolerance': 0.05, 'minimize': seed % 2 == 0}
  values = [rng.choice([math.nan, rng.random(), rng.random() + i / 9]) for i in range(30)]
  straight, restarted = _Make(**settings), _Make(**settings)
  for i, value in enumerate(values):
    step = 10 * (i + 1)
    found = [
      (one.Update(step, 'eval_dev', {'loss': value}), one.StopReason(step), one.best_step)
      for one in (straight, restarted)
    ]
    assert found[0] == found[1]
    if rng.random() < 0.5:
      state = json.loads(json.dumps(restarted.State()))
      restarted = _Make(**settings)
      restarted.Restore(state)
  assert straight.State() == restarted.State()


def testAnotherMetricBeginsAnew(caplog):
  before = _Make()
  before.Update(10, 'eval_dev', {'loss': 1.0})
  after = _Make(metric='accuracy', minimize=False)
  after.Restore(before.State())
  assert after.best_step is None
  assert 'began anew: metric, minimize' in caplog.text


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
