# SPDX-License-Identifier: Apache-2.0
"""Builds Keras layers from their configurations, without weights or with initial values.

The variables of a layer that is built in a keras.StatelessScope have a shape and dtype but allocate
no memory; `stateless_call` replaces them by tensors.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from lingvo_gpipe.core import nested_map
from lingvo_gpipe.layers.keras import keras_config, keras_dropout, keras_norm

_MIXED = {
  ('float32', 'bfloat16'): 'mixed_bfloat16',
  ('float32', 'float16'): 'mixed_float16',
}


class _Cell(keras.layers.Layer):
  """Calls another layer through `__call__`, which `stateless_call` of that layer would skip.

  `__call__` casts to the compute dtype, applies activity regularizers and masks, and passes
  `training` to nested layers.
  """

  def __init__(self, inner: Any) -> None:
    super().__init__(name='cell')
    self.inner = inner
    self.built = True

  def call(self, *args: Any, training: bool | None = None) -> Any:
    return CallKeras(self.inner, args, training)


def CallKeras(layer: Any, args: Sequence[Any], training: bool | None = None) -> Any:
  """Calls a Keras layer. A model with several inputs takes them as a list."""
  if isinstance(layer, keras.Model) and len(args) > 1:
    args = [list(args)]
  return layer(*args, training=training)


@dataclasses.dataclass(frozen=True)
class KerasNorm:
  """The moving averages and sums of one BatchNormalization.

  Attributes:
    mean: key of the moving mean.
    variance: key of the moving variance.
    momentum: share of a moving average that an update keeps.
    sums: {name: index in the layer's non_trainable_variables}.
  """

  mean: str
  variance: str
  momentum: float
  sums: dict[str, int]


class KerasTemplate:
  """A Keras layer without weights.

  Attributes:
    cell: calls the layer, `cell.inner`, by `cell.stateless_call`.
    keys: {key: Keras variable} of all weights.
    trainable: the key of each of `cell.trainable_variables`.
    state: the key of each of `cell.non_trainable_variables`; None for a variable that is not a
      weight.
    seeds: {index in `state`: number of the seed generator}.
    norms: the trainable BatchNormalizations.
    outputs: the symbolic outputs of the layer.
  """

  def __init__(self, cell: _Cell, norms: Sequence[Any], outputs: Any, path: str) -> None:
    self.cell = cell
    self.outputs = outputs
    sums = {id(v) for norm in norms for v in norm.batch_sums.values()}
    self.keys = _Keys([v for v in cell.weights if id(v) not in sums], cell.inner.name)
    key_of = {id(v): key for key, v in self.keys.items()}
    self.trainable = [key_of[id(v)] for v in cell.trainable_variables]
    self.state = [key_of.get(id(v)) for v in cell.non_trainable_variables]
    index_of = {id(v): i for i, v in enumerate(cell.non_trainable_variables)}
    seeds = [
      i
      for i, v in enumerate(cell.non_trainable_variables)
      if id(v) not in key_of and v.name == 'seed_generator_state'
    ]
    self.seeds = {i: n for n, i in enumerate(seeds)}
    self.norms = [
      KerasNorm(
        key_of[id(norm.moving_mean)],
        key_of[id(norm.moving_variance)],
        norm.momentum,
        {name: index_of[id(v)] for name, v in norm.batch_sums.items()},
      )
      for norm in norms
      if norm.trainable
    ]
    for i, v in enumerate(cell.non_trainable_variables):
      if self.state[i] is None and i not in self.seeds and id(v) not in sums:
        raise ValueError(
          f'{path}: the Keras layer has a variable {v.path!r} that is neither a weight nor the '
          'state of a seed generator (a metric?); it would not be updated'
        )
    for key, v in self.keys.items():
      if v.constraint is not None:
        raise ValueError(
          f'{path}: {key} has a Keras constraint, which is not applied here; remove it'
        )


def _Keys(variables: Sequence[Any], name: str) -> dict[str, Any]:
  """Returns {key: variable}, with valid, unique keys without the numbers that Keras counts up."""
  numbers: dict[tuple[str, str], dict[str, int]] = {}
  keys: dict[str, Any] = {}
  for v in variables:
    parts = v.path.split('/')
    if len(parts) > 1 and parts[0] == name:
      del parts[0]
    key = ''
    for part in parts:
      base = re.sub(r'(?<=.)_\d+$', '', part)
      seen = numbers.setdefault((key, base), {})
      number = seen.setdefault(part, len(seen))
      key = '_'.join(x for x in (key, base, str(number) if number else '') if x)
    key = re.sub(r'\W', '_', key)
    try:
      nested_map.NestedMap.CheckKey(key)
    except ValueError:
      key = f'w_{key.strip("_")}'
    number = 0
    while (f'{key}_{number}' if number else key) in keys:
      number += 1
    keys[f'{key}_{number}' if number else key] = v
  return keys


def PolicyName(dtype: tf.DType, fprop_dtype: tf.DType) -> str:
  """Returns the Keras policy for dtypes of weights and activations; ValueError if there is none."""
  if dtype == fprop_dtype:
    return dtype.name
  if (dtype.name, fprop_dtype.name) not in _MIXED:
    known = ', '.join(f'{a} and {b}' for a, b in _MIXED)
    raise ValueError(
      f'Keras has no dtype policy for weights in {dtype.name} and activations in '
      f'{fprop_dtype.name}; expected {known}, or equal dtypes'
    )
  return _MIXED[dtype.name, fprop_dtype.name]


@dataclasses.dataclass(frozen=True)
class KerasSource:
  """Everything that determines a Keras layer; hashable.

  Attributes:
    config: JSON of the result of `keras.saving.serialize_keras_object`. A dtype of null stands for
      the policy, or in an InputLayer for the compute dtype.
    inputs: the inputs of its call.
    policy: name of a Keras dtype policy.
    custom_objects: (name, class) of each class that Keras does not know.
  """

  config: str
  inputs: tuple[Any, ...]
  policy: str
  custom_objects: tuple[tuple[str, Any], ...] = ()

  @classmethod
  def FromParams(
    cls,
    config: Mapping[str, Any],
    inputs: Sequence[Any],
    policy: str,
    custom_objects: Mapping[str, Any],
  ) -> KerasSource:
    """Makes a source from the plain values in Params."""
    frozen = tuple(tuple(i) if isinstance(i, (list, tuple)) else i for i in inputs)
    return cls(json.dumps(config), frozen, policy, tuple(sorted(custom_objects.items())))


_templates: weakref.WeakValueDictionary[KerasSource, KerasTemplate] = weakref.WeakValueDictionary()


def Template(source: KerasSource, path: str) -> KerasTemplate:
  """Returns the Keras layer of a source, without weights; equal sources share a layer in use.

  Raises:
    ValueError: a pipeline does not support the layer; the message names the reason.
  """
  template = _templates.get(source)
  if template is None:
    try:
      # Constants are allocated, variables are not.
      with tf.init_scope(), keras.StatelessScope(initialize_variables=False):
        cell, norms, outputs = _Make(source, 0, path)
    finally:
      # Keras would initialise these variables on the next occasion. Have it do so in a graph that
      # never runs, in a name scope, in which any variable name is valid.
      with tf.Graph().as_default(), tf.name_scope('keras'), keras.StatelessScope():
        pass
    template = KerasTemplate(cell, norms, outputs, path)
    _templates[source] = template
  return template


def InitialValues(source: KerasSource, seed: int, path: str) -> dict[str, tf.Tensor]:
  """Returns {key: initial value} from Keras's initializers, determined by source and seed."""
  with tf.init_scope(), tf.device('/CPU:0'):
    template = KerasTemplate(*_Make(source, seed, path), path)
    return {key: tf.convert_to_tensor(v.value) for key, v in template.keys.items()}


def _Make(source: KerasSource, seed: int, path: str) -> tuple[_Cell, list[Any], Any]:
  """Returns the built layer in a cell, its BatchNormalizations, and its symbolic outputs."""
  policy = keras.DTypePolicy(source.policy)
  config = json.loads(source.config)
  for part in keras_config.Objects(config):
    keras_norm.Convert(part, path)
    keras_dropout.Convert(part)
  config = keras_config.WithPolicy(config, policy)
  custom_objects = {
    **dict(source.custom_objects),
    **keras_norm.CUSTOM_OBJECTS,
    **keras_dropout.CUSTOM_OBJECTS,
  }

  _CheckModules(config, custom_objects, path)

  def Symbol(spec: keras_config.KerasInput) -> keras.KerasTensor:
    dtype = tf.as_dtype(spec.dtype)
    return keras.KerasTensor(spec.shape, policy.compute_dtype if dtype.is_floating else dtype.name)

  # Initializers without a seed take one from Python's random generator.
  state = random.getstate()
  random.seed(seed)
  try:
    with keras_norm.Collect() as norms:
      layer = keras.saving.deserialize_keras_object(config, custom_objects=custom_objects)
      args = [_MapInputs(Symbol, i) for i in source.inputs]
      outputs = CallKeras(layer, args)
  except Exception as e:
    e.add_note(f'while {path} built the Keras {config.get("class_name")} for {source.inputs}')
    raise
  finally:
    random.setstate(state)
  return _Cell(layer), norms, outputs


def _CheckModules(config: Any, custom_objects: Mapping[str, Any], path: str) -> None:
  """Raises ValueError if Keras would import a module to find a class by its name.

  A config is data that may come from an untrusted text, and the releases of Keras 3 differ in the
  modules that they refuse.
  """
  if isinstance(config, (list, tuple)):
    for part in config:
      _CheckModules(part, custom_objects, path)
  if not isinstance(config, dict):
    return
  module, name = config.get('module'), config.get('registered_name') or config.get('class_name')
  is_keras = module in (None, 'builtins') or str(module).split('.')[0] == 'keras'
  is_known = is_keras or 'class_name' not in config
  if not is_known and keras.saving.get_registered_object(name, custom_objects) is None:
    raise ValueError(
      f'{path}: its Keras config names {name!r} of the module {module!r}, but a config does not '
      'import modules: pass the class in custom_objects, or register it with '
      'keras.saving.register_keras_serializable'
    )
  for part in config.values():
    _CheckModules(part, custom_objects, path)


def _MapInputs(fn: Any, spec: Any) -> Any:
  return (
    fn(spec) if isinstance(spec, keras_config.KerasInput) else [_MapInputs(fn, s) for s in spec]
  )
