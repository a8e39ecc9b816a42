# SPDX-License-Identifier: Apache-2.0
"""Params: named, documented, nested settings of layers, tasks and experiments.

    p = hyperparams.Params()
    p.Define('learning_rate', 0.1, 'Step size.')
    p.learning_rate = 0.2
    p.Set(**{'train.max_steps': 100}).Copy().Freeze()

The rules:

* Only a defined name can be read or written. Code may assign any value; a param that declares its
  `domain` is checked when its Params are instantiated. A default of True or False declares a bool.
* Assigning, `Set` and `Define` keep a reference to the value: two Params that are set to the same
  nested Params share it. `Copy`, `copy.deepcopy`, `MergeCommonKeysFrom`, `CopyFieldsTo` and
  `Instantiate`d layers copy deeply: they copy nested Params and containers, and preserve sharing
  inside the copied tree. They share classes, functions, tensors and objects that cannot be copied.
* `Freeze` is deep and final for the object and the Params in it. A copy of frozen Params can be
  changed.
* Text (`FromText`) must be in the declared domain, or equal the default. Without a domain it must
  have the type of the present value, or the type of the default if the present value is None; if
  either is None, so may be the text, and if both are, any type is accepted. Text is parsed, never
  evaluated; see `literals` for the form of values.
* A path is `a.b`, `layers[1].x`, `layers[-1]`, `groups['k'].x`; `r[x]` is a field of a dataclass.

Errors: AttributeError for an undefined name (with the closest names), TypeError for a change of
frozen Params, ValueError for text or a path that cannot be parsed. Messages are one line. This
module imports no TensorFlow.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

from lingvo_gpipe.core import domain as domain_lib
from lingvo_gpipe.core import literals, params_text, params_tree

_NAME = re.compile(r'[a-z_][a-z0-9_]*')
# Returns the new value of a param, or of an entry of a container, from (present value, param).
_Make = Callable[[Any, params_tree.Param | None], Any]

ParseOverrides = params_text.ParseOverrides


class Params(params_tree.Node):
  """A set of named params, in the order of their definition. See the module's docstring."""

  # Once mangled, these three names contain capitals, so no param can have them.
  __values: dict[str, Any]
  __definitions: dict[str, params_tree.Param]  # Shared with copies: replaced, never changed.
  __frozen: bool

  def __init__(self) -> None:
    self.__dict__['_Params__values'] = {}
    self.__dict__['_Params__definitions'] = {}
    self.__dict__['_Params__frozen'] = False

  # --- One param ----------------------------------------------------------------------------------

  def Define(
    self, name: str, default_value: Any, description: str, domain: domain_lib.Domain | None = None
  ) -> None:
    """Adds a param.

    Args:
      name: lower-case letters, digits and underscores, not beginning with a digit.
      default_value: the value until it is set.
      description: the purpose of the param.
      domain: the values that the param may have; None: `domain.BOOL` for a default of True or
        False, otherwise see the module's docstring.

    Raises:
      AttributeError: the name is already defined.
      TypeError: these Params are frozen.
      ValueError: the name has another form.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
      raise ValueError(f'{name!r} is not a valid name for a param: it must match {_NAME.pattern}')
    if name.startswith('__') and name.endswith('__'):
      raise ValueError(f'{name!r} is not a valid name for a param: Python reserves such names')
    self._CheckMutable(name)
    if name in self.__values:
      raise AttributeError(f'{name} is already defined')
    if domain is None and isinstance(default_value, bool):
      domain = domain_lib.BOOL  # Any other value, such as 'false', would count as true or false.
    param = params_tree.Param(params_tree.DeepCopy(default_value, {}), description, domain)
    self.__dict__['_Params__definitions'] = {**self.__definitions, name: param}
    self.__values[name] = default_value

  def __getattr__(self, name: str) -> Any:
    # Python itself looks up names such as __setstate__, even before __init__ has run.
    if name.startswith('__') and name.endswith('__'):
      raise AttributeError(name)
    self._CheckDefined(name)
    return self._Read(self.__values[name])

  def __setattr__(self, name: str, value: Any) -> None:
    self._CheckMutable(name)
    self._CheckDefined(name)
    self.__values[name] = value

  def _Read(self, value: Any) -> Any:
    """Returns the value of a param, or a copy that protects frozen Params from the caller."""
    return params_tree.CopyContainers(value) if self.__frozen else value

  def _Values(self) -> dict[str, Any]:
    return self.__values

  def _Definitions(self) -> dict[str, params_tree.Param]:
    return self.__definitions

  def _CheckDefined(self, name: str) -> None:
    if name not in self.__values:
      raise AttributeError(params_tree.UndefinedMessage(self, name))

  def CheckDomains(self, prefix: str) -> None:
    """Raises ValueError if a value is outside of its domain.

    Nested Params are checked too, unless they are instantiated themselves.

    Args:
      prefix: the beginning of the message, before the name of the param.
    """
    for name, value in self.__values.items():
      if domain := self.__definitions[name].domain:
        domain.Check(prefix + name, value)
      if isinstance(value, Params) and not isinstance(value, InstantiableParams):
        value.CheckDomains(f'{prefix}{name}.')

  def _CheckMutable(self, path: str) -> None:
    if self.__frozen:
      raise TypeError(f'{path} cannot be changed: its Params are frozen (change a Copy() of them)')

  # --- Paths --------------------------------------------------------------------------------------

  def Get(self, name: str) -> Any:
    """Returns the value at a path. Raises AttributeError if the path is not defined."""
    if isinstance(name, str) and name in self.__values:  # The common case needs no parsing.
      return self._Read(self.__values[name])
    value: Any = self
    owner: Params = self
    prefix = ''
    for step in params_text.ParseSteps(name):
      owner = value if isinstance(value, Params) else owner
      value = params_tree.GetStep(value, step, prefix, name)
      prefix += step.text
    return owner._Read(value)

  def Set(self, **kwargs: Any) -> Self:
    """Sets values at paths, all or none: `Set(x=1, **{'a.b[0].c': 2})`. Returns self."""

    def _Constant(value: Any) -> _Make:
      return lambda current, param: value

    return self._SetAll((path, _Constant(value)) for path, value in kwargs.items())

  def _SetAll(
    self, changes: Iterable[tuple[str, _Make]], check: Callable[[str], None] | None = None
  ) -> Self:
    """Sets each path to its function's result for (present value, param), all or none."""
    undo: list[Callable[[], None]] = []
    try:
      for path, make in changes:
        if path in self.__values:  # The common case needs no parsing.
          self._CheckMutable(path)
          current = self.__values[path]
          new = make(current, self.__definitions[path])
          undo.append(functools.partial(self.__values.__setitem__, path, current))
          self.__values[path] = new
        else:
          params_tree.SetPath(self, params_text.ParseSteps(path), make, '', path, undo)
        if check:
          check(path)
    except BaseException:
      for restore in reversed(undo):
        restore()
      raise
    return self

  def ParamIsSet(self, name: str) -> bool:
    """Whether the value at a path is not None. Raises AttributeError if it is not defined."""
    return self.Get(name) is not None

  def Delete(self, *names: str) -> Self:
    """Removes the definitions of the params at some paths. Returns self."""
    for name in names:
      parent, param = self._Find(name)
      parent._CheckMutable(name)
      del parent.__values[param]
      definitions = {key: x for key, x in parent.__definitions.items() if key != param}
      parent.__dict__['_Params__definitions'] = definitions
    return self

  def GetDescription(self, name: str) -> str:
    """Returns the description of the param at a path."""
    parent, param = self._Find(name)
    return parent.__definitions[param].description

  def GetDomain(self, name: str) -> domain_lib.Domain | None:
    """Returns the declared domain of the param at a path; None for an entry of a container."""
    if params_text.ParseSteps(name)[-1].kind != 'param':
      return None
    parent, param = self._Find(name)
    return parent.__definitions[param].domain

  def GetDefault(self, name: str) -> Any:
    """Returns a copy of the default value of the param at a path."""
    parent, param = self._Find(name)
    return params_tree.DeepCopy(parent.__definitions[param].default, {})

  def _Find(self, path: str) -> tuple[Params, str]:
    """Returns the Params that hold the param at a path, and the param's name."""
    self.Get(path)
    *_, last = params_text.ParseSteps(path)
    prefix = path.removesuffix(last.text)
    if last.kind != 'param':
      raise AttributeError(f'{path} is not a param but a part of {prefix}')
    return (self.Get(prefix) if prefix else self), last.value

  # --- All params ---------------------------------------------------------------------------------

  def IterParams(self) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) of every param in the order of definition; enters no nested Params."""
    for name, value in self.__values.items():
      yield name, self._Read(value)

  def GetKeys(self) -> list[str]:
    """Returns the names, in the order of definition."""
    return list(self.__values)

  def __dir__(self) -> list[str]:
    return sorted(self.__values)

  def __len__(self) -> int:
    return len(self.__values)

  def __contains__(self, name: object) -> bool:
    return name in self.__values

  def __eq__(self, other: object) -> bool:
    """Compares names and values; ignores defaults, descriptions, order and freezing."""
    if not isinstance(other, Params):
      return NotImplemented
    return self.__values.keys() == other.__values.keys() and all(
      params_tree.Equal(value, other.__values[name]) for name, value in self.__values.items()
    )

  __hash__ = None  # type: ignore[assignment]

  def Visit(
    self,
    visit_fn: Callable[[str, Any], Any],
    enter_fn: Callable[[str, Any], bool] | None = None,
    exit_fn: Callable[[str, Any], Any] | None = None,
  ) -> None:
    """Walks through all values, depth first, in the order of definition.

    Keys are paths; the key of these Params is ''. In a list of (name, Params) pairs, the key of the
    Params is `a[name]`.

    Args:
      visit_fn: called with (key, value) of leaves and of containers that were not entered.
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
    """Returns a deep copy of the same class, which can be changed even if these are frozen."""
    return self.__deepcopy__({})

  __copy__ = Copy

  def __deepcopy__(self, memo: dict[int, Any]) -> Self:
    new = self.__class__.__new__(self.__class__)
    memo[id(self)] = new
    new.__dict__.update(self.__dict__)
    new.__dict__['_Params__frozen'] = False
    new.__dict__['_Params__values'] = {
      name: params_tree.DeepCopy(value, memo) for name, value in self.__values.items()
    }
    return new

  def Freeze(self) -> None:
    """Makes these Params, and all Params in them, read-only for good.

    Their lists, dicts, sets and dataclasses are copied now and whenever they are read, so a change
    of the original or of a copy has no effect on them. Lists that are read refuse changes.
    """
    if self.__frozen:
      return
    self.__dict__['_Params__frozen'] = True
    for name, value in self.__values.items():
      self.__values[name] = params_tree.CopyContainers(value, freeze=True)

  def IsImmutable(self) -> bool:
    """Whether these Params are frozen."""
    return self.__frozen

  def MergeCommonKeysFrom(self, other: Params) -> Self:
    """Copies the values of all common names, except `cls`, from `other`. Returns self."""
    names = [name for name in other.GetKeys() if name in self.__values and name != 'cls']
    CopyFieldsSubsetTo(other, self, names)
    return self

  # --- Text ---------------------------------------------------------------------------------------

  def ToText(self, include_types: bool = False, separator: str = ':') -> Any:
    """Returns one line `path : value` for every leaf, sorted by name; FromText reads it.

    Args:
      include_types: whether to return (text, {path: type name}).
      separator: the text between path and value. FromText reads only ':'.
    """
    leaves = list(params_tree.Leaves('', self))
    text = ''.join(f'{key} {separator} {literals.WriteValue(value)}\n' for key, value in leaves)
    return (text, {k: literals.TypeName(v) for k, v in leaves}) if include_types else text

  def ToTextWithTypes(self) -> str:
    """Returns ToText, an empty line, and one line `path : type name` for every leaf."""
    text, types = self.ToText(include_types=True)
    return text + '\n' + ''.join(f'{key} : {name}\n' for key, name in types.items())

  def FromText(self, text: str, type_overrides: Mapping[str, str] | None = None) -> Self:
    """Sets the params that the text names, all or none. Returns self.

    Args:
      text: `path:value` pairs, separated by new lines or `;`, in the order in which they are
        applied; see `ParseOverrides`.
      type_overrides: {path: type name, as in ToText(include_types=True)} for values whose type
        differs from the present value's type.

    Raises:
      AttributeError: a path is not defined.
      ValueError: the text has another form, a value has another type than the param, or a path
        leads to Params.
      TypeError: these Params are frozen.
    """
    return self.ApplyOverrides(ParseOverrides(text), type_overrides)

  def ApplyOverrides(
    self, overrides: Iterable[tuple[str, str]], type_overrides: Mapping[str, str] | None = None
  ) -> Self:
    """Does the same as FromText for (path, text of the value) pairs. Returns self."""
    types = type_overrides or {}
    former_classes: dict[str, Any] = {}  # {path of a cls: its value before the overrides}.

    def _Parse(path: str, text: str, current: Any, param: params_tree.Param | None) -> Any:
      default = param.default if param else None
      like = params_tree.DeepCopy(default, {}) if current is None else current
      if isinstance(like, Params) and text.strip() not in ('None', 'NoneType'):
        names = [name for name in like.GetKeys() if name != 'cls']
        hint = f' such as {path}.{names[0]}' if names and current is not None else ''
        state = 'is None, in place of' if current is None else 'is'
        raise ValueError(
          f'{path} {state} Params; set one of the params in it{hint}, got {literals.Shorten(text)}'
        )
      type_name = types.get(path)
      if path.rpartition('.')[2] == 'cls':
        former_classes.setdefault(path, current)
      if param and param.domain:
        if current is not None and text.strip() == literals.WriteValue(current):
          return current
        # An integer stays an integer even if the domain allows other numbers.
        is_int = type(like) is int and text.strip().lstrip('+-').isdecimal()
        like = like if is_int or param.domain.like is None else param.domain.like
        return params_text.ParseValue(text, like, path, type_name)
      value = params_text.ParseValue(text, like, path, type_name)
      if type_name is None and (value is not None or None not in (current, default)):
        domain_lib.Infer(like).Check(path, value)
      return value

    def _Check(path: str) -> None:
      """Checks the last param on a path, of which the text may have set an entry."""
      value: Any = self
      name, where, owner, param_name = '', '', self, ''
      for step in params_text.ParseSteps(path):
        prefix, name = name, params_tree.Join(name, step.text)
        if step.kind == 'param':
          where, owner, param_name = name, value, step.value
        value = params_tree.GetStep(value, step, prefix, path)
      param, new = owner._Definitions()[param_name], owner._Values()[param_name]
      if param.domain and not params_tree.Equal(new, param.default):
        param.domain.Check(where, new)
      former = former_classes.get(path, value)
      if value is not former and hasattr(value, 'Params'):
        former_keys = former.Params().GetKeys() if hasattr(former, 'Params') else []
        keys = value.Params().GetKeys()
        if missing := [key for key in keys if key not in owner]:
          raise ValueError(
            f'{path} cannot become {value.__name__}, which has the params {", ".join(missing)}, too'
          )
        if ignored := [key for key in former_keys if key in owner and key not in keys]:
          raise ValueError(
            f'{path} cannot become {value.__name__}, which does not have the params '
            f'{", ".join(ignored)}'
          )
        (least, most), (former_least, former_most) = _NumArguments(value), _NumArguments(former)
        if least > former_most or most < former_least:
          raise ValueError(
            f'{path} cannot become {value.__name__}, whose FProp{inspect.signature(value.FProp)} '
            f'takes other arguments than {former.__name__}.FProp{inspect.signature(former.FProp)}'
          )

    changes = ((path, functools.partial(_Parse, path, text)) for path, text in overrides)
    return self._SetAll(changes, _Check)

  def FromTextWithTypes(self, text: str) -> Self:
    """Reads the text of ToTextWithTypes, which may change the types of params. Returns self."""
    values, separator, types = text.strip().rpartition('\n\n')
    if not separator and text.strip():
      raise ValueError('the text has no types: expected values, an empty line, and types')
    return self.FromText(values, dict(ParseOverrides(types)))

  def TextDiff(self, other: Params) -> str:
    """Returns the differences: `> x: mine`, `< x: theirs`, and `? x:` above nested Params."""
    return ''.join(line + '\n' for line in params_tree.Diff(self, other))

  def __str__(self) -> str:
    """Returns all params as indented text, sorted by name. FromText does not read it."""
    return params_tree.Dump(self)

  def __repr__(self) -> str:
    """Returns names and values on one line; of nested Params only the size."""

    def _Short(value: Any) -> str:
      if isinstance(value, Params):
        return f'{type(value).__name__}(<{len(value)} params>)'
      if params_tree.HoldsNodes(value):
        return f'<{literals.TypeName(value)} with Params>'
      return literals.WriteValue(value)

    return f'{type(self).__name__}({", ".join(f"{k}={_Short(v)}" for k, v in self.IterParams())})'


class InstantiableParams(Params):
  """Params of a class: `Instantiate` creates an instance of `cls`."""

  def __init__(self, cls: Any = None):
    super().__init__()
    self.Define('cls', cls, 'The class that these params configure.')

  def Instantiate(self, **kwargs: Any) -> Any:
    """Returns `cls(self, **kwargs)`.

    Raises:
      ValueError: `cls` is None, or a param is outside of its domain.
    """
    if self.cls is None:
      raise ValueError(f'cannot instantiate Params whose cls is None: {self!r}')
    name = f' {self.name!r}' if 'name' in self and self.name else ''
    self.CheckDomains(f'{getattr(self.cls, "__name__", self.cls)}{name}: ')
    return self.cls(self, **kwargs)


def _NumArguments(cls: Any) -> tuple[int, float]:
  """Returns the least and the greatest number of positional arguments of FProp, if it has one."""
  try:
    parameters = inspect.signature(cls.FProp).parameters.values()
  except (AttributeError, TypeError, ValueError):  # There is none, or its arguments are unknown.
    return 0, math.inf
  positional = [x for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
  takes_any = any(x.kind == x.VAR_POSITIONAL for x in parameters)
  required = sum(x.default is x.empty for x in positional)
  return required, math.inf if takes_any else len(positional)


def CopyFieldsTo(
  from_p: Params,
  to_p: Params,
  skip: str | Iterable[str] | None = None,
  ignore_unknown_keys: bool = False,
) -> Params:
  """Copies all values of one Params, except `cls`, to another. Changes nothing on an error.

  Args:
    from_p: the source.
    to_p: the destination.
    skip: a name or names to leave out.
    ignore_unknown_keys: whether to leave out names that `to_p` does not define; if not, they raise
      AttributeError.

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
  values = {name: from_p.Get(name) for name in names}  # DeepCopy identifies live objects by id.
  memo: dict[int, Any] = {}
  return to_p.Set(**{name: params_tree.DeepCopy(v, memo) for name, v in values.items()})
