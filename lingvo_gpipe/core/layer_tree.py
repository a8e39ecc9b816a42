# SPDX-License-Identifier: Apache-2.0
"""A layer's place in the tree of layers, and the weights of the layer and its descendants.

This is the side of `BaseLayer` that the engine, the learner and the checkpointer use. The author of
a layer needs only `base_layer`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import nested_map, weight_params
from lingvo_gpipe.graph import side_effects

# Called as maker(path, device, create). Returns the variable at a path: `create()`, or another one.
VariableMaker = Callable[[str, str | None, Callable[[], tf.Variable]], tf.Variable]


class LayerTree(tf.Module):
  """The base class of `BaseLayer`: walks over the layers and their weights."""

  # tf.Module looks this up whenever an attribute is set; not to find it is slow.
  _self_setattr_tracking = True

  _params: Any
  _layer_children: dict[str, Any]
  _weights: dict[str, tuple[weight_params.WeightParams, bool]]
  _parent: Any
  _key: str
  _is_seed_root: bool
  _variables: dict[str, tf.Variable] | None
  _variable_maker: VariableMaker | None
  _base_names: frozenset[str]

  def __init__(self, params: Any) -> None:
    of_subclass = frozenset(self.__dict__)  # Attributes that it set before this call.
    super().__init__(name=params.name)
    # These assignments bypass tf.Module's tracking, which took a third of the time to construct a
    # large model.
    self.__dict__.update(
      _params=params,
      _layer_children={},
      _weights={},
      _parent=None,
      _key=params.name,
      _is_seed_root=False,
      _variables=None,
      _variable_maker=None,
    )
    self.__dict__['_base_names'] = frozenset([*self.__dict__, '_base_names']) - of_subclass

  # ---- layers ----------------------------------------------------------------------------------

  @property
  def path(self) -> str:
    """Dotted names from the root, for example `lm.stack.layers[3].self_atten`."""
    return self._key if self._parent is None else f'{self._parent.path}.{self._key}'

  def Attributes(self) -> list[dict[str, Any]]:
    """Returns the attributes that subclasses set, of this layer and of each descendant."""
    attributes = {
      name: self._Comparable(value)
      for name, value in self.__dict__.items()
      if name not in self._base_names
      # tf.Module sets these to track attributes, and `CreateChild` to let it find layers.
      and not name.startswith('_self_')
      and name.removeprefix('_child_') not in self._layer_children
      and not isinstance(getattr(type(self), name, None), functools.cached_property)
    }
    return [attributes, *(x for child in self.ChildLayers() for x in child.Attributes())]

  def _Comparable(self, value: Any) -> Any:
    """Returns a value that equals the same attribute of another layer."""
    if isinstance(value, tf.Variable):
      return value.ref()  # Equal to itself alone.
    if isinstance(value, tf.Tensor):
      return value.numpy() if hasattr(value, 'numpy') else value.ref()
    if isinstance(value, functools.partial):
      return value.func, value.args, value.keywords
    is_own_method = getattr(value, '__self__', None) is self
    return value.__func__ if is_own_method else value

  def Ancestors(self) -> Iterator[Any]:
    """Yields this layer, its parent, and so on up to the root."""
    layer: Any = self
    while layer is not None:
      yield layer
      layer = layer._parent

  def ChildLayers(self) -> Iterator[Any]:
    """Yields the direct children, including those in lists and dicts, in order of creation."""
    for child in self._layer_children.values():
      if isinstance(child, LayerTree):
        yield child
      else:
        yield from child.values() if isinstance(child, Mapping) else child

  def Descendants(self) -> Iterator[Any]:
    """Yields this layer and all layers below it, parents first."""
    yield self
    for child in self.ChildLayers():
      yield from child.Descendants()

  @property
  def submodules(self) -> tuple[Any, ...]:
    """All layers below this layer."""
    return tuple(self.Descendants())[1:]

  @property
  def seed_root(self) -> Any:
    """The outermost element of a sequence that contains this layer; without one, the root."""
    ancestors = list(self.Ancestors())
    return next((a for a in reversed(ancestors) if a._is_seed_root), ancestors[-1])

  # ---- declared weights ------------------------------------------------------------------------

  def WeightSpecs(self) -> dict[str, tuple[weight_params.WeightParams, bool]]:
    """Returns {path: (weight, trainable)} of this layer and its descendants; allocates nothing."""
    specs = {f'{self.path}.{name}': spec for name, spec in self._weights.items()}
    for child in self.ChildLayers():
      specs.update(child.WeightSpecs())
    return specs

  def WeightTensorSpecs(self) -> nested_map.NestedMap:
    """Returns a nest like `vars` with a tf.TensorSpec for each weight; allocates nothing."""
    specs = {name: tf.TensorSpec(w.shape, w.dtype) for name, (w, _) in self._weights.items()}
    return self._Nest(specs, lambda child: child.WeightTensorSpecs())

  def NumParams(self) -> int:
    """Returns the number of trainable weights, from their declared shapes."""
    return sum(w.num_elements for w, trainable in self.WeightSpecs().values() if trainable)

  # ---- variables -------------------------------------------------------------------------------

  def SetVariableMaker(self, maker: VariableMaker) -> None:
    """Lets `maker` create the variables of this tree, so that several models can share some.

    To be called on the root, before `InstantiateVariables`.
    """
    self._variable_maker = maker

  def InstantiateVariables(self, device: str | None = None) -> None:
    """Allocates the weights of this layer and its descendants, on `device` if it is given.

    Initial values depend on the run's seed and the weight's path only. A subtree that already has
    variables keeps them.
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
          weight_params.InitialValue(weight, self._params.random_seed, path),
          trainable=trainable,
          # Keras rejects slashes, TensorFlow brackets.
          name=path.replace('[', '_').replace(']', ''),
        )
      except tf.errors.OpError as e:
        e.add_note(f'while creating the weight {path} of shape {list(weight.shape)}')
        raise

  @property
  def own_vars(self) -> dict[str, tf.Variable]:
    """{name: variable} of this layer alone.

    Raises:
      ValueError: InstantiateVariables was not called, or FProp or the loss asks for them.
    """
    side_effects.CheckWeights(self.path)
    if self._variables is None:
      raise ValueError(f'{self.path} has no variables yet; call InstantiateVariables() first')
    return self._variables

  @property
  def vars(self) -> nested_map.NestedMap:
    """The variables of this layer and its descendants, nested as the layers are.

    Raises:
      ValueError: InstantiateVariables was not called.
    """
    return self._Nest(self.own_vars, lambda child: child.vars)

  def VariablesByPath(self) -> dict[str, tf.Variable]:
    """Returns {path: variable} of this layer and its descendants, as a checkpoint stores them."""
    variables = {f'{self.path}.{name}': v for name, v in self.own_vars.items()}
    for child in self.ChildLayers():
      variables.update(child.VariablesByPath())
    return variables

  @property
  def variables(self) -> tuple[tf.Variable, ...]:
    """All variables of this layer and its descendants."""
    # tf.Module would also follow the reference to the parent.
    return tuple(self.VariablesByPath().values())

  @property
  def trainable_variables(self) -> tuple[tf.Variable, ...]:
    """The trainable variables of this layer and its descendants."""
    return tuple(v for v in self.variables if v.trainable)

  @property
  def non_trainable_variables(self) -> tuple[tf.Variable, ...]:
    """The other variables of this layer and its descendants, such as moving averages."""
    return tuple(v for v in self.variables if not v.trainable)

  # ---- theta -----------------------------------------------------------------------------------

  @property
  def theta(self) -> nested_map.NestedMap:
    """The weights to compute with: `vars`, with floating-point weights cast to fprop_dtype."""
    return self.ThetaFrom(self.vars)

  def ThetaFrom(self, variables: nested_map.NestedMap) -> nested_map.NestedMap:
    """Turns a nest like `vars` into theta: each layer's weights in its fprop_dtype.

    A weight that needs no cast is returned unchanged, whether variable or tensor, so a gather from
    a table stays a gather and the weight is not copied.
    """
    fprop_dtype = self._params.fprop_dtype
    theta = {}
    for name in self._weights:
      weight = variables[name]
      cast = weight.dtype.is_floating and weight.dtype != fprop_dtype
      theta[name] = tf.cast(weight, fprop_dtype) if cast else weight
    return self._Nest(theta, lambda child, part: child.ThetaFrom(part), variables)

  def _Nest(
    self, own_values: Mapping[str, Any], fn: Callable[..., Any], *nests: Mapping[str, Any]
  ) -> nested_map.NestedMap:
    """Returns a nest like `vars`: `own_values`, and `fn(child, *parts of nests)` of each child."""
    result = nested_map.NestedMap(own_values)
    for name, child in self._layer_children.items():
      parts = [nest[name] for nest in nests]
      if isinstance(child, LayerTree):
        result[name] = fn(child, *parts)
      elif isinstance(child, Mapping):
        result[name] = nested_map.NestedMap(
          {k: fn(c, *(part[k] for part in parts)) for k, c in child.items()}
        )
      else:
        result[name] = [fn(*c) for c in zip(child, *parts, strict=True)]
    return result
