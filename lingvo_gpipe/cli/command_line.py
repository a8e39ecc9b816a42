# SPDX-License-Identifier: Apache-2.0
"""Parses the command line of a program: its flags, --help, and mistakes as one line.

Imports no TensorFlow, so that programs without TensorFlow start fast.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection

from absl import flags

FLAGS = flags.FLAGS


def Parse(
  description: str,
  hidden: Collection[str] = (),
  num_arguments: Callable[[], int] = lambda: 0,
) -> list[str]:
  """Parses the flags. --help prints them and exits; a mistake exits with one line and status 2.

  Args:
    description: docstring of the program, which --help prints.
    hidden: flags of libraries, which --help leaves out.
    num_arguments: returns the number of arguments that are not flags, after the flags are parsed.

  Returns:
    The arguments that are not flags.
  """
  if {'--help', '-help', '-h', '--helpshort', '--helpfull'} & set(sys.argv[1:]):
    print(description + '\n')
    for name in sorted(set(FLAGS) - set(hidden)):
      print(f'  --{name}: {FLAGS[name].help} (default: {FLAGS[name].default_as_str})')
    sys.exit(0)
  try:
    arguments: list[str] = FLAGS(sys.argv)[1:]
  except flags.Error as e:
    print(f'{e} (--help lists the flags)', file=sys.stderr)
    sys.exit(2)
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
