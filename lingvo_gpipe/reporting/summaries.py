# SPDX-License-Identifier: Apache-2.0
"""Writes summaries that TensorBoard shows."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any, Self

import tensorflow as tf

from lingvo_gpipe.core import files


class SummaryWriter:
  """Writes scalars, histograms and text to an event file in a directory.

  A restarted program adds a new file to the directory; for repeated steps, TensorBoard shows the
  last values. Writes nothing without a directory.
  """

  def __init__(self, logdir: str | os.PathLike[str] | None):
    """Creates a missing directory and a new event file.

    Args:
      logdir: the directory, or None to make every method do nothing.

    Raises:
      OSError: the directory cannot be written; the message names it.
    """
    self._logdir = None if logdir is None else os.fspath(logdir)
    self._closed = False
    self._writer = tf.summary.create_noop_writer()
    if self._logdir is not None:
      try:
        # Creates the file now even if the caller is tracing a function.
        with tf.init_scope():
          self._writer = tf.summary.create_file_writer(self._logdir)
      except tf.errors.OpError as e:
        raise files.CannotWrite('summaries', self._logdir, e) from e

  def Scalars(self, step: Any, values: Mapping[str, Any]) -> None:
    """Writes {name: scalar} at a step, as float32; '/' in a name makes a group in TensorBoard.

    Raises:
      ValueError: the writer is closed, or a value is not a scalar (the message names it).
      OSError: the file cannot be written; often only `Flush` or `Close` notice it.
    """
    tensors = {name: tf.convert_to_tensor(value) for name, value in values.items()}
    for name, tensor in tensors.items():
      if tensor.shape.rank != 0:
        raise ValueError(f'Summary {name!r} must be a scalar, got the shape {tensor.shape}.')
    with self._Writing(step):
      for name, tensor in tensors.items():
        tf.summary.scalar(name, tf.cast(tensor, tf.float32))

  def Histograms(self, step: Any, values: Mapping[str, Any]) -> None:
    """Writes {name: tensor of any shape} at a step, without non-finite entries.

    Raises:
      ValueError: the writer is closed.
      OSError: the file cannot be written; often only `Flush` or `Close` notice it.
    """
    with self._Writing(step):
      for name, value in values.items():
        flat = tf.cast(tf.reshape(value, [-1]), tf.float64)
        # A NaN belongs to no bucket and would make the range of all buckets NaN.
        tf.summary.histogram(name, tf.boolean_mask(flat, tf.math.is_finite(flat)))

  def Text(self, step: Any, name: str, text: str) -> None:
    """Writes a text at a step; TensorBoard renders it as Markdown.

    Raises:
      ValueError: the writer is closed.
      OSError: the file cannot be written; often only `Flush` or `Close` notice it.
    """
    with self._Writing(step):
      tf.summary.text(name, text)

  def Flush(self) -> None:
    """Flushes all summaries to the file, so that they survive a kill."""
    self._CheckOpen()
    with self._ConvertErrors():
      self._writer.flush()

  def Close(self) -> None:
    """Flushes and closes the file. A second call does nothing."""
    was_closed, self._closed = self._closed, True
    if not was_closed:
      with self._ConvertErrors():
        self._writer.close()

  @contextlib.contextmanager
  def _Writing(self, step: Any) -> Iterator[None]:
    """Directs tf.summary to the file, at a step."""
    self._CheckOpen()
    with self._ConvertErrors(), self._writer.as_default(step=int(step)):
      yield

  @contextlib.contextmanager
  def _ConvertErrors(self) -> Iterator[None]:
    """Converts TensorFlow's file errors into an OSError that names the directory."""
    try:
      yield
    except tf.errors.OpError as e:
      reason = files.OneLine(e)
      raise OSError(
        f'Cannot write summaries in {self._logdir!r}: {reason}. Check free space and permissions.'
      ) from e

  def _CheckOpen(self) -> None:
    if self._closed:
      raise ValueError(
        f'The summary writer of {self._logdir!r} is closed; create a new one to write more.'
      )

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exc: object) -> None:
    self.Close()


def Preformatted(text: str) -> str:
  """Returns Markdown that shows a text verbatim in a fixed-width font."""
  return ''.join(f'    {line}\n' for line in text.split('\n'))
