# SPDX-License-Identifier: Apache-2.0
"""Text that users hand in, files written whole or not at all, one-line messages of file errors."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterator

import tensorflow as tf

from lingvo_gpipe.core import text_file

# The errors that tf.io.gfile and Python's own functions raise.
FILE_ERRORS = (tf.errors.OpError, OSError)

# TensorFlow's account of a function: where its operations were made, and which worker ran them.
_TRACE = re.compile(
  r'Graph execution error:\s*|Detected at node .*\n(?:[ ]*File ".*\n|<stack.*>\n|\n)*'
  r'|\s*\[\[(?:\{\{.*?\}\}.*?|[\w/.-]+/_\d+)\]\]'
)
# Its list of errors if several operations fail at once.
_ROOTS = re.compile(
  r'\d+ root error\(s\) found\.\s*\(0\) [A-Z_]+:(.*?)(?:\n\s*\(1\).*)?'
  r'\n\d+ successful operations\.\s*\d+ derived errors ignored\.',
  re.DOTALL,
)
_REMOTE = re.compile(r'\nAdditional GRPC error information from remote target (\S+) while .*\n.*')

# The errors of file systems that cannot fsync a directory, such as some network file systems.
_NO_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.EOPNOTSUPP)


def OneLine(error: BaseException) -> str:
  """Returns an error's message as one line, without TensorFlow's names of its own operations.

  If TensorFlow lists several errors, the line has the first.
  """
  text = getattr(error, 'message', None) or str(error) or type(error).__name__
  text = _REMOTE.sub(r' (of \1)', _ROOTS.sub(r'\1', _TRACE.sub('', text)))
  text = re.sub(r'\{\{.*?\}\}\s*|\s*\[Op:\w+\](\s*name:\s*$)?', '', text)
  return ' '.join(text.split())[:400]


def CannotWrite(content: str, directory: str, error: BaseException) -> OSError:
  """Returns an error saying that a directory cannot be written, and how to fix that.

  Args:
    content: the kind of content, as 'checkpoints'.
    directory: the directory.
    error: the cause.
  """
  return OSError(
    f'Cannot write {content} in {directory!r}: {OneLine(error)}. '
    'Give a directory that can be created and written.'
  )


def MakeDirs(content: str, directory: str) -> None:
  """Makes a local directory and its parents, unless they exist; see `CannotWrite` for errors."""
  try:
    os.makedirs(directory, exist_ok=True)
  except (OSError, RecursionError) as e:  # Python makes the parents recursively.
    raise CannotWrite(content, directory, e) from e


@contextlib.contextmanager
def Reading(path: str, context: str) -> Iterator[None]:
  """Raises an OSError in one line if the enclosed code cannot read a file that a user names.

  Args:
    path: any path that tf.io.gfile takes.
    context: start of messages: the flag or param that names the file.
  """
  try:
    yield
  except FILE_ERRORS as e:
    raise OSError(f'{context}: {path!r} cannot be read: {OneLine(e)}') from e


def ReadBytes(path: str, context: str) -> bytes:
  """Returns the content of a file that a user names; see `Reading` for errors."""
  if IsLocal(path):  # tf.io.gfile finds pipes empty.
    return text_file.ReadBytes(path, context)
  with Reading(path, context), tf.io.gfile.GFile(path, 'rb') as f:
    content: bytes = f.read()
  return content


def ReadText(path: str, context: str) -> str:
  """Returns the text of a file of settings that a user names; see `Reading` for errors.

  Raises:
    ValueError: the text is not in UTF-8, or a local file is larger than 64 MiB.
  """
  if IsLocal(path):
    return text_file.Read(path, context)
  return text_file.Decode(ReadBytes(path, context), path, context)


def IsLocal(path: str) -> bool:
  """Whether a path belongs to the operating system, rather than being a URL such as gs://b/x."""
  return '://' not in path


def Sync(path: str) -> None:
  """Fsyncs a local file or directory.

  Does nothing for remote paths and on file systems that cannot fsync directories.
  """
  if not IsLocal(path):
    return
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  except OSError as e:
    if e.errno not in _NO_SYNC or not os.path.isdir(path):
      raise
  finally:
    os.close(descriptor)


def WriteWhole(path: str, content: str | bytes) -> None:
  """Writes a file so that readers see all of it or none: under a temporary name, then renamed.

  Args:
    path: any path that tf.io.gfile takes, in an existing directory; an older file is replaced.
    content: text becomes UTF-8; half of a surrogate pair, which UTF-8 cannot hold, becomes an
      escape such as `\\ud800`.

  Raises:
    OSError: the file cannot be written; nothing is left behind.
  """
  if isinstance(content, str):
    content = content.encode('utf-8', errors='backslashreplace')
  temporary = f'{path}.tmp-{secrets.token_hex(4)}'
  try:
    try:
      with tf.io.gfile.GFile(temporary, 'wb') as f:
        f.write(content)
      # Without this, a power failure may leave an empty file under the new name.
      Sync(temporary)
      tf.io.gfile.rename(temporary, path, overwrite=True)
    except BaseException:
      if tf.io.gfile.exists(temporary):
        tf.io.gfile.remove(temporary)
      raise
  except tf.errors.OpError as e:
    raise OSError(f'Cannot write {path!r}: {e.message}') from e
