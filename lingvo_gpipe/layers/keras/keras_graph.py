# SPDX-License-Identifier: Apache-2.0
"""Cuts the serialised graph of a Functional Keras model wherever a single tensor crosses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lingvo_gpipe.layers.keras import keras_config


@dataclasses.dataclass(frozen=True)
class Piece:
  """A part of a model that a single tensor connects to each neighbouring part.

  Attributes:
    config: a serialised layer, or a Functional model of several layers.
    inputs: the inputs of the piece.
    names: names of its layers in the model, in the order of config's layers without inputs; one
      name if the piece is a layer.
    last: name of the layer that makes the piece's output.
  """

  config: dict[str, Any]
  inputs: tuple[keras_config.KerasInput, ...]
  names: tuple[str, ...]
  last: str

  @property
  def is_graph(self) -> bool:
    """Whether config is a Functional model of several layers."""
    return self.config['class_name'] == _MODEL


@dataclasses.dataclass(frozen=True)
class _Call:
  """One call of a layer: the name of the layer, the index of the call, and its arguments."""

  name: str
  index: int
  arguments: dict[str, Any]

  @property
  def uses(self) -> list[keras_config.Reference]:
    return [tuple(t['keras_history']) for t in keras_config.Tensors(self.arguments)]


_MODEL = 'Model'


def Cut(model: Mapping[str, Any]) -> list[Piece]:
  """Returns the pieces of a serialised Functional model.

  All calls of a shared layer are in one piece. The first piece takes all inputs of the model, and
  the last piece returns all its outputs.
  """
  config = model['config']
  layers = {layer['name']: layer for layer in config['layers']}
  inputs = keras_config.References(config['input_layers'])
  outputs = [
    (name, index - _CallOffset(layers[name]), i)
    for name, index, i in keras_config.References(config['output_layers'])
  ]
  calls = _SortCalls(layers, inputs)
  pieces = []
  begin, entering = 0, inputs
  for end in range(1, len(calls) + 1):
    later = calls[end:]
    leaving = _LiveTensors(later, outputs) if later else outputs
    shared = {c.name for c in calls[begin:end]} & {c.name for c in later}
    if later and (len(leaving) != 1 or shared or leaving[0] in inputs):
      continue
    pieces.append(_MakePiece(layers, calls[begin:end], entering, leaving))
    begin, entering = end, leaving
  return pieces


def _CallOffset(layer: Mapping[str, Any]) -> int:
  """Returns the number that Keras adds to the index of a call in a model's outputs.

  A Functional model has been called once before, to build it. Keras counts that call in
  `output_layers`, but not in `inbound_nodes`.
  """
  return int(keras_config.IsFunctional(layer))


def _SortCalls(layers: Mapping[str, Any], inputs: Sequence[keras_config.Reference]) -> list[_Call]:
  """Returns all calls in topological order."""
  waiting = [
    _Call(name, i, arguments)
    for name, layer in layers.items()
    for i, arguments in enumerate(layer['inbound_nodes'])
  ]
  available = {r[:2] for r in inputs}
  ordered: list[_Call] = []
  while waiting:
    ready = [c for c in waiting if all(r[:2] in available for r in c.uses)]
    if not ready:
      raise ValueError(f'no layer of the Keras model makes one of the tensors {waiting[0].uses}')
    # One call at a time, which follows each chain to its end before starting the next.
    waiting.remove(ready[0])
    available.add((ready[0].name, ready[0].index))
    ordered.append(ready[0])
  return ordered


def _LiveTensors(
  later: Sequence[_Call], outputs: Sequence[keras_config.Reference]
) -> list[keras_config.Reference]:
  """Returns the tensors made before the `later` calls that these use, or that are outputs."""
  made_later = {(c.name, c.index) for c in later}
  used = dict.fromkeys(r for c in later for r in c.uses) | dict.fromkeys(outputs)
  return [r for r in used if r[:2] not in made_later]


def _MakePiece(
  layers: Mapping[str, Any],
  calls: Sequence[_Call],
  entering: Sequence[keras_config.Reference],
  leaving: Sequence[keras_config.Reference],
) -> Piece:
  specs = {
    tuple(t['keras_history']): keras_config.KerasInput((None, *t['shape'][1:]), t['dtype'])
    for call in calls
    for t in keras_config.Tensors(call.arguments)
  }
  inputs = tuple(specs[r] for r in entering)
  names = tuple(dict.fromkeys(c.name for c in calls))
  last = calls[-1]
  if len(calls) == 1 and _IsPlain(layers[last.name], last):
    layer = {k: v for k, v in layers[last.name].items() if k not in ('name', 'inbound_nodes')}
    return Piece(copy.deepcopy(layer), inputs, names, last.name)

  sources = [InputLayer(spec, f'input_{i}') for i, spec in enumerate(inputs)]
  graph = {
    'name': 'model',
    'trainable': True,
    'layers': sources + [copy.deepcopy(layers[name]) for name in names],
    'input_layers': _OneOrMore([[f'input_{i}', 0, 0] for i in range(len(inputs))]),
  }
  new = {r: (f'input_{i}', 0, 0) for i, r in enumerate(entering)}
  keras_config.MapReferences(graph, lambda r: new.get(r, r))
  outputs = [[name, index + _CallOffset(layers[name]), i] for name, index, i in leaving]
  graph['output_layers'] = _OneOrMore(outputs)
  config = {'module': 'keras', 'class_name': _MODEL, 'config': graph, 'registered_name': None}
  return Piece(config, inputs, names, last.name)


def Join(pieces: Sequence[Piece]) -> dict[str, Any]:
  """Joins consecutive pieces into one serialised Sequential model.

  Raises:
    ValueError: the first piece takes several inputs, which a Sequential model cannot do.
  """
  if len(pieces[0].inputs) != 1:
    raise ValueError(
      f'the Keras model takes {len(pieces[0].inputs)} inputs up to {pieces[0].last}; cut after it'
    )
  layers = [InputLayer(pieces[0].inputs[0], 'input'), *(p.config for p in pieces)]
  config = {'name': 'sequential', 'trainable': True, 'layers': layers}
  return {'module': 'keras', 'class_name': 'Sequential', 'config': config, 'registered_name': None}


def InputLayer(spec: keras_config.KerasInput, name: str) -> dict[str, Any]:
  """Returns the serialised layer that stands for an input in a Keras model."""
  return {
    'module': 'keras.layers',
    'class_name': 'InputLayer',
    'config': {'batch_shape': list(spec.shape), 'dtype': spec.dtype, 'name': name},
    'registered_name': None,
    'name': name,
    'inbound_nodes': [],
  }


def _OneOrMore(values: list[Any]) -> Any:
  # For a list with one element, Keras's symbolic call would return a list.
  return values[0] if len(values) == 1 else values


def _IsPlain(layer: Mapping[str, Any], call: _Call) -> bool:
  """Whether a call takes a single tensor only, so that the layer needs no graph."""
  arguments = call.arguments['args']
  return (
    'trainable' in layer['config']
    and len(arguments) == 1
    and isinstance(arguments[0], dict)
    and arguments[0].get('class_name') == '__keras_tensor__'
    and all(value is None for value in call.arguments['kwargs'].values())
  )
