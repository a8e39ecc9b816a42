# SPDX-License-Identifier: Apache-2.0
"""Updates weights that follow statistics of the data, such as the moving averages of batch norm.

A layer reports sums by `fprop_context.Current().AddSums`, and computes new values from them in
`StateFromSums`. The functions here call it once for each mini-batch, for the engine and for custom
training loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import tensorflow as tf

from lingvo_gpipe.core import nested_map


class StatefulLayer(Protocol):
  """A layer that reports sums, as `BaseLayer` describes its members."""

  sums_over_replicas: bool

  @property
  def path(self) -> str: ...

  @property
  def own_vars(self) -> dict[str, tf.Variable]: ...

  def Ancestors(self) -> Iterator[Any]: ...

  def StateFromSums(
    self, state: nested_map.NestedMap, sums: nested_map.NestedMap
  ) -> Mapping[str, tf.Tensor]: ...


def NextState(
  layer: StatefulLayer, sums: nested_map.NestedMap, state: Mapping[str, tf.Tensor] | None = None
) -> dict[str, tf.Tensor]:
  """Returns the values of `layer.StateFromSums`; the present values if a number is not finite.

  Args:
    layer: the layer that reported the sums.
    sums: the layer's sums over the mini-batch, by name.
    state: the result for the previous mini-batch, if it was not assigned yet.

  Returns:
    {name: new value of the weight}, on the device of the weights.

  Raises:
    ValueError: StateFromSums returned a name that is not a non-trainable weight of the layer.
  """
  variables = {name: v for name, v in layer.own_vars.items() if not v.trainable}
  with tf.device(next(iter(variables.values())).device if variables else None):
    present = nested_map.NestedMap(variables).Transform(tf.convert_to_tensor)
    present.update(state or {})
    new = layer.StateFromSums(present, sums)
    if unknown := sorted(new.keys() - variables.keys()):
      raise ValueError(
        f'{layer.path}: StateFromSums returned {", ".join(unknown)}; the non-trainable weights '
        f'of the layer are {", ".join(variables) or "none"}'
      )
    values = {name: tf.cast(value, variables[name].dtype) for name, value in new.items()}
    floats = [x for x in (*tf.nest.flatten(sums), *values.values()) if x.dtype.is_floating]
    is_finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(x)) for x in floats])
    return {name: tf.where(is_finite, value, present[name]) for name, value in values.items()}


def UpdateFromSums(layer: StatefulLayer, sums: nested_map.NestedMap) -> None:
  """Assigns `NextState` to the layer's weights."""
  for name, value in NextState(layer, sums).items():
    variable = layer.own_vars[name]
    with tf.device(variable.device):
      variable.assign(value)
