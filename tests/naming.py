# SPDX-License-Identifier: Apache-2.0
"""Patterns for error messages that name the things a reader needs, not the sentence around them."""

import re


def Naming(*parts: object) -> str:
  """Returns a pattern for `pytest.raises(match=...)`: each part occurs as it is, in any order.

  A part is a param, path, stage, number, file or flag. It stands alone: 3 is not found in 13.
  """
  return '(?s)' + ''.join(rf'(?=.*(?<!\w){re.escape(str(part))}(?!\w))' for part in parts)


def Names(text: str, *parts: object) -> bool:
  """Whether a text names each part, such as a line of a log."""
  return re.search(Naming(*parts), text) is not None


def AnyLineNames(text: str, *parts: object) -> bool:
  """Whether one line of a text names all parts, such as the action and the step in an output."""
  return any(Names(line, *parts) for line in text.splitlines())
