# SPDX-License-Identifier: Apache-2.0
"""Bad steps in a row: told, counted, and explained when there are too many."""

import sys

import numpy as np
import pytest

from lingvo_gpipe.learning import learner, nonfinite_steps

_FINITE = {'is_finite': 1.0, 'loss': 1.0}
_BAD_LOSS = {'is_finite': 1.0, 'loss': np.inf}
_BAD_GRADIENT = {'is_finite': 0.0, 'loss': 1.0}


def _Steps(limit, *, skip_nonfinite=True, **options):
  params = learner.Learner.Params().Set(skip_nonfinite=skip_nonfinite)
  return nonfinite_steps.NonFiniteSteps(limit, {'task.train.learner': params}, **options)


def _Told(steps, values, tasks=None):
  """What is said of steps from 5 on, and what ended them, '' for nothing."""
  said = []
  try:
    for i, value in enumerate(values):
      task = tasks[i] if tasks else ''
      steps.Check(5 + i, value, said.append, lambda: 'layer 3 is to blame', task)
  except nonfinite_steps.NotFiniteError as e:
    return said, str(e)
  return said, ''


def testEachBadStepIsTold():
  said, ended = _Told(_Steps(0), [_BAD_GRADIENT, _FINITE, _BAD_LOSS])
  assert not ended
  assert said == [
    'step 5: a gradient is not finite; the update was skipped',
    'step 7: the loss is not finite; the gradients are, and were applied',
  ]
  said, _ = _Told(_Steps(0, skip_nonfinite=False), [_BAD_GRADIENT])
  assert said == ['step 5: a gradient is not finite; it was applied']


def testOnlyStepsInARowCount():
  steps = _Steps(3)
  assert not _Told(steps, [_BAD_GRADIENT, _BAD_GRADIENT, _FINITE, _BAD_GRADIENT, _BAD_LOSS])[1]
  assert steps.in_a_row == {'': 2}
  said, ended = _Told(_Steps(3), [_FINITE, _BAD_GRADIENT, _BAD_LOSS, _BAD_GRADIENT])
  assert len(said) == 3
  assert ended.startswith(
    'step 8: the loss or gradients of 3 steps in a row were not finite (6 to 8;'
  )
  assert '; train.max_nonfinite_steps is 3' in ended
  assert 'left the weights as they were' in ended
  assert '--check_numerics' in ended
  assert ended.endswith('. In the last one layer 3 is to blame')


def testStepsOfOtherTasksAreNotBetween():
  """A task that is never finite does not hide among those that are."""
  tasks = ['bad', 'good', 'bad', 'good', 'good', 'bad']
  values = [_BAD_GRADIENT if task == 'bad' else _FINITE for task in tasks]
  said, ended = _Told(_Steps(3), values, tasks)
  assert len(said) == 3
  assert ended.startswith(
    'step 10: the loss or gradients of 3 steps in a row of the task bad were not finite (up to 10;'
  )


def testWhatWasAppliedIsNotRepeated():
  _, ended = _Told(_Steps(1, skip_nonfinite=False), [_BAD_GRADIENT])
  assert 'skip_nonfinite is False' in ended
  assert 'left the weights' not in ended
  assert 'In the last one' not in ended
  assert 'In the last one' not in _Told(_Steps(1), [_BAD_LOSS])[1]


def testZeroIsNever():
  said, ended = _Told(_Steps(0), [_BAD_GRADIENT] * 50)
  assert len(said) == 50
  assert not ended


def testTheFirstIsTooManyWhereNumericsAreChecked():
  said, ended = _Told(_Steps(0, check_numerics=True), [_FINITE, _BAD_LOSS])
  assert (said, ended) == ([], 'step 6 is not finite: layer 3 is to blame')
  with pytest.raises(ValueError, match='set skip_nonfinite of task.train.learner to True'):
    _Steps(0, skip_nonfinite=False, check_numerics=True)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
