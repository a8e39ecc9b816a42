# SPDX-License-Identifier: Apache-2.0
"""Timelines as text. schedule_test.py has the pictures of schedules."""

import sys

import pytest

from lingvo_gpipe.pipeline.schedule import timeline_text
from tests import naming


def testTicks():
  assert (
    timeline_text.DrawTicks([[(0, 1, 'F0'), (3, 5, 'B0')], [(1, 2, 'F0')]])
    == """\
time      0  1  2  3  4
device 0  F0 .  .  B0---
device 1  .  F0 .  .  .
"""
  )


def testScale():
  rows = [[(0, 0.5, 'F0'), (1.5, 2, 'B0')], [(0.5, 1.5, 'V0')]]
  assert (
    timeline_text.DrawToScale(rows, 24, ['half', 'busy'])
    == """\
time      0     0.5   1     1.5    2
device 0  |F0---............|B0---  half
device 1  ......|V0---------......  busy
"""
  )


def testLongLabelsAreShortened():
  rows = [[(i, i + 1, f'10F{i}') for i in range(8)]]
  for num_columns, line in (
    (40, '|10F0|10F1|10F2|10F3|10F4|10F5|10F6|10F7'),
    (24, '|F-|F-|F-|F-|F-|F-|F-|F-'),
    (8, 'FFFFFFFF'),
    (4, 'FFFF'),
  ):
    assert timeline_text.DrawToScale(rows, num_columns).splitlines()[1] == f'device 0  {line}'


def testAnEmptyTimelineIsDrawnIdle():
  assert timeline_text.DrawToScale([[]], 4).splitlines()[1] == 'device 0  ....'
  with pytest.raises(ValueError, match=naming.Naming('num_columns', 'positive', 'got 0')):
    timeline_text.DrawToScale([[]], 0)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
