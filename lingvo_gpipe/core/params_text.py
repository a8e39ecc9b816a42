# SPDX-License-Identifier: Apache-2.0
"""Parses the text of params: values of a given type, paths such as `a.b[0].c`, lists of overrides.

This module does not depend on `Params`. `literals` defines the text form of values.
"""

from __future__ import annotations

import copy
import decimal
import difflib
import enum
import math
import numbers
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from lingvo_gpipe.core import literals, nested_tree

_INT = re.compile(r'[+-]?[0-9][0-9_]*(\.[0-9_]*)?([eE][+-]?[0-9]+)?')
_SKIPPED = re.compile(r'(?:[\s;]|#[^\n]*)*')
_BLANKS = re.compile(r'[ \t]*')
_BARE_VALUE = re.compile(r'[^;\n]*')
_PLAIN = (list, tuple, dict, bytes)
# The number of characters to scan in vain for the ends of open quotes and brackets.
_MAX_SCANNED = 1 << 21


# --- Values ---------------------------------------------------------------------------------------


def _ParseBool(text: str, like: Any) -> bool:
  value = {'true': True, 'false': False}.get(text.lower())
  if value is None:
    raise ValueError()
  return value


def _ParseInt(text: str, like: Any) -> int:
  if not _INT.fullmatch(text):
    value = int(text, 0)  # 0x10, or ValueError.
    if value.bit_length() > literals.MAX_BITS:
      raise ValueError('it is too large')
    return value
  number = decimal.Decimal(text)  # Exact, unlike a float from 1e23 on.
  if number.adjusted() > 4000 or number != number.to_integral_value():
    raise ValueError()
  return int(number)


def _ParseFloat(text: str, like: Any) -> float:
  number = float(text)
  if math.isinf(number) and 'inf' not in text.lower():
    raise ValueError('it is too large')
  return number


def _ParseStr(text: str, like: Any) -> str:
  if not re.match(r'[rRuU]?[\'"]', text):
    return text
  value = literals.ParseStrict(text)
  if not isinstance(value, str):
    raise ValueError()
  return value


def _ParseDType(text: str, like: Any) -> Any:
  try:
    return sys.modules[type(like).__module__].as_dtype(text.removeprefix('tf.'))
  except TypeError:
    raise ValueError() from None


def _ParseNamed(text: str, like: Any) -> Any:
  value: Any = literals.ParseStrict(text) if text.startswith('type/') else None
  # A function must not replace a class: it would be called instead of instantiated.
  if not literals.IsNamed(value) or (isinstance(like, type) and not isinstance(value, type)):
    raise ValueError()
  # A layer must not replace an input, nor a class without Params a layer.
  bases = [c for c in getattr(like, '__mro__', ()) if hasattr(c, 'Params')]
  if bases and not issubclass(value, bases[-1]):
    raise ValueError(f'it is not a {bases[-1].__name__}')
  return value


def _ParseRecord(text: str, like: Any) -> Any:
  """Reads a new record, `type/.../Cls(x=1)`, or a dict of fields to replace in the present one."""
  cls, fields = type(like), literals.RecordFields(like)
  if text.startswith('type/'):
    return literals.ParseRecord(text, cls)
  value = literals.ParseStrict(text)
  if type(value) is not dict:
    raise ValueError()
  for name in value:
    if name not in fields:
      closest = difflib.get_close_matches(str(name), fields, n=1)
      hint = f'; did you mean {closest[0]}?' if closest else ''
      raise ValueError(f'{cls.__name__} has no field {name!r}{hint}')
  return literals.ReplaceFields(like, **value)


def _ParseContainer(text: str, like: Any) -> Any:
  value: Any = literals.ParseStrict(text)
  kind: Any = next(kind for kind in _PLAIN if isinstance(like, kind))
  if type(value) is not kind:
    raise ValueError()
  if isinstance(like, dict) and type(like) is not dict:  # Keep the class, such as NestedMap.
    new: dict[Any, Any] = copy.copy(like)
    new.clear()
    new.update(value)
    return new
  return value


def _ParseOpaque(text: str, like: Any) -> Any:
  raise ValueError()


def _ParserFor(like: Any) -> tuple[str, Callable[[str, Any], Any]]:
  """Returns a description of the text that can replace the value `like`, and its parser."""
  if isinstance(like, bool) or literals.IsNumpyBool(like):
    return 'bool (true or false)', _ParseBool
  if isinstance(like, numbers.Integral) and not isinstance(like, enum.Enum):
    return 'int (such as 100 or 1e6)', _ParseInt
  if literals.IsFloat(like):
    return 'float', _ParseFloat
  if isinstance(like, str) and not isinstance(like, enum.Enum):
    return 'str (with a quote at its beginning, it must be a quoted string)', _ParseStr
  if literals.IsNamed(like):
    kind = 'class' if isinstance(like, type) else 'class or function'
    return f'type/<module>/<name> of a {kind}', _ParseNamed
  if literals.IsTensorFlowDType(like):
    return 'a dtype (such as float32)', _ParseDType
  if literals.IsRecord(like):
    names = list(literals.RecordFields(like))
    return f'{type(like).__name__} (a dict of fields {", ".join(names)})', _ParseRecord
  name = type(like).__name__
  if isinstance(like, _PLAIN) and not (isinstance(like, tuple) and type(like) is not tuple):
    example = {'list': '[1, 2]', 'tuple': '(1, 2)', 'dict': "{'a': 1}"}.get(name)
    return f'{name} (such as {example})' if example else name, _ParseContainer
  return f'{name}, which has no text form', _ParseOpaque


_LIKE: dict[str, Any] = {'bool': False, 'int': 0, 'float': 0.0, 'str': ''}


def ParseValue(text: str, like: Any, path: str, type_name: str | None = None) -> Any:
  """Reads the text of a param's new value.

  Args:
    text: the text. `None` (or Lingvo's `NoneType`) is None for every `like`; a string 'None' needs
      quotes.
    like: a value of the required type. None accepts any type; see `literals.ParseLiteral`.
    path: the path of the param, for messages.
    type_name: the required type as a name from `literals.TypeName`. `like` then matters only for
      text that cannot be read without it.

  Raises:
    ValueError: the text has another type. The message is one line with the path, the expected type
      and the text.
  """
  text = text.strip()
  if text in ('None', 'NoneType'):
    return None
  expected = ''
  try:
    # The only way to read the text of a value without a text form, such as a lambda.
    if like is not None and text == literals.WriteValue(like):
      return like
    if type_name is not None:
      like = _LIKE.get(type_name)
    if like is not None:
      expected, parse = _ParserFor(like)
      return parse(text, like)
    value = literals.ParseLiteral(text)
    if type_name not in (None, 'type', 'function', literals.TypeName(value)):
      expected = literals.Shorten(str(type_name))[1:-1]
      raise ValueError()
    return value
  except (ValueError, ArithmeticError, RecursionError) as e:
    reason = ' '.join(str(e).split())
    # The messages of int() and float() add nothing.
    if isinstance(e, ArithmeticError) or reason.startswith(('could not convert', 'invalid lit')):
      reason = ''
    expects = f'expects {expected}, got' if expected else 'cannot take'
    message = f'{path} {expects} {literals.Shorten(text)}'
    raise ValueError(f'{message}: {reason}' if reason else message) from None


# --- Paths and overrides --------------------------------------------------------------------------


class Step(NamedTuple):
  """A step of a path: `.x` (kind 'param'), `[3]` or `['k']` ('item'), or `[x]` ('field')."""

  kind: str
  value: Any
  text: str


def ParseSteps(path: str) -> list[Step]:
  """Splits `a.b[1]['k'].c` into steps.

  Raises:
    ValueError: the text is not a path.
  """
  steps: list[Step] = []
  for name, key, text in nested_tree.SplitPath(path):
    if name:
      steps.append(Step('param', name, text))
    elif key.isidentifier() and key not in ('None', 'True', 'False', 'inf', 'nan'):
      steps.append(Step('field', key, text))
    else:
      try:
        steps.append(Step('item', literals.ParseStrict(key), text))
      except ValueError:
        raise nested_tree.InvalidPath(path, text) from None
  return steps


def _ScanLiteral(text: str, position: int, ends: str) -> int | None:
  """Returns the position of one of `ends` outside of quotes and brackets; None if these stay open.

  Returns the length of the text if none of `ends` occurs.
  """
  depth = 0
  while position < len(text):
    c = text[position]
    if c in '\'"':
      quoted = literals.QUOTED.match(text, position)
      if not quoted:
        return None
      position = quoted.end()
      continue
    if depth == 0 and c in ends:
      return position
    depth += (c in '[({') - (c in '])}')
    position += 1
  return None if depth > 0 else position


def ParseOverrides(text: str) -> list[tuple[str, str]]:
  """Splits `a.b:1; c:'x;y'` into [('a.b', '1'), ('c', "'x;y'")], in order.

  Pairs are separated by `;` or a new line. A literal value (which begins with a quote, a bracket or
  `type/`) may contain separators inside its quotes and brackets. A bare value ends at the first
  separator. A `#` in place of a key begins a comment, up to the end of the line. White space around
  keys and values is ignored.

  Raises:
    ValueError: a pair has no `:` or no key, or very many values have open quotes or brackets.
  """
  pairs: list[tuple[str, str]] = []
  position = num_scanned = 0
  while True:
    position += len(_Match(_SKIPPED, text, position))
    if position == len(text):
      return pairs
    end = _ScanLiteral(text, position, ':;\n')
    key = text[position:end].strip()
    if end is None or text[end : end + 1] != ':' or not key:
      bare = literals.Shorten(_Match(_BARE_VALUE, text, position).strip())
      raise ValueError(f'{bare} is not of the form key:value')
    position = end + 1
    position += len(_Match(_BLANKS, text, position))
    stop = None
    if literals.LITERAL_START.match(text, position):
      stop = _ScanLiteral(text, position, ';\n')
      if stop is None:  # It was scanned, at most up to the end of the text.
        if num_scanned > _MAX_SCANNED:
          raise ValueError(
            f'{literals.Shorten(key)} is one of many values with open quotes or brackets: close '
            'them'
          )
        num_scanned += len(text) - position
    value = text[position:stop] if stop else _Match(_BARE_VALUE, text, position)
    # A key may span lines inside quotes, but messages that name it must be one line.
    key = key.replace('\n', '\\n').replace('\r', '\\r')
    pairs.append((key, value.strip()))
    position += len(value)


def _Match(pattern: re.Pattern[str], text: str, position: int) -> str:
  """Returns the match of `pattern` at a position, or ''."""
  match = pattern.match(text, position)
  return match.group() if match else ''
