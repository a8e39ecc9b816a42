# SPDX-License-Identifier: Apache-2.0
"""The trace of a subclassed model: its `call` runs on symbols, and Keras records the calls in it.

Keras records a call if an argument is symbolic. It would compute the following calls at once, and
their results would be constants:

    self.positions(ops.arange(length))    a layer with weights
    ops.exp(self.scale)                   an operation

`RecordCalls` lets Keras record them, too, and functions of TensorFlow, and operators: see
keras_functions. The record has the training mode of each layer, which is its mode in plain Keras.
It differs from the mode of the model if the model's `call` takes no `training`. A mode that the
call of a layer asks for is also the mode of the layers that are called after it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import keras_tensor
from keras.src.ops import node as keras_node

from lingvo_gpipe.layers.keras import keras_equality, keras_functions, keras_nodes, keras_variables

# The public modules of functions of tensors.
_TENSORFLOW = (tf, tf.image, tf.linalg, tf.math, tf.nn, tf.random, tf.signal, tf.strings)
_KERAS = (keras.ops, keras.ops.image, keras.ops.linalg, keras.ops.nn, keras.ops.numpy)
_RECORDERS: list[_Recorder] = []  # One for each trace that runs.
_HAS_SYMBOLS = keras_tensor.any_symbolic_tensors


class _Call(keras.layers.Layer):
  """Runs code in its call."""

  def __init__(self, run: Callable[[bool | None], None], **options: Any) -> None:
    super().__init__(name='cell', **options)
    self.built = True
    self._run = run

  def call(self, training: bool | None = None) -> None:
    self._run(training)


def RunInCall(run: Callable[[], Any], policy: Any, training: bool | None) -> Any:
  """Returns what `run` returns inside the `__call__` of a model.

  Args:
    run: calls layers and operations.
    policy: the dtype policy of the model.
    training: the training mode that the model is called with, if any.
  """
  results: list[Any] = []
  errors: list[Exception] = []

  def Run(_: bool | None) -> None:
    try:
      results.append(run())
    except Exception as e:  # Keras would add `_Call` and its arguments to the message.
      errors.append(e)

  _Call(Run, dtype=policy)(training=training)
  if errors:
    raise errors[0]
  return results[0]


def _NextMode() -> bool | None:
  """Returns the mode of the next call in a model if it asks for none; None: the layer's default."""
  modes: list[bool | None] = []
  _Call(modes.append)()
  return modes[0]


def Mode(call: Any) -> bool:
  """Returns the training mode of a recorded call of a layer.

  Raises:
    ValueError: a Functional model with modes of its own is called without a mode. Only then do they
      hold.
  """
  layer, mode = call.operation, call.arguments.kwargs.get('training')
  mode = call.mode if mode is None else mode
  if mode is not None:
    return bool(mode)
  for inner in getattr(layer, 'operations', ()):
    if any(c.arguments.kwargs.get('training') for c in inner._inbound_nodes):
      raise ValueError(
        f'{inner.name} of {layer.name} was called with training=True, which holds only if '
        f'{layer.name} is called without a mode: take `training` in `call`, or call {inner.name} '
        'there'
      )
  parameters = inspect.signature(layer.call).parameters
  return 'training' in parameters and parameters['training'].default is True


def _Attributes(layer: Any) -> dict[tuple[str, str], Any]:
  """Returns {(path of a layer, name): value} of the attributes that code may read as settings."""
  return {
    (x.path, name): value
    for x in keras_nodes.Sublayers(layer)
    for name, value in vars(x).items()
    if isinstance(value, (bool, int, float, str)) and name not in keras_equality.IGNORED
  }


@dataclasses.dataclass
class Record:
  """The record of a trace.

  Attributes:
    calls: the Nodes of Keras, in order. A Node of a layer has the attribute `mode`; see `Mode`.
    unknown_axes: the axes of unknown size in each call of keras.ops.shape, in order.
    called: {id of a layer: the layer, and its attributes after its last call}.
  """

  calls: list[Any] = dataclasses.field(default_factory=list)
  unknown_axes: list[Sequence[int]] = dataclasses.field(default_factory=list)
  called: dict[int, tuple[Any, dict[Any, Any]]] = dataclasses.field(default_factory=dict)

  def CheckAttributes(self, layer: Any = None) -> None:
    """Raises ValueError if code has changed attributes of a layer since its last call.

    The recorded calls run later, when they would all find the last values.

    Args:
      layer: the layer; None: all layers.
    """
    for key in self.called if layer is None else {id(layer)} & self.called.keys():
      called, before = self.called[key]
      for (path, name), value in _Attributes(called).items():
        if before.get((path, name), value) != value:
          raise ValueError(f'it changes {name} of {path} between calls of layers')


class _TensorShape(tuple):
  """The static shape of a symbol, with the methods of the tf.TensorShape that a tensor has."""

  __slots__ = ()

  def __getitem__(self, key: Any) -> Any:
    item = super().__getitem__(key)
    return _TensorShape(item) if isinstance(key, slice) else item

  def __add__(self, other: Any) -> _TensorShape:
    return _TensorShape((*self, *other))

  def __radd__(self, other: Any) -> _TensorShape:
    return _TensorShape((*other, *self))

  def __getattr__(self, name: str) -> Any:
    if name.startswith('_'):
      raise AttributeError(name)
    return getattr(tf.TensorShape(self), name)


@contextlib.contextmanager
def RecordCalls(unknown_axes: Sequence[Sequence[int]] = ()) -> Iterator[Record]:
  """Yields the record of the calls of the enclosed code, which runs in the call of a model.

  Calls within the call of a layer or operation are not recorded, except of symbols, for its mask.
  A change of a variable raises ValueError.

  Args:
    unknown_axes: the record of a trace of inputs with more unknown sizes, to compare the two.
  """
  recorder = _Recorder(unknown_axes)
  _RECORDERS.append(recorder)
  try:
    with contextlib.ExitStack() as replaced:
      for owner, attributes in recorder.Replacements():
        replaced.enter_context(keras_variables.ReplaceAttributes(owner, **attributes))
      yield recorder.record
  finally:
    _RECORDERS.remove(recorder)


class _Recorder:
  """The methods and functions that replace methods and functions of Keras and TensorFlow."""

  def __init__(self, unknown_axes: Sequence[Sequence[int]]) -> None:
    self.record = Record()
    self._unknown_axes = unknown_axes
    self._functions = keras_functions.Functions()
    self._running: list[Any] = []  # The layers and operations whose calls run.
    self._thread = threading.get_ident()
    self._due: list[Any] = []  # A layer whose call is to be recorded, before it runs.

  def Replacements(self) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields an object, class or module, and its new attributes."""
    yield keras.Layer, {'__call__': self._CallLayer(self._TrackRunning(keras.Layer.__call__))}
    symbolic_call = self._SymbolicCall(self._TrackRunning(keras.Operation.symbolic_call))
    call = self._CallOperation(keras.Operation.__call__)
    yield keras.Operation, {'__call__': call, 'symbolic_call': symbolic_call}
    static_shape = self._StaticShape(keras.KerasTensor.shape)
    shapes = {'shape': static_shape, 'get_shape': static_shape.fget}
    # NumPy leaves the operator to the symbol on its right.
    like_arrays = {'__array_priority__': 100, **self._Operators(keras.KerasTensor)}
    yield keras.KerasTensor, {**shapes, **like_arrays}
    outside = {'assign': 'it changes', '__tf_tensor__': 'it computes with the value of'}
    refusing = {name: self._RefuseOutside(name, error) for name, error in outside.items()}
    like_symbols = {'sparse': False, 'ragged': False}
    yield keras.Variable, {**self._Operators(keras.Variable), **refusing, **like_symbols}
    for name, module in list(sys.modules.items()):
      if name.startswith('keras.src.') and hasattr(module, 'any_symbolic_tensors'):
        yield module, {'any_symbolic_tensors': self._HasSymbols}
    for modules, is_for in ((_TENSORFLOW, _IsSymbolOrWeight), (_KERAS, _IsSize)):
      for module in modules:
        functions = {k: f for k, f in vars(module).items() if inspect.isfunction(f)}
        yield module, {k: _RecordFunction(f, is_for) for k, f in functions.items()}
    shape = self._Shape(keras.ops.shape)
    yield from ((module, {'shape': shape}) for module in (keras.ops, keras.ops.numpy))

  def IsOutside(self) -> bool:
    """Whether the code between layers and operations runs, in the thread of the trace."""
    return not self._running and threading.get_ident() == self._thread

  def Call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Records a call of a function; returns the symbols for its results."""
    results, call = self._TrackRunning(self._functions.Record)(function, *args, **kwargs)
    self.record.calls.append(call)
    return results

  def _TrackRunning(self, call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method whose object counts as running while it runs."""

    def Call(operation: Any, *args: Any, **kwargs: Any) -> Any:
      self._running.append(operation)
      try:
        return call(operation, *args, **kwargs)
      finally:
        self._running.pop()

    return Call

  def _HasSymbols(self, args: Any = None, kwargs: Any = None) -> bool:
    return _HAS_SYMBOLS(args, kwargs) or (self.IsOutside() and _HasWeight((args, kwargs)))

  def _CallLayer(self, call_layer: Callable[..., Any]) -> Callable[..., Any]:
    def Call(layer: Any, *args: Any, **kwargs: Any) -> Any:
      has_symbols = _HAS_SYMBOLS(args, kwargs)
      if not self.IsOutside() or not (has_symbols or layer.variables or _HasWeight((args, kwargs))):
        return call_layer(layer, *args, **kwargs)
      mode = _NextMode()
      self.record.CheckAttributes(layer)
      if has_symbols:
        outputs = call_layer(layer, *args, **kwargs)
      else:
        self._due.append(layer)
        outputs = call_layer(layer, *args, **kwargs)
        keras_node.Node(layer, args, kwargs, outputs)
      call = layer._inbound_nodes[-1]
      call.mode = mode
      self.record.called[id(layer)] = (layer, _Attributes(layer))
      self.record.calls.append(call)
      return outputs

    return Call

  def _CallOperation(self, call_operation: Callable[..., Any]) -> Callable[..., Any]:
    def Call(operation: Any, *args: Any, **kwargs: Any) -> Any:
      if self._due and self._due[0] is operation:
        self._due.clear()
        return operation.symbolic_call(*args, **kwargs)
      return call_operation(operation, *args, **kwargs)

    return Call

  def _SymbolicCall(self, symbolic_call: Callable[..., Any]) -> Callable[..., Any]:
    def Call(operation: Any, *args: Any, **kwargs: Any) -> Any:
      outputs = symbolic_call(operation, *args, **kwargs)
      call = operation._inbound_nodes[-1]
      if self.IsOutside() or call.arguments.keras_tensors:  # A layer computes its mask by symbols.
        self.record.calls.append(call)
      return outputs

    return Call

  def _Operators(self, owner: Any) -> dict[str, Any]:
    """Returns the operators of a class."""
    methods = {'__getitem__': self._GetItem(owner.__getitem__)}
    for name in (*keras_functions.BINARY, *keras_functions.OTHERS):
      methods[f'__{name}__'] = self._Operator(owner, name, is_reflected=False)
    for name in keras_functions.BINARY:
      methods[f'__r{name}__'] = self._Operator(owner, name, is_reflected=True)
    return methods

  def _Operator(self, owner: Any, name: str, *, is_reflected: bool) -> Callable[..., Any]:
    run = getattr(operator, f'__{name}__')
    compute = getattr(owner, f'__r{name}__' if is_reflected else f'__{name}__', None)

    def Apply(x: Any, *operands: Any) -> Any:
      if not self.IsOutside() or keras_variables.IsSeed(x):
        # A KerasTensor has no `__eq__` of its own.
        return compute(x, *operands) if compute else NotImplemented
      if name in ('eq', 'ne') and (operands[0] is None or isinstance(operands[0], str)):
        return name == 'ne'
      return self.Call(run, *((*operands, x) if is_reflected else (x, *operands)))

    return Apply

  def _GetItem(self, get_item: Callable[..., Any]) -> Callable[..., Any]:
    def GetItem(x: Any, key: Any) -> Any:
      if not self.IsOutside() or keras_variables.IsSeed(x):
        return get_item(x, key)
      keys = key if isinstance(key, tuple) else (key,)
      return self.Call(keras_functions.Item, x, *map(keras_functions.Bounds, keys))

    return GetItem

  def _StaticShape(self, shape: Any) -> property:
    def Shape(x: Any) -> Any:
      return _TensorShape(shape.fget(x)) if self.IsOutside() else shape.fget(x)

    return property(Shape)

  def _Shape(self, shape: Callable[..., Any]) -> Callable[..., Any]:
    def Shape(x: Any) -> Any:
      sizes = shape(x)
      if not self.IsOutside() or not isinstance(x, keras.KerasTensor):
        return sizes
      index = len(self.record.unknown_axes)
      axes: Sequence[int] = [i for i, size in enumerate(sizes) if size is None]
      if index < len(self._unknown_axes):
        axes = self._unknown_axes[index]
      self.record.unknown_axes.append(axes)
      return tuple(
        self.Call(keras_functions.Size, x, i) if i in axes else size for i, size in enumerate(sizes)
      )

    return Shape

  def _RefuseOutside(self, name: str, error: str) -> Callable[..., Any]:
    """Returns a method of variables that raises ValueError outside layers and operations."""
    method = getattr(keras.Variable, name)

    def Method(variable: Any, *args: Any, **kwargs: Any) -> Any:
      if not self.IsOutside() or keras_variables.IsSeed(variable):
        return method(variable, *args, **kwargs)
      raise ValueError(
        f'{error} the variable {variable.path} outside layers, and a pipeline would lose it'
      )

    return Method


@functools.cache
def _RecordFunction(
  function: Callable[..., Any], is_for: Callable[[Any], bool]
) -> Callable[..., Any]:
  """Returns a function that is recorded when it gets an argument of some kind.

  It is the same in each trace, so that layers that a call makes with it, as an activation, are
  equal.
  """

  @functools.wraps(function)
  def Call(*args: Any, **kwargs: Any) -> Any:
    is_outside = bool(_RECORDERS) and _RECORDERS[-1].IsOutside()
    if is_outside and any(map(is_for, keras.tree.flatten((args, kwargs)))):
      return _RECORDERS[-1].Call(function, *args, **kwargs)
    return function(*args, **kwargs)

  return Call


def _HasWeight(nest: Any) -> bool:
  return any(map(_IsWeight, keras.tree.flatten(nest)))


def _IsWeight(x: Any) -> bool:
  return isinstance(x, keras.Variable) and not keras_variables.IsSeed(x)


def _IsSymbolOrWeight(x: Any) -> bool:
  return isinstance(x, keras.KerasTensor) or _IsWeight(x)


def _IsSize(x: Any) -> bool:
  """Whether an argument is a symbolic integer, as keras.ops.shape has them."""
  return isinstance(x, keras.KerasTensor) and not x.shape and tf.as_dtype(x.dtype).is_integer
