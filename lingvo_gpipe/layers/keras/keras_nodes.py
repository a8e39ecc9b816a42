# SPDX-License-Identifier: Apache-2.0
"""The graph of a live Keras model: the calls of its layers and operations, nested models opened.

The layers are the model's own objects, never copies made from their configurations: state that a
configuration lacks (frozen sublayers, LoRA, quantisation, adapted statistics) stays what it is.

Keras has no public way to walk over the calls of a model, to move a variable to another device, or
to list the layers inside a layer. So this file uses private attributes of Keras:
`KerasTensor._keras_history`, `Operation._inbound_nodes`, `Functional._standardize_inputs`,
`Sequential._functional`, `Layer._flatten_layers`, `Variable._value`, `Model._compile_config`,
`Optimizer._iterations`, `Variable._direct_assign`, `saving_lib.is_memory_sufficient`, the ids of
variables and the list of variables that have no value yet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src.backend.common import global_state
from keras.src.models import functional as keras_functional
from keras.src.saving import saving_lib

from lingvo_gpipe.layers.keras import keras_equality

# Layers whose call in training changes variables that no gradient reaches.
STATEFUL = (keras.layers.BatchNormalization, keras.layers.SpectralNormalization)


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
  """A tensor of the model.

  Attributes:
    index: its number, in the order in which the calls make them; the inputs come first.
    shape: with None for the batch size.
    dtype: name of its dtype.
  """

  index: int
  shape: tuple[int | None, ...]
  dtype: str

  @property
  def bytes_per_example(self) -> int:
    """Its bytes for one example; sizes that are not known count as 1."""
    size = tf.as_dtype(self.dtype).size if self.dtype != 'string' else 16
    for dim in self.shape[1:]:
      size *= dim or 1
    return size


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
  """One call of a layer or operation.

  Attributes:
    operation: the live Keras layer, or an operation of keras.ops.
    args: the arguments of the call, with a Value for each tensor.
    kwargs: the named arguments.
    outputs: the tensors that the call makes, flat.
    policy: the dtype policy of the model whose graph has the call.
    training: the mode that the call asks for; None: the mode of the whole model.
  """

  operation: Any
  args: tuple[Any, ...]
  kwargs: dict[str, Any]
  outputs: tuple[Value, ...]
  policy: Any
  training: bool | None = None

  @property
  def inputs(self) -> list[Value]:
    """The tensors among the arguments."""
    return [x for x in keras.tree.flatten((self.args, self.kwargs)) if isinstance(x, Value)]

  @property
  def variables(self) -> list[Any]:
    """The Keras variables that the call reads: weights, and the states of seed generators."""
    used = list(self.operation.variables) if isinstance(self.operation, keras.Layer) else []
    flat = keras.tree.flatten((self.args, self.kwargs))
    return used + [x for x in flat if isinstance(x, keras.Variable)]


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
  """The calls of a model, in an order in which each finds its arguments.

  Attributes:
    model: the live Keras model.
    nodes: the calls.
    inputs: the inputs of the model, flat.
    outputs: the outputs of the model, flat.
    output_structure: the outputs as the model returns them, with a Value for each tensor.
    input_structure: the inputs as the model takes them, with a Value for each tensor.
  """

  model: Any
  nodes: tuple[Node, ...]
  inputs: tuple[Value, ...]
  outputs: tuple[Value, ...]
  output_structure: Any
  input_structure: Any

  def FlatInputs(self, x: Any) -> list[Any]:
    """Returns the input tensors in the order of `inputs`, cast and reshaped as Keras does.

    Args:
      x: tensors `[batch, ...]` as Keras's `fit` takes them: one, a list or a dict by name.

    Raises:
      ValueError: the inputs have another structure.
    """
    graph = _AsFunctional(self.model)
    names = {t.name for t in self.model.inputs} if graph is not None else set()
    if isinstance(x, dict) and (missing := sorted(names - x.keys())):
      raise ValueError(f'{self.model.name} needs the inputs {sorted(names)}, missing: {missing}')
    if graph is not None:
      return list(graph._standardize_inputs(x))
    try:
      keras.tree.assert_same_structure(x, self.input_structure)
    except (ValueError, TypeError):
      shapes = keras.tree.map_structure(lambda v: tuple(v.shape), (self.input_structure, x))
      raise ValueError(
        f'{self.model.name} takes inputs {shapes[0]}, as in its first batch, got {shapes[1]}'
      ) from None
    flat = []
    for t, v in zip(keras.tree.flatten(x), self.inputs, strict=True):
      actual, expected = (tf.as_dtype(x.dtype) for x in (t, v))
      if actual.is_floating != expected.is_floating:
        raise ValueError(
          f'{self.model.name} takes inputs of dtype {v.dtype}, as in its first batch, got '
          f'{actual.name}'
        )
      flat.append(keras.ops.convert_to_tensor(t, dtype=v.dtype))
    return flat

  def OtherSizes(self, x: Any) -> Any:
    """Returns specs like the inputs with None for each size that differs; None if none does.

    Args:
      x: the inputs. Only a traced graph knows one size; a Functional model knows all its sizes.
    """
    flat = keras.tree.flatten(x)
    if _AsFunctional(self.model) is not None or len(flat) != len(self.inputs):
      return None
    specs = []
    for t, v in zip(flat, self.inputs, strict=True):
      if len(t.shape) != len(v.shape):
        return None
      sizes = [a if a == b else None for a, b in zip(t.shape[1:], v.shape[1:], strict=True)]
      specs.append(tf.TensorSpec([None, *sizes], t.dtype))
    is_equal = all(s.shape[1:] == v.shape[1:] for s, v in zip(specs, self.inputs, strict=True))
    return None if is_equal else keras.tree.pack_sequence_as(x, specs)

  def PackOutputs(self, flat: Sequence[Any]) -> Any:
    """Returns flat output tensors in the structure of the model's outputs."""
    return keras.tree.pack_sequence_as(self.output_structure, list(flat))


def VariablesBefore(graph: Graph, outputs: Sequence[Value]) -> set[int]:
  """Returns the ids of the variables that some outputs, or losses of layers, may depend on."""
  needed = set(outputs)
  variables = set()
  for node in reversed(graph.nodes):
    adds_loss = any(map(MayAddLoss, Sublayers(node.operation)))
    if adds_loss or not needed.isdisjoint(node.outputs):
      needed.update(node.inputs)
      variables |= {id(v) for v in node.variables}
    variables |= {id(v) for v in node.variables if v.regularizer is not None}
  return variables


def FromModel(model: Any, x: Any = None) -> Graph:
  """Returns the graph of a model.

  A Functional or Sequential model has one already. The `call` of any other model is run once, on
  symbolic tensors: its layers and operations of keras.ops record themselves.

  Args:
    model: a keras.Model.
    x: specs or tensors `[batch, ...]` like the model's inputs, for a model without a graph.

  Raises:
    TypeError: it is not a keras.Model.
    ValueError: the model has no graph; the message names the line of `call` and the reason.
  """
  if not isinstance(model, keras.Model):
    raise TypeError(f'expected a keras.Model, got {type(model).__name__}')
  graph = _AsFunctional(model)
  if graph is not None:
    builder = _Builder()
    inputs = tuple(builder.NewValue(t) for t in graph.inputs)
    outputs = builder.Run(graph.outputs, _Environment(graph.inputs, inputs), model.dtype_policy)
    # Keras returns the only output of a list alone.
    structure = keras.tree.pack_sequence_as(graph.output, list(outputs))
    if isinstance(structure, (list, tuple)) and len(structure) == 1:
      structure = structure[0]
    return Graph(model, tuple(builder.nodes), inputs, tuple(outputs), structure, graph.input)
  if x is None:
    raise ValueError(
      f'{model.name} ({type(model).__name__}) has no graph of layers yet: call it on a batch, or '
      'pass an example of its inputs'
    )
  return _TraceCall(model, x)


def Sublayers(layer: Any) -> list[Any]:
  """Returns a Keras layer and all layers inside it."""
  return list(layer._flatten_layers()) if isinstance(layer, keras.Layer) else []


def MayAddLoss(layer: Any) -> bool:
  """Whether a call of a layer may add to the loss."""
  is_foreign = type(layer).__module__.split('.')[0] != 'keras'
  return is_foreign or layer.activity_regularizer is not None


def IsSeed(variable: Any) -> bool:
  """Whether a Keras variable is the state of a seed generator."""
  return bool(variable.name == 'seed_generator_state')


@contextlib.contextmanager
def WithoutValues() -> Iterator[None]:
  """Makes the variables of the enclosed Keras code without values, so that they need no memory.

  `Move` gives each its initial value, on the device where it stays.
  """
  with keras.StatelessScope(initialize_variables=False):
    yield
  # Keras would give all of them their values at the next occasion.
  global_state.set_global_attribute('uninitialized_variables', [])


@contextlib.contextmanager
def Replaced(owner: Any, **attributes: Any) -> Iterator[None]:
  """Gives an object, class or module other attributes while the enclosed code runs."""
  before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
  for name, value in attributes.items():
    setattr(owner, name, value)
  try:
    yield
  finally:
    for name in attributes:
      if name in before:
        setattr(owner, name, before[name])
      else:
        delattr(owner, name)


@contextlib.contextmanager
def WaitingForAssignments() -> Iterator[None]:
  """Lets the enclosed code wait until each value that it gives to a variable is there.

  Values on their way to workers would gather in this process.
  """
  assign = keras_backend.Variable._direct_assign

  def Assign(variable: Any, value: Any) -> None:
    assign(variable, value)
    variable.value.is_initialized().numpy()

  with Replaced(keras_backend.Variable, _direct_assign=Assign):
    yield


def SavingThroughFiles() -> contextlib.AbstractContextManager[None]:
  """Lets Keras write an archive from a file beside it, which it else puts together in memory."""
  return Replaced(saving_lib, is_memory_sufficient=lambda model: False)


def Move(variable: Any, device: str) -> tf.Variable:
  """Returns the tf.Variable behind a Keras variable, after moving it to a device.

  The Keras variable then reads and writes the new place, so the model, its callbacks and its files
  continue with the same object; the memory at the old place is freed. A variable that is on the
  device already stays as it is.
  """
  if variable._value is None:
    with tf.init_scope(), tf.device(device):
      variable._deferred_initialize()
    return variable._value
  old = variable.value
  place = tf.DeviceSpec.from_string(old.device)
  stays = place.make_merged_spec(tf.DeviceSpec.from_string(device)) == place
  if stays and old.trainable == variable.trainable:
    return old
  with tf.init_scope(), tf.device(device):
    variable._value = tf.Variable(old, trainable=variable.trainable, name=variable.name)
  variable._value._unique_id = old._unique_id  # By which optimizers know the variable.
  return variable._value


def Places(model: Any) -> list[tuple[Any, Any, bool]]:
  """Returns each variable of a model, the tf.Variable behind it, and whether it is trained."""
  return [(v, v._value, v.trainable) for v in model.variables]


def ForgetFunctions(model: Any) -> None:
  """Drops the functions that a model has traced with its variables at other places."""
  for layer in model._flatten_layers():
    for name in ('train_function', 'test_function', 'predict_function', 'generate_function'):
      if getattr(layer, name, None) is not None:
        setattr(layer, name, None)


def NumUpdates(optimizer: Any) -> Any:
  """Returns the count of an optimizer's steps, including steps that only accumulate gradients."""
  return getattr(optimizer, 'inner_optimizer', optimizer)._iterations


def GiveValues(model: Any) -> None:
  """Gives the variables of a model that have no values yet their initial ones, on the host."""
  for v in model.variables:
    if v._value is None:
      Move(v, '/device:CPU:0')


def MoveSlots(optimizer: Any, variables: Sequence[Any]) -> None:
  """Moves the slots of an optimizer that was built before to the devices of its variables."""
  inner = getattr(optimizer, 'inner_optimizer', None)
  if inner is not None:
    MoveSlots(inner, variables)
  if not optimizer.built:
    return
  places = {v.path.replace('/', '_'): v.value.device for v in variables}
  for slot in optimizer.variables:
    owner = [path for path in places if slot.name.startswith(f'{path}_')]
    if owner:
      Move(slot, places[max(owner, key=len)])


def CompileArguments(model: Any) -> dict[str, Any]:
  """Returns the arguments that a model was compiled with, defaults of its class included."""
  arguments = dict(model._compile_config.config)
  arguments['optimizer'] = model.optimizer
  return arguments


class _Environment(dict[int, Value]):
  """{id of a KerasTensor: Value}."""

  def __init__(self, tensors: Sequence[Any], values: Sequence[Value]) -> None:
    super().__init__({id(t): v for t, v in zip(tensors, values, strict=True)})


class _Builder:
  """Collects the calls of a model and of the models nested in it."""

  def __init__(self) -> None:
    self.nodes: list[Node] = []
    self._num_values = 0

  def NewValue(self, tensor: Any) -> Value:
    self._num_values += 1
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    return Value(self._num_values - 1, tuple(tensor.shape), dtype)

  def Run(
    self,
    outputs: Sequence[Any],
    environment: _Environment,
    policy: Any,
    training: bool | None = None,
    *,
    is_traced: bool = False,
  ) -> list[Value]:
    """Adds the calls that lead to some KerasTensors; returns their Values.

    Args:
      outputs: the KerasTensors.
      environment: the tensors that are known; grows.
      policy: the dtype policy of the model.
      training: the mode that the model was called with by an outer one; None: any.
      is_traced: whether the calls record the arguments of a `call`, whose `training` counts. In a
        Functional model the mode of the model overrides the mode of a layer's call.
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
          raise ValueError(f'the tensor {tensor.name} does not depend on the inputs of the model')
        stack.append((tensor, True))
        stack += [(t, False) for t in reversed(call.arguments.keras_tensors)]
        continue
      args, kwargs = call.arguments.fill_in(environment)
      kwargs = dict(kwargs)
      asked = kwargs.pop('training', None)
      mode = asked if is_traced and asked is not None else training
      values = self._Call(history.operation, args, kwargs, call.outputs, policy, mode)
      environment.update({id(t): v for t, v in zip(call.outputs, values, strict=True)})
    return [environment[id(t)] for t in outputs]

  def _Call(
    self,
    operation: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: Sequence[Any],
    policy: Any,
    training: bool | None,
  ) -> Sequence[Value]:
    """Adds one call: the node, or the nodes of a nested model."""
    graph = _AsFunctional(operation)
    inputs = None if graph is None else _NestedInputs(graph, args, kwargs)
    if graph is not None and inputs is not None:
      environment = _Environment(graph.inputs, inputs)
      return self.Run(graph.outputs, environment, operation.dtype_policy, training)
    if None in keras.tree.flatten(getattr(operation, 'newshape', ())):
      raise ValueError(f'{operation.name} reshapes to a size that is not known: use -1')
    if any(isinstance(x, tf.Variable) for x in keras.tree.flatten((args, kwargs))):
      raise ValueError(f'{operation.name} takes the value of a weight: pass the weight itself')
    values = tuple(self.NewValue(t) for t in outputs)
    self.nodes.append(Node(operation, args, kwargs, values, policy, training))
    return values


def _AsFunctional(model: Any) -> Any:
  """Returns the Functional that computes a model, if the model is one; else None."""
  if isinstance(model, keras.Sequential):
    is_plain = type(model).call is keras.Sequential.call
    return model._functional if is_plain and model.built else None
  is_functional = isinstance(model, keras_functional.Functional)
  return model if is_functional and type(model).call is keras_functional.Functional.call else None


def _NestedInputs(graph: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Value] | None:
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
  if len(flat) != len(names) or not all(isinstance(v, Value) for v in flat):
    return None
  for value, tensor in zip(flat, graph.inputs, strict=True):
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    if len(value.shape) != len(tensor.shape) or value.dtype != dtype:
      return None
  return flat


# ---- models without a graph ----------------------------------------------------------------------


def _TraceCall(model: Any, x: Any) -> Graph:
  """Returns the graph of a subclassed model, from its `call` on symbolic tensors."""

  def Symbol(t: Any) -> Any:
    dtype = keras.backend.standardize_dtype(t.dtype)
    if model.autocast and tf.as_dtype(dtype).is_floating:
      dtype = model.compute_dtype  # As Keras casts the arguments of a model.
    return keras.KerasTensor((None, *t.shape[1:]), dtype)

  def Trace(mode: bool | None) -> Graph:
    return _TraceMode(model, keras.tree.map_structure(Symbol, x), mode)

  if not model.built:
    model(keras.tree.map_structure(Symbol, x))  # Makes the variables, under the model's name.
  modes = [True, False] if 'training' in inspect.signature(model.call).parameters else [None]
  first = Trace(modes[0])
  with _OtherWeights():
    other = Trace(modes[0])
  if not _IsSameGraph(first, other):
    raise ValueError(
      f'{type(model).__name__}.call computes with the value of a weight, or draws random numbers, '
      'outside layers or in a layer that takes constants only, so that both would stay constant: '
      'pass the weight itself to keras.ops, or move the computation into a layer'
    )
  last = Trace(modes[-1])
  if not _IsSameGraph(first, last):
    raise ValueError(
      f'{type(model).__name__}.call does something else in training than in evaluation, so its '
      'layers are no fixed graph: move the choice into a layer that takes `training`'
    )
  # A mode that follows the argument is the mode of the whole model.
  nodes = tuple(
    dataclasses.replace(a, training=a.training if a.training == b.training else None)
    for a, b in zip(first.nodes, last.nodes, strict=True)
  )
  return dataclasses.replace(first, nodes=nodes)


def _TraceMode(model: Any, x: Any, mode: bool | None) -> Graph:
  flat = keras.tree.flatten(x)
  builder = _Builder()
  inputs = tuple(builder.NewValue(t) for t in flat)
  try:
    outputs = model.call(x) if mode is None else model.call(x, training=mode)
    tensors = keras.tree.flatten(outputs)
    for t in tensors:
      if not isinstance(t, keras.KerasTensor):
        raise TypeError(f'it returns a {type(t).__name__}')
    values = builder.Run(tensors, _Environment(flat, inputs), model.dtype_policy, is_traced=True)
  except Exception as e:
    raise ValueError(
      f'{type(model).__name__}.call cannot be traced{_Line(model, e)}: {e}. Its tensors may '
      'be passed to layers and keras.ops only; put other code into a keras.layers.Layer of its own'
    ) from e
  structure = keras.tree.pack_sequence_as(outputs, values)
  input_structure = keras.tree.pack_sequence_as(x, list(inputs))
  return Graph(model, tuple(builder.nodes), inputs, tuple(values), structure, input_structure)


def _Line(model: Any, error: Exception) -> str:
  """Returns the last line of the model's `call` that an error passed."""
  path = inspect.getsourcefile(type(model))
  frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
  return f' at line {frames[-1].lineno} of {path} ({frames[-1].line})' if frames else ''


class _OtherWeights(keras.StatelessScope):
  """Changes the values of all weights that code reads, so that a trace shows their use."""

  def get_current_value(self, variable: Any) -> Any:
    """Returns a value other than the present one; integers keep theirs."""
    value = super().get_current_value(variable)
    if value is None and variable._value is not None and variable._value.dtype.is_floating:
      value = variable._value + tf.ones([], variable._value.dtype)
    return value


def _IsSameGraph(a: Graph, b: Graph) -> bool:
  """Whether two traces of one model have the same calls and outputs."""
  is_equal = len(a.nodes) == len(b.nodes) and all(map(_IsSameCall, a.nodes, b.nodes))
  return is_equal and [v.index for v in a.outputs] == [v.index for v in b.outputs]


def _IsSameCall(a: Node, b: Node) -> bool:
  """Whether two traces of one model made the same call."""

  def Leaves(node: Node) -> Iterator[Any]:
    for leaf in keras.tree.flatten((node.args, node.kwargs)):
      if isinstance(leaf, Value):
        yield leaf.index
      else:
        yield leaf.numpy() if isinstance(leaf, tf.Tensor) else leaf

  is_layer = isinstance(a.operation, keras.Layer)
  if is_layer and a.operation is not b.operation:
    return False
  return keras_equality.AreEqual((a.operation, *Leaves(a)), (b.operation, *Leaves(b)))
