# SPDX-License-Identifier: Apache-2.0
"""Warm start: a new run takes weights over from the checkpoints of other runs, by rules on names.

`task.train.init_from_checkpoint_rules`, as in Lingvo:

    {'runs/other': ([(r'lm\\.stack\\.(.*)', r'lm.stack.\\1')], [r'.*\\.softmax\\..*'])}

For each checkpoint a list of (regular expression, name in the checkpoint), the first that fits the
whole name of a weight wins, and a list of regular expressions of weights that keep their own
initial values. Slots and the step are not taken over.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from lingvo_gpipe.checkpoint import checkpoint_info, checkpointer

_PARAM = 'train.init_from_checkpoint_rules'
_EXAMPLE = "{'runs/other': ([(r'(.*)', r'\\1')], [])}"


@dataclasses.dataclass(frozen=True)
class _Rules:
  """The rules of one checkpoint."""

  where: str
  rules: tuple[tuple[re.Pattern[str], str], ...]
  ignored: tuple[re.Pattern[str], ...]

  def NameOf(self, weight: str, matched: set[str]) -> str | None:
    """The name in the checkpoint; None where no rule fits. Adds the pattern to `matched`."""
    if any(pattern.fullmatch(weight) for pattern in self.ignored):
      return None
    for pattern, name in self.rules:
      if match := pattern.fullmatch(weight):
        matched.add(pattern.pattern)
        try:
          return match.expand(name)
        except (re.error, IndexError) as e:
          raise ValueError(
            f'{_PARAM}[{self.where!r}]: {name!r} cannot be filled in from {pattern.pattern!r}: {e}'
          ) from e
    return None


def Check(rules: Any) -> None:
  """Raises ValueError where the rules are not of the form they should have."""
  _Parse(rules)


def Load(rules: Any, weights: Mapping[str, tf.Variable]) -> list[str]:
  """Assigns weights their values in other runs' checkpoints.

  All names, shapes and dtypes are checked before the first weight is assigned.

  Args:
    rules: see the top of this file.
    weights: {name: variable}, the model's weights.

  Returns:
    Lines for people: what was taken from where, and every weight that was not.

  Raises:
    ValueError: a rule fits no weight, a name or shape does not fit the checkpoint, two checkpoints
      would set one weight, or there is no checkpoint.
    OSError: a checkpoint cannot be read.
  """
  source: dict[str, str] = {}  # {weight: the checkpoint it is taken from}
  sources = []
  lines = []
  for one in _Parse(rules):
    matched: set[str] = set()
    names = {
      weight: name for weight in weights if (name := one.NameOf(weight, matched)) is not None
    }
    _CheckMatched(one, matched, weights)
    for weight in names:
      if weight in source:
        raise ValueError(
          f'{_PARAM}: both {source[weight]!r} and {one.where!r} set {weight}: let one of them '
          'ignore it'
        )
    source.update(dict.fromkeys(names, one.where))
    saved, info = _Find(one.where)
    _CheckNames(one.where, info, names, weights)
    sources.append((saved, info, names))
    lines.append(f'warm start: {len(names)} of {len(weights)} weights from {info.path}')
  for saved, info, names in sources:
    _Assign(saved, info, names, weights)
  left = [weight for weight in weights if weight not in source]
  if left:
    lines.append(f'warm start: {len(left)} keep their initial values: {", ".join(left)}')
  return lines


def _Parse(rules: Any) -> list[_Rules]:
  found = []
  for where, value in rules.items():
    try:
      pairs, ignored = value
      made = [(_Compiled(where, pattern), _Template(where, name)) for pattern, name in pairs]
      if isinstance(ignored, str):
        raise TypeError
      found.append(_Rules(where, tuple(made), tuple(_Compiled(where, i) for i in ignored)))
    except (TypeError, ValueError) as e:
      if isinstance(e, _RuleError):
        raise
      raise ValueError(
        f'{_PARAM}[{where!r}] must be a pair of lists, of (regular expression, name in the '
        f'checkpoint) and of regular expressions to ignore, got {value!r}; for example {_EXAMPLE}'
      ) from e
  return found


class _RuleError(ValueError):
  """Names the rule itself."""


def _Compiled(where: str, pattern: Any) -> re.Pattern[str]:
  if not isinstance(pattern, str):
    raise TypeError
  try:
    return re.compile(pattern)
  except re.error as e:
    raise _RuleError(f'{_PARAM}[{where!r}]: {pattern!r} is not a regular expression: {e}') from e


def _Template(where: str, name: Any) -> str:
  if not isinstance(name, str):
    raise TypeError
  if '%s' in name:
    raise _RuleError(f"{_PARAM}[{where!r}]: in {name!r} write \\1, \\2 ... for Lingvo's %s")
  return name


def _CheckMatched(one: _Rules, matched: set[str], weights: Mapping[str, Any]) -> None:
  for pattern, _ in one.rules:
    if pattern.pattern not in matched:
      raise ValueError(
        f'{_PARAM}[{one.where!r}]: the rule {pattern.pattern!r} fits none of the {len(weights)} '
        f'weights that rules before it left, such as {next(iter(weights), "none")}; a rule fits '
        'the whole name, and --mode=inspect_model prints all names'
      )


def _Find(where: str) -> tuple[checkpointer.Checkpointer, checkpoint_info.CheckpointInfo]:
  """The checkpoint of a logdir, a directory of checkpoints (the last one), or a commit file."""
  where = os.path.expanduser(where).rstrip('/')
  folder, name = os.path.split(where)
  if checkpoint_info.COMMIT.fullmatch(name):
    saved = checkpointer.Checkpointer(folder)
    for info in saved.All():
      if os.path.basename(info.path) == name:
        saved.Verify(info)
        return saved, info
  else:
    for directory in (os.path.join(where, 'train'), where):
      saved = checkpointer.Checkpointer(directory)
      if (latest := saved.Latest()) is not None:
        return saved, latest
  raise ValueError(
    f'{_PARAM}: there is no checkpoint at {where!r}; name a logdir, its train directory, or a file '
    'such as train/ckpt-00000205.json'
  )


def _CheckNames(
  where: str,
  info: checkpoint_info.CheckpointInfo,
  names: Mapping[str, str],
  weights: Mapping[str, tf.Variable],
) -> None:
  """Raises ValueError that lists every name, shape and dtype that does not fit."""
  missing, different = [], []
  for weight, name in names.items():
    variable, saved = weights[weight], info.tensors.get(name)
    if saved is None:
      close = difflib.get_close_matches(name, info.tensors, 1)
      missing.append(f'{name} for {weight}' + (f' (closest: {close[0]})' if close else ''))
    elif (saved.shape, saved.dtype) != (variable.shape, variable.dtype):
      different.append(
        f'{weight} is {variable.dtype.name}{variable.shape.as_list()}, '
        f'{name} {saved.dtype.name}{saved.shape.as_list()}'
      )
  problems = []
  if missing:
    problems.append(f'it does not have {", ".join(missing)}')
  if different:
    problems.append(f'another shape or dtype: {"; ".join(different)}')
  if problems:
    raise ValueError(
      f'{_PARAM}[{where!r}] does not fit {info.path}: {"; ".join(problems)}. Correct the rules, or '
      'ignore these weights'
    )


def _Assign(
  saved: checkpointer.Checkpointer,
  info: checkpoint_info.CheckpointInfo,
  names: Mapping[str, str],
  weights: Mapping[str, tf.Variable],
) -> None:
  """Assigns; several weights may be of one name."""
  left = dict(names)
  while left:
    now = {name: weight for weight, name in left.items()}
    saved.Restore(info, {name: weights[weight] for name, weight in now.items()}, allow_extra=True)
    left = {weight: name for weight, name in left.items() if now[name] != weight}
