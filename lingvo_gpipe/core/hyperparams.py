# SPDX-License-Identifier: Apache-2.0
"""Params: named, documented, nested settings of layers, tasks and experiments.

    p = hyperparams.Params()
    p.Define('learning_rate', 0.1, 'Step size.')
    p.learning_rate = 0.2
    p.Set(**{'train.max_steps': 100}).Copy().Freeze()

What holds throughout:

* Only a defined name can be read or written. Any value is allowed, and code may change its type.
* Assigning, `Set` and `Define` keep a reference to the value: two Params that are given the same
  nested Params share it. `Copy`, `copy.deepcopy`, `MergeCommonKeysFrom`, `CopyFieldsTo` and
  `Instantiate`d layers copy deeply: nested Params and containers become new ones (sharing inside
  the copied tree is kept), while classes, functions, tensors and whatever cannot be copied are
  shared.
* `Freeze` is deep and final for the object and the Params in it. A copy of frozen Params can be
  changed.
* Text (`FromText`) must have the type of the present value, of the default where that is None, and
  any type where both are None. `None` is accepted everywhere. Text is parsed, never evaluated; see
  `literals` for the form of values.
* A path is `a.b`, `layers[1].x`, `layers[-1]`, `groups['k'].x`; `r[x]` is a field of a dataclass.

Errors: AttributeError for what is not defined (with the closest names), TypeError for a change of
frozen Params, ValueError for text or a path that cannot be read. Messages are one line. This module
imports no TensorFlow.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

from lingvo_gpipe.core import literals, params_text, params_tree

_NAME = re.compile(r'[a-z_][a-z0-9_]*')

ParseOverrides = params_text.ParseOverrides


class Params(params_tree.Node):
  """A set of named params, in the order of their definition. See the module's text."""

  # These two names hold capitals once mangled, so no param can have them.
  __params: dict[str, params_tree.Param]
  __frozen: bool

  def __init__(self) -> None:
    self.__dict__['_Params__params'] = {}
    self.__dict__['_Params__frozen'] = False

  # --- One param ----------------------------------------------------------------------------------

  def Define(self, name: str, default_value: Any, description: str) -> None:
    """Adds a param.

    Args:
      name: lower-case letters, digits and underscores, no digit first.
      default_value: its value until it is set.
      description: what it is for.

    Raises:
      AttributeError: the name is defined already.
      TypeError: these Params are frozen.
      ValueError: the name is not of that form.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
      raise ValueError(f'{name!r} is no name for a param: it must match {_NAME.pattern}')
    if name.startswith('__') and name.endswith('__'):
      raise ValueError(
        f'{name!r} is no name for a param: Python keeps names of this form for itself'
      )
    self._CheckMutable(name)
    if name in self.__params:
      raise AttributeError(f'{name} is already defined')
    default = params_tree.Copied(default_value, {})
    self.__params[name] = params_tree.Param(default_value, default, description)

  def __getattr__(self, name: str) -> Any:
    # Python itself asks for names such as __setstate__, also before there are params.
    if name.startswith('__') and name.endswith('__'):
      raise AttributeError(name)
    return self._Read(self._Record(name).value)

  def __setattr__(self, name: str, value: Any) -> None:
    self._CheckMutable(name)
    self._Record(name).value = value

  def _Read(self, value: Any) -> Any:
    """Returns the value of a param to the caller, who must not be able to change frozen Params."""
    return params_tree.CopyContainers(value) if self.__frozen else value

  def _Records(self) -> dict[str, params_tree.Param]:
    return self.__params

  def _Record(self, name: str) -> params_tree.Param:
    record = self.__params.get(name)
    if record is None:
      raise AttributeError(params_tree.Undefined(self, name))
    return record

  def _CheckMutable(self, path: str) -> None:
    if self.__frozen:
      raise TypeError(f'{path} cannot be changed: its Params are frozen (change a Copy() of them)')

  # --- Paths --------------------------------------------------------------------------------------

  def Get(self, name: str) -> Any:
    """The value at a path. Raises AttributeError where there is none."""
    if isinstance(name, str) and name in self.__params:  # Mostly a path is a name: no parsing.
      return self._Read(self.__params[name].value)
    value: Any = self
    owner: Params = self
    prefix = ''
    for step in params_text.ParsePath(name):
      owner = value if isinstance(value, Params) else owner
      value = params_tree.GetStep(value, step, prefix, name)
      prefix += step.text
    return owner._Read(value)

  def Set(self, **kwargs: Any) -> Self:
    """Sets values at paths, `Set(x=1, **{'a.b[0].c': 2})`; on an error none. Returns self."""

    def _To(value: Any) -> Callable[[Any, Any], Any]:
      return lambda current, default: value

    return self._SetAll((path, _To(value)) for path, value in kwargs.items())

  def _SetAll(self, changes: Iterable[tuple[str, Callable[[Any, Any], Any]]]) -> Self:
    """Sets each path to what its function makes of (present value, default); on an error none."""
    undo: list[Callable[[], None]] = []
    try:
      for path, make in changes:
        if path in self.__params:  # As in Get.
          self._CheckMutable(path)
          record = self.__params[path]
          new = make(record.value, record.default)
          undo.append(functools.partial(setattr, record, 'value', record.value))
          record.value = new
          continue
        params_tree.SetPath(self, params_text.ParsePath(path), make, '', path, undo)
    except BaseException:
      for take_back in reversed(undo):
        take_back()
      raise
    return self

  def ParamIsSet(self, name: str) -> bool:
    """Whether the value at a path is not None. Raises AttributeError where there is none."""
    return self.Get(name) is not None

  def Delete(self, *names: str) -> Self:
    """Removes the definitions of the params at some paths. Returns self."""
    for name in names:
      parent, param = self._Find(name)
      parent._CheckMutable(name)
      del parent.__params[param]
    return self

  def GetDescription(self, name: str) -> str:
    """The description that the param at a path was defined with."""
    parent, param = self._Find(name)
    return parent.__params[param].description

  def GetDefault(self, name: str) -> Any:
    """The value (a copy) that the param at a path was defined with."""
    parent, param = self._Find(name)
    return params_tree.Copied(parent.__params[param].default, {})

  def _Find(self, path: str) -> tuple[Params, str]:
    """The Params that the param at a path belongs to, and its name there."""
    self.Get(path)
    *_, last = params_text.ParsePath(path)
    prefix = path.removesuffix(last.text)
    if last.kind != 'param':
      raise AttributeError(f'{path} is no param of its own but a part of {prefix}')
    return (self.Get(prefix) if prefix else self), last.value

  # --- All params ---------------------------------------------------------------------------------

  def IterParams(self) -> Iterator[tuple[str, Any]]:
    """(name, value) of every param, in the order of definition; does not enter nested Params."""
    for name, param in self.__params.items():
      yield name, self._Read(param.value)

  def GetKeys(self) -> list[str]:
    """The names, in the order of definition."""
    return list(self.__params)

  def __dir__(self) -> list[str]:
    return sorted(self.__params)

  def __len__(self) -> int:
    return len(self.__params)

  def __contains__(self, name: object) -> bool:
    return name in self.__params

  def __eq__(self, other: object) -> bool:
    """Same names, equal values; defaults, descriptions, order and freezing do not count."""
    if not isinstance(other, Params):
      return NotImplemented
    return self.__params.keys() == other.__params.keys() and all(
      params_tree.Equal(param.value, other.__params[name].value)
      for name, param in self.__params.items()
    )

  __hash__ = None  # type: ignore[assignment]

  def Visit(
    self,
    visit_fn: Callable[[str, Any], Any],
    enter_fn: Callable[[str, Any], bool] | None = None,
    exit_fn: Callable[[str, Any], Any] | None = None,
  ) -> None:
    """Walks through everything, depth first, in the order of definition.

    Keys are paths (these Params themselves have ''). In a list of (name, Params) pairs the Params
    have `a[name]`.

    Args:
      visit_fn: called with (key, value) of what is no container, or was not entered.
      enter_fn: called with (key, value) of Params, lists, tuples, dicts and dataclasses; if it
        returns False, visit_fn gets the container itself.
      exit_fn: called with (key, value) after an entered container.
    """

    def _Visit(key: str, value: Any) -> None:
      children = params_tree.Children(value)
      if children is None or (enter_fn and not enter_fn(key, value)):
        visit_fn(key, value)
        return
      for suffix, child in children:
        _Visit(params_tree.Join(key, suffix), child)
      if exit_fn:
        exit_fn(key, value)

    _Visit('', self)

  # --- Copies and freezing ------------------------------------------------------------------------

  def Copy(self) -> Self:
    """A deep copy, which can be changed even if this is frozen. Of the same class."""
    return copy.deepcopy(self)

  def __copy__(self) -> Self:
    return copy.deepcopy(self)

  def __deepcopy__(self, memo: dict[int, Any]) -> Self:
    new = self.__class__.__new__(self.__class__)
    memo[id(self)] = new
    new.__dict__.update(self.__dict__)
    new.__dict__['_Params__frozen'] = False
    new.__dict__['_Params__params'] = {
      name: params_tree.Param(
        params_tree.Copied(param.value, memo), param.default, param.description
      )
      for name, param in self.__params.items()
    }
    return new

  def Freeze(self) -> None:
    """Makes these Params, and all Params in them, read-only for good.

    Their lists, dicts, sets and dataclasses are copied now and whenever they are read: a caller can
    change such a copy, or the original, without effect on the frozen Params.
    """
    if self.__frozen:
      return
    self.__dict__['_Params__frozen'] = True
    for param in self.__params.values():
      param.value = params_tree.CopyContainers(param.value)
      params_tree.FreezeNodes(param.value)

  def IsImmutable(self) -> bool:
    """Whether these Params are frozen."""
    return self.__frozen

  def MergeCommonKeysFrom(self, other: Params) -> Self:
    """Copies the value of every name that both have, except `cls`, from `other`. Returns self."""
    names = [name for name in other.GetKeys() if name in self.__params and name != 'cls']
    CopyFieldsSubsetTo(other, self, names)
    return self

  # --- Text ---------------------------------------------------------------------------------------

  def ToText(self, include_types: bool = False, separator: str = ':') -> Any:
    """One line `path : value` for every leaf, sorted by name, with nothing lost that text can hold.

    Args:
      include_types: return (text, {path: type name}).
      separator: what stands between path and value. FromText reads ':' only.
    """
    leaves = list(params_tree.Leaves('', self))
    text = ''.join(f'{key} {separator} {literals.WriteValue(value)}\n' for key, value in leaves)
    return (text, {k: literals.TypeName(v) for k, v in leaves}) if include_types else text

  def ToTextWithTypes(self) -> str:
    """ToText, an empty line, and one line `path : type name` for every leaf."""
    text, types = self.ToText(include_types=True)
    return text + '\n' + ''.join(f'{key} : {name}\n' for key, name in types.items())

  def FromText(self, text: str, type_overrides: Mapping[str, str] | None = None) -> Self:
    """Sets what the text names, or on an error nothing. Returns self.

    Args:
      text: `path:value` pairs, separated by new lines or `;`, in the order in which they are
        applied; `ParseOverrides` tells more.
      type_overrides: {path: type name, as ToText(include_types=True) gives it} for values whose
        type differs from that of the present value.

    Raises:
      AttributeError: a path leads nowhere.
      ValueError: the text has another form, or a value another type than the param, or a path leads
        to Params.
      TypeError: these Params are frozen.
    """
    return self.ApplyOverrides(ParseOverrides(text), type_overrides)

  def ApplyOverrides(
    self, overrides: Iterable[tuple[str, str]], type_overrides: Mapping[str, str] | None = None
  ) -> Self:
    """FromText for (path, text of the value) pairs."""
    types = type_overrides or {}

    def _Parse(path: str, text: str, current: Any, default: Any) -> Any:
      like = params_tree.Copied(default, {}) if current is None else current
      if isinstance(like, Params) and text.strip() not in ('None', 'NoneType'):
        names = [name for name in like.GetKeys() if name != 'cls']
        hint = f' such as {path}.{names[0]}' if names and current is not None else ''
        state = 'is None and stands for' if current is None else 'is'
        raise ValueError(
          f'{path} {state} Params; set one of the params in it{hint}, got {literals.Shorten(text)}'
        )
      return params_text.ParseValue(text, like, path, types.get(path))

    return self._SetAll((path, functools.partial(_Parse, path, text)) for path, text in overrides)

  def FromTextWithTypes(self, text: str) -> Self:
    """FromText of what ToTextWithTypes wrote; may change the types of params. Returns self."""
    values, separator, types = text.strip().rpartition('\n\n')
    if not separator and text.strip():
      raise ValueError('the text has no types: expected values, an empty line, and types')
    return self.FromText(values, dict(ParseOverrides(types)))

  def TextDiff(self, other: Params) -> str:
    """What differs: `> x: mine`, `< x: theirs`; `? x:` before what differs in nested Params."""
    return ''.join(line + '\n' for line in params_tree.Diff(self, other))

  def __str__(self) -> str:
    """Everything, indented, sorted by name; for people, not for FromText."""
    return params_tree.Dump(self)

  def __repr__(self) -> str:
    """One line: names and values, nested Params as their size."""

    def _Short(value: Any) -> str:
      if isinstance(value, Params):
        return f'{type(value).__name__}(<{len(value)} params>)'
      if params_tree.HoldsNodes(value):
        return f'<{literals.TypeName(value)} with Params>'
      return literals.WriteValue(value)

    return f'{type(self).__name__}({", ".join(f"{k}={_Short(v)}" for k, v in self.IterParams())})'


class InstantiableParams(Params):
  """Params of a class: `cls` is what `Instantiate` makes."""

  def __init__(self, cls: Any = None):
    super().__init__()
    self.Define('cls', cls, 'The class that these params configure.')

  def Instantiate(self, **kwargs: Any) -> Any:
    """Returns `cls(self, **kwargs)`. Raises ValueError if `cls` is None."""
    if self.cls is None:
      raise ValueError(f'cannot instantiate Params whose cls is None: {self!r}')
    return self.cls(self, **kwargs)


def CopyFieldsTo(
  from_p: Params,
  to_p: Params,
  skip: str | Iterable[str] | None = None,
  ignore_unknown_keys: bool = False,
) -> Params:
  """Copies all values of one Params, except `cls`, to another. On an error nothing is changed.

  Args:
    from_p: where they come from.
    to_p: where they go.
    skip: a name or names to leave out.
    ignore_unknown_keys: leave out what `to_p` does not define, which else is an AttributeError.

  Returns:
    `to_p`.
  """
  skipped = {'cls', *([skip] if isinstance(skip, str) else skip or [])}
  names = [name for name in from_p.GetKeys() if name not in skipped]
  if ignore_unknown_keys:
    names = [name for name in names if name in to_p]
  return CopyFieldsSubsetTo(from_p, to_p, names)


def CopyFieldsSubsetTo(from_p: Params, to_p: Params, names: Iterable[str]) -> Params:
  """Copies the values of the named params from one Params to another. Returns `to_p`."""
  memo: dict[int, Any] = {}
  return to_p.Set(**{name: params_tree.Copied(from_p.Get(name), memo) for name in names})
