# SPDX-License-Identifier: Apache-2.0
"""Generates with a causal model of KerasHub whose weights are on several devices.

KerasHub's own code runs: `generate` fills the cache from the prompt by `_build_cache`, and its
sampler calls `call_with_cache` for each token. Two things differ from plain Keras:

* Each operation runs on the device of the weights that it reads, or else of its inputs.
* The cache, a tensor `[batch, layer, ...]`, exists in pieces only: one for each layer, on the
  device of the layer. The sampler gets a tuple of them.

The loop over tokens runs in Python; each of its steps is one tf.function over all devices.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from lingvo_gpipe.layers.keras import keras_variables

_METHODS = ('generate_step', 'call_with_cache', '_build_cache')


def Generate(
  model: Any, make_steps: Callable[[Any], GenerationSteps], *args: Any, **kwargs: Any
) -> Any:
  """Returns the result of the model's `generate`.

  Args:
    model: a CausalLM of KerasHub.
    make_steps: returns the functions for a batch of the model's inputs.
    *args: arguments of `generate`.
    **kwargs: arguments of `generate`.

  Raises:
    ValueError: the model does not generate with a cache.
  """
  for name in _METHODS:
    if not hasattr(model, name):
      raise ValueError(
        f'{model.name} ({type(model).__name__}) has no {name}, so it cannot generate through '
        'stages as a CausalLM of KerasHub does'
      )

  def Run(inputs: Any, stop_token_ids: Any = None) -> Any:
    inputs = keras.tree.map_structure(lambda x: x if x is None else tf.convert_to_tensor(x), inputs)
    return make_steps(inputs).Run(inputs, stop_token_ids)

  with keras_variables.ReplaceAttributes(model, generate_function=Run):
    return model.generate(*args, **kwargs)


class GenerationSteps:
  """The traced functions of a model, for the places that its weights have now."""

  def __init__(self, model: Any, devices: Sequence[str]) -> None:
    """Traces nothing yet.

    Args:
      model: a CausalLM of KerasHub.
      devices: names of the devices, in the order of the stages.
    """
    self._model = model
    self._devices = devices
    self._call_with_cache = model.call_with_cache
    self._signature = inspect.signature(model.call_with_cache)
    self._fill = tf.function(model._build_cache, autograph=False)
    self._extend = tf.function(self._Extend, autograph=False)
    # The structure of the model's cache; for each tensor in it, whether it is in pieces, and the
    # devices of the pieces.
    self._structure: Any = None
    self._pieces: list[tuple[bool, list[str]]] = []

  def Run(self, inputs: Any, stop_token_ids: Any) -> Any:
    """Returns the result of the model's `generate_step` for a batch."""
    with keras_variables.ReplaceAttributes(
      self._model, call_with_cache=self._Dispatch, _build_cache=self._fill
    ):
      return self._model.generate_step(inputs, stop_token_ids)

  def _Dispatch(self, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of `call_with_cache`: the trace of `_build_cache` calls it, and samplers."""
    return (self._extend if tf.executing_eagerly() else self._Fill)(*args, **kwargs)

  def _Fill(self, *args: Any, **kwargs: Any) -> Any:
    return self._Call(_NewCache, *args, **kwargs)

  def _Extend(self, *args: Any, **kwargs: Any) -> Any:
    return self._Call(self._Join, *args, **kwargs)

  def _Call(self, prepare: Callable[[Any, _DeviceFunction], Any], *args: Any, **kwargs: Any) -> Any:
    """Runs the model's `call_with_cache`; to be traced.

    Args:
      prepare: makes the cache for the model from the argument.
      *args: arguments of `call_with_cache`.
      **kwargs: arguments of `call_with_cache`.

    Returns:
      The results of `call_with_cache`, with the cache in pieces.
    """
    call = self._signature.bind(*args, **kwargs)
    device_function = _DeviceFunction(self._devices)
    with tf.zeros([]).graph.device(device_function):
      weights = [(v, device_function.Read(v.value)) for v in self._model.variables]
      call.arguments['cache'] = prepare(call.arguments['cache'], device_function)
      with keras.StatelessScope(weights):
        logits, hidden_states, cache = self._call_with_cache(*call.args, **call.kwargs)
    self._structure = keras.tree.map_structure(lambda _: 0, cache)
    pieces = [_Pieces(t) for t in keras.tree.flatten(cache)]
    self._pieces = [
      (isinstance(x, tuple), [device_function.Device(t) for t in keras.tree.flatten(x)])
      for x in pieces
    ]
    return logits, hidden_states, keras.tree.pack_sequence_as(self._structure, pieces)

  def _Join(self, cache: Any, _: _DeviceFunction) -> Any:
    """Returns the cache of the previous call in the structure that the model expects."""
    flat = iter(keras.tree.flatten(cache))
    tensors = []
    for is_stack, devices in self._pieces:
      pieces = []
      for device in devices:
        with tf.device(device):  # An argument alone has no device that operations could follow.
          pieces.append(tf.identity(next(flat)))
      tensors.append(_Stack(pieces) if is_stack else pieces[0])
    return keras.tree.pack_sequence_as(self._structure, tensors)


class _DeviceFunction:
  """A device function: an operation runs where its weights are, or else where its inputs are."""

  def __init__(self, devices: Sequence[str]) -> None:
    self._order = {tf.DeviceSpec.from_string(d).to_string(): i for i, d in enumerate(devices)}
    # Devices by name of the operation: of values that depend on weights alone, and of the outputs
    # of layers. Then the operations that depend on constants alone.
    self._weights: dict[str, str] = {}
    self._activations: dict[str, str] = {}
    self._constants: set[str] = set()
    self.last = ''

  def Read(self, variable: tf.Variable) -> tf.Tensor:
    """Returns the value of a weight."""
    with tf.device(variable.device):
      value = tf.identity(variable)
    self._weights[value.op.name] = variable.device
    return value

  def Device(self, tensor: tf.Tensor) -> str:
    """Returns the device of a tensor; empty if the tensor depends on no weight."""
    return self._activations.get(tensor.op.name, '')

  def __call__(self, op: tf.Operation) -> str:
    names = [t.op.name for t in op.inputs]
    weights = [self._weights[name] for name in names if name in self._weights]
    activations = [self._activations[name] for name in names if name in self._activations]
    # A weight may be far larger than the tensor that meets it, so the tensor moves.
    device = op.device or max(weights or activations, key=self._Stage, default='')
    if weights and all(name in self._weights or name in self._constants for name in names):
      self._weights[op.name] = device
    elif op.type != 'Placeholder' and self._constants.issuperset(names):
      self._constants.add(op.name)
    elif device:
      self._activations[op.name] = device
      self.last = device
    return device

  def _Stage(self, device: str) -> int:
    return self._order.get(device, -1)


class _Stack:
  """Takes the place of a tensor `[batch, layer, ...]` whose pieces `[:, layer]` exist alone."""

  def __init__(self, pieces: Sequence[tf.Tensor]) -> None:
    self._pieces = pieces
    self.shape = tf.TensorShape([pieces[0].shape[0], len(pieces), *pieces[0].shape[1:]])
    self.dtype = pieces[0].dtype

  def __getitem__(self, key: Any) -> tf.Tensor:
    is_piece = isinstance(key, tuple) and key[0] == slice(None) and isinstance(key[1], int)
    if not is_piece:
      return self.Whole()[key]
    piece = self.Piece(key[1])
    return piece if key[2:] in ((), (...,)) else piece[(slice(None), *key[2:])]

  def Piece(self, index: int) -> tf.Tensor:
    """Returns the piece of a layer `[batch, ...]`."""
    return self._pieces[index]

  def Whole(self) -> tf.Tensor:
    """Returns the tensor, on one device."""
    return tf.stack(self._pieces, axis=1)


class _NewStack(_Stack):
  """Makes zeros when a layer asks for them, on the device of the layer that ran last."""

  def __init__(self, zeros: tf.Tensor, device_function: _DeviceFunction) -> None:
    self._device_function = device_function
    self.shape = zeros.shape
    self.dtype = zeros.dtype

  def Piece(self, index: int) -> tf.Tensor:
    return self._Zeros([self.shape[0], *self.shape[2:]])

  def Whole(self) -> tf.Tensor:
    return self._Zeros(self.shape)

  def _Zeros(self, shape: Any) -> tf.Tensor:
    with tf.device(self._device_function.last):
      return tf.zeros(shape, self.dtype)


# An operation that takes the whole cache gets a correct tensor, on one device.
tf.register_tensor_conversion_function(_Stack, lambda x, *_, **__: x.Whole())


def _NewCache(cache: Any, device_function: _DeviceFunction) -> Any:
  """Returns an empty cache whose zeros are made layer by layer."""

  def New(x: tf.Tensor) -> Any:
    value = tf.get_static_value(x.op.inputs[1] if x.op.type == 'Fill' else x)
    is_zero = value is not None and not np.any(value)
    return _NewStack(x, device_function) if is_zero and x.shape.rank > 1 else x

  return keras.tree.map_structure(New, cache)


def _Pieces(tensor: tf.Tensor) -> Any:
  """Returns the pieces of a tensor that was stacked from layers, or else the tensor."""
  is_stack = tensor.op.type == 'Pack' and tensor.op.get_attr('axis') == 1
  return tuple(tensor.op.inputs) if is_stack else tensor
