# SPDX-License-Identifier: Apache-2.0
"""The differences between two sets of Params or their texts, such as the params.txt of two runs."""

from __future__ import annotations

import re
from typing import NamedTuple

from lingvo_gpipe.core import hyperparams, params_text


class Change(NamedTuple):
  """A param that differs between two sets of Params.

  Its `str` is a human-readable line: `~ path : old -> new`, `- path : old` or `+ path : new`.

  Attributes:
    path: the path of the param.
    old: the text of the value in the first set; None if the first set lacks the param.
    new: the text of the value in the second set; None if the second set lacks the param.
  """

  path: str
  old: str | None
  new: str | None

  def __str__(self) -> str:
    if self.old is None:
      return f'+ {self.path} : {self.new}'
    if self.new is None:
      return f'- {self.path} : {self.old}'
    return f'~ {self.path} : {self.old} -> {self.new}'


def FindChanges(a: str | hyperparams.Params, b: str | hyperparams.Params) -> list[Change]:
  """Returns the params that differ from `a` to `b`, sorted by path and by index within lists.

  Args:
    a: Params, or text that ToText wrote.
    b: Params, or text that ToText wrote.

  Raises:
    ValueError: a text has another form.
  """
  old, new = _ReadValues(a), _ReadValues(b)
  return [
    Change(path, old.get(path), new.get(path))
    for path in sorted({*old, *new}, key=_SortKey)
    if old.get(path) != new.get(path)
  ]


def _ReadValues(params: str | hyperparams.Params) -> dict[str, str]:
  text = params if isinstance(params, str) else params.ToText()
  return dict(params_text.ParseOverrides(text))


def _SortKey(path: str) -> list[tuple[bool, int, str]]:
  """Returns a key that sorts `layers[2]` before `layers[10]`."""
  parts = re.split(r'(\d+)', path)
  return [(p.isdigit(), int(p) if p.isdigit() else 0, p) for p in parts]
