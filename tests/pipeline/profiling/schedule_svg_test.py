# SPDX-License-Identifier: Apache-2.0
"""Pictures of schedules show each action at its time, and the activations that a device holds."""

import re
import sys
from xml.etree import ElementTree

import pytest

from lingvo_gpipe.pipeline.profiling import schedule_svg
from lingvo_gpipe.pipeline.schedule import schedules
from tests import naming, processes
from tools import draw_schedule

_SVG = '{http://www.w3.org/2000/svg}'
TIMES = (1.0, 1.5, 0.5)


def _Simulated(name):
  per_device = draw_schedule.LeastStages(name, 3)
  return draw_schedule.Simulate(schedules.Get(name, 3 * per_device, 6, 3), TIMES)


@pytest.mark.parametrize('name', schedules.Names())
def testEachActionHasItsPlaceAndWidth(name):
  result = _Simulated(name)
  root = ElementTree.fromstring(schedule_svg.Draw(result))
  drawn = {
    (int(rect.get('data-device')), rect.get('data-action')): (
      float(rect.get('x')), float(rect.get('width'))
    )
    for rect in root.iter(f'{_SVG}rect')
  }  # fmt: skip
  spans = [span for row in result.timeline for span in row]
  assert len(drawn) == len(spans)
  first, scale = drawn[0, '0F0'][0], drawn[0, '0F0'][1] / (result.timeline[0][0].end or 1)
  for span in spans:
    x, width = drawn[span.device, str(span.action)]
    assert x == pytest.approx(first + span.start * scale, abs=0.1)
    assert width == pytest.approx((span.end - span.start) * scale, abs=0.1)


@pytest.mark.parametrize('name', schedules.Names())
def testTheCurveEndsAtZeroAndPeaksAtThePeakOfTheDevice(name):
  result = _Simulated(name)
  text = schedule_svg.Draw(result)
  peaks = [int(number) for number in re.findall(r'>(\d+) held<', text)]
  assert peaks == list(result.schedule.DevicePeakActivations())
  for path in re.findall(r'<path d="([^"]*)"', text):
    base, *heights = re.findall(r'[ V]([\d.]+)', path)
    assert float(heights[-1]) == float(base)


def testTheProgramDrawsAFile(tmp_path):
  source, target = tmp_path / 'order.csv', tmp_path / 'order.svg'
  source.write_text(schedules.Get('zb_h1', 2, 3).ToText())
  command = [sys.executable, '-m', 'tools.draw_schedule']
  done = processes.Run('', f'--schedule={source}', f'--output={target}', command=command)
  assert done.returncode == 0, done.stderr
  assert len(ElementTree.parse(target).findall(f'.//{_SVG}rect')) == 2 * 3 * 3


def testThePictureOfTheReadmeIsOurs():
  picture = processes.ROOT / 'docs' / 'gpipe.svg'
  result = draw_schedule.Simulate(schedules.Get('gpipe', 4, 8))
  assert picture.read_text() == schedule_svg.Draw(result, is_standalone=True)


@pytest.mark.parametrize(
  'flag',
  [
    '--schedule=no_such',
    '--times=1,x,2',
    '--times=0,0,0',
    '--times=1e-320,0,0',
    pytest.param('--schedule=' + 5000 * 'x', id='long_name'),
    pytest.param('--timeline=' + 5000 * 'x', id='long_page'),
    '--num_micro_batches=0',
    '--timeline=/no/such/page.html',
    '--output=/no/such/folder/x.svg',
  ],
)
def testMistakesEndInOneLine(flag):
  command = [sys.executable, '-m', 'tools.draw_schedule']
  done = processes.Run('', flag, command=command)
  assert done.returncode == 2 and done.stderr.count('\n') == 1
  assert flag.split('=')[0].strip('-') in done.stderr


@pytest.mark.parametrize('flag', ['--schedule', '--timeline'])
def testAFileThatIsNotUtf8IsNamed(tmp_path, flag):
  path = tmp_path / 'latin'
  path.write_bytes(b'caf\xe9\n')
  command = [sys.executable, '-m', 'tools.draw_schedule']
  done = processes.Run('', f'{flag}={path}', command=command)
  assert done.returncode == 2
  (line,) = done.stderr.splitlines()
  assert naming.Names(line, flag, repr(str(path)), 'UTF-8')


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
