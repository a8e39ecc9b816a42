# SPDX-License-Identifier: Apache-2.0
"""Keras models as lists of `KerasLayer`s, and their weights to and fro.

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
  """A piece of a Keras model, and the Keras layers that its `names` are those of."""

  piece: keras_graph.Piece
  layers: tuple[Any, ...]


def Cut(
  model: Any, inputs: Sequence[keras_config.KerasInput] = (), *, after: Collection[str] = ()
) -> list[hyperparams.InstantiableParams]:
  """The Params of a list of KerasLayers that together compute what a Keras model computes.

  A keras.Sequential, or a list of layers, becomes one KerasLayer a layer. A Functional model is cut
  wherever a single tensor leads from what is before to what is after: parallel branches stay
  together, and so do all calls of a layer that is called several times. Models within are cut
  likewise. The first KerasLayer takes all inputs of a Functional model as arguments, and the last
  one makes all its outputs as a tuple.

  Args:
    model: a keras.Sequential, a Functional keras.Model or a list of Keras layers. Its weights are
      not looked at.
    inputs: the inputs of the first layer, where a Sequential or a list does not know them.
    after: names of Keras layers. If there are any, cuts are made behind these only.

  Raises:
    TypeError: the model is none of these.
    ValueError: its inputs are not known, or a name in `after` is not that of the last layer before
      a possible cut.
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
    layers: a list with the KerasLayers of which `Cut` made the Params, in order, as `stack.layers`;
      other layers among them are passed over. Or a list with one KerasLayer for the whole model.
      They must have variables.
    model: the model, or one that was made in the same way.
    inputs: as given to `Cut`.
    after: as given to `Cut`.

  Raises:
    ValueError: the layers are not those of the model; nothing was set.
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
  """The opposite of `LoadWeights`: sets the weights of the model."""
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
  return [_MakeCell(group, policy) for group in _Grouped(parts, after)]


def _Grouped(parts: list[_Part], after: Collection[str]) -> list[list[_Part]]:
  if not after:
    return [[part] for part in parts]
  ends = [part.piece.last for part in parts]
  for name in after:
    if name not in ends[:-1]:
      close = difflib.get_close_matches(name, ends[:-1], n=3) or ends[:-1]
      raise ValueError(
        f'the model cannot be cut behind a layer {name!r}; possible are {", ".join(close)}'
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
    config = keras_graph.Joined(pieces)
  params = keras_layer.KerasLayer.FromConfig(config, pieces[0].inputs, policy)
  params.custom_objects = keras_layer.CustomObjects([x for part in parts for x in part.layers])
  name = re.sub(r'\W', '_', pieces[-1].last).strip('_').lower()
  try:
    nested_map.NestedMap.CheckKey(name)
  except ValueError:
    name = f'layer_{name}'
  params.name = name
  return params, parts


# ---- finding the parts ---------------------------------------------------------------------------


def _Spec(tensor: Any) -> keras_config.KerasInput:
  return keras_config.KerasInput((None, *tensor.shape[1:]), tf.as_dtype(tensor.dtype).name)


def _IsGraph(layer: Any) -> bool:
  """Whether a Keras model was made from inputs and outputs and computes nothing else."""
  # Only what Keras itself calls so: a subclass may have a `call` of its own.
  own = type(layer).__module__.startswith('keras.') and not isinstance(layer, keras.Sequential)
  return own and isinstance(layer, keras.Model) and bool(getattr(layer, 'inputs', None))


def _Graph(model: Any) -> list[_Part]:
  parts: list[_Part] = []
  by_name = {layer.name: layer for layer in model.layers}
  for piece in keras_graph.Cut(keras.saving.serialize_keras_object(model)):
    layers = tuple(by_name.get(name) for name in piece.names)
    if piece.is_graph:
      parts.append(_Part(piece, layers))
    else:
      parts += _Opened(layers[0], piece.inputs)
  return parts


def _Chain(layers: Sequence[Any], inputs: Sequence[keras_config.KerasInput]) -> list[_Part]:
  if not layers or not inputs:
    what = 'layers' if not layers else 'inputs'
    raise ValueError(
      f'the {what} of the Keras model are not known; build it, or give `inputs`, a KerasInput each'
    )
  parts: list[_Part] = []
  for layer in layers:
    parts += _Opened(layer, tuple(inputs))
    piece = parts[-1].piece
    params = keras_layer.KerasLayer.FromConfig(
      piece.config, piece.inputs, layer.dtype_policy.name
    ).Set(name=f'layer_{len(parts) - 1}', custom_objects=keras_layer.CustomObjects([layer]))
    inputs = [_Spec(t) for t in tf.nest.flatten(params.Instantiate().template.outputs)]
  return parts


def _Opened(layer: Any, inputs: tuple[keras_config.KerasInput, ...]) -> list[_Part]:
  """The parts of a layer of one input: several where it is a model."""
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
  """(variable of ours, variable of Keras's) for each weight."""
  own = [layer for layer in layers if isinstance(layer, keras_layer.KerasLayer)]
  if len(own) == 1 and isinstance(model, keras.layers.Layer):
    (layer,) = own
    if layer.params.config == keras_layer.KerasLayer.FromKeras(model, inputs).config:
      return _InOrder(layer, layer.template.cell.inner, model)
  cells = _Cells(model, inputs, after)
  if len(own) != len(cells):
    raise ValueError(
      f'the model is cut into {len(cells)} KerasLayers, but {len(own)} are given; '
      'give `after` as it was given to Cut'
    )
  pairs = []
  for layer, (params, parts) in zip(own, cells, strict=True):
    if layer.params.config != params.config:
      raise ValueError(f'{layer.path} is not {parts[-1].piece.last}, which the model has there')
    inner = layer.template.cell.inner
    for part, target in zip(parts, inner.layers if len(parts) > 1 else [inner], strict=True):
      targets = [target]
      if part.piece.is_graph:
        children = keras_config.Canonical(part.piece.config, '')['config']['layers']
        names = [c['name'] for c in children if 'batch_shape' not in c['config']]
        by_name = {child.name: child for child in target.layers}
        targets = [by_name.get(name) for name in names]
      for made, source in zip(targets, part.layers, strict=True):
        if source is not None:  # None is an operation, without weights.
          pairs += _InOrder(layer, made, source)
  return pairs


def _InOrder(layer: keras_layer.KerasLayer, made: Any, source: Any) -> list[tuple[Any, Any]]:
  """The pairs of one Keras layer: `made` from the same configuration as `source`."""
  key_of = {id(v): key for key, v in layer.template.keys.items()}
  ours = [layer.VariableOf(key_of[id(w)]) for w in made.weights if id(w) in key_of]
  if [v.shape for v in ours] != [w.shape for w in source.weights]:
    raise ValueError(
      f'{layer.path}: the weights of the Keras layer {source.name} are of shapes '
      f'{[tuple(w.shape) for w in source.weights]}, expected {[tuple(v.shape) for v in ours]}; '
      'is it built?'
    )
  return list(zip(ours, source.weights, strict=True))
