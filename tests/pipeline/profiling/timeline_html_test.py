# SPDX-License-Identifier: Apache-2.0
"""The page of a timeline: well-formed, with each action drawn to scale in its row."""

import itertools
import sys
import time
from xml.etree import ElementTree

import pytest

from lingvo_gpipe.pipeline.cost import simulator
from lingvo_gpipe.pipeline.profiling import measured_schedule, timeline_html
from lingvo_gpipe.pipeline.schedule import schedules
from tests import naming
from tests.toys import simulations


def _Simulated(policy):
  schedule = schedules.Get('interleaved_1f1b', 4, 4, 2)
  return simulator.Simulate(schedule, simulator.Costs(0.001), remat_policy=policy)


def _Rects(page):
  """Parses a page as XML; returns {(class, step): {action: (x, width, y)}}."""
  rects = {}
  root = ElementTree.fromstring(page.removeprefix('<!DOCTYPE html>\n'))
  for rect in root.iter('{http://www.w3.org/2000/svg}rect'):
    row = rects.setdefault((rect.get('class'), int(rect.get('data-step'))), {})
    assert rect.get('data-action') not in row
    row[rect.get('data-action')] = tuple(float(rect.get(a)) for a in ('x', 'width', 'y'))
  return rects


def testEachActionIsDrawnToScaleInItsRow():
  result = _Simulated('none')
  drawn = [(simulations.AsMeasured(result, step), result) for step in (5, 6)]
  times = measured_schedule.MeanTimes([m for m, _ in drawn])
  page = timeline_html.MakePage('Steps <5 & 6>', ['a < b'], drawn, ['CPU:0', 'CPU:1'], times)
  rects = _Rects(page)
  assert rects.keys() == set(itertools.product(('measured', 'simulated'), (5, 6)))
  for by_action in rects.values():
    assert by_action.keys() == {str(a) for row in result.schedule.actions for a in row}
    left_edge, unit_width, _ = by_action['0F0']
    for row in result.timeline:
      assert len({by_action[str(span.action)][2] for span in row}) == 1
      for span in row:
        x, width, _ = by_action[str(span.action)]
        assert x - left_edge == pytest.approx(unit_width * span.start / 0.001, abs=0.5)
        assert width == pytest.approx(unit_width * (span.end - span.start) / 0.001, abs=0.1)
  # Simulated rows are below the measured rows.
  assert rects['measured', 5]['0F0'][2] < rects['simulated', 5]['0F0'][2]
  assert rects['simulated', 5]['0F0'][2] < rects['measured', 5]['1F0'][2]
  for text in ('Steps &lt;5 &amp; 6&gt;', 'a &lt; b', '>CPU:0<', '>0F0<', '>3B3<', 'mean ms'):
    assert text in page
  assert f'step 6: {result.makespan * 1e3:.2f} ms' in page


def testASimulatedRecomputationIsASeparateRect():
  result = _Simulated('except_last')
  page = timeline_html.MakePage(
    '', [], [(simulations.AsMeasured(result, 1), result)], ['a', 'b'], {}
  )
  assert _Rects(page)['recompute', 1].keys() == {f'{k}B{m}' for k in range(4) for m in range(3)}


def testTheLastPictureIsAFileOfItsOwn():
  result = _Simulated('none')
  drawn = [(simulations.AsMeasured(result, step), result) for step in (5, 6)]
  page = timeline_html.MakePage('', [], drawn, ['a', 'b'], {})
  picture = timeline_html.LastPicture(page)
  assert _Rects(picture) == {key: row for key, row in _Rects(page).items() if key[1] == 6}
  assert 'step 6: ' in picture and '<style>' in picture
  with pytest.raises(ValueError, match=naming.Naming('timeline_*.html')):
    timeline_html.LastPicture('<html></html>')


@pytest.mark.parametrize(
  'begin, part',
  [
    ('', '<h2>x</h2><svg'),
    ('', '<h2>x</h2><svg '),
    ('', '<h2>'),
    ('<h2>', '</h2><svg >'),
    ('<h2></h2><svg ', 'viewBox="0 0 1 1"'),
    ('', '<h2></h2><svg viewBox="0 0 1 1"><style>'),
    ('', '<h2></h2><svg viewBox="0 0 1 1"><style></style>'),
    ('<h2></h2><svg viewBox="0 0 1', '1'),
  ],
)
def testTheTimeForAnotherPageIsLinear(begin, part):
  page = begin + part * 30_000
  started = time.process_time()
  with pytest.raises(ValueError, match=naming.Naming('timeline_*.html')):
    timeline_html.LastPicture(page)
  assert time.process_time() - started < 1.0


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
