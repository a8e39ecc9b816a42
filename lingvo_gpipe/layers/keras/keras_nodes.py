# SPDX-License-Identifier: Apache-2.0
"""The calls of the layers and operations of a Keras model, and questions about them.

The layers are the model's own objects, never copies made from their configurations: state that a
configuration lacks (frozen sublayers, LoRA, quantisation, adapted statistics) stays as it is.

Keras has no public way to list the layers inside a layer. So this file uses private attributes of
Keras: `Functional._standardize_inputs`, `Sequential._functional` and `Layer._flatten_layers`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.models import functional as keras_functional

from lingvo_gpipe.layers.keras import keras_functions

# Operations that TensorFlow has no gradient for, although their outputs are floating.
_CUTTING = ('Ceil', 'Floor', 'Rint', 'Round', 'Sign', 'StopGradient', 'Trunc')
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
    operation: the live Keras layer, or an operation of keras.ops, or a keras_functions.Function.
    args: the arguments of the call, with a Value for each tensor.
    kwargs: the named arguments.
    outputs: the tensors that the call makes, flat.
    policy: the dtype policy of the model whose graph has the call.
    training: the mode that the call asks for; None: the mode of the whole model.
    line: the line of a subclassed model's `call` that makes it, for errors; otherwise empty.
  """

  operation: Any
  args: tuple[Any, ...]
  kwargs: dict[str, Any]
  outputs: tuple[Value, ...]
  policy: Any
  training: bool | None = None
  line: str = ''

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
    unknown_axes: of a traced graph; see keras_symbols.Record.
    closed: {name: reason} of the large layers that could not be opened.
  """

  model: Any
  nodes: tuple[Node, ...]
  inputs: tuple[Value, ...]
  outputs: tuple[Value, ...]
  output_structure: Any
  input_structure: Any
  unknown_axes: Sequence[Sequence[int]] = ()
  closed: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def FlatInputs(self, x: Any) -> list[Any]:
    """Returns the input tensors in the order of `inputs`, cast and reshaped as Keras does.

    Args:
      x: tensors `[batch, ...]` as Keras's `fit` takes them: one, a list, or a dict by the keys of
        the model's inputs if they are a dict, otherwise by their names.

    Raises:
      ValueError: the inputs have another structure, or sizes that a Functional model refuses.
    """
    graph = AsFunctional(self.model)
    if graph is not None and isinstance(x, dict):
      # A model that was made with a dict has its keys, which may differ from the names of tensors.
      by_key = isinstance(graph.input, dict)
      names = set(graph.input if by_key else (t.name for t in self.model.inputs))
      if missing := sorted(names - x.keys()):
        raise ValueError(f'{self.model.name} needs the inputs {sorted(names)}, missing: {missing}')
      if by_key:  # Keras would go by the order of all keys, unknown ones included.
        x = type(graph.input)((name, x[name]) for name in graph.input)
    if graph is not None:
      tensors = list(graph._standardize_inputs(x))
      if graph is self.model:  # As in Keras, a Sequential model takes other sizes.
        for t, v in zip(tensors, self.model.inputs, strict=True):
          if t is not None and not tf.TensorShape(v.shape[1:]).is_compatible_with(t.shape[1:]):
            raise ValueError(
              f'{self.model.name}: the input {v.name} has the shape {tuple(t.shape)}, expected '
              f'{v.shape}'
            )
      return tensors
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
    if AsFunctional(self.model) is not None or len(flat) != len(self.inputs):
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


def MayCutGradients(graph: Graph) -> bool:
  """Whether a gradient may end at a call: at an operation, or in a layer of the user."""

  def MayCut(node: Node) -> bool:
    if isinstance(node.operation, keras.Layer):
      return any(_MayStopGradients(type(layer).__module__) for layer in Sublayers(node.operation))
    if isinstance(node.operation, keras_functions.Function) and not node.operation.is_smooth:
      return True
    is_float = all(tf.as_dtype(v.dtype).is_floating for v in node.outputs)
    return not is_float or type(node.operation).__name__ in _CUTTING

  return any(map(MayCut, graph.nodes))


@functools.cache
def _MayStopGradients(module: str) -> bool:
  """Whether a layer of a module may stop gradients to its weights; Keras's own do not."""
  package = module.split('.')[0]
  if package == 'keras_hub':
    return 'stop_gradient' in inspect.getsource(sys.modules[module])
  return package != 'keras'


def ConnectedVariables(graph: Graph, outputs: Sequence[Value]) -> set[int]:
  """Returns the ids of the trained variables that some outputs, or losses of layers, depend on.

  Traces the gradient of the whole model.
  """
  variables = graph.model.trainable_variables
  connected: set[int] = set()

  def Trace(x: Any) -> None:
    with tf.GradientTape() as tape:
      flat = keras.tree.flatten(graph.model(x, training=True))
      pairs = zip(graph.outputs, flat, strict=True)
      objective = [t for v, t in pairs if v in outputs and t.dtype.is_floating]
      objective += graph.model.losses
    gradients = tape.gradient(objective, [v.value for v in variables])
    connected.update(
      id(v) for v, gradient in zip(variables, gradients, strict=True) if gradient is not None
    )

  spec = keras.tree.map_structure(lambda v: tf.TensorSpec(v.shape, v.dtype), graph.input_structure)
  tf.function(Trace, autograph=False).get_concrete_function(spec)
  return connected


def Sublayers(layer: Any) -> list[Any]:
  """Returns a Keras layer and all layers inside it."""
  return list(layer._flatten_layers()) if isinstance(layer, keras.Layer) else []


def MayAddLoss(layer: Any) -> bool:
  """Whether a call of a layer may add to the loss."""
  is_foreign = type(layer).__module__.split('.')[0] != 'keras'
  return is_foreign or layer.activity_regularizer is not None


def AsFunctional(model: Any) -> Any:
  """Returns the Functional that computes a model, if the model is one, or None."""
  if isinstance(model, keras.Sequential):
    is_plain = type(model).call is keras.Sequential.call
    return model._functional if is_plain and model.built else None
  is_functional = isinstance(model, keras_functional.Functional)
  return model if is_functional and type(model).call is keras_functional.Functional.call else None
