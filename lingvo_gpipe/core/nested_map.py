# SPDX-License-Identifier: Apache-2.0
"""NestedMap: the struct that layers, tasks and input generators pass around.

A `dict` whose keys are identifiers and can be read and written as attributes. The methods in
CamelCase treat the map as a tree:

* Containers are mappings, lists and tuples (named tuples too), those that `tf.nest` enters, so that
  `m.Flatten()` and `tf.nest.flatten(m)` give the same list: keys sorted, sequences in order.
  (Lingvo takes a tuple for a leaf.)
* Everything else is a leaf. `None` is a leaf and is kept. An empty container holds no leaf.
* A leaf's name is its path: `enc.layers[2].w`. A key of a plain `dict` inside which is no
  identifier is written `['a b']`.

TensorFlow knows mappings and keeps this type: what `tf.nest`, `tf.data` and `tf.function` hand back
for a NestedMap is a NestedMap. Where a plain dict comes from elsewhere (json, Keras, a saved
model), `NestedMap.FromNestedDict` converts it. This module imports no TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

from lingvo_gpipe.core import nested_tree


class NestedMap(dict):
  """A dict with attribute access and tree operations; the module's text says what is a leaf.

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
        f'{key!r} is a reserved key: it is the name of a method of NestedMap. Choose another.'
      )
    if key.startswith('__') and key.endswith('__'):
      raise ValueError(f'{key!r} is a reserved key: Python keeps names of this form for itself.')

  def __setitem__(self, key: str, value: Any) -> None:
    self.CheckKey(key)
    super().__setitem__(key, value)

  def __missing__(self, key: Any) -> Any:
    raise KeyError(nested_tree.MissingKeyMessage(self, key))

  def __getattr__(self, name: str) -> Any:
    # Only reached for what is no method. Probes for protocols (__array__, ...) get a short way out.
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
    for key in new:  # All are checked before anything changes.
      self.CheckKey(key)
    super().update(new)

  def setdefault(self, key: str, default: Any = None) -> Any:
    self.CheckKey(key)
    return super().setdefault(key, default)

  def copy(self) -> NestedMap:
    """A shallow copy of the same type."""
    return type(self)(self)

  def __copy__(self) -> NestedMap:
    return self.copy()

  def __deepcopy__(self, memo: Any) -> NestedMap:
    # Lingvo's meaning: leaves are tensors and variables, which must not be cloned.
    return self.DeepCopy()

  # --- conversions ---

  def DeepCopy(self) -> NestedMap:
    """Copies every container; the leaves are shared. `copy.deepcopy` does the same."""
    return self.Transform(lambda leaf: leaf)

  @classmethod
  def FromNestedDict(cls, value: Any) -> Any:
    """Returns `value` with every mapping in it, also in lists and tuples, as a NestedMap.

    Every container is copied, the leaves are shared.

    Raises:
      ValueError: a key cannot be a NestedMap's; the text says which one and why.
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
      KeyError: a step names no key; the text has the close and the present keys.
      IndexError: an index is out of range.
      TypeError: a step goes into something that is no container of that kind.
      ValueError: `key` is no path.
    """
    return nested_tree.Find(self, key)[1]

  def Get(self, key: str, default: Any = None) -> Any:
    """Like `GetItem`, but returns `default` where there is nothing.

    Raises:
      ValueError: `key` is no path.
    """
    try:
      return self.GetItem(key)
    except (KeyError, IndexError, TypeError):
      return default

  def Has(self, key: str) -> bool:
    """Whether there is a leaf or a container at the path `key`."""
    return self.Get(key, nested_tree.DROPPED) is not nested_tree.DROPPED

  def Set(self, key: str, value: Any) -> None:
    """Sets the value at the path `key` and makes the maps and lists on the way that are missing.

    An index may be at most the length of its list (then the value is appended). A failing call
    changes nothing.

    Raises:
      ValueError: `key` is no path, a step on the way is a leaf, a new key is invalid, an index is
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
    # What is missing below `node` is built first, so that an error leaves the map as it was.
    for step in reversed(steps[depth + 1 :]):
      if isinstance(step, int):
        if step != 0:
          raise ValueError(f'Cannot set {key!r}: a new list starts at [0], got [{step}].')
        value = [value]
      else:
        value = type(self)({step: value})
    step = steps[depth]
    where = f'Cannot set {key!r}: {nested_tree.QuotePath(steps[:depth])}'
    if isinstance(node, MutableMapping):
      node[step] = value
    elif isinstance(node, list) and isinstance(step, int):
      if not -len(node) <= step <= len(node):
        raise ValueError(f'{where} has {len(node)} elements; an index is at most that, got {step}.')
      if step == len(node):
        node.append(value)
      else:
        node[step] = value
    elif isinstance(node, tuple):
      raise ValueError(f'{where} is a tuple, whose elements cannot be set; set the whole tuple.')
    else:
      raise ValueError(f'{where} is a {type(node).__name__}, which has no element {step!r}.')

  def GetSlice(self, keys: Iterable[str]) -> NestedMap:
    """Returns a new map with only what is at or below the given paths.

    Elements that are left out make their list shorter.

    Raises:
      KeyError, IndexError, TypeError, ValueError: as `GetItem`.
    """
    if isinstance(keys, str):
      raise TypeError(f'GetSlice takes a collection of paths, got the str {keys!r}.')
    wanted = {nested_tree.Find(self, key)[0] for key in keys}
    result = nested_tree.Select(self, wanted)
    return type(self)() if result is nested_tree.DROPPED else result

  def Keys(self) -> list[str]:
    """Returns the paths of all leaves, in the order of `Flatten`."""
    return [key for key, _ in self.FlattenItems()]

  # --- merging ---

  def Update(self, other: Mapping[str, Any]) -> NestedMap:
    """Merges `other` into this map leaf by leaf and returns this map.

    A tuple of `other` replaces what is there as a whole. A failing call changes nothing.

    Raises:
      ValueError: `other` has a map or a list where this map has something else.
    """
    nested_tree.Merge(self.DeepCopy(), type(self).FromNestedDict(other))  # For the errors only.
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
      ValueError: there are not as many values as leaves.
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

    A container that loses all its leaves goes too; one that was empty before stays. Lists and
    tuples get shorter.

    Raises:
      ValueError: a named tuple would lose some of its fields.
    """
    result = nested_tree.Filter(fn, self)
    return type(self)() if result is nested_tree.DROPPED else result

  def IsCompatible(self, other: Mapping[str, Any]) -> bool:
    """Whether `other` has leaves at the same paths. What the leaves are does not matter."""
    return self.Keys() == [key for key, _ in nested_tree.Leaves(other)]

  def DebugString(self) -> str:
    """Returns one aligned line `path    leaf` for each leaf; its further lines are indented."""
    items = self.FlattenItems()
    width = max((len(key) for key, _ in items), default=0) + 4
    indent = '\n' + ' ' * width
    return '\n'.join(key.ljust(width) + str(leaf).replace('\n', indent) for key, leaf in items)


_RESERVED_KEYS = frozenset(dir(NestedMap))
