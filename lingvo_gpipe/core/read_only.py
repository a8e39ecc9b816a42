# SPDX-License-Identifier: Apache-2.0
"""Read-only lists, dicts and sets: what the containers inside frozen `Params` become.

A read-only container is an instance of the class it was made from (`isinstance(x, list)` holds,
`==`, `json` and `tf.nest` treat it as one) whose changing methods raise TypeError. Any copy of it
can be changed again.
"""

from __future__ import annotations

import collections
import copy
import functools
from typing import Any

_MUTATORS: dict[type, tuple[str, ...]] = {
  list: (
    *('append', 'extend', 'insert', 'remove', 'pop', 'clear', 'sort', 'reverse'),
    *('__setitem__', '__delitem__', '__iadd__', '__imul__'),
  ),
  dict: (
    *('clear', 'pop', 'popitem', 'setdefault', 'update', 'move_to_end'),
    *('__setitem__', '__delitem__', '__ior__'),
  ),
  set: (
    *('add', 'clear', 'discard', 'pop', 'remove', 'update', 'difference_update'),
    *('intersection_update', 'symmetric_difference_update'),
    *('__iand__', '__ior__', '__isub__', '__ixor__'),
  ),
}
_KINDS = tuple(_MUTATORS)


def IsContainer(value: Any) -> bool:
  """Whether `value` is of a kind that `MakeReadOnly` takes."""
  return isinstance(value, _KINDS)


def IsReadOnly(value: Any) -> bool:
  """Whether `value` was made by `MakeReadOnly`."""
  return hasattr(type(value), '_read_only_base')


def BaseClass(value: Any) -> Any:
  """The class of `value`; for a read-only container the class that it was made from."""
  return getattr(type(value), '_read_only_base', type(value))


def _Fill(new: Any, value: Any) -> Any:
  """Fills an empty container past its own (perhaps refusing) methods."""
  if isinstance(value, dict):
    # An OrderedDict keeps its order beside the dict, so the dict's own method would lose it.
    kind = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
    for key, item in value.items():
      kind.__setitem__(new, key, item)
  elif isinstance(value, list):
    list.extend(new, value)
  else:
    set.update(new, value)
  return new


def _Refuse(self: Any, *unused_args: Any, **unused_kwargs: Any) -> Any:
  raise TypeError(
    f'this {BaseClass(self).__name__} is part of frozen Params; change it in a Copy()'
  )


@functools.cache
def _ReadOnlyClass(base: type) -> type:
  kind = next(kind for kind in _KINDS if issubclass(base, kind))
  members: dict[str, Any] = dict.fromkeys(_MUTATORS[kind], _Refuse)
  members.update(
    _read_only_base=base,
    __slots__=(),
    __module__=__name__,
    # type(x)(items), as tf.nest calls it, gives a container of the class that it was made from.
    __new__=lambda cls, *args, **kwargs: base(*args, **kwargs),
    __setattr__=_Refuse,
    __delattr__=_Refuse,
    __copy__=Thaw,
    copy=Thaw,
    __deepcopy__=lambda self, memo: _DeepThaw(self, memo),
    __reduce_ex__=lambda self, protocol: (MakeReadOnly, (Thaw(self),)),
  )
  return type(f'ReadOnly_{base.__name__}', (base,), members)


def MakeReadOnly(value: Any) -> Any:
  """Returns a read-only container of the same items; `value` itself is left as it is."""
  if IsReadOnly(value):
    return value
  base: Any = type(value)
  return _Fill(base.__new__(_ReadOnlyClass(base)), value)


def Thaw(value: Any) -> Any:
  """Returns a shallow copy, of the class that the read-only `value` was made from."""
  base = BaseClass(value)
  return _Fill(base.__new__(base), value)


def _DeepThaw(value: Any, memo: dict[int, Any]) -> Any:
  return copy.deepcopy(Thaw(value), memo)
