# SPDX-License-Identifier: Apache-2.0
"""Saves checkpoints while training continues; training only waits for a copy in host memory."""

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
  """Copies the values in `Save`; a thread then writes, reads back and commits them.

  Keeps one copy at a time: a save waits for the save before it. Needs host memory for one copy of
  the variables, in addition to the needs of `Checkpointer.Save`. Values that a worker writes are
  copied on that worker. The next call of `Check`, `Save` or `Wait` raises an error of the thread.
  Call the methods from one thread.

  Attributes:
    num_saves: number of committed checkpoints.
    blocked_seconds: time that training waited, for copies and for the thread.
    write_seconds: time of writing, in the thread or, without a thread, in the calls.
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
      in_background: whether to copy the values and write them in a thread. If False, a save returns
        after the commit and makes no copy.
      lock: lock of the directory, checked before each save and before its commit.
    """
    self._saver = saver
    self._in_background = in_background
    self._lock = lock
    self._thread: threading.Thread | None = None
    self._error: BaseException | None = None
    self._copy_seconds = 0.0  # The time of copies in the current save.
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
      step: training step, at least 0.
      variables: {path: tf.Variable, tf.Tensor or np.ndarray}, on any devices. They may be changed
        after this returns.
      metadata: dict of JSON values, which may be changed after this returns.
      trained: paths of the trained weights.
      **options: further arguments of `Checkpointer.Save`.

    Returns:
      Whether all trained weights are finite. If not, nothing is saved and a warning is logged.

    Raises:
      OSError: this checkpoint or the previous one cannot be saved, the lock was lost, or there is
        no memory for the copy.
      ValueError, TypeError: an argument cannot be saved.
    """
    with self.Blocking():
      self._Join()
      if self._lock is not None:
        self._lock.Check()
      heartbeat.Begin(heartbeat.COPY)  # A worker may hang in the check, too.
      bad = _FindNonFinite({path: variables[path] for path in trained})
      if bad is not None:
        logging.warning('no checkpoint of step %d: %s is not finite', step, bad)
        return False
      if not self._in_background:
        heartbeat.Step(heartbeat.COPY)
        self._Write(step, variables, metadata, options)
        self._RaiseError()
        return True
      self._copy_seconds = -time.perf_counter()
      values = _CopyValues(step, variables, self._saver.workers)
      heartbeat.Step(heartbeat.COPY)
      self._copy_seconds += time.perf_counter()
      self._thread = threading.Thread(
        target=self._Write,
        args=(step, values, copy.deepcopy(dict(metadata)), options),
        name=f'checkpoint of step {step}',
      )
      self._thread.start()
      if self._saver.workers and not self.num_saves:
        # The first save sends new functions to workers, which must not run concurrently with other
        # functions: see `worker_hosts._Gate`.
        self._Join()
        self.write_seconds = 0.0
      return True

  def Check(self) -> None:
    """Raises the error of the thread, if it has failed. Does not wait."""
    if self._thread is not None and not self._thread.is_alive():
      self._Join()

  def Wait(self) -> None:
    """Waits until the last save is committed, and raises its error if it failed."""
    with self.Blocking():
      self._Join()

  def BeforeNewFunctions(self) -> None:
    """Waits like `Wait` if workers write, because sending new functions to them must run alone."""
    if self._saver.workers:
      self.Wait()

  @contextlib.contextmanager
  def Blocking(self) -> Iterator[None]:
    """Counts the time of the enclosed code, for which training waits, as a cost of saving."""
    start = time.perf_counter()
    heartbeat.SuspendTimeout()
    try:
      yield
    finally:
      heartbeat.SuspendTimeout()
      self.blocked_seconds += time.perf_counter() - start

  def Close(self) -> None:
    """Waits like `Wait` but logs an error; for use while an exception may be propagating."""
    try:
      self.Wait()
    except Exception as e:
      logging.error('%s', e)

  def Report(self) -> str | None:
    """Returns the cost of all saves as a line of text, or None if there were no saves."""
    if not self.num_saves:
      return None
    overlapped = self.write_seconds if self._in_background else 0.0
    return (
      f'{self.num_saves} checkpoint{"s" * (self.num_saves > 1)}: training paused '
      f'{self.blocked_seconds:.2f} s; {overlapped:.2f} s of writing overlapped with it'
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
    # If this process writes alone, no worker can hang, so a slow store may take any time.
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


def _FindNonFinite(weights: Mapping[str, tf.Variable]) -> str | None:
  """Returns the path of a weight with a non-finite entry, or None if all are finite."""
  checks = {}
  for path, v in weights.items():
    with tf.device(v.device):
      checks[path] = tf.reduce_all(tf.math.is_finite(v))
  # All checks were started above, before the first result is waited for here.
  return next((path for path, is_finite in checks.items() if not is_finite), None)


def _CopyValues(step: int, variables: Mapping[str, Any], workers: Sequence[str]) -> dict[str, Any]:
  """Copies the values to the memory of the hosts that write them."""
  placed = worker_hosts.Split(variables, workers)
  copies: dict[str, Any] = {}

  def CopyOn(host: str) -> None:
    values = [variables[path] for path in placed[host]]
    if host == worker_hosts.HERE:
      host_copies = [_Copy(value) for value in values]
    else:
      host_copies = worker_hosts.CopyToHost(host, values)
    copies.update(zip(placed[host], host_copies, strict=True))

  try:
    worker_hosts.ForEach(CopyOn, placed)
  except (MemoryError, tf.errors.ResourceExhaustedError) as e:
    raise OSError(
      f'Cannot save the checkpoint of step {step}: not enough host memory for a copy of '
      f'{len(variables)} variables. Set train.save_async to False: training then waits for '
      'each save, but makes no copy. Earlier checkpoints are untouched.'
    ) from e
  return copies


def _Copy(value: Any) -> Any:
  if isinstance(value, tf.Variable | tf.Tensor):
    array = value.numpy()  # TensorFlow promises a copy.
    # NumPy's fixed-size bytes would lose trailing zeros.
    return np.array(array, dtype=object) if value.dtype == tf.string else array
  return np.array(value) if isinstance(value, np.ndarray) else value
