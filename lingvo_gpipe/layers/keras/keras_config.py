# SPDX-License-Identifier: Apache-2.0
"""Canonical configurations of Keras layers and models: equal layers have equal configurations.

Works on the results of `keras.saving.serialize_keras_object`, which are plain dicts, lists and
values; does not build any layer.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

# (name of the layer, index of its call, index of the call's output).
Reference = tuple[str, int, int]


@dataclasses.dataclass(frozen=True)
class KerasInput:
  """Shape, with a batch dimension of None, and dtype of one input.

  Any floating dtype stands for the layer's fprop_dtype.
  """

  shape: tuple[int | None, ...]
  dtype: str = 'float32'


def IsFunctional(config: Mapping[str, Any]) -> bool:
  """Whether a configuration is of a Functional model, a graph of layers."""
  return isinstance(config.get('config'), dict) and 'input_layers' in config['config']


def Canonicalise(config: Mapping[str, Any], policy: str) -> dict[str, Any]:
  """Returns a copy that does not depend on the process, or on the names of layers.

  Equal blocks of a network get equal configurations: layers are named after their class and
  numbered within each model, `policy` and the floating dtypes of inputs are replaced by None, and
  the shapes and compilation options that Keras adds are removed.
  """
  result = _Strip(config, policy)
  _Rename(result, _ClassName(result))
  return result


def WithPolicy(config: Any, policy: Any) -> Any:
  """Returns a copy with the dtypes of a keras.DTypePolicy for the Nones of `Canonicalise`."""
  if isinstance(config, (list, tuple)):
    return [WithPolicy(part, policy) for part in config]
  if not isinstance(config, dict):
    return config
  config = {key: WithPolicy(part, policy) for key, part in config.items()}
  if 'name' in config and config.get('dtype', '') is None:
    if 'batch_shape' in config:
      config['dtype'] = policy.compute_dtype
    elif 'trainable' in config:
      config['dtype'] = policy.name
  return config


def Objects(config: Any) -> Iterator[dict[str, Any]]:
  """Yields all serialised objects with a configuration, outer objects first, to change in place."""
  if isinstance(config, (list, tuple)):
    for part in config:
      yield from Objects(part)
  elif isinstance(config, dict):
    if 'class_name' in config and isinstance(config.get('config'), dict):
      yield config
    for part in config.values():
      yield from Objects(part)


def _Strip(config: Any, policy: str) -> Any:
  if isinstance(config, (list, tuple)):
    return [_Strip(part, policy) for part in config]
  if not isinstance(config, dict):
    return copy.deepcopy(config)
  dropped = ('build_config', 'compile_config') if 'class_name' in config else ()
  config = {k: _Strip(part, policy) for k, part in config.items() if k not in dropped}
  if 'name' in config:
    dtype = config.get('dtype')
    if isinstance(dtype, dict) and dtype.get('config') == {'name': policy}:
      config['dtype'] = None
    if 'batch_shape' in config:
      config['batch_shape'] = [None, *config['batch_shape'][1:]]
      if isinstance(dtype, str) and tf.as_dtype(dtype).is_floating:
        config['dtype'] = None
  return config


def _ClassName(config: Mapping[str, Any]) -> str:
  """Returns the class name in snake case, such as `layer_normalization`."""
  name = re.sub(r'\W', '_', config['class_name'])
  return re.sub(r'(?<=[a-z])(?=[A-Z])', '_', name).lower()


def _Rename(config: dict[str, Any], name: str) -> None:
  """Renames a layer, and the layers of a Functional or Sequential model, in place."""
  inner = config['config']
  for part in (config, inner):
    if 'name' in part:
      part['name'] = name
  if not (IsFunctional(config) or config['class_name'] == 'Sequential'):
    return
  counts: dict[str, int] = collections.Counter()
  names = {}
  for part in inner['layers']:
    old, new = part.get('name') or part['config']['name'], _ClassName(part)
    names[old] = f'{new}_{counts[new]}' if counts[new] else new
    counts[new] += 1
    _Rename(part, names[old])
  if IsFunctional(config):
    MapReferences(inner, lambda r: (names[r[0]], *r[1:]))


def MapReferences(config: Any, fn: Callable[[Reference], Reference]) -> None:
  """Replaces, in place, each tensor reference in the graph of one Functional configuration."""
  for key in ('input_layers', 'output_layers'):
    if key in config:
      config[key] = _MapNested(config[key], fn)
  for part in config['layers']:
    for call in part['inbound_nodes']:
      for tensor in Tensors(call):
        tensor['keras_history'] = list(fn(tuple(tensor['keras_history'])))


def References(value: Any) -> list[Reference]:
  """Returns the references in `input_layers` or `output_layers`."""
  if _IsReference(value):
    return [tuple(value)]
  parts = value.values() if isinstance(value, dict) else value
  return [r for part in parts for r in References(part)]


def _IsReference(value: Any) -> bool:
  return isinstance(value, (list, tuple)) and len(value) == 3 and isinstance(value[0], str)


def _MapNested(value: Any, fn: Callable[[Reference], Reference]) -> Any:
  if _IsReference(value):
    return list(fn(tuple(value)))
  if isinstance(value, dict):
    return {key: _MapNested(part, fn) for key, part in value.items()}
  return [_MapNested(part, fn) for part in value]


def Tensors(call: Any) -> Iterator[dict[str, Any]]:
  """Yields the tensors among the arguments of a call: dicts of shape, dtype and keras_history."""
  if isinstance(call, dict):
    if call.get('class_name') == '__keras_tensor__':
      yield call['config']
    else:
      for part in call.values():
        yield from Tensors(part)
  elif isinstance(call, (list, tuple)):
    for part in call:
      yield from Tensors(part)
