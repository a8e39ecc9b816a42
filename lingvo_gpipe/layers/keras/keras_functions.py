# SPDX-License-Identifier: Apache-2.0
"""Functions of tensors as calls that a trace records, like the calls of Keras's operations.

Keras cannot record these, or would record operations that compute something else:

    x * 2, self.scale * 2, x[:, 0]                  operators
    tf.concat([x, y], axis=1)                       functions of TensorFlow
    ops.broadcast_to(self.w, (ops.shape(x)[0], 5))  sizes, which differ between micro-batches
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.ops import node as keras_node

# Operators that a trace records, without underscores.
BINARY = ('add', 'sub', 'mul', 'truediv', 'floordiv', 'mod', 'pow', 'matmul', 'and', 'or', 'xor')
OTHERS = ('neg', 'pos', 'abs', 'invert', 'lt', 'le', 'gt', 'ge', 'eq', 'ne')


class Function(keras.Operation):
  """A function of tensors as an operation of Keras.

  Attributes:
    function: takes and returns nests of tensors.
  """

  def __init__(self, function: Callable[..., Any]) -> None:
    super().__init__(name=function.__name__.strip('_').lower())
    self.function = function

  def call(self, *args: Any, **kwargs: Any) -> Any:
    """Returns the results of the function."""
    return self.function(*args, **kwargs)

  @property
  def is_smooth(self) -> bool:
    """Whether gradients pass through the function; False if unknown."""
    return self.function in _SMOOTH


class Functions:
  """The functions of one trace.

  All are in one graph of TensorFlow, which tracks the sizes that they compute:
  `tf.reshape(x, [tf.shape(x)[0], 4, 2])` has the shape [None, 4, 2].
  """

  def __init__(self) -> None:
    self._graph = tf.function(lambda: None, autograph=False).get_concrete_function().graph

  def Record(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Returns the symbols for the results of a function, and the Node of Keras that has its call.

    Args:
      function: takes and returns nests of tensors.
      *args: its arguments, with a KerasTensor for each tensor.
      **kwargs: its named arguments.

    Raises:
      TypeError: a result is not a tensor.
    """
    with self._graph.as_default(), keras.StatelessScope():
      tensors, named = keras.tree.map_structure(_Tensor, (args, kwargs))
      results = keras.tree.map_structure(_Symbol, function(*tensors, **named))
    operation = Function(function)
    keras_node.Node(operation, args, kwargs, results)
    return results, operation._inbound_nodes[-1]


def _Tensor(x: Any) -> Any:
  """Returns the tensor of a symbol in the default graph; anything else as it is."""
  if not isinstance(x, keras.KerasTensor):
    return x
  if not hasattr(x, '_tensor'):
    x._tensor = tf.raw_ops.Placeholder(dtype=x.dtype, shape=x.shape)
  return x._tensor


def _Symbol(tensor: Any) -> Any:
  """Returns the symbol for a tensor."""
  if isinstance(tensor, tf.Variable):
    tensor = tf.convert_to_tensor(tensor)
  if not isinstance(tensor, tf.Tensor):
    raise TypeError(f'expected a tensor as the result, got a {type(tensor).__name__}')
  symbol = keras.KerasTensor(tensor.shape, tensor.dtype.name)
  symbol._tensor = tensor
  return symbol


def Size(x: tf.Tensor, axis: int) -> tf.Tensor:
  """Returns the size of a tensor's axis, an int32 scalar."""
  return tf.shape(x)[axis]


def Item(x: Any, *keys: Any) -> Any:
  """Returns the item of a tensor or weight for the results of `Bounds`."""
  keys = tuple(slice(*k['bounds']) if isinstance(k, dict) else k for k in keys)
  return x[keys if len(keys) > 1 else keys[0]]


def Bounds(key: Any) -> Any:
  """Returns a slice as a nest, in which Keras finds symbols; any other index as it is."""
  return {'bounds': [key.start, key.stop, key.step]} if isinstance(key, slice) else key


# Gradients pass through these.
_SMOOTH = (Item, *(getattr(operator, name) for name in BINARY[:4]), operator.neg, operator.matmul)
