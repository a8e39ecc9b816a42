# SPDX-License-Identifier: Apache-2.0
"""Trains or evaluates in a child process, and continues in another one after a worker failed.

TensorFlow's context cannot be repaired once a worker that it was connected to has died, and a
worker that hangs makes a step wait forever. Therefore the context lives in a process that can be
replaced: a fork of this process, which has imported TensorFlow but not used it.
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

# Exit status of a child after a worker failed (EX_TEMPFAIL of sysexits.h).
WORKER_FAILED = 75

# Maximum number of restarts in a row without progress.
MAX_RESTARTS = 5

# Pause before the first restart, which doubles with each restart, and the longest pause.
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0

# Time limits without a sign of life: while something is compiled or read, and the minimum for a
# step.
_LONG_SECONDS = 1800.0
_MIN_SECONDS = 60.0
# A storage that is slow for minutes is not a hanging worker, nor is filling a shuffle buffer.
_MIN_STORE_SECONDS = 600.0
_END_SECONDS = 60.0
# Interval at which local workers are checked.
_POLL_SECONDS = 1.0

# Number of recent steps of a kind whose median time sets the limit, and the minimum number.
_NUM_TIMES, _MIN_TIMES = 50, 5

# The event that is missing when a limit is exceeded, by kind of step.
_STEP = 'step was done'
_EVENTS = {
  heartbeat.READ[0]: 'batch was read',
  heartbeat.WRITE[0]: 'checkpoint was written',
}

# Capacity of a pipe on Linux.
_PIPE_BYTES = 1 << 16


class Work(NamedTuple):
  """The work of the children.

  Attributes:
    name: name of the work for messages, such as 'training'.
    milestone: event that shows progress, for messages, such as 'a new checkpoint'.
    GetProgress: returns a number that grows with progress.
    DescribeStart: returns the point from which another child resumes, for messages. If None, it is
      the checkpoint of the step that `GetProgress` returns.
  """

  name: str
  milestone: str
  GetProgress: Callable[[], int]
  DescribeStart: Callable[[], str] | None = None


class _Failure(NamedTuple):
  """The failure of a child process: a kind, for counting, and a message."""

  kind: str
  message: str


class _Stopped(BaseException):
  """A signal came before there is anything to save. Not an Exception, so that nobody handles it."""


class Supervisor:
  """Starts children, and local workers if there are any, until a child has done the work."""

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
      run: does the work in the child. Takes the local workers (or None) and {kind: number of
        failures so far}. Returns the exit status, or `WORKER_FAILED` if another try may help. The
        child reports its status by `heartbeat.End` if its exit may hang.
      work: description of the work, and its progress.
      start_workers: starts the local workers; called for each child.
      step_timeout: time limit in seconds of a step, or of reading its batch, after which the child
        is killed. If None, ten times the median of recent steps of the same kind, but at least a
        minute for a step and ten minutes for reading a batch. Writing a checkpoint always has the
        limit of ten times the median, and at least ten minutes.
      record: called after each failure, while there is no child, with the progress and {kind:
        number of failures so far}; one of the kinds is 'gave_up'.
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
    """Supervises the children; returns the exit status, in a forked child of the child's work."""
    for number in self._signals:
      signal.signal(number, self._Forward)
    num_in_a_row, progress = 0, self._work.GetProgress()
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
        if not self._failures:  # A mistake of the user: nothing has run yet.
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
      now = self._ReadProgress(progress)
      num_in_a_row, progress = (1, now) if now > progress else (num_in_a_row + 1, progress)
      gives_up = num_in_a_row > MAX_RESTARTS
      self._failures.update([failure.kind, *(['gave_up'] if gives_up else [])])
      if gives_up:
        text = f'{num_in_a_row} times in a row without {self._work.milestone}: giving up'
        logging.error('%s; %s', failure.message, text)
      else:
        start = self._work.DescribeStart() if self._work.DescribeStart else FromStep(now)
        logging.warning('%s; resuming %s %s', failure.message, self._work.name, start)
      if self._record:
        self._record(now, self._failures)
      if gives_up:
        return status or 1
      self._Pause(_PauseSeconds(num_in_a_row))

  def _ReadProgress(self, progress: int) -> int:
    """Returns the progress of the work, or the previous progress if it cannot be read now."""
    try:
      return self._work.GetProgress()
    except OSError as e:  # The cause of the child's failure may affect this, too, and pass soon.
      logging.warning('%s', e)
      return progress

  def _Start(self) -> local_workers.LocalWorkers | None:
    """Starts the workers; raises _Stopped if a signal comes, because no child can receive it yet.

    Returns with the signals blocked. They stay pending until parent and child have forked.
    """
    self._is_starting = True
    if self._received:
      raise _Stopped
    workers = self._start_workers() if self._start_workers else None
    for stream in (sys.stdout, sys.stderr):
      with suppress(OSError):  # The reader may be gone.
        stream.flush()  # Otherwise the child writes the buffered text again.
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
    """Waits for this time or until a signal comes."""
    signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
    info = None if self._received else signal.sigtimedwait(self._signals, seconds)
    if info:
      self._received.append(info.si_signo)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)

  def _InChild(
    self,
    supervisor: int,
    workers: local_workers.LocalWorkers | None,
    lifeline: tuple[int, int],
    signs: tuple[int, int],
  ) -> int:
    local_workers.EndWithParent(supervisor)
    for number in self._signals:
      signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
    # Ctrl-C in a terminal goes to the whole process group. In its own group, the child receives it
    # once, from the supervisor.
    os.setpgid(0, 0)
    os.close(lifeline[1])
    os.close(signs[0])
    if workers is not None:
      workers.DetachInFork()
    threading.Thread(
      target=_EndWithSupervisor, args=(lifeline[0],), name='supervisor', daemon=True
    ).start()
    heartbeat.SendTo(signs[1])
    return self._run(workers.spec if workers else None, self._failures)

  def _Watch(
    self, descriptor: int, workers: local_workers.LocalWorkers | None
  ) -> tuple[int, _Failure | None]:
    """Waits for the child's end; returns (exit status, failure or None)."""
    signs = _Signs(self._step_timeout, time.monotonic())
    # Deadline for the child to notice by itself that a local worker has ended.
    noticed_by = math.inf
    while True:
      if workers is not None and noticed_by == math.inf and workers.AnyHasEnded():
        noticed_by = time.monotonic() + _END_SECONDS
      seconds = max(0.0, min(signs.limit.deadline, noticed_by) - time.monotonic())
      if workers is not None:
        seconds = min(seconds, _POLL_SECONDS)
      ready, _, _ = select.select([descriptor], [], [], seconds)
      if ready:
        message = os.read(descriptor, _PIPE_BYTES)
        if not message:
          status = self._Reap()
          # If the child crashed after it reported its status, the reported status counts.
          return self._Judge(status if status >= 0 or signs.status is None else signs.status)
        signs.Take(message, time.monotonic())
      limit, now = signs.limit, time.monotonic()
      # Checked after each message: signs of other steps must not extend the limit of a write.
      if now >= min(limit.deadline, noticed_by):
        os.kill(self._child, signal.SIGKILL)
        self._Reap()
        if signs.status is not None:
          return self._Judge(signs.status)
        if now >= noticed_by:  # The child may be waiting to connect to the ended worker.
          return 1, _Failure('worker_failed', 'a local worker ended')
        text = f'no {limit.event} within {limit.seconds:.1f} s: a worker may hang'
        return 1, _Failure('no_step', text)

  def _Judge(self, status: int) -> tuple[int, _Failure | None]:
    """Returns (exit status, failure or None) for the status of a child."""
    if status == WORKER_FAILED:
      return 1, _Failure('worker_failed', 'a worker failed')
    if status < 0:
      message = f'the {self._work.name} process was ended by signal {-status}'
      return 1, _Failure('process_died', message)
    return status, None

  def _Reap(self) -> int:
    """Waits for the child's end; returns its status. Never signals a later process of this id."""
    os.waitid(os.P_PID, self._child, os.WEXITED | os.WNOWAIT)
    child, self._child = self._child, 0
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class _Limit(NamedTuple):
  """A time limit for the next sign of life.

  Attributes:
    deadline: time, in seconds of the monotonic clock, at which the limit is exceeded.
    seconds: length of the limit.
    event: event that is missing if the limit is exceeded.
  """

  deadline: float
  seconds: float
  event: str


class _Signs:
  """The signs of life that a child has sent (see `heartbeat`), and the limit for the next one.

  Attributes:
    status: exit status of the child, once the child has reported it.
  """

  def __init__(self, step_timeout: float | None, now: float) -> None:
    self.status: int | None = None
    self._step_timeout = step_timeout
    self._times: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_NUM_TIMES))
    # {whether it is a write: (kind, time)} of the steps in progress. A write runs concurrently with
    # the other kinds.
    self._started: dict[bool, tuple[int, float]] = {}
    self._limits = {False: _Limit(now + _LONG_SECONDS, _LONG_SECONDS, _STEP)}
    self._is_end = False

  @property
  def limit(self) -> _Limit:
    """The limit with the earliest deadline."""
    return min(self._limits.values())

  def Take(self, message: bytes, now: float) -> None:
    """Processes signs read at this time; the last one may be incomplete."""
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
    started = self._started.pop(is_write, None)
    seconds, event = math.inf if is_write else _LONG_SECONDS, _STEP
    if kind in heartbeat.KINDS:
      if sign != kind:
        self._started[is_write] = kind, now
        seconds, event = self._StepLimit(kind), _EVENTS.get(kind, _STEP)
      # If both signs were read at once, this process was late and does not know the time.
      elif started is not None and started[0] == kind and started[1] < now:
        self._times[kind].append(now - started[1])
    self._limits[is_write] = _Limit(now + seconds, seconds, event)

  def _StepLimit(self, kind: int) -> float:
    """Returns the time limit in seconds of a step of this kind."""
    if self._step_timeout is not None and kind != heartbeat.WRITE[0]:
      return self._step_timeout
    times = self._times[kind]
    if len(times) < _MIN_TIMES:
      return _LONG_SECONDS
    is_stored = kind in heartbeat.READ + heartbeat.WRITE
    minimum = _MIN_STORE_SECONDS if is_stored else _MIN_SECONDS
    return max(minimum, 10 * statistics.median(times))


def FromStep(step: int) -> str:
  """Describes a resume from the checkpoint of a step, or from the beginning if the step is -1."""
  return f'from the checkpoint of step {step}' if step >= 0 else 'from the beginning'


def _PauseSeconds(failures: int) -> float:
  """Returns the pause after a number of failures in a row: a worker may need time to come back."""
  return min(_LONGEST_PAUSE_SECONDS, _PAUSE_SECONDS * 2.0 ** (failures - 1))


def _EndWithSupervisor(lifeline: int) -> None:
  """Ends this process when the supervisor ends and closes the pipe."""
  os.read(lifeline, 1)
  os._exit(1)
