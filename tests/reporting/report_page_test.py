# SPDX-License-Identifier: Apache-2.0
"""The report page escapes names, and draws any numbers and events."""

import json
import math
import random
import re
import sys
from xml.etree import ElementTree

import pytest

from lingvo_gpipe.reporting import line_chart, metrics_log, report_page, run_report

_SVG = '{http://www.w3.org/2000/svg}'
_BAD = '<script>alert("1 & 2")</script>\x07\''


def _Report(name='toy', **changes):
  values = dict(
    model=name, logdir='/runs/' + name, ended='max_steps 3', is_finished=True, step=3, num_steps=3,
    num_skipped_steps=0, examples_consumed=3, num_examples=3, num_damaged_records=0,
    train_seconds=1.0, seconds=1.0, train={'loss': 1.0}, passes={}, best=None, checkpoints=[3],
  )  # fmt: skip
  return run_report.RunReport(**{**values, **changes})


def _Record(step, split='train', time=1e9, **values):
  return metrics_log.Record(step, time + step, split, values)


def _Parse(page):
  return ElementTree.fromstring(page.removeprefix('<!DOCTYPE html>'))


def testNamesAreEscaped():
  records = [
    metrics_log.Record(step, 1e9, split, {_BAD: 1.0, f'loss/{_BAD}': 2.0})
    for step in (1, 2)
    for split in ('train', _BAD, metrics_log.FAILURES)
  ]
  sections = {_BAD: report_page.Preformatted(_BAD)}
  page = report_page.MakePage(_Report(_BAD), records, [1e9], f'trainer {_BAD}', sections)
  root = _Parse(page)
  assert '<script' not in page and not list(root.iter('script'))
  assert {e.tag.rpartition('}')[2] for e in root.iter()} <= set(
    'html head meta title style body h1 h2 h3 section table tr th td p div pre figure figcaption '
    'svg path text span br'.split()
  )
  assert any('alert("1 & 2")' in text for text in root.itertext())


def testFailuresAndStartsAreOnTheAxisOfTime():
  records = [_Record(step, loss=1.0) for step in range(1, 9)]
  records.append(_Record(5, metrics_log.FAILURES, time=1e9 + 60, worker_failed=2.0))
  page = report_page.MakePage(_Report(), records, [1e9, 1e9 + 66], 'trainer', {})
  root = _Parse(page)
  marks = [e.get('class') for e in root.iter(f'{_SVG}path') if e.find(f'{_SVG}title') is not None]
  assert marks == ['start', 'failure', 'start']
  table = [row[1].text for row in root.iter('tr') if len(row) == 2 and row[0].tag == 'td']
  assert len(table) == 3 and 'worker_failed 2' in table[1]


@pytest.mark.parametrize('records', [[], [_Record(2, 'eval_dev', loss=1.0)]])
def testARunWithoutLoggedStepsHasAPage(records):
  _Parse(report_page.MakePage(_Report(is_finished=False), records, [], 'trainer', {}))


def testAnyNumbersAreDrawn():
  rng = random.Random(0)
  for _ in range(200):
    size = rng.choice([1, 2, 5, 5000])
    scale = 10.0 ** rng.randint(-320, 308)
    values = [(i, rng.choice([rng.uniform(-1, 1) * scale, 0.0, math.nan])) for i in range(size)]
    figure = ElementTree.fromstring(line_chart.Figure('x', {'a': values, 'b': values[:1]}))
    path = next(e for e in figure.iter(f'{_SVG}path') if e.get('class') == 'c0').get('d')
    assert all(math.isfinite(float(n)) for n in re.findall(r'[^MLHVh ]+', path))
    assert path.count('L') + path.count('M') <= 3 * 400


def testManyPointsKeepTheExtremes():
  values = [(i, float(i % 7)) for i in range(10_000)]
  values[5003] = (5003, 99.0)
  values[7001] = (7001, -99.0)
  figure = ElementTree.fromstring(line_chart.Figure('x', {'a': values}))
  path = next(e for e in figure.iter(f'{_SVG}path') if e.get('class') == 'c0').get('d')
  heights = [float(y) for y in re.findall(r' ([\d.]+)', path)]
  assert heights.count(min(heights)) == heights.count(max(heights)) == 1


def testTicksAreRoundAndWithin():
  assert line_chart.Ticks(0, 1, 5) == [0, 0.2, 0.4, 0.6000000000000001, 0.8, 1]
  assert line_chart.Ticks(3, 3, 5) == [3]
  for low, high in ((-1e9, 3.7), (1e-9, 2e-9), (5.59, 5.62)):
    ticks = line_chart.Ticks(low, high, 6)
    assert 2 <= len(ticks) <= 7 and low - 1e-9 <= ticks[0] and ticks[-1] <= high + 1e-9


def testReadSkipsInvalidLines(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  good = {'step': 1, 'time': 5.0, 'split': 'train', 'values': {'loss': None, 'x': 2}}
  bad = [{**good, 'time': 1e30}, {**good, 'values': 3}, {**good, 'step': 10**400}, {'step': 1}, []]
  lines = [json.dumps(line) for line in (good, *bad)] + ['{"step"', '']
  path.write_text('\n'.join(lines))
  (record,) = metrics_log.Read(str(path))
  assert math.isnan(record.values['loss']) and record.values['x'] == 2.0
  assert list(metrics_log.Read(str(tmp_path / 'none.jsonl'))) == []


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
