# SPDX-License-Identifier: Apache-2.0
"""The calls that a model makes: the calls in its graph, or in a trace of its `call`.

Keras has no public way to walk over the calls of a model. So this file uses private attributes of
Keras: `KerasTensor._keras_history`, `Node.__init__` and `Operation._inbound_nodes`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import linecache
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.ops import node as keras_node

from lingvo_gpipe.layers.keras import keras_equality, keras_nodes, keras_symbols, keras_variables


class Environment(dict[int, keras_nodes.Value]):
  """{id of a KerasTensor: Value}."""

  def __init__(self, tensors: Sequence[Any], values: Sequence[keras_nodes.Value]) -> None:
    super().__init__({id(t): v for t, v in zip(tensors, values, strict=True)})


class Builder:
  """Collects the calls of a model and of the models nested in it."""

  def __init__(self) -> None:
    self.nodes: list[keras_nodes.Node] = []
    self._num_values = 0

  def NewValue(self, tensor: Any) -> keras_nodes.Value:
    self._num_values += 1
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    return keras_nodes.Value(self._num_values - 1, tuple(tensor.shape), dtype)

  def Run(
    self,
    outputs: Sequence[Any],
    environment: Environment,
    policy: Any,
    training: bool | None = None,
  ) -> list[keras_nodes.Value]:
    """Adds the calls that lead to KerasTensors of a Functional model; returns their Values.

    Args:
      outputs: the KerasTensors.
      environment: the known tensors; the tensors of the calls are added.
      policy: the dtype policy of the model.
      training: the mode that the model was called with by an outer one, which overrides the modes
        of its layers' calls; None: any.
    """
    # Depth first, so that a chain is followed to its end before the next begins.
    stack = [(t, False) for t in reversed(outputs)]
    while stack:
      tensor, is_ready = stack.pop()
      if id(tensor) in environment:
        continue
      history = tensor._keras_history
      call = history.operation._inbound_nodes[history.node_index]
      if not is_ready:
        if not call.arguments.keras_tensors:
          raise _MakeForeignError(tensor)
        stack.append((tensor, True))
        stack += [(t, False) for t in reversed(call.arguments.keras_tensors)]
        continue
      self._Add(call, environment, policy, training)
    return [environment[id(t)] for t in outputs]

  def RunTrace(
    self, calls: Sequence[Any], outputs: Sequence[Any], environment: Environment, policy: Any
  ) -> list[keras_nodes.Value]:
    """Adds the calls of a trace, in their order, unless they have no effect; see `Run`."""
    needed = {id(t) for t in outputs}
    for call in reversed(calls):
      if _HasEffect(call.operation) or not needed.isdisjoint(map(id, call.outputs)):
        needed |= {id(call), *map(id, call.arguments.keras_tensors)}
    for call in calls:
      if id(call) in needed:
        self._Add(call, environment, policy, is_traced=True)
    for t in outputs:
      if id(t) not in environment:
        raise _MakeForeignError(t)
    return [environment[id(t)] for t in outputs]

  def _Add(
    self,
    call: Any,
    environment: Environment,
    policy: Any,
    training: bool | None = None,
    *,
    is_traced: bool = False,
  ) -> None:
    """Adds one call; in a trace in the mode that it asks for, or that Keras gives it."""
    for t in call.arguments.keras_tensors:
      if id(t) not in environment:
        raise _MakeForeignError(t)
    args, kwargs = call.arguments.fill_in(environment)
    kwargs = dict(kwargs)
    kwargs.pop('training', None)
    if is_traced and isinstance(call.operation, keras.Layer):
      training = keras_symbols.Mode(call)
    values = self._Call(call, args, kwargs, policy, training)
    environment.update({id(t): v for t, v in zip(call.outputs, values, strict=True)})

  def _Call(
    self,
    call: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    policy: Any,
    training: bool | None,
  ) -> Sequence[keras_nodes.Value]:
    """Adds one call, a Node of Keras: our node, or the nodes of a nested model."""
    operation, line = call.operation, getattr(call, 'line', '')
    graph = keras_nodes.AsFunctional(operation)
    is_opened = graph is not None and operation.activity_regularizer is None
    inputs = _NestedInputs(graph, args, kwargs) if is_opened else None
    if graph is not None and inputs is not None:
      environment = Environment(graph.inputs, inputs)
      return self.Run(graph.outputs, environment, operation.dtype_policy, training)
    if None in keras.tree.flatten(getattr(operation, 'newshape', ())):
      raise ValueError(
        f'{operation.name}{line} reshapes to a size that is not known: use -1, or ops.shape'
      )
    if any(isinstance(x, tf.Variable) for x in keras.tree.flatten((args, kwargs))):
      raise ValueError(
        f'{operation.name}{line} takes the value of a weight: pass the weight itself'
      )
    values = tuple(self.NewValue(t) for t in call.outputs)
    self.nodes.append(keras_nodes.Node(operation, args, kwargs, values, policy, training, line))
    return values


def _MakeForeignError(tensor: Any) -> ValueError:
  return ValueError(f'the tensor {tensor.name} does not depend on the inputs of the model')


def _HasEffect(operation: Any) -> bool:
  """Whether a call may do more than return its outputs: add a loss, or change state."""
  layers = keras_nodes.Sublayers(operation)
  state = (v for v in layers[0].variables if not v.trainable) if layers else ()
  return any(map(keras_nodes.MayAddLoss, layers)) or not all(map(keras_variables.IsSeed, state))


def _NestedInputs(
  graph: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[keras_nodes.Value] | None:
  """Returns the Values for a nested model's inputs; None if Keras would convert them."""
  kwargs = dict(kwargs)
  if not args and 'inputs' in kwargs:
    args = (kwargs.pop('inputs'),)
  if len(args) != 1 or any(v is not None for v in keras.tree.flatten(kwargs)):
    return None
  names = [t.name for t in graph.inputs]
  inputs, expected = args[0], graph.input
  if isinstance(inputs, dict) and not isinstance(expected, dict):
    if not set(names) <= set(inputs):
      return None
    inputs = [inputs[name] for name in names]
  flat = keras.tree.flatten(inputs)
  if isinstance(inputs, dict) and set(inputs) != set(expected):
    return None
  if len(flat) != len(names) or not all(isinstance(v, keras_nodes.Value) for v in flat):
    return None
  for value, tensor in zip(flat, graph.inputs, strict=True):
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    if len(value.shape) != len(tensor.shape) or value.dtype != dtype:
      return None
  return flat


def Trace(
  layer: Any, args: Sequence[Any], kwargs: Mapping[str, Any], modes: Sequence[bool | None]
) -> keras_nodes.Graph:
  """Returns the graph of a layer or subclassed model, from its `call` on symbolic tensors.

  Args:
    layer: a built layer or model.
    args: the arguments of the call, with a KerasTensor for each tensor.
    kwargs: its named arguments.
    modes: the training modes in which it is called; see `Modes`.

  Raises:
    ValueError: the graph would not compute what `call` does; the message names the line.
  """

  trace = functools.partial(TraceMode, layer, args, kwargs)
  with keras.StatelessScope():  # Seeds keep their values.
    first = trace(modes[0])
  for scale in (0.0, 9.0):
    with _OtherWeights(scale):
      other = trace(modes[0])
    if (line := Difference(first, other)) is not None:
      raise ValueError(
        f'{type(layer).__name__}.call computes with the value of a weight, draws random numbers, '
        f'or passes a function that uses its tensors, outside layers; the result, used{line}, '
        'would stay constant: pass the weight itself to keras.ops, or move the computation into a '
        'layer'
      )
  with keras.StatelessScope():
    last = trace(modes[-1])
  if (line := Difference(first, last)) is not None:
    raise ValueError(
      f'{type(layer).__name__}.call does something else in training than in evaluation{line}, so '
      'its layers form no fixed graph: move the choice into a layer that takes `training`'
    )
  nodes = []
  for a, b in zip(first.nodes, last.nodes, strict=True):
    if b.training and not a.training:
      raise ValueError(
        f'{type(layer).__name__}.call{a.line} gives a layer the mode of training in evaluation only'
      )
    # If the mode differs between the traces, the layer follows the mode of the whole model.
    nodes.append(dataclasses.replace(a, training=a.training if a.training == b.training else None))
  return dataclasses.replace(first, nodes=tuple(nodes))


def Modes(model: Any) -> list[bool | None]:
  """Returns the training modes in which Keras calls a model; None: without a mode."""
  return [True, False] if _TakesTraining(model) else [None]


def _TakesTraining(layer: Any) -> bool:
  return 'training' in inspect.signature(layer.call).parameters


def TraceMode(
  layer: Any,
  args: Sequence[Any],
  kwargs: Mapping[str, Any],
  mode: bool | None,
  unknown_axes: Sequence[Sequence[int]] = (),
) -> keras_nodes.Graph:
  """Returns the graph of one training mode; `unknown_axes`: see `keras_symbols.RecordCalls`."""
  flat = [t for t in keras.tree.flatten((args, kwargs)) if isinstance(t, keras.KerasTensor)]
  builder = Builder()
  inputs = tuple(builder.NewValue(t) for t in flat)
  environment = Environment(flat, inputs)
  to_value = lambda t: environment.get(id(t), t)  # noqa: E731
  input_structure = keras.tree.map_structure(to_value, args[0] if args else kwargs)

  def Call() -> Any:
    options = {'training': mode} if mode is not None and _TakesTraining(layer) else {}
    # A tf.function would run with tensors.
    call = getattr(layer.call, 'python_function', layer.call)
    with keras_symbols.RecordCalls(unknown_axes) as record:
      return call(*args, **kwargs, **options), record

  with NamingTheLine(layer):
    with _KnowingLines(_Path(layer)), _RefuseMethods(layer, 'add_loss', 'add_metric'):
      outputs, record = keras_symbols.RunInCall(Call, layer.dtype_policy, mode)
    tensors = keras.tree.flatten(outputs)
    for t in tensors:
      if not isinstance(t, keras.KerasTensor):
        raise TypeError(f'it returns a {type(t).__name__}')
    record.CheckAttributes()
    values = builder.RunTrace(record.calls, tensors, environment, layer.dtype_policy)
  structure = keras.tree.pack_sequence_as(outputs, values)
  return keras_nodes.Graph(
    *(layer, tuple(builder.nodes), inputs, tuple(values), structure, input_structure),
    unknown_axes=record.unknown_axes,
  )


def Symbols(model: Any, x: Any) -> Any:
  """Returns symbolic inputs of a model like the specs or tensors `x`."""

  def Symbol(t: Any) -> Any:
    dtype = keras.backend.standardize_dtype(t.dtype)
    if model.autocast and tf.as_dtype(dtype).is_floating:
      dtype = model.compute_dtype  # Keras casts the arguments of a model.
    return keras.KerasTensor((None, *t.shape[1:]), dtype)

  return keras.tree.map_structure(Symbol, x)


@contextlib.contextmanager
def NamingTheLine(model: Any) -> Iterator[None]:
  """Names the line of a model's code in errors of the enclosed code, which calls it."""
  try:
    yield
  except Exception as e:
    frames = reversed([*traceback.walk_tb(e.__traceback__)])
    line = _Line(_Path(model), frames)
    raise ValueError(
      f'{type(model).__name__}.call cannot be traced{line}: {e}. Its tensors may be passed to '
      'layers, keras.ops and functions of TensorFlow; put other code into a layer of its own'
    ) from e


@contextlib.contextmanager
def _KnowingLines(path: str | None) -> Iterator[None]:
  """Lets each call of a layer or operation remember the line of a file that made it."""
  make = keras_node.Node.__init__

  def Make(call: Any, *args: Any, **kwargs: Any) -> None:
    make(call, *args, **kwargs)
    call.line = _Line(path, traceback.walk_stack(None))

  with keras_variables.ReplaceAttributes(keras_node.Node, __init__=Make):
    yield


@contextlib.contextmanager
def _RefuseMethods(model: Any, *names: str) -> Iterator[None]:
  """Lets the `call` of a model raise ValueError when it calls one of these methods of its own."""

  def Refuse(name: str) -> Callable[..., None]:
    def Method(*args: Any, **kwargs: Any) -> None:
      raise ValueError(
        f'{name} of the model itself, which a pipeline would lose: call add_loss in a layer, and '
        'give metrics to compile()'
      )

    return Method

  with keras_variables.ReplaceAttributes(model, **{name: Refuse(name) for name in names}):
    yield


def _Path(model: Any) -> str | None:
  """Returns the file of a model's `call`, also in a notebook; None if it is unknown."""
  call = type(model).call
  code = getattr(getattr(call, 'python_function', call), '__code__', None)
  return code.co_filename if code is not None else None


def _Line(path: str | None, frames: Iterable[tuple[Any, int]]) -> str:
  """Returns the first line of a file among some frames, as a part of a sentence."""
  for frame, line in frames:
    if path is not None and frame.f_code.co_filename == path:
      return f' at line {line} of {path} ({linecache.getline(path, line).strip()})'
  return ''


class _OtherWeights(keras.StatelessScope):
  """Changes the values of all weights that code reads, so that a trace shows their use.

  They become random numbers of a standard deviation `scale`; if that is 0, zeros.
  """

  def __init__(self, scale: float) -> None:
    super().__init__()
    self._scale = scale

  def get_current_value(self, variable: Any) -> Any:
    """Returns a value of which each element differs from the present one."""
    value = super().get_current_value(variable)
    if value is not None or variable._value is None:
      return value
    value = tf.convert_to_tensor(variable._value)
    if value.dtype == tf.bool:
      return tf.logical_not(value)
    other = tf.random.stateless_normal(value.shape, [0, 0], stddev=self._scale)
    other = tf.cast(other, value.dtype)
    return tf.where(other == value, value + 1, other)


def Difference(a: keras_nodes.Graph, b: keras_nodes.Graph) -> str | None:
  """Returns the line of the first call that differs in two traces of a model; None if none does."""
  for x, y in itertools.zip_longest(a.nodes, b.nodes):
    if x is None or y is None or not _IsSameCall(x, y):
      return (x or y).line
  return None if [v.index for v in a.outputs] == [v.index for v in b.outputs] else ''


def _IsSameCall(a: keras_nodes.Node, b: keras_nodes.Node) -> bool:
  """Whether two traces of one model made the same call."""

  def Leaves(node: keras_nodes.Node) -> Iterator[Any]:
    for leaf in keras.tree.flatten((node.args, node.kwargs)):
      if isinstance(leaf, keras_nodes.Value):
        yield leaf.index
      else:
        yield np.asarray(leaf) if isinstance(leaf, (tf.Tensor, np.generic)) else leaf

  # A layer that the call makes, as layers.add does, is a new object in each trace.
  has_weights = isinstance(a.operation, keras.Layer) and a.operation.variables
  if has_weights and a.operation is not b.operation:
    return False
  return keras_equality.AreEqual((a.operation, *Leaves(a)), (b.operation, *Leaves(b)))
