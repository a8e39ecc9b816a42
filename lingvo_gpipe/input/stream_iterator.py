# SPDX-License-Identifier: Apache-2.0
"""`StreamIterator`: goes through a tf.data pipeline; another one can go on where it is.

The state is what tf.data itself makes of an iterator, buffers included: what was read ahead and not
taken comes again. It is data, and fits the pipeline that it was taken of.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Self

import tensorflow as tf

# Datasets and their iterators are on a host; this one is that of the process.
_HERE = '/device:CPU:0'

# Under such keys a state tells why something could not be read ahead.
_FAILURE = re.compile(rb'@@[\w.\[\]]{0,99}error_message')


class StreamIterator:
  """Like `iter(dataset)`, with `Save` and `Restore`; errors in making an element are tf.data's.

  Attributes:
    num_taken: how many elements were taken of it.
  """

  def __init__(
    self, make: Callable[[], tf.data.Dataset], host: str = _HERE, *, is_checked: bool = False
  ) -> None:
    """Reads nothing yet.

    Args:
      make: returns the pipeline, the same at each call.
      host: the CPU where it is made and read; it may be a worker's.
      is_checked: it is known to have no state outside of its iterator, whatever operations it has.
    """
    self._make, self._host, self._is_checked = make, host, is_checked
    with tf.device(host):
      self._dataset = make()  # Functions of its pipeline live as long as it does.
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
    return self._Packed(values)

  def Map(self, function: Callable[[Any], Any]) -> Iterator[Any]:
    """What a function of TensorFlow's operations makes of each element that is left.

    Values stay where the function puts them. Nothing is read before it is asked for.
    """

    @tf.function(autograph=False)
    def Next() -> tuple[tf.Tensor, Any]:
      # The end is no error, of which a worker would print a line.
      found = tf.raw_ops.IteratorGetNextAsOptional(iterator=self._handle, **self._types)
      is_there = tf.raw_ops.OptionalHasValue(optional=found)
      values = tf.cond(
        is_there,
        lambda: tf.raw_ops.OptionalGetValue(optional=found, **self._types),
        lambda: [tf.zeros(spec.shape, spec.dtype) for spec in self._flat],
      )
      return is_there, function(self._Packed(values))

    while True:
      with tf.device(self._host):
        is_there, made = Next()
      if not is_there:
        return
      self.num_taken += 1
      yield made

  def CopyTo(self, host: str) -> StreamIterator:
    """Another one that goes on from here, on another host.

    Args:
      host: its CPU.

    Raises:
      tf.errors.OpError: the pipeline cannot be saved, or not be made there.
    """
    other = StreamIterator(self._make, host, is_checked=self._is_checked)
    other.Restore(self.Save())
    other.num_taken = self.num_taken
    return other

  def Save(self) -> tf.Tensor:
    """The state behind the last element that was taken: a string, for `Restore`.

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
    """Goes to where another iterator of such a pipeline was saved.

    Args:
      state: what `Save` returned.

    Raises:
      tf.errors.OpError: it is not the state of such a pipeline.
    """
    with tf.device(self._host):
      tf.raw_ops.DeserializeIterator(
        resource_handle=self._handle, serialized=tf.io.parse_tensor(state, tf.variant)
      )

  def _Packed(self, values: list[tf.Tensor]) -> Any:
    return tf.nest.pack_sequence_as(self._dataset.element_spec, values)


def HasFailed(state: tf.Tensor) -> bool:
  """Whether something was read ahead in vain: it fails again for whoever goes on from that state.

  Args:
    state: what `StreamIterator.Save` returned.
  """
  return _FAILURE.search(state.numpy()) is not None
