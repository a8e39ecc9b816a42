# SPDX-License-Identifier: Apache-2.0
"""Text files by glob: their lines and digests, with errors that name the file and the fix."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence

import tensorflow as tf

from lingvo_gpipe.core import files, text_file

# Version of `Lines`: tokens in a cache of another version are made again.
LINES_VERSION = 2

_READ_AT_ONCE = 1 << 24


def Files(pattern: str | Sequence[str], context: str) -> list[str]:
  """Returns the files that match a glob or a list of globs, sorted, without duplicates.

  Args:
    pattern: any path or glob that tf.io.gfile takes, or a list of them.
    context: start of messages, such as 'TextFilesInput: param file_pattern'.

  Raises:
    ValueError: the pattern is empty, or matches no file or a device.
    OSError: a match, such as a symbolic link, leads to no file.
  """
  if not pattern:
    raise ValueError(f'{context} is not set: set it to a glob of text files')
  patterns = [pattern] if isinstance(pattern, str) else list(pattern)
  matches: set[str] = set()
  for glob in patterns:
    with files.Reading(glob, context):
      matches.update(path for path in tf.io.gfile.glob(glob) if not tf.io.gfile.isdir(path))
  paths = sorted(matches)
  for path in filter(files.IsLocal, paths):
    if not os.path.exists(path):
      with files.Reading(path, context):
        tf.io.gfile.stat(path)
    if text_file.IsDevice(os.stat(path)):
      raise ValueError(f'{context}: {path!r} is a device, which may have no end')
  if not paths:
    raise ValueError(
      f'{context}: no file matches {pattern!r}: check the path (relative paths start at '
      f'{os.getcwd()!r})'
    )
  return paths


def Lines(path: str, context: str) -> Iterator[str]:
  """Yields the lines of a text file, without line ends.

  Args:
    path: any path that tf.io.gfile takes.
    context: start of messages, such as 'TextFilesInput: param file_pattern'.

  Raises:
    ValueError: a line is not in UTF-8.
    OSError: the file cannot be read.
  """
  number, tail = 1, b''
  with files.Reading(path, context), tf.io.gfile.GFile(path, 'rb') as f:
    # Not the lines of `GFile`, which lack every carriage return, even within a line.
    while content := f.read(_READ_AT_ONCE):
      *lines, tail = (tail + content).split(b'\n')
      for line in lines:
        yield _Line(line, path, context, number)
        number += 1
  if tail:
    yield _Line(tail, path, context, number)


def _Line(content: bytes, path: str, context: str, number: int) -> str:
  return text_file.Decode(content.removesuffix(b'\r'), path, context, number)


def Digest(path: str, context: str) -> str:
  """Returns the SHA-256 of a file's content, hexadecimal; see `Lines` for the arguments."""
  digest = hashlib.sha256()
  with files.Reading(path, context), tf.io.gfile.GFile(path, 'rb') as f:
    while content := f.read(_READ_AT_ONCE):
      digest.update(content)
  return digest.hexdigest()
