# SPDX-License-Identifier: Apache-2.0
"""Lets one trainer at a time use a directory; the lock of a killed trainer does not block the next.

On a local path the lock is an flock, which the operating system releases however the process ends.
On other paths (gs://...), and on file systems without locks, it is a lease: a small file that its
holder rewrites every `BEAT_SECONDS`. Another trainer may take over a lease that has not changed for
`LIFETIME_SECONDS`, or whose process is known to have ended. Clocks of different machines are never
compared.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

import tensorflow as tf
from absl import logging

from lingvo_gpipe.core import files

FILE_NAME = 'trainer.lock'

# Interval at which a lease is rewritten, and how long a lease is valid that nobody rewrites.
BEAT_SECONDS = 10.0
LIFETIME_SECONDS = 60.0
# If two trainers take a free lease at the same time, the last writer holds it after this time.
SETTLE_SECONDS = 2.0
# Much longer than `Watch` holds the lock to test it.
_LOOK_SECONDS = 0.1


class InUseError(OSError):
  """Another trainer uses the directory."""


class LostError(OSError):
  """The error of a trainer that no longer holds the directory."""


class Lock(Protocol):
  """Exclusive use of a directory."""

  def Check(self) -> None:
    """Raises LostError if another trainer took the directory, or it no longer exists."""

  def Release(self) -> None:
    """Lets the next trainer use the directory."""


@contextlib.contextmanager
def HoldLock(directory: str) -> Iterator[Lock]:
  """Holds the lock of a directory while the enclosed code runs; creates a missing directory.

  Args:
    directory: any path that tf.io.gfile accepts. If the lock is a lease that may still be held,
      watches it for up to LIFETIME_SECONDS first.

  Raises:
    InUseError: another trainer holds the lock; one line that names its process.
    OSError: the directory cannot be written.
  """
  lock: Lock
  try:
    lock = _FileLock(directory) if files.IsLocal(directory) else _Lease(directory)
  except _NoLocksError:
    lock = _Lease(directory)
  try:
    yield lock
  finally:
    lock.Release()


class Watch:
  """Measures for how long nobody has held a directory, without taking or writing anything."""

  def __init__(self, directory: str) -> None:
    """Starts to measure; touches no file."""
    self._directory = directory
    self._last_lease: dict[str, Any] = {}
    self._last_held = time.monotonic()  # Last time that the directory was held; first, the start.

  def SecondsFree(self) -> float:
    """Returns for how many seconds nobody was seen to hold the directory. Call it repeatedly.

    Returns 0.0 while a lease may be held: a lease that nobody rewrites is valid for
    LIFETIME_SECONDS.
    """
    is_held = _IsLocked(self._directory) if files.IsLocal(self._directory) else None
    may_be_held = False
    if is_held is None:
      lease = {}
      # If the lock file is unreachable, report the directory as not held.
      with contextlib.suppress(*files.FILE_ERRORS):
        lease = _ReadRecord(os.path.join(self._directory, FILE_NAME))
      may_be_held = bool(lease) and not _HasEnded(lease)
      is_held = may_be_held and lease != self._last_lease
      self._last_lease = lease
    now = time.monotonic()
    if is_held:
      self._last_held = now
    free = now - self._last_held
    return 0.0 if may_be_held and free < LIFETIME_SECONDS else free


def _IsLocked(directory: str) -> bool | None:
  """Whether some process holds the flock; None if the file system has no flock."""
  try:
    file = os.open(os.path.join(directory, FILE_NAME), os.O_RDONLY)
  except OSError:
    return False
  try:
    # A shared lock, held for a moment: several processes may test at once.
    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return False
  except BlockingIOError:
    return True
  except OSError:
    return None
  finally:
    os.close(file)


class _NoLocksError(Exception):
  """The file system does not support flock."""


class _FileLock:
  """An flock on a file. Never removes it, or two processes could lock two files of its name."""

  def __init__(self, directory: str) -> None:
    self._directory = directory
    self._path = os.path.join(directory, FILE_NAME)
    files.MakeDirs(FILE_NAME, directory)
    try:
      # NOFOLLOW: the file is truncated below, which must not happen to the target of a link.
      self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as e:
      raise files.CannotWrite(FILE_NAME, directory, e) from e
    try:
      self._Lock()
    except OSError as e:
      holder = _ParseRecord(os.pread(self._file, 4096, 0))
      os.close(self._file)
      if not isinstance(e, BlockingIOError):
        raise _NoLocksError() from e
      raise _InUseError(directory, holder) from None
    # A forked process inherits the open file, and with it the lock, and may outlive this process.
    os.register_at_fork(after_in_child=self._Close)
    with contextlib.suppress(OSError):  # The record only serves messages, and the disk may be full.
      os.ftruncate(self._file, 0)
      os.pwrite(self._file, json.dumps(_OwnRecord()).encode(), 0)

  def _Lock(self) -> None:
    try:
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      time.sleep(_LOOK_SECONDS)  # A `Watch` may have held it for a moment.
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

  def Check(self) -> None:
    try:
      stat = os.stat(self._path)
    except OSError as e:
      raise _LostError(self._directory, files.OneLine(e)) from e
    if not os.path.samestat(stat, os.fstat(self._file)):
      raise _LostError(self._directory, 'another directory or lock file has replaced it')

  def Release(self) -> None:
    self._Close()

  def _Close(self) -> None:
    if self._file >= 0:
      os.close(self._file)
      self._file = -1


class _Lease:
  """A file that its holder keeps rewriting."""

  def __init__(self, directory: str) -> None:
    self._directory = directory
    self._path = os.path.join(directory, FILE_NAME)
    self._record = {**_OwnRecord(), 'token': secrets.token_hex(8), 'beat': 0}
    self._released = threading.Event()
    self._mutex = threading.Lock()
    try:
      tf.io.gfile.makedirs(directory)
      self._AwaitFree()
      self._Write()
      if not self._released.wait(SETTLE_SECONDS) and not self._IsMine(record := self._Read()):
        raise _InUseError(directory, record)
    except InUseError:
      raise
    except files.FILE_ERRORS as e:
      raise files.CannotWrite(FILE_NAME, directory, e) from e
    self._thread = threading.Thread(target=self._Beat, name='lease', daemon=True)
    self._thread.start()

  def _AwaitFree(self) -> None:
    """Returns once the lease is free or expired; raises InUseError if its holder rewrites it."""
    first = self._Read()
    start = time.monotonic()
    if first and not _HasEnded(first):
      logging.info(
        '%s was held by %s: watching for up to %g s whether it still is',
        self._path, _Describe(first), LIFETIME_SECONDS,
      )  # fmt: skip
    record = first
    while record and not _HasEnded(record) and time.monotonic() - start < LIFETIME_SECONDS:
      time.sleep(BEAT_SECONDS / 4)
      record = self._Read()
      if record and record != first:
        raise _InUseError(self._directory, record)

  def _Read(self) -> dict[str, Any]:
    return _ReadRecord(self._path)

  def _Write(self) -> None:
    self._record['beat'] += 1
    files.WriteWhole(self._path, json.dumps(self._record))

  def _IsMine(self, record: dict[str, Any]) -> bool:
    return record.get('token') == self._record['token']

  def _Beat(self) -> None:
    while not self._released.wait(BEAT_SECONDS):
      # An unreachable file may be reachable at the next beat; `Check` reports it if not.
      with self._mutex, contextlib.suppress(*files.FILE_ERRORS):
        if not self._IsMine(self._Read()):
          return
        self._Write()

  def Check(self) -> None:
    end = time.monotonic() + LIFETIME_SECONDS
    while True:
      try:
        # On some file systems the file is missing for a moment while `_Beat` replaces it.
        with self._mutex:
          record = self._Read()
        break
      except files.FILE_ERRORS as e:
        if time.monotonic() >= end:
          raise _LostError(self._directory, files.OneLine(e)) from e
      time.sleep(BEAT_SECONDS / 4)
    if not self._IsMine(record):
      reason = f'{_Describe(record)} holds it' if record else 'its lock file was removed'
      raise _LostError(self._directory, reason)

  def Release(self) -> None:
    self._released.set()
    self._thread.join()
    with contextlib.suppress(*files.FILE_ERRORS):  # A lease that is not removed expires.
      if self._IsMine(self._Read()):
        tf.io.gfile.remove(self._path)


# --- records of holders ---------------------------------------------------------------------------


def _OwnRecord() -> dict[str, Any]:
  """Returns the record of this process as a holder."""
  pid = os.getpid()
  return {
    'host': socket.gethostname(),
    'pid': pid,
    'since': time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime()),
    'machine': _Machine(),
    'started': _StartTime(pid),
  }


def _Machine() -> str:
  """Returns an id of the scope of process ids: this boot and this container; '' if unknown."""
  try:
    with open('/proc/sys/kernel/random/boot_id', encoding='ascii') as f:
      return f'{f.read().strip()} {os.readlink("/proc/self/ns/pid")}'
  except OSError:
    return ''


def _StartTime(pid: int) -> str:
  """Returns the start time of a process in kernel ticks; '' if it does not exist or has ended."""
  try:
    with open(f'/proc/{pid}/stat', encoding='utf-8', errors='replace') as f:
      # The second field, the name, may contain spaces and parentheses; the state comes after it.
      fields = f.read().rpartition(')')[2].split()
      return '' if fields[0] in 'ZX' else fields[19]  # A zombie has ended.
  except (OSError, IndexError):
    return ''


def _HasEnded(record: dict[str, Any]) -> bool:
  """Whether the holder's process has surely ended."""
  pid = record.get('pid')
  if not isinstance(pid, int) or record.get('machine') != _Machine() or not record['machine']:
    return False
  return bool(record.get('started') != _StartTime(pid))


def _ReadRecord(path: str) -> dict[str, Any]:
  """Returns the record in a lock file; {} if the file is missing or empty, as no lease is."""
  try:
    with tf.io.gfile.GFile(path, 'rb') as f:
      data = f.read()
      return _ParseRecord(data) if data else {}
  except tf.errors.NotFoundError:
    return {}


def _ParseRecord(data: bytes) -> dict[str, Any]:
  """Parses a holder's record; an unreadable record is kept as text, so that changes show."""
  try:
    record = json.loads(data)
  except (ValueError, RecursionError):
    record = None
  return record if isinstance(record, dict) else {'text': repr(data[:200])}


def _Describe(record: dict[str, Any]) -> str:
  if not {'pid', 'host', 'since'} <= record.keys():
    return 'another process'
  return f'process {record["pid"]} on {record["host"]}, since {record["since"]}'


def _InUseError(directory: str, record: dict[str, Any]) -> InUseError:
  return InUseError(
    f'{directory!r} is in use by another trainer ({_Describe(record)}). Wait for its end, stop it, '
    'or use another --logdir.'
  )


def _LostError(directory: str, reason: str) -> LostError:
  return LostError(
    f'this trainer lost its directory {directory!r}: {reason}. It saves nothing more there. Find '
    'out why, then restart it.'
  )
