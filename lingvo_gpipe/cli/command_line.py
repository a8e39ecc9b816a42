# SPDX-License-Identifier: Apache-2.0
"""Parses the command line of a program: its flags, --help, and mistakes as one line.

Imports no TensorFlow, so that programs without TensorFlow start fast.
"""

from __future__ import annotations

import collections
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence

from absl import flags

from lingvo_gpipe.cli import completion
from lingvo_gpipe.cli import subjects as subjects_lib
from lingvo_gpipe.core import domain, text_file

FLAGS = flags.FLAGS

_MAX_FLAG_FILES = 100
# Absl searches for the closest name recursively, for which Python's stack may be too small.
_LONGEST_NAME = 80


def Parse(
  description: str,
  hidden: Collection[str] = (),
  num_arguments: Callable[[], int] = lambda: 0,
  subjects: Sequence[subjects_lib.Subject] = (),
) -> list[str]:
  """Parses the flags; a mistake exits with one line and status 2.

  --help prints the flags and exits. With subjects there is --completion, which prints a script for
  the shell and exits.

  Args:
    description: docstring of the program, which --help prints.
    hidden: flags of libraries, which --help leaves out.
    num_arguments: returns the number of arguments that are not flags, after the flags are parsed.
    subjects: the headings under which --help shows the flags of an installed program.

  Returns:
    The arguments that are not flags.
  """
  program = os.path.basename(sys.argv[0]).removesuffix('.py')
  if subjects:
    flags.DEFINE_enum(
      'completion', None, list(completion.SHELLS), 'Print a script that completes the command line.'
    )
  names = set(FLAGS) - set(hidden)
  if {'--help', '-help', '-h', '--helpshort', '--helpfull'} & set(sys.argv[1:]):
    print(f'{description.strip()}\n\n{subjects_lib.Help(program, FLAGS, names, subjects)}')
    sys.exit(0)
  try:
    arguments: list[str] = FLAGS([sys.argv[0], *_WithFlagFiles(sys.argv[1:])])[1:]
  except flags.Error as e:
    print(f'{Printable(e)} (--help lists the flags)', file=sys.stderr)
    sys.exit(2)
  except (OSError, ValueError) as e:  # A file of flags cannot be read.
    print(e, file=sys.stderr)
    sys.exit(2)
  for text, name in [*((a, 'an argument') for a in arguments), *_Texts()]:
    if not domain.IsText(text):
      print(f'{name} is not in UTF-8, or contains NUL: {text!r}', file=sys.stderr)
      sys.exit(2)
  if subjects and FLAGS.completion:
    print(completion.Script(FLAGS.completion, program, FLAGS, names), end='')
    sys.exit(0)
  expected = num_arguments()
  if len(arguments) < expected:
    print(
      f'expected {expected} arguments in addition to flags, got {len(arguments)}', file=sys.stderr
    )
    sys.exit(2)
  if len(arguments) > expected:
    print(
      f'unexpected argument {arguments[expected]!r}; flags look like --name=value', file=sys.stderr
    )
    sys.exit(2)
  return arguments


def Printable(error: Exception) -> str:
  """Returns an error's message in one line: messages about flags may repeat any characters."""
  return ''.join(c if c.isprintable() else ascii(c)[1:-1] for c in str(error))


def _WithFlagFiles(arguments: Sequence[str]) -> list[str]:
  """Returns the arguments, with the lines of a file in place of each --flagfile=file.

  Absl would read these files in any encoding, and with the byte order mark. As with absl, a file
  may name others, and --flagfile= without a name is ignored.

  Raises:
    OSError: a file cannot be read.
    ValueError: a file is not in UTF-8, no file follows the flag, a file contains itself, or the
      name of a flag is too long to be known.
  """
  expanded: list[str] = []
  remaining = collections.deque(arguments)
  num_files = 0
  while remaining:
    argument = remaining.popleft()
    name, equals, path = argument.partition('=')
    if argument == '--':  # No flags follow.
      return [*expanded, argument, *remaining]
    if name.startswith('-') and len(name) > _LONGEST_NAME:
      raise ValueError(f'unknown flag {name[:_LONGEST_NAME]!r} ...')
    if name not in ('--flagfile', '-flagfile'):
      expanded.append(argument)
      continue
    if not equals and not remaining:
      raise ValueError('--flagfile: expected the path of a file')
    path = os.path.expanduser(path.strip() if equals else remaining.popleft())
    num_files += bool(path)
    if num_files > _MAX_FLAG_FILES:
      raise ValueError(
        f'--flagfile: more than {_MAX_FLAG_FILES} files: does {path!r} contain itself?'
      )
    lines = map(str.strip, text_file.Read(path, '--flagfile').split('\n') if path else ())
    remaining.extendleft(reversed([x for x in lines if x and not x.startswith(('#', '//'))]))
  return expanded


def _Texts() -> Iterator[tuple[str, str]]:
  """Yields (text, name) of the strings that flags have as values, also in lists."""
  for name, value in FLAGS.flag_values_dict().items():
    for text in value if isinstance(value, list) else [value]:
      if isinstance(text, str):
        yield text, f'--{name}'
