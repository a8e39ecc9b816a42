# SPDX-License-Identifier: Apache-2.0
"""Keras 3 optimizers as Params, one Keras object a stage, built on the stage's device.

`optimizer.Adam.Params()` has Keras's hyperparameters of the same names and defaults, except what
the learner decides: learning rate, clipping, EMA, accumulation and loss scaling.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

os.environ.setdefault('KERAS_BACKEND', 'tensorflow')
import keras  # noqa: E402

from lingvo_gpipe import hyperparams  # noqa: E402

_LEARNERS_PART = frozenset(
  {
    'learning_rate',
    'clipnorm',
    'clipvalue',
    'global_clipnorm',
    'use_ema',
    'ema_momentum',
    'ema_overwrite_frequency',
    'loss_scale_factor',
    'gradient_accumulation_steps',
    'name',
    'self',
    'kwargs',
  }
)


class KerasOptimizer:
  """Base of the optimizers below: Params from the Keras class's signature."""

  keras_class: type[keras.optimizers.Optimizer] = keras.optimizers.Optimizer

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params with the hyperparameters of the Keras class and their defaults."""
    p = hyperparams.InstantiableParams(cls)
    for name, parameter in inspect.signature(cls.keras_class.__init__).parameters.items():
      if name not in _LEARNERS_PART:
        p.Define(name, parameter.default, f'{name} of keras.optimizers.{cls.keras_class.__name__}.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    self.params = params.Copy()

  def Build(self, device: str, variables: Mapping[str, tf.Variable]) -> StageOptimizer:
    """An optimizer of these {path: variable}, its slots on `device`."""
    config = {name: value for name, value in self.params.IterParams() if name != 'cls'}
    return StageOptimizer(self.keras_class, config, device, variables, self._OtherSlots)

  def SlotsPerWeight(self) -> int:
    """How many slots of its own size a weight has; found by building them for a tiny one."""
    with tf.init_scope():
      weight = tf.Variable(tf.zeros([2, 3]), name='weight')
      slots = self.Build('/device:CPU:0', {'weight': weight}).slots
    return sum(slot.shape == weight.shape for slot in slots.values())

  @classmethod
  def _OtherSlots(cls, built: Any) -> dict[str, list[Any]]:
    """{slot name: a slot for each variable} of those that Keras makes in a way of its own."""
    del built
    return {}


class SGD(KerasOptimizer):
  """keras.optimizers.SGD; `momentum` and `nesterov` among its Params."""

  keras_class = keras.optimizers.SGD


class Adam(KerasOptimizer):
  """keras.optimizers.Adam."""

  keras_class = keras.optimizers.Adam


class AdamW(KerasOptimizer):
  """keras.optimizers.AdamW: Adam with decoupled weight decay."""

  keras_class = keras.optimizers.AdamW


class Adafactor(KerasOptimizer):
  """keras.optimizers.Adafactor. The second moment of a matrix is kept as `row` and `column`."""

  keras_class = keras.optimizers.Adafactor

  @classmethod
  def _OtherSlots(cls, built: Any) -> dict[str, list[Any]]:
    return {'row': built._r, 'column': built._c}


class RMSprop(KerasOptimizer):
  """keras.optimizers.RMSprop."""

  keras_class = keras.optimizers.RMSprop


class Adagrad(KerasOptimizer):
  """keras.optimizers.Adagrad."""

  keras_class = keras.optimizers.Adagrad


class Adadelta(KerasOptimizer):
  """keras.optimizers.Adadelta."""

  keras_class = keras.optimizers.Adadelta


class Adamax(KerasOptimizer):
  """keras.optimizers.Adamax."""

  keras_class = keras.optimizers.Adamax


class Lamb(KerasOptimizer):
  """keras.optimizers.Lamb."""

  keras_class = keras.optimizers.Lamb


class Lion(KerasOptimizer):
  """keras.optimizers.Lion."""

  keras_class = keras.optimizers.Lion


class StageOptimizer:
  """The Keras optimizer of one stage, with its slots named by variable path and slot name.

  Attributes:
    slots: {'<variable path>/<slot name>': variable}, what a checkpoint keeps of it.
    iterations: the count of updates applied, equal in all stages.
  """

  def __init__(
    self,
    keras_class: type[keras.optimizers.Optimizer],
    config: Mapping[str, Any],
    device: str,
    variables: Mapping[str, tf.Variable],
    other_slots: Callable[[Any], Mapping[str, Sequence[Any]]],
  ) -> None:
    """Makes the slots.

    Args:
      keras_class: the Keras optimizer.
      config: arguments of its constructor, the learning rate aside.
      device: where the slots live, as the variables do.
      variables: {path: variable}.
      other_slots: {slot name: a slot for each variable} of those of the built Keras optimizer that
        were not made by its `add_variable_from_reference`.

    Raises:
      ValueError: the Keras optimizer keeps state beside its slots and its count of updates, which
        no checkpoint would hold.
    """
    self._device = device
    self._variables = list(variables.values())
    self.slots: dict[str, tf.Variable] = {}
    # By identity: nothing says that names of variables are unique.
    paths = {id(v): path for path, v in variables.items()}

    # Keras makes slot names out of variable names, not uniquely; what it makes is recorded here.
    class Recording(keras_class):
      def add_variable_from_reference(
        recording, reference_variable: Any, name: str | None = None, initializer: Any = 'zeros'
      ) -> Any:
        slot = super().add_variable_from_reference(reference_variable, name, initializer)
        self._AddSlot(paths[id(reference_variable)], name or 'var', slot.value)
        return slot

    with tf.init_scope(), tf.device(device):
      self._keras = Recording(learning_rate=0.0, **config)
      self._keras.build(self._variables)
    for name, slots in other_slots(self._keras).items():
      for path, slot in zip(variables, slots, strict=True):
        self._AddSlot(path, name, slot.value)
    self.iterations: tf.Variable = self._keras.iterations.value
    known = {id(v) for v in [*self.slots.values(), self.iterations]}
    known.add(id(self._keras.learning_rate.value))
    hidden = [v.path for v in self._keras.variables if id(v.value) not in known]
    if hidden:
      raise ValueError(
        f'keras.optimizers.{keras_class.__name__} cannot be used: it keeps state that is no slot '
        f'of a variable and that no checkpoint would hold: {", ".join(hidden)}. '
        'Take another optimizer'
      )

  def _AddSlot(self, path: str, name: str, slot: tf.Variable) -> None:
    key = f'{path}/{name}'
    assert key not in self.slots, f'two slots are called {key}'
    self.slots[key] = slot

  def Apply(self, grads: Sequence[tf.Tensor], learning_rate: tf.Tensor) -> None:
    """One update of the stage's variables, in their order; to be called in a tf.function."""
    if not self._variables:
      return
    with tf.device(self._device):
      self._keras.learning_rate.assign(learning_rate)
      self._keras.apply(list(grads), self._variables)
