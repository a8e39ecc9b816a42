# SPDX-License-Identifier: Apache-2.0
"""Trees of mappings, lists and tuples: paths such as `a.b[2].c`, and walks over the leaves.

These are the functions behind `NestedMap`'s methods. They take any such tree, a NestedMap or not;
the docstring of `nested_map` defines containers and leaves. Paths of Params have the same grammar.
This module imports no TensorFlow.
"""

from __future__ import annotations

import ast
import collections
import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from lingvo_gpipe.core import literals

_IDENTIFIER = re.compile(r'[A-Za-z_][A-Za-z0-9_]*')
# `a`, `.a` or `[key]`, whose key may hold brackets inside quotes.
_STEP = re.compile(
  r"""(?:^|(?!^)\.)(?P<name>[A-Za-z_][A-Za-z0-9_]*)"""
  r"""|\[(?P<key>(?:[^\[\]'"]|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")+)\]""",
  re.DOTALL,
)
# Returned by `Filter` and `Select` if nothing remains.
DROPPED = object()


# --- paths ---


def IsIdentifier(key: str) -> bool:
  """Whether a path contains `key` without brackets."""
  return _IDENTIFIER.fullmatch(key) is not None


def SplitPath(path: str) -> Iterator[tuple[str, str, str]]:
  """Yields (name, key, text) of each step of a path.

  A step is `.x`, with the name `x` and no key, or `[k]`, with the key `k` and no name.

  Raises:
    ValueError: the text is not a path.
  """
  if not isinstance(path, str):
    raise ValueError(f'Invalid path {path!r}: expected a str, got {type(path).__name__}.')
  position = 0
  while position < len(path) or not position:
    match = _STEP.match(path, position)
    if not match:
      raise InvalidPath(path, path[position:])
    yield match['name'] or '', match['key'] or '', match.group()
    position = match.end()


def InvalidPath(path: str, remainder: str) -> ValueError:
  """Returns the error for a path whose text is invalid from `remainder` on."""
  return ValueError(
    f'Invalid path {literals.Shorten(path)} at {literals.Shorten(remainder)}: expected something '
    "like a.b, a[2].b or a['k'].b."
  )


def ParsePath(path: str) -> list[str | int]:
  """Splits 'a.b[2].c' into ['a', 'b', 2, 'c']."""
  steps: list[str | int] = []
  for name, key, text in SplitPath(path):
    if name:
      steps.append(name)
    elif re.fullmatch('-?[0-9]+', key):
      steps.append(int(key))
    elif literals.QUOTED.fullmatch(key):
      try:
        steps.append(ast.literal_eval(key))
      except (SyntaxError, ValueError):  # For example, \x without digits.
        raise InvalidPath(path, text) from None
    else:
      raise InvalidPath(path, text)
  return steps


def JoinPath(prefix: str, step: Any) -> str:
  """Returns the path `prefix` with one more key or index."""
  if isinstance(step, str) and IsIdentifier(step):
    return f'{prefix}.{step}' if prefix else step
  return f'{prefix}[{step!r}]'


def QuotePath(steps: Iterable[Any]) -> str:
  """Returns the quoted path of `steps`, for messages."""
  path = ''
  for step in steps:
    path = JoinPath(path, step)
  return repr(path) if path else 'the map'


def MissingKeyMessage(node: Mapping[Any, Any], key: Any) -> str:
  """Returns 'has no key ...', with the closest keys and all keys of `node`."""
  keys = [str(k) for k in node]
  close = difflib.get_close_matches(str(key), keys, n=3, cutoff=0.6)
  hint = f'; did you mean {" or ".join(map(repr, close))}?' if close else ''
  return f'has no key {key!r}{hint} (keys: {sorted(keys)})'


def GetStep(node: Any, step: str | int) -> Any:
  """Returns one child, or raises KeyError, IndexError or TypeError, as 'has ...' or 'is ...'."""
  if isinstance(node, Mapping):
    if step not in node:
      raise KeyError(MissingKeyMessage(node, step))
    return node[step]
  if isinstance(node, (list, tuple)) and isinstance(step, int):
    if not -len(node) <= step < len(node):
      raise IndexError(f'has {len(node)} elements, index {step} is out of range')
    return node[step]
  raise TypeError(f'is a {type(node).__name__}, which has no element {step!r}')


def Find(root: Any, path: str) -> tuple[tuple[Any, ...], Any]:
  """Returns the steps of `path`, without negative indices, and the leaf or container at its end.

  Raises:
    KeyError, IndexError, TypeError: a step leads nowhere; the message names the step.
    ValueError: `path` is not a path.
  """
  node = root
  steps: list[Any] = []
  for step in ParsePath(path):
    try:
      child = GetStep(node, step)
    except (KeyError, IndexError, TypeError) as e:
      raise type(e)(f'{QuotePath(steps)} {e.args[0]} (looking for {path!r})') from None
    negative = isinstance(step, int) and step < 0 and not isinstance(node, Mapping)
    steps.append(len(node) + int(step) if negative else step)
    node = child
  return tuple(steps), node


# --- walks ---


def Children(node: Any) -> list[tuple[Any, Any]] | None:
  """Returns the children with their keys or indices in flatten order, or None for a leaf."""
  if isinstance(node, Mapping):
    return [(key, node[key]) for key in sorted(node)]
  if isinstance(node, (list, tuple)):
    return list(enumerate(node))
  return None


def Rebuild(node: Any, children: list[tuple[Any, Any]]) -> Any:
  """Returns a container like `node` with these children. A mapping keeps its order of keys."""
  if isinstance(node, Mapping):
    by_key = dict(children)
    by_key = {key: by_key[key] for key in node if key in by_key}
    if isinstance(node, collections.defaultdict):
      return type(node)(node.default_factory, by_key)
    return type(node)(by_key)  # type: ignore[call-arg]
  values = [child for _, child in children]
  if isinstance(node, list):
    return type(node)(values)
  fields = getattr(node, '_fields', None)
  if fields is None:
    return type(node)(tuple(values))
  if len(values) != len(fields):
    raise ValueError(
      f'A named tuple {type(node).__name__} cannot lose some of its {len(fields)} fields.'
    )
  return type(node)(*values)


def Leaves(node: Any, path: str = '') -> Iterable[tuple[str, Any]]:
  """Yields `(path, leaf)` for all leaves in flatten order; `path` leads to `node`."""
  children = Children(node)
  if children is None:
    yield path, node
  else:
    for step, child in children:
      yield from Leaves(child, JoinPath(path, step))


def Map(fn: Callable[[str, Any], Any], node: Any, path: str = '') -> Any:
  """Returns a tree like `node` with `fn(path, leaf)` for every leaf, called in flatten order."""
  children = Children(node)
  if children is None:
    return fn(path, node)
  return Rebuild(node, [(step, Map(fn, child, JoinPath(path, step))) for step, child in children])


def Filter(fn: Callable[[str, Any], Any], node: Any, path: str = '') -> Any:
  """Returns a tree with the leaves for which `fn(path, leaf)` is true, or DROPPED.

  Containers that lose all their leaves are dropped too; empty containers stay.
  """
  children = Children(node)
  if children is None:
    return node if fn(path, node) else DROPPED
  filtered = [(step, Filter(fn, child, JoinPath(path, step))) for step, child in children]
  filtered = [(step, child) for step, child in filtered if child is not DROPPED]
  return DROPPED if children and not filtered else Rebuild(node, filtered)


def Select(node: Any, selected: Collection[tuple[Any, ...]], steps: tuple[Any, ...] = ()) -> Any:
  """Returns a tree with only the values at or below the `selected` steps, or DROPPED.

  `steps` lead from the root to `node`.
  """
  if steps in selected:
    return Map(lambda _, leaf: leaf, node)
  children = Children(node) or []
  parts = [(step, Select(child, selected, (*steps, step))) for step, child in children]
  parts = [(step, child) for step, child in parts if child is not DROPPED]
  return Rebuild(node, parts) if parts else DROPPED


def ToPlain(node: Any) -> Any:
  """Returns a tree like `node` with a plain dict for every mapping."""
  if isinstance(node, Mapping):
    return {key: ToPlain(child) for key, child in node.items()}
  if isinstance(node, (list, tuple)):
    return Rebuild(node, [(i, ToPlain(child)) for i, child in enumerate(node)])
  return node


def Merge(target: MutableMapping[Any, Any] | list[Any], source: Any, path: str = '') -> None:
  """Merges a mapping or list into one of the same kind, leaf by leaf and in place.

  Raises:
    ValueError: at some path, `source` has a map or a list and `target` has something else. Values
      merged before the error stay.
  """
  for step, new in Children(source) or []:
    exists = step < len(target) if isinstance(target, list) else step in target
    old = target[step] if exists else None
    if isinstance(target, list) and not exists:
      target.append(new)
    elif not exists:
      target[step] = new
    elif not isinstance(new, (Mapping, list)):
      target[step] = new
    elif isinstance(old, MutableMapping if isinstance(new, Mapping) else list):
      Merge(old, new, JoinPath(path, step))
    else:
      raise ValueError(
        f'Update: {JoinPath(path, step)!r} is a {type(old).__name__} here and a '
        f'{type(new).__name__} in the other map; delete it first to replace it.'
      )
