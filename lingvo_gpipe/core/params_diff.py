# SPDX-License-Identifier: Apache-2.0
"""What differs between two sets of Params, from their text: the params.txt of two runs, say."""

from __future__ import annotations

import re
from typing import NamedTuple

from lingvo_gpipe.core import hyperparams, params_text


class Change(NamedTuple):
  """A param that two sets of Params do not agree on.

  Its text is a line for people: `~ path : old -> new`, `- path : old` or `+ path : new`.

  Attributes:
    path: the path of the param.
    old: the text of the first one's value; None where it has no such param.
    new: the same of the second one.
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


def Changes(a: str | hyperparams.Params, b: str | hyperparams.Params) -> list[Change]:
  """The params that differ from `a` to `b`, by path; those in lists by their index.

  Args:
    a: Params, or the text that their ToText wrote.
    b: the same.

  Raises:
    ValueError: a text is not of this form.
  """
  old, new = _Values(a), _Values(b)
  return [
    Change(path, old.get(path), new.get(path))
    for path in sorted({*old, *new}, key=_Order)
    if old.get(path) != new.get(path)
  ]


def _Values(params: str | hyperparams.Params) -> dict[str, str]:
  text = params if isinstance(params, str) else params.ToText()
  return dict(params_text.ParseOverrides(text))


def _Order(path: str) -> list[tuple[bool, int, str]]:
  """Sorts `layers[2]` before `layers[10]`."""
  parts = re.split(r'(\d+)', path)
  return [(p.isdigit(), int(p) if p.isdigit() else 0, p) for p in parts]
