# SPDX-License-Identifier: Apache-2.0
"""One trainer a directory: a second one is refused, and none is held up by one that was killed.

On a local path the lock is the operating system's (flock), which ends with its process however that
ends. Elsewhere (gs://...), and where a file system has no locks, it is a lease: a small file that
its holder writes anew every `BEAT_SECONDS`. A lease that has not changed for `LIFETIME_SECONDS`, or
whose process is known to be gone, is taken over. No clocks of two machines are compared.
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

# How often a lease is written, and how long one counts that nobody writes.
BEAT_SECONDS = 10.0
LIFETIME_SECONDS = 60.0
# Of two that take a free lease at the same time, the one that wrote last has it after this long.
SETTLE_SECONDS = 2.0
# Much longer than one who only looks has a lock.
_LOOK_SECONDS = 0.1


class InUseError(OSError):
  """Another trainer works in the directory."""


class LostError(OSError):
  """The directory is no longer this trainer's."""


class Lock(Protocol):
  """What holds a directory."""

  def Check(self) -> None:
    """Raises LostError where the directory went to another trainer, or is not there any more."""

  def Release(self) -> None:
    """Lets the next trainer in."""


@contextlib.contextmanager
def Held(directory: str) -> Iterator[Lock]:
  """Holds a directory while the enclosed code runs; makes it where it is missing.

  Args:
    directory: any path that tf.io.gfile takes. Where the lock is a lease that somebody may still
      hold, it is watched for up to LIFETIME_SECONDS first.

  Raises:
    InUseError: another trainer has it; one line that names it.
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
  """Sees for how long nobody has held a directory; takes and writes nothing."""

  def __init__(self, directory: str) -> None:
    """Begins to count; touches no file."""
    self._directory = directory
    self._held: dict[str, Any] = {}  # The lease that was seen last.
    self._since = time.monotonic()  # When somebody was seen to hold it, or this began.

  def SecondsFree(self) -> float:
    """How long nobody was seen to hold the directory; to be called again and again.

    0.0 while somebody may hold a lease: one that is not written counts for LIFETIME_SECONDS.
    """
    is_held = _IsLocked(self._directory) if files.IsLocal(self._directory) else None
    may_be_held = False
    if is_held is None:
      held = {}
      # Where it cannot be reached, nobody was seen.
      with contextlib.suppress(*files.FILE_ERRORS):
        held = _ReadRecord(os.path.join(self._directory, FILE_NAME))
      may_be_held = bool(held) and not _IsGone(held)
      is_held = may_be_held and held != self._held
      self._held = held
    now = time.monotonic()
    if is_held:
      self._since = now
    free = now - self._since
    return 0.0 if may_be_held and free < LIFETIME_SECONDS else free


def _IsLocked(directory: str) -> bool | None:
  """Whether somebody holds the operating system's lock; None where there are no such locks."""
  try:
    file = os.open(os.path.join(directory, FILE_NAME), os.O_RDONLY)
  except OSError:
    return False
  try:
    # For a moment, and beside others who look.
    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return False
  except BlockingIOError:
    return True
  except OSError:
    return None
  finally:
    os.close(file)


class _NoLocksError(Exception):
  """The file system does not know flock."""


class _FileLock:
  """An flock on a file, which stays there: were it removed, two could hold two of its name."""

  def __init__(self, directory: str) -> None:
    self._directory = directory
    self._path = os.path.join(directory, FILE_NAME)
    try:
      os.makedirs(directory, exist_ok=True)
      # What a link leads to is not to be emptied below.
      self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as e:
      raise files.CannotWrite(FILE_NAME, directory, e) from e
    try:
      self._Lock()
    except OSError as e:
      held = _Parsed(os.pread(self._file, 4096, 0))
      os.close(self._file)
      if not isinstance(e, BlockingIOError):
        raise _NoLocksError() from e
      raise _InUse(directory, held) from None
    # A forked process has the file open too, and may outlive this one.
    os.register_at_fork(after_in_child=self._Close)
    with contextlib.suppress(OSError):  # It is only for people; the disk may be full.
      os.ftruncate(self._file, 0)
      os.pwrite(self._file, json.dumps(_Myself()).encode(), 0)

  def _Lock(self) -> None:
    try:
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      time.sleep(_LOOK_SECONDS)  # Perhaps it was one who looked, see `Watch`.
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

  def Check(self) -> None:
    try:
      there = os.stat(self._path)
    except OSError as e:
      raise _Lost(self._directory, files.OneLine(e)) from e
    if not os.path.samestat(there, os.fstat(self._file)):
      raise _Lost(self._directory, 'another directory or lock file has taken its place')

  def Release(self) -> None:
    self._Close()

  def _Close(self) -> None:
    if self._file >= 0:
      os.close(self._file)
      self._file = -1


class _Lease:
  """A file whose holder keeps changing it."""

  def __init__(self, directory: str) -> None:
    self._directory = directory
    self._path = os.path.join(directory, FILE_NAME)
    self._record = {**_Myself(), 'token': secrets.token_hex(8), 'beat': 0}
    self._released = threading.Event()
    self._mutex = threading.Lock()
    try:
      tf.io.gfile.makedirs(directory)
      self._AwaitFree()
      self._Write()
      if not self._released.wait(SETTLE_SECONDS) and not self._IsMine(held := self._Read()):
        raise _InUse(directory, held)
    except InUseError:
      raise
    except files.FILE_ERRORS as e:
      raise files.CannotWrite(FILE_NAME, directory, e) from e
    self._thread = threading.Thread(target=self._Beat, name='lease', daemon=True)
    self._thread.start()

  def _AwaitFree(self) -> None:
    """Returns where nobody has the lease, or nobody uses it; raises InUseError else."""
    first = self._Read()
    start = time.monotonic()
    if first and not _IsGone(first):
      logging.info(
        '%s was held by %s: watching for up to %g s whether it still is',
        self._path, _Describe(first), LIFETIME_SECONDS,
      )  # fmt: skip
    held = first
    while held and not _IsGone(held) and time.monotonic() - start < LIFETIME_SECONDS:
      time.sleep(BEAT_SECONDS / 4)
      held = self._Read()
      if held and held != first:
        raise _InUse(self._directory, held)

  def _Read(self) -> dict[str, Any]:
    return _ReadRecord(self._path)

  def _Write(self) -> None:
    self._record['beat'] += 1
    files.WriteWhole(self._path, json.dumps(self._record))

  def _IsMine(self, held: dict[str, Any]) -> bool:
    return held.get('token') == self._record['token']

  def _Beat(self) -> None:
    while not self._released.wait(BEAT_SECONDS):
      # What cannot be reached now may be at the next beat; Check tells in any case.
      with self._mutex, contextlib.suppress(*files.FILE_ERRORS):
        if not self._IsMine(self._Read()):
          return
        self._Write()

  def Check(self) -> None:
    end = time.monotonic() + LIFETIME_SECONDS
    while True:
      try:
        with self._mutex:  # Some file systems have no file for a moment while one replaces it.
          held = self._Read()
        break
      except files.FILE_ERRORS as e:
        if time.monotonic() >= end:
          raise _Lost(self._directory, files.OneLine(e)) from e
      time.sleep(BEAT_SECONDS / 4)
    if not self._IsMine(held):
      why = f'{_Describe(held)} has it' if held else 'its lock file was removed'
      raise _Lost(self._directory, why)

  def Release(self) -> None:
    self._released.set()
    self._thread.join()
    with contextlib.suppress(*files.FILE_ERRORS):  # It expires by itself.
      if self._IsMine(self._Read()):
        tf.io.gfile.remove(self._path)


# --- who ------------------------------------------------------------------------------------------


def _Myself() -> dict[str, Any]:
  """What is written of a holder."""
  pid = os.getpid()
  return {
    'host': socket.gethostname(),
    'pid': pid,
    'since': time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime()),
    'machine': _Machine(),
    'started': _Started(pid),
  }


def _Machine() -> str:
  """Where process ids mean the same: this boot of this machine, this container. '' if unknown."""
  try:
    with open('/proc/sys/kernel/random/boot_id', encoding='ascii') as f:
      return f'{f.read().strip()} {os.readlink("/proc/self/ns/pid")}'
  except OSError:
    return ''


def _Started(pid: int) -> str:
  """When a process started, in the kernel's ticks; '' where it is none, or one that has ended."""
  try:
    with open(f'/proc/{pid}/stat', encoding='utf-8', errors='replace') as f:
      # Behind the name, which may hold anything, the state is the third field.
      fields = f.read().rpartition(')')[2].split()
      return '' if fields[0] in 'ZX' else fields[19]  # A zombie only waits to be counted.
  except (OSError, IndexError):
    return ''


def _IsGone(held: dict[str, Any]) -> bool:
  """Whether the holder's process surely is no more."""
  pid = held.get('pid')
  if not isinstance(pid, int) or held.get('machine') != _Machine() or not held['machine']:
    return False
  return bool(held.get('started') != _Started(pid))


def _ReadRecord(path: str) -> dict[str, Any]:
  """What the file of a lock holds; {} where there is none, or an empty one: no lease is empty."""
  try:
    with tf.io.gfile.GFile(path, 'rb') as f:
      data = f.read()
      return _Parsed(data) if data else {}
  except tf.errors.NotFoundError:
    return {}


def _Parsed(data: bytes) -> dict[str, Any]:
  """A holder's record; one that cannot be read is kept as text, to see it change."""
  try:
    record = json.loads(data)
  except (ValueError, RecursionError):
    record = None
  return record if isinstance(record, dict) else {'text': repr(data[:200])}


def _Describe(held: dict[str, Any]) -> str:
  if not {'pid', 'host', 'since'} <= held.keys():
    return 'another process'
  return f'process {held["pid"]} on {held["host"]}, since {held["since"]}'


def _InUse(directory: str, held: dict[str, Any]) -> InUseError:
  return InUseError(
    f'{directory!r} is in use: another trainer works there ({_Describe(held)}). Wait for its end '
    'or stop it, or give another --logdir.'
  )


def _Lost(directory: str, why: str) -> LostError:
  return LostError(
    f'{directory!r} is no longer the directory that this trainer began to work in: {why}. Nothing '
    'more is saved there. See where it went, and start again.'
  )
