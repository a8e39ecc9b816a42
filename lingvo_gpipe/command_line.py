# SPDX-License-Identifier: Apache-2.0
"""How every program, here and in tools/, starts: flags, --help, and a mistake in them as one line.

Imports no TensorFlow, so that a program that needs none starts at once.
"""

from __future__ import annotations

import sys
from collections.abc import Collection

from absl import flags

FLAGS = flags.FLAGS


def Parse(description: str, others: Collection[str] = ()) -> None:
  """Parses the flags; --help prints them and leaves, a mistake ends with one line and status 2.

  Args:
    description: the program's docstring, printed by --help.
    others: flags that are not the program's own, but of libraries; --help leaves them out.
  """
  if {'--help', '-help', '-h', '--helpshort', '--helpfull'} & set(sys.argv[1:]):
    print(description + '\n')
    for name in sorted(set(FLAGS) - set(others)):
      print(f'  --{name}: {FLAGS[name].help} (default: {FLAGS[name].default_as_str})')
    sys.exit(0)
  try:
    rest = FLAGS(sys.argv)[1:]
  except flags.Error as e:
    print(f'{e} (--help lists the flags)', file=sys.stderr)
    sys.exit(2)
  if rest:
    print(f'unexpected argument {rest[0]!r}; flags look like --name=value', file=sys.stderr)
    sys.exit(2)
