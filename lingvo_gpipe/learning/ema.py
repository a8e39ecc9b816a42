# SPDX-License-Identifier: Apache-2.0
"""Exponential moving averages of the weights, for evaluation: `task.train.ema_decay`.

Each average lies beside its variable, on the device of its stage. A tied weight is one variable and
has one average.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping

import tensorflow as tf

from lingvo_gpipe.checkpoint import checkpoint_info, checkpointer
from lingvo_gpipe.learning import shared_weights

# An average under way moves by less than these can tell from 1.
_NARROW = (tf.bfloat16, tf.float16)
# The average of a weight lies beside it in a checkpoint.
_SUFFIX = '/ema'


class ExponentialMovingAverage:
  """average += (1 - d) * (variable - average) after each update, d = min(decay, (1+n) / (10+n)).

  n is the training step, so that the first averages forget the initial weights soon (as
  tf.train.ExponentialMovingAverage with num_updates, and so Lingvo). Where the step is skipped the
  averages stay. Variables of 16 bits have averages of 32.
  """

  def __init__(
    self,
    decay: float,
    variables: Mapping[str, tf.Variable],
    shared: shared_weights.SharedWeights | None = None,
  ) -> None:
    """Averages begin at the present values.

    Args:
      decay: in (0, 1).
      variables: {path: variable}, each on its device.
      shared: has the averages of weights that other tasks have, too.
    """
    self._decay = decay
    self._variables = dict(variables)
    self._averages: dict[str, tf.Variable] = {}
    self._is_swapped = False
    for path, v in self._variables.items():
      self._averages[path] = _Average(v, shared)

  def Variables(self) -> dict[str, tf.Variable]:
    """{'<path>/ema': variable}: what a checkpoint keeps."""
    return {path + _SUFFIX: average for path, average in self._averages.items()}

  def BeginAtWeights(self) -> None:
    """Gives the averages the present values of the variables."""
    for path, average in self._averages.items():
      with tf.device(average.device):
        average.assign(tf.cast(self._variables[path], average.dtype))

  def Apply(self, step: tf.Tensor, is_applied: tf.Tensor) -> None:
    """Moves the averages; to be called in a tf.function, after the update.

    Args:
      step: int64 scalar, the training step.
      is_applied: bool scalar; where it is false nothing is changed.
    """
    count = tf.cast(step, tf.float64)
    rate = 1.0 - tf.minimum(tf.constant(self._decay, tf.float64), (1.0 + count) / (10.0 + count))
    of_device: dict[str, list[str]] = {}
    for path, average in self._averages.items():
      of_device.setdefault(average.device, []).append(path)
    for device, paths in of_device.items():
      self._Move(device, paths, rate, is_applied)

  def _Move(self, device: str, paths: list[str], rate: tf.Tensor, is_applied: tf.Tensor) -> None:
    with tf.device(device):

      def Move() -> tf.Tensor:
        for path in paths:
          average = self._averages[path]
          value = tf.cast(self._variables[path], average.dtype)
          average.assign_add(tf.cast(rate, average.dtype) * (value - average))
        return tf.constant(True)

      tf.cond(is_applied, Move, lambda: tf.constant(False))

  @contextlib.contextmanager
  def InPlaceOfWeights(self) -> Iterator[None]:
    """Within it the variables have the values of their averages; after it, exactly their own."""
    if self._is_swapped:
      yield
      return
    own = {}
    self._is_swapped = True
    try:
      for path, v in self._variables.items():
        with tf.device(v.device):
          own[path] = tf.identity(v)
          v.assign(tf.cast(self._averages[path], v.dtype))
      yield
    finally:
      for path, value in own.items():
        with tf.device(self._variables[path].device):
          self._variables[path].assign(value)
      self._is_swapped = False


def Restore(
  saved: checkpointer.Checkpointer,
  info: checkpoint_info.CheckpointInfo,
  variables: Mapping[str, tf.Variable],
) -> int:
  """Reads a checkpoint to evaluate it: averages in place of weights, where it has any.

  The checkpoint alone decides, whatever `task.train.ema_decay` is, so that all who evaluate a run
  evaluate the same. No copy of the weights is made but, in host memory, of narrow ones.

  Args:
    saved: the checkpoints.
    info: one of them.
    variables: {path: variable}, on any devices.

  Returns:
    How many averages were read.

  Raises:
    ValueError, DamagedError: as `Checkpointer.Restore`.
  """
  averages = {path: path + _SUFFIX for path in variables if path + _SUFFIX in info.tensors}
  wanted = {averages.get(path, path): v for path, v in variables.items()}
  wide: dict[str, tf.Variable] = {}
  with tf.device('/device:CPU:0'):
    for path, name in averages.items():
      if variables[path].dtype in _NARROW:
        wide[path] = wanted[name] = tf.Variable(tf.zeros(variables[path].shape), trainable=False)
  saved.Restore(info, wanted, allow_extra=True)
  for path, average in wide.items():
    variables[path].assign(tf.cast(average, variables[path].dtype))
  return len(averages)


def DescribeWeights(num_averages: int) -> str:
  """What `Restore` read, for people."""
  return f'moving averages of {num_averages} weights' if num_averages else 'weights'


def _Average(v: tf.Variable, shared: shared_weights.SharedWeights | None) -> tf.Variable:
  make = functools.partial(_NewAverage, v)
  return shared.Auxiliary('ema', v, make) if shared else make()


def _NewAverage(v: tf.Variable) -> tf.Variable:
  dtype = tf.float32 if v.dtype in _NARROW else v.dtype
  with tf.init_scope(), tf.device(v.device):
    return tf.Variable(tf.cast(v, dtype), trainable=False, name='ema')
