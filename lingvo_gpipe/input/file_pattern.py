# SPDX-License-Identifier: Apache-2.0
"""Text files by glob, their lines and digests, with errors that name the file and what to do."""

from __future__ import annotations

import codecs
import hashlib
import os
from collections.abc import Iterator, Sequence

import tensorflow as tf

_HASHED_AT_ONCE = 1 << 24


def Files(pattern: str | Sequence[str], where: str) -> list[str]:
  """The files that a glob or a list of globs matches, sorted, each once.

  Args:
    pattern: any path or glob that tf.io.gfile takes, or some of them.
    where: what names the pattern in messages, such as 'TextFilesInput: param file_pattern'.

  Raises:
    ValueError: the pattern is empty or matches no file.
  """
  if not pattern:
    raise ValueError(f'{where} is not set: set it to a glob of text files')
  patterns = [pattern] if isinstance(pattern, str) else list(pattern)
  matches = {path for one in patterns for path in tf.io.gfile.glob(one)}
  files = sorted(path for path in matches if not tf.io.gfile.isdir(path))
  if not files:
    raise ValueError(
      f'{where}: no file matches {pattern!r}: check the path (a relative one counts from '
      f'{os.getcwd()!r})'
    )
  return files


def Lines(path: str, where: str) -> Iterator[str]:
  """The lines of a text file, without their ends.

  Args:
    path: any path that tf.io.gfile takes.
    where: as in `Files`.

  Raises:
    ValueError: a line is not in UTF-8.
  """
  with tf.io.gfile.GFile(path, 'rb') as f:
    for number, line in enumerate(f, 1):
      yield DecodeText(line.removesuffix(b'\n').removesuffix(b'\r'), path, where, number)


def DecodeText(content: bytes, path: str, where: str, first_line: int = 1) -> str:
  """A part of a text file that begins in some line; ValueError where it is not in UTF-8.

  The mark of byte order that some editors write at a file's beginning is no text.
  """
  if first_line == 1:
    content = content.removeprefix(codecs.BOM_UTF8)
  try:
    return content.decode()
  except UnicodeDecodeError as e:
    line = first_line + content[: e.start].count(b'\n')
    raise ValueError(f'{where}: {path!r} is not in UTF-8: line {line}: {e.reason}') from e


def Digest(path: str) -> str:
  """SHA-256 of a file's content, hexadecimal."""
  digest = hashlib.sha256()
  with tf.io.gfile.GFile(path, 'rb') as f:
    while content := f.read(_HASHED_AT_ONCE):
      digest.update(content)
  return digest.hexdigest()
