# SPDX-License-Identifier: Apache-2.0
"""Warm start: initialises weights of a new run from checkpoints of other runs, by rules on names.

`task.train.init_from_checkpoint_rules`, as in Lingvo:

    {'runs/other': ([(r'lm\\.stack\\.(.*)', r'lm.stack.\\1')], [r'.*\\.softmax\\..*'])}

Each checkpoint has a list of (regular expression, name in the checkpoint) and a list of regular
expressions of weights that keep their initial values. A regular expression must match the whole
name of a weight, and the first match wins. Optimizer slots and the step are not copied.
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

  source: str  # A log directory, a directory of checkpoints, or a commit file.
  rules: tuple[tuple[re.Pattern[str], str], ...]
  ignored: tuple[re.Pattern[str], ...]

  def NameOf(self, weight: str, matched: set[str]) -> str | None:
    """Returns a weight's name in the checkpoint, or None. Adds the pattern to `matched`."""
    if any(pattern.fullmatch(weight) for pattern in self.ignored):
      return None
    for pattern, name in self.rules:
      if match := pattern.fullmatch(weight):
        matched.add(pattern.pattern)
        try:
          return match.expand(name)
        except (re.error, IndexError) as e:
          raise ValueError(
            f'{_PARAM}[{self.source!r}]: {name!r} does not fit the groups of '
            f'{pattern.pattern!r}: {e}'
          ) from e
    return None


def Check(rules: Any) -> None:
  """Raises a ValueError if the rules have the wrong form."""
  _Parse(rules)


def Load(rules: Any, weights: Mapping[str, tf.Variable]) -> list[str]:
  """Assigns weights their values in checkpoints of other runs.

  Checks all names, shapes and dtypes before it assigns the first weight.

  Args:
    rules: the rules; see the top of this file.
    weights: {name: variable}, the model's weights.

  Returns:
    Lines for the log: the number of weights taken from each checkpoint, and the weights that keep
    their initial values.

  Raises:
    ValueError: a rule matches no weight, a name or shape does not fit the checkpoint, two
      checkpoints would set the same weight, or a checkpoint does not exist.
    OSError: a checkpoint cannot be read.
  """
  source_of: dict[str, str] = {}  # {weight: source}
  assignments = []
  lines = []
  for rules_of_source in _Parse(rules):
    source = rules_of_source.source
    matched: set[str] = set()
    names = {
      weight: name
      for weight in weights
      if (name := rules_of_source.NameOf(weight, matched)) is not None
    }
    _CheckMatched(rules_of_source, matched, weights)
    for weight in names:
      if weight in source_of:
        raise ValueError(
          f'{_PARAM}: both {source_of[weight]!r} and {source!r} set {weight}: let one of them '
          'ignore it'
        )
    source_of.update(dict.fromkeys(names, source))
    saved, info = _Find(source)
    _CheckNames(source, info, names, weights)
    assignments.append((saved, info, names))
    lines.append(f'warm start: {len(names)} of {len(weights)} weights from {info.path}')
  for saved, info, names in assignments:
    _Assign(saved, info, names, weights)
  unset = [weight for weight in weights if weight not in source_of]
  if unset:
    lines.append(f'warm start: {len(unset)} keep their initial values: {", ".join(unset)}')
  return lines


def _Parse(rules: Any) -> list[_Rules]:
  parsed = []
  for source, value in rules.items():
    try:
      pairs, ignored = value
      templates = [(_Compile(source, pattern), _Template(source, name)) for pattern, name in pairs]
      if isinstance(ignored, str):
        raise TypeError
      parsed.append(_Rules(source, tuple(templates), tuple(_Compile(source, i) for i in ignored)))
    except (TypeError, ValueError) as e:
      if isinstance(e, _RuleError):
        raise
      raise ValueError(
        f'{_PARAM}[{source!r}] must be a pair of lists: (regular expression, name in the '
        f'checkpoint) pairs, and regular expressions of weights to ignore. Got {value!r}; for '
        f'example {_EXAMPLE}'
      ) from e
  return parsed


class _RuleError(ValueError):
  """An error whose message already names the rule."""


def _Compile(source: str, pattern: Any) -> re.Pattern[str]:
  if not isinstance(pattern, str):
    raise TypeError
  try:
    return re.compile(pattern)
  except re.error as e:
    raise _RuleError(f'{_PARAM}[{source!r}]: {pattern!r} is not a regular expression: {e}') from e


def _Template(source: str, name: Any) -> str:
  if not isinstance(name, str):
    raise TypeError
  if '%s' in name:
    raise _RuleError(f"{_PARAM}[{source!r}]: in {name!r} write \\1, \\2 ... for Lingvo's %s")
  return name


def _CheckMatched(rules: _Rules, matched: set[str], weights: Mapping[str, Any]) -> None:
  for pattern, _ in rules.rules:
    if pattern.pattern not in matched:
      raise ValueError(
        f'{_PARAM}[{rules.source!r}]: the rule {pattern.pattern!r} matches none of the '
        f'{len(weights)} weights that earlier rules did not match, such as '
        f'{next(iter(weights), "none")}; a rule must match the whole name, and '
        '--mode=inspect_model prints all names'
      )


def _Find(source: str) -> tuple[checkpointer.Checkpointer, checkpoint_info.CheckpointInfo]:
  """Returns the checkpoint of a commit file, or the last one of a log or checkpoint directory."""
  source = os.path.expanduser(source).rstrip('/')
  folder, name = os.path.split(source)
  if checkpoint_info.COMMIT.fullmatch(name):
    saved = checkpointer.Checkpointer(folder)
    for info in saved.All():
      if os.path.basename(info.path) == name:
        saved.Verify(info)
        return saved, info
  else:
    for directory in (os.path.join(source, 'train'), source):
      saved = checkpointer.Checkpointer(directory)
      if (latest := saved.Latest()) is not None:
        return saved, latest
  raise ValueError(
    f'{_PARAM}: there is no checkpoint at {source!r}; name a logdir, its train directory, or a '
    'file such as train/ckpt-00000205.json'
  )


def _CheckNames(
  source: str,
  info: checkpoint_info.CheckpointInfo,
  names: Mapping[str, str],
  weights: Mapping[str, tf.Variable],
) -> None:
  """Raises a ValueError that lists every name, shape and dtype that does not fit."""
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
      f'{_PARAM}[{source!r}] does not fit {info.path}: {"; ".join(problems)}. Correct the rules, '
      'or ignore these weights'
    )


def _Assign(
  saved: checkpointer.Checkpointer,
  info: checkpoint_info.CheckpointInfo,
  names: Mapping[str, str],
  weights: Mapping[str, tf.Variable],
) -> None:
  """Assigns the weights; several of them may have the same name in the checkpoint."""
  remaining = dict(names)
  while remaining:
    batch = {name: weight for weight, name in remaining.items()}  # One weight per name.
    saved.Restore(info, {name: weights[weight] for name, weight in batch.items()}, allow_extra=True)
    remaining = {weight: name for weight, name in remaining.items() if batch[name] != weight}
