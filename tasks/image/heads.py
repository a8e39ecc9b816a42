# SPDX-License-Identifier: Apache-2.0
"""Heads of image networks: layers that map features to logits."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lingvo_gpipe import (
  base_layer,
  batch_norm,
  conv_batch_norm,
  domain,
  dropout,
  flatten,
  hyperparams,
  linear,
  nested_map,
  pooling,
  sequential,
)


class ClassifierHead(base_layer.BaseLayer):
  """Applies ReLU, the mean over all positions, dropout, and a projection to logits."""

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of a ClassifierHead."""
    p = super().Params()
    p.Define('input_dim', 0, 'Number of channels of the inputs.', domain.SIZE)
    p.Define('num_classes', 0, 'Number of classes.', domain.SIZE)
    p.Define(
      'dropout_prob',
      0.0,
      'Probability to drop a channel before the projection.',
      domain.PROBABILITY,
    )
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    self.CreateChild('pool', pooling.GlobalPoolingLayer.Params())
    self.CreateChild('dropout', dropout.DropoutLayer.Params().Set(keep_prob=1.0 - p.dropout_prob))
    self.CreateChild('projection', _Logits(p.input_dim, p.num_classes))

  def FProp(
    self,
    theta: nested_map.NestedMap,
    inputs: tf.Tensor,
    previous: tf.Tensor | None = None,
    aux_logits: tf.Tensor | None = None,
  ) -> Any:
    """Classifies images by their features.

    Args:
      theta: the weights.
      inputs: [batch, height, width, input_dim].
      previous: output of the cell before the last; not used.
      aux_logits: None, or the logits of an auxiliary head.

    Returns:
      Logits [batch, num_classes]; with `aux_logits` the tuple (logits, aux_logits).
    """
    del previous
    x = self.pool.FProp(theta.pool, tf.nn.relu(self._CastToFPropDtype(inputs)))
    x = self.dropout.FProp(theta.dropout, x)
    logits = self.projection.FProp(theta.projection, x)
    return logits if aux_logits is None else (logits, aux_logits)


class AuxiliaryHead(base_layer.BaseLayer):
  """A second classifier on the features of an earlier layer, in training only.

  A skip connection brings the features (see layers/skip.py). The head applies ReLU, the mean of 5x5
  windows at stride 3, a 1x1 convolution, a convolution over the whole remaining map, and a
  projection to logits, which are one more argument of the next layer (Szegedy et al. 2015; widths
  of AmoebaNet).
  """

  @classmethod
  def Params(cls) -> hyperparams.InstantiableParams:
    """Returns the Params of an AuxiliaryHead."""
    p = super().Params()
    p.Define('key', 'aux_head', 'Name of the skip connection.', nested_map.KEY)
    p.Define('input_dim', 0, 'Number of channels of the features.', domain.SIZE)
    p.Define('input_size', 0, 'Height and width of the features.', domain.Size(MIN_SIZE))
    p.Define('num_classes', 0, 'Number of classes.', domain.SIZE)
    p.Define(
      'scale', 0.4, 'Factor of the widths, 128 and 768, of the two convolutions.', domain.POSITIVE
    )
    p.Define('batch_norm_tpl', batch_norm.BatchNormLayer.Params(), 'Template of the batch norms.')
    return p

  def __init__(self, params: hyperparams.InstantiableParams) -> None:
    super().__init__(params)
    p = self.params
    size = -(-(p.input_size - MIN_SIZE + 1) // _STRIDE)
    small, large = int(128 * p.scale), int(768 * p.scale)
    block = conv_batch_norm.ConvBatchNormLayer.Params().Set(
      padding='VALID', batch_norm_tpl=p.batch_norm_tpl
    )
    # Each block begins with a ReLU, except the first: its ReLU comes before the pool.
    layers = [
      pooling.PoolingLayer.Params().Set(
        window_shape=(MIN_SIZE, MIN_SIZE),
        window_stride=(_STRIDE, _STRIDE),
        pooling_type='AVG',
        padding='VALID',
      ),
      block.Copy().Set(filter_shape=(1, 1, p.input_dim, small), activation='NONE'),
      block.Copy().Set(filter_shape=(size, size, small, large)),
      flatten.FlattenLayer.Params(),
    ]
    self.CreateChild('features', sequential.SequentialLayer.Params().Set(sub=layers))
    self.CreateChild('projection', _Logits(large, p.num_classes))

  @property
  def skips_in(self) -> tuple[str, ...]:
    """Names of the skip connections: the key."""
    return (self.params.key,)

  def FPropSkips(
    self, theta: nested_map.NestedMap, skips: nested_map.NestedMap, *args: Any
  ) -> tuple[Any, nested_map.NestedMap]:
    """Returns the arguments, followed in training by logits [batch, num_classes].

    Args:
      theta: the weights.
      skips: {key: features [batch, input_size, input_size, input_dim]}.
      *args: outputs of the previous layer, returned unchanged.
    """
    if not self.do_eval:
      x = tf.nn.relu(self._CastToFPropDtype(skips[self.params.key]))
      x = tf.nn.relu(self.features.FProp(theta.features, x))
      args = (*args, self.projection.FProp(theta.projection, x))
    return args, nested_map.NestedMap()


MIN_SIZE, _STRIDE = 5, 3


def _Logits(input_dim: int, num_classes: int) -> hyperparams.InstantiableParams:
  return linear.ProjectionLayer.Params().Set(
    input_dim=input_dim, output_dim=num_classes, has_bias=True, activation='NONE'
  )
