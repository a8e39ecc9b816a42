# SPDX-License-Identifier: Apache-2.0
"""The variables of live Keras models: made without values, moved between devices, given values.

Keras has no public way to do this, or to change what its code calls. So this file uses private
attributes of Keras: `Variable._value`, `Variable.assign`, the ids of variables and the list
of variables that have no value yet, `Model._compile_config`, `Optimizer._iterations`,
`Layer._flatten_layers`, `backend.core.remat`, and `is_memory_sufficient` and `safe_get_h5_dataset`
of `saving_lib`.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src.backend.common import global_state
from keras.src.saving import saving_lib

# About the most bytes that are sent to, or fetched from, another device at once.
_SLICE_BYTES = 2**24


@contextlib.contextmanager
def WithoutValues() -> Iterator[None]:
  """Makes the variables of the enclosed Keras code without values, so that they need no memory.

  `Move` gives each its initial value, on the device where it stays.
  """
  with keras.StatelessScope(initialize_variables=False):
    yield
  # Keras would give all of them their values at the next opportunity.
  global_state.set_global_attribute('uninitialized_variables', [])


def IsSeed(variable: Any) -> bool:
  """Whether a Keras variable is the state of a seed generator."""
  return bool(variable.name == 'seed_generator_state')


_KERAS_ADD = keras_backend.numpy.add


@contextlib.contextmanager
def ReplaceAttributes(owner: Any, **attributes: Any) -> Iterator[None]:
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


def _AddAsInBatches(x1: Any, x2: Any) -> Any:
  """Adds as Keras does if the size of the batch is unknown.

  If it is known, Keras takes an x2 [n, 1] for a bias [n] of an x1 [n, n]. It never takes x1 for a
  bias.
  """
  shape = tuple(getattr(x2, 'shape', ()))
  if len(shape) > 1 and shape[0] not in (None, 1) and all(size == 1 for size in shape[1:]):
    x1, x2 = x2, x1
  return _KERAS_ADD(x1, x2)


def InBatches() -> contextlib.AbstractContextManager[None]:
  """Lets keras.ops compute with a batch of known size as with one of unknown size."""
  return ReplaceAttributes(keras_backend.numpy, add=_AddAsInBatches)


def WithoutRemat() -> contextlib.AbstractContextManager[None]:
  """Lets the layers of a keras.RematScope compute as outside of it, and keras.remat do nothing.

  Both are tf.recompute_grad, which would lose the gradients of weights that are tensors.
  """
  return ReplaceAttributes(keras_backend.core, remat=lambda function: function)


def Slices(shape: Sequence[int], item_size: int) -> list[Any]:
  """Returns slices of the first dimension of an array, of a few MiB each if its rows allow it."""
  size = item_size * math.prod(shape)
  if size <= _SLICE_BYTES:
    return [...]
  step = max(1, shape[0] * _SLICE_BYTES // size)
  return [slice(i, min(i + step, shape[0])) for i in range(0, shape[0], step)]


@contextlib.contextmanager
def Streaming() -> Iterator[None]:
  """Lets Keras code that moves weights between variables and files hold one whole value at a time.

  Keras holds up to four copies of a value, lets the values that are on their way to workers gather
  in this process, and puts an archive together in memory.
  """
  get_dataset = saving_lib.safe_get_h5_dataset

  def GetDataset(group: Any, name: str) -> Any:
    dataset = get_dataset(group, name)
    value = dataset[()]
    is_bfloat16 = dataset.attrs.get('dtype') == 'bfloat16'
    return value.view(tf.bfloat16.as_numpy_dtype) if is_bfloat16 else value

  with (
    ReplaceAttributes(keras_backend.Variable, assign=_Assign),
    ReplaceAttributes(keras_backend, convert_to_numpy=_Numpy),
    ReplaceAttributes(
      saving_lib, safe_get_h5_dataset=GetDataset, is_memory_sufficient=lambda model: False
    ),
  ):
    yield


def _Assign(variable: Any, value: Any) -> Any:
  """Gives a value to a Keras variable; returns when the value has arrived."""
  target = variable.value
  value = value if hasattr(value, 'dtype') else np.asarray(value)
  if np.shape(value) != tuple(target.shape):
    raise ValueError(f'{variable.path} has the shape {tuple(target.shape)}, got {np.shape(value)}')

  def Give(new: tf.Tensor) -> None:
    tf.raw_ops.AssignVariableOp(resource=target.handle, value=new)
    target.is_initialized().numpy()

  def Part(rows: Any) -> tf.Tensor:
    return tf.identity(keras.ops.convert_to_tensor(value[rows], dtype=variable._dtype))

  slices = Slices(target.shape, target.dtype.size)
  with tf.device(target.device):
    if len(slices) == 1:
      Give(Part(...))
      return value
    Give(tf.zeros([0], target.dtype))  # Frees the memory of the old value.
    if tf.DeviceSpec.from_string(target.device).device_type == 'CPU':
      # Assigning to slices of the variable would make each later read a copy.
      whole = tf.raw_ops.Empty(shape=target.shape, dtype=target.dtype)
      for rows in slices:
        whole = tf.raw_ops.InplaceUpdate(x=whole, i=tf.range(rows.start, rows.stop), v=Part(rows))
        target.is_initialized().numpy()  # Waits, so that slices do not gather on their way.
    else:
      whole = tf.concat([Part(rows) for rows in slices], 0)
    Give(whole)
  return value


def _Numpy(value: Any) -> Any:
  """Returns a value of a variable or tensor on the host."""
  value = getattr(value, 'value', value)
  if not isinstance(value, tf.Variable) or _IsHere(value):
    return np.asarray(value)
  result = np.empty(value.shape, value.dtype.as_numpy_dtype)
  for rows in Slices(value.shape, value.dtype.size):
    result[rows] = value[rows].numpy()
  return result


def _IsHere(variable: tf.Variable) -> bool:
  """Whether a variable is in the memory of this process."""
  device = tf.DeviceSpec.from_string(variable.device)
  return device.device_type == 'CPU' and device.job in (None, 'localhost')


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
  if place.make_merged_spec(tf.DeviceSpec.from_string(device)) == place:
    old._trainable = variable.trainable
    return old
  with tf.init_scope(), tf.device(device):
    variable._value = tf.Variable(old, trainable=variable.trainable, name=variable.name)
    # Functions that were traced with the old place fail, and do not keep its memory.
    tf.raw_ops.AssignVariableOp(resource=old.handle, value=tf.zeros([0], old.dtype))
  variable._value._unique_id = old._unique_id  # Optimizers identify the variable by it.
  return variable._value


def Places(model: Any) -> list[tuple[Any, Any, bool]]:
  """Returns each variable of a model, the tf.Variable behind it, and whether it is trained."""
  return [(v, v._value, v.trainable) for v in model.variables]


def ForgetFunctions(model: Any, but: type) -> None:
  """Drops the functions that models have traced with the variables of a model at other places.

  Args:
    model: the model; others may share layers with it, or have it as a layer.
    but: the class of models that make their functions again by themselves.
  """
  variables = {id(v) for v in model.variables}
  # Each object refers to its class.
  objects = gc.get_referrers(*_WithSubclasses(keras.Model))
  for other in [x for x in objects if issubclass(type(x), keras.Model)]:
    is_made = hasattr(other, '_tracker') and not isinstance(other, but)
    if not is_made or variables.isdisjoint(map(id, other.variables)):
      continue
    for name in ('train_function', 'test_function', 'predict_function', 'generate_function'):
      if vars(other).get(name) is not None:
        setattr(other, name, None)


def _WithSubclasses(cls: type) -> set[type]:
  return {cls}.union(*map(_WithSubclasses, cls.__subclasses__()))


def Inner(optimizer: Any) -> Any:
  """Returns the optimizer that a LossScaleOptimizer wraps, or any other optimizer itself."""
  return getattr(optimizer, 'inner_optimizer', optimizer)


def NumUpdates(optimizer: Any) -> Any:
  """Returns the count of an optimizer's steps, including steps that only accumulate gradients."""
  return Inner(optimizer)._iterations


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


def SlotsPerWeight(optimizer: Any) -> int:
  """Returns the number of slots, each as large as its weight, that a Keras optimizer keeps.

  The slots are counted by building an optimizer of the same configuration for a tiny weight. The
  number is 2 if the class of a user has no such configuration.
  """
  with tf.init_scope(), tf.device('/device:CPU:0'):
    weight = keras.Variable(tf.zeros([2, 3]), name='weight')
    try:
      config = {**optimizer.get_config(), 'learning_rate': 0.1}  # It may be any function.
      same = type(optimizer).from_config(config)
    except (TypeError, ValueError, NotImplementedError):
      return 2
    same.build([weight])
  return sum(slot.shape == weight.shape for slot in same.variables)


def CompileArguments(model: Any) -> dict[str, Any]:
  """Returns the arguments that a model was compiled with, defaults of its class included."""
  arguments = dict(model._compile_config.config)
  arguments['optimizer'] = model.optimizer
  return arguments
