# SPDX-License-Identifier: Apache-2.0
"""Saves checkpoints beside training: what training waits for is a copy in memory of the hosts."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from lingvo_gpipe.checkpoint import checkpointer, logdir_lock
from lingvo_gpipe.core import heartbeat
from lingvo_gpipe.distributed import worker_hosts


class BackgroundSaver:
  """Copies the values when asked to save; a thread writes, reads back and commits them.

  There is one copy at a time: a save waits for the one before it. Host memory beside the variables:
  their size once, and what `Checkpointer.Save` needs. What a worker writes is copied there. What
  fails in the thread is raised by the next call of `Check`, `Save` or `Wait`. Methods are called
  from one thread.

  Attributes:
    num_saves: how many checkpoints were committed.
    blocked_seconds: how long the calls took: the copies, and waiting for the thread.
    write_seconds: how long the thread (or, without one, the calls) wrote.
  """

  def __init__(
    self,
    saver: checkpointer.Checkpointer,
    *,
    in_background: bool = True,
    lock: logdir_lock.Lock | None = None,
  ) -> None:
    """Starts nothing.

    Args:
      saver: writes the checkpoints.
      in_background: False: there is no copy and no thread, and a save returns when it is done.
      lock: of the directory; asked before each save, and before its commit, whether it still holds.
    """
    self._saver = saver
    self._in_background = in_background
    self._lock = lock
    self._thread: threading.Thread | None = None
    self._error: BaseException | None = None
    self._copy_seconds = 0.0  # Of the save under way.
    self.num_saves = 0
    self.blocked_seconds = 0.0
    self.write_seconds = 0.0

  def Save(
    self,
    step: int,
    variables: Mapping[str, Any],
    metadata: Mapping[str, Any],
    *,
    trained: Collection[str] = (),
    **options: Any,
  ) -> bool:
    """Saves the values that the variables have now, unless a trained weight is not finite.

    Args:
      step: as for `Checkpointer.Save`.
      variables: the same; they may be changed when this returns.
      metadata: the same, and the same holds.
      trained: the paths of the trained weights.
      **options: what else `Checkpointer.Save` takes.

    Returns:
      Whether all these are finite; where not nothing is saved, and a warning says so.

    Raises:
      OSError: this checkpoint or the one before cannot be saved, the directory was lost, or there
        is no memory for the copy.
      ValueError, TypeError: an argument cannot be saved.
    """
    with self.Blocking():
      self._Join()
      if self._lock is not None:
        self._lock.Check()
      if bad := _NotFinite({path: variables[path] for path in trained}):
        logging.warning('no checkpoint of step %d: %s is not finite', step, bad)
        return False
      if not self._in_background:
        self._Write(step, variables, metadata, options)
        self._RaiseError()
        return True
      self._copy_seconds = -time.perf_counter()
      heartbeat.Begin(heartbeat.COPY)
      values = _Copies(step, variables, self._saver.workers)
      heartbeat.Step(heartbeat.COPY)
      self._copy_seconds += time.perf_counter()
      self._thread = threading.Thread(
        target=self._Write,
        args=(step, values, copy.deepcopy(dict(metadata)), options),
        name=f'checkpoint of step {step}',
      )
      self._thread.start()
      if self._saver.workers and not self.num_saves:
        # New functions are brought to workers, which is not to be done beside others: see `_Gate`.
        self._Join()
        self.write_seconds = 0.0
      return True

  def Check(self) -> None:
    """Raises what failed in the thread, if it has failed; does not wait."""
    if self._thread is not None and not self._thread.is_alive():
      self._Join()

  def Wait(self) -> None:
    """Waits until what was saved is committed; raises what failed."""
    with self.Blocking():
      self._Join()

  def BeforeNewFunctions(self) -> None:
    """Waits as `Wait` does where workers write: new functions are brought to them alone."""
    if self._saver.workers:
      self.Wait()

  @contextlib.contextmanager
  def Blocking(self) -> Iterator[None]:
    """Counts what is done in it, for which training waits, as a cost of saving."""
    start = time.perf_counter()
    heartbeat.SuspendTimeout()
    try:
      yield
    finally:
      heartbeat.SuspendTimeout()
      self.blocked_seconds += time.perf_counter() - start

  def Close(self) -> None:
    """`Wait` where an exception may be under way: what failed is logged."""
    try:
      self.Wait()
    except Exception as e:
      logging.error('%s', e)

  def Report(self) -> str:
    """The cost of all saves, in a line for people; '' where there were none."""
    if not self.num_saves:
      return ''
    beside = self.write_seconds if self._in_background else 0.0
    return (
      f'{self.num_saves} checkpoint{"s" * (self.num_saves > 1)} saved: training stood still for '
      f'{self.blocked_seconds:.2f} s, and {beside:.2f} s of writing went on beside it'
    )

  def _Join(self) -> None:
    if self._thread is not None:
      self._thread.join()
      self._thread = None
    self._RaiseError()

  def _RaiseError(self) -> None:
    error, self._error = self._error, None
    if error is not None:
      raise error

  def _Write(
    self,
    step: int,
    values: Mapping[str, Any],
    metadata: Mapping[str, Any],
    options: Mapping[str, Any],
  ) -> None:
    start = time.perf_counter()
    # Where this process writes alone, no worker can hang in it, and a slow store may take its time.
    if self._saver.workers:
      heartbeat.Begin(heartbeat.WRITE)
    try:
      self._saver.Save(step, values, metadata, lock=self._lock, **options)
      self.num_saves += 1
    except BaseException as e:
      self._error = e
    if self._saver.workers:
      heartbeat.Step(heartbeat.WRITE)
    seconds = time.perf_counter() - start
    self.write_seconds += seconds
    if self._error is None:
      logging.info(
        'checkpoint of step %d: copied in %.3f s; written, read back and committed in %.2f s',
        step,
        self._copy_seconds,
        seconds,
      )


def _NotFinite(weights: Mapping[str, tf.Variable]) -> str:
  """The path of a weight with an entry that is not finite; '' where none has."""
  found = {}
  for path, v in weights.items():
    with tf.device(v.device):
      found[path] = tf.reduce_all(tf.math.is_finite(v))
  # All are under way before the first is waited for.
  return next((path for path, is_finite in found.items() if not is_finite), '')


def _Copies(step: int, variables: Mapping[str, Any], workers: Sequence[str]) -> dict[str, Any]:
  """The values in memory of their own, on the hosts that write them."""
  placed = worker_hosts.Split(variables, workers)
  copies: dict[str, Any] = {}

  def CopyOn(host: str) -> None:
    values = [variables[path] for path in placed[host]]
    if host == worker_hosts.HERE:
      found = [_Copy(value) for value in values]
    else:
      found = worker_hosts.Copies(host, values)
    copies.update(zip(placed[host], found, strict=True))

  try:
    worker_hosts.Each(CopyOn, placed)
  except (MemoryError, tf.errors.ResourceExhaustedError) as e:
    raise OSError(
      f'Cannot save the checkpoint of step {step}: there is no host memory for a copy of '
      f'{len(variables)} variables. Set train.save_async to False: training then waits for '
      'each save, and nothing is copied. Earlier checkpoints are untouched.'
    ) from e
  return copies


def _Copy(value: Any) -> Any:
  if isinstance(value, tf.Variable | tf.Tensor):
    array = value.numpy()  # TensorFlow promises a copy.
    # NumPy's own arrays of bytes would lose zeros at their end.
    return np.array(array, dtype=object) if value.dtype == tf.string else array
  return np.array(value) if isinstance(value, np.ndarray) else value
