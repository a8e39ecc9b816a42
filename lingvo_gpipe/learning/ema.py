# SPDX-License-Identifier: Apache-2.0
"""Exponential moving averages of the weights, for evaluation: `task.train.ema_decay`.

Each average is stored on the device of its variable. A tied weight is one variable and has one
average.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping

import tensorflow as tf

from lingvo_gpipe.checkpoint import checkpoint_info, checkpointer
from lingvo_gpipe.learning import shared_weights

# Dtypes too narrow for the small changes of an average.
_NARROW = (tf.bfloat16, tf.float16)
# Suffix of a weight's name that names its average in a checkpoint.
_SUFFIX = '/ema'


class ExponentialMovingAverage:
  """Moving averages of a set of variables.

  After each update average += (1 - d) * (variable - average), with d = min(decay, (1+n) / (10+n))
  and n the training step. The varying rate makes the first averages forget the initial weights
  quickly, as in tf.train.ExponentialMovingAverage with num_updates, and in Lingvo. A skipped step
  leaves the averages unchanged. 16-bit variables have float32 averages.
  """

  def __init__(
    self,
    decay: float,
    variables: Mapping[str, tf.Variable],
    shared: shared_weights.SharedWeights | None = None,
  ) -> None:
    """Creates the averages with the present values of the variables.

    Args:
      decay: decay of the averages, in (0, 1).
      variables: {path: variable}, each on its device.
      shared: registry of the weights that several tasks share; None if no weights are shared.
    """
    self._decay = decay
    self._variables = dict(variables)
    self._averages: dict[str, tf.Variable] = {}
    self._is_swapped = False
    for path, v in self._variables.items():
      self._averages[path] = _Average(v, shared)

  def Variables(self) -> dict[str, tf.Variable]:
    """Returns the averages to save in a checkpoint: {'<path>/ema': variable}."""
    return {path + _SUFFIX: average for path, average in self._averages.items()}

  def BeginAtWeights(self) -> None:
    """Sets the averages to the present values of the variables."""
    for path, average in self._averages.items():
      with tf.device(average.device):
        average.assign(tf.cast(self._variables[path], average.dtype))

  def Apply(self, step: tf.Tensor, is_applied: tf.Tensor) -> None:
    """Updates the averages; call it in a tf.function, after the update of the weights.

    Args:
      step: int64 scalar, the training step.
      is_applied: bool scalar, whether the weights were updated; if False, no average changes.
    """
    count = tf.cast(step, tf.float64)
    rate = 1.0 - tf.minimum(tf.constant(self._decay, tf.float64), (1.0 + count) / (10.0 + count))
    paths_by_device: dict[str, list[str]] = {}
    for path, average in self._averages.items():
      paths_by_device.setdefault(average.device, []).append(path)
    for device, paths in paths_by_device.items():
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
    """Context in which the variables hold their averages; restores their exact values on exit."""
    if self._is_swapped:
      yield
      return
    weights = {}
    self._is_swapped = True
    try:
      for path, v in self._variables.items():
        with tf.device(v.device):
          weights[path] = tf.identity(v)
          v.assign(tf.cast(self._averages[path], v.dtype))
      yield
    finally:
      for path, value in weights.items():
        with tf.device(self._variables[path].device):
          self._variables[path].assign(value)
      self._is_swapped = False


def Restore(
  saved: checkpointer.Checkpointer,
  info: checkpoint_info.CheckpointInfo,
  variables: Mapping[str, tf.Variable],
) -> int:
  """Restores weights for evaluation from a checkpoint, using averages if the checkpoint has them.

  The choice depends on the checkpoint only, not on `task.train.ema_decay`, so that every evaluation
  of a run uses the same values. Only 16-bit weights are copied, in host memory.

  Args:
    saved: the checkpoints of the run.
    info: the checkpoint to restore.
    variables: {path: variable}, on any devices.

  Returns:
    Number of averages restored.

  Raises:
    ValueError: the checkpoint lacks a variable, or a shape or dtype differs.
    DamagedError: the checkpoint cannot be read.
  """
  averages = {path: path + _SUFFIX for path in variables if path + _SUFFIX in info.tensors}
  targets = {averages.get(path, path): v for path, v in variables.items()}
  wide: dict[str, tf.Variable] = {}
  with tf.device('/device:CPU:0'):
    for path, name in averages.items():
      if variables[path].dtype in _NARROW:
        wide[path] = targets[name] = tf.Variable(tf.zeros(variables[path].shape), trainable=False)
  saved.Restore(info, targets, allow_extra=True)
  for path, average in wide.items():
    variables[path].assign(tf.cast(average, variables[path].dtype))
  return len(averages)


def DescribeWeights(num_averages: int) -> str:
  """Describes the values that `Restore` read, for log lines."""
  return f'moving averages of {num_averages} weights' if num_averages else 'weights'


def _Average(v: tf.Variable, shared: shared_weights.SharedWeights | None) -> tf.Variable:
  make = functools.partial(_NewAverage, v)
  return shared.Auxiliary('ema', v, make) if shared else make()


def _NewAverage(v: tf.Variable) -> tf.Variable:
  dtype = tf.float32 if v.dtype in _NARROW else v.dtype
  with tf.init_scope(), tf.device(v.device):
    return tf.Variable(tf.cast(v, dtype), trainable=False, name='ema')
