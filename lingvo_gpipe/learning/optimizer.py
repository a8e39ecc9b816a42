# SPDX-License-Identifier: Apache-2.0
"""Keras 3 optimizers with Params; each stage has its own Keras object on its device.

Every optimizer of the installed Keras has a class of the same name here: `optimizer.SGD`, `Adam`,
`AdamW`, `Nadam`, `Lion`, `Muon` and so on. `optimizer.Adam.Params()` has the names and defaults of
Keras's hyperparameters, except for the arguments that the learner controls: learning rate,
clipping, EMA, accumulation and loss scaling. Each of these optimizers updates a weight from that
weight and its gradient only, so the stages update independently.
"""

from __future__ import annotations

import difflib
import inspect
import os
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

os.environ.setdefault('KERAS_BACKEND', 'tensorflow')
import keras  # noqa: E402

from lingvo_gpipe.core import domain, hyperparams  # noqa: E402

# Arguments of Keras's optimizers that are not Params here: {name: alternative}.
_LEARNER_ARGUMENTS = {
  'learning_rate': 'set learning_rate and lr_schedule of the learner',
  'clipnorm': 'set clip_gradient_single_norm_to_value of the learner',
  'clipvalue': 'set clip_gradient_value_to of the learner',
  'global_clipnorm': 'set clip_gradient_norm_to_value of the learner',
  'use_ema': 'set train.ema_decay',
  'ema_momentum': 'set train.ema_decay',
  'ema_overwrite_frequency': 'train.ema_decay evaluates averages and leaves the weights alone',
  'loss_scale_factor': 'gradients are float32 or bfloat16, whose range needs no loss scaling',
  'gradient_accumulation_steps': 'set num_accumulated_mini_batches of the learner',
}
_NO_PARAMS = frozenset({*_LEARNER_ARGUMENTS, 'name', 'self', 'kwargs'})

# Names in keras.optimizers that do not define an update rule: {name: alternative}.
_CONTAINERS = {
  'LossScaleOptimizer': _LEARNER_ARGUMENTS['loss_scale_factor'],
  'MultiOptimizer': 'make train.learner a list of learners, each with its own optimizer',
  'OptimizerMap': 'make train.learner a list of learners, each with its own optimizer',
}


# Domains of arguments that their defaults do not imply.
_DOMAINS = {
  'exclude_layers': domain.STRINGS | domain.NONE,
  'initial_accumulator_value': domain.NOT_NEGATIVE,
  'l1_regularization_strength': domain.NOT_NEGATIVE,
  'l2_regularization_strength': domain.NOT_NEGATIVE,
  'l2_shrinkage_regularization_strength': domain.NOT_NEGATIVE,
  'learning_rate_power': domain.Number(high=0),
  'ns_steps': domain.Int(1, 100),
  'warmup_steps': domain.STEPS,
}
# Shares of the old value in averages over the steps. Adam divides by 1 - beta^step, and with a beta
# of 1 Lion would learn nothing.
_BETAS = ('beta_1', 'beta_2', 'adam_beta_1', 'adam_beta_2')
_DECAYS = ('momentum', 'rho')


class _Params(hyperparams.InstantiableParams):
  """Params whose errors say which param of the learner to set instead."""

  def _Hint(self, name: str) -> str:
    return _LEARNER_ARGUMENTS.get(name, '')


def _Domain(argument: str, default: Any) -> domain.Domain | None:
  """Returns the domain of an argument of a Keras optimizer."""
  if argument in _DOMAINS:
    return _DOMAINS[argument]
  if argument.endswith('weight_decay'):
    return domain.NOT_NEGATIVE | domain.NONE
  if 'epsilon' in argument:
    return domain.NOT_NEGATIVE
  if argument in _BETAS:
    return domain.Number(0, below=1)
  if argument in _DECAYS:
    return domain.Number(0, 1)
  is_number = isinstance(default, int | float) and not isinstance(default, bool)
  return domain.Number() if is_number else None


class KerasOptimizer:
  """Base class of optimizers; derives Params from the signature of a Keras class."""

  keras_class: type[keras.optimizers.Optimizer] = keras.optimizers.Optimizer
  # Names of slots that start at the value of their weight.
  slots_of_weights: tuple[str, ...] = ()

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params with the hyperparameters of the Keras class and their defaults.

    Raises:
      ValueError: the installed Keras lacks the class, or the class wraps other optimizers.
    """
    if cls.keras_class is keras.optimizers.Optimizer:
      raise ValueError(
        f'Keras {keras.__version__} has no optimizer {cls.__name__}: use another one'
      )
    name = cls.keras_class.__name__
    if name in _CONTAINERS:
      raise ValueError(f'keras.optimizers.{name} cannot be used: {_CONTAINERS[name]}')
    p = _Params(cls)
    for argument, parameter in inspect.signature(cls.keras_class.__init__).parameters.items():
      if argument not in _NO_PARAMS:
        description = f'{argument} of keras.optimizers.{name}.'
        p.Define(argument, parameter.default, description, _Domain(argument, parameter.default))
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    self.params = params.Copy()

  def Build(
    self,
    device: str,
    variables: Mapping[str, tf.Variable],
    is_decayed: Callable[[str], bool] | None = None,
  ) -> StageOptimizer:
    """Builds an optimizer of the variables of one stage.

    Args:
      device: the device for the slots.
      variables: {path: variable}.
      is_decayed: returns whether weight decay applies to the variable with a path; None: it applies
        to all variables.

    Raises:
      ValueError: the optimizer does not support these variables, or keeps state that checkpoints
        would not save.
    """
    self._CheckVariables(variables)
    config = {name: value for name, value in self.params.IterParams() if name != 'cls'}
    undecayed = [v for path, v in variables.items() if is_decayed and not is_decayed(path)]
    return StageOptimizer(self, config, device, variables, undecayed)

  def SlotsPerWeight(self) -> int:
    """Returns the number of slots, each as large as its weight, per weight.

    The slots are counted by building an optimizer for a tiny weight.
    """
    with tf.init_scope():
      weight = tf.Variable(tf.zeros([2, 3]), name='weight')
      slots = self.Build('/device:CPU:0', {'weight': weight}).slots
    return sum(slot.shape == weight.shape for slot in slots.values())

  # ---- Overridden for Keras optimizers with special state --------------------------------------

  def OtherSlots(self, built: Any) -> dict[str, list[Any]]:
    """Returns {slot name: slots} for slots not created by `add_variable_from_reference`."""
    del built
    return {}

  def SharedState(self, built: Any) -> dict[str, Any]:
    """Returns {name: variable} for state that depends only on the number of updates."""
    del built
    return {}

  def _CheckVariables(self, variables: Mapping[str, tf.Variable]) -> None:
    del variables


class Adafactor(KerasOptimizer):
  """keras.optimizers.Adafactor, which keeps the second moment of a matrix as `row` and `column`."""

  def OtherSlots(self, built: Any) -> dict[str, list[Any]]:
    """Returns the factors of the second moments."""
    return {'row': built._r, 'column': built._c}


class Muon(KerasOptimizer):
  """keras.optimizers.Muon: updates matrices by Newton-Schulz, and all other weights as AdamW.

  The path of a layer in Keras corresponds to the path of a variable here: the regular expressions
  of `exclude_layers` are searched in it, and `exclude_embeddings` looks for 'embedding' in it.
  """

  def _CheckVariables(self, variables: Mapping[str, tf.Variable]) -> None:
    for path, v in variables.items():
      if v.dtype != tf.float32 and len(v.shape) == 2:
        raise ValueError(
          f'Muon in Keras updates only float32 matrices, but {path} is {v.dtype.name}: exclude it '
          'with bprop_variable_exclusion, or use another optimizer'
        )


class Nadam(KerasOptimizer):
  """keras.optimizers.Nadam."""

  def SharedState(self, built: Any) -> dict[str, Any]:
    """Returns the product of the momentum schedule."""
    return {'u_product': built._u_product}


class ScheduleFreeAdamW(KerasOptimizer):
  """keras.optimizers.ScheduleFreeAdamW.

  As in Keras, the weights are the points y at which gradients are computed, also in evaluation.
  """

  slots_of_weights = ('momentum',)


def _BindToKeras() -> None:
  """Sets the Keras class of the classes above, and creates classes for all other optimizers."""
  for name, keras_class in inspect.getmembers(keras.optimizers, inspect.isclass):
    is_optimizer = issubclass(keras_class, keras.optimizers.Optimizer) and name not in _CONTAINERS
    if not is_optimizer or keras_class is keras.optimizers.Optimizer:
      continue
    if name not in globals():
      members = {'__doc__': f'keras.optimizers.{name}.', '__module__': __name__}
      globals()[name] = type(name, (KerasOptimizer,), members)
    globals()[name].keras_class = keras_class


_BindToKeras()


def __getattr__(name: str) -> type[KerasOptimizer]:
  """Raises AttributeError with similar names; lets type checkers accept the generated classes."""
  if name in _CONTAINERS:
    raise AttributeError(f'optimizer.{name} does not exist: {_CONTAINERS[name]}')
  known = sorted(
    key for key, value in globals().items() if inspect.isclass(value) and key[0].isupper()
  )
  close = difflib.get_close_matches(name, known, n=3)
  hint = f'; did you mean {" or ".join(close)}?' if close else ''
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}{hint}')


class StageOptimizer:
  """The Keras optimizer of one stage, with its slots named by variable path and slot name.

  Attributes:
    slots: {'<variable path>/<slot name>': variable}, saved in checkpoints.
    iterations: int64 variable, the number of updates applied, equal in all stages.
    variables: the variables to update, in the order of the gradients passed to `Apply`.
    shared: {name: variable} for other state that is equal in all stages.
  """

  def __init__(
    self,
    kind: KerasOptimizer,
    config: Mapping[str, Any],
    device: str,
    variables: Mapping[str, tf.Variable],
    undecayed: Sequence[tf.Variable],
  ) -> None:
    """Creates the Keras optimizer and its slots.

    Args:
      kind: the optimizer, with its Keras class.
      config: arguments of the Keras constructor, without the learning rate.
      device: the device of the variables and slots.
      variables: {path: variable}.
      undecayed: variables to which weight decay does not apply.

    Raises:
      ValueError: the Keras optimizer keeps state other than slots and the number of updates, which
        checkpoints would not save.
    """
    self._kind = kind
    self._device = device
    self._paths = dict(variables)
    self.variables = list(variables.values())
    self.slots: dict[str, tf.Variable] = {}
    # Keyed by identity, because names of variables need not be unique.
    paths = {id(v): path for path, v in variables.items()}

    # Keras derives slot names from variable names, which is not unique. Record the slots instead.
    class Recording(kind.keras_class):  # type: ignore[name-defined]
      def add_variable_from_reference(
        recording, reference_variable: Any, name: str | None = None, initializer: Any = 'zeros'
      ) -> Any:
        slot = super().add_variable_from_reference(reference_variable, name, initializer)
        self._AddSlot(paths[id(reference_variable)], name or 'var', slot.value)
        return slot

      def _should_use_adamw(recording, variable: Any) -> bool:
        # Used by Muon. It needs a path, which Keras variables have and TensorFlow variables lack.
        shape, path = variable.shape, paths[id(variable)]
        return bool(super()._should_use_adamw(types.SimpleNamespace(shape=shape, path=path)))

    with tf.init_scope(), tf.device(device):
      self._keras = Recording(learning_rate=0.0, **config)
      self._keras.exclude_from_weight_decay(var_list=list(undecayed))
      self._keras.build(self.variables)
    for name, slots in kind.OtherSlots(self._keras).items():
      for path, slot in zip(variables, slots, strict=True):
        self._AddSlot(path, name, slot.value)
    self.iterations: tf.Variable = self._keras.iterations.value
    self.shared = {name: v.value for name, v in kind.SharedState(self._keras).items()}
    known = {id(v) for v in [*self.slots.values(), *self.shared.values(), self.iterations]}
    known.add(id(self._keras.learning_rate.value))
    hidden = [v.path for v in self._keras.variables if id(v.value) not in known]
    if hidden:
      raise ValueError(
        f'keras.optimizers.{kind.keras_class.__name__} cannot be used: it keeps state other than '
        f'slots, which checkpoints would not save: {", ".join(hidden)}. Use another optimizer'
      )

  def _AddSlot(self, path: str, name: str, slot: tf.Variable) -> None:
    key = f'{path}/{name}'
    assert key not in self.slots, f'two slots have the name {key}'
    self.slots[key] = slot

  def Follow(self, first: StageOptimizer) -> None:
    """Copies the number of updates, and the state that depends on it, from another stage."""
    self.iterations.assign(first.iterations)
    for name, variable in self.shared.items():
      variable.assign(tf.cast(first.shared[name], variable.dtype))

  def BeginAtWeights(self) -> None:
    """Resets the slots that start at the value of their weight, after weights were assigned."""
    for path, variable in self._paths.items():
      for name in self._kind.slots_of_weights:
        with tf.device(self._device):
          self.slots[f'{path}/{name}'].assign(variable)

  def Apply(self, grads: Sequence[tf.Tensor], learning_rate: tf.Tensor) -> None:
    """Updates the variables of the stage once; call it in a tf.function.

    Args:
      grads: the gradients, in the order of `variables`.
      learning_rate: scalar.
    """
    if not self.variables:
      return
    with tf.device(self._device):
      self._keras.learning_rate.assign(learning_rate)
      self._keras.apply(list(grads), self.variables)
