# SPDX-License-Identifier: Apache-2.0
"""Keras 3 optimizers as Params, one Keras object a stage, built on the stage's device.

There is a class for every optimizer of the installed Keras, of the same name: `optimizer.SGD`,
`Adam`, `AdamW`, `Nadam`, `Lion`, `Muon` ... `optimizer.Adam.Params()` has Keras's hyperparameters
of the same names and defaults, except what the learner decides: learning rate, clipping, EMA,
accumulation and loss scaling. All of them update a weight from that weight alone, so stages update
by themselves.
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

from lingvo_gpipe.core import hyperparams  # noqa: E402

# Arguments of Keras's optimizers that are no Params here: {name: what to do instead}.
_LEARNERS_PART = {
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
_NO_PARAMS = frozenset({*_LEARNERS_PART, 'name', 'self', 'kwargs'})

# Names in keras.optimizers that stand for no way to update a weight: {name: what to do instead}.
_CONTAINERS = {
  'LossScaleOptimizer': _LEARNERS_PART['loss_scale_factor'],
  'MultiOptimizer': 'make train.learner a list of learners, each with its own optimizer',
  'OptimizerMap': 'make train.learner a list of learners, each with its own optimizer',
}


class _Params(hyperparams.InstantiableParams):
  """Params that know where the learner's part is set."""

  def _Hint(self, name: str) -> str:
    return f'that is for the learner: {_LEARNERS_PART[name]}' if name in _LEARNERS_PART else ''


class KerasOptimizer:
  """Base of the optimizers: Params from the Keras class's signature."""

  keras_class: type[keras.optimizers.Optimizer] = keras.optimizers.Optimizer
  # Slots that begin as their weight.
  slots_of_weights: tuple[str, ...] = ()

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Params with the hyperparameters of the Keras class and their defaults.

    Raises:
      ValueError: the installed Keras has no such class, or it is a container of other optimizers.
    """
    if cls.keras_class is keras.optimizers.Optimizer:
      raise ValueError(f'Keras {keras.__version__} has no optimizer {cls.__name__}; take another')
    name = cls.keras_class.__name__
    if name in _CONTAINERS:
      raise ValueError(f'keras.optimizers.{name} cannot be used: {_CONTAINERS[name]}')
    p = _Params(cls)
    for argument, parameter in inspect.signature(cls.keras_class.__init__).parameters.items():
      if argument not in _NO_PARAMS:
        p.Define(argument, parameter.default, f'{argument} of keras.optimizers.{name}.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    self.params = params.Copy()

  def Build(
    self,
    device: str,
    variables: Mapping[str, tf.Variable],
    is_decayed: Callable[[str], bool] | None = None,
  ) -> StageOptimizer:
    """An optimizer of these {path: variable}, its slots on `device`.

    Args:
      device: where the slots live.
      variables: {path: variable}.
      is_decayed: tells by its path whether the optimizer's weight decay touches a variable; None:
        all are decayed.

    Raises:
      ValueError: the optimizer cannot take these variables, or keeps state that is not known here.
    """
    self._CheckVariables(variables)
    config = {name: value for name, value in self.params.IterParams() if name != 'cls'}
    spared = [v for path, v in variables.items() if is_decayed and not is_decayed(path)]
    return StageOptimizer(self, config, device, variables, spared)

  def SlotsPerWeight(self) -> int:
    """How many slots of its own size a weight has; found by building them for a tiny one."""
    with tf.init_scope():
      weight = tf.Variable(tf.zeros([2, 3]), name='weight')
      slots = self.Build('/device:CPU:0', {'weight': weight}).slots
    return sum(slot.shape == weight.shape for slot in slots.values())

  # ---- what some of Keras's optimizers have of their own ----------------------------------------

  def OtherSlots(self, built: Any) -> dict[str, list[Any]]:
    """{slot name: a slot for each variable} of those not made by `add_variable_from_reference`."""
    del built
    return {}

  def SharedState(self, built: Any) -> dict[str, Any]:
    """{name: variable} of what belongs to no weight and follows from the count of updates."""
    del built
    return {}

  def _CheckVariables(self, variables: Mapping[str, tf.Variable]) -> None:
    del variables


class Adafactor(KerasOptimizer):
  """keras.optimizers.Adafactor. The second moment of a matrix is kept as `row` and `column`."""

  def OtherSlots(self, built: Any) -> dict[str, list[Any]]:
    """See the parent."""
    return {'row': built._r, 'column': built._c}


class Muon(KerasOptimizer):
  """keras.optimizers.Muon: matrices by Newton-Schulz, all other weights as AdamW.

  What Keras calls a layer's path is here the variable's: `exclude_layers` are regular expressions
  that find it, and `exclude_embeddings` goes by 'embedding' in it.
  """

  def _CheckVariables(self, variables: Mapping[str, tf.Variable]) -> None:
    for path, v in variables.items():
      if v.dtype != tf.float32 and len(v.shape) == 2:
        raise ValueError(
          f'Muon as Keras has it updates matrices of float32 only, and {path} is of '
          f'{v.dtype.name}; exclude it by bprop_variable_exclusion, or take another optimizer'
        )


class Nadam(KerasOptimizer):
  """keras.optimizers.Nadam."""

  def SharedState(self, built: Any) -> dict[str, Any]:
    """See the parent."""
    return {'u_product': built._u_product}


class ScheduleFreeAdamW(KerasOptimizer):
  """keras.optimizers.ScheduleFreeAdamW.

  As in Keras, weights are the points y at which gradients are taken, in evaluation too.
  """

  slots_of_weights = ('momentum',)


def _BindToKeras() -> None:
  """Gives the classes above their Keras class, and makes one for each of Keras's others."""
  for name, keras_class in inspect.getmembers(keras.optimizers, inspect.isclass):
    is_one = issubclass(keras_class, keras.optimizers.Optimizer) and name not in _CONTAINERS
    if not is_one or keras_class is keras.optimizers.Optimizer:
      continue
    if name not in globals():
      members = {'__doc__': f'keras.optimizers.{name}.', '__module__': __name__}
      globals()[name] = type(name, (KerasOptimizer,), members)
    globals()[name].keras_class = keras_class


_BindToKeras()


def __getattr__(name: str) -> type[KerasOptimizer]:
  """Says what there is; also tells type checkers that there are more names than they can see."""
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
    slots: {'<variable path>/<slot name>': variable}, what a checkpoint keeps of it.
    iterations: the count of updates applied, equal in all stages.
    variables: what it updates, in the order in which `Apply` takes gradients.
    shared: {name: variable} of other state that is equal in all stages.
  """

  def __init__(
    self,
    kind: KerasOptimizer,
    config: Mapping[str, Any],
    device: str,
    variables: Mapping[str, tf.Variable],
    spared: Sequence[tf.Variable],
  ) -> None:
    """Makes the slots.

    Args:
      kind: knows the Keras optimizer.
      config: arguments of its constructor, the learning rate aside.
      device: where the slots live, as the variables do.
      variables: {path: variable}.
      spared: those among them that weight decay leaves alone.

    Raises:
      ValueError: the Keras optimizer keeps state beside its slots and its count of updates, which
        no checkpoint would hold.
    """
    self._kind = kind
    self._device = device
    self._paths = dict(variables)
    self.variables = list(variables.values())
    self.slots: dict[str, tf.Variable] = {}
    # By identity: nothing says that names of variables are unique.
    paths = {id(v): path for path, v in variables.items()}

    # Keras makes slot names out of variable names, not uniquely; what it makes is recorded here.
    class Recording(kind.keras_class):  # type: ignore[name-defined]
      def add_variable_from_reference(
        recording, reference_variable: Any, name: str | None = None, initializer: Any = 'zeros'
      ) -> Any:
        slot = super().add_variable_from_reference(reference_variable, name, initializer)
        self._AddSlot(paths[id(reference_variable)], name or 'var', slot.value)
        return slot

      def _should_use_adamw(recording, variable: Any) -> bool:
        # Muon's. It asks for a path, which Keras's variables have and TensorFlow's do not.
        shape, path = variable.shape, paths[id(variable)]
        return bool(super()._should_use_adamw(types.SimpleNamespace(shape=shape, path=path)))

    with tf.init_scope(), tf.device(device):
      self._keras = Recording(learning_rate=0.0, **config)
      self._keras.exclude_from_weight_decay(var_list=list(spared))
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
        f'keras.optimizers.{kind.keras_class.__name__} cannot be used: it keeps state that is no '
        f'slot of a variable and that no checkpoint would hold: {", ".join(hidden)}. '
        'Take another optimizer'
      )

  def _AddSlot(self, path: str, name: str, slot: tf.Variable) -> None:
    key = f'{path}/{name}'
    assert key not in self.slots, f'two slots are called {key}'
    self.slots[key] = slot

  def Follow(self, first: StageOptimizer) -> None:
    """Takes the count of updates, and what follows from it, from another stage's optimizer."""
    self.iterations.assign(first.iterations)
    for name, variable in self.shared.items():
      variable.assign(tf.cast(first.shared[name], variable.dtype))

  def BeginAtWeights(self) -> None:
    """Gives slots that begin as their weight its present value: weights came from elsewhere."""
    for path, variable in self._paths.items():
      for name in self._kind.slots_of_weights:
        with tf.device(self._device):
          self.slots[f'{path}/{name}'].assign(variable)

  def Apply(self, grads: Sequence[tf.Tensor], learning_rate: tf.Tensor) -> None:
    """One update of the stage's variables, in their order; to be called in a tf.function."""
    if not self.variables:
      return
    with tf.device(self._device):
      self._keras.learning_rate.assign(learning_rate)
      self._keras.apply(list(grads), self.variables)
