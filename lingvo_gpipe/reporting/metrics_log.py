# SPDX-License-Identifier: Apache-2.0
"""`MetricsLog`: the measurements of a run for scripts, one JSON object per line.

    {"step": 100, "time": 1732200000.0, "split": "train", "values": {"loss": 2.5}}

`split` is 'train', the directory of an evaluation or decoding, such as 'eval_dev', or 'failures':
{kind: number of failures} when training was resumed after that step. Lines are in order of time.
Each step and split has one line, except that all lines of failures are kept. Non-finite values are
null.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import tensorflow as tf
from absl import logging

from lingvo_gpipe.core import files

# The split of lines about events, which no repeated step writes again.
FAILURES = 'failures'
NAME = 'metrics.jsonl'


class Record(NamedTuple):
  """A line; values that are not finite are NaN."""

  step: int
  time: float
  split: str
  values: Mapping[str, float]


def Read(path: str) -> Iterator[Record]:
  """Yields the valid lines of a file; none if it does not exist.

  Raises:
    OSError: the file cannot be read.
  """
  for line in _Read(path).splitlines():
    if _Key(line) is None:
      continue
    record = json.loads(line)
    step, split = record['step'], record['split']
    seconds, values = record.get('time'), record.get('values')
    is_time = isinstance(seconds, int | float) and 0 <= seconds < 1 << 33
    if is_time and abs(step) < 1 << 53 and isinstance(values, dict):
      numbers = {name: _Float(value) for name, value in values.items()}
      yield Record(step, seconds, split, numbers)


def _Float(value: object) -> float:
  if isinstance(value, float | int) and abs(value) <= sys.float_info.max:
    return float(value)
  return math.nan


class MetricsLog:
  """Appends lines to a file, each in one write, so that a kill leaves whole lines.

  A run that resumes from a checkpoint repeats the later steps, so their lines are removed first.
  """

  def __init__(self, path: str, last_step: int | None = None) -> None:
    """Reads the existing file and removes lines that do not belong to the run.

    Args:
      path: path of the file; its directory exists.
      last_step: lines of later steps are removed, except for failures. None keeps all lines.

    Raises:
      OSError: the file cannot be read or written.
    """
    self._path = path
    self._file: tf.io.gfile.GFile | None = None
    self._keys: set[tuple[int, str]] = set()
    self._Rewrite(lambda key: last_step is None or key[0] <= last_step)

  def Write(self, step: int, split: str, values: Mapping[str, float]) -> None:
    """Adds a line; replaces the line of the same step and split, except for failures.

    Raises:
      OSError: the file cannot be written.
    """
    key = (step, split)
    floats = {name: float(value) for name, value in values.items()}
    line = json.dumps(
      {
        'step': step,
        'time': round(time.time(), 3),
        'split': split,
        'values': {name: v if math.isfinite(v) else None for name, v in floats.items()},
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
    """Closes the file; the next `Write` reopens it."""
    file, self._file = self._file, None
    if file is not None:
      # Each line was flushed, so an error here was raised before.
      with contextlib.suppress(tf.errors.OpError):
        file.close()

  def _Rewrite(self, is_kept: Callable[[tuple[int, str]], bool]) -> None:
    """Removes lines that are not kept and a partial last line. Writes only if something changed."""
    self.Close()
    text = _Read(self._path)
    lines: dict[tuple[int, str, int], str] = {}
    for number, line in enumerate(text.split('\n')[:-1]):
      key = _Key(line)
      if key is None:
        logging.warning('%s: removing an invalid line: %.80s', self._path, line)
      elif key[1] == FAILURES:
        lines[(*key, number)] = f'{line}\n'
      elif is_kept(key):
        place = (*key, -1)
        lines.pop(place, None)  # The last of several lines counts, at its position.
        lines[place] = f'{line}\n'
    self._keys = {place[:2] for place in lines}
    new_text = ''.join(lines.values())
    if new_text != text:
      files.WriteWhole(self._path, new_text)


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
  """Returns (step, split) of a line, or None if the line is invalid."""
  try:
    record = json.loads(line)
    step, split = record['step'], record['split']
  except (ValueError, KeyError, TypeError, RecursionError):
    return None
  return (step, split) if isinstance(step, int) and isinstance(split, str) else None
