# SPDX-License-Identifier: Apache-2.0
"""Domains: the values that a param may have, declared where the param is defined.

    p.Define('num_layers', 1, 'Number of layers.', domain.NUM_LAYERS)
    p.Define('decay', 0.999, 'Decay; None: no decay.', domain.Number(0, below=1) | domain.NONE)

Text must be in the domain when it is set, and every value when its Params are instantiated. The
default may lie outside of the domain: the param must be set then. Without a declared domain, text
has the type of the present value, and code may assign any value; a default of True or False
declares `BOOL`.

This module imports no TensorFlow.
"""

from __future__ import annotations

import difflib
import itertools
import math
import numbers
import re
import struct
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lingvo_gpipe.core import literals

_INT64_MAX = (1 << 63) - 1


@dataclass(frozen=True)
class Domain:
  """A set of values.

  Attributes:
    text: a description such as `an integer of at least 1`.
    contains: returns whether a value is in the domain.
    like: a value of the type that text is parsed as if the present value does not decide it.
    names: returns the strings in the domain, of which a message suggests the closest.
  """

  text: str
  contains: Callable[[Any], bool]
  like: Any = None
  names: Callable[[], Sequence[str]] = tuple

  def __or__(self, other: Domain) -> Domain:
    like = self.like if other is NONE else None
    return Domain(
      f'{self.text} or {other.text}',
      lambda x: self.contains(x) or other.contains(x),
      like,
      lambda: [*self.names(), *other.names()],
    )

  def Check(self, path: str, value: Any) -> None:
    """Raises ValueError, naming the path, unless the domain contains the value."""
    if not self.contains(value):
      cls = getattr(value, 'cls', None) if PARAMS.contains(value) else None
      text = f'Params of {cls.__name__}' if isinstance(cls, type) else literals.WriteValue(value)
      text = text if len(text) <= 80 else text[:76] + ' ...'
      raise ValueError(f'{path} expects {self.text}, got {text}{self._Hint(value)}')

  def _Hint(self, value: Any) -> str:
    """Returns a number's value in float32, the closest name, or all names if `text` has none."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if isinstance(self.like, float) and is_number:
      rounded = _AsFloat32(value)
      is_another = rounded != value and rounded in (0.0, 1.0, math.inf, -math.inf)
      return f', which is {rounded} in float32' if is_another else ''
    names = {name.lower(): name for name in self.names()} if isinstance(value, str) else {}
    if close := difflib.get_close_matches(value.lower(), names, n=1) if names else []:
      return f'; did you mean {names[close[0]]!r}?'
    is_listed = any(repr(name) in self.text for name in names.values())
    return f'; known: {", ".join(names.values())}' if names and not is_listed else ''


def _IsInt(value: Any) -> bool:
  return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _AsFloat32(value: numbers.Real) -> float:
  try:
    return float(struct.unpack('f', struct.pack('f', float(value)))[0])
  except OverflowError:
    return math.inf if value > 0 else -math.inf  # type: ignore[operator]


def _Limits(*limits: tuple[str, Any]) -> str:
  texts = [f'{word} {limit}' for word, limit in limits if limit is not None]
  return ' ' + ' and '.join(texts) if texts else ''


def Int(low: int | None = None, high: int | None = None, multiple_of: int = 1) -> Domain:
  """Returns the integers from `low` to `high`; None: as far as int64 reaches.

  Args:
    low: the least.
    high: the greatest.
    multiple_of: a number that divides each of them.
  """
  least = -_INT64_MAX - 1 if low is None else low
  most = _INT64_MAX if high is None else high
  of_least = 'of at least' if multiple_of == 1 else 'at least'
  limits = _Limits((of_least, low), ('at most', high)) or ' of 64 bits'
  text = 'an integer' if multiple_of == 1 else f'a multiple of {multiple_of},'
  return Domain(
    text + limits if low is None or low != high else str(low),
    lambda x: bool(_IsInt(x) and least <= x <= most and x % multiple_of == 0),
    0,
  )


def Number(
  low: float | None = None,
  high: float | None = None,
  *,
  above: float | None = None,
  below: float | None = None,
) -> Domain:
  """Returns the finite numbers from `low` to `high`, or above and below a limit.

  Their values in float32 must be finite and within `above` and `below`, too, whatever the dtype of
  the model: most numbers end up in float32, in which 1e-50 is 0.
  """

  def _Contains(x: Any) -> bool:
    if isinstance(x, bool) or not isinstance(x, numbers.Real) or x != x:
      return False
    value: Any = x
    rounded = _AsFloat32(x)
    return (
      math.isfinite(rounded)
      and (low is None or value >= low)
      and (high is None or value <= high)
      and (above is None or (value > above and rounded > above))
      and (below is None or (value < below and rounded < below))
    )

  limits = _Limits(('of at least', low), ('above', above), ('at most', high), ('below', below))
  return Domain('a number' + limits, _Contains, 0.0)


def OneOf(*values: str) -> Domain:
  """Returns the domain of these strings."""
  return Domain(
    ' or '.join(map(repr, values)), lambda x: isinstance(x, str) and x in values, '', lambda: values
  )


def NameOf(kind: str, names: Callable[[], Sequence[str]]) -> Domain:
  """Returns the strings that `names` returns at the time of a check: names of one kind."""
  return Domain(f'the name of {kind}', lambda x: isinstance(x, str) and x in names(), '', names)


def ListOf(
  item: Domain, size: int | None = None, *, increasing: bool = False, not_empty: bool = False
) -> Domain:
  """Returns the lists and tuples whose items are all in a domain.

  Args:
    item: the domain of each item.
    size: the number of items; None: any.
    increasing: whether each item must be greater than the one before.
    not_empty: whether there must be an item.
  """

  def _Contains(x: Any) -> bool:
    return (
      isinstance(x, list | tuple)
      and size in (None, len(x))
      and (len(x) > 0 or not not_empty)
      and all(map(item.contains, x))
      and not (increasing and any(a >= b for a, b in itertools.pairwise(x)))
    )

  length = ' that is not empty' if not_empty else '' if size is None else f' of {size}'
  order = ', in increasing order' if increasing else ''
  return Domain(f'a list{length}, each item {item.text}{order}', _Contains)


def PairOf(first: Domain, second: Domain) -> Domain:
  """Returns the lists and tuples of two items in these domains."""
  return Domain(
    f'a pair of {first.text} and {second.text}',
    lambda x: (
      isinstance(x, list | tuple) and len(x) == 2 and first.contains(x[0]) and second.contains(x[1])
    ),
  )


def DictOf(key: Domain, value: Domain) -> Domain:
  """Returns dicts whose keys are in one domain and whose values in another."""

  def _Contains(x: Any) -> bool:
    return isinstance(x, Mapping) and all(
      key.contains(k) and value.contains(v) for k, v in x.items()
    )

  return Domain(f'a dict from {key.text} to {value.text}', _Contains)


def InstanceOf(*classes: type) -> Domain:
  """Returns the instances of some classes."""
  names = ' or '.join(cls.__name__ for cls in classes)
  return Domain(f'an object of type {names}', lambda x: isinstance(x, classes))


def ParamsOf(cls: type) -> Domain:
  """Returns the Params of a class and of its subclasses."""

  def _Contains(x: Any) -> bool:
    configured = getattr(x, 'cls', None) if PARAMS.contains(x) else None
    return isinstance(configured, type) and issubclass(configured, cls)

  return Domain(f'the Params of a {cls.__name__}', _Contains)


def IsText(value: Any) -> bool:
  """Whether a value is a string that files and paths may hold: in UTF-8 and without NUL."""
  try:
    return isinstance(value, str) and b'\0' not in value.encode()
  except UnicodeEncodeError:  # It has surrogates.
    return False


# Escapes and sets, and groups of nothing but repeats that repeat, as (a+)+: a search for these may
# take exponential time. Other forms of the same exist, but few write them.
_SET = r'\[\^?\]?(?:\\.|[^\]\\])*\]'
_REPEAT = r'(?:[*+]|\{\d*,\})'
_GROUPS = re.compile(
  rf'\\.|{_SET}|(?P<repeated>\((?:\?[a-zA-Z-]*:|\?P<\w+>)?'
  rf'(?:(?:\\.|{_SET}|[^()\[\]\\|*+?{{}}]){_REPEAT}\??)+\){_REPEAT}(?!\+))'
)


def _IsRegex(value: Any) -> bool:
  try:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')  # For example, about a set in a set.
      is_regex = isinstance(value, str) and bool(re.compile(value))
      return is_regex and not any(m['repeated'] for m in _GROUPS.finditer(value))
  except (re.error, RecursionError, OverflowError):
    return False


def _IsFloatDType(value: Any) -> bool:
  name = getattr(value, 'name', None) or getattr(value, '__name__', value)
  return name in ('bfloat16', 'float16', 'half', 'float32', 'float', 'float64', 'double')


NONE = Domain('None', lambda x: x is None)
ANY = Domain('any value', lambda x: True)
BOOL = Domain('a bool', lambda x: isinstance(x, bool) or literals.IsNumpyBool(x), False)
STR = Domain('a string in UTF-8 without NUL', IsText, '')
STRINGS = ListOf(STR)
REGEX = Domain('a regular expression, but no repeat of repeats such as (a+)+', _IsRegex, '')
FLOAT_DTYPE = Domain('a floating dtype such as float32', _IsFloatDType)
PARAMS = Domain('Params', lambda x: hasattr(x, 'FromText'))

_INT32_MAX = (1 << 31) - 1


def Size(low: int = 1, multiple_of: int = 1) -> Domain:
  """Returns the sizes of a dimension from `low` on that a number divides."""
  return Int(low, _INT32_MAX, multiple_of)


SIZE = Size()
SIZES = ListOf(SIZE)
MAX_LAYERS = 4096
NUM_LAYERS = Int(1, MAX_LAYERS)
INDEX = Int(0, _INT32_MAX)  # A size that may be 0, or an index of a dimension.
COUNT = Int(0)
# Seeds number the micro-batches of all steps in 63 bits.
MAX_STEPS = (1 << 43) - 1
STEPS = Int(0, MAX_STEPS)
MAX_EXAMPLES = 1 << 40
EXAMPLES = Int(0, MAX_EXAMPLES)
NOT_NEGATIVE = Number(0)
POSITIVE = Number(above=0)
PROBABILITY = Number(0, below=1)  # The probability of dropping: 1 would drop everything.


def Infer(value: Any) -> Domain:
  """Returns the domain of the text that may replace a value of an undeclared domain."""
  for domain in (BOOL, Int(), STR):
    if domain.contains(value):
      return domain
  return Domain(literals.TypeName(value), lambda x: x is not None)
