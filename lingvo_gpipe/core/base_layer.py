# SPDX-License-Identifier: Apache-2.0
"""`BaseLayer`: a layer is Params, children, weights and a pure function `FProp(theta, *args)`.

Weights are declared in the constructor and allocated later, by `InstantiateVariables`, on the
device of the stage that the layer belongs to. Counting a model's parameters allocates nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import fprop_context, fprop_trace, hyperparams, nested_map, weight_params

# Makes the variable of a path on a device, by the function or in a way of its own.
VariableMaker = Callable[[str, str | None, Callable[[], tf.Variable]], tf.Variable]

# Params that a child takes from its parent where it has None, with the root's own default.
INHERITED = {
  'dtype': tf.float32,
  'fprop_dtype': None,  # The layer's dtype.
  'random_seed': 0,
  'params_init': weight_params.WeightInit.Xavier(),
}


class BaseLayer(tf.Module):
  """Base class of all layers (Lingvo's BaseLayer, on tf.Module).

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
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """The Params of this class; None in the first four means: as the parent's."""
    p = hyperparams.InstantiableParams(cls)
    p.Define('name', '', 'Name of this layer: lower case, digits and underscores.')
    p.Define('dtype', None, "Dtype of the weights. None: the parent's; float32 at the root.")
    p.Define('fprop_dtype', None, "Dtype of activations. None: the parent's, or dtype.")
    p.Define('random_seed', None, "Seed of initial values and dropout. None: the parent's, or 0.")
    p.Define('params_init', None, "WeightInit of weights without one. None: the parent's, Xavier.")
    return p

  _params: Any
  _layer_children: dict[str, Any]
  _weights: dict[str, tuple[weight_params.WeightParams, bool]]

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    """Copies `params`; ValueError if they belong to another class or have no legal name."""
    p = params.Copy()
    if p.cls is not type(self):
      raise ValueError(
        f'{type(self).__name__} was given the Params of {getattr(p.cls, "__name__", p.cls)}; '
        'use params.Instantiate()'
      )
    if not p.name:
      raise ValueError(f'the Params of a {type(self).__name__} need a name: set p.name')
    nested_map.NestedMap.CheckKey(p.name)
    super().__init__(name=p.name)
    for key, default in INHERITED.items():
      if getattr(p, key) is None:
        setattr(p, key, default)
    p.dtype = tf.as_dtype(p.dtype)
    p.fprop_dtype = p.dtype if p.fprop_dtype is None else tf.as_dtype(p.fprop_dtype)
    p.Freeze()
    # These go past tf.Module's tracking, which made up a third of the time of a large model's
    # construction.
    self.__dict__.update(_params=p, _layer_children={}, _weights={})
    self._parent: BaseLayer | None = None
    self._key = p.name
    self._is_seed_root = False
    self._variables: dict[str, tf.Variable] | None = None
    self._variable_maker: VariableMaker | None = None

  # ---- structure -------------------------------------------------------------------------------

  @property
  def params(self) -> Any:
    """The layer's own frozen Params."""
    return self._params

  @property
  def path(self) -> str:
    """Dotted names from the root, as in `lm.stack.layers[3].self_atten`."""
    return self._key if self._parent is None else f'{self._parent.path}.{self._key}'

  @property
  def children(self) -> nested_map.NestedMap:
    """The children: {name: layer, or a list or dict of layers}."""
    return nested_map.NestedMap(self._layer_children)

  def Ancestors(self) -> Iterator[BaseLayer]:
    """This layer, its parent, and so on up to the root."""
    layer: BaseLayer | None = self
    while layer is not None:
      yield layer
      layer = layer._parent

  @property
  def seed_root(self) -> BaseLayer:
    """The layer of the outermost sequence that this layer is or is part of; else the root."""
    ancestors = list(self.Ancestors())
    return next((a for a in reversed(ancestors) if a._is_seed_root), ancestors[-1])

  def CreateChild(self, name: str, params: hyperparams.InstantiableParams) -> BaseLayer:
    """Makes a child from a copy of `params`; it is reached as `self.<name>`.

    The child takes dtype, fprop_dtype, random_seed and params_init from this layer where its own
    are None.

    Raises:
      ValueError: the name is taken, or variables were already made.
    """
    self._CheckNewName(name)
    child = self._MakeChild(name, name, params)
    self._AddChild(name, child)
    return child

  def CreateChildren(
    self, name: str, params: Sequence[Any] | Mapping[str, Any], *, seed_roots: bool = False
  ) -> Any:
    """Makes a list or dict of children, reached as `self.<name>[i]`.

    Args:
      name: the name of the list or dict; unnamed children are called `<name>_<i>`.
      params: Params of each child; a dict of them by name works too.
      seed_roots: True where each child is an element of a sequence that may be cut into stages.
    """
    self._CheckNewName(name)
    if isinstance(params, Mapping):
      made: Any = nested_map.NestedMap(
        {k: self._MakeChild(f'{name}.{k}', f'{name}_{k}', p) for k, p in params.items()}
      )
      layers = list(made.values())
    else:
      made = [self._MakeChild(f'{name}[{i}]', f'{name}_{i}', p) for i, p in enumerate(params)]
      layers = made
    for layer in layers:
      layer._is_seed_root = seed_roots
    self._AddChild(name, made)
    return made

  def _AddChild(self, name: str, child: Any) -> None:
    self._layer_children[name] = child
    super().__setattr__(f'_child_{name}', child)  # What tf.Module tracks.

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
    child._parent = self
    child._key = key
    return child

  def _CheckNewName(self, name: str) -> None:
    if self._variables is not None:
      raise ValueError(
        f'{self.path}: {name!r} comes too late, the variables exist; create children and '
        'variables in __init__'
      )
    nested_map.NestedMap.CheckKey(name)
    if name in self._layer_children or name in self._weights or hasattr(type(self), name):
      raise ValueError(f'{self.path}: the name {name!r} is already taken')

  def __setattr__(self, name: str, value: Any) -> None:
    if isinstance(value, BaseLayer) and name != '_parent':
      raise ValueError(
        f'{self.path}: {name} is set to a layer, which would be left out of the weights; make it '
        f'with CreateChild({name!r}, params)'
      )
    super().__setattr__(name, value)

  def __getattr__(self, name: str) -> Any:
    # Only called where normal look-up failed, that is for children.
    children = self.__dict__.get('_layer_children', {})
    if name in children:
      return children[name]
    raise AttributeError(
      f'{type(self).__name__} has no attribute and no child {name!r}'
      + (f'; children: {", ".join(children)}' if children else '')
    )

  def ChildLayers(self) -> Iterator[BaseLayer]:
    """The direct children, lists and dicts opened, in order of creation."""
    for child in self._layer_children.values():
      if isinstance(child, BaseLayer):
        yield child
      else:
        yield from child.values() if isinstance(child, Mapping) else child

  def Descendants(self) -> Iterator[BaseLayer]:
    """This layer and all layers below it, parents first."""
    yield self
    for child in self.ChildLayers():
      yield from child.Descendants()

  # ---- weights ---------------------------------------------------------------------------------

  def CreateVariable(
    self, name: str, weight: weight_params.WeightParams, trainable: bool = True
  ) -> None:
    """Declares a weight: `theta.<name>` in FProp. Nothing is allocated yet.

    Args:
      name: the weight's name within this layer.
      weight: its shape, and its init and dtype where they differ from the layer's.
      trainable: False for statistics and the like, which no gradient touches.
    """
    self._CheckNewName(name)
    p = self.params
    weight = weight_params.WeightParams(
      weight.shape, weight.init or p.params_init, weight.dtype or p.dtype
    )
    self._weights[name] = (weight, trainable)

  def WeightSpecs(self) -> dict[str, tuple[weight_params.WeightParams, bool]]:
    """{path: (weight, trainable)} of this layer and all below; allocates nothing."""
    specs = {f'{self.path}.{name}': spec for name, spec in self._weights.items()}
    for child in self.ChildLayers():
      specs.update(child.WeightSpecs())
    return specs

  def WeightTensorSpecs(self) -> nested_map.NestedMap:
    """A nest like `vars` with a tf.TensorSpec for each weight; allocates nothing."""
    own = {name: tf.TensorSpec(w.shape, w.dtype) for name, (w, _) in self._weights.items()}
    return self._Nest(own, lambda child: child.WeightTensorSpecs())

  def NumParams(self) -> int:
    """Count of trainable weights, from their declared shapes."""
    return sum(w.num_elements for w, trainable in self.WeightSpecs().values() if trainable)

  def SetVariableMaker(self, maker: VariableMaker) -> None:
    """Has the variables of this layer and those below made by `maker`: several models share some.

    To be called on the root, before `InstantiateVariables`.
    """
    self._variable_maker = maker

  def InstantiateVariables(self, device: str | None = None) -> None:
    """Allocates this layer's and its descendants' weights, on `device` if one is given.

    Initial values depend on the run's seed and the weight's path only. Calling it again changes
    nothing: a subtree that has variables keeps them.
    """
    for child in self.ChildLayers():
      child.InstantiateVariables(device)
    if self._variables is not None:
      return
    *_, root = self.Ancestors()
    variables = {}
    for name in self._weights:
      create = functools.partial(self._NewVariable, name, device)
      maker = root._variable_maker
      variables[name] = maker(f'{self.path}.{name}', device, create) if maker else create()
    self._variables = variables

  def _NewVariable(self, name: str, device: str | None) -> tf.Variable:
    weight, trainable = self._weights[name]
    path = f'{self.path}.{name}'
    with tf.init_scope(), tf.device(device) if device else contextlib.nullcontext():
      try:
        return tf.Variable(
          weight_params.InitialValue(weight, self.params.random_seed, path),
          trainable=trainable,
          # Keras refuses slashes, TensorFlow brackets.
          name=path.replace('[', '_').replace(']', ''),
        )
      except tf.errors.OpError as e:
        e.add_note(f'while the weight {path} was made, of shape {list(weight.shape)}')
        raise

  @property
  def vars(self) -> nested_map.NestedMap:
    """The variables of this layer and its descendants, nested as the layers are.

    Raises:
      ValueError: InstantiateVariables was not called.
    """
    return self._Nest(self._Made(), lambda child: child.vars)

  def _Made(self) -> dict[str, tf.Variable]:
    if self._variables is None:
      raise ValueError(f'{self.path} has no variables yet; call InstantiateVariables() first')
    return self._variables

  def _Nest(
    self, own: Mapping[str, Any], fn: Callable[..., Any], *nests: Mapping[str, Any]
  ) -> nested_map.NestedMap:
    """A nest of the shape of `vars`: `own`, and `fn` of each child and its part of `nests`."""
    result = nested_map.NestedMap(own)
    for name, child in self._layer_children.items():
      parts = [nest[name] for nest in nests]
      if isinstance(child, BaseLayer):
        result[name] = fn(child, *parts)
      elif isinstance(child, Mapping):
        result[name] = nested_map.NestedMap(
          {k: fn(c, *(part[k] for part in parts)) for k, c in child.items()}
        )
      else:
        result[name] = [fn(*c) for c in zip(child, *parts, strict=True)]
    return result

  def VariablesByPath(self) -> dict[str, tf.Variable]:
    """{path: variable} of this layer and all below: what a checkpoint holds."""
    found = {f'{self.path}.{name}': v for name, v in self._Made().items()}
    for child in self.ChildLayers():
      found.update(child.VariablesByPath())
    return found

  @property
  def variables(self) -> tuple[tf.Variable, ...]:
    """All variables of this layer and below."""
    # tf.Module would find its way up through the parent too.
    return tuple(self.VariablesByPath().values())

  @property
  def trainable_variables(self) -> tuple[tf.Variable, ...]:
    """The trainable ones among `variables`."""
    return tuple(v for v in self.variables if v.trainable)

  @property
  def non_trainable_variables(self) -> tuple[tf.Variable, ...]:
    """The other ones among `variables`."""
    return tuple(v for v in self.variables if not v.trainable)

  @property
  def submodules(self) -> tuple[BaseLayer, ...]:
    """All layers below this one."""
    return tuple(self.Descendants())[1:]

  @property
  def theta(self) -> nested_map.NestedMap:
    """The weights to compute with: `vars`, floating ones cast to fprop_dtype."""
    return self.ThetaFrom(self.vars)

  def ThetaFrom(self, variables: nested_map.NestedMap) -> nested_map.NestedMap:
    """Turns a nest like `vars` into theta: each layer's weights in its fprop_dtype.

    A weight that needs no cast is handed on as it is, variable or tensor, so a gather from a
    table stays a gather and no copy of a weight is made.
    """
    p = self.params
    own = {}
    for name in self._weights:
      weight = variables[name]
      cast = weight.dtype.is_floating and weight.dtype != p.fprop_dtype
      own[name] = tf.cast(weight, p.fprop_dtype) if cast else weight
    return self._Nest(own, lambda child, part: child.ThetaFrom(part), variables)

  # ---- computing -------------------------------------------------------------------------------

  @property
  def do_eval(self) -> bool:
    """True in evaluation and inference: no dropout."""
    return fprop_context.Current().do_eval

  def FProp(self, theta: nested_map.NestedMap, *args: Any) -> Any:
    """Computes the layer's outputs from its weights `theta` and its inputs; has no side effects.

    A subclass overrides it; several outputs are a tuple.
    """
    raise NotImplementedError(f'{type(self).__name__} has no FProp')

  @property
  def skips_in(self) -> tuple[str, ...]:
    """Names of the skip connections that end here: tensors of earlier layers of the sequence."""
    return ()

  @property
  def skips_out(self) -> tuple[str, ...]:
    """Names of the skip connections that begin here."""
    return ()

  def FPropSkips(
    self, theta: nested_map.NestedMap, skips: nested_map.NestedMap, *args: Any
  ) -> tuple[Any, nested_map.NestedMap]:
    """FProp of a layer in a sequence: takes `skips_in`, returns the outputs and `skips_out`."""
    del skips
    return self.FProp(theta, *args), nested_map.NestedMap()

  # ---- decoding --------------------------------------------------------------------------------

  # Whether in evaluation each position of the outputs [batch, time, ...] follows from that position
  # of the inputs alone, provided that it does so in the children: decoding then needs no code.
  is_position_wise = False

  # Whether FProp calls `FPropContext.SumOverReplicas` in training.
  sums_over_replicas = False

  def __init_subclass__(cls, **kwargs: Any) -> None:
    """A class that writes an FProp of its own has to say anew that it is position-wise."""
    super().__init_subclass__(**kwargs)
    if 'FProp' in vars(cls) and 'is_position_wise' not in vars(cls):
      cls.is_position_wise = False

  def Prefill(
    self, theta: nested_map.NestedMap, *args: Any, max_length: int
  ) -> tuple[Any, nested_map.NestedMap]:
    """FProp of the first positions, a prompt, and what `ExtendStep` has to know of them.

    To be called in evaluation mode, as ExtendStep. The two have no side effects. Here they serve
    layers with `is_position_wise`; another layer that can decode overrides ExtendStep, and this
    where the states are not empty.

    Args:
      theta: the weights.
      *args: as for FProp, [batch, time, ...].
      max_length: how many positions the states must have room for, those of the prompt included.

    Returns:
      What FProp returns, and the states: a NestedMap, maybe empty, of tensors [batch, ...].

    Raises:
      NotImplementedError: this layer, or one below, cannot go position by position.
    """
    del max_length
    if type(self).ExtendStep is BaseLayer.ExtendStep:
      self._CheckPositionWise()
    return self.FProp(theta, *args), nested_map.NestedMap()

  def ExtendStep(
    self, theta: nested_map.NestedMap, states: nested_map.NestedMap, *args: Any, time_step: Any
  ) -> tuple[Any, nested_map.NestedMap]:
    """FProp of one more position, after those that `states` stand for.

    Args:
      theta: the weights.
      states: what Prefill or the ExtendStep before returned.
      *args: as for FProp, but of this position only: [batch, 1, ...].
      time_step: int32 scalar, the index of the position, below `max_length`; the prompt's first one
        is 0.

    Returns:
      The outputs of this position, and the new states.

    Raises:
      NotImplementedError: as Prefill.
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
          'its outputs follows from that position of its inputs alone'
        )

  # ---- state -----------------------------------------------------------------------------------

  def StateFromSums(
    self, state: nested_map.NestedMap, sums: nested_map.NestedMap
  ) -> Mapping[str, tf.Tensor]:
    """New values of weights that follow statistics of the data, as BatchNorm's moving averages.

    A layer that calls `fprop_context.Current().AddSums(self, sums)` in FProp overrides it. It is
    called once after each mini-batch of training, never for a recomputation or in evaluation.
    Whether the layer's trainable weights are trained does not matter.

    Args:
      state: the present values of this layer's own non-trainable weights, by name.
      sums: what FProp reported, added up over all micro-batches of the mini-batch.

    Returns:
      {name: new value}; weights that are left out stay as they are.
    """
    raise NotImplementedError(
      f'{type(self).__name__} reports sums by AddSums but has no StateFromSums'
    )

  def NextState(
    self, sums: nested_map.NestedMap, state: Mapping[str, tf.Tensor] | None = None
  ) -> dict[str, tf.Tensor]:
    """What `StateFromSums` returns; as it was where a sum or a value is not finite.

    Args:
      sums: as for `StateFromSums`.
      state: what this returned for the mini-batch before, where that was not assigned yet.

    Returns:
      {name: value of the weight}, on the device of the weights.

    Raises:
      ValueError: StateFromSums names something that is not a non-trainable weight of the layer.
    """
    own = {name: v for name, v in (self._variables or {}).items() if not v.trainable}
    with tf.device(next(iter(own.values())).device if own else None):
      present = nested_map.NestedMap(own).Transform(tf.convert_to_tensor)
      present.update(state or {})
      new = self.StateFromSums(present, sums)
      if unknown := sorted(new.keys() - own.keys()):
        raise ValueError(
          f'{self.path}: StateFromSums returned {", ".join(unknown)}; the non-trainable weights '
          f'of the layer are {", ".join(own) or "none"}'
        )
      values = {name: tf.cast(value, own[name].dtype) for name, value in new.items()}
      floats = [x for x in (*tf.nest.flatten(sums), *values.values()) if x.dtype.is_floating]
      is_finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(x)) for x in floats])
      return {name: tf.where(is_finite, value, present[name]) for name, value in values.items()}

  def UpdateFromSums(self, sums: nested_map.NestedMap) -> None:
    """Assigns `NextState`."""
    for name, value in self.NextState(sums).items():
      variable = self._Made()[name]
      with tf.device(variable.device):
        variable.assign(value)

  def FPropDefaultTheta(self, *args: Any) -> Any:
    """`FProp` with the layer's own weights."""
    return self.FProp(self.theta, *args)

  def __call__(self, *args: Any) -> Any:
    """Same as `FPropDefaultTheta`."""
    return self.FProp(self.theta, *args)

  def _CastToFPropDtype(self, value: Any) -> Any:
    """`value`, a nest, with its floating tensors cast to fprop_dtype."""

    def Cast(x: Any) -> Any:
      if x is None or not x.dtype.is_floating:
        return x
      return tf.cast(x, self.params.fprop_dtype)

    return tf.nest.map_structure(Cast, value)

  @classmethod
  def FPropMetaSkips(
    cls,
    params: hyperparams.InstantiableParams,
    skip_specs: nested_map.NestedMap,
    *input_specs: Any,
  ) -> tuple[nested_map.NestedMap, nested_map.NestedMap]:
    """FPropMeta of a layer in a sequence, and the specs of its `skips_out`."""
    del skip_specs
    return cls.FPropMeta(params, *input_specs), nested_map.NestedMap()

  @classmethod
  def FPropMeta(
    cls, params: hyperparams.InstantiableParams, *input_specs: Any
  ) -> nested_map.NestedMap:
    """Output shapes and cost of one FProp, without allocating or running anything.

    This default traces the layer once and counts the operations of its graph; a subclass
    overrides it where the figures are exact and simple.

    Args:
      params: the layer's Params.
      *input_specs: a (nest of) tf.TensorSpec with static shapes for each input; None allowed.

    Returns:
      NestedMap(flops, out_specs): floating point operations of one forward call (a multiply-add
      counts as two) and a tuple with the (nest of) tf.TensorSpec of each output.
    """
    p = params.Copy()
    p.name = p.name or 'layer'
    return fprop_trace.TraceMeta(p.Instantiate(), *input_specs)

  def __repr__(self) -> str:
    return f'<{type(self).__name__} {self.path}>'
