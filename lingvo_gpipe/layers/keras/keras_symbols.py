# SPDX-License-Identifier: Apache-2.0
"""The trace of a subclassed model: its `call` runs on symbols, and Keras records the calls in it.

Keras records a call if an argument is symbolic. These it would compute at once, for good:

    self.positions(ops.arange(length))    a layer with weights
    ops.exp(self.scale)                   an operation
    self.scale * 2                        an operator

`Recorded` lets Keras record them, too, and notes the training mode of each layer. It is the mode
that the layer has in plain Keras: not the mode of the model if its `call` takes no `training`; and
a mode that the call of a layer asks for is also the mode of the layers that are called after it.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.backend.common import keras_tensor
from keras.src.ops import node as keras_node

from lingvo_gpipe.layers.keras import keras_variables

# The operators of variables, and the operations that they stand for.
_BINARY: dict[str, Callable[..., Any]] = {
  'add': keras.ops.add,
  'sub': keras.ops.subtract,
  'mul': keras.ops.multiply,
  'truediv': keras.ops.true_divide,
  'floordiv': keras.ops.floor_divide,
  'mod': keras.ops.mod,
  'pow': keras.ops.power,
  'matmul': keras.ops.matmul,
  'and': keras.ops.logical_and,
  'or': keras.ops.logical_or,
  'xor': keras.ops.logical_xor,
}
_OTHERS: dict[str, Callable[..., Any]] = {
  'neg': keras.ops.negative,
  'abs': keras.ops.absolute,
  'lt': keras.ops.less,
  'le': keras.ops.less_equal,
  'gt': keras.ops.greater,
  'ge': keras.ops.greater_equal,
  'eq': keras.ops.equal,
  'ne': keras.ops.not_equal,
  'invert': keras.ops.logical_not,
}
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
    ValueError: a Functional model with modes of its own gets none, so they hold, as nowhere else.
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


@contextlib.contextmanager
def Recorded() -> Iterator[list[Any]]:
  """Yields a list of the calls of the enclosed code, in order; it runs in the call of a model.

  Calls within the call of a layer or operation are not recorded, except of symbols, for its mask.
  The record of a layer's call, a Node of Keras, has the attribute `mode`; see `Mode`. A change of a
  variable raises ValueError.
  """
  running: list[Any] = []  # The layers and operations whose calls run.
  due: list[Any] = []  # A layer whose call is to be recorded, before it runs.
  calls: list[Any] = []
  call_layer = _Noted(keras.Layer.__call__, running)
  symbolic_call = _Noted(keras.Operation.symbolic_call, running)
  call_operation, assign = keras.Operation.__call__, keras.Variable.assign

  def HasSymbols(args: Any = None, kwargs: Any = None) -> bool:
    return _HAS_SYMBOLS(args, kwargs) or (not running and _HasVariable((args, kwargs)))

  def CallLayer(layer: Any, *args: Any, **kwargs: Any) -> Any:
    has_symbols = _HAS_SYMBOLS(args, kwargs)
    if running or not (has_symbols or layer.variables or _HasVariable((args, kwargs))):
      return call_layer(layer, *args, **kwargs)
    mode = _NextMode()
    if has_symbols:
      outputs = call_layer(layer, *args, **kwargs)
    else:
      due.append(layer)
      outputs = call_layer(layer, *args, **kwargs)
      keras_node.Node(layer, args, kwargs, outputs)
    calls.append(layer._inbound_nodes[-1])
    calls[-1].mode = mode
    return outputs

  def CallOperation(operation: Any, *args: Any, **kwargs: Any) -> Any:
    if due and due[0] is operation:
      due.clear()
      return operation.symbolic_call(*args, **kwargs)
    return call_operation(operation, *args, **kwargs)

  def SymbolicCall(operation: Any, *args: Any, **kwargs: Any) -> Any:
    outputs = symbolic_call(operation, *args, **kwargs)
    call = operation._inbound_nodes[-1]
    if not running or call.arguments.keras_tensors:  # A layer computes its mask by symbols.
      calls.append(call)
    return outputs

  def Equal(x: Any, other: Any) -> Any:
    is_computed = running or other is None or isinstance(other, str)
    return x is other if is_computed else keras.ops.equal(x, other)

  def Operator(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    compute = getattr(keras.Variable, name)

    def Apply(variable: Any, *args: Any) -> Any:
      is_computed = running or keras_variables.IsSeed(variable)
      return compute(variable, *args) if is_computed else run(variable, *args)

    return Apply

  def Assign(variable: Any, value: Any) -> Any:
    if running or keras_variables.IsSeed(variable):
      return assign(variable, value)
    raise ValueError(
      f'it changes the variable {variable.path} outside layers, and a pipeline would lose the '
      'change'
    )

  operators = {f'__{name}__': run for name, run in {**_BINARY, **_OTHERS}.items()}
  operators['__getitem__'] = _GetItem
  operators |= {f'__r{name}__': _Swapped(run) for name, run in _BINARY.items()}
  replacements: list[tuple[Any, dict[str, Any]]] = [
    (keras.Layer, {'__call__': CallLayer}),
    (keras.Operation, {'__call__': CallOperation}),
    (keras.Operation, {'symbolic_call': SymbolicCall}),
    (keras.Variable, {name: Operator(name, run) for name, run in operators.items()}),
    (keras.Variable, {'assign': Assign, 'sparse': False, 'ragged': False}),  # Like a symbol.
    (keras.KerasTensor, {'__getitem__': _GetItem, '__eq__': Equal}),  # It has `__ne__` alone.
  ]
  for name, module in list(sys.modules.items()):
    if name.startswith('keras.src.') and hasattr(module, 'any_symbolic_tensors'):
      replacements.append((module, {'any_symbolic_tensors': HasSymbols}))
  with contextlib.ExitStack() as replaced:
    for owner, attributes in replacements:
      replaced.enter_context(keras_variables.Replaced(owner, **attributes))
    yield calls


def _Noted(call: Callable[..., Any], running: list[Any]) -> Callable[..., Any]:
  """Returns a method that is in the list `running` while it runs."""

  def Call(operation: Any, *args: Any, **kwargs: Any) -> Any:
    running.append(operation)
    try:
      return call(operation, *args, **kwargs)
    finally:
      running.pop()

  return Call


def _HasVariable(nest: Any) -> bool:
  return any(
    isinstance(x, keras.Variable) and not keras_variables.IsSeed(x)
    for x in keras.tree.flatten(nest)
  )


def _GetItem(x: Any, key: Any) -> Any:
  # Keras records the index None, and slices, only in a tuple.
  return keras.ops.get_item(x, key if isinstance(key, tuple) else (key,))


def _Swapped(run: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
  return lambda a, b: run(b, a)
