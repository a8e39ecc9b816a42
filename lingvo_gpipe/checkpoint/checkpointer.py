# SPDX-License-Identifier: Apache-2.0
"""Saves and restores {path: variable} maps so that a kill at any moment loses nothing.

What lies in a directory (any path that tf.io.gfile takes):

    ckpt-00000205.json                    commit file: format, step, tensors, metadata; written last
    ckpt-00000205-1f2e3d4c/tensors.index  the tensors, a TensorFlow tensor bundle
    ckpt-00000205-1f2e3d4c/tensors.data-00000-of-00001

A save writes a folder under a name never used before, reads it back, and only then renames the
commit file into place; a folder that no commit file names does not count and the next save removes
it. The names in the file are the keys of the map (design 4.14): they know nothing of stages,
devices or Python objects. Everything read is data: JSON and tensors, no pickle.

Of a run on workers each writes the data files of its own tensors, and reads back what another one
wrote, where all share the directory (`LetWorkersWrite`); the bundle, the commit and the reading are
the same.
"""

from __future__ import annotations

import copy
import operator
import os
import re
import secrets
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from lingvo_gpipe.checkpoint import (
  checkpoint_info,
  checkpoint_retention,
  logdir_lock,
  tensor_bundle,
)
from lingvo_gpipe.core import files
from lingvo_gpipe.distributed import worker_hosts

CheckpointInfo = checkpoint_info.CheckpointInfo
DamagedError = tensor_bundle.DamagedError

_LEFTOVER_COMMIT = re.compile(r'ckpt-\d{8,20}\.json\.tmp-[0-9a-f]{8}')


class Checkpointer:
  """The checkpoints of one directory. One process writes; any number may read.

  Methods may be called from several threads; saves wait for each other.

  Attributes:
    directory: where the checkpoints are.
    workers: the hosts (see `worker_hosts`) that write and read what lies there; [] is this process
      alone.
  """

  def __init__(
    self,
    directory: str | os.PathLike[str],
    max_to_keep: int | None = 3,
    keep_every_n_hours: float | None = None,
  ) -> None:
    """Touches no file.

    Args:
      directory: where the checkpoints are; made by the first save.
      max_to_keep: see `checkpoint_retention.Retention`.
      keep_every_n_hours: the same.

    Raises:
      ValueError: a number is out of range.
    """
    self._retention = checkpoint_retention.Retention(max_to_keep, keep_every_n_hours)
    self.directory = os.fspath(directory)
    self.workers: list[str] = []
    self._lock = threading.Lock()
    self._is_made = False  # Whether this process has seen the directory.
    self._verified: set[str] = set()  # prefixes read in full by this process
    self._bad: dict[str, str] = {}  # {prefix or path of a commit file: what is wrong}

  def CheckWritable(self) -> None:
    """Makes the directory and writes and removes a small file: call it before the first step.

    Raises:
      OSError: one line that names the directory.
      ValueError: TensorFlow would not find what is there, for it takes the names for patterns.
    """
    probe = os.path.join(self.directory, f'ckpt-00000000.json.tmp-{secrets.token_hex(4)}')
    try:
      self._MakeDirectory()
      _WriteText(probe, 'a test\n')
      is_found = bool(tf.io.gfile.glob(probe))  # So RestoreV2 looks for files.
      tf.io.gfile.remove(probe)
    except files.FILE_ERRORS as e:
      raise files.CannotWrite('checkpoints', self.directory, e) from e
    if not is_found:
      raise ValueError(
        f'TensorFlow reads no checkpoints in {self.directory!r}, for it takes the name for a '
        'pattern: give a directory whose path has no [ and no backslash'
      )

  def LetWorkersWrite(self, devices: Collection[str]) -> None:
    """Has the workers write and read what lies on their devices, if all share this directory.

    That is tried once, now, and told in the log. Where it fails this process does all, as it does
    without workers. Call it after `CheckWritable`.

    Args:
      devices: those of the run, full names.
    """
    workers = worker_hosts.Of(devices)
    if not workers:
      return
    if files.IsLocal(self.directory):
      self.directory = os.path.abspath(self.directory)  # Workers may run elsewhere.
    if why := worker_hosts.WhyNotShared(self.directory, workers):
      logging.info('Checkpoints are written by this process alone: %s.', why)
      return
    self.workers = workers
    logging.info(
      'Checkpoints are written by each of %d workers for its own stages: all share %s.',
      len(workers),
      self.directory,
    )

  def Save(
    self,
    step: int,
    variables: Mapping[str, Any],
    metadata: Mapping[str, Any],
    protected: Collection[int] = (),
    lock: logdir_lock.Lock | None = None,
  ) -> str:
    """Writes a checkpoint, reads it back, commits it, and then removes the oldest ones.

    A checkpoint of the same step is replaced, at the moment of the commit. The values are taken
    while they are written: do not change them meanwhile, or give copies. Memory of each host beside
    the variables: up to 256 MiB, or twice the largest tensor if that is more.

    Args:
      step: training step, at least 0.
      variables: {path: tf.Variable, tf.Tensor or np.ndarray}, on any devices.
      metadata: dict with str keys of JSON values: dict, list (a tuple comes back as a list), str,
        int, float, bool, None.
      protected: the checkpoints of these steps stay, too.
      lock: of the directory; asked before the commit whether it still holds.

    Returns:
      Path of the commit file.

    Raises:
      ValueError, TypeError: an argument cannot be saved; nothing was written.
      OSError: a file cannot be written (or does not read back), or the directory was lost; earlier
        checkpoints are untouched.
    """
    step = operator.index(step)
    if step < 0:
      raise ValueError(f'A checkpoint has a step of at least 0, got {step}.')
    if not variables:
      raise ValueError(f'No variables were given to save at step {step} in {self.directory!r}.')
    for path in variables:
      if not isinstance(path, str) or not path:
        raise ValueError(f'The name of a variable is a text that is not empty, got {path!r}.')
    specs = {path: tensor_bundle.Spec(path, value) for path, value in variables.items()}
    checkpoint_info.CheckJson('metadata', metadata)
    with self._lock:
      return self._Save(step, variables, specs, metadata, protected, lock)

  def _Save(
    self,
    step: int,
    variables: Mapping[str, Any],
    specs: Mapping[str, tf.TensorSpec],
    metadata: Mapping[str, Any],
    protected: Collection[int],
    lock: logdir_lock.Lock | None,
  ) -> str:
    name = f'ckpt-{step:08d}'
    nonce = secrets.token_hex(4)
    folder = os.path.join(self.directory, f'{name}-{nonce}')
    prefix = os.path.join(folder, checkpoint_info.BUNDLE)
    commit = self._CommitPath(step)
    removable = False  # while there is a new folder that is surely not committed
    try:
      self._MakeDirectory()
      self._RemoveLeftovers()
      removable = True
      tf.io.gfile.mkdir(folder)
      placed = worker_hosts.Split(variables, self.workers)
      written = tensor_bundle.Write(prefix, variables, placed)
      tensor_bundle.Verify(prefix, specs, written, worker_hosts.ByOthers(placed))
      text = checkpoint_info.CommitText(step, os.path.basename(folder), specs, metadata, written)
      _WriteText(f'{commit}.tmp-{nonce}', text)
      checkpoint_info.ParseCommit(self.directory, commit, _ReadText(f'{commit}.tmp-{nonce}'))
      if lock is not None:  # Writing may have taken longer than a lease lasts.
        lock.Check()
      removable = False
      tf.io.gfile.rename(f'{commit}.tmp-{nonce}', commit, overwrite=True)
      files.Sync(self.directory)
    except files.FILE_ERRORS as e:
      # From the rename on it may be committed all the same; then the next save tidies up.
      if removable:
        self._Try(tf.io.gfile.rmtree, folder)
      if isinstance(e, logdir_lock.LostError):
        raise
      raise OSError(
        f'Cannot save the checkpoint of step {step} in {self.directory!r}: '
        f'{files.OneLine(e)}. Is there space, and may it be written? '
        'Earlier checkpoints are untouched.'
      ) from e
    self._verified.add(prefix)
    self._Try(self._RemoveOld, step, protected)
    return commit

  def _MakeDirectory(self) -> None:
    """Makes the directory, once: where somebody takes it away, no other one stands in its place."""
    if not self._is_made:
      tf.io.gfile.makedirs(self.directory)
      self._is_made = True

  def _RemoveOld(self, saved_step: int, protected: Collection[int]) -> None:
    """Removes what does not stay by the rule."""
    infos, unreadable = self._List()
    good = [info for info in infos if not self.IsKnownDamaged(info)]
    damaged = [info.step for info in infos if self.IsKnownDamaged(info)] + unreadable
    for step in self._retention.Removable(saved_step, good, damaged, protected):
      tf.io.gfile.remove(self._CommitPath(step))
    self._RemoveLeftovers()

  def _RemoveLeftovers(self) -> None:
    """Removes what killed saves left, and the folders whose commit file was removed or replaced."""
    good, unreadable = self._List()
    used = {os.path.basename(os.path.dirname(info.prefix)) for info in good}
    for name in self._ListDirectory():
      match = checkpoint_info.FOLDER.fullmatch(name)
      # Where the commit file cannot be read just now, its folder may be needed yet.
      if match and name not in used and int(match[1]) not in unreadable:
        self._Try(_RemoveFolder, os.path.join(self.directory, name))
      elif _LEFTOVER_COMMIT.fullmatch(name):
        self._Try(tf.io.gfile.remove, os.path.join(self.directory, name))

  def _Try(self, function: Callable[..., Any], *args: Any) -> None:
    """Calls what may fail without harm; a failure is logged."""
    try:
      function(*args)
    except files.FILE_ERRORS as e:
      logging.warning('Cannot tidy up in %s: %s.', self.directory, files.OneLine(e))

  def _CommitPath(self, step: int) -> str:
    return os.path.join(self.directory, f'ckpt-{step:08d}.json')

  def _ListDirectory(self) -> list[str]:
    """Returns the names in the directory, none where it does not exist."""
    try:
      # isdir and exists say no as well when they cannot tell, and a run must not start anew then.
      tf.io.gfile.stat(self.directory)
    except tf.errors.NotFoundError:
      return []
    except files.FILE_ERRORS as e:
      raise self._Unreadable(e) from e
    try:
      # Object stores list folders with a slash at the end.
      return sorted(name.rstrip('/') for name in tf.io.gfile.listdir(self.directory))
    except files.FILE_ERRORS as e:
      raise self._Unreadable(e) from e

  def _Unreadable(self, error: Exception) -> OSError:
    reason = files.OneLine(error)
    return OSError(f'Cannot read the checkpoint directory {self.directory!r}: {reason}.')

  def _List(self) -> tuple[list[CheckpointInfo], list[int]]:
    """Returns (committed checkpoints by step, steps whose commit file cannot be read)."""
    infos, unreadable = [], []
    for name in self._ListDirectory():
      match = checkpoint_info.COMMIT.fullmatch(name)
      if not match or name != f'ckpt-{int(match[1]):08d}.json':
        continue
      path = os.path.join(self.directory, name)
      try:
        infos.append(checkpoint_info.ParseCommit(self.directory, path, _ReadText(path)))
        self._bad.pop(path, None)
      except tf.errors.NotFoundError:
        continue  # Removed since it was listed.
      except files.FILE_ERRORS as e:
        self._NoteBad(path, files.OneLine(e))
        unreadable.append(int(match[1]))
    return sorted(infos, key=lambda info: info.step), unreadable

  def _NoteBad(self, key: str, reason: str) -> None:
    """Remembers a bad checkpoint and warns of it, once in a process."""
    if key not in self._bad:
      self._bad[key] = reason
      logging.warning('Damaged checkpoint %s is passed over: %s.', key, reason)

  def All(self) -> list[CheckpointInfo]:
    """Returns the committed checkpoints by ascending step. Data files are not looked at.

    Raises:
      ValueError: one was written by a newer version of this program.
      OSError: the directory cannot be read.
    """
    return self._List()[0]

  def Latest(self) -> CheckpointInfo | None:
    """Returns the newest checkpoint that reads back in full, or None where there is none at all.

    Reads a checkpoint once in a process. Damaged ones are named in a warning and passed over.

    Raises:
      DamagedError: there are checkpoints, but none can be read (whether to start anew is not
        decided here).
      ValueError: one was written by a newer version of this program.
      OSError: the directory cannot be read.
    """
    return self._Newest(self.Verify)

  def _Newest(self, check: Callable[[CheckpointInfo], Any]) -> CheckpointInfo | None:
    """Returns the newest checkpoint that passes `check(info)`."""
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
          # The writer may have removed it by its rule while it was read: then look again.
          vanished = not self.IsKnownDamaged(info)
          if vanished:
            break
      if vanished:
        continue
      if infos or unreadable:
        bad = {os.path.relpath(key, self.directory): why for key, why in self._bad.items()}
        raise DamagedError(
          f'No checkpoint in {self.directory!r} can be read, of {len(infos) + len(unreadable)}: '
          + '; '.join(f'{name}: {why}' for name, why in list(bad.items())[:3])
          + '. Give another directory, or move them away to start anew.'
        )
      return None

  def IsKnownDamaged(self, info: CheckpointInfo) -> bool:
    """Whether this process could not read a checkpoint, and has named it in a warning."""
    return info.prefix in self._bad

  def Verify(self, info: CheckpointInfo) -> None:
    """Reads a checkpoint in full, once in a process, and checks all sizes and checksums.

    Raises:
      DamagedError: naming the checkpoint and what is wrong.
    """
    if info.prefix in self._verified:
      return
    try:
      tensor_bundle.Verify(info.prefix, info.tensors, info.written)
    except DamagedError as e:
      raise self._Damaged(info, e) from e
    self._verified.add(info.prefix)

  def _Damaged(self, info: CheckpointInfo, error: Exception) -> DamagedError:
    """Returns the error that names the checkpoint; remembers it as bad unless it was removed."""
    reason = files.OneLine(error)
    if info in self.All():
      self._verified.discard(info.prefix)
      self._NoteBad(info.prefix, reason)
    return DamagedError(f'Checkpoint {info.prefix} cannot be read: {reason}.')

  def ReadMetadata(self, info: CheckpointInfo) -> dict[str, Any]:
    """Returns the metadata that was given to `Save`."""
    return copy.deepcopy(dict(info.metadata))

  def Restore(
    self,
    info: CheckpointInfo,
    variables: Mapping[str, tf.Variable],
    allow_missing: bool = False,
    allow_extra: bool = False,
  ) -> dict[str, Any]:
    """Assigns every variable its value; names, shapes and dtypes are checked before the first one.

    Args:
      info: from `Latest` or `All`.
      variables: {path in the checkpoint: variable}, on any devices.
      allow_missing: variables that are not in the checkpoint keep their value.
      allow_extra: tensors in the checkpoint that no variable takes are left.

    Returns:
      The metadata.

    Raises:
      ValueError: the maps do not match; names what is missing, left over or of another type.
      DamagedError: the data cannot be read; some variables may have been assigned. `Latest` then
        returns the one before.
    """
    checkpoint_info.CheckMatch(info, variables, allow_missing, allow_extra)
    wanted = {path: spec for path, spec in info.tensors.items() if path in variables}
    try:
      tensor_bundle.CheckFiles(info.prefix, info.written)
      tensor_bundle.Read(
        info.prefix,
        wanted,
        lambda path, tensor: variables[path].assign(tensor),
        worker_hosts.Split({path: variables[path] for path in wanted}, self.workers),
      )
    except DamagedError as e:
      raise self._Damaged(info, e) from e
    return self.ReadMetadata(info)

  def RestoreLatest(
    self,
    variables: Mapping[str, tf.Variable],
    allow_missing: bool = False,
    allow_extra: bool = False,
  ) -> tuple[CheckpointInfo, dict[str, Any]] | None:
    """Restores the newest checkpoint that can be read; falls back, with a warning, until one can.

    The same as `Restore(Latest())`, but the files are read once.

    Args:
      variables: as for `Restore`.
      allow_missing: as for `Restore`.
      allow_extra: as for `Restore`.

    Returns:
      (the checkpoint, its metadata), or None where there is none at all.

    Raises:
      ValueError, OSError: as `Restore` and `Latest`.
    """
    info = self._Newest(lambda info: self.Restore(info, variables, allow_missing, allow_extra))
    return None if info is None else (info, self.ReadMetadata(info))


def _RemoveFolder(path: str) -> None:
  # Of a link, the link alone: what it leads to lies elsewhere.
  (os.remove if os.path.islink(path) else tf.io.gfile.rmtree)(path)


def _WriteText(path: str, text: str) -> None:
  with tf.io.gfile.GFile(path, 'w') as f:
    f.write(text)
  files.Sync(path)


def _ReadText(path: str) -> str:
  with tf.io.gfile.GFile(path, 'rb') as f:
    data = f.read()
  # A flipped bit need not be UTF-8; the digest finds it.
  return data.decode('utf-8', errors='replace')
