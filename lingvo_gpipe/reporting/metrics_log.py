# SPDX-License-Identifier: Apache-2.0
"""`MetricsLog`: what a run measured, one JSON object a line, for scripts.

    {"step": 100, "time": 1732200000.0, "split": "train", "values": {"loss": 2.5}}

`split` is train, the directory of an evaluation or decoding, such as eval_dev, or failures: how
often training had failed, by kind, when it began again after that step. For each step and split
there is one line, in the order of time, but of failures there are all; what is not finite is null.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping

import tensorflow as tf
from absl import logging

from lingvo_gpipe.core import files

# The split of lines that tell what happened, not what came of a step: no step makes them again.
FAILURES = 'failures'


class MetricsLog:
  """Appends to a file, each line in one go, so that a kill leaves whole lines.

  A run that goes on from a checkpoint repeats the steps after it: their lines are removed first.
  """

  def __init__(self, path: str, last_step: int | None = None) -> None:
    """Reads what is there, and removes what does not belong to the run.

    Args:
      path: the file; its directory exists.
      last_step: lines of later steps are removed, but failures; None keeps them.

    Raises:
      OSError: the file cannot be read or written.
    """
    self._path = path
    self._file: tf.io.gfile.GFile | None = None
    self._keys: set[tuple[int, str]] = set()
    self._Rewrite(lambda key: last_step is None or key[0] <= last_step)

  def Write(self, step: int, split: str, values: Mapping[str, float]) -> None:
    """Adds a line; one of the same step and split goes, unless it tells of failures.

    Raises:
      OSError: it cannot be written.
    """
    key = (step, split)
    found = {name: float(value) for name, value in values.items()}
    line = json.dumps(
      {
        'step': step,
        'time': round(time.time(), 3),
        'split': split,
        'values': {name: v if math.isfinite(v) else None for name, v in found.items()},
      }
    )
    if key in self._keys:
      self._Rewrite(lambda other: other != key)
    self._keys.add(key)
    try:
      if self._file is None:
        self._file = tf.io.gfile.GFile(self._path, 'a')
      self._file.write(line + '\n')
      self._file.flush()
    except tf.errors.OpError as e:
      raise OSError(f'Cannot write {self._path!r}: {e.message}') from e

  def Close(self) -> None:
    """Closes the file; another `Write` opens it again."""
    file, self._file = self._file, None
    if file is not None:
      # Each line was flushed: what cannot be written now was an error before.
      with contextlib.suppress(tf.errors.OpError):
        file.close()

  def _Rewrite(self, is_kept: Callable[[tuple[int, str]], bool]) -> None:
    """Removes lines, among them what a kill left of one; writes nothing where none is to go."""
    self.Close()
    text = _Read(self._path)
    lines: dict[tuple[int, str, int], str] = {}
    for number, line in enumerate(text.split('\n')[:-1]):
      key = _Key(line)
      if key is None:
        logging.warning('%s: a line that is none of this log is removed: %.80s', self._path, line)
      elif key[1] == FAILURES:
        lines[(*key, number)] = f'{line}\n'
      elif is_kept(key):
        place = (*key, -1)
        lines.pop(place, None)  # The last one counts, and in its place.
        lines[place] = f'{line}\n'
    self._keys = {place[:2] for place in lines}
    kept = ''.join(lines.values())
    if kept != text:
      files.WriteWhole(self._path, kept)


def _Read(path: str) -> str:
  try:
    with tf.io.gfile.GFile(path, 'rb') as f:
      data = f.read()
  except tf.errors.NotFoundError:
    return ''
  except tf.errors.OpError as e:
    raise OSError(f'Cannot read {path!r}: {e.message}') from e
  return data.decode('utf-8', errors='replace')


def _Key(line: str) -> tuple[int, str] | None:
  """(step, split) of a line; None where it is not one of ours."""
  try:
    found = json.loads(line)
    step, split = found['step'], found['split']
  except (ValueError, KeyError, TypeError, RecursionError):
    return None
  return (step, split) if isinstance(step, int) and isinstance(split, str) else None
