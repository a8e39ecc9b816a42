# SPDX-License-Identifier: Apache-2.0
"""Whether two live Keras objects compute the same function of their variables and inputs."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Set
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# Attributes that name a layer, or record how it was made and called; no computation reads them.
IGNORED = frozenset(
  {
    '_auto_config',
    '_auto_name',
    '_build_shapes_dict',
    '_called',
    '_inbound_nodes',
    '_initializer',
    '_loss_ids',
    '_losses',
    '_name',
    '_name_scope',
    '_obj_reference_counts_dict',
    '_outbound_nodes',
    '_parent_path',
    '_path',
    '_post_build_modules',
    '_saved_model_arg_spec',
    '_saved_model_inputs_spec',
    '_self_setattr_tracking',
    '_self_unconditional_checkpoint_dependencies',
    '_self_unconditional_deferred_dependencies',
    '_self_unconditional_dependency_names',
    '_self_name_based_restores',
    '_self_saveable_object_factories',
    '_self_update_uid',
    '_tracker',
    '_unconditional_checkpoint_dependencies',
    '_unconditional_dependency_names',
    'name',
  }
)
# Keras wraps these methods for each layer; a class may have data of that name.
_WRAPPED = ('build', 'quantize')
# The attributes, which are compared, hold all that these methods compute from a name.
_MAKING = ('__init__', 'build', 'get_config')
_PLAIN: tuple[type, ...] = (
  *(str, bytes, int, float, complex, type(None), type, slice, types.EllipsisType),
  *(inspect.Signature, tf.DType, tf.TensorShape),
)


def AreEqual(a: Any, b: Any) -> bool:
  """Whether two objects are equal in all that a computation may depend on.

  Names of layers do not count, and neither do the initializers of weights. Names do count in a
  class outside Keras if its user chose them or if methods of the class read names. Variables are
  equal if they have the same shape, dtype and trainability, and stand in the same places. Functions
  are equal if they have the same code and have captured equal objects. Variables that their layer
  does not track and objects of unknown kind are equal only if they are the same object: unequal is
  always a safe answer.
  """
  return _Comparison().AreEqual(a, b)


class _Comparison:
  """One comparison, which pairs the objects that it met: object i here is object i there."""

  def __init__(self) -> None:
    self._partner: dict[int, int] = {}
    self._partner_back: dict[int, int] = {}
    self._alive: list[Any] = []
    self._tracked: frozenset[int] | None = None  # Inside an operation: ids of its variables.

  def AreEqual(self, a: Any, b: Any) -> bool:
    if isinstance(a, _PLAIN) or isinstance(b, _PLAIN):
      if type(a) is not type(b):
        return False
      # -0.0 is equal to 0.0, and nan is not equal to itself.
      return repr(a) == repr(b) if isinstance(a, (float, complex)) else bool(a == b)
    if type(a) is not type(b):
      return False
    if id(a) in self._partner or id(b) in self._partner_back:
      return self._partner.get(id(a)) == id(b) and self._partner_back.get(id(b)) == id(a)
    self._partner[id(a)], self._partner_back[id(b)] = id(b), id(a)
    self._alive += [a, b]  # An id stands for one object as long as that lives.
    return self._AreAlike(a, b)

  def _AreAlike(self, a: Any, b: Any) -> bool:
    if isinstance(a, keras.Variable):
      if self._tracked is not None and not self._tracked >= {id(a), id(b)}:
        return a is b  # A trace refers to this variable, so an equal one cannot replace it.
      return _Spec(a) == _Spec(b) and self.AreEqual(a.regularizer, b.regularizer)
    if isinstance(a, (list, tuple)):
      return len(a) == len(b) and all(map(self.AreEqual, a, b))
    if isinstance(a, dict):
      return list(a) == list(b) and all(self.AreEqual(a[key], b[key]) for key in a)
    if isinstance(a, (set, frozenset)):
      return list(a) == list(b)  # A computation may depend on their order.
    if isinstance(a, np.ndarray):
      return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, types.FunctionType):
      is_same = a.__code__ is b.__code__ and a.__globals__ is b.__globals__
      return a is b or (is_same and self.AreEqual(_CapturedValues(a), _CapturedValues(b)))
    if isinstance(a, types.MethodType):
      return a.__func__ is b.__func__ and self.AreEqual(a.__self__, b.__self__)
    is_known = isinstance(a, (keras.Operation, keras.DTypePolicy, keras.initializers.Initializer))
    is_known = is_known or isinstance(a, (keras.regularizers.Regularizer, keras.InputSpec))
    is_known = is_known or isinstance(a, (keras.random.SeedGenerator, keras.constraints.Constraint))
    if not (is_known and hasattr(a, '__dict__')):
      return a is b
    mine, other = _State(a), _State(b)
    outer = self._tracked
    if outer is None and isinstance(a, keras.Operation):
      self._tracked = frozenset(id(v) for x in (a, b) for v in getattr(x, 'variables', ()))
    try:
      return list(mine) == list(other) and all(self.AreEqual(mine[k], other[k]) for k in mine)
    finally:
      self._tracked = outer


def _CapturedValues(function: Any) -> list[Any]:
  """Returns the values that a function uses besides its code, its arguments and its module."""

  def Contents(cell: types.CellType) -> Any:
    try:
      return cell.cell_contents
    except ValueError:  # The cell is empty.
      return cell

  cells = [Contents(cell) for cell in function.__closure__ or ()]
  return [cells, function.__defaults__, function.__kwdefaults__, vars(function)]


def _Spec(v: Any) -> tuple[Any, ...]:
  return tuple(v.shape), v.dtype, v.trainable, v._autocast


def _State(value: Any) -> dict[str, Any]:
  """Returns the attributes that a computation may read, sorted by name."""
  attributes = {
    k: v for k, v in vars(value).items() if k not in IGNORED and not (k in _WRAPPED and callable(v))
  }
  if isinstance(value, keras.random.SeedGenerator):
    attributes.pop('_initial_seed', None)
    attributes.pop('seed', None)
  if isinstance(value, keras.Layer):
    is_known = IsOfKeras(type(value))
    attributes = {
      k: v
      for k, v in attributes.items()
      if not isinstance(v, keras.initializers.Initializer)
      or not (is_known or k.endswith('_initializer'))
      or (not is_known and Reads(type(value), {k}))
    }
    if not is_known:
      attributes['name'] = _CountedNames(value)
  return dict(sorted(attributes.items()))


def IsOfKeras(cls: type) -> bool:
  """Whether a class is Keras's or KerasHub's."""
  return cls.__module__.split('.')[0] in ('keras', 'keras_hub')


def _CountedNames(layer: Any) -> list[str]:
  """Returns the names on which the computation of a layer of a class outside Keras may depend."""
  if Reads(type(layer), {'name', 'path'}):
    return [x.name for x in layer._flatten_layers()]
  return [] if _HasAutomaticName(layer) else [layer.name]


def Reads(cls: type, attributes: Set[str]) -> bool:
  """Whether a method that a class does not have from Keras reads an attribute of such a name."""
  codes = []
  for base in cls.__mro__:
    if not IsOfKeras(base) and base.__module__.split('.')[0] != 'tensorflow':
      for key, value in vars(base).items():
        if key not in _MAKING:
          function = getattr(value, 'fget', None) or getattr(value, '__func__', value)
          codes.append(getattr(inspect.unwrap(function), '__code__', None))
  while codes:
    code = codes.pop()
    if isinstance(code, types.CodeType):
      if not attributes.isdisjoint(code.co_names):
        return True
      codes += code.co_consts  # Functions inside the function.
  return False


def _HasAutomaticName(layer: Any) -> bool:
  """Whether Keras named a layer after its class."""
  words = re.sub(r'(.)([A-Z][a-z]+)', r'\1_\2', type(layer).__name__)
  base = re.sub(r'([a-z])([A-Z])', r'\1_\2', words).lower()
  return re.fullmatch(rf'{re.escape(base)}(_\d+)?', layer.name) is not None
