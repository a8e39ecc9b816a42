# SPDX-License-Identifier: Apache-2.0
"""Skip connections from any layer of a sequence to any later one.

    sub = [a, StashLayer(key='x'), b, c, PopLayer(key='x', combine='add'), d]

In a pipeline a skip tensor goes straight from the stage that makes it to each stage that takes it,
whatever lies between, and is freed after its last use.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import base_layer, hyperparams, nested_map

COMBINE = ('add', 'concat', 'append')


class StashLayer(base_layer.BaseLayer):
  """Hands its arguments on, and the first of them to each PopLayer of the same key as well."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """The Params of a StashLayer."""
    p = super().Params()
    p.Define('key', '', 'Name of the skip connection; one of its kind in the sequence.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    nested_map.NestedMap.CheckKey(self.params.key)

  @property
  def skips_out(self) -> tuple[str, ...]:
    """The key."""
    return (self.params.key,)

  def FProp(self, theta: nested_map.NestedMap, *args: Any) -> Any:
    """The arguments as they are."""
    del theta
    return args[0] if len(args) == 1 else args

  def FPropSkips(
    self, theta: nested_map.NestedMap, skips: nested_map.NestedMap, *args: Any
  ) -> tuple[Any, nested_map.NestedMap]:
    """The arguments as they are, and the first one, a nest of tensors, under the key."""
    return self.FProp(theta, *args), nested_map.NestedMap({self.params.key: args[0]})


class PopLayer(base_layer.BaseLayer):
  """Joins what a StashLayer of the same key was given to its own first argument."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """The Params of a PopLayer."""
    p = super().Params()
    p.Define('key', '', 'Name of the skip connection.')
    p.Define('combine', 'add', 'add, concat (on the last axis) or append (as a last argument).')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    nested_map.NestedMap.CheckKey(self.params.key)
    if self.params.combine not in COMBINE:
      raise ValueError(
        f'{self.path}: combine must be one of {", ".join(COMBINE)}, got {self.params.combine!r}'
      )

  @property
  def skips_in(self) -> tuple[str, ...]:
    """The key."""
    return (self.params.key,)

  def FPropSkips(
    self, theta: nested_map.NestedMap, skips: nested_map.NestedMap, *args: Any
  ) -> tuple[Any, nested_map.NestedMap]:
    """The arguments with the stashed tensor joined to them.

    Args:
      theta: empty.
      skips: {key: tensor}, of the shape of the first argument for `add`, of its shape but for the
        last axis for `concat`, any nest for `append`.
      *args: of which the first is changed.
    """
    del theta
    joined = _Join(self.path, self.params.combine, skips[self.params.key], args)
    return joined[0] if len(joined) == 1 else joined, nested_map.NestedMap()


def _Join(path: str, combine: str, stashed: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
  if combine == 'append':
    return (*args, stashed)
  if combine == 'concat':
    return (tf.concat([args[0], stashed], axis=-1), *args[1:])
  if args[0].shape != stashed.shape:
    raise ValueError(f'{path}: cannot add a skip of shape {stashed.shape} to {args[0].shape}')
  return (args[0] + stashed, *args[1:])
