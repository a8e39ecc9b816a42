# SPDX-License-Identifier: Apache-2.0
"""The progress line on several kinds of terminals: the cursor, and terminals without rewriting."""

import io
import re
import sys

import pytest

from lingvo_gpipe.reporting import progress


class _Terminal(io.StringIO):
  def isatty(self):
    return True


@pytest.fixture
def clock(monkeypatch):
  """Replaces the clock by clock[0], in seconds, which tests advance."""
  now = [100.0]
  monkeypatch.setattr(progress.time, 'monotonic', lambda: now[0])
  return now


def _Run(stream, clock, steps, start=0, seconds=1.0):
  display = progress.Progress(start, start + steps, 'tokens', stream)
  for i in range(steps):
    clock[0] += seconds if i else 30.0  # The first step compiles.
    display.Update(start + i + 1, {'loss': 2.0 / (i + 1)}, 50.0)
  display.Close()
  return display


def testATerminalUpdatesOneLineAndPrintsAboveIt(clock, monkeypatch):
  monkeypatch.setenv('TERM', 'xterm')
  monkeypatch.setenv('COLUMNS', '60')
  stream = _Terminal()
  display = progress.Progress(0, 3, 'tokens', stream)
  for step in range(1, 4):
    display.Update(step, {'loss': 1.0, 'a_metric_with_a_long_name_that_does_not_fit': 1.0}, 1.0)
    if step == 2:
      display.Print('a note\nof two lines [not markup]')
  display.Close()
  text = stream.getvalue()
  assert 'a note\nof two lines [not markup]\n' in text
  # A wrapped line could not be rewritten.
  plain = re.sub(r'\x1b\[[?\d;]*[A-Za-z]', '', text)
  assert max(len(line) for line in re.split(r'[\r\n]', plain)) <= 60
  assert text.count('step 3/3') >= 1 and text.endswith('\x1b[?25h')
  # A process that is killed between updates leaves the cursor visible.
  assert text.index('\x1b[?25l') < text.index('\x1b[?25h') < text.index('step 1/3')


@pytest.mark.parametrize('name, value', [('TERM', 'dumb'), ('TTY_COMPATIBLE', '0')])
def testATerminalThatCannotRewriteGetsPlainLines(clock, monkeypatch, name, value):
  monkeypatch.setenv(name, value)
  stream = _Terminal()
  _Run(stream, clock, 12)
  lines = stream.getvalue().splitlines()
  assert [line.split()[1] for line in lines] == ['1/12', '11/12', '12/12']
  assert '\x1b' not in stream.getvalue()


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))
