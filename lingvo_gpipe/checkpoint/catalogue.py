# SPDX-License-Identifier: Apache-2.0
"""Lists and verifies the committed checkpoints of a directory. Reads only."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from absl import logging

from lingvo_gpipe.checkpoint import checkpoint_info, tensor_bundle
from lingvo_gpipe.core import files

CheckpointInfo = checkpoint_info.CheckpointInfo
DamagedError = tensor_bundle.DamagedError


class Catalogue:
  """The committed checkpoints of one directory.

  Reading is safe while another process saves and removes checkpoints.

  Attributes:
    directory: path of the directory that holds the checkpoints.
  """

  def __init__(self, directory: str | os.PathLike[str]) -> None:
    """Touches no file."""
    self.directory = os.fspath(directory)
    self._verified: set[str] = set()  # Prefixes that this process has read in full.
    self._bad: dict[str, str] = {}  # {prefix or path of a commit file: reason}

  def All(self) -> list[CheckpointInfo]:
    """Returns the committed checkpoints by ascending step. Does not look at data files.

    Raises:
      ValueError: a checkpoint was written by a newer version of this program.
      OSError: the directory cannot be read.
    """
    return self._List()[0]

  def Latest(self) -> CheckpointInfo | None:
    """Returns the newest checkpoint that reads back in full, or None if there are no checkpoints.

    Reads each checkpoint at most once per process. Logs a warning that names each damaged
    checkpoint and skips it.

    Raises:
      DamagedError: there are checkpoints, but none can be read. The caller decides whether to start
        training from scratch.
      ValueError: a checkpoint was written by a newer version of this program.
      OSError: the directory cannot be read.
    """
    return self._Newest(self.Verify)

  def Verify(self, info: CheckpointInfo) -> None:
    """Reads a checkpoint in full, once per process, and checks all sizes and checksums.

    Raises:
      DamagedError: the checkpoint is damaged; the message names it and the damage.
    """
    if info.prefix in self._verified:
      return
    try:
      tensor_bundle.Verify(info.prefix, info.tensors, info.written)
    except DamagedError as e:
      raise self._MakeDamagedError(info, e) from e
    self._verified.add(info.prefix)

  def IsKnownDamaged(self, info: CheckpointInfo) -> bool:
    """Whether this process failed to read a checkpoint and has logged a warning about it."""
    return info.prefix in self._bad

  def ReadMetadata(self, info: CheckpointInfo) -> dict[str, Any]:
    """Returns a copy of the metadata that the checkpoint was saved with."""
    return copy.deepcopy(dict(info.metadata))

  def _Newest(self, check: Callable[[CheckpointInfo], Any]) -> CheckpointInfo | None:
    """Returns the newest checkpoint for which `check(info)` does not raise DamagedError."""
    while True:
      infos, unreadable = self._List()
      vanished = False
      for info in reversed(infos):
        if self.IsKnownDamaged(info):
          continue
        try:
          check(info)
          return info
        except DamagedError:
          # The writer may have removed this checkpoint while it was read. If so, list again.
          vanished = not self.IsKnownDamaged(info)
          if vanished:
            break
      if vanished:
        continue
      if infos or unreadable:
        bad = {os.path.relpath(key, self.directory): reason for key, reason in self._bad.items()}
        raise DamagedError(
          f'None of the {len(infos) + len(unreadable)} checkpoints in {self.directory!r} can be '
          'read: '
          + '; '.join(f'{name}: {reason}' for name, reason in list(bad.items())[:3])
          + '. Use another directory, or move these checkpoints away to start from scratch.'
        )
      return None

  def _List(self) -> tuple[list[CheckpointInfo], list[int]]:
    """Returns (committed checkpoints by step, steps of the commit files that cannot be read)."""
    infos, unreadable = [], []
    for name in self._FileNames():
      match = checkpoint_info.COMMIT.fullmatch(name)
      if not match or name != checkpoint_info.CommitName(int(match[1])):
        continue
      path = os.path.join(self.directory, name)
      try:
        infos.append(checkpoint_info.ParseCommit(self.directory, path, ReadText(path)))
        self._bad.pop(path, None)
      except tf.errors.NotFoundError:
        continue  # It was removed after the listing.
      except files.FILE_ERRORS as e:
        self._NoteBad(path, files.OneLine(e))
        unreadable.append(int(match[1]))
    return sorted(infos, key=lambda info: info.step), unreadable

  def _FileNames(self) -> list[str]:
    """Returns the names in the directory, or [] if it does not exist."""
    try:
      # isdir and exists also return False if the file system cannot be reached. A run must not
      # start from scratch then.
      tf.io.gfile.stat(self.directory)
    except tf.errors.NotFoundError:
      return []
    except files.FILE_ERRORS as e:
      raise self._MakeUnreadableError(e) from e
    try:
      # Object stores list folders with a slash at the end.
      return sorted(name.rstrip('/') for name in tf.io.gfile.listdir(self.directory))
    except files.FILE_ERRORS as e:
      raise self._MakeUnreadableError(e) from e

  def _MakeUnreadableError(self, error: Exception) -> OSError:
    reason = files.OneLine(error)
    return OSError(f'Cannot read the checkpoint directory {self.directory!r}: {reason}.')

  def _NoteBad(self, key: str, reason: str) -> None:
    """Remembers a damaged checkpoint and logs a warning, once per process."""
    if key not in self._bad:
      self._bad[key] = reason
      logging.warning('Skipping damaged checkpoint %s: %s.', key, reason)

  def _MakeDamagedError(self, info: CheckpointInfo, error: Exception) -> DamagedError:
    """Returns an error that names the checkpoint. Remembers it as damaged if it still exists."""
    reason = files.OneLine(error)
    if info in self.All():
      self._verified.discard(info.prefix)
      self._NoteBad(info.prefix, reason)
    return DamagedError(f'Checkpoint {info.prefix} cannot be read: {reason}.')


def ReadText(path: str) -> str:
  """Returns the text of a file that may be damaged."""
  with tf.io.gfile.GFile(path, 'rb') as f:
    data = f.read()
  # A flipped bit need not be UTF-8; the commit file's digest detects it.
  return data.decode('utf-8', errors='replace')
