# SPDX-License-Identifier: Apache-2.0
"""What a person sees while a run goes on: one updating line on a terminal, plain lines in a log."""

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

# Seconds between two plain lines where the output is not a terminal.
_LINE_SECONDS = 10.0
# Over how many steps the rate is averaged.
_WINDOW = 50


class Progress:
  """Shows step, metrics, rate and time left.

  On a terminal one line at the bottom is kept up to date; `Print` writes above it. Elsewhere a
  line is printed at most every ten seconds, and one for the first and the last step.
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
      start_step: steps done before.
      max_steps: the step at which the run ends.
      unit: what `count` of `Update` counts: tokens or examples.
      stream: where to write; standard output.
      seconds_left: the run ends after so many seconds from now, if that is before `max_steps`.
    """
    self._first_step = start_step + 1
    self._max_steps = max_steps
    self._unit = unit
    self._stream = stream or sys.stdout
    self._end_time = time.monotonic() + seconds_left
    self._paused_seconds = 0.0
    self._text = ''
    self._last_line = 0.0
    # (time, step, count so far): the first entry falls out when the window is full.
    self._seen: deque[tuple[float, int, float]] = deque(maxlen=_WINDOW + 1)
    self._count = 0.0
    self._live: rich.live.Live | None = None
    console = rich.console.Console(file=self._stream, highlight=False)
    # A dumb terminal cannot rewrite a line.
    if self._stream.isatty() and console.is_terminal and not console.is_dumb_terminal:
      self._live = rich.live.Live(console=console, auto_refresh=False, redirect_stderr=False)
      self._live.start()
      # `Live` hides the cursor, and a process that is killed would never bring it back.
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
      step: steps done so far.
      values: what to show of it.
      count: how many tokens or examples it took in.
      label: what stands before the values, such as the name of a task.
      notes: what stands behind the rate, such as the learning rate.
    """
    self._count += count
    # The first step holds the compilation: the clock of the rate starts at its end.
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
  def Paused(self, why: str) -> Iterator[None]:
    """While something else is done than steps: its time does not count in the rate."""
    start = time.monotonic()
    self._Show(f'{why}  {self._text}')
    try:
      yield
    finally:
      self._paused_seconds += time.monotonic() - start
      self._Show(self._text)

  @property
  def rate(self) -> float:
    """Tokens or examples a second over the last steps; 0 before the second one."""
    if len(self._seen) < 2:
      return 0.0
    (t0, _, c0), (t1, _, c1) = self._seen[0], self._seen[-1]
    return (c1 - c0) / max(t1 - t0, 1e-9)

  def Print(self, text: str) -> None:
    """Prints lines that stay."""
    if self._live is not None:
      self._live.console.print(rich.text.Text(text), soft_wrap=True)
    else:
      print(text, file=self._stream, flush=True)

  def Close(self) -> None:
    """Leaves the last state of the line on the terminal."""
    if self._live is not None:
      self._live.stop()
      self._live = None

  def _Show(self, text: str) -> None:
    """Writes the line of a terminal anew."""
    if self._live is not None:
      self._live.update(rich.text.Text(text, no_wrap=True, overflow='ellipsis'), refresh=True)

  def _Text(self, step: int, values: Mapping[str, float], label: str, notes: Sequence[str]) -> str:
    shown = '  '.join(f'{name} {value:.4g}' for name, value in values.items())
    text = f'step {step}/{self._max_steps}  {label}{"  " if label else ""}{shown}'
    if len(self._seen) < 2:
      return text
    (t0, s0, _), (t1, s1, _) = self._seen[0], self._seen[-1]
    left = (self._max_steps - step) * (t1 - t0) / max(s1 - s0, 1)
    left = max(0.0, min(left, self._end_time - time.monotonic()))
    return '  '.join([text, f'{self.rate:,.0f} {self._unit}/s', *notes, f'{Duration(left)} left'])


def Duration(seconds: float) -> str:
  """`1:02:03` or `2:03`."""
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f'{hours}:{minutes:02}:{rest:02}' if hours else f'{minutes}:{rest:02}'


def FormatMetrics(values: Mapping[str, float]) -> str:
  """Returns metrics as one line; members of a group, such as `bleu/de-en`, are left out."""
  return '  '.join(f'{name} {value:.4f}' for name, value in values.items() if '/' not in name)
