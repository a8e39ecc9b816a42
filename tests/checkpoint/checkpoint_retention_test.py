# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints are removed; checkpointer_test covers the removal of their files."""

import sys

import hypothesis
import pytest
from hypothesis import strategies as st

from lingvo_gpipe.checkpoint import checkpoint_info, checkpoint_retention
from tests import naming

_STEPS = st.sets(st.integers(0, 20))


@hypothesis.given(st.integers(1, 6), _STEPS.filter(bool), _STEPS, _STEPS)
def testTheHighestAndTheProtectedStepsAreKept(max_to_keep, good, damaged, protected):
  infos = [checkpoint_info.CheckpointInfo(s, '', '', 0.0, {}, {}, {}) for s in sorted(good)]
  rule = checkpoint_retention.Retention(max_to_keep)
  damaged -= good
  removed = rule.Removable(max(good), infos, sorted(damaged), protected)
  highest = sorted(good)[-max_to_keep:]
  old = (good - {*highest}) | {step for step in damaged if step < highest[0]}
  assert sorted(removed) == sorted(old - protected)


def _KeptByTheHour(hours, damaged=()):
  """Returns the steps that are kept of checkpoints saved at these hours, one per step."""
  infos = [
    checkpoint_info.CheckpointInfo(step, '', '', hour * 3600.0, {}, {}, {})
    for step, hour in enumerate(hours)
    if step not in damaged
  ]
  rule = checkpoint_retention.Retention(max_to_keep=1, keep_every_n_hours=2)
  removed = rule.Removable(len(hours) - 1, infos, damaged, [])
  return [step for step in range(len(hours)) if step not in removed]


def testKeepingByTimeSurvivesAClockThatIsSetBack():
  """The first two checkpoints were saved before the clock was set."""
  assert _KeptByTheHour([900, 901, 5, 6, 7, 8, 9, 10]) == [0, 2, 4, 6, 7]
  assert _KeptByTheHour([3, 2.9, 4, 5, 6]) == [0, 3, 4]


def testUnreadableCheckpointsAreKeptIfTheyMayBeKeptForGood():
  assert _KeptByTheHour(range(7), damaged=[0, 4]) == [0, 1, 3, 4, 5, 6]


def testNumbersOutOfRangeAreAnError():
  with pytest.raises(ValueError, match=naming.Naming('max_to_keep', 0)):
    checkpoint_retention.Retention(max_to_keep=0)
  with pytest.raises(ValueError, match=naming.Naming('keep_every_n_hours', 0)):
    checkpoint_retention.Retention(keep_every_n_hours=0)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
