# SPDX-License-Identifier: Apache-2.0
"""The text form of values: `WriteValue` and its inverse, `ParseLiteral`.

Text is parsed, never evaluated, and parsing imports nothing. A value is written as a Python
literal, with these additions:

* `type/<module>/<name>` is a class or a function. Reading looks only in modules that are already
  imported, and takes only classes and functions of this project and of the packages that hold
  experiments (`AllowPackageOf`), and activations of TensorFlow and Keras.
* `type/<module>/<name>(x=1, y=2)` is a dataclass.
* `tf.float32` is a TensorFlow dtype; `inf` and `nan` are floats.
* `<module.class(...)>` stands for an object that text cannot make, such as a set, an enum member, a
  named tuple or an array. The dots are what determines it; of an array they contain a digest.
* `<module.class>` stands for any object of a class of which no more is known.
* `type/<module>/<name>@<digest>` is a lambda or a function that is local to another one. The digest
  is of its code and of the values that it captured.

The last three can be read only over a value with the same text, which it keeps. The text of a value
is always one line, and the same in every process. This module does not import TensorFlow.
"""

from __future__ import annotations

import ast
import copyreg
import dataclasses
import difflib
import enum
import functools
import hashlib
import math
import numbers
import re
import sys
import types
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
# Also from an open quote to the end: further quotes in it are not tried one by one.
_QUOTED_OR_OPEN = re.compile(QUOTED.pattern + r"""|['"].*""", re.DOTALL)
# Text that starts like this is a literal, never a bare string.
LITERAL_START = re.compile(
  r"""[bBrRuU]{0,2}['"]|[\[({]|type/|tf\.[a-z_0-9]+$|<[\w.<>]+>$|<[\w-]+\.[\w.<>-]+\("""
)
_NAMED = re.compile(r'type/([^/()]+)/([^/()]+)')
_BOOLS = {'true': True, 'false': False}
_NAMES = {'inf': math.inf, 'nan': math.nan, 'NoneType': None}
_MAX_QUOTED = 80
# Python writes no integer of more than 4,300 digits.
MAX_BITS = 14_000
_DIGEST_LENGTH = 16
# Packages whose objects are determined by what `pickle` keeps of them. With other packages this may
# include the time, or be a whole model.
_PICKLED = {*sys.stdlib_module_names, 'numpy'}
_NEW = object().__reduce_ex__(4)[0]  # Calls `__new__`.
# Packages whose classes and functions text may name.
_packages = {'lingvo_gpipe', 'params', 'tasks'}
_ACTIVATION = re.compile(
  r'keras\.src\.activations\.activations\.\w+|tensorflow\.python\.ops\.\w+\.(relu6?|s?elu|gelu|'
  r'leaky_relu|crelu_v2|swish|softplus|softsign|tanh|sigmoid|(log_)?softmax_v2)'
)


class _NotLiteral(ValueError):
  """The text is not a literal; the caller may read it as a string."""


# --- Kinds of values ------------------------------------------------------------------------------


class ReadOnlyList(list[Any]):
  """A list read from frozen Params: it refuses changes, which would be lost. Copies are plain."""

  def _Refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
    raise TypeError(
      'a list of frozen Params cannot be changed: change list(x), or the Params before Instantiate'
    )

  append = extend = insert = remove = pop = clear = sort = reverse = _Refuse
  __setitem__ = __delitem__ = __iadd__ = __imul__ = _Refuse

  def __reduce__(self) -> tuple[type[list[Any]], tuple[list[Any]]]:
    return list, (list(self),)


def IsRecord(value: Any) -> bool:
  """Whether `value` is an instance of a dataclass."""
  return dataclasses.is_dataclass(value) and not isinstance(value, type)


def RecordFields(value: Any) -> dict[str, Any]:
  """Returns {name: value} of the fields that the record's constructor takes."""
  cls: Any = type(value)
  return {name: getattr(value, name) for name in _FieldNames(cls)}


@functools.cache
def _FieldNames(cls: Any) -> tuple[str, ...]:
  return tuple(f.name for f in dataclasses.fields(cls) if f.init)


def ReplaceFields(value: Any, **fields: Any) -> Any:
  """Returns a record like `value` with new fields. Raises ValueError if its class rejects them."""
  try:
    return dataclasses.replace(value, **fields)
  except Exception as e:
    raise ValueError(f'{type(value).__name__} rejects {fields!r}: {e}') from e


def IsTensorFlowDType(value: Any) -> bool:
  """Whether `value` is a tf.DType, judging by the name of its class."""
  cls = type(value)
  return cls.__name__ == 'DType' and cls.__module__.partition('.')[0] == 'tensorflow'


def IsNamed(value: Any) -> bool:
  """Whether `value` is a class or a function, which has the text `type/<module>/<name>`."""
  if isinstance(value, types.MethodType):
    return isinstance(value.__self__, type)
  if isinstance(value, types.BuiltinFunctionType):
    return value.__self__ is None or isinstance(value.__self__, types.ModuleType)
  return isinstance(value, (type, types.FunctionType)) and not isinstance(value, types.GenericAlias)


def IsFloat(value: Any) -> bool:
  """Whether `value` is a floating-point number of Python or NumPy."""
  return isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational)


def IsNumpyBool(value: Any) -> bool:
  """Whether `value` is a NumPy bool, which is not a subclass of bool."""
  return type(value).__module__ == 'numpy' and type(value).__name__ in ('bool', 'bool_')


def TypeName(value: Any) -> str:
  """Returns the type of `value` as ToTextWithTypes names it. NumPy's numbers count as Python's."""
  if IsNamed(value):
    return 'type' if isinstance(value, type) else 'function'
  for cls, name in ((bool, 'bool'), (numbers.Integral, 'int'), (str, 'str')):
    if isinstance(value, cls):
      return name
  if IsNumpyBool(value) or IsFloat(value):
    return 'float' if IsFloat(value) else 'bool'
  return 'list' if type(value) is ReadOnlyList else type(value).__name__


# --- Writing --------------------------------------------------------------------------------------


def TypePath(value: Any) -> str:
  """Returns `type/<module>/<name>` of a class or function."""
  return f'type/{value.__module__ or "builtins"}/{value.__qualname__}'


def WriteValue(value: Any) -> str:
  """Returns the text of one value, on one line."""
  return _Writer().Write(value)


def UnwrittenClasses(value: Any) -> list[str]:
  """Returns the classes of objects in a value of which its text has only the class."""
  writer = _Writer()
  writer.Write(value)
  return writer.unwritten


class _Writer:
  """Writes one value.

  Attributes:
    unwritten: the classes of objects of which only the class was written.
  """

  def __init__(self) -> None:
    self.unwritten: list[str] = []
    self._functions: list[types.FunctionType] = []

  def Write(self, value: Any) -> str:
    """Returns the text of a value or of a part of it."""
    if value is None or isinstance(value, bool) or IsNumpyBool(value):
      return 'None' if value is None else str(bool(value))
    if isinstance(value, enum.Enum):  # Some are also an int or a str.
      return self._WriteOpaque(value)
    if IsNamed(value):
      return self._WriteNamed(value)
    if isinstance(value, str):
      return str.__repr__(value)
    if isinstance(value, bytes):
      return bytes.__repr__(value)
    if isinstance(value, numbers.Integral):
      return repr(int(value))
    if IsFloat(value):
      return repr(float(value))
    if IsTensorFlowDType(value):
      return f'tf.{value.name}'
    if IsRecord(value):
      fields = (f'{name}={self.Write(item)}' for name, item in RecordFields(value).items())
      return f'{TypePath(type(value))}({", ".join(fields)})'
    if type(value) is tuple:
      return f'({self._Join(value)}{"," if len(value) == 1 else ""})'
    if isinstance(value, list):
      return f'[{self._Join(value)}]'
    if isinstance(value, dict):
      pairs = (f'{self.Write(key)}: {self.Write(item)}' for key, item in value.items())
      return f'{{{", ".join(pairs)}}}'
    return self._WriteOpaque(value)

  def _Join(self, items: Iterable[Any]) -> str:
    return ', '.join(map(self.Write, items))

  def _WriteNamed(self, value: Any) -> str:
    path = TypePath(value)
    # A function may capture itself.
    if not isinstance(value, types.FunctionType) or _IsInModule(value) or value in self._functions:
      return path
    self._functions.append(value)
    captured = [_Contents(cell) for cell in value.__closure__ or ()]
    parts = [_CodeParts(value.__code__), captured, value.__defaults__, value.__kwdefaults__]
    try:
      digest = _Digest(self.Write(parts).encode('utf-8', 'surrogatepass'))
    except RecursionError:  # A captured value contains itself.
      self.unwritten.append(path)
      return path
    finally:
      self._functions.pop()
    return f'{path}@{digest}'

  def _WriteOpaque(self, value: Any) -> str:
    name = f'{type(value).__module__}.{type(value).__qualname__}'
    if isinstance(value, (set, frozenset)):  # Their order differs between processes.
      return f'<{name}({", ".join(sorted(map(self.Write, value)))})>'
    parts = _Parts(value)
    if parts is None:
      self.unwritten.append(name)
      return f'<{name}>'
    return f'<{name}({self._Join(parts)})>'


def _IsInModule(function: types.FunctionType) -> bool:
  """Whether a function is what its module calls by its name; a wrapper may have the same name."""
  if '<' in function.__qualname__:
    return False
  module = sys.modules.get(function.__module__)
  if module is None:  # Nothing else is known to have the name.
    return True
  first, *names = function.__qualname__.split('.')
  value = vars(module).get(first)  # Not by getattr: a lazy module would import.
  for name in names:
    value = getattr(value, name, None)
  return value is function


def _Contents(cell: types.CellType) -> Any:
  try:
    return cell.cell_contents
  except ValueError:  # The cell is empty.
    return None


def _CodeParts(code: types.CodeType) -> list[Any]:
  """Returns what a code object computes, without its file and lines."""
  constants = [_CodeParts(x) if isinstance(x, types.CodeType) else x for x in code.co_consts]
  counts = [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags]
  return [code.co_code, code.co_exceptiontable, constants, code.co_names, code.co_varnames, counts]


def _Parts(value: Any) -> Sequence[Any] | None:
  """Returns values that determine an object without a literal; None if they are unknown."""
  cls = type(value)
  if isinstance(value, enum.Enum):
    return [value.name]
  if isinstance(value, tuple):  # For example, a named tuple.
    return list(value)
  if isinstance(value, types.ModuleType):
    return [value.__name__]
  if isinstance(value, functools.partial):
    return [value.func, *value.args, value.keywords]
  try:
    if hasattr(value, '__array__'):  # Also a tensor.
      array = sys.modules['numpy'].asarray(value)
      content = array.tolist() if array.dtype.hasobject else _Digest(array.tobytes())
      return [str(array.dtype), array.shape, content]
    if cls.__module__.partition('.')[0] not in _PICKLED:
      return None
    reduce = copyreg.dispatch_table.get(cls)
    reduced: Any = reduce(value) if reduce else value.__reduce_ex__(4)
  except Exception:  # For example, if it is a symbolic tensor or a lock.
    return None
  if isinstance(reduced, str):  # The object's name in its module.
    return None if '<' in reduced else [reduced]
  make, arguments, *more = reduced
  state = more[0] if more else None
  # Attributes may hold values of this process alone, such as the number of a thread.
  if any(isinstance(x, dict) for x in (state if isinstance(state, tuple) else [state])):
    return None
  items = [list(x) for x in more[1:] if x is not None]
  parts = [make, *arguments, *([] if state is None else [state]), *items]
  return [part for part in parts if part is not cls and part is not _NEW]


def _Digest(data: bytes) -> str:
  return hashlib.sha256(data).hexdigest()[:_DIGEST_LENGTH]


def Shorten(text: str) -> str:
  """Quotes the text for a one-line message, at most 80 characters of it."""
  quoted = repr(text)
  return quoted if len(quoted) <= _MAX_QUOTED else quoted[: _MAX_QUOTED - 4] + "...'"


# --- Reading --------------------------------------------------------------------------------------


def AllowPackageOf(cls: type) -> None:
  """Lets text name the classes and functions of the top-level package of a class."""
  _packages.add(cls.__module__.partition('.')[0])


def _CheckAllowed(module_name: str, qualname: str) -> None:
  """Raises ValueError if text may not name this class or function."""
  path = f'{module_name}.{qualname}'
  if path.partition('.')[0] not in _packages and not _ACTIVATION.fullmatch(path):
    packages = ', '.join(sorted(_packages))
    raise ValueError(
      f'text cannot name {Shorten(path)}, only classes and functions of {packages} and activations '
      'of TensorFlow and Keras'
    )


def _Resolve(module_name: str, qualname: str) -> Any:
  """Returns the class or function of that name in an imported module."""
  if not qualname.isprintable():
    raise ValueError(f'{Shorten(qualname)} is not the name of a class or a function')
  _CheckAllowed(module_name, qualname)
  module = sys.modules.get(module_name)
  if module is None:
    raise ValueError(
      f'module {Shorten(module_name)} is not imported; import it before reading the text'
    )
  value: Any = module
  for name in qualname.split('.'):
    if '<' in name:
      raise ValueError(
        f'{Shorten(qualname)} of module {module_name} is local or a lambda; give it a name in a '
        'module'
      )
    # Look only at defined names: getattr on a lazy module may import, and on an object run code.
    names = vars(value) if value is module else dir(value) if isinstance(value, type) else ()
    if name not in names:
      closest = difflib.get_close_matches(name, names, n=1)
      hint = f'; did you mean {closest[0]}?' if closest else ''
      raise ValueError(f'module {module_name} has no {Shorten(qualname)}{hint}')
    value = vars(value)[name] if value is module else getattr(value, name)
  if not (IsNamed(value) or callable(value)):
    raise ValueError(f'{qualname} of module {module_name} is not a class or a function')
  # The module may have imported it, and a method that is implemented in C has no module.
  _CheckAllowed(str(getattr(value, '__module__', None)), getattr(value, '__qualname__', qualname))
  return value


def _ReadDType(name: str) -> Any:
  """Returns the TensorFlow dtype of that name."""
  dtypes = sys.modules.get('tensorflow.python.framework.dtypes')
  if dtypes is None:
    raise ValueError(f'tf.{name} needs TensorFlow, which is not imported')
  try:
    return dtypes.as_dtype(name)
  except TypeError:
    raise ValueError(f'tf.{name} is not a dtype') from None


def _MakeRecord(cls: Any, fields: dict[str, Any]) -> Any:
  if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
    raise ValueError(f'{cls!r} is not a dataclass')
  try:
    return cls(**fields)
  except Exception as e:
    raise ValueError(f'{cls.__name__} rejects {fields!r}: {e}') from e


def _DottedName(node: ast.AST) -> str:
  if isinstance(node, ast.Attribute):
    return f'{_DottedName(node.value)}.{node.attr}'
  if isinstance(node, ast.Name):
    return node.id
  raise _NotLiteral('expected a dotted name')


def _ReadDivision(node: ast.BinOp) -> Any:
  """Reads `type/<module>/<name>`, which Python's grammar parses as two divisions."""
  match node:
    case ast.BinOp(ast.BinOp(ast.Name('type'), ast.Div(), module), ast.Div(), ast.Call() as call):
      return _MakeRecord(_Resolve(_DottedName(module), _DottedName(call.func)), _ReadKeywords(call))
    case ast.BinOp(ast.BinOp(ast.Name('type'), ast.Div(), module), ast.Div(), name):
      return _Resolve(_DottedName(module), _DottedName(name))
  raise _NotLiteral('an expression is not a literal; a string needs quotes')


def _ReadKeywords(node: ast.Call) -> dict[str, Any]:
  if node.args or any(k.arg is None for k in node.keywords):
    raise _NotLiteral('write fields as name=value')
  return {str(k.arg): _ReadNode(k.value) for k in node.keywords}


def _ReadNode(node: ast.AST) -> Any:
  """Returns the value of a syntax node, if it is a literal in the sense of this module."""
  match node:
    case ast.Constant(value=value) if not isinstance(value, (complex, types.EllipsisType)):
      if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError('a number is too large')
      return value
    case ast.Name(id=name) if name in _NAMES or name.lower() in _BOOLS:
      return _NAMES[name] if name in _NAMES else _BOOLS[name.lower()]
    case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
      value = _ReadNode(operand)
      if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _NotLiteral('a sign must precede a number')
      return -value if isinstance(node.op, ast.USub) else value
    case ast.List(elts=elts):
      return [_ReadNode(e) for e in elts]
    case ast.Tuple(elts=elts):
      return tuple(_ReadNode(e) for e in elts)
    case ast.Dict(keys=keys, values=values) if None not in keys:
      return {_ReadNode(k): _ReadNode(v) for k, v in zip(keys, values, strict=True) if k}
    case ast.Attribute(value=ast.Name(id='tf'), attr=name):
      return _ReadDType(name)
    case ast.BinOp():
      return _ReadDivision(node)
  raise _NotLiteral(f'{Shorten(ast.unparse(node))} is not a literal; a string needs quotes')


def _ParseNode(text: str) -> ast.expr:
  """Parses one expression. A string in quotes may span lines."""
  escaped = _QUOTED_OR_OPEN.sub(lambda m: m.group().replace('\n', '\\n').replace('\r', '\\r'), text)
  escaped = re.sub('\r\n?', '\n', escaped)  # Python counts these as line ends.
  try:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')  # Warnings about invalid escapes such as \d.
      node = ast.parse(escaped, mode='eval').body
  except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
    raise _NotLiteral(getattr(e, 'msg', None) or str(e)) from None
  # Python ignores a comment after the value; here `5 #1` is not a number.
  last = escaped.encode('utf-8', 'surrogatepass').split(b'\n')[(node.end_lineno or 1) - 1 :]
  if b'#' in last[0][node.end_col_offset :] or any(b'#' in line for line in last[1:]):
    raise _NotLiteral('a literal cannot have a comment')
  return node


def ParseStrict(text: str) -> Any:
  """Reads a literal. Raises ValueError for any other text, including a bare string."""
  named = _NAMED.fullmatch(text)
  if named:  # The module's name may be invalid in Python's grammar, as for my-script.py.
    return _Resolve(*named.groups())
  try:
    return _ReadNode(_ParseNode(text))
  except (TypeError, RecursionError) as e:  # For example, a list as a dict's key.
    raise ValueError(str(e)) from None


def ParseLiteral(text: str) -> Any:
  """Reads text of any type; text that is not a literal is a string.

  Args:
    text: for example `0.1`, `[1, 2]`, `true`, `type/my.module/MyClass` or `some words`. `true` and
      `false` are bools in upper or lower case.

  Raises:
    ValueError: the text starts like a literal (with a quote, a bracket or `type/`) but is invalid,
      or names something that does not exist.
  """
  text = text.strip()
  try:
    return ParseStrict(text)
  except _NotLiteral:
    if LITERAL_START.match(text):
      raise
    return text


def ParseRecord(text: str, cls: type) -> Any:
  """Reads `type/<module>/<cls>(x=1)` of a known class, which may even be local to a function."""
  start = TypePath(cls)
  node = _ParseNode('fields' + text.removeprefix(start)) if text.startswith(start + '(') else None
  if not isinstance(node, ast.Call):
    raise ValueError()
  try:
    return _MakeRecord(cls, _ReadKeywords(node))
  except TypeError as e:  # For example, a list as a dict's key.
    raise ValueError(str(e)) from None
