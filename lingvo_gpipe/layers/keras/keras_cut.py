# SPDX-License-Identifier: Apache-2.0
"""Cuts Keras models into lists of `KerasLayer`s, and copies weights in both directions.

model = keras.applications.MobileNetV2(weights=None)
p = pipelining_layer.PipeliningLayer.Params().Set(name='net', sub=keras_cut.Cut(model))
...
keras_cut.LoadWeights(stack.layers, model)
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Collection, Sequence
from typing import Any

import keras
import tensorflow as tf

from lingvo_gpipe.core import hyperparams, nested_map
from lingvo_gpipe.layers.keras import keras_config, keras_graph, keras_layer


@dataclasses.dataclass(frozen=True)
class _Part:
  """A piece of a Keras model, and the Keras layers for its `names`."""

  piece: keras_graph.Piece
  layers: tuple[Any, ...]


def Cut(
  model: Any, inputs: Sequence[keras_config.KerasInput] = (), *, after: Collection[str] = ()
) -> list[hyperparams.InstantiableParams]:
  """Returns the Params of a list of KerasLayers that together compute a Keras model.

  A keras.Sequential, or a list of layers, becomes one KerasLayer for each layer. A Functional model
  is cut wherever a single tensor connects the part before with the part after: parallel branches
  stay together, and so do all calls of a shared layer. Nested models are cut in the same way. The
  first KerasLayer takes all inputs of a Functional model as arguments, and the last KerasLayer
  returns all outputs as a tuple.

  Args:
    model: a keras.Sequential, a Functional keras.Model or a list of Keras layers. Its weights are
      ignored.
    inputs: the inputs of the first layer, if the Sequential or the list has not been built.
    after: names of Keras layers. If not empty, the model is cut only after these layers.

  Raises:
    TypeError: the model has another type.
    ValueError: the inputs are unknown, or the model cannot be cut after a layer in `after`.
  """
  return [params for params, _ in _Cells(model, inputs, after)]


def LoadWeights(
  layers: Sequence[Any],
  model: Any,
  inputs: Sequence[keras_config.KerasInput] = (),
  *,
  after: Collection[str] = (),
) -> None:
  """Sets the variables of KerasLayers to the weights of the model that they were cut from.

  Args:
    layers: a list, such as `stack.layers`, with the KerasLayers made from the result of `Cut`, in
      order; other layers in the list are skipped. Or a list with one KerasLayer for the whole
      model. The layers must have variables.
    model: the model, or another model that was built in the same way.
    inputs: the `inputs` passed to `Cut`.
    after: the `after` passed to `Cut`.

  Raises:
    ValueError: the layers do not match the model; no variable has been changed.
  """
  for ours, theirs in _Pairs(layers, model, inputs, after):
    ours.assign(tf.cast(tf.convert_to_tensor(theirs.value), ours.dtype))


def SaveWeights(
  layers: Sequence[Any],
  model: Any,
  inputs: Sequence[keras_config.KerasInput] = (),
  *,
  after: Collection[str] = (),
) -> None:
  """Sets the weights of the model to the variables of KerasLayers; the inverse of `LoadWeights`."""
  for ours, theirs in _Pairs(layers, model, inputs, after):
    theirs.assign(ours.numpy())


_Cell = tuple[hyperparams.InstantiableParams, list[_Part]]


def _Cells(
  model: Any, inputs: Sequence[keras_config.KerasInput], after: Collection[str]
) -> list[_Cell]:
  if isinstance(model, (list, tuple)):
    parts, policy = _Chain(model, inputs), model[0].dtype_policy.name
  elif isinstance(model, keras.Sequential):
    if not inputs and model.built:
      inputs = [_Spec(t) for t in model.inputs]
    parts, policy = _Chain(model.layers, inputs), model.dtype_policy.name
  elif isinstance(model, keras.Model) and _IsGraph(model):
    parts, policy = _Graph(model), model.dtype_policy.name
  else:
    raise TypeError(
      'expected a keras.Sequential, a Functional keras.Model or a list of Keras layers, got '
      f'{type(model).__name__}; a subclassed model is one cell: KerasLayer.FromKeras(model, ...)'
    )
  return [_MakeCell(group, policy) for group in _Group(parts, after)]


def _Group(parts: list[_Part], after: Collection[str]) -> list[list[_Part]]:
  if not after:
    return [[part] for part in parts]
  ends = [part.piece.last for part in parts]
  for name in after:
    if name not in ends[:-1]:
      close = difflib.get_close_matches(name, ends[:-1], n=3) or ends[:-1]
      raise ValueError(
        f'the model cannot be cut after a layer {name!r}; it can be cut after {", ".join(close)}'
      )
  groups: list[list[_Part]] = [[]]
  for part in parts:
    groups[-1].append(part)
    if part.piece.last in after:
      groups.append([])
  return groups


def _MakeCell(parts: list[_Part], policy: str) -> _Cell:
  pieces = [part.piece for part in parts]
  config = pieces[0].config
  if len(pieces) > 1:
    config = keras_graph.Join(pieces)
  params = keras_layer.KerasLayer.FromConfig(config, pieces[0].inputs, policy)
  params.custom_objects = keras_layer.CustomObjects([x for part in parts for x in part.layers])
  name = re.sub(r'\W', '_', pieces[-1].last).strip('_').lower()
  try:
    nested_map.NestedMap.CheckKey(name)
  except ValueError:
    name = f'layer_{name}'
  params.name = name
  return params, parts


# ---- parts of a model ---------------------------------------------------------------------------


def _Spec(tensor: Any) -> keras_config.KerasInput:
  return keras_config.KerasInput((None, *tensor.shape[1:]), tf.as_dtype(tensor.dtype).name)


def _IsGraph(layer: Any) -> bool:
  """Whether a Keras model is exactly the graph between its inputs and outputs."""
  # Only Keras's own classes: a subclass may define its own `call`.
  is_keras = type(layer).__module__.startswith('keras.')
  if not is_keras or isinstance(layer, keras.Sequential):
    return False
  return isinstance(layer, keras.Model) and bool(getattr(layer, 'inputs', None))


def _Graph(model: Any) -> list[_Part]:
  parts: list[_Part] = []
  by_name = {layer.name: layer for layer in model.layers}
  for piece in keras_graph.Cut(keras.saving.serialize_keras_object(model)):
    layers = tuple(by_name.get(name) for name in piece.names)
    if piece.is_graph:
      parts.append(_Part(piece, layers))
    else:
      parts += _Expand(layers[0], piece.inputs)
  return parts


def _Chain(layers: Sequence[Any], inputs: Sequence[keras_config.KerasInput]) -> list[_Part]:
  if not layers or not inputs:
    missing = 'layers' if not layers else 'inputs'
    raise ValueError(
      f'the {missing} of the Keras model are unknown; build it, or pass `inputs`, a KerasInput each'
    )
  parts: list[_Part] = []
  for layer in layers:
    parts += _Expand(layer, tuple(inputs))
    piece = parts[-1].piece
    params = keras_layer.KerasLayer.FromConfig(
      piece.config, piece.inputs, layer.dtype_policy.name
    ).Set(name=f'layer_{len(parts) - 1}', custom_objects=keras_layer.CustomObjects([layer]))
    inputs = [_Spec(t) for t in tf.nest.flatten(params.Instantiate().template.outputs)]
  return parts


def _Expand(layer: Any, inputs: tuple[keras_config.KerasInput, ...]) -> list[_Part]:
  """Returns the parts of a layer with one input; a model has several parts."""
  if isinstance(layer, keras.Sequential) and layer.layers:
    return _Chain(layer.layers, inputs)
  if _IsGraph(layer) and len(layer.inputs) == len(layer.outputs) == 1:
    return _Graph(layer)
  config = keras.saving.serialize_keras_object(layer)
  return [_Part(keras_graph.Piece(config, inputs, (layer.name,), layer.name), (layer,))]


# ---- weights -------------------------------------------------------------------------------------


def _Pairs(
  layers: Sequence[Any],
  model: Any,
  inputs: Sequence[keras_config.KerasInput],
  after: Collection[str],
) -> list[tuple[tf.Variable, Any]]:
  """Returns (our variable, Keras variable) for each weight."""
  cells = [layer for layer in layers if isinstance(layer, keras_layer.KerasLayer)]
  if len(cells) == 1 and isinstance(model, keras.layers.Layer):
    (layer,) = cells
    if layer.params.config == keras_layer.KerasLayer.FromKeras(model, inputs).config:
      return _PairWeights(layer, layer.template.cell.inner, model)
  expected = _Cells(model, inputs, after)
  if len(cells) != len(expected):
    raise ValueError(
      f'expected {len(expected)} KerasLayers, the number of cells of the model, got {len(cells)}; '
      'pass the same `after` as to Cut'
    )
  pairs = []
  for layer, (params, parts) in zip(cells, expected, strict=True):
    if layer.params.config != params.config:
      raise ValueError(f'{layer.path} does not match the layer {parts[-1].piece.last} of the model')
    inner = layer.template.cell.inner
    for part, target in zip(parts, inner.layers if len(parts) > 1 else [inner], strict=True):
      targets = [target]
      if part.piece.is_graph:
        children = keras_config.Canonicalise(part.piece.config, '')['config']['layers']
        names = [c['name'] for c in children if 'batch_shape' not in c['config']]
        by_name = {child.name: child for child in target.layers}
        targets = [by_name.get(name) for name in names]
      for copy, source in zip(targets, part.layers, strict=True):
        if source is not None:  # None is an operation, without weights.
          pairs += _PairWeights(layer, copy, source)
  return pairs


def _PairWeights(layer: keras_layer.KerasLayer, copy: Any, source: Any) -> list[tuple[Any, Any]]:
  """Returns the pairs of one Keras layer; `copy` was built from the configuration of `source`."""
  key_of = {id(v): key for key, v in layer.template.keys.items()}
  ours = [layer.VariableOf(key_of[id(w)]) for w in copy.weights if id(w) in key_of]
  if [v.shape for v in ours] != [w.shape for w in source.weights]:
    raise ValueError(
      f'{layer.path}: the weights of the Keras layer {source.name} have shapes '
      f'{[tuple(w.shape) for w in source.weights]}, expected {[tuple(v.shape) for v in ours]}; '
      'build the Keras layer first'
    )
  return list(zip(ours, source.weights, strict=True))
