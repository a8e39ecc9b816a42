# SPDX-License-Identifier: Apache-2.0
"""`KerasLayer`: any Keras layer as a layer of a pipeline.

`keras_cut` turns a Keras model into the Params of a list of KerasLayers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from lingvo_gpipe.core import base_layer, fprop_context, hyperparams, nested_map, weight_params
from lingvo_gpipe.layers.keras import keras_build, keras_config, keras_norm


class KerasLayer(base_layer.BaseLayer):
  """Runs a keras.layers.Layer by `stateless_call`, with its variables as weights of this layer.

  * Weights have the keys of `template.keys`. Keras's initializers, seeded by p.random_seed and the
    path of this layer, give their initial values. Weights frozen in Keras are not trainable.
  * `training` is True in training and False in evaluation.
  * The state of a seed generator is not a weight: each call draws it from the context's seeds.
  * A Dropout has masks of integer random bits, equal with and without XLA (`keras_dropout`).
  * Losses that Keras collects (regularizers, add_loss) become an auxiliary loss `keras_losses`.
  * A BatchNormalization normalises by micro-batch (`keras_norm`).
  * A call that changes any other state raises an error, because the change would be lost.
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of a KerasLayer; `FromKeras` fills them in."""
    p = super().Params()
    p.Define(
      'config',
      {},
      'The layer, serialised by keras.saving.serialize_keras_object. A dtype of None follows from '
      'dtype and fprop_dtype.',
    )
    p.Define('inputs', [], 'A KerasInput, or a list of them, for each argument of the call.')
    p.Define('custom_objects', {}, '{name: class} of each class that Keras does not know.')
    p.Define(
      'drop_mask', False, 'Whether to drop the Keras mask of an output; if False, it is an error.'
    )
    return p

  @classmethod
  def FromKeras(
    cls, layer: keras.layers.Layer, inputs: Sequence[Any], policy: str | None = None
  ) -> hyperparams.InstantiableParams:
    """Returns the Params of a layer like a Keras layer, built or not, without its weights.

    Args:
      layer: any Keras layer or model that can be serialised.
      inputs: a KerasInput, or a list of them, for each argument of its call.
      policy: name of the Keras dtype policy that stands for this layer's dtype and fprop_dtype;
        None: the policy of `layer`.
    """
    config = keras.saving.serialize_keras_object(layer)
    p = cls.FromConfig(config, inputs, policy or layer.dtype_policy.name)
    p.custom_objects = CustomObjects([layer])
    return p

  @classmethod
  def FromConfig(
    cls, config: dict[str, Any], inputs: Sequence[Any], policy: str = 'float32'
  ) -> hyperparams.InstantiableParams:
    """Returns the Params for the result of `keras.saving.serialize_keras_object`."""
    p = cls.Params()
    policy = policy.rpartition('_from_')[2]  # A quantised layer keeps its own policy.
    p.config = keras_config.Canonicalise(config, policy)
    p.inputs = list(inputs)
    if policy != 'float32':
      p.dtype = tf.as_dtype(keras.DTypePolicy(policy).variable_dtype)
      p.fprop_dtype = tf.as_dtype(keras.DTypePolicy(policy).compute_dtype)
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    if not p.config:
      raise ValueError(f'{self.path}: config is empty; make the Params with KerasLayer.FromKeras')
    self._source = keras_build.KerasSource.FromParams(
      p.config, p.inputs, keras_build.PolicyName(p.dtype, p.fprop_dtype), p.custom_objects
    )
    self._template = keras_build.Template(self._source, self.path)
    self._initial: dict[str, tf.Tensor] = {}
    self._name_of: dict[str, str] = {}
    for key, v in self._template.keys.items():
      name = f'{key}_' if hasattr(type(self), key) else key
      self._name_of[key] = name
      init = weight_params.WeightInit.CustomVarInit(functools.partial(self._InitialValue, key))
      self.CreateVariable(
        name, weight_params.WeightParams(v.shape, init, v.dtype), trainable=v.trainable
      )

  @property
  def template(self) -> keras_build.KerasTemplate:
    """The Keras layer, without weights."""
    return self._template

  def VariableOf(self, key: str) -> tf.Variable:
    """Returns the variable for one of `template.keys`."""
    return self.vars[self._name_of[key]]

  def InstantiateVariables(self, device: str | None = None) -> None:
    """Makes the variables; meanwhile the layer's initial values take memory twice."""
    super().InstantiateVariables(device)
    self._initial = {}

  def _InitialValue(self, key: str, *unused_args: Any) -> tf.Tensor:
    if not self._initial:
      seed = weight_params.Hash64(self.params.random_seed, self.path)
      self._initial = keras_build.InitialValues(self._source, seed, self.path)
    return self._initial[key]

  def ThetaFrom(self, variables: nested_map.NestedMap) -> nested_map.NestedMap:
    """Returns the weights unchanged: Keras casts each weight when it uses it."""
    return nested_map.NestedMap(variables)

  def FProp(self, theta: nested_map.NestedMap, *args: Any) -> Any:
    """Calls the Keras layer.

    Args:
      theta: the weights.
      *args: the arguments of the call, tensors `[batch, ...]`. A model with several inputs takes
        one argument for each.

    Returns:
      The outputs of the Keras layer, with a list as a tuple.

    Raises:
      ValueError: the call changes state that would be lost, or an output has a mask.
    """
    template, context = self._template, fprop_context.Current()
    variables = template.cell.non_trainable_variables
    state = [self._State(theta, i, v) for i, v in enumerate(variables)]
    outputs, new_state, losses = template.cell.stateless_call(
      [self._Tensor(theta, key) for key in template.trainable],
      state,
      *args,
      training=not context.do_eval,
      return_losses=True,
    )
    for key, old, new in zip(template.state, state, new_state, strict=True):
      if key is not None and new is not old:
        raise ValueError(
          f'{self.path}: the call of the Keras {self.params.config["class_name"]} changes its '
          f'variable {key!r}, which a pipeline does not update; only BatchNormalizations that its '
          'configuration names are converted'
        )
    sums = {
      f'{name}_{i}': new_state[index]
      for i, norm in enumerate(template.norms)
      for name, index in norm.sums.items()
    }
    context.AddSums(self, sums)
    if losses:
      total = tf.add_n([tf.reduce_sum(tf.cast(loss, self.params.dtype)) for loss in losses])
      context.AddAuxLoss(self, total, name='keras_losses')
    self._CheckMasks(outputs)
    return tuple(outputs) if isinstance(outputs, list) else outputs

  def _Tensor(self, theta: nested_map.NestedMap, key: str) -> tf.Tensor:
    return tf.convert_to_tensor(theta[self._name_of[key]])

  def _State(self, theta: nested_map.NestedMap, index: int, variable: Any) -> tf.Tensor:
    """Returns the value of a non-trainable Keras variable in this call."""
    key = self._template.state[index]
    if key is not None:
      return self._Tensor(theta, key)
    context = fprop_context.Current()
    if index not in self._template.seeds or context.do_eval:
      return tf.zeros(variable.shape, variable.dtype)
    # Keras takes the seeds modulo 2^31, which would repeat the seeds of other steps.
    bits = tf.random.stateless_uniform(
      variable.shape,
      context.OpSeed(self, f'seed_{self._template.seeds[index]}'),
      minval=None,
      maxval=None,
      dtype=tf.uint32,
      alg='philox',
    )
    return tf.cast(bits, variable.dtype)

  def StateFromSums(
    self, state: nested_map.NestedMap, sums: nested_map.NestedMap
  ) -> Mapping[str, tf.Tensor]:
    """Returns the moving averages of the BatchNormalizations after a mini-batch."""
    new = {}
    for i, norm in enumerate(self._template.norms):
      mean, variance = self._name_of[norm.mean], self._name_of[norm.variance]
      new[mean], new[variance] = keras_norm.MovingAverages(
        state[mean],
        state[variance],
        norm.momentum,
        {name: sums[f'{name}_{i}'] for name in norm.sums},
      )
    return new

  def _CheckMasks(self, outputs: Any) -> None:
    if self.params.drop_mask:
      return
    for output in tf.nest.flatten(outputs):
      if getattr(output, '_keras_mask', None) is not None:
        raise ValueError(
          f'{self.path}: the output of the Keras {self.params.config["class_name"]} has a mask, '
          'which would be lost between cells; put the layers that use the mask into one cell, or '
          'set drop_mask=True'
        )


def CustomObjects(layers: Sequence[Any]) -> dict[str, Any]:
  """Returns {name: class} of the custom classes among some Keras layers."""
  classes = {type(layer) for layer in _WithInner(layers) if layer is not None}
  classes = {c for c in classes if not c.__module__.startswith('keras.')}
  return {keras.saving.get_registered_name(c): c for c in classes}


def _WithInner(layers: Sequence[Any]) -> Iterator[Any]:
  """Yields Keras layers, and the inner layers of models and wrappers."""
  for layer in layers:
    yield layer
    inner = [*getattr(layer, 'layers', ()), getattr(layer, 'layer', None)]
    yield from _WithInner([x for x in inner if isinstance(x, keras.layers.Layer)])
