# SPDX-License-Identifier: Apache-2.0
"""Text of files that users hand in, without TensorFlow; `files` also reads remote paths."""

from __future__ import annotations

import codecs
import os
import stat

# Far above any text of settings; devices such as /dev/zero have no end.
_MAX_BYTES = 1 << 26


def Read(path: str, context: str) -> str:
  """Returns the text of a local file, or from a pipe, that holds settings and not data.

  Args:
    path: the file.
    context: start of messages: the flag or param that names the file.

  Raises:
    OSError: the file cannot be read.
    ValueError: the text is not in UTF-8, or larger than 64 MiB.
  """
  content = ReadBytes(path, context, _MAX_BYTES + 1)
  if len(content) > _MAX_BYTES:
    raise ValueError(f'{context}: {path!r} is larger than {_MAX_BYTES >> 20} MiB')
  return Decode(content, path, context)


def ReadBytes(path: str, context: str, size: int = -1) -> bytes:
  """Returns the content of a local file, at most the first `size` bytes.

  Raises:
    OSError: the file cannot be read, or is a device that may have no end.
  """
  try:
    with open(path, 'rb') as f:
      if size < 0 and IsDevice(os.fstat(f.fileno())):
        raise OSError('it is a device, which may have no end')
      return f.read(size)
  except (OSError, ValueError) as e:  # ValueError: the path has NUL.
    raise OSError(f'{context}: {path!r} cannot be read: {getattr(e, "strerror", None) or e}') from e


def IsDevice(status: os.stat_result) -> bool:
  """Whether the status of a file is of a device such as /dev/zero."""
  return stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)


def Decode(content: bytes, path: str, context: str, first_line: int = 1) -> str:
  """Decodes a part of a text file that begins at some line; ValueError if it is not in UTF-8.

  Drops the byte order mark that some editors write at the beginning of a file.
  """
  if first_line == 1:
    content = content.removeprefix(codecs.BOM_UTF8)
  try:
    return content.decode()
  except UnicodeDecodeError as e:
    line = first_line + content[: e.start].count(b'\n')
    raise ValueError(f'{context}: {path!r} is not in UTF-8: line {line}: {e.reason}') from e
