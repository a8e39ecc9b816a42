# SPDX-License-Identifier: Apache-2.0
"""`StreamIterator`: an iterator over a tf.data pipeline that can be saved and restored.

Its state is tf.data's checkpoint of an iterator, buffers included: elements that were read ahead
but not taken come again. The state is data, and fits only the pipeline that it was saved from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Self

import tensorflow as tf

# Data sets and their iterators live on a host; this is the host of the process.
_LOCAL_HOST = '/device:CPU:0'

# Keys under which a state holds the message of a failed read.
_FAILURE = re.compile(rb'@@[\w.\[\]]{0,99}error_message')


class StreamIterator:
  """Like `iter(dataset)`, with `Save` and `Restore`; errors in making an element are tf.data's.

  Attributes:
    num_taken: number of elements taken from it.
  """

  def __init__(
    self, make: Callable[[], tf.data.Dataset], host: str = _LOCAL_HOST, *, is_checked: bool = False
  ) -> None:
    """Creates the pipeline without reading any data.

    Args:
      make: returns the pipeline, the same one at each call.
      host: the CPU that makes and reads the pipeline; it may be a worker's.
      is_checked: whether the pipeline is known to have no state outside its iterator, whatever its
        operations.
    """
    self._make, self._host, self._is_checked = make, host, is_checked
    with tf.device(host):
      self._dataset = make()  # Keeps the functions of the pipeline alive.
      self._flat = tf.nest.flatten(self._dataset.element_spec)
      self._types = {
        'output_types': [spec.dtype for spec in self._flat],
        'output_shapes': [spec.shape for spec in self._flat],
      }
      self._handle = tf.raw_ops.AnonymousIteratorV3(**self._types)
      tf.raw_ops.MakeIterator(
        dataset=tf.data.experimental.to_variant(self._dataset), iterator=self._handle
      )
    self.num_taken = 0

  def __iter__(self) -> Self:
    return self

  def __next__(self) -> Any:
    try:
      with tf.device(self._host):
        values = tf.raw_ops.IteratorGetNext(iterator=self._handle, **self._types)
    except tf.errors.OutOfRangeError:
      raise StopIteration from None
    self.num_taken += 1
    return self._Pack(values)

  def Map(self, function: Callable[[Any], Any]) -> Iterator[Any]:
    """Yields the result of a function of TensorFlow operations for each remaining element.

    Values stay on the devices on which the function puts them. An element is read when it is asked
    for.
    """

    @tf.function(autograph=False)
    def Next() -> tuple[tf.Tensor, Any]:
      # Not an error at the end of the data, because a worker would log it.
      element = tf.raw_ops.IteratorGetNextAsOptional(iterator=self._handle, **self._types)
      has_value = tf.raw_ops.OptionalHasValue(optional=element)
      values = tf.cond(
        has_value,
        lambda: tf.raw_ops.OptionalGetValue(optional=element, **self._types),
        lambda: [tf.zeros(spec.shape, spec.dtype) for spec in self._flat],
      )
      return has_value, function(self._Pack(values))

    while True:
      with tf.device(self._host):
        has_value, result = Next()
      if not has_value:
        return
      self.num_taken += 1
      yield result

  def CopyTo(self, host: str) -> StreamIterator:
    """Returns an iterator on another host that continues from here.

    Args:
      host: the CPU of the other host.

    Raises:
      tf.errors.OpError: the pipeline cannot be saved, or cannot be made on that host.
    """
    other = StreamIterator(self._make, host, is_checked=self._is_checked)
    other.Restore(self.Save())
    other.num_taken = self.num_taken
    return other

  def Save(self) -> tf.Tensor:
    """Returns the state after the last element taken: a string, for `Restore`.

    Raises:
      tf.errors.OpError: the pipeline cannot be saved.
    """
    policies = tf.data.experimental.ExternalStatePolicy
    policy = policies.IGNORE if self._is_checked else policies.FAIL
    with tf.device(self._host):
      state = tf.raw_ops.SerializeIterator(
        resource_handle=self._handle, external_state_policy=policy.value
      )
      return tf.io.serialize_tensor(state)

  def Restore(self, state: tf.Tensor) -> None:
    """Continues from the state of another iterator over an equal pipeline.

    Args:
      state: the result of `Save`.

    Raises:
      tf.errors.OpError: the state is not from an equal pipeline.
    """
    with tf.device(self._host):
      tf.raw_ops.DeserializeIterator(
        resource_handle=self._handle, serialized=tf.io.parse_tensor(state, tf.variant)
      )

  def _Pack(self, values: list[tf.Tensor]) -> Any:
    return tf.nest.pack_sequence_as(self._dataset.element_spec, values)


def HasFailed(state: tf.Tensor) -> bool:
  """Whether reading ahead failed: an iterator restored from this state fails again.

  Args:
    state: the result of `StreamIterator.Save`.
  """
  return _FAILURE.search(state.numpy()) is not None
