# SPDX-License-Identifier: Apache-2.0
"""A layer that applies an activation function."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gpipe.core import base_layer, hyperparams, nested_map
from lingvo_gpipe.layers import activations


class ActivationLayer(base_layer.BaseLayer):
  """y = activation(x)."""

  is_position_wise = True

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of an ActivationLayer."""
    p = super().Params()
    p.Define(
      'activation', 'RELU', 'Name of the activation; see layers/activations.py.', activations.NAME
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    self._activation = activations.GetFn(self.params.activation)

  def FProp(self, theta: nested_map.NestedMap, inputs: tf.Tensor) -> tf.Tensor:
    """Applies the activation to inputs of any shape."""
    del theta
    return self._activation(self._CastToFPropDtype(inputs))
