# SPDX-License-Identifier: Apache-2.0
"""NestedMap: the struct that layers, tasks and input generators pass around.

A `dict` whose keys are identifiers and can be read and written as attributes. The methods in
CamelCase treat the map as a tree:

* Containers are mappings, lists and tuples (also named tuples), as for `tf.nest`, so `m.Flatten()`
  and `tf.nest.flatten(m)` return the same list: keys sorted, sequences in order. (In Lingvo, a
  tuple is a leaf.)
* Every other value is a leaf, including `None`. An empty container has no leaves.
* A leaf's name is its path: `enc.layers[2].w`. A key of a nested plain `dict` that is not an
  identifier is written `['a b']`.

TensorFlow preserves this type: `tf.nest`, `tf.data` and `tf.function` return a NestedMap for a
NestedMap. `NestedMap.FromNestedDict` converts a plain dict from other sources (json, Keras, a saved
model). This module imports no TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

from lingvo_gpipe.core import domain, nested_tree


class NestedMap(dict):
  """A dict with attribute access and tree operations; the module's docstring defines leaves.

  Example:
    m = NestedMap(w=1, layers=[NestedMap(b=2), NestedMap(b=3)])
    m.layers[1].b           # 3
    m.FlattenItems()        # [('layers[0].b', 2), ('layers[1].b', 3), ('w', 1)]
    m.Transform(str)        # same structure, leaves '1', '2', '3'
  """

  __slots__ = ()  # No instance dict: an attribute is always a key.

  def __init__(self, *args: Any, **kwargs: Any):
    super().__init__()
    self.update(*args, **kwargs)

  # --- dict's own protocol, with checked keys ---

  @staticmethod
  def CheckKey(key: Any) -> None:
    """Raises ValueError, with the reason, unless `key` can be a key of a NestedMap."""
    if not isinstance(key, str):
      raise ValueError(f'Invalid NestedMap key {key!r}: expected a str, got {type(key).__name__}.')
    if not nested_tree.IsIdentifier(key):
      raise ValueError(
        f'Invalid NestedMap key {key!r}: expected an identifier '
        f'(letters, digits and _, no digit first).'
      )
    if key in _RESERVED_KEYS:
      raise ValueError(
        f'{key!r} is a reserved key: it is the name of a method of NestedMap. Choose another name.'
      )
    if key.startswith('__') and key.endswith('__'):
      raise ValueError(f'{key!r} is a reserved key: Python reserves names of this form.')

  def __setitem__(self, key: str, value: Any) -> None:
    self.CheckKey(key)
    super().__setitem__(key, value)

  def __missing__(self, key: Any) -> Any:
    raise KeyError(nested_tree.MissingKeyMessage(self, key))

  def __getattr__(self, name: str) -> Any:
    # Python calls this only for names other than methods. Probes such as __array__ end here.
    if name.startswith('__') and name.endswith('__'):
      raise AttributeError(f'{type(self).__name__} has no attribute {name!r}.')
    try:
      return super().__getitem__(name)
    except KeyError as e:
      raise AttributeError(e.args[0]) from None

  def __setattr__(self, name: str, value: Any) -> None:
    self[name] = value

  def __delattr__(self, name: str) -> None:
    if name not in self:
      raise AttributeError(nested_tree.MissingKeyMessage(self, name))
    del self[name]

  def __dir__(self) -> list[str]:
    return sorted({*super().__dir__(), *self})

  def __repr__(self) -> str:
    return f'{type(self).__name__}({super().__repr__()})'

  def __or__(self, other: Any) -> NestedMap:
    if not isinstance(other, Mapping):
      return NotImplemented
    result = self.copy()
    result.update(other)
    return result

  def __ror__(self, other: Any) -> NestedMap:
    if not isinstance(other, Mapping):
      return NotImplemented
    result = type(self)(other)
    result.update(self)
    return result

  def __ior__(self, other: Any) -> NestedMap:
    self.update(other)
    return self

  def update(self, *args: Any, **kwargs: Any) -> None:
    """dict's update: top-level keys only. `Update` merges nested maps."""
    new = dict(*args, **kwargs)
    for key in new:  # Check all keys before any change.
      self.CheckKey(key)
    super().update(new)

  def setdefault(self, key: str, default: Any = None) -> Any:
    self.CheckKey(key)
    return super().setdefault(key, default)

  def copy(self) -> NestedMap:
    """Returns a shallow copy of the same type."""
    return type(self)(self)

  def __copy__(self) -> NestedMap:
    return self.copy()

  def __deepcopy__(self, memo: Any) -> NestedMap:
    # As in Lingvo: leaves are tensors and variables, which must not be cloned.
    return self.DeepCopy()

  # --- conversions ---

  def DeepCopy(self) -> NestedMap:
    """Copies every container; the leaves are shared. `copy.deepcopy` does the same."""
    return self.Transform(lambda leaf: leaf)

  @classmethod
  def FromNestedDict(cls, value: Any) -> Any:
    """Returns `value` with every mapping in it, also in lists and tuples, as a NestedMap.

    Copies every container and shares the leaves.

    Raises:
      ValueError: a key is invalid in a NestedMap; the message names it and the reason.
    """
    if isinstance(value, Mapping):
      return cls((key, cls.FromNestedDict(child)) for key, child in value.items())
    if isinstance(value, (list, tuple)):
      return nested_tree.Rebuild(
        value, [(i, cls.FromNestedDict(child)) for i, child in enumerate(value)]
      )
    return value

  def ToNestedDict(self) -> dict[str, Any]:
    """Returns the same tree with every mapping as a plain dict. Leaves are shared."""
    return nested_tree.ToPlain(self)

  # --- access by path ---

  def GetItem(self, key: str) -> Any:
    """Returns the leaf or the container at the path `key`, e.g. 'enc.layers[2].w'.

    Raises:
      KeyError: a key does not exist; the message lists the closest and all keys.
      IndexError: an index is out of range.
      TypeError: a step leads into a leaf or another kind of container.
      ValueError: `key` is not a path.
    """
    return nested_tree.Find(self, key)[1]

  def Get(self, key: str, default: Any = None) -> Any:
    """Like `GetItem`, but returns `default` if nothing exists at the path.

    Raises:
      ValueError: `key` is not a path.
    """
    try:
      return self.GetItem(key)
    except (KeyError, IndexError, TypeError):
      return default

  def Has(self, key: str) -> bool:
    """Whether a leaf or a container exists at the path `key`."""
    return self.Get(key, nested_tree.DROPPED) is not nested_tree.DROPPED

  def Set(self, key: str, value: Any) -> None:
    """Sets the value at the path `key` and creates missing maps and lists along the path.

    An index may be at most the length of its list; the value is then appended. A failing call
    changes nothing.

    Raises:
      ValueError: `key` is not a path, a step leads into a leaf, a new key is invalid, an index is
        beyond the list's length, or an element of a tuple would have to change.
    """
    steps = nested_tree.ParsePath(key)
    node: Any = self
    depth = 0
    while depth < len(steps) - 1:
      try:
        node = nested_tree.GetStep(node, steps[depth])
      except (KeyError, IndexError):
        break
      except TypeError as e:
        raise ValueError(
          f'Cannot set {key!r}: {nested_tree.QuotePath(steps[:depth])} {e}'
        ) from None
      depth += 1
    # Build the missing containers below `node` first, so that an error leaves the map unchanged.
    for step in reversed(steps[depth + 1 :]):
      if isinstance(step, int):
        if step != 0:
          raise ValueError(f'Cannot set {key!r}: a new list starts at [0], got [{step}].')
        value = [value]
      else:
        value = type(self)({step: value})
    step = steps[depth]
    message = f'Cannot set {key!r}: {nested_tree.QuotePath(steps[:depth])}'
    if isinstance(node, MutableMapping):
      node[step] = value
    elif isinstance(node, list) and isinstance(step, int):
      if not -len(node) <= step <= len(node):
        raise ValueError(
          f'{message} has {len(node)} elements; an index is at most that, got {step}.'
        )
      if step == len(node):
        node.append(value)
      else:
        node[step] = value
    elif isinstance(node, tuple):
      raise ValueError(f'{message} is a tuple, whose elements cannot be set; set the whole tuple.')
    else:
      raise ValueError(f'{message} is a {type(node).__name__}, which has no element {step!r}.')

  def GetSlice(self, keys: Iterable[str]) -> NestedMap:
    """Returns a new map with only the values at or below the given paths.

    Lists become shorter if elements are left out.

    Raises:
      KeyError, IndexError, TypeError, ValueError: a path is invalid, as in `GetItem`.
    """
    if isinstance(keys, str):
      raise TypeError(f'GetSlice takes a collection of paths, got the str {keys!r}.')
    selected = {nested_tree.Find(self, key)[0] for key in keys}
    result = nested_tree.Select(self, selected)
    return type(self)() if result is nested_tree.DROPPED else result

  def Keys(self) -> list[str]:
    """Returns the paths of all leaves, in the order of `Flatten`."""
    return [key for key, _ in self.FlattenItems()]

  # --- merging ---

  def Update(self, other: Mapping[str, Any]) -> NestedMap:
    """Merges `other` into this map leaf by leaf and returns this map.

    A tuple of `other` replaces the present value as a whole. A failing call changes nothing.

    Raises:
      ValueError: at some path, `other` has a map or a list and this map has something else.
    """
    # Merge into a copy first, so that an error changes nothing.
    nested_tree.Merge(self.DeepCopy(), type(self).FromNestedDict(other))
    nested_tree.Merge(self, type(self).FromNestedDict(other))
    return self

  def Union(self, other: Mapping[str, Any]) -> NestedMap:
    """Like `Update`, but returns a new map."""
    return self.DeepCopy().Update(other)

  # --- the map as a list of leaves ---

  def Flatten(self) -> list[Any]:
    """Returns all leaves: keys sorted, lists and tuples in order, as `tf.nest.flatten` does."""
    return [leaf for _, leaf in self.FlattenItems()]

  def FlattenItems(self) -> list[tuple[str, Any]]:
    """Returns `(path, leaf)` for all leaves, in the order of `Flatten`."""
    return list(nested_tree.Leaves(self))

  def Pack(self, values: Iterable[Any]) -> NestedMap:
    """Returns a map of this structure whose leaves are `values`, in the order of `Flatten`.

    Raises:
      ValueError: the number of values differs from the number of leaves.
    """
    values = list(values)
    count = sum(1 for _ in nested_tree.Leaves(self))
    if len(values) != count:
      raise ValueError(f'Pack: the NestedMap has {count} leaves, got {len(values)} values.')
    iterator = iter(values)
    return nested_tree.Map(lambda *_: next(iterator), self)

  def Transform(self, fn: Callable[[Any], Any]) -> NestedMap:
    """Returns a map of this structure with `fn(leaf)` for every leaf, in `Flatten`'s order."""
    return nested_tree.Map(lambda _, leaf: fn(leaf), self)

  def TransformWithKey(self, fn: Callable[[str, Any], Any]) -> NestedMap:
    """Like `Transform`, with `fn(path, leaf)`."""
    return nested_tree.Map(fn, self)

  def Filter(self, fn: Callable[[Any], Any]) -> NestedMap:
    """Returns a new map with the leaves for which `fn(leaf)` is true. See `FilterKeyVal`."""
    return self.FilterKeyVal(lambda _, leaf: fn(leaf))

  def FilterKeyVal(self, fn: Callable[[str, Any], Any]) -> NestedMap:
    """Returns a new map with the leaves for which `fn(path, leaf)` is true.

    Containers that lose all their leaves are dropped too; empty containers stay. Lists and tuples
    become shorter.

    Raises:
      ValueError: a named tuple would lose some of its fields.
    """
    result = nested_tree.Filter(fn, self)
    return type(self)() if result is nested_tree.DROPPED else result

  def IsCompatible(self, other: Mapping[str, Any]) -> bool:
    """Whether `other` has leaves at the same paths. The values of the leaves do not matter."""
    return self.Keys() == [key for key, _ in nested_tree.Leaves(other)]

  def DebugString(self) -> str:
    """Returns one aligned line `path    leaf` for each leaf; continuation lines are indented."""
    items = self.FlattenItems()
    width = max((len(key) for key, _ in items), default=0) + 4
    indent = '\n' + ' ' * width
    return '\n'.join(key.ljust(width) + str(leaf).replace('\n', indent) for key, leaf in items)


_RESERVED_KEYS = frozenset(dir(NestedMap))


def _IsKey(value: Any) -> bool:
  try:
    NestedMap.CheckKey(value)
  except ValueError:
    return False
  return True


# Names that may become keys, such as the names of layers.
KEY = domain.Domain(
  'a name of letters, digits and _, no digit first, not of the form __x__ and not the name of a '
  'method of NestedMap',
  _IsKey,
  '',
)
