# SPDX-License-Identifier: Apache-2.0
"""How every program, here and in tools/, starts: flags, --help, and a mistake in them as one line.

Imports no TensorFlow, so that a program that needs none starts at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection

from absl import flags

from lingvo_gpipe.cli import lingvo_flags

FLAGS = flags.FLAGS


def Parse(
  description: str,
  others: Collection[str] = (),
  num_arguments: Callable[[], int] = lambda: 0,
) -> list[str]:
  """Parses the flags; --help prints them and leaves, a mistake ends with one line and status 2.

  Args:
    description: the program's docstring, printed by --help.
    others: flags that are not the program's own, but of libraries; --help leaves them out.
    num_arguments: how many arguments that are no flags there must be, asked once flags are parsed.

  Returns:
    Those arguments.
  """
  if {'--help', '-help', '-h', '--helpshort', '--helpfull'} & set(sys.argv[1:]):
    print(description + '\n')
    for name in sorted(set(FLAGS) - set(others)):
      print(f'  --{name}: {FLAGS[name].help} (default: {FLAGS[name].default_as_str})')
    sys.exit(0)
  try:
    arguments = lingvo_flags.Translate(sys.argv[1:], set(FLAGS))
    rest = FLAGS([sys.argv[0], *arguments])[1:]
  except (flags.Error, ValueError) as e:
    print(f'{e} (--help lists the flags)', file=sys.stderr)
    sys.exit(2)
  expected = num_arguments()
  if len(rest) < expected:
    print(f'expected {expected} arguments beside the flags, got {len(rest)}', file=sys.stderr)
    sys.exit(2)
  if len(rest) > expected:
    print(f'unexpected argument {rest[expected]!r}; flags look like --name=value', file=sys.stderr)
    sys.exit(2)
  return rest
