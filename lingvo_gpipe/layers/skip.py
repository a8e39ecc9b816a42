# SPDX-License-Identifier: Apache-2.0
"""Skip connections from any layer of a sequence to any later one.

    sub = [a, StashLayer(key='x'), b, c, PopLayer(key='x', combine='add'), d]

In a pipeline a skip tensor is sent directly from the stage that produces it to each stage that
takes it, past all stages in between, and is freed after its last use.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import base_layer, domain, hyperparams, nested_map

COMBINE = ('add', 'concat', 'append')


class StashLayer(base_layer.BaseLayer):
  """Returns its arguments, and sends the first to each PopLayer with the same key."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of a StashLayer."""
    p = super().Params()
    p.Define('key', '', 'Name of the skip connection; unique in the sequence.', nested_map.KEY)
    return p

  @property
  def skips_out(self) -> tuple[str, ...]:
    """Names of the skip connections: the key."""
    return (self.params.key,)

  def FProp(self, theta: nested_map.NestedMap, *args: Any) -> Any:
    """Returns the arguments unchanged."""
    del theta
    return args[0] if len(args) == 1 else args

  def FPropSkips(
    self, theta: nested_map.NestedMap, skips: nested_map.NestedMap, *args: Any
  ) -> tuple[Any, nested_map.NestedMap]:
    """Returns the arguments unchanged, and {key: first argument}, a nest of tensors."""
    return self.FProp(theta, *args), nested_map.NestedMap({self.params.key: args[0]})


class PopLayer(base_layer.BaseLayer):
  """Joins the tensor from the StashLayer with the same key to its first argument."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of a PopLayer."""
    p = super().Params()
    p.Define('key', '', 'Name of the skip connection.', nested_map.KEY)
    p.Define(
      'combine',
      'add',
      'add, concat (on the last axis) or append (as the last argument).',
      domain.OneOf(*COMBINE),
    )
    return p

  @property
  def skips_in(self) -> tuple[str, ...]:
    """Names of the skip connections: the key."""
    return (self.params.key,)

  def FPropSkips(
    self, theta: nested_map.NestedMap, skips: nested_map.NestedMap, *args: Any
  ) -> tuple[Any, nested_map.NestedMap]:
    """Returns the arguments with the stashed tensor joined to them.

    Args:
      theta: empty.
      skips: {key: tensor}. For `add` it has the shape of the first argument, for `concat` this
        shape except for the last axis. For `append` it may be any nest.
      *args: the outputs of the previous layer. `add` and `concat` change the first.
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
