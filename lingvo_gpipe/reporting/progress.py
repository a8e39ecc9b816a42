# SPDX-License-Identifier: Apache-2.0
"""Shows the progress of a run: one updating line on a terminal, plain lines in a log."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

import rich.console
import rich.live
import rich.text

# Seconds between two plain lines if the output is not a terminal.
_LINE_SECONDS = 10.0
# Number of steps over which the rate is averaged.
_WINDOW = 50


class Progress:
  """Shows step, metrics, rate and remaining time.

  On a terminal, updates one line at the bottom; `Print` writes above it. On other outputs, prints a
  line at most every ten seconds, and for the first and the last step.
  """

  def __init__(
    self,
    start_step: int,
    max_steps: int,
    unit: str,
    stream: TextIO | None = None,
    *,
    seconds_left: float = math.inf,
  ) -> None:
    """Starts the clock.

    Args:
      start_step: number of steps done before.
      max_steps: step at which the run ends.
      unit: unit of `count` in `Update`, 'tokens' or 'examples'.
      stream: output stream, by default standard output.
      seconds_left: seconds from now after which the run ends, if it does not reach `max_steps`
        before.
    """
    self._first_step = start_step + 1
    self._max_steps = max_steps
    self._unit = unit
    self._stream = stream or sys.stdout
    self._end_time = time.monotonic() + seconds_left
    self._paused_seconds = 0.0
    self._text = ''
    self._last_line = 0.0
    # (time, step, count so far) of the last steps.
    self._seen: deque[tuple[float, int, float]] = deque(maxlen=_WINDOW + 1)
    self._count = 0.0
    self._live: rich.live.Live | None = None
    console = rich.console.Console(file=self._stream, highlight=False)
    # A dumb terminal cannot rewrite a line.
    if self._stream.isatty() and console.is_terminal and not console.is_dumb_terminal:
      self._live = rich.live.Live(console=console, auto_refresh=False, redirect_stderr=False)
      self._live.start()
      # `Live` hides the cursor, and a killed process would never show it again.
      console.show_cursor(True)

  def Update(
    self,
    step: int,
    values: Mapping[str, float],
    count: float,
    label: str = '',
    notes: Sequence[str] = (),
  ) -> None:
    """Shows a finished step.

    Args:
      step: number of steps done so far.
      values: metrics to show.
      count: number of tokens or examples in this step.
      label: text before the values, such as the name of a task.
      notes: texts after the rate, such as the learning rate.
    """
    self._count += count
    # The first step includes compilation, so the rate is measured from its end.
    self._seen.append((time.monotonic() - self._paused_seconds, step, self._count))
    text = self._text = self._Text(step, values, label, notes)
    if self._live is not None:
      self._Show(text)
      return
    is_edge = step in (self._first_step, self._max_steps)
    if is_edge or time.monotonic() - self._last_line >= _LINE_SECONDS:
      self.Print(text)
      self._last_line = time.monotonic()

  @contextlib.contextmanager
  def Pause(self, reason: str) -> Iterator[None]:
    """Shows the reason while the enclosed code runs, and excludes its time from the rate."""
    start = time.monotonic()
    self._Show(f'{reason}  {self._text}')
    try:
      yield
    finally:
      self._paused_seconds += time.monotonic() - start
      self._Show(self._text)

  @property
  def rate(self) -> float:
    """Tokens or examples per second over the last steps, or 0 before the second step."""
    if len(self._seen) < 2:
      return 0.0
    (t0, _, c0), (t1, _, c1) = self._seen[0], self._seen[-1]
    return (c1 - c0) / max(t1 - t0, 1e-9)

  def Print(self, text: str) -> None:
    """Prints lines that are not overwritten."""
    if self._live is not None:
      self._live.console.print(rich.text.Text(text), soft_wrap=True)
    else:
      print(text, file=self._stream, flush=True)

  def Close(self) -> None:
    """Stops updating the line; its last state stays on the terminal."""
    if self._live is not None:
      self._live.stop()
      self._live = None

  def _Show(self, text: str) -> None:
    """Rewrites the line of a terminal."""
    if self._live is not None:
      self._live.update(rich.text.Text(text, no_wrap=True, overflow='ellipsis'), refresh=True)

  def _Text(self, step: int, values: Mapping[str, float], label: str, notes: Sequence[str]) -> str:
    metrics = '  '.join(f'{name} {value:.4g}' for name, value in values.items())
    text = f'step {step}/{self._max_steps}  {label}{"  " if label else ""}{metrics}'
    if len(self._seen) < 2:
      return text
    (t0, s0, _), (t1, s1, _) = self._seen[0], self._seen[-1]
    seconds = (self._max_steps - step) * (t1 - t0) / max(s1 - s0, 1)
    seconds = max(0.0, min(seconds, self._end_time - time.monotonic()))
    rate = f'{self.rate:,.0f} {self._unit}/s'
    return '  '.join([text, rate, *notes, f'{Duration(seconds)} left'])


def Duration(seconds: float) -> str:
  """Formats a duration as `1:02:03` or `2:03`."""
  minutes, whole_seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f'{hours}:{minutes:02}:{whole_seconds:02}'
  return f'{minutes}:{whole_seconds:02}'


def FormatMetrics(values: Mapping[str, float]) -> str:
  """Formats metrics as one line, without members of a group such as `bleu/de-en`."""
  return '  '.join(f'{name} {value:.4f}' for name, value in values.items() if '/' not in name)
