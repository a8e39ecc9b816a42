# SPDX-License-Identifier: Apache-2.0
"""Reports an error that is not a user's mistake: its cause in a few lines, the rest in a file."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import traceback

import tensorflow as tf

from lingvo_gpipe.core import files

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

# Notes that say where an error occurred, such as in which layer.
_PLACE = ('in ', 'while ')
# A line of code, in TensorFlow's account of an operation.
_CODE = re.compile(r'^ *File "(.+)", line (\d+), in (.+)$', re.MULTILINE)


def Print(error: Exception, logdir: str | None) -> None:
  """Prints the cause of an error to stderr; the stack trace goes to a file, or before the cause.

  Args:
    error: the error.
    logdir: directory for the file; a temporary one if it does not exist. None: print the trace.
  """
  path = '' if logdir is None else _WriteTrace(error, logdir)
  if not path:
    traceback.print_exception(error)
  print('\n' + Cause(error), file=sys.stderr)
  if path:
    print(f'stack trace: {path}', file=sys.stderr)


def Cause(error: Exception) -> str:
  """Returns lines with an error's kind, place and message, the user's code, and other notes."""
  notes = getattr(error, '__notes__', [])
  place = ', '.join(note for note in notes if note.startswith(_PLACE))
  message = str(error)
  if isinstance(error, tf.errors.OpError):  # A Python function's own stack trace may follow.
    message = files.OneLine(error).partition(' Traceback (most recent call last)')[0]
  lines = [f'{type(error).__name__}{" " if place else ""}{place}: {message}']
  lines += _OwnCode(error)
  return '\n'.join([*lines, *(note for note in notes if not note.startswith(_PLACE))])


def _OwnCode(error: Exception) -> list[str]:
  """Returns the innermost line of code in the working directory, if there is one."""
  calls = [(f.filename, str(f.lineno), f.name) for f in traceback.extract_tb(error.__traceback__)]
  calls += _CODE.findall(getattr(error, 'message', ''))
  home = os.getcwd() + os.sep
  own_calls = [
    call
    for call in calls
    if not call[0].startswith('<')  # Code without a file, such as <frozen runpy>.
    and os.path.abspath(call[0]).startswith(home)
    and not os.path.abspath(call[0]).startswith(_PACKAGE)
    and 'site-packages' not in call[0]
  ]
  return [f'File "{file}", line {line}, in {name}' for file, line, name in own_calls[-1:]]


def _WriteTrace(error: Exception, logdir: str) -> str:
  """Writes the stack trace to a file; returns its path, or '' if that fails."""
  name = f'error-{os.path.basename(sys.argv[0]).removesuffix(".py")}'
  try:
    if logdir and tf.io.gfile.isdir(logdir):
      path = os.path.join(logdir, f'{name}.txt')
    else:
      path = os.path.join(tempfile.mkdtemp(), f'{name}.txt')
    files.WriteWhole(path, ''.join(traceback.format_exception(error)))
  except files.FILE_ERRORS:
    return ''
  return path
