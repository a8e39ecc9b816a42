# SPDX-License-Identifier: Apache-2.0
"""Consecutive non-finite steps are logged and counted, and end training at a limit."""

import sys

import numpy as np
import pytest

from lingvo_gpipe.learning import learner, nonfinite_steps
from tests import naming

_FINITE = {'is_finite': 1.0, 'loss': 1.0}
_BAD_LOSS = {'is_finite': 1.0, 'loss': np.inf}
_BAD_GRADIENT = {'is_finite': 0.0, 'loss': 1.0}
_ORIGIN = 'layer 3 is to blame'  # The answer of the function that repeats a step.


def _Steps(limit, *, skip_nonfinite=True, **options):
  params = learner.Learner.Params().Set(skip_nonfinite=skip_nonfinite)
  return nonfinite_steps.NonFiniteSteps(limit, {'task.train.learner': params}, **options)


def _Check(steps, values, tasks=None):
  """Checks steps from 5 on; returns the log lines, and the error that stopped training or ''."""
  lines = []
  try:
    for i, value in enumerate(values):
      task = tasks[i] if tasks else ''
      steps.Check(5 + i, value, lines.append, lambda: _ORIGIN, task)
  except nonfinite_steps.NotFiniteError as e:
    return lines, str(e)
  return lines, ''


def testEachNonFiniteStepIsLogged():
  (of_gradient, of_loss), error = _Check(_Steps(0), [_BAD_GRADIENT, _FINITE, _BAD_LOSS])
  assert not error
  assert naming.Names(of_gradient, 'step 5', 'gradient', 'skipped') and 'loss' not in of_gradient
  assert naming.Names(of_loss, 'step 7', 'loss', 'applied')
  (line,), _ = _Check(_Steps(0, skip_nonfinite=False), [_BAD_GRADIENT])
  assert naming.Names(line, 'step 5', 'gradient', 'applied') and 'loss' not in line


def testOnlyConsecutiveStepsCount():
  steps = _Steps(3)
  assert not _Check(steps, [_BAD_GRADIENT, _BAD_GRADIENT, _FINITE, _BAD_GRADIENT, _BAD_LOSS])[1]
  assert steps.in_a_row == {'': 2}
  lines, error = _Check(_Steps(3), [_FINITE, _BAD_GRADIENT, _BAD_LOSS, _BAD_GRADIENT])
  assert len(lines) == 3
  assert naming.Names(error, 'step 8', '3 steps', '6 to 8', 'skipped', '--check_numerics')
  assert naming.Names(error, 'train.max_nonfinite_steps is 3')
  assert error.endswith(_ORIGIN)


def testStepsOfOtherTasksDoNotInterruptTheCount():
  """Finite steps of one task do not hide the non-finite steps of another."""
  tasks = ['bad', 'good', 'bad', 'good', 'good', 'bad']
  values = [_BAD_GRADIENT if task == 'bad' else _FINITE for task in tasks]
  lines, error = _Check(_Steps(3), values, tasks)
  assert len(lines) == 3
  assert naming.Names(error, 'step 10', '3 steps', 'task bad', 'up to 10')


def testAppliedStepsAreNotRepeated():
  _, error = _Check(_Steps(1, skip_nonfinite=False), [_BAD_GRADIENT])
  assert naming.Names(error, 'skip_nonfinite', 'False')
  assert 'skipped' not in error
  assert _ORIGIN not in error
  assert _ORIGIN not in _Check(_Steps(1), [_BAD_LOSS])[1]


def testALimitOfZeroNeverStops():
  lines, error = _Check(_Steps(0), [_BAD_GRADIENT] * 50)
  assert len(lines) == 50
  assert not error


def testWithCheckNumericsTheFirstNonFiniteStepStops():
  lines, error = _Check(_Steps(0, check_numerics=True), [_FINITE, _BAD_LOSS])
  assert not lines
  assert naming.Names(error, 'step 6') and error.endswith(_ORIGIN)
  with pytest.raises(
    ValueError, match=naming.Naming('check_numerics', 'skip_nonfinite', 'task.train.learner')
  ):
    _Steps(0, skip_nonfinite=False, check_numerics=True)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
