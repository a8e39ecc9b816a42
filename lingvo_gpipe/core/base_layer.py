# SPDX-License-Identifier: Apache-2.0
"""`BaseLayer`: a layer is Params, children, weights and a pure function `FProp(theta, *args)`.

Weights are declared in the constructor and allocated later, by `InstantiateVariables`, on the
device of the layer's stage. Counting a model's parameters allocates nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import (
  domain,
  fprop_context,
  hyperparams,
  nested_map,
  pipeline_element,
  weight_params,
)

# Params that a child inherits from its parent if it leaves them None, and the root's defaults.
INHERITED = {
  'dtype': tf.float32,
  'fprop_dtype': None,  # The layer's dtype.
  'random_seed': 0,
  'params_init': weight_params.WeightInit.Xavier(),
}


class BaseLayer(pipeline_element.PipelineElement):
  """The base class of all layers (Lingvo's BaseLayer, on tf.Module).

  A subclass defines its Params, creates children and declares weights in its constructor, and
  computes in `FProp`:

      class Bias(base_layer.BaseLayer):
        @classmethod
        def Params(cls):
          p = super().Params()
          p.Define('dim', 0, 'Size of the last axis.')
          return p

        def __init__(self, params):
          super().__init__(params)
          self.CreateVariable('b', weight_params.WeightParams([self.params.dim]))

        def FProp(self, theta, x):
          return x + theta.b

  The Params are copied and frozen: `layer.params` never changes after construction.

  Two base classes hold what other parts of the library use: `pipeline_element` the questions of the
  pipeline and of the cost model, such as `FPropMeta` and skip connections, and `layer_tree` the
  walks over layers and weights, such as `path`, `vars` and `theta`. Few layers override any of it.
  """

  # Whether, in evaluation, each position of the outputs [batch, time, ...] depends on the same
  # position of the inputs alone, provided that this holds for the children. Such a layer decodes
  # without further code.
  is_position_wise = False

  # Whether FProp calls `FPropContext.SumOverReplicas` in training.
  sums_over_replicas = False

  def __init_subclass__(cls, **kwargs: Any) -> None:
    """Makes a class that overrides FProp declare again that it is position-wise."""
    super().__init_subclass__(**kwargs)
    for name in ('FProp', 'FPropSkips'):
      if isinstance(vars(cls).get(name), tf.types.experimental.PolymorphicFunction):
        raise TypeError(
          f'{cls.__name__}.{name} is a tf.function: it would keep the mode, the seeds and the sums '
          'of its first call; leave the decorator out, stages are compiled in any case'
        )
    if 'FProp' in vars(cls) and 'is_position_wise' not in vars(cls):
      cls.is_position_wise = False

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of this class; the parent's value replaces None in the inherited ones."""
    p = hyperparams.InstantiableParams(cls)
    p.Define('name', '', 'Name of this layer.', nested_map.KEY)
    p.Define(
      'dtype',
      None,
      "Dtype of the weights. None: the parent's; float32 at the root.",
      domain.FLOAT_DTYPE | domain.NONE,
    )
    p.Define(
      'fprop_dtype',
      None,
      "Dtype of activations. None: the parent's, or dtype.",
      domain.FLOAT_DTYPE | domain.NONE,
    )
    p.Define(
      'random_seed',
      None,
      "Seed of initial values and dropout. None: the parent's, or 0.",
      domain.Int() | domain.NONE,
    )
    p.Define(
      'params_init',
      None,
      "WeightInit of weights without one. None: the parent's, Xavier.",
      domain.InstanceOf(weight_params.WeightInit) | domain.NONE,
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    """Copies `params`.

    Raises:
      ValueError: the Params belong to another class.
    """
    p = params.Copy()
    if p.cls is not type(self):
      raise ValueError(
        f'{type(self).__name__} was given the Params of {getattr(p.cls, "__name__", p.cls)}; '
        'use params.Instantiate()'
      )
    for key, default in INHERITED.items():
      if getattr(p, key) is None:
        setattr(p, key, default)
    p.dtype = tf.as_dtype(p.dtype)
    p.fprop_dtype = p.dtype if p.fprop_dtype is None else tf.as_dtype(p.fprop_dtype)
    p.Freeze()
    super().__init__(p)

  @property
  def params(self) -> Any:
    """The layer's frozen copy of its Params."""
    return self._params

  # ---- children and weights --------------------------------------------------------------------

  @property
  def children(self) -> nested_map.NestedMap:
    """The children: {name: layer, or a list or dict of layers}."""
    return nested_map.NestedMap(self._layer_children)

  def CreateChild(self, name: str, params: hyperparams.InstantiableParams) -> BaseLayer:
    """Creates a child from a copy of `params`, as the attribute `self.<name>`.

    The child inherits dtype, fprop_dtype, random_seed and params_init from this layer if its Params
    leave them None.

    Raises:
      ValueError: the name is taken, or the variables already exist.
    """
    self._CheckNewName(name)
    child = self._MakeChild(name, name, params)
    self._AddChild(name, child)
    return child

  def CreateChildren(
    self, name: str, params: Sequence[Any] | Mapping[str, Any], *, seed_roots: bool = False
  ) -> Any:
    """Creates a list or dict of children, as the attribute `self.<name>`.

    Args:
      name: the name of the list or dict; unnamed children are called `<name>_<i>`.
      params: a list, or a dict by name, of the children's Params.
      seed_roots: whether each child is an element of a sequence that may be cut into stages.
    """
    self._CheckNewName(name)
    if isinstance(params, Mapping):
      children: Any = nested_map.NestedMap(
        {k: self._MakeChild(f'{name}.{k}', f'{name}_{k}', p) for k, p in params.items()}
      )
      layers = list(children.values())
    else:
      children = [self._MakeChild(f'{name}[{i}]', f'{name}_{i}', p) for i, p in enumerate(params)]
      layers = children
    for layer in layers:
      layer.__dict__['_is_seed_root'] = seed_roots
    self._AddChild(name, children)
    return children

  def CreateVariable(
    self, name: str, weight: weight_params.WeightParams, trainable: bool = True
  ) -> None:
    """Declares a weight, `theta.<name>` in FProp. Allocates nothing yet.

    Args:
      name: the weight's name within this layer.
      weight: its shape, and its init and dtype if they differ from the layer's.
      trainable: False for statistics and other weights without gradients.
    """
    self._CheckNewName(name)
    p = self.params
    weight = weight_params.WeightParams(
      weight.shape, weight.init or p.params_init, weight.dtype or p.dtype
    )
    self._weights[name] = (weight, trainable)

  def _AddChild(self, name: str, child: Any) -> None:
    self._layer_children[name] = child
    super().__setattr__(f'_child_{name}', child)  # For tf.Module's tracking.

  def _MakeChild(self, key: str, name: str, params: Any) -> BaseLayer:
    if not isinstance(params, hyperparams.InstantiableParams):
      raise TypeError(
        f'{self.path}.{key}: expected the Params of a layer, got {type(params).__name__}'
      )
    p = params.Copy()
    p.name = p.name or name
    for inherited in INHERITED:
      if getattr(p, inherited) is None:
        setattr(p, inherited, getattr(self.params, inherited))
    child = p.Instantiate()
    child.__dict__.update(_parent=self, _key=key)  # Not tracked either, as in LayerTree.
    return child

  def _CheckNewName(self, name: str) -> None:
    if self._variables is not None:
      raise ValueError(
        f'{self.path}: cannot create {name!r}, the variables already exist; create children and '
        'variables in __init__'
      )
    nested_map.NestedMap.CheckKey(name)
    if name in self._layer_children or name in self._weights or hasattr(type(self), name):
      raise ValueError(f'{self.path}: the name {name!r} is already taken')

  def __setattr__(self, name: str, value: Any) -> None:
    if isinstance(value, BaseLayer):
      raise ValueError(
        f'{self.path}: {name} is set to a layer, whose weights would be missing; create it with '
        f'CreateChild({name!r}, params)'
      )
    super().__setattr__(name, value)

  def __getattr__(self, name: str) -> Any:
    # Python calls this only if the normal look-up failed, so `name` can only be a child.
    children = self.__dict__.get('_layer_children', {})
    if name in children:
      return children[name]
    raise AttributeError(
      f'{type(self).__name__} has no attribute and no child {name!r}'
      + (f'; children: {", ".join(children)}' if children else '')
    )

  # ---- computing -------------------------------------------------------------------------------

  @property
  def do_eval(self) -> bool:
    """Whether FProp runs in evaluation or inference mode, without dropout."""
    return fprop_context.Current().do_eval

  def FProp(self, theta: nested_map.NestedMap, *args: Any) -> Any:
    """Computes the layer's outputs from its weights `theta` and its inputs, without side effects.

    A subclass overrides it. Several outputs are a tuple.
    """
    raise NotImplementedError(f'{type(self).__name__} has no FProp')

  def __call__(self, *args: Any) -> Any:
    """Runs `FProp` with the layer's own weights."""
    return self.FProp(self.theta, *args)

  def FPropDefaultTheta(self, *args: Any) -> Any:
    """Runs `FProp` with the layer's own weights (Lingvo's name of `__call__`)."""
    return self.FProp(self.theta, *args)

  def StateFromSums(
    self, state: nested_map.NestedMap, sums: nested_map.NestedMap
  ) -> Mapping[str, tf.Tensor]:
    """Returns new values of weights that follow statistics of the data, such as moving averages.

    A layer that calls `fprop_context.Current().AddSums(self, sums)` in FProp overrides it. It is
    called once after each mini-batch of training, never for a recomputation or in evaluation,
    whether or not the layer's trainable weights are being trained.

    Args:
      state: the present values of this layer's own non-trainable weights, by name.
      sums: the sums that FProp reported, added up over all micro-batches of the mini-batch.

    Returns:
      {name: new value}; all other weights keep their values.
    """
    raise NotImplementedError(
      f'{type(self).__name__} reports sums by AddSums but has no StateFromSums'
    )

  def _CastToFPropDtype(self, value: Any) -> Any:
    """Returns the nest `value` with its floating-point tensors cast to fprop_dtype."""

    def Cast(x: Any) -> Any:
      if x is None or not x.dtype.is_floating:
        return x
      return tf.cast(x, self.params.fprop_dtype)

    return tf.nest.map_structure(Cast, value)

  # ---- decoding --------------------------------------------------------------------------------

  def Prefill(
    self, theta: nested_map.NestedMap, *args: Any, max_length: int
  ) -> tuple[Any, nested_map.NestedMap]:
    """Runs FProp on the first positions, a prompt, and returns the states for `ExtendStep`.

    Like ExtendStep, it runs in evaluation mode and has no side effects. These defaults serve layers
    with `is_position_wise`. Another layer that can decode overrides ExtendStep, and also Prefill if
    its states are not empty.

    Args:
      theta: the weights.
      *args: the arguments of FProp, [batch, time, ...].
      max_length: number of positions that the states must have room for, including the prompt.

    Returns:
      The outputs of FProp, and the states: a possibly empty NestedMap of tensors [batch, ...].

    Raises:
      NotImplementedError: this layer, or one below it, cannot decode position by position.
    """
    del max_length
    if type(self).ExtendStep is BaseLayer.ExtendStep:
      self._CheckPositionWise()
    return self.FProp(theta, *args), nested_map.NestedMap()

  def ExtendStep(
    self, theta: nested_map.NestedMap, states: nested_map.NestedMap, *args: Any, time_step: Any
  ) -> tuple[Any, nested_map.NestedMap]:
    """Runs FProp on one more position, after the positions that `states` summarise.

    Args:
      theta: the weights.
      states: the states from Prefill or the previous ExtendStep.
      *args: the arguments of FProp at this position only: [batch, 1, ...].
      time_step: int32 scalar, the index of the position, below `max_length`; the prompt begins at
        0.

    Returns:
      The outputs of this position, and the new states.

    Raises:
      NotImplementedError: this layer, or one below it, cannot decode position by position.
    """
    del time_step
    self._CheckPositionWise()
    return self.FProp(theta, *args), states

  def _CheckPositionWise(self) -> None:
    for layer in self.Descendants():
      if not layer.is_position_wise:
        raise NotImplementedError(
          f'{layer.path}: a {type(layer).__name__} cannot decode position by position; write its '
          'Prefill and ExtendStep, or set is_position_wise = True in the class if each position of '
          'its outputs depends on the same position of its inputs alone'
        )

  def __repr__(self) -> str:
    return f'<{type(self).__name__} {self.path}>'
