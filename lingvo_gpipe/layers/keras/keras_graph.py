# SPDX-License-Identifier: Apache-2.0
"""The graph of a live Keras model, nested models and large layers opened."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from lingvo_gpipe.layers.keras import keras_equality, keras_nodes, keras_trace


def FromModel(model: Any, x: Any = None) -> keras_nodes.Graph:
  """Returns the graph of a model.

  A Functional or Sequential model has one already. The `call` of any other model is run once, on
  symbolic tensors: its layers and operations of keras.ops record themselves.

  Args:
    model: a keras.Model. Unless it is built, its variables are made, as Keras does before `fit`.
    x: specs or tensors `[batch, ...]` like the model's inputs, for a model without a graph.

  Raises:
    TypeError: it is not a keras.Model.
    ValueError: the model has no graph; the message names the line of `call` and the reason. Or it
      has an activity regularizer, which only layers inside it may have.
  """
  if not isinstance(model, keras.Model):
    raise TypeError(f'expected a keras.Model, got {type(model).__name__}')
  if model.activity_regularizer is not None:
    raise ValueError(
      f'{model.name} has an activity regularizer: give it to the layer that makes the output'
    )
  if not model.built and x is not None:
    with keras_trace.NamingTheLine(model):
      model(keras_trace.Symbols(model, x))  # Makes the variables, under the model's name.
  graph = keras_nodes.AsFunctional(model)
  if graph is not None:
    return _FromFunctional(model, graph)
  if x is None:
    raise ValueError(
      f'{model.name} ({type(model).__name__}) has no graph of layers yet: call it on a batch, or '
      'pass an example of its inputs'
    )
  symbols = (keras_trace.Symbols(model, x),)
  return keras_trace.Trace(model, symbols, {}, keras_trace.Modes(model))


def _FromFunctional(model: Any, graph: Any) -> keras_nodes.Graph:
  """Returns the graph of a model, from the Functional that computes it."""
  builder = keras_trace.Builder()
  inputs = tuple(builder.NewValue(t) for t in graph.inputs)
  environment = keras_trace.Environment(graph.inputs, inputs)
  outputs = builder.Run(graph.outputs, environment, model.dtype_policy)
  # If a list has a single output, Keras returns just that output.
  structure = keras.tree.pack_sequence_as(graph.output, list(outputs))
  if isinstance(structure, (list, tuple)) and len(structure) == 1:
    structure = structure[0]
  return keras_nodes.Graph(
    model, tuple(builder.nodes), inputs, tuple(outputs), structure, graph.input
  )


def CheckSizes(graph: keras_nodes.Graph, x: Any) -> None:
  """Raises ValueError if a model computes with a size that its graph does not know.

  Args:
    graph: the graph of a subclassed model, of inputs with unknown sizes, before layers are opened.
    x: tensors `[batch, ...]` like the model's inputs.
  """
  model = graph.model
  symbols, mode = (keras_trace.Symbols(model, x),), keras_trace.Modes(model)[0]
  with keras.StatelessScope():
    other = keras_trace.TraceMode(model, symbols, {}, mode, graph.unknown_axes)
  if (line := keras_trace.Difference(graph, other)) is not None:
    raise ValueError(
      f'{type(model).__name__}.call computes with a length{line}, which is another in this batch '
      'than before: use ops.shape(x) for x.shape, or pad all sequences to one length'
    )


# ---- layers that are opened ----------------------------------------------------------------------


def OpenLayers(graph: keras_nodes.Graph, num_stages: int) -> keras_nodes.Graph:
  """Returns a graph in which the calls inside large layers of users replace these layers.

  Args:
    graph: the graph.
    num_stages: a layer is large if it has more weights than half of a stage.
  """
  opener = _Opener(graph, 1 / (2 * num_stages))
  inputs = tuple(map(opener.NewValue, graph.inputs))
  environment = dict(zip(graph.inputs, inputs, strict=True))
  opener.Add(graph.nodes, environment)
  if not opener.is_open:
    return dataclasses.replace(graph, closed=opener.closed)
  to_new = functools.partial(_ReplaceValues, environment=environment)
  return dataclasses.replace(
    graph,
    nodes=tuple(opener.nodes),
    inputs=inputs,
    outputs=tuple(environment[v] for v in graph.outputs),
    output_structure=to_new(graph.output_structure),
    input_structure=to_new(graph.input_structure),
    closed=opener.closed,
  )


def _ReplaceValues(nest: Any, environment: dict[keras_nodes.Value, keras_nodes.Value]) -> Any:
  return keras.tree.map_structure(
    lambda x: environment[x] if isinstance(x, keras_nodes.Value) else x, nest
  )


class _Opener:
  """Copies the calls of a graph, opening layers.

  Attributes:
    nodes: the calls.
    closed: {name: reason} of the large layers that could not be opened.
    is_open: whether a layer was opened.
  """

  def __init__(self, graph: keras_nodes.Graph, share: float) -> None:
    self.nodes: list[keras_nodes.Node] = []
    self.closed: dict[str, str] = {}
    self.is_open = False
    self._num_values = 0
    weights = {id(v): v for node in graph.nodes for v in node.variables}
    self._large = share * _NumWeights(weights.values())
    layers = [x for node in graph.nodes for x in keras_nodes.Sublayers(node.operation)]
    self._has_masks = any(map(_MakesMasks, layers))

  def NewValue(self, value: keras_nodes.Value) -> keras_nodes.Value:
    """Returns a Value like another, with the next index."""
    self._num_values += 1
    return dataclasses.replace(value, index=self._num_values - 1)

  def Add(
    self,
    nodes: Sequence[keras_nodes.Node],
    environment: dict[keras_nodes.Value, keras_nodes.Value],
    training: bool | None = None,
  ) -> None:
    """Adds calls.

    Args:
      nodes: the calls.
      environment: the new Values of their inputs; of their outputs when this returns.
      training: the mode of the layer that is opened.
    """
    for node in nodes:
      args, kwargs = _ReplaceValues((node.args, node.kwargs), environment)
      mode = training if node.training is None else node.training
      node = dataclasses.replace(node, args=args, kwargs=kwargs, training=mode)
      graph = self._GraphInside(node)
      if graph is None:
        outputs = tuple(map(self.NewValue, node.outputs))
        self.nodes.append(dataclasses.replace(node, outputs=outputs))
      else:
        self.is_open = True
        inside = dict(zip(graph.inputs, node.inputs, strict=True))
        self.Add(graph.nodes, inside, mode)
        outputs = tuple(inside[v] for v in graph.outputs)
      environment.update(zip(node.outputs, outputs, strict=True))

  def _GraphInside(self, node: keras_nodes.Node) -> keras_nodes.Graph | None:
    """Returns the graph of the layer that a call is of; None if it stays closed."""
    layer = node.operation
    if not _IsComposite(layer) or _NumWeights(layer.variables) <= self._large:
      return None
    try:
      if self._has_masks:  # The inner calls alone might lose masks that Keras sets.
        raise ValueError('the model has masks')
      return _TraceInside(node)
    except (TypeError, ValueError) as e:
      self.closed[layer.name] = str(e)
      return None


def _MakesMasks(layer: Any) -> bool:
  is_foreign = not keras_equality.IsOfKeras(type(layer))
  overrides = type(layer).compute_mask not in (keras.Layer.compute_mask, keras.Model.compute_mask)
  is_masking = isinstance(layer, keras.layers.Masking) or getattr(layer, 'mask_zero', False)
  sets = is_foreign and keras_equality.Reads(type(layer), {'_keras_mask', 'set_keras_mask'})
  return bool(is_masking or sets or (is_foreign and overrides))


def _NumWeights(variables: Iterable[Any]) -> int:
  return sum(math.prod(v.shape) for v in variables)


def _IsComposite(layer: Any) -> bool:
  """Whether a layer of a user has several layers with weights inside."""
  if not isinstance(layer, keras.Layer) or keras_equality.IsOfKeras(type(layer)):
    return False
  inside = keras_nodes.Sublayers(layer)[1:]
  return sum(bool(x.variables) and not keras_nodes.Sublayers(x)[1:] for x in inside) > 1


def _TraceInside(node: keras_nodes.Node) -> keras_nodes.Graph:
  """Returns the graph of the layer that a call is of.

  Raises:
    ValueError: the graph would not compute what the layer does.
  """
  layer = node.operation
  if reason := _WhyClosed(node):
    raise ValueError(f'it {reason}')
  modes = [True, False] if node.training is None else [node.training]
  args, kwargs = keras.tree.map_structure(_Symbol, (node.args, node.kwargs))
  graph = keras_trace.Trace(layer, args, kwargs, modes)
  if [(v.shape, v.dtype) for v in graph.outputs] != [(v.shape, v.dtype) for v in node.outputs]:
    raise ValueError('its traced outputs have other shapes or dtypes')
  return graph


def _Symbol(x: Any) -> Any:
  return keras.KerasTensor(x.shape, x.dtype) if isinstance(x, keras_nodes.Value) else x


def _WhyClosed(node: keras_nodes.Node) -> str:
  """Returns why the calls inside a layer would not do all its work; '' if they would."""
  layer = node.operation
  floats = {v.dtype for v in node.inputs if tf.as_dtype(v.dtype).is_floating}
  if layer.supports_masking:
    return 'hands on masks'
  if any(v.shape[:1] != (None,) or None in v.shape[1:] for v in node.inputs):
    return 'has inputs with unknown dimensions other than the batch'
  if any(set(x._call_context_args) - {'training'} for x in keras_nodes.Sublayers(layer)):
    return 'has context arguments other than `training`'
  if layer.autocast and not floats <= {layer.compute_dtype}:
    return f'casts its inputs to {layer.compute_dtype}'
  if layer.activity_regularizer is not None:
    return 'has an activity regularizer'
  if not layer.supports_jit:
    return 'has supports_jit=False'
  if type(layer).__call__ not in (keras.Layer.__call__, keras.Model.__call__):
    return 'overrides __call__'
  if node.training is False and any(map(_TrainsByDefault, keras_nodes.Sublayers(layer))):
    return 'has layers that train by default'
  return ''


def _TrainsByDefault(layer: Any) -> bool:
  parameter = inspect.signature(layer.call).parameters.get('training')
  return parameter is not None and parameter.default is True
