# SPDX-License-Identifier: Apache-2.0
"""Walks over trees of Params and containers: paths, copies, freezing, comparison, text of a tree.

The inner nodes of a tree are Params (here seen as `Node`), lists, tuples, dicts and dataclasses.
"""

from __future__ import annotations

import copy
import difflib
import enum
import functools
import itertools
import math
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from lingvo_gpipe.core import domain as domain_lib
from lingvo_gpipe.core import literals
from lingvo_gpipe.core.params_text import Step

_MAX_KEYS_LISTED = 12
_ATOMS = (type(None), bool, int, float, str, bytes, range, type, types.FunctionType, enum.Enum)
# Libraries whose objects (tensors, variables) are shared by copies.
_SHARED = ('tensorflow', 'keras', 'jax', 'jaxlib')


class Param(NamedTuple):
  """The definition of a param. Copies of its Params share it, and nobody changes the default."""

  default: Any
  description: str
  domain: domain_lib.Domain | None


class Node:
  """The interface of Params for the functions here."""

  def _Values(self) -> dict[str, Any]:
    """Returns the values by name, in the order of definition."""
    raise NotImplementedError()

  def _Definitions(self) -> dict[str, Param]:
    """Returns the params by name. Several nodes may share this dict."""
    raise NotImplementedError()

  def _CheckMutable(self, path: str) -> None:
    """Raises TypeError, naming `path`, if the node is frozen."""
    raise NotImplementedError()

  def Freeze(self) -> None:
    """Makes the node and its values read-only."""
    raise NotImplementedError()

  def __deepcopy__(self, memo: dict[int, Any]) -> Any:
    """Returns a deep copy, which is not frozen."""
    raise NotImplementedError()

  def _Hint(self, name: str) -> str:
    """Returns advice about a name that is deliberately not defined, or ''."""
    del name
    return ''


# --- Structure ------------------------------------------------------------------------------------


def _PairNames(value: Any) -> list[str] | None:
  """Returns the names of a list of (name, Params) pairs; None for other lists or equal names."""
  names = []
  for item in value:
    if not (type(item) is tuple and len(item) == 2 and isinstance(item[1], Node)):
      return None
    if not (isinstance(item[0], str) and item[0].isidentifier()):
      return None
    names.append(item[0])
  return names if names and len(set(names)) == len(names) else None


def Children(value: Any) -> list[tuple[str, Any]] | None:
  """Returns (suffix to the path of `value`, child) of each child; None if `value` is a leaf."""
  if isinstance(value, Node):
    return [(f'.{name}', child) for name, child in value._Values().items()]
  if literals.IsRecord(value):
    return [(f'[{name}]', item) for name, item in literals.RecordFields(value).items()]
  if isinstance(value, dict):
    return [(f'[{literals.WriteValue(key)}]', item) for key, item in value.items()]
  if isinstance(value, list) or type(value) is tuple:
    names = _PairNames(value)
    if names:
      return [(f'[{name}]', item) for name, (_, item) in zip(names, value, strict=True)]
    return [(f'[{i}]', item) for i, item in enumerate(value)]
  return None


def Join(prefix: str, suffix: str) -> str:
  """Returns the path of a child."""
  return prefix + suffix if prefix else suffix.removeprefix('.')


def HoldsNodes(value: Any) -> bool:
  """Whether `value` is or contains Params."""
  if isinstance(value, Node):
    return True
  if isinstance(value, _ATOMS):
    return False
  return any(HoldsNodes(child) for _, child in Children(value) or ())


def Leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
  """Yields (path, value) of each line of text: a container without Params in it is one leaf."""
  if not HoldsNodes(value):
    yield prefix, value
    return
  children = Children(value) or []
  for suffix, child in _SortedChildren(value) if isinstance(value, Node) else children:
    yield from Leaves(Join(prefix, suffix), child)


# --- Paths ----------------------------------------------------------------------------------------


def UndefinedMessage(node: Node, name: str, prefix: str = '', path: str = '') -> str:
  """Returns the message that Params at `prefix` lack `name`; `path` is the whole requested path."""
  if hint := node._Hint(name):
    return f'{path or Join(prefix, f".{name}")} is not defined: {hint}'
  keys = list(node._Values())
  guesses = _PathsWithSameEnd(prefix, node, path)
  if not guesses:
    scores = {key: difflib.SequenceMatcher(None, name, key).ratio() for key in keys}
    best = max(scores.values(), default=0.0)
    close = [key for key in keys if scores[key] >= max(0.6, best - 0.1)]
    close = sorted(close, key=lambda key: -scores[key])[:3]
    guesses = [Join(prefix, f'.{key}') for key in close]
  if not guesses:  # Perhaps a part of the path is missing.
    guesses = [key for key, _ in Leaves(prefix, node) if key.endswith(f'.{name}')][:3]
  return _MissingMessage(Join(prefix, f'.{name}'), path, prefix, guesses, sorted(keys))


def _PathsWithSameEnd(prefix: str, node: Node, path: str) -> list[str]:
  """Returns paths in Params at `prefix` that share at least the last two parts with `path`.

  They help if the path is from another model, or lacks its first parts.
  """
  candidates: dict[tuple[int, int], list[str]] = {}
  for key, _ in Leaves(prefix, node):
    pairs = zip(reversed(key.split('.')), reversed(path.split('.')), strict=False)
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    candidates.setdefault((same, -key.count('.')), []).append(key)
  best = max(candidates, default=(0, 0))
  return candidates[best][:3] if best[0] >= 2 else []


def _MissingMessage(
  missing: str, path: str, prefix: str, guesses: list[str], keys: list[str]
) -> str:
  if path.removeprefix(missing):
    missing += f' (in {path})'
  if guesses:
    return f'{missing} is not defined; did you mean {" or ".join(guesses)}?'
  names = ', '.join(keys[:_MAX_KEYS_LISTED]) or 'nothing'
  more = f', ... ({len(keys)} in all)' if len(keys) > _MAX_KEYS_LISTED else ''
  return f'{missing} is not defined; {prefix + " has" if prefix else "there is"}: {names}{more}'


class _Place:
  """A child of a container, and the functions that replace and restore it."""

  def __init__(
    self,
    child: Any,
    put: Callable[[Any], Any],
    restore: Callable[[], Any] | None = None,
    param: Param | None = None,
  ):
    self.child = child
    self.put = put  # Returns the container, or a new container if it cannot be changed.
    self.restore = restore
    self.param = param


def _Locate(container: Any, step: Step, prefix: str, path: str) -> _Place:
  """Finds the child of `container` (at `prefix`) at the end of a step of `path`."""
  child_path, key = Join(prefix, step.text), step.value
  if step.kind == 'param':
    if not isinstance(container, Node):
      kind = 'None' if container is None else f'of type {literals.TypeName(container)}'
      raise AttributeError(f'{path} is not defined: {prefix} is {kind} and has no params')
    if key not in container._Values():
      raise AttributeError(UndefinedMessage(container, key, prefix, path))
    return _LocateParam(container, key, path)
  if isinstance(container, dict):
    try:
      defined = key in container
    except TypeError:  # The key is not hashable.
      defined = False
    if not defined:
      keys = [literals.WriteValue(k) for k in container]
      close = difflib.get_close_matches(literals.WriteValue(key), keys, n=3)
      raise AttributeError(
        _MissingMessage(child_path, path, prefix, [f'{prefix}[{k}]' for k in close], sorted(keys))
      )
    return _LocateKey(container, key)
  if literals.IsRecord(container):
    fields = literals.RecordFields(container)
    if key not in fields or step.kind != 'field':
      close = difflib.get_close_matches(str(key), fields, n=3)
      raise AttributeError(
        _MissingMessage(child_path, path, prefix, [f'{prefix}[{k}]' for k in close], list(fields))
      )
    return _Place(fields[key], lambda new: literals.ReplaceFields(container, **{key: new}))
  if isinstance(container, list) or type(container) is tuple:
    names = _PairNames(container) if step.kind == 'field' else None
    if names and key in names:
      return _LocatePair(container, names.index(key))
    if type(key) is not int or not -len(container) <= key < len(container):
      raise AttributeError(f'{child_path} is not defined: {prefix} has {len(container)} entries')
    return _LocateKey(container, key)
  kind = 'Params' if isinstance(container, Node) else literals.TypeName(container)
  raise AttributeError(
    f'{child_path} is not defined: {prefix or "this"} is {kind}, which takes no index'
  )


def _LocateParam(node: Node, name: str, path: str) -> _Place:
  values = node._Values()
  value = values[name]

  def _Put(new: Any) -> Node:
    node._CheckMutable(path)
    values[name] = new
    return node

  restore = functools.partial(values.__setitem__, name, value)
  return _Place(value, _Put, restore, node._Definitions()[name])


def _LocateKey(container: Any, key: Any) -> _Place:
  def _Put(new: Any) -> Any:
    if not changes:
      items = list(container)
      items[key] = new
      return tuple(items) if isinstance(container, tuple) else items
    container[key] = new
    return container

  old = container[key]
  changes = not isinstance(container, (tuple, literals.ReadOnlyList))
  return _Place(old, _Put, functools.partial(container.__setitem__, key, old) if changes else None)


def _LocatePair(container: Any, index: int) -> _Place:
  place = _LocateKey(container, index)
  name, child = place.child
  return _Place(child, lambda new: place.put((name, new)), place.restore)


def GetStep(container: Any, step: Step, prefix: str, path: str) -> Any:
  """Returns the child of `container` (at `prefix`) at the end of a step of `path`.

  Raises:
    AttributeError: the child is not defined.
  """
  return _Locate(container, step, prefix, path).child


def SetPath(
  container: Any,
  steps: list[Step],
  make: Callable[[Any, Param | None], Any],
  prefix: str,
  path: str,
  undo: list[Callable[[], Any]],
) -> Any:
  """Sets the value at `steps` from `container` to `make(present value, its param)`.

  Args:
    container: Params or a container.
    steps: the steps from `container` to the value.
    make: returns the new value; an entry of a container has no param.
    prefix: the path of `container`.
    path: the whole path, for messages.
    undo: receives functions that restore the changed values.

  Returns:
    `container`, or its replacement if it cannot be changed, as a tuple.
  """
  place = _Locate(container, steps[0], prefix, path)
  if isinstance(container, Node) and not isinstance(place.child, Node):
    container._CheckMutable(path)  # The containers inside frozen Params are not read-only.
  if len(steps) == 1:
    new = make(place.child, place.param)
  else:
    new = SetPath(place.child, steps[1:], make, Join(prefix, steps[0].text), path, undo)
    if new is place.child:
      return container
  replaced = place.put(new)
  if place.restore:
    undo.append(place.restore)
  return replaced


# --- Copies, freezing, equality -------------------------------------------------------------------


def _WithChildren(value: Any, fn: Callable[[Any], Any]) -> Any:
  """Returns a container like `value` with `fn(child)` for each child; None if it is a leaf."""
  if isinstance(value, (list, dict)):
    new = copy.copy(value)
    for key, item in list(new.items() if isinstance(new, dict) else enumerate(new)):
      new[key] = fn(item)
    return new
  if type(value) is tuple:
    return tuple(fn(item) for item in value)
  if literals.IsRecord(value):
    fields = literals.RecordFields(value)
    new_fields = {name: fn(item) for name, item in fields.items()}
    is_frozen = type(value).__dataclass_params__.frozen
    if is_frozen and all(new_fields[name] is item for name, item in fields.items()):
      return value
    new = copy.copy(value)
    for name, item in new_fields.items():
      object.__setattr__(new, name, item)
    return new
  return None


@functools.cache
def _IsAtom(cls: type) -> bool:
  return issubclass(cls, _ATOMS)


@functools.cache
def _IsShared(cls: type) -> bool:
  return _IsAtom(cls) or cls.__module__.partition('.')[0] in _SHARED


def DeepCopy(value: Any, memo: dict[int, Any]) -> Any:
  """Returns a deep copy that can be changed, or `value` itself if copies share it."""
  cls: Any = type(value)  # Its __class__ is dict if it is TensorFlow's wrapper of a dict.
  if _IsShared(cls):
    return value
  if id(value) in memo:
    return memo[id(value)]
  if isinstance(value, Node):
    return value.__deepcopy__(memo)
  new = _WithChildren(value, lambda child: DeepCopy(child, memo))
  if new is None:
    try:
      new = copy.deepcopy(value, memo)
    except Exception:  # For example, a lock or an open file.
      new = value
  memo[id(value)] = new
  return new


def CopyContainers(value: Any, freeze: bool = False) -> Any:
  """Returns `value` with copies of the containers in it. Params and other leaves are shared.

  Args:
    value: any value.
    freeze: whether to freeze the Params in it; if not, its lists become read-only.
  """
  if _IsAtom(value.__class__):
    return value
  if isinstance(value, Node):
    if freeze:
      value.Freeze()
    return value
  if isinstance(value, set):
    return copy.copy(value)
  new = _WithChildren(value, lambda child: CopyContainers(child, freeze))
  if type(new) is list and not freeze:
    return literals.ReadOnlyList(new)
  return value if new is None else new


def Equal(a: Any, b: Any, *, exactly: bool = False) -> bool:
  """Whether two values are equal: nan is equal to nan, but True differs from 1, and -0.0 from 0.0.

  Arrays are equal if their shapes and all their elements are.

  Args:
    a: a value.
    b: another one.
    exactly: whether values also differ if a computation could tell them apart, by the kind of a
      number or the order of a map.
  """
  if a is b:
    return True
  if isinstance(a, bool) is not isinstance(b, bool):
    return False
  if exactly and isinstance(a, (int, float, complex, set, dict)) and type(a) is not type(b):
    return False
  if isinstance(a, Node) or isinstance(b, Node):
    return bool(a == b)
  if isinstance(a, float) and isinstance(b, float):
    is_same = a == b and math.copysign(1, a) == math.copysign(1, b)
    return is_same or (math.isnan(a) and math.isnan(b))
  equal = functools.partial(Equal, exactly=exactly)
  for kind in (list, tuple):
    if isinstance(a, kind) and isinstance(b, kind):
      return len(a) == len(b) and all(map(equal, a, b))
  if isinstance(a, dict) and isinstance(b, dict):
    has_keys = equal(list(a), list(b)) if exactly else a.keys() == b.keys()
    return has_keys and all(equal(item, b[key]) for key, item in a.items())
  if exactly and isinstance(a, (set, frozenset)):
    return isinstance(b, (set, frozenset)) and equal(list(a), list(b))
  if literals.IsRecord(a) and type(a) is type(b):
    a_fields, b_fields = literals.RecordFields(a), literals.RecordFields(b)
    return all(equal(item, b_fields[name]) for name, item in a_fields.items())
  try:
    is_equal = a == b
    if not hasattr(is_equal, 'all'):
      return bool(is_equal)
    # Arrays of different shapes are not equal, but `==` would broadcast one of them.
    kinds = ((getattr(x, 'dtype', None), getattr(x, 'shape', None)) for x in (a, b))
    return len(set(kinds)) == 1 and bool(is_equal.all())
  except Exception:  # Values that cannot be compared are not equal.
    return False


# --- Text of a tree -------------------------------------------------------------------------------


def _DiffValues(name: str, mine: Any, theirs: Any, indent: str) -> Iterator[str]:
  if Equal(mine, theirs):
    return
  if isinstance(mine, Node) and isinstance(theirs, Node):
    yield f'{indent}? {name}:'
    yield from Diff(mine, theirs, indent + '  ')
  elif any(isinstance(mine, kind) and isinstance(theirs, kind) for kind in (list, tuple, dict)):
    yield from _DiffChildren(name, Children(mine), Children(theirs), indent)
  else:
    yield from _DiffOneSide('>', name, mine, indent)
    yield from _DiffOneSide('<', name, theirs, indent)


def _DiffChildren(prefix: str, mine: Any, theirs: Any, indent: str) -> Iterator[str]:
  my_children, their_children = dict(mine), dict(theirs)
  suffixes = [*my_children, *(s for s in their_children if s not in my_children)]
  for suffix in suffixes if prefix else sorted(suffixes):
    name = Join(prefix, suffix)
    if suffix in my_children and suffix in their_children:
      yield from _DiffValues(name, my_children[suffix], their_children[suffix], indent)
    elif suffix in my_children:
      yield from _DiffOneSide('>', name, my_children[suffix], indent)
    else:
      yield from _DiffOneSide('<', name, their_children[suffix], indent)


def _DiffOneSide(mark: str, name: str, value: Any, indent: str) -> Iterator[str]:
  for path, leaf in list(Leaves(name, value)) or [(name, value)]:
    yield f'{indent}{mark} {path}: {literals.WriteValue(leaf)}'


def Diff(mine: Node, theirs: Node, indent: str = '') -> Iterator[str]:
  """Yields the lines of `Params.TextDiff`."""
  yield from _DiffChildren('', Children(mine), Children(theirs), indent)


def _SortedChildren(node: Node) -> list[tuple[str, Any]]:
  return sorted(Children(node) or [], key=lambda child: child[0])


def Dump(value: Any, indent: str = '') -> str:
  """Returns indented, human-readable text."""
  children = Children(value) if HoldsNodes(value) else None
  if children is None:
    return literals.WriteValue(value)
  if isinstance(value, Node):
    children, brackets = _SortedChildren(value), '{}'
    start = type(value).__name__ + ' ' if not indent else ''
  else:
    start = ''
    brackets = '[]' if isinstance(value, list) else '{}' if isinstance(value, dict) else '()'
  lines = [
    f'{indent}  {suffix.removeprefix(".")} : {Dump(child, indent + "  ")}\n'
    for suffix, child in children
  ]
  return f'{start}{brackets[0]}\n{"".join(lines)}{indent}{brackets[1]}'
