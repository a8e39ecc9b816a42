# SPDX-License-Identifier: Apache-2.0
"""What is said where a file or directory cannot be read or written: one line that names it."""

from __future__ import annotations

import re

import tensorflow as tf

# What tf.io.gfile and Python's own functions raise.
FILE_ERRORS = (tf.errors.OpError, OSError)

# What TensorFlow tells of a function: where its operations were made, and which worker ran them.
_TRACE = re.compile(
  r'Graph execution error:\s*|Detected at node .*\n(?:[ ]*File ".*\n|\n)*|\s*\[\[\{\{.*?\}\}.*?\]\]'
)
_REMOTE = re.compile(r'\nAdditional GRPC error information from remote target (\S+) while .*\n.*')


def OneLine(error: BaseException) -> str:
  """Returns an error's message as one line, without TensorFlow's names of its own operations."""
  text = getattr(error, 'message', None) or str(error) or type(error).__name__
  text = _REMOTE.sub(r' (of \1)', _TRACE.sub('', text))
  text = re.sub(r'\{\{.*?\}\}\s*|\s*\[Op:\w+\](\s*name:\s*$)?', '', text)
  return ' '.join(text.split())[:400]


def CannotWrite(what: str, directory: str, error: BaseException) -> OSError:
  """Returns the error that says that something cannot be written into a directory, and what to do.

  Args:
    what: what was to be written.
    directory: where.
    error: why not.
  """
  return OSError(
    f'Cannot write {what} in {directory!r}: {OneLine(error)}. '
    'Give a directory that can be created and written.'
  )
