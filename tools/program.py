# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the programs in tools/: their start, flags with lists, and new processes.

A program is `python -m tools.<name>` in the checkout and ends with

    if __name__ == '__main__':
      program.Main(DefineFlags, Run, __doc__)

A program that takes an experiment by --model follows tools/verify.py instead and uses the flags of
`lingvo_gpipe.cli.binary`.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from absl import flags

from lingvo_gpipe.cli import command_line, interrupts
from lingvo_gpipe.core import text_file

FLAGS = flags.FLAGS

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Runs a module like `python -m`, after the imports of lingvo_gpipe's programs. Importing TensorFlow
# alone takes twice their time, because it imports Keras and all that Keras finds.
_RUN_MODULE = (
  'import runpy, sys; from lingvo_gpipe.cli import binary; del sys.argv[0]; '
  "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def Main(define_flags: Callable[[], None], run: Callable[[], int], description: str) -> NoReturn:
  """Parses the flags, runs the program and exits with the status that it returns.

  Args:
    define_flags: defines the flags of this program.
    run: the program; a ValueError is a mistake of the user, reported in one line with status 2.
    description: the docstring of the module, which --help prints.
  """
  other_flags = set(FLAGS)
  define_flags()
  command_line.Parse(description, other_flags)
  interrupts.Raise()
  try:
    status = run()
  except KeyboardInterrupt:
    interrupts.End()
  except (flags.Error, ValueError) as e:
    print(f'{command_line.Printable(e)} (--help lists the flags)', file=sys.stderr)
    status = 2
  sys.exit(status)


def Numbers(name: str, low: int = 1, high: int | None = None) -> list[int]:
  """Returns the integers of a list flag; raises ValueError unless all are in [low, high]."""
  texts: list[str] = FLAGS[name].value or []
  numbers = [int(text) if text.isdecimal() else low - 1 for text in texts]
  if not numbers or min(numbers) < low or (high is not None and max(numbers) > high):
    span = f'of at least {low}' if high is None else f'from {low} to {high}'
    raise ValueError(f'--{name}: expected numbers {span}, got {",".join(texts) or "none"}')
  return numbers


def Names(name: str, known: Collection[str]) -> list[str]:
  """Returns the names of a list flag; raises ValueError unless all are in `known`."""
  names: list[str] = FLAGS[name].value or []
  for value in names or ['']:
    if value not in known:
      raise ValueError(f'--{name}: unknown {value!r}; expected some of {", ".join(known)}')
  return names


def ReadText(path: str, flag: str) -> str:
  """Returns the text of the local file that a flag names; ValueError if it cannot be read."""
  try:
    return text_file.Read(path, f'--{flag}')
  except OSError as e:
    raise ValueError(str(e)) from e


def DefineOutput() -> None:
  """Defines the flag of `WriteOutput`."""
  flags.DEFINE_string('output', None, 'The file to write; by default the standard output.')


def WriteOutput(text: str, flag: str = 'output') -> None:
  """Writes a text to the file that a flag names, or prints it if the flag is not set.

  Raises:
    ValueError: the file cannot be written.
  """
  if path := FLAGS[flag].value:
    try:
      pathlib.Path(path).write_text(text, encoding='utf-8')
    except OSError as e:
      raise ValueError(f'--{flag}: {e}') from e
  else:
    sys.stdout.write(text)


def RunModule(
  module: str, argument: str, timeout_seconds: float
) -> subprocess.CompletedProcess[str]:
  """Runs `python -m module argument` of this checkout in a new process until it ends.

  Raises:
    subprocess.TimeoutExpired: the process took too long and was killed.
  """
  interrupts.Raise()  # `run` then kills the process.
  path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
  return subprocess.run(
    [sys.executable, '-c', _RUN_MODULE, module, argument],
    env={**os.environ, 'PYTHONPATH': path},
    capture_output=True,
    text=True,
    timeout=timeout_seconds,
    check=False,
  )


def ResultOf(module: str, argument: str, timeout_seconds: float) -> Any:
  """Runs a module with `RunModule` and returns its last line of output, parsed as JSON.

  Raises:
    RuntimeError: the module failed.
    subprocess.TimeoutExpired: the process took too long and was killed.
  """
  done = RunModule(module, argument, timeout_seconds)
  if done.returncode:
    raise RuntimeError(f'{module} {argument} failed:\n{done.stderr[-2000:]}')
  return json.loads(done.stdout.splitlines()[-1])
