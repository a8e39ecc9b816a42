# SPDX-License-Identifier: Apache-2.0
"""Progress: one updating line on a terminal, plain lines on other outputs; rate, remaining time."""

import io
import sys
import types

import pytest

from lingvo_gpipe.reporting import progress
from tests import terminal


def _Terminal():
  stream = io.StringIO()
  stream.isatty = lambda: True
  return stream


@pytest.fixture
def clock(monkeypatch):
  """Replaces the clock of the module by one that only the test advances."""
  fake_time = types.SimpleNamespace(now=1000.0)
  fake_time.monotonic = lambda: fake_time.now
  monkeypatch.setattr(progress, 'time', fake_time)
  return fake_time


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
  for name in ('NO_COLOR', 'FORCE_COLOR', 'TTY_COMPATIBLE', 'TTY_INTERACTIVE'):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setenv('TERM', 'xterm')
  monkeypatch.setenv('COLUMNS', '100')
  monkeypatch.setenv('LINES', '30')


def _Run(stream, clock, steps, *, seconds=1.0, count=100.0, start=0, end=100):
  display = progress.Progress(start, end, 'tokens', stream)
  for step in steps:
    clock.now += seconds
    display.Update(step, {'loss': 2.0 / step}, count)
  return display


def testATerminalHasOneUpdatingLine(clock):
  stream = _Terminal()
  display = _Run(stream, clock, range(1, 6))
  lines = [line for line in terminal.Screen(stream.getvalue()) if line]
  assert len(lines) == 1
  assert lines[0].startswith('step 5/100  loss 0.4  100 tokens/s')
  # Printed text appears above the line, which continues below.
  display.Print('something [bold]happened[/bold]')
  clock.now += 1
  display.Update(6, {'loss': 0.3}, 100.0)
  lines = [line for line in terminal.Screen(stream.getvalue()) if line]
  assert len(lines) == 2
  assert lines[0] == 'something [bold]happened[/bold]'
  assert lines[1].startswith('step 6/100  loss 0.3')
  display.Close()
  assert [line for line in terminal.Screen(stream.getvalue()) if line] == lines
  # The cursor is visible.
  assert stream.getvalue().rfind('\x1b[?25h') >= stream.getvalue().rfind('\x1b[?25l')
  display.Close()  # A second call does nothing.


def testALongLineIsTruncatedNotWrapped(clock):
  stream = _Terminal()
  display = progress.Progress(0, 10, 'tokens', stream)
  for step in (1, 2):
    display.Update(step, {f'metric_{i}': i for i in range(40)}, 1.0)
  display.Close()
  lines = [line for line in terminal.Screen(stream.getvalue()) if line]
  assert len(lines) == 1
  assert len(lines[0]) <= 100


def testADumbTerminalGetsPlainLines(clock, monkeypatch):
  monkeypatch.setenv('TERM', 'dumb')
  stream = _Terminal()
  _Run(stream, clock, range(1, 3)).Close()
  assert '\x1b' not in stream.getvalue()
  assert stream.getvalue().startswith('step 1/100  loss 2\n')


def testALogHasALineEveryTenSeconds(clock):
  """In addition, it has lines for the first and the last step."""
  stream = io.StringIO()
  display = _Run(stream, clock, range(1, 31), seconds=1.0, end=30)
  display.Print('a line that stays')
  display.Close()
  lines = stream.getvalue().splitlines()
  assert '\x1b' not in stream.getvalue() and '\r' not in stream.getvalue()
  assert [line.split()[1] for line in lines[:-1]] == ['1/30', '11/30', '21/30', '30/30']
  assert lines[-1] == 'a line that stays'


def testAResumedRunPrintsItsOwnFirstStep(clock):
  stream = io.StringIO()
  _Run(stream, clock, range(41, 44), start=40)
  assert [line.split()[1] for line in stream.getvalue().splitlines()] == ['41/100']


def testARunOfOneStepHasNoRate(clock):
  stream = io.StringIO()
  display = _Run(stream, clock, [1], end=1)
  assert stream.getvalue() == 'step 1/1  loss 2\n'
  assert display.rate == 0.0


def testTheRateExcludesTheFirstStep(clock):
  """The first step compiles, so neither its time nor its tokens count."""
  display = progress.Progress(0, 100, 'tokens', io.StringIO())
  clock.now += 500
  display.Update(1, {}, 1e9)
  assert display.rate == 0.0
  for step in range(2, 5):
    clock.now += 2
    display.Update(step, {}, 300.0)
  assert display.rate == pytest.approx(150.0)


def testTheRateAveragesTheLastSteps(clock):
  display = progress.Progress(0, 1000, 'tokens', io.StringIO())
  for step in range(1, 101):
    clock.now += 1
    display.Update(step, {}, 10.0)
  assert display.rate == pytest.approx(10.0)
  for step in range(101, 152):
    clock.now += 0.5
    display.Update(step, {}, 10.0)
  assert display.rate == pytest.approx(20.0)


def testTheRemainingTimeFollowsFromTheLastSteps(clock):
  stream = io.StringIO()
  _Run(stream, clock, range(1, 12), seconds=10.0, end=100)
  lines = stream.getvalue().splitlines()
  assert 'left' not in lines[0]
  # 89 steps of 10 seconds.
  assert lines[-1].endswith('10 tokens/s  14:50 left')
  assert lines[-1].startswith('step 11/100')


def testNotesFollowTheRate(clock):
  for notes, text in ((['lr 0.01', 'bubble 21%'], '  lr 0.01  bubble 21%  '), ([], '  ')):
    stream = io.StringIO()
    line = progress.Progress(0, 2, 'tokens', stream)
    for step in (1, 2):
      clock.now += 1
      line.Update(step, {}, 100.0, notes=notes)
    assert stream.getvalue().endswith(f'100 tokens/s{text}0:00 left\n')


def testALimitOfTimeShortensTheRemainingTime(clock):
  stream = io.StringIO()
  line = progress.Progress(0, 1000, 'tokens', stream, seconds_left=60.0)
  for step in range(1, 9):
    clock.now += 10
    line.Update(step, {}, 100.0)
  lefts = [text.split()[-2] for text in stream.getvalue().splitlines()[1:]]
  assert lefts == ['0:40', '0:30', '0:20', '0:10', '0:00', '0:00', '0:00']


def testAPauseDoesNotCountInTheRate(clock):
  stream = _Terminal()
  display = _Run(stream, clock, range(1, 6))
  with display.Pause('evaluating Dev'):
    assert terminal.Screen(stream.getvalue())[-1].startswith('evaluating Dev  step 5/100')
    clock.now += 500
  clock.now += 1
  display.Update(6, {'loss': 0.3}, 100.0)
  display.Close()
  assert display.rate == pytest.approx(100.0)
  (line,) = [line for line in terminal.Screen(stream.getvalue()) if line]
  assert line.startswith('step 6/100') and line.endswith('1:34 left')


def testTheRemainingTimeEndsAtZero(clock):
  stream = io.StringIO()
  _Run(stream, clock, range(1, 4), end=3)
  assert stream.getvalue().splitlines()[-1].endswith('0:00 left')


def testNumbersAreReadable(clock):
  stream = io.StringIO()
  display = progress.Progress(0, 2, 'tokens', stream)
  display.Update(1, {'loss': 3.14159265, 'nats': float('nan'), 'small': 1.5e-7}, 1.0)
  assert stream.getvalue() == 'step 1/2  loss 3.142  nats nan  small 1.5e-07\n'


def testStandardOutputIsTheDefault(capsys):
  display = progress.Progress(0, 2, 'tokens')
  display.Update(1, {'loss': 1.0}, 1.0)
  display.Close()
  assert capsys.readouterr().out == 'step 1/2  loss 1\n'


@pytest.mark.parametrize(
  'seconds, text',
  [
    (0, '0:00'),
    (59.4, '0:59'),
    (59.6, '1:00'),
    (61, '1:01'),
    (3599.6, '1:00:00'),
    (36610, '10:10:10'),
  ],
)
def testDuration(seconds, text):
  assert progress.Duration(seconds) == text


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
