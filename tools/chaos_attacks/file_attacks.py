# SPDX-License-Identifier: Apache-2.0
"""Attacks on files of many kinds: damaged ones are read rightly, or refused in one line."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import random
import re
import shutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tools.chaos_attacks import children, mutation


def DamageAny(draw: random.Random, folder: pathlib.Path) -> str:
  """Damages one or two files below a folder; returns a description."""
  paths = [path for path in sorted(folder.rglob('*')) if path.is_file()]
  damages = [
    mutation.File(draw, x) for x in draw.sample(paths, min(len(paths), draw.choice([1, 1, 2])))
  ]
  return ', '.join(damages)


class Command(NamedTuple):
  """A program that reads files.

  Attributes:
    program: a program of lingvo_gpipe, or a module.
    args: its arguments.
    statuses: statuses of success.
    is_checked: whether the files have checksums, so that damage never leads to another output.
  """

  program: str
  args: Sequence[str]
  statuses: Sequence[int] = (0,)
  is_checked: bool = False


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind of files, and who reads them: a function or a program.

  Attributes:
    make: writes intact files into an empty folder; they may not depend on chance.
    read: reads the files in a folder and returns what they hold. It refuses them by a ValueError or
      an OSError in one line that names a file.
    command: in place of `read`, returns a program. It refuses files in one line, with status 2.
    expected: reads the files in another way. `read` must return an equal result, and refuse what
      this function refuses by a ValueError or an OSError. None: any result is right, as damage
      cannot be seen.
    is_checked: whether the files have checksums, so that damage never leads to another result.
    damage: damages some files; returns a description.
  """

  make: Callable[[pathlib.Path], None]
  read: Callable[[pathlib.Path], Any] | None = None
  command: Callable[[random.Random, pathlib.Path], Command] | None = None
  expected: Callable[[pathlib.Path], Any] | None = None
  is_checked: bool = False
  damage: Callable[[random.Random, pathlib.Path], str] = DamageAny


def Attack(name: str, kind: Kind, draw: random.Random, runner: children.Runner) -> None:
  """Damages a copy of the files and lets them be read.

  Args:
    name: the name of the kind.
    kind: the kind.
    draw: draws the damage.
    runner: runs the readers. The intact files lie beside its folder and serve all cases.
  """
  intact = runner.folder.parent / f'intact_{name}'
  if not intact.exists():
    unfinished = runner.folder / 'unfinished'
    unfinished.mkdir(parents=True)
    runner.Call(lambda: kind.make(unfinished))
    os.rename(unfinished, intact)
  folder = runner.folder / 'files'
  mutation.CopyTree(intact, folder)
  damage = kind.damage(draw, folder)
  try:
    if kind.command:
      _CheckProgram(kind.command(draw, folder), intact, folder, runner)
    else:
      runner.Call(lambda: _Compare(kind, intact, folder))
  except children.FindingError as e:
    raise children.FindingError(f'{damage}: {e}') from None


def _Compare(kind: Kind, intact: pathlib.Path, folder: pathlib.Path) -> None:
  assert kind.read
  is_right = True
  expected = None
  if kind.is_checked:
    expected = kind.read(intact)
  elif kind.expected:
    try:
      expected = kind.expected(folder)
    except (ValueError, OSError):
      is_right = False
  try:
    actual = kind.read(folder)
  except (ValueError, OSError) as e:
    text = str(e)
    # Damage may lead to files elsewhere. Sizes above the memory are refused by a weight's name.
    named = rf"'/(?!job:|device:|replica:)|{re.escape(str(folder))}|more than the memory"
    if '\n' in text or not re.search(named, text):
      raise children.FindingError(f'not one line that names a file: {e!r}') from e
    if kind.expected and is_right:
      raise children.FindingError(f'{e!r} in place of {expected!r:.500}') from e
    return
  if not is_right:
    raise children.FindingError(f'wrong files are read as {actual!r:.500}')
  if (kind.is_checked or kind.expected) and actual != expected:
    raise children.FindingError(f'{actual!r:.500} in place of {expected!r:.500}')


def _CheckProgram(
  command: Command, intact: pathlib.Path, folder: pathlib.Path, runner: children.Runner
) -> None:
  """Runs a program; if its result is checked and it succeeds, again on intact files."""
  ended = runner.Run(command.program, command.args)
  where = ' '.join(command.args[-2:])[:300]
  try:
    children.CheckEnd(ended, command.statuses)
  except children.FindingError as e:
    raise children.FindingError(f'{where}: {e}') from None
  if 'Traceback' in ended.stderr or 'stack trace' in ended.stderr:
    raise children.FindingError(f'{where}: status {ended.status}: {ended.stderr[-1500:]}')
  if command.is_checked and not ended.status:
    shutil.rmtree(folder)
    mutation.CopyTree(intact, folder)
    expected = runner.Run(command.program, command.args).stdout
    if ended.stdout != expected:
      raise children.FindingError(f'{where}: {ended.stdout!r} in place of {expected!r}')
