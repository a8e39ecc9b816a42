# SPDX-License-Identifier: Apache-2.0
"""Saves and restores {path: variable} maps so that a kill at any moment loses nothing.

Layout of a directory (any path that tf.io.gfile accepts):

    ckpt-00000205.json                    commit file: format, step, tensors, metadata; written last
    ckpt-00000205-1f2e3d4c/tensors.index  the tensors, a TensorFlow tensor bundle
    ckpt-00000205-1f2e3d4c/tensors.data-00000-of-00001

`Checkpointer._WriteAndCommit` shows the order of a commit. A folder that no commit file names does
not count, and the next save removes it. The names in the bundle are the keys of the map: they do
not depend on stages, devices or Python objects. Everything read is data, JSON and tensors; nothing
is unpickled.

In a run on workers that all share the directory, each worker writes the data files of its own
tensors and reads back the files of another worker (`LetWorkersWrite`). The bundle, the commit and
reading are the same as without workers.
"""

from __future__ import annotations

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
  catalogue,
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


class Checkpointer(catalogue.Catalogue):
  """Writes and restores the checkpoints of one directory. One process writes; any number may read.

  Methods may be called from several threads; saves wait for each other.

  Attributes:
    directory: path of the directory that holds the checkpoints.
    workers: the worker hosts (see `worker_hosts`) that write and read the tensors on their devices,
      or [] if this process reads and writes everything.
  """

  def __init__(
    self,
    directory: str | os.PathLike[str],
    max_to_keep: int | None = 3,
    keep_every_n_hours: float | None = None,
  ) -> None:
    """Touches no file.

    Args:
      directory: path of the directory that holds the checkpoints; the first save creates it.
      max_to_keep: number of checkpoints to keep; see `checkpoint_retention.Retention`.
      keep_every_n_hours: interval of checkpoints that are kept for good; see
        `checkpoint_retention.Retention`.

    Raises:
      ValueError: a number is out of range.
    """
    super().__init__(directory)
    self._retention = checkpoint_retention.Retention(max_to_keep, keep_every_n_hours)
    self.workers: list[str] = []
    self._lock = threading.Lock()
    self._directory_exists = False

  def CheckWritable(self) -> None:
    """Creates the directory, then writes and removes a small file. Call it before the first step.

    Raises:
      OSError: the directory cannot be written; the message is one line and names it.
      ValueError: TensorFlow would not find the files, because it interprets the path as a pattern.
    """
    probe = os.path.join(self.directory, f'ckpt-00000000.json.tmp-{secrets.token_hex(4)}')
    try:
      self._MakeDirectory()
      _WriteText(probe, 'a test\n')
      is_matched = bool(tf.io.gfile.glob(probe))  # RestoreV2 looks for files in this way.
      tf.io.gfile.remove(probe)
    except files.FILE_ERRORS as e:
      raise files.CannotWrite('checkpoints', self.directory, e) from e
    if not is_matched:
      raise ValueError(
        f'TensorFlow cannot read checkpoints in {self.directory!r}, because it interprets the path '
        'as a file pattern. Use a directory whose path contains neither [ nor a backslash.'
      )

  def LetWorkersWrite(self, devices: Collection[str]) -> None:
    """Lets workers write and read the tensors on their devices, if all share this directory.

    Tests the sharing once, now, and logs the result. If it fails, this process reads and writes
    everything, as in a run without workers. Call it after `CheckWritable`.

    Args:
      devices: full names of the run's devices.
    """
    workers = worker_hosts.ListHosts(devices)
    if not workers:
      return
    if files.IsLocal(self.directory):
      self.directory = os.path.abspath(self.directory)  # Workers may run in another directory.
    if reason := worker_hosts.WhyNotShared(self.directory, workers):
      logging.info('Checkpoints are written by this process alone: %s.', reason)
      return
    self.workers = workers
    logging.info(
      'Checkpoints are written by each of %d workers for its own stages: all share %s.',
      len(workers),
      self.directory,
    )

  # --- saving -------------------------------------------------------------------------------------

  def Save(
    self,
    step: int,
    variables: Mapping[str, Any],
    metadata: Mapping[str, Any],
    protected: Collection[int] = (),
    lock: logdir_lock.Lock | None = None,
  ) -> str:
    """Writes a checkpoint, reads it back, commits it, and then removes the oldest checkpoints.

    Replaces a checkpoint of the same step at the moment of the commit. The values are read during
    writing: do not change them meanwhile, or pass copies. Each host needs up to 256 MiB of memory
    in addition to the variables, or twice the size of the largest tensor if that is more.

    Args:
      step: training step, at least 0.
      variables: {path: tf.Variable, tf.Tensor or np.ndarray}, on any devices.
      metadata: dict with str keys of JSON values: dict, list (a tuple comes back as a list), str,
        int, float, bool, None.
      protected: steps whose checkpoints must not be removed.
      lock: lock of the directory, checked right before the commit.

    Returns:
      Path of the commit file.

    Raises:
      ValueError, TypeError: an argument cannot be saved; nothing was written.
      OSError: a file cannot be written or does not read back, or the lock was lost; earlier
        checkpoints are untouched.
    """
    step = operator.index(step)
    if step < 0:
      raise ValueError(f'The step of a checkpoint must be at least 0, got {step}.')
    if not variables:
      raise ValueError(f'No variables to save at step {step} in {self.directory!r}.')
    for path in variables:
      if not isinstance(path, str) or not path:
        raise ValueError(f'The name of a variable must be a non-empty string, got {path!r}.')
    specs = {path: tensor_bundle.Spec(path, value) for path, value in variables.items()}
    checkpoint_info.CheckJson('metadata', metadata)
    with self._lock:
      commit = self._WriteAndCommit(step, variables, specs, metadata, lock)
      self._Try(self._RemoveOld, step, protected)
      return commit

  def _WriteAndCommit(
    self,
    step: int,
    variables: Mapping[str, Any],
    specs: Mapping[str, tf.TensorSpec],
    metadata: Mapping[str, Any],
    lock: logdir_lock.Lock | None,
  ) -> str:
    """Writes a checkpoint and commits it; returns the path of the commit file.

    The order makes a kill or a power failure at any point harmless:

    1. Write the tensors into a folder under a new name, fsync them, and read them back.
    2. Write the commit file under a temporary name, fsync it, and read it back.
    3. Check that this trainer still holds the directory.
    4. Commit: rename the commit file to its final name. Before this line the old checkpoints count,
       from this line on the new one counts, too.
    5. Fsync the directory, which makes the rename durable.
    """
    nonce = secrets.token_hex(4)
    folder = os.path.join(self.directory, f'ckpt-{step:08d}-{nonce}')
    prefix = os.path.join(folder, checkpoint_info.BUNDLE)
    commit = self._CommitPath(step)
    temporary = f'{commit}.tmp-{nonce}'
    is_folder_removable = False  # True while the new folder exists and is surely not committed.
    try:
      self._MakeDirectory()
      self._RemoveLeftovers()
      is_folder_removable = True
      tf.io.gfile.mkdir(folder)
      placed = worker_hosts.Split(variables, self.workers)
      written = tensor_bundle.Write(prefix, variables, placed)
      tensor_bundle.Verify(prefix, specs, written, worker_hosts.Rotate(placed))
      text = checkpoint_info.CommitText(step, os.path.basename(folder), specs, metadata, written)
      _WriteText(temporary, text)
      checkpoint_info.ParseCommit(self.directory, commit, catalogue.ReadText(temporary))
      if lock is not None:  # Writing may have taken longer than a lease lasts.
        lock.Check()
      is_folder_removable = False
      self._MoveFolderAway(commit)
      tf.io.gfile.rename(temporary, commit, overwrite=True)  # The commit.
      files.Sync(self.directory)
    except files.FILE_ERRORS as e:
      # From the rename on, the checkpoint may be committed despite the error. The next save then
      # removes the folder if it is not.
      if is_folder_removable:
        self._Try(tf.io.gfile.rmtree, folder)
      if isinstance(e, logdir_lock.LostError):
        raise
      raise OSError(
        f'Cannot save the checkpoint of step {step} in {self.directory!r}: '
        f'{files.OneLine(e)}. Check free space and write permission. '
        'Earlier checkpoints are untouched.'
      ) from e
    self._verified.add(prefix)
    return commit

  def _MakeDirectory(self) -> None:
    """Creates the directory, once: if it is removed later, saving must fail, not recreate it."""
    if not self._directory_exists:
      tf.io.gfile.makedirs(self.directory)
      self._directory_exists = True

  def _CommitPath(self, step: int) -> str:
    return os.path.join(self.directory, checkpoint_info.CommitName(step))

  # --- removal ------------------------------------------------------------------------------------

  def _RemoveOld(self, saved_step: int, protected: Collection[int]) -> None:
    """Removes the checkpoints that the retention rule does not keep."""
    infos, unreadable = self._List()
    good = [info for info in infos if not self.IsKnownDamaged(info)]
    damaged = [info.step for info in infos if self.IsKnownDamaged(info)] + unreadable
    for step in self._retention.Removable(saved_step, good, damaged, protected):
      if not self._MoveFolderAway(self._CommitPath(step)):
        tf.io.gfile.remove(self._CommitPath(step))
    self._RemoveLeftovers()

  def _MoveFolderAway(self, commit: str) -> bool:
    """Renames a local folder in place of a commit file; returns whether there was one."""
    if not os.path.isdir(commit):
      return False
    renamed = f'{commit}.folder-{secrets.token_hex(4)}'
    os.rename(commit, renamed)
    logging.warning('%s is a folder: renamed to %s.', commit, renamed)
    return True

  def _RemoveLeftovers(self) -> None:
    """Removes leftovers of killed saves, and folders whose commit file was removed or replaced."""
    good, unreadable = self._List()
    used = {os.path.basename(os.path.dirname(info.prefix)) for info in good}
    for name in self._FileNames():
      match = checkpoint_info.FOLDER.fullmatch(name)
      # If the commit file cannot be read now, its folder may still be needed.
      if match and name not in used and int(match[1]) not in unreadable:
        self._Try(_RemoveFolder, os.path.join(self.directory, name))
      elif _LEFTOVER_COMMIT.fullmatch(name):
        self._Try(tf.io.gfile.remove, os.path.join(self.directory, name))

  def _Try(self, function: Callable[..., Any], *args: Any) -> None:
    """Calls a function that may fail without harm, and logs its failure."""
    try:
      function(*args)
    except files.FILE_ERRORS as e:
      logging.warning('Cannot tidy up in %s: %s.', self.directory, files.OneLine(e))

  # --- restoring ----------------------------------------------------------------------------------

  def Restore(
    self,
    info: CheckpointInfo,
    variables: Mapping[str, tf.Variable],
    allow_missing: bool = False,
    allow_extra: bool = False,
  ) -> dict[str, Any]:
    """Assigns every variable its value, after checking all names, shapes and dtypes.

    Args:
      info: checkpoint from `Latest` or `All`.
      variables: {path in the checkpoint: variable}, on any devices.
      allow_missing: whether variables that are not in the checkpoint keep their value.
      allow_extra: whether tensors in the checkpoint without a variable are ignored.

    Returns:
      The metadata.

    Raises:
      ValueError: the maps do not match; the message names the paths that are missing, extra, or of
        another shape or dtype.
      DamagedError: the data cannot be read; some variables may have been assigned. `Latest` then
        returns the checkpoint before it.
    """
    checkpoint_info.CheckMatch(info, variables, allow_missing, allow_extra)
    specs = {path: spec for path, spec in info.tensors.items() if path in variables}
    try:
      tensor_bundle.CheckFiles(info.prefix, info.written)
      tensor_bundle.Read(
        info.prefix,
        specs,
        lambda path, tensor: variables[path].assign(tensor),
        worker_hosts.Split({path: variables[path] for path in specs}, self.workers),
      )
    except DamagedError as e:
      raise self._MakeDamagedError(info, e) from e
    return self.ReadMetadata(info)

  def RestoreLatest(
    self,
    variables: Mapping[str, tf.Variable],
    allow_missing: bool = False,
    allow_extra: bool = False,
  ) -> tuple[CheckpointInfo, dict[str, Any]] | None:
    """Restores the newest readable checkpoint; skips damaged checkpoints with a warning.

    Equals `Restore(Latest())`, but reads the files once.

    Args:
      variables: {path in the checkpoint: variable}, on any devices.
      allow_missing: whether variables that are not in the checkpoint keep their value.
      allow_extra: whether tensors in the checkpoint without a variable are ignored.

    Returns:
      (checkpoint, its metadata), or None if there are no checkpoints.

    Raises:
      ValueError: the maps do not match, or a checkpoint was written by a newer version.
      OSError: the directory, or every checkpoint in it, cannot be read.
    """
    info = self._Newest(lambda info: self.Restore(info, variables, allow_missing, allow_extra))
    return None if info is None else (info, self.ReadMetadata(info))


def _RemoveFolder(path: str) -> None:
  # Removes only the link if the path is one, because its target is outside the directory.
  (os.remove if os.path.islink(path) else tf.io.gfile.rmtree)(path)


def _WriteText(path: str, text: str) -> None:
  with tf.io.gfile.GFile(path, 'w') as f:
    f.write(text)
  files.Sync(path)
