# SPDX-License-Identifier: Apache-2.0
"""Trains or evaluates in a child process, and where a worker fails goes on in another one.

TensorFlow's context cannot be mended once a worker it was connected to has died, and a worker that
stands still makes a step wait for ever. So the process that holds the context is one that can be
replaced: a fork of this one, which has imported TensorFlow but uses nothing of it.
"""

from __future__ import annotations

import math
import os
import select
import signal
import statistics
import sys
import threading
import time
import types
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from absl import logging

from lingvo_gpipe.core import heartbeat
from lingvo_gpipe.distributed import cluster_spec, local_workers, stop_request

# The status of a child that a worker failed (EX_TEMPFAIL of sysexits.h).
WORKER_FAILED = 75

# So often in a row the work begins again and gets no further.
MAX_RESTARTS = 5

# The first pause before another try, which doubles with each, and the longest, in seconds.
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0

# Seconds without a sign of life: where something is compiled or read; the least within a step.
_LONG_SECONDS = 1800.0
_LEAST_SECONDS = 60.0
# A store that is slow for minutes is no worker that hangs, nor is a shuffle's buffer that fills.
_LEAST_STORE_SECONDS = 600.0
_END_SECONDS = 60.0
# So often local workers are looked after.
_POLL_SECONDS = 1.0

# Steps of a kind the median of whose times counts, and how many there must be.
_NUM_TIMES, _LEAST_TIMES = 50, 5

# What was not done where it takes too long.
_STEP = 'step was done'
_WHAT = {
  heartbeat.READ[0]: 'batch was read',
  heartbeat.WRITE[0]: 'checkpoint was written',
}

# All that a pipe may hold on Linux.
_PIPE_BYTES = 1 << 16


class Work(NamedTuple):
  """What the children do.

  Attributes:
    name: such as training, for people.
    gain: what shows that it gets further, such as a new checkpoint, for people.
    Reached: how far it has come: a number that grows.
    Where: from where another child goes on, for people; None: from the checkpoint of the step that
      `Reached` tells.
  """

  name: str
  gain: str
  Reached: Callable[[], int]
  Where: Callable[[], str] | None = None


class _Failure(NamedTuple):
  """Why a child's end is no good one: the name under which it is counted, and a text for people."""

  kind: str
  why: str


class _Stopped(BaseException):
  """A signal came where there is nothing to save; no Exception: nobody takes it for an error."""


class Supervisor:
  """Starts workers of this machine if there are any, and children, until one has done the work."""

  def __init__(
    self,
    run: Callable[[cluster_spec.ClusterSpec | None, Mapping[str, int]], int],
    work: Work,
    start_workers: Callable[[], local_workers.LocalWorkers] | None = None,
    step_timeout: float | None = None,
    record: Callable[[int, Mapping[str, int]], None] | None = None,
  ) -> None:
    """Starts nothing.

    Args:
      run: does the work in the child; takes the local workers, None without any, and how often it
        failed so far, by kind; returns the exit status, `WORKER_FAILED` where another try may help.
        The process tells its status by `heartbeat.End` where its end may hang.
      work: what it is.
      start_workers: starts the local workers; they are started anew with each child.
      step_timeout: a child is ended where a step, or to read for it, takes so many seconds; None:
        ten times the median of the last of that kind, at least a minute, for a batch that is read
        ten. Writing of checkpoints has that limit in any case, of at least ten minutes.
      record: told of each failure while there is no child: what is reached, and the failures so
        far, by kind; 'gave_up' is one of them.
    """
    self._run = run
    self._work = work
    self._start_workers = start_workers
    self._step_timeout = step_timeout
    self._record = record
    self._child = 0
    self._received: list[int] = []
    self._is_starting = False
    self._failures: Counter[str] = Counter()
    self._signals = stop_request.Signals()

  def Run(self) -> int:
    """Returns the exit status: of this process, and, in each child, of the child."""
    for number in self._signals:
      signal.signal(number, self._Forward)
    in_a_row, reached = 0, self._work.Reached()
    supervisor = os.getpid()
    failure: _Failure | None
    while True:
      try:
        workers = self._Start()
      except _Stopped:
        self._is_starting = False
        return 128 + self._received[0]
      except OSError as e:
        self._is_starting = False
        if not self._failures:  # A mistake, and nothing was done yet.
          raise
        status, failure = 1, _Failure('worker_failed', str(e))
      else:
        lifeline, signs = os.pipe(), os.pipe()
        self._child = os.fork()
        if not self._child:
          return self._InChild(supervisor, workers, lifeline, signs)
        os.close(lifeline[0])
        os.close(signs[1])
        try:
          signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
          status, failure = self._Watch(signs[0], workers)
        finally:
          self._child = 0
          os.close(lifeline[1])
          os.close(signs[0])
          if workers is not None:
            workers.Close()
      if self._received:
        return 128 + self._received[0] if failure else status
      if not failure:
        return status
      now = self._Reached(reached)
      in_a_row, reached = (1, now) if now > reached else (in_a_row + 1, reached)
      gives_up = in_a_row > MAX_RESTARTS
      self._failures.update([failure.kind, *(['gave_up'] if gives_up else [])])
      if gives_up:
        found = f'{in_a_row} times in a row without {self._work.gain}: giving up'
        logging.error('%s; %s', failure.why, found)
      else:
        where = self._work.Where() if self._work.Where else FromStep(now)
        logging.warning('%s; %s goes on %s', failure.why, self._work.name, where)
      if self._record:
        self._record(now, self._failures)
      if gives_up:
        return status or 1
      self._Pause(_PauseSeconds(in_a_row))

  def _Reached(self, reached: int) -> int:
    """How far the work has come; where that cannot be read now, what was reached before."""
    try:
      return self._work.Reached()
    except OSError as e:  # What made the child fail may have made this fail, too, and be over soon.
      logging.warning('%s', e)
      return reached

  def _Start(self) -> local_workers.LocalWorkers | None:
    """Starts the workers; raises _Stopped where a signal comes before there is a child to have it.

    From its return on a signal waits until it is clear whose it is.
    """
    self._is_starting = True
    if self._received:
      raise _Stopped
    workers = self._start_workers() if self._start_workers else None
    for stream in (sys.stdout, sys.stderr):
      with suppress(OSError):  # Nobody reads it any more.
        stream.flush()  # Else the child writes what waits here, too.
    signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
    self._is_starting = False
    return workers

  def _Forward(self, number: int, frame: types.FrameType | None) -> None:
    self._received.append(number)
    if self._is_starting:
      raise _Stopped
    if self._child:
      with suppress(ProcessLookupError):
        os.kill(self._child, number)

  def _Pause(self, seconds: float) -> None:
    """Waits, but not longer than for a signal."""
    signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
    found = None if self._received else signal.sigtimedwait(self._signals, seconds)
    if found:
      self._received.append(found.si_signo)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)

  def _InChild(
    self,
    supervisor: int,
    workers: local_workers.LocalWorkers | None,
    lifeline: tuple[int, int],
    signs: tuple[int, int],
  ) -> int:
    local_workers.EndWithStarter(supervisor)
    for number in self._signals:
      signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
    # Ctrl-C in a terminal goes to the whole group; the supervisor forwards it, once.
    os.setpgid(0, 0)
    os.close(lifeline[1])
    os.close(signs[0])
    if workers is not None:
      workers.LeaveToStarter()
    threading.Thread(target=_EndWith, args=(lifeline[0],), name='supervisor', daemon=True).start()
    heartbeat.SendTo(signs[1])
    return self._run(workers.spec if workers else None, self._failures)

  def _Watch(
    self, descriptor: int, workers: local_workers.LocalWorkers | None
  ) -> tuple[int, _Failure | None]:
    """Waits for the child's end; returns its status, and why it is no good end."""
    signs = _Signs(self._step_timeout, time.monotonic())
    gone = math.inf  # By when the child is to tell itself that a local worker has ended.
    while True:
      if workers is not None and gone == math.inf and workers.HaveEnded():
        gone = time.monotonic() + _END_SECONDS
      seconds = max(0.0, min(signs.limit.deadline, gone) - time.monotonic())
      if workers is not None:
        seconds = min(seconds, _POLL_SECONDS)
      ready, _, _ = select.select([descriptor], [], [], seconds)
      if ready:
        message = os.read(descriptor, _PIPE_BYTES)
        if not message:
          status = self._Reap()
          # What it has told counts where it then crashed.
          return self._Judged(status if status >= 0 or signs.status is None else signs.status)
        signs.Take(message, time.monotonic())
      limit, now = signs.limit, time.monotonic()
      if now >= min(limit.deadline, gone):  # Of a write that hangs others' signs tell nothing.
        os.kill(self._child, signal.SIGKILL)
        self._Reap()
        if signs.status is not None:
          return self._Judged(signs.status)
        if now >= gone:  # It may have connected to one that was no longer there.
          return 1, _Failure('worker_failed', 'a local worker ended')
        why = f'no {limit.what} within {limit.seconds:.1f} s: a worker may hang'
        return 1, _Failure('no_step', why)

  def _Judged(self, status: int) -> tuple[int, _Failure | None]:
    """(exit status, why it is no good end)."""
    if status == WORKER_FAILED:
      return 1, _Failure('worker_failed', 'a worker failed')
    if status < 0:
      why = f'the {self._work.name} process ended by signal {-status}'
      return 1, _Failure('process_died', why)
    return status, None

  def _Reap(self) -> int:
    """Waits for the child's end; its status. No signal goes to a process that has its number."""
    os.waitid(os.P_PID, self._child, os.WEXITED | os.WNOWAIT)
    child, self._child = self._child, 0
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class _Limit(NamedTuple):
  """By when another sign is to come, after how many seconds, and what was not done if none does."""

  deadline: float
  seconds: float
  what: str


class _Signs:
  """What a child has told.

  Attributes:
    status: the exit status with which it ends, once it has said so.
  """

  def __init__(self, step_timeout: float | None, now: float) -> None:
    self.status: int | None = None
    self._step_timeout = step_timeout
    self._times: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_NUM_TIMES))
    # Of a write, and of all that goes on beside it: the kind that has begun, and when.
    self._begun: dict[bool, tuple[int, float]] = {}
    self._limits = {False: _Limit(now + _LONG_SECONDS, _LONG_SECONDS, _STEP)}
    self._is_end = False

  @property
  def limit(self) -> _Limit:
    """What must come first."""
    return min(self._limits.values())

  def Take(self, message: bytes, now: float) -> None:
    """Takes what was read at this time: some signs, of which the last may be incomplete."""
    for byte in message:
      if self._is_end:
        self.status = byte if self.status is None else self.status
      elif byte == heartbeat.END[0]:
        self._is_end = True
        self._limits = {False: _Limit(now + _END_SECONDS, _END_SECONDS, _STEP)}
      else:
        self._TakeSign(byte, now)

  def _TakeSign(self, sign: int, now: float) -> None:
    kind = bytes([sign]).lower()[0]
    is_write = kind == heartbeat.WRITE[0]
    begun = self._begun.pop(is_write, None)
    seconds, what = math.inf if is_write else _LONG_SECONDS, _STEP
    if kind in heartbeat.KINDS:
      if sign != kind:
        self._begun[is_write] = kind, now
        seconds, what = self._StepLimit(kind), _WHAT.get(kind, _STEP)
      # Where both signs were read at once this process was late, and knows no time.
      elif begun is not None and begun[0] == kind and begun[1] < now:
        self._times[kind].append(now - begun[1])
    self._limits[is_write] = _Limit(now + seconds, seconds, what)

  def _StepLimit(self, kind: int) -> float:
    if self._step_timeout is not None and kind != heartbeat.WRITE[0]:
      return self._step_timeout
    times = self._times[kind]
    if len(times) < _LEAST_TIMES:
      return _LONG_SECONDS
    is_stored = kind in heartbeat.READ + heartbeat.WRITE
    least = _LEAST_STORE_SECONDS if is_stored else _LEAST_SECONDS
    return max(least, 10 * statistics.median(times))


def FromStep(step: int) -> str:
  """Says that work goes on from the checkpoint of a step; of -1: that there is none."""
  return f'from the checkpoint of step {step}' if step >= 0 else 'from its beginning'


def _PauseSeconds(failures: int) -> float:
  """The pause after so many failures in a row: a worker may need time to come back."""
  return min(_LONGEST_PAUSE_SECONDS, _PAUSE_SECONDS * 2.0 ** (failures - 1))


def _EndWith(lifeline: int) -> None:
  """Ends this process when the supervisor has ended."""
  os.read(lifeline, 1)
  os._exit(1)
