# SPDX-License-Identifier: Apache-2.0
"""Linear layers: matrix products over the last axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from lingvo_gpipe.core import base_layer, domain, hyperparams, nested_map, shapes, weight_params
from lingvo_gpipe.layers import activations, dropout


def MatMulLastDim(x: tf.Tensor, w: Any) -> tf.Tensor:
  """Multiplies the last axis of `x` [..., dim_in] by `w` [dim_in, dim_out]; returns [..., dim_out].

  Uses one plain matrix product: the gradient of a batched product would compute a weight gradient
  for each row of the batch and then sum them.
  """
  if x.shape.rank == 2:
    return tf.matmul(x, w)
  leading = shapes.GetShape(x)[:-1]
  dim_in, dim_out = w.shape
  return tf.reshape(tf.matmul(tf.reshape(x, [-1, dim_in]), w), [*leading, dim_out])


def ApplyPadding(paddings: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
  """Returns `x` [..., dim] with zeros at the positions for which `paddings` [...] is 1."""
  return x * tf.cast(1.0 - paddings, x.dtype)[..., tf.newaxis]


class LinearLayer(base_layer.BaseLayer):
  """y = x w, without bias."""

  is_position_wise = True

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of a LinearLayer."""
    p = super().Params()
    p.Define('input_dim', 0, 'Size of the last axis of the inputs.', domain.SIZE)
    p.Define('output_dim', 0, 'Size of the last axis of the outputs.', domain.SIZE)
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    self.CreateVariable('w', weight_params.WeightParams([p.input_dim, p.output_dim]))

  def FProp(self, theta: nested_map.NestedMap, inputs: tf.Tensor) -> tf.Tensor:
    """Maps inputs [..., input_dim] to [..., output_dim]."""
    shapes.CheckLastDim(self.path, inputs, self.params.input_dim)
    return MatMulLastDim(self._CastToFPropDtype(inputs), theta.w)


class ProjectionLayer(base_layer.BaseLayer):
  """y = activation(x w + b)."""

  is_position_wise = True

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of a ProjectionLayer."""
    p = super().Params()
    p.Define('input_dim', 0, 'Size of the last axis of the inputs.', domain.SIZE)
    p.Define('output_dim', 0, 'Size of the last axis of the outputs.', domain.SIZE)
    p.Define('has_bias', False, 'Whether to add a bias b.')
    p.Define('bias_init', 0.0, 'Initial value of all entries of b.', domain.Number())
    p.Define(
      'activation', 'RELU', 'Name of the activation; see layers/activations.py.', activations.NAME
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    self._activation = activations.GetFn(p.activation)
    self.CreateVariable('w', weight_params.WeightParams([p.input_dim, p.output_dim]))
    if p.has_bias:
      init = weight_params.WeightInit.Constant(p.bias_init)
      self.CreateVariable('b', weight_params.WeightParams([p.output_dim], init))

  def FProp(
    self, theta: nested_map.NestedMap, inputs: tf.Tensor, paddings: tf.Tensor | None = None
  ) -> tf.Tensor:
    """Projects the last axis of the inputs.

    Args:
      theta: w [input_dim, output_dim] and, if has_bias, b [output_dim].
      inputs: [..., input_dim].
      paddings: None, or [...] with 1.0 at positions whose outputs are to be 0.

    Returns:
      [..., output_dim] in fprop_dtype.
    """
    shapes.CheckLastDim(self.path, inputs, self.params.input_dim)
    shapes.CheckPaddings(self.path, paddings, inputs)
    y = MatMulLastDim(self._CastToFPropDtype(inputs), theta.w)
    if self.params.has_bias:
      y = tf.nn.bias_add(y, theta.b)
    y = self._activation(y)
    return y if paddings is None else ApplyPadding(paddings, y)


class FeedForwardNet(base_layer.BaseLayer):
  """A sequence of ProjectionLayers, each followed by dropout."""

  is_position_wise = True

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of a FeedForwardNet."""
    p = super().Params()
    p.Define('input_dim', 0, 'Size of the last axis of the inputs.', domain.SIZE)
    p.Define(
      'hidden_layer_dims',
      [],
      'Output sizes of the projections.',
      domain.ListOf(domain.SIZE, not_empty=True),
    )
    p.Define('projection_tpl', ProjectionLayer.Params(), 'Template of each projection.')
    p.Define(
      'dropout',
      dropout.DropoutLayer.Params(),
      'Params of the dropout after each projection, or a list with one entry for each.',
    )
    p.Define(
      'activation',
      'RELU',
      'Name of the activation, or a list with one entry for each projection.',
      activations.NAME | domain.ListOf(activations.NAME),
    )
    p.Define('has_bias', True, 'Whether the projections add a bias.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    num_layers = len(p.hidden_layer_dims)
    names = self._ForEach('activation', num_layers)
    dims = [p.input_dim, *p.hidden_layer_dims]
    projections = [
      p.projection_tpl.Copy().Set(
        input_dim=dims[i], output_dim=dims[i + 1], activation=names[i], has_bias=p.has_bias
      )
      for i in range(num_layers)
    ]
    self.CreateChildren('fc', projections)
    self.CreateChildren('dropout', self._ForEach('dropout', num_layers))

  def _ForEach(self, name: str, num_layers: int) -> list[Any]:
    """Returns a list with the value of a param for each projection."""
    value = self.params.Get(name)
    if isinstance(value, str) or not isinstance(value, Sequence):
      return [value] * num_layers
    if len(value) != num_layers:
      raise ValueError(
        f'{type(self).__name__} {self.params.name!r}: {name} must be one value or a list of '
        f'{num_layers}, one for each of hidden_layer_dims, got {len(value)}'
      )
    return list(value)

  def FProp(
    self, theta: nested_map.NestedMap, inputs: tf.Tensor, paddings: tf.Tensor | None = None
  ) -> tf.Tensor:
    """Maps inputs [..., input_dim] to [..., hidden_layer_dims[-1]]; 0 at padded positions."""
    x = inputs
    for i, (fc, drop) in enumerate(zip(self.fc, self.dropout, strict=True)):
      x = fc.FProp(theta.fc[i], x, paddings)
      x = drop.FProp(theta.dropout[i], x)
    return x
